from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from unilab.sac import fused
from unilab.sac.objectives import LOG_PROBABILITY_FLOOR, project, shift, support

SHAPES = [(2, 37, 24), (1, 50, 128), (2, 19, 192), (2, 11, 384)]
GAMMAS = [0.97, 0.5, 0.0]


def error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def layer(shape: tuple[int, int, int]) -> list[Tensor]:
    """Product, bias, scale and shift."""
    source = torch.Generator().manual_seed(1)
    members, _, width = shape
    return [torch.randn(s, generator=source) for s in (shape, *[(members, 1, width)] * 3)]


def returns(gamma: float, atoms: int = 101, rows: int = 53) -> list[Tensor]:
    """Logits, target logits, rewards and discounts; some returns leave the support, one probability is below e^-30."""
    source = torch.Generator().manual_seed(2)
    logits, target = (3 * torch.randn(2, rows, atoms, generator=source) for _ in range(2))
    logits[0, 3, 2] = 200.0
    alive = torch.rand(rows, generator=source) > 0.35
    return [logits, target, 8 * torch.randn(rows, generator=source), gamma * alive.float()]


def plain_loss(
    logits: Tensor, target: Tensor, reward: Tensor, discount: Tensor, points: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    probabilities = F.softmax(target, -1)
    mass = project(probabilities, reward, discount, gamma, points)
    losses = -(mass * F.log_softmax(logits, -1).clamp(min=LOG_PROBABILITY_FLOOR)).sum(-1)
    return losses, (probabilities * shift(reward, discount, points)).sum(-1)


# --- operators against the chains they replace -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_norm_silu_equals_its_chain_and_so_do_its_gradients(shape: tuple[int, int, int]) -> None:
    ours, theirs = ([value.clone().requires_grad_() for value in layer(shape)] for _ in range(2))
    product, bias, scale, shift_ = theirs
    expected = F.silu(F.layer_norm(product + bias, shape[-1:]) * scale + shift_)
    found = fused.norm_silu(*ours)
    assert error(found.detach(), expected.detach()) < 1e-6
    slope = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    found.backward(slope)
    expected.backward(slope)
    assert max(error(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True)) < 1e-6


def test_norm_silu_takes_no_gradient_of_frozen_parameters() -> None:
    product, *rest = layer((2, 8, 16))
    product.requires_grad_()
    fused.norm_silu(product, *rest).sum().backward()
    assert product.grad is not None
    assert fused.norm_silu_backward(product.detach(), product.detach(), *rest, False)[1].shape == (3, 2, 0, 16)


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("atoms", [101, 11])
def test_cross_entropy_equals_its_chain_and_so_does_its_gradient(gamma: float, atoms: int) -> None:
    (logits, *rest), points = returns(gamma, atoms), support(atoms, "cpu")
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    losses, _, expected_targets = fused.cross_entropy(ours, *rest, points, gamma)
    expected = plain_loss(theirs, *rest, points, gamma)
    assert error(losses.detach(), expected[0].detach()) < 1e-6
    assert error(expected_targets, expected[1]) < 1e-6
    losses.mean().backward()
    expected[0].mean().backward()
    assert error(ours.grad, theirs.grad) < 1e-6


def test_operators_are_described_to_the_compiler() -> None:
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    leaves = tuple(value.requires_grad_() for value in layer((2, 8, 16)))
    torch.library.opcheck(fused.norm_silu, leaves, test_utils=tests)
    logits, *rest = returns(0.97, rows=8)
    torch.library.opcheck(
        fused.cross_entropy, (logits.requires_grad_(), *rest, support(101, "cpu"), 0.97), test_utils=tests
    )


# --- Triton kernels against the operators' plain definitions ---------------------------------------------------------
# On a GPU, or without one in Triton's interpreter: TRITON_INTERPRET=1.


@pytest.fixture
def kernels() -> ModuleType:
    triton = pytest.importorskip("triton")
    if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
        pytest.skip("needs a CUDA device or TRITON_INTERPRET=1")
    from unilab.sac import kernels

    return kernels


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the compiler's and the interpreter's
@pytest.mark.parametrize("shape", SHAPES)
def test_normalisation_kernels(kernels: ModuleType, device: str, shape: tuple[int, int, int]) -> None:
    given, slope = layer(shape), torch.randn(shape, generator=torch.Generator().manual_seed(3))
    there = [value.to(device) for value in given]
    assert error(kernels.norm_silu(*there, fused.EPSILON).cpu(), fused.norm_silu(*given)) < 1e-6
    down, parts = kernels.norm_silu_backward(slope.to(device), *there, fused.EPSILON, True)
    expected = fused.norm_silu_backward(slope, *given, True)
    assert error(down.cpu(), expected[0]) < 1e-6
    assert parts.shape == (3, shape[0], kernels.programs(shape[0], shape[2]), shape[2])
    assert error(parts.sum(2).cpu(), expected[1].sum(2)) < 1e-6


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("atoms", [101, 11])
def test_cross_entropy_kernel(kernels: ModuleType, device: str, gamma: float, atoms: int) -> None:
    given = returns(gamma, atoms)
    found: Any = kernels.cross_entropy(*(value.to(device) for value in given), gamma)
    for ours, theirs in zip(found, fused.cross_entropy(*given, support(atoms, "cpu"), gamma), strict=True):
        assert error(ours.cpu(), theirs) < 1e-5


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("argument", [0, 1, 2], ids=["logits", "target", "reward"])
def test_a_bad_row_spoils_its_own_loss_alone(kernels: ModuleType, device: str, argument: int, bad: float) -> None:
    for gamma in (0.97, 0.0):
        given = returns(gamma)
        (given[argument] if argument == 2 else given[argument][0])[4] = bad
        found = kernels.cross_entropy(*(value.to(device) for value in given), gamma)[0].cpu()
        expected = fused.cross_entropy(*given, support(101, "cpu"), gamma)[0]
        assert torch.equal(found.isfinite(), expected.isfinite())
        assert torch.allclose(found.nan_to_num(), expected.nan_to_num(), atol=1e-4)
