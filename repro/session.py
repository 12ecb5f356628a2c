"""Runs the cells of a plan one after the other into a report folder."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from repro.attempts import supersede
from repro.benchmarks import leave_out, run_benchmarks
from repro.ceiling import record_ceiling
from repro.clean import clean_cell
from repro.errors import UsageError
from repro.evaluation import models_folder, put_models_aside, put_models_beside, record_evaluation
from repro.evidence import CellEvidence, Evidence, judge_cell, usage_stop
from repro.foreign_run import foreign_command, foreign_environment
from repro.host import Host, gpu_label
from repro.journal import Journal, Outcome, read_journal
from repro.late import examine
from repro.launch import GRACE_SECONDS, Ended, Runner, cell_environment
from repro.layout import HOST_FILE, JOURNAL_FILE, LOGS_DIR, PLAN_FILE, RUNS_DIR
from repro.live import SessionView
from repro.matrix import AB_MATRIX
from repro.plan import Cell, Executor, Plan
from repro.redact import Redactor
from repro.result import Result, missing_cells
from repro.schema import canonical_json
from repro.session_probes import log_file, run_probes
from repro.telemetry import Sampler
from unilab.names import EXIT_FAILED, EXIT_HOST_UNFIT, EXIT_INCOMPLETE, EXIT_OK, EXIT_USAGE

REPORTS = Path("reports")


def default_out_dir(plan: Plan, host: Host) -> Path:
    """``reports/<date>_<matrix>_<commit>``; with GPUs their short name and number stand for the matrix, or behind it
    where it is about learning, commits or images. Of these two it has both. The name of a smoke run says so: git leaves
    it alone.
    """
    ranks = max(cell.world_size for cell in plan.cells)
    uses_gpu = not plan.matrix.smoke and any(cell.gpus for cell in plan.cells)
    what = gpu_label(host.gpus, ranks) if uses_gpu and host.gpus else plan.matrix.name
    if (plan.matrix.learning or plan.sources) and what != plan.matrix.name:
        what = f"{plan.matrix.name}_{what}"
    if plan.matrix.smoke and "smoke" not in what:
        what = f"{what}_smoke"
    code = "_".join(source.short for source in plan.sources.values()) or plan.source.short
    return REPORTS / f"{plan.created[:10]}_{what}_{code}"


def create_out_dir(wanted: Path) -> Path:
    """Make the folder, or the first of ``-2``, ``-3`` … that is free, and in it `runs/`: what makes that has it.

    A folder with content is never used again, nor one beside which weights of an earlier report lie.

    Raises:
        UsageError: If it cannot be made, or its path has no last name to number or is not printable text.
    """
    if wanted.name in ("", "..") or not str(wanted).isprintable():
        raise UsageError(f"--out {str(wanted)!a}: give the path of a new folder, for example {REPORTS / 'mine'}")
    number = 1
    while True:
        path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        number += 1
        if models_folder(path).exists():  # weights of a report that lies elsewhere now
            continue
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not any(path.iterdir()):
                (path / RUNS_DIR).mkdir()
                return path
        except FileExistsError:  # no folder, or another session was faster
            continue
        except OSError as error:
            raise UsageError(f"cannot make the report folder {path}: {error.strerror}; choose another --out") from None


def start_session(plan: Plan, host: Host, out_dir: Path) -> Journal:
    """Write what is known before the first cell into a folder of `create_out_dir`, and begin the journal."""
    (out_dir / LOGS_DIR).mkdir()
    (out_dir / PLAN_FILE).write_text(canonical_json(published_plan(plan, Redactor(out_dir))), encoding="utf-8")
    (out_dir / HOST_FILE).write_text(canonical_json(host), encoding="utf-8")
    assert not (out_dir / JOURNAL_FILE).exists()
    journal = Journal(out_dir)
    journal.write("session_started")
    return journal


def published_plan(plan: Plan, redactor: Redactor) -> Plan:
    """The plan with names and paths replaced in everything a user typed: overrides and variables."""

    def variables(environment: dict[str, str]) -> dict[str, str]:
        return {name: redactor.text(value) for name, value in environment.items()}

    def words(texts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(redactor.text(word) for word in texts)

    cells = tuple(
        cell.model_copy(update={"arguments": words(cell.arguments), "environment": variables(cell.environment)})
        for cell in plan.cells
    )
    cases = tuple(
        case.model_copy(
            update={
                "overrides": words(case.overrides),
                "command": words(case.command),
                "environment": variables(case.environment),
            }
        )
        for case in plan.matrix.cases
    )
    matrix = plan.matrix.model_copy(update={"cases": cases, "overrides": words(plan.matrix.overrides)})

    def named(executor: Executor) -> Executor:
        return executor.model_copy(update={"image": executor.image and redactor.text(executor.image)})

    images = {case: named(image) for case, image in plan.images.items()}
    own = {"cells": cells, "matrix": matrix, "executor": named(plan.executor), "images": images}
    return plan.model_copy(update=own)


@dataclass(frozen=True)
class Session:
    """Where a session is kept, and how its cells are started.

    Attributes:
        plan: The plan.
        journal: Gets every start and end.
        out_dir: The report folder.
        trainer: Start of every command.
        inherited: The environment that cells inherit.
        runner: Gives what runs a cell's commands.
        roots: Folder that a case imports the trainer from, where it is not this installation's. Probes take that of
            the last case.
    """

    plan: Plan
    journal: Journal
    out_dir: Path
    trainer: Sequence[str]
    inherited: Mapping[str, str]
    runner: Callable[[Cell], Runner]
    roots: Mapping[str, Path]

    def command(self, cell: Cell) -> list[str]:
        """What is started for a cell."""
        if cell.foreign:
            return foreign_command(self.plan, cell, self.out_dir, Path.cwd())
        return [*self.trainer, *cell.arguments]

    def environment(self, cell: Cell) -> dict[str, str]:
        """The whole environment of a cell."""
        if cell.foreign:
            return foreign_environment(self.inherited, cell)
        return cell_environment(self.inherited, cell, self.roots.get(cell.case))


def run_cells(session: Session, view: SessionView, *, fail_fast: bool, finished: Mapping[str, CellEvidence]) -> bool:
    """Run the probes, then every cell that the host can hold.

    A failed probe ends the session, and so do settings that the trainer refuses (exit code 2).

    Args:
        session: The session.
        view: Shows what happens.
        fail_fast: Stop after the first cell that gives no number.
        finished: Cells of a resumed session that are not run again, by id.

    Returns:
        Whether the session was interrupted.
    """
    with view:
        try:
            interrupted = _run_all(session, view, fail_fast, finished)
        except KeyboardInterrupt:
            interrupted = True
        session.journal.write("session_interrupted" if interrupted else "session_ended")
    return interrupted


def _run_all(session: Session, view: SessionView, fail_fast: bool, finished: Mapping[str, CellEvidence]) -> bool:
    """Run probes, micro-benchmarks and cells; whether one of them was interrupted."""
    plan, out_dir = session.plan, session.out_dir
    root = session.roots.get(plan.matrix.cases[-1].name)
    probed = run_probes(plan, session.journal, out_dir, view.note, session.inherited, session.runner, root)
    if probed != "passed":
        return probed == "interrupted"
    if _run_benchmarks(plan, session.journal, out_dir, session.inherited) == "interrupted":
        return True
    for cell in plan.runnable:
        if cell.id in finished:
            view.kept(finished[cell.id])
            continue
        _put_aside(out_dir, cell)
        view.started(cell)
        evidence, ended, interrupted = _run_one(session, cell)
        view.ended(evidence, ended.seconds)
        if interrupted:
            return True
        if ended.exit_code == EXIT_USAGE or (fail_fast and evidence.throughput is None):
            break
    return False


def _run_benchmarks(plan: Plan, journal: Journal, out_dir: Path, inherited: Mapping[str, str]) -> Outcome | None:
    """Run the micro-benchmarks on the devices of the first cell; return how their process ended.

    None where the matrix asks for none, or an earlier part of the session ran them.
    """
    if not plan.matrix.benchmarks or any(entry.event == "benchmarks_ended" for entry in read_journal(out_dir)):
        return None
    journal.write("benchmarks_started")
    ended = None
    if plan.executor.kind == "docker":
        leave_out(out_dir, "runs are in containers, and their image holds no benchmarks")
    else:
        ended = run_benchmarks(out_dir, cell_environment(inherited, plan.runnable[0]))
    journal.write("benchmarks_ended", seconds=ended.seconds if ended is not None else None)
    return ended.outcome if ended is not None else None


def _put_aside(out_dir: Path, cell: Cell) -> None:
    """Keep what an earlier attempt of a cell left; one that was cut off still holds weights, names and paths."""
    put_models_beside(out_dir, cell)
    clean_cell(out_dir, cell)
    kept = supersede(out_dir, cell, read_journal(out_dir))
    if kept is not None:
        put_models_aside(out_dir, cell, kept.name)


def _run_one(session: Session, cell: Cell) -> tuple[CellEvidence, Ended, bool]:
    """Run a cell and what belongs to it; how it is judged, how it ended, and whether any of it was interrupted."""
    plan, journal, out_dir = session.plan, session.journal, session.out_dir
    environment, run, grace = session.environment(cell), session.runner(cell), GRACE_SECONDS
    journal.write("cell_started", cell=cell.id)
    log = out_dir / cell.log
    late = partial(examine, run_dir=out_dir / cell.run, log=log, stacks=out_dir / cell.stacks)
    gpus = () if plan.matrix.smoke else cell.gpus
    descends = plan.executor.kind == "local"
    with Sampler(out_dir / cell.telemetry, cell.cpu_ids or (), gpus, descends=descends) as sampler:
        ended = run(session.command(cell), environment, out_dir, log, plan.timeout_seconds, grace, late)
    interrupted = ended.outcome == "interrupted"
    if plan.matrix.ceiling and not cell.foreign:
        interrupted |= record_ceiling(cell, ended, environment, out_dir, grace, run)
    no_evaluation = None
    if plan.matrix.evaluate:
        no_evaluation, stopped = record_evaluation(plan.matrix, cell, ended, environment, out_dir, grace, run)
        interrupted |= stopped
    with contextlib.suppress(OSError):  # tried again when the page is written; the run was good all the same
        put_models_beside(out_dir, cell)
    redacted = clean_cell(out_dir, cell)
    entry = journal.write(
        "cell_ended",
        cell=cell.id,
        outcome=ended.outcome,
        exit_code=ended.exit_code,
        seconds=ended.seconds,
        reason=ended.reason,
        redacted=redacted or None,
        samples=sampler.count,
        no_evaluation=no_evaluation,
    )
    return judge_cell(out_dir, plan, cell, entry), ended, interrupted


def exit_code(result: Result, evidence: Evidence) -> int:
    """What the outcome means for the caller.

    In this order: a failed probe, refused settings, host unfit, incomplete, a policy that does not walk or a gated
    regression, success.
    """
    if result.verdict == "probe_failed":
        return EXIT_FAILED
    if usage_stop(evidence.journal) is not None:
        return EXIT_USAGE
    missing = missing_cells(evidence)
    if missing and {item.status for item in missing} <= {"host_unfit", "skipped"} and not _any_number(result):
        return EXIT_HOST_UNFIT
    if result.verdict == "incomplete":
        return EXIT_INCOMPLETE
    if result.verdict == "does_not_walk":
        return EXIT_FAILED
    gated = {item.name for item in evidence.plan.matrix.comparisons if item.gate}
    if any(found.name in gated and found.verdict == "regression" for found in result.comparisons):
        return EXIT_FAILED
    return EXIT_OK


def next_step(result: Result, out_dir: Path, program: str) -> str:
    """What the user does next, as a command where there is one; `program` is how this one is started."""
    if result.verdict == "probe_failed":
        failed = next(probe.name for probe in result.probes if not probe.passed)
        return f"look for the fault: checks in the report, output in {out_dir / log_file(failed)}"
    if result.verdict == "incomplete":
        first = next(cell for cell in result.cells if cell.status not in ("measured", "discarded"))
        found = f"{first.id} {first.status.replace('_', ' ')}, {first.reason}"
        if first.status == "interrupted":
            return f"the same command with --resume --out {out_dir} goes on; {found}"
        return f"see the report and {out_dir / LOGS_DIR}: {found}"
    if result.verdict == "does_not_walk":
        return f"look for the fault: curves in the report, events in {out_dir / RUNS_DIR}"
    verify = shlex.join([program, "verify", str(out_dir)])
    if result.smoke:
        measuring = "run --matrix learning" if result.learning else "run --matrix single"
        command = "ab REF_A REF_B" if result.matrix == AB_MATRIX else measuring
        return f"{verify}; to measure, run this on a host with a GPU: {program} {command}"
    return verify


def _any_number(result: Result) -> bool:
    return any(cell.steps_per_second is not None for cell in result.cells)
