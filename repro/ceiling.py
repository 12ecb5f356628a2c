"""The same-run physics ceiling of a cell: measured right after its run, read again by every report."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from repro.errors import UsageError
from repro.events import Refusal
from repro.launch import GRACE_SECONDS, Ended, Runner, run_cell
from repro.layout import CEILING_FILE
from repro.plan import Cell, is_pinned
from repro.run_files import MOST, find_value, read_json
from repro.schema import Model, Strict, canonical_json, parse_model, read_model
from unilab.names import CONFIG_FILE, MANIFEST_FILE, STATES_FILE

PROGRAM = (sys.executable, "-P", "-m", "unilab.physics.ceiling")
SECONDS = 8.0  # rates of a shared host drift within seconds
SMOKE_SECONDS = 1.0
LIMIT_SECONDS = 300.0

# What the trainer's manifest calls as the ceiling does.
PHYSICS = ("groups", "decimation", "timestep", "workers")

Seconds = Annotated[float, Field(gt=0, lt=1e6)]


class Times(Strict):
    """Seconds of whole batches, one list for each snapshot, and the rate that follows from them."""

    env_steps_per_second: Annotated[float, Field(gt=0)]
    step_seconds: tuple[tuple[Seconds, ...], ...]


class Ceiling(Times):
    """What `python -m unilab.physics.ceiling` prints.

    Attributes:
        schema_version: Of this object.
        env_steps_per_second: All env steps / all time inside the step.
        step_seconds: Times of every snapshot.
        c_loop: The same by a plain C loop, or None.
        c_loop_reason: Why there is no C loop, or None.
        iterations: Training iteration of each snapshot.
        num_envs: Environments of a batch.
        groups: Groups of environments that took turns.
        decimation: Physics steps of an env step.
        timestep: Seconds of a physics step.
        profile: Solver path.
        workers: Physics threads.
        cpu_ids: Their CPUs; None where they are not pinned.
        mujoco: Version of the engine.
        cpu_model: Name of the CPU.
        seconds: Wall time of the measurement.
    """

    schema_version: Literal[1]
    c_loop: Times | None
    c_loop_reason: str | None
    iterations: tuple[int, ...]
    num_envs: Annotated[int, Field(ge=1, le=MOST)]
    groups: int
    decimation: int
    timestep: float
    profile: str
    workers: int
    cpu_ids: tuple[int, ...] | None
    mujoco: str
    cpu_model: str
    seconds: Seconds

    @model_validator(mode="after")
    def _rates(self) -> Self:
        both: list[Times] = [self] if self.c_loop is None else [self, self.c_loop]
        for times in both:
            every = list(chain.from_iterable(times.step_seconds))
            if not every or len(times.step_seconds) != len(self.iterations):
                raise ValueError(f"{len(times.step_seconds)} lists of times for {len(self.iterations)} snapshots")
            rate = self.num_envs * len(every) / sum(every)
            if not math.isclose(times.env_steps_per_second, rate, rel_tol=1e-9):
                raise ValueError(f"env_steps_per_second is {times.env_steps_per_second}, its times give {rate}")
        return self


class PoolCeilings(Strict):
    """What the program prints for several pools that step at the same time.

    Attributes:
        schema_version: Of this object.
        env_steps_per_second: Sum of the pools' rates.
        pools: What each of them measured, rank after rank.
    """

    schema_version: Literal[1]
    env_steps_per_second: Annotated[float, Field(gt=0)]
    pools: Annotated[tuple[Ceiling, ...], Field(min_length=2)]

    @model_validator(mode="after")
    def _sum(self) -> Self:
        if any(pool.iterations != self.pools[0].iterations for pool in self.pools):
            raise ValueError("its pools stepped states of different iterations")
        total = sum(pool.env_steps_per_second for pool in self.pools)
        if not math.isclose(self.env_steps_per_second, total, rel_tol=1e-9):
            raise ValueError(f"env_steps_per_second is {self.env_steps_per_second}, its pools give {total}")
        return self


class CeilingRecord(Strict):
    """`ceiling.json` of a cell: a measurement of one pool or of several, or the reason why there is none."""

    schema_version: Literal[1] = 1
    ceiling: Ceiling | None = None
    ceilings: PoolCeilings | None = None
    reason: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(part is not None for part in (self.ceiling, self.ceilings, self.reason)) != 1:
            raise ValueError("it must hold a measurement or a reason, and not both")
        return self

    @model_serializer(mode="wrap")
    def _short(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what a run of one rank never has."""
        content: dict[str, Any] = serialize(self)
        return {key: value for key, value in content.items() if key != "ceilings" or value is not None}

    @property
    def pools(self) -> tuple[Ceiling, ...]:
        """The measurement of each rank's pool; none where there is a reason."""
        if self.ceilings is not None:
            return self.ceilings.pools
        return () if self.ceiling is None else (self.ceiling,)


