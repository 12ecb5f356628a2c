"""Steps the recorded states of a run, and nothing else, and times it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import get_native_id
from typing import Any

import numpy as np

from unilab.names import SCHEMA_VERSION
from unilab.physics.c_loop import CLoop, NoCLoop
from unilab.physics.mujoco_pool import MujocoPool
from unilab.physics.pinning import confine, cpu_model
from unilab.physics.spec import row_groups
from unilab.physics.states import States


@dataclass
class Times:
    """Seconds inside the step: one list for each round, one value for each snapshot. The first round warms up."""

    rounds: list[list[float]] = field(default_factory=list)

    def summary(self, num_envs: int) -> dict[str, Any]:
        """Rate over all counted rounds, and their times by snapshot, (K, rounds)."""
        counted = np.array(self.rounds[1:])
        rate = num_envs * counted.size / counted.sum()
        return {"env_steps_per_second": float(rate), "step_seconds": counted.T.tolist()}


Round = Callable[[], list[float]]
# Makes rounds of the pool, and of the C loop in turn with them where there is one.
Rounds = Callable[[Round, Round | None], tuple[Times, Times]]


def step_states(
    states: States, cpu_ids: list[int] | None, groups: int, rounds: Rounds, c_loop: bool = False
) -> dict[str, Any]:
    """Step every snapshot in turn, in the groups of a tick of training, and time nothing but the step.

    Args:
        states: snapshots of a run.
        cpu_ids: CPUs of the workers, worker i on the i-th; None leaves placement to the system.
        groups: groups of simulations that take turns, as `env.physics_groups` of a run.
        rounds: makes rounds over all snapshots and keeps their times.
        c_loop: run a plain C loop in turn with the pool.

    Returns:
        What the ceiling program prints for one pool.

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
        own, plain = rounds(stepper.round, None if loop is None else loop.round)
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


def rounds_for(seconds: float) -> Rounds:
    """Rounds for so many seconds; two at least, the first is not counted."""

    def rounds(pool: Round, plain: Round | None) -> tuple[Times, Times]:
        own, other, began = Times(), Times(), time.monotonic()
        while len(own.rounds) < 2 or time.monotonic() - began < seconds:
            own.rounds.append(pool())
            if plain is not None:
                other.rounds.append(plain())
        return own, other

    return rounds


def with_profile(states: States, profile: str | None) -> States:
    """The states, to be stepped by another solver path; None keeps that of their run."""
    return states if profile is None else replace(states, spec=replace(states.spec, profile=profile))


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
