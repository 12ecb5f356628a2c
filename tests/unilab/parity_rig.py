"""An environment and its pool on one side, reference robots on the other, step by step; tasks say what is compared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import mujoco
import numpy as np
import numpy.typing as npt
import torch

from unilab.environment import Environment
from unilab.physics.mujoco_pool import MujocoPool
from unilab.physics.spec import RESET, ROBOTS
from unilab.state import StateRegistry
from unilab.tasks.velocity_task import VelocityTask

Array = npt.NDArray[np.float64]
CPU = torch.device("cpu")
ROBOTS_SIDE_BY_SIDE = 8


class Robot(Protocol):
    """A robot stepped by mj_step, with its task's arithmetic."""

    steps: int

    def act(self, action: Array, ctrl: Array) -> None: ...


R = TypeVar("R", bound=Robot)


class Comparison(ABC, Generic[R]):
    """Eight robots of each side; `first_steps` of the first four lie before a time limit."""

    def __init__(self, task: VelocityTask, first_steps: list[int], build: Callable[[int], R]) -> None:
        self.env = Environment(task, ROBOTS_SIDE_BY_SIDE, CPU, torch.Generator().manual_seed(11), StateRegistry())
        self.pool = MujocoPool(task.spec, ROBOTS_SIDE_BY_SIDE)
        self.env.begin()
        self.env.episodes.steps[:4] = torch.tensor(first_steps)
        self.robots = [build(steps) for steps in self.env.episodes.steps.tolist()]
        self.worst = {"qpos": 0.0, "critic": 0.0, "reset critic": 0.0, "reward": 0.0}
        self.seen = {"terminated": 0, "timeout": 0}

    @abstractmethod
    def reset(self, index: int) -> Array:
        """The robot's first observation of an episode that the environment began."""

    @abstractmethod
    def compare(self) -> None:
        """Hold what the environment made of a step against the robots."""

    def run(self, steps: int, amplitude: list[float]) -> None:
        """Random actions within each robot's amplitude; some robots fall, some come to the time limit."""
        noise, width = torch.Generator().manual_seed(2), self.env.task.action_dim
        for _ in range(steps):
            for index in np.flatnonzero(self.env.codes.numpy() == RESET).tolist():
                self.note("reset critic", self.env.critic[index], self.reset(index))
            actions = torch.rand(ROBOTS_SIDE_BY_SIDE, width, generator=noise) * 2 - 1
            self.step(actions * torch.tensor(amplitude).unsqueeze(1))
        assert min(self.seen.values()) >= 2

    def step(self, action: torch.Tensor) -> None:
        env = self.env
        env.control(action)
        self.pool.apply(env.ctrl.numpy(), env.codes.numpy(), env.reset_rows.numpy())
        self.pool.step()
        self.pool.pack(env.fields.numpy())
        for index, robot in enumerate(self.robots):
            robot.act(action[index].double().numpy(), env.ctrl[index].double().numpy())
        env.draw()
        env.complete()
        env.summarize()
        self.compare()
        assert env.valid.all()
        env.restart(env.finished)
        for robot, code in zip(self.robots, env.codes.tolist(), strict=True):
            robot.steps = 0 if code == RESET else robot.steps

    def compare_ends(self, index: int, terminated: bool, truncated: bool) -> None:
        """Of one robot's episode."""
        env, timeout = self.env, truncated and not terminated
        assert (bool(env.terminated[index]), bool(env.truncated[index])) == (terminated, truncated)
        assert bool(env.timeout[index]) == timeout
        assert bool(env.finished[index]) == (terminated or truncated)
        self.seen["terminated"] += terminated
        self.seen["timeout"] += timeout

    def note(self, what: str, found: torch.Tensor, expected: Any) -> None:
        self.worst[what] = max(self.worst[what], float(np.abs(found.double().numpy() - expected).max()))


def reference_model(scene: str, timestep: float, profile: str) -> mujoco.MjModel:
    """A scene with the options of a physics profile."""
    model = mujoco.MjModel.from_xml_path(str(ROBOTS / scene))
    model.opt.timestep = timestep
    if profile == "exact":
        model.opt.jacobian = mujoco.mjtJacobian.mjJAC_SPARSE
        model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_ISLAND
    return model