def record_ceiling(
    cell: Cell,
    ended: Ended,
    environment: Mapping[str, str],
    out_dir: Path,
    grace: float = GRACE_SECONDS,
    run: Runner = run_cell,
) -> bool:
    """Measure the ceiling of a cell whose trainer just ended and write `ceiling.json` into its run folder.

    The cell is not touched by a failure, which is recorded with its reason. The states are removed in every case.

    Returns:
        Whether the user interrupted it.
    """
    run_dir = out_dir / cell.run
    try:
        if cell.warmup or ended.exit_code != 0 or not run_dir.is_dir():
            return False
        found, record = _measure(cell, environment, out_dir, grace, run)
        (run_dir / CEILING_FILE).write_text(canonical_json(record), encoding="utf-8")
        return found is not None and found.outcome == "interrupted"
    finally:
        for path in run_dir.glob(f"*{STATES_FILE}*"):
            path.unlink()


def _measure(
    cell: Cell, environment: Mapping[str, str], out_dir: Path, grace: float, run: Runner = run_cell
) -> tuple[Ended | None, CeilingRecord]:
    states = Path(cell.run) / STATES_FILE
    if not (out_dir / states).is_file():
        return None, CeilingRecord(reason=f"the run left no {STATES_FILE}")
    pools = cell.pools if is_pinned(cell) else ()
    if cell.world_size > 1 and not pools:
        return None, CeilingRecord(reason="several pools are measured only where threads can be pinned")
    try:
        groups = find_value(read_json(out_dir / cell.run / CONFIG_FILE), "env", "physics_groups")
    except Refusal as refusal:
        return None, CeilingRecord(reason=str(refusal))
    options = () if groups is None else ("--groups", str(groups))
    seconds = min(SMOKE_SECONDS, SECONDS) if "training.smoke=true" in cell.arguments else SECONDS
    command = (states, environment, out_dir, seconds, *options)
    if len(pools) > 1:
        ended, ceilings = _run_program(PoolCeilings, pools, *command, grace=grace, run=run)
        return ended, CeilingRecord(ceilings=ceilings, reason=ended.reason)
    ended, ceiling = _run_program(Ceiling, pools, *command, grace=grace, run=run)
    return ended, CeilingRecord(ceiling=ceiling, reason=ended.reason)


def run_ceiling(
    states: Path,
    cpu_ids: Sequence[int] | None,
    environment: Mapping[str, str],
    folder: Path,
    seconds: float,
    *options: str,
) -> tuple[Ended, Ceiling | None]:
    """Run the ceiling program of one pool to its end.

    Args:
        states: File of recorded states, as seen from `folder`.
        cpu_ids: CPUs of the workers; None lets the program choose.
        environment: Its whole environment.
        folder: Its working directory.
        seconds: How long it measures.
        options: Further flags.

    Returns:
        How it ended, with the reason where it failed; and what it measured, or None.
    """
    return _run_program(Ceiling, [] if cpu_ids is None else [cpu_ids], states, environment, folder, seconds, *options)


