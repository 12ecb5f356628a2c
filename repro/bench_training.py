"""`repro bench learner` and `repro bench tick`: the learner alone, and where the time of a tick goes."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from repro import text
from repro.errors import HostUnfitError, UsageError
from repro.events import Refusal
from repro.host import find_host
from repro.launch import run_cell, trainer_environment
from repro.matrix import FEWEST_POINTS, check_overrides, load_matrix
from repro.output import require_new
from repro.plan import TRAINER, VISIBLE_DEVICES
from repro.schema import Strict, canonical_json, read_model
from repro.throughput import measure
from unilab.names import (
    ACTION_WAIT_MS,
    APPLY_MS,
    BACKEND_MS,
    COLLECTOR_WAIT_MS,
    EXIT_HOST_UNFIT,
    EXIT_OK,
    EXIT_USAGE,
    INFERENCE_MS,
    ITERATION_TIME,
    LEARNING_TIME,
    PACK_MS,
)

LEARNER = (sys.executable, "-m", "unilab.bench", "learner")
NAMES = ("--task", "g1_walk_flat", "--sim", "mujoco")
SMOKE = "training.smoke=true"
TIMEOUT = 1200.0
# Tags by stage. Those of the pool follow each other, so they and their remainder make up the tick; those of the carrier
# happen beside the other group's step, where there are two groups, and else while the pool is idle.
POOL = {"idle": ACTION_WAIT_MS, "inside step": BACKEND_MS}
CARRIER = {"apply command": APPLY_MS, "pack rows": PACK_MS}
HOST = {"wait for rows": COLLECTOR_WAIT_MS, "act": INFERENCE_MS}

_VARIANTS = (
    "inductor: whole objectives are compiled; inductor-loss: losses, policy and steps alone.",
    "eager-reads: the host reads what every update reports, otherwise once a cycle.",
)

Positive = Annotated[float, Field(gt=0)]


class Variant(Strict):
    """One way to run the update cycle; as `unilab.bench.Measurement`."""

    variant: str
    ms: Positive
    cycles_ms: tuple[Positive, ...]
    kernels: int | None
    compile_seconds: float | None
    capture_seconds: float | None
    update_error: dict[str, float]


class LearnerBench(Strict):
    """What `unilab.bench` writes."""

    schema_version: Literal[1]
    kind: Literal["learner"]
    smoke: bool
    algo: str
    task: str
    device: str
    torch: str
    sizes: dict[str, int]
    variants: Annotated[tuple[Variant, ...], Field(min_length=1)]


class TickBench(Strict):
    """Tail means of one short run, ms.

    Attributes:
        smoke: A CPU run with small sizes.
        iterations: Training iterations of the run.
        points: Events of the tail.
        steps_per_second: The main metric of the run.
        tick_ms: From one command being out to the next.
        exposed_ms: The pool standing still between two steps.
        pool: Stages of the physics pool, one after the other; None where a stage is not logged.
        pool_remainder_ms: The tick without them; None where one is not logged.
        carrier: Stages of the collector's other thread.
        learner: Stages of the learner's host thread.
        learner_remainder_ms: The tick without them: submission of the update, metrics, files.
        update_ms: The update phase on the device; it runs beside the others.
    """

    schema_version: Literal[1] = 1
    kind: Literal["tick"] = "tick"
    smoke: bool
    iterations: int
    points: int
    steps_per_second: float
    tick_ms: float
    exposed_ms: float | None
    pool: dict[str, float | None]
    pool_remainder_ms: float | None
    carrier: dict[str, float | None]
    learner: dict[str, float | None]
    learner_remainder_ms: float | None
    update_ms: float | None


@dataclass(frozen=True)
class Setup:
    """How the trainer is started: small on the CPU (`smoke`) or on the first visible GPU."""

    smoke: bool
    overrides: tuple[str, ...]
    environment: dict[str, str]


def bench_training(arguments: argparse.Namespace, trainer: Sequence[str] = TRAINER) -> int:
    """Run a benchmark, print it, write it where asked; return the exit code.

    Raises:
        UsageError: If a setting is wrong.
        HostUnfitError: If the trainer says so.
        OSError: If the measured process fails.
    """
    require_new(arguments.output)
    match arguments.part:
        case "learner":
            return _conclude(arguments, found := bench_learner(arguments), learner_lines(found))
        case _:
            return _conclude(arguments, ticks := bench_tick(arguments, trainer), tick_lines(ticks))


def bench_learner(arguments: argparse.Namespace) -> LearnerBench:
    """Update cycles on random rows, in a process of the trainer."""
    setup = _set_up(arguments)
    asked = () if arguments.variants is None else ("--variants", arguments.variants)
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "learner.json"
        command = [
            *LEARNER,
            "--algo",
            arguments.algo,
            *NAMES,
            *asked,
            "--cycles",
            f"{arguments.cycles}",
            "--output",
            str(output),
        ]
        _run([*command, *setup.overrides], setup, Path(name))
        return read_model(LearnerBench, output)


def bench_tick(arguments: argparse.Namespace, trainer: Sequence[str]) -> TickBench:
    """Tail means of a short training run, whose folder is removed."""
    if arguments.iterations < FEWEST_POINTS:
        raise UsageError(f"--iterations {arguments.iterations}: must be at least {FEWEST_POINTS}")
    setup = _set_up(arguments)
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        own = (f"training.log_dir={run}", "training.no_play=true", f"algo.max_iterations={arguments.iterations}")
        _run(
            [*trainer, "--algo", arguments.algo, *NAMES, *own, "algo.save_interval=-1", *setup.overrides],
            setup,
            Path(name),
        )
        try:
            return summarize_tick(run, setup.smoke, arguments.iterations)
        except Refusal as refusal:
            raise ChildProcessError(f"no number: {refusal.code}: {refusal}") from None


def summarize_tick(run: Path, smoke: bool, iterations: int) -> TickBench:
    """Tail means of a finished run.

    Raises:
        Refusal: If the run gives no number.
    """
    found = measure(run)

    def means(tags: dict[str, str]) -> dict[str, float | None]:
        return {stage: found.stages.get(tag) for stage, tag in tags.items()}

    tick = found.stages.get(ITERATION_TIME)
    if tick is None:
        raise ChildProcessError(f"no number: the run has no {ITERATION_TIME}")
    pool, learner = means(POOL), means(HOST)
    return TickBench(
        smoke=smoke,
        iterations=iterations,
        points=found.window.points,
        steps_per_second=found.steps_per_second,
        tick_ms=tick,
        exposed_ms=found.exposed_ms,
        pool=pool,
        pool_remainder_ms=_remainder(tick, pool),
        carrier=means(CARRIER),
        learner=learner,
        learner_remainder_ms=_remainder(tick, learner),
        update_ms=found.stages.get(LEARNING_TIME),
    )


def learner_lines(found: LearnerBench) -> list[str]:
    """The variants as a table."""
    eager = next((item.ms for item in found.variants if item.variant == "eager"), None)
    rows = [
        [
            *(item.variant, text.significant(item.ms, 4)),
            *(text.significant(extreme(item.cycles_ms), 4) for extreme in (min, max)),
            text.NOTHING if eager is None else f"{eager / item.ms:.2f}\N{MULTIPLICATION SIGN}",
            text.rate(item.kernels),
            *(text.number(value, 1) for value in (item.compile_seconds, item.capture_seconds)),
            f"{max(item.update_error.values(), default=0.0):.1e}",
        ]
        for item in found.variants
    ]
    headers = ("variant", "ms/cycle", "min", "max", "speed-up", "kernels", "compile s", "capture s", "update error")
    sizes = ", ".join(f"{name} {value:,}" for name, value in sorted(found.sizes.items()))
    return [
        f"{_smoke(found.smoke)}{found.algo} on {found.task}: one update cycle on {found.device}, torch {found.torch}",
        sizes,
        "",
        text.plain_table(headers, rows, "lrrrrrrrr"),
        "",
        "ms/cycle: median. Update error: |update - eager update| / |eager update| of one cycle, worst parameter group.",
        *(_VARIANTS if found.algo == "flashsac" else ()),
    ]


def tick_lines(found: TickBench) -> list[str]:
    """The tick by stage as a table."""
    pool = {f"pool: {stage}": value for stage, value in found.pool.items()}
    learner = {f"learner: {stage}": value for stage, value in found.learner.items()}
    stages: dict[str, float | None] = {
        "tick": found.tick_ms,
        **pool,
        "pool: remainder": found.pool_remainder_ms,
        "exposed": found.exposed_ms,
        **{f"carrier: {stage}": value for stage, value in found.carrier.items()},
        **learner,
        "learner: remainder": found.learner_remainder_ms,
        "update on the device": found.update_ms,
    }
    rows = [
        [stage, text.number(value), text.percent(None if value is None else value / found.tick_ms)]
        for stage, value in stages.items()
    ]
    return [
        f"{_smoke(found.smoke)}{text.rate(found.steps_per_second)} env steps/s; means of the last "
        f"{found.points} of {text.count_of(found.iterations, 'tick')}",
        "",
        text.plain_table(("stage", "ms", "of the tick"), rows, "lrr"),
        "",
        "Exposed: the pool stands still between two steps. Its stages follow each other. With two groups the carrier "
        "works beside the other group's step. The update runs beside all of them; what of it outlasts the steps makes "
        "the pool idle.",
    ]


def _set_up(arguments: argparse.Namespace) -> Setup:
    """Smoke where it is asked for or no GPU can be used, else the first visible GPU."""
    host, _ = find_host()
    asked = tuple(arguments.overrides)
    overrides = check_overrides(tuple(word for word in asked if word != SMOKE))
    environment = trainer_environment(os.environ)
    if SMOKE in asked or host.gpu_unusable is not None:
        why = "asked for" if SMOKE in asked else host.gpu_unusable
        print(f"SMOKE: {why}; small sizes on the CPU, never a benchmark", file=sys.stderr)
        return Setup(True, (SMOKE, *load_matrix("smoke").overrides, *overrides), environment)
    return Setup(False, overrides, environment | {VISIBLE_DEVICES: host.visible_gpus[0]})


def _run(command: Sequence[str], setup: Setup, folder: Path) -> None:
    """Run a process to its end; its failure becomes an error with the last line it said."""
    log = folder / "logs" / "bench.log"
    log.parent.mkdir()
    ended = run_cell(command, setup.environment, folder, log, TIMEOUT)
    if ended.outcome == "interrupted":
        raise KeyboardInterrupt
    if ended.exit_code == EXIT_OK:
        return
    kind = {EXIT_USAGE: UsageError, EXIT_HOST_UNFIT: HostUnfitError}.get(ended.exit_code or 0, ChildProcessError)
    raise kind(f"the measured process failed: {ended.reason}")


def _conclude(arguments: argparse.Namespace, found: Strict, lines: list[str]) -> int:
    if arguments.output is not None:
        arguments.output.write_text(canonical_json(found), encoding="utf-8")
    sys.stdout.write(canonical_json(found) if arguments.json else "".join(f"{line}\n" for line in lines))
    return EXIT_OK


def _remainder(tick: float, stages: dict[str, float | None]) -> float | None:
    known = [value for value in stages.values() if value is not None]
    return tick - sum(known) if len(known) == len(stages) else None


def _smoke(smoke: bool) -> str:
    return "SMOKE, not a benchmark: " if smoke else ""
