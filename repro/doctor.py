"""What this host can run, on one screen."""

from __future__ import annotations

import os

from repro import text
from repro.gpus import GpuLoad, gpu_loads
from repro.host import Host, gpu_links
from repro.matrix import Matrix, builtin_names, load_matrix
from repro.place import Cpu
from repro.plan import make_plan, unfit_cases
from repro.provenance import find_source, graph_hooks, trainer_package
from repro.renderer import find_renderer
from repro.schema import Strict
from repro.spin import NOISE_LIMIT, SpinNoise, measure_spin


class CaseFit(Strict):
    """Whether this host can hold a case; `reason` says why not, or is None."""

    case: str
    reason: str | None


class MatrixFit(Strict):
    """Whether a matrix fits this host.

    Attributes:
        matrix: Its name.
        fits: Whether every case can be held.
        estimated_seconds: Expected duration of what can be held.
        cases: Every case of it.
    """

    matrix: str
    fits: bool
    estimated_seconds: float
    cases: tuple[CaseFit, ...]


class Diagnosis(Strict):
    """Everything the doctor says; `--json` prints it.

    Attributes:
        host: Facts that also go into a report.
        loads: What its GPUs do right now.
        renderer: What can render videos, in words.
        noise: How evenly the host computes right now.
        trainer: Folder of the package that cells import.
        graph_hooks: Whether that trainer captures its gradient all-reduce.
        matrices: What fits.
    """

    host: Host
    loads: tuple[GpuLoad, ...]
    renderer: str
    noise: SpinNoise
    trainer: str
    graph_hooks: bool
    matrices: tuple[MatrixFit, ...]


def diagnose(host: Host, topology: tuple[Cpu, ...], matrix: str | None) -> Diagnosis:
    """Look at the host for one matrix, or for all that are shipped.

    Raises:
        UsageError: If the matrix is unknown.
    """
    matrices = [load_matrix(name) for name in ([matrix] if matrix else builtin_names())]
    package = trainer_package()
    return Diagnosis(
        host=host,
        loads=gpu_loads(),
        renderer=find_renderer(os.environ),
        noise=measure_spin(),
        trainer=str(package) if package else "not importable",
        graph_hooks=graph_hooks(),
        matrices=tuple(_fit(item, host, topology) for item in matrices),
    )


def choose_matrix(host: Host, topology: tuple[Cpu, ...], contained: bool = False) -> tuple[str, str]:
    """Name of the widest matrix for a host like this of which it can hold every case, and why it is that one.

    Never `smoke` where there is a GPU: that would measure something else.
    """
    if host.gpu_unusable is not None:
        return "smoke", f"no usable GPU: {host.gpu_unusable}"
    count = sum(not host.is_unlisted(entry) for entry in host.visible_gpus)
    why = f"this host shows {text.count_of(count, 'GPU')}"
    if count == 1:
        return "single", why
    unfit = unfit_cases(load_matrix("dual"), host, topology, contained)
    missing = next((f"{why}, but case {case} of dual {reason}" for case, reason in unfit.items()), None)
    return ("dual", why) if missing is None else ("single", missing)


def doctor_lines(found: Diagnosis) -> list[str]:
    """The diagnosis as text, one screen; with one matrix every case of it has a line."""
    host = found.host
    pairs = [
        ("GPUs", _gpus(host)),
        *([("GPU links", _links(host))] if host.gpu_links else []),
        *([("GPU load", _loads(found.loads))] if found.loads else []),
        ("driver", ", ".join([host.driver or "none", *_libraries(host)])),
        ("CPU", _cpu(host)),
        ("allowed", f"CPU {text.cpu_list(host.allowed_cpus)}, {text.count_of(host.physical_cores, 'physical core')}"),
        ("CPU limit", "none" if host.cgroup_cpus is None else f"{host.cgroup_cpus:g} CPUs (control group)"),
        ("memory", f"{_memory(host)}; /dev/shm {text.gib(host.shm_bytes)}"),
        ("compiler", host.compiler or "none: torch.compile needs one on a GPU"),
        ("renderer", found.renderer),
        ("noise", _noise(found.noise)),
        ("versions", ", ".join(f"{name} {host.versions[name] or 'missing'}" for name in ("python", "torch", "mujoco"))),
        ("trainer", f"{found.trainer} \N{MIDDLE DOT} graph hooks: {found.graph_hooks}"),
    ]
    lines = [f"{name + ':':<11}{value}" for name, value in pairs]
    for fit in found.matrices:
        lines.append(f"{'matrix:':<11}{fit.matrix} {_answer(fit, in_full=len(found.matrices) == 1)}")
        if len(found.matrices) == 1:
            lines += [f"{'':<11}  {case.case}: {case.reason or 'fits'}" for case in fit.cases]
    return lines


