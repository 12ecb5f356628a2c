from __future__ import annotations

from pathlib import Path

import pytest
from session_builder import make_host

from repro.gpus import Gpu
from repro.host import (
    Host,
    cgroup_cpus,
    cgroup_memory,
    find_host,
    governor,
    gpu_label,
    numa_nodes,
    versions,
    visible_gpus,
)
from repro.schema import canonical_json, parse_model

TWO = tuple(Gpu(name="NVIDIA H200", uuid=f"GPU-{i}", memory_bytes=1) for i in range(2))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_this_host_is_described_and_survives_its_file() -> None:
    host, topology = find_host({"NCCL_DEBUG": "INFO", "SECRET": "x", "CUDA_VISIBLE_DEVICES": ""})
    assert len(topology) == len(host.allowed_cpus) >= 1
    assert 1 <= host.physical_cores <= len(host.allowed_cpus)
    assert host.environment == {"CUDA_VISIBLE_DEVICES": "", "NCCL_DEBUG": "INFO"}
    assert host.versions["numpy"]
    assert host.gpu_unusable is not None
    assert parse_model(Host, canonical_json(host), "host.json") == host


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, ("GPU-0", "GPU-1")),
        ("1", ("1",)),
        (" GPU-1 , MIG-x", ("GPU-1", "MIG-x")),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", ("0",)),
    ],
)
def test_visible_entries_are_opaque(variable: str | None, expected: tuple[str, ...]) -> None:
    assert visible_gpus(variable, TWO) == expected


@pytest.mark.parametrize(
    ("entries", "nodes"),
    [
        (("0", "1"), (1, 0)),
        (("01", "GPU-0"), (0, 1)),
        (("GPU-", "gpu-1"), (1, 0)),
        (("7", "MIG-GPU-0/1/0", "x"), (None, None, None)),
    ],
)
def test_the_node_of_a_visible_gpu_is_known_where_its_entry_names_a_listed_one(
    entries: tuple[str, ...], nodes: tuple[int | None, ...]
) -> None:
    gpus = tuple(gpu.model_copy(update={"numa_node": 1 - position}) for position, gpu in enumerate(TWO))
    host, _ = make_host(4, 2, gpus=gpus, visible_gpus=entries)
    assert host.gpu_nodes == nodes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"gpus": ()}, "the driver lists no GPU"),
        ({"visible_gpus": ()}, "CUDA_VISIBLE_DEVICES hides every GPU"),
        ({"visible_gpus": ("9", "GPU-9", "x")}, "CUDA_VISIBLE_DEVICES names no GPU that the driver lists"),
        ({"visible_gpus": ("9", "0")}, None),
        ({"visible_gpus": ("MIG-9",)}, None),  # what is not known here is left to the run
        ({"versions": {"torch": "2.13.0+cpu"}}, "torch 2.13.0+cpu is built without CUDA"),
    ],
)
def test_a_gpu_is_usable_or_the_reason_is_known(changes: dict[str, object], reason: str | None) -> None:
    assert make_host(gpu_count=1, **changes)[0].gpu_unusable == reason


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("NVIDIA H200", "h200x2"),
        ("NVIDIA GeForce RTX 5090", "rtx5090x2"),
        ("NVIDIA A100-SXM4-80GB", "a100x2"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000adagenerationx2"),
        ("Tesla V100-PCIE-16GB", "v100x2"),
    ],
)
def test_gpu_names_become_short_labels(name: str, label: str) -> None:
    assert gpu_label((Gpu(name=name, uuid="GPU-0", memory_bytes=1),), 2) == label


def test_limits_of_version_2_are_the_smallest_on_the_way_up(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    write(membership, "0::/pod/box\n")
    write(tmp_path / "pod" / "cpu.max", "350000 100000\n")
    write(tmp_path / "pod" / "box" / "cpu.max", "max 100000\n")
    write(tmp_path / "pod" / "memory.max", "max\n")
    write(tmp_path / "pod" / "box" / "memory.max", "1073741824\n")
    assert cgroup_cpus(tmp_path, membership) == 3.5
    assert cgroup_memory(tmp_path, membership) == 2**30


def test_limits_of_version_1_are_read_per_controller(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    write(membership, "4:memory:/box\n3:cpu,cpuacct:/box\n0::/\n")
    write(tmp_path / "cpu" / "box" / "cpu.cfs_quota_us", "200000\n")
    write(tmp_path / "cpu" / "box" / "cpu.cfs_period_us", "100000\n")
    write(tmp_path / "memory" / "box" / "memory.limit_in_bytes", "2147483648\n")
    write(tmp_path / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    assert cgroup_cpus(tmp_path, membership) == 2.0
    assert cgroup_memory(tmp_path, membership) == 2**31


def test_no_limit_is_none(tmp_path: Path) -> None:
    assert cgroup_cpus(tmp_path, tmp_path / "none") is None
    assert cgroup_memory(tmp_path, tmp_path / "none") is None


def test_governors_and_nodes_are_those_of_the_allowed_cpus(tmp_path: Path) -> None:
    for cpu, name in ((0, "performance"), (1, "powersave"), (2, "performance")):
        write(tmp_path / f"cpu{cpu}" / "cpufreq" / "scaling_governor", f"{name}\n")
        (tmp_path / f"cpu{cpu}" / f"node{cpu % 2}").mkdir()
    assert governor((0, 2), tmp_path) == "performance"
    assert governor((0, 1, 2), tmp_path) == "performance, powersave"
    assert governor((7,), tmp_path) is None
    assert [numa_nodes(cpus, tmp_path) for cpus in ((0, 2), (0, 1), (7,))] == [1, 2, None]


def test_cuda_cudnn_and_nccl_are_torchs_own_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.13.0", "nvidia-nccl-cu12": "2.27.3"}
    installed |= {"nvidia-cuda-runtime": "13.0.96", "nvidia-cudnn-cu13": "9.20.0.48"}
    monkeypatch.setattr("repro.host._version", installed.get)
    assert [versions()[name] for name in ("cuda", "cudnn", "nccl")] == ["13.0.96", "9.20.0.48", "2.27.3"]
    assert versions()["torch"] == "2.13.0" and versions()["mujoco"] is None


def test_host_files_of_older_versions_are_read() -> None:
    host, _ = make_host(gpu_count=2)
    new = {"sockets", "numa_nodes", "governor", "gpu_links"}
    old = host.model_dump(mode="json", exclude=new)
    for gpu in old["gpus"]:
        del gpu["max_sm_clock_mhz"], gpu["numa_node"]
    found = parse_model(Host, canonical_json(old), "host.json")
    assert found == host and (found.governor, found.gpu_links) == (None, ())
