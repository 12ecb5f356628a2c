"""Reads what a session left in its folder, and nothing else, and decides which cells have a number."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from repro.as_planned import PLACED, departure, shortened
from repro.attempts import last_ends, moved_cells
from repro.benchmarks import Benchmarks
from repro.ceiling import read_ceiling
from repro.errors import UsageError
from repro.evaluation import Evaluation, read_evaluation
from repro.events import Reason, Refusal
from repro.foreign_run import NO_CEILING, measure_foreign
from repro.host import Host
from repro.journal import Entry, read_journal
from repro.layout import (
    BENCHMARKS_FILE,
    HOST_FILE,
    JOURNAL_FILE,
    LOGS_DIR,
    PLAN_FILE,
    PROBES_DIR,
    RUNS_DIR,
    TELEMETRY_DIR,
    is_derived,
)
from repro.learning import Learning, learn
from repro.manifest import file_sha256, list_files
from repro.plan import Cell, Plan, asked_probes, case_of, check_plan
from repro.run_files import flatten, read_json
from repro.schema import read_canonical
from repro.session_probes import ProbeEvidence, log_file, read_probes, record_file, require_same_host
from repro.telemetry import Sample, read_telemetry
from repro.throughput import Throughput, measure
from unilab.names import COMMAND_FILE, CONFIG_FILE, EXIT_HOST_UNFIT, EXIT_OK, EXIT_USAGE, MANIFEST_FILE

# Reasons of the suite's own, beside those of `events.Reason`.
COPIED_EVENTS = "copied_events"
NO_EVALUATION = "no_evaluation"
EVENT_FILE_MARK = "tfevents"
STATUSES = (
    "measured",  # has a number that counts
    "discarded",  # a warm-up that ended well; its number does not count
    "refused",  # ended well, but no number may be given
    "failed",  # the trainer failed
    "host_unfit",  # the trainer says that this host cannot do it
    "timeout",  # ended by the suite
    "interrupted",  # ended by the user
    "not_run",  # the session ended before its turn
    "skipped",  # the plan knew that this host cannot hold it
)


@dataclass(frozen=True, eq=False)
class CellEvidence:
    """One planned cell and what became of it.

    Attributes:
        cell: The planned cell.
        status: One of `STATUSES`.
        reason: Why there is no number, or None.
        throughput: The measurement, or None.
        fingerprint: What must be equal within a group: commit, difference, source hash, versions. None without a run.
        has_run: Whether there is a run directory.
        learning: Its learning curves, or None where the matrix is not about learning.
        evaluation: What its policy does without exploration, or None where the matrix does not ask.
        ceiling: Env steps/s of the physics alone, or None.
        ceiling_reason: Why a ceiling that the matrix asks for is missing, or None.
        config: The run's resolved settings, or None where the run says nothing or is not the planned one.
        manifest: What it is made of, likewise.
    """

    cell: Cell
    status: str
    reason: str | None
    throughput: Throughput | None
    fingerprint: Mapping[str, str] | None
    has_run: bool
    learning: Learning | None = None
    evaluation: Evaluation | None = None
    ceiling: float | None = None
    ceiling_reason: str | None = None
    config: Mapping[str, Any] | None = None
    manifest: Mapping[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class Evidence:
    """A session's folder, read.

    Attributes:
        plan: The plan.
        host: Facts of the host.
        journal: What happened.
        cells: One entry for each planned cell, in order.
        inputs: SHA-256 of every raw file by its relative path.
        benchmarks: The micro-benchmarks, or None where the session ran none.
        probes: One entry for each probe of the matrix, in order.
        telemetry: What the host did while each cell ran, by cell.
    """

    plan: Plan
    host: Host
    journal: tuple[Entry, ...]
    cells: tuple[CellEvidence, ...]
    inputs: Mapping[str, str]
    benchmarks: Benchmarks | None = None
    probes: tuple[ProbeEvidence, ...] = ()
    telemetry: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)


def read_evidence(out_dir: Path) -> Evidence:
    """Read a session's folder.

    Raises:
        UsageError: If the plan, the host's facts or the journal are missing or malformed, or contradict each other.
    """
    plan, host = read_canonical(Plan, out_dir / PLAN_FILE), read_canonical(Host, out_dir / HOST_FILE)
    check_plan(plan)
    journal = read_journal(out_dir)
    ended = _ended(plan, journal)
    moved = moved_cells(out_dir, journal)
    _require_logs(out_dir, [cell for cell in plan.cells if cell.id in ended and cell.id not in moved])
    telemetry = {cell.id: _telemetry(out_dir, cell, ended.get(cell.id)) for cell in plan.cells if cell.id not in moved}
    started = {entry.cell for entry in journal if entry.event == "cell_started"}
    probes = read_probes(out_dir, plan, journal)
    require_same_host(probes, host)
    stop = _stop(journal, probes)
    cells = tuple(_judge(out_dir, plan, cell, cell.id in started, ended.get(cell.id), stop) for cell in plan.cells)
    inputs = hash_inputs(out_dir)
    benchmarks = _read_benchmarks(out_dir, plan, journal)
    cells = refuse_mixed_groups(refuse_copied_events(cells, inputs))
    return Evidence(plan, host, journal, cells, inputs, benchmarks, probes, telemetry)


def unowned(out_dir: Path, plan: Plan) -> list[str]:
    """Entries of the session's folders that belong to no planned cell or probe, one line each."""
    owned = {name for cell in plan.cells for name in (cell.run, cell.log, cell.stacks, cell.telemetry)}
    owned |= {name for probe in asked_probes(plan.matrix, plan.cells) for name in (record_file(probe), log_file(probe))}
    folders = (RUNS_DIR, LOGS_DIR, TELEMETRY_DIR, PROBES_DIR)
    strange = {path.relative_to(out_dir).as_posix() for part in folders for path in out_dir.glob(f"{part}/*")} - owned
    kinds = {name: "probe" if name.startswith(f"{PROBES_DIR}/") else "cell" for name in sorted(strange)}
    return [f"{name}: belongs to no {kind} of {PLAN_FILE}" for name, kind in kinds.items()]


