"""Sessions that were resumed: which attempts a cell had, and where what earlier ones left is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from repro.journal import Entry
from repro.layout import SUPERSEDED_DIR
from repro.plan import Cell
from repro.text import count_of

# Names of what an attempt left, inside its own folder.
RUN, LOG, STACKS, TELEMETRY = "run", "cell.log", "stacks.txt", "telemetry.jsonl"


@dataclass(frozen=True)
class Attempt:
    """One start of a cell.

    Attributes:
        cell: Id of the cell.
        number: From 1.
        ended: The line of its end, or None where the session was killed before.
    """

    cell: str
    number: int
    ended: Entry | None = None

    @property
    def folder(self) -> str:
        """Where it is kept once the cell is run again, relative to the report's folder."""
        return f"{SUPERSEDED_DIR}/{self.cell}.{self.number}"


def attempts(journal: Sequence[Entry]) -> dict[str, list[Attempt]]:
    """Attempts of every cell that was started, in order."""
    found: dict[str, list[Attempt]] = {}
    for entry in journal:
        if entry.event == "cell_started" and entry.cell is not None:
            of_cell = found.setdefault(entry.cell, [])
            of_cell.append(Attempt(entry.cell, len(of_cell) + 1))
        elif entry.event == "cell_ended" and entry.cell is not None:
            found[entry.cell][-1] = Attempt(entry.cell, len(found[entry.cell]), entry)
    return found


def last_ends(journal: Sequence[Entry]) -> dict[str, Entry]:
    """The end of every cell whose last attempt has one: earlier attempts do not count."""
    lasts = (of_cell[-1] for of_cell in attempts(journal).values())
    return {last.cell: last.ended for last in lasts if last.ended is not None}


def supersede(out_dir: Path, cell: Cell, journal: Sequence[Entry]) -> Path | None:
    """Move what a cell's last attempt left aside; again after a crash in the middle, the rest of it.

    Returns:
        The attempt's folder, or None where the cell has none or left nothing.
    """
    of_cell = attempts(journal).get(cell.id)
    if not of_cell:
        return None
    folder = out_dir / of_cell[-1].folder
    for name, kept in ((cell.run, RUN), (cell.log, LOG), (cell.stacks, STACKS), (cell.telemetry, TELEMETRY)):
        if (out_dir / name).exists():
            folder.mkdir(parents=True, exist_ok=True)
            (out_dir / name).rename(folder / kept)
    return folder if folder.exists() else None


def moved_cells(out_dir: Path, journal: Sequence[Entry]) -> set[str]:
    """Cells whose last attempt was moved aside, by a session that was killed before it began the next one."""
    return {cell for cell, of_cell in attempts(journal).items() if (out_dir / of_cell[-1].folder).exists()}


def attempt_problems(out_dir: Path, journal: Sequence[Entry]) -> list[str]:
    """Folders of attempts that the journal does not have, and attempts that ended and left no log; one line each."""
    every = [attempt for of_cell in attempts(journal).values() for attempt in of_cell]
    known = {attempt.folder for attempt in every}
    found = sorted(path.relative_to(out_dir).as_posix() for path in out_dir.glob(f"{SUPERSEDED_DIR}/*"))
    lasts = {of_cell[-1] for of_cell in attempts(journal).values()}
    ended = [attempt.folder for attempt in every if attempt not in lasts and attempt.ended is not None]
    return [
        *(f"{name}: is no attempt of the journal" for name in found if name not in known),
        *(
            f"{name}/{LOG} is missing, though the journal says that its attempt ended"
            for name in ended
            if not (out_dir / name / LOG).is_file()
        ),
    ]


def attempt_notes(journal: Sequence[Entry]) -> list[str]:
    """What a reader must know of a resumed session, or of a clock that was set; nothing of one that ran through."""
    times = [datetime.fromisoformat(entry.time) for entry in journal]
    was_set = any(after < before for before, after in pairwise(times))
    notes = ["The clock of the host was set back: times of the journal are not in order."] if was_set else []
    resumed = sum(entry.event == "session_resumed" for entry in journal)
    if not resumed:
        return notes
    again = [attempt for of_cell in attempts(journal).values() for attempt in of_cell[:-1]]
    return [
        *notes,
        f"The session was resumed {count_of(resumed, 'time')}: runs before and after lie further apart than planned.",
        *(f"{attempt.cell} was run again: attempt {attempt.number} {_end(attempt.ended)}." for attempt in again),
        *([f"What these attempts left is in `{SUPERSEDED_DIR}/`; no number comes from it."] if again else []),
    ]


def session_seconds(journal: Sequence[Entry]) -> float:
    """Time that the parts of a session took, the pauses between them left out."""
    return sum(_step(before, after) for before, after in pairwise(journal) if after.event != "session_resumed")


def _step(before: Entry, after: Entry) -> float:
    """Seconds from one line to the next; of an older journal by the wall clock, unless that was set back meanwhile."""
    if before.elapsed is not None and after.elapsed is not None:
        return after.elapsed - before.elapsed
    seconds = (datetime.fromisoformat(after.time) - datetime.fromisoformat(before.time)).total_seconds()
    return seconds if seconds >= 0 else after.seconds or 0.0


def _end(ended: Entry | None) -> str:
    if ended is None:
        return "was cut off with its session"
    if ended.reason is not None:
        return f"was {ended.outcome}: {ended.reason}" if ended.outcome == "interrupted" else f"gave {ended.reason}"
    return "ended well and gave no number"
