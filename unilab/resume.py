"""Going on with a run: from which checkpoint, whether it fits, and where the new attempt writes."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unilab.actor_semantics import describe_actor, verify_actor
from unilab.algorithm import LATEST
from unilab.checkpoint import (
    FORMAT,
    Checkpoint,
    attempts,
    check_origin,
    find_run,
    load_checkpoint,
    load_config_file,
    load_run_config,
    run_of,
    shown,
    wrong_numbers,
)
from unilab.config import RunConfig
from unilab.environment import Environment
from unilab.event_log import is_written
from unilab.learner import Actor
from unilab.names import ATTEMPT_PATTERN, MANIFEST_FILE
from unilab.state import StateRegistry
from unilab.streams import PREFIX, STREAMS, stream_seed
from unilab.tasks.velocity_task import VelocityTask

# Bytes of a random generator's state in torch: of the CPU's Mersenne Twister, of CUDA's Philox.
_STATE_BYTES = frozenset({5056, 16})

# Settings that say where a run is, not what it does.
_PLACES = ("algo.resume", "algo.load_run", "algo.checkpoint", "training.log_root", "training.log_dir")


@dataclass(frozen=True)
class Resume:
    """How a run goes on.

    Attributes:
        directory: where the new attempt writes, not yet made.
        checkpoint: where it goes on from.
        changes: settings that differ from those the checkpoint was trained with, one text each.
        new_streams: whether random streams begin anew, since the checkpoint's are those of another kind of device.
    """

    directory: Path
    checkpoint: Checkpoint
    changes: tuple[str, ...]
    new_streams: bool = False

    def facts(self) -> dict[str, Any]:
        """What the attempt's JSON files say of it; the file's path is relative to the run's directory."""
        file = self.checkpoint.file.absolute().relative_to(self.directory.absolute().parent)
        return {
            "file": file.as_posix(),
            "iteration": self.checkpoint.iteration,
            "env_steps": self.checkpoint.env_steps,
            "sha256": self.checkpoint.sha256,
            "new_streams": self.new_streams,
        }

    def lines(self, target: int) -> list[str]:
        """What a person is told.

        Args:
            target: the iteration that the run goes on to.
        """
        found = self.checkpoint
        place = f"iteration {found.iteration}, env step {found.env_steps}"
        ring = "the replay ring is not saved and fills anew before the first update"
        told = [f"RESUMED from {found.file} at {place}, up to iteration {target}; {ring}"]
        if self.new_streams:
            told.append("random streams begin anew: the checkpoint was trained on another kind of device")
        return [*told, f"changed since then: {', '.join(self.changes)}"] if self.changes else told


def plan_resume(config: RunConfig, task: VelocityTask, device: torch.device, ranks: int = 1) -> Resume:
    """Find the checkpoint that `algo.load_run` and `algo.checkpoint` ask for, and check that the run can go on from it.

    Args:
        config: the run as it is to go on.
        task: its task.
        device: the learner's device.
        ranks: how many it goes on with; sizes are per rank, so another number is a change like others.

    Raises:
        ValueError: one line, if there is no such checkpoint or it does not fit; nothing of it was used then.
    """
    directory = find_run(_asked_run(config), config)
    load_run_config(directory, config)
    run = run_of(directory)
    for folder in filter(is_written, (run, *attempts(run))):
        raise ValueError(f"a run still writes {folder}; wait for its end, or end it, before going on")
    checkpoint = load_checkpoint(directory, config.algo.checkpoint)
    check_origin(checkpoint, config)
    _check_facts(checkpoint, config, task)
    verify_actor(checkpoint.content, describe_actor(config.algo, task.obs_dim, task.action_dim), checkpoint.file)
    _check_state(checkpoint)
    usable = _streams_of(checkpoint, config, device)
    _try_state(usable, config, device)
    _check_values(checkpoint, config.algo.build_actor(task.obs_dim, task.action_dim))
    before = {"ranks": _ranks(checkpoint.file.parent, ranks)} | load_config_file(checkpoint.file.parent).to_json()
    now = {"ranks": ranks} | config.to_json()
    return Resume(next_attempt(run), usable, tuple(_changes(before, now)), usable is not checkpoint)


