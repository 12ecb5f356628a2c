"""Turns a case's wishes into CPU and GPU ids of this host, or says why the host cannot hold it."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from repro import text

SYSFS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Cpu:
    """One logical CPU: its number, and the physical core and socket it belongs to."""

    cpu: int
    core: int
    socket: int


@dataclass(frozen=True)
class Offer:
    """What a host offers to cases.

    Attributes:
        topology: Its allowed CPUs.
        cgroup_cpus: CPU time that the control group pays for, in CPUs; None without a limit.
        visible_gpus: Entries of CUDA_VISIBLE_DEVICES, one rank each.
        gpu_unusable: Why no GPU can be used, if so.
    """

    topology: tuple[Cpu, ...]
    cgroup_cpus: float | None = None
    visible_gpus: tuple[str, ...] = ()
    gpu_unusable: str | None = None


@dataclass(frozen=True)
class Placement:
    """Where a cell runs.

    Attributes:
        pools: For each rank one CPU for each of its physics workers; all ranks have equally many.
        gpus: Entries of CUDA_VISIBLE_DEVICES, one for each rank; empty on the CPU.
        cpuset: CPUs of its container, ascending; None without one.
    """

    pools: tuple[tuple[int, ...], ...]
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


def split_cpus(topology: tuple[Cpu, ...], cgroup_cpus: float | None, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Equally large shares of the usable CPUs, one for each rank, each in filling order; none for too few CPUs.

    A share is made of whole physical cores, neighbours on one socket as far as they last. What cannot be split evenly
    stays unused. One rank gets what `usable_cpus` gives.
    """
    if ranks > len(topology):
        return ()
    cores: dict[tuple[int, int], list[Cpu]] = defaultdict(list)
    for cpu in sorted(topology, key=lambda item: (item.socket, item.cpu)):
        cores[cpu.socket, cpu.core].append(cpu)
    whole = list(cores.values()) if len(cores) >= ranks else [[cpu] for own in cores.values() for cpu in own]
    count = len(whole) // ranks
    own = [tuple(chain.from_iterable(whole[rank * count : (rank + 1) * count])) for rank in range(ranks)]
    size = min(map(len, own))
    if cgroup_cpus is not None:
        size = min(size, math.floor(max(1.0, cgroup_cpus)) // ranks)
    return tuple(fill_order(share)[:size] for share in own) if size else ()


def place(workers: int | Literal["default", "all"], gpus: tuple[int, ...], offer: Offer, widest: int = 1) -> Placement:
    """Choose the CPUs and GPUs of a case.

    The CPUs are split by the ranks of the widest case, so that a case of fewer ranks has the first pools of that one;
    by the case's own ranks where it asks for more.

    Args:
        workers: Of each rank: a count, ``default`` (a share of the widest case less one CPU, which stays free for the
            rank's learner; at least one worker) or ``all`` (a share of the case's own).
        gpus: Positions within the visible GPUs; empty for one rank on the CPU.
        offer: What the host has.
        widest: Most ranks of a case in the matrix.

    Raises:
        CannotHoldError: Saying what was asked and what this host has.
    """
    entries = _pick_gpus(gpus, offer.visible_gpus, offer.gpu_unusable)
    ranks = max(1, len(gpus))
    shares, own = (split_cpus(offer.topology, offer.cgroup_cpus, count) for count in (max(widest, ranks), ranks))
    offered = text.count_of(len(usable_cpus(offer.topology, offer.cgroup_cpus)), "CPU")
    if not own:
        raise CannotHoldError(f"asks for {ranks} ranks, this host offers {offered}")
    of_share, of_own = (len(split[0]) if split else 0 for split in (shares, own))
    count = {"default": max(1, of_share - 1), "all": of_own}.get(str(workers), workers)
    assert isinstance(count, int)
    if count > of_own:
        each = f"{count} workers" if ranks == 1 else f"{ranks} ranks of {text.count_of(count, 'worker')}"
        raise CannotHoldError(f"asks for {each}, this host offers {offered}")
    pools = shares[:ranks] if count <= of_share else own
    return Placement(tuple(pool[:count] for pool in pools), entries)


def choose_cpuset(pools: tuple[tuple[int, ...], ...], topology: tuple[Cpu, ...]) -> tuple[int, ...]:
    """CPUs of a container, ascending: those of the physics workers, and one more for the learner of each rank.

    A learner that may run only where physics workers sit would take their time, so such a container is refused.

    Raises:
        CannotHoldError: If too few CPUs are left.
    """
    workers, ranks = tuple(chain.from_iterable(pools)), len(pools)
    free = [cpu for cpu in fill_order(topology) if cpu not in workers]
    if len(free) < ranks:
        needed = f"{text.count_of(len(workers), 'worker')} and {text.count_of(ranks, 'learner')}"
        raise CannotHoldError(
            f"in a container {needed} need {len(workers) + ranks} CPUs, this host offers {len(topology)}; "
            "lower the case's workers"
        )
    return tuple(sorted((*workers, *free[:ranks])))


def _pick_gpus(gpus: tuple[int, ...], visible: tuple[str, ...], unusable: str | None) -> tuple[str, ...]:
    if not gpus:
        return ()
    if unusable is not None:
        raise CannotHoldError(f"asks for GPU position {gpus[0]}, but {unusable}")
    if max(gpus) >= len(visible):
        raise CannotHoldError(f"asks for GPU position {max(gpus)}, this host shows {len(visible)} GPU (counted from 0)")
    return tuple(visible[position] for position in gpus)


def _number(path: Path, default: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return default