def judge_cell(out_dir: Path, plan: Plan, cell: Cell, entry: Entry) -> CellEvidence:
    """Decide about one cell right after its end; the groups are not looked at."""
    return _judge(out_dir, plan, cell, True, entry, "")


def usage_stop(journal: tuple[Entry, ...]) -> str | None:
    """Id of the cell whose settings the trainer refused, which ended the session; None where there is none."""
    return next((cell for cell, entry in last_ends(journal).items() if entry.exit_code == EXIT_USAGE), None)


def _stop(journal: tuple[Entry, ...], probes: tuple[ProbeEvidence, ...]) -> str:
    """Why cells without a start had none."""
    failed = [probe.name for probe in probes if probe.status == "failed"]
    if failed:
        return f"probe {failed[0]} failed, so no run was started"
    refused = usage_stop(journal)
    if refused is not None:
        return f"the session stopped because the trainer refused the settings of {refused}"
    return "the session ended before its turn"


def hash_inputs(out_dir: Path) -> dict[str, str]:
    """SHA-256 of every file that is not derived from the others, by relative path."""
    return {name: file_sha256(out_dir / name) for name in list_files(out_dir)[0] if not is_derived(name)}


def _read_benchmarks(out_dir: Path, plan: Plan, journal: tuple[Entry, ...]) -> Benchmarks | None:
    """The micro-benchmarks of a session; None where its matrix asks for none, or it ended before they did."""
    events = {entry.event for entry in journal}
    asked, started = plan.matrix.benchmarks, "benchmarks_started" in events
    present = (out_dir / BENCHMARKS_FILE).exists()
    if started and not asked:
        raise UsageError(f"{JOURNAL_FILE} has micro-benchmarks, though the matrix does not ask for them")
    if asked and not started and "cell_started" in events:
        raise UsageError(f"{JOURNAL_FILE} has no micro-benchmarks, though the matrix asks for them")
    if present and not started:
        raise UsageError(f"{BENCHMARKS_FILE} is there, though {JOURNAL_FILE} says that no micro-benchmark was started")
    return read_canonical(Benchmarks, out_dir / BENCHMARKS_FILE) if present or "benchmarks_ended" in events else None


def _telemetry(out_dir: Path, cell: Cell, entry: Entry | None) -> tuple[Sample, ...]:
    path = out_dir / cell.telemetry
    if entry is not None and entry.samples is None and path.exists():
        raise UsageError(f"{cell.telemetry} is there, though {JOURNAL_FILE} says that its cell was not sampled")
    return read_telemetry(path, None if entry is None else entry.samples)


