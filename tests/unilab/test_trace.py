from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from unilab import trace
from unilab.trace import ANCHOR_LIMIT_NS, DeviceClock, HostClock, Span, StageTimer, Trace, device_times

US = 1_000


def events(path: Path) -> list[dict[str, Any]]:
    content = json.loads(path.read_text())
    assert isinstance(content, list)
    return content


def test_spans_are_events_on_named_tracks(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline = Trace(path)
    timeline.span("learner/host", "wait", 5_000, 7_500, tick=3)
    timeline.spans("learner/device", [Span("upload", 8_001, 9_002), Span("act", 9_002, 9_999)])
    timeline.span("collector/pool", "Batch.step", 10**15 + 1, 10**15 + 2)
    timeline.close()
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in events(path)
        if event["ph"] == "M"
    }
    assert names == {
        ("process_name", 1, 0): "learner",
        ("thread_name", 1, 1): "host",
        ("thread_name", 1, 2): "device",
        ("process_name", 2, 0): "collector",
        ("thread_name", 2, 3): "pool",
    }
    assert [event for event in events(path) if event["ph"] != "M"] == [
        {"ph": "X", "pid": 1, "tid": 1, "name": "wait", "ts": 5.0, "dur": 2.5, "args": {"tick": 3}},
        {"ph": "X", "pid": 1, "tid": 2, "name": "upload", "ts": 8.001, "dur": 1.001},
        {"ph": "X", "pid": 1, "tid": 2, "name": "act", "ts": 9.002, "dur": 0.997},
        {"ph": "X", "pid": 2, "tid": 3, "name": "Batch.step", "ts": 10**12 + 0.001, "dur": 0.001},
    ]


def test_a_trace_without_spans_is_an_empty_array(tmp_path: Path) -> None:
    Trace(tmp_path / "trace.json").close()
    assert events(tmp_path / "trace.json") == []


