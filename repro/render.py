"""Renders report.md: a view of the result, in which no number is computed that could be published."""

from __future__ import annotations

from importlib import resources
from typing import Any

import jinja2

from repro import text
from repro.attempts import attempt_notes, session_seconds
from repro.benchmarks import benchmark_table
from repro.cycle import bounding_stages, learner_table, missing_tags, pool_table
from repro.effects_section import effects_section
from repro.evidence import Evidence, differing_settings, mixed_cases
from repro.figures import RATES_FIGURE, STEPS_FIGURE
from repro.headline import METRIC_NAMES, ceiling_share, headline
from repro.host import Host, gpu_links
from repro.layout import CEILING_FILE, MANIFEST_FILE, RESULT_FILE, RUNS_DIR
from repro.learning_section import learning_context, learning_limit
from repro.matrix import Comparison, Matrix
from repro.noise_section import noise_sentence, steadiness_table
from repro.plan import VISIBLE_DEVICES, Cell, Plan, shell_command
from repro.probes_section import probes_section
from repro.provenance import Source
from repro.result import Result, missing_cells
from repro.scaling_section import scaling_section
from repro.settings_section import settings_section
from repro.telemetry_section import telemetry_section
from repro.text import count_of, markdown_table
from unilab.names import TRACE_FILE

WEAK_SCALING = (
    "Cases compare whole configurations. Where ranks are added, environments, batch, collectors and CPU quota grow "
    "with them: that is end-to-end weak scaling, neither the gain of one change nor the scaling of the GPU alone."
)

STRONG_SCALING = (
    "Cases compare whole configurations of one total of environments and one batch. Where ranks are added, each has a "
    "smaller part of both, and collectors and CPU quota grow: that is end-to-end strong scaling, neither the gain of "
    "one change nor the scaling of the GPU alone."
)


def render_report(evidence: Evidence, result: Result) -> str:
    """Return the text of report.md; the same folder gives the same bytes."""
    return _fill("report.md.j2", report_context(evidence, result))


def _fill(template: str, context: dict[str, Any]) -> str:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown, not HTML
    )
    source = (resources.files("repro") / "templates" / template).read_text(encoding="utf-8")
    return environment.from_string(source).render(context)


def report_context(evidence: Evidence, result: Result) -> dict[str, Any]:
    """Everything the template shows, as finished text; empty where a section has nothing to say."""
    matrix = evidence.plan.matrix
    measured = any(group.n for group in result.groups)
    return {
        "title": _title(evidence.plan, result.smoke),
        "headline": f"**{headline(result, matrix, evidence.plan.labels)}**",
        "smoke": result.smoke,
        "question": text.escaped(matrix.reason),
        "session": _session(evidence),
        "learning": _fill("learning.md.j2", learning_context(evidence, result)).strip() if result.learning else "",
        "groups": _groups(result, matrix.ceiling) if measured else "",
        "ceiling": matrix.ceiling,
        "comparisons": _comparisons(evidence, result) if measured and result.comparisons else "",
        "comparison_note": _comparison_note(evidence),
        "scaling": scaling_section(matrix, result),
        "effects": effects_section(matrix, result),
        "stages": "; ".join(bounding_stages(evidence).values()),
        "pool": pool_table(evidence) if measured else "",
        "learner": learner_table(evidence) if measured else "",
        "missing_stages": missing_tags(evidence),
        "rates_figure": RATES_FIGURE if measured and not matrix.learning else "",
        "steps_figure": STEPS_FIGURE if measured else "",
        "probes": probes_section(evidence),
        "problems": _problems(evidence),
        "runs": _runs(result, matrix.ceiling),
        "several_ranks": any(cell.world_size > 1 for cell in evidence.plan.runnable),
        "sensitivity": _sensitivity(evidence),
        "noise": noise_sentence(result.noise) if measured else "",
        "steadiness": steadiness_table(result),
        "telemetry": telemetry_section(evidence.telemetry),
        "benchmarks": _benchmarks(evidence),
        "notes": _notes(evidence),
        "settings": settings_section(evidence),
        "cases": _cases(evidence),
        "order": ", ".join(f"{c.id}{' (discarded)' if c.warmup else ''}" for c in evidence.plan.cells),
        "commands": _commands(evidence),
        "environment": _environment(evidence),
        "limits": _limits(evidence, result),
        "inputs": sorted(evidence.inputs.items()),
        "manifest": MANIFEST_FILE,
        "result": RESULT_FILE,
    }


