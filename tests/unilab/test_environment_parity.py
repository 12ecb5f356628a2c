"""One control step against values computed from the task's published text: numpy in float64 and one MjData per robot.

The reference below takes from the project only what is drawn or chosen: reset rows, commands, first phases, actions
and the episode counters it starts with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mujoco
import numpy as np
import numpy.typing as npt
import pytest
import torch

from unilab.environment import Environment
from unilab.physics.mujoco_pool import MujocoPool
from unilab.physics.spec import RESET, ROBOTS
from unilab.state import StateRegistry
from unilab.tasks.g1_walk_flat import G1WalkFlat, G1WalkFlatConfig, G1WalkFlatRewards

Array = npt.NDArray[np.float64]
ROBOTS_SIDE_BY_SIDE, STEPS = 8, 40
LEG = [-0.312, 0, 0, 0.669, -0.363, 0]
STAND = np.array([*LEG, *LEG, 0, 0, 0, 0.2, 0.2, 0, 0.6, 0, 0, 0, 0.2, -0.2, 0, 0.6, 0, 0, 0])
POSE_WEIGHTS = np.array([0.01, 1, 5, 0.01, 5, 5] * 2 + [50] * 17)
TURN = 2 * np.pi


def swing_height(phase: float) -> float:
    share = ((phase + np.pi) % TURN) / TURN
    smooth = [s * s * (3 - 2 * s) for s in (2 * share, 2 * share - 1)]
    return 0.09 * (smooth[0] if share <= 0.5 else 1 - smooth[1])


@dataclass
class ReferenceRobot:
    """One robot, stepped by mj_step, and the task's arithmetic for it."""

    model: mujoco.MjModel
    steps: int
    command: Array = field(default_factory=lambda: np.zeros(3))
    phase: Array = field(default_factory=lambda: np.zeros(2))
    action: Array = field(default_factory=lambda: np.zeros(29))
    previous: Array = field(default_factory=lambda: np.zeros(29))

    def __post_init__(self) -> None:
        self.data = mujoco.MjData(self.model)

    def reset(self, row: Array, command: Array, phase: Array) -> Array:
        """Start an episode; returns its first critic observation, from sensors that are up to date."""
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:], self.data.qvel[:] = row[:36], row[36:71]
        self.model.actuator_gainprm[:, 0] = row[71:100]
        self.model.actuator_biasprm[:, 1], self.model.actuator_biasprm[:, 2] = -row[71:100], -row[100:129]
        self.command, self.phase = command.copy(), phase.copy()
        self.action, self.previous = np.zeros(29), np.zeros(29)
        fresh = mujoco.MjData(self.model)
        fresh.qpos[:], fresh.qvel[:] = self.data.qpos, self.data.qvel
        mujoco.mj_forward(self.model, fresh)
        return self.critic(fresh)

    def act(self, action: Array, ctrl: Array) -> None:
        """Hold the targets for three physics steps."""
        np.testing.assert_allclose(ctrl, STAND + action, rtol=0, atol=3e-7)
        self.previous, self.action = self.action, action.copy()
        self.data.ctrl[:] = ctrl
        for _ in range(3):
            mujoco.mj_step(self.model, self.data)
        self.steps += 1
        self.phase = (self.phase + TURN * 1.5 * 0.02) % TURN

    def sensor(self, name: str, data: mujoco.MjData | None = None) -> Array:
        return (data or self.data).sensor(name).data.copy()

    def critic(self, data: mujoco.MjData | None = None) -> Array:
        state = data or self.data
        return np.concatenate(
            (
                0.25 * self.sensor("torso_gyro", state),
                -self.sensor("torso_upvector", state),
                state.qpos[7:] - STAND,
                0.05 * state.qvel[6:],
                self.action,
                self.command,
                self.phase,
                2 * self.sensor("pelvis_local_linvel", state),
            )
        )

    def reward(self, penalty: float) -> float:
        v, w, u = (self.sensor(name) for name in ("pelvis_local_linvel", "torso_gyro", "torso_upvector"))
        feet = [self.sensor(f"{side}_foot_quat") for side in ("left", "right")]
        heights = [self.sensor(f"{side}_foot_pos")[2] for side in ("left", "right")]
        error = sum((z - swing_height(phase)) ** 2 for z, phase in zip(heights, self.phase, strict=True))
        gains = 2.0 * np.exp(-((self.command[0] - v[0]) ** 2 + (self.command[1] - v[1]) ** 2) / 0.25)
        gains += 1.5 * np.exp(-((self.command[2] - w[2]) ** 2) / 0.25) + 5.0 * np.exp(-error / 0.04) + 10.0
        costs = 1.0 * (w[0] ** 2 + w[1] ** 2) + 10.0 * (u[0] ** 2 + u[1] ** 2)
        costs += 4.0 * np.sum((self.action - self.previous) ** 2)
        costs += 0.5 * np.sum(POSE_WEIGHTS * (self.data.qpos[7:] - STAND) ** 2)
        costs += 20.0 * sum(quat[1] ** 2 + quat[2] ** 2 for quat in feet)
        return float(0.02 * (gains - penalty * costs))

    def terminated(self) -> bool:
        tilt = np.degrees(np.arccos(np.clip(self.sensor("torso_upvector")[2], -1, 1)))
        return bool(tilt > 65 or self.data.qpos[2] < 0.3)

    def truncated(self) -> bool:
        return self.steps >= 1000


