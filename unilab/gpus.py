"""What the driver says about the GPUs that ranks are given, without opening one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pynvml


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a slice of one.

    Attributes:
        uuid: its id, for a slice the slice's own.
        bus_id: PCI address, as in `00000000:17:00.0`.
    """

    uuid: str
    bus_id: str


def find_gpus(entries: Sequence[str]) -> tuple[list[Gpu | None], str | None]:
    """The GPU behind each entry of CUDA_VISIBLE_DEVICES, and the driver's version.

    A number counts in the driver's order, which is CUDA's wherever all GPUs are of one kind.

    Args:
        entries: numbers, ids or beginnings of ids of GPUs or MIG slices.

    Returns:
        None for an entry that the driver does not know; None for the version without a driver.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [None] * len(entries), None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        gpus = [Gpu(_text(pynvml.nvmlDeviceGetUUID(handle)), _bus_id(handle)) for handle in handles]
        return [_find(entry, gpus) for entry in entries], _text(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return [None] * len(entries), None
    finally:
        pynvml.nvmlShutdown()


def _find(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    if entry.isdigit():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    if not entry.startswith("MIG-"):
        return next((gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)), None)
    try:
        whole = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(pynvml.nvmlDeviceGetHandleByUUID(entry))
        return Gpu(entry, _bus_id(whole))
    except pynvml.NVMLError:
        return None


def _bus_id(handle: object) -> str:
    return _text(pynvml.nvmlDeviceGetPciInfo(handle).busId)


def _text(value: str | bytes) -> str:
    """Some versions of the binding hand out bytes."""
    return value.decode() if isinstance(value, bytes) else value
