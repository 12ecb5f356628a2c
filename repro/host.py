"""Facts of the host that a result depends on; no names of people or machines."""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

import psutil

from repro.gpus import Gpu, GpuLink, find_gpus, listed_position
from repro.place import SYSFS, Cpu, read_topology
from repro.redact import Redactor
from repro.schema import Strict

VERSIONED = (
    "torch",
    "mujoco",
    "numpy",
    "scipy",
    "pandas",
    "tensorboard",
    "tbparse",
    "matplotlib",
    "jinja2",
    "pydantic",
    "triton",
    "unilab-repro",
)
RELEVANT_PREFIXES = ("CUDA_", "NCCL_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "OPENBLAS_", "MUJOCO_", "UNILAB_")
# Torch's own libraries, by what a reader calls them; of each, one package is installed at most.
GPU_LIBRARIES = {
    "cuda": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11"),
    "cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu11"),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"),
}
COMPILERS = ("gcc", "cc", "clang", "g++")
CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


class Host(Strict):
    """What a reader must know about the machine.

    Attributes:
        platform: Kernel and architecture.
        cpu_model: Marketing name of the CPU.
        cpu_count: Logical CPUs of the machine.
        allowed_cpus: CPUs of this process's mask, ascending.
        physical_cores: Distinct cores among the allowed CPUs.
        cgroup_cpus: CPU time limit in CPUs, or None without one.
        memory_bytes: Memory of the machine.
        memory_limit_bytes: Limit of the control group, or None without one.
        shm_bytes: Size of /dev/shm, or None without it.
        gpus: GPUs the driver lists.
        visible_gpus: Entries a rank can get, in order: CUDA_VISIBLE_DEVICES where it is set, else the GPUs' ids.
        driver: GPU driver version, or None.
        compiler: Name of the first C compiler found, or None.
        versions: Versions by package; None where it is not installed.
        environment: Inherited variables that steer the libraries.
        sockets: Sockets among the allowed CPUs, or None in files of older versions.
        numa_nodes: NUMA nodes among them, or None where the kernel does not say.
        governor: Frequency governors of the allowed CPUs, or None where the kernel does not say, as in most machines
            that are virtual.
        gpu_links: What joins each pair of GPUs.
    """

    platform: str
    cpu_model: str
    cpu_count: int
    allowed_cpus: tuple[int, ...]
    physical_cores: int
    cgroup_cpus: float | None
    memory_bytes: int
    memory_limit_bytes: int | None
    shm_bytes: int | None
    gpus: tuple[Gpu, ...]
    visible_gpus: tuple[str, ...]
    driver: str | None
    compiler: str | None
    versions: dict[str, str | None]
    environment: dict[str, str]
    sockets: int | None = None
    numa_nodes: int | None = None
    governor: str | None = None
    gpu_links: tuple[GpuLink, ...] = ()

    @property
    def gpu_nodes(self) -> tuple[int | None, ...]:
        """NUMA node of the GPU behind each visible entry, None where it is not known."""
        positions = [listed_position(entry, self.gpus) for entry in self.visible_gpus]
        return tuple(None if position is None else self.gpus[position].numa_node for position in positions)

    @property
    def gpu_unusable(self) -> str | None:
        """Why no cell can use a GPU here, or None when one can."""
        if not self.gpus:
            return "the driver lists no GPU"
        if not self.visible_gpus:
            return "CUDA_VISIBLE_DEVICES hides every GPU"
        if all(map(self.is_unlisted, self.visible_gpus)):
            return "CUDA_VISIBLE_DEVICES names no GPU that the driver lists"
        if (self.versions.get("torch") or "").endswith("+cpu"):
            return f"torch {self.versions['torch']} is built without CUDA"
        return None

    def is_unlisted(self, entry: str) -> bool:
        """Whether the driver lists no GPU that an entry names; of MIG's parts that is not known here."""
        return not entry.startswith("MIG-") and listed_position(entry, self.gpus) is None


def find_host(environment: Mapping[str, str] | None = None) -> tuple[Host, tuple[Cpu, ...]]:
    """Look at this machine; also return the topology of the allowed CPUs, which placement needs."""
    environ = os.environ if environment is None else environment
    allowed = allowed_cpus()
    topology = read_topology(allowed)
    found = find_gpus()
    redactor = Redactor()
    host = Host(
        platform=f"{platform.system()} {kernel_version()} {platform.machine()}",
        cpu_model=cpu_model(),
        cpu_count=os.cpu_count() or 1,
        allowed_cpus=allowed,
        physical_cores=len({(cpu.socket, cpu.core) for cpu in topology}),
        cgroup_cpus=cgroup_cpus(),
        memory_bytes=int(psutil.virtual_memory().total),
        memory_limit_bytes=cgroup_memory(),
        shm_bytes=int(shutil.disk_usage("/dev/shm").total) if Path("/dev/shm").is_dir() else None,
        gpus=found.gpus,
        visible_gpus=visible_gpus(environ.get("CUDA_VISIBLE_DEVICES"), found.gpus),
        driver=found.driver,
        compiler=next((name for name in COMPILERS if shutil.which(name)), None),
        versions=versions(),
        environment={k: redactor.text(v) for k, v in sorted(environ.items()) if k.startswith(RELEVANT_PREFIXES)},
        sockets=len({cpu.socket for cpu in topology}),
        numa_nodes=numa_nodes(allowed),
        governor=governor(allowed),
        gpu_links=found.links,
    )
    return host, topology


