from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from unilab.optim import ALIGNMENT, ParameterGroup, WarmupCosine, bind
from unilab.state import StateRegistry

SHAPES = ((5, 3), (5,), (70,), (2, 4, 33), (1,))
LR, DECAY = 3e-3, 0.1
Loss = Callable[[list[nn.Parameter]], Tensor]


def parameters(seed: int = 1) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=source)) for shape in SHAPES]


def build(max_grad_norm: float = 0.0, lr: float = LR, decay: float = DECAY) -> tuple[ParameterGroup, StateRegistry]:
    registry = StateRegistry()
    return ParameterGroup("net", parameters(), lr, decay, registry, max_grad_norm), registry


def loss_of_step(step: int) -> Loss:
    """A quadratic with its own random targets, so that gradients change sign and size from step to step."""

    def loss(values: list[nn.Parameter]) -> Tensor:
        source = torch.Generator().manual_seed(100 + step)
        return sum((v - 2 * torch.randn(v.shape, generator=source)).square().sum() for v in values)

    return loss


def train(group: ParameterGroup, steps: range) -> None:
    for step in steps:
        group.backward(loss_of_step(step)(group.parameters))
        group.step()


def padding(group: ParameterGroup) -> Tensor:
    """(P,) bool: elements of the flat buffers that belong to no parameter."""
    unused = torch.ones(group.flat.shape, dtype=torch.bool)
    for parameter in group.parameters:
        start = (parameter.data_ptr() - group.flat.data_ptr()) // 4
        unused[start : start + parameter.numel()] = False
    return unused


# --- the step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_grad_norm", [0.0, 5.0])
def test_twenty_steps_equal_torchs_adamw_on_separate_parameters(max_grad_norm: float) -> None:
    group, _ = build(max_grad_norm)
    plain = parameters()
    optimizer = torch.optim.AdamW(plain, lr=LR, betas=(0.9, 0.95), weight_decay=DECAY, foreach=False)
    for step in range(20):
        optimizer.zero_grad()
        loss_of_step(step)(plain).backward()
        if max_grad_norm:
            norm = nn.utils.clip_grad_norm_(plain, max_grad_norm)
            assert norm > max_grad_norm
        optimizer.step()
        train(group, range(step, step + 1))
        for ours, theirs in zip(group.parameters, plain, strict=True):
            # Two float32 roundings: fused and single operations round in different places; measured 6e-8.
            torch.testing.assert_close(ours, theirs, rtol=3e-7, atol=3e-7)


def test_two_steps_by_hand() -> None:
    """Gradients 1, then -1: moments 0.1, 0.05 and then -0.01, 0.0975; the second step is +lr * 0.01 / 0.19."""
    parameter = nn.Parameter(torch.tensor([4.0]))
    group = ParameterGroup("x", [parameter], 0.1, 0.5, StateRegistry())
    group.backward(parameter.sum())
    group.step()
    first = 4 * (1 - 0.1 * 0.5) - 0.1
    assert parameter.item() == pytest.approx(first, rel=1e-6)
    group.backward(-parameter.sum())
    group.step()
    assert parameter.item() == pytest.approx(first * (1 - 0.1 * 0.5) + 0.1 * 0.01 / 0.19, rel=1e-6)


def test_decay_is_decoupled_from_the_gradient() -> None:
    """A parameter without gradient shrinks by 1 - lr * decay each step."""
    parameter = nn.Parameter(torch.tensor([4.0]))
    group = ParameterGroup("x", [parameter], 0.1, 0.5, StateRegistry())
    for _ in range(3):
        group.backward(0.0 * parameter.sum())
        group.step()
    assert parameter.item() == pytest.approx(4 * 0.95**3, rel=1e-6)


def test_backward_replaces_the_gradient() -> None:
    group, _ = build()
    for _ in range(2):
        group.backward(loss_of_step(0)(group.parameters))
    plain = parameters()
    loss = loss_of_step(0)(plain)
    loss.backward()
    for ours, theirs in zip(group.parameters, plain, strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert group.loss.item() == loss.item()
    assert not group.loss.requires_grad


def test_backward_reaches_its_own_group_alone() -> None:
    first, second = build()[0], build()[0]
    product = sum((a * b).sum() for a, b in zip(first.parameters, second.parameters, strict=True))
    first.backward(product)
    assert second.gradient.count_nonzero() == 0
    for ours, theirs in zip(first.parameters, second.parameters, strict=True):
        assert torch.equal(ours.grad, theirs)


# --- clipping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.5, 0.999, 1.001, 3.0])
def test_clipping_equals_clip_grad_norm(share: float) -> None:
    plain = parameters()
    loss_of_step(0)(plain).backward()
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in plain))
    limit = share * norm
    nn.utils.clip_grad_norm_(plain, limit)
    group, _ = build(limit)
    group.backward(loss_of_step(0)(group.parameters))
    group.step()
    assert group.norm.item() == pytest.approx(norm, rel=1e-6)  # as it was before clipping
    for ours, theirs in zip(group.parameters, plain, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=0)
    assert group.gradient.norm().item() == pytest.approx(min(norm, limit), rel=1e-6)


