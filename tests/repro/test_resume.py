"""Sessions that are resumed: after Ctrl-C, after the session was killed, after cells failed; and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_probe
import foreign_trainer
import psutil
import pytest
from session_builder import TOY, TRAINER, finished_session, make_host, matrix_text, run_session

from repro.cli import main
from repro.evidence import read_evidence
from repro.journal import read_journal
from repro.layout import HOST_FILE, JOURNAL_FILE, MANIFEST_FILE, PLAN_FILE, REPORT_FILE, RESULT_FILE
from repro.manifest import write_manifest
from repro.plan import Plan
from repro.redact import PROJECT
from repro.report import Report, write_report
from repro.resume import RUN_MARK, claim
from repro.schema import canonical_json, read_model
from repro.verify import verify

SESSION = "import sys; from repro.cli import main; sys.exit(main(sys.argv[1:6], trainer=sys.argv[6:]))"
THREE = matrix_text({"a": {}, "b": {"FAKE_SECONDS": "60"}, "c": {}})


def resume(out: Path, matrix: Path, *flags: str) -> int:
    return main(["run", "--resume", "--matrix", str(matrix), "--out", str(out), *flags], trainer=TRAINER)


def events(out: Path) -> list[str]:
    return [f"{entry.event.removeprefix('session_')} {entry.cell or ''}".strip() for entry in read_journal(out)]


def statuses(out: Path) -> dict[str, str]:
    return {item.cell.id: item.status for item in read_evidence(out).cells}


def checked(out: Path) -> list[str]:
    lines: list[str] = []
    assert verify([out], lines.append), lines
    return lines


def stop_in_the_middle(folder: Path, number: signal.Signals) -> tuple[Path, Path]:
    """Run `THREE` in a process of its own and send it a signal while its second cell runs; the third is quick."""
    matrix, out = folder / "m.toml", folder / "out"
    matrix.write_text(THREE)
    command = [sys.executable, "-c", SESSION, "run", "--matrix", str(matrix), "--out", str(out), *TRAINER]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=folder) as process:
        try:
            deadline = time.monotonic() + 60
            while not (out / "runs" / "b_r1" / "progress.jsonl").exists():
                assert process.poll() is None and time.monotonic() < deadline, "the cell did not start"
                time.sleep(0.02)
            process.send_signal(number)
            process.wait(timeout=60)
        finally:
            process.kill()
    return out, matrix


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of this process end at once, whatever they were planned to do."""
    from repro import launch

    run = launch.run_cell

    def quick(command: list[str], environment: dict[str, str], *rest: object) -> launch.Ended:
        return run(command, {**environment, "FAKE_SECONDS": "0"}, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(launch, "run_cell", quick)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_session_that_was_stopped_goes_on_where_it_was(tmp_path: Path, number: signal.Signals) -> None:
    out, matrix = stop_in_the_middle(tmp_path, number)
    before = (out / JOURNAL_FILE).read_bytes()
    kept = {path: path.read_bytes() for path in (out / "runs" / "a_r1").iterdir()}
    if number == signal.SIGKILL:
        assert events(out)[-1] == "cell_started b_r1" and not (out / MANIFEST_FILE).exists()
        with (out / JOURNAL_FILE).open("ab") as file:
            file.write(b'{"event": "cell_end')  # the end of b, cut
    else:
        assert events(out)[-2:] == ["cell_ended b_r1", "interrupted"]
    assert resume(out, matrix) == 0
    assert (out / JOURNAL_FILE).read_bytes().startswith(before)
    again = ["resumed", "cell_started b_r1", "cell_ended b_r1", "cell_started c_r1", "cell_ended c_r1", "ended"]
    assert events(out)[len(before.splitlines()) :] == again
    assert set(statuses(out).values()) == {"measured"}
    assert kept == {path: path.read_bytes() for path in (out / "runs" / "a_r1").iterdir()}
    aside = out / "superseded" / "b_r1.1"
    assert {"run", "cell.log", "telemetry.jsonl"} == {path.name for path in aside.iterdir()}
    assert str(tmp_path) not in "".join(path.read_text() for path in aside.rglob("*.json"))
    page = (out / REPORT_FILE).read_text()
    assert "- The session was resumed 1 time: runs before and after lie further apart than planned.\n" in page
    ending = "was interrupted: by the user; " if number == signal.SIGINT else "was cut off with its session."
    assert f"- b_r1 was run again: attempt 1 {ending}" in page
    assert checked(out)[-1].startswith("verified: ") and checked(out)[-1].endswith(", 3 runs recomputed")


def failing_once(folder: Path) -> tuple[Path, Path]:
    """A session of a good cell and one that fails for as long as the file `broken` is there."""
    folder.mkdir(exist_ok=True)
    trainer, matrix, out = folder / "trainer.py", folder / "matrix.toml", folder / "out"
    broken = folder / "broken"
    broken.touch()
    matrix.write_text(matrix_text({"good": {"NOTE": str(PROJECT)}, "bad": {"BROKEN": str(broken)}}))
    trainer.write_text(
        "import os, subprocess, sys\n"
        "if os.path.exists(os.environ.get('BROKEN', '')): sys.exit('out of luck')\n"
        f"sys.exit(subprocess.call([*{list(TRAINER)!r}, *sys.argv[1:]]))\n"
    )
    return out, matrix


def test_only_failed_cells_are_run_again_and_their_failure_stays_in_the_report(tmp_path: Path) -> None:
    out, matrix = failing_once(tmp_path)
    command = ["run", "--matrix", str(matrix), "--out", str(out)]
    trainer = [sys.executable, str(tmp_path / "trainer.py")]
    assert main(command, trainer=trainer) == 4
    assert main([*command, "--resume"], trainer=trainer) == 4  # it fails again
    (tmp_path / "broken").unlink()
    assert main([*command, "--resume"], trainer=trainer) == 0
    assert events(out).count("cell_started good_r1") == 1 and events(out).count("cell_started bad_r1") == 3
    page = (out / REPORT_FILE).read_text()
    for attempt in (1, 2):
        assert f"- bad_r1 was run again: attempt {attempt} gave exit code 1: out of luck.\n" in page
        assert (out / "superseded" / f"bad_r1.{attempt}" / "cell.log").read_text() == "out of luck\n"
    assert "resumed 2 times" in page
    checked(out)


def test_a_complete_session_has_nothing_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run_session(tmp_path, TOY)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert resume(out, tmp_path / "matrix.toml") == code == 0
    assert capsys.readouterr().out == f"nothing to do: every run in {out} has its number\n"
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    (out / MANIFEST_FILE).unlink()  # killed while it wrote the report
    assert resume(out, tmp_path / "matrix.toml") == 0
    assert events(out)[-3:] == ["ended", "resumed", "ended"] and not (out / "superseded").exists()
    checked(out)


def edit(out: Path, file: str, change: Callable[[dict[str, object]], object]) -> None:
    content = json.loads((out / file).read_text())
    change(content)
    (out / file).write_text(canonical_json(content))
    write_manifest(out)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (PLAN_FILE, lambda plan: plan["source"].update(commit="f" * 40), r'source\.commit in its plan\.json is "ffff'),
        (PLAN_FILE, lambda plan: plan["source"].update(diff_sha256="d"), r'source\.diff_sha256 in its .* is "d", here'),
        (PLAN_FILE, lambda plan: plan.update(timeout_seconds=5.0), r"timeout_seconds in its plan\.json is 5\.0, here "),
        (HOST_FILE, lambda host: host.update(cpu_model="Z80"), r'cpu_model in its host\.json is "Z80", here it is "'),
        (HOST_FILE, lambda host: host["versions"].update(torch="0.1"), r'versions\.torch in its host\.json is "0\.1"'),
    ],
)
def test_another_code_host_or_package_is_refused_by_name(
    tmp_path: Path,
    file: str,
    change: Callable[[dict[str, object]], object],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = finished_session(tmp_path)
    (tmp_path / "matrix.toml").write_text(TOY)
    edit(out, file, change)
    before = (out / JOURNAL_FILE).read_bytes()
    assert resume(out, tmp_path / "matrix.toml") == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1 and "leave out --resume" in error
    assert (out / JOURNAL_FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--iterations", "41"], "matrix.iterations in its plan.json is 40, here it is 41"),
        (["--repeats", "3"], "matrix.repeats in its plan.json is 2, here it is 3"),
        (["--override", "algo.seed=2"], "matrix.overrides in its plan.json is [], here it is "),
        (["--prefix", "x"], 'cells.0.id in its plan.json is "warmup1_slow", here it is "x_warmup1_slow"'),
    ],
)
def test_another_matrix_is_refused_by_name(
    tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = finished_session(tmp_path)
    (tmp_path / "matrix.toml").write_text(TOY)
    assert resume(out, tmp_path / "matrix.toml", *flags) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_session_and_files_that_were_changed_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "matrix.toml").write_text(TOY)
    assert main(["run", "--resume", "--matrix", str(tmp_path / "matrix.toml")], trainer=TRAINER) == 2
    assert "--resume needs --out DIR" in capsys.readouterr().err
    assert resume(tmp_path / "nowhere", tmp_path / "matrix.toml") == 2
    assert "holds no plan.json, so no session began there" in capsys.readouterr().err
    out = finished_session(tmp_path)
    (out / "logs" / "slow_r1.log").write_text("other")
    assert resume(out, tmp_path / "matrix.toml") == 2
    assert "logs/slow_r1.log: the file or its line" in capsys.readouterr().err


