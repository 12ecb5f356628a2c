"""Turns the events of one run into the numbers that may be published, or refuses.

The main metric is the difference of cumulative global env steps over the difference of wall time between the first and
the last event of the tail (by default the last half of the events, so that start-up and compilation stay outside).
It never uses a logged rate: those are float32 means of per-iteration rates and lie above it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from repro.account import check_account
from repro.events import EventLog, Reason, Refusal, Series, find_event_file, read_events
from repro.matrix import FEWEST_POINTS
from repro.run_files import MOST, RunEnd, find_count, read_json, read_progress, read_run_end
from repro.steadiness import Steadiness, steadiness, trend_note
from unilab.names import (
    ACTION_WAIT_MS,
    APPLY_MS,
    BACKEND_MS,
    COLLECTOR_WAIT_MS,
    CONFIG_FILE,
    EXPOSED_MS,
    INFERENCE_MS,
    ITERATION_TIME,
    LEARNING_TIME,
    MANIFEST_FILE,
    MEAN_EPISODE_LENGTH,
    MEAN_REWARD,
    PACK_MS,
    PHYSICS_FRACTION,
    PROGRESS_FILE,
    RUN_END_FILE,
    TOTAL_FPS,
    TRAIN_ITERATION,
)

SENSITIVITY_TAILS = (0.25, 0.5, 0.75)
CLOCK_TOLERANCE = 0.01  # relative difference of wall and monotonic time over the window
GAP_FACTOR = 10.0  # an interval this many times the median one is reported
GAP_SHARE, GAP_SHARE_FACTOR = 0.05, 3.0  # so is one of this share of the window, where it is not just a short window
LOST_SHARE = 0.01  # of the window's env steps or updates: with more lost than this, a run does other work
UNCHECKED = (
    f"no {RUN_END_FILE} of this trainer: nothing says that the run is complete",
    f"no {PROGRESS_FILE} of this trainer: the wall clock was not checked",
)
INVALID_ROWS = "Train/invalid_rows"
SKIPPED_UPDATES = "Train/skipped_updates"
IN_SECONDS = (ITERATION_TIME, LEARNING_TIME)  # the other stages are logged in ms
STAGE_TAGS = (*IN_SECONDS, COLLECTOR_WAIT_MS, INFERENCE_MS, ACTION_WAIT_MS, APPLY_MS, BACKEND_MS, PACK_MS)
_LOSSES = "Loss/"
_RANK = re.compile(r"Perf/rank\d+/(.+)")  # as `rank_tag` writes them


@dataclass(frozen=True)
class Window:
    """The first and last event between which a rate is measured; indices count from 0, times are s since 1970."""

    first_index: int
    last_index: int
    first_step: int
    last_step: int
    first_time: float
    last_time: float

    @property
    def points(self) -> int:
        """Events inside, both ends included; there is one interval less."""
        return self.last_index - self.first_index + 1

    @property
    def seconds(self) -> float:
        """Wall seconds between the two events."""
        return self.last_time - self.first_time

    @property
    def steps_per_second(self) -> float:
        """Global env steps per wall second."""
        return (self.last_step - self.first_step) / self.seconds


@dataclass(frozen=True, eq=False)
class Throughput:
    """What one run says about speed.

    Attributes:
        tag: the tag whose events were used.
        tail: fraction of the events in the window.
        steps_per_second: the main metric, global env steps per wall second over the window.
        points: events of the tag in the whole file.
        window: where the main metric was measured.
        tail_mean: arithmetic mean of the tag's values over the window; a mean of logged rates, not the main metric.
        tail_median: their median, middle values averaged.
        tail_p90: their 90th percentile, linearly interpolated.
        window_sensitivity: the main metric for other tails; None where a tail holds fewer than two events.
        steadiness: trend and autocorrelation of the rate inside the window.
        physics_fraction: tail mean of the share of the tick spent inside physics, or None without the tag.
        exposed_ms: tail mean of the tick's time outside physics in ms, or None without the tag.
        learner_cycle_ms: tail mean of the update phase's device time in ms, of several ranks the least of each record;
            or None without the tag.
        stages: tail mean in ms of every tag of `STAGE_TAGS` that was recorded, and of its ranks' own; the update
            phase's is `learner_cycle_ms`.
        learner_rows_per_second: replay rows consumed by all learners per wall second, or None when the run directory
            does not say the batch size, updates and ranks.
        mean_reward: last value, or None without the tag or before the first finished episode.
        mean_episode_length: last value in control steps, or None likewise.
        startup_seconds: process start to first training iteration from `run_end.json`, or None.
        notes: what a reader must know beside the number, one line each.
        steps: cumulative env steps of every point, `(N,)`.
        seconds: wall seconds of every point since the first, `(N,)`.
        rates: env steps per second of every interval, `(N - 1,)`.
        scalars: every point of every tag of the event file.
    """

    tag: str
    tail: float
    steps_per_second: float
    points: int
    window: Window
    tail_mean: float
    tail_median: float
    tail_p90: float
    window_sensitivity: dict[float, float | None]
    steadiness: Steadiness
    physics_fraction: float | None
    exposed_ms: float | None
    learner_cycle_ms: float | None
    stages: Mapping[str, float]
    learner_rows_per_second: float | None
    mean_reward: float | None
    mean_episode_length: float | None
    startup_seconds: float | None
    notes: list[str]
    steps: NDArray[np.int64]
    seconds: NDArray[np.float64]
    rates: NDArray[np.float64]
    scalars: Mapping[str, Series]


def measure(
    run_dir: Path,
    tail: float = 0.5,
    tag: str = TOTAL_FPS,
    min_points: int = FEWEST_POINTS,
    own: bool = True,
) -> Throughput:
    """Measure one run.

    Args:
        run_dir: directory with exactly one event file.
        tail: fraction of the events to measure over; N events give the window from index floor(N (1 - tail)) on.
        tag: whose events give steps and times.
        min_points: fewest events of the tag in the file.
        own: whether the run is of this trainer, whose files are then held against each other. Of another program's
            only the events are read; what they cannot show is noted.

    Raises:
        Refusal: whenever no number may be given; its code says why.
        ValueError: if `tail` is not in (0, 1] or `min_points` is below 2.
    """
    if not 0.0 < tail <= 1.0:
        raise ValueError(f"tail must be above 0 and at most 1, got {tail}")
    if min_points < 2:
        raise ValueError(f"min_points must be at least 2, got {min_points}")
    find_event_file(run_dir)
    end = read_run_end(run_dir) if own else None
    log = read_events(run_dir)
    series = _choose_series(log, tag, min_points)
    _check_order(log, series, tag)
    window = _window(log, series, tag, tail)
    _check_rate(log, window)
    _check_finite(log, window, tag, losses=own)
    notes = [
        *_cut_notes(log),
        *(UNCHECKED if end is None else _check_own(run_dir, log, window, end)),
        *_check_work(read_json(run_dir / CONFIG_FILE) if own else {}, log, window),
        *_gap_notes(series, window),
        *_sparse_notes(log, window),
    ]
    rows = _learner_rows_per_second(run_dir, log, window) if own else (None, [])
    return _throughput(log, series, window, tag, tail, end, rows, notes)


def measure_events(log: EventLog, tag: str, tail: float = 0.5, min_points: int = FEWEST_POINTS) -> Throughput:
    """Measure one run of another program by one tag of its events; whatever else it left is not read.

    Args:
        log: its events, their steps being cumulative global env steps.
        tag: whose events give steps and times.
        tail: fraction of the events to measure over.
        min_points: fewest events of the tag.

    Raises:
        Refusal: whenever no number may be given; its code says why.
    """
    series = _choose_series(log, tag, min_points)
    _check_order(log, series, tag)
    window = _window(log, series, tag, tail)
    _check_rate(log, window)
    only = replace(log, scalars={tag: series})
    _check_finite(only, window, tag, losses=False)
    notes = [*_cut_notes(log), *UNCHECKED, *_gap_notes(series, window)]
    return _throughput(only, series, window, tag, tail, None, (None, []), notes)


def _throughput(
    log: EventLog,
    series: Series,
    window: Window,
    tag: str,
    tail: float,
    end: RunEnd | None,
    learner_rows: tuple[float | None, list[str]],
    notes: list[str],
) -> Throughput:
    values = series.values[window.first_index :]
    steady = steadiness(series.steps[window.first_index :], series.wall_times[window.first_index :])
    trend = trend_note(steady)
    rows, row_notes = learner_rows
    stages = _stages(log, window)
    return Throughput(
        tag=tag,
        tail=tail,
        steps_per_second=window.steps_per_second,
        points=len(series.steps),
        window=window,
        tail_mean=float(np.mean(values)),
        tail_median=float(np.median(values)),
        tail_p90=float(np.percentile(values, 90)),
        window_sensitivity=_sensitivity(series),
        steadiness=steady,
        physics_fraction=_tail_mean(log, PHYSICS_FRACTION, window),
        exposed_ms=_tail_mean(log, EXPOSED_MS, window),
        learner_cycle_ms=stages.get(LEARNING_TIME),
        stages=stages,
        learner_rows_per_second=rows,
        mean_reward=_last(log, MEAN_REWARD),
        mean_episode_length=_last(log, MEAN_EPISODE_LENGTH),
        startup_seconds=None if end is None else end.startup_seconds,
        notes=[*notes, *([trend] if trend else []), *row_notes],
        steps=series.steps,
        seconds=series.wall_times - series.wall_times[0],
        rates=np.diff(series.steps) / np.diff(series.wall_times),
        scalars=log.scalars,
    )


def _choose_series(log: EventLog, tag: str, min_points: int) -> Series:
    series = log.scalars.get(tag)
    if series is None:
        near = get_close_matches(tag, log.scalars, n=3, cutoff=0.0)
        offered = f"nearest are {', '.join(near)}" if near else "it has no scalars at all"
        raise Refusal(Reason.MISSING_TAG, f"{log.path.name} has no scalar {tag}; {offered}; choose another tag")
    if len(series.steps) < min_points:
        raise Refusal(
            Reason.TOO_FEW_POINTS,
            f"{log.path.name} has {len(series.steps)} points of {tag}, fewer than {min_points}; run more iterations",
        )
    return series


def _check_order(log: EventLog, series: Series, tag: str) -> None:
    steps = np.flatnonzero(np.diff(series.steps) <= 0)
    if steps.size:
        i = int(steps[0])
        raise Refusal(
            Reason.STEPS_NOT_INCREASING,
            f"{log.path.name}: {tag} has step {series.steps[i]} at point {i} and {series.steps[i + 1]} at the next; "
            "steps must grow, so this is not one run",
        )
    with np.errstate(invalid="ignore", over="ignore"):
        intervals = np.diff(series.wall_times)
    times = np.flatnonzero(~((intervals > 0) & np.isfinite(intervals)))  # written so that NaN counts as not growing
    if times.size:
        i = int(times[0])
        raise Refusal(
            Reason.TIME_NOT_INCREASING,
            f"{log.path.name}: {tag} has wall time {series.wall_times[i]:.6f} at point {i} and "
            f"{series.wall_times[i + 1]:.6f} at the next; time must grow, run it again",
        )


def _first_index(count: int, tail: float) -> int:
    """floor(count (1 - tail)), exact in the decimal digits that the user typed: tail 0.9 of 10 points begins at 1."""
    return math.floor(count * (1 - Fraction(str(tail))))


def _span(series: Series, tail: float) -> Window | None:
    """The window of a tail, or None where it holds fewer than two points."""
    last = len(series.steps) - 1
    first = _first_index(last + 1, tail)
    if first >= last:
        return None
    steps, times = series.steps, series.wall_times
    return Window(first, last, int(steps[first]), int(steps[last]), float(times[first]), float(times[last]))


def _window(log: EventLog, series: Series, tag: str, tail: float) -> Window:
    window = _span(series, tail)
    if window is None:
        raise Refusal(
            Reason.TOO_FEW_POINTS,
            f"{log.path.name}: a tail of {tail} holds fewer than two of the {len(series.steps)} points of {tag}; "
            "take a larger tail",
        )
    return window


def _check_rate(log: EventLog, window: Window) -> None:
    if not math.isfinite(window.steps_per_second):
        raise Refusal(
            Reason.NON_FINITE,
            f"{log.path.name}: {window.last_step - window.first_step} steps in {window.seconds:g} s are no rate; "
            "the times are damaged, run it again",
        )


def _sensitivity(series: Series) -> dict[float, float | None]:
    windows = {tail: _span(series, tail) for tail in SENSITIVITY_TAILS}
    return {tail: window.steps_per_second if window else None for tail, window in windows.items()}


def _check_finite(log: EventLog, window: Window, tag: str, losses: bool) -> None:
    """Refuse non-finite tail values of all tags that become numbers, and of losses: a diverged run does other work."""
    reported = [tag, PHYSICS_FRACTION, EXPOSED_MS, *_stage_tags(log), TRAIN_ITERATION, INVALID_ROWS, SKIPPED_UPDATES]
    if losses:
        reported += sorted(name for name in log.scalars if name.startswith(_LOSSES))
    for name in reported:
        steps, values = _tail(log, name, window)
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            raise Refusal(
                Reason.NON_FINITE,
                f"{log.path.name}: {name} is {values[bad[0]]} at step {steps[bad[0]]} and at {bad.size - 1} more "
                "points of the tail; look into the training before measuring it",
            )


def _cut_notes(log: EventLog) -> list[str]:
    cut = log.scan.cut_offset
    return [] if cut is None else [f"the last record of the event file is cut at byte {cut} and was left out"]


def _check_own(run_dir: Path, log: EventLog, window: Window, end: RunEnd) -> list[str]:
    """Refuse a run of this trainer whose files do not tell of one run; nothing is left to note."""
    _check_end(log, end)
    _check_clock(run_dir, window)
    check_account(run_dir, log, end)
    return []


def _check_end(log: EventLog, end: RunEnd) -> None:
    """Compare the events with the run's own account; a cut tail explains exactly one missing record."""
    if log.summaries + log.scan.cut_tail != end.event_count:
        raise Refusal(
            Reason.EVENT_COUNT_MISMATCH,
            f"{log.path.name} holds {log.summaries} summaries and {RUN_END_FILE} counted {end.event_count}; "
            "events were lost or added, copy or run it again",
        )
    last = max(int(points.steps[-1]) for points in log.scalars.values())
    if not (end.final_env_steps > last if log.scan.cut_tail else end.final_env_steps == last):
        raise Refusal(
            Reason.EVENT_COUNT_MISMATCH,
            f"the last event is at step {last}, {RUN_END_FILE} says {end.final_env_steps}; "
            "the files are not of one run, run it again",
        )


