from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.place import (
    CannotHoldError,
    Cpu,
    Offer,
    Placement,
    fill_order,
    hand_out,
    place,
    read_topology,
    split_cpus,
    usable_cpus,
)

# Two sockets of two cores with two threads each, numbered as Linux often does: siblings are 4 apart.
SMT = tuple(Cpu(cpu, core=cpu % 2, socket=cpu % 4 // 2) for cpu in range(8))


def test_physical_cores_come_before_their_siblings() -> None:
    assert fill_order(SMT) == (0, 1, 2, 3, 4, 5, 6, 7)
    neighbours = tuple(Cpu(cpu, core=cpu // 2, socket=0) for cpu in range(8))  # siblings side by side
    assert fill_order(neighbours) == (0, 2, 4, 6, 1, 3, 5, 7)


def test_equal_core_numbers_on_two_sockets_are_two_cores() -> None:
    assert fill_order((Cpu(0, 0, 0), Cpu(1, 0, 1), Cpu(2, 0, 0))) == (0, 1, 2)
    assert fill_order((Cpu(0, 0, 0), Cpu(1, 0, 0), Cpu(2, 0, 1))) == (0, 2, 1)


@pytest.mark.parametrize(("limit", "expected"), [(None, 8), (16.0, 8), (3.9, 3), (0.5, 1)])
def test_a_time_limit_bounds_the_cpus(limit: float | None, expected: int) -> None:
    assert usable_cpus(SMT, limit) == tuple(range(expected))


def test_topology_is_read_from_sysfs_and_a_cpu_without_files_is_a_core(tmp_path: Path) -> None:
    for cpu, core in ((2, 7), (3, 7)):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "core_id").write_text(f"{core}\n")
        (folder / "physical_package_id").write_text("1\n")
    (tmp_path / "cpu3" / "node1").mkdir()
    assert read_topology((2, 3, 9), tmp_path) == (Cpu(2, 7, 1), Cpu(3, 7, 1, node=1), Cpu(9, 9, 0))


def cores(count: int, sockets: int = 1, threads: int = 1) -> tuple[Cpu, ...]:
    """Sockets of `count` cores with `threads` CPUs each; siblings follow after all cores, as Linux often numbers."""
    every = [(socket, core) for socket in range(sockets) for core in range(count)]
    return tuple(
        Cpu(t * len(every) + i, core, socket) for t in range(threads) for i, (socket, core) in enumerate(every)
    )


def test_default_keeps_one_cpu_for_the_learner_and_all_does_not() -> None:
    offer = Offer(tuple(Cpu(cpu, cpu, 0) for cpu in (0, 2, 4, 6)))
    assert place("default", (), offer) == Placement(((0, 2, 4),), ())
    assert place("all", (), offer) == Placement(((0, 2, 4, 6),), ())
    assert place(1, (), offer) == Placement(((0,),), ())
    assert place("default", (), Offer((Cpu(5, 5, 0),))) == Placement(((5,),), ())


def test_gpu_positions_become_entries_taken_as_they_are() -> None:
    assert place(1, (1,), Offer(cores(1), None, ("MIG-a", "GPU-b"))).gpus == ("GPU-b",)
    assert place(1, (1, 0), Offer(cores(2), None, ("MIG-a", "GPU-b"))).gpus == ("GPU-b", "MIG-a")


@pytest.mark.parametrize(
    ("topology", "limit", "expected"),
    [
        (cores(4, sockets=2), None, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (cores(2, sockets=2, threads=2), None, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (cores(4, threads=2), None, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (cores(3, threads=2), None, [(0, 3), (1, 4)]),  # the third core stays unused: a core has one rank
        (cores(1, threads=2), None, [(0,), (1,)]),  # fewer cores than ranks: siblings are split
        (cores(5), None, [(0, 1), (2, 3)]),
        (cores(4, sockets=2), 6.5, [(0, 1, 2), (4, 5, 6)]),
        (cores(4)[:3] + cores(4, sockets=2)[4:], None, [(0, 1, 2), (4, 5, 6)]),  # of one socket where possible
        (cores(1), None, []),
        (cores(8), 1.9, []),
    ],
)
def test_two_ranks_have_equal_shares_of_whole_cores_on_their_socket(
    topology: tuple[Cpu, ...], limit: float | None, expected: list[tuple[int, ...]]
) -> None:
    assert list(split_cpus(topology, limit, 2)) == expected


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5)), min_size=1, max_size=24),
    st.integers(1, 4),
    st.none() | st.floats(0.1, 30),
)
def test_shares_are_equal_disjoint_and_usable(places: list[tuple[int, int]], ranks: int, limit: float | None) -> None:
    topology = tuple(Cpu(number, core, socket) for number, (socket, core) in enumerate(places))
    found = split_cpus(topology, limit, ranks)
    every = [cpu for share in found for cpu in share]
    assert len(every) == len(set(every)) <= len(topology)
    assert len({len(share) for share in found}) <= 1
    assert bool(found) == (ranks <= len(usable_cpus(topology, limit)))
    assert limit is None or len(every) <= max(1.0, limit)
    if ranks == 1:
        assert found == (usable_cpus(topology, limit),)


TWO = ("GPU-a", "GPU-b")


def on_nodes(topology: tuple[Cpu, ...]) -> tuple[Cpu, ...]:
    """Every socket a NUMA node."""
    return tuple(replace(cpu, node=cpu.socket) for cpu in topology)


@pytest.mark.parametrize(
    ("nodes", "both"),
    [
        ((0, 1), ((0, 1, 2, 3), (4, 5, 6, 7))),
        ((1, 0), ((4, 5, 6, 7), (0, 1, 2, 3))),
        ((1, 1), ((4, 5, 6, 7), (0, 1, 2, 3))),
        ((1, None), ((4, 5, 6, 7), (0, 1, 2, 3))),
        ((None, None), ((0, 1, 2, 3), (4, 5, 6, 7))),
        ((7, 7), ((0, 1, 2, 3), (4, 5, 6, 7))),  # a node none of whose CPUs are allowed
        ((), ((0, 1, 2, 3), (4, 5, 6, 7))),
    ],
)
def test_a_ranks_pool_is_on_the_node_of_its_gpu(
    nodes: tuple[int | None, ...], both: tuple[tuple[int, ...], ...]
) -> None:
    offer = Offer(on_nodes(cores(4, sockets=2)), None, TWO, gpu_nodes=nodes)
    assert place("all", (0, 1), offer, widest=2).pools == both
    assert place(4, (0,), offer, widest=2).pools == both[:1]
    assert place("default", (0, 1), offer, widest=2).pools == tuple(pool[:-1] for pool in both)
    assert place(4, (0,), offer, joined=2).pools == (both[0] + both[1],)
    swapped = Offer(offer.topology, None, TWO, gpu_nodes=nodes[::-1])
    assert place(4, (1,), swapped, widest=2).pools == both[:1]


def test_a_share_that_spans_nodes_goes_to_the_rank_that_has_most_of_it() -> None:
    """Three shares of four cores on two nodes of six: the middle one is half and half."""
    topology = on_nodes(cores(6, sockets=2))
    shares = split_cpus(topology, None, 3)
    assert shares == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    assert hand_out(shares, [1, 1, 0], topology) == (shares[2], shares[1], shares[0])
    assert hand_out(shares, [0, 1], topology) == (shares[0], shares[2], shares[1])


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5), st.none() | st.integers(0, 3)), min_size=1, max_size=24),
    st.lists(st.none() | st.integers(0, 3), min_size=1, max_size=4),
    st.none() | st.floats(0.1, 30),
)
def test_handing_out_keeps_the_shares_whatever_the_nodes(
    places: list[tuple[int, int, int | None]], nodes: list[int | None], limit: float | None
) -> None:
    topology = tuple(Cpu(number, core, socket, node) for number, (socket, core, node) in enumerate(places))
    shares = split_cpus(topology, limit, len(nodes))
    found = hand_out(shares, nodes, topology)
    every = [cpu for share in found for cpu in share]
    assert sorted(found) == sorted(shares)
    assert len({len(share) for share in found}) <= 1
    assert len(every) == len(set(every))
    assert hand_out(shares, [None] * len(nodes), topology) == shares
    for ranks in range(len(nodes)):
        assert hand_out(shares, nodes[:ranks], topology)[:ranks] == found[:ranks]