def test_a_session_that_still_runs_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = finished_session(tmp_path)
    (tmp_path / "matrix.toml").write_text(TOY)
    with claim(out):
        assert resume(out, tmp_path / "matrix.toml") == 2
    assert "a session still runs in" in capsys.readouterr().err


FOREIGN = """
import sys, time
from pathlib import Path
sys.path.insert(0, {folder!r})
from foreign_trainer import write_events
out, goes_on = Path(sys.argv[1]), Path(sys.argv[2])
write_events(out, 40)
(out / "on_walker01.yaml").write_text(f"home: {{Path.home()}}/x\\n")
(out / "latest").symlink_to(out / "nowhere")
while goes_on.exists():
    time.sleep(0.02)
"""
WRAPPED = {
    "shell": '"$@"; true',  # the shell is told to end with the session, its child is not
    "daemon": 'setsid "$@" >/dev/null 2>&1 & wait',
    "without variables": 'env -i "$@"; true',
}


@pytest.fixture
def goes_on(tmp_path: Path) -> Iterator[Path]:
    """A file for as long as which `FOREIGN` goes on."""
    path = tmp_path / "goes_on"
    path.touch()
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.skipif(sys.platform != "linux", reason="setsid, and the tie of a run to its session")
@pytest.mark.parametrize("wrapper", WRAPPED)
def test_another_trainer_that_outlives_its_killed_session_is_named_and_what_it_left_is_cleaned(
    wrapper: str, goes_on: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "walker01")
    script, matrix, out = (tmp_path / name for name in ("theirs.py", "m.toml", "out"))
    script.write_text(FOREIGN.format(folder=str(Path(foreign_trainer.__file__).parent)))
    words = ["sh", "-c", WRAPPED[wrapper], "sh", sys.executable, str(script), "{run_dir}", str(goes_on)]
    case = f'[[cases]]\nname = "theirs"\nreason = "Another."\nworkers = 1\ncommand = {json.dumps(words)}\n'
    matrix.write_text(matrix_text({}) + case + f'event_tag = "{foreign_trainer.TAG}"\nstep_axis = 64\n')
    command = [sys.executable, "-c", SESSION, "run", "--matrix", str(matrix), "--out", str(out), *TRAINER]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 60
            while not (out / "runs" / "theirs_r1" / "latest").is_symlink():
                assert process.poll() is None and time.monotonic() < deadline, "the cell did not start"
                time.sleep(0.02)
        finally:
            process.kill()
    (theirs,) = (
        item for item in psutil.process_iter(["cmdline"]) if (item.info["cmdline"] or [])[1:2] == [str(script)]
    )
    monkeypatch.setattr("repro.resume.GRACE_SECONDS", 0.2)
    for type_in in (lambda: resume(out, matrix), lambda: main(["report", str(out)])):
        assert type_in() == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"{theirs.pid} (python" in error and error.endswith(f"end it, then type this again: kill {theirs.pid}\n")
    assert events(out)[-1] == "cell_started theirs_r1" and not (out / MANIFEST_FILE).exists()
    monkeypatch.setattr("repro.resume.GRACE_SECONDS", 10.0)
    goes_on.unlink()
    if wrapper == "shell":  # a page of what was reached in between is fit to publish too
        assert main(["report", str(out)]) == 0
        assert "runs/theirs_r1/on_host.yaml\n" in (out / MANIFEST_FILE).read_text()
        checked(out)
    assert resume(out, matrix) == 0
    left = out / "superseded" / "theirs_r1.1" / "run"
    assert [path.name for path in left.iterdir() if "tfevents" not in path.name] == ["on_host.yaml"]
    assert (left / "on_host.yaml").read_text() == "home: <home>/x\n"
    checked(out)


