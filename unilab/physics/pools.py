"""Which CPUs the physics of each rank gets: the host's cores as the kernel names them, and a plan from them alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unilab.physics.pinning import check_cpu_ids

SYSTEM = Path("/sys/devices/system")
PCI = Path("/sys/bus/pci/devices")
GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
POOLS_KEY = "training.dp_collector_cpu_ids"


class TooFewCpusError(RuntimeError):
    """There are more ranks than CPUs."""


@dataclass(frozen=True)
class Cpu:
    """One logical CPU.

    Attributes:
        cpu: its number.
        core: lowest number among the CPUs of its physical core.
        node: its NUMA node, or its socket where the kernel keeps no nodes.
    """

    cpu: int
    core: int
    node: int


@dataclass(frozen=True)
class Topology:
    """What a plan must know of a host.

    Attributes:
        cpus: every logical CPU, ascending.
        quota: CPU time that the control group grants, in CPUs; None without a limit.
    """

    cpus: tuple[Cpu, ...]
    quota: float | None = None


def read_topology(system: Path = SYSTEM, groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> Topology:
    """Cores and NUMA nodes of this host, and the time limit of this process's control groups.

    Args:
        system: the kernel's device tree that holds `cpu/`.
        groups: root of the control groups, of version 2 or 1.
        membership: file that names this process's groups.
    """
    numbers = sorted(int(path.name[3:]) for path in (system / "cpu").glob("cpu[0-9]*") if path.name[3:].isdigit())
    return Topology(tuple(_read_cpu(system / "cpu", number) for number in numbers), _cpu_quota(groups, membership))


def gpu_node(bus_id: str, topology: Topology, pci: Path = PCI) -> int | None:
    """NUMA node of a GPU, or None where the kernel does not say.

    Args:
        bus_id: as in `00000000:17:00.0`; the kernel writes the domain with four digits.
        topology: the host's CPUs, for kernels that list near CPUs and no node.
        pci: the kernel's tree of PCI devices.
    """
    domain, _, rest = bus_id.lower().partition(":")
    device = pci / f"{int(domain, 16):04x}:{rest}"
    node = _number(device / "numa_node", -1)
    if node >= 0:
        return node
    near = parse_cpu_list(_text(device / "local_cpulist"))
    nodes = {cpu.node for cpu in topology.cpus if cpu.cpu in near}
    return nodes.pop() if len(nodes) == 1 else None


def plan_pools(
    topology: Topology,
    allowed: Sequence[int],
    ranks: int,
    gpu_numa: Sequence[int | None] = (),
    explicit: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """CPUs of each rank's physics workers, worker i on the i-th.

    By default every rank gets equally many physical cores, near its GPU as far as they last, and of these CPUs one of
    each core before the first SMT sibling. Its first CPU is left to the learner, unless it is the only one, and that
    one's siblings come last. Ranks wait for each other, so all pools are as large as the smallest, and no larger than
    the control group pays for; what cannot be split evenly stays unused.

    Args:
        topology: the host.
        allowed: CPUs this process may use.
        ranks: number of ranks.
        gpu_numa: NUMA node of each rank's GPU, None where unknown; empty without GPUs.
        explicit: the lists a user asked for, taken as they are.

    Raises:
        ValueError: for explicit lists of the wrong number, or one that is empty, repeats a CPU, leaves `allowed` or
            shares a CPU with another.
        TooFewCpusError: where a rank would get no CPU.
    """
    if explicit is not None:
        _check_pools(explicit, allowed, ranks)
        return [list(pool) for pool in explicit]
    if ranks > len(allowed):
        raise TooFewCpusError(f"{ranks} ranks need a CPU each, this process may use {len(allowed)}")
    known = {cpu.cpu: cpu for cpu in topology.cpus}
    near = [gpu_numa[rank] if rank < len(gpu_numa) else None for rank in range(ranks)]
    cores = _cores([known.get(number, Cpu(number, number, 0)) for number in sorted(allowed)], ranks)
    shares = [_fill_order(share, node) for share, node in zip(_split(cores, near), near, strict=True)]
    size = min(map(len, shares))
    if topology.quota is not None:
        size = min(size, max(1, int(topology.quota / ranks)))
    return [share[1:size] or share[:1] for share in shares]


def parse_cpu_list(text: str) -> frozenset[int]:
    """CPUs of a list as the kernel writes it: `0-3,8`."""
    bounds = [part.partition("-") for part in text.split(",") if part]
    return frozenset(cpu for low, _, high in bounds for cpu in range(int(low), int(high or low) + 1))


def _check_pools(pools: Sequence[Sequence[int]], allowed: Sequence[int], ranks: int) -> None:
    if len(pools) != ranks:
        found, asked = (f"{n} {what}{'s' * (n != 1)}" for n, what in ((len(pools), "list"), (ranks, "rank")))
        raise ValueError(f"{POOLS_KEY} has {found} for {asked} on this host; give one list each, as in [[2,3],[4,5]]")
    owner: dict[int, int] = {}
    for rank, pool in enumerate(pools):
        check_cpu_ids(pool, allowed, f"{POOLS_KEY}[{rank}]")
        for cpu in pool:
            if cpu in owner:
                raise ValueError(f"{POOLS_KEY} gives CPU {cpu} to rank {owner[cpu]} and to rank {rank}; give it to one")
            owner[cpu] = rank


def _cores(cpus: Sequence[Cpu], ranks: int) -> list[list[Cpu]]:
    """Physical cores by node; single CPUs where there are fewer cores than ranks."""
    cores: dict[int, list[Cpu]] = defaultdict(list)
    for cpu in cpus:
        cores[cpu.core].append(cpu)
    found = list(cores.values()) if len(cores) >= ranks else [[cpu] for cpu in cpus]
    return sorted(found, key=lambda core: (core[0].node, core[0].cpu))


def _split(cores: Sequence[list[Cpu]], near: Sequence[int | None]) -> list[list[list[Cpu]]]:
    """Equally many cores for each rank: first those near its GPU, then, in order of nodes, what others left."""
    count = len(cores) // len(near)
    free = list(cores)
    shares: list[list[list[Cpu]]] = [[] for _ in near]
    for only_near in (True, False):
        for share, node in zip(shares, near, strict=True):
            wanted = [core for core in free if not only_near or core[0].node == node][: count - len(share)]
            share += wanted
            free = [core for core in free if core not in wanted]
    return shares


def _fill_order(cores: Sequence[list[Cpu]], near: int | None) -> list[int]:
    """CPU numbers in the order they are used, the learner's first, its siblings last."""
    far = {cpu.cpu: near is not None and cpu.node != near for core in cores for cpu in core}
    layers = [(layer, far[cpu.cpu], cpu.cpu, cpu.core) for core in cores for layer, cpu in enumerate(core)]
    learner = min(layers)
    return [cpu for *_, cpu, _ in sorted(layers, key=lambda item: (item != learner and item[3] == learner[3], item))]


def _read_cpu(folder: Path, number: int) -> Cpu:
    """A CPU as the kernel describes it; without a description it is a core of its own."""
    own = folder / f"cpu{number}"
    siblings = _text(own / "topology/core_cpus_list") or _text(own / "topology/thread_siblings_list") or str(number)
    nodes = [int(path.name[4:]) for path in own.glob("node[0-9]*")]
    socket = max(0, _number(own / "topology/physical_package_id", 0))
    return Cpu(number, min(parse_cpu_list(siblings)), nodes[0] if nodes else socket)


def _cpu_quota(groups: Path, membership: Path) -> float | None:
    """Smallest limit among this process's control groups and those above them, in CPUs."""
    limits = []
    for line in _text(membership).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = groups / "cpu" if controllers else groups
        own = base / name.strip("/")
        for group in (own, *(parent for parent in own.parents if parent.is_relative_to(base))):
            words = _text(group / "cpu.max").split()  # version 2: quota and period in µs
            words = words or [_text(group / f"cpu.cfs_{part}_us") for part in ("quota", "period")]  # version 1
            if len(words) == 2 and all(word.isdigit() for word in words):
                limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def _number(path: Path, default: int) -> int:
    try:
        return int(_text(path))
    except ValueError:
        return default


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
