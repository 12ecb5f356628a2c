"""What one run says about learning: its curves over env steps and seconds, and the numbers at their end.

The curves have a point for each logged iteration. The *last tenth* is the last tenth of those points, at least one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from repro.events import Reason, Refusal
from repro.run_files import read_json
from repro.throughput import Throughput
from unilab.names import CONFIG_FILE, MEAN_EPISODE_LENGTH, MEAN_REWARD, TRACKING_ERROR_ANG, TRACKING_ERROR_LIN

WALKING_LENGTH = 900.0  # control steps of a mean episode, of at most 1000: the policy falls rarely


@dataclass(frozen=True, eq=False)
class Learning:
    """Curves and numbers of one run.

    Attributes:
        seed: `algo.seed`.
        env_steps: cumulative global env steps of the last record.
        wall_seconds: from the first record to the last, so without start-up and compilation.
        seconds_to_walk: from the first record to the first of a tenth of the run's points in a row whose mean episode
            length is at least `WALKING_LENGTH`; None when there is none.
        episode_return: mean of `Train/mean_reward` over the last tenth, or None where no episode had ended.
        episode_length: the same of `Train/mean_episode_length`, control steps.
        tracking_error_lin: the same of the planar velocity's error, m/s, or None without its tag.
        tracking_error_ang: the same of the yaw rate's error, rad/s, or None without its tag.
        steps: cumulative env steps of every point, `(N,)`.
        seconds: wall seconds of every point since the first, `(N,)`.
        curves: values of every point by tag, `(N,)` each; NaN where no episode had ended yet. Without the tracking
            errors where they were not logged.
    """

    seed: int
    env_steps: int
    wall_seconds: float
    seconds_to_walk: float | None
    episode_return: float | None
    episode_length: float | None
    tracking_error_lin: float | None
    tracking_error_ang: float | None
    steps: NDArray[np.int64]
    seconds: NDArray[np.float64]
    curves: Mapping[str, NDArray[np.float64]]


def learn(run_dir: Path, measured: Throughput) -> Learning:
    """Read the curves of a run that has a rate.

    Args:
        run_dir: directory of the run.
        measured: its measurement, which has checked the events.

    Raises:
        Refusal: `missing_tag`, `non_finite`, or `damaged_file` where the configuration names no seed.
    """
    tags = [MEAN_REWARD, MEAN_EPISODE_LENGTH]
    tags += [tag for tag in (TRACKING_ERROR_LIN, TRACKING_ERROR_ANG) if tag in measured.scalars]
    curves = {tag: _curve(run_dir, measured, tag) for tag in tags}
    none_ended = curves[MEAN_EPISODE_LENGTH] == 0  # until then both means of episodes are logged as 0
    for tag in (MEAN_REWARD, MEAN_EPISODE_LENGTH):
        curves[tag] = np.where(none_ended, np.nan, curves[tag])
    final = {tag: _mean_of_last_tenth(curve) for tag, curve in curves.items()}
    return Learning(
        seed=_seed(run_dir),
        env_steps=int(measured.steps[-1]),
        wall_seconds=float(measured.seconds[-1]),
        seconds_to_walk=_seconds_to_walk(curves[MEAN_EPISODE_LENGTH], measured.seconds),
        episode_return=final[MEAN_REWARD],
        episode_length=final[MEAN_EPISODE_LENGTH],
        tracking_error_lin=final.get(TRACKING_ERROR_LIN),
        tracking_error_ang=final.get(TRACKING_ERROR_ANG),
        steps=measured.steps,
        seconds=measured.seconds,
        curves=curves,
    )


def _curve(run_dir: Path, measured: Throughput, tag: str) -> NDArray[np.float64]:
    series = measured.scalars.get(tag)
    if series is None or not np.array_equal(series.steps, measured.steps):
        found = 0 if series is None else len(series.steps)
        raise Refusal(
            Reason.MISSING_TAG,
            f"{run_dir.resolve().name} has {found} points of {tag} and {len(measured.steps)} of {measured.tag}; "
            "a learning curve needs one in every record",
        )
    bad = np.flatnonzero(~np.isfinite(series.values))
    if bad.size:
        raise Refusal(
            Reason.NON_FINITE,
            f"{run_dir.resolve().name}: {tag} is {series.values[bad[0]]} at step {series.steps[bad[0]]} and at "
            f"{bad.size - 1} more points; look into the training before publishing it",
        )
    return series.values


def tenth(count: int) -> int:
    """A tenth of a number of points, at least one."""
    return max(1, count // 10)


def _mean_of_last_tenth(values: NDArray[np.float64]) -> float | None:
    """Mean over the points of the last tenth that have a number; None where there are none."""
    last = values[len(values) - tenth(len(values)) :]
    kept = last[~np.isnan(last)]
    return float(np.mean(kept)) if kept.size else None


def _seconds_to_walk(lengths: NDArray[np.float64], seconds: NDArray[np.float64]) -> float | None:
    """Start of the first tenth of the points in a row that are all long enough.

    A single long point does not count: episodes begin at random places of their time limit, so that those which end
    first do so at the limit.
    """
    windows = np.lib.stride_tricks.sliding_window_view(lengths >= WALKING_LENGTH, tenth(len(lengths)))
    starts = np.flatnonzero(windows.all(axis=1))
    return float(seconds[starts[0]]) if starts.size else None


def _seed(run_dir: Path) -> int:
    algo = read_json(run_dir / CONFIG_FILE).get("algo")
    seed = algo.get("seed") if isinstance(algo, dict) else None
    if type(seed) is not int:
        raise Refusal(Reason.DAMAGED_FILE, f"{CONFIG_FILE}: algo.seed is {seed!r}, not an integer; run it again")
    return seed
