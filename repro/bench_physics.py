"""`repro bench physics`: what the CPUs of this host give when they do nothing but `mj_step`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Literal, NoReturn

from repro import text
from repro.ceiling import Ceiling, run_ceiling
from repro.errors import HostUnfitError, UsageError
from repro.host import Host, find_host
from repro.launch import Ended, run_cell, trainer_environment
from repro.layout import TELEMETRY_DIR
from repro.place import Cpu, usable_cpus
from repro.plan import CEILING_SNAPSHOTS, VISIBLE_DEVICES
from repro.schema import Strict, canonical_json
from repro.spin import NOISE_LIMIT
from repro.telemetry import Sampler, read_telemetry
from unilab.names import EXIT_HOST_UNFIT, EXIT_OK, EXIT_USAGE, STATES_FILE

PROFILES = ("reference", "exact", "fast")
TRAINING_LIMIT_SECONDS = 900.0
# Where the states come from when none are given: a short run, on a host without a GPU a small one.
TRAINING = ("--algo", "sac", "--task", "g1_walk_flat", "--sim", "mujoco", "training.no_play=true")
SHORT = ("algo.max_iterations=60", "algo.save_interval=-1", f"training.record_states={CEILING_SNAPSHOTS}")
SMALL = (
    *("training.smoke=true", "algo.num_envs=64", "algo.batch_size=64"),
    *("algo.actor_hidden_dim=64", "algo.critic_hidden_dim=64"),
)


class PhysicsRow(Strict):
    """One measurement.

    Attributes:
        workers: Physics threads.
        cpu_ids: Their CPUs; None where they cannot be pinned.
        profile: Solver path.
        env_steps_per_second: Rate of the pool.
        c_loop_env_steps_per_second: Rate of the plain C loop, in turn with the pool; None without one.
        ratio: Pool / C loop.
    """

    workers: int
    cpu_ids: tuple[int, ...] | None
    profile: str
    env_steps_per_second: float
    c_loop_env_steps_per_second: float | None
    ratio: float | None


class PhysicsBench(Strict):
    """What `repro bench physics --json` prints.

    Attributes:
        schema_version: Of this object.
        num_envs: Environments of a batch.
        snapshots: Recorded states that were stepped in turn.
        decimation: Physics steps of an env step.
        mujoco: Version of the engine.
        cpu_model: Name of the CPU.
        c_loop_reason: Why there is no C loop, or None.
        foreign_share: Work of other processes meanwhile as a share of the CPUs that may be used; None where the system
            does not say.
        rows: Every measurement.
    """

    schema_version: Literal[1]
    num_envs: int
    snapshots: int
    decimation: int
    mujoco: str
    cpu_model: str
    c_loop_reason: str | None
    foreign_share: float | None
    rows: tuple[PhysicsRow, ...]


def run_bench(arguments: argparse.Namespace, trainer: Sequence[str]) -> int:
    """Measure and print; returns the exit code. Raises as `bench_physics`."""
    found = bench_physics(arguments, *find_host(), trainer)
    sys.stdout.write(canonical_json(found) if arguments.json else "".join(f"{line}\n" for line in physics_lines(found)))
    return EXIT_OK


def bench_physics(
    arguments: argparse.Namespace, host: Host, topology: tuple[Cpu, ...], trainer: Sequence[str]
) -> PhysicsBench:
    """Measure the `mj_step` ceiling for every worker count and solver path that is asked for.

    Args:
        arguments: `states`, `workers`, `profiles` and `seconds` of the command line.
        host: Facts of the host.
        topology: Its allowed CPUs.
        trainer: Start of the command that trains, for states of its own.

    Raises:
        UsageError: If there is no such file, or a count or profile cannot be had here.
        HostUnfitError: If this host cannot train.
        ChildProcessError: If a program failed.
    """
    usable = usable_cpus(topology, host.cgroup_cpus)
    counts, profiles = _worker_counts(arguments.workers, usable), _profiles(arguments.profiles)
    if not 0 < arguments.seconds < 3600:
        raise UsageError(f"--seconds {arguments.seconds:g}: must be above 0 and below 3600")
    if arguments.states is not None and not arguments.states.is_file():
        raise UsageError(f"--states {arguments.states} is not a file; leave it out, and states are recorded first")
    environment = trainer_environment(os.environ)
    found = []
    with tempfile.TemporaryDirectory(prefix="repro-bench-") as name:
        folder = Path(name)
        states = arguments.states or _record(folder, host, environment, trainer)
        telemetry = folder / TELEMETRY_DIR / "bench.jsonl"
        with Sampler(telemetry, (), ()) as sampler:
            for profile, count in product(profiles, counts):
                cpus = usable[:count] if sys.platform == "linux" else None
                options = ("--profile", profile, "--c-loop")
                ended, ceiling = run_ceiling(states.absolute(), cpus, environment, folder, arguments.seconds, *options)
                found.append(_required(ended, ceiling))
        samples = read_telemetry(telemetry, sampler.count)
    foreign = [sample.foreign_cpus for sample in samples if sample.foreign_cpus is not None]
    return _summary(found, fmean(foreign) / len(usable) if foreign else None)


def physics_lines(found: PhysicsBench) -> list[str]:
    """A measurement as a table for people."""
    rows = [
        [
            str(row.workers),
            text.cpu_list(row.cpu_ids or ()),
            row.profile,
            text.rate(row.env_steps_per_second),
            text.rate(row.c_loop_env_steps_per_second),
            text.number(row.ratio, 3),
        ]
        for row in found.rows
    ]
    headers = ("workers", "CPUs", "profile", "env steps/s", "C loop", "ratio")
    return [
        f"mj_step ceiling: {text.count_of(found.snapshots, 'recorded state')} of "
        f"{text.count_of(found.num_envs, 'environment')}, {found.decimation} physics steps each, "
        f"MuJoCo {found.mujoco}, {found.cpu_model}",
        text.plain_table(headers, rows, "rllrrr"),
        *([] if found.c_loop_reason is None else [f"no C loop: {found.c_loop_reason}"]),
        *_noise(found.foreign_share),
    ]


def _noise(foreign_share: float | None) -> list[str]:
    """One line where other work took so much of the CPUs that the rates are not the host's own."""
    if foreign_share is None or foreign_share <= NOISE_LIMIT:
        return []
    return [
        f"NOISY: work of other processes took {text.percent(foreign_share)} of the CPUs meanwhile, the limit is "
        f"{text.percent(NOISE_LIMIT)}; end it and measure again"
    ]


