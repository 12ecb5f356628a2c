"""What this host can run, on one screen."""

from __future__ import annotations

from repro import text
from repro.host import Host
from repro.matrix import Matrix, builtin_names, load_matrix
from repro.place import Cpu
from repro.plan import make_plan
from repro.provenance import find_source, graph_hooks, trainer_package
from repro.schema import Strict


class MatrixFit(Strict):
    """Whether a matrix fits this host.

    Attributes:
        matrix: Its name.
        fits: Whether every case can be held.
        estimated_seconds: Expected duration of what can be held.
        reasons: Why cases are skipped, one line for each reason, with the cases that it holds for.
    """

    matrix: str
    fits: bool
    estimated_seconds: float
    reasons: tuple[str, ...]


class Diagnosis(Strict):
    """Everything the doctor says; `--json` prints it."""

    host: Host
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
        trainer=str(package) if package else "not importable",
        graph_hooks=graph_hooks(),
        matrices=tuple(_fit(item, host, topology) for item in matrices),
    )


def choose_matrix(host: Host) -> tuple[str, str]:
    """Name of the widest shipped matrix this host can run, and why it is that one."""
    if host.gpu_unusable is None:
        count = len(host.visible_gpus)
        return "dual" if count > 1 else "single", f"this host shows {text.count_of(count, 'GPU')}"
    return "smoke", f"no usable GPU: {host.gpu_unusable}"


def doctor_lines(found: Diagnosis) -> list[str]:
    """The diagnosis as text, one screen."""
    host = found.host
    pairs = [
        ("GPUs", _gpus(host)),
        ("driver", host.driver or "none"),
        ("CPU", f"{host.cpu_model}, {text.count_of(host.cpu_count, 'logical CPU')}"),
        ("allowed", f"CPU {text.cpu_list(host.allowed_cpus)}, {text.count_of(host.physical_cores, 'physical core')}"),
        ("CPU limit", "none" if host.cgroup_cpus is None else f"{host.cgroup_cpus:g} CPUs (control group)"),
        ("memory", _memory(host)),
        ("/dev/shm", text.gib(host.shm_bytes)),
        ("compiler", host.compiler or "none: torch.compile needs one on a GPU"),
        ("versions", ", ".join(f"{name} {host.versions[name] or 'missing'}" for name in ("python", "torch", "mujoco"))),
        ("trainer", f"{found.trainer} \N{MIDDLE DOT} graph hooks: {found.graph_hooks}"),
    ]
    lines = [f"{name + ':':<11}{value}" for name, value in pairs]
    for fit in found.matrices:
        answer = f"fits, about {text.duration(fit.estimated_seconds)}" if fit.fits else "does not fit"
        only = f": {fit.reasons[0]}" if len(fit.reasons) == 1 else ""
        lines.append(f"{'matrix:':<11}{fit.matrix} {answer}{only}")
        lines += [f"{'':<11}  {reason}" for reason in fit.reasons if not only]
    return lines


def _fit(matrix: Matrix, host: Host, topology: tuple[Cpu, ...]) -> MatrixFit:
    plan = make_plan(matrix, host, topology, find_source())
    skipped = {cell.case: cell.skip_reason for cell in plan.cells if cell.skip_reason is not None}
    cases = {reason: [name for name, own in skipped.items() if own == reason] for reason in skipped.values()}
    return MatrixFit(
        matrix=matrix.name,
        fits=not skipped,
        estimated_seconds=plan.estimated_seconds,
        reasons=tuple(
            f"{'every case' if len(names) == len(matrix.cases) > 1 else ', '.join(names)}: {reason}"
            for reason, names in cases.items()
        ),
    )


def _gpus(host: Host) -> str:
    names = ", ".join(f"{gpu.name} ({text.gib(gpu.memory_bytes)})" for gpu in host.gpus)
    if host.gpu_unusable is not None:
        return f"{names or 'none'}; unusable: {host.gpu_unusable}" if names else "none"
    return f"{names}; visible: {text.count_of(len(host.visible_gpus), 'GPU')}"


def _memory(host: Host) -> str:
    limit = "" if host.memory_limit_bytes is None else f", limited to {text.gib(host.memory_limit_bytes)}"
    return f"{text.gib(host.memory_bytes)}{limit}"
