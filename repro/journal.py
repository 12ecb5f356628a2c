"""The append-only account of a session: one JSON line for each thing that happened, on disk before the next begins."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from repro.errors import UsageError
from repro.layout import JOURNAL_FILE
from repro.schema import Strict, parse_model

Event = Literal[
    "session_started",
    "probe_started",
    "probe_ended",
    "benchmarks_started",
    "benchmarks_ended",
    "cell_started",
    "cell_ended",
    "session_interrupted",
    "session_resumed",
    "session_ended",
]
Outcome = Literal["exited", "timeout", "interrupted"]
ENDS = ("session_ended", "session_interrupted")


class Entry(Strict):
    """One line.

    Attributes:
        event: `session_started`, `probe_started`, `probe_ended`, `benchmarks_started`, `benchmarks_ended`,
            `cell_started`, `cell_ended`, `session_interrupted`, `session_resumed` or `session_ended`.
        time: Time with its zone, ISO 8601; the suite writes UTC.
        elapsed: Seconds since this part of the session began, by a clock that nobody sets; an older version wrote none.
        cell: Id of the cell, for its two events.
        probe: Name of the probe, for its two events.
        outcome: How the cell or probe ended.
        exit_code: Exit code of its process; negative for a signal; None where it was killed by the suite or a container
            engine did not run it.
        seconds: Duration of its process, or of that of the micro-benchmarks.
        reason: Why the cell or probe did not end well, or None.
        redacted: Files of the run directory in which names or paths were replaced.
        samples: Lines of the cell's telemetry.
        no_evaluation: Why the cell's policy could not be evaluated, or None.
    """

    event: Event
    time: str
    elapsed: Annotated[float, Field(ge=0)] | None = None
    cell: str | None = None
    probe: str | None = None
    outcome: Outcome | None = None
    exit_code: int | None = None
    seconds: Annotated[float, Field(ge=0)] | None = None
    reason: str | None = None
    redacted: tuple[str, ...] | None = None
    samples: Annotated[int, Field(ge=0)] | None = None
    no_evaluation: str | None = None

    @field_validator("time")
    @classmethod
    def _aware(cls, time: str) -> str:
        if datetime.fromisoformat(time).tzinfo is None:
            raise ValueError(f"{time!r} has no time zone")
        return time


class Journal:
    """Writes the entries of one part of a session; each is flushed to the disk before the call returns."""

    def __init__(self, out_dir: Path) -> None:
        self._path, self._began = out_dir / JOURNAL_FILE, time.monotonic()

    def write(
        self,
        event: Event,
        *,
        cell: str | None = None,
        probe: str | None = None,
        outcome: Outcome | None = None,
        exit_code: int | None = None,
        seconds: float | None = None,
        reason: str | None = None,
        redacted: tuple[str, ...] | None = None,
        samples: int | None = None,
        no_evaluation: str | None = None,
    ) -> Entry:
        """Append one entry and return it; see `Entry` for the fields."""
        entry = Entry(
            event=event,
            time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            elapsed=round(time.monotonic() - self._began, 3),
            cell=cell,
            probe=probe,
            outcome=outcome,
            exit_code=exit_code,
            seconds=None if seconds is None else round(seconds, 3),
            reason=reason,
            redacted=redacted,
            samples=samples,
            no_evaluation=no_evaluation,
        )
        line = json.dumps(entry.model_dump(mode="json", exclude_none=True), ensure_ascii=False, allow_nan=False) + "\n"
        with self._path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        return entry


def read_journal(out_dir: Path) -> tuple[Entry, ...]:
    """Read all entries.

    Raises:
        UsageError: If the file is missing, or as `parse_journal`.
    """
    path = out_dir / JOURNAL_FILE
    if not path.is_file():
        raise UsageError(f"{JOURNAL_FILE} is missing in {out_dir}")
    return parse_journal(path.read_bytes())


def parse_journal(content: bytes) -> tuple[Entry, ...]:
    """Read all entries of a journal, or of its beginning.

    A last line without its newline was cut by a crash and is left out; anything else must be an entry.

    Raises:
        UsageError: If a line is no entry or has a key twice, or the order cannot have happened.
    """
    lines = content.split(b"\n")[:-1]
    entries = tuple(_entry(line, f"{JOURNAL_FILE} line {i}") for i, line in enumerate(lines, start=1))
    _check_order(entries)
    return entries


def _entry(line: bytes, source: str) -> Entry:
    entry = parse_model(Entry, line, source)

    def distinct(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"{source}: key {twice!r} is there twice")

    json.loads(line, object_pairs_hook=distinct)
    return entry


def _check_order(entries: tuple[Entry, ...]) -> None:
    """Refuse an order that no session writes: it starts once and ends last, so does each of its cells and probes.

    What a resumed session does again is judged from there on.
    """
    if not entries:
        raise UsageError(f"{JOURNAL_FILE} holds no entry; a session writes session_started first")
    last = len(entries)
    seen: set[tuple[str, str | None]] = set()
    for number, entry in enumerate(entries, start=1):
        source = f"{JOURNAL_FILE} line {number}"
        for kind, name in (("cell", entry.cell), ("probe", entry.probe)):
            is_kind = entry.event.startswith(f"{kind}_")
            if is_kind != (name is not None):
                raise UsageError(f"{source}: {entry.event} names {f'no {kind}' if is_kind else f'{kind} {name!r}'}")
        if (entry.event == "session_started") != (number == 1):
            raise UsageError(f"{source}: {entry.event}; session_started is the first line and no other")
        if entry.event == "session_resumed":
            seen.clear()
        followed = number != last and entries[number].event != "session_resumed"
        if entry.event in ENDS and followed:
            raise UsageError(f"{source}: {entry.event} is not the last line")
        if (entry.event, entry.cell or entry.probe) in seen:
            kind = f"probe {entry.probe!r}" if entry.probe else f"cell {entry.cell!r}"
            raise UsageError(f"{source}: {entry.event} of {kind} is there twice")
        if entry.probe and any(event.startswith(("cell_", "benchmarks_")) for event, _ in seen):
            raise UsageError(f"{source}: {entry.event}; probes come before everything else")
        if entry.event == "probe_ended" and ("probe_started", entry.probe) not in seen:
            raise UsageError(f"{source}: probe {entry.probe!r} ends before it starts")
        if entry.event == "benchmarks_ended" and ("benchmarks_started", None) not in seen:
            raise UsageError(f"{source}: micro-benchmarks end before they start")
        if entry.event == "cell_ended" and ("cell_started", entry.cell) not in seen:
            raise UsageError(f"{source}: cell {entry.cell!r} ends before it starts")
        if entry.event != "session_resumed" and (entry.elapsed or 0.0) < (entries[max(0, number - 2)].elapsed or 0.0):
            raise UsageError(f"{source}: elapsed {entry.elapsed} is before that of the line above")
        seen.add((entry.event, entry.cell or entry.probe))
