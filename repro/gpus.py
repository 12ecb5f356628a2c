"""What the driver says about GPUs, through NVML: their facts, what joins them, and who uses them now."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from repro import text
from repro.schema import Strict

PCI = Path("/sys/bus/pci/devices")
# Closest common ancestor of two GPUs in the PCIe tree, nearest first.
ANCESTORS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "one board",
    pynvml.NVML_TOPOLOGY_SINGLE: "one PCIe switch",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PCIe switches",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "one PCIe host bridge",
    pynvml.NVML_TOPOLOGY_NODE: "PCIe within a NUMA node",
    pynvml.NVML_TOPOLOGY_SYSTEM: "PCIe across NUMA nodes",
}
IDLE_PERCENT = 5  # utilization up to which a GPU counts as idle
IDLE_BYTES = 4 * 2**30  # memory in use up to which it does: a desktop on it needs some, a driver 0.6 GiB of an H200
SETTLE_SECONDS = 2.0
Answer = TypeVar("Answer")


class Gpu(Strict):
    """One GPU as the driver lists it; None where driver or kernel does not say.

    Attributes:
        max_sm_clock_mhz: Highest clock of its multiprocessors.
        numa_node: NUMA node it hangs on.
    """

    name: str
    uuid: str
    memory_bytes: int
    max_sm_clock_mhz: int | None = None
    numa_node: int | None = None


class GpuLink(Strict):
    """What joins two GPUs, by their positions among those the driver lists."""

    first: int
    second: int
    link: str


class GpuLoad(Strict):
    """What a GPU does right now; None where the driver does not say.

    Attributes:
        position: Among the GPUs that the driver lists.
        processes: Processes that compute on it. None of them is the suite's, which never opens a GPU itself.
        utilization: Percent of the last moment in which it computed.
        used_bytes: Memory in use, the driver's own share included.
    """

    position: int
    processes: int | None
    utilization: int | None
    used_bytes: int

    @property
    def busy(self) -> bool:
        """Whether somebody else uses it; in a container the memory of their processes may be all that shows."""
        return bool(self.processes) or (self.utilization or 0) > IDLE_PERCENT or self.used_bytes > IDLE_BYTES

    @property
    def shown(self) -> str:
        """What is known, as in ``2 processes, 37 %, 1.0 GiB``."""
        count = "" if self.processes is None else f"{text.count_of(self.processes, 'process', 'processes')}, "
        percent = "" if self.utilization is None else f"{self.utilization} %, "
        return f"{count}{percent}{text.gib(self.used_bytes)}"


class GpuFacts(Strict):
    """All GPUs, the links between them, and the driver's version; empty where there is no driver."""

    gpus: tuple[Gpu, ...] = ()
    links: tuple[GpuLink, ...] = ()
    driver: str | None = None


def find_gpus() -> GpuFacts:
    """Facts of all GPUs that the driver lists."""
    with _handles() as handles:
        if handles is None:
            return GpuFacts()
        return GpuFacts(
            gpus=tuple(map(_gpu, handles)),
            links=tuple(
                GpuLink(first=a, second=b, link=_link(handles[a], handles[b]))
                for a, b in combinations(range(len(handles)), 2)
            ),
            driver=str(pynvml.nvmlSystemGetDriverVersion()),
        )


def gpu_loads() -> tuple[GpuLoad, ...]:
    """What every GPU that the driver lists does right now.

    A process that has just ended, or the start of the driver itself, counts for a moment: so what seems busy is asked
    again.
    """
    with _handles() as handles:
        loads = tuple(_load(position, handle) for position, handle in enumerate(handles or []))
        if not any(load.busy for load in loads):
            return loads
        time.sleep(SETTLE_SECONDS)
        return tuple(_load(position, handle) for position, handle in enumerate(handles or []))


def listed_position(entry: str, gpus: Sequence[Gpu]) -> int | None:
    """Position of the GPU that an entry of CUDA_VISIBLE_DEVICES names among those the driver lists, or None.

    An entry is such a position, or an id or its beginning; parts of a GPU (MIG) have no position.
    """
    if entry.isascii() and entry.isdigit():
        names = [str(position) for position in range(len(gpus))]
        entry = entry.lstrip("0") or "0"
        return names.index(entry) if entry in names else None
    is_id = entry.lower().startswith("gpu-")
    return next((i for i, gpu in enumerate(gpus) if is_id and gpu.uuid.lower().startswith(entry.lower())), None)


@contextlib.contextmanager
def _handles() -> Iterator[list[Any] | None]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: Any) -> Gpu:
    bus = _ask(lambda: str(pynvml.nvmlDeviceGetPciInfo(handle).busId))
    return Gpu(
        name=str(pynvml.nvmlDeviceGetName(handle)),
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        max_sm_clock_mhz=_ask(lambda: int(pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM))),
        numa_node=None if bus is None else numa_node(bus, PCI),
    )


def numa_node(bus_id: str, pci: Path) -> int | None:
    """NUMA node of a device by its bus id, as in `00000000:17:00.0`; None where the tree `pci` does not say."""
    domain, _, rest = bus_id.lower().partition(":")
    try:
        node = int((pci / f"{int(domain, 16):04x}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _link(a: Any, b: Any) -> str:
    nvlink = _ask(lambda: pynvml.nvmlDeviceGetP2PStatus(a, b, pynvml.NVML_P2P_CAPS_INDEX_NVLINK))
    if nvlink == pynvml.NVML_P2P_STATUS_OK:
        return "NVLink"
    ancestor = _ask(lambda: int(pynvml.nvmlDeviceGetTopologyCommonAncestor(a, b)))
    return "unknown" if ancestor is None else ANCESTORS.get(ancestor, f"unknown ({ancestor})")


def _load(position: int, handle: Any) -> GpuLoad:
    return GpuLoad(
        position=position,
        processes=_ask(lambda: len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))),
        utilization=_ask(lambda: int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        used_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).used),
    )


def _ask(question: Callable[[], Answer]) -> Answer | None:
    """The driver's answer, or None where this GPU or driver has none."""
    try:
        return question()
    except pynvml.NVMLError:
        return None