def _worker_counts(asked: str | None, usable: tuple[int, ...]) -> list[int]:
    """Worker counts: those asked for, else one, all but the learner's CPU, and all."""
    most = len(usable)
    if asked is None:
        return sorted({1, max(1, most - 1), most}) if sys.platform == "linux" else [most]
    words = asked.split(",")
    if not all(word.isdecimal() and int(word) >= 1 for word in words):
        raise UsageError(f"--workers {asked}: write counts with commas, for example 1,{most}")
    counts = [int(word) for word in words]
    if max(counts) > most:
        raise UsageError(f"--workers {asked}: this host offers {text.count_of(most, 'CPU')}")
    if sys.platform != "linux" and set(counts) != {most}:
        raise UsageError(f"--workers {asked}: threads can be placed on Linux only; leave it out")
    return counts


def _profiles(asked: str | None) -> list[str]:
    names = list(PROFILES) if asked is None else asked.split(",")
    unknown = [name for name in names if name not in PROFILES]
    if unknown:
        raise UsageError(f"--profiles {asked}: no profile {unknown[0]!r}; there are {', '.join(PROFILES)}")
    return names


def _record(folder: Path, host: Host, environment: Mapping[str, str], trainer: Sequence[str]) -> Path:
    """Train for a short time in `folder`; returns the recorded states."""
    run, log = folder / "run", folder / "logs" / "train.log"
    log.parent.mkdir()
    on_gpu = host.gpu_unusable is None
    visible = {VISIBLE_DEVICES: host.visible_gpus[0]} if on_gpu else {}
    command = [*trainer, *TRAINING, *SHORT, *(() if on_gpu else SMALL), f"training.log_dir={run}"]
    ended = run_cell(command, {**environment, **visible}, folder, log, TRAINING_LIMIT_SECONDS)
    if ended.exit_code != 0:
        _fail(ended, "the training that records states")
    if not (run / STATES_FILE).is_file():
        raise ChildProcessError(f"the training left no {STATES_FILE}")
    return run / STATES_FILE


def _required(ended: Ended, ceiling: Ceiling | None) -> Ceiling:
    if ceiling is None:
        _fail(ended, "the ceiling program")
    return ceiling


def _fail(ended: Ended, what: str) -> NoReturn:
    """Raise what the end of a program means for the caller."""
    if ended.outcome == "interrupted":
        raise KeyboardInterrupt
    message = f"{what}: {ended.reason}"
    if ended.exit_code == EXIT_USAGE:
        raise UsageError(message)
    if ended.exit_code == EXIT_HOST_UNFIT:
        raise HostUnfitError(message)
    raise ChildProcessError(message)


def _summary(found: list[Ceiling], foreign_share: float | None) -> PhysicsBench:
    first = found[0]
    return PhysicsBench(
        schema_version=1,
        num_envs=first.num_envs,
        snapshots=len(first.iterations),
        decimation=first.decimation,
        mujoco=first.mujoco,
        cpu_model=first.cpu_model,
        c_loop_reason=first.c_loop_reason,
        foreign_share=foreign_share,
        rows=tuple(map(_row, found)),
    )


def _row(found: Ceiling) -> PhysicsRow:
    plain = None if found.c_loop is None else found.c_loop.env_steps_per_second
    return PhysicsRow(
        workers=found.workers,
        cpu_ids=found.cpu_ids,
        profile=found.profile,
        env_steps_per_second=found.env_steps_per_second,
        c_loop_env_steps_per_second=plain,
        ratio=None if plain is None else found.env_steps_per_second / plain,
    )