def killed_session(folder: Path) -> Path:
    """A finished session as if it had been killed while its second cell ran."""
    out = finished_session(folder)
    (folder / "matrix.toml").write_text(TOY)
    lines = (out / JOURNAL_FILE).read_bytes().splitlines(keepends=True)
    (out / JOURNAL_FILE).write_bytes(b"".join(lines[:4]))
    assert events(out)[-2:] == ["cell_ended warmup1_slow", "cell_started slow_r1"]
    for name in (MANIFEST_FILE, RESULT_FILE, REPORT_FILE):
        (out / name).unlink()
    for cell in read_model(Plan, out / PLAN_FILE).cells[2:]:
        shutil.rmtree(out / cell.run)
        (out / cell.log).unlink()
        (out / cell.telemetry).unlink()
    return out


def test_a_killed_session_that_was_rendered_goes_on_though_its_run_wrote_more(tmp_path: Path) -> None:
    out = killed_session(tmp_path)
    assert main(["report", str(out)]) == 0
    (out / "runs" / "slow_r1" / "late.json").write_text("{}")
    with (out / "logs" / "slow_r1.log").open("a") as log:
        log.write("more\n")
    lines: list[str] = []
    assert not verify([out], lines.append)
    assert main(["report", str(out)]) == 0
    checked(out)
    (out / "runs" / "slow_r1" / "later.json").write_text("{}")
    assert resume(out, tmp_path / "matrix.toml") == 0
    checked(out)


