"""The probes of a session: run before everything else, kept in its folder, read again by every report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from repro.errors import UsageError
from repro.host import Host
from repro.journal import Entry, Journal, read_journal
from repro.launch import Runner, cell_environment
from repro.layout import HOST_FILE, JOURNAL_FILE, LOGS_DIR, PROBES_DIR
from repro.matrix import ProbeName
from repro.plan import Cell, Plan, asked_probes, same_words
from repro.probe import Asked, Findings, Probed, contradiction, run_probe
from repro.redact import Redactor
from repro.schema import Strict, canonical_json, parse_model, read_canonical
from repro.text import duration

SMOKE_RANKS = 2  # the fewest that communicate

Status = Literal["passed", "failed", "interrupted", "not_run"]


class ProbeRecord(Strict):
    """`probes/<name>.json`: what a probe found, or the reason why it found nothing."""

    schema_version: Literal[1] = 1
    findings: Findings | None = None
    reason: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.findings is None) == (self.reason is None):
            raise ValueError("it must hold findings or a reason, and not both")
        return self


@dataclass(frozen=True)
class ProbeEvidence:
    """A probe of the matrix and what became of it.

    Attributes:
        name: The probe.
        status: How it ended.
        detail: What it found, or why it found nothing.
        findings: What it wrote, or None.
    """

    name: ProbeName
    status: Status
    detail: str
    findings: Findings | None = None


def record_file(probe: str) -> str:
    """What is kept of a probe, relative to the report's folder."""
    return f"{PROBES_DIR}/{probe}.json"


def log_file(probe: str) -> str:
    """Its log, relative to the report's folder; no cell's id is like it."""
    return f"{LOGS_DIR}/probe_{probe}.log"


def planned_probes(plan: Plan) -> tuple[Asked, ...]:
    """The probes of a plan, with the ranks of the widest case that the host can hold.

    `correctness` looks at the learner of the matrix; objectives are compiled where runs compile them: on a GPU.
    """
    smoke = plan.matrix.smoke
    own = [cell.world_size for cell in plan.runnable if not cell.foreign]
    ranks = SMOKE_RANKS if smoke else max(own, default=1)
    return tuple(
        Asked(name, ranks, smoke, not smoke, plan.matrix.algo) if name == "correctness" else Asked(name, ranks, smoke)
        for name in asked_probes(plan.matrix, plan.cells)
    )


def probe_variables(plan: Plan) -> dict[str, str]:
    """Variables set for the probes: those of the widest case of this trainer."""
    return _widest(plan).environment


def run_probes(
    plan: Plan,
    journal: Journal,
    out_dir: Path,
    say: Callable[[str], None],
    inherited: Mapping[str, str],
    runner: Callable[[Cell], Runner],
    root: Path | None,
) -> Status:
    """Run the probes of a matrix and keep what they found; those that passed before a session was resumed stay.

    Args:
        plan: The plan.
        journal: Gets every start and end.
        out_dir: The report folder.
        say: Shows a line.
        inherited: The environment that cells inherit.
        runner: Gives what runs a cell's commands, here the widest cell's.
        root: Folder that the trainer is imported from; None takes this installation's.

    Returns:
        `passed`, also without a probe; `failed` if any did; `interrupted` as soon as one was.

    Raises:
        UsageError: If one says that it ran elsewhere than `host.json` does.
    """
    status: Status = "passed"
    passed = {probe.name for probe in read_probes(out_dir, plan, read_journal(out_dir)) if probe.status == "passed"}
    widest = _widest(plan)
    environment = cell_environment(inherited, widest, root)
    for asked in planned_probes(plan):
        if asked.probe in passed:
            continue
        evidence, seconds = _run_one(asked, journal, out_dir, environment, runner(widest))
        require_same_host((evidence,), read_canonical(Host, out_dir / HOST_FILE))
        say(f"probe {asked.probe}: {evidence.status}, {evidence.detail} ({duration(seconds)})")
        if evidence.status == "interrupted":
            return "interrupted"
        status = "failed" if evidence.status == "failed" else status
    return status


def _run_one(
    asked: Asked, journal: Journal, out_dir: Path, environment: Mapping[str, str], run: Runner
) -> tuple[ProbeEvidence, float]:
    """Run a probe and keep what it found; what became of it, and the seconds it took."""
    journal.write("probe_started", probe=asked.probe)
    log = out_dir / log_file(asked.probe)
    found = run_probe(asked, environment, out_dir, log, run=run)
    Redactor(out_dir).file(log)
    record = _keep(out_dir, asked, found)
    entry = journal.write(
        "probe_ended",
        probe=asked.probe,
        outcome=found.ended.outcome,
        exit_code=found.ended.exit_code,
        seconds=found.ended.seconds,
        reason=found.reason,
    )
    return _evidence(asked.probe, record, entry), found.ended.seconds


