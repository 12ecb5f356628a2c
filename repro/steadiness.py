"""Whether a run was steady over its window: its trend, and what its many points are worth.

Neighbouring ticks share a scheduler, a clock speed and a cache, so their rates are alike: a standard error that takes
the points of one run for independent is too small. The trend is therefore fitted to batch means, whose errors are
nearly independent once a batch is long against the correlation. Points of one run never count as n.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from repro.stats import CONFIDENCE

BATCHES, FEWEST_BATCHES = 10, 4
EFFECTIVE_PER_BATCH = 4.0  # effective points of a batch, so that the means of neighbouring batches hardly correlate
ROUNDING = 1e-9  # relative; what varies less is the rounding of times
TREND_LIMIT = 0.02  # a change over the window that moves its mean by 1 %


@dataclass(frozen=True)
class Steadiness:
    """How the rate behaved inside one window; None where there are too few points or nothing varied.

    Attributes:
        trend: change of the rate over the window as a share of its mean, from the least-squares line through the
            rates of consecutive batches, at most `BATCHES` and each of `EFFECTIVE_PER_BATCH` effective points.
        trend_low: lower end of its 95 % interval, Student t with two degrees of freedom less than batches.
        trend_high: upper end.
        autocorrelation: lag-1 correlation of the rates of neighbouring intervals about their own line over time.
        effective_points: independent intervals that would say as much as the `intervals` here,
            intervals (1 - r) / (1 + r) for lag-1 autocorrelation r, from 1 to `intervals`.
        intervals: intervals of the window.
    """

    trend: float | None
    trend_low: float | None
    trend_high: float | None
    autocorrelation: float | None
    effective_points: float | None
    intervals: int


def steadiness(steps: NDArray[np.int64], seconds: NDArray[np.float64]) -> Steadiness:
    """Judge one window.

    Args:
        steps: cumulative env steps of its points, ascending, `(P,)`.
        seconds: times of its points, ascending, `(P,)`.
    """
    intervals = len(steps) - 1
    times = seconds - seconds[0]
    with np.errstate(over="ignore"):  # of times that are nearly equal
        rates = np.diff(steps) / np.diff(times)
    correlation = None
    if np.isfinite(rates).all():
        correlation = autocorrelation(_line(_middles(times), rates)[1] / np.mean(rates))
    effective = float(intervals) if correlation is None else effective_points(intervals, correlation)
    count = min(BATCHES, int(effective / EFFECTIVE_PER_BATCH))
    trend, low, high = _trend(steps, times, count) if count >= FEWEST_BATCHES else (None, None, None)
    return Steadiness(trend, low, high, correlation, None if correlation is None else effective, intervals)


def autocorrelation(values: NDArray[np.float64]) -> float | None:
    """Lag-1 autocorrelation; None for fewer than three values, or where they vary by `ROUNDING` or less."""
    if len(values) < 3 or np.ptp(values) <= ROUNDING:
        return None
    deviations = values - np.mean(values)
    square = float(np.sum(deviations**2))
    return float(np.sum(deviations[1:] * deviations[:-1])) / square


def effective_points(count: int, correlation: float) -> float:
    """How many independent points carry as much about their mean as `count` of a first-order autoregression."""
    if correlation <= 0:
        return float(count)  # alternating errors cancel; that is no reason to count more points than there are
    return max(1.0, count * (1 - correlation) / (1 + correlation))


def trend_note(found: Steadiness) -> str | None:
    """One line where a run was still getting faster or slower beyond its own noise, else None."""
    if found.trend is None or found.trend_low is None or found.trend_high is None or abs(found.trend) < TREND_LIMIT:
        return None
    if found.trend_low <= 0 <= found.trend_high:
        return None
    way = "faster" if found.trend > 0 else "slower"
    return (
        f"still getting {way}: the rate changed by {found.trend:+.1%} over the window "
        f"(95 % interval {found.trend_low:+.1%} to {found.trend_high:+.1%})"
    )


def _trend(steps: NDArray[np.int64], times: NDArray[np.float64], count: int) -> tuple[float, float, float]:
    """Trend over the window as a share of its mean rate, and its interval, from `count` batches."""
    edges = np.linspace(0, len(steps) - 1, count + 1).round().astype(int)
    batches = np.diff(steps[edges]) / np.diff(times[edges])
    middles = _middles(times[edges])
    slope, residuals = _line(middles, batches)
    square = np.sum((middles - np.mean(middles)) ** 2)
    error = float(np.sqrt(np.sum(residuals**2) / (count - 2) / square))
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, count - 2)) * error
    scale = float(times[-1]) ** 2 / float(steps[-1] - steps[0])  # the window's length over its mean rate
    return scale * slope, scale * (slope - half), scale * (slope + half)


def _middles(times: NDArray[np.float64]) -> NDArray[np.float64]:
    return (times[1:] + times[:-1]) / 2


def _line(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """Slope of the least-squares line and the residuals about it."""
    centred = x - np.mean(x)
    square = float(np.sum(centred**2))
    slope = float(np.sum(centred * y)) / square if square > 0 else 0.0
    return slope, y - np.mean(y) - slope * centred