@pytest.mark.parametrize("name", ["logs/warmup1_slow.log", "runs/warmup1_slow/new.json", HOST_FILE])
def test_what_had_ended_stays_as_it_was_listed(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = killed_session(tmp_path)
    assert main(["report", str(out)]) == 0
    with (out / name).open("a") as file:
        file.write(" ")
    assert main(["report", str(out)]) == 1 and resume(out, tmp_path / "matrix.toml") == 2
    assert f"{out}: {name}: " in capsys.readouterr().err.splitlines()[-1] or name == HOST_FILE


def test_a_journal_that_was_cut_is_no_session_that_went_on(tmp_path: Path) -> None:
    out = finished_session(tmp_path)
    lines = (out / JOURNAL_FILE).read_bytes().splitlines(keepends=True)
    (out / JOURNAL_FILE).write_bytes(b"".join(lines[:4]))
    assert main(["report", str(out)]) == 1


def test_no_page_is_written_while_the_session_runs_or_writes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, codes = tmp_path / "out", []
    before: set[Path] = set()

    def meanwhile(out_dir: Path) -> Report:
        before.update(out_dir.rglob("*"))
        codes.append(main(["report", str(out_dir)]))
        assert before == set(out_dir.rglob("*"))
        return write_report(out_dir)

    monkeypatch.setattr("repro.report.write_report", meanwhile)
    assert run_session(tmp_path, matrix_text({"a": {}})) == (0, out) and codes == [2]
    error = f"repro: a session still runs in {out}, or its page is written; wait for its end, then type this again\n"
    assert capsys.readouterr().err == error


def test_a_session_killed_while_it_moved_an_attempt_aside_goes_on(tmp_path: Path) -> None:
    text = matrix_text({"bad": {"FAKE_MODE": "crash"}, "good": {}})
    _, out = run_session(tmp_path, text)
    aside = out / "superseded" / "bad_r1.1"
    aside.mkdir(parents=True)
    (out / "logs" / "bad_r1.log").rename(aside / "cell.log")
    for name in (MANIFEST_FILE, RESULT_FILE, REPORT_FILE):
        (out / name).unlink()
    assert main(["report", str(out)]) == 0 and statuses(out)["bad_r1"] == "failed"
    checked(out)
    assert resume(out, tmp_path / "matrix.toml") == 4
    assert {path.name for path in aside.iterdir()} == {"run", "cell.log", "telemetry.jsonl"}
    checked(out)


def test_a_session_killed_while_it_redacted_a_file_has_a_report_that_verifies(tmp_path: Path) -> None:
    _, out = run_session(tmp_path, matrix_text({"bad": {"FAKE_MODE": "crash"}, "good": {}}))
    for name in (MANIFEST_FILE, RESULT_FILE, REPORT_FILE):
        (out / name).unlink()
    (out / "logs" / ".bad_r1.log.redacted").touch()
    assert main(["report", str(out)]) == 0
    checked(out)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda out: (out / "superseded" / "bad_r1.1" / "cell.log").unlink(), "bad_r1.1/cell.log is missing, though"),
        (lambda out: (out / "superseded" / "good_r1.3").mkdir(), "good_r1.3: is no attempt of the journal"),
        (lambda out: (out / "superseded" / "note.txt").touch(), "superseded/note.txt: is no attempt of the journal"),
    ],
)
def test_superseded_attempts_are_those_of_the_journal(
    tmp_path: Path, spoil: Callable[[Path], object], problem: str
) -> None:
    _, out = run_session(tmp_path, matrix_text({"bad": {"FAKE_MODE": "crash"}, "good": {}}))
    assert resume(out, tmp_path / "matrix.toml") == 4
    checked(out)
    spoil(out)
    write_report(out)
    lines: list[str] = []
    assert not verify([out], lines.append)
    assert any(problem in line for line in lines), lines