def _ranks(folder: Path, now: int) -> int:
    """How many ranks wrote a folder's files; as many as now where it does not say."""
    try:
        return int(json.loads((folder / MANIFEST_FILE).read_text())["dp_sync"]["world_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return now


def next_attempt(run: Path) -> Path:
    """The folder of a run's next attempt, not yet made; the run's own directory is the first one."""
    numbers = [int(path.name.rpartition("-")[2]) for path in attempts(run)]
    return run / ATTEMPT_PATTERN.format(number=f"{max(numbers, default=1) + 1:03d}")


def _asked_run(config: RunConfig) -> str:
    """The run that is asked for: `training.log_dir` stands for it as well, since an attempt is written inside."""
    run, log_dir = config.algo.load_run, config.training.log_dir
    if log_dir is None:
        return run
    if run == LATEST:
        return log_dir
    if run_of(Path(run).expanduser()).resolve() != Path(log_dir).expanduser().resolve():
        raise ValueError(
            f"algo.load_run={run} is written on inside that run, not in training.log_dir={log_dir}; "
            "leave training.log_dir out"
        )
    return run


def _check_facts(checkpoint: Checkpoint, config: RunConfig, task: VelocityTask) -> None:
    content, file, target = checkpoint.content, checkpoint.file, config.algo.max_iterations
    version = content.get("format")
    if type(version) is not int or version < FORMAT:
        raise ValueError(
            f"{file} has format {shown(version)}; the minimum supported format is {FORMAT}, "
            "retraining with the current version is the only way to recover"
        )
    wanted = {"obs_dim": task.obs_dim, "critic_dim": task.critic_dim, "action_dim": task.action_dim}
    apart = [
        f"{name} {shown(content.get(name))}, not {value!r}"
        for name, value in wanted.items()
        if type(content.get(name)) is not int or content[name] != value
    ]
    if apart:
        raise ValueError(f"{file} has {'; '.join(apart)}; choose what it was trained with")
    if checkpoint.iteration >= target:
        raise ValueError(
            f"{file} is at iteration {checkpoint.iteration} of algo.max_iterations={target}: nothing is left to do; "
            "set a larger algo.max_iterations"
        )


def _check_state(checkpoint: Checkpoint) -> None:
    state = checkpoint.content.get("state")
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise ValueError(f"{checkpoint.file}: state must hold tensors by name")


def _check_values(checkpoint: Checkpoint, actor: Actor) -> None:
    """Refuse values with which every further update would be skipped or wrong.

    Metrics may hold any, as those of a skipped update do.
    """
    state = {name: value for name, value in checkpoint.content["state"].items() if not name.startswith("learner/")}
    if (problem := wrong_numbers(state, actor)) is not None:
        raise ValueError(f"{checkpoint.file}: {problem}; choose an earlier one with algo.checkpoint")


def _streams_of(checkpoint: Checkpoint, config: RunConfig, device: torch.device) -> Checkpoint:
    """The checkpoint, with new random streams where its own are those of another kind of device."""
    state, own = checkpoint.content["state"], torch.Generator(device)
    found = {name.removeprefix(PREFIX): value for name, value in state.items() if name.startswith(PREFIX)}
    kinds = {(value.dtype, *value.shape) for value in found.values()}
    others = {(torch.uint8, size) for size in _STATE_BYTES - {own.get_state().numel()}}
    if set(found) != set(STREAMS) or len(kinds) != 1 or not kinds <= others:
        return checkpoint
    seeds = {name: stream_seed(config.algo.seed, name, resumed=checkpoint.iteration) for name in STREAMS}
    streams = {f"{PREFIX}{name}": own.manual_seed(seed).get_state() for name, seed in seeds.items()}
    return replace(checkpoint, content={**checkpoint.content, "state": {**state, **streams}})


def _try_state(checkpoint: Checkpoint, config: RunConfig, device: torch.device) -> None:
    """Try optimizers and all other state on a registry like the run's: names, shapes, types, states of generators."""
    try:
        _lasting_state(config, device).restore(checkpoint.content["state"], lasting=True)
    except (ValueError, RuntimeError) as error:
        reason = textwrap.shorten(str(error), 300, placeholder=" …")
        raise ValueError(f"{checkpoint.file} does not fit this run: {reason}; set what it was trained with") from None


def _lasting_state(config: RunConfig, device: torch.device) -> StateRegistry:
    """A registry with the lasting entries of a run. A single environment on the CPU has the same ones."""
    registry, cpu, algo = StateRegistry(), torch.device("cpu"), replace(config.algo, num_envs=1)
    task = config.build_task(1, cpu)
    for stream in STREAMS:
        registry.generator(f"{PREFIX}{stream}", torch.Generator(device))
    Environment(task, 1, cpu, torch.Generator(), registry)
    algo.build_learner((task.obs_dim, task.critic_dim, task.action_dim), cpu, False, registry)
    return registry


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Settings that differ, as `key=value (value before)`."""
    found: list[str] = []
    for name, value in now.items():
        key, former = f"{prefix}{name}", before.get(name)
        if isinstance(value, dict) and isinstance(former, dict):
            found += _changes(former, value, f"{key}.")
        elif value != former and key not in _PLACES:
            found.append(f"{key}={value} ({former})")
    return found
