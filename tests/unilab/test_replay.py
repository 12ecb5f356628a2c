from __future__ import annotations

import math
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from unilab.replay import ReplayRing
from unilab.state import StateRegistry

WIDTHS = {"obs": 2, "reward": 0, "critic": 3}


def build(capacity: int) -> ReplayRing:
    return ReplayRing(capacity, WIDTHS, torch.device("cpu"), StateRegistry())


def transitions(labels: list[float]) -> dict[str, Tensor]:
    """One row per label: obs (l, l + 0.25), reward -l, critic (l + 0.5, l + 0.5, l + 0.5)."""
    label = torch.tensor(labels)
    obs = torch.stack((label, label + 0.25), 1)
    return {"critic": (label + 0.5).unsqueeze(1).expand(-1, 3), "obs": obs, "reward": -label}


def packed(label: float) -> list[float]:
    return [label, label + 0.25, -label, label + 0.5, label + 0.5, label + 0.5]


def append(ring: ReplayRing, labels: list[float], valid: list[bool] | None = None) -> None:
    ring.append(transitions(labels), torch.tensor(valid if valid is not None else [True] * len(labels)))


def state(ring: ReplayRing) -> tuple[float, float]:
    return ring.position.item(), ring.size.item()


def stored(ring: ReplayRing) -> list[float]:
    """Labels of all rows but the last, which takes what is not stored."""
    return ring.rows[: ring.capacity, 0].tolist()


# --- append ----------------------------------------------------------------------------------------------------------


def test_starts_empty_and_registers_its_pointers_alone() -> None:
    registry = StateRegistry()
    ring = ReplayRing(4, WIDTHS, torch.device("cpu"), registry)
    assert registry.names() == ["replay/position", "replay/size"]
    assert state(ring) == (0, 0)
    assert (ring.width, ring.rows.shape) == (6, (5, 6))
    assert ring.position.dtype == ring.size.dtype == torch.int64


def test_rows_are_packed_in_the_order_of_the_widths() -> None:
    ring = build(4)
    append(ring, [1, 2])
    assert ring.rows[:2].tolist() == [packed(1), packed(2)]
    assert state(ring) == (2, 2)


def test_wraps_around() -> None:
    ring = build(5)
    append(ring, [1, 2, 3])
    append(ring, [4, 5, 6])
    assert stored(ring) == [6, 2, 3, 4, 5]
    assert state(ring) == (1, 5)
    append(ring, [7, 8, 9, 10])
    assert stored(ring) == [6, 7, 8, 9, 10]
    assert state(ring) == (0, 5)


def test_filling_exactly_returns_to_the_start() -> None:
    ring = build(4)
    append(ring, [1, 2, 3, 4])
    assert state(ring) == (0, 4)
    append(ring, [5])
    assert stored(ring) == [5, 2, 3, 4]
    assert state(ring) == (1, 4)


def test_drops_invalid_rows_without_a_gap() -> None:
    ring = build(6)
    append(ring, [1, 2, 3, 4], [False, True, False, True])
    assert stored(ring) == [2, 4, 0, 0, 0, 0]
    assert state(ring) == (2, 2)
    append(ring, [5, 6, 7], [True, True, False])
    assert stored(ring) == [2, 4, 5, 6, 0, 0]
    assert state(ring) == (4, 4)


def test_drops_invalid_rows_across_the_wrap() -> None:
    ring = build(3)
    append(ring, [1, 2])
    append(ring, [3, 4, 5], [True, False, True])
    assert stored(ring) == [5, 2, 3]
    assert state(ring) == (1, 3)


def test_nothing_valid_changes_nothing() -> None:
    ring = build(3)
    append(ring, [1, 2])
    append(ring, [math.nan, math.inf], [False, False])
    assert stored(ring) == [1, 2, 0]
    assert state(ring) == (2, 2)
    assert ring.rows[:3].isfinite().all()