def _run_program(
    model: type[Model],
    pools: Sequence[Sequence[int]],
    states: Path,
    environment: Mapping[str, str],
    folder: Path,
    seconds: float,
    *options: str,
    grace: float = GRACE_SECONDS,
    run: Runner = run_cell,
) -> tuple[Ended, Model | None]:
    placed = [word for pool in pools for word in ("--cpu-ids", ",".join(map(str, pool)))]
    with tempfile.TemporaryDirectory() as name:
        log, output = Path(name) / "logs" / "ceiling.log", Path(name) / CEILING_FILE
        log.parent.mkdir()
        command = [*PROGRAM, "--states", str(states), "--seconds", str(seconds), "--output", str(output)]
        ended = run([*command, *placed, *options], environment, folder, log, LIMIT_SECONDS, grace)
        if ended.outcome != "exited" or ended.exit_code != 0:
            return ended, None
        try:
            return ended, parse_model(model, output.read_bytes(), "the ceiling program's output")
        except (UsageError, OSError) as error:
            return replace(ended, reason=str(error)), None


def read_ceiling(
    run_dir: Path, cell: Cell, config: Mapping[str, Any], manifest: Mapping[str, Any], command: Mapping[str, Any]
) -> tuple[float | None, str | None]:
    """The ceiling of a cell in env steps/s from its `ceiling.json`, or None and the reason why there is none.

    A measurement counts only if it did the run's work: as many environments in as many groups, with as many workers on
    the same CPUs, with the same solver path, steps and engine, from iterations of the run; for each rank.
    """
    try:
        record = read_model(CeilingRecord, run_dir / CEILING_FILE)
    except UsageError as error:
        return None, str(error)
    if record.reason is not None:
        return None, record.reason
    if len(record.pools) != cell.world_size:
        return None, f"ranks of the run: {cell.world_size}, pools of the ceiling: {len(record.pools)}"
    for rank, found in enumerate(record.pools):
        problem = _deviation(cell, rank, found, config, manifest, command)
        if problem is not None:
            return None, problem
    return sum(found.env_steps_per_second for found in record.pools), None


def _deviation(
    cell: Cell,
    rank: int,
    found: Ceiling,
    config: Mapping[str, Any],
    manifest: Mapping[str, Any],
    command: Mapping[str, Any],
) -> str | None:
    """What the pool of a rank did that the run did not, or None."""
    of_rank = f"CPUs of rank {rank}" if cell.world_size > 1 else "CPUs"
    planned = cell.pools[rank] if is_pinned(cell) else None
    asked: dict[str, tuple[Any, Any]] = {
        "algo.num_envs": (find_value(config, "algo", "num_envs"), found.num_envs),
        "env.physics_profile": (find_value(config, "env", "physics_profile"), found.profile),
        "mujoco": (find_value(command, "versions", "mujoco"), found.mujoco),
        of_rank: (planned, found.cpu_ids),
        **{f"physics.{name}": (find_value(manifest, "physics", name), getattr(found, name)) for name in PHYSICS},
    }
    if cell.world_size > 1:  # its physics section is rank 0's
        asked[f"{of_rank} in {MANIFEST_FILE}"] = (_rank_cpus(manifest, rank), found.cpu_ids)
    if asked["physics.groups"][0] is None:  # an older run, which does not say
        del asked["physics.groups"]
    for what, (run, ceiling) in asked.items():
        if run != ceiling:
            return f"{what} of the run: {_plain(run)}, of the ceiling: {_plain(ceiling)}"
    most = find_value(config, "algo", "max_iterations")
    if not all(one < other for one, other in pairwise((0, *found.iterations, most + 1))):
        return f"the ceiling's iterations do not ascend within those of the run, 1 to {most}"
    return None


def _rank_cpus(manifest: Mapping[str, Any], rank: int) -> tuple[Any, ...] | None:
    """CPUs of a rank as the run recorded them, or None where it did not."""
    ranks = manifest.get("ranks")
    own = ranks[rank] if isinstance(ranks, list) and rank < len(ranks) else None
    cpu_ids = own.get("cpu_ids") if isinstance(own, dict) else None
    return tuple(cpu_ids) if isinstance(cpu_ids, list) else None


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else f"{value}"
