"""Where a tick goes: the tables' arithmetic, missing tags, and the stage that bounds a case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from repro.cycle import bounding_stages, learner_table, missing_tags, pool_table, stage_means
from repro.events import Refusal
from repro.throughput import STAGE_TAGS, measure
from unilab import names

# A tick of 40 ms: 36 inside physics, 3 idle, so 1 is left to the pool; 35 waiting and 4 acting, so 1 to the learner.
TICK = {
    names.ITERATION_TIME: 40.0,
    names.LEARNING_TIME: 9.0,
    names.COLLECTOR_WAIT_MS: 35.0,
    names.INFERENCE_MS: 4.0,
    names.ACTION_WAIT_MS: 3.0,
    names.APPLY_MS: 0.25,
    names.BACKEND_MS: 36.0,
    names.PACK_MS: 0.5,
}


def evidence(*runs: dict[str, float], ranks: int = 1, **statuses: str) -> Any:
    """One case `n1` with these runs."""
    cells = [
        SimpleNamespace(
            cell=SimpleNamespace(case="n1", id=f"n1_r{number}", world_size=ranks),
            status=statuses.get(f"r{number}", "measured"),
            throughput=SimpleNamespace(stages=run),
        )
        for number, run in enumerate(runs, start=1)
    ]
    cases = [SimpleNamespace(name="n1"), SimpleNamespace(name="n2")]
    return SimpleNamespace(cells=cells, plan=SimpleNamespace(matrix=SimpleNamespace(cases=cases)))


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_test_knows_every_tag() -> None:
    assert TICK.keys() == set(STAGE_TAGS)


def test_stages_and_remainder_are_the_tick() -> None:
    found = evidence(TICK)
    assert cells(pool_table(found)) == [["n1", "40.00", "36.00 (90.0 %)", "3.00 (7.5 %)", "1.00 (2.5 %)"]]
    shown = ["n1", "40.00", "35.00 (87.5 %)", "4.00 (10.0 %)", "1.00 (2.5 %)", "9.00", "0.25", "0.50"]
    assert cells(learner_table(found)) == [shown]
    assert missing_tags(found) == ""


def test_a_case_is_the_mean_of_its_measured_runs() -> None:
    other = {tag: 3 * value for tag, value in TICK.items()}
    found = evidence(TICK, other, {}, r3="refused")
    assert stage_means(found, "n1") == {tag: 2 * value for tag, value in TICK.items()}
    assert stage_means(found, "n2") == {}
    assert [row[0] for row in cells(pool_table(found))] == ["n1"], "a case without a run has no row"


@pytest.mark.parametrize(
    ("tag", "pool", "learner"),
    [
        (names.BACKEND_MS, ["40.00", "missing", "3.00 (7.5 %)", "missing"], None),
        (names.INFERENCE_MS, None, ["40.00", "35.00 (87.5 %)", "missing", "missing", "9.00", "0.25", "0.50"]),
        (names.PACK_MS, None, ["40.00", "35.00 (87.5 %)", "4.00 (10.0 %)", "1.00 (2.5 %)", "9.00", "0.25", "missing"]),
        (names.ITERATION_TIME, ["missing", "36.00", "3.00", "missing"], None),
    ],
)
def test_a_missing_tag_is_missing_and_not_zero(tag: str, pool: list[str] | None, learner: list[str] | None) -> None:
    found = evidence(TICK, {name: value for name, value in TICK.items() if name != tag})
    if pool is not None:
        assert cells(pool_table(found)) == [["n1", *pool]]
    if learner is not None:
        assert cells(learner_table(found)) == [["n1", *learner]]
    assert missing_tags(found) == f"`n1` lacks `{tag}`: what needs them is missing too."


def of_rank(rank: int, changes: dict[str, float]) -> dict[str, float]:
    """A tick as one of several ranks logs it."""
    return {names.rank_tag(tag, rank): value for tag, value in {**TICK, **changes}.items()}


def test_every_rank_has_a_row_of_its_own() -> None:
    """Rank 1 steps 2 ms faster and waits for it; the run's own tags are the means, as the trainer logs them."""
    one, other = of_rank(0, {}), of_rank(1, {names.BACKEND_MS: 34.0, names.ACTION_WAIT_MS: 5.0})
    mean = {**TICK, names.BACKEND_MS: 35.0, names.ACTION_WAIT_MS: 4.0}
    found = evidence(mean | one | other, mean | one | other, ranks=2)
    assert cells(pool_table(found)) == [
        ["n1, all ranks", "40.00", "35.00 (87.5 %)", "4.00 (10.0 %)", "1.00 (2.5 %)"],
        ["n1, rank 0", "40.00", "36.00 (90.0 %)", "3.00 (7.5 %)", "1.00 (2.5 %)"],
        ["n1, rank 1", "40.00", "34.00 (85.0 %)", "5.00 (12.5 %)", "1.00 (2.5 %)"],
    ]
    assert [row[0] for row in cells(learner_table(found))] == ["n1, all ranks", "n1, rank 0", "n1, rank 1"]
    assert missing_tags(found) == ""


