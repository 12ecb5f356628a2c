"""`--resume`: `repro run` and `repro ab` go on with a session that was interrupted or whose cells did not all end well.

Only on the same plan, code, host and packages. Cells with a number stay, the others are run again; what their earlier
attempts left is moved aside and stays in the report.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from repro.errors import UsageError
from repro.evidence import CellEvidence, Evidence, read_evidence
from repro.host import Host
from repro.journal import Journal
from repro.launch import GRACE_SECONDS
from repro.layout import (
    FIGURES_DIR,
    HOST_FILE,
    JOURNAL_FILE,
    LOGS_DIR,
    MANIFEST_FILE,
    PLAN_FILE,
    REPORT_FILE,
    RESULT_FILE,
)
from repro.plan import Plan
from repro.redact import Redactor
from repro.report import changed_inputs
from repro.session import published_plan

NUMBERED = ("measured", "discarded")
UNCOMPARED_PLAN = ("schema_version", "created", "estimated_seconds")
UNCOMPARED_HOST = ("memory_bytes", "memory_limit_bytes", "shm_bytes")  # differ from one start of a machine to the next
RUN_MARK = "REPRO_RUN_OF"  # variable of all that a session starts, and of what that starts: the session's folder


@contextlib.contextmanager
def claim(out_dir: Path) -> Iterator[None]:
    """Hold a session's folder, so that nothing else writes into it; ends with the process in any case.

    Raises:
        UsageError: If another process holds it, a run of a session that was killed goes on, or it is no session's
            folder.
    """
    try:
        file = (out_dir / PLAN_FILE).open("rb")
    except OSError:
        raise UsageError(
            f"{out_dir} holds no {PLAN_FILE}, so no session began there; repro run without --resume begins one"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"a session still runs in {out_dir}, or its page is written; wait for its end, then type this again"
            ) from None
        _await_runs(out_dir)
        yield


def marked(environment: Mapping[str, str], out_dir: Path) -> dict[str, str]:
    """The environment by which a run is known as one of this folder's, whatever process of it is left."""
    return {**environment, RUN_MARK: str(out_dir.resolve())}


def find_session(out_dir: Path, plan: Plan, host: Host) -> Evidence:
    """Read an earlier session, if the same one is asked for now.

    Args:
        out_dir: Its folder.
        plan: What is asked for, planned now.
        host: This machine.

    Raises:
        UsageError: If its files are damaged, or plan, code, host or packages differ; the message names the first
            difference.
    """
    try:
        evidence = read_evidence(out_dir)
    except UsageError as error:
        raise UsageError(f"--resume {out_dir}: {error}") from None
    changed = changed_inputs(out_dir)
    if changed:
        raise UsageError(f"--resume {out_dir}: {changed[0]}; its files are not those that its session wrote")
    failed = [probe.name for probe in evidence.probes if probe.status == "failed"]
    if failed:
        raise UsageError(f"--resume {out_dir}: probe {failed[0]} failed; look for the fault, then start a new session")
    now = published_plan(plan, Redactor(out_dir))
    _require_same(out_dir, PLAN_FILE, _content(evidence.plan, UNCOMPARED_PLAN), _content(now, UNCOMPARED_PLAN))
    _require_same(out_dir, HOST_FILE, _content(evidence.host, UNCOMPARED_HOST), _content(host, UNCOMPARED_HOST))
    return evidence


def finished_cells(evidence: Evidence) -> dict[str, CellEvidence]:
    """Cells that need not be run again, by id."""
    return {item.cell.id: item for item in evidence.cells if item.status in NUMBERED}


def is_complete(out_dir: Path, evidence: Evidence) -> bool:
    """Whether every cell that this host can hold has a number, and the report is written."""
    finished = finished_cells(evidence)
    return all(cell.id in finished for cell in evidence.plan.runnable) and (out_dir / MANIFEST_FILE).exists()


def reopen_session(out_dir: Path) -> Journal:
    """Go on with a session's journal.

    A last line that a crash cut is no entry and is removed; nothing before it is touched. What was derived from the
    shorter journal goes too, the hash list first, so that a folder never has one that does not fit.
    """
    (out_dir / MANIFEST_FILE).unlink(missing_ok=True)
    for name in (RESULT_FILE, REPORT_FILE):
        (out_dir / name).unlink(missing_ok=True)
    shutil.rmtree(out_dir / FIGURES_DIR, ignore_errors=True)
    with (out_dir / JOURNAL_FILE).open("r+b") as file:
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        file.flush()
        os.fsync(file.fileno())
    journal = Journal(out_dir)
    journal.write("session_resumed")
    return journal


def _content(model: Plan | Host, left_out: tuple[str, ...]) -> dict[str, Any]:
    """Fields to compare, what all else follows from first."""
    content = model.model_dump(mode="json", exclude=set(left_out))
    first = [name for name in ("source", "images", "sources", "matrix", "timeout_seconds") if name in content]
    return {name: content[name] for name in dict.fromkeys([*first, *content])}


def _require_same(out_dir: Path, file: str, recorded: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    difference = _first_difference(recorded, found)
    if difference is not None:
        name, before, now = difference
        raise UsageError(
            f"--resume {out_dir}: {name} in its {file} is {_short(before)}, here it is {_short(now)}; "
            "give the arguments it was started with, on the same code and host, or leave out --resume"
        )


def _first_difference(a: Any, b: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Dotted name of the first place where two JSON values differ, and both values there."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        pairs = [(str(key), a.get(key), b.get(key)) for key in dict.fromkeys([*a, *b])]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [(str(index), one, other) for index, (one, other) in enumerate(zip(a, b, strict=True))]
    else:
        return None if a == b else (name, a, b)
    found = (_first_difference(one, other, f"{name}.{key}" if name else key) for key, one, other in pairs)
    return next((difference for difference in found if difference is not None), None)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _await_runs(out_dir: Path) -> None:
    """Wait for runs of a session that was killed: the trainer's are told to end with it, which takes them a moment."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (running := _runs(out_dir.resolve())) and time.monotonic() < deadline:
        time.sleep(0.1)
    if running:
        named = ", ".join(f"{pid} ({name})" for pid, name in running.items())
        raise UsageError(
            f"{out_dir}: process {named} of a run whose session was killed goes on; end it, then type this again: "
            f"kill {' '.join(map(str, running))}"
        )


def _runs(folder: Path) -> dict[int, str]:
    """Names, by id, of processes that carry the mark of this folder, or whose output goes to one of its logs."""
    found, own = {}, {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}  # a shell may have the mark
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid not in own and (
                process.environ().get(RUN_MARK) == str(folder)
                or any(
                    file.fd in (1, 2) and Path(file.path).parent == folder / LOGS_DIR for file in process.open_files()
                )
            ):
                found[process.pid] = process.name()
    return found