@pytest.mark.parametrize(
    ("workers", "one", "both"),
    [
        ("default", (0, 1, 2), ((0, 1, 2), (4, 5, 6))),  # one CPU of each share stays free
        ("all", (0, 1, 2, 3, 4, 5, 6, 7), ((0, 1, 2, 3), (4, 5, 6, 7))),
        (2, (0, 1), ((0, 1), (4, 5))),
        (4, (0, 1, 2, 3), ((0, 1, 2, 3), (4, 5, 6, 7))),
    ],
)
def test_one_rank_has_the_first_pool_of_two(
    workers: int | Literal["default", "all"], one: tuple[int, ...], both: tuple[tuple[int, ...], ...]
) -> None:
    offer = Offer(cores(4, sockets=2), None, TWO)
    assert place(workers, (0,), offer, widest=2) == Placement((one,), TWO[:1])
    assert place(workers, (0, 1), offer, widest=2) == Placement(both, TWO)


def test_a_count_beyond_the_share_of_the_widest_case_takes_the_cases_own() -> None:
    """One pool of all cores against two of half of them."""
    assert place(7, (0,), Offer(cores(4, sockets=2), None, TWO), widest=2).pools == (tuple(range(7)),)


def test_two_pools_of_one_rank_are_those_of_two_ranks_joined() -> None:
    offer = Offer(cores(4, sockets=2), None, TWO)
    assert place("default", (0,), offer, widest=2, joined=2).pools == ((0, 1, 2, 4, 5, 6),)
    assert place(2, (0,), offer, joined=2).pools == ((0, 1, 4, 5),)
    with pytest.raises(CannotHoldError, match=r"^asks for 10 workers, this host offers 8 CPUs$"):
        place(5, (0,), offer, joined=2)
    with pytest.raises(CannotHoldError, match=r"^asks for 2 pools, this host offers 1 CPU$"):
        place("default", (0,), Offer(cores(1), None, TWO), joined=2)


