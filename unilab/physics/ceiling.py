"""`python -m unilab.physics.ceiling`: how fast this host steps the states of a run when it does nothing else."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import get_native_id
from typing import Any, NoReturn

import numpy as np

from unilab.names import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, SCHEMA_VERSION
from unilab.physics.c_loop import CLoop, NoCLoop
from unilab.physics.mujoco_pool import MujocoPool
from unilab.physics.pinning import LINUX, allowed_cpus, confine, cpu_model
from unilab.physics.spec import GROUP_COUNTS, PROFILES, row_groups
from unilab.physics.states import States, load_states

SECONDS = 2.0
GROUPS = 2  # as env.physics_groups


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"ceiling: {message}; see --help", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


@dataclass
class Times:
    """Seconds inside the step: one list for each round, one value for each snapshot. The first round warms up."""

    rounds: list[list[float]] = field(default_factory=list)

    def summary(self, num_envs: int) -> dict[str, Any]:
        """Rate over all counted rounds, and their times by snapshot, (K, rounds)."""
        counted = np.array(self.rounds[1:])
        rate = num_envs * counted.size / counted.sum()
        return {"env_steps_per_second": float(rate), "step_seconds": counted.T.tolist()}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print or write one JSON object; returns the exit code.

    Args:
        argv: arguments after the program's name; None takes the process's own.
    """
    arguments = _parser().parse_args(argv)
    try:
        _check_output(arguments.output)
        found = measure_ceiling(
            _with_profile(load_states(arguments.states), arguments.profile),
            _cpu_ids(arguments.cpu_ids, arguments.workers),
            arguments.seconds,
            arguments.c_loop,
            arguments.groups,
        )
        text = json.dumps(found, sort_keys=True) + "\n"
        if arguments.output is None:
            sys.stdout.write(text)
        else:
            arguments.output.write_text(text, encoding="utf-8")
    except ValueError as error:
        return _refuse(str(error), EXIT_USAGE)
    except (MemoryError, OSError, RuntimeError) as error:
        return _refuse(str(error) or type(error).__name__, EXIT_FAILED)
    except KeyboardInterrupt:
        return _refuse("interrupted", EXIT_INTERRUPTED)
    return EXIT_OK


def measure_ceiling(
    states: States, cpu_ids: list[int] | None, seconds: float, c_loop: bool = False, groups: int = GROUPS
) -> dict[str, Any]:
    """Step every snapshot in turn, in the groups of a tick of training, and time nothing but the step.

    Args:
        states: snapshots of a run.
        cpu_ids: CPUs of the workers, worker i on the i-th; None leaves placement to the system.
        seconds: how long to go on; two rounds over all snapshots are made at least, the first is not counted.
        c_loop: run a plain C loop in turn with the pool.
        groups: groups of simulations that take turns, as `env.physics_groups` of a run.

    Returns:
        What the program prints.

    Raises:
        ValueError: if CPUs or states do not fit.
        RuntimeError: if the engine raised or reset a simulation, or the C loop computes other states than the pool.
    """
    began = time.monotonic()
    pool = MujocoPool(states.spec, states.num_envs, cpu_ids)
    _check_width(states, pool)
    rows = row_groups(states.num_envs, groups)
    with contextlib.ExitStack() as stack:
        loop, reason = _c_loop(stack, states, pool) if c_loop else (None, None)
        stepper = stack.enter_context(Stepper(pool, states, rows, cpu_ids))
        own, plain = _rounds(stepper.round, seconds, None if loop is None else loop.round)
        _require_sound(pool)
        if loop is not None:
            _require_same(pool, states, loop)
            _require_sound(pool)
    return {
        "schema_version": SCHEMA_VERSION,
        **own.summary(states.num_envs),
        "c_loop": None if loop is None else plain.summary(states.num_envs),
        "c_loop_reason": reason,
        "iterations": list(states.iterations),
        "num_envs": states.num_envs,
        "groups": len(rows),
        "decimation": states.spec.decimation,
        "timestep": states.spec.timestep,
        "profile": states.spec.profile,
        "workers": len(pool.placement),
        "cpu_ids": None if cpu_ids is None else [cpu for _, cpu in pool.placement],
        "mujoco": pool.mujoco_version,
        "cpu_model": cpu_model(),
        "seconds": time.monotonic() - began,
    }


def _rounds(
    pool: Callable[[], list[float]], seconds: float, plain: Callable[[], list[float]] | None
) -> tuple[Times, Times]:
    """Rounds of the pool, and of the C loop in turn with them."""
    own, other, began = Times(), Times(), time.monotonic()
    while len(own.rounds) < 2 or time.monotonic() - began < seconds:
        own.rounds.append(pool())
        if plain is not None:
            other.rounds.append(plain())
    return own, other


