"""Ranks that learn together, as processes of their own with gloo on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_learning import FREQUENCY, UPDATES, build, wires
from test_learner import draws, update
from torch import Tensor

from unilab.sac.objectives import Batch

PROGRAM = Path(__file__).resolve().parents[1] / "rank_program.py"
Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    out = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(PROGRAM), "learn", str(out), "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, "completed\n"), ended.stdout + ended.stderr
    return [torch.load(out / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    """Names of entries that differ in a bit."""
    assert one.keys() == other.keys()
    return {name for name in one if not torch.equal(one[name], other[name])} - {"learner/Loss/entropy"}  # of own rows


def test_ranks_begin_equal_with_rank_0s_weights(seen: Seen) -> None:
    zero, one = seen
    assert apart(zero["own start"], one["own start"]) == {
        "actor/parameters",
        "critic/parameters",
        "critic_target/parameters",
    }
    assert apart(zero["start"], zero["own start"]) == set()
    assert apart(one["start"], zero["start"]) == set()


def local_wires(start: dict[str, Tensor], *batches: tuple[Batch, Tensor, Tensor]) -> dict[str, Tensor]:
    """Gradients and losses of one update by a single process, on the rows of all batches at once."""
    learner, registry = build(0)
    registry.restore(start)
    rows = Batch(**{name: torch.cat([getattr(b[0], name) for b in batches]) for name in vars(batches[0][0])})
    update(learner, rows, torch.cat([b[1] for b in batches]), torch.cat([b[2] for b in batches]))
    return wires(learner)


def test_the_averaged_gradient_is_the_mean_of_the_ranks_gradients(seen: Seen) -> None:
    """Of the critics and the temperature, whose first update starts from equal weights everywhere."""
    ones = [local_wires(seen[0]["start"], draws(1000 * rank)) for rank in range(2)]
    for name in ("critic", "temperature"):
        mean = (ones[0][name] + ones[1][name]) / 2
        assert (ones[0][name] - ones[1][name]).abs().max() > 1e-3
        # The same float32 operations, perhaps on other numbers of threads.
        torch.testing.assert_close(seen[0]["wires"][name], mean, rtol=1e-6, atol=1e-7)


def test_the_averaged_gradient_is_that_of_the_concatenated_batch(seen: Seen) -> None:
    """The losses in it too; the actor's after a critic step, so that both steps were equal."""
    whole = local_wires(seen[0]["start"], draws(0), draws(1000))
    for name, values in whole.items():
        assert values.abs().max() > 1e-3
        # Sums of 64 rows instead of two of 32; AdamW's first step divides by its gradient, so the actor sees more.
        torch.testing.assert_close(seen[0]["wires"][name], values, rtol=1e-4, atol=2e-6)


def test_ranks_stay_bit_equal(seen: Seen) -> None:
    zero, one = seen
    for moment in ("first", "cycles"):
        assert apart(zero[moment], one[moment]) == set(), moment
    assert torch.equal(zero["wires"]["critic"], one["wires"]["critic"])
    assert len(apart(zero["cycles"], zero["start"])) > 10


def test_ten_collectives_a_cycle_at_fixed_addresses(seen: Seen) -> None:
    assert [rank["collectives"] for rank in seen] == [2 * (UPDATES + UPDATES // FREQUENCY)] * 2 == [20, 20]
    assert not any(rank["moved"] for rank in seen)


@pytest.mark.parametrize(
    ("case", "untouched"),
    [(0, {"critic", "critic_target", "temperature"}), (1, {"actor"}), (2, {"critic", "critic_target", "temperature"})],
)
def test_a_bad_number_on_one_rank_is_skipped_by_all_who_then_go_on(seen: Seen, case: int, untouched: set[str]) -> None:
    """A bad reward or critic observation concerns the critics, a bad policy observation the actor."""
    for rank in seen:
        skip = rank["skips"][case]
        changed = {name.split("/")[0] for name in apart(skip["before"], skip["after"])} - {"learner"}
        assert not changed & untouched
        key = "learner/Train/skipped_updates"
        assert skip["after"][key] >= skip["before"][key] + 1
        changed = {name.split("/")[0] for name in apart(skip["after"], skip["next"])}
        assert changed >= {"actor", "critic", "critic_target", "temperature"}
        assert skip["next"][key] == skip["after"][key]
        assert all(value.isfinite().all() for name, value in skip["next"].items() if not name.startswith("learner/"))
    for moment in ("after", "next"):
        assert apart(seen[0]["skips"][case][moment], seen[1]["skips"][case][moment]) == set()


def test_ranks_with_the_same_data_are_one_rank_bit_for_bit(seen: Seen) -> None:
    """The mean of two equal numbers is exact, so nothing but the collective itself could differ."""
    for rank in seen:
        assert apart(rank["alone"], rank["same"]) == set()


def test_gathered_values_are_every_ranks(seen: Seen) -> None:
    for rank in seen:
        assert rank["gathered"][0].tolist() == [0.0, 2.0]
        assert rank["gathered"][1][0] == 1.0 and rank["gathered"][1][1].isnan()


def test_the_manifest_says_how_gradients_are_combined(seen: Seen) -> None:
    assert seen[1]["facts"] == {
        "world_size": 2,
        "backend": "gloo",
        "mode": "gradient_mean_per_optimizer_step",
        "gradient_collectives_per_iteration": 10,
        "cuda_graph_optimizer_capture": None,
        "cuda_graph_collective_warmup": True,
    }