def test_the_trainer_chooses_where_it_is_asked_to_and_a_case_may_leave_one_cpu_of_all() -> None:
    offer = Offer(cores(4, sockets=2), None, TWO)
    assert place("auto", (0, 1), offer, widest=2) == Placement((), TWO)
    assert place("all_but_one", (0,), offer, widest=2).pools == ((0, 1, 2, 3, 4, 5, 6),)
    assert place("all_but_one", (0, 1), offer, widest=2).pools == ((0, 1, 2), (4, 5, 6))


def test_a_host_too_small_for_the_widest_case_holds_the_others() -> None:
    assert place("default", (0,), Offer(cores(1), None, TWO), widest=2).pools == ((0,),)
    with pytest.raises(CannotHoldError, match=r"^asks for 2 ranks, this host offers 1 CPU$"):
        place("default", (0, 1), Offer(cores(1), None, TWO), widest=2)


@pytest.mark.parametrize(
    ("workers", "gpus", "unusable", "reason"),
    [
        (3, (), None, "asks for 3 workers, this host offers 2 CPUs"),
        (2, (0, 1), None, "asks for 2 ranks of 2 workers, this host offers 2 CPUs"),
        (1, (2,), None, "asks for GPU position 2, this host shows 2 GPU"),
        (1, (0,), "the driver lists no GPU", "asks for GPU position 0, but the driver lists no GPU"),
    ],
)
def test_a_case_that_does_not_fit_says_why(
    workers: int, gpus: tuple[int, ...], unusable: str | None, reason: str
) -> None:
    with pytest.raises(CannotHoldError) as caught:
        place(workers, gpus, Offer(cores(2), None, TWO, unusable))
    assert str(caught.value).startswith(reason)


@st.composite
def offers(draw: st.DrawFn) -> Offer:
    """Any host: cores of one or two sockets with siblings, nodes or none, a time limit or none, up to four GPUs."""
    node = st.none() | st.integers(0, 3)
    places = draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 7), node), min_size=1, max_size=24))
    topology = tuple(Cpu(number, core, socket, on) for number, (socket, core, on) in enumerate(places))
    gpus = tuple(f"GPU-{position}" for position in range(draw(st.integers(0, 4))))
    unusable = draw(st.sampled_from([None, "the reason"]))
    return Offer(topology, draw(st.none() | st.floats(0.1, 30)), gpus, unusable, tuple(draw(node) for _ in gpus))


@given(
    offers(),
    st.sampled_from(["default", "all"]) | st.integers(1, 12),
    st.lists(st.integers(0, 4), unique=True, max_size=4),
    st.integers(1, 4),
)
def test_a_case_is_placed_within_the_offer_or_refused(
    offer: Offer, workers: int | Literal["default", "all"], gpus: list[int], widest: int
) -> None:
    usable = usable_cpus(offer.topology, offer.cgroup_cpus)
    try:
        found = place(workers, tuple(gpus), offer, widest)
    except CannotHoldError as error:
        assert str(error).startswith("asks for ") and "\n" not in str(error)
        fits_gpus = not gpus or (offer.gpu_unusable is None and max(gpus) < len(offer.visible_gpus))
        fits_ranks = max(1, len(gpus)) <= len(usable)
        assert not fits_gpus or not fits_ranks or isinstance(workers, int)
        return
    used = [cpu for pool in found.pools for cpu in pool]
    assert found.gpus == tuple(offer.visible_gpus[position] for position in gpus)
    assert len(found.pools) == max(1, len(gpus))
    assert len(used) == len(set(used)) <= len(usable)
    assert set(used) <= {cpu.cpu for cpu in offer.topology}
    assert len({len(pool) for pool in found.pools}) == 1
    assert not isinstance(workers, int) or len(found.pools[0]) == workers
    assert found == place(workers, tuple(gpus), offer, widest)
