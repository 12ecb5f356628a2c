"""Runs that do not end in time: which kind of late they are, and where their processes stand."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import fake_trainer
import psutil
import pytest
from session_builder import matrix_text, run_session

from repro.late import examine, handles, why_late
from repro.launch import Ended, run_cell
from repro.layout import REPORT_FILE, RESULT_FILE
from repro.result import Result
from repro.schema import read_model
from repro.verify import verify
from unilab.names import PROGRESS_FILE, RUN_END_FILE

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
ARGUMENTS = ["--algo", "sac", "--task", "g1_walk_flat", "--sim", "mujoco", "training.log_dir=runs/a"]


def aged(path: Path, seconds: float) -> Path:
    """The file's folder, with the file written so many seconds before the time 1000."""
    os.utime(path, (1000.0 - seconds, 1000.0 - seconds))
    return path.parent


def test_a_run_that_recorded_its_end_hangs_in_its_teardown(fake_run: Callable[..., Path]) -> None:
    run = aged(fake_run() / RUN_END_FILE, 42.0)
    assert why_late(run, 1000.0) == "teardown hang: run_end.json was written 42.0 s before"


@pytest.mark.parametrize(
    ("rate", "age", "why"),
    [  # 16 env steps an iteration: 0.16 s of it at rate 100, 4 s at rate 4
        (100.0, 11.0, "hang: no progress for 11.0 s"),
        (100.0, 9.0, "too slow: still progressing, at iteration 30"),
        (4.0, 39.0, "too slow: still progressing, at iteration 30"),
        (4.0, 41.0, "hang: no progress for 41.0 s"),
    ],
)
def test_a_hang_is_ten_seconds_and_ten_iterations(
    fake_run: Callable[..., Path], rate: float, age: float, why: str
) -> None:
    run = aged(fake_run(mode="hang", rate=rate, jitter=0.0) / PROGRESS_FILE, age)
    assert why_late(run, 1000.0) == why


def test_a_run_without_an_iteration_made_no_progress(tmp_path: Path) -> None:
    assert why_late(tmp_path, 1000.0) == "hang: no progress, not one iteration"
    (tmp_path / PROGRESS_FILE).touch()
    assert why_late(tmp_path, 1000.0) == "hang: no progress, not one iteration"


def test_damaged_progress_is_judged_by_its_time(tmp_path: Path) -> None:
    (tmp_path / PROGRESS_FILE).write_text("coffee\n")
    assert why_late(aged(tmp_path / PROGRESS_FILE, 1.0), 1000.0) == "too slow: still progressing"


@LINUX
def test_only_a_process_with_a_handler_is_asked() -> None:
    program = "import signal, sys; {}; print(flush=True); sys.stdin.read()"
    for statement, expected in (("signal.signal(signal.SIGUSR2, print)", True), ("0", False)):
        command = [sys.executable, "-c", program.format(statement)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert handles(process.pid, signal.SIGUSR2) is expected
            assert not handles(process.pid, signal.SIGUSR1)
            process.kill()
    assert not handles(process.pid, signal.SIGUSR2)  # gone


def run_late(folder: Path, mode: str, timeout: float, command: list[str]) -> Ended:
    (folder / "logs").mkdir()
    log, stacks = folder / "logs" / "a.log", folder / "logs" / "a.stacks.txt"
    late = partial(examine, run_dir=folder / "runs" / "a", log=log, stacks=stacks)
    return run_cell(command, {**os.environ, "FAKE_MODE": mode}, folder, log, timeout, grace=0.5, late=late)


@LINUX
def test_the_stacks_of_a_deaf_hang_name_the_function_it_hangs_in(tmp_path: Path) -> None:
    trainer = [sys.executable, str(Path(fake_trainer.__file__)), *ARGUMENTS]
    ended = run_late(tmp_path, "deaf_hang", 6.0, trainer)
    assert ended.outcome == "timeout" and ended.reason is not None
    assert ended.reason.endswith("did not end on SIGTERM within 0.5 s and was killed")
    stacks = (tmp_path / "logs" / "a.stacks.txt").read_text()
    assert re.search(r'File ".*fake_trainer\.py", line \d+ in wait_for_nothing\n', stacks)
    assert re.search(r"^State:\tS \(sleeping\)$", stacks, re.MULTILINE)
    assert "wait_for_nothing" in (tmp_path / "logs" / "a.log").read_text()


@LINUX
def test_every_process_of_the_tree_is_described_and_none_is_left(tmp_path: Path) -> None:
    child = "import time; time.sleep(60)"
    parent = (
        "import faulthandler, signal, subprocess, sys; faulthandler.register(signal.SIGUSR2, file=2); "
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], process_group=0); print(child.pid, flush=True); "
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); child.wait()"
    )
    ended = run_late(tmp_path, "ok", 3.0, [sys.executable, "-c", parent])
    assert ended.outcome == "timeout"
    pid = int((tmp_path / "logs" / "a.log").read_text().split()[0])
    stacks = (tmp_path / "logs" / "a.stacks.txt").read_text()
    first, second = re.split(r"^process ", stacks, flags=re.MULTILINE)[1:]
    assert "most recent call first" in first
    assert second.startswith(f"{pid}: ") and "no Python stacks: it does not handle SIGUSR2" in second
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@LINUX
def test_three_ways_to_be_late_and_a_crash_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repro.late.STALL_SECONDS", 1.0)
    modes = ("hang", "slow", "teardown_hang", "crash")
    code, out = run_session(tmp_path, matrix_text({mode: {"FAKE_MODE": mode} for mode in modes}), "--timeout", "7")
    assert code == 4
    found = {cell.case: (cell.status, cell.reason or "") for cell in read_model(Result, out / RESULT_FILE).cells}
    limit = r"no end after 7 s; its process group ended on SIGTERM"
    for case, status, reason in (
        ("hang", "timeout", rf"hang: no progress for \d\.\d s; {limit}"),
        ("slow", "timeout", rf"too slow: still progressing, at iteration \d+; {limit}"),
        ("teardown_hang", "timeout", rf"teardown hang: run_end\.json was written \d\.\d s before; {limit}"),
        ("crash", "failed", "exit code 1: RuntimeError: asked to crash"),
    ):
        assert found[case][0] == status and re.fullmatch(reason, found[case][1]), (case, found[case])
    page = (out / REPORT_FILE).read_text()
    for case, function in (("hang", "wait_for_nothing"), ("slow", "crawl"), ("teardown_hang", "wait_for_nothing")):
        stacks = f"logs/{case}_r1.stacks.txt"
        assert f"([stacks]({stacks}))" in page and f" in {function}\n" in (out / stacks).read_text()
        assert str(Path(fake_trainer.__file__).parents[2]) not in (out / stacks).read_text()
    assert not (out / "logs" / "crash_r1.stacks.txt").exists() and page.count("([stacks](") == 3
    assert verify([out], lambda line: None)