def _require_logs(out_dir: Path, cells: list[Cell]) -> None:
    missing = [cell.log for cell in cells if not (out_dir / cell.log).is_file()]
    if missing:
        raise UsageError(f"{missing[0]} is missing, though {JOURNAL_FILE} says that its cell ended")


def _ended(plan: Plan, journal: tuple[Entry, ...]) -> dict[str, Entry]:
    known = {cell.id for cell in plan.cells}
    for entry in journal:
        if entry.cell is not None and entry.cell not in known:
            raise UsageError(f"{JOURNAL_FILE} names cell {entry.cell!r}, which is not in {PLAN_FILE}")
    return last_ends(journal)


def _judge(out_dir: Path, plan: Plan, cell: Cell, started: bool, entry: Entry | None, stop: str) -> CellEvidence:
    without = partial(_without_number, out_dir, cell)
    if cell.skip_reason is not None:
        return without("skipped", cell.skip_reason)
    if not started:
        return without("not_run", stop)
    if entry is None:
        return without("interrupted", "the journal has no end of this cell")
    if entry.outcome != "exited":
        return without(str(entry.outcome), entry.reason)
    if entry.exit_code == EXIT_HOST_UNFIT and not cell.foreign:
        return without("host_unfit", entry.reason)
    if entry.exit_code != EXIT_OK:
        return without("failed", entry.reason)
    return _measured_foreign(out_dir, plan, cell) if cell.foreign else _measured(out_dir, plan, cell, entry)


def _without_number(out_dir: Path, cell: Cell, status: str, reason: str | None) -> CellEvidence:
    return CellEvidence(cell, status, reason, None, None, (out_dir / cell.run).is_dir())


def _measured_foreign(out_dir: Path, plan: Plan, cell: Cell) -> CellEvidence:
    """A run of another trainer: its events are all that is known of it."""
    status = "discarded" if cell.warmup else "measured"
    try:
        throughput = measure_foreign(out_dir / cell.run, case_of(plan.matrix, cell))
    except Refusal as refusal:
        return _without_number(out_dir, cell, "refused", f"{refusal.code}: {relative_text(str(refusal), out_dir)}")
    missing = NO_CEILING if plan.matrix.ceiling and not cell.warmup else None
    return CellEvidence(cell, status, None, throughput, None, has_run=True, ceiling_reason=missing)


def _measured(out_dir: Path, plan: Plan, cell: Cell, entry: Entry) -> CellEvidence:
    run_dir = out_dir / cell.run
    try:
        throughput = measure(run_dir)
        learning = learn(run_dir, throughput) if plan.matrix.learning else None
        config, manifest = read_json(run_dir / CONFIG_FILE), read_json(run_dir / MANIFEST_FILE)
        command = read_json(run_dir / COMMAND_FILE)
    except Refusal as refusal:
        return _without_number(out_dir, cell, "refused", f"{refusal.code}: {relative_text(str(refusal), out_dir)}")
    problem = departure(plan, cell, config, manifest, command)
    if problem is not None:
        return _without_number(out_dir, cell, "refused", problem)
    evaluation = None
    if plan.matrix.evaluate and not cell.warmup:
        try:
            evaluation = _evaluation(run_dir, plan, entry, throughput)
        except ValueError as error:
            reason = f"{NO_EVALUATION}: {relative_text(str(error), out_dir)}"
            return _without_number(out_dir, cell, "refused", reason)
    throughput = replace(throughput, notes=[relative_text(note, out_dir) for note in throughput.notes])
    ceiling, missing = None, None
    if plan.matrix.ceiling and not cell.warmup:
        ceiling, missing = read_ceiling(run_dir, cell, config, manifest, command)
    return CellEvidence(
        cell,
        "discarded" if cell.warmup else "measured",
        None,
        throughput,
        fingerprint(command),
        has_run=True,
        learning=learning,
        evaluation=evaluation,
        ceiling=ceiling,
        ceiling_reason=None if missing is None else relative_text(missing, out_dir),
        config=config,
        manifest=manifest,
    )


def _evaluation(run_dir: Path, plan: Plan, entry: Entry, throughput: Throughput) -> Evaluation:
    """The evaluation that a learning matrix asks for.

    Raises:
        ValueError: If there is none of this run's policy.
    """
    if entry.no_evaluation is not None:
        raise ValueError(entry.no_evaluation)
    return read_evaluation(run_dir, plan.matrix, int(throughput.steps[-1]))


