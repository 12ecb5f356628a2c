"""Reads the event file of one run directory, or says why it must not be read.

tbparse reads the scalars. It also hides damage, sorts by step and merges what it finds, so the record framing is walked
here too, every checksum is verified, and the two readings must agree point by point.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray
from tbparse import SummaryReader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import CRC_TABLE, masked_crc32c
from tensorboard.util.tensor_util import make_ndarray

from unilab.names import ATTEMPT_PATTERN

_EVENT_FILE_MARK = "tfevents"
_HEADER = struct.Struct("<QI")  # payload length, masked CRC32C of the eight length bytes
_CHECKSUM = struct.Struct("<I")  # masked CRC32C of the payload
_SCALARS = "scalars"  # plugin of tensors that hold one number, which newer writers use in place of `simple_value`
_SMALL_BATCH = 16  # below this many records the library's loop is faster than a step over columns
_BATCH_BYTES = 32 * 2**20
_CRC_TABLE = np.array(CRC_TABLE, dtype=np.uint32)


class Reason(StrEnum):
    """Why a run gives no number: stable codes, used in result files."""

    MISSING_RUN_DIR = "missing_run_dir"
    NO_EVENT_FILE = "no_event_file"
    SEVERAL_RUNS = "several_runs"
    FOREIGN_FILE = "foreign_file"
    EMPTY_EVENTS = "empty_events"
    DAMAGED_RECORD = "damaged_record"
    READERS_DISAGREE = "readers_disagree"
    DAMAGED_FILE = "damaged_file"
    MISSING_RUN_END = "missing_run_end"
    RUN_FAILED = "run_failed"
    EVENT_COUNT_MISMATCH = "event_count_mismatch"
    MISSING_TAG = "missing_tag"
    TOO_FEW_POINTS = "too_few_points"
    STEPS_NOT_INCREASING = "steps_not_increasing"
    TIME_NOT_INCREASING = "time_not_increasing"
    NON_FINITE = "non_finite"
    INVALID_PHYSICS = "invalid_physics"
    SKIPPED_UPDATES = "skipped_updates"
    PROGRESS_MISMATCH = "progress_mismatch"
    SETTINGS_MISMATCH = "settings_mismatch"
    CLOCK_STEP = "clock_step"
    MIXED_CODE = "mixed_code"  # of a group of runs, their settings too; found where results are put together


class Refusal(Exception):  # noqa: N818 - an answer of the suite, not a fault of it
    """A run that gives no number.

    Attributes:
        code: one of `Reason`.
        message: one line: what was asked, what was found, what to do. It names files without their directories,
            since it is published and must be the same wherever the run is measured again.
    """

    def __init__(self, code: Reason, message: str) -> None:
        super().__init__(code, message)  # both, so that the exception survives pickling
        self.code: str = Reason(code).value
        self.message = message

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class RecordScan:
    """What the framing of an event file says.

    Attributes:
        count: complete records, the leading version record included.
        bytes: size of the file.
        cut_offset: byte at which an incomplete last record begins, or None.
    """

    count: int
    bytes: int
    cut_offset: int | None

    @property
    def cut_tail(self) -> bool:
        """Whether the last record is incomplete."""
        return self.cut_offset is not None


@dataclass(frozen=True, eq=False)
class Series:
    """All points of one tag in file order, never sampled.

    Attributes:
        steps: event.step, `(N,)`.
        wall_times: event.wall_time in seconds since 1970, `(N,)`.
        values: the scalar, `(N,)`; float32 in the file.
    """

    steps: NDArray[np.int64]
    wall_times: NDArray[np.float64]
    values: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class EventLog:
    """One event file, read and checked.

    Attributes:
        path: the file.
        scan: its framing.
        summaries: records that carry a summary; `run_end.json` calls this `event_count`.
        scalars: points by tag.
    """

    path: Path
    scan: RecordScan
    summaries: int
    scalars: Mapping[str, Series]


def find_event_file(run_dir: Path) -> Path:
    """The one event file of a run directory.

    Raises:
        Refusal: `missing_run_dir`, `no_event_file`, or `several_runs` when there is any other event file, copy of one
            or attempt in the directory or below it.
    """
    if not run_dir.is_dir():
        raise Refusal(
            Reason.MISSING_RUN_DIR, f"{run_dir.resolve().name} is not a directory; give the directory of one run"
        )
    found = sorted(path for path in run_dir.rglob(f"*{_EVENT_FILE_MARK}*") if path.is_file())  # a pipe would block
    if not found:
        raise Refusal(
            Reason.NO_EVENT_FILE, f"{run_dir.resolve().name} has no *{_EVENT_FILE_MARK}* file; was the logger on?"
        )
    attempts = sorted(path for path in run_dir.glob(ATTEMPT_PATTERN.format(number="*")) if path.is_dir())
    if len(found) + len(attempts) > 1:
        if not attempts and all(path.parent != run_dir for path in found):
            raise Refusal(
                Reason.SEVERAL_RUNS,
                f"{run_dir.resolve().name} holds {len(found)} event files in folders of their own; "
                f"name one run, for example {found[0].parent}",
            )
        listed = ", ".join(path.relative_to(run_dir).as_posix() for path in found + attempts)
        instead = f"measure {attempts[-1].name} by itself" if attempts else "give each run a directory of its own"
        what = f"{run_dir.resolve().name} should hold one event file and nothing of another run, found: {listed}"
        raise Refusal(Reason.SEVERAL_RUNS, f"{what}; {instead}")
    if found[0].parent != run_dir:
        raise Refusal(
            Reason.NO_EVENT_FILE,
            f"{run_dir.resolve().name} has no event file of its own; "
            f"did you mean {found[0].parent.relative_to(run_dir)}?",
        )
    return found[0]


def scan_records(path: Path) -> RecordScan:
    """Walk the records of an event file and verify both checksums of each.

    Raises:
        Refusal: `foreign_file`, `empty_events`, or `damaged_record` naming the record's index and offset.
    """
    return _frame(path)[1]


def read_scalars(run_dir: Path) -> dict[str, Series]:
    """All scalars of a run directory by tag; see `read_events` for the refusals."""
    return dict(read_events(run_dir).scalars)


def read_events(run_dir: Path) -> EventLog:
    """Read and check the one event file of a run directory.

    Raises:
        Refusal: what `find_event_file` and `scan_records` refuse; `several_runs` when a second session is inside the
            file; `readers_disagree` when tbparse lost or changed a point.
    """
    path = find_event_file(run_dir)
    payloads, scan = _frame(path)
    walked, summaries, tensors = _walk(path, payloads)
    _compare(path, walked, _read_with_tbparse(path, tensors))
    return EventLog(path, scan, summaries, walked)


def _frame(path: Path) -> tuple[list[memoryview], RecordScan]:
    """Payloads of the complete records, all checksums verified.

    Format, from TensorFlow's `record_writer.cc`: length, its checksum, payload, its checksum, little-endian.
    """
    content = memoryview(path.read_bytes())
    offset, broken = 0, None
    offsets: list[int] = []
    payloads: list[memoryview] = []
    while offset + _HEADER.size <= len(content):
        length, checksum = _HEADER.unpack_from(content, offset)
        if masked_crc32c(bytes(content[offset : offset + 8])) != checksum:
            broken = offset
            break
        end = offset + _HEADER.size + length
        if end + _CHECKSUM.size > len(content):
            break
        offsets.append(offset)
        payloads.append(content[offset + _HEADER.size : end])
        offset = end + _CHECKSUM.size
    _check_payloads(path, content, offsets, payloads)
    if broken is not None and offsets:
        _refuse_record(path, len(offsets), broken, "the checksum of its length is wrong")
    _check_first(path, broken, payloads)
    return payloads, RecordScan(len(payloads), len(content), offset if offset < len(content) else None)


def _check_payloads(path: Path, content: memoryview, offsets: list[int], payloads: list[memoryview]) -> None:
    stored = [
        _CHECKSUM.unpack_from(content, o + _HEADER.size + len(p))[0] for o, p in zip(offsets, payloads, strict=True)
    ]
    wrong = np.flatnonzero(masked_checksums(payloads) != np.array(stored, dtype=np.uint32))
    if wrong.size:
        index = int(wrong[0])
        _refuse_record(path, index, offsets[index], "the checksum of its content is wrong")


def _refuse_record(path: Path, index: int, offset: int, what: str) -> NoReturn:
    raise Refusal(
        Reason.DAMAGED_RECORD,
        f"{path.name}: record {index} at byte {offset} is damaged ({what}); copy it again or rerun",
    )


def _check_first(path: Path, broken: int | None, payloads: list[memoryview]) -> None:
    """The first record names the format's version; a file with nothing after it holds no events."""
    foreign = broken is not None
    if payloads:
        try:
            foreign = not Event.FromString(bytes(payloads[0])).file_version.startswith("brain.Event:")
        except DecodeError:
            foreign = True
    if foreign:
        raise Refusal(
            Reason.FOREIGN_FILE, f"{path.name} is not a TensorBoard event file; give a TensorBoard run directory"
        )
    if len(payloads) < 2:
        raise Refusal(Reason.EMPTY_EVENTS, f"{path.name} holds no events; the run ended before its first iteration")


