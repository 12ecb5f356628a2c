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
Policy = Literal["default", "all_but_one", "all", "auto"]


@dataclass(frozen=True)
class Cpu:
    """One logical CPU: its number, physical core and socket, and its NUMA node, None where the kernel keeps none."""

    cpu: int
    core: int
    socket: int
    node: int | None = None


@dataclass(frozen=True)
class Offer:
    """What a host offers to cases.

    Attributes:
        topology: Its allowed CPUs.
        cgroup_cpus: CPU time that the control group pays for, in CPUs; None without a limit.
        visible_gpus: Entries of CUDA_VISIBLE_DEVICES, one rank each.
        gpu_unusable: Why no GPU can be used, if so.
        gpu_nodes: NUMA node of each of the visible GPUs, None where it is not known; empty where none is.
    """

    topology: tuple[Cpu, ...]
    cgroup_cpus: float | None = None
    visible_gpus: tuple[str, ...] = ()
    gpu_unusable: str | None = None
    gpu_nodes: tuple[int | None, ...] = ()

    def nodes_of(self, gpus: tuple[int, ...], joined: int) -> list[int | None]:
        """NUMA node of each rank's GPU, by position, once for each of the rank's pools."""
        nodes = [self.gpu_nodes[position] if position < len(self.gpu_nodes) else None for position in gpus]
        return [node for node in nodes for _ in range(joined)]


@dataclass(frozen=True)
class Placement:
    """Where a cell runs.

    Attributes:
        pools: For each rank one CPU for each of its physics workers; all ranks have equally many. None where the
            trainer chooses.
        gpus: Entries of CUDA_VISIBLE_DEVICES, one for each rank; empty on the CPU.
        cpuset: CPUs of its container, ascending; None without one.
    """

    pools: tuple[tuple[int, ...], ...]
    gpus: tuple[str, ...]
    cpuset: tuple[int, ...] | None = None


class CannotHoldError(RuntimeError):
    """This host is too small for a case; the text is the reason the plan records."""


def read_topology(allowed: tuple[int, ...], sysfs: Path = SYSFS) -> tuple[Cpu, ...]:
    """Core, socket and node of every allowed CPU; a CPU without topology files counts as a core of its own."""
    return tuple(_read_cpu(cpu, sysfs / f"cpu{cpu}") for cpu in allowed)


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


def hand_out(
    shares: tuple[tuple[int, ...], ...], nodes: list[int | None], topology: tuple[Cpu, ...]
) -> tuple[tuple[int, ...], ...]:
    """The shares in another order: each rank in turn takes the one with the most CPUs on the NUMA node of its GPU.

    Of equal ones the first, so that the order stays where no node is known; what is left over comes last. What a rank
    gets does not depend on the ranks behind it, so that a case of fewer has the first pools of the widest.

    Args:
        shares: As `split_cpus` gives them.
        nodes: Of each rank's GPU, None where it is not known.
        topology: The CPUs.
    """
    node_of = {cpu.cpu: cpu.node for cpu in topology}
    left, taken = list(shares), []
    for node in nodes[: len(shares)]:
        near = [0 if node is None else sum(node_of[cpu] == node for cpu in share) for share in left]
        taken.append(left.pop(near.index(max(near))))
    return (*taken, *left)


def place(workers: int | Policy, gpus: tuple[int, ...], offer: Offer, widest: int = 1, joined: int = 1) -> Placement:
    """Choose the CPUs and GPUs of a case.

    The CPUs are split by the pools of the widest case, so that a case of fewer has the first pools of that one; by the
    case's own where it asks for more. A rank's pools are near its GPU, as `hand_out` says.

    Args:
        workers: Of each pool: a count, ``default`` (a share of the widest case less one CPU, which stays free for the
            rank's learner; at least one worker), ``all_but_one`` (the same of a share of the case's own), ``all`` (that
            share) or ``auto`` (the trainer chooses).
        gpus: Positions within the visible GPUs; empty for one rank on the CPU.
        offer: What the host has.
        widest: Most pools of a case in the matrix.
        joined: Pools that each rank has, as one.

    Raises:
        CannotHoldError: Saying what was asked and what this host has.
    """
    entries = _pick_gpus(gpus, offer.visible_gpus, offer.gpu_unusable)
    ranks = max(1, len(gpus))
    asked = ranks * joined
    splits = (split_cpus(offer.topology, offer.cgroup_cpus, count) for count in (max(widest, asked), asked))
    shares, own = (hand_out(split, offer.nodes_of(gpus, joined), offer.topology) for split in splits)
    offered = text.count_of(len(usable_cpus(offer.topology, offer.cgroup_cpus)), "CPU")
    if not own:
        what = f"{ranks} ranks" if joined == 1 else f"{asked} pools"
        raise CannotHoldError(f"asks for {what}, this host offers {offered}")
    if workers == "auto":
        return Placement((), entries)
    of_share, of_own = (len(split[0]) if split else 0 for split in (shares, own))
    policies = {"default": max(1, of_share - 1), "all_but_one": max(1, of_own - 1), "all": of_own}
    count = workers if isinstance(workers, int) else policies[workers]
    if count > of_own:
        each = text.count_of(count * joined, "worker")
        raise CannotHoldError(
            f"asks for {each if ranks == 1 else f'{ranks} ranks of {each}'}, this host offers {offered}"
        )
    pools = [pool[:count] for pool in (shares[:asked] if count <= of_share else own)]
    return Placement(tuple(tuple(chain.from_iterable(pools[i : i + joined])) for i in range(0, asked, joined)), entries)


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


def _read_cpu(cpu: int, folder: Path) -> Cpu:
    core = _number(folder / "topology" / "core_id", cpu)
    socket = _number(folder / "topology" / "physical_package_id", 0)
    nodes = [int(path.name.removeprefix("node")) for path in folder.glob("node[0-9]*")]
    return Cpu(cpu, core, socket, min(nodes, default=None))


def _number(path: Path, default: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return default
