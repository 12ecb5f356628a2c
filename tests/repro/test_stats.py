from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from repro.stats import Ratio, Verdict, paired_ratio, pooled_spread, summarize, verdict, welch_ratio

# The published single-GPU and two-GPU runs with local pools of 32 cores, env steps/s.
LOCAL_32 = [48_057.33, 51_036.37, 51_488.87]
DUAL_32 = [107_503.16, 109_619.53, 108_815.94]

rates = st.floats(min_value=1e-3, max_value=1e9)
groups = st.lists(rates, min_size=2, max_size=8)


def test_mean_and_sample_deviation_of_the_published_group() -> None:
    group = summarize(LOCAL_32)
    assert group.n == 3
    assert group.mean == pytest.approx((48_057.33 * 51_036.37 * 51_488.87) ** (1 / 3), rel=1e-12)
    assert group.sd == pytest.approx(1_864.36, abs=0.01)


def test_the_ratio_of_two_means_is_the_ratio() -> None:
    # The arithmetic means of these sides are equal, so they would contradict a ratio of 0.8.
    a, b = [100.0, 100.0], [40.0, 160.0]
    assert summarize(b).mean == pytest.approx(80.0)
    assert summarize(b).mean / summarize(a).mean == pytest.approx(welch_ratio(a, b).ratio, rel=1e-12)
    assert summarize(DUAL_32).mean / summarize(LOCAL_32).mean == pytest.approx(welch_ratio(LOCAL_32, DUAL_32).ratio)


def test_interval_of_a_group_by_hand() -> None:
    # Logs 1, 2, 3: mean 2, standard deviation 1; t(0.975, 2) = 4.302653, half-width 4.302653 / sqrt(3) = 2.484138.
    group = summarize([math.exp(1), math.exp(2), math.exp(3)])
    assert group.ci_low == pytest.approx(math.exp(2 - 2.484138), rel=1e-6)
    assert group.ci_high == pytest.approx(math.exp(2 + 2.484138), rel=1e-6)


def test_interval_of_a_group_equals_scipy() -> None:
    expected = scipy_stats.ttest_1samp(np.log(DUAL_32), 0.0).confidence_interval(0.95)
    group = summarize(DUAL_32)
    assert (group.ci_low, group.ci_high) == pytest.approx((math.exp(expected.low), math.exp(expected.high)), rel=1e-9)


def test_one_run_has_no_spread() -> None:
    group = summarize([123.0])
    assert (group.n, group.mean, group.sd, group.ci_low, group.ci_high) == (1, 123.0, None, None, None)


def test_welch_ratio_of_the_published_groups() -> None:
    found = welch_ratio(LOCAL_32, DUAL_32)
    assert found.n == 3
    assert found.ratio == pytest.approx(2.165, abs=0.001)  # the documents' ratio of arithmetic means is 2.1645
    assert (found.ci_low, found.ci_high) == pytest.approx((1.99, 2.36), abs=0.005)


@pytest.mark.parametrize("b", [DUAL_32, DUAL_32[:2], [*DUAL_32, 90_000.0, 120_000.0]])
def test_welch_ratio_equals_scipy(b: list[float]) -> None:
    expected = scipy_stats.ttest_ind(np.log(b), np.log(LOCAL_32), equal_var=False).confidence_interval(0.95)
    found = welch_ratio(LOCAL_32, b)
    assert (found.ci_low, found.ci_high) == pytest.approx((math.exp(expected.low), math.exp(expected.high)), rel=1e-9)


def test_welch_ratio_by_hand() -> None:
    # Logs 0, 2 against 1, 3: difference 1, both squared errors 1, so error sqrt(2) at 2 degrees of freedom.
    found = welch_ratio([1.0, math.exp(2)], [math.exp(1), math.exp(3)])
    half = 4.302653 * math.sqrt(2)
    assert found.ratio == pytest.approx(math.e)
    assert (found.ci_low, found.ci_high) == pytest.approx((math.exp(1 - half), math.exp(1 + half)), rel=1e-5)