def _check_clock(run_dir: Path, window: Window) -> None:
    """Compare the window's wall time with the monotonic clock of `progress.jsonl`."""
    path = run_dir / PROGRESS_FILE
    if not path.exists():
        raise Refusal(
            Reason.PROGRESS_MISMATCH,
            f"{run_dir.resolve().name} has no {PROGRESS_FILE} to check the wall clock by; run it again",
        )
    progress = read_progress(path)
    first, last = progress.get(window.first_step), progress.get(window.last_step)
    if first is None or last is None:
        missing = window.first_step if first is None else window.last_step
        raise Refusal(
            Reason.PROGRESS_MISMATCH,
            f"{path.name} lacks env step {missing} of the event file; the files are not of one run, run it again",
        )
    seconds = last.monotonic_s - first.monotonic_s
    if not abs(window.seconds - seconds) <= CLOCK_TOLERANCE * seconds:
        raise Refusal(
            Reason.CLOCK_STEP,
            f"{run_dir.resolve().name}: the wall clock stepped during the run: the window took "
            f"{window.seconds:.3f} s by it and {seconds:.3f} s by the monotonic clock; run it again",
        )


def _check_work(config: Mapping[str, Any], log: EventLog, window: Window) -> list[str]:
    """Refuse a window that lost more than `LOST_SHARE` of its transitions or updates; note smaller losses."""
    updates = find_count(config, "algo", "updates_per_step")
    iterations = _iterations(log, window)
    done = updates * iterations if updates is not None and iterations is not None else 0.0
    steps = window.last_step - window.first_step
    return [
        *_lost_notes(log, window, INVALID_ROWS, steps, "env steps", Reason.INVALID_PHYSICS),
        *_lost_notes(log, window, SKIPPED_UPDATES, done, "updates", Reason.SKIPPED_UPDATES),
    ]


