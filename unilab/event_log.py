"""TensorBoard events and progress lines, written by a thread so that the training loop never waits for a disk."""

from __future__ import annotations

import contextlib
import fcntl
import json
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from unilab.names import EVENT_FILE_PREFIX, PROGRESS_FILE

FLUSH_SECONDS = 1.0


@dataclass(frozen=True)
class Clock:
    """Wall time that follows the monotonic clock from one anchor, so that a stepped system clock cannot enter events.

    Attributes:
        wall_anchor: seconds since the epoch at the anchor.
        monotonic_anchor: monotonic seconds at the anchor.
    """

    wall_anchor: float
    monotonic_anchor: float

    @classmethod
    def start(cls) -> Clock:
        """Anchor a clock now."""
        return cls(time.time(), time.monotonic())

    def wall(self, monotonic: float) -> float:
        """Seconds since the epoch at a monotonic time."""
        return self.wall_anchor + (monotonic - self.monotonic_anchor)


@dataclass(frozen=True)
class Record:
    """One training iteration as it is written.

    Attributes:
        iteration: counted from 1.
        env_steps: cumulative env steps of all ranks.
        monotonic: seconds of the monotonic clock when the iteration's transitions were complete.
        physics_seconds: time inside the physics step of this iteration.
        scalars: values by tag.
    """

    iteration: int
    env_steps: int
    monotonic: float
    physics_seconds: float
    scalars: dict[str, float]


class Mirror(Protocol):
    """Another place that every record goes to; it must neither wait nor raise."""

    def write(self, record: Record) -> None:
        """Take one iteration."""


def is_written(directory: Path) -> bool:
    """Whether a run that is not over logs into a directory."""
    try:
        with (directory / PROGRESS_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no log, or no locks
        return False
    return False


class EventLog:
    """One event file and `progress.jsonl` in a run directory.

    The event file is written with TensorBoard's record writer directly, since its usual writer puts the host's name
    into the file name and opens the file anew by name at every flush.

    Args:
        directory: the run directory.
        clock: turns monotonic times into event times.
        events: also write the event file; progress lines are always written.
        mirror: gets every record too; its owner closes it.
    """

    def __init__(self, directory: Path, clock: Clock, events: bool = True, mirror: Mirror | None = None) -> None:
        self.count = 0
        self._clock, self._mirror = clock, mirror
        self._progress = (directory / PROGRESS_FILE).open("x")  # a second run in this directory fails here
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(self._progress, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until closed, or until this process is gone
        self._events: RecordWriter | None = None
        if events:
            path = directory / f"{EVENT_FILE_PREFIX}{int(clock.wall_anchor)}.unilab"
            self._events = RecordWriter(path.open("xb"))
            self._put(Event(wall_time=clock.wall_anchor, file_version="brain.Event:2"))
        self._queue: queue.Queue[Record | None] = queue.Queue()
        self._error: BaseException | None = None
        self._flushed = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="event-log", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Queue one iteration.

        Raises:
            RuntimeError: if an earlier write failed; the cause is attached.
        """
        self._raise_error()
        self._queue.put(record)
        if self._mirror is not None:
            self._mirror.write(record)

    def close(self) -> None:
        """Write what is queued and close the files.

        Raises:
            RuntimeError: if a write failed; the cause is attached.
        """
        self._queue.put(None)
        self._thread.join()
        for file in (self._progress, self._events):
            try:
                if file is not None:
                    file.close()
            except OSError as error:
                self._error = self._error or error
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RuntimeError("writing the run's events failed") from self._error

    def _run(self) -> None:
        try:
            while (record := self._next()) is not None:
                self._append(record)
            self._flush()
        except BaseException as error:  # handed to the training loop, which must not go on unlogged
            self._error = error

    def _next(self) -> Record | None:
        """Wait for a record or the end (None), flushing in time also while nothing comes."""
        while True:
            due = self._flushed + FLUSH_SECONDS - time.monotonic()
            if due > 0:
                with contextlib.suppress(queue.Empty):
                    return self._queue.get(timeout=due)
            self._flush()
            self._flushed = time.monotonic()

    def _append(self, record: Record) -> None:
        if self._events is not None:
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in record.scalars.items()]
            wall_time = self._clock.wall(record.monotonic)
            self._put(Event(wall_time=wall_time, step=record.env_steps, summary=Summary(value=values)))
            self.count += 1
        line = {
            "iteration": record.iteration,
            "env_steps": record.env_steps,
            "monotonic_s": record.monotonic,
            "physics_s": record.physics_seconds,
        }
        self._progress.write(json.dumps(line) + "\n")

    def _put(self, event: Event) -> None:
        assert self._events is not None
        self._events.write(event.SerializeToString())

    def _flush(self) -> None:
        self._progress.flush()
        if self._events is not None:
            self._events.flush()