def test_paired_ratio_equals_scipy_and_uses_the_pairs() -> None:
    a, b = [100.0, 200.0, 400.0], [111.0, 219.0, 442.0]
    expected = scipy_stats.ttest_rel(np.log(b), np.log(a)).confidence_interval(0.95)
    found = paired_ratio(a, b)
    assert (found.ci_low, found.ci_high) == pytest.approx((math.exp(expected.low), math.exp(expected.high)), rel=1e-9)
    assert found.ratio == pytest.approx((111 / 100 * 219 / 200 * 442 / 400) ** (1 / 3))
    assert found.ci_high - found.ci_low < 0.1 * (welch_ratio(a, b).ci_high - welch_ratio(a, b).ci_low)


def test_equal_values_give_a_point() -> None:
    assert welch_ratio([2.0, 2.0], [3.0, 3.0, 3.0]) == Ratio(*[pytest.approx(1.5)] * 3, n=2)
    assert paired_ratio([2.0, 4.0], [3.0, 6.0]) == Ratio(*[pytest.approx(1.5)] * 3, n=2)


@pytest.mark.parametrize("compare", [welch_ratio, paired_ratio])
@pytest.mark.parametrize("bad", [[1.0], [], [1.0, 0.0], [1.0, -2.0], [1.0, math.nan], [1.0, math.inf]])
def test_comparisons_refuse_what_has_no_interval(
    compare: Callable[[list[float], list[float]], Ratio], bad: list[float]
) -> None:
    good = [1.0] * max(len(bad), 1)
    with pytest.raises(ValueError, match=r"needs at least 2|finite and positive|equally many"):
        compare(bad, good)
    with pytest.raises(ValueError, match=r"needs at least 2|finite and positive|equally many"):
        compare(good, bad)


def test_pairs_need_equal_lengths() -> None:
    with pytest.raises(ValueError, match="equally many values, got 2 and 3"):
        paired_ratio([1.0, 2.0], [1.0, 2.0, 3.0])


@pytest.mark.parametrize("bad", [[], [0.0], [1.0, -1.0], [math.nan]])
def test_a_group_refuses_values_without_a_logarithm(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="values"):
        summarize(bad)


@pytest.mark.parametrize(
    ("ratio", "lo", "hi", "expected"),
    [
        (0.90, 0.88, 0.94, "regression"),
        (1.10, 1.01, 1.20, "improved"),
        (1.00, 0.97, 1.03, "no_regression"),
        (0.97, 0.96, 0.98, "no_regression"),  # a certain loss, inside the margin
        (0.93, 0.80, 1.05, "suspicious"),  # the estimate is beyond the margin
        (0.96, 0.93, 0.99, "suspicious"),  # a loss for certain, perhaps beyond the margin
        (1.00, 0.90, 1.10, "insufficient_data"),
        (0.96, 0.94, 1.00, "insufficient_data"),
    ],
)
def test_verdicts(ratio: float, lo: float, hi: float, expected: str) -> None:
    assert verdict(ratio, lo, hi, margin=0.05) == expected


def test_verdict_at_the_edges_of_its_comparisons() -> None:
    # All numbers are exact in binary: every bound is strict.
    assert verdict(0.875, 0.75, 0.875, margin=0.125) == "suspicious"  # hi = -m is no regression yet
    assert verdict(1.0, 1.0, 1.0, margin=0.125) == "no_regression"  # lo = 0 is not improved
    assert verdict(0.9375, 0.875, 1.0, margin=0.125) == "insufficient_data"  # lo = -m, hi = 0
    assert verdict(0.5, 0.5, 0.5, margin=0.0) == "regression"
    assert verdict(1.0, 1.0, 1.0, margin=0.0) == "insufficient_data"


def test_verdict_without_interval() -> None:
    assert verdict(0.5, None, None, margin=0.05) == "insufficient_data"


@pytest.mark.parametrize(
    ("ratio", "lo", "hi", "margin"),
    [
        (1.2, 0.9, 1.1, 0.05),
        (math.nan, 0.9, 1.1, 0.05),
        (1.0, 0.9, math.inf, 0.05),
        (1.0, 0.9, 1.1, -0.1),
        (1, 1, 1, 1),
    ],
)
def test_verdict_refuses_nonsense(ratio: float, lo: float, hi: float, margin: float) -> None:
    with pytest.raises(ValueError, match=r"ratio lies inside|margin must be"):
        verdict(ratio, lo, hi, margin)


