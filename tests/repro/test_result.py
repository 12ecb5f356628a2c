from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from session_builder import finished_session

from repro.evidence import read_evidence
from repro.result import CellResult, Result, compute_result
from repro.schema import canonical_json

SCHEMA = Path(__file__).resolve().parents[2] / "repro" / "schemas" / "result.schema.json"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return finished_session(tmp_path)


def computed(out: Path) -> Result:
    return compute_result(read_evidence(out))


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(canonical_json(content))


def forget_the_trainer(out: Path) -> str:
    """Make the plan one of an older version, which does not name the trainer's hash; return that hash."""
    found: str = json.loads((out / "plan.json").read_text())["source"]["trainer_sha256"]
    edit_json(out / "plan.json", lambda plan: [plan["source"].pop(name) for name in ("trainer", "trainer_sha256")])
    return found


def test_the_committed_schema_is_the_models() -> None:
    fresh = "python -m repro.result > repro/schemas/result.schema.json"
    assert json.loads(SCHEMA.read_text()) == Result.model_json_schema(), f"write it again: {fresh}"


def test_the_names_others_rely_on() -> None:
    assert list(Result.model_fields) == [
        *("schema_version", "matrix", "smoke", "host", "cells", "groups", "comparisons"),
        *("probes", "learning", "verdict", "noise"),
    ]
    assert list(CellResult.model_fields) == [
        *("id", "case", "repeat", "status", "reason", "world_size", "steps_per_second", "learner_rows_per_second"),
        *("tail_mean_total_fps", "physics_fraction", "ceiling_share", "exposed_ms", "learner_cycle_ms"),
        *("startup_seconds", "run"),
        *("trend", "trend_ci_low", "trend_ci_high", "autocorrelation", "effective_points"),
    ]
    names = {kind: list(Result.model_json_schema()["$defs"][kind]["properties"]) for kind in ("GroupResult",)}
    assert names == {"GroupResult": ["case", "n", "mean", "sd", "ci_low", "ci_high"]}


def test_numbers_are_those_of_the_runs(out: Path) -> None:
    result = computed(out)
    rates = {
        case: [cell.steps_per_second or 0.0 for cell in result.cells if cell.case == case and cell.status == "measured"]
        for case in ("slow", "fast")
    }
    slow = result.groups[0]
    assert slow.sd == pytest.approx(abs(rates["slow"][0] - rates["slow"][1]) / 2**0.5, rel=1e-6)
    half = stats.t.ppf(0.975, 1) * abs(math.log(rates["slow"][0] / rates["slow"][1])) / 2
    centre = math.sqrt(rates["slow"][0] * rates["slow"][1])
    assert slow.mean == pytest.approx(centre, rel=1e-9)
    assert (slow.ci_low, slow.ci_high) == pytest.approx((centre * math.exp(-half), centre * math.exp(half)), rel=1e-6)
    welch = stats.ttest_ind(np.log(rates["fast"]), np.log(rates["slow"]), equal_var=False).confidence_interval()
    (found,) = result.comparisons
    assert (found.ci_low, found.ci_high) == pytest.approx((math.exp(welch.low), math.exp(welch.high)), rel=1e-6)
    assert found.ratio == pytest.approx((result.groups[1].mean or 0.0) / slow.mean, rel=1e-9)


def test_floats_are_finite_and_rounded(out: Path) -> None:
    text = canonical_json(computed(out))
    assert "NaN" not in text and "Infinity" not in text
    for cell in json.loads(text)["cells"]:
        value = cell["steps_per_second"]
        assert value == float(f"{value:.10g}")


