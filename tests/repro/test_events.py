from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fake_trainer import WALL_START, scalar_event, write_events
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

from repro import events
from repro.events import Reason, RecordScan, Refusal, Series, masked_checksums, read_events, read_scalars, scan_records

TAG = "Perf/total_fps"
LENGTH, LENGTH_CHECKSUM, CHECKSUM = 8, 4, 4  # bytes of a record around its payload


def simple_events(count: int) -> list[Event]:
    return [scalar_event(16 * (i + 1), WALL_START + 0.5 * (i + 1), {TAG: 32.0 + i, "Loss/a": -i}) for i in range(count)]


@pytest.fixture
def event_file(tmp_path: Path) -> Path:
    """Five records with two scalars each."""
    path = tmp_path / "events.out.tfevents.1"
    write_events(path, simple_events(5))
    return path


def boundaries(path: Path) -> list[int]:
    """Offset of every record and of the end of the file."""
    content, offsets = path.read_bytes(), [0]
    while offsets[-1] < len(content):
        length = int.from_bytes(content[offsets[-1] : offsets[-1] + LENGTH], "little")
        offsets.append(offsets[-1] + LENGTH + LENGTH_CHECKSUM + length + CHECKSUM)
    return offsets


def write_raw(path: Path, payloads: list[bytes]) -> None:
    with path.open("wb") as stream:
        writer = RecordWriter(stream)
        for payload in payloads:
            writer.write(payload)


def refusal(function: Callable[[Path], object], path: Path) -> Refusal:
    with pytest.raises(Refusal) as caught:
        function(path)
    assert "\n" not in str(caught.value)
    return caught.value


def test_checksums_equal_the_library_for_all_short_lengths_and_mixed_batches() -> None:
    draw = random.Random(3)
    lengths = [*range(40), *[draw.randrange(0, 300) for _ in range(300)], *[7] * 40, *[2] * 40, 5000]
    payloads = [memoryview(draw.randbytes(length)) for length in lengths]
    expected = [masked_crc32c(bytes(payload)) for payload in payloads]
    assert masked_checksums(payloads).tolist() == expected


def test_checksums_do_not_depend_on_the_batch_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(4)
    payloads = [memoryview(draw.randbytes(draw.randrange(4, 90))) for _ in range(200)]
    expected = [masked_crc32c(bytes(payload)) for payload in payloads]
    monkeypatch.setattr(events, "_BATCH_BYTES", 2000)
    assert masked_checksums(payloads).tolist() == expected


def test_scan_counts_records_and_bytes(event_file: Path) -> None:
    assert scan_records(event_file) == RecordScan(count=6, bytes=event_file.stat().st_size, cut_offset=None)


def test_a_tail_cut_at_any_byte_is_reported_and_the_rest_is_read(event_file: Path) -> None:
    content = event_file.read_bytes()
    start, end = boundaries(event_file)[-2:]
    for size in range(start + 1, end):
        event_file.write_bytes(content[:size])
        log = read_events(event_file.parent)
        assert log.scan == RecordScan(count=5, bytes=size, cut_offset=start)
        assert log.scan.cut_tail
        assert log.scalars[TAG].values.tolist() == [32.0, 33.0, 34.0, 35.0]
    event_file.write_bytes(content[:start])
    assert scan_records(event_file) == RecordScan(count=5, bytes=start, cut_offset=None)


@pytest.mark.parametrize("index", [1, 3, 5])
def test_a_wrong_byte_anywhere_in_a_complete_record_is_refused(event_file: Path, index: int) -> None:
    content = event_file.read_bytes()
    start, end = boundaries(event_file)[index : index + 2]
    for offset in range(start, end):
        damaged = bytearray(content)
        damaged[offset] ^= 0x01
        event_file.write_bytes(bytes(damaged))
        found = refusal(scan_records, event_file)
        assert found.code == "damaged_record"
        assert event_file.name in str(found)
        assert f"record {index} at byte {start} " in str(found)
        assert ("length" in str(found)) == (offset < start + LENGTH + LENGTH_CHECKSUM)


