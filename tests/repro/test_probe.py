"""Probes from the suite's side: `repro probe`, and the probes of a session, with a program that probes nothing."""

from __future__ import annotations

import fnmatch
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import fake_probe
import psutil
import pytest
from session_builder import SOURCE, make_host, matrix_text, run_session, toy_matrix

from repro import launch, probe_command
from repro import probe as probe_module
from repro.cli import main
from repro.errors import UsageError
from repro.evidence import read_evidence
from repro.host import Host
from repro.journal import read_journal
from repro.launch import Ended
from repro.layout import RESULT_FILE
from repro.manifest import write_manifest
from repro.matrix import Matrix, ProbeName, parse_matrix
from repro.plan import PROBE_ESTIMATE_SECONDS, make_plan
from repro.probe import ESSENTIAL, Asked, Findings
from repro.result import Result
from repro.schema import canonical_json, parse_model, read_model
from repro.session_probes import ProbeEvidence, planned_probes, probe_variables, require_same_host
from repro.verify import verify
from unilab.probes.__main__ import PROBES
from unilab.probes.nccl_capture import CASES

PROGRAMS = Path(__file__).parents[2] / "unilab" / "probes"
RECORD = "probes/correctness.json"
PROGRAM = probe_module.PROGRAM
BOTH = 'probes = ["correctness", "communication"]\n'


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "PROGRAM", (sys.executable, str(Path(fake_probe.__file__))))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Host]:
    """Make the host show so many GPUs."""

    def show(count: int) -> Host:
        found = make_host(cpus=16, gpu_count=count)
        for module in ("probe_command", "cli"):
            monkeypatch.setattr(f"repro.{module}.find_host", lambda: found)
        return found[0]

    return show


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Visible devices and arguments of every call of the program."""
    log = tmp_path / "calls"
    monkeypatch.setenv("FAKE_PROBE_LOG", str(log))
    return lambda: log.read_text().splitlines() if log.exists() else []


def interrupted(_command: object, _environment: object, _out: object, log: Path, *_: object) -> Ended:
    """Stands for `run_cell`: the user presses Ctrl-C."""
    log.touch()
    return Ended("interrupted", None, 1.0, "by the user")


def test_names_are_those_of_the_trainer() -> None:
    assert list(get_args(ProbeName)) == list(PROBES)


# --- the command -----------------------------------------------------------------------------------------------------


def test_a_probe_that_passes_says_so_line_by_line(
    gpus: Callable[[int], Host], capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(0)
    assert main(["probe", "communication", "--smoke"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0]
        == f"SMOKE: communication: 2 ranks, gloo, 2 \N{MULTIPLICATION SIGN} cpu; torch {fake_probe.TORCH}; 1.2 s"
    )
    assert lines[1:4] == [
        "ok      ended_x           the same on 2 ranks: 0123456789abcdef",
        "ok      values_correct_x  largest difference 3e-8",
        "noted   bits_equal        last bits differ",
    ]
    assert [line.split() for line in lines[5:8]] == [
        ["operation", "bytes", "microseconds"],
        ["all_reduce", "1,024", "12.50"],
        ["broadcast", "2,048", "7.250"],
    ]
    assert lines[-1] == "SMOKE: communication: 2 of 2 checks passed"


def test_a_failed_check_is_exit_code_1_and_stands_in_the_last_line(
    gpus: Callable[[int], Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(2)
    monkeypatch.setenv("FAKE_PROBE", "fail")
    assert main(["probe", "correctness"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "FAILED  gradient_is_mean_of_ranks  largest difference 3e-8" in lines
    assert lines[-1] == "correctness: FAILED, gradient_is_mean_of_ranks: largest difference 3e-8"


@pytest.mark.parametrize(
    ("shown", "arguments", "call"),
    [
        (0, ["correctness", "--smoke"], "None correctness --world-size 2 --smoke"),
        (4, ["correctness", "--smoke", "--world-size", "3"], "None correctness --world-size 3 --smoke"),
        (1, ["correctness"], "GPU-0 correctness --world-size 1"),
        (4, ["nccl-capture"], "GPU-0,GPU-1 nccl-capture --world-size 2"),
        (4, ["correctness", "--compile-loss", "--world-size", "3"],
         "GPU-0,GPU-1,GPU-2 correctness --world-size 3 --compile-loss"),
        (0, ["correctness", "--algo", "flashsac", "--smoke"],
         "None correctness --world-size 2 --smoke --algo flashsac"),
    ],
)  # fmt: skip
def test_ranks_get_the_first_visible_gpus(
    shown: int, arguments: list[str], call: str, gpus: Callable[[int], Host], calls: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")  # what is inherited never reaches a probe
    gpus(shown)
    assert main(["probe", *arguments]) == 0
    assert calls() == [call]


@pytest.mark.parametrize(
    ("shown", "arguments", "code", "message"),
    [
        (0, ["correctness"], 3,
         "probe correctness needs a GPU, and the driver lists no GPU; add --smoke to run it with gloo on the CPU"),
        (0, ["nccl-capture"], 3, "probe nccl-capture needs a GPU, and the driver lists no GPU"),
        (2, ["nccl-capture", "--smoke"], 2,
         "nccl-capture is about graphs on GPUs; leave --smoke out, on a host with a GPU"),
        (2, ["communication", "--world-size", "3"], 3,
         "--world-size 3 needs 3 GPUs, this host shows 2; ask for at most 2; add --smoke to run it with gloo on the "
         "CPU"),
        (2, ["communication", "--world-size", "0"], 2, "--world-size 0: must be at least 1"),
        (2, ["communication", "--algo", "flashsac"], 2,
         "communication looks at no learner; leave --algo out, or type repro probe correctness"),
        (2, ["communication", "--output", "."], 2, "--output . is a folder; name a new file in it"),
        (2, ["communication", "--output", __file__], 2,
         f"--output {__file__} exists; older results are never replaced, choose another name"),
    ],
)  # fmt: skip
def test_wrong_requests_are_one_line_and_start_nothing(
    shown: int, arguments: list[str], code: int, message: str, gpus: Callable[[int], Host],
    calls: Callable[[], list[str]], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    gpus(shown)
    assert main(["probe", *arguments]) == code
    assert capsys.readouterr().err == f"repro: {message}\n"
    assert calls() == []


def test_findings_about_another_learner_are_refused(
    gpus: Callable[[int], Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(0)
    assert main(["probe", "correctness", "--smoke", "--algo", "flashsac"]) == 0
    assert "; algo flashsac; 1.2 s" in capsys.readouterr().out.splitlines()[0]
    monkeypatch.setenv("FAKE_PROBE", "other_algo")
    assert main(["probe", "correctness", "--smoke", "--algo", "flashsac"]) == 1
    assert 'settings.algo was asked as "flashsac", its findings say "sac"' in capsys.readouterr().err


def test_an_algorithm_that_there_is_not_is_refused_by_the_trainer(
    gpus: Callable[[int], Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(0)
    monkeypatch.setattr(probe_module, "PROGRAM", PROGRAM)
    assert main(["probe", "correctness", "--smoke", "--algo", "ppo"]) == 2
    line = capsys.readouterr().err
    assert line.endswith("probe: --algo ppo: there is sac, flashsac\n") and line.count("\n") == 1


def test_an_unknown_probe_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["probe", "corectness"])
    assert caught.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("repro probe: argument PROBE: invalid choice: 'corectness'") and line.count("\n") == 1


ENDINGS = {
    "crash": (1, "exit code 1: RuntimeError: asked to crash"),
    "exit2": (2, "exit code 2: probe: as it was asked"),
    "exit3": (3, "exit code 3: probe: as it was asked"),
    "hang": (1, "no end after 1 s; its process group ended on SIGTERM"),
    "garbage": (1, "its findings: invalid JSON: "),
    "silent": (1, "exit code 0, but it wrote no findings"),
    "nan": (1, "its findings: settings or measurements hold a number that is not finite"),
    "extra": (1, "its findings: unknown key 'host'"),
    "wrong_probe": (1, 'probe was asked as "communication", its findings say "correctness"'),
    "contradict": (1, "its findings say failed, its exit code is 0"),
}


@pytest.mark.parametrize("mode", ENDINGS)
def test_a_probe_without_findings_is_one_line_with_its_code(
    mode: str, gpus: Callable[[int], Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    gpus(0)
    monkeypatch.setenv("FAKE_PROBE", mode)
    monkeypatch.setattr(probe_module, "LIMIT_SECONDS", 1.0 if mode == "hang" else 60.0)
    output = tmp_path / "found.json"
    code, reason = ENDINGS[mode]
    assert main(["probe", "communication", "--smoke", "--output", str(output)]) == code
    captured = capsys.readouterr()
    assert captured.err.startswith(f"repro: probe communication: {reason}") and captured.err.count("\n") == 1
    assert captured.out == "" and not output.exists()
    if code == 1:
        assert "; its whole output: python " in captured.err
        assert captured.err.endswith(" communication --world-size 2 --smoke\n")


def test_an_interrupt_is_exit_code_130(
    gpus: Callable[[int], Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(0)
    monkeypatch.setattr(probe_command, "run_probe", partial(probe_module.run_probe, run=interrupted))
    assert main(["probe", "correctness", "--smoke"]) == 130
    assert capsys.readouterr().err == "repro: interrupted\n"


def test_json_is_the_probes_own_and_goes_into_a_file_too(
    gpus: Callable[[int], Host], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(0)
    output = tmp_path / "found.json"
    assert main(["probe", "correctness", "--smoke", "--json", "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert shown == output.read_text() and json.loads(shown)["checks"][-1]["required"] is False
    parse_model(Findings, shown, "test")


def content(**changes: Any) -> str:
    """JSON of findings that pass, with changes."""
    checks = [
        {"name": name, "passed": True, "detail": "", "required": True} for name in fake_probe.NAMES["correctness"]
    ]
    found: dict[str, Any] = {
        **{"schema_version": 1, "passed": True, "probe": "correctness", "smoke": True, "backend": "gloo"},
        **{"world_size": 2, "devices": ["cpu", "cpu"], "versions": {}, "transport": "none", "settings": {}},
        **{"seconds": 1.0, "checks": checks, "measurements": []},
    }
    return json.dumps(found | changes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"passed": False}, "passed is false, its checks say otherwise"),
        ({"checks": []}, "passed is true, its checks say otherwise"),
        ({"checks": json.loads(content())["checks"][1:]}, "passed is true without the check 'parameters_equal'"),
        ({"devices": ["cpu", "Fake GPU"]}, "devices cpu, Fake GPU with smoke = true"),
        ({"devices": ["cpu"]}, "1 devices of 2 ranks"),
        ({"backend": "nccl"}, "backend nccl with smoke = true"),
        ({"checks": 2 * json.loads(content())["checks"]}, "check 'parameters_equal' is there twice"),
        ({"seconds": float("nan")}, "seconds: "),
        ({"world_size": "2"}, "world_size: "),
        ({"measurements": [{"x": [1.0, float("inf")]}]}, "measurements hold a number that is not finite"),
        ({"schema_version": 2}, "schema_version: "),
    ],
)
def test_findings_that_cannot_be_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_model(Findings, content(**changes), "f")
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_checks_that_no_probe_may_lack_are_those_of_the_trainer() -> None:
    for name in ESSENTIAL["correctness"]:
        assert any(f'"{name}"' in path.read_text() for path in PROGRAMS.glob("correctness*.py")), name
    for name in ESSENTIAL["communication"]:
        assert f'f"{name.replace("*", "{name}")}"' in (PROGRAMS / "communication.py").read_text(), name
    (pattern,) = ESSENTIAL["nccl-capture"]
    assert [case.warmed_up for case in CASES] == [fnmatch.fnmatch(case.name, pattern) for case in CASES]


def test_a_probe_looks_at_the_learner_of_its_matrix() -> None:
    matrix = toy_matrix(algo="flashsac", probes=("correctness", "communication"))
    correctness, communication = planned_probes(make_plan(matrix, *make_host(), SOURCE))
    assert correctness.arguments[-2:] == ("--algo", "flashsac") and "--algo" not in communication.arguments
    assert correctness.deviation(parse_model(Findings, content(), "f")) == (
        "settings.compile_loss was asked as false, its findings say null"
    )
    of_sac = parse_model(Findings, content(settings={"compile_loss": False}), "f")
    assert correctness.deviation(of_sac) == 'settings.algo was asked as "flashsac", its findings say "sac"'


def test_a_probe_that_is_told_to_end_ends_its_ranks(tmp_path: Path) -> None:
    """As a time limit or a killed suite does; the ranks are a process group of their own."""
    (tmp_path / "rank_that_sleeps.py").write_text("import time\ntime.sleep(600)\n")
    script = f"""