@dataclass
class Curriculum:
    """The penalty factor over a window of one episode, as eight environments have it."""

    factor: float = 0.0625
    mean: float = 0.0

    def update(self, lengths: list[int]) -> None:
        if lengths:
            self.mean = float(np.mean(lengths))  # weight min(1, n / 1)
            self.factor *= 0.999 if self.mean < 150 else 1.001 if self.mean > 750 else 1
            self.factor = min(max(self.factor, 0.0625), 0.125)


def reference_model(profile: str) -> mujoco.MjModel:
    model = mujoco.MjModel.from_xml_path(str(ROBOTS / "unitree_g1" / "scene_flat.xml"))
    model.opt.timestep = 1 / 150
    if profile == "exact":
        model.opt.jacobian = mujoco.mjtJacobian.mjJAC_SPARSE
        model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_ISLAND
    return model


class Comparison:
    """Environment and pool on one side, eight reference robots on the other, step by step."""

    def __init__(self, profile: str) -> None:
        cpu = torch.device("cpu")
        task = G1WalkFlat(G1WalkFlatConfig(), G1WalkFlatRewards(), ROBOTS_SIDE_BY_SIDE, cpu, profile)
        self.env = Environment(task, ROBOTS_SIDE_BY_SIDE, cpu, torch.Generator().manual_seed(11), StateRegistry())
        self.pool = MujocoPool(task.spec, ROBOTS_SIDE_BY_SIDE)
        self.env.begin()
        self.env.episodes.steps[:4] = torch.tensor([999, 990, 965, 0])
        counters = self.env.episodes.steps.tolist()
        self.robots = [ReferenceRobot(reference_model(profile), steps) for steps in counters]
        self.curriculum = Curriculum()
        self.worst = {"qpos": 0.0, "critic": 0.0, "reset critic": 0.0, "reward": 0.0}
        self.seen = {"terminated": 0, "timeout": 0}

    def restart(self) -> None:
        for index, robot in enumerate(self.robots):
            if self.env.codes[index] == RESET:
                given = (self.env.reset_rows, self.env.command, self.env.phase)
                first = robot.reset(*(value[index].double().numpy() for value in given))
                self.note("reset critic", self.env.critic[index], first)

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
        env.restart(env.finished)
        for robot, code in zip(self.robots, env.codes.tolist(), strict=True):
            robot.steps = 0 if code == RESET else robot.steps

    def compare(self) -> None:
        env = self.env
        lengths = []
        for index, robot in enumerate(self.robots):
            self.note("qpos", env.fields[index, :36], robot.data.qpos)
            self.note("critic", env.next_critic[index], robot.critic())
            self.note("reward", env.reward[index], robot.reward(self.curriculum.factor))
            flags = (robot.terminated(), robot.truncated())
            assert (bool(env.terminated[index]), bool(env.truncated[index])) == flags
            assert bool(env.timeout[index]) == (flags == (False, True))
            assert bool(env.finished[index]) == any(flags)
            self.seen["terminated"] += flags[0]
            self.seen["timeout"] += flags == (False, True)
            lengths += [robot.steps] if any(flags) else []
        assert env.valid.all()
        self.curriculum.update(lengths)
        assert env.episodes.penalty_scale.item() == pytest.approx(self.curriculum.factor, rel=1e-6)

    def note(self, what: str, found: torch.Tensor, expected: Any) -> None:
        self.worst[what] = max(self.worst[what], float(np.abs(found.double().numpy() - expected).max()))


@pytest.mark.parametrize("profile", ["reference", "exact"])
def test_control_steps_match_an_independent_computation(profile: str) -> None:
    comparison = Comparison(profile)
    noise = torch.Generator().manual_seed(2)
    amplitude = torch.tensor([0.3, 0.3, 1.0, 1.0, 1.0, 1.0, 1.5, 1.5]).unsqueeze(1)
    for _ in range(STEPS):
        comparison.restart()
        comparison.step((torch.rand(ROBOTS_SIDE_BY_SIDE, 29, generator=noise) * 2 - 1) * amplitude)
    assert comparison.seen["terminated"] >= 2
    assert comparison.seen["timeout"] >= 2
    assert comparison.worst["qpos"] < 2.5e-7  # float32 of angles below 4 rad
    assert comparison.worst["critic"] < 5e-6  # the gait phase adds up 40 roundings
    assert comparison.worst["reset critic"] < 5e-7
    assert comparison.worst["reward"] < 5e-7
