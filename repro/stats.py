"""Intervals and verdicts over runs. The run is the unit of replication; n runs give n numbers, however long they are.

All intervals are Student t intervals of log values, exponentiated: rates are positive and their noise is relative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95

Verdict = Literal["regression", "improved", "no_regression", "suspicious", "insufficient_data"]


@dataclass(frozen=True)
class GroupStats:
    """One group of runs.

    Attributes:
        n: runs.
        mean: geometric mean.
        sd: sample standard deviation (n - 1), or None for one run.
        ci_low: lower end of the 95 % interval, or None for one run.
        ci_high: upper end, or None for one run.

    The mean is the centre of its interval on the log scale, and the ratio of two means is that of `welch_ratio`.
    It lies below the arithmetic mean by about sd² / (2 mean): 0.1 % where the runs scatter by 4 %.
    """

    n: int
    mean: float
    sd: float | None
    ci_low: float | None
    ci_high: float | None


@dataclass(frozen=True)
class Ratio:
    """How much larger b is than a.

    Attributes:
        ratio: ratio of geometric means, b over a.
        ci_low: lower end of its 95 % interval.
        ci_high: upper end.
        n: runs on the smaller side, or pairs.

    The geometric ratio is the centre of the interval on the log scale, so the estimate and its interval are of the
    same quantity; a ratio of arithmetic means differs from it by about half the difference of the squared spreads.
    """

    ratio: float
    ci_low: float
    ci_high: float
    n: int


def summarize(values: Sequence[float]) -> GroupStats:
    """Mean, spread and interval of one group.

    Raises:
        ValueError: if there is no value, or one is not finite and positive.
    """
    logs = _logs("values", values, at_least=1)
    n, centre = len(values), float(np.mean(logs))
    if n == 1:
        return GroupStats(1, float(values[0]), None, None, None)
    low, high = _interval(centre, _standard_error(logs), n - 1)
    return GroupStats(n, math.exp(centre), float(np.std(values, ddof=1)), low, high)


def welch_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """b relative to a, from independent runs with unequal variances: Welch's t on log values.

    Raises:
        ValueError: if a side has fewer than two values, or one is not finite and positive.
    """
    log_a, log_b = _logs("a", a, at_least=2), _logs("b", b, at_least=2)
    difference = float(np.mean(log_b) - np.mean(log_a))
    square_a, square_b = _standard_error(log_a) ** 2, _standard_error(log_b) ** 2
    error = math.sqrt(square_a + square_b)
    low, high = _interval(difference, error, _welch_freedom((square_a, square_b), (len(a), len(b))))
    return Ratio(math.exp(difference), low, high, min(len(a), len(b)))


def ratio_change(old: tuple[Sequence[float], Sequence[float]], new: tuple[Sequence[float], Sequence[float]]) -> Ratio:
    """How b / a changed, from the groups (a, b) of an old and a new session: Welch's t on log values.

    The log change is a sum of four independent means with signs, so their squared errors add up.

    Raises:
        ValueError: if a group has fewer than two values, or one is not finite and positive.
    """
    groups = {"old a": (1.0, old[0]), "old b": (-1.0, old[1]), "new a": (-1.0, new[0]), "new b": (1.0, new[1])}
    logs = [(sign, _logs(name, values, at_least=2)) for name, (sign, values) in groups.items()]
    change = sum(sign * float(np.mean(values)) for sign, values in logs)
    squares, counts = [_standard_error(values) ** 2 for _, values in logs], [len(values) for _, values in logs]
    low, high = _interval(change, math.sqrt(sum(squares)), _welch_freedom(squares, counts))
    return Ratio(math.exp(change), low, high, min(counts))


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """b relative to a, from runs taken in pairs: the t interval of the log ratio of each pair.

    Raises:
        ValueError: if there are fewer than two pairs, lengths differ, or a value is not finite and positive.
    """
    if len(a) != len(b):
        raise ValueError(f"pairs need equally many values, got {len(a)} and {len(b)}")
    ratios = _logs("b", b, at_least=2) - _logs("a", a, at_least=2)
    mean = float(np.mean(ratios))
    low, high = _interval(mean, _standard_error(ratios), len(a) - 1)
    return Ratio(math.exp(mean), low, high, len(a))


def pooled_spread(groups: Sequence[Sequence[float]]) -> float:
    """Standard deviation of log values within groups: squared deviations from each group's mean over all (n - 1).

    Raises:
        ValueError: if there is no group, one has fewer than two values, or a value is not finite and positive.
    """
    logs = [_logs("group", group, at_least=2) for group in groups]
    if not logs:
        raise ValueError("a spread needs at least one group")
    squares = sum(float(np.sum((group - np.mean(group)) ** 2)) for group in logs)
    return math.sqrt(squares / sum(len(group) - 1 for group in logs))


def verdict(ratio: float, lo: float | None, hi: float | None, margin: float) -> Verdict:
    """What a comparison says about a change, with the smallest change that matters.

    Args:
        ratio: new over old; 1 is no change.
        lo: lower end of the ratio's interval, None when there is none.
        hi: upper end, None when there is none.
        margin: relative loss that is tolerated, for example 0.05.

    Raises:
        ValueError: if a number is not finite, the interval does not hold the ratio, or the margin is not in [0, 1).
    """
    if not 0.0 <= margin < 1.0:
        raise ValueError(f"margin must be at least 0 and below 1, got {margin}")
    if lo is None or hi is None:
        return "insufficient_data"
    if not all(map(math.isfinite, (ratio, lo, hi))) or not lo <= ratio <= hi:
        raise ValueError(f"a ratio lies inside its finite interval, got {ratio} in [{lo}, {hi}]")
    if hi - 1.0 < -margin:
        return "regression"
    if lo - 1.0 > 0.0:
        return "improved"
    if lo - 1.0 > -margin:
        return "no_regression"
    if ratio - 1.0 < -margin or hi - 1.0 < 0.0:
        return "suspicious"
    return "insufficient_data"


def _logs(name: str, values: Sequence[float], at_least: int) -> NDArray[np.float64]:
    if len(values) < at_least:
        raise ValueError(f"{name} needs at least {at_least} values, got {len(values)}")
    array = np.asarray(values, dtype=np.float64)
    if not (np.isfinite(array) & (array > 0)).all():
        raise ValueError(f"{name} must be finite and positive, got {list(values)}")
    return np.log(array)


def _standard_error(values: NDArray[np.float64]) -> float:
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))


def _welch_freedom(squares: Sequence[float], counts: Sequence[int]) -> float:
    """Welch-Satterthwaite degrees of freedom from the squared standard errors; any number does without scatter."""
    total = sum(squares)
    if total == 0.0:
        return float(sum(counts) - len(counts))
    # Shares, so that tiny squares do not underflow.
    return 1.0 / sum((square / total) ** 2 / (n - 1) for square, n in zip(squares, counts, strict=True))


def _interval(centre: float, error: float, freedom: float) -> tuple[float, float]:
    """Student t interval of a log value, exponentiated."""
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, freedom)) * error
    return math.exp(centre - half), math.exp(centre + half)
