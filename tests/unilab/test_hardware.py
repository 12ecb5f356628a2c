"""Which device, CPUs and threads a run gets, and when it does not fit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from unilab import hardware
from unilab.config import RunConfig, TrainingConfig
from unilab.gpus import Gpu
from unilab.hardware import (
    HostUnfit,
    available_memory,
    check_memory,
    choose_cpus,
    choose_device,
    learner_threads,
    visible_entry,
)
from unilab.physics import pinning
from unilab.physics.pools import Cpu, Topology
from unilab.physics.spec import PhysicsSpec
from unilab.sac.config import SacConfig
from unilab.tasks.g1_walk_flat_config import G1WalkFlatConfig

SPEC = PhysicsSpec("none.xml", 0.01, 2, "exact", 2, 1, 2, (("gyro", 3),), (("kp", 2),))
GIB = 2**30
Host = Callable[..., None]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host with the accelerators it is told to have."""

    def build(gpus: int = 0, mps: bool = False, xpu: bool = False, visible: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch.xpu, "is_available", lambda: xpu)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return build


def run_config(**training: Any) -> RunConfig:
    return RunConfig(training=TrainingConfig(**training))


def test_smoke_mode_is_the_cpu_whatever_there_is(host: Host) -> None:
    host(gpus=2, visible="0,1")
    assert choose_device(run_config(smoke=True)) == torch.device("cpu")


@pytest.mark.parametrize("visible", [None, "3", "GPU-5f5b2c", "MIG-11"])
def test_one_visible_gpu_is_the_learners(host: Host, capsys: pytest.CaptureFixture[str], visible: str | None) -> None:
    host(gpus=1, visible=visible)
    assert choose_device(run_config()) == torch.device("cuda", 0)
    assert capsys.readouterr() == ("", "")


def test_a_rank_takes_the_first_device_it_sees(host: Host) -> None:
    host(gpus=8)
    assert choose_device(run_config()) == torch.device("cuda", 0)


def test_mps_trains_one_rank(host: Host) -> None:
    host(mps=True)
    with pytest.raises(HostUnfit, match="2 ranks need CUDA devices, found MPS, which trains one; unset CUDA_VISIBLE"):
        choose_device(run_config(), 2)


@pytest.mark.parametrize(("ranks", "threads"), [(1, 8), (2, 4), (4, 2), (32, 1)])
def test_learners_of_one_host_share_its_cpus(monkeypatch: pytest.MonkeyPatch, ranks: int, threads: int) -> None:
    monkeypatch.setattr(hardware, "allowed_cpus", lambda: list(range(64)))
    assert learner_threads(ranks) == threads


def test_mps_where_there_is_no_cuda(host: Host) -> None:
    host(mps=True, xpu=True)
    assert choose_device(run_config()) == torch.device("mps")


@pytest.mark.parametrize(("xpu", "found"), [(True, "found an XPU, which is not supported"), (False, "found neither")])
def test_no_accelerator_is_refused_and_names_the_way_out(host: Host, xpu: bool, found: str) -> None:
    host(xpu=xpu)
    with pytest.raises(HostUnfit) as caught:
        choose_device(run_config())
    assert found in str(caught.value)
    assert str(caught.value).endswith("add training.smoke=true")


@pytest.mark.parametrize(
    ("cpus", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 2), (23, 2), (24, 3), (63, 7), (64, 8), (256, 8)]
)
def test_learner_threads(monkeypatch: pytest.MonkeyPatch, cpus: int, threads: int) -> None:
    monkeypatch.setattr(hardware, "allowed_cpus", lambda: list(range(cpus)))
    assert learner_threads() == threads


def cpu_config(cpu_ids: list[int] | None = None, pools: list[list[int]] | None = None) -> RunConfig:
    return RunConfig(training=TrainingConfig(dp_collector_cpu_ids=pools), env=G1WalkFlatConfig(cpu_ids=cpu_ids))