def read_probes(out_dir: Path, plan: Plan, journal: tuple[Entry, ...]) -> tuple[ProbeEvidence, ...]:
    """Read what the probes of a session left.

    Raises:
        UsageError: If plan, journal and files contradict each other, or a file is malformed.
    """
    started = [entry.probe for entry in journal if entry.event == "probe_started"]
    last = {entry.probe: entry for entry in journal if entry.probe is not None}
    ended = {probe: entry for probe, entry in last.items() if entry.event == "probe_ended"}
    strange = [name for name in started if name not in asked_probes(plan.matrix, plan.cells)]
    if strange:
        raise UsageError(f"{JOURNAL_FILE} has probe {strange[0]!r}, though the plan does not ask for it")
    found = tuple(
        _read(out_dir, asked, asked.probe in started, ended.get(asked.probe)) for asked in planned_probes(plan)
    )
    unpassed = next((probe for probe in found if probe.status != "passed"), None)
    late = next((entry.event for entry in journal if entry.event in ("benchmarks_started", "cell_started")), None)
    if unpassed is not None and late is not None:
        raise UsageError(
            f"{JOURNAL_FILE} has {late}, though probe {unpassed.name!r} {unpassed.status.replace('_', ' ')}"
        )
    return found


def require_same_host(probes: tuple[ProbeEvidence, ...], host: Host) -> None:
    """Refuse a probe with another torch, driver or GPU than the session's, as far as both are recorded.

    CUDA and NCCL are left out: a probe names those torch was built with, the host the packages that are installed.

    Raises:
        UsageError: Naming the first difference.
    """
    recorded = {**host.versions, "driver": host.driver, "cuda": None, "nccl": None}
    gpus = dict.fromkeys(gpu.name for gpu in host.gpus)
    for name, found in ((record_file(probe.name), probe.findings) for probe in probes):
        for what, version in found.versions.items() if found is not None else ():
            said = recorded.get(what)
            if said is not None and not _same_version(version, said):
                raise UsageError(f"{name} is of {what} {version}, {HOST_FILE} says {said}")
        for device in found.devices if found is not None and not found.smoke else ():
            if not any(same_words([gpu], [device.partition(" MIG ")[0]]) for gpu in gpus):
                raise UsageError(f"{name} is of GPU {device}, {HOST_FILE} says {', '.join(gpus) or 'none'}")


def _same_version(one: str, other: str) -> bool:
    """Builds, as in `2.11.0+cu130`, and patches of a package, as in `2.26.2.post1`, are not named everywhere."""
    short, long = sorted((one.partition("+")[0], other.partition("+")[0]), key=len)
    return f"{long}.".startswith(f"{short}.")


def _widest(plan: Plan) -> Cell:
    """The cell whose place probes take; where cases are commits or images, it is of the last one, the change."""
    last = plan.matrix.cases[-1].name
    own = [cell for cell in plan.runnable if not cell.foreign and (not plan.sources or cell.case == last)]
    return max(own or plan.cells, key=lambda cell: cell.world_size)


def _keep(out_dir: Path, asked: Asked, found: Probed) -> ProbeRecord:
    """Write the record of a probe, without names and paths."""
    path = out_dir / record_file(asked.probe)
    path.parent.mkdir(exist_ok=True)
    record = ProbeRecord(findings=found.findings, reason=found.reason)
    content = canonical_json(Redactor(out_dir).value(record.model_dump(mode="json")))
    path.write_text(content, encoding="utf-8")
    return parse_model(ProbeRecord, content, record_file(asked.probe))


def _read(out_dir: Path, asked: Asked, started: bool, entry: Entry | None) -> ProbeEvidence:
    name = record_file(asked.probe)
    if not started:
        if (out_dir / name).exists():
            raise UsageError(f"{name} is there, though {JOURNAL_FILE} says that the probe was not started")
        return ProbeEvidence(asked.probe, "not_run", "the session ended before its turn")
    if entry is None:
        return ProbeEvidence(asked.probe, "interrupted", "the journal has no end of this probe")
    if not (out_dir / log_file(asked.probe)).is_file():
        raise UsageError(f"{log_file(asked.probe)} is missing, though {JOURNAL_FILE} says that its probe ended")
    record = read_canonical(ProbeRecord, out_dir / name, name)
    problem = _problem(asked, record, entry)
    if problem is not None:
        raise UsageError(f"{name}: {problem}")
    return _evidence(asked.probe, record, entry)


def _problem(asked: Asked, record: ProbeRecord, entry: Entry) -> str | None:
    """Why this record cannot be that of the probe that the journal tells of, or None."""
    found = record.findings
    if found is None:
        return None if record.reason == entry.reason else f"its reason is not that of {JOURNAL_FILE}"
    if entry.outcome != "exited":
        return f"it holds findings, though {JOURNAL_FILE} says {entry.outcome}"
    return asked.deviation(found) or contradiction(found, entry.exit_code)


def _evidence(name: ProbeName, record: ProbeRecord, entry: Entry) -> ProbeEvidence:
    if record.findings is None:
        status: Status = "interrupted" if entry.outcome == "interrupted" else "failed"
        return ProbeEvidence(name, status, record.reason or "")
    return ProbeEvidence(
        name, "passed" if record.findings.passed else "failed", record.findings.detail, record.findings
    )