def _title(plan: Plan, smoke: bool) -> str:
    matrix = plan.matrix
    compared = " against ".join(plan.labels.values()) or f"matrix {matrix.name}"
    return f"{'SMOKE: ' if smoke else ''}{matrix.algo} on {matrix.task} ({matrix.sim}), {compared}"


def _session(evidence: Evidence) -> str:
    took = f" in {text.duration(session_seconds(evidence.journal))}" if len(evidence.journal) > 1 else ""
    ran = sum(entry.event == "cell_ended" for entry in evidence.journal)
    return f"on {evidence.plan.created[:10]} (UTC){took}, {count_of(ran, 'run')} one after the other"


def _groups(result: Result, ceiling: bool) -> str:
    rows = [
        [
            group.case,
            str(group.n),
            text.rate(group.mean),
            text.rate(group.sd),
            text.interval(group.ci_low, group.ci_high),
            *([text.percent(ceiling_share(result, group.case))] if ceiling else []),
        ]
        for group in result.groups
    ]
    headers = ("case", "n", "geometric mean, env steps/s", "sd", "95 % interval", *(["ceiling share"] * ceiling))
    return markdown_table(headers, rows, "lrrrr" + "r" * ceiling)


def _comparisons(evidence: Evidence, result: Result) -> str:
    rows = [
        [
            f"{item.name}: {item.numerator} / {item.denominator}{_metric(item)}",
            text.ratio(found.ratio),
            text.interval(found.ci_low, found.ci_high, ".3f"),
            str(found.n),
            found.verdict.replace("_", " "),
        ]
        for found, item in zip(result.comparisons, evidence.plan.matrix.comparisons, strict=True)
    ]
    return markdown_table(("comparison", "ratio", "95 % interval", "n", "verdict"), rows, "lrrrl")


def _metric(item: Comparison) -> str:
    """What a comparison is about, where it is not env steps/s against an expected ratio of one."""
    metric = "" if item.metric == "steps_per_second" else f", {METRIC_NAMES[item.metric]}"
    return metric if item.expected == 1.0 else f"{metric} ({item.expected:g} expected)"


def _comparison_note(evidence: Evidence) -> str:
    matrix = evidence.plan.matrix
    paired = matrix.interval == "paired"
    kind = "the paired t, by repeat," if paired else "Welch's t"
    pairs = " of the runs whose repeat has a number in both cases" if paired else ""
    plain = all(item.metric == "steps_per_second" and item.expected == 1.0 for item in matrix.comparisons)
    logs, loss = ("steps/s", "A loss") if plain else ("values", "A loss against the expected ratio")
    return (
        f"The ratio is that of the geometric means{pairs}; its interval is {kind} on log {logs}. "
        f"{loss} within {text.percent(matrix.margin)} is tolerated."
    )


def _runs(result: Result, ceiling: bool) -> str:
    headers = (
        *("run", "status", "env steps/s", "tail mean of `Perf/total_fps`", "rows/s"),
        *("physics share", "exposed ms", "learner ms", "start-up s"),
        *(["ceiling share"] * ceiling),
    )
    rows = [
        [
            *(cell.id, cell.status.replace("_", " "), text.rate(cell.steps_per_second)),
            *(text.rate(cell.tail_mean_total_fps), text.rate(cell.learner_rows_per_second)),
            *(text.percent(cell.physics_fraction), text.number(cell.exposed_ms), text.number(cell.learner_cycle_ms)),
            text.number(cell.startup_seconds, 1),
            *([text.percent(cell.ceiling_share)] if ceiling else []),
        ]
        for cell in result.cells
    ]
    return markdown_table(headers, rows, "llrrrrrrr" + "r" * ceiling)


def _sensitivity(evidence: Evidence) -> str:
    found = [(item.cell.id, item.throughput) for item in evidence.cells if item.status == "measured"]
    rows = [
        [name, *(text.rate(value) for _, value in sorted(throughput.window_sensitivity.items()))]
        for name, throughput in found
        if throughput is not None
    ]
    return markdown_table(("run", "last 25 %", "last 50 %", "last 75 %"), rows, "lrrr") if rows else ""


def _problems(evidence: Evidence) -> str:
    rows = [
        [item.cell.id, item.status.replace("_", " "), (item.reason or text.NOTHING) + _stacks(evidence, item.cell)]
        for item in missing_cells(evidence)
    ]
    return markdown_table(("cell", "status", "reason"), rows, "lll") if rows else ""


