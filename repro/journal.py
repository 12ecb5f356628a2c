"""The append-only account of a session: one JSON line for each thing that happened, on disk before the next begins."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from repro.errors import UsageError
from repro.layout import JOURNAL_FILE
from repro.schema import Strict, parse_model

Event = Literal["session_started", "cell_started", "cell_ended", "session_interrupted", "session_ended"]
Outcome = Literal["exited", "timeout", "interrupted"]


class Entry(Strict):
    """One line.

    Attributes:
        event: `session_started`, `cell_started`, `cell_ended`, `session_interrupted` or `session_ended`.
        time: UTC time.
        cell: Id of the cell, for its two events.
        outcome: How the cell ended.
        exit_code: Exit code of the trainer; negative for a signal; None where it was killed by the suite.
        seconds: Duration of the cell's process.
        reason: Why the cell did not end well, or None.
        redacted: Files of the run directory in which names or paths were replaced.
    """

    event: Event
    time: str
    cell: str | None = None
    outcome: Outcome | None = None
    exit_code: int | None = None
    seconds: Annotated[float, Field(ge=0)] | None = None
    reason: str | None = None
    redacted: tuple[str, ...] | None = None


class Journal:
    """Writes entries; each is flushed to the disk before the call returns."""

    def __init__(self, out_dir: Path) -> None:
        self._path = out_dir / JOURNAL_FILE

    def write(
        self,
        event: Event,
        *,
        cell: str | None = None,
        outcome: Outcome | None = None,
        exit_code: int | None = None,
        seconds: float | None = None,
        reason: str | None = None,
        redacted: tuple[str, ...] | None = None,
    ) -> Entry:
        """Append one entry and return it; see `Entry` for the fields."""
        entry = Entry(
            event=event,
            time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            cell=cell,
            outcome=outcome,
            exit_code=exit_code,
            seconds=None if seconds is None else round(seconds, 3),
            reason=reason,
            redacted=redacted,
        )
        line = json.dumps(entry.model_dump(mode="json", exclude_none=True), ensure_ascii=False, allow_nan=False) + "\n"
        with self._path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        return entry


def read_journal(out_dir: Path) -> tuple[Entry, ...]:
    """Read all entries.

    A last line without its newline was cut by a crash and is left out; anything else must be an entry.

    Raises:
        UsageError: If the file is missing or a line is no entry.
    """
    path = out_dir / JOURNAL_FILE
    if not path.is_file():
        raise UsageError(f"{JOURNAL_FILE} is missing in {out_dir}")
    lines = path.read_bytes().split(b"\n")[:-1]
    return tuple(parse_model(Entry, line, f"{JOURNAL_FILE} line {i}") for i, line in enumerate(lines, start=1))