def relative_text(text: str, out_dir: Path) -> str:
    """Replace the folder's path in a message, so that the same folder elsewhere gives the same text."""
    for prefix in sorted({str(out_dir), str(out_dir.absolute()), str(out_dir.resolve())}, key=len, reverse=True):
        text = text.replace(f"{prefix}/", "")
    return text


def refuse_copied_events(cells: tuple[CellEvidence, ...], inputs: Mapping[str, str]) -> tuple[CellEvidence, ...]:
    """Take the numbers of cells whose event files are the same, byte for byte: one of them is a copy."""
    owners: dict[str, list[str]] = {}
    for item in cells:
        for name, digest in inputs.items():
            if name.startswith(f"{item.cell.run}/") and EVENT_FILE_MARK in name:
                owners.setdefault(digest, []).append(item.cell.id)
    copied = {cell: same for same in owners.values() if len(same) > 1 for cell in same}
    return tuple(
        replace(
            item,
            status="refused",
            reason=f"{COPIED_EVENTS}: {' and '.join(copied[item.cell.id])} have the same event file",
            throughput=None,
        )
        if item.throughput is not None and item.cell.id in copied
        else item
        for item in cells
    )


def fingerprint(command: Mapping[str, Any]) -> dict[str, str]:
    """What `command.json` says about the code of a run, flat, as text."""
    found = {"source_sha256": json.dumps(command.get("source_sha256"))}
    for section in ("git", "versions"):
        inner = command.get(section)
        for key, value in sorted(inner.items()) if isinstance(inner, dict) else ():
            found[f"{section}.{key}"] = json.dumps(value, sort_keys=True)
    return found


def refuse_mixed_groups(cells: tuple[CellEvidence, ...]) -> tuple[CellEvidence, ...]:
    """Take the numbers of every case whose measured cells did not run the same code, versions and settings."""
    mixed: dict[str, str] = {}
    first: dict[str, CellEvidence] = {}
    for item in cells:
        if item.status != "measured" or item.fingerprint is None:
            continue
        other = first.setdefault(item.cell.case, item)
        difference = _difference(other.fingerprint or {}, item.fingerprint)
        difference = difference or _difference(_settings(other), _settings(item))
        if difference and item.cell.case not in mixed:
            mixed[item.cell.case] = f"{difference} in {other.cell.id} and {item.cell.id}"
    return tuple(
        replace(
            item,
            status="refused",
            reason=f"{Reason.MIXED_CODE}: group {item.cell.case} mixes {mixed[item.cell.case]}",
            throughput=None,
        )
        if item.status == "measured" and item.cell.case in mixed
        else item
        for item in cells
    )


def _settings(item: CellEvidence) -> dict[str, str]:
    """What a run was to do, flat, as text."""
    return {key: json.dumps(value) for key, value in flatten(item.config or {}).items() if key not in PLACED}


def mixed_cases(evidence: Evidence, one: str, other: str) -> str | None:
    """Say what differs between the code of two cases' measured cells, or None.

    Where cases are commits, only versions that both record must be equal; images are compared with what they hold.
    """
    if evidence.plan.images:
        return None
    a, b = (_first(evidence, case, "fingerprint") for case in (one, other))
    if evidence.plan.sources:
        common = {name for name in a.keys() & b.keys() if name.startswith("versions.")}
        a, b = ({name: side[name] for name in common} for side in (a, b))
    return _difference(a, b) if a and b else None


def differing_settings(evidence: Evidence) -> list[str]:
    """Settings that both of two compared commits or images have and that resolve differently; none of other cases."""
    if not evidence.plan.sources:
        return []
    a, b = (flatten(_first(evidence, case, "config")) for case in evidence.plan.sources)
    return [
        f"{key} {json.dumps(a[key])} and {json.dumps(b[key])}"
        for key in sorted(a.keys() & b.keys())
        if key not in PLACED and a[key] != b[key]
    ]


def _first(evidence: Evidence, case: str, field: Literal["fingerprint", "config"]) -> Mapping[str, Any]:
    """What the first measured run of a case recorded; empty without one."""
    runs = (item for item in evidence.cells if item.cell.case == case and item.status == "measured")
    found: Mapping[str, Any] | None = next((getattr(item, field) for item in runs), None)
    return found or {}


def _difference(a: Mapping[str, str], b: Mapping[str, str]) -> str | None:
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) != b.get(key):
            return f"{key} {shortened(a.get(key))} and {shortened(b.get(key))}"
    return None
