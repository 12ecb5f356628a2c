from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from session_builder import SOURCE, make_host, toy_matrix

from repro.launch import cell_environment, last_line, run_cell
from repro.plan import Cell, make_plan


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@pytest.fixture
def cell() -> Cell:
    return make_plan(toy_matrix(), *make_host(), SOURCE).cells[1]


def test_a_good_end_has_no_reason_and_both_streams_are_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "cell.log"
    ended = run_cell(
        python("import os, sys; print(os.getcwd()); print('x', file=sys.stderr)"), os.environ, tmp_path, log, 60
    )
    assert (ended.outcome, ended.exit_code, ended.reason) == ("exited", 0, None)
    assert log.read_text().split() == [str(tmp_path), "x"]


@pytest.mark.parametrize(
    ("program", "code", "reason"),
    [
        ("raise SystemExit(3)", 3, "exit code 3: its log is empty"),
        ("print('a'); print('no GPU'); raise SystemExit(2)", 2, "exit code 2: no GPU"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, "killed by SIGKILL: its log is empty"),
    ],
)
def test_a_bad_end_names_the_code_and_the_last_line(tmp_path: Path, program: str, code: int, reason: str) -> None:
    ended = run_cell(python(program), os.environ, tmp_path, tmp_path / "cell.log", 60)
    assert (ended.outcome, ended.exit_code, ended.reason) == ("exited", code, reason)


def test_a_time_limit_ends_the_group_politely(tmp_path: Path) -> None:
    ended = run_cell(python("import time; time.sleep(60)"), os.environ, tmp_path, tmp_path / "cell.log", 0.2)
    assert (ended.outcome, ended.exit_code) == ("timeout", None)
    assert ended.reason == "no end after 0.2 s; its process group ended on SIGTERM"
    assert ended.seconds < 10


def test_a_group_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    ended = run_cell(python(deaf), os.environ, tmp_path, tmp_path / "cell.log", 2.0, grace=0.2)
    assert ended.reason is not None
    assert ended.reason.endswith("did not end on SIGTERM within 0.2 s and was killed")


def test_children_left_behind_are_killed(tmp_path: Path) -> None:
    parent = (
        "import subprocess, sys; "
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], "
        "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"
    )
    log = tmp_path / "cell.log"
    assert run_cell(python(parent), os.environ, tmp_path, log, 60).exit_code == 0
    child = int(log.read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child is still there"
        time.sleep(0.02)


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 30
    while not path.exists() or not path.read_text().endswith("\n"):
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.02)
    return path.read_text()


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans another parent")
def test_a_daemon_left_behind_is_killed(tmp_path: Path) -> None:
    trainer = (
        "import os, time\n"
        "if os.fork(): os.wait()\n"
        "else:\n"
        "    os.setsid()\n"
        "    if os.fork(): os._exit(0)\n"
        "    print(os.getpid(), flush=True); time.sleep(60)\n"
    )
    log, others = tmp_path / "cell.log", psutil.Process().children()
    assert run_cell(python(trainer + "time.sleep(0.5)"), os.environ, tmp_path, log, 60).exit_code == 0
    assert not is_alive(int(log.read_text()))
    assert set(psutil.Process().children()) <= set(others)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to its parent")
def test_a_killed_suite_leaves_no_cell_behind(tmp_path: Path) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    suite = (
        "import os, sys; from pathlib import Path; from repro.launch import run_cell; "
        f"run_cell([sys.executable, '-c', {program!r}], os.environ, Path('.'), Path('cell.log'), 60)"
    )
    with subprocess.Popen(python(suite), cwd=tmp_path) as process:
        cell = int(wait_for(tmp_path / "cell.log"))
        assert is_alive(cell)
        process.kill()
    deadline = time.monotonic() + 10
    while is_alive(cell):
        assert time.monotonic() < deadline, "the cell is still there"
        time.sleep(0.02)


def test_an_interrupt_while_a_cell_starts_ends_the_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(real(*arguments, **options))
        signal.raise_signal(signal.SIGINT)  # before the caller has the process in hand
        return started[0]

    monkeypatch.setattr("repro.launch.subprocess.Popen", start)
    ended = run_cell(python("import time; time.sleep(60)"), os.environ, tmp_path, tmp_path / "cell.log", 60)
    assert ended.outcome == "interrupted"
    assert started[0].poll() is not None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_cell_starts_with_the_usual_signals(tmp_path: Path) -> None:
    program = (
        "import signal as s; print(s.pthread_sigmask(s.SIG_BLOCK, []), s.getsignal(s.SIGINT) is s.default_int_handler, "
        "s.getsignal(s.SIGTERM) is s.SIG_DFL)"
    )
    log = tmp_path / "cell.log"
    assert run_cell(python(program), os.environ, tmp_path, log, 60).exit_code == 0
    assert log.read_text() == "set() True True\n"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the start itself fails")
def test_a_trainer_that_is_not_there_is_named(tmp_path: Path) -> None:
    ended = run_cell(["/nonexistent/trainer"], os.environ, tmp_path, tmp_path / "cell.log", 60)
    assert ended.reason == "exit code 1: cannot start /nonexistent/trainer: No such file or directory"


def test_variables_that_change_the_work_are_taken_out_unless_a_case_sets_them(cell: Cell) -> None:
    inherited = {
        "NCCL_PROTO": "LL",
        "NCCL_ALGO": "Ring",
        "NCCL_DEBUG": "INFO",
        "CUDA_VISIBLE_DEVICES": "0",
        "HOME": "/h",
    }
    chosen = cell.model_copy(update={"environment": {"NCCL_ALGO": "Tree"}})
    environment = cell_environment(inherited, chosen)
    assert {name: value for name, value in environment.items() if name != "PYTHONPATH"} == {
        "NCCL_ALGO": "Tree",
        "NCCL_DEBUG": "INFO",
        "HOME": "/h",
    }


def test_a_relative_import_path_survives_the_change_of_folder(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repro.launch.trainer_package", lambda: Path("/src/unilab"))
    environment = cell_environment({"PYTHONPATH": "lib"}, cell)
    assert environment["PYTHONPATH"].split(os.pathsep) == ["/src", str(Path("lib").resolve())]


def test_the_last_line_is_cut(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "cell.log"
    log.parent.mkdir()
    log.write_text("first\n" + "x" * 1000 + "\n\n  \n")
    assert last_line(log) == "x" * 299 + "…"


def test_only_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "cell.log"
    log.parent.mkdir()
    with log.open("wb") as file:
        file.truncate(2**38)  # a hole, larger than the memory
        file.seek(2**38)
        file.write(b"\nlast\n")
    assert last_line(log) == "last"
