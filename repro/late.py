"""A run that does not end in time, looked at before it is ended: which kind of late it is, and where it stands."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

from repro.events import Refusal
from repro.launch import process_tree
from repro.run_files import Progress, read_progress
from unilab.names import PROGRESS_FILE, RUN_END_FILE, STACKS_SIGNAL

STALL_SECONDS = 10.0  # without progress: a checkpoint takes less
STALL_ITERATIONS = 10.0  # and so much longer than the run's mean iteration
ANSWER_SECONDS = 2.0  # for one process to print its stacks
QUIET_SECONDS = 0.1  # without a new line: it has printed them
STATUS_LINES = ("Name", "State", "PPid", "Threads", "VmRSS", "voluntary_ctxt_switches")


def examine(pid: int, run_dir: Path, log: Path, stacks: Path) -> str:
    """Say why a run is late, and write where each of its processes stands.

    Args:
        pid: Of the trainer.
        run_dir: Its run directory.
        log: Where its processes write what they print.
        stacks: File for what is found.
    """
    why = why_late(run_dir, time.time())
    stacks.write_text("\n".join(_standing(process, log) for process in process_tree(pid)), encoding="utf-8")
    return why


def why_late(run_dir: Path, now: float) -> str:
    """Which of the three it is: a hang, a hang after the end was recorded, or a run that needs more time.

    Args:
        run_dir: The run directory.
        now: Seconds since 1970.
    """
    end, progress = run_dir / RUN_END_FILE, run_dir / PROGRESS_FILE
    if end.exists():
        return f"teardown hang: {RUN_END_FILE} was written {now - end.stat().st_mtime:.1f} s before"
    if not progress.exists() or not progress.stat().st_size:
        return "hang: no progress, not one iteration"
    age = now - progress.stat().st_mtime
    entries = _entries(progress)
    if age > max(STALL_SECONDS, STALL_ITERATIONS * _pace(entries)):
        return f"hang: no progress for {age:.1f} s"
    reached = f", at iteration {entries[-1].iteration}" if entries else ""
    return f"too slow: still progressing{reached}"


def _entries(path: Path) -> list[Progress]:
    try:
        return list(read_progress(path).values())
    except Refusal:  # judged by its time alone
        return []


def _pace(entries: list[Progress]) -> float:
    """Mean seconds of an iteration."""
    if len(entries) < 2:
        return 0.0
    first, last = entries[0], entries[-1]
    return (last.monotonic_s - first.monotonic_s) / max(1, last.iteration - first.iteration)


def _standing(process: psutil.Process, log: Path) -> str:
    """What can be seen of one process from outside, and its Python stacks where it prints them."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error as error:
        return f"process {process.pid}: {type(error).__name__}\n"
    return "\n".join([f"process {process.pid}: {command}", *_outside(process.pid), _stacks(process.pid, log), ""])


def _outside(pid: int) -> list[str]:
    """Lines of the kernel about a process; none on systems without /proc."""
    lines = [line for line in _read(pid, "status").splitlines() if line.startswith(STATUS_LINES)]
    return [*lines, *(f"{name}: {text}" for name in ("wchan", "stat") if (text := _read(pid, name).strip()))]


def _stacks(pid: int, log: Path) -> str:
    if not handles(pid, signal.Signals[STACKS_SIGNAL]):
        return f"no Python stacks: it does not handle {STACKS_SIGNAL}"
    before = log.stat().st_size
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.Signals[STACKS_SIGNAL])
    printed = _await_output(log, before)
    return printed or f"no Python stacks: no answer to {STACKS_SIGNAL} within {ANSWER_SECONDS:g} s"


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise; false where that is not known."""
    line = next((line for line in _read(pid, "status").splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def _await_output(log: Path, before: int) -> str:
    """What is written to the log behind position `before`, once nothing more comes."""
    deadline = time.monotonic() + ANSWER_SECONDS
    size, changed = before, time.monotonic()
    while (now := time.monotonic()) < deadline and (size == before or now - changed < QUIET_SECONDS):
        time.sleep(0.02)
        if log.stat().st_size != size:
            size, changed = log.stat().st_size, time.monotonic()
    with log.open("rb") as file:
        file.seek(before)
        return file.read().decode("utf-8", errors="replace").strip()


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