class Stepper:
    """Steps every snapshot, group after group; with several groups a second thread restores the next one meanwhile.

    Args:
        pool: the simulations.
        states: what they start from.
        rows: the groups.
        cpu_ids: CPUs that the second thread may use, those of the workers; None for any.
    """

    def __init__(self, pool: MujocoPool, states: States, rows: Sequence[slice], cpu_ids: list[int] | None) -> None:
        self._pool, self._states = pool, states
        self._turns = [(index, part) for index in range(len(states.iterations)) for part in rows]
        self._overlap = len(rows) > 1
        self._carrier = ThreadPoolExecutor(1)
        if cpu_ids is not None:  # any CPU of the list, not only that of the thread it is started from
            self._carrier.submit(lambda: confine(get_native_id(), cpu_ids)).result()

    def __enter__(self) -> Stepper:
        return self

    def __exit__(self, *_: object) -> None:
        self._carrier.shutdown()

    def round(self) -> list[float]:
        """Seconds inside the step, one value for each snapshot."""
        seconds = [0.0] * len(self._states.iterations)
        restored = self._carrier.submit(self._restore, *self._turns[0])
        for number, (index, rows) in enumerate(self._turns, 1):
            restored.result()
            if self._overlap and number < len(self._turns):
                restored = self._carrier.submit(self._restore, *self._turns[number])
            began = time.perf_counter()
            self._pool.step(rows)
            seconds[index] += time.perf_counter() - began
            if not self._overlap and number < len(self._turns):
                restored = self._carrier.submit(self._restore, *self._turns[number])
        return seconds

    def _restore(self, index: int, rows: slice) -> None:
        self._pool.restore(self._states.snapshot(index), rows)


def _c_loop(stack: contextlib.ExitStack, states: States, pool: MujocoPool) -> tuple[CLoop | None, str | None]:
    try:
        return stack.enter_context(CLoop(states, [cpu for _, cpu in pool.placement])), None
    except NoCLoop as error:
        return None, str(error)


def _check_width(states: States, pool: MujocoPool) -> None:
    """NumPy would spread a state of one number over all, and the C loop would read past the end of short ones."""
    found, needed = (arrays["state"].shape[-1] for arrays in (states.arrays, pool.inputs()))
    if found != needed:
        raise ValueError(
            f"the recorded states hold {found} numbers each, those of {states.spec.scene} have {needed}; "
            "record them again with training.record_states=8"
        )


def _require_sound(pool: MujocoPool) -> None:
    """Steps that end in a reset of the engine cost something else than those of the run."""
    if pool.failure is not None:
        raise RuntimeError(pool.failure)
    if pool.untrusted:
        raise RuntimeError(f"the engine warned of bad physics in {pool.untrusted} of {pool.num_envs} simulations")


def _require_same(pool: MujocoPool, states: States, loop: CLoop) -> None:
    for index, iteration in enumerate(states.iterations):
        pool.restore(states.snapshot(index))
        pool.step()
        if not np.array_equal(pool.inputs()["state"], loop.after[index], equal_nan=True):
            raise RuntimeError(f"the C loop steps the states of iteration {iteration} to others than the pool")


def _with_profile(states: States, profile: str | None) -> States:
    return states if profile is None else replace(states, spec=replace(states.spec, profile=profile))


def _check_output(path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"--output {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise ValueError(f"--output {path}: there is no folder {path.parent}; make it first or name another file")


def _cpu_ids(asked: list[int] | None, workers: int | None) -> list[int] | None:
    """CPUs of the workers: the list, the first allowed ones, or as training chooses: all allowed less one."""
    if asked is not None:
        return asked
    allowed = allowed_cpus()
    if workers is None:
        return (allowed[1:] or allowed) if LINUX else None
    if not LINUX:
        raise ValueError(f"--workers {workers}: pinning needs Linux, this is {sys.platform}; leave it out")
    if not 1 <= workers <= len(allowed):
        raise ValueError(f"--workers {workers}: this process may use {len(allowed)} CPUs; use 1 to {len(allowed)}")
    return allowed[:workers]


def _parser() -> _Parser:
    parser = _Parser(prog="python -m unilab.physics.ceiling", description=__doc__, allow_abbrev=False)
    parser.add_argument("--states", metavar="FILE", type=Path, required=True, help="recorded states of a run")
    cpus = parser.add_mutually_exclusive_group()
    cpus.add_argument("--cpu-ids", metavar="0,1,…", type=_numbers, help="CPUs of the workers, worker i on the i-th")
    cpus.add_argument("--workers", metavar="N", type=int, help="workers, on the first allowed CPUs")
    parser.add_argument("--profile", choices=PROFILES, help="solver path (default: that of the run)")
    parser.add_argument("--seconds", metavar="S", type=_seconds, default=SECONDS, help="how long (default 2)")
    parser.add_argument("--groups", type=int, default=GROUPS, choices=GROUP_COUNTS, help="as the run's (default 2)")
    parser.add_argument("--c-loop", action="store_true", help="also time a plain C loop")
    parser.add_argument("--output", metavar="FILE", type=Path, help="write there instead of printing")
    return parser


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of CPUs; write numbers with commas, as in 0,1,2")
    return [int(part) for part in parts]


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 3600:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0 and below 3600")
    return value


def _refuse(message: str, code: int) -> int:
    print(f"ceiling: {' '.join(message.splitlines())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
