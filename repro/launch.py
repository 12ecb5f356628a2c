"""Runs one cell as a process group of its own, with a log, a time limit and a clean end in every case."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from repro.journal import Outcome
from repro.plan import CLEARED, Cell
from repro.provenance import trainer_package
from repro.redact import Redactor
from unilab.names import EXIT_OK

GRACE_SECONDS = 10.0
REASON_LENGTH = 300


@dataclass(frozen=True)
class Ended:
    """How a cell's process ended; fields as in `journal.Entry`."""

    outcome: Outcome
    exit_code: int | None
    seconds: float
    reason: str | None


def cell_environment(inherited: Mapping[str, str], cell: Cell) -> dict[str, str]:
    """The environment of a cell: the inherited one without `CLEARED`, then what the cell sets.

    The child runs in the report's folder, so relative entries of PYTHONPATH are made absolute, and a trainer that is
    imported from a checkout is put first: the cell imports the package that `repro doctor` names.
    """
    environment = {name: value for name, value in inherited.items() if name not in CLEARED}
    entries = [str(Path(entry).resolve()) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    package = trainer_package()
    if package is not None and package.parent.name not in ("site-packages", "dist-packages"):
        entries.insert(0, str(package.parent))
    if entries:
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(entries))
    return {**environment, **cell.environment}


def run_cell(
    command: Sequence[str],
    environment: Mapping[str, str],
    out_dir: Path,
    log: Path,
    timeout: float,
    grace: float = GRACE_SECONDS,
) -> Ended:
    """Run a command to its end.

    Args:
        command: Program and arguments.
        environment: Its whole environment.
        out_dir: Its working directory.
        log: File for its output, both streams.
        timeout: Seconds before its process group is ended.
        grace: Seconds between SIGTERM and SIGKILL.

    Returns:
        How it ended. An interrupt (Ctrl-C) ends the process group too and is returned as the outcome `interrupted`.
    """
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command),
            cwd=out_dir,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        outcome, reason = _wait(process, timeout, grace)
    seconds = time.monotonic() - began
    if outcome != "exited":
        return Ended(outcome, None, seconds, reason)
    code = process.returncode
    return Ended("exited", code, seconds, None if code == EXIT_OK else f"{_code_text(code)}: {last_line(log)}")


def _wait(process: subprocess.Popen[bytes], timeout: float, grace: float) -> tuple[Outcome, str | None]:
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        how = _end_group(process, grace)
        return "timeout", f"no end after {timeout:g} s; {how}"
    except KeyboardInterrupt:
        return "interrupted", f"by the user; {_end_group(process, grace)}"
    finally:
        _signal_group(process, signal.SIGKILL)  # whatever the trainer left behind
    return "exited", None


def _end_group(process: subprocess.Popen[bytes], grace: float) -> str:
    """Ask the process group to end, then force it; return which of the two it took."""
    _signal_group(process, signal.SIGTERM)
    try:
        process.wait(grace)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        _signal_group(process, signal.SIGKILL)
        process.wait()
        return f"its process group did not end on SIGTERM within {grace:g} s and was killed"
    return "its process group ended on SIGTERM"


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _code_text(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def last_line(log: Path) -> str:
    """Last line of a log that says something, redacted and cut; a placeholder for an empty log."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    if not lines:
        return "its log is empty"
    text = Redactor(log.parent.parent).text(lines[-1])
    return text if len(text) <= REASON_LENGTH else f"{text[: REASON_LENGTH - 1]}…"
