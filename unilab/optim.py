"""Parameters that step together: one flat buffer, one flat gradient, one AdamW, one finite gate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unilab.state import StateRegistry

ALIGNMENT = 64  # elements; every parameter starts on a 256-byte boundary, as matrix kernels like
BETAS = (0.9, 0.95)
EPSILON = 1e-8


@dataclass(frozen=True)
class WarmupCosine:
    """A learning rate that rises linearly, then falls along half a cosine, and stays.

    Attributes:
        init: at step 0, if there is a warm-up.
        peak: after the warm-up.
        end: after the decay.
        warmup_steps: steps of the rise.
        decay_steps: steps of the fall.
    """

    init: float
    peak: float
    end: float
    warmup_steps: int
    decay_steps: int

    def at(self, step: Tensor) -> Tensor:
        """Learning rate of a step counted from 0, on its device; both 0-d."""
        position = step.float()
        rise = self.init + (self.peak - self.init) * (position / max(self.warmup_steps, 1))
        share = ((position - self.warmup_steps) / self.decay_steps).clamp(0.0, 1.0)
        fall = self.end + (self.peak - self.end) * 0.5 * (1.0 + torch.cos(math.pi * share))
        return torch.where(position < self.warmup_steps, rise, fall)


class ParameterGroup:
    """The parameters of one optimizer, laid out in one buffer.

    Every parameter becomes a view of `flat` and its gradient a view of `gradient`, so that an optimizer step, a target
    update and a gradient all-reduce are each one operation at fixed addresses. The loss lies behind the gradient in the
    same buffer: averaged with it, a loss that is not finite on one rank is not finite on any.

    Args:
        name: prefix of the registered state.
        parameters: the parameters, on their device.
        lr: AdamW learning rate, or its schedule; a schedule goes on also where a step is skipped.
        weight_decay: AdamW weight decay.
        registry: receives the parameters and the optimizer's state.
        max_grad_norm: gradients are scaled down to this global norm; 0 turns that off.
        betas: decay of AdamW's two moments.

    Attributes:
        flat: all parameters, `(P,)` float32, each aligned to `ALIGNMENT` elements.
        gradient: their gradients, same layout.
        loss: the loss of the last `backward`, the mean of all ranks' where gradients are averaged; 0-d.
        wire: gradient and loss, what ranks average; `(P + ALIGNMENT,)`.
        finite: 1.0 where the last step was taken, 0.0 where it was skipped; 0-d.
        norm: global gradient norm of the last step before clipping; 0-d.
    """

    def __init__(
        self,
        name: str,
        parameters: Iterable[nn.Parameter],
        lr: float | WarmupCosine,
        weight_decay: float,
        registry: StateRegistry,
        max_grad_norm: float = 0.0,
        betas: tuple[float, float] = BETAS,
    ) -> None:
        self.parameters = list(parameters)
        self._shapes = [parameter.shape for parameter in self.parameters]
        device = self.parameters[0].device
        self.flat = nn.Parameter(_flatten(self.parameters))
        bind(self.parameters, self.flat.data)
        self.lay(torch.zeros(self.flat.numel() + ALIGNMENT, device=device))
        self.finite = torch.ones((), device=device)
        self.norm = torch.zeros((), device=device)
        self._lr, self._weight_decay, self._max_grad_norm, self._betas = lr, weight_decay, max_grad_norm, betas
        self._gaps = [torch.zeros(_aligned(p.numel()) - p.numel(), device=device) for p in self.parameters]
        registry.tensor(f"{name}/parameters", self.flat.data)
        self._count = registry.tensor(f"{name}/adamw_step", torch.zeros((), device=device))
        self._scheduled = torch.zeros((), dtype=torch.int64, device=device)
        if isinstance(lr, WarmupCosine):
            registry.tensor(f"{name}/schedule_step", self._scheduled)
        self._mean = registry.tensor(f"{name}/adamw_exp_avg", torch.zeros_like(self.flat.data))
        self._square = registry.tensor(f"{name}/adamw_exp_avg_sq", torch.zeros_like(self.flat.data))

    def lay(self, wire: Tensor) -> None:
        """Keep gradient and loss in `wire`, `(P + ALIGNMENT,)`, from now on."""
        self.wire, self.gradient, self.loss = wire, wire[: self.flat.numel()], wire[self.flat.numel()]
        self.flat.grad = self.gradient
        for parameter, view in zip(self.parameters, _views(self._shapes, self.gradient), strict=True):
            parameter.grad = view

    def backward(self, loss: Tensor) -> None:
        """Replace the gradient by that of the scalar `loss` with respect to this group's parameters alone."""
        self.loss.copy_(loss.detach())
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)
        pieces = [part.reshape(-1) for pair in zip(gradients, self._gaps, strict=True) for part in pair if part.numel()]
        torch.cat(pieces, out=self.gradient)

    @torch.no_grad()
    def step(self, gate: Tensor | None = None) -> None:
        """One AdamW step with the gradient at hand; skipped, on the device, where loss or gradient is not finite.

        Written in single operations, which Inductor makes one pass over the flat buffers.

        Args:
            gate: `finite` of another group, whose skip this group follows; 0-d.
        """
        norm = torch.linalg.vector_norm(self.gradient)
        taken = torch.isfinite(self.loss) & torch.isfinite(norm)
        if gate is not None:
            taken = taken & (gate > 0)
        self.norm.copy_(norm)
        self.finite.copy_(taken)
        self._count.add_(self.finite)
        if self._max_grad_norm > 0:
            self.gradient.mul_((self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        lr, betas = self._next_lr(), self._betas
        mean = torch.lerp(self._mean, self.gradient, 1 - betas[0])
        square = betas[1] * self._square + (1 - betas[1]) * self.gradient.square()
        # 1 - beta^count, exact also where that is small
        first, second = (-torch.expm1(self._count * math.log(beta)) for beta in betas)
        change = mean / (square.sqrt() / second.sqrt() + EPSILON) * (lr / first)
        stepped = self.flat.data * (1 - lr * self._weight_decay) - change
        for state, value in ((self._mean, mean), (self._square, square), (self.flat.data, stepped)):
            state.copy_(torch.where(taken, value, state))

    @torch.no_grad()
    def constrain(self, project: Callable[[list[Tensor]], list[Tensor]]) -> None:
        """Replace the parameters by `project` of them, in the same order and shapes, where the last step was taken."""
        values = project(_views(self._shapes, self.flat.data))
        pieces = [part.reshape(-1) for pair in zip(values, self._gaps, strict=True) for part in pair if part.numel()]
        self.flat.data.copy_(torch.where(self.finite > 0, torch.cat(pieces), self.flat.data))

    def _next_lr(self) -> float | Tensor:
        """This step's learning rate; a schedule moves on."""
        if not isinstance(self._lr, WarmupCosine):
            return self._lr
        lr = self._lr.at(self._scheduled)
        self._scheduled.add_(1)
        return lr


def share_wire(groups: Sequence[ParameterGroup]) -> Tensor:
    """Lay the gradients and losses of several groups into one buffer, averaged at once; returned."""
    sizes = [group.wire.numel() for group in groups]
    wire = groups[0].wire.new_zeros(sum(sizes))
    for group, part in zip(groups, wire.split(sizes), strict=True):
        group.lay(part)
    return wire


def bind(parameters: Iterable[nn.Parameter], flat: Tensor) -> None:
    """Make `parameters` views of `flat`, laid out as `ParameterGroup` does."""
    parameters = list(parameters)
    for parameter, view in zip(parameters, _views([parameter.shape for parameter in parameters], flat), strict=True):
        parameter.data = view


def _flatten(parameters: list[nn.Parameter]) -> Tensor:
    flat = torch.zeros(sum(_aligned(p.numel()) for p in parameters), device=parameters[0].device)
    for parameter, view in zip(parameters, _views([parameter.shape for parameter in parameters], flat), strict=True):
        view.copy_(parameter.data)
    return flat


def _views(shapes: Sequence[torch.Size], flat: Tensor) -> list[Tensor]:
    views, start = [], 0
    for shape in shapes:
        views.append(flat[start : start + shape.numel()].view(shape))
        start += _aligned(shape.numel())
    return views


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
