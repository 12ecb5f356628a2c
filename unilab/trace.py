"""A timeline of a run on one clock, `time.monotonic_ns`, which both processes share.

The learner writes all of it: the collector's times come with every slot's header, the device's from timing events.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

TRACE_BYTES = 5_000_000  # of the file, what a report can carry: some 2000 ticks of 23 spans
BUFFERED = 20_000  # calls that wait for the disk, at most
WRITE_SECONDS = 0.05
SLICE = 8  # calls written before the interpreter is yielded, some 0.1 ms
ROOM = 5_000  # bytes kept free for the spans of one more call and the line that says why a trace stopped
ANCHOR_SECONDS = 0.5
ANCHOR_LIMIT_NS = 200_000
DEVICE_TAGS = {
    "upload": "Perf/device_upload_ms",
    "act": "Perf/device_act_ms",
    "download": "Perf/device_download_ms",
}


Times = tuple[str, int, int]  # name, start and end in nanoseconds of `time.monotonic_ns`


class Span(NamedTuple):
    """A stage that is over, in nanoseconds of `time.monotonic_ns`."""

    name: str
    start_ns: int
    end_ns: int


class Trace:
    """Trace events as Perfetto and chrome://tracing read them: a JSON array, one event a line.

    Times are those of `progress.jsonl`, in microseconds. A thread writes what `span` has put aside, so a killed run
    leaves an array that only lacks its last spans and its closing bracket; both readers accept that. The file stops
    growing at `limit` bytes, or where the disk is so slow that `BUFFERED` calls wait; its last event then says so.

    Args:
        path: file to make; it must not exist.
        limit: most bytes of the file.

    Raises:
        FileExistsError: if the file exists.
    """

    def __init__(self, path: Path, limit: int = TRACE_BYTES) -> None:
        self._file = path.open("xb", buffering=1 << 20)  # more than a batch, so that whole lines reach the disk
        self._size = self._file.write(b"[")
        self._limit, self._spans = limit, 0
        self._tracks: dict[str, tuple[int, int]] = {}  # process and thread number by track
        self._processes: dict[str, int] = {}
        self._buffer: deque[tuple[str, Sequence[Times], dict[str, Any]]] = deque()
        self._stopped: str | None = None
        self._said = False
        self._error: BaseException | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    def span(self, track: str, name: str, start_ns: int, end_ns: int, **args: Any) -> None:
        """Put one span aside; as `spans`, for one."""
        self.spans(track, ((name, start_ns, end_ns),), **args)

    def spans(self, track: str, spans: Sequence[Times], **args: Any) -> None:
        """Put spans of one track aside; costs the caller about a microsecond, however many they are.

        Args:
            track: `process/thread`, as in `learner/device`.
            spans: what happened when, `Span` or plain tuples; on one track they lie side by side or nest.
            args: what a reader of each span is shown, JSON values.

        Raises:
            RuntimeError: if writing failed; the cause is attached.
        """
        if self._error is not None:
            self._raise_error()
        if self._stopped is not None:
            return
        self._buffer.append((track, spans, args))
        if len(self._buffer) >= BUFFERED:
            self._stopped = f"the disk is slower than the run, {BUFFERED} calls waited"

    def close(self) -> None:
        """Write what is put aside and close the array and the file.

        Raises:
            RuntimeError: if writing failed; the cause is attached.
        """
        self._ending.set()
        self._thread.join()
        try:
            if self._error is None:
                self._file.write(b"\n]\n")
            self._file.close()
        except OSError as error:
            self._error = self._error or error
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"writing the run's trace failed: {self._error}") from self._error

    def _run(self) -> None:
        try:
            ending = False
            while not ending:
                ending = self._ending.wait(WRITE_SECONDS)
                self._drain()
        except BaseException as error:  # handed to the training loop
            self._error = error

    def _drain(self) -> None:
        for number in itertools.count(1):
            if not self._buffer:
                break
            if self._size > self._limit - ROOM:
                self._stopped = self._stopped or f"the limit of {self._limit} bytes"
                self._buffer.clear()
                break
            self._write(*self._buffer.popleft())
            if number % SLICE == 0:
                time.sleep(0)  # yields the interpreter
        if self._stopped is not None and not self._said:
            self._said = True
            name = f"trace stopped at {self._spans} spans: {self._stopped}"
            self._put({"ph": "i", "s": "g", "pid": 1, "tid": 1, "name": name, "ts": time.monotonic_ns() / 1000})
        self._file.flush()

    def _write(self, track: str, spans: Sequence[Times], args: dict[str, Any]) -> None:
        pid, tid = self._tracks.get(track) or self._new_track(track)
        shown = {"args": args} if args else {}
        for name, start_ns, end_ns in spans:
            times = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
            self._put({"ph": "X", "pid": pid, "tid": tid, "name": name, **times, **shown})
        self._spans += len(spans)

    def _new_track(self, track: str) -> tuple[int, int]:
        process, _, thread = track.partition("/")
        if process not in self._processes:
            self._processes[process] = len(self._processes) + 1
            self._name("process_name", process, self._processes[process], 0)
        self._tracks[track] = numbers = (self._processes[process], len(self._tracks) + 1)
        self._name("thread_name", thread, *numbers)
        return numbers

    def _name(self, what: str, name: str, pid: int, tid: int) -> None:
        self._put({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}})

    def _put(self, event: dict[str, Any]) -> None:
        line = ("\n" if self._size == 1 else ",\n") + json.dumps(event, separators=(",", ":"))
        self._size += self._file.write(line.encode())


class Clock(Protocol):
    """Marks a moment now and says later when it was."""

    def mark(self) -> Any:
        """A mark of this moment."""

    def done(self, mark: Any) -> bool:
        """Whether the moment is over, so that it can be resolved."""

    def resolve(self, mark: Any) -> int:
        """The moment in nanoseconds of `time.monotonic_ns`; to be asked once."""

    def renew(self) -> None:
        """Take the device's time again if that is due; to be called where the device has nothing to do."""