def test_against_a_queue() -> None:
    """Sixty appends of random validity hold what a queue of the same length holds."""
    source = torch.Generator().manual_seed(2)
    ring, queue, label = build(13), deque[float](maxlen=13), 0
    for _ in range(60):
        labels = [float(label + row) for row in range(5)]
        valid = (torch.rand(5, generator=source) < 0.6).tolist()
        append(ring, labels, valid)
        queue.extend(value for value, keep in zip(labels, valid, strict=True) if keep)
        label += 5
        position, size = (int(value) for value in state(ring))
        oldest_first = [stored(ring)[(position - size + row) % 13] for row in range(size)]
        assert oldest_first == list(queue)


def test_shapes_do_not_depend_on_what_is_valid() -> None:
    traces: list[list[Any]] = []

    class Trace(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            traces[-1].append((str(func), result.shape))
            return result

    for valid in ([True] * 4, [False] * 4, [False, True, True, False]):
        traces.append([])
        ring, parts, mask = build(5), transitions([1, 2, 3, 4]), torch.tensor(valid)
        with Trace():
            ring.append(parts, mask)
            ring.append(parts, mask)
    assert len(traces[0]) > 10
    assert traces[0] == traces[1] == traces[2]


# --- gather ----------------------------------------------------------------------------------------------------------


def gather(ring: ReplayRing, draws: list[int]) -> Tensor:
    out = torch.full((len(draws), ring.width), math.nan)
    ring.gather(torch.tensor(draws), out)
    return out


def test_gathers_modulo_the_fill() -> None:
    ring = build(8)
    append(ring, [1, 2, 3])
    largest = 2**63 - 1  # = 1 mod 3, the largest that random_ draws
    assert gather(ring, [0, 1, 2, 3, 7, largest]).tolist() == [packed(label) for label in (1, 2, 3, 1, 2, 2)]


def test_gathers_all_rows_once_full() -> None:
    ring = build(3)
    append(ring, [1, 2, 3])
    append(ring, [4])
    assert gather(ring, [0, 1, 2, 3, 4, 5])[:, 0].tolist() == [4, 2, 3, 4, 2, 3]


def test_an_empty_ring_gives_zeros() -> None:
    assert (gather(build(3), [0, 1, 5]) == 0).all()


def test_never_gathers_the_row_of_dropped_transitions() -> None:
    ring = build(3)
    append(ring, [1, 2, math.nan, 3, math.nan, 4], [True, True, False, True, False, True])
    assert gather(ring, list(range(50))).isfinite().all()


@pytest.mark.parametrize("fill", [8, 24])
def test_draws_are_uniform_over_the_fill(fill: int) -> None:
    ring, count = build(24), 96_000
    append(ring, [float(label) for label in range(fill)])
    draws = torch.empty(count, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(4))
    out = torch.empty(count, ring.width)
    ring.gather(draws, out)
    counts = torch.bincount(out[:, 0].long(), minlength=24)
    assert counts[fill:].sum() == 0
    expected = count / fill
    chi_square = (counts[:fill] - expected).square().sum().item() / expected
    freedom = fill - 1
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)


def test_gather_writes_in_place() -> None:
    ring = build(3)
    append(ring, [1])
    out = torch.zeros(2, ring.width)
    address, parts = out.data_ptr(), ring.split(out)
    ring.gather(torch.tensor([0, 0]), out)
    assert out.data_ptr() == address
    assert parts["reward"].tolist() == [-1, -1]


# --- split -----------------------------------------------------------------------------------------------------------


def test_split_gives_views_of_the_parts() -> None:
    ring = build(3)
    rows = torch.tensor([packed(1), packed(2)])
    parts = ring.split(rows)
    assert list(parts) == ["obs", "reward", "critic"]
    assert parts["obs"].tolist() == [[1, 1.25], [2, 2.25]]
    assert parts["reward"].tolist() == [-1, -2]
    assert parts["critic"].tolist() == [[1.5] * 3, [2.5] * 3]
    rows.zero_()
    assert all((part == 0).all() for part in parts.values())


def test_split_returns_what_was_appended() -> None:
    ring = build(4)
    append(ring, [1, 2, 3])
    for name, part in ring.split(ring.rows[:3]).items():
        assert torch.equal(part, transitions([1, 2, 3])[name]), name
