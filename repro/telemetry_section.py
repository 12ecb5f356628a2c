"""The page's table of what the host did while each cell ran."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean

from repro import text
from repro.gpu_reading import GpuSample
from repro.telemetry import Sample
from repro.text import markdown_table

NO_THROTTLE = "gpu_idle"  # a clock that is low because there is nothing to do
CPU_HEADERS = ("own CPUs busy", "other CPUs busy", "foreign load, CPUs (max)", "load average (max)")
GPU_HEADERS = (
    *("GPU", "busy mean / max", "SM MHz min", "memory MHz min", "W mean", "\N{DEGREE SIGN}C max"),
    *("throttled by (samples)", "foreign processes (max)"),
)


def telemetry_section(telemetry: Mapping[str, Sequence[Sample]]) -> str:
    """One row for each cell and GPU as Markdown, and what could not be read; empty without samples.

    Args:
        telemetry: Samples by cell.
    """
    found = {cell: samples for cell, samples in telemetry.items() if samples}
    if not found:
        return ""
    with_gpus = any(sample.gpus for sample in chain.from_iterable(found.values()))
    gpu_headers = GPU_HEADERS if with_gpus else ()
    rows = [
        [cell, str(len(samples)), *_cpu_columns(samples), *columns]
        for cell, samples in found.items()
        for columns in (_gpu_rows(samples) if with_gpus else [[]])
    ]
    headers = ("run", "samples", *CPU_HEADERS, *gpu_headers)
    table = markdown_table(headers, rows, "lrrrrr" + "lrrrrrlr"[: len(gpu_headers)])
    failures = [f"- {cell}: {sample.failed}" for cell in found for sample in found[cell] if sample.failed is not None]
    return "\n\n".join([table, *(["Not everything could be read:\n\n" + "\n".join(failures)] if failures else [])])


def _cpu_columns(samples: Sequence[Sample]) -> list[str]:
    return [
        text.percent(_over(fmean, (sample.own_cpus_busy for sample in samples))),
        text.percent(_over(fmean, (sample.other_cpus_busy for sample in samples))),
        text.number(_over(max, (sample.foreign_cpus for sample in samples))),
        text.number(_over(max, (sample.load_average for sample in samples))),
    ]


def _gpu_rows(samples: Sequence[Sample]) -> list[list[str]]:
    """Columns of every GPU of a cell, in the cell's order; one row of dashes where it has none."""
    by_gpu: dict[str, list[GpuSample]] = {}
    for gpu in chain.from_iterable(sample.gpus for sample in samples):
        by_gpu.setdefault(gpu.uuid, []).append(gpu)
    rows = [_gpu_columns(position, found) for position, found in enumerate(by_gpu.values())]
    return rows or [[text.NOTHING] * len(GPU_HEADERS)]


def _gpu_columns(position: int, found: Sequence[GpuSample]) -> list[str]:
    mean, peak = (_over(over, (gpu.utilisation for gpu in found)) for over in (fmean, max))
    return [
        str(position),
        f"{text.percent(mean)} / {text.percent(peak)}",
        text.rate(_over(min, (gpu.sm_mhz for gpu in found))),
        text.rate(_over(min, (gpu.memory_mhz for gpu in found))),
        text.rate(_over(fmean, (gpu.power_w for gpu in found))),
        text.rate(_over(max, (gpu.temperature_c for gpu in found))),
        _throttling(found),
        text.rate(_over(max, (gpu.foreign_processes for gpu in found))),
    ]


def _throttling(found: Sequence[GpuSample]) -> str:
    """Every reason seen with the number of samples that have it."""
    if all(gpu.throttle is None for gpu in found):
        return text.NOTHING
    names = [name for gpu in found for name in gpu.throttle or () if name != NO_THROTTLE]
    return ", ".join(f"{name} ({names.count(name)})" for name in sorted(set(names))) or "none"


def _over(combine: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    """The values that are there, combined; None where there is none."""
    present = [float(value) for value in values if value is not None]
    return combine(present) if present else None
