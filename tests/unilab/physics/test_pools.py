"""Plans of CPU pools on small copies of the kernel's tree, and what holds for every host."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unilab.physics import pinning
from unilab.physics.pools import (
    Cpu,
    TooFewCpusError,
    Topology,
    gpu_node,
    parse_cpu_list,
    plan_pools,
    read_topology,
)

KEY = "training.dp_collector_cpu_ids"


def write_tree(system: Path, sockets: int, cores: int, threads: int, nodes: bool = True) -> Path:
    """The kernel's tree of a host that counts all first threads of all sockets, then all second ones."""
    for cpu in range(sockets * cores * threads):
        core = cpu % (sockets * cores)
        siblings = ",".join(str(core + thread * sockets * cores) for thread in range(threads))
        topology = system / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "core_cpus_list").write_text(f"{siblings}\n")
        (topology / "physical_package_id").write_text(f"{core // cores}\n")
        if nodes:
            (topology.parent / f"node{core // cores}").mkdir()
    (system / "cpu" / "cpufreq").mkdir()
    return system


@pytest.fixture
def one_socket(tmp_path: Path) -> Topology:
    """16 CPUs, no SMT."""
    return read_topology(write_tree(tmp_path / "one", 1, 16, 1), tmp_path, tmp_path / "none")


@pytest.fixture
def two_sockets(tmp_path: Path) -> Topology:
    """64 CPUs: cores 0 to 15 and 16 to 31, their siblings 32 higher."""
    return read_topology(write_tree(tmp_path / "two", 2, 16, 2), tmp_path, tmp_path / "none")


def span(*bounds: tuple[int, int]) -> list[int]:
    return [cpu for low, high in bounds for cpu in range(low, high + 1)]


