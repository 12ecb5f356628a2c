"""Which device a run gets, which CPUs its physics gets, and whether it fits: every refusal that needs the host."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from unilab.channel import channel_bytes
from unilab.config import RunConfig
from unilab.gpus import find_gpus
from unilab.physics.pinning import LINUX, allowed_cpus, check_cpu_ids
from unilab.physics.pools import POOLS_KEY, TooFewCpusError, Topology, gpu_node, plan_pools, read_topology
from unilab.physics.spec import PhysicsSpec
from unilab.physics.states import recorded_iterations
from unilab.ranks import VISIBLE_DEVICES

MEMORY_SHARE = 0.8
GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


class HostUnfit(RuntimeError):  # noqa: N818 - says what is the matter
    """This host cannot do what was asked; one line says what is missing."""


def choose_device(config: RunConfig, world_size: int = 1) -> torch.device:
    """The learner's device.

    Args:
        config: the run.
        world_size: number of ranks, each of which sees its own device alone.

    Returns:
        The CPU in smoke mode, else the first visible CUDA device, else MPS.

    Raises:
        HostUnfit: where training cannot run.
    """
    if config.training.smoke:
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if torch.backends.mps.is_available():
        if world_size > 1:
            raise HostUnfit(
                f"{world_size} ranks need CUDA devices, found MPS, which trains one; unset {VISIBLE_DEVICES}"
            )
        return torch.device("mps")
    found = "found an XPU, which is not supported" if torch.xpu.is_available() else "found neither"
    raise HostUnfit(
        f"training needs a CUDA or MPS device, {found}; to see the whole path work on the CPU add training.smoke=true"
    )


def device_count() -> int:
    """CUDA devices this process sees."""
    return torch.cuda.device_count()


def choose_cpus(
    config: RunConfig, rank: int = 0, world_size: int = 1, gpus: Sequence[str | None] = ()
) -> list[int] | None:
    """CPUs of a rank's physics workers: the asked ones, else its share of the allowed ones less one for the learner.

    Args:
        config: the run.
        rank: whose CPUs.
        world_size: number of ranks.
        gpus: entry of CUDA_VISIBLE_DEVICES of every rank, None where a rank has none.

    Returns:
        The list, or None where threads cannot be pinned.

    Raises:
        ValueError: for a list that is empty, repeats a CPU, leaves the allowed mask, overlaps another, or is not one
            of as many as there are ranks.
        HostUnfit: for more ranks than CPUs.
    """
    single, pools = config.env.cpu_ids, config.training.dp_collector_cpu_ids
    if single is not None:
        if pools is not None or world_size > 1:
            rival = f"{POOLS_KEY} is set" if pools is not None else f"there are {world_size} ranks"
            raise ValueError(f"env.cpu_ids={list(single)} is for a single rank and {rival}; give {POOLS_KEY} alone")
        check_cpu_ids(single)
        return list(single)
    if pools is None and not LINUX:
        return None
    topology = read_topology()
    try:
        return plan_pools(topology, allowed_cpus(), world_size, _gpu_nodes(gpus, topology), pools)[rank]
    except TooFewCpusError as error:
        raise HostUnfit(f"{error}; start fewer ranks or allow more CPUs") from None


def _gpu_nodes(entries: Sequence[str | None], topology: Topology) -> list[int | None]:
    """NUMA node of each rank's GPU."""
    gpus, _ = find_gpus([entry or "" for entry in entries]) if any(entries) else ([None] * len(entries), None)
    return [None if gpu is None else gpu_node(gpu.bus_id, topology) for gpu in gpus]


def visible_entry(device: torch.device) -> str | None:
    """Entry of CUDA_VISIBLE_DEVICES that a CUDA device stands for, or None on another device."""
    if device.type != "cuda":
        return None
    index = device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(index) if visible is None else visible.split(",")[index].strip()


def check_memory(config: RunConfig, spec: PhysicsSpec, replay_width: int, device: torch.device, ranks: int = 1) -> None:
    """Refuse a run whose slots, ring or recorded states do not fit, where `ranks` of them share the host's memory.

    Raises:
        HostUnfit: naming what does not fit and both numbers.
    """
    algo = config.algo
    ring = 4 * replay_width * (algo.num_envs * algo.replay_buffer_n + algo.updates_per_step * algo.batch_size)
    shared = device.type != "cuda"  # the CPU and MPS keep the ring in the host's memory
    parts = {
        "the ingress slots": channel_bytes(spec, algo.num_envs) * ranks,
        "the recorded states": _recorded_bytes(config, spec),  # rank 0's alone
        "the replay ring": ring * ranks if shared else 0,
    }
    what = " and ".join(name for name, size in parts.items() if size)
    keys = "algo.num_envs, algo.replay_buffer_n" + (", training.record_states" if "states" in what else "")
    _require_fit(what, sum(parts.values()), available_memory(), keys)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        _require_fit("the replay ring on the device", ring, free, "algo.replay_buffer_n, algo.num_envs")


def _recorded_bytes(config: RunConfig, spec: PhysicsSpec) -> int:
    """What `StateRecorder` takes in the collector, at most: float64 states and model fields of every snapshot."""
    count = len(recorded_iterations(config.algo.max_iterations, config.training.record_states))
    width = spec.state_bound + sum(width for _, width in spec.model_fields)
    return 8 * count * config.algo.num_envs * width


def available_memory(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> int:
    """Bytes a new allocation may take on the host: free memory, or less where a control group says so.

    Args:
        groups: root of the control groups, version 2.
        membership: file that names this process's group.
    """
    available = int(psutil.virtual_memory().available)
    return int(max(0, min([available, *map(_group_room, _own_groups(groups, membership))])))


def _own_groups(groups: Path, membership: Path) -> list[Path]:
    """This process's control group and all above it; inside a container usually the root alone."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return [groups]
    names = [line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")]
    own = groups / "/".join(names)
    return [own, *(parent for parent in own.parents if parent.is_relative_to(groups))]


def _group_room(group: Path) -> float:
    """Bytes left in one control group; file cache it can drop does not count as used."""
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or its limit is "max"
        return math.inf
    return limit - used + int(statistics.get("inactive_file", 0))


def learner_threads(ranks: int = 1) -> int:
    """Torch threads of one of the host's learners: an eighth of its CPUs, between 2 and 8, or 1 below four CPUs."""
    cpus = len(allowed_cpus()) // ranks
    return 1 if cpus < 4 else min(8, max(2, cpus // 8))


def _require_fit(what: str, needed: int, available: int, keys: str) -> None:
    if needed > MEMORY_SHARE * available:
        raise HostUnfit(
            f"{what} need {needed / 2**30:.2f} GiB, {available / 2**30:.2f} GiB are free "
            f"and at most {MEMORY_SHARE:.0%} of them may be taken; lower {keys}"
        )