@pytest.fixture
def plain_host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A host of single cores, given the CPUs a process may use and the nodes of some CPUs."""

    def build(allowed: list[int], nodes: dict[int, int] | None = None) -> None:
        cpus = tuple(Cpu(cpu, cpu, (nodes or {}).get(cpu, 0)) for cpu in range(16))
        monkeypatch.setattr(hardware, "LINUX", True)
        monkeypatch.setattr(hardware, "allowed_cpus", lambda: allowed)
        monkeypatch.setattr(hardware, "read_topology", lambda: Topology(cpus))

    return build


@pytest.mark.parametrize(("allowed", "workers"), [([3], [3]), ([2, 5], [5]), ([0, 1, 2, 9], [1, 2, 9])])
def test_the_default_leaves_one_cpu_to_the_learner(plain_host: Host, allowed: list[int], workers: list[int]) -> None:
    plain_host(allowed)
    assert choose_cpus(cpu_config()) == workers


def test_each_rank_finds_its_own_pool(plain_host: Host) -> None:
    plain_host([0, 1, 2, 3, 4, 5])
    assert [choose_cpus(cpu_config(), rank, 2) for rank in (0, 1)] == [[1, 2], [4, 5]]
    asked = [[5], [0, 3]]
    assert [choose_cpus(cpu_config(pools=asked), rank, 2) for rank in (0, 1)] == asked


def test_a_pool_follows_the_gpu_of_its_rank(plain_host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_host([0, 1, 2, 3], {2: 1, 3: 1})
    monkeypatch.setattr(hardware, "find_gpus", lambda entries: ([Gpu(entry, entry) for entry in entries], "1"))
    monkeypatch.setattr(hardware, "gpu_node", lambda bus_id, _: {"a": 0, "b": 1}[bus_id])
    assert choose_cpus(cpu_config(), 0, 2, ["b", "a"]) == [3]
    assert choose_cpus(cpu_config(), 0, 1, ["b"]) == [3, 0, 1]
    assert choose_cpus(cpu_config(), 0, 1, [None]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("cpu_ids", "pools", "ranks", "message"),
    [
        ([1], [[1]], 1, "env.cpu_ids=[1] is for a single rank and training.dp_collector_cpu_ids is set; give "),
        ([1], None, 2, "env.cpu_ids=[1] is for a single rank and there are 2 ranks; give training.dp_collector_"),
        (None, [[0], [1]], 1, "training.dp_collector_cpu_ids has 2 lists for 1 rank on this host; give one"),
    ],
)
def test_lists_that_do_not_fit_the_ranks(
    plain_host: Host, cpu_ids: list[int] | None, pools: list[list[int]] | None, ranks: int, message: str
) -> None:
    plain_host([0, 1])
    with pytest.raises(ValueError, match=r"\S") as caught:
        choose_cpus(cpu_config(cpu_ids, pools), 0, ranks)
    assert str(caught.value).startswith(message)


def test_more_ranks_than_cpus_do_not_fit_the_host(plain_host: Host) -> None:
    plain_host([4])
    with pytest.raises(HostUnfit, match=r"^2 ranks need a CPU each, this process may use 1; start fewer ranks or"):
        choose_cpus(cpu_config(), 0, 2)


def test_no_default_where_threads_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "LINUX", False)
    assert choose_cpus(cpu_config()) is None


def test_pools_are_refused_where_threads_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "LINUX", False)
    monkeypatch.setattr(pinning, "LINUX", False)
    with pytest.raises(ValueError, match=r"training\.dp_collector_cpu_ids\[0\]=\[0\]: pinning needs Linux"):
        choose_cpus(cpu_config(pools=[[0]]))


def test_an_asked_list_is_kept_or_refused() -> None:
    cpu = max(os.sched_getaffinity(0))
    assert choose_cpus(cpu_config([cpu])) == choose_cpus(cpu_config(pools=[[cpu]])) == [cpu]
    for asked, message in (
        ([], r"=\[\] names no CPU"),
        ([cpu, cpu], f"names CPU {cpu} twice"),
        ([cpu, 99999], "names CPU 99999, which this process may not use; allowed: "),
        ([-1], "names CPU -1"),
    ):
        with pytest.raises(ValueError, match=rf"env\.cpu_ids.*{message}"):
            choose_cpus(cpu_config(asked))
        with pytest.raises(ValueError, match=rf"training\.dp_collector_cpu_ids\[0\].*{message}"):
            choose_cpus(cpu_config(pools=[asked]))


@pytest.mark.parametrize(
    ("visible", "device", "entry"),
    [
        (None, "cuda:0", "0"),
        ("GPU-5f5b2c", "cuda:0", "GPU-5f5b2c"),
        ("4, 5", "cuda:1", "5"),
        ("4", "cuda", "4"),
        ("4", "cpu", None),
        (None, "mps", None),
    ],
)
def test_the_entry_behind_a_device(host: Host, visible: str | None, device: str, entry: str | None) -> None:
    host(gpus=2, visible=visible)
    assert visible_entry(torch.device(device)) == entry


def write_group(folder: Path, limit: int | str, used: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - cache}\nactive_file 5\ninactive_file {cache}\n")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 100 GiB of free memory."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * GIB))


@pytest.mark.parametrize(
    ("limit", "used", "cache", "gib"),
    [
        (8 * GIB, 3 * GIB, 0, 5),
        (8 * GIB, 8 * GIB, 6 * GIB, 6),  # full of file cache, which gives way
        (8 * GIB, 9 * GIB, 0, 0),  # over the limit
        (500 * GIB, GIB, 0, 100),  # the host has less
        ("max", 3 * GIB, 0, 100),
    ],
)
@pytest.mark.usefixtures("free")
def test_memory_of_a_container(tmp_path: Path, limit: int | str, used: int, cache: int, gib: int) -> None:
    write_group(tmp_path / "groups", limit, used, cache)
    membership = tmp_path / "membership"
    membership.write_text("0::/\n")
    assert available_memory(tmp_path / "groups", membership) == gib * GIB


@pytest.mark.usefixtures("free")
def test_the_tightest_group_above_the_process_counts(tmp_path: Path) -> None:
    groups, membership = tmp_path / "groups", tmp_path / "membership"
    membership.write_text("12:memory:/elsewhere\n0::/slurm/job_7/step_0\n")
    write_group(groups / "slurm" / "job_7" / "step_0", "max", GIB)
    write_group(groups / "slurm" / "job_7", 20 * GIB, 4 * GIB)
    write_group(groups / "slurm", 90 * GIB, 30 * GIB)
    write_group(tmp_path, GIB, 0)  # above the root of the groups: not a group
    assert available_memory(groups, membership) == 16 * GIB


@pytest.mark.usefixtures("free")
def test_no_control_groups_at_all(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "none", tmp_path / "nothing") == 100 * GIB


def test_memory_of_this_host_is_a_number_of_bytes() -> None:
    assert 0 < available_memory() <= psutil.virtual_memory().total


# Four environments: 6 pages of slots and command; ring 4 bytes x 10 columns x (4 x 8 rows + 2 x 16 gathered) = 2560.
SMALL = SacConfig(num_envs=4, replay_buffer_n=8, updates_per_step=2, batch_size=16)


@pytest.mark.parametrize(
    ("device", "needed", "what"),
    [
        ("cpu", 24576 + 2560, "the ingress slots and the replay ring"),
        ("mps", 24576 + 2560, "the ingress slots and the replay ring"),
        ("cuda", 24576, "the ingress slots"),
    ],
)
def test_a_run_may_take_four_fifths_of_the_hosts_memory(
    monkeypatch: pytest.MonkeyPatch, device: str, needed: int, what: str
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (GIB, GIB))
    enough = -(-needed * 5 // 4)
    monkeypatch.setattr(hardware, "available_memory", lambda: enough)
    check_memory(RunConfig(algo=SMALL), SPEC, 10, torch.device(device))
    monkeypatch.setattr(hardware, "available_memory", lambda: enough - 1)
    with pytest.raises(HostUnfit, match=f"^{what} need"):
        check_memory(RunConfig(algo=SMALL), SPEC, 10, torch.device(device))


def test_the_ring_must_fit_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "available_memory", lambda: GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3200, GIB))
    check_memory(RunConfig(algo=SMALL), SPEC, 10, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3199, GIB))
    with pytest.raises(HostUnfit, match=r"^the replay ring on the device need"):
        check_memory(RunConfig(algo=SMALL), SPEC, 10, torch.device("cuda"))


def test_recorded_states_are_counted_and_their_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 20 numbers of a state (1 + nq 2 + 3 x nv 1 + nu 2 + 6 x 2) and 2 gains, for each of 3 iterations."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (GIB, GIB))
    config = RunConfig(
        algo=SacConfig(num_envs=4, replay_buffer_n=8, updates_per_step=2, batch_size=16, max_iterations=5),
        training=TrainingConfig(record_states=8),
    )
    enough = -(-(24576 + 3 * 4 * (20 + 2) * 8) * 5 // 4)
    monkeypatch.setattr(hardware, "available_memory", lambda: enough)
    check_memory(config, SPEC, 10, torch.device("cuda"))
    monkeypatch.setattr(hardware, "available_memory", lambda: enough - 1)
    message = r"^the ingress slots and the recorded states need .*; lower .*, training\.record_states$"
    with pytest.raises(HostUnfit, match=message):
        check_memory(config, SPEC, 10, torch.device("cuda"))


def test_both_numbers_and_the_keys_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "available_memory", lambda: 3 * GIB)
    config = RunConfig(algo=SacConfig(num_envs=2**20, replay_buffer_n=64, updates_per_step=1, batch_size=1))
    with pytest.raises(HostUnfit) as caught:  # slots 96 MiB, ring 4 x 10 x 2^26 bytes = 2.5 GiB
        check_memory(config, SPEC, 10, torch.device("cpu"))
    assert str(caught.value) == (
        "the ingress slots and the replay ring need 2.59 GiB, 3.00 GiB are free and at most 80% of them may be taken; "
        "lower algo.num_envs, algo.replay_buffer_n"
    )
