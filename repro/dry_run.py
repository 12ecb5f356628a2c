"""A plan as text: what would run, where, in which order, with which environment and command."""

from __future__ import annotations

from repro import benchmarks, text
from repro.plan import PROBE_ESTIMATE_SECONDS, Cell, Plan, shell_command
from repro.probe import LIMIT_SECONDS
from repro.session_probes import planned_probes, probe_variables

CEILING_LINE = "after each measured run its physics states are stepped again on the same CPUs: the physics ceiling"


def plan_lines(plan: Plan) -> list[str]:
    """Describe a plan: table of cells, changes of the environment, one command for each case that can run."""
    matrix = plan.matrix
    smoke = ", SMOKE (CPU, never a benchmark)" if matrix.smoke else ""
    cleared = ", ".join(plan.cleared_environment) or "nothing"
    return [
        f"matrix {matrix.name}{smoke}: {matrix.reason}",
        f"{text.count_of(len(plan.runnable), 'run')}, about {text.duration(plan.estimated_seconds)}, "
        f"at most {text.duration(plan.timeout_seconds)} each",
        *_probes(plan),
        *((f"micro-benchmarks first, at most {text.duration(benchmarks.LIMIT_SECONDS)}",) if matrix.benchmarks else ()),
        *([CEILING_LINE] if matrix.ceiling else []),
        *_containers(plan),
        "",
        _table(plan),
        "",
        f"taken out of the environment: {cleared}",
        *_commands(plan),
        *(f"skipped {cell.id}: {cell.skip_reason}" for cell in plan.cells if cell.skip_reason is not None),
    ]


def _probes(plan: Plan) -> list[str]:
    probes = planned_probes(plan)
    if not probes:
        return []
    estimate = PROBE_ESTIMATE_SECONDS[plan.matrix.smoke] * len(probes)
    return [
        f"before everything else {text.count_of(len(probes), 'probe')}, about {text.duration(estimate)}, at most "
        f"{text.duration(LIMIT_SECONDS)} each; no run is started where one fails:",
        *(f"  {probe.shell_command(probe_variables(plan))}" for probe in probes),
    ]


def _table(plan: Plan) -> str:
    rows = [
        [
            str(number),
            cell.id,
            "warm-up, discarded" if cell.warmup else "skipped" if cell.skip_reason else "measured",
            "auto" if cell.chooses_cpus else text.workers(cell.pools),
            "the trainer's choice" if cell.chooses_cpus else text.pools(cell.pools),
            ",".join(cell.gpus) or "none",
            cell.content_sha256[:12],
        ]
        for number, cell in enumerate(plan.cells, start=1)
    ]
    return text.plain_table(("#", "cell", "kind", "workers", "CPUs", "GPU", "content"), rows, "rllrlll")


def _containers(plan: Plan) -> list[str]:
    if plan.executor.kind == "local":
        return []
    sets = {cell.case: text.cpu_list(cell.cpuset) for cell in plan.runnable if cell.cpuset is not None}
    images = {f"{case} ": image for case, image in plan.images.items()} or {"": plan.executor}
    return [
        f"each run in a container of {', '.join(f'{case}{it.image} ({it.image_id})' for case, it in images.items())}; "
        f"CPUs: {', '.join(f'{case} {cpus}' for case, cpus in sets.items())}"
    ]


def _commands(plan: Plan) -> list[str]:
    first: dict[str, Cell] = {}
    for cell in plan.runnable:
        if not cell.warmup:
            first.setdefault(cell.case, cell)
    if not first:
        return []
    return [
        "command of each case's first run, in the report's folder; other runs differ in training.log_dir alone:",
        *(f"  {shell_command(plan, cell, cell.environment)}" for cell in first.values()),
    ]
