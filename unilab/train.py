"""The `train` command: from a command line to a complete run directory."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from unilab.names import (
    COMPLETED,
    EXIT_FAILED,
    EXIT_HOST_UNFIT,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    FAILED,
    INTERRUPTED,
    MEETING_FILE,
    RUN_END_FILE,
    TRACE_FILE,
)
from unilab.signals import deaf, interrupts_once, sigterm_interrupts
from unilab.stacks import print_stacks_on_signal

if TYPE_CHECKING:
    from unilab.config import RunConfig
    from unilab.event_log import EventLog
    from unilab.rank import Place
    from unilab.ranks import Ranks
    from unilab.resume import Resume
    from unilab.run_dir import RunDirectory
    from unilab.runner import Runner
    from unilab.terminal import TerminalView
    from unilab.trace import Trace
    from unilab.wandb_log import WandbLog


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit code.

    Args:
        argv: arguments after the program's name; None takes the process's own.
    """
    print_stacks_on_signal()
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="train", description=__doc__, allow_abbrev=False)
    parser.add_argument("--algo", required=True, help="algorithm, as in sac")
    parser.add_argument("--task", required=True, help="task, as in g1_walk_flat")
    parser.add_argument("--sim", required=True, help="physics backend, as in mujoco")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as in algo.max_iterations=300")
    args = parser.parse_intermixed_args(arguments)
    return train(args.algo, args.task, args.sim, args.overrides, arguments)