def _lost_notes(log: EventLog, window: Window, tag: str, total: float, what: str, reason: Reason) -> list[str]:
    """Judge the growth of a cumulative counter over the window; every change of it counts as growth."""
    lost = float(np.abs(np.diff(_tail(log, tag, window)[1])).sum())
    if not lost:
        return []
    of = f"of {total:,.0f} {what} of the window" if total > 0 else f"{what} of an unknown number"
    found = f"{tag} grew by {lost:,.0f} {of}"
    if lost > LOST_SHARE * total:
        raise Refusal(
            reason,
            f"{log.path.name}: {found}, more than {LOST_SHARE:.0%}; look into the training before measuring it",
        )
    return [f"{found} ({lost / total:.2%})"]


def _gap_notes(series: Series, window: Window) -> list[str]:
    intervals = np.diff(series.wall_times[window.first_index :])
    median = float(np.median(intervals))
    longest = int(np.argmax(intervals))
    seconds = float(intervals[longest])
    share = seconds / window.seconds
    if seconds <= GAP_FACTOR * median and not (share > GAP_SHARE and seconds > GAP_SHARE_FACTOR * median):
        return []
    return [
        f"one pause of {seconds:.3g} s is {share:.0%} of the window, after env step "
        f"{series.steps[window.first_index + longest]}; the median interval is {median:.3g} s"
    ]


