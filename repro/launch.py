"""Runs one cell as a process group of its own, with a log, a time limit and a clean end in every case.

Even where the suite itself is killed: on Linux a cell gets SIGTERM when the thread that started it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

import psutil

from repro.journal import Outcome
from repro.plan import CLEARED, Cell
from repro.provenance import trainer_package
from repro.redact import Redactor
from unilab.names import EXIT_OK

GRACE_SECONDS = 10.0
REASON_LENGTH = 300
TAIL_BYTES = 2**16  # of a log, in which its last line is looked for
KILL_ROUNDS = 3  # what is killed may have started another just before
SET_CHILD_SUBREAPER = 36  # of prctl: orphans below this process become its children
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Run as a program of its own, which becomes the cell: Popen's preexec_fn is unsafe beside the view's thread.
_TIED = """
import ctypes, os, signal, sys
parent, command = int(sys.argv[1]), sys.argv[2:]
if ctypes.CDLL(None, use_errno=True).prctl(1, int(signal.SIGTERM)):  # 1: PR_SET_PDEATHSIG
    sys.exit(f"cannot tie the run to the suite: {os.strerror(ctypes.get_errno())}")
if os.getppid() != parent:
    sys.exit("the suite ended before the run began")
try:
    os.execvp(command[0], command)
except OSError as error:
    sys.exit(f"cannot start {command[0]}: {error.strerror}")
"""


@dataclass(frozen=True)
class Ended:
    """How a cell's process ended; fields as in `journal.Entry`."""

    outcome: Outcome
    exit_code: int | None
    seconds: float
    reason: str | None


class Runner(Protocol):
    """Runs a command to its end, as `run_cell`."""

    def __call__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        out_dir: Path,
        log: Path,
        timeout: float,
        grace: float = GRACE_SECONDS,
        late: Callable[[int], str] | None = None,
    ) -> Ended:
        """Run it."""


def local_runner(cell: Cell) -> Runner:
    """What runs a cell's commands on this host."""
    return run_cell


def cell_environment(inherited: Mapping[str, str], cell: Cell, root: Path | None = None) -> dict[str, str]:
    """The environment of a cell: `trainer_environment`, then what the cell sets."""
    return {**trainer_environment(inherited, root), **cell.environment}


def trainer_environment(inherited: Mapping[str, str], root: Path | None = None) -> dict[str, str]:
    """The inherited environment without `CLEARED`, in which the trainer's package is found.

    The child runs in the report's folder, so relative entries of PYTHONPATH are made absolute, and a trainer that is
    imported from a checkout is put first: the cell imports the package that `repro doctor` names. With a `root` it is
    the package in there.
    """
    environment = {name: value for name, value in inherited.items() if name not in CLEARED}
    entries = [str(Path(entry).resolve()) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    package = trainer_package()
    if root is not None:
        entries.insert(0, str(root))
    elif package is not None and package.parent.name not in ("site-packages", "dist-packages"):
        entries.insert(0, str(package.parent))
    if entries:
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(entries))
    return environment


