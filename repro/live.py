"""Shows a running session: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from repro import text
from repro.evidence import CellEvidence
from repro.noise import session_noise
from repro.plan import Cell, Plan

MAX_ROWS = 16


@dataclass
class _Row:
    cell: Cell
    state: str = "waiting"
    seconds: float | None = None
    rate: float | None = None


class LastingStream:
    """A text stream that a session can go on writing to after its reader is gone, as under ``| head -1``.

    The first error ends the output: the file descriptor then leads nowhere, so that nothing fails at exit either.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._ended = stream, False

    def write(self, words: str) -> int:
        """Write, or do nothing once the reader is gone."""
        if not self._ended:
            try:
                self._stream.write(words)
            except OSError:
                self._end()
        return len(words)

    def flush(self) -> None:
        """Flush, or do nothing once the reader is gone."""
        if not self._ended:
            try:
                self._stream.flush()
            except OSError:
                self._end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _end(self) -> None:
        self._ended = True
        with contextlib.suppress(OSError, AttributeError):  # a stream in memory has no descriptor
            descriptor = self._stream.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


class SessionView:
    """Shows the cells of a plan while they run; use as a context manager.

    Args:
        plan: The plan.
        console: Where to draw; a table if it is a terminal.
        clock: Monotonic seconds.
    """

    def __init__(self, plan: Plan, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._plan, self._console, self._clock = plan, console, clock
        self._rows = [_Row(cell, "skipped" if cell.skip_reason else "waiting") for cell in plan.cells]
        self._found: dict[str, CellEvidence] = {}
        self._current: int | None = None
        self._began = 0.0
        self._live = Live(self, console=console, refresh_per_second=2, transient=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        """Begin to draw."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Draw a last time and leave the table on the screen."""
        self._current = None
        for row in self._rows:
            if row.state == "waiting":
                row.state = "not run"
        if self._live is not None:
            self._live.stop()

    def kept(self, evidence: CellEvidence) -> None:
        """A cell of an earlier part of the session is not run again."""
        ids = [cell.id for cell in self._plan.cells]  # its words may differ: they were redacted
        self._current = ids.index(evidence.cell.id)
        row = self._judged(evidence)
        row.state += " before"
        if self._live is None:
            self._line(f"{self._place()} {evidence.cell.id}: {row.state}")
        self._current = None

    def started(self, cell: Cell) -> None:
        """A cell began."""
        self._current = self._plan.cells.index(cell)
        self._rows[self._current].state = "running"
        self._began = self._clock()
        if self._live is None:
            self._line(f"{self._place()} {cell.id}: running")

    def ended(self, evidence: CellEvidence, seconds: float) -> None:
        """The running cell ended and was looked at."""
        row = self._judged(evidence)
        row.seconds = seconds
        if self._live is None or evidence.reason:
            self._line(f"{self._place()} {evidence.cell.id}: {self._summary(row, evidence.reason)}")
        self._current = None

    def note(self, line: str) -> None:
        """Print a line about something that is no cell."""
        self._line(line)

    def remaining_seconds(self) -> float:
        """Expected time to the end: waiting cells at the mean of finished ones, or at the plan's estimate."""
        each = self._expected_seconds()
        running = max(0.0, each - self._elapsed()) if self._current is not None else 0.0
        return each * self._waiting() + running

    def __rich__(self) -> Table:
        """The table as it is now; long plans show the rows around the running cell."""
        caption = ", ".join(filter(None, (self._left(), self._noise())))
        table = Table(caption=caption or None, caption_justify="left")
        for name, justify in (("cell", "left"), ("state", "left"), ("elapsed", "right"), ("steps/s", "right")):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        at = self._current if self._current is not None else len(self._rows)
        first = max(0, min(at - MAX_ROWS // 2, len(self._rows) - MAX_ROWS))
        for index in range(first, min(first + MAX_ROWS, len(self._rows))):
            row = self._rows[index]
            seconds = self._elapsed() if index == self._current else row.seconds
            elapsed = text.NOTHING if seconds is None else text.duration(seconds)
            table.add_row(row.cell.id, row.state, elapsed, text.rate(row.rate))
        return table

    def _summary(self, row: _Row, reason: str | None) -> str:
        parts = [row.state if reason is None else f"{row.state} ({reason})"]
        if row.rate is not None:
            parts.append(f"{text.rate(row.rate)} steps/s")
        parts.append(text.duration(row.seconds or 0.0))
        if self._waiting():
            parts.append(_about(self._expected_seconds() * self._waiting()))
        return ", ".join(filter(None, (*parts, self._noise())))

    def _judged(self, evidence: CellEvidence) -> _Row:
        """The row of the current cell with what became of it."""
        assert self._current is not None
        self._found[evidence.cell.id] = evidence
        row = self._rows[self._current]
        row.state = evidence.status.replace("_", " ")
        row.rate = evidence.throughput.steps_per_second if evidence.throughput else None
        return row

    def _left(self) -> str:
        """What is expected to be left; of a cell that takes longer than the others did, nobody knows."""
        about = _about(self.remaining_seconds())
        if self._current is None or self._elapsed() < self._expected_seconds():
            return about
        late = f"{self._rows[self._current].cell.id} takes longer than expected"
        return f"{late}, then {about}" if about else late

    def _noise(self) -> str:
        """The host noise as far as cases were measured twice; the page gives this number for the whole session."""
        found = session_noise(self._found.values())
        return "" if found is None else f"host noise {text.percent(found.score)}"

    def _expected_seconds(self) -> float:
        done = [row.seconds for row in self._rows if row.seconds is not None]
        return sum(done) / len(done) if done else self._plan.estimated_seconds / max(1, len(self._plan.runnable))

    def _elapsed(self) -> float:
        return self._clock() - self._began

    def _waiting(self) -> int:
        return sum(row.state == "waiting" for row in self._rows)

    def _place(self) -> str:
        assert self._current is not None
        return f"[{self._current + 1}/{len(self._rows)}]"

    def _line(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _about(seconds: float) -> str:
    """So much time, in whole seconds and never none; empty where there is none."""
    return f"about {text.duration(math.ceil(seconds))} left" if seconds > 0 else ""