def test_the_result_is_a_function_of_the_folder_alone(out: Path, tmp_path: Path) -> None:
    elsewhere = Path(shutil.copytree(out, tmp_path / "somewhere" / "else"))
    for name in ("result.json", "report.md", "MANIFEST.sha256"):
        (elsewhere / name).unlink()
    assert canonical_json(computed(elsewhere)) == (out / "result.json").read_text()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda c: c.update(source_sha256="0" * 64), "source_sha256 {trainer}… and 000000000000…"),
        (lambda c: c["versions"].update(torch="2.12.0"), "versions.torch 2.13.0 and 2.12.0"),
        (lambda c: c["versions"].pop("torch"), "versions.torch 2.13.0 and nothing"),
    ],
)
def test_mixed_code_inside_a_group_takes_its_numbers(
    out: Path, change: Callable[[dict[str, Any]], object], what: str
) -> None:
    what = what.format(trainer=forget_the_trainer(out)[:12])
    edit_json(out / "runs" / "slow_r2" / "command.json", change)
    result = computed(out)
    slow = [cell for cell in result.cells if cell.case == "slow" and cell.repeat]
    assert {(cell.status, cell.reason) for cell in slow} == {
        ("refused", f"mixed_code: group slow mixes {what} in slow_r1 and slow_r2")
    }
    assert {cell.steps_per_second for cell in slow} == {None}
    assert (result.groups[0].n, result.groups[0].mean, result.groups[1].n) == (0, None, 2)
    assert (result.comparisons[0].ratio, result.comparisons[0].verdict) == (None, "insufficient_data")
    assert result.verdict == "incomplete"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"commit": "1" * 40}, "ran code 111111111111 ("),
        ({"commit": None, "dirty": None, "diff_sha256": None}, "ran code of an unknown commit (changes unknown), "),
        ({"diff_sha256": "2" * 64}, " 222222222222), but the plan was made for "),
        ({"dirty": True}, "(with changes), but"),
    ],
)
def test_a_run_of_other_code_than_the_plan_names_is_refused(out: Path, change: dict[str, Any], said: str) -> None:
    git = {"commit": "3" * 40, "dirty": False, "diff_sha256": None}
    for name in ("warmup1_slow", "slow_r1", "slow_r2", "fast_r1", "fast_r2"):
        edit_json(out / "runs" / name / "command.json", lambda c: c.update(git=git))
    edit_json(out / "plan.json", lambda plan: plan["source"].update(git))
    assert computed(out).verdict == "improved"
    edit_json(out / "runs" / "slow_r2" / "command.json", lambda c: c["git"].update(change))
    cells = {cell.id: cell for cell in computed(out).cells}
    reason = cells["slow_r2"].reason or ""
    assert cells["slow_r2"].status == "refused" and cells["slow_r1"].status == "measured"
    assert reason.startswith("other_code: ran code ") and said in reason
    assert reason.endswith("but the plan was made for 333333333333 (without changes)")


def test_a_run_of_another_trainer_of_the_same_commit_is_refused(out: Path) -> None:
    edit_json(out / "runs" / "slow_r2" / "command.json", lambda c: c.update(source_sha256="0" * 64))
    cells = {cell.id: cell for cell in computed(out).cells}
    planned = json.loads((out / "plan.json").read_text())["source"]["trainer_sha256"]
    assert cells["slow_r2"].reason == (
        f"other_code: ran trainer sources 000000000000…, but the plan was made for {planned[:12]}…"
    )
    assert cells["slow_r1"].status == "measured"


def test_unknown_code_fits_a_plan_for_unknown_code(out: Path) -> None:
    unknown = {"commit": None, "dirty": None, "diff_sha256": None}
    edit_json(out / "plan.json", lambda plan: plan["source"].update(unknown, origin="hash"))
    for run in (out / "runs").iterdir():
        edit_json(run / "command.json", lambda c: c.update(git=unknown))
    assert computed(out).verdict == "improved"


def test_runs_that_were_exchanged_are_refused(out: Path) -> None:
    one, other = out / "runs" / "slow_r1", out / "runs" / "slow_r2"
    one.rename(out / "x")
    other.rename(one)
    (out / "x").rename(other)
    cells = {cell.id: cell for cell in computed(out).cells}
    assert cells["slow_r1"].reason == (
        "not_as_planned: its command was planned with training.log_dir=runs/slow_r1, "
        "the run says training.log_dir=runs/slow_r2"
    )
    assert cells["slow_r2"].status == "refused" and cells["fast_r1"].status == "measured"


@pytest.mark.parametrize("start", ["", "./", "<home>/reports/x/", "/root/reports/x/"])
def test_a_runs_folder_may_be_recorded_in_full(out: Path, start: str) -> None:
    def rewrite(command: dict[str, Any]) -> None:
        command["argv"] = [word.replace("log_dir=runs/", f"log_dir={start}runs/") for word in command["argv"]]

    edit_json(out / "runs" / "slow_r1" / "command.json", rewrite)
    assert computed(out).verdict == "improved"