class HostClock:
    """Stages as the host sees them: all there is on the CPU and on MPS."""

    def mark(self) -> int:
        """The host's time now."""
        return time.monotonic_ns()

    def done(self, mark: int) -> bool:
        """Always: the host's moments are over when they are marked."""
        return True

    def resolve(self, mark: int) -> int:
        """The mark itself."""
        return mark

    def renew(self) -> None:
        """Nothing to do."""


class Anchor(NamedTuple):
    """A device event and the host's time of it, with half the interval in which it must have happened."""

    event: Any
    ns: int
    uncertainty_ns: int


class DeviceClock:
    """Times of CUDA events on the host's clock.

    An event's time is that of an anchor plus `elapsed_time`, a float32 of milliseconds: after 16 s its steps are 1 µs,
    and the device's clock drifts from the host's by some 10 to 100 µs a second. So `renew` takes a new anchor every
    `ANCHOR_SECONDS`; a mark keeps the anchor of its own time. An anchor that took longer than `ANCHOR_LIMIT_NS`, since
    the device was busy after all, is not taken.

    Args:
        wait: waits for an event against a deadline, given what it waits for.
        event: makes a timing event.
    """

    def __init__(self, wait: Callable[[Any, str], None], event: Callable[[], Any] | None = None) -> None:
        self._wait, self._event = wait, event or (lambda: torch.cuda.Event(enable_timing=True))
        self._free: list[Any] = []
        self._anchor()  # the first event of a stream costs more
        self.anchor = min((self._anchor() for _ in range(5)), key=lambda anchor: anchor.uncertainty_ns)
        self._due = self.anchor.ns + int(ANCHOR_SECONDS * 1e9)

    def mark(self) -> tuple[Any, Anchor]:
        """Record an event on the current stream."""
        event = self._free.pop() if self._free else self._event()
        event.record()
        return event, self.anchor

    def done(self, mark: tuple[Any, Anchor]) -> bool:
        """Whether the device has passed the event."""
        return bool(mark[0].query())

    def resolve(self, mark: tuple[Any, Anchor]) -> int:
        """When the device passed the event, which later marks use again."""
        event, anchor = mark
        self._free.append(event)
        return anchor.ns + int(1e6 * anchor.event.elapsed_time(event))

    def renew(self) -> None:
        """Take a new anchor if the last one is old; waits some 20 µs where the device is idle, and for it elsewhere."""
        if time.monotonic_ns() < self._due:
            return
        found = self._anchor()
        self._due = found.ns + int(ANCHOR_SECONDS * 1e9)
        if found.uncertainty_ns <= ANCHOR_LIMIT_NS:
            self.anchor = found

    def _anchor(self) -> Anchor:
        event = self._event()
        before = time.monotonic_ns()
        event.record()
        self._wait(event, "an anchor of the device's clock")
        after = time.monotonic_ns()
        return Anchor(event, (before + after) // 2, (after - before) // 2)


class StageTimer:
    """Stages of a tick on the device, marked while they are queued and read when they are over.

    Nothing here waits. `next_tick` begins a tick, `begin` and `end` surround a stage as often as it occurs in it, and
    `read` gives the stages of the tick before the current one. On a device, end a stage before recording the event by
    which the host learns that it is over, and on the stream it ran on; surround a graph's replay, not its capture.

    Args:
        clock: of the device.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[str, Any] = {}
        self._current: list[tuple[str, Any, Any]] = []
        self._previous: list[tuple[str, Any, Any]] = []

    def next_tick(self) -> None:
        """Begin a tick; stages of the last but one that nobody read are dropped."""
        assert not self._open, f"stages {sorted(self._open)} did not end within their tick"
        self._previous, self._current = self._current, []

    def begin(self, stage: str) -> None:
        """Mark the start of a stage on the current stream."""
        assert stage not in self._open, f"stage {stage!r} began twice"
        self._open[stage] = self._clock.mark()

    def end(self, stage: str) -> None:
        """Mark its end, on the same stream."""
        self._current.append((stage, self._open.pop(stage), self._clock.mark()))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Surround a stage with `begin` and `end`."""
        self.begin(name)
        yield
        self.end(name)

    def read(self) -> list[Span]:
        """Stages of the previous tick in the order of their ends; to be read once.

        Raises:
            RuntimeError: if the device has not finished one of them.
        """
        marks, self._previous = self._previous, []
        for stage, _, end in marks:
            if not self._clock.done(end):
                raise RuntimeError(f"stage {stage!r} was read before the device finished it")
        return [Span(stage, self._clock.resolve(start), self._clock.resolve(end)) for stage, start, end in marks]


def device_times(spans: Iterable[Span]) -> dict[str, float]:
    """Milliseconds of one tick by tag: a stage's spans summed, 0 for one that did not occur."""
    times = dict.fromkeys(DEVICE_TAGS.values(), 0.0)
    for span in spans:
        if span.name in DEVICE_TAGS:
            times[DEVICE_TAGS[span.name]] += (span.end_ns - span.start_ns) / 1e6
    return times
