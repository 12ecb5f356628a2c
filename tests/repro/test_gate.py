"""The gate: what may be compared, every verdict, and how often it is wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats as scipy_stats
from session_builder import COMPARISON, make_host, matrix_text

from repro.comparable import Side, host_noise, rates_obstacle, refuse_incomparable, remarks
from repro.errors import UsageError
from repro.gate import METRICS, Finding, Gate, compare_number, judge, judge_probes
from repro.gate_command import gate_lines, verdict_line
from repro.host import Host
from repro.matrix import parse_matrix
from repro.result import CellResult, ComparisonResult, ProbeResult, Result
from repro.text import ratio

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "ci.md"
DRAWS, NOISE, MARGIN = 10_000, 0.02, 0.05
STEADY = [0.950, 0.955, 0.945]
VERDICTS = ("regression", "suspicious", "insufficient_data", "no_regression", "improved")


def gpu_text(cases: Sequence[str] = ("n1",), extra: str = "", **options: Any) -> str:
    """TOML of a matrix that is no smoke."""
    text = matrix_text({case: {} for case in cases}, extra=extra, **options)
    return text.replace("smoke = true", "smoke = false").replace("workers = 1\n", "workers = 1\ngpus = [0]\n")


def cell(case: str, repeat: int, **changes: Any) -> CellResult:
    facts: dict[str, Any] = {name: 1.0 for name in METRICS}
    facts |= {"id": f"{case}_r{repeat}", "case": case, "repeat": repeat, "status": "measured", "reason": None}
    return CellResult(**facts | {"world_size": 1, "run": None} | changes)


def side(
    name: str,
    shares: Mapping[str, Sequence[float | None]],
    *,
    ceilings: Sequence[float] = (1000.0, 1001.0, 999.0, 1000.0, 1000.0),
    text: str | None = None,
    host: Host | None = None,
    probes: Sequence[ProbeResult] = (),
    settings: Mapping[str, Any] | None = None,
    broken: Sequence[str] = (),
) -> Side:
    """A report with these shares of the ceiling by case; rates are shares times `ceilings`."""
    cases = list(shares)
    matrix = parse_matrix(text or gpu_text(cases, "ceiling = true\n"), "m.toml")
    cells = [
        cell(
            case,
            repeat,
            ceiling_share=share,
            steps_per_second=(share or 0.95) * top,
            status="failed" if f"{case}_r{repeat}" in broken else "measured",
        )
        for case, values in shares.items()
        for repeat, (share, top) in enumerate(zip(values, ceilings, strict=False), start=1)
    ]
    comparisons = tuple(
        ComparisonResult(
            name=item.name, metric="steps_per_second", ratio=1.0, ci_low=None, ci_high=None, n=1, verdict="improved"
        )
        for item in matrix.comparisons
    )
    result = Result(
        schema_version=1,
        matrix="m",
        smoke=matrix.smoke,
        host=host or make_host(gpu_count=1)[0],
        cells=tuple(cells),
        groups=(),
        comparisons=comparisons,
        probes=tuple(probes),
        learning=(),
        verdict="measured",
    )
    flat = dict(settings or {"algo.num_envs": 2048})
    return Side(name, "abc1234", matrix, result, dict.fromkeys(cases, flat), frozenset({name}))


def judged(base: Side, current: Side, max_drop: float = MARGIN) -> Gate:
    return judge(base, current, max_drop)


def verdicts(gate: Gate) -> dict[str, str]:
    return {row.name: row.verdict for row in gate.rows}


def scaled(values: Sequence[float], factor: float) -> list[float | None]:
    return [value * factor for value in values]


# ---- verdicts


@pytest.mark.parametrize(
    ("factor", "verdict", "code"),
    [(0.90, "regression", 1), (0.95, "suspicious", 0), (1.0, "no_regression", 0), (1.04, "improved", 0)],
)
def test_a_share_is_judged_by_the_interval_of_its_change(factor: float, verdict: str, code: int) -> None:
    gate = judged(side("a", {"n1": STEADY}), side("b", {"n1": scaled(STEADY, factor)}))
    share = gate.rows[0]
    assert share.name == "n1: share of the physics ceiling"
    assert (share.verdict, gate.speed, gate.exit_code, share.n) == (verdict, verdict, code, (3, 3))
    logs = np.log(STEADY)
    expected = scipy_stats.ttest_ind(logs + math.log(factor), logs, equal_var=False).confidence_interval()
    assert share.ratio == pytest.approx(factor)
    assert share.interval == pytest.approx((math.exp(expected.low), math.exp(expected.high)))


def test_undecided_is_said_and_does_not_fail() -> None:
    gate = judged(side("a", {"n1": STEADY}), side("b", {"n1": scaled(STEADY, 0.95)}))
    assert verdict_line(gate).startswith("gate passed, but UNDECIDED: probes: the matrix names none; speed: suspicious")
    (share, *_) = gate.findings()["speed"]
    assert share.state == "undecided" and share.message.startswith("looks lower, undecided: -5.0 % [")


def test_one_run_has_no_interval_and_decides_nothing() -> None:
    gate = judged(side("a", {"n1": [0.95]}), side("b", {"n1": [0.60]}))
    share = gate.rows[0]
    assert (share.verdict, share.interval, share.n) == ("insufficient_data", None, (1, 1))
    assert share.change == "-36.8 % [no interval]" and gate.exit_code == 0
    assert "UNDECIDED" in verdict_line(gate)


def test_faster_is_said_only_beyond_the_noise() -> None:
    noisy = judged(side("a", {"n1": [0.90, 0.95, 1.00]}), side("b", {"n1": [0.92, 0.97, 1.02]}))
    assert noisy.rows[0].ratio is not None and noisy.rows[0].ratio > 1.02
    assert "improved" not in "\n".join(gate_lines(noisy)) and "higher" not in noisy.rows[0].sentence(MARGIN)


def test_the_worst_number_is_the_verdict_on_speed() -> None:
    base = side("a", {"n1": STEADY, "n2": STEADY})
    gate = judged(base, side("b", {"n1": scaled(STEADY, 1.1), "n2": scaled(STEADY, 0.9)}))
    assert verdicts(gate)["n1: share of the physics ceiling"] == "improved"
    assert (gate.speed, gate.exit_code) == ("regression", 1)


def test_the_limit_is_the_users() -> None:
    base, current = side("a", {"n1": STEADY}), side("b", {"n1": scaled(STEADY, 0.9)})
    assert judged(base, current, 0.05).exit_code == 1 and judged(base, current, 0.2).exit_code == 0


# ---- ratios within a session

RATIO = gpu_text(("slow", "fast"), COMPARISON)
SLOW, FAST = [100.0, 102.0, 98.0], [200.0, 203.0, 197.0]


def ratio_side(name: str, fast: Sequence[float], text: str = RATIO) -> Side:
    """A report without ceilings, whose rates are 0.95 times these."""
    made = side(name, {"slow": [None] * 3, "fast": [None] * 3}, text=text)
    rates = {"slow": SLOW, "fast": fast}
    cells = tuple(
        one.model_copy(update={"steps_per_second": rates[one.case][one.repeat - 1]}) for one in made.result.cells
    )
    result = made.result.model_copy(update={"cells": cells})
    return Side(name, made.source, made.matrix, result, made.settings, made.events)


def test_a_ratio_is_judged_by_the_errors_of_all_four_groups() -> None:
    gate = judged(ratio_side("a", FAST), ratio_side("b", [value * 0.9 for value in FAST]))
    row = next(row for row in gate.rows if row.name == "speedup: fast / slow")
    # By hand: the change is ln 0.9; errors are s²/3 of each group, two groups of each kind.
    squares = [float(np.var(np.log(group), ddof=1)) / 3 for group in (SLOW, FAST) for _ in range(2)]
    freedom = sum(squares) ** 2 / sum(square**2 / 2 for square in squares)
    half = scipy_stats.t.ppf(0.975, freedom) * math.sqrt(sum(squares))
    assert row.ratio == pytest.approx(0.9)
    assert row.interval == pytest.approx((0.9 * math.exp(-half), 0.9 * math.exp(half)))
    assert (row.base, row.current, row.verdict, gate.exit_code) == (ratio(2.0), ratio(1.8), "regression", 1)


def test_a_ratio_of_pairs_is_judged_by_its_pairs() -> None:
    text = RATIO.replace('"welch"', '"paired"')
    slower = [value * 0.9 for value in FAST]
    gate = judged(ratio_side("a", FAST, text), ratio_side("b", slower, text))
    row = next(row for row in gate.rows if row.name == "speedup: fast / slow")
    pairs = [np.log(np.divide(fast, SLOW)) for fast in (FAST, slower)]
    expected = scipy_stats.ttest_ind(pairs[1], pairs[0], equal_var=False).confidence_interval()
    assert row.interval == pytest.approx((math.exp(expected.low), math.exp(expected.high)))


def test_ratios_are_judged_where_rates_are_not() -> None:
    gate = judged(ratio_side("a", FAST), ratio_side("b", FAST))
    assert verdicts(gate) == {
        "slow: env steps/s": "not_judged",
        "fast: env steps/s": "not_judged",
        "speedup: fast / slow": "no_regression",
    }


# ---- what may be compared


def test_rates_are_judged_between_equal_hosts_and_the_ceiling_never() -> None:
    gate = judged(side("a", {"n1": STEADY}), side("b", {"n1": scaled(STEADY, 0.9)}))
    assert verdicts(gate) == {
        "n1: share of the physics ceiling": "regression",
        "n1: env steps/s": "regression",
        "n1: physics ceiling, env steps/s": "not_judged",
    }


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"cpu_model": "Another CPU"}, "CPU model"),
        ({"physical_cores": 2}, "physical cores"),
        ({"allowed_cpus": (0, 1)}, "allowed CPUs"),
        ({"cgroup_cpus": 2.0}, "CPU limit of the control group"),
        ({"gpus": ()}, "GPUs"),
        ({"visible_gpus": ()}, "visible GPUs"),
    ],
)
def test_another_class_of_host_has_its_share_judged_and_not_its_rate(changes: dict[str, Any], what: str) -> None:
    current = side("b", {"n1": scaled(STEADY, 0.9)}, host=make_host(gpu_count=1, **changes)[0])
    gate = judged(side("a", {"n1": STEADY}), current)
    rate = gate.rows[1]
    assert rate.verdict == "not_judged" and rate.reason.startswith(f"another class of host: {what} ")
    assert (rate.change, gate.rows[0].verdict) == ("\N{EN DASH}", "regression")


def test_ids_and_versions_are_no_class_of_host_but_are_said() -> None:
    base, current = side("a", {"n1": STEADY}), side("b", {"n1": STEADY})
    host = base.result.host
    gpus = tuple(gpu.model_copy(update={"uuid": "GPU-other"}) for gpu in host.gpus)
    other = host.model_copy(update={"gpus": gpus, "driver": "601.0", "versions": host.versions | {"torch": "2.14.0"}})
    moved = side("b", {"n1": STEADY}, host=other)
    assert rates_obstacle(base, current) is None and rates_obstacle(base, moved) is None
    assert remarks(base, moved) == ["driver 600.1, now 601.0", "torch 2.13.0, now 2.14.0"]


def test_what_a_report_says_never_begins_a_line() -> None:
    host = make_host(gpu_count=1, driver="601\n::add-mask::x")[0]
    lines = "\n".join(gate_lines(judged(side("a", {"n1": STEADY}), side("b", {"n1": STEADY}, host=host)))).splitlines()
    assert "also: driver 600.1, now 601 ::add-mask::x" in lines


def test_a_host_that_moved_between_the_sessions_is_not_steady() -> None:
    base = side("a", {"n1": STEADY})
    drifted = side("b", {"n1": STEADY}, ceilings=[800.0, 801.0, 799.0])
    # By hand: logs lie about two values, ln 0.8 apart, three each: half of it times sqrt(6/5).
    assert host_noise(base, drifted) == pytest.approx(-math.log(0.8) / 2 * math.sqrt(6 / 5), rel=1e-3)
    gate = judged(base, drifted)
    assert gate.rows[1].reason == "the host was not steady: its physics ceilings scatter by 12.2%, the limit is 5%"
    assert (gate.rows[0].verdict, gate.exit_code) == ("no_regression", 0)


@pytest.mark.parametrize(
    ("text", "settings", "what"),
    [
        (("iterations = 40", "iterations = 41"), None, "iterations is 40 in the baseline a, 41 in b"),
        (('task = "g1_walk_flat"', 'task = "other"'), None, 'task is "g1_walk_flat" in the baseline a, "other" in b'),
        (('algo = "sac"', 'algo = "flashsac"'), None, 'algo is "sac" in the baseline a, "flashsac" in b'),
        (("ceiling = true", 'ceiling = true\noverrides = ["a=1"]'), None, 'overrides is [] in the baseline a, ["a=1"]'),
        (("workers = 1", "workers = 2"), None, "workers of n1 is 1 in the baseline a, 2 in b"),
        (("gpus = [0]", "gpus = [1]"), None, "gpus of n1 is [0] in the baseline a, [1] in b"),
        (("environment = {", 'environment = { A = "1"'), None, 'environment of n1 is {} in the baseline a, {"A": "1"}'),
        (None, {"env.physics_profile": "fast"}, 'env.physics_profile of n1 is "exact" in the baseline a, "fast" in b'),
    ],
)
def test_other_work_is_refused_and_the_setting_named(
    text: tuple[str, str] | None, settings: dict[str, Any] | None, what: str
) -> None:
    own = gpu_text(("n1",), "ceiling = true\n")
    changed = own if text is None else own.replace(*text)
    base = side("a", {"n1": STEADY}, text=own, settings={"env.physics_profile": "exact"} if settings else None)
    current = side("b", {"n1": STEADY}, text=changed, settings=settings)
    assert settings or changed != own
    with pytest.raises(UsageError, match=f"^not comparable: {re.escape(what)}"):
        refuse_incomparable(base, current)


def test_repeats_and_names_are_not_the_work_and_new_settings_are_said() -> None:
    own = gpu_text(("n1",), "ceiling = true\n")
    base = side("a", {"n1": STEADY}, text=own)
    other = own.replace("repeats = 1", "repeats = 5").replace('name = "toy"', 'name = "mine"')
    current = side("b", {"n1": [*STEADY, 0.951, 0.949]}, text=other, settings={"algo.num_envs": 2048, "env.new": 1})
    gate = judged(base, current)
    assert gate.rows[0].n == (3, 5) and gate.remarks == ("settings of this report alone: env.new",)


def test_where_a_run_lies_is_not_the_work() -> None:
    base = side("a", {"n1": STEADY}, settings={"training.log_dir": "runs/n1_r1", "env.cpu_ids": [0, 1]})
    current = side("b", {"n1": STEADY}, settings={"training.log_dir": "runs/mine_n1_r1", "env.cpu_ids": [2, 3]})
    refuse_incomparable(base, current)


def test_another_comparison_of_the_same_name_is_refused() -> None:
    swapped = RATIO.replace('numerator = "fast"\ndenominator = "slow"', 'numerator = "slow"\ndenominator = "fast"')
    assert swapped != RATIO
    with pytest.raises(UsageError, match="not comparable: comparison speedup is "):
        refuse_incomparable(ratio_side("a", FAST), ratio_side("b", FAST, swapped))


def test_smoke_and_learning_and_the_same_runs_are_refused() -> None:
    good = side("a", {"n1": STEADY})
    text = matrix_text({"n1": {}})
    smoke = side("b", {"n1": STEADY}, text=text)
    for pair in ((good, smoke), (smoke, good)):
        with pytest.raises(UsageError, match="b is a smoke report"):
            refuse_incomparable(*pair)
    with pytest.raises(UsageError, match="c is a learning report"):
        refuse_incomparable(good, side("c", {"n1": STEADY}, text=gpu_text(extra="learning = true\nceiling = true\n")))
    with pytest.raises(UsageError, match="a and a hold the same runs"):
        refuse_incomparable(good, good)


def test_nothing_to_judge_is_no_success() -> None:
    with pytest.raises(UsageError, match="no number of b can be judged: n1: env steps/s: not both reports have a"):
        judged(side("a", {"n1": [None] * 3}), side("b", {"n1": [None] * 3}))


# ---- what is missing


def test_a_case_or_number_that_vanished_fails() -> None:
    base = side("a", {"n1": STEADY, "n2": STEADY})
    gate = judged(base, side("b", {"n1": STEADY}))
    assert verdicts(gate)["n2: share of the physics ceiling"] == verdicts(gate)["n2: env steps/s"] == "vanished"
    assert (gate.speed, gate.exit_code) == ("vanished", 1)
    without = side("b", {"n1": [None] * 3, "n2": STEADY})
    assert verdicts(judged(base, without))["n1: share of the physics ceiling"] == "vanished"


def changed_cells(of: Side, **values: Any) -> Side:
    """A side all of whose runs have these numbers."""
    cells = tuple(one.model_copy(update=values) for one in of.result.cells)
    return replace(of, result=of.result.model_copy(update={"cells": cells}))


def test_every_number_of_a_run_can_vanish() -> None:
    assert {"physics_fraction", "exposed_ms", "learner_cycle_ms", "startup_seconds"} < set(METRICS)
    base, less = side("a", {"n1": STEADY}), changed_cells(side("b", {"n1": STEADY}), exposed_ms=None)
    gate = judged(base, less)
    assert verdicts(gate)["n1: exposed_ms"] == "vanished" and gate.exit_code == 1
    assert "n1: exposed_ms" not in verdicts(judged(less, base))


def test_a_number_that_is_not_above_zero_vanishes_too() -> None:
    base = changed_cells(side("a", {"n1": STEADY}), exposed_ms=0.0)
    gate = judged(base, changed_cells(side("b", {"n1": STEADY}), exposed_ms=None))
    assert verdicts(gate)["n1: exposed_ms"] == "vanished" and gate.exit_code == 1


def test_a_trend_that_too_noisy_a_run_does_not_have_is_no_loss() -> None:
    base = changed_cells(side("a", {"n1": STEADY}), trend=-0.04, trend_ci_low=-0.2)
    noise = ("trend", "trend_ci_low", "trend_ci_high", "autocorrelation", "effective_points")
    noisy = changed_cells(side("b", {"n1": STEADY}), **dict.fromkeys(noise))
    assert judged(base, noisy).exit_code == 0


def test_a_comparison_that_vanished_fails() -> None:
    gate = judged(ratio_side("a", FAST), ratio_side("b", FAST, RATIO.replace(COMPARISON, "")))
    assert verdicts(gate)["speedup: fast / slow"] == "vanished" and gate.exit_code == 1


def test_what_only_the_report_has_is_not_judged() -> None:
    gate = judged(side("a", {"n1": STEADY}), side("b", {"n1": STEADY, "n2": scaled(STEADY, 0.5)}))
    assert verdicts(gate)["n2: share of the physics ceiling"] == "not_judged" and gate.exit_code == 0
    assert gate.rows[-1].reason == "the baseline has none"


def test_an_incomplete_report_is_4_even_where_it_is_slower() -> None:
    current = side("b", {"n1": scaled(STEADY, 0.5)}, broken=["n1_r3"])
    gate = judged(side("a", {"n1": STEADY}), current)
    assert (gate.speed, gate.exit_code, gate.missing) == ("regression", 4, ("n1_r3 failed",))
    assert verdict_line(gate).startswith("gate INCOMPLETE: ")
    assert gate.findings()["speed"][-1] == Finding("cells", "failed", "without a number: n1_r3 failed")


def test_an_incomplete_report_is_4_where_nothing_can_be_judged() -> None:
    gate = judged(side("a", {"n1": [None] * 3}), side("b", {"n1": [None] * 3}, broken=["n1_r3"]))
    assert {row.verdict for row in gate.rows} == {"not_judged"} and gate.exit_code == 4


def test_an_incomplete_baseline_is_said() -> None:
    gate = judged(side("a", {"n1": STEADY}, broken=["n1_r3"]), side("b", {"n1": STEADY}))
    assert gate.remarks == ("the baseline is incomplete: n1_r3 failed",) and gate.rows[0].n == (2, 3)


# ---- probes

PASSED = ProbeResult(name="correctness", passed=True, detail="2 ranks agree")
FAILED = ProbeResult(name="communication", passed=False, detail="rank 1\n::error::differs")


def test_a_failed_probe_fails_and_leaves_no_verdict_on_speed() -> None:
    gate = judged(side("a", {"n1": STEADY}), side("b", {"n1": STEADY}, probes=[PASSED, FAILED], broken=["n1_r3"]))
    assert (gate.exit_code, gate.rows) == (1, ())
    assert verdict_line(gate) == (
        "gate FAILED: probes: 1 of 2 passed, not communication; speed: no verdict, a probe failed"
    )
    assert not any(line.startswith("::") for line in "\n".join(gate_lines(gate)).splitlines())


def test_a_missing_probe_has_not_passed() -> None:
    asking = type("Asking", (), {"probes": ("correctness", "communication")})()
    assert [(p.name, p.passed) for p in judge_probes(asking, (), [PASSED])] == [
        ("correctness", True),
        ("communication", False),
    ]
    gate = judged(side("a", {"n1": STEADY}, probes=[PASSED]), side("b", {"n1": STEADY}))
    assert gate.exit_code == 1 and "probe correctness: asked for by the matrix or in the" in "\n".join(gate_lines(gate))


def test_a_baseline_whose_probe_failed_is_none() -> None:
    with pytest.raises(UsageError, match=r"^a is no baseline, its probe communication did not pass"):
        judged(side("a", {"n1": STEADY}, probes=[PASSED, FAILED]), side("b", {"n1": STEADY}, probes=[PASSED]))


def test_no_probe_is_said() -> None:
    gate = judged(side("a", {"n1": STEADY}), side("b", {"n1": STEADY}))
    assert gate.findings()["probes"] == [Finding("probes", "not_judged", "the matrix names no probe")]
    assert "probes: the matrix names none;" in verdict_line(gate)


# ---- error rates


def simulate(change: float, n: int) -> dict[str, float]:
    """Rates of the verdicts over synthetic pairs of sessions; checked against the gate itself on the first draws."""
    generator = np.random.default_rng(7)
    base = NOISE * generator.standard_normal((DRAWS, n))
    current = math.log1p(change) + NOISE * generator.standard_normal((DRAWS, n))
    found = rule(base, current)
    for one, other, verdict in zip(base[:200], current[:200], found, strict=False):
        (row,) = compare_number("x", ratio, (np.exp(one),), (np.exp(other),), None, MARGIN)
        assert row.verdict == verdict
    return {verdict: 100.0 * float(np.mean(found == verdict)) for verdict in VERDICTS}


def rule(base: NDArray[np.float64], current: NDArray[np.float64]) -> NDArray[np.str_]:
    """The rule of docs/reports.md for many draws at once, from logs (draws, n)."""
    change = current.mean(axis=1) - base.mean(axis=1)
    n = base.shape[1]
    squares = [side.var(axis=1, ddof=1) / n for side in (base, current)]
    freedom = sum(squares) ** 2 / (sum(square**2 for square in squares) / (n - 1))
    half = scipy_stats.t.ppf(0.975, freedom) * np.sqrt(sum(squares))
    point, low, high = (np.expm1(value) for value in (change, change - half, change + half))
    conditions = [high < -MARGIN, low > 0, low > -MARGIN, (point < -MARGIN) | (high < 0)]
    return np.select(conditions, ["regression", "improved", "no_regression", "suspicious"], "insufficient_data")


def documented_rates() -> dict[tuple[float, int], dict[str, float]]:
    text = GUIDE.read_text(encoding="utf-8").partition("## How often the gate is wrong")[2]
    table = [[word.strip() for word in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    heads, rows = [head.replace(" ", "_") for head in table[0]], [row for row in table[1:] if "%" in row[0]]
    return {
        (float(row[0].replace("\N{MINUS SIGN}", "-").rstrip(" %")) / 100, int(row[1])): dict(
            zip(heads[2:], map(float, row[2:]), strict=True)
        )
        for row in rows
    }


def test_error_rates_are_those_the_guide_states() -> None:
    documented = documented_rates()
    assert {(-0.1, 5), (0.0, 5)} <= documented.keys()
    for (change, n), stated in documented.items():
        found = simulate(change, n)
        for verdict, percent in stated.items():
            p = found[verdict] / 100
            error = 0.05 + 100 * 3 * math.sqrt(p * (1 - p) / DRAWS)  # rounding, three standard errors
            assert abs(percent - found[verdict]) <= error, (change, n, verdict, found[verdict])
        assert sum(stated.values()) == pytest.approx(100.0, abs=0.3)