def test_a_run_with_another_command_is_refused(out: Path) -> None:
    edit_json(out / "runs" / "slow_r1" / "command.json", lambda c: c["argv"].append("algo.num_envs=1"))
    cell = next(cell for cell in computed(out).cells if cell.id == "slow_r1")
    assert (cell.reason or "").startswith("not_as_planned: its command was planned with 11 words, the run says 12")


def test_events_that_were_copied_between_cells_are_refused(out: Path) -> None:
    (mine,) = (out / "runs" / "slow_r1").glob("events*")
    for name in (mine.name, "progress.jsonl", "run_end.json"):
        shutil.copyfile(out / "runs" / "fast_r1" / name, mine.parent / name)
    cells = {cell.id: cell for cell in computed(out).cells}
    for name in ("slow_r1", "fast_r1"):
        assert cells[name].status == "refused" and cells[name].steps_per_second is None
        assert cells[name].reason == "copied_events: slow_r1 and fast_r1 have the same event file"
    assert cells["slow_r2"].status == "measured"


def test_mixed_settings_inside_a_group_take_its_numbers(out: Path) -> None:
    edit_json(out / "runs" / "slow_r2" / "config.json", lambda c: c["algo"].update(batch_size=128))
    result = computed(out)
    assert {(cell.status, cell.reason) for cell in result.cells if cell.case == "slow" and cell.repeat} == {
        ("refused", "mixed_code: group slow mixes algo.batch_size 64 and 128 in slow_r1 and slow_r2")
    }
    assert result.groups[0].n == 0


def test_two_cases_of_different_code_are_not_compared(out: Path) -> None:
    forget_the_trainer(out)
    for repeat in (1, 2):
        edit_json(out / "runs" / f"slow_r{repeat}" / "command.json", lambda c: c.update(source_sha256="0" * 64))
    result = computed(out)
    assert [group.n for group in result.groups] == [2, 2]
    assert (result.comparisons[0].ratio, result.comparisons[0].verdict) == (None, "insufficient_data")
    assert result.verdict == "insufficient_data"


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        (
            "config.json",
            lambda c: c["training"].update(smoke=False),
            "training.smoke was planned as true, the run says",
        ),
        ("config.json", lambda c: c["env"].update(cpu_ids=[7]), "env.cpu_ids was planned as [0], the run says [7]"),
        ("config.json", lambda c: c.pop("env"), "env.cpu_ids was planned as [0], the run says null"),
    ],
)
def test_a_run_that_is_not_the_planned_one_is_refused(
    out: Path, name: str, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    edit_json(out / "runs" / "fast_r1" / name, change)
    cell = next(cell for cell in computed(out).cells if cell.id == "fast_r1")
    assert cell.status == "refused"
    assert (cell.reason or "").startswith(f"not_as_planned: {reason}")


def test_a_run_without_provenance_is_refused(out: Path) -> None:
    (out / "runs" / "fast_r1" / "command.json").unlink()
    cell = next(cell for cell in computed(out).cells if cell.id == "fast_r1")
    assert (cell.reason or "").startswith("missing_provenance: ")


def test_a_paired_interval_uses_only_complete_pairs(out: Path) -> None:
    edit_json(out / "plan.json", lambda plan: plan["matrix"].update(interval="paired"))
    result = computed(out)
    rates = {cell.id: cell.steps_per_second or 0.0 for cell in result.cells}
    logs = [math.log(rates[f"fast_r{repeat}"] / rates[f"slow_r{repeat}"]) for repeat in (1, 2)]
    paired = stats.ttest_1samp(logs, 0.0).confidence_interval()
    (found,) = result.comparisons
    assert found.ratio == pytest.approx(math.exp(sum(logs) / 2))
    assert (found.ci_low, found.ci_high) == pytest.approx((math.exp(paired.low), math.exp(paired.high)), rel=1e-6)
    shutil.rmtree(out / "runs" / "slow_r2")
    (found,) = computed(out).comparisons
    assert (found.n, found.ratio) == (1, pytest.approx(math.exp(logs[0])))


def test_a_single_run_has_no_spread_and_decides_nothing(out: Path) -> None:
    for name in ("slow_r2", "fast_r2"):
        shutil.rmtree(out / "runs" / name)
    result = computed(out)
    assert [(group.n, group.sd, group.ci_low) for group in result.groups] == [(1, None, None)] * 2
    (found,) = result.comparisons
    assert found.ratio == pytest.approx(1.5, rel=0.02)
    assert (found.ci_low, found.ci_high, found.n, found.verdict) == (None, None, 1, "insufficient_data")
