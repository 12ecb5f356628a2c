"""The host while a cell runs: one sample a second into `telemetry/<cell>.jsonl`, read again by every report.

The samples explain a rate, they are no part of it, so nothing that goes wrong here touches the cell.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self, TextIO

from pydantic import Field

from repro.cpu_reading import CpuReader
from repro.errors import UsageError
from repro.gpu_reading import GpuReader, GpuSample, NvmlReader
from repro.redact import Redactor
from repro.schema import Strict, parse_model

INTERVAL_SECONDS = 1.0
STOP_SECONDS = 5.0  # a driver that hangs must not hold up the session


class Sample(Strict):
    """One line.

    Attributes:
        seconds: Since the cell's start.
        gpus: The cell's GPUs.
        load_average: Of the machine, over a minute.
        own_cpus_busy: Busy share of the CPUs of the cell's physics since the last sample.
        other_cpus_busy: The same of the machine's other CPUs.
        foreign_cpus: CPUs' worth of work of processes that are not the suite's.
        failed: What could not be read, and is not tried again.
    """

    seconds: Annotated[float, Field(ge=0)]
    gpus: tuple[GpuSample, ...] = ()
    load_average: float | None = None
    own_cpus_busy: float | None = None
    other_cpus_busy: float | None = None
    foreign_cpus: float | None = None
    failed: str | None = None


class Sampler:
    """Samples from a thread while a cell runs; use as a context manager.

    Args:
        path: The file.
        cpu_ids: CPUs of the cell's physics.
        gpus: Its entries of CUDA_VISIBLE_DEVICES; none where it has none.
        open_gpus: Makes the reader of the GPUs.
        interval: Seconds between samples. A shorter cell gets one at its end.
        descends: Whether the cell's processes descend from this one; those of a container do not, and nothing can be
            called foreign then.

    Attributes:
        count: Lines written; None where the file could not be written.
    """

    def __init__(
        self,
        path: Path,
        cpu_ids: Sequence[int],
        gpus: Sequence[str],
        open_gpus: Callable[[Sequence[str]], GpuReader] = NvmlReader,
        interval: float = INTERVAL_SECONDS,
        descends: bool = True,
    ) -> None:
        self.count: int | None = None
        self._path, self._cpu_ids, self._entries = path, tuple(cpu_ids), tuple(gpus)
        self._open_gpus, self._interval, self._descends = open_gpus, interval, descends
        self._reader: GpuReader | None = None
        self._stop, self._closed = threading.Event(), False
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(STOP_SECONDS)
        self._closed = True

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # without a file there is nobody to tell
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("w", encoding="utf-8") as file:
                self.count = 0
                try:
                    self._sample_until_stopped(file)
                except Exception as error:  # whatever it was, the cell goes on
                    self._write(file, Sample(seconds=self._seconds(), failed=_words(error)))
                finally:
                    if self._reader is not None:
                        self._reader.close()
        if self.count is not None and not self._closed:
            with contextlib.suppress(OSError):  # a disk that was full may have taken a line late
                self.count = self._path.read_bytes().count(b"\n")

    def _sample_until_stopped(self, file: TextIO) -> None:
        cpus, failed = CpuReader(self._cpu_ids), self._open()
        due = self._began
        stopped = False
        while not stopped:
            due += self._interval
            stopped = self._stop.wait(max(0.0, due - time.monotonic()))
            if not stopped or not self.count:
                self._write(file, self._sample(cpus, failed))
            failed = None

    def _open(self) -> str | None:
        """Open the GPUs, or say why not."""
        try:
            self._reader = self._open_gpus(self._entries) if self._entries else None
        except Exception as error:  # the CPUs can be read all the same
            return _words(error)
        return None

    def _sample(self, cpus: CpuReader, failed: str | None) -> Sample:
        gpus: tuple[GpuSample, ...] = ()
        try:
            gpus = self._reader.read() if self._reader is not None else ()
        except Exception as error:  # a GPU that fell off the bus; the CPUs can be read all the same
            self._reader, failed = None, _words(error)
        load = cpus.read()
        if not self._descends:
            gpus = tuple(gpu.model_copy(update={"foreign_processes": None}) for gpu in gpus)
        return Sample(
            seconds=self._seconds(),
            gpus=gpus,
            load_average=round(os.getloadavg()[0], 2),
            own_cpus_busy=load.own_busy,
            other_cpus_busy=load.other_busy,
            foreign_cpus=load.foreign if self._descends else None,
            failed=failed,
        )

    def _seconds(self) -> float:
        return round(time.monotonic() - self._began, 3)

    def _write(self, file: TextIO, sample: Sample) -> None:
        if not self._closed:
            file.write(json.dumps(sample.model_dump(mode="json"), ensure_ascii=False, allow_nan=False) + "\n")
            file.flush()
            self.count = (self.count or 0) + 1


def read_telemetry(path: Path, expected: int | None) -> tuple[Sample, ...]:
    """Read a cell's samples.

    Args:
        path: The file.
        expected: How many the journal says there are; None where the cell has no end, or an older suite ran it.

    Raises:
        UsageError: If a line is no sample, or there are more or fewer than the journal says.
    """
    if not path.is_file() and not expected:
        return ()
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []  # a line without its end was cut by a crash
    if expected is not None and len(lines) != expected:
        raise UsageError(f"telemetry/{path.name} has {len(lines)} samples, the journal says {expected}")
    return tuple(parse_model(Sample, line, f"telemetry/{path.name} line {i}") for i, line in enumerate(lines, start=1))


def _words(error: Exception) -> str:
    return Redactor().text(f"{type(error).__name__}: {error}")
