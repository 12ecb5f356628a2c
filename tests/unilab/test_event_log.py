"""The event file as TensorBoard reads it, the progress lines beside it, and a log that fails."""

from __future__ import annotations

import json
import math
import queue
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tbparse import SummaryReader
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from unilab import event_log
from unilab.event_log import Clock, EventLog, Record

CLOCK = Clock(wall_anchor=1_700_000_000.25, monotonic_anchor=100.0)


def record(iteration: int, **scalars: float) -> Record:
    return Record(
        iteration, 8 * iteration, 100.0 + iteration / 4, 0.001 * iteration, scalars or {"a/b": float(iteration)}
    )


def event_file(directory: Path) -> Path:
    (path,) = directory.glob("events.out.tfevents.*")
    return path


def events(directory: Path) -> list[Any]:
    return list(LegacyEventFileLoader(str(event_file(directory))).Load())


def progress(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "progress.jsonl").read_text().splitlines()]


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def test_one_record_an_iteration_with_all_its_tags(tmp_path: Path) -> None:
    log = EventLog(tmp_path, CLOCK)
    for iteration in (1, 2, 3):
        log.write(record(iteration, **{"Train/x": iteration / 3, "Perf/y": -1e-3}))
    log.close()
    first, *rest = events(tmp_path)
    assert (first.file_version, first.wall_time) == ("brain.Event:2", 1_700_000_000.25)
    assert [event.step for event in rest] == [8, 16, 24]
    assert [event.wall_time for event in rest] == [1_700_000_000.5, 1_700_000_000.75, 1_700_000_001.0]
    assert [[value.tag for value in event.summary.value] for event in rest] == [["Train/x", "Perf/y"]] * 3
    assert rest[0].summary.value[0].simple_value == pytest.approx(1 / 3, rel=1e-7)
    assert log.count == 3


def test_progress_lines_match_the_events(tmp_path: Path) -> None:
    log = EventLog(tmp_path, CLOCK)
    for iteration in (1, 2):
        log.write(record(iteration))
    log.close()
    assert progress(tmp_path) == [
        {"iteration": 1, "env_steps": 8, "monotonic_s": 100.25, "physics_s": 0.001},
        {"iteration": 2, "env_steps": 16, "monotonic_s": 100.5, "physics_s": 0.002},
    ]


def test_steps_beyond_32_bits(tmp_path: Path) -> None:
    log = EventLog(tmp_path, CLOCK)
    log.write(Record(1, 2**40 + 1, 101.0, 0.0, {"a": 1.0}))
    log.close()
    assert events(tmp_path)[1].step == 2**40 + 1


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # tbparse on a recent pandas
def test_tbparse_reads_it(tmp_path: Path) -> None:
    log = EventLog(tmp_path, CLOCK)
    for iteration in range(1, 6):
        log.write(record(iteration, **{"Perf/total_fps": 10.0 * iteration, "Loss/critic": math.nan}))
    log.close()
    frame = SummaryReader(str(event_file(tmp_path)), extra_columns={"wall_time"}).scalars
    rates = frame[frame["tag"] == "Perf/total_fps"]
    assert rates["step"].tolist() == [8, 16, 24, 32, 40]
    assert rates["value"].tolist() == [10.0, 20.0, 30.0, 40.0, 50.0]
    assert rates["wall_time"].tolist() == [CLOCK.wall(100 + iteration / 4) for iteration in range(1, 6)]
    assert frame[frame["tag"] == "Loss/critic"]["value"].isna().all()


def test_the_file_name_does_not_tell_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "secrethost")
    EventLog(tmp_path, CLOCK).close()
    assert event_file(tmp_path).name == "events.out.tfevents.1700000000.unilab"


def test_no_event_file_when_none_is_wanted(tmp_path: Path) -> None:
    log = EventLog(tmp_path, CLOCK, events=False)
    log.write(record(1))
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["progress.jsonl"]
    assert len(progress(tmp_path)) == 1
    assert log.count == 0


def test_a_second_run_in_the_same_folder_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    log = EventLog(tmp_path, CLOCK)
    log.write(record(1))
    with pytest.raises(FileExistsError):
        EventLog(tmp_path, Clock(CLOCK.wall_anchor + 60, 0.0))
    log.write(record(2))
    log.close()
    assert [event.step for event in events(tmp_path)[1:]] == [8, 16]
    assert len(progress(tmp_path)) == 2


def test_a_reader_sees_a_record_within_a_second_though_nothing_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert event_log.FLUSH_SECONDS <= 1.0
    monkeypatch.setattr(event_log, "FLUSH_SECONDS", 0.05)
    log = EventLog(tmp_path, CLOCK)
    log.write(record(1))
    assert eventually(lambda: len(progress(tmp_path)) == 1)
    assert eventually(lambda: len(events(tmp_path)) == 2)
    log.close()


def test_a_steady_stream_is_flushed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "FLUSH_SECONDS", 0.05)
    log = EventLog(tmp_path, CLOCK)

    def written() -> bool:
        log.write(record(1))
        return bool((tmp_path / "progress.jsonl").stat().st_size)

    assert eventually(written)
    log.close()


def test_wall_times_follow_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock.start()
    monkeypatch.setattr(time, "time", lambda: 0.0)  # the system clock is set back
    assert clock.wall(clock.monotonic_anchor + 5) == clock.wall_anchor + 5


def test_a_failed_write_reaches_the_writer_and_the_end(tmp_path: Path) -> None:
    log = EventLog(tmp_path, CLOCK)
    log._progress.close()
    log.write(record(1))
    assert eventually(lambda: not log._thread.is_alive())
    with pytest.raises(RuntimeError, match="writing the run's events failed") as caught:
        log.write(record(2))
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(RuntimeError, match="writing the run's events failed"):
        log.close()
    assert log._events is not None
    assert log._events._writer.closed


def test_a_disk_that_fills_up_at_the_end_is_an_error(tmp_path: Path) -> None:
    log = EventLog(tmp_path, CLOCK)
    log._progress.close()
    log._progress = Path("/dev/full").open("w")  # noqa: SIM115 - the log closes it
    log.write(record(1))
    with pytest.raises(RuntimeError, match="writing the run's events failed") as caught:
        log.close()
    assert isinstance(caught.value.__cause__, OSError)
    assert log._events is not None
    assert log._events._writer.closed


def test_a_value_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    log = EventLog(tmp_path, CLOCK)
    log.write(record(1, **{"a": "text"}))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="writing the run's events failed"):
        log.close()


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    log = EventLog(tmp_path, CLOCK)
    log.write(record(1))
    log.close()
    log.close()
    assert len(events(tmp_path)) == 2


def test_writing_never_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path, CLOCK)
    gate: queue.Queue[None] = queue.Queue()
    append = log._append
    monkeypatch.setattr(log, "_append", lambda item: (gate.get(), append(item)))
    for iteration in range(1, 201):
        log.write(record(iteration))  # nothing is written yet
    for _ in range(200):
        gate.put(None)
    log.close()
    assert log.count == 200


@pytest.mark.parametrize("events", [True, False])
def test_a_mirror_gets_every_record(tmp_path: Path, events: bool) -> None:
    class Kept(list[Record]):
        write = list.append

    kept = Kept()
    log = EventLog(tmp_path, CLOCK, events, mirror=kept)
    for iteration in (1, 2):
        log.write(record(iteration))
    log.close()
    assert kept == [record(1), record(2)]
