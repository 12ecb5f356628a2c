"""Operators that replace chains of small ones in compiled code on CUDA: what they compute, in plain torch.

A compiler that sees only the chain reads a layer's activations several times. Each operator here is one pass: on CUDA a
Triton kernel, elsewhere the plain definition below, which is also what the kernels are tested against.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-5  # of layer norms, torch's default


def fusing(tensor: Tensor) -> bool:
    """Whether code on this tensor is being compiled for CUDA, the one case in which these operators are used."""
    return tensor.is_cuda and torch.compiler.is_compiling()


@torch.library.custom_op("unilab::norm_silu", mutates_args=(), device_types="cpu")
def norm_silu(product: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """SiLU(LayerNorm(product + bias) * scale + shift), in float32 inside, rounded once at the end.

    Args:
        product: `(E, B, H)` float32 or bfloat16.
        bias: `(E, 1, H)` float32, as the two below.
        scale: of the normalised row.
        shift: added to it.

    Returns:
        `(E, B, H)` in the type of `product`.
    """
    normalised, _ = _normalised(product, bias)
    return F.silu(normalised * scale + shift).to(product.dtype)


@torch.library.custom_op("unilab::norm_silu_backward", mutates_args=(), device_types="cpu")
def norm_silu_backward(
    gradient: Tensor, product: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, sums: bool
) -> tuple[Tensor, Tensor]:
    """Gradient of `norm_silu` with respect to the product, and parts of those of bias, scale and shift.

    Returns:
        `(E, B, H)`, and `(3, E, P, H)` to be summed over P, which is 0 unless `sums`.
    """
    normalised, deviation = _normalised(product, bias)
    value = normalised * scale + shift
    gate = torch.sigmoid(value)
    slope = gradient.float() * gate * (1 + value * (1 - gate))
    scaled = slope * scale
    along = (scaled * normalised).mean(-1, keepdim=True)
    down = deviation * (scaled - scaled.mean(-1, keepdim=True) - normalised * along)
    parts = torch.stack((down, slope * normalised, slope))
    return down.to(product.dtype), parts if sums else parts[:, :, :0].clone()


def _normalised(product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    hidden = product.float() + bias
    variance, mean = torch.var_mean(hidden, -1, keepdim=True, correction=0)
    deviation = (variance + EPSILON).rsqrt()
    return (hidden - mean) * deviation, deviation


@norm_silu.register_kernel("cuda")
def _norm_silu_cuda(product: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    from unilab.sac import kernels

    return kernels.norm_silu(product, bias, scale, shift, EPSILON)


@norm_silu_backward.register_kernel("cuda")
def _norm_silu_backward_cuda(
    gradient: Tensor, product: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, sums: bool
) -> tuple[Tensor, Tensor]:
    from unilab.sac import kernels

    return kernels.norm_silu_backward(gradient, product, bias, scale, shift, EPSILON, sums)


@norm_silu.register_fake
def _(product: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return product.new_empty(product.shape)


@norm_silu_backward.register_fake
def _(
    gradient: Tensor, product: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, sums: bool
) -> tuple[Tensor, Tensor]:
    members, _, width = product.shape
    parts = _parts(product) if sums else 0
    return product.new_empty(product.shape), bias.new_empty((3, members, parts, width))


def _parts(product: Tensor) -> int:
    members, rows, width = product.shape
    if not product.is_cuda:
        return rows
    from unilab.sac import kernels

    return kernels.programs(members, width)


def _save_norm_silu(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _norm_silu_gradients(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
    sums = any(ctx.needs_input_grad[1:])  # type: ignore[attr-defined]
    down, parts = norm_silu_backward(gradient, *ctx.saved_tensors, sums)  # type: ignore[attr-defined]
    if not sums:
        return down, None, None, None
    return down, *parts.sum(2, keepdim=True).unbind()  # each contiguous, as the flat gradient takes it


norm_silu.register_autograd(_norm_silu_gradients, setup_context=_save_norm_silu)


@torch.library.custom_op("unilab::cross_entropy", mutates_args=(), device_types="cpu")
def cross_entropy(
    logits: Tensor, target: Tensor, reward: Tensor, discount: Tensor, points: Tensor, gamma: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of `softmax(logits)` against `softmax(target)` shifted to reward + discount * Z and projected.

    Args:
        logits: `(E, B, K)` float32.
        target: `(E, B, K)` float32; not differentiated, nor is what follows.
        reward: `(B,)`.
        discount: `(B,)`, each either 0 or `gamma`.
        points: `(K,)` support, as `objectives.support` gives it.
        gamma: the discount of rows that run on.

    Returns:
        Losses `(E, B)`, their derivatives with respect to the logits `(E, B, K)` and the expected targets `(E, B)`.
    """
    from unilab.sac.objectives import LOG_PROBABILITY_FLOOR, project, shift

    probabilities = F.softmax(target, -1)
    mass = project(probabilities, reward, discount, gamma, points)
    expected = (probabilities * shift(reward, discount, points)).sum(-1)
    logarithms = F.log_softmax(logits, -1)
    losses = -(mass * logarithms.clamp(min=LOG_PROBABILITY_FLOOR)).sum(-1)
    moving = mass.masked_fill(logarithms < LOG_PROBABILITY_FLOOR, 0.0)
    return losses, logarithms.exp() * moving.sum(-1, keepdim=True) - moving, expected


@cross_entropy.register_kernel("cuda")
def _cross_entropy_cuda(
    logits: Tensor, target: Tensor, reward: Tensor, discount: Tensor, points: Tensor, gamma: float
) -> tuple[Tensor, Tensor, Tensor]:
    from unilab.sac import kernels

    return kernels.cross_entropy(logits, target, reward, discount, gamma)


@cross_entropy.register_fake
def _(
    logits: Tensor, target: Tensor, reward: Tensor, discount: Tensor, points: Tensor, gamma: float
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        logits.new_empty(logits.shape[:2]),
        logits.new_empty(logits.shape),
        logits.new_empty(logits.shape[:2]),
    )


def _save_cross_entropy(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, ...]
) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])


def _cross_entropy_gradients(
    ctx: torch.autograd.function.FunctionCtx, gradient: Tensor, *_: object
) -> tuple[Tensor | None, ...]:
    (slope,) = ctx.saved_tensors  # type: ignore[attr-defined]
    return gradient.unsqueeze(-1) * slope, None, None, None, None, None


cross_entropy.register_autograd(_cross_entropy_gradients, setup_context=_save_cross_entropy)
