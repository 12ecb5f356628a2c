"""Where a tick goes: the pool's side, the learner's side, and which stage bounds a case.

Every number is the mean over a case's measured runs of their tail means of `Perf/*`. What the named stages leave of a
tick is its remainder: stated, and no stage. A tag that a run lacks is missing, not zero. A case of several ranks has a
row for all of them, from the run's tags, and one for each rank from the tags of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from repro import text
from repro.evidence import Evidence
from repro.throughput import STAGE_TAGS
from unilab.names import (
    ACTION_WAIT_MS,
    APPLY_MS,
    BACKEND_MS,
    COLLECTOR_WAIT_MS,
    INFERENCE_MS,
    ITERATION_TIME,
    LEARNING_TIME,
    PACK_MS,
    rank_tag,
)

BUSY = 0.95  # share of the tick inside `Batch.step` from which physics bounds a case
MISSING = "missing"
POOL = {BACKEND_MS: "inside `Batch.step`", ACTION_WAIT_MS: "idle, waiting for a command"}
LEARNER = {COLLECTOR_WAIT_MS: "waiting for rows", INFERENCE_MS: "upload, act, download, command"}
BESIDE = {LEARNING_TIME: "update on the device", APPLY_MS: "apply", PACK_MS: "pack"}


def stage_means(evidence: Evidence, case: str, rank: int | None = None) -> dict[str, float]:
    """Milliseconds by tag, the mean over a case's measured runs; without the tags that one of them lacks.

    Args:
        evidence: The session.
        case: The case.
        rank: Takes the tags of this rank alone, under the names of the run's; None takes the run's.
    """
    runs = [
        item.throughput.stages
        for item in evidence.cells
        if item.cell.case == case and item.status == "measured" and item.throughput is not None
    ]
    names = {tag: tag if rank is None else rank_tag(tag, rank) for tag in STAGE_TAGS}
    return {
        tag: fmean(run[name] for run in runs)
        for tag, name in names.items()
        if runs and all(name in run for run in runs)
    }


def pool_table(evidence: Evidence) -> str:
    """The tick as the pool spends it: two stages and the remainder."""
    rows = [[name, *_tick(means, POOL)] for name, means in _rows(evidence).items()]
    return text.markdown_table(("case", "tick, ms", *POOL.values(), "remainder"), rows, "lrrrr")


def learner_table(evidence: Evidence) -> str:
    """The tick as the learner spends it: two stages and the remainder; then what is no part of that sum."""
    rows = [
        [name, *_tick(means, LEARNER), *(text.number(means[tag]) if tag in means else MISSING for tag in BESIDE)]
        for name, means in _rows(evidence).items()
    ]
    return text.markdown_table(
        ("case", "tick, ms", *LEARNER.values(), "remainder", *(f"beside: {name}" for name in BESIDE.values())),
        rows,
        "lrrrrrrr",
    )


def missing_tags(evidence: Evidence) -> str:
    """One sentence on the tags that measured runs lack; empty where none does."""
    parts = []
    for name, means in _rows(evidence).items():
        tags = [tag for tag in STAGE_TAGS if tag not in means]
        if tags:
            listed = "every tag" if len(tags) == len(STAGE_TAGS) else ", ".join(f"`{tag}`" for tag in tags)
            parts.append(f"`{name}` lacks {listed}")
    return f"{'; '.join(parts)}: what needs them is missing too." if parts else ""


def bounding_stages(evidence: Evidence) -> dict[str, str]:
    """What bounds each measured case and why one can say so; without the cases whose tags do not say it."""
    found = {case: _bounding(case, means) for case, means in _measured(evidence).items()}
    return {case: sentence for case, sentence in found.items() if sentence is not None}


def _bounding(case: str, means: Mapping[str, float]) -> str | None:
    if not means.keys() >= {ITERATION_TIME, *POOL, LEARNING_TIME}:
        return None
    tick, physics, idle = (means[tag] for tag in (ITERATION_TIME, BACKEND_MS, ACTION_WAIT_MS))
    inside = f"the pool is inside `Batch.step` for {text.percent(physics / tick)} of a tick of {text.number(tick)} ms"
    if physics >= BUSY * tick:
        return f"physics in `{case}` ({inside})"
    # All that the pool is not inside for, in three parts. The update begins as the pool stops being idle.
    late = min(idle, max(0.0, means[LEARNING_TIME] - (tick - idle)))
    parts = {
        "the update on the device": late,
        "upload, act, download and command": idle - late,
        "the pool's remainder, as applying and packing": tick - physics - idle,
    }
    stage, lost = max(parts.items(), key=lambda part: part[1])
    return f"{stage} in `{case}` (costs the pool {text.number(lost)} ms; {inside})"


def _measured(evidence: Evidence) -> dict[str, dict[str, float]]:
    """Means of every case that has a number, in the matrix's order."""
    counted = {item.cell.case for item in evidence.cells if item.status == "measured" and item.throughput is not None}
    names = [case.name for case in evidence.plan.matrix.cases if case.name in counted]
    return {name: stage_means(evidence, name) for name in names}


def _rows(evidence: Evidence) -> dict[str, dict[str, float]]:
    """Means by name of the row: every measured case and, where it has several ranks, each of them."""
    ranks = {item.cell.case: item.cell.world_size for item in evidence.cells}
    rows = {}
    for case, means in _measured(evidence).items():
        several = range(ranks[case]) if ranks[case] > 1 else ()
        rows[f"{case}, all ranks" if several else case] = means
        rows |= {f"{case}, rank {rank}": stage_means(evidence, case, rank) for rank in several}
    return rows


def _tick(means: Mapping[str, float], stages: Sequence[str] | Mapping[str, str]) -> list[str]:
    """The tick, its stages with their shares, and what they leave of it."""
    tick = means.get(ITERATION_TIME)
    known = tick is not None and all(tag in means for tag in stages)
    rest = tick - sum(means[tag] for tag in stages) if tick is not None and known else None
    return [
        MISSING if tick is None else text.number(tick),
        *(_share(means.get(tag), tick) for tag in stages),
        _share(rest, tick),
    ]


def _share(value: float | None, tick: float | None) -> str:
    if value is None:
        return MISSING
    return text.number(value) if not tick else f"{text.number(value)} ({text.percent(value / tick)})"