def train(algo: str, task: str, sim: str, overrides: Sequence[str], argv: list[str]) -> int:
    """Check everything that can be refused, then train.

    Args:
        algo: algorithm name.
        task: task name.
        sim: physics backend name.
        overrides: `key=value` settings.
        argv: the command line as it is recorded.

    Returns:
        The exit code.
    """
    try:
        from unilab.config import load_config

        try:
            config = load_config(algo, task, sim, overrides)
        except ValueError as error:
            return _refuse(error, EXIT_USAGE)
        return _prepare_and_run(config, ["--algo", algo, "--task", task, "--sim", sim, *overrides], argv)
    except KeyboardInterrupt:  # from here only before the run began, since a run records its own
        print("train: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _prepare_and_run(config: RunConfig, names: Sequence[str], argv: list[str]) -> int:
    """Refuse, follow as another rank, or train as rank 0.

    Args:
        config: the run.
        names: the command line of another rank of this run.
        argv: the command line as it is recorded.
    """
    from unilab.hardware import HostUnfit, device_count
    from unilab.rank import Place
    from unilab.requirements import require_packages, require_playback
    from unilab.resume import plan_resume
    from unilab.run_dir import RunDirectory, choose_run_dir

    environment = dict(os.environ)
    try:
        ranks = _find_ranks(config, environment)
        if ranks.rank:
            return _follow(config, ranks)
        require_packages(config)
        place = Place.prepare(config, ranks)
        resume = plan_resume(config, place.task, place.device, ranks.world_size) if config.algo.resume else None
        path = resume.directory if resume else choose_run_dir(config, ranks.world_size, datetime.now())
        require_playback(config)
        directory = RunDirectory(path)
        mirror = _mirror(config, directory)
    except HostUnfit as error:
        return _refuse(error, EXIT_HOST_UNFIT)
    except ValueError as error:
        return _refuse(error, EXIT_USAGE)
    _say_what_runs(place, device_count())
    for line in resume.lines(config.algo.max_iterations) if resume else ():
        print(line)
    print(f"run directory {directory.path}")
    command = [sys.executable, "-P", "-m", "unilab.rank", *names]
    with _terminations(ranks):
        return _train_and_record(place, directory, argv, environment, command, resume, mirror)


def _find_ranks(config: RunConfig, environment: dict[str, str]) -> Ranks:
    """The ranks that environment and configuration ask for."""
    from unilab.hardware import device_count
    from unilab.ranks import plan_ranks
    from unilab.transport import check_transport

    devices = config.training.devices
    counted = device_count() if devices is not None and not config.training.smoke else 0
    ranks = plan_ranks(environment, devices, counted)
    check_transport(ranks, config.training.nccl_transport)
    return ranks


def _mirror(config: RunConfig, directory: RunDirectory) -> WandbLog | None:
    """W&B where it was asked for."""
    from unilab.wandb_log import start_wandb

    return start_wandb(config, directory.path) if config.training.logger == "wandb" else None


def _say_what_runs(place: Place, devices: int) -> None:
    training, ranks = place.config.training, place.ranks
    if training.devices is not None:
        print("training.devices is deprecated: choose GPUs with CUDA_VISIBLE_DEVICES")
    if training.smoke:
        print("SMOKE: CPU functional check; its speed means nothing")
    elif not ranks.entries and devices > 1:
        print(f"{devices} GPUs are visible and CUDA_VISIBLE_DEVICES is unset: training one rank on the first")
    if ranks.world_size > 1:
        print(f"{ranks.world_size} ranks")


def _follow(config: RunConfig, ranks: Ranks) -> int:
    """Be a rank other than 0 that a launcher started."""
    import traceback

    from unilab.hardware import HostUnfit
    from unilab.rank import follow

    try:
        with _terminations(ranks):
            follow(config, ranks, Path())
    except HostUnfit as error:
        return _refuse(error, EXIT_HOST_UNFIT)
    except KeyboardInterrupt as interrupt:
        print(f"train: rank {ranks.rank} was interrupted{_reason(interrupt)}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        traceback.print_exception(error)
        return _refuse(RuntimeError(f"rank {ranks.rank} failed: {error}"), EXIT_FAILED)
    return EXIT_OK


def _terminations(ranks: Ranks) -> AbstractContextManager[None]:
    """What a termination does while a run lasts. A launcher sends it to the ranks that are left when one has failed."""
    if ranks.launched and ranks.world_size > 1:
        return sigterm_interrupts("SIGTERM, which a launcher sends when another rank failed; see its output")
    return sigterm_interrupts()


def _reason(error: BaseException | None) -> str:
    return f" ({error})" if error and str(error) else ""


def _train_and_record(
    place: Place,
    directory: RunDirectory,
    argv: list[str],
    environment: dict[str, str],
    command: list[str],
    resume: Resume | None,
    mirror: WandbLog | None,
) -> int:
    """Train into `directory` and write `run_end.json`, whatever happens."""
    from unilab.event_log import Clock, EventLog

    began, config = time.monotonic(), place.config
    try:  # first of all: where another run has begun in this directory meanwhile, nothing of it may be replaced
        log = EventLog(directory.path, Clock.start(), config.training.logger != "none", mirror)
    except OSError as error:
        return _refuse(error, EXIT_FAILED)
    run = _Run(place, directory, log, resume, began)
    status, cause = COMPLETED, None  # type: str, BaseException | None
    try:
        with closing(log):
            run.train(argv, environment, command)
    except KeyboardInterrupt as interrupt:
        status, cause = INTERRUPTED, interrupt
    except BaseException as failure:  # SystemExit too: the terminal view raises it when its reader is gone
        status, cause = FAILED, failure
    ended = time.monotonic()
    artifacts, code = None, EXIT_OK
    if status == COMPLETED and not config.training.no_play:
        with interrupts_once():
            artifacts, code = _play(config, directory.path)
    with deaf():
        try:
            run.write_end(status, cause, ended, artifacts)
        except OSError as error:
            code = _refuse(OSError(f"{RUN_END_FILE} was not written: {error}"), EXIT_FAILED)
        code = _conclude(config, directory, status, cause) or code
    if mirror is not None:  # last: what it waits for is the network
        mirror.close(code)
    return code


@dataclass
class _Run:
    """A run that has begun.

    Attributes:
        place: what rank 0 trains with.
        directory: receives its files.
        log: receives its records.
        resume: how it goes on; None where it starts anew.
        began: monotonic seconds.
        runner: None before it is built.
    """

    place: Place
    directory: RunDirectory
    log: EventLog
    resume: Resume | None
    began: float
    runner: Runner | None = None

    def train(self, argv: list[str], environment: dict[str, str], command: list[str]) -> None:
        """Train to the last iteration; whatever stops it before is raised.

        Args:
            argv: the command line as it is recorded.
            environment: that of the command.
            command: starts another rank.
        """
        from unilab.checkpoint import attempts
        from unilab.provenance import command_facts
        from unilab.rank_processes import RankProcesses
        from unilab.run_dir import remove_leftovers

        config, ranks, directory = self.place.config, self.place.ranks, self.directory
        run = directory.path.parent
        for folder in (run, *attempts(run)) if self.resume else ():
            remove_leftovers(folder)
        origin = {"resumed_from": self.resume.facts() if self.resume else None}
        directory.write_config(config)
        directory.write_command(command_facts(argv, environment) | origin)
        transport = self.place.set_transport(environment)  # before others start, which inherit it
        meeting, entries = directory.path / MEETING_FILE, () if ranks.launched else ranks.entries
        with RankProcesses(command, entries, meeting, self.write_last_words) as others:
            with others.watching():
                self.runner = self.place.join(meeting, self.resume.checkpoint if self.resume else None)
            with self.runner as runner, _view(self.place) as view, others.watching():
                manifest = runner.manifest() | origin
                manifest["dp_sync"] |= transport.facts()
                directory.write_manifest(manifest)
                with _trace(config, directory.path) as trace:
                    runner.run(self.log, view, directory, trace)

    def write_last_words(self, error: BaseException) -> None:
        """The end of a run whose process hangs, of another rank's failure or an interrupt."""
        status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
        self.write_end(status, error, time.monotonic())

    def write_end(
        self, status: str, cause: BaseException | None, ended: float, artifacts: dict[str, str] | None = None
    ) -> None:
        """Write `run_end.json`.

        Args:
            status: how the run ended.
            cause: what ended it; None where it is complete.
            ended: monotonic seconds.
            artifacts: what became of the files that are made after training.
        """
        from unilab.provenance import redact

        reached = self.runner or (self.resume.checkpoint if self.resume else None)
        raised = None if cause is None else {"type": type(cause).__name__, "message": redact(str(cause))}
        facts = {
            "status": status,
            "final_env_steps": reached.env_steps if reached else 0,
            "iterations": reached.iteration if reached else 0,
            "event_count": self.log.count,
            "wall_seconds": ended - self.began,
            "exception": raised,
            "startup_seconds": self.runner.startup_seconds if self.runner else None,
            "artifacts": redact(artifacts),
        }
        self.directory.write_end(facts)


def _view(place: Place) -> TerminalView:
    from unilab.terminal import Scale, TerminalView

    algo, training, size = place.config.algo, place.config.training, place.ranks.world_size
    title = f"{algo.algo} · {training.task_name}{' · SMOKE' if training.smoke else ''}"
    rows = algo.batch_size * algo.updates_per_step
    return TerminalView(Scale(title, algo.max_iterations, algo.num_envs * size, rows * size))


def _trace(config: RunConfig, directory: Path) -> AbstractContextManager[Trace | None]:
    """The run's timeline, or None where none was asked for."""
    from unilab.trace import Trace

    return closing(Trace(directory / TRACE_FILE)) if config.training.trace_enabled else nullcontext()


def _play(config: RunConfig, directory: Path) -> tuple[dict[str, str], int]:
    """Numbers and video of what was trained: what became of each file, and the exit code. No failure of the run."""
    from unilab.eval import OK, evaluate_trained, files_after_training

    try:
        print("evaluating and recording (not with training.no_play=true)", flush=True)
        artifacts, code = evaluate_trained(config, directory)
    except OSError as error:  # nobody reads what is printed any more, or no process can be started
        artifacts, code = dict.fromkeys(files_after_training(config), str(error)), EXIT_FAILED
    except KeyboardInterrupt:  # before there was a process to end
        artifacts, code = dict.fromkeys(files_after_training(config), "interrupted"), EXIT_INTERRUPTED
    missing = [name for name, found in artifacts.items() if found != OK]
    if missing:
        print(f"train: the training is complete, but there is no {' and no '.join(missing)}", file=sys.stderr)
    return artifacts, code


def _conclude(config: RunConfig, directory: RunDirectory, status: str, error: BaseException | None) -> int:
    if status == COMPLETED:
        print(f"completed {config.algo.max_iterations} iterations in {directory.path}")
        return EXIT_OK
    if status == INTERRUPTED:
        print(f"interrupted{_reason(error)}; what was written stays in {directory.path}", file=sys.stderr)
        return EXIT_INTERRUPTED
    import traceback

    traceback.print_exception(error)
    print(f"train: the run failed: {error}", file=sys.stderr)
    return EXIT_FAILED


def _refuse(error: Exception, code: int) -> int:
    print(f"train: {' '.join(str(error).splitlines())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