import runpy, sys, types
sys.path.insert(0, {str(tmp_path)!r})
probe = types.ModuleType("unilab.probes.correctness")
probe.run = lambda setting: setting.run("rank_that_sleeps", {{}}, 600)
sys.modules[probe.__name__] = probe
sys.argv = ["probes", "correctness", "--smoke"]
runpy.run_module("unilab.probes", run_name="__main__")
"""
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        deadline = time.monotonic() + 30
        while len(ranks := psutil.Process(process.pid).children()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
    assert not psutil.wait_procs(ranks, timeout=5)[1]


# --- matrices and plans ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probes", "problem"),
    [
        ('["corectness"]', "probes.0: input should be 'correctness', 'communication' or 'nccl-capture'"),
        ('["correctness", "correctness"]', "probe 'correctness' is named 2 times; once is enough"),
        ('["nccl-capture"]', "probe 'nccl-capture' is about graphs on GPUs; take it out of a smoke matrix"),
        ('"correctness"', "probes: "),
    ],
)
def test_a_matrix_that_names_wrong_probes_is_refused(probes: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_matrix(matrix_text({"a": {}}, extra=f"probes = {probes}\n"), "m")
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_a_matrix_without_probes_keeps_its_bytes() -> None:
    assert "probes" not in canonical_json(toy_matrix())
    asking = parse_matrix(matrix_text({"a": {}}, extra=BOTH), "m")
    assert json.loads(canonical_json(asking))["probes"] == ["correctness", "communication"]
    assert parse_model(Matrix, canonical_json(asking), "m") == asking


def test_probes_get_the_ranks_of_the_widest_case_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    text = matrix_text({"n1": {}, "n2": {}}, extra='probes = ["correctness", "nccl-capture"]\n').replace(
        "smoke = true", "smoke = false"
    )
    first, second = text.split('name = "n2"')
    text = first.replace("workers = 1", "gpus = [0]") + 'name = "n2"' + second.replace("workers = 1", "gpus = [0, 1]")
    plan = make_plan(parse_matrix(text, "m"), *make_host(16, 2), SOURCE)
    one, two = (cell.model_copy(update={"skip_reason": None}) for cell in plan.cells[:2])
    two = two.model_copy(update={"gpus": ("GPU-0", "GPU-1"), "environment": {"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1"}})
    both = plan.model_copy(update={"cells": (one, two)})
    assert planned_probes(both) == (
        Asked("correctness", 2, smoke=False, compile_loss=True),
        Asked("nccl-capture", 2, smoke=False),
    )
    assert probe_variables(both) == {"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1"}
    flash = both.model_copy(update={"matrix": both.matrix.model_copy(update={"algo": "flashsac"})})
    assert [asked.algo for asked in planned_probes(flash)] == ["flashsac", "sac"]  # the latter looks at no learner
    narrow = plan.model_copy(update={"cells": (one, two.model_copy(update={"skip_reason": "too wide"}))})
    assert planned_probes(narrow) == (Asked("correctness", 1, smoke=False, compile_loss=True),)  # the other needs two


def test_plans_list_probes_with_their_time(
    tmp_path: Path, calls: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = run_session(tmp_path, matrix_text({"a": {}}, extra=BOTH), "--dry-run")
    assert code == 0 and not out.exists() and calls() == []
    lines = capsys.readouterr().out.splitlines()
    at = lines.index(
        "before everything else 2 probes, about 30 s, at most 10 min 00 s each; no run is started where one fails:"
    )
    assert lines[at + 1].startswith("  PYTHONUNBUFFERED=1 python ")
    assert [line.split("fake_probe.py ")[1] for line in lines[at + 1 : at + 3]] == [
        "correctness --world-size 2 --smoke",
        "communication --world-size 2 --smoke",
    ]
    with_probes, without = (
        make_plan(parse_matrix(matrix_text({"a": {}}, extra=extra), "m"), *make_host(), SOURCE) for extra in (BOTH, "")
    )
    assert with_probes.estimated_seconds - without.estimated_seconds == 2 * PROBE_ESTIMATE_SECONDS[True]
    assert with_probes.cells == without.cells


# --- in a session ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sessions of two probes that pass, and of one that fails; each is run once."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_module, "PROGRAM", (sys.executable, str(Path(fake_probe.__file__))))
        for mode, code in (("ok", 0), ("correctness:fail", 1), ("correctness:crash", 1)):
            patch.setenv("FAKE_PROBE", mode)
            ended, found[mode] = run_session(tmp_path_factory.mktemp("probes"), matrix_text({"a": {}}, extra=BOTH))
            assert ended == code
    return found


@pytest.fixture
def copy_of(sessions: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda mode: Path(shutil.copytree(sessions[mode], tmp_path / "out"))


def checked(out: Path) -> tuple[bool, str]:
    lines: list[str] = []
    return verify([out], lines.append), "\n".join(lines)


def test_probes_that_pass_come_first_and_stand_in_the_report(sessions: dict[str, Path]) -> None:
    out = sessions["ok"]
    result = read_model(Result, out / RESULT_FILE)
    assert [probe.model_dump() for probe in result.probes] == [
        {"name": "correctness", "passed": True, "detail": "4 of 4 checks passed"},
        {"name": "communication", "passed": True, "detail": "2 of 2 checks passed"},
    ]
    assert result.verdict == "measured"
    events = [(entry.event, entry.probe) for entry in read_journal(out)]
    assert events[:6] == [
        ("session_started", None),
        *(("probe_started", "correctness"), ("probe_ended", "correctness")),
        *(("probe_started", "communication"), ("probe_ended", "communication")),
        ("cell_started", None),
    ]
    page = (out / "report.md").read_text()
    section = page[page.index("## Probes") : page.index("## Metric")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"]
    assert ["`correctness`", "bits_equal", "noted", "last bits differ"] in rows
    assert ["`communication`", "values_correct_x", "ok", "largest difference 3e-8"] in rows
    assert ["operation", "bytes", "microseconds"] in rows and ["all_reduce", "1,024", "12.50"] in rows
    assert "no correctness probe ran" not in page and "The physics ceiling of the host was not measured." in page
    assert checked(out)[0]


def test_nothing_kept_of_a_probe_names_the_machine(sessions: dict[str, Path]) -> None:
    for name in (RECORD, "logs/probe_correctness.log", "report.md", "journal.jsonl", "plan.json"):
        text = (sessions["ok"] / name).read_text()
        assert f"{Path.home()}/" not in text, name
    assert "<home>/probe" in (sessions["ok"] / RECORD).read_text()
    assert "<home>/probe" in (sessions["ok"] / "logs/probe_correctness.log").read_text()


@pytest.mark.parametrize(
    ("mode", "detail"),
    [
        ("correctness:fail", "gradient_is_mean_of_ranks: largest difference 3e-8"),
        ("correctness:crash", "exit code 1: RuntimeError: asked to crash"),
    ],
)
def test_a_failed_probe_ends_the_session_without_a_run_or_a_verdict_on_speed(
    mode: str, detail: str, sessions: dict[str, Path]
) -> None:
    out = sessions[mode]
    result = read_model(Result, out / RESULT_FILE)
    assert [(probe.name, probe.passed) for probe in result.probes] == [("correctness", False), ("communication", True)]
    assert result.probes[0].detail == detail and result.verdict == "probe_failed"
    assert [(cell.status, cell.reason) for cell in result.cells] == [
        ("not_run", "probe correctness failed, so no run was started")
    ]
    assert not list((out / "runs").iterdir())
    page = (out / "report.md").read_text()
    sentence = f"Probe `correctness` failed: {detail}. No run was started, so there is no verdict on speed."
    assert f"**{sentence}**" in page
    passed, lines = checked(out)
    assert passed and "verified, but incomplete: 1 of 1 cell gave no number" in lines


def test_the_last_lines_of_a_failed_session_say_what_to_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_PROBE", "communication:exit3")
    extra = BOTH + "benchmarks = true\n"
    code, out = run_session(tmp_path, matrix_text({"a": {}}, extra=extra))
    assert code == 1 and not (out / "benchmarks.json").exists()
    lines = capsys.readouterr().out.splitlines()
    assert "probe communication: failed, exit code 3: probe: as it was asked" in " ".join(lines)
    assert lines[-6].startswith("SMOKE, not a benchmark: Probe communication failed: exit code 3: ")
    assert lines[-3:-1] == [
        "probes: 1 of 2 passed",
        f"next: look for the fault: checks in the report, output in {out}/logs/probe_communication.log",
    ]
    assert checked(out)[0]


def test_comparisons_of_a_failed_session_have_no_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PROBE", "fail")
    comparison = '\n[[comparisons]]\nname = "c"\nnumerator = "a"\ndenominator = "b"\ngate = true\n'
    code, out = run_session(tmp_path, matrix_text({"a": {}, "b": {}}, extra=BOTH + comparison))
    (found,) = read_model(Result, out / RESULT_FILE).comparisons
    assert (code, found.ratio, found.n, found.verdict) == (1, None, 0, "insufficient_data")


def test_an_interrupted_probe_is_no_failed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "run_cell", interrupted)
    code, out = run_session(tmp_path, matrix_text({"a": {}}, extra=BOTH))
    result = read_model(Result, out / RESULT_FILE)
    assert code == 130 and result.verdict == "incomplete"
    assert [(probe.passed, probe.detail) for probe in result.probes] == [
        (False, "by the user"),
        (False, "the session ended before its turn"),
    ]
    assert [entry.event for entry in read_journal(out)][-1] == "session_interrupted"
    assert [probe.status for probe in read_evidence(out).probes] == ["interrupted", "not_run"]
    assert checked(out)[0]


def change(name: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(out: Path) -> None:
        text = (out / name).read_text()
        assert old in text, text
        (out / name).write_text(text.replace(old, new, 1))

    return edit


def changed(edit: Callable[[dict[str, Any]], object], name: str = RECORD) -> Callable[[Path], None]:
    """Change a record and write it as the suite would."""

    def write(out: Path) -> None:
        record = json.loads((out / name).read_text())
        edit(record)
        (out / name).write_text(canonical_json(record))

    return write


def passing(record: dict[str, Any]) -> None:
    """A failed check turned, consistently."""
    record["findings"]["passed"] = True
    record["findings"]["checks"][3]["passed"] = True


def drop(event: str) -> Callable[[Path], None]:
    def edit(out: Path) -> None:
        lines = (out / "journal.jsonl").read_text().splitlines(keepends=True)
        (out / "journal.jsonl").write_text("".join(line for line in lines if event not in line))

    return edit


def late(out: Path) -> None:
    """Probes after the cells."""
    lines = (out / "journal.jsonl").read_text().splitlines(keepends=True)
    (out / "journal.jsonl").write_text("".join([lines[0], *lines[5:-1], *lines[1:5], lines[-1]]))


def swap_plan(out: Path) -> None:
    plan = json.loads((out / "plan.json").read_text())
    plan["matrix"].pop("probes")
    (out / "plan.json").write_text(canonical_json(plan))


@pytest.mark.parametrize(
    ("mode", "edit", "problem"),
    [
        ("ok", lambda out: (out / RECORD).unlink(), f"{RECORD} is missing"),
        ("ok", lambda out: (out / "logs/probe_correctness.log").unlink(), "logs/probe_correctness.log is missing"),
        ("ok", change(RECORD, '"reason"', ' "reason"'), f"{RECORD}: not as the suite writes it"),
        ("ok", changed(lambda r: r["findings"].update(world_size=3)), f"{RECORD}: findings: 2 devices of 3 ranks"),
        ("ok", changed(lambda r: r["findings"].update(probe="communication")), "without the check 'ended_*'"),
        ("ok", changed(lambda r: r["findings"]["checks"].pop(0)), "without the check 'parameters_equal'"),
        ("ok", changed(lambda r: r["findings"]["versions"].update(torch="1.0")), f"{RECORD} is of torch 1.0, "),
        ("ok", changed(lambda r: r["findings"].update(host="x")), "unknown key 'findings.host'"),
        ("ok", changed(lambda r: r.update(reason="why")), "it must hold findings or a reason, and not both"),
        ("ok", changed(lambda r: r["findings"]["checks"][0].update(passed=False)), "its checks say otherwise"),
        ("ok", changed(lambda r: r["findings"]["checks"][0].update(detail="x")), "report.md: differs"),
        ("ok", changed(lambda r: r.update(findings=None, reason="x")), "its reason is not that of journal.jsonl"),
        ("ok", swap_plan, "journal.jsonl has probe 'correctness', though the plan does not ask for it"),
        ("ok", drop("probe_"), f"{RECORD} is there, though journal.jsonl says that the probe was not started"),
        ("ok", drop("probe_started"), "probe 'correctness' ends before it starts"),
        ("ok", late, "journal.jsonl line 4: probe_started; probes come before everything else"),
        ("ok", drop("probe_ended"), "journal.jsonl has cell_started, though probe 'correctness' interrupted"),
        ("ok", lambda out: (out / "probes/other.json").touch(), "probes/other.json: belongs to no probe of plan.json"),
        ("ok", change("journal.jsonl", '"probe_ended", ', '"probe_started", '), "probe_started of probe 'correctness'"),
        ("ok", change("journal.jsonl", '"probe": "correctness"', '"cell": "a_r1"'), "probe_started names "),
        ("correctness:fail", changed(passing), "its findings say passed, its exit code is 1"),
        ("correctness:fail", change(RESULT_FILE, '"passed": false', '"passed": true'), f"{RESULT_FILE}: differs"),
        ("correctness:crash", changed(lambda r: r.update(reason="other")), "its reason is not that of journal.jsonl"),
    ],
)  # fmt: skip
def test_a_change_is_found_though_hashes_fit(
    mode: str, edit: Callable[[Path], object], problem: str, copy_of: Callable[[str], Path]
) -> None:
    out = copy_of(mode)
    edit(out)
    write_manifest(out)
    passed, lines = checked(out)
    assert not passed and problem in lines, lines


def test_a_probe_of_another_host_ends_the_session_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = make_host(versions={"torch": "1.0.0"})
    monkeypatch.setattr("repro.cli.find_host", lambda: host)
    code, out = run_session(tmp_path, matrix_text({"a": {}}, extra=BOTH))
    assert code == 2 and not list((out / "runs").iterdir())
    error = capsys.readouterr().err
    assert error == f"repro: {RECORD} is of torch {fake_probe.TORCH}, host.json says 1.0.0\n"


H200 = {"smoke": False, "backend": "nccl", "world_size": 1, "devices": ["NVIDIA H200"]}
VERSIONS = {"torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.29.7", "driver": "600.1"}


def of_host(changes: dict[str, Any]) -> None:
    """Compare a probe on one H200 with a host of it."""
    versions = {"torch": "2.13.0", "nccl": "2.29.7.post1"}
    host, _ = make_host(gpu_count=1, versions=versions)
    findings = parse_model(Findings, content(**{**H200, "versions": VERSIONS, **changes}), "f")
    require_same_host((ProbeEvidence("correctness", "passed", "", findings), NO_FINDINGS), host)


NO_FINDINGS = ProbeEvidence("communication", "failed", "no end after 1 s")


@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"versions": {}}, {"versions": {"nccl": "2.30.1"}}, {"devices": ["NVIDIA H200 MIG 1g.18gb"]}),
        {"devices": ["NVIDIA <host>"]},  # where the machine is called as its GPU
        {"smoke": True, "backend": "gloo", "devices": ["cpu"], "versions": {"torch": "2.13.0"}},
    ],
)
def test_a_probe_of_the_sessions_host_fits(changes: dict[str, Any]) -> None:
    of_host(changes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"versions": {"torch": "2.11.0+cu130"}}, "torch 2.11.0+cu130, host.json says 2.13.0"),
        ({"versions": {"driver": "600.10"}}, "driver 600.10, host.json says 600.1"),
        ({"devices": ["NVIDIA H100"]}, "GPU NVIDIA H100, host.json says NVIDIA H200"),
        ({"world_size": 2, "devices": ["NVIDIA H200", "NVIDIA H200 NVL"]}, "GPU NVIDIA H200 NVL, host.json says"),
    ],
)
def test_a_probe_of_another_host_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        of_host(changes)
    assert f"{RECORD} is of {problem}" in str(caught.value)


def test_a_termination_ends_the_command_as_ctrl_c_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []

    def terminated(_: object, __: object, folder: Path, ___: object) -> None:
        folders.append(folder)
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("repro.probe_command.run_probe", terminated)
    assert main(["probe", "communication", "--smoke"]) == 130
    assert capsys.readouterr() == ("", "repro: interrupted\n")
    assert [folder.exists() for folder in folders] == [False]
