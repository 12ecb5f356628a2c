"""Deterministic episodes of a trained policy on the CPU: no observation noise, no pushes, always the same draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unilab.config import RunConfig
from unilab.environment import Environment
from unilab.learner import Actor
from unilab.physics.mujoco_pool import MujocoPool
from unilab.state import StateRegistry

SEED = 0  # of commands, starting states and model parameters: every policy of a task gets the same


@dataclass(frozen=True)
class Evaluation:
    """Outcome of the first episode of each environment, one number per episode.

    The errors are means over an episode's steps. A step whose physics broke, which ends its episode as a fall, counts
    as one of a robot that stands still.

    Attributes:
        returns: sum of rewards, with the penalty factor of the checkpoint.
        lengths: control steps.
        falls: whether the robot fell.
        errors_lin: norm of commanded minus actual planar velocity, m/s.
        errors_ang: absolute difference of commanded and actual yaw rate, rad/s.
        standing_lin: what `errors_lin` were if the robot stood still: the norm of the command.
        standing_ang: the same of `errors_ang`.
    """

    returns: list[float]
    lengths: list[int]
    falls: list[bool]
    errors_lin: list[float]
    errors_ang: list[float]
    standing_lin: list[float]
    standing_ang: list[float]


def evaluate(config: RunConfig, checkpoint: dict[str, Any], episodes: int) -> Evaluation:
    """Run one episode in each of `episodes` environments.

    Args:
        config: the run's configuration.
        checkpoint: as `load_run` returns it.
        episodes: environments.
    """
    returns, lengths = torch.zeros(episodes), torch.zeros(episodes, dtype=torch.int64)
    fell, running = torch.zeros(episodes, dtype=torch.bool), torch.ones(episodes, dtype=torch.bool)
    errors, standing = torch.zeros(episodes, 2, dtype=torch.float64), torch.zeros(episodes, 2)
    for environment in rollout(config, checkpoint, episodes):
        still = _standing(environment.command)
        standing = torch.where(lengths.unsqueeze(1) == 0, still, standing)
        error = torch.where(environment.valid.unsqueeze(1), environment.tracking_errors, still)
        errors += torch.where(running.unsqueeze(1), error, 0.0)
        returns += torch.where(running, environment.reward, 0.0)
        lengths += running
        fell |= running & (environment.terminated | ~environment.valid)
        running &= ~environment.finished
        if not running.any():
            break
    means = errors / lengths.unsqueeze(1)
    per_episode = (returns, lengths, fell, *means.unbind(1), *standing.unbind(1))
    return Evaluation(*(values.tolist() for values in per_episode))


def _standing(command: Tensor) -> Tensor:
    """Errors (N, 2) of a robot that stands still under a command (N, 3): planar, then yaw."""
    return torch.stack((command[:, :2].square().sum(1).sqrt(), command[:, 2].abs()), dim=1)


def record(config: RunConfig, checkpoint: dict[str, Any], num_envs: int, steps: int) -> NDArray[np.float32]:
    """Positions (steps, num_envs, nq) after every control step; robots that fell begin anew."""
    positions = []
    for environment in islice(rollout(config, checkpoint, num_envs), steps):
        columns = environment.task.spec.columns["qpos"]
        positions.append(environment.fields[:, columns].numpy().copy())
    return np.stack(positions)


def rollout(config: RunConfig, checkpoint: dict[str, Any], num_envs: int) -> Iterator[Environment]:
    """Control steps without end, with the squashed mean of the policy as the action.

    Starting states, commands, gains and masses are drawn as in training: those are the robots the policy is for.

    Returns:
        The environment after each step, its transition complete and its finished rows not yet restarted.

    Raises:
        ValueError: if the checkpoint holds no penalty factor.
    """
    environment = _quiet_environment(config, num_envs)
    actor = config.algo.build_actor(environment.task.obs_dim, environment.task.action_dim)
    actor.load_state_dict(checkpoint["actor"])
    try:
        environment.episodes.penalty_scale.copy_(checkpoint["state"]["env/penalty_scale"])
        if not environment.episodes.penalty_scale.isfinite():
            raise RuntimeError("it is not finite")
    except (KeyError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the checkpoint does not hold a penalty factor: {reason}") from None
    return _steps(environment, actor)


def _steps(environment: Environment, actor: Actor) -> Iterator[Environment]:
    pool = MujocoPool(environment.task.spec, environment.num_envs)
    environment.begin()
    environment.episodes.steps.zero_()
    while True:
        with torch.no_grad():
            environment.control(actor.deterministic(environment.obs))
        pool.apply(environment.ctrl.numpy(), environment.codes.numpy(), environment.reset_rows.numpy())
        pool.step()
        pool.pack(environment.fields.numpy())
        environment.draw()
        environment.complete()
        yield environment
        environment.restart(environment.finished)


def _quiet_environment(config: RunConfig, num_envs: int) -> Environment:
    noise = dict.fromkeys(config.env.observation_noise, 0.0)
    quiet = replace(config, env=replace(config.env, observation_noise=noise))
    task = quiet.build_task(num_envs, torch.device("cpu"))
    task.push_interval = None
    generator = torch.Generator().manual_seed(SEED)
    return Environment(task, num_envs, task.device, generator, StateRegistry())