def test_the_first_damaged_record_is_named(event_file: Path) -> None:
    offsets = boundaries(event_file)
    content = bytearray(event_file.read_bytes())
    content[offsets[4]] ^= 0x01  # a length
    content[offsets[2] + 20] ^= 0x01  # a payload before it
    event_file.write_bytes(bytes(content))
    assert "record 2 at byte" in str(refusal(scan_records, event_file))


def test_lost_bytes_in_the_middle_are_damage_not_a_cut_tail(event_file: Path) -> None:
    offsets = boundaries(event_file)
    content = event_file.read_bytes()
    event_file.write_bytes(content[: offsets[3] - 3] + content[offsets[3] :])
    assert refusal(scan_records, event_file).code == "damaged_record"


def test_a_record_with_right_checksum_that_is_no_event_is_refused(event_file: Path) -> None:
    with event_file.open("ab") as stream:
        RecordWriter(stream).write(b"\xff" * 9)
    found = refusal(read_events, event_file.parent)
    assert found.code == "damaged_record"
    assert "record 6" in str(found)


@pytest.mark.parametrize(
    "payloads",
    [[b"\xff" * 9] * 3, [Event(step=1).SerializeToString()] * 3, [b"", b""]],
    ids=["other records", "no version", "no content"],
)
def test_records_of_another_program_are_foreign(tmp_path: Path, payloads: list[bytes]) -> None:
    path = tmp_path / "events.out.tfevents.1"
    write_raw(path, payloads)
    assert refusal(scan_records, path).code == "foreign_file"


