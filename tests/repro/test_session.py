"""Whole sessions with the fake trainer: what happens when cells end well, badly or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from session_builder import (
    SOURCE,
    TRAINER,
    finished_session,
    make_host,
    matrix_text,
    run_session,
    toy_matrix,
)

from repro.attempts import session_seconds
from repro.cli import main
from repro.errors import UsageError
from repro.evidence import read_evidence
from repro.journal import read_journal
from repro.launch import signals_interrupt
from repro.layout import JOURNAL_FILE, PLAN_FILE, RESULT_FILE
from repro.manifest import read_manifest
from repro.matrix import TRACE_OVERRIDE, load_matrix
from repro.plan import make_plan
from repro.report import derive_report
from repro.result import Result, compute_result
from repro.schema import canonical_json, read_model
from repro.session import create_out_dir, default_out_dir, exit_code, published_plan
from repro.text import duration
from repro.verify import verify
from unilab.names import TRACE_FILE

FAILING = ("crash", "cut_log", "nan", "clock_step", "no_run_end", "damaged", "duplicate_steps", "exit3")


def result_of(out: Path) -> Result:
    return read_model(Result, out / RESULT_FILE)


def test_a_session_is_measured_reported_and_verifies_twice(tmp_path: Path) -> None:
    out = finished_session(tmp_path)
    result = result_of(out)
    assert [(cell.id, cell.status) for cell in result.cells] == [
        ("warmup1_slow", "discarded"),
        *((name, "measured") for name in ("slow_r1", "fast_r1", "fast_r2", "slow_r2")),
    ]
    slow, fast = result.groups
    assert slow.n == fast.n == 2
    assert slow.mean == pytest.approx(10_000, rel=0.011) and fast.mean == pytest.approx(15_000, rel=0.011)
    (speedup,) = result.comparisons
    assert speedup.ratio == pytest.approx(1.5, rel=0.02)
    assert (speedup.name, speedup.metric, speedup.n) == ("speedup", "steps_per_second", 2)
    assert result.smoke and result.matrix == "toy"
    for _ in range(2):
        lines: list[str] = []
        assert verify([out], lines.append), lines
        assert lines[-1].startswith("verified: ") and lines[-1].endswith(", 5 runs recomputed")


def test_the_journal_tells_starts_and_ends_in_order(tmp_path: Path) -> None:
    entries = read_journal(finished_session(tmp_path))
    assert [entry.event for entry in entries] == [
        "session_started",
        *5 * ["cell_started", "cell_ended"],
        "session_ended",
    ]
    assert {entry.exit_code for entry in entries if entry.event == "cell_ended"} == {0}


def test_traces_are_planned_kept_listed_and_said(tmp_path: Path) -> None:
    text = matrix_text({"slow": {"FAKE_RATE": "10000"}}, repeats=2, warmup=1)
    code, out = run_session(tmp_path, text, "--trace", "--override", "algo.seed=3")
    assert code == 0
    evidence = read_evidence(out)
    assert evidence.plan.matrix.overrides[-2:] == ("algo.seed=3", TRACE_OVERRIDE)
    assert all(cell.arguments[-1] == TRACE_OVERRIDE for cell in evidence.plan.cells)
    traces = {f"{cell.run}/{TRACE_FILE}" for cell in evidence.plan.cells}
    assert traces == {name for name in evidence.inputs if name.endswith(TRACE_FILE)} and len(traces) == 3
    assert traces < set(read_manifest(out)[0])
    page = (out / "report.md").read_text(encoding="utf-8")
    assert "- 3 runs wrote a timeline, `trace.json` beside its events, for ui.perfetto.dev; rates include what" in page
    assert f"algo.seed=3 {TRACE_OVERRIDE}\n" in page
    assert verify([out], lambda line: None)
    (out / min(traces)).write_text("[]")
    lines: list[str] = []
    assert not verify([out], lines.append) and any(min(traces) in line for line in lines)


def test_a_session_without_trace_says_nothing_of_it(tmp_path: Path) -> None:
    out = finished_session(tmp_path)
    assert "timeline" not in (out / "report.md").read_text(encoding="utf-8")
    assert not list(out.rglob(TRACE_FILE))


def test_nothing_published_names_this_machine(tmp_path: Path) -> None:
    out = finished_session(tmp_path)
    project = str(Path(__file__).resolve().parents[2])
    texts = [path for path in out.rglob("*") if path.is_file() and "tfevents" not in path.name]
    assert len(texts) > 20
    for path in texts:
        content = path.read_text(encoding="utf-8")
        assert project not in content and str(Path.home()) + "/" not in content, path
        assert "repro-session-" not in content, path  # the folder it was run in


def test_bad_cells_say_why_and_do_not_stop_the_others(tmp_path: Path) -> None:
    cases = {mode: {"FAKE_MODE": mode} for mode in FAILING} | {"good": {}}
    code, out = run_session(tmp_path, matrix_text(cases))
    assert code == 4
    result = result_of(out)
    assert result.verdict == "incomplete"
    found = {cell.case: (cell.status, cell.reason or "") for cell in result.cells}
    expected = {
        "crash": ("failed", "exit code 1: RuntimeError: asked to crash"),
        "nan": ("refused", "non_finite: "),
        "clock_step": ("refused", "clock_step: "),
        "no_run_end": ("refused", "missing_run_end: "),
        "damaged": ("refused", "damaged_record: "),
        "duplicate_steps": ("refused", "steps_not_increasing: "),
        "exit3": ("host_unfit", "exit code 3: train: no GPU is visible"),
        "good": ("measured", ""),
        "cut_log": ("measured", ""),  # a cut tail is reported beside the number
    }
    for case, (status, reason) in expected.items():
        assert found[case][0] == status, (case, found[case])
        assert found[case][1].startswith(reason), (case, found[case])
    page = (out / "report.md").read_text()
    assert "## What gave no number" in page and "asked to crash" in page
    assert "cut_log_r1: the last record of the event file is cut" in page
    assert verify([out], lambda line: None)


def test_settings_that_the_trainer_refuses_end_the_session(tmp_path: Path) -> None:
    text = matrix_text({"good": {}, "wrong": {"FAKE_MODE": "dance"}, "later": {}}, repeats=2)
    code, out = run_session(tmp_path, text)
    assert code == 2
    good, wrong, *later = result_of(out).cells
    assert (good.status, wrong.status) == ("measured", "failed")
    assert (wrong.reason or "").startswith("exit code 2: fake_trainer: FAKE_MODE='dance'")
    assert {(cell.status, cell.reason) for cell in later} == {
        ("not_run", "the session stopped because the trainer refused the settings of wrong_r1")
    }
    assert len(later) == 4 and read_journal(out)[-1].event == "session_ended"
    assert verify([out], lambda line: None)


def test_a_closed_output_does_not_end_the_session(tmp_path: Path) -> None:
    matrix, out = tmp_path / "m.toml", tmp_path / "out"
    matrix.write_text(matrix_text({"a": {"FAKE_SECONDS": "0.3"}, "b": {}}))
    script = "import sys; from repro.cli import main; sys.exit(main(sys.argv[1:6], trainer=sys.argv[6:]))"
    command = [sys.executable, "-c", script, "run", "--matrix", str(matrix), "--out", str(out), *TRAINER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("2 runs into ")
        process.stdout.close()
        errors = process.stderr.read()
        code = process.wait(timeout=60)
    assert (code, errors) == (0, "")
    assert [cell.status for cell in result_of(out).cells] == ["measured", "measured"]
    assert verify([out], lambda line: None)


def test_a_full_disk_ends_a_session_with_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(out_dir: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("repro.report.write_report", full)
        code, out = run_session(tmp_path, matrix_text({"one": {}}))
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 1 and "No space left" in line and f"--resume --out {out} goes on" in line
    assert main(["report", str(out)]) == 0 and verify([out], lambda line: None)


def test_a_hanging_cell_is_ended_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repro.late.STALL_SECONDS", 0.2)
    code, out = run_session(tmp_path, matrix_text({"hang": {"FAKE_MODE": "hang"}}), "--timeout", "6")
    assert code == 4
    (cell,) = result_of(out).cells
    assert cell.status == "timeout"
    ended = r"no end after 6 s; its process group ended on SIGTERM"
    assert re.fullmatch(rf"hang: no progress for \d\.\d s; {ended}", cell.reason or "")
    assert (
        "Nothing was measured" in (out / "report.md").read_text() or "gave no number" in (out / "report.md").read_text()
    )
    assert not list(out.glob("figures/*"))
    assert verify([out], lambda line: None)


def test_fail_fast_stops_and_the_rest_is_not_run(tmp_path: Path) -> None:
    code, out = run_session(tmp_path, matrix_text({"bad": {"FAKE_MODE": "crash"}, "good": {}}), "--fail-fast")
    assert code == 4
    assert [(cell.case, cell.status) for cell in result_of(out).cells] == [("bad", "failed"), ("good", "not_run")]


def test_a_host_that_is_unfit_for_every_cell_gives_exit_code_3(tmp_path: Path) -> None:
    assert run_session(tmp_path, matrix_text({"a": {"FAKE_MODE": "exit3"}}))[0] == 3


@pytest.mark.parametrize(("gate", "code"), [(True, 1), (False, 0)])
def test_only_a_gated_regression_gives_exit_code_1(tmp_path: Path, gate: bool, code: int) -> None:
    out = finished_session(tmp_path)
    plan = json.loads((out / PLAN_FILE).read_text())
    plan["matrix"]["comparisons"] = [{"name": "back", "numerator": "slow", "denominator": "fast", "gate": gate}]
    (out / PLAN_FILE).write_text(canonical_json(plan))
    evidence = read_evidence(out)
    result = compute_result(evidence)
    assert result.verdict == "regression"
    assert exit_code(result, evidence) == code


def test_a_run_that_did_other_work_than_planned_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(matrix_text({"a": {}}))
    out, two = tmp_path / "out", ("env", "CUDA_VISIBLE_DEVICES=0,1", *TRAINER)  # two ranks, the plan says one
    assert main(["run", "--matrix", str(tmp_path / "m.toml"), "--out", str(out)], trainer=two) == 4
    (cell,) = result_of(out).cells
    assert (cell.status, cell.steps_per_second) == ("refused", None)
    assert cell.reason == "not_as_planned: world size was planned as 1, the run says 2"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_the_cell_and_leaves_a_valid_journal(tmp_path: Path, number: signal.Signals) -> None:
    matrix, out = tmp_path / "m.toml", tmp_path / "out"
    matrix.write_text(matrix_text({"hang": {"FAKE_MODE": "hang"}, "later": {}}))
    script = "import sys; from repro.cli import main; sys.exit(main(sys.argv[1:6], trainer=sys.argv[6:]))"
    command = [sys.executable, "-c", script, "run", "--matrix", str(matrix), "--out", str(out), *TRAINER]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
    ) as process:
        try:
            deadline = time.monotonic() + 60
            while not (out / "runs" / "hang_r1" / "progress.jsonl").exists():
                assert process.poll() is None and time.monotonic() < deadline, "the cell did not start"
                time.sleep(0.02)
            cells = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            output = process.communicate(timeout=60)[0]
        finally:
            process.kill()
    assert process.returncode == 130, output
    assert cells and not psutil.wait_procs(cells, timeout=10)[1], "the cell is still there"
    entries = read_journal(out)
    assert [entry.event for entry in entries] == [
        "session_started",
        "cell_started",
        "cell_ended",
        "session_interrupted",
    ]
    assert entries[2].outcome == "interrupted"
    assert [(cell.id, cell.status) for cell in result_of(out).cells] == [
        ("hang_r1", "interrupted"),
        ("later_r1", "not_run"),
    ]
    assert output.splitlines()[-1] == f"{out}/report.md"
    assert f"next: the same command with --resume --out {out} goes on; hang_r1 interrupted, by the user" in output
    assert "Traceback" not in output
    assert verify([out], lambda line: None)


def test_a_folder_with_content_is_never_used_again(tmp_path: Path) -> None:
    first = tmp_path / "r"
    first.mkdir()
    assert create_out_dir(first) == first  # it was empty
    (tmp_path / "r-2").mkdir()
    (tmp_path / "r-2" / "x").write_text("x")
    assert create_out_dir(first).name == "r-3"
    with pytest.raises(UsageError, match="cannot make the report folder"):
        create_out_dir(tmp_path / "r-2" / "x" / "y")


def test_two_sessions_that_begin_in_the_same_moment_get_a_folder_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Path.iterdir
    others: list[Path] = []

    def look_while_another_begins(path: Path) -> Iterator[Path]:
        found = list(look(path))
        if not others:
            others.append(path)
            others.append(create_out_dir(path))
        return iter(found)

    monkeypatch.setattr(Path, "iterdir", look_while_another_begins)
    assert create_out_dir(tmp_path / "r").name == "r-2" and others[1] == tmp_path / "r"


WRITING = """
import sys, time
import repro.report
from repro.cli import main
def write_report(out_dir):
    print("writing", flush=True)
    time.sleep(60)
