from __future__ import annotations

from pathlib import Path

import pytest

from repro.place import CannotHoldError, Cpu, Placement, fill_order, place, read_topology, usable_cpus

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
    assert read_topology((2, 3, 9), tmp_path) == (Cpu(2, 7, 1), Cpu(3, 7, 1), Cpu(9, 9, 0))


def test_default_keeps_one_cpu_for_the_learner_and_all_does_not() -> None:
    usable = (0, 2, 4, 6)
    assert place("default", (), usable, ()) == Placement((0, 2, 4), ())
    assert place("all", (), usable, ()) == Placement(usable, ())
    assert place(1, (), usable, ()) == Placement((0,), ())
    assert place("default", (), (5,), ()) == Placement((5,), ())


def test_gpu_positions_become_entries_taken_as_they_are() -> None:
    assert place(1, (1,), (0,), ("MIG-a", "GPU-b")).gpus == ("GPU-b",)


@pytest.mark.parametrize(
    ("workers", "gpus", "unusable", "reason"),
    [
        (3, (), None, "asks for 3 workers, this host offers 2 CPUs"),
        (1, (2,), None, "asks for GPU position 2, this host shows 2 GPU"),
        (1, (0, 1), None, "asks for 2 ranks, this trainer runs one"),
        (1, (0,), "the driver lists no GPU", "asks for GPU position 0, but the driver lists no GPU"),
    ],
)
def test_a_case_that_does_not_fit_says_why(
    workers: int, gpus: tuple[int, ...], unusable: str | None, reason: str
) -> None:
    with pytest.raises(CannotHoldError) as caught:
        place(workers, gpus, (0, 1), ("GPU-a", "GPU-b"), unusable)
    assert str(caught.value).startswith(reason)
