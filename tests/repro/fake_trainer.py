#!/usr/bin/env python3
"""A trainer that trains nothing and leaves a complete run directory in a fraction of a second.

Command line as the real one:
`fake_trainer.py --algo sac --task g1_walk_flat --sim mujoco training.log_dir=DIR [key=value …]`.
Times are synthetic: the environment steps of every window of the event file divided by its wall time give the run's
rate exactly, so a test knows the number that the suite must find.

Environment variables:
    FAKE_MODE     how the run ends (see MODES), default `ok`
    FAKE_RATE     env steps per second, default 10,000 for each CPU of the ranks' lists (one when there is no list)
    FAKE_NOISE    relative half-width of the noise of the rate between runs, default 0.01; drawn from `algo.seed` and
                  the name of the run directory, so the same run repeats exactly
    FAKE_LENGTH   mean episode length that the run grows to, default 100; returns are a quarter of it
    FAKE_TRACKING set to anything: log both tracking errors
    FAKE_STATES   what `training.record_states` leaves: `ok` (real physics, standing still at first), `none`, `damaged`
    FAKE_CODE     JSON of what command.json says about code, `git` and `source_sha256`
    FAKE_SECONDS  real seconds the process lives before it ends, default 0
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import math
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from unilab import names
from unilab.physics.spec import row_groups

MODES = {
    "ok": "a complete run, exit 0",
    "crash": "half the events, no run_end.json, a traceback, exit 1",
    "hang": "half the events, then nothing for an hour",
    "deaf_hang": "the same, and SIGTERM is ignored",
    "slow": "half the events, then the last progress line again and again, a little later each time",
    "teardown_hang": "a complete run, then nothing for an hour",
    "cut_log": "a complete run whose last event record lost its last bytes, exit 0",
    "nan": "the critic loss is NaN in the second half, exit 0",
    "clock_step": "the wall clock jumps inside the tail, the monotonic clock does not, exit 0",
    "no_run_end": "everything but run_end.json, exit 0",
    "failed_end": "run_end.json says failed, exit 1",
    "damaged": "one byte of a record in the middle is wrong, exit 0",
    "duplicate_steps": "two neighbouring events of the tail carry the same step, exit 0",
    "exit3": "no run directory, one line, exit 3",
}
HALVES = ("crash", "hang", "deaf_hang", "slow")
TRACKING_ERRORS: dict[str, float | None] = {"Episode/tracking_error_lin": 0.125, "Episode/tracking_error_ang": 0.25}
RANK_TAGS = (
    *(names.TOTAL_FPS, names.ITERATION_TIME, names.LEARNING_TIME, names.PHYSICS_FRACTION, names.EXPOSED_MS),
    *(names.COLLECTOR_WAIT_MS, names.INFERENCE_MS, names.ACTION_WAIT_MS, names.APPLY_MS, names.BACKEND_MS),
    names.PACK_MS,
)
WALL_START = 1_790_000_000.0  # s since 1970; any fixed instant, so that the files repeat byte for byte
MONOTONIC_START = 1_000.0  # s
STARTUP_SECONDS = 3.5
LOGGED_OVERSTATEMENT = 1.08  # Perf/total_fps is a mean of rates and lies above steps / time, as in real runs


@dataclass(frozen=True)
class RunOptions:
    """What a synthetic run contains.

    `rate` is in global env steps per second. `tags` adds or replaces constant scalars; a value of None drops the tag.
    """

    rate: float = 10_000.0
    mode: str = "ok"
    iterations: int = 60
    num_envs: int = 16
    batch_size: int = 64
    updates_per_step: int = 8
    world_size: int = 1
    seed: int = 1
    cpu_ids: tuple[int, ...] | None = None
    pools: tuple[tuple[int, ...], ...] | None = None  # CPUs of each of several ranks
    task: str = "g1_walk_flat"
    smoke: bool = True
    jitter: float = 0.2  # of one iteration, on the times between the quarter points of the run
    argv: tuple[str, ...] = ()
    trace: bool = False
    final_length: float = 100.0  # mean episode length in control steps that a run grows to from 20, linearly
    tags: dict[str, float | None] = field(default_factory=dict)


def write_run(run_dir: Path, options: RunOptions) -> Path:
    """Write a whole run directory in the state that `options.mode` leaves behind; return `run_dir`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    _write_json(run_dir / names.CONFIG_FILE, _config(options))
    _write_json(run_dir / names.COMMAND_FILE, _command(options))
    _write_json(run_dir / names.MANIFEST_FILE, _manifest(options))
    seconds = iteration_seconds(options)
    count = options.iterations // 2 if options.mode in HALVES else options.iterations
    records = [_record(options, iteration, seconds) for iteration in range(count)]
    damage = {"cut_log": "cut", "damaged": "flip"}.get(options.mode)
    write_events(run_dir / f"{names.EVENT_FILE_PREFIX}{int(WALL_START)}", records, damage)
    _write_progress(run_dir / names.PROGRESS_FILE, options, seconds[:count])
    if options.trace:
        span = {"ph": "X", "pid": 1, "tid": 1, "name": "Batch.step", "ts": 1e6 * MONOTONIC_START, "dur": 9e5 / 1e3}
        (run_dir / names.TRACE_FILE).write_text(f"[\n{json.dumps(span)}\n]\n", encoding="utf-8")
    if "algo.save_interval=0" in options.argv:
        (run_dir / names.CHECKPOINT_PATTERN.format(iteration=options.iterations)).write_bytes(b"no weights")
    if options.mode not in (*HALVES, "no_run_end"):
        _write_json(run_dir / names.RUN_END_FILE, _run_end(options, seconds))
    return run_dir