repro.report.write_report = write_report
sys.exit(main(sys.argv[1:6], trainer=sys.argv[6:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_while_the_page_is_written_says_what_to_type(tmp_path: Path, number: signal.Signals) -> None:
    matrix, out = tmp_path / "m.toml", tmp_path / "out"
    matrix.write_text(matrix_text({"a": {}}))
    command = [sys.executable, "-c", WRITING, "run", "--matrix", str(matrix), "--out", str(out), *TRAINER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and "writing\n" in iter(process.stdout.readline, "")
            process.send_signal(number)
            error = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == 130
    assert error == (
        f"repro: interrupted; what was reached is in {out}: repro report {out} writes its page, "
        f"the same command with --resume --out {out} goes on\n"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_after_the_last_line_is_no_crash(number: signal.Signals) -> None:
    script = (
        "import atexit, time; from repro import cli; cli.main = lambda: 0\n"
        "atexit.register(lambda: (print('over', flush=True), time.sleep(60))); cli.program()"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "over\n"
            process.send_signal(number)
            error = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert (process.returncode, error) == (130, "")


def test_a_folder_beside_weights_of_an_earlier_report_is_not_taken(tmp_path: Path) -> None:
    """A report that was moved away or deleted leaves them; its successor would replace them by its own."""
    (tmp_path / "r_models" / "exact_r1").mkdir(parents=True)
    assert create_out_dir(tmp_path / "r").name == "r-2"


@pytest.mark.parametrize("wanted", ["", ".", "/", "..", "a/..", "a\nb", os.fsdecode(b"a\xff")])
def test_a_report_folder_needs_a_name_that_can_be_printed(
    wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"--out .*: give the path of a new folder") as caught:
        create_out_dir(Path(wanted))
    assert "\n" not in str(caught.value) and str(caught.value).isascii()
    assert not list(tmp_path.iterdir())


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_interrupt():
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_session_leaves_the_first_alone(tmp_path: Path) -> None:
    text = matrix_text({"a": {}})
    code, out = run_session(tmp_path, text)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert code == run_session(tmp_path, text)[0] == 0
    assert (tmp_path / "out-2" / RESULT_FILE).is_file()
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_folders_are_named_by_date_matrix_or_gpu_and_commit() -> None:
    smoke = make_plan(load_matrix("smoke"), *make_host(), SOURCE)
    assert default_out_dir(smoke, make_host()[0]) == Path("reports") / f"{smoke.created[:10]}_smoke_0123456"
    host, topology = make_host(gpu_count=2)
    single = make_plan(load_matrix("single"), host, topology, SOURCE)
    assert default_out_dir(single, host).name == f"{single.created[:10]}_h200x1_0123456"


def test_what_a_user_typed_is_redacted_in_the_published_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from repro.redact import Redactor

    monkeypatch.setattr("pathlib.Path.home", lambda: Path("/home/marie"))
    plan = make_plan(toy_matrix(overrides=("algo.x=/home/marie/y",)), *make_host(), SOURCE)
    assert "/home/marie" in json.dumps(plan.model_dump(mode="json"))
    assert "/home/marie" not in json.dumps(published_plan(plan, Redactor()).model_dump(mode="json"))


def test_a_killed_session_can_still_be_reported(tmp_path: Path) -> None:
    from repro.cli import main

    out = finished_session(tmp_path)
    journal = out / JOURNAL_FILE
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:4]) + lines[4][:10])  # killed while slow_r1 ran
    for name in ("MANIFEST.sha256", "result.json", "report.md"):
        (out / name).unlink()
    assert main(["report", str(out)]) == 0
    assert [cell.status for cell in result_of(out).cells] == ["discarded", "interrupted", *3 * ["not_run"]]
    assert verify([out], lambda line: None)
    assert not list((out / "figures").iterdir())


def test_a_session_takes_the_time_it_took_whoever_set_the_clock(tmp_path: Path) -> None:
    out = finished_session(tmp_path)
    journal = out / JOURNAL_FILE
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    entries[-1]["time"] = "2020-01-01T00:00:00.000000Z"
    journal.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    page = derive_report(out, figures=False).files["report.md"].decode()
    assert f" in {duration(entries[-1]['elapsed'])}, 5 runs one after the other" in page
    assert "- The clock of the host was set back: times of the journal are not in order.\n" in page
    for entry in entries:  # as an older version wrote it: what is left is the time of the runs before
        del entry["elapsed"]
    journal.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert 0 < session_seconds(read_journal(out)) < 600