def masked_checksums(payloads: list[memoryview]) -> NDArray[np.uint32]:
    """Masked CRC32C of each payload, `(len(payloads),)`; equal to tensorboard's `masked_crc32c`, some 20 times faster.

    All payloads advance together, one byte column at a time. They are right-aligned: a zero state is not changed by
    leading zeros, and the usual initial state of all ones equals inverting the first four bytes of the payload.
    """
    result = np.empty(len(payloads), dtype=np.uint32)
    order = sorted(range(len(payloads)), key=lambda index: len(payloads[index]))
    for batch in _batches(order, payloads):
        if len(batch) < _SMALL_BATCH or len(payloads[batch[0]]) < 4:
            result[batch] = [masked_crc32c(bytes(payloads[index])) for index in batch]
        else:
            result[batch] = _columnwise([payloads[index] for index in batch])
    return result


def _batches(order: list[int], payloads: list[memoryview]) -> Iterator[list[int]]:
    """Cut indices sorted by length into batches whose padded size is bounded."""
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * len(payloads[index]) > _BATCH_BYTES:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _columnwise(payloads: list[memoryview]) -> NDArray[np.uint32]:
    width = max(len(payload) for payload in payloads)
    rows = np.zeros((len(payloads), width), dtype=np.uint8)
    for row, payload in zip(rows, payloads, strict=True):
        start = width - len(payload)
        row[start:] = np.frombuffer(payload, dtype=np.uint8)
        row[start : start + 4] ^= 0xFF
    crc = np.zeros(len(payloads), dtype=np.uint32)
    for column in np.ascontiguousarray(rows.T):  # (width, n)
        crc = _CRC_TABLE[(crc ^ column) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
    crc = ~crc
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)


