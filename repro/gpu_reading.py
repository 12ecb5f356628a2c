"""What the driver says about the GPUs of a running cell."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil
import pynvml

from repro.schema import Strict

# Bits of nvmlClocksEventReasons, as the driver's documentation names them.
THROTTLE_REASONS = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clock_setting",
    "board_limit",
    "reliability",
)
FIRST_NAMESPACE = 0xEFFFFFFC  # inode of the machine's own process ids; a container has others


class GpuSample(Strict):
    """One GPU at one moment; None for what the driver does not say.

    Attributes:
        uuid: Its id.
        utilisation: Share of the driver's last period in which a kernel ran.
        sm_mhz: Clock of the multiprocessors.
        memory_mhz: Clock of the memory.
        power_w: Power drawn.
        temperature_c: Temperature of the chip.
        throttle: Names of what holds the clocks down.
        memory_bytes: Memory in use, by anybody.
        foreign_processes: Compute processes that the suite did not start.
    """

    uuid: str
    utilisation: float | None
    sm_mhz: int | None
    memory_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    throttle: tuple[str, ...] | None
    memory_bytes: int | None
    foreign_processes: int | None


class GpuReader(Protocol):
    """Reads GPUs until it is closed."""

    def read(self) -> tuple[GpuSample, ...]:
        """All GPUs now."""

    def close(self) -> None:
        """Let go of the driver."""


class NvmlReader:
    """Reads GPUs through NVML.

    Args:
        entries: Entries of CUDA_VISIBLE_DEVICES: ids or numbers.

    Raises:
        pynvml.NVMLError: Without a driver, or for an entry it does not know.
        ValueError: For an entry that is neither.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        pynvml.nvmlInit()
        self._handles = [_handle(entry) for entry in entries]

    def read(self) -> tuple[GpuSample, ...]:
        """All GPUs now."""
        return tuple(map(_sample, self._handles))

    def close(self) -> None:
        """Let go of the driver."""
        pynvml.nvmlShutdown()


def _handle(entry: str) -> Any:
    if entry.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(entry))
    if not entry.startswith(("GPU-", "MIG-")):
        raise ValueError(f"{entry!r} is neither the number nor the id of a GPU")
    return pynvml.nvmlDeviceGetHandleByUUID(entry)


def _sample(handle: Any) -> GpuSample:
    def ask(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except pynvml.NVMLError:  # not every GPU has every sensor
            return None

    utilisation = ask(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    milliwatts = ask(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
    pids = ask(lambda: [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)])
    return GpuSample(
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        utilisation=None if utilisation is None else utilisation / 100,
        sm_mhz=ask(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        memory_mhz=ask(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
        power_w=None if milliwatts is None else milliwatts / 1000,
        temperature_c=ask(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        throttle=ask(lambda: throttle_names(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))),
        memory_bytes=ask(lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)),
        foreign_processes=None if pids is None else count_foreign(pids),
    )


def throttle_names(bits: int) -> tuple[str, ...]:
    """Names of set bits; a bit without a name is given as its number."""
    set_bits = [bit for bit in range(bits.bit_length()) if bits >> bit & 1]
    return tuple(THROTTLE_REASONS[bit] if bit < len(THROTTLE_REASONS) else hex(1 << bit) for bit in set_bits)


def count_foreign(pids: Sequence[int], namespace: Path = Path("/proc/self/ns/pid")) -> int | None:
    """How many of these processes this one did not start, directly or not.

    None where that cannot be known: in a container the driver may give the machine's ids, which are not the
    container's. An id of our own among them shows that they are.
    """
    own = sum(_is_own(pid) for pid in pids)
    comparable = own or not pids or (namespace.exists() and namespace.stat().st_ino == FIRST_NAMESPACE)
    return len(pids) - own if comparable else None


def _is_own(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return os.getpid() in (pid, *(parent.pid for parent in process.parents()))
    except psutil.Error:
        return False