def test_zero_turns_clipping_off() -> None:
    group, _ = build(0.0)
    group.backward(1e6 * loss_of_step(0)(group.parameters))
    before = group.gradient.clone()
    group.step()
    assert torch.equal(group.gradient, before)


# --- the finite gate -------------------------------------------------------------------------------------------------


def _zero(values: list[nn.Parameter]) -> Tensor:
    return values[2] - values[2].detach()


POISONS: dict[str, Loss] = {
    "nan loss": lambda values: values[0].sum() + math.nan,
    "inf loss": lambda values: values[0].sum() + math.inf,
    "minus inf loss": lambda values: values[0].sum() - math.inf,
    "nan gradient": lambda values: _zero(values).abs().sqrt().sum(),  # d sqrt|x| at 0 is inf * 0
    "inf gradient": lambda values: _zero(values).clamp(min=0).sqrt().sum(),
    "one nan element": lambda values: values[0].sum() + _zero(values)[7].abs().sqrt(),
    "overflowing norm": lambda values: (1e30 * values[1]).sum(),
}


@pytest.mark.parametrize("max_grad_norm", [0.0, 5.0])
@pytest.mark.parametrize("poison", POISONS)
def test_a_step_that_is_not_finite_is_skipped_whole(poison: str, max_grad_norm: float) -> None:
    group, registry = build(max_grad_norm)
    train(group, range(3))
    assert group.finite.item() == 1
    before = registry.snapshot()
    loss = POISONS[poison](group.parameters)
    assert loss.isfinite() or "loss" in poison
    for _ in range(2):
        group.backward(POISONS[poison](group.parameters))
        group.step()
        assert group.finite.item() == 0
    after = registry.snapshot()
    assert set(after) == {"net/parameters", "net/adamw_step", "net/adamw_exp_avg", "net/adamw_exp_avg_sq"}
    for name in before:
        assert torch.equal(after[name], before[name]), name


@pytest.mark.parametrize("poison", POISONS)
def test_training_goes_on_after_a_skip_as_if_it_had_not_been(poison: str) -> None:
    group, registry = build()
    train(group, range(3))
    group.backward(POISONS[poison](group.parameters))
    group.step()
    train(group, range(3, 6))
    assert group.finite.item() == 1
    untouched, expected = build()
    train(untouched, range(6))
    one, other = registry.snapshot(), expected.snapshot()
    assert one["net/adamw_step"].item() == 6
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_a_group_can_follow_the_gate_of_another() -> None:
    group, registry = build()
    before = registry.snapshot()
    group.backward(loss_of_step(0)(group.parameters))
    group.step(torch.tensor(0.0))
    assert group.finite.item() == 0
    assert all(torch.equal(value, before[name]) for name, value in registry.snapshot().items())
    group.step(torch.tensor(1.0))
    assert group.finite.item() == 1
    assert registry.snapshot()["net/adamw_step"].item() == 1
    group.backward(POISONS["nan loss"](group.parameters))
    group.step(torch.tensor(1.0))
    assert group.finite.item() == 0


# --- the layout ------------------------------------------------------------------------------------------------------


