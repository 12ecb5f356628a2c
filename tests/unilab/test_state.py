from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unilab.state import StateRegistry


@pytest.fixture
def weights() -> Tensor:
    return torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def counter() -> Tensor:
    return torch.tensor(7)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.fixture
def registry(weights: Tensor, counter: Tensor, generator: torch.Generator) -> StateRegistry:
    registry = StateRegistry()
    registry.tensor("weights", weights)
    registry.generator("random", generator)
    registry.tensor("counter", counter)
    return registry


def test_registering_returns_the_very_object(generator: torch.Generator) -> None:
    registry, value = StateRegistry(), torch.zeros(2)
    assert registry.tensor("a", value) is value
    assert registry.generator("b", generator) is generator


def test_names_are_tensors_then_generators(registry: StateRegistry) -> None:
    assert registry.names() == ["weights", "counter", "random"]


@pytest.mark.parametrize("name", ["weights", "random"])
def test_a_name_is_given_once(registry: StateRegistry, name: str) -> None:
    with pytest.raises(ValueError, match=f"state '{name}' is registered twice"):
        registry.tensor(name, torch.zeros(1))
    with pytest.raises(ValueError, match=f"state '{name}' is registered twice"):
        registry.generator(name, torch.Generator())


def test_snapshot_is_a_copy(registry: StateRegistry, weights: Tensor, generator: torch.Generator) -> None:
    snapshot = registry.snapshot()
    weights.zero_()
    torch.rand(3, generator=generator)
    assert snapshot["weights"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not torch.equal(snapshot["random"], generator.get_state())


def test_snapshot_carries_no_gradient() -> None:
    registry = StateRegistry()
    registry.tensor("parameter", torch.ones(2, requires_grad=True))
    assert not registry.snapshot()["parameter"].requires_grad


def test_round_trip_writes_in_place(
    registry: StateRegistry, weights: Tensor, counter: Tensor, generator: torch.Generator
) -> None:
    address = weights.data_ptr()
    snapshot = registry.snapshot()
    expected = torch.rand(4, generator=generator)
    weights.mul_(-1)
    counter.add_(1)
    registry.restore(snapshot)
    assert weights.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (counter.item(), counter.dtype, weights.data_ptr()) == (7, torch.int64, address)
    assert torch.equal(torch.rand(4, generator=generator), expected)


def test_a_snapshot_can_be_restored_twice(registry: StateRegistry, weights: Tensor) -> None:
    snapshot = registry.snapshot()
    for _ in range(2):
        registry.restore(snapshot)
        weights.add_(1)
    assert snapshot["weights"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert weights.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_restores_a_parameter_that_takes_gradients() -> None:
    registry = StateRegistry()
    parameter = registry.tensor("parameter", torch.ones(2, requires_grad=True))
    registry.restore({"parameter": torch.full((2,), 4.0)})
    assert parameter.tolist() == [4, 4]
    assert parameter.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": torch.zeros(1)}, "the snapshot and this run differ in extra"),
        ({"weights": None}, "the snapshot and this run differ in weights"),
        ({"random": None, "extra": torch.zeros(1)}, "the snapshot and this run differ in extra, random"),
        ({"counter": torch.zeros(1)}, r"counter has shape \(\), the snapshot \(1,\)"),
        ({"weights": torch.zeros(3, 2)}, r"weights has shape \(2, 3\), the snapshot \(3, 2\)"),
    ],
)
def test_refuses_another_runs_snapshot_and_changes_nothing(
    registry: StateRegistry, change: dict[str, Tensor | None], message: str
) -> None:
    before = registry.snapshot()
    altered = {**{name: torch.zeros_like(value) for name, value in before.items()}, **change}
    with pytest.raises(ValueError, match=message):
        registry.restore({name: value for name, value in altered.items() if value is not None})
    after = registry.snapshot()
    assert all(torch.equal(after[name], before[name]) for name in before)