def test_the_plan_of_a_resumed_session_stays_the_first(tmp_path: Path) -> None:
    _, out = run_session(tmp_path, matrix_text({"bad": {"FAKE_MODE": "crash"}}))
    plan, host = (out / PLAN_FILE).read_bytes(), (out / HOST_FILE).read_bytes()
    assert resume(out, tmp_path / "matrix.toml") == 4
    assert ((out / PLAN_FILE).read_bytes(), (out / HOST_FILE).read_bytes()) == (plan, host)
    assert read_model(Plan, out / PLAN_FILE).cells[0].id == "bad_r1"


@pytest.mark.parametrize(("mode", "code"), [("ok", 4), ("correctness:fail", 2)])
def test_passed_probes_are_not_run_again_and_failed_ones_end_it(
    mode: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("repro.probe.PROGRAM", (sys.executable, str(Path(fake_probe.__file__))))
    monkeypatch.setenv("FAKE_PROBE", mode)
    text = matrix_text({"bad": {"FAKE_MODE": "crash"}}, extra='probes = ["correctness"]\n')
    _, out = run_session(tmp_path, text)
    assert resume(out, tmp_path / "matrix.toml") == code
    assert events(out).count("probe_started") == 1
    assert ("probe correctness failed; look for the fault" in capsys.readouterr().err) is (code == 2)
    checked(out)


def test_a_session_whose_other_runs_this_host_cannot_hold_has_nothing_to_do_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("repro.cli.find_host", lambda: make_host(cpus=1))
    text = matrix_text({"one": {}, "two": {}})
    _, out = run_session(tmp_path, "workers = 2".join(text.rsplit("workers = 1", 1)))
    capsys.readouterr()
    assert resume(out, tmp_path / "matrix.toml") == 4
    assert capsys.readouterr().out == (
        f"nothing to do: every run in {out} has its number; skipped, as this host cannot hold them: two_r1\n"
    )


def test_the_shell_that_a_command_is_typed_in_is_no_run(tmp_path: Path) -> None:
    """One that was opened from within a run has its mark."""
    program = "import sys, repro.resume, pathlib; print(repro.resume._runs(pathlib.Path(sys.argv[1])))"
    shell = ["sh", "-c", '"$0" -c "$1" "$2"; true', sys.executable, program, str(tmp_path)]
    environment = {**os.environ, RUN_MARK: str(tmp_path)}
    ended = subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "{}\n"