def test_what_a_rank_did_not_log_is_missing_and_not_zero() -> None:
    second = of_rank(1, {})
    del second[names.rank_tag(names.BACKEND_MS, 1)]
    found = evidence(TICK | of_rank(0, {}) | second, TICK | of_rank(0, {}) | of_rank(1, {}), ranks=2)
    assert cells(pool_table(found))[2] == ["n1, rank 1", "40.00", "missing", "3.00 (7.5 %)", "missing"]
    assert missing_tags(found) == f"`n1, rank 1` lacks `{names.BACKEND_MS}`: what needs them is missing too."
    older = evidence(TICK, ranks=2)
    assert cells(pool_table(older))[1] == ["n1, rank 0", *["missing"] * 4]
    assert missing_tags(older).startswith("`n1, rank 0` lacks every tag; `n1, rank 1` lacks every tag: ")


def test_tags_of_ranks_are_read_over_the_runs_window(fake_run: Callable[..., Path]) -> None:
    """A tick of 40 ms; the made-up ranks lie 5 % below and above the mean."""
    found = measure(fake_run(rate=1_000.0, num_envs=20, world_size=2)).stages
    assert found[names.ITERATION_TIME] == pytest.approx(40.0)
    assert found[names.rank_tag(names.ITERATION_TIME, 0)] == pytest.approx(38.0)
    assert found[names.rank_tag(names.LEARNING_TIME, 1)] == pytest.approx(12.6)  # s in the file, ms here
    assert found[names.rank_tag(names.BACKEND_MS, 1)] == pytest.approx(37.8)
    assert len(found) == 3 * len(STAGE_TAGS)


def test_a_rank_whose_stage_is_no_number_is_refused(fake_run: Callable[..., Path]) -> None:
    with pytest.raises(Refusal, match="Perf/rank1/learner_inference_ms is nan at step"):
        measure(fake_run(world_size=2, tags={names.rank_tag(names.INFERENCE_MS, 1): float("nan")}))


INSIDE = "the pool is inside `Batch.step` for"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({names.BACKEND_MS: 38.0}, f"physics in `n1` ({INSIDE} 95.0 % of a tick of 40.00 ms)"),
        ({}, f"upload, act, download and command in `n1` (costs the pool 3.00 ms; {INSIDE} 90.0 % of a tick of"),
        ({names.ACTION_WAIT_MS: 1.5}, "the pool's remainder, as applying and packing in `n1` (costs the pool 2.50 ms;"),
        # The update begins when the pool has its command: 37 ms of it are hidden, 2 of the idle 3 are not.
        ({names.LEARNING_TIME: 39.0}, "the update on the device in `n1` (costs the pool 2.00 ms;"),
        ({names.LEARNING_TIME: 38.0}, "upload, act, download and command in `n1` (costs the pool 2.00 ms;"),
        ({names.LEARNING_TIME: 90.0}, "the update on the device in `n1` (costs the pool 3.00 ms;"),
    ],
)
def test_the_bounding_stage_is_what_keeps_the_pool_from_physics(changes: dict[str, float], sentence: str) -> None:
    assert bounding_stages(evidence({**TICK, **changes}))["n1"].startswith(sentence)


@pytest.mark.parametrize("tag", [names.ITERATION_TIME, names.BACKEND_MS, names.ACTION_WAIT_MS, names.LEARNING_TIME])
def test_no_bounding_stage_without_its_tags(tag: str) -> None:
    assert bounding_stages(evidence({name: value for name, value in TICK.items() if name != tag})) == {}
    assert bounding_stages(evidence(TICK, r1="failed")) == {}


def test_stages_are_tail_means_in_milliseconds(fake_run: Callable[..., Path]) -> None:
    found = measure(fake_run(rate=1_000.0, num_envs=20, tags={names.PACK_MS: None, names.APPLY_MS: 0.5}))
    assert found.stages[names.ITERATION_TIME] == pytest.approx(20.0)
    assert found.stages[names.LEARNING_TIME] == found.learner_cycle_ms
    assert found.stages[names.APPLY_MS] == 0.5
    assert found.stages.keys() == set(STAGE_TAGS) - {names.PACK_MS}


def test_a_stage_that_is_no_number_is_refused(fake_run: Callable[..., Path]) -> None:
    with pytest.raises(Refusal, match=f"{names.INFERENCE_MS} is nan at step"):
        measure(fake_run(tags={names.INFERENCE_MS: float("nan")}))
