from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from repro import gpus
from repro.gpus import Gpu, GpuFacts, GpuLink, GpuLoad, find_gpus, gpu_loads, listed_position, numa_node


class Driver:
    """Stands for NVML: two GPUs; names in `silent` answer as drivers do that do not know a question."""

    def __init__(self, nvlink: bool, ancestor: int, silent: tuple[str, ...]) -> None:
        answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": 2,
            "nvmlSystemGetDriverVersion": "600.1",
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=140 * 2**30, used=3 * 2**30),
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetP2PStatus": pynvml.NVML_P2P_STATUS_OK if nvlink else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED,
            "nvmlDeviceGetTopologyCommonAncestor": ancestor,
            "nvmlDeviceGetComputeRunningProcesses": [object()] * 3,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=40),
        }
        self.calls: dict[str, Any] = {name: lambda *_, value=value: value for name, value in answers.items()}
        self.calls["nvmlDeviceGetHandleByIndex"] = lambda index: index
        self.calls["nvmlDeviceGetUUID"] = lambda handle: f"GPU-{handle}"
        self.calls["nvmlDeviceGetPciInfo"] = lambda handle: SimpleNamespace(busId=f"00000000:1{handle}:00.0")
        self.calls |= dict.fromkeys(silent, self.refuse)

    def refuse(self, *_: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    for index in (0, 1):
        (tmp_path / f"0000:1{index}:00.0").mkdir()
        (tmp_path / f"0000:1{index}:00.0" / "numa_node").write_text(f"{index}\n")
    monkeypatch.setattr(gpus, "PCI", tmp_path)
    monkeypatch.setattr(gpus, "SETTLE_SECONDS", 0)

    def install(
        nvlink: bool = False, ancestor: int = pynvml.NVML_TOPOLOGY_SYSTEM, silent: tuple[str, ...] = ()
    ) -> None:
        for name, call in Driver(nvlink, ancestor, silent).calls.items():
            monkeypatch.setattr(pynvml, name, call)

    return install


def test_facts_of_two_gpus_and_their_link(drive: Any) -> None:
    drive(nvlink=True)
    h200 = {"name": "NVIDIA H200", "memory_bytes": 140 * 2**30, "max_sm_clock_mhz": 1980}
    assert find_gpus() == GpuFacts(
        gpus=tuple(Gpu(uuid=f"GPU-{index}", numa_node=index, **h200) for index in (0, 1)),
        links=(GpuLink(first=0, second=1, link="NVLink"),),
        driver="600.1",
    )


@pytest.mark.parametrize(
    ("ancestor", "link"),
    [
        (pynvml.NVML_TOPOLOGY_SINGLE, "one PCIe switch"),
        (pynvml.NVML_TOPOLOGY_SYSTEM, "PCIe across NUMA nodes"),
        (77, "unknown (77)"),
    ],
)
def test_without_nvlink_the_tree_of_pcie_says_it(drive: Any, ancestor: int, link: str) -> None:
    drive(ancestor=ancestor)
    assert [found.link for found in find_gpus().links] == [link]


def test_what_a_driver_does_not_know_is_none(drive: Any) -> None:
    drive(silent=("nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetPciInfo", "nvmlDeviceGetP2PStatus"))
    found = find_gpus()
    assert {(gpu.max_sm_clock_mhz, gpu.numa_node) for gpu in found.gpus} == {(None, None)}
    drive(silent=("nvmlDeviceGetP2PStatus", "nvmlDeviceGetTopologyCommonAncestor"))
    assert find_gpus().links[0].link == "unknown"
    drive(silent=("nvmlInit",))
    assert (find_gpus(), gpu_loads()) == (GpuFacts(), ())


def test_a_gpu_is_busy_by_its_processes_its_work_or_its_memory(drive: Any) -> None:
    drive()
    assert gpu_loads()[1] == GpuLoad(position=1, processes=3, utilization=40, used_bytes=3 * 2**30)
    drive(silent=("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetUtilizationRates"))
    assert gpu_loads()[0] == GpuLoad(position=0, processes=None, utilization=None, used_bytes=3 * 2**30)
    busy = [
        GpuLoad(position=0, processes=processes, utilization=utilization, used_bytes=used * 2**30).busy
        for processes, utilization, used in (
            *((0, 0, 0), (None, None, 1), (0, 5, 4)),
            *((1, 0, 0), (None, 6, 0), (0, 0, 5), (None, None, 5)),
        )
    ]
    assert busy == [False, False, False, True, True, True, True]


def test_what_seems_busy_is_asked_again(drive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drive()
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda _: [])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda _: SimpleNamespace(total=2**40, used=2**29))
    percents = iter([0, 90, 0, 1])  # of both GPUs, twice
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda _: SimpleNamespace(gpu=next(percents)))
    assert [load.utilization for load in gpu_loads()] == [0, 1]


@pytest.mark.parametrize(
    ("entry", "position"),
    [
        *(("0", 0), ("1", 1), ("01", 1), ("2", None), ("9" * 5000, None), ("\u00b2", None), ("1a", None), ("", None)),
        *(("GPU-1", 1), ("GPU-", 0), ("gpu-1", 1), ("GPU-12", None), ("1-GPU", None), ("MIG-GPU-1/0/0", None)),
    ],
)
def test_an_entry_is_a_position_or_an_id_or_its_beginning(entry: str, position: int | None) -> None:
    assert listed_position(entry, [Gpu(name="A", uuid=f"GPU-{index}", memory_bytes=1) for index in (0, 1)]) == position


def test_a_device_without_a_node_has_none(tmp_path: Path) -> None:
    (tmp_path / "0000:17:00.0").mkdir()
    (tmp_path / "0000:17:00.0" / "numa_node").write_text("-1\n")
    assert numa_node("00000000:17:00.0", tmp_path) is None
    assert numa_node("00000000:18:00.0", tmp_path) is None
    assert numa_node("nonsense", tmp_path) is None