@given(a=groups, b=groups, scale=st.floats(min_value=0.01, max_value=100.0))
def test_ratio_properties(a: list[float], b: list[float], scale: float) -> None:
    found, back = welch_ratio(a, b), welch_ratio(b, a)
    scaled = welch_ratio(a, [scale * value for value in b])
    assert found.ci_low <= found.ratio <= found.ci_high
    assert verdict(found.ratio, found.ci_low, found.ci_high, 0.05) in get_args(Verdict)
    for forward, backward in ((found.ratio, back.ratio), (found.ci_low, back.ci_high), (found.ci_high, back.ci_low)):
        assert math.log(forward) == pytest.approx(-math.log(backward), abs=1e-9, rel=1e-9)
    assert math.log(scaled.ratio) == pytest.approx(math.log(scale) + math.log(found.ratio), abs=1e-9, rel=1e-9)


@given(values=groups)
def test_group_interval_holds_the_geometric_mean(values: list[float]) -> None:
    group = summarize(values)
    geometric = math.exp(sum(map(math.log, values)) / len(values))
    assert group.ci_low is not None
    assert group.ci_high is not None
    assert group.ci_low <= geometric * (1 + 1e-9)
    assert group.ci_high >= geometric * (1 - 1e-9)


@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.parametrize("compare", [welch_ratio, paired_ratio])
def test_intervals_cover_what_they_promise(compare: Callable[[list[float], list[float]], Ratio], n: int) -> None:
    draws, true_ratio = 600, 1.05
    generator = np.random.default_rng(20)
    a = 50_000.0 * np.exp(0.04 * generator.standard_normal((draws, n)))
    b = 50_000.0 * true_ratio * np.exp(0.04 * generator.standard_normal((draws, n)))
    found = [compare(list(one), list(other)) for one, other in zip(a, b, strict=True)]
    coverage = sum(ratio.ci_low <= true_ratio <= ratio.ci_high for ratio in found) / draws
    assert 0.93 < coverage < 0.98  # three standard errors of 600 draws are 0.027; a bootstrap of means covers 0.87


def test_pooled_spread_by_hand_and_refusals() -> None:
    # Logs 0, 2 and 5, 5, 5: squared deviations 2 over 1 + 2 degrees of freedom.
    assert pooled_spread([[1.0, math.exp(2)], [math.exp(5)] * 3]) == pytest.approx(math.sqrt(2 / 3))
    assert pooled_spread([LOCAL_32]) == pytest.approx(float(np.std(np.log(LOCAL_32), ddof=1)))
    for bad in ([], [[1.0]], [[1.0, 0.0]]):
        with pytest.raises(ValueError, match=r"at least|finite and positive"):
            pooled_spread(bad)


def test_a_ratio_of_scipys_standard_normal_quantiles() -> None:
    """Group intervals against t intervals computed by scipy from its own quantiles, for every published size."""
    for n in (2, 3, 5, 10):
        logs = scipy_stats.norm.ppf((np.arange(n) + 0.5) / n) * 0.02 + math.log(5e4)
        expected = scipy_stats.t.interval(0.95, n - 1, loc=logs.mean(), scale=scipy_stats.sem(logs))
        group = summarize(list(np.exp(logs)))
        assert (group.ci_low, group.ci_high) == pytest.approx(tuple(np.exp(expected)), rel=1e-9)


@given(pairs=st.lists(st.tuples(rates, rates), min_size=2, max_size=8))
def test_pairs_equal_scipys_related_samples(pairs: list[tuple[float, float]]) -> None:
    a, b = ([pair[side] for pair in pairs] for side in (0, 1))
    differences = np.log(b) - np.log(a)
    found = paired_ratio(a, b)
    assert math.log(found.ratio) == pytest.approx(differences.mean(), abs=1e-9)
    if np.ptp(differences) > 1e-6:
        expected = scipy_stats.ttest_rel(np.log(b), np.log(a)).confidence_interval(0.95)
        if max(map(abs, (expected.low, expected.high))) < 700:  # within floats
            assert (math.log(found.ci_low), math.log(found.ci_high)) == pytest.approx(
                (expected.low, expected.high), rel=1e-6, abs=1e-6
            )