def test_a_text_file_is_foreign(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    path.write_text("step,wall_time,value\n1,2,3\n")
    assert refusal(scan_records, path).code == "foreign_file"


def test_a_file_without_events_is_empty(event_file: Path) -> None:
    content, version_end = event_file.read_bytes(), boundaries(event_file)[1]
    for size in [*range(version_end + 1), version_end + 5]:
        event_file.write_bytes(content[:size])
        assert refusal(scan_records, event_file).code == "empty_events"


def test_scalars_come_back_in_full(event_file: Path) -> None:
    scalars = read_scalars(event_file.parent)
    assert sorted(scalars) == ["Loss/a", TAG]
    assert scalars[TAG].steps.tolist() == [16, 32, 48, 64, 80]
    assert scalars[TAG].wall_times.tolist() == [WALL_START + 0.5 * i for i in range(1, 6)]
    assert scalars["Loss/a"].values.tolist() == [0.0, -1.0, -2.0, -3.0, -4.0]
    assert [array.dtype for array in (scalars[TAG].steps, scalars[TAG].values)] == [np.int64, np.float64]


def test_many_points_are_not_sampled(tmp_path: Path) -> None:
    count = 12_000  # TensorBoard keeps 10,000 by default
    write_events(
        tmp_path / "events.out.tfevents.1",
        [scalar_event(i + 1, WALL_START + i, {TAG: float(i)}) for i in range(count)],
    )
    assert read_scalars(tmp_path)[TAG].values.tolist() == list(range(count))


def test_steps_beyond_32_bits_and_values_that_are_not_finite_survive(tmp_path: Path) -> None:
    values = [float("nan"), float("inf"), 1.5]
    write_events(
        tmp_path / "events.out.tfevents.1",
        [scalar_event(2**40 + i, WALL_START + i, {TAG: value}) for i, value in enumerate(values)],
    )
    series = read_scalars(tmp_path)[TAG]
    assert series.steps.tolist() == [2**40, 2**40 + 1, 2**40 + 2]
    assert np.array_equal(series.values, values, equal_nan=True)


def test_the_order_of_the_file_is_kept_where_steps_go_back(tmp_path: Path) -> None:
    steps = [5, 9, 7, 7]
    write_events(
        tmp_path / "events.out.tfevents.1",
        [scalar_event(step, WALL_START + i, {TAG: float(i)}) for i, step in enumerate(steps)],
    )
    series = read_scalars(tmp_path)[TAG]
    assert series.steps.tolist() == steps
    assert series.values.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_summaries_of_other_kinds_are_counted_and_left_alone(tmp_path: Path) -> None:
    histogram = Summary(value=[Summary.Value(tag="weights", histo=HistogramProto(num=1.0))])
    others = [Event(step=3, wall_time=WALL_START + 9, summary=histogram), Event(wall_time=WALL_START, graph_def=b"x")]
    write_events(tmp_path / "events.out.tfevents.1", simple_events(2) + others)
    log = read_events(tmp_path)
    assert log.summaries == 3
    assert log.scan.count == 5
    assert sorted(log.scalars) == ["Loss/a", TAG]


def test_an_event_file_without_scalars_reads_as_none(tmp_path: Path) -> None:
    write_events(tmp_path / "events.out.tfevents.1", [Event(wall_time=WALL_START, graph_def=b"x")])
    assert read_scalars(tmp_path) == {}


@pytest.mark.parametrize(
    "other",
    ["events.out.tfevents.2", "events.out.tfevents.1.bak", "attempt-002/events.out.tfevents.1", "old/x/my.tfevents"],
)
def test_a_second_event_file_anywhere_below_is_named(event_file: Path, other: str) -> None:
    path = event_file.parent / other
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(event_file.read_bytes())
    found = refusal(read_scalars, event_file.parent)
    assert found.code == "several_runs"
    assert event_file.name in str(found)
    assert other in str(found)


def test_a_later_attempt_is_refused_even_without_events(event_file: Path) -> None:
    (event_file.parent / "attempt-002").mkdir()
    found = refusal(read_scalars, event_file.parent)
    assert found.code == "several_runs"
    assert str(found).endswith("attempt-002; measure attempt-002 by itself")


@pytest.mark.parametrize(
    "second",
    [
        Event(wall_time=WALL_START, file_version="brain.Event:2"),
        Event(wall_time=WALL_START, step=3, session_log=SessionLog(status=SessionLog.START)),
    ],
    ids=["joined files", "restart"],
)
def test_a_second_session_inside_the_file_is_refused(tmp_path: Path, second: Event) -> None:
    write_events(tmp_path / "events.out.tfevents.1", [*simple_events(5), second, *simple_events(5)])
    found = refusal(read_scalars, tmp_path)
    assert found.code == "several_runs"
    assert "record 6" in str(found)


def test_other_files_beside_the_events_are_fine(event_file: Path) -> None:
    (event_file.parent / "model_10.pt").write_bytes(b"x")
    (event_file.parent / "videos").mkdir()
    assert len(read_scalars(event_file.parent)) == 2


def test_a_directory_without_events_or_with_them_one_level_down_says_so(event_file: Path, tmp_path: Path) -> None:
    assert refusal(read_scalars, tmp_path / "absent").code == "missing_run_dir"
    inner = tmp_path / "runs" / "first"
    inner.mkdir(parents=True)
    assert refusal(read_scalars, inner).code == "no_event_file"
    event_file.rename(inner / event_file.name)
    found = refusal(read_scalars, tmp_path / "runs")
    assert found.code == "no_event_file"
    assert "did you mean first?" in str(found)


def test_a_pipe_with_the_name_of_an_event_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.out.tfevents.1")
    assert refusal(events.find_event_file, tmp_path).code == "no_event_file"


@pytest.mark.parametrize("change", ["lost point", "lost tag", "other value", "added tag"])
def test_a_reading_that_differs_from_the_records_is_refused(
    event_file: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    read = events._read_with_tbparse(event_file, set())
    whole = read[TAG]
    if change == "lost point":
        read[TAG] = Series(whole.steps[1:], whole.wall_times[1:], whole.values[1:])
    elif change == "lost tag":
        del read[TAG]
    elif change == "other value":
        read[TAG] = Series(whole.steps, whole.wall_times, whole.values + 1.0)
    else:
        read["more"] = whole
    monkeypatch.setattr(events, "_read_with_tbparse", lambda path, tensors: read)
    assert refusal(read_scalars, event_file.parent).code == "readers_disagree"


def test_a_refusal_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(Refusal(Reason.MISSING_TAG, "no such tag")))
    assert (copy.code, copy.message, str(copy)) == ("missing_tag", "no such tag", "no such tag")
