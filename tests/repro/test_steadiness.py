from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from repro.steadiness import TREND_LIMIT, Steadiness, autocorrelation, effective_points, steadiness, trend_note


def window(intervals: NDArray[np.float64]) -> Steadiness:
    """A window whose every interval takes so many seconds for 100 env steps."""
    seconds = np.concatenate([[0.0], np.cumsum(intervals)])
    return steadiness(100 * np.arange(len(seconds), dtype=np.int64), seconds)


def correlated(generator: np.random.Generator, count: int, correlation: float) -> NDArray[np.float64]:
    """A stationary first-order autoregression of unit variance."""
    values = generator.standard_normal(count)
    for i in range(1, count):
        values[i] = correlation * values[i - 1] + math.sqrt(1 - correlation**2) * values[i]
    return values


def test_autocorrelation_by_hand() -> None:
    # Mean 2, deviations -1 0 1 0: products 0 + 0 + 0, then -1 -1 1 1: 1 - 1 + 1 of squares 4.
    assert autocorrelation(np.array([1.0, 2.0, 3.0, 2.0])) == 0.0
    assert autocorrelation(np.array([1.0, 1.0, 3.0, 3.0])) == 0.25
    assert autocorrelation(np.array([1.0, 3.0, 1.0, 3.0])) == -0.75


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 2.0], [2.0, 2.0, 2.0]])
def test_what_does_not_vary_has_no_autocorrelation(values: list[float]) -> None:
    assert autocorrelation(np.array(values)) is None


@pytest.mark.parametrize(
    ("count", "correlation", "points"), [(100, 0.0, 100.0), (100, 0.5, 100 / 3), (100, -0.5, 100.0), (9, 0.99, 1.0)]
)
def test_effective_points_by_hand(count: int, correlation: float, points: float) -> None:
    assert effective_points(count, correlation) == pytest.approx(points)


def test_a_steady_run_has_no_trend_and_nothing_to_correlate() -> None:
    found = window(np.full(40, 0.25))
    assert (found.trend, found.trend_low, found.trend_high) == (0.0, 0.0, 0.0)
    assert (found.autocorrelation, found.effective_points, found.intervals) == (None, None, 40)
    assert trend_note(found) is None


def test_the_trend_is_that_of_a_line_through_the_batches() -> None:
    generator = np.random.default_rng(3)
    intervals = 0.05 * np.exp(0.05 * generator.standard_normal(100) - np.linspace(0, 0.2, 100))
    found = window(intervals)
    times = np.concatenate([[0.0], np.cumsum(intervals)])[::10]
    batches = 1000 / np.diff(times)
    line = stats.linregress((times[1:] + times[:-1]) / 2, batches)
    scale = times[-1] ** 2 / 10_000
    half = stats.t.ppf(0.975, 8) * line.stderr
    assert found.trend == pytest.approx(scale * line.slope)
    assert (found.trend_low, found.trend_high) == pytest.approx(
        (scale * (line.slope - half), scale * (line.slope + half))
    )


@pytest.mark.parametrize(("grows", "way"), [(0.2, "faster"), (-0.2, "slower")])
def test_a_run_that_still_changes_is_noted(grows: float, way: str) -> None:
    generator = np.random.default_rng(5)
    rates = (1 + grows * (np.arange(150) / 150 - 0.5)) * np.exp(0.02 * generator.standard_normal(150))
    found = window(1 / rates)
    assert found.trend == pytest.approx(grows, abs=0.03)
    assert (trend_note(found) or "").startswith(f"still getting {way}: the rate changed by {found.trend:+.1%} over the")


def test_a_change_too_small_to_matter_is_not_noted() -> None:
    assert trend_note(Steadiness(0.9 * TREND_LIMIT, 0.01, 0.03, None, None, 100)) is None
    assert trend_note(Steadiness(0.5, -0.1, 1.1, None, None, 100)) is None  # inside the noise
    assert trend_note(Steadiness(0.5, 0.1, 0.9, None, None, 100)) is not None


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
def test_correlated_noise_is_no_trend(correlation: float) -> None:
    """The error of a line through 150 single intervals would call half of these runs changing at 0.8."""
    generator = np.random.default_rng(7)
    found = [window(0.05 * np.exp(0.05 * correlated(generator, 150, correlation))) for _ in range(400)]
    false = sum(one.trend_low is not None and not one.trend_low <= 0 <= (one.trend_high or 0.0) for one in found)
    assert false / 400 < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)


def test_too_few_effective_points_have_no_trend() -> None:
    assert window(np.full(15, 0.1)).trend is None
    assert window(np.full(16, 0.1)).trend is not None
    slow = window(0.05 * np.exp(0.05 * correlated(np.random.default_rng(1), 40, 0.95)))
    assert slow.trend is None and slow.effective_points is not None and slow.effective_points < 16


@given(st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=60), st.integers(-9, 9))
def test_the_unit_of_time_does_not_matter(intervals: list[float], exponent: int) -> None:
    one = window(np.array(intervals))
    assert window(2.0**exponent * np.array(intervals)) == one  # powers of two round alike
    if one.effective_points is not None:
        assert 1.0 <= one.effective_points <= one.intervals


def test_times_too_close_for_rates_give_nothing() -> None:
    found = steadiness(np.array([0, 2**40, 2**41, 2**42], dtype=np.int64), np.array([0.0, 5e-324, 1e-323, 1.0]))
    assert (found.trend, found.autocorrelation) == (None, None)