def run_cell(
    command: Sequence[str],
    environment: Mapping[str, str],
    out_dir: Path,
    log: Path,
    timeout: float,
    grace: float = GRACE_SECONDS,
    late: Callable[[int], str] | None = None,
) -> Ended:
    """Run a command to its end.

    Args:
        command: Program and arguments.
        environment: Its whole environment.
        out_dir: Its working directory.
        log: File for its output, both streams.
        timeout: Seconds before its process group is ended.
        grace: Seconds between SIGTERM and SIGKILL.
        late: Called with the process id when the time is over, before anything is ended; says why it is late.

    Returns:
        How it ended. An interrupt (Ctrl-C) ends the process group too and is returned as the outcome `interrupted`.
    """
    began = time.monotonic()
    with log.open("wb") as output, interrupts_held() as let_interrupts_in, orphans_ended():
        process = subprocess.Popen(
            _tied(command),
            cwd=out_dir,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        outcome, reason = _wait(process, timeout, grace, let_interrupts_in, late)
    seconds = time.monotonic() - began
    if outcome != "exited":
        return Ended(outcome, None, seconds, reason)
    code = process.returncode
    return Ended("exited", code, seconds, None if code == EXIT_OK else f"{_code_text(code)}: {last_line(log)}")


def _tied(command: Sequence[str]) -> list[str]:
    """The command, on Linux behind a program that makes it end with its parent; other systems have no such call."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command]


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Make SIGTERM and SIGHUP act as Ctrl-C does: a stopped container or closed terminal leaves no cell.

    A signal that is ignored stays so, as SIGHUP under nohup.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [number for number in INTERRUPTS if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Keep interrupts back from here until the yielded function is called, which lets them in again, late ones first.

    So none can fall between the start of a process and the code that would end it. Handlers are replaced, not signals
    blocked: a blocked signal would reach the view's thread, and a cell would inherit the block.
    """
    came: list[int] = []
    before: dict[int, Callable[[int, FrameType | None], object]] = {}

    def let_in() -> None:
        for number in list(before):
            signal.signal(number, before.pop(number))
        while came:
            signal.raise_signal(came.pop())

    try:
        if threading.current_thread() is threading.main_thread():  # no other thread is interrupted
            for number in INTERRUPTS:
                handler = signal.getsignal(number)
                if callable(handler):  # what is ignored, as under nohup, or ends the suite at once stays so
                    before[number] = handler
                    signal.signal(number, lambda received, _: came.append(received))
        yield let_in
    finally:
        let_in()


@contextlib.contextmanager
def orphans_ended() -> Iterator[None]:
    """End what a run leaves running outside its process group, as a daemon, which would take CPUs from the next run.

    On Linux alone: elsewhere such a process is nobody's child any more.
    """
    if sys.platform != "linux":
        yield
        return
    before = set(process_tree(os.getpid()))
    _adopt(True)
    try:
        yield
    finally:
        for _ in range(KILL_ROUNDS):
            left = [process for process in process_tree(os.getpid()) if process not in before]
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, GRACE_SECONDS)
        _adopt(False)


def _adopt(orphans: bool) -> None:
    """Whether orphans below this process become its children; an old kernel refuses and leaves things as they are."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0)


def _wait(
    process: subprocess.Popen[bytes],
    timeout: float,
    grace: float,
    let_interrupts_in: Callable[[], None],
    late: Callable[[int], str] | None,
) -> tuple[Outcome, str | None]:
    try:
        let_interrupts_in()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            why = f"{late(process.pid)}; " if late is not None else ""
            return "timeout", f"{why}no end after {timeout:g} s; {_end_group(process, grace)}"
    except KeyboardInterrupt:
        return "interrupted", f"by the user; {_end_group(process, grace)}"
    finally:
        _signal_group(process, signal.SIGKILL)  # whatever the trainer left behind
    return "exited", None


def _end_group(process: subprocess.Popen[bytes], grace: float) -> str:
    """Ask the process group to end, then force it; return which of the two it took.

    Ranks and collectors have groups of their own. They end with their parent, unless they hang too.
    """
    tree = process_tree(process.pid)
    _signal_group(process, signal.SIGTERM)
    try:
        process.wait(grace)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        _signal_group(process, signal.SIGKILL)
        process.wait()
        return f"its process group did not end on SIGTERM within {grace:g} s and was killed"
    finally:
        for other in tree[1:]:
            with contextlib.suppress(psutil.Error):
                other.kill()
    return "its process group ended on SIGTERM"


def process_tree(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it; empty where it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _code_text(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def last_line(log: Path) -> str:
    """Last line of a log that says something, redacted and cut; a placeholder for an empty log."""
    with log.open("rb") as file:  # from near its end: a log may be larger than the memory
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        tail = file.read().decode("utf-8", errors="replace")
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    if not lines:
        return "its log is empty"
    text = Redactor(log.parent.parent).text(lines[-1])
    return text if len(text) <= REASON_LENGTH else f"{text[: REASON_LENGTH - 1]}…"
