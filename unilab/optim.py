"""Parameters that step together: one flat buffer, one flat gradient, one fused AdamW, one finite gate."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from unilab.state import StateRegistry

ALIGNMENT = 64  # elements; every parameter starts on a 256-byte boundary, as matrix kernels like


class ParameterGroup:
    """The parameters of one optimizer, laid out in one buffer.

    Every parameter becomes a view of `flat` and its gradient a view of `gradient`, so that an optimizer step, a target
    update and a gradient all-reduce are each one operation at fixed addresses.

    Args:
        name: prefix of the registered state.
        parameters: the parameters, on their device.
        lr: AdamW learning rate.
        weight_decay: AdamW weight decay.
        registry: receives the parameters and the optimizer's state.
        max_grad_norm: gradients are scaled down to this global norm; 0 turns that off.

    Attributes:
        flat: all parameters, `(P,)` float32, each aligned to `ALIGNMENT` elements.
        gradient: their gradients, same layout.
        loss: the loss of the last `backward`; 0-d.
        finite: 1.0 where the last step was taken, 0.0 where it was skipped; 0-d.
        norm: global gradient norm of the last step before clipping; 0-d.
    """

    def __init__(
        self,
        name: str,
        parameters: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float,
        registry: StateRegistry,
        max_grad_norm: float = 0.0,
    ) -> None:
        self.parameters = list(parameters)
        device = self.parameters[0].device
        self.flat = nn.Parameter(_flatten(self.parameters))
        self.gradient = torch.zeros_like(self.flat)
        self.flat.grad = self.gradient
        bind(self.parameters, self.flat.data)
        for parameter, view in zip(self.parameters, _views(self.parameters, self.gradient), strict=True):
            parameter.grad = view
        self.loss = torch.zeros((), device=device)
        self.finite = torch.ones((), device=device)
        self.norm = torch.zeros((), device=device)
        self._max_grad_norm = max_grad_norm
        self._optimizer = torch.optim.AdamW(
            [self.flat],
            lr=lr,
            betas=(0.9, 0.95),
            weight_decay=weight_decay,
            fused=True,
            capturable=device.type == "cuda",
        )
        self._register(name, registry, device)

    def backward(self, loss: Tensor) -> None:
        """Replace the gradient by that of the scalar `loss` with respect to this group's parameters alone."""
        self.loss.copy_(loss.detach())
        self.gradient.zero_()
        loss.backward(inputs=self.parameters)

    def step(self, gate: Tensor | None = None) -> None:
        """One AdamW step with the gradient at hand; skipped, on the device, where loss or gradient is not finite.

        Args:
            gate: `finite` of another group, whose skip this group follows; 0-d.
        """
        torch.linalg.vector_norm(self.gradient, out=self.norm)
        self.finite.copy_(torch.isfinite(self.loss) & torch.isfinite(self.norm))
        if gate is not None:
            self.finite.mul_(gate)
        if self._max_grad_norm > 0:
            self.gradient.mul_((self._max_grad_norm / (self.norm + 1e-6)).clamp(max=1.0))
        self._optimizer.found_inf = 1.0 - self.finite  # type: ignore[attr-defined]
        self._optimizer.step()

    def _register(self, name: str, registry: StateRegistry, device: torch.device) -> None:
        # The optimizer would make its state at the first step; made here, it has an address from the start.
        state = {
            "step": torch.zeros((), device=device),
            "exp_avg": torch.zeros_like(self.flat),
            "exp_avg_sq": torch.zeros_like(self.flat),
        }
        self._optimizer.state[self.flat] = state
        registry.tensor(f"{name}/parameters", self.flat.data)
        for key, value in state.items():
            registry.tensor(f"{name}/adamw_{key}", value)


def bind(parameters: Iterable[nn.Parameter], flat: Tensor) -> None:
    """Make `parameters` views of `flat`, laid out as `ParameterGroup` does."""
    parameters = list(parameters)
    for parameter, view in zip(parameters, _views(parameters, flat), strict=True):
        parameter.data = view


def _flatten(parameters: list[nn.Parameter]) -> Tensor:
    flat = torch.zeros(sum(_aligned(p.numel()) for p in parameters), device=parameters[0].device)
    for parameter, view in zip(parameters, _views(parameters, flat), strict=True):
        view.copy_(parameter.data)
    return flat


def _views(parameters: list[nn.Parameter], flat: Tensor) -> list[Tensor]:
    views, start = [], 0
    for parameter in parameters:
        views.append(flat[start : start + parameter.numel()].view(parameter.shape))
        start += _aligned(parameter.numel())
    return views


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