def _stacks(evidence: Evidence, cell: Cell) -> str:
    """A link to where the processes of a cell stood, where that is known."""
    return f" ([stacks]({cell.stacks}))" if cell.stacks in evidence.inputs else ""


def _benchmarks(evidence: Evidence) -> str:
    found = evidence.benchmarks
    if found is None:
        return ""
    return benchmark_table(found) if found.reason is None else f"None: {found.reason}."


def _notes(evidence: Evidence) -> list[str]:
    notes = [f"{item.cell.id}: {note}" for item in evidence.cells if item.throughput for note in item.throughput.notes]
    notes += [
        f"{item.cell.id}: no share of the physics ceiling: {item.ceiling_reason}"
        for item in evidence.cells
        if item.ceiling_reason is not None
    ]
    notes += attempt_notes(evidence.journal)
    for item in evidence.plan.matrix.comparisons:
        difference = mixed_cases(evidence, item.denominator, item.numerator)
        if difference is not None:
            notes.append(f"{item.name}: no ratio, since the two cases ran different code: {difference}")
    notes += side_notes(evidence)
    traces = [name for name in evidence.inputs if name.startswith(f"{RUNS_DIR}/") and name.endswith(f"/{TRACE_FILE}")]
    if traces:
        notes.append(
            f"{count_of(len(traces), 'run')} wrote a timeline, `{TRACE_FILE}` beside its events, for ui.perfetto.dev; "
            "rates include what writing it costs."
        )
    cleared = evidence.plan.cleared_environment
    if cleared:
        notes.append(f"Taken out of the inherited environment of every run: {', '.join(cleared)}.")
    changed = sum(entry.redacted is not None for entry in evidence.journal)
    if changed:
        notes.append(
            f"Names of people and machines and absolute paths were replaced in files of {count_of(changed, 'run')}; "
            "the journal lists them."
        )
    return notes


def side_notes(evidence: Evidence) -> list[str]:
    """What a reader must know about two commits or images that are compared; empty where cases are neither."""
    found = differing_settings(evidence)
    what = "images" if evidence.plan.images else "commits"
    other = f"The {what} do not do the same work: settings of a and b are {'; '.join(found)}."
    return [*evidence.plan.remarks, *([other] if found else [])]


def _cases(evidence: Evidence) -> str:
    rows = []
    for case in evidence.plan.matrix.cases:
        cell = next(cell for cell in evidence.plan.cells if cell.case == case.name)
        where = f"CPU {text.pools(cell.pools)}" if cell.pools else "this host cannot hold it"
        if cell.chooses_cpus:
            where = "the trainer's choice"
        if cell.cpuset is not None:
            where += f", container {text.cpu_list(cell.cpuset)}"
        gpus = ", ".join(map(str, case.gpus)) or "none"
        asked = f"{case.workers}" if case.pools == 1 else f"{case.pools} pools of {case.workers}"
        rows.append([case.name, gpus, asked, text.workers(cell.pools), where, text.escaped(case.reason)])
    headers = ("case", "GPU positions", "workers asked", "workers", "workers' CPUs", "why")
    return markdown_table(headers, rows, "lrrrll")


def _commands(evidence: Evidence) -> list[str]:
    lines = []
    ran = {item.cell.id for item in evidence.cells if item.status not in ("skipped", "not_run")}
    planned = [cell for cell in evidence.plan.cells if cell.id in ran and not cell.warmup]
    for case in evidence.plan.matrix.cases:
        cell = next((cell for cell in planned if cell.case == case.name), None)
        if cell is None:
            continue
        uuids, positions = ",".join(cell.gpus), ",".join(map(str, case.gpus))  # positions hold on other hosts too
        variables = {
            name: positions if name == VISIBLE_DEVICES and value == uuids else value
            for name, value in cell.environment.items()
        }
        lines.append(shell_command(evidence.plan, cell, variables))
    return lines