def _sparse_notes(log: EventLog, window: Window) -> list[str]:
    """A tag that is logged for a part of the window only is a mean over that part; say so."""
    notes = []
    for name in (PHYSICS_FRACTION, EXPOSED_MS, *_stage_tags(log)):
        count = len(_tail(log, name, window)[0])
        if name in log.scalars and count != window.points:
            notes.append(f"{name} has {count} points in the window of {window.points}")
    return notes


def _tail(log: EventLog, name: str, window: Window) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Steps and values of a tag from the window's first step on; empty without the tag."""
    series = log.scalars.get(name)
    if series is None:
        return np.empty(0, np.int64), np.empty(0, np.float64)
    inside = series.steps >= window.first_step
    return series.steps[inside], series.values[inside]


def _tail_mean(log: EventLog, name: str, window: Window) -> float | None:
    values = _tail(log, name, window)[1]
    return float(np.mean(values)) if values.size else None


def _stages(log: EventLog, window: Window) -> dict[str, float]:
    found = {}
    for name, tag in _stage_tags(log).items():
        mean = _tail_mean(log, name, window)
        if mean is not None:
            found[name] = mean * (1e3 if tag in IN_SECONDS else 1.0)
    least = _least_learning(log, window)
    return found if least is None else {**found, LEARNING_TIME: 1e3 * least}