def write_events(path: Path, records: list[Event], damage: str | None = None) -> None:
    """Write an event file: the version record, then `records`; `damage` is None, "cut" or "flip"."""
    with path.open("wb") as stream:
        writer = RecordWriter(stream)
        writer.write(Event(wall_time=WALL_START, file_version="brain.Event:2").SerializeToString())
        for record in records:
            writer.write(record.SerializeToString())
    if damage is None:
        return
    content = bytearray(path.read_bytes())
    if damage == "cut":
        del content[-7:]
    else:
        content[len(content) // 2] ^= 0x10
    path.write_bytes(bytes(content))


def scalar_event(step: int, wall_time: float, tags: dict[str, float]) -> Event:
    """One record with all scalars of one iteration."""
    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()]
    return Event(step=step, wall_time=wall_time, summary=Summary(value=values))


def env_steps(options: RunOptions, iteration: int) -> int:
    """Cumulative global env steps after `iteration`, counted from zero."""
    if options.mode == "duplicate_steps" and iteration == options.iterations * 3 // 4:
        iteration -= 1
    return (iteration + 1) * options.num_envs * options.world_size


def iteration_seconds(options: RunOptions) -> list[float]:
    """Seconds from the first iteration to each one, exact at the quarter points of the run, jittered between them."""
    interval = options.num_envs * options.world_size / options.rate
    count = options.iterations
    exact = {0, count // 4, count // 2, count * 3 // 4, count - 1}
    draw = random.Random(options.seed)
    offsets = [0.0 if i in exact else options.jitter * (draw.random() - 0.5) for i in range(count)]
    return [(i + offset) * interval for i, offset in enumerate(offsets)]


def _record(options: RunOptions, iteration: int, seconds: list[float]) -> Event:
    wall_time = WALL_START + STARTUP_SECONDS + seconds[iteration]
    if options.mode == "clock_step" and iteration >= options.iterations * 3 // 4:
        wall_time += max(1.0, 0.5 * seconds[-1])
    return scalar_event(env_steps(options, iteration), wall_time, _tags(options, iteration))


def _tags(options: RunOptions, iteration: int) -> dict[str, float]:
    progress = iteration / options.iterations
    tick = options.num_envs * options.world_size / options.rate  # s
    nan = options.mode == "nan" and progress >= 0.5
    tags: dict[str, float | None] = {
        names.TRAIN_ITERATION: iteration + 1,
        names.MEAN_REWARD: -2.0 + (options.final_length / 4.0 - 5.0) * progress,
        names.MEAN_EPISODE_LENGTH: 20.0 + (options.final_length - 20.0) * progress,
        "Loss/actor": -1.0 - progress,
        "Loss/critic": math.nan if nan else 4.0 - 3.0 * progress,
        "Loss/temperature": 0.01,
        names.TOTAL_FPS: options.rate * (LOGGED_OVERSTATEMENT + 0.02 * math.sin(iteration)),
        names.ITERATION_TIME: tick,
        names.LEARNING_TIME: 0.3 * tick,
        names.PHYSICS_FRACTION: 0.9,
        names.EXPOSED_MS: 100.0 * tick,
        names.COLLECTOR_WAIT_MS: 920.0 * tick,
        names.INFERENCE_MS: 60.0 * tick,
        names.ACTION_WAIT_MS: 70.0 * tick,
        names.APPLY_MS: 10.0 * tick,
        names.BACKEND_MS: 900.0 * tick,
        names.PACK_MS: 15.0 * tick,
    }
    if options.world_size > 1:  # of each rank its own, which lie around the mean
        middle = (options.world_size - 1) / 2
        for rank, tag in itertools.product(range(options.world_size), RANK_TAGS):
            tags[names.rank_tag(tag, rank)] = (1.0 + 0.1 * (rank - middle)) * (tags[tag] or 0.0)
    tags.update(options.tags)
    return {tag: value for tag, value in tags.items() if value is not None}


def _config(options: RunOptions) -> dict[str, Any]:
    return override(_defaults(options), [word for word in options.argv if "=" in word])


def override(config: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """A configuration with the settings of `key=value` words."""
    for key, value in _overrides(words).items():
        section = config
        *sections, name = key.split(".")
        for inner in sections:
            section = section.setdefault(inner, {})
        section[name] = value.strip("'") if isinstance(value, str) else value
    return config


def _defaults(options: RunOptions) -> dict[str, Any]:
    return {
        "schema_version": names.SCHEMA_VERSION,
        "algo": {
            "algo": "sac",
            "num_envs": options.num_envs,
            "batch_size": options.batch_size,
            "replay_buffer_n": 512,
            "updates_per_step": options.updates_per_step,
            "policy_frequency": 4,
            "max_iterations": options.iterations,
            "save_interval": -1,
            "seed": options.seed,
        },
        "training": {
            "smoke": options.smoke,
            "task_name": options.task,
            "sim_backend": "mujoco",
            "logger": "tensorboard",
            "no_play": True,
            **({} if options.pools is None else {"dp_collector_cpu_ids": [list(pool) for pool in options.pools]}),
        },
        "env": {
            "physics_profile": "exact",
            "cpu_ids": list(options.cpu_ids) if options.cpu_ids is not None else None,
            "sim_dt": 0.00667,
            "ctrl_dt": 0.02,
        },
    }


def _command(options: RunOptions) -> dict[str, Any]:
    gpus = [] if options.smoke else [{"name": "Fake GPU", "uuid": f"GPU-{i:08d}"} for i in range(options.world_size)]
    return {
        "schema_version": names.SCHEMA_VERSION,
        "argv": list(options.argv),
        "environment": {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ},
        "git": {name: _planned_source()[name] for name in ("commit", "dirty", "diff_sha256")},
        "source_sha256": _planned_source()["trainer_sha256"] or "f" * 64,
        "versions": {"python": "3.12.0", "torch": "2.13.0", "mujoco": "4.0.0", "numpy": "2.3.0"},
        "affinity": [0, 1],
        "host": {
            "cpu_model": "Fake CPU",
            "cpu_count": 2,
            "memory_bytes": 8 * 2**30,
            "gpus": gpus,
            "platform": "Linux",
        },
        **json.loads(os.environ.get("FAKE_CODE", "{}")),
    }


def _planned_source() -> dict[str, Any]:
    """The code that the plan in the working directory names, as a trainer of the same checkout finds it."""
    plan = Path("plan.json")
    found: dict[str, Any] = json.loads(plan.read_text(encoding="utf-8"))["source"] if plan.is_file() else {}
    return {"commit": "0" * 40, "dirty": False, "diff_sha256": None, "trainer_sha256": "f" * 64} | found


def _manifest(options: RunOptions) -> dict[str, Any]:
    device = "cpu" if options.smoke else "cuda:0"
    rank = {
        "collector_backend_device": device,
        "gpu_name": None if options.smoke else "Fake GPU",
    }
    pools = [None if pool is None else list(pool) for pool in options.pools or [options.cpu_ids] * options.world_size]
    updates = options.updates_per_step
    collectives = updates - (-updates // 4) if options.world_size > 1 else 0
    return {
        "schema_version": names.SCHEMA_VERSION,
        "ranks": [
            {"rank": index, **rank, "gpu_uuid": None if options.smoke else f"GPU-{index:08}", "cpu_ids": pools[index]}
            for index in range(options.world_size)
        ],
        "dp_sync": {
            "world_size": options.world_size,
            "mode": names.GRADIENT_MEAN if options.world_size > 1 else "none",
            "gradient_collectives_per_iteration": collectives,
            "transport": "gloo" if options.world_size > 1 else "none",
        },
        "physics": {
            **{"profile": _config(options)["env"]["physics_profile"], "timestep": 1 / 150, "decimation": 3},
            **{"groups": len(row_groups(options.num_envs, 2)), "workers": len(pools[0] or (0,))},
        },
        "learner": {"algo": "sac", "amp": False, "compiled": False, "cuda_graph": False}
        | {"replay_rows": 512 * options.num_envs},
    }


def _run_end(options: RunOptions, seconds: list[float]) -> dict[str, Any]:
    failed = options.mode == "failed_end"
    return {
        "schema_version": names.SCHEMA_VERSION,
        "status": names.FAILED if failed else names.COMPLETED,
        "final_env_steps": env_steps(options, options.iterations - 1),
        "iterations": options.iterations,
        "event_count": options.iterations,
        "wall_seconds": STARTUP_SECONDS + seconds[-1],
        "startup_seconds": STARTUP_SECONDS,
        "exception": {"type": "RuntimeError", "message": "asked to fail"} if failed else None,
    }


def _write_progress(path: Path, options: RunOptions, seconds: list[float]) -> None:
    interval = options.num_envs * options.world_size / options.rate
    lines = [
        {
            "iteration": iteration + 1,
            "env_steps": env_steps(options, iteration),
            "monotonic_s": MONOTONIC_START + STARTUP_SECONDS + second,
            "physics_s": 0.9 * interval,
        }
        for iteration, second in enumerate(seconds)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(path)


def _overrides(words: list[str]) -> dict[str, Any]:
    """Read `key=value` words; a value that is JSON (numbers, lists, true, null) is taken as such."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise SystemExit(f"fake_trainer: expected key=value, found {word!r}")
        try:
            found[key.lstrip("+")] = json.loads(text)
        except json.JSONDecodeError:
            found[key.lstrip("+")] = text
    return found


def write_states(path: Path, num_envs: int, count: int) -> None:
    """Record real physics: robots that fall, `count` steps of them, as `FAKE_STATES` asks."""
    kind = os.environ.get("FAKE_STATES", "ok")
    if kind == "damaged":
        path.write_bytes(b"PK damaged")
    if kind != "ok":
        return
    from unilab.physics.mujoco_pool import MujocoPool
    from unilab.physics.spec import PhysicsSpec
    from unilab.physics.states import StateRecorder

    pool = MujocoPool(PhysicsSpec("unitree_g1/scene_flat.xml", 1 / 150, 3, "exact", 36, 35, 29, (), ()), num_envs)
    recorder = StateRecorder(pool, count)
    for index in range(count):
        recorder.take(index, slice(None), index + 1)
        pool.step()
    recorder.write(path)


def options_from(task: str, overrides: dict[str, Any], run_dir: Path, argv: list[str]) -> RunOptions:
    """The run that a command line and the FAKE_ variables ask for."""
    cpu_ids = overrides.get("env.cpu_ids")
    pools = overrides.get("training.dp_collector_cpu_ids")
    seed = int(overrides.get("algo.seed", 1))
    rate = float(os.environ.get("FAKE_RATE", 10_000 * sum(map(len, pools or [cpu_ids or [0]]))))
    noise = float(os.environ.get("FAKE_NOISE", "0.01"))
    devices = [entry for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry]
    defaults = RunOptions()
    return RunOptions(
        rate=rate * (1.0 + noise * random.Random(f"{seed}:{run_dir.name}").uniform(-1.0, 1.0)),
        mode=os.environ.get("FAKE_MODE", "ok"),
        iterations=int(overrides.get("algo.max_iterations", defaults.iterations)),
        num_envs=int(overrides.get("algo.num_envs", defaults.num_envs)),
        batch_size=int(overrides.get("algo.batch_size", defaults.batch_size)),
        updates_per_step=int(overrides.get("algo.updates_per_step", defaults.updates_per_step)),
        world_size=max(1, len(devices)),
        seed=seed,
        cpu_ids=tuple(cpu_ids) if cpu_ids is not None else None,
        pools=tuple(map(tuple, pools)) if pools is not None else None,
        task=task,
        smoke=bool(overrides.get("training.smoke", False)),
        argv=tuple(argv),
        trace=bool(overrides.get("training.trace_enabled", False)),
        final_length=float(os.environ.get("FAKE_LENGTH", defaults.final_length)),
        tags=dict(TRACKING_ERRORS) if "FAKE_TRACKING" in os.environ else {},
    )


def main(argv: list[str]) -> int:
    """Write the run directory that the command line asks for and end as FAKE_MODE says."""
    parser = argparse.ArgumentParser(prog="fake_trainer")
    parser.add_argument("--algo", required=True, choices=["sac"])
    parser.add_argument("--task", required=True)
    parser.add_argument("--sim", required=True)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args(argv)
    overrides = _overrides(arguments.overrides)
    run_dir = Path(str(overrides["training.log_dir"]))
    options = options_from(arguments.task, overrides, run_dir, argv)
    if options.mode not in MODES:
        print(f"fake_trainer: FAKE_MODE={options.mode!r}; known are {', '.join(MODES)}", file=sys.stderr)
        return names.EXIT_USAGE
    if options.mode == "exit3":
        print("train: no GPU is visible; add training.smoke=true for a run on the CPU", file=sys.stderr)
        return names.EXIT_HOST_UNFIT
    if run_dir.exists() and any(run_dir.iterdir()):
        print(f"train: {run_dir} is not empty; choose another training.log_dir", file=sys.stderr)
        return names.EXIT_USAGE
    return _run(run_dir, options, int(overrides.get("training.record_states", 0)))


def _run(run_dir: Path, options: RunOptions, snapshots: int) -> int:
    faulthandler.register(signal.Signals[names.STACKS_SIGNAL], file=2, all_threads=True)
    if options.mode == "deaf_hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(f"fake run: {options.iterations} iterations, mode {options.mode}", flush=True)
    unfinished = replace(options, mode="no_run_end") if options.mode == "ok" else options
    write_run(run_dir, unfinished)
    if snapshots:
        write_states(run_dir / names.STATES_FILE, options.num_envs, snapshots)
    try:
        if options.mode in ("hang", "deaf_hang", "teardown_hang"):
            wait_for_nothing()
        if options.mode == "slow":
            crawl(run_dir / names.PROGRESS_FILE)
        time.sleep(float(os.environ.get("FAKE_SECONDS", "0")))
    except KeyboardInterrupt:
        end = _run_end(options, iteration_seconds(options))
        _write_json(run_dir / names.RUN_END_FILE, {**end, "status": names.INTERRUPTED})
        return names.EXIT_INTERRUPTED
    if options.mode == "ok":
        _write_json(run_dir / names.RUN_END_FILE, _run_end(options, iteration_seconds(options)))
    if options.mode == "crash":
        raise RuntimeError("asked to crash")
    return names.EXIT_FAILED if options.mode == "failed_end" else names.EXIT_OK


def wait_for_nothing() -> None:
    """Hang, in a function that a dump of the stacks names."""
    time.sleep(3600.0)


def crawl(progress: Path) -> None:
    """Go on with iterations, forever."""
    line = json.loads(progress.read_text(encoding="utf-8").splitlines()[-1])
    while True:
        time.sleep(0.05)
        line = {name: value + 1 for name, value in line.items()}
        with progress.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