def _answer(fit: MatrixFit, in_full: bool) -> str:
    """Whether a matrix fits; in short also why not, as its first reason."""
    if fit.fits:
        return f"fits, about {text.duration(fit.estimated_seconds)}"
    able = sum(case.reason is None for case in fit.cases)
    answer = f"does not fit, {able} of {text.count_of(len(fit.cases), 'case')} would run"
    first = next(case for case in fit.cases if case.reason is not None)
    return answer if in_full else f"{answer}: {first.case} {first.reason}"


def _fit(matrix: Matrix, host: Host, topology: tuple[Cpu, ...]) -> MatrixFit:
    plan = make_plan(matrix, host, topology, find_source())
    reasons = {cell.case: cell.skip_reason for cell in plan.cells}
    return MatrixFit(
        matrix=matrix.name,
        fits=not any(reasons.values()),
        estimated_seconds=plan.estimated_seconds,
        cases=tuple(CaseFit(case=case.name, reason=reasons[case.name]) for case in matrix.cases),
    )


def _cpu(host: Host) -> str:
    parts = [host.cpu_model, text.count_of(host.cpu_count, "logical CPU")]
    if host.numa_nodes is not None:
        parts.append(text.count_of(host.numa_nodes, "NUMA node"))
    return ", ".join([*parts, f"governor {host.governor or 'unknown'}"])


def _links(host: Host) -> str:
    nodes = " ".join("?" if gpu.numa_node is None else f"{gpu.numa_node}" for gpu in host.gpus)
    return f"{gpu_links(host)}; NUMA nodes {nodes}"


def _libraries(host: Host) -> list[str]:
    """CUDA, cuDNN and NCCL that torch brings."""
    names = {"cuda": "CUDA", "cudnn": "cuDNN", "nccl": "NCCL"}
    return [f"{shown} {host.versions.get(name) or 'none'}" for name, shown in names.items()]


def _loads(loads: tuple[GpuLoad, ...]) -> str:
    busy = [f"GPU {load.position} busy: {load.shown}" for load in loads if load.busy]
    return f"{'; '.join(busy)} (what is measured beside them is not this trainer's speed)" if busy else "idle"


def _noise(found: SpinNoise) -> str:
    judged = "within" if found.score <= NOISE_LIMIT else "above"
    return (
        f"{text.percent(found.score)} in {found.seconds:.1f} s of equal work on one CPU, {judged} {NOISE_LIMIT:.0%}"
        f"{'' if judged == 'within' else ': something else computes here'}"
    )


def _gpus(host: Host) -> str:
    names = ", ".join(f"{gpu.name} ({text.gib(gpu.memory_bytes)})" for gpu in host.gpus)
    if host.gpu_unusable is not None:
        return f"{names or 'none'}; unusable: {host.gpu_unusable}" if names else "none"
    unlisted = [ascii(entry) for entry in host.visible_gpus if host.is_unlisted(entry)]
    missing = f"; not listed: {', '.join(unlisted)} of CUDA_VISIBLE_DEVICES" if unlisted else ""
    return f"{names}; visible: {text.count_of(len(host.visible_gpus) - len(unlisted), 'GPU')}{missing}"


def _memory(host: Host) -> str:
    limit = "" if host.memory_limit_bytes is None else f", limited to {text.gib(host.memory_limit_bytes)}"
    return f"{text.gib(host.memory_bytes)}{limit}"