def test_the_trees_are_read(one_socket: Topology, two_sockets: Topology) -> None:
    assert one_socket == Topology(tuple(Cpu(cpu, cpu, 0) for cpu in range(16)))
    assert two_sockets == Topology(tuple(Cpu(cpu, cpu % 32, cpu % 32 // 16) for cpu in range(64)))


def test_without_nodes_sockets_stand_for_them(tmp_path: Path) -> None:
    found = read_topology(write_tree(tmp_path / "tree", 2, 2, 1, nodes=False), tmp_path, tmp_path / "none")
    assert [cpu.node for cpu in found.cpus] == [0, 0, 1, 1]


def test_older_kernels_and_bare_cpus(tmp_path: Path) -> None:
    folder = tmp_path / "cpu"
    (folder / "cpu0" / "topology").mkdir(parents=True)
    (folder / "cpu1").mkdir()
    (folder / "cpu7" / "topology").mkdir(parents=True)
    (folder / "cpu0" / "topology" / "thread_siblings_list").write_text("0,7\n")
    (folder / "cpu7" / "topology" / "thread_siblings_list").write_text("0,7\n")
    (folder / "cpu7" / "topology" / "physical_package_id").write_text("-1\n")
    found = read_topology(tmp_path, tmp_path, tmp_path / "none")
    assert found.cpus == (Cpu(0, 0, 0), Cpu(1, 1, 0), Cpu(7, 0, 0))
    assert read_topology(tmp_path / "none", tmp_path, tmp_path / "none") == Topology(())


def test_one_rank_without_siblings_gets_all_but_the_first(one_socket: Topology) -> None:
    assert plan_pools(one_socket, range(16), 1) == [span((1, 15))]
    assert plan_pools(one_socket, range(16), 1, [0]) == [span((1, 15))]
    assert plan_pools(one_socket, [3], 1) == [[3]]
    assert plan_pools(one_socket, [5, 2], 1) == [[5]]
    assert plan_pools(Topology(()), [2, 5, 9], 1) == [[5, 9]]


def test_ranks_share_one_socket_evenly(one_socket: Topology) -> None:
    assert plan_pools(one_socket, range(16), 2) == [span((1, 7)), span((9, 15))]
    assert plan_pools(one_socket, range(16), 2, [0, 0]) == [span((1, 7)), span((9, 15))]
    assert plan_pools(one_socket, range(16), 3) == [span((1, 4)), span((6, 9)), span((11, 14))]  # 15 stays unused
    assert plan_pools(one_socket, range(16), 16) == [[cpu] for cpu in range(16)]


def test_siblings_come_after_all_cores_and_the_learners_last(two_sockets: Topology) -> None:
    assert plan_pools(two_sockets, range(64), 1) == [[*span((1, 31), (33, 63)), 32]]


@pytest.mark.parametrize("gpus", [(), (None, None), (0, 1), (0, 0), (None, 1), (0, None), (0, 7)])
def test_two_ranks_get_a_socket_each(two_sockets: Topology, gpus: tuple[int | None, ...]) -> None:
    first, second = [*span((1, 15), (33, 47)), 32], [*span((17, 31), (49, 63)), 48]
    assert plan_pools(two_sockets, range(64), 2, gpus) == [first, second]


@pytest.mark.parametrize("gpus", [(1, 0), (1, None), (None, 0), (1, 1)])
def test_a_pool_is_near_its_gpu(two_sockets: Topology, gpus: tuple[int | None, ...]) -> None:
    first, second = [*span((1, 15), (33, 47)), 32], [*span((17, 31), (49, 63)), 48]
    assert plan_pools(two_sockets, range(64), 2, gpus) == [second, first]


def test_one_rank_begins_near_its_gpu_and_leaves_a_near_core(two_sockets: Topology) -> None:
    near_first = [*span((17, 31), (0, 15), (49, 63), (32, 47)), 48]
    assert plan_pools(two_sockets, range(64), 1, [1]) == [near_first]


def test_four_ranks_on_two_sockets(two_sockets: Topology) -> None:
    cores = [pool[:7] for pool in plan_pools(two_sockets, range(64), 4, [1, 1, 0, 0])]
    assert cores == [span((17, 23)), span((25, 31)), span((1, 7)), span((9, 15))]


def test_a_mask_with_holes(two_sockets: Topology) -> None:
    mask = [2, 3, 5, 20, 21, 34, 35, 40, 52]  # 34, 35 and 52 are siblings of 2, 3 and 20; 40 is here without 8
    assert plan_pools(two_sockets, mask, 1) == [[3, 5, 20, 21, 40, 35, 52, 34]]
    # Rank 1's GPU is near 20 and 21 alone, so its third core is far; 34 would make rank 0 the larger one.
    assert plan_pools(two_sockets, mask, 2, [0, 1]) == [[3, 5, 35], [21, 40, 52]]


def test_two_cpus_for_two_ranks(one_socket: Topology, two_sockets: Topology) -> None:
    assert plan_pools(one_socket, [0, 1], 2) == [[0], [1]]
    assert plan_pools(two_sockets, [4, 36], 2) == [[4], [36]]  # one core
    assert plan_pools(two_sockets, [4, 36], 1) == [[36]]
    assert plan_pools(two_sockets, [3, 20], 2, [1, 0]) == [[20], [3]]
    with pytest.raises(TooFewCpusError, match="3 ranks need a CPU each, this process may use 2"):
        plan_pools(one_socket, [0, 1], 3)


@pytest.mark.parametrize(
    ("quota", "ranks", "pools"),
    [
        (6.0, 1, [[1, 2, 3, 4, 5]]),
        (6.9, 2, [[1, 2], [9, 10]]),
        (1.0, 1, [[0]]),
        (0.5, 2, [[0], [8]]),
        (99.0, 1, [span((1, 15))]),
    ],
)
def test_a_quota_below_the_mask_bounds_the_pools(
    one_socket: Topology, quota: float, ranks: int, pools: list[list[int]]
) -> None:
    assert plan_pools(Topology(one_socket.cpus, quota), range(16), ranks) == pools


def test_a_quota_is_spent_on_near_cores(two_sockets: Topology) -> None:
    assert plan_pools(Topology(two_sockets.cpus, 4.0), range(64), 1, [1]) == [[17, 18, 19]]


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def test_the_tightest_quota_counts_in_both_versions(tmp_path: Path) -> None:
    groups, membership = tmp_path / "groups", tmp_path / "membership"
    system = write_tree(tmp_path / "tree", 1, 2, 1)
    write_files(groups / "job" / "step", {"cpu.max": "max 100000"})
    write_files(groups / "job", {"cpu.max": "350000 100000"})
    write_files(groups, {"cpu.max": "900000 100000"})
    membership.write_text("0::/job/step\n")
    assert read_topology(system, groups, membership).quota == 3.5
    write_files(groups / "cpu" / "box", {"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000"})
    write_files(groups / "cpu", {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"})
    membership.write_text("4:memory:/box\n1:cpu,cpuacct:/box\n0::/elsewhere\n")
    assert read_topology(system, groups, membership).quota == 1.5
    membership.write_text("1:cpu:/\n")
    assert read_topology(system, groups, membership).quota is None


def test_lists_of_the_kernel() -> None:
    assert parse_cpu_list("0-3,8,10-11") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cpu_list("") == frozenset()


def test_the_node_of_a_gpu(tmp_path: Path, two_sockets: Topology) -> None:
    write_files(tmp_path / "0000:17:00.0", {"numa_node": "1", "local_cpulist": "0-63"})
    write_files(tmp_path / "0000:ca:00.0", {"numa_node": "-1", "local_cpulist": "16-31,48-63"})
    write_files(tmp_path / "0000:cb:00.0", {"numa_node": "-1", "local_cpulist": "0-63"})
    write_files(tmp_path / "10000:01:00.0", {"numa_node": "0"})
    asked = ("00000000:17:00.0", "00000000:CA:00.0", "00000000:CB:00.0", "00010000:01:00.0", "00000000:FF:00.0")
    assert [gpu_node(bus_id, two_sockets, tmp_path) for bus_id in asked] == [1, 1, None, 0, None]


def test_explicit_pools_are_kept_as_they_are(two_sockets: Topology) -> None:
    asked = [[40, 3, 9], [1]]
    planned = plan_pools(Topology(two_sockets.cpus, 1.0), range(64), 2, [1, 1], asked)
    assert planned == asked
    planned[0].clear()
    assert asked == [[40, 3, 9], [1]]


@pytest.mark.skipif(not pinning.LINUX, reason="thread masks are a Linux feature")
@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ([[0]], f"{KEY} has 1 list for 2 ranks on this host; give one list each, as in [[2,3],[4,5]]"),
        ([], f"{KEY} has 0 lists for 2 ranks on this host; give one list each, as in [[2,3],[4,5]]"),
        ([[0], [1], [2]], f"{KEY} has 3 lists for 2 ranks on this host; give one list each, as in [[2,3],[4,5]]"),
        ([[0], []], f"{KEY}[1]=[] names no CPU; list at least one, or use null for no pinning"),
        ([[0, 0], [1]], f"{KEY}[0]=[0, 0] names CPU 0 twice; list each CPU once"),
        ([[0], [9]], f"{KEY}[1]=[9] names CPU 9, which this process may not use; allowed: [0, 1, 2]"),
        ([[-1], [1]], f"{KEY}[0]=[-1] names CPU -1, which this process may not use; allowed: [0, 1, 2]"),
        ([[0, 2], [1, 2]], f"{KEY} gives CPU 2 to rank 0 and to rank 1; give it to one"),
    ],
)
def test_explicit_pools_that_cannot_hold_are_refused(
    one_socket: Topology, pools: list[list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        plan_pools(one_socket, [0, 1, 2], 2, explicit=pools)
    assert str(caught.value) == message


@st.composite
def hosts(draw: st.DrawFn) -> tuple[Topology, list[int], list[int | None]]:
    """A host of any shape, a mask on it, and the node of each rank's GPU."""
    sockets, cores, threads = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 2))
    numbers = draw(st.permutations(range(sockets * cores * threads)))
    places = [(core, core // cores) for core in range(sockets * cores) for _ in range(threads)]
    lowest: dict[int, int] = {}
    for number, (core, _) in sorted(zip(numbers, places, strict=True)):
        lowest.setdefault(core, number)
    cpus = sorted(
        (Cpu(number, lowest[core], node) for number, (core, node) in zip(numbers, places, strict=True)),
        key=lambda cpu: cpu.cpu,
    )
    mask = draw(st.lists(st.sampled_from(cpus), min_size=1, unique=True))
    nodes = st.none() | st.integers(0, sockets)
    gpus = draw(st.lists(nodes, min_size=1, max_size=len(mask)))
    return Topology(tuple(cpus), draw(st.none() | st.floats(0.1, 40))), [cpu.cpu for cpu in mask], gpus


@given(hosts())
def test_pools_are_disjoint_equal_allowed_and_paid_for(host: tuple[Topology, list[int], list[int | None]]) -> None:
    topology, mask, gpus = host
    pools = plan_pools(topology, mask, len(gpus), gpus)
    assert pools == plan_pools(topology, sorted(mask), len(gpus), gpus)
    used = Counter(cpu for pool in pools for cpu in pool)
    assert len(pools) == len(gpus)
    assert set(used) <= set(mask)
    assert max(used.values()) == 1
    assert len({len(pool) for pool in pools}) == 1
    assert topology.quota is None or len(used) <= max(len(gpus), topology.quota)
    assert len(used) <= max(len(gpus), len(mask) - len(gpus))  # a CPU per rank for its learner, where there is more


@given(hosts())
def test_no_sibling_works_before_all_cores_of_its_pool_do(host: tuple[Topology, list[int], list[int | None]]) -> None:
    topology, mask, gpus = host
    core = {cpu.cpu: cpu.core for cpu in topology.cpus}
    if len({core[cpu] for cpu in mask}) < len(gpus):
        return  # cores are divided among ranks
    for pool in plan_pools(topology, mask, len(gpus), gpus):
        cores = [core[cpu] for cpu in pool]
        repeats = [position for position, number in enumerate(cores) if number in cores[:position]]
        assert not repeats or min(repeats) >= len(set(cores)) - 1  # the learner's siblings are the very last


@given(st.sets(st.integers(0, 300)), st.booleans())
def test_a_list_of_cpus_is_read_as_the_kernel_writes_it(cpus: set[int], spelled_out: bool) -> None:
    """Runs are joined with a dash, or every CPU stands alone; the order of the parts means nothing."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1 and not spelled_out:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    parts = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    assert parse_cpu_list(",".join(parts)) == parse_cpu_list(",".join(reversed(parts))) == cpus


@given(hosts(), st.integers(0, 1000))
def test_a_plan_depends_on_the_set_of_cpus_alone(host: tuple[Topology, list[int], list[int | None]], seed: int) -> None:
    topology, mask, gpus = host
    shuffled = random.Random(seed).sample(mask, len(mask))
    assert plan_pools(topology, shuffled, len(gpus), gpus) == plan_pools(topology, mask, len(gpus), gpus)
    elsewhere = Topology(topology.cpus, None)
    sizes = [len(plan_pools(one, mask, len(gpus), gpus)[0]) for one in (topology, elsewhere)]
    assert sizes[0] <= sizes[1]  # a quota never adds CPUs
