"""A run of another trainer: started in an environment of its own, measured by its events alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from repro.events import EventLog, Reason, Refusal, find_event_file, read_events
from repro.foreign import ForeignKeys, fill_command
from repro.matrix import CODE_VARIABLES
from repro.plan import CLEARED, Cell, Plan, case_of
from repro.throughput import Throughput, measure_events

NO_CEILING = "another trainer records no physics states"
NOT_KNOWN = (
    "another trainer: what it does beyond this tag is not read, so learner rows/s, physics share, stages and the code "
    "that ran are missing"
)
EVENT_FILES = "*tfevents*"
# Run as a program of its own, which becomes the trainer.
_CONFINED = """
import os, sys
os.sched_setaffinity(0, map(int, sys.argv[1].split(",")))
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot start {sys.argv[2]}: {error.strerror}")
"""


def foreign_command(plan: Plan, cell: Cell, out_dir: Path, started_in: Path) -> list[str]:
    """The command of a cell as it is started in the report's folder.

    Args:
        plan: The plan.
        cell: The cell.
        out_dir: The report's folder; the run directory is given as an absolute path.
        started_in: Where the suite was started. A word with a slash, or that ends in .py, and names a file there is
            made absolute.
    """
    case = case_of(plan.matrix, cell)
    run_dir = str(out_dir.resolve() / cell.run)
    words = fill_command(case.command, run_dir, cell.pools, cell.gpus, plan.matrix.iterations)
    command = [_absolute(word, started_in) for word in words]
    if not case.affinity:
        return command
    return [sys.executable, "-I", "-S", "-c", _CONFINED, ",".join(map(str, cell.cpu_ids or ())), *command]


def foreign_environment(inherited: Mapping[str, str], cell: Cell) -> dict[str, str]:
    """The inherited environment without what steers this trainer or its imports, then what the cell sets."""
    left_out = {*CLEARED, *CODE_VARIABLES}
    return {name: value for name, value in inherited.items() if name not in left_out} | cell.environment


def measure_foreign(run_dir: Path, case: ForeignKeys) -> Throughput:
    """Measure a run by the events of its case's tag.

    Raises:
        Refusal: Whenever no number may be given; its code says why.
    """
    log = read_events(_event_folder(run_dir, case.events))
    factor = 1 if case.step_axis == "env_steps" else case.step_axis
    assert case.event_tag is not None and isinstance(factor, int)
    scalars = {tag: replace(series, steps=series.steps * factor) for tag, series in log.scalars.items()}
    scaled: EventLog = replace(log, scalars=scalars)
    found = measure_events(scaled, case.event_tag)
    return replace(found, notes=[*found.notes, NOT_KNOWN])


def _event_folder(run_dir: Path, events: str | None) -> Path:
    """The folder that holds the one event file of a run."""
    if events is not None:
        if run_dir.is_dir() and not (run_dir / events).is_dir():
            raise Refusal(
                Reason.NO_EVENT_FILE, f"{run_dir.name} has no folder {events}, which its case names as events"
            )
        return run_dir / events
    found = sorted(path for path in run_dir.rglob(EVENT_FILES) if path.is_file())
    if len(found) > 1:
        listed = ", ".join(path.relative_to(run_dir).as_posix() for path in found)
        raise Refusal(
            Reason.SEVERAL_RUNS, f"{run_dir.name} holds {len(found)} event files: {listed}; name one's folder as events"
        )
    return found[0].parent if found else find_event_file(run_dir).parent  # which refuses with its own reason


def _absolute(word: str, folder: Path) -> str:
    # A program keeps the name it is called by: the interpreter of a virtual environment is a link.
    is_path = "/" in word or word.endswith(".py")
    return str(folder.absolute() / word) if is_path and (folder / word).is_file() else word
