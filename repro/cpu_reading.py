"""How busy the CPUs of the machine are while a cell runs, and with whose work."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import psutil

STAT = Path("/proc/stat")
TICKS = os.sysconf("SC_CLK_TCK")  # per second
COUNTED = 8  # columns of /proc/stat; the guests' behind them are part of these
IDLE = (3, 4)  # idle, waiting for a disk


class CpuTimes(NamedTuple):
    """Ticks of one CPU since the machine started; what a hypervisor took counts as busy."""

    busy: int
    total: int


class CpuLoad(NamedTuple):
    """Between two readings; None where the system does not say.

    Attributes:
        own_busy: Busy share of the cell's CPUs.
        other_busy: Busy share of the machine's other CPUs.
        foreign: CPUs' worth of work that the suite and its processes did not do.
    """

    own_busy: float | None
    other_busy: float | None
    foreign: float | None


class CpuReader:
    """Measures the load since its last reading.

    Args:
        cpu_ids: The cell's CPUs.
        stat: The kernel's counters.
    """

    def __init__(self, cpu_ids: Collection[int], stat: Path = STAT) -> None:
        self._own, self._stat = frozenset(cpu_ids), stat
        self._before, self._spent, self._when = read_times(stat), own_seconds(), time.monotonic()

    def read(self) -> CpuLoad:
        """The load since the last call, or since the start."""
        times, spent, when = read_times(self._stat), own_seconds(), time.monotonic()
        passed = {
            cpu: CpuTimes(found.busy - self._before[cpu].busy, found.total - self._before[cpu].total)
            for cpu, found in times.items()
            if cpu in self._before
        }
        seconds, worked = when - self._when, max(0.0, spent - self._spent)
        self._before, self._spent, self._when = times, spent, when
        own, other = ([passed[cpu] for cpu in passed if (cpu in self._own) is mine] for mine in (True, False))
        busy = sum(found.busy for found in passed.values()) / TICKS
        foreign = round(max(0.0, busy - worked) / seconds, 3) if passed and seconds > 0 else None
        return CpuLoad(_share(own), _share(other), foreign)


def read_times(stat: Path = STAT) -> dict[int, CpuTimes]:
    """Counters of every CPU; empty on systems without them."""
    found = {}
    for line in stat.read_text().splitlines() if stat.is_file() else []:
        name, *words = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = [int(word) for word in words[:COUNTED]]
            total = sum(ticks)
            found[int(name.removeprefix("cpu"))] = CpuTimes(total - sum(ticks[column] for column in IDLE), total)
    return found


def _share(times: list[CpuTimes]) -> float | None:
    total = sum(found.total for found in times)
    return round(sum(found.busy for found in times) / total, 3) if total > 0 else None


def own_seconds() -> float:
    """CPU seconds of this process and of all it started; one that ended counts with the process that waited for it."""
    seconds = 0.0
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds
