from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from session_builder import TOY, TRAINER, finished_session, make_host

from repro.arguments import build_parser
from repro.cli import main, program_name
from repro.doctor import choose_matrix
from repro.plan import Plan
from repro.schema import parse_model

SELECTION = ["CASE", "--matrix", "--repeats", "--iterations"]
COMMANDS = {
    "doctor": ["--matrix", "--json"],
    "plan": [*SELECTION, "--json"],
    "run": [
        *SELECTION,
        *("--out", "--prefix", "--override", "--trace", "--timeout", "--resume", "--executor", "--image"),
        *("--require-gpu", "--fail-fast", "--dry-run"),
    ],
    "scaling": ["--iterations", "--devices", "--extra-overrides", "--out-json"],
    "ab": [
        *("REF_A", "REF_B", "--matrix", "--repeats", "--iterations"),
        *("--out", "--override", "--resume", "--require-gpu", "--dry-run"),
    ],
    "analyze": ["RUN_DIR", "--tag", "--tail", "--output", "--json"],
    "probe": ["PROBE", "--world-size", "--algo", "--compile-loss", "--smoke", "--output", "--json"],
    "report": ["OUT_DIR", "--check"],
    "verify": ["OUT_DIR"],
    "gate": ["CURRENT", "--baseline", "--max-drop", "--junit"],
    "bench": ["PART"],
}
BENCHES = {
    "physics": ["--states", "--workers", "--profiles", "--seconds", "--json"],
    "learner": ["KEY=VALUE", "--algo", "--json", "--output", "--variants", "--cycles"],
    "tick": ["KEY=VALUE", "--algo", "--json", "--output", "--iterations"],
}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repro.cli.find_host", make_host)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repro.cli.find_host", lambda: make_host(cpus=16, gpu_count=1))


