"""One control step against values computed from the task's published text: numpy in float64 and one MjData per robot.

The reference below takes from the project only what is drawn or chosen: reset rows, commands, first phases, actions
and the episode counters it starts with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import mujoco
import numpy as np
import parity_rig
import pytest
from parity_rig import CPU, ROBOTS_SIDE_BY_SIDE, Array, reference_model

from unilab.tasks.g1_walk_flat import G1WalkFlat, G1WalkFlatConfig, G1WalkFlatRewards

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


class Comparison(parity_rig.Comparison[ReferenceRobot]):
    def __init__(self, profile: str) -> None:
        task = G1WalkFlat(G1WalkFlatConfig(), G1WalkFlatRewards(), ROBOTS_SIDE_BY_SIDE, CPU, profile)
        model = partial(reference_model, "unitree_g1/scene_flat.xml", 1 / 150, profile)
        super().__init__(task, [999, 990, 965, 0], lambda steps: ReferenceRobot(model(), steps))
        self.curriculum = Curriculum()

    def reset(self, index: int) -> Array:
        given = (self.env.reset_rows, self.env.command, self.env.phase)
        return self.robots[index].reset(*(value[index].double().numpy() for value in given))

    def compare(self) -> None:
        env, lengths = self.env, []
        for index, robot in enumerate(self.robots):
            self.note("qpos", env.fields[index, :36], robot.data.qpos)
            self.note("critic", env.next_critic[index], robot.critic())
            self.note("reward", env.reward[index], robot.reward(self.curriculum.factor))
            self.compare_ends(index, robot.terminated(), robot.truncated())
            lengths += [robot.steps] if robot.terminated() or robot.truncated() else []
        self.curriculum.update(lengths)
        assert env.episodes.penalty_scale.item() == pytest.approx(self.curriculum.factor, rel=1e-6)


@pytest.mark.parametrize("profile", ["reference", "exact"])
def test_control_steps_match_an_independent_computation(profile: str) -> None:
    comparison = Comparison(profile)
    comparison.run(40, [0.3, 0.3, 1.0, 1.0, 1.0, 1.0, 1.5, 1.5])
    assert comparison.worst["qpos"] < 2.5e-7  # float32 of angles below 4 rad
    assert comparison.worst["critic"] < 5e-6  # the gait phase adds up 40 roundings
    assert comparison.worst["reset critic"] < 5e-7
    assert comparison.worst["reward"] < 5e-7