def test_parameters_keep_their_values_shapes_and_order() -> None:
    group, _ = build()
    assert len(group.parameters) == len(SHAPES)
    for ours, theirs in zip(group.parameters, parameters(), strict=True):
        assert torch.equal(ours, theirs)
    starts = [(p.data_ptr() - group.flat.data_ptr()) // 4 for p in group.parameters]
    assert starts == [0, 64, 128, 256, 576]  # each at the next multiple of 64 after 15, 5, 70 and 264 elements
    assert group.flat.numel() == 640
    assert ALIGNMENT == 64


def test_parameters_and_gradients_stay_views_of_the_flat_buffers() -> None:
    group, registry = build(5.0)
    flat, gradient = group.flat.data_ptr(), group.gradient.data_ptr()
    addresses = [(p.data_ptr(), p.grad.data_ptr()) for p in group.parameters]
    scalars = [value.data_ptr() for value in (group.loss, group.norm, group.finite)]
    train(group, range(4))
    group.backward(POISONS["nan loss"](group.parameters))
    group.step()
    registry.restore(registry.snapshot())
    assert (group.flat.data_ptr(), group.gradient.data_ptr()) == (flat, gradient)
    assert [(p.data_ptr(), p.grad.data_ptr()) for p in group.parameters] == addresses
    assert [value.data_ptr() for value in (group.loss, group.norm, group.finite)] == scalars
    for parameter, (_, grad_address) in zip(group.parameters, addresses, strict=True):
        assert grad_address - gradient == parameter.data_ptr() - flat
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert parameter.is_contiguous()
        assert parameter.grad.is_contiguous()
    group.flat.data.fill_(0.5)
    group.gradient.fill_(0.25)
    assert all((p == 0.5).all() and (p.grad == 0.25).all() for p in group.parameters)


def test_the_padding_stays_zero() -> None:
    group, registry = build(5.0)
    train(group, range(20))
    unused = padding(group)
    assert unused.sum() == 640 - sum(math.prod(shape) for shape in SHAPES)
    assert group.gradient[unused].count_nonzero() == 0
    for name, value in registry.snapshot().items():
        if value.shape == unused.shape:
            assert value[unused].count_nonzero() == 0, name
            assert value[~unused].count_nonzero() == (~unused).sum(), name


def test_restoring_the_registry_undoes_steps() -> None:
    group, registry = build()
    train(group, range(2))
    middle = registry.snapshot()
    train(group, range(2, 5))
    end = registry.snapshot()
    registry.restore(middle)
    assert torch.equal(torch.cat([p.flatten() for p in group.parameters]), middle["net/parameters"][~padding(group)])
    train(group, range(2, 5))
    again = registry.snapshot()
    assert end["net/adamw_step"].item() == 5
    assert all(torch.equal(again[name], end[name]) for name in end)


def test_bind_makes_another_module_share_the_values() -> None:
    group, _ = build()
    other = [nn.Parameter(torch.zeros(shape), requires_grad=False) for shape in SHAPES]
    bind(other, group.flat.data)
    train(group, range(2))
    for ours, shared in zip(group.parameters, other, strict=True):
        assert torch.equal(ours, shared)
        assert not shared.requires_grad
        assert shared.grad is None
    assert not torch.equal(other[0], parameters()[0])


def test_takes_a_generator_of_parameters() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    registry = StateRegistry()
    group = ParameterGroup("net", net.parameters(), LR, DECAY, registry)
    assert [p.shape for p in group.parameters] == [p.shape for p in net.parameters()]
    assert all(ours is theirs for ours, theirs in zip(group.parameters, net.parameters(), strict=True))


# --- schedules and constraints ---------------------------------------------------------------------------------------


def test_a_schedule_rises_falls_along_half_a_cosine_and_stays() -> None:
    schedule = WarmupCosine(1e-6, 3e-4, 1.5e-4, 4, 500_000)
    found = [schedule.at(torch.tensor(step)).item() for step in (0, 1, 4, 4 + 250_000, 4 + 500_000, 10**7)]
    assert found == pytest.approx([1e-6, 1e-6 + 2.99e-4 / 4, 3e-4, 2.25e-4, 1.5e-4, 1.5e-4], rel=1e-6)
    constant = WarmupCosine(3e-4, 3e-4, 1.5e-4, 0, 500_000)
    # Ends of the documented runs: 8,000, 40,000 and 100,000 critic updates.
    ends = [constant.at(torch.tensor(step)).item() for step in (0, 8_000, 40_000, 100_000)]
    assert ends == pytest.approx([3e-4, 2.99905e-4, 2.9764e-4, 2.8568e-4], abs=5e-9)


def test_a_scheduled_group_steps_as_torchs_adam_and_counts_skipped_steps() -> None:
    registry, schedule = StateRegistry(), WarmupCosine(1e-3, 3e-3, 1e-3, 2, 5)
    group = ParameterGroup("net", parameters(), schedule, 0.0, registry, betas=(0.9, 0.999))
    plain = parameters()
    optimizer = torch.optim.Adam(plain, lr=1.0, betas=(0.9, 0.999), foreach=False)
    for step in range(10):
        if step == 4:
            group.backward(torch.nan * loss_of_step(step)(group.parameters))
            group.step()
            continue
        rise, share = 1e-3 + 2e-3 * step / 2, min(1.0, (step - 2) / 5)
        fall = 1e-3 + 2e-3 * (1 + math.cos(math.pi * share)) / 2
        optimizer.param_groups[0]["lr"] = rise if step < 2 else fall
        optimizer.zero_grad()
        loss_of_step(step)(plain).backward()
        optimizer.step()
        train(group, range(step, step + 1))
        for ours, theirs in zip(group.parameters, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    state = registry.snapshot()
    assert (state["net/schedule_step"].item(), state["net/adamw_step"].item()) == (10, 9)
    assert "net/schedule_step" not in build()[1].names()


def test_a_constraint_follows_taken_steps_alone_and_keeps_gaps_and_addresses() -> None:
    group, _ = build()
    address, before = group.flat.data_ptr(), group.flat.detach().clone()
    for scale, moved in ((math.nan, False), (1.0, True)):
        group.backward(scale * loss_of_step(0)(group.parameters))
        group.step()
        stepped = [value.detach().clone() for value in group.parameters]
        group.constrain(lambda values: [2 * value for value in values])
        assert torch.equal(group.flat, before) is not moved
        for ours, theirs in zip(group.parameters, stepped, strict=True):
            assert torch.equal(ours, 2 * theirs if moved else theirs)
    assert group.flat.data_ptr() == address
    assert not group.flat[padding(group)].any()