def test_an_older_trace_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("mine")
    with pytest.raises(FileExistsError):
        Trace(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_text() == "mine"


def test_a_trace_stops_at_its_limit_and_says_so_last(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline = Trace(path, limit=20_000)
    for number in range(1_000):
        timeline.span("learner/host", "wait", number, number + 1, tick=number)
    timeline.close()
    *spans, last = [event for event in events(path) if event["ph"] != "M"]
    assert last["name"] == f"trace stopped at {len(spans)} spans: the limit of 20000 bytes"
    assert [span["args"]["tick"] for span in spans] == list(range(len(spans)))
    assert 14_000 < path.stat().st_size <= 20_000


def test_nothing_is_written_after_a_trace_stopped(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline = Trace(path, limit=6_000)
    for _ in range(3):
        for number in range(200):
            timeline.span("learner/host", "wait", number, number + 1)
        time.sleep(3 * trace.WRITE_SECONDS)
    timeline.close()
    stops = [number for number, event in enumerate(events(path)) if event["ph"] == "i"]
    assert stops == [len(events(path)) - 1]


def test_a_slow_disk_stops_the_trace_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "BUFFERED", 10)
    monkeypatch.setattr(trace, "WRITE_SECONDS", 60.0)
    timeline = Trace(tmp_path / "trace.json")
    for number in range(50):
        timeline.span("learner/host", "wait", number, number + 1)
    timeline.close()
    found = [event["name"] for event in events(tmp_path / "trace.json") if event["ph"] != "M"]
    assert found == ["wait"] * 10 + ["trace stopped at 10 spans: the disk is slower than the run, 10 calls waited"]


def test_a_failed_write_reaches_the_run(tmp_path: Path) -> None:
    timeline = Trace(tmp_path / "trace.json")
    timeline.span("learner/host", "wait", 0, 1, what=object())  # no JSON value
    deadline = time.monotonic() + 10
    with pytest.raises(RuntimeError, match="writing the run's trace failed"):
        while time.monotonic() < deadline:
            timeline.span("learner/host", "wait", 1, 2)
            time.sleep(0.01)
    with pytest.raises(RuntimeError, match="writing the run's trace failed"):
        timeline.close()


def _trace_until_killed(path: Path) -> None:
    timeline = Trace(path)
    for number in range(100):
        timeline.span("learner/host", "wait", number, number + 1)
    time.sleep(6 * trace.WRITE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_run_leaves_whole_lines_that_lack_only_the_bracket(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_trace_until_killed, args=(tmp_path / "trace.json",))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    text = (tmp_path / "trace.json").read_text()
    assert len([event for event in json.loads(f"{text}\n]") if event["ph"] == "X"]) == 100


class FakeDevice:
    """A device whose clock is off the host's by `offset_ns` and which is done with an event after `latency_ns`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, offset_ns: int) -> None:
        self.now, self.offset, self.latency = 10**9, offset_ns, 4 * US
        monkeypatch.setattr(trace.time, "monotonic_ns", lambda: self.now)
        self.waits = 0

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def wait(self, event: FakeEvent, what: str) -> None:
        assert what == "an anchor of the device's clock"
        self.waits += 1
        self.now += self.latency

    def clock(self) -> DeviceClock:
        return DeviceClock(self.wait, self.event)


class FakeEvent:
    """Happens half-way through the latency of a device that is waited for, as an anchor does, else when recorded."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.finished = device, True

    def record(self) -> None:
        self.at = self.device.now + self.device.offset

    def query(self) -> bool:
        return self.finished

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.at - self.at) / 1e6


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeDevice]:
    return lambda offset_ns=0: FakeDevice(monkeypatch, offset_ns)


@pytest.mark.parametrize("offset_ns", [0, 10**15, -(10**12)])
def test_device_times_are_host_times_to_within_the_anchor(device: Callable[..., FakeDevice], offset_ns: int) -> None:
    fake = device(offset_ns)
    clock = fake.clock()
    assert fake.waits == 6
    fake.now += 123 * US
    mark, marked = clock.mark(), fake.now
    fake.now += 77 * US
    assert clock.anchor.uncertainty_ns == fake.latency // 2
    assert abs(clock.resolve(mark) - marked) <= clock.anchor.uncertainty_ns


def test_the_anchor_with_the_shortest_wait_is_taken(device: Callable[..., FakeDevice]) -> None:
    fake = device()
    waits = iter([90, 40, 30, 8, 50, 20])

    def wait(event: FakeEvent, what: str) -> None:
        fake.now += next(waits) * US

    assert DeviceClock(wait, fake.event).anchor.uncertainty_ns == 4 * US


def test_a_mark_keeps_the_anchor_of_its_time(device: Callable[..., FakeDevice]) -> None:
    fake = device()
    clock = fake.clock()
    mark, marked = clock.mark(), fake.now
    first, waits = clock.anchor, fake.waits
    clock.renew()
    assert (clock.anchor, fake.waits) == (first, waits), "renewed before it was due"
    fake.now += int(trace.ANCHOR_SECONDS * 1e9)
    fake.offset += 30 * US  # the drift of that time
    clock.renew()
    assert clock.anchor is not first
    later, at = clock.mark(), fake.now
    assert abs(clock.resolve(mark) - marked) <= 2 * US
    assert abs(clock.resolve(later) - at) <= 2 * US


def test_an_anchor_of_a_busy_device_is_not_taken(device: Callable[..., FakeDevice]) -> None:
    fake = device()
    clock = fake.clock()
    first, waits = clock.anchor, fake.waits
    fake.now += int(trace.ANCHOR_SECONDS * 1e9)
    fake.latency = 3 * ANCHOR_LIMIT_NS
    clock.renew()
    assert (clock.anchor, fake.waits) == (first, waits + 1)
    clock.renew()
    assert fake.waits == waits + 1, "asked a busy device again at once"


def test_stages_are_read_one_tick_later_in_order(device: Callable[..., FakeDevice]) -> None:
    fake = device()
    clock = fake.clock()
    timer = StageTimer(clock)

    def stage(name: str, us: int) -> None:
        timer.begin(name)
        fake.now += us * US
        timer.end(name)

    timer.next_tick()
    for _ in range(2):
        stage("upload", 100)
        stage("act", 250)
    stage("update", 9_000)
    assert timer.read() == []
    timer.next_tick()
    stage("upload", 5_000)
    spans = timer.read()
    assert [span.name for span in spans] == ["upload", "act", "upload", "act", "update"]
    assert all(a.end_ns == b.start_ns for a, b in pairwise(spans))
    assert device_times(spans) == pytest.approx(
        {"Perf/device_upload_ms": 0.2, "Perf/device_act_ms": 0.5, "Perf/device_download_ms": 0.0}
    )
    assert timer.read() == [], "stages are read once"


def watched(fake: FakeDevice) -> tuple[StageTimer, list[FakeEvent]]:
    """A timer and every event that was made for it."""
    made: list[FakeEvent] = []

    def event() -> FakeEvent:
        made.append(fake.event())
        return made[-1]

    return StageTimer(DeviceClock(fake.wait, event)), made


def test_events_are_used_again(device: Callable[..., FakeDevice]) -> None:
    fake = device()
    timer, made = watched(fake)
    before = len(made)
    for _ in range(10):
        timer.next_tick()
        timer.read()
        for stage in ("upload", "act"):
            timer.begin(stage)
            timer.end(stage)
    assert len(made) == before + 4


def test_a_stage_that_is_not_over_is_no_number(device: Callable[..., FakeDevice]) -> None:
    fake = device()
    timer, made = watched(fake)
    timer.next_tick()
    timer.begin("update")
    timer.end("update")
    timer.next_tick()
    made[-1].finished = False
    with pytest.raises(RuntimeError, match="stage 'update' was read before the device finished it"):
        timer.read()


def test_stages_end_once_and_within_their_tick() -> None:
    timer = StageTimer(HostClock())
    timer.next_tick()
    timer.begin("act")
    with pytest.raises(AssertionError, match="began twice"):
        timer.begin("act")
    with pytest.raises(AssertionError, match="did not end within their tick"):
        timer.next_tick()


def test_the_hosts_clock_is_monotonic_time() -> None:
    timer = StageTimer(HostClock())
    timer.next_tick()
    before = time.monotonic_ns()
    timer.begin("act")
    timer.end("act")
    after = time.monotonic_ns()
    timer.next_tick()
    (span,) = timer.read()
    assert before <= span.start_ns <= span.end_ns <= after