def _environment(evidence: Evidence) -> str:
    host, own, sources = evidence.host, evidence.plan.source, evidence.plan.sources
    rows = [
        *([f"code of {case}", _code(source)] for case, source in sources.items()),
        ["code of the suite" if sources else "code", _code(own)],
        *([["trainer", own.trainer]] if own.trainer and not sources else []),
        *_containers(evidence.plan),
        ["CPU", f"{host.cpu_model}, {count_of(host.cpu_count, 'logical CPU')}"],
        ["allowed CPUs", f"{text.cpu_list(host.allowed_cpus)} ({count_of(host.physical_cores, 'physical core')})"],
        ["sockets, NUMA nodes", f"{_known(host.sockets)}, {_known(host.numa_nodes)} among the allowed CPUs"],
        ["frequency governor", _known(host.governor)],
        ["CPU time limit", "none" if host.cgroup_cpus is None else f"{host.cgroup_cpus:g} CPUs (control group)"],
        ["memory", _memory(host)],
        ["GPUs", ", ".join(f"{gpu.name} ({text.gib(gpu.memory_bytes)})" for gpu in host.gpus) or "none"],
        *([["GPU clock, NUMA node", _gpu_places(host)]] if host.gpus else []),
        *([["GPU links", gpu_links(host)]] if host.gpu_links else []),
        ["GPU driver", host.driver or "none"],
        ["system", host.platform],
        ["compiler", host.compiler or "none"],
        *([name, version or "not installed"] for name, version in sorted(host.versions.items())),
        *([f"${name}", value] for name, value in sorted(host.environment.items())),
    ]
    return markdown_table(("what", "value"), rows, "ll")


def _gpu_places(host: Host) -> str:
    """Highest clock and NUMA node of every GPU, as the driver and the kernel say."""
    return ", ".join(f"{_known(gpu.max_sm_clock_mhz)} MHz at node {_known(gpu.numa_node)}" for gpu in host.gpus)


def _known(value: int | str | None) -> str:
    return "unknown" if value is None else f"{value}"


def _containers(plan: Plan) -> list[list[str]]:
    """The images of a session whose cells ran in containers."""
    if plan.images:  # a derived image has the commit of the one below it, whatever it changed
        sources = {case: plan.sources[case].sources_sha256[:12] for case in plan.images}
        return [
            [f"image of {case}", f"{image.image} {image.image_id}, sources {sources[case]}…"]
            for case, image in plan.images.items()
        ]
    executor = plan.executor
    return [["image of every run", f"{executor.image} {executor.image_id}"]] if executor.kind == "docker" else []


def _code(source: Source) -> str:
    if source.commit is None:
        return f"commit unknown, sources {source.sources_sha256[:12]}…"
    if not source.dirty:
        return f"commit {source.commit}"
    return f"commit {source.commit} with changes (difference {(source.diff_sha256 or 'unknown')[:12]}…)"


def _memory(host: Host) -> str:
    limit = "" if host.memory_limit_bytes is None else f", limited to {text.gib(host.memory_limit_bytes)}"
    return f"{text.gib(host.memory_bytes)}{limit}, /dev/shm {text.gib(host.shm_bytes)}"


def _limits(evidence: Evidence, result: Result) -> list[str]:
    matrix = evidence.plan.matrix
    limits = []
    if result.smoke:
        limits.append(
            "SMOKE: eager CPU execution with small networks and batches. No rate here says anything about a GPU."
        )
    limits += [
        learning_limit(matrix, result),
        *([STRONG_SCALING if matrix.strong else WEAK_SCALING] if _scales(matrix) else []),
        "One host, one session. Absolute rates drift with the host; compare ratios within one report.",
        *([_interval_limit(matrix)] if any(group.n > 1 for group in result.groups) else []),
        *_not_looked_at(evidence),
    ]
    sources = list(evidence.plan.sources.values()) or [evidence.plan.source]
    if any(source.dirty for source in sources):
        limits.append("The sources had uncommitted changes: the commit alone does not reproduce these numbers.")
    if any(source.commit is None for source in sources):
        limits.append("The commit is unknown; the source hash is all that identifies the code.")
    return limits


def _not_looked_at(evidence: Evidence) -> list[str]:
    """What of the ceiling and the correctness probe is missing, as one sentence or none."""
    missing = []
    if not any(f"{item.cell.run}/{CEILING_FILE}" in evidence.inputs for item in evidence.cells):
        missing.append("the physics ceiling of the host was not measured")
    if not any(probe.name == "correctness" and probe.findings is not None for probe in evidence.probes):
        missing.append("no correctness probe ran")
    sentence = " and ".join(missing)
    return [f"{sentence[0].upper()}{sentence[1:]}."] if missing else []


def _scales(matrix: Matrix) -> bool:
    """Whether a case has several GPUs, or cases differ in how many they have."""
    counts = {len(case.gpus) for case in matrix.cases}
    return len(counts) > 1 or max(counts) > 1


def _interval_limit(matrix: Matrix) -> str:
    return (
        f"{count_of(matrix.repeats, 'run')} of each case: the 95 % intervals are Student t intervals of log rates and "
        "assume independent runs."
    )
