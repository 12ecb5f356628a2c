"""Entries of CUDA_VISIBLE_DEVICES as the driver's GPUs, on a driver that is made up."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest

from unilab.gpus import Gpu, find_gpus

FIRST = Gpu("GPU-aaaa-1", "00000000:17:00.0")
SECOND = Gpu("GPU-bbbb-2", "00000000:CA:00.0")
SLICE = "MIG-cccc-3"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, one with a slice; one fact as bytes, as older bindings give it."""
    gpus = [FIRST, SECOND]

    def by_uuid(uuid: str) -> str:
        if uuid != SLICE:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    for name, function in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda index: gpus[index].uuid,
        "nvmlDeviceGetPciInfo": lambda index: SimpleNamespace(busId=gpus[index].bus_id.encode()),
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda _: 1,
    }.items():
        monkeypatch.setattr(pynvml, name, function)


@pytest.mark.usefixtures("driver")
def test_numbers_ids_beginnings_and_slices() -> None:
    found = find_gpus(["1", "GPU-aaaa-1", "GPU-b", SLICE])
    assert found == ([SECOND, FIRST, SECOND, Gpu(SLICE, SECOND.bus_id)], "580.1")


@pytest.mark.usefixtures("driver")
def test_what_the_driver_does_not_know() -> None:
    assert find_gpus(["2", "GPU-x", "MIG-x", ""]) == ([None] * 4, "580.1")


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert find_gpus(["0", "1"]) == ([None, None], None)