def flags(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Flags and positionals of every subcommand."""
    (commands,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return {
        name: [
            action.option_strings[0] if action.option_strings else str(action.metavar)
            for action in parser._actions
            if not isinstance(action, argparse._HelpAction)
        ]
        for name, parser in commands.choices.items()
    }


def test_the_command_line_is_frozen() -> None:
    parser = build_parser()
    assert flags(parser) == COMMANDS
    (commands,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    assert flags(commands.choices["bench"]) == BENCHES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "repro: the following arguments are required: COMMAND"),
        (["dance"], "repro: argument COMMAND: invalid choice: 'dance'"),
        (["--matirx", "run", "n1"], "repro: unrecognized arguments: --matirx; see repro --help"),
        (["run", "--matirx", "smoke"], "repro run: unrecognized arguments: --matirx; see repro run --help"),
        (
            ["bench", "tick", "--cycles=1"],
            "repro bench tick: unrecognized arguments: --cycles=1; see repro bench tick ",
        ),
        (["run", "--repeats", "many", "n1"], "repro run: argument --repeats: invalid int value: 'many'"),
        (["verify", "a", "b"], "repro verify: unrecognized arguments: b; see repro verify --help"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["run"],
            2,
            "name cases or a matrix: --matrix ablation, documents, dual, learning, learning_flashsac, ",
        ),
        (["run", "n1", "--matrix", "smoke"], 2, "matrix smoke has no case 'n1'; known: workers1, workers2"),
        (["plan", "workers1", "workers1"], 2, "cases workers1 workers1 repeat a name; use --repeats"),
        (["plan", "n1"], 2, "n1 in documents/dual/single); say which, as in --matrix documents n1"),
        (["plan", "--matrix", "smok"], 2, "unknown matrix 'smok'; did you mean 'smoke'?"),
        (["plan", "workers3"], 2, "unknown case 'workers3'; did you mean 'workers"),
        (["plan", "--matrix", "smoke", "--repeats", "0"], 2, "--repeats 0: must be at least 1"),
        (["run", "--matrix", "smoke", "--override", "a"], 2, "override 'a' is not key=value"),
        (["run", "--matrix", "smoke", "--iterations", "19"], 2, "case 'workers1' logs 19 events in 19 iterations, "),
        (["plan", "--matrix", "learning", "--iterations", "95"], 2, "a rate needs 20; type --iterations 96 or more"),
        (["run", "--matrix", "smoke", "--timeout", "-1"], 2, "--timeout -1: must be above 0 seconds"),
        (["run", "--matrix", "smoke", "--prefix", "A"], 2, "--prefix 'A': use small letters"),
        (["run", "--matrix", "auto", "--require-gpu"], 3, "--require-gpu: the driver lists no GPU"),
        (["run", "--matrix", "single"], 3, "nothing of matrix single can run here: n1: asks for GPU position 0"),
        (["plan", "--matrix", "single"], 3, "can run here: n1: asks for GPU position 0, but the driver lists no GPU"),
        (["run", "--matrix", "single", "--dry-run"], 3, "nothing of matrix single can run here: n1: asks"),
        (["doctor", "--matrix", "nope"], 2, "unknown matrix 'nope'"),
        (["analyze", "nowhere"], 2, "nowhere is not a folder"),
        (["report", "nowhere"], 2, "nowhere is not a folder"),
        (["verify"], 2, "no report with a MANIFEST.sha256 below reports"),
    ],
)
def test_requests_that_cannot_be_met_are_one_line_with_their_code(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("wanted", ["", ".", "/", "..", "\udcff"])
def test_a_report_folder_without_a_usable_name_is_one_line(
    wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--matrix", "smoke", "--out", wanted], trainer=["/nonexistent"]) == 2
    error = capsys.readouterr().err
    assert "give the path of a new folder" in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_that_names_a_line_end_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["analyze", "a\nb"]) == 2
    assert capsys.readouterr().err == "repro: a b is not a folder; give the folder of one run\n"


def test_analyze_of_hostile_files_is_one_line(
    fake_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = fake_run()
    for name in ("config.json", "manifest.json", "progress.jsonl", "run_end.json"):
        whole = (run / name).read_text()
        (run / name).write_text("[" * 10**5 + "\n")
        assert main(["analyze", str(run)]) == 1
        error = capsys.readouterr().err
        assert error.startswith("repro: no number: damaged_file: ") and error.count("\n") == 1
        (run / name).write_text(whole)


@pytest.mark.usefixtures("no_gpu")
def test_a_dry_run_prints_everything_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    boom = ["/nonexistent/trainer"]
    assert (
        main(["run", "--matrix", "smoke", "--dry-run", "--override", "a.b=1", "--override", "c=2"], trainer=boom) == 0
    )
    output = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert "matrix smoke, SMOKE (CPU, never a benchmark)" in output
    assert "taken out of the environment: NCCL_ALGO" in output
    assert "CPUs" in output and "'env.cpu_ids=[0,1]'" in output
    assert output.count("/nonexistent/trainer --algo sac") == output.count("a.b=1 c=2") == 2  # one for each case
    assert "training.log_dir=runs/workers1_r1 " in output and "training.log_dir=runs/workers2_r1 " in output


def test_an_override_takes_one_value_and_leaves_the_cases_alone() -> None:
    found = build_parser().parse_args(["run", "--override", "a.b=1", "--override", "c=[2,3]", "workers1", "workers2"])
    assert (found.override, found.cases) == (["a.b=1", "c=[2,3]"], ["workers1", "workers2"])
    assert build_parser().parse_args(["run", "workers1"]).override == []


def test_the_next_command_begins_as_this_one_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "repro"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert program_name("bin/repro") == "bin/repro"
    assert program_name("/some/where/cli.py") == "repro"
    monkeypatch.setenv("PATH", str(program.parent))
    assert program_name("bin/repro") == program_name(str(program)) == "repro"


@pytest.mark.usefixtures("no_gpu")
def test_a_plan_of_nothing_is_still_json_and_exits_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--matrix", "single", "--json"]) == 3
    assert not parse_model(Plan, capsys.readouterr().out, "stdout").runnable


@pytest.mark.usefixtures("no_gpu")
def test_a_plan_as_json_is_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "workers1", "--repeats", "2", "--iterations", "50", "--json"]) == 0
    plan = parse_model(Plan, capsys.readouterr().out, "stdout")
    assert [cell.id for cell in plan.cells] == ["warmup1_workers1", "workers1_r1", "workers1_r2"]
    assert plan.matrix.iterations == 50


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(("words", "workers"), [(["--matrix", "dual", "n1"], 7), (["n1", "--matrix", "auto"], 15)])
def test_cases_of_a_named_matrix_are_run_as_in_it(
    words: list[str], workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words, "--json"]) == 0
    plan = parse_model(Plan, capsys.readouterr().out, "stdout")
    assert {cell.case for cell in plan.cells} == {"n1"}
    assert {len(pool) for cell in plan.cells for pool in cell.pools} == {workers}


@pytest.mark.usefixtures("one_gpu")
def test_auto_takes_the_gpu_where_there_is_one_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--matrix", "auto"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "matrix single: this host shows 1 GPU\n"
    assert "CUDA_VISIBLE_DEVICES=GPU-0" in captured.out


def test_auto_falls_back_to_smoke_and_says_why() -> None:
    assert choose_matrix(*make_host()) == ("smoke", "no usable GPU: the driver lists no GPU")
    hidden = make_host(gpu_count=1, visible_gpus=())
    assert choose_matrix(*hidden) == ("smoke", "no usable GPU: CUDA_VISIBLE_DEVICES hides every GPU")


@pytest.mark.usefixtures("no_gpu")
def test_a_session_ends_with_six_lines_and_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.toml").write_text(TOY)
    assert main(["run", "--matrix", "toy.toml", "--repeats", "2", "--prefix", "p"], trainer=TRAINER) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[-6].startswith("SMOKE, not a benchmark: fast runs at 1.")
    assert lines[-5] == "share of the physics ceiling: not measured"
    assert lines[-4].startswith("bounding stage: upload, act, download and command in fast (costs the")
    assert lines[-3] == "probes: none"
    assert lines[-2].startswith("next: repro verify reports/")
    report = Path(lines[-1])
    assert report.is_file() and report.name == "report.md" and report.parent.parent == Path("reports")
    assert (report.parent / "runs" / "p_slow_r1").is_dir()
    assert any(line.startswith("[2/5] p_slow_r1: measured, ") and line.endswith(" left") for line in lines)


@pytest.mark.usefixtures("no_gpu")
def test_the_doctor_fits_one_screen_and_names_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert any(line.startswith("trainer:") and line.endswith("unilab \u00b7 graph hooks: True") for line in lines)
    assert any("single does not fit, 0 of 1 case would run: n1 asks for GPU" in line for line in lines) and any(
        "smoke fits" in line for line in lines
    )
    assert main(["doctor", "--matrix", "single"]) == 3
    assert main(["doctor", "--matrix", "smoke"]) == 0


@pytest.mark.usefixtures("one_gpu")
def test_the_doctor_speaks_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--matrix", "single", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    fits = {"matrix": "single", "fits": True, "estimated_seconds": 354.0, "cases": [{"case": "n1", "reason": None}]}
    assert found["matrices"] == [fits]
    assert found["host"]["gpus"][0]["name"] == "NVIDIA H200"


def test_analyze_prints_the_metric_and_never_replaces_a_file(
    fake_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fake_run(rate=12_345.0)
    output = tmp_path / "a.json"
    assert main(["analyze", str(run), "--output", str(output)]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("env steps/s             12,345  (")
    assert json.loads(output.read_text())["steps_per_second"] == pytest.approx(12_345.0, rel=1e-5)
    assert main(["analyze", str(run), "--output", str(output)]) == 2
    assert main(["analyze", str(run), "--tail", "1.5"]) == 2
    capsys.readouterr()
    assert main(["analyze", str(run), "--json", "--tail", "0.25"]) == 0
    assert json.loads(capsys.readouterr().out)["window"]["points"] == 15


def test_analyze_of_a_report_names_one_of_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = finished_session(tmp_path)
    assert main(["analyze", str(out)]) == 1
    error = capsys.readouterr().err
    assert error.endswith(f"name one run, for example {out}/runs/fast_r1\n") and error.count("\n") == 1
    assert main(["analyze", str(out / "runs" / "fast_r1")]) == 0


@pytest.mark.parametrize(("mode", "code"), [("no_run_end", "missing_run_end"), ("nan", "non_finite")])
def test_analyze_gives_no_number_for_a_bad_run(
    mode: str, code: str, fake_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", str(fake_run(mode=mode))]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"repro: no number: {code}: ")


def test_analyze_takes_the_folder_of_another_program(
    fake_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = fake_run()
    for name in ("config.json", "command.json", "manifest.json", "progress.jsonl", "run_end.json"):
        (run / name).unlink()
    assert main(["analyze", str(run), "--tag", "Perf/iteration_time"]) == 0
    assert "no run_end.json" in capsys.readouterr().out


def test_the_module_is_a_command_and_starts_without_the_heavy_libraries() -> None:
    program = "import sys, repro.cli; sys.exit(bool({'torch', 'pandas', 'matplotlib', 'scipy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
