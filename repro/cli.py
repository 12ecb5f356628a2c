"""The ``repro`` command: dispatches, and turns what happened into an exit code."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn, TextIO, cast

from repro.arguments import build_parser
from repro.busy import require_idle, warn_busy
from repro.doctor import choose_matrix, diagnose, doctor_lines
from repro.dry_run import plan_lines
from repro.errors import HostUnfitError, UsageError
from repro.host import Host, find_host
from repro.launch import INTERRUPTS, Runner, local_runner, signals_interrupt
from repro.matrix import TRACE_OVERRIDE, Matrix, adjust, builtin_names, load_matrix, matrix_of_cases, select_cases
from repro.output import require_new
from repro.place import Cpu
from repro.plan import LOCAL, TRAINER, Cell, Plan, asked_probes, make_plan
from repro.provenance import find_source
from repro.schema import canonical_json
from repro.text import count_of, duration
from unilab.names import (
    EXIT_FAILED,
    EXIT_HOST_UNFIT,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
)

if TYPE_CHECKING:
    from repro.docker_executor import DockerExecutor
    from repro.evidence import CellEvidence
    from repro.report import Report

# Modules that read events and draw figures take a second to import; the commands that need them import them.


def main(argv: Sequence[str] | None = None, *, trainer: Sequence[str] = TRAINER) -> int:
    """Run the command line; return its exit code.

    Args:
        argv: Arguments after the program's name; None takes the process's own.
        trainer: Start of the command that runs one cell; the cell's own arguments follow it.
    """
    arguments = build_parser().parse_args(argv)
    try:
        with signals_interrupt():
            return _dispatch(arguments, trainer)
    except UsageError as error:
        return _refuse(str(error), EXIT_USAGE)
    except HostUnfitError as error:
        return _refuse(str(error), EXIT_HOST_UNFIT)
    except OSError as error:
        return _refuse(str(error), EXIT_FAILED)
    except KeyboardInterrupt as interrupt:
        return _refuse("; ".join(filter(None, ("interrupted", str(interrupt)))), EXIT_INTERRUPTED)


def program() -> NoReturn:
    """The command as it is installed: also an interrupt while the interpreter starts or ends is exit code 130."""
    for number in INTERRUPTS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda *_: os._exit(EXIT_INTERRUPTED))
    sys.exit(main())


def _dispatch(arguments: argparse.Namespace, trainer: Sequence[str]) -> int:
    match arguments.command:
        case "doctor":
            return _doctor(arguments)
        case "plan":
            return _plan(arguments, trainer)
        case "run":
            return _run(arguments, trainer)
        case "scaling":
            from repro.scaling import scaling

            return scaling(arguments, trainer, _run_plan)
        case "ab":
            from repro.ab import ab

            return ab(arguments, trainer, _resume if arguments.resume else _run_plan)
        case "analyze":
            return _analyze(arguments)
        case "probe":
            from repro.probe_command import probe

            return probe(arguments)
        case "report":
            return _report(arguments)
        case "gate":
            from repro.gate_command import gate

            return gate(arguments)
        case "bench":
            return _bench(arguments, trainer)
        case _:
            return _verify(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    host, topology = find_host()
    found = diagnose(host, topology, arguments.matrix)
    sys.stdout.write(canonical_json(found) if arguments.json else _lines(doctor_lines(found)))
    unfit = arguments.matrix is not None and not all(fit.fits for fit in found.matrices)
    return EXIT_HOST_UNFIT if unfit else EXIT_OK


def _plan(arguments: argparse.Namespace, trainer: Sequence[str]) -> int:
    host, topology = find_host()
    matrix = adjust(_select(arguments, host, topology), arguments.iterations, arguments.repeats, ())
    plan = make_plan(matrix, host, topology, find_source(), inherited=list(os.environ), trainer=trainer)
    warn_busy(plan, host)
    if arguments.json:
        sys.stdout.write(canonical_json(plan))
        return EXIT_OK if plan.runnable else EXIT_HOST_UNFIT
    _require_runnable(plan)
    sys.stdout.write(_lines(plan_lines(plan)))
    return EXIT_OK


def _run(arguments: argparse.Namespace, trainer: Sequence[str]) -> int:
    host, topology = find_host()
    if arguments.executor == "local":
        if arguments.image is not None:
            raise UsageError(f"--image {arguments.image} is for --executor docker; add it, or leave --image out")
        return _run_on(arguments, host, topology, trainer, None)
    from repro.docker_executor import docker_executor

    with docker_executor(arguments.image, host, find_source()) as executor:
        return _run_on(arguments, executor.host_inside(host), topology, trainer, executor)


def _run_on(
    arguments: argparse.Namespace,
    host: Host,
    topology: tuple[Cpu, ...],
    trainer: Sequence[str],
    executor: DockerExecutor | None,
) -> int:
    if arguments.require_gpu and host.gpu_unusable is not None:
        raise HostUnfitError(f"--require-gpu: {host.gpu_unusable}; see repro doctor")
    plan = _plan_run(arguments, host, topology, trainer, executor)
    _require_runnable(plan)
    if executor is not None:
        executor.check_gpus(plan)
    if arguments.dry_run:
        warn_busy(plan, host)
        sys.stdout.write(_lines(plan_lines(plan)))
        return EXIT_OK
    from repro.live import LastingStream

    with contextlib.redirect_stdout(cast(TextIO, LastingStream(sys.stdout))):
        runner = local_runner if executor is None else executor.runner
        return (_resume if arguments.resume else _run_plan)(arguments, plan, host, trainer, runner)


def _require_runnable(plan: Plan) -> None:
    if not plan.runnable:
        reasons = dict.fromkeys(f"{cell.case}: {cell.skip_reason}" for cell in plan.cells)
        raise HostUnfitError(f"nothing of matrix {plan.matrix.name} can run here: {'; '.join(reasons)}")


def _plan_run(
    arguments: argparse.Namespace,
    host: Host,
    topology: tuple[Cpu, ...],
    trainer: Sequence[str],
    executor: DockerExecutor | None,
) -> Plan:
    overrides = (*arguments.override, *((TRACE_OVERRIDE,) if arguments.trace else ()))
    selected = _select(arguments, host, topology, contained=executor is not None)
    matrix = adjust(selected, arguments.iterations, arguments.repeats, overrides)
    return make_plan(
        matrix,
        host,
        topology,
        find_source(),
        inherited=list(os.environ) if executor is None else (),
        prefix=arguments.prefix,
        timeout=arguments.timeout,
        trainer=trainer,
        executor=LOCAL if executor is None else executor.facts,
    )


def _select(arguments: argparse.Namespace, host: Host, topology: tuple[Cpu, ...], contained: bool = False) -> Matrix:
    """The matrix that the command line names, or the cases of it; `auto` says on stderr which it is and why."""
    if arguments.matrix is None:
        if arguments.cases:
            return matrix_of_cases(arguments.cases)
        raise UsageError(f"name cases or a matrix: --matrix {', '.join([*builtin_names(), 'auto'])} or a TOML file")
    name = arguments.matrix
    if name == "auto":
        name, why = choose_matrix(host, topology, contained)
        print(f"matrix {name}: {why}", file=sys.stderr)
    matrix = load_matrix(name)
    return select_cases(matrix, arguments.cases) if arguments.cases else matrix


def _resume(
    arguments: argparse.Namespace,
    plan: Plan,
    host: Host,
    trainer: Sequence[str],
    runner: Callable[[Cell], Runner],
    *,
    roots: Mapping[str, Path] = MappingProxyType({}),
) -> int:
    from repro.resume import claim, find_session, finished_cells, is_complete

    if arguments.out is None:
        raise UsageError("--resume needs --out DIR, the folder of the session to go on with")
    with claim(arguments.out):
        earlier = find_session(arguments.out, plan, host)
        if not is_complete(arguments.out, earlier):
            return _run_plan(arguments, plan, host, trainer, runner, finished_cells(earlier), roots)
    from repro.result import compute_result
    from repro.session import exit_code

    skipped = [cell.id for cell in plan.cells if cell.skip_reason is not None]
    without = f"; skipped, as this host cannot hold them: {', '.join(skipped)}" if skipped else ""
    print(f"nothing to do: every run in {arguments.out} has its number{without}")
    return exit_code(compute_result(earlier), earlier)


def _run_plan(
    arguments: argparse.Namespace,
    plan: Plan,
    host: Host,
    trainer: Sequence[str],
    runner: Callable[[Cell], Runner] = local_runner,
    finished: Mapping[str, CellEvidence] | None = None,
    roots: Mapping[str, Path] = MappingProxyType({}),
    out_dir: Path | None = None,
) -> int:
    """Run a session to its report.

    `finished` is given where one is resumed: the cells that it has already; `out_dir` where its folder was made before.
    """
    from rich.console import Console

    from repro.live import SessionView
    from repro.report import write_report
    from repro.resume import claim, marked, reopen_session
    from repro.session import Session, create_out_dir, default_out_dir, exit_code, run_cells, start_session

    resumed, kept = finished is not None, finished or {}
    ahead = [cell for cell in plan.runnable if cell.id not in kept]
    if ahead:
        require_idle(plan, host)
    if out_dir is None:
        out_dir = arguments.out if resumed else create_out_dir(arguments.out or default_out_dir(plan, host))
    sys.stdout.write(_lines(_opening_lines(plan, out_dir, len(ahead))))
    sys.stdout.flush()
    journal = reopen_session(out_dir) if resumed else start_session(plan, host, out_dir)
    session = Session(plan, journal, out_dir, trainer, marked(os.environ, out_dir), runner, roots)
    view = SessionView(plan, Console())
    with _naming(out_dir), contextlib.nullcontext() if resumed else claim(out_dir):
        interrupted = run_cells(session, view, fail_fast=arguments.fail_fast, finished=kept)
        report = write_report(out_dir)
        _say_what_came_out(plan, report, out_dir)
    code = exit_code(report.result, report.evidence)
    return EXIT_INTERRUPTED if interrupted else code


def _opening_lines(plan: Plan, out_dir: Path, count: int) -> list[str]:
    """What is about to happen: `count` runs, and what comes before them."""
    from repro.benchmarks import LIMIT_SECONDS

    seconds = plan.estimated_seconds * count / len(plan.runnable)
    lines = [f"{count_of(count, 'run')} into {out_dir}, about {duration(seconds)}"]
    if probes := asked_probes(plan.matrix, plan.cells):
        lines.append(f"probes before everything else: {', '.join(probes)}")
    if plan.matrix.benchmarks:
        lines.append(f"micro-benchmarks first, at most {duration(LIMIT_SECONDS)}")
    if plan.cleared_environment:
        lines.append(f"taken out of the environment: {', '.join(plan.cleared_environment)}")
    return lines


def _say_what_came_out(plan: Plan, report: Report, out_dir: Path) -> None:
    from repro.cycle import bounding_stages
    from repro.headline import closing_lines
    from repro.layout import REPORT_FILE
    from repro.render import side_notes
    from repro.session import next_step

    following = next_step(report.result, out_dir, program_name(sys.argv[0]))
    stages, page = bounding_stages(report.evidence), f"{out_dir / REPORT_FILE}"
    sys.stdout.write(_lines(side_notes(report.evidence)))
    sys.stdout.write(_lines(closing_lines(report.result, plan.matrix, stages, page, following, plan.labels)))
    sys.stdout.flush()


@contextlib.contextmanager
def _naming(out_dir: Path) -> Iterator[None]:
    """Say of an interrupt, or an error of the system, as a full disk, where what was reached is and how to go on."""
    reached = (
        f"what was reached is in {out_dir}: repro report {out_dir} writes its page, "
        f"the same command with --resume --out {out_dir} goes on"
    )
    try:
        yield
    except OSError as error:
        raise OSError(f"{error}; {reached}") from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(reached) from None


def _analyze(arguments: argparse.Namespace) -> int:
    from repro.analyze import analysis_json, analysis_lines
    from repro.events import Refusal
    from repro.run_files import is_own
    from repro.throughput import measure

    require_new(arguments.output)
    if not arguments.run_dir.is_dir():
        raise UsageError(f"{arguments.run_dir} is not a folder; give the folder of one run")
    if not 0.0 < arguments.tail <= 1.0:
        raise UsageError(f"--tail {arguments.tail:g}: must be above 0 and at most 1")
    try:
        found = measure(arguments.run_dir, arguments.tail, arguments.tag, own=is_own(arguments.run_dir))
    except Refusal as refusal:
        return _refuse(f"no number: {refusal.code}: {refusal}", EXIT_FAILED)
    if arguments.output is not None:
        arguments.output.write_text(analysis_json(found), encoding="utf-8")
    sys.stdout.write(analysis_json(found) if arguments.json else _lines(analysis_lines(found)))
    return EXIT_OK


def _report(arguments: argparse.Namespace) -> int:
    from repro.resume import claim
    from repro.verify import check_folder

    out_dir: Path = check_folder(arguments.out_dir)
    with contextlib.nullcontext() if arguments.check else claim(out_dir):
        return _render(out_dir, arguments.check)


def _render(out_dir: Path, check: bool) -> int:
    """Write a report again, or only compare it."""
    from repro.layout import MANIFEST_FILE, REPORT_FILE
    from repro.report import changed_inputs, compare_report, derive_report, write_report

    changed = changed_inputs(out_dir)
    if changed:
        sys.stdout.write(_lines(changed))
        return _refuse(f"{out_dir}: raw files do not fit {MANIFEST_FILE}; nothing was rendered", EXIT_FAILED)
    if not check:
        write_report(out_dir)
        print(out_dir / REPORT_FILE)
        return EXIT_OK
    problems, remarks = compare_report(out_dir, derive_report(out_dir))
    sys.stdout.write(_lines([*problems, *remarks]))
    print(f"{out_dir}: {count_of(len(problems), 'file')} differ" if problems else f"{out_dir}: up to date")
    return EXIT_FAILED if problems else EXIT_OK


def _verify(arguments: argparse.Namespace) -> int:
    from repro.session import REPORTS
    from repro.verify import check_folder, find_reports, verify

    folders = find_reports(REPORTS) if arguments.out_dir is None else [check_folder(arguments.out_dir)]
    return EXIT_OK if verify(folders, print) else EXIT_FAILED


def _bench(arguments: argparse.Namespace, trainer: Sequence[str]) -> int:
    if arguments.part == "physics":
        from repro.bench_physics import run_bench

        return run_bench(arguments, trainer)
    from repro.bench_training import bench_training

    return bench_training(arguments, trainer)


def program_name(started_as: str) -> str:
    """The suite's command as the user can type it again: a path where it was given and `repro` alone finds another."""
    found, started = shutil.which("repro"), Path(started_as)
    on_path = found is not None and Path(found).absolute() == started.absolute()
    return started_as if started.name == "repro" and not on_path else "repro"


def _lines(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _refuse(message: str, code: int) -> int:
    line = " ".join(message.splitlines())  # names of files and keys may hold line ends
    print(f"repro: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    program()
