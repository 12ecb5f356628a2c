"""Turns a case's wishes into CPU and GPU ids of this host, or says why the host cannot hold it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SYSFS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Cpu:
    """One logical CPU: its number, and the physical core and socket it belongs to."""

    cpu: int
    core: int
    socket: int


@dataclass(frozen=True)
class Placement:
    """Where a cell runs.

    Attributes:
        cpu_ids: One CPU for each physics worker.
        gpus: Entries of CUDA_VISIBLE_DEVICES, one for each rank; empty on the CPU.
        cpuset: CPUs of its container, ascending; None without one.
    """

    cpu_ids: tuple[int, ...]
    gpus: tuple[str, ...]
    cpuset: tuple[int, ...] | None = None


class CannotHoldError(RuntimeError):
    """This host is too small for a case; the text is the reason the plan records."""


def read_topology(allowed: tuple[int, ...], sysfs: Path = SYSFS) -> tuple[Cpu, ...]:
    """Core and socket of every allowed CPU; a CPU without topology files counts as a core of its own."""
    return tuple(
        Cpu(cpu, _number(folder / "core_id", cpu), _number(folder / "physical_package_id", 0))
        for cpu in allowed
        for folder in [sysfs / f"cpu{cpu}" / "topology"]
    )


def fill_order(topology: tuple[Cpu, ...]) -> tuple[int, ...]:
    """CPU numbers in the order they are filled: one of every physical core first, then their SMT siblings."""
    taken: dict[tuple[int, int], int] = {}
    layers: list[tuple[int, int]] = []
    for cpu in sorted(topology, key=lambda item: item.cpu):
        layer = taken.get((cpu.socket, cpu.core), 0)
        taken[cpu.socket, cpu.core] = layer + 1
        layers.append((layer, cpu.cpu))
    return tuple(number for _, number in sorted(layers))


def usable_cpus(topology: tuple[Cpu, ...], cgroup_cpus: float | None) -> tuple[int, ...]:
    """CPUs in filling order, no more than the control group's time limit pays for, at least one."""
    order = fill_order(topology)
    if cgroup_cpus is None:
        return order
    return order[: max(1, math.floor(cgroup_cpus))]


def place(
    workers: int | Literal["default", "all"],
    gpus: tuple[int, ...],
    usable: tuple[int, ...],
    visible_gpus: tuple[str, ...],
    gpu_unusable: str | None = None,
) -> Placement:
    """Choose the CPUs and GPUs of a case.

    Args:
        workers: A count, ``default`` (one usable CPU stays free for the learner, at least one worker) or ``all``.
        gpus: Positions within `visible_gpus`.
        usable: CPUs in filling order.
        visible_gpus: Entries of CUDA_VISIBLE_DEVICES, one GPU each.
        gpu_unusable: Why no GPU can be used, if so.

    Raises:
        CannotHoldError: Saying what was asked and what this host has.
    """
    entries = _pick_gpus(gpus, visible_gpus, gpu_unusable)
    count = {"default": max(1, len(usable) - 1), "all": len(usable)}.get(str(workers), workers)
    assert isinstance(count, int)
    if count > len(usable):
        raise CannotHoldError(f"asks for {count} workers, this host offers {len(usable)} CPU{'s' * (len(usable) > 1)}")
    return Placement(usable[:count], entries)


def choose_cpuset(workers: tuple[int, ...], ranks: int, topology: tuple[Cpu, ...]) -> tuple[int, ...]:
    """CPUs of a container, ascending: those of the physics workers, and one more for the learner of each rank.

    A learner that may run only where physics workers sit would take their time, so such a container is refused.

    Raises:
        CannotHoldError: If too few CPUs are left.
    """
    free = [cpu for cpu in fill_order(topology) if cpu not in workers]
    if len(free) < ranks:
        raise CannotHoldError(
            f"in a container {len(workers)} workers need {ranks} more CPU{'s' * (ranks > 1)} for the learner, "
            f"this host has {len(free)} left; lower the case's workers"
        )
    return tuple(sorted((*workers, *free[:ranks])))


def _pick_gpus(gpus: tuple[int, ...], visible: tuple[str, ...], unusable: str | None) -> tuple[str, ...]:
    if not gpus:
        return ()
    if unusable is not None:
        raise CannotHoldError(f"asks for GPU position {gpus[0]}, but {unusable}")
    if max(gpus) >= len(visible):
        raise CannotHoldError(f"asks for GPU position {max(gpus)}, this host shows {len(visible)} GPU (counted from 0)")
    if len(gpus) > 1:
        raise CannotHoldError(f"asks for {len(gpus)} ranks, this trainer runs one")
    return tuple(visible[position] for position in gpus)


def _number(path: Path, default: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return default