def _walk(path: Path, payloads: list[memoryview]) -> tuple[dict[str, Series], int, set[str]]:
    """Scalars by tag in file order, the number of records with a summary, and the tags whose scalars are tensors."""
    tensors: set[str] = set()
    columns: dict[str, tuple[list[int], list[float], list[float]]] = {}
    summaries = 0
    for index, payload in enumerate(payloads):
        event = _parse(path, index, payload)
        summaries += event.HasField("summary")
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == _SCALARS and value.HasField("tensor"):
                tensors.add(value.tag)  # said with a tag's first value, and by some writers with every one
            if value.HasField("simple_value") or value.tag in tensors:
                steps, wall_times, values = columns.setdefault(value.tag, ([], [], []))
                steps.append(event.step)
                wall_times.append(event.wall_time)
                values.append(_number(path, index, value))
    return {tag: _series(*lists) for tag, lists in columns.items()}, summaries, tensors


def _number(path: Path, index: int, value: Summary.Value) -> float:
    if value.HasField("simple_value"):
        return float(value.simple_value)
    try:
        return float(make_ndarray(value.tensor).item())
    except (TypeError, ValueError) as error:
        raise Refusal(
            Reason.DAMAGED_RECORD, f"{path.name}: record {index}: the scalar {value.tag} is not one number ({error})"
        ) from error


def _parse(path: Path, index: int, payload: memoryview) -> Event:
    try:
        event = Event.FromString(bytes(payload))
    except DecodeError as error:
        raise Refusal(
            Reason.DAMAGED_RECORD, f"{path.name}: record {index} is no TensorBoard event ({error})"
        ) from error
    restarted = event.HasField("session_log") and event.session_log.status == SessionLog.START
    if index and (restarted or event.HasField("file_version")):
        raise Refusal(
            Reason.SEVERAL_RUNS,
            f"{path.name}: a second session begins at record {index}; measure runs that were not resumed",
        )
    return event


def _series(steps: object, wall_times: object, values: object) -> Series:
    return Series(np.asarray(steps, np.int64), np.asarray(wall_times, np.float64), np.asarray(values, np.float64))


def _read_with_tbparse(path: Path, tensors: set[str]) -> dict[str, Series]:
    """All scalar points of the file (no sampling), sorted by step within a tag as tbparse returns them.

    Args:
        path: the file.
        tensors: tags whose scalars are tensors.
    """
    with warnings.catch_warnings():
        # tbparse 0.0.9 sorts in place, which pandas 3.1 deprecates and pandas below 4 still does.
        warnings.filterwarnings("ignore", message="The inplace keyword in DataFrame.sort_values")
        kinds = {"scalars", "tensors"} if tensors else {"scalars"}
        reader = SummaryReader(str(path), extra_columns={"wall_time"}, event_types=kinds)
        frames = [reader.scalars]
        if tensors:
            frames.append(reader.tensors[reader.tensors["tag"].isin(tensors)])
    return {
        str(tag): _series(rows["step"], rows["wall_time"], rows["value"].astype(float))
        for frame in frames
        if not frame.empty
        for tag, rows in frame.groupby("tag", sort=False)
    }


def _compare(path: Path, walked: dict[str, Series], read: dict[str, Series]) -> None:
    """Refuse unless both readings hold the same points; their order is the file's, which tbparse does not keep."""
    for tag in sorted(walked.keys() | read.keys()):
        counts = [len(side[tag].steps) if tag in side else 0 for side in (walked, read)]
        if counts[0] != counts[1] or not _same_points(walked[tag], read[tag]):
            raise Refusal(
                Reason.READERS_DISAGREE,
                f"{path.name}: {tag} has {counts[0]} points in the records and {counts[1]} as read by tbparse, or they "
                "differ; report this file",
            )


def _same_points(a: Series, b: Series) -> bool:
    return all(np.array_equal(one, other, equal_nan=True) for one, other in zip(_sorted(a), _sorted(b), strict=True))


def _sorted(series: Series) -> tuple[NDArray[np.generic], ...]:
    order = np.lexsort((series.values, series.wall_times, series.steps))
    return series.steps[order], series.wall_times[order], series.values[order]