def allowed_cpus() -> tuple[int, ...]:
    """CPUs this process may run on, ascending; all of them where the system keeps no mask."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def kernel_version() -> str:
    """Numbers of the kernel's release; what follows them names whoever built it."""
    release = platform.release()
    return "".join(itertools.takewhile(lambda letter: letter.isdigit() or letter == ".", release)).strip(".") or release


def cpu_model() -> str:
    """Name of the CPU."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def governor(cpus: tuple[int, ...], sysfs: Path = SYSFS) -> str | None:
    """Frequency governors of some CPUs, as in ``performance``; several are joined, None where the kernel has none."""
    found = {_read(sysfs / f"cpu{cpu}" / "cpufreq" / "scaling_governor") for cpu in cpus} - {""}
    return ", ".join(sorted(found)) or None


def numa_nodes(cpus: tuple[int, ...], sysfs: Path = SYSFS) -> int | None:
    """How many NUMA nodes some CPUs belong to, or None where the kernel keeps none."""
    found = {path.name for cpu in cpus for path in (sysfs / f"cpu{cpu}").glob("node[0-9]*")}
    return len(found) or None


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that shape a result, read without importing them."""
    found = {name: _version(name) for name in VERSIONED}
    libraries = {
        name: next((version for version in map(_version, packages) if version), None)
        for name, packages in GPU_LIBRARIES.items()
    }
    return {"python": platform.python_version(), **found, **libraries}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def visible_gpus(variable: str | None, gpus: tuple[Gpu, ...]) -> tuple[str, ...]:
    """Entries for one rank each: those of CUDA_VISIBLE_DEVICES, taken as they are, else every GPU's id."""
    if variable is None:
        return tuple(gpu.uuid for gpu in gpus)
    entries = [entry.strip() for entry in variable.split(",")]
    ending = next((i for i, entry in enumerate(entries) if entry in ("", "-1")), len(entries))  # CUDA stops there too
    return tuple(entries[:ending])


def gpu_links(host: Host) -> str:
    """What joins the GPUs, equal links together, as in ``NVLink (0-1 0-2); one PCIe switch (1-2)``."""
    pairs: dict[str, list[str]] = {}
    for link in host.gpu_links:
        pairs.setdefault(link.link, []).append(f"{link.first}-{link.second}")
    if len(pairs) == 1 and len(host.gpu_links) > 1:
        return f"{next(iter(pairs))} (all pairs)"
    return "; ".join(f"{link} ({' '.join(names)})" for link, names in pairs.items())


def gpu_label(gpus: tuple[Gpu, ...], count: int) -> str:
    """Short name of the GPU and how many are used, as in ``h200x1`` or ``rtx5090x2``."""
    words = gpus[0].name.lower().replace("-", " ").split()
    kept: list[str] = []
    for word in words:
        if word in ("nvidia", "geforce", "tesla"):
            continue
        if kept and (word.startswith(("sxm", "pcie", "hbm", "nvl")) or word.endswith("gb")):
            break
        kept.append("".join(letter for letter in word if letter.isalnum()))
    return f"{''.join(kept)}x{count}"


def cgroup_cpus(groups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """Smallest CPU time limit of this process's control groups in CPUs, or None."""
    limits = []
    for group in _groups(groups, membership, "cpu"):
        words = _read(group / "cpu.max").split()  # version 2: quota and period in microseconds
        if not words:
            words = [_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]  # version 1
        if len(words) == 2 and all(word.isdigit() for word in words):
            limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def cgroup_memory(groups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Smallest memory limit of this process's control groups in bytes, or None."""
    texts = [
        _read(group / name)
        for group in _groups(groups, membership, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    limits = [int(text) for text in texts if text.isdigit()]
    return min((limit for limit in limits if limit < math.ldexp(1, 60)), default=None)  # version 1 writes 2^63 for none


def _groups(groups: Path, membership: Path, controller: str) -> list[Path]:
    """Folders of this process's control group and of all above it, for version 2 and for version 1's controller."""
    found = []
    for line in _read(membership).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = groups / controller if controllers else groups
        own = base / name.strip("/")
        found += [own, *(parent for parent in own.parents if parent.is_relative_to(base))]
    return found or [groups]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