def _least_learning(log: EventLog, window: Window) -> float | None:
    """Tail mean of the least that a rank's update phase took, in s, or None without tags of ranks.

    Ranks wait for each other in the all-reduces, so what the others took longer is waiting and not work.
    """
    least: dict[int, float] = {}
    for name, tag in _stage_tags(log).items():
        if tag == LEARNING_TIME != name:
            steps, values = _tail(log, name, window)
            for step, value in zip(steps.tolist(), values.tolist(), strict=True):
                least[step] = min(value, least.get(step, math.inf))
    return float(np.mean(list(least.values()))) if least else None


def _stage_tags(log: EventLog) -> dict[str, str]:
    """Tags of stages by name in the file: those of the run, and those of single ranks that it has."""
    own = {tag: tag for tag in STAGE_TAGS}
    ranks = {name: f"Perf/{match[1]}" for name in log.scalars if (match := _RANK.fullmatch(name))}
    return own | {name: tag for name, tag in ranks.items() if tag in STAGE_TAGS}


def _last(log: EventLog, name: str) -> float | None:
    series = log.scalars.get(name)
    if series is None or not math.isfinite(series.values[-1]):
        return None
    return float(series.values[-1])


def _iterations(log: EventLog, window: Window) -> float | None:
    """Training iterations of the window, or None where its ends do not say theirs."""
    steps, values = _tail(log, TRAIN_ITERATION, window)
    iterations = dict(zip(steps.tolist(), values.tolist(), strict=True))
    first, last = iterations.get(window.first_step), iterations.get(window.last_step)
    return None if first is None or last is None else float(last - first)


def _learner_rows_per_second(run_dir: Path, log: EventLog, window: Window) -> tuple[float | None, list[str]]:
    """Batch of one update x updates of an iteration x ranks x iterations of the window / its wall seconds, and notes.

    None where a size is missing or out of range, or `progress.jsonl` counts other iterations.
    """
    config, manifest = read_json(run_dir / CONFIG_FILE), read_json(run_dir / MANIFEST_FILE)
    sizes = {
        "algo.batch_size": find_count(config, "algo", "batch_size"),
        "algo.updates_per_step": find_count(config, "algo", "updates_per_step"),
        "dp_sync.world_size": find_count(manifest, "dp_sync", "world_size"),
    }
    iterations = _iterations(log, window)
    if not (config and manifest) or iterations is None:
        return None, []
    unknown = [name for name, size in sizes.items() if size is None]
    if unknown:
        return None, [f"no learner rows/s: {unknown[0]} is missing or not from 1 to {MOST}"]
    if iterations != (counted := _counted_iterations(run_dir, window, iterations)) or iterations <= 0:
        return None, [f"no learner rows/s: {TRAIN_ITERATION} grew by {iterations:g}, {PROGRESS_FILE} by {counted:g}"]
    return math.prod(size for size in sizes.values() if size) * iterations / window.seconds, []


def _counted_iterations(run_dir: Path, window: Window, otherwise: float) -> float:
    """Iterations of the window by `progress.jsonl`; `otherwise` where it does not have both ends."""
    path = run_dir / PROGRESS_FILE
    progress = read_progress(path) if path.exists() else {}
    first, last = progress.get(window.first_step), progress.get(window.last_step)
    return otherwise if first is None or last is None else float(last.iteration - first.iteration)
