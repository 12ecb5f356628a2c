"""One Go2 control step against values computed from the task's published text: numpy in float64, one MjData per robot.

The reference below takes from the project only what is drawn or chosen: reset rows, commands, the draws of a push,
actions and the episode counters it starts with. Observation noise is off; pushes come every 0.4 s instead of 15.
"""

from __future__ import annotations

import mujoco
import numpy as np
import parity_rig
import pytest
from parity_rig import CPU, ROBOTS_SIDE_BY_SIDE, Array, reference_model

from unilab.tasks.go2_joystick_flat import Go2JoystickFlat, Go2JoystickFlatConfig, Go2JoystickFlatRewards

PUSH_EVERY = 20  # control steps
HOME = np.array([0, 0.8, -1.5, 0, 0.8, -1.5, 0, 1.0, -1.5, 0, 1.0, -1.5])
CTRL_OF_JOINT = [3, 4, 5, 0, 1, 2, 9, 10, 11, 6, 7, 8]
LEGS = ("FL", "FR", "RL", "RR")
OFFSETS = np.array([0, 0.5, 0.5, 0])


class ReferenceRobot:
    """One robot, stepped by mj_step, and the task's arithmetic for it."""

    def __init__(self, profile: str, steps: int) -> None:
        self.model = reference_model("unitree_go2/scene_flat.xml", 0.01, profile)
        self.data, self.fresh = mujoco.MjData(self.model), mujoco.MjData(self.model)
        self.steps, self.command = steps, np.zeros(3)
        self.action, self.previous = np.zeros(12), np.zeros(12)

    def reset(self, row: Array, command: Array, phases: Array) -> Array:
        """Start an episode; returns its first observation, from sensors that are up to date."""
        mujoco.mj_resetData(self.model, self.data)
        self.model.actuator_gainprm[:, 0] = row[37:49]
        self.model.actuator_biasprm[:, 1], self.model.actuator_biasprm[:, 2] = -row[37:49], -row[49:61]
        self.model.body("base").mass[0], self.model.body("base").ipos[:] = row[61], row[62:65]
        mujoco.mj_setConst(self.model, self.fresh)
        self.data.qpos[:], self.data.qvel[:] = row[:19], row[19:37]
        self.command, self.action, self.previous = command.copy(), np.zeros(12), np.zeros(12)
        return self.observation(phases, up_to_date=True)

    def act(self, action: Array, ctrl: Array) -> None:
        """Hold the targets for two physics steps."""
        np.testing.assert_allclose(ctrl[CTRL_OF_JOINT], HOME + 0.4 * action, rtol=0, atol=3e-7)
        self.previous, self.action = self.action, action.copy()
        self.data.ctrl[:] = ctrl
        for _ in range(2):
            mujoco.mj_step(self.model, self.data)
        self.steps += 1

    def sensor(self, name: str) -> Array:
        return np.array(self.data.sensor(name).data)

    def observation(self, phases: Array, up_to_date: bool) -> Array:
        data = self.data
        if up_to_date:
            data = self.fresh
            data.qpos[:], data.qvel[:] = self.data.qpos, self.data.qvel
            mujoco.mj_forward(self.model, data)
        gyro, up, velocity = (data.sensor(name).data for name in ("gyro", "upvector", "local_linvel"))
        joints = self.data.qpos[7:] - HOME, self.data.qvel[6:]
        return np.concatenate((gyro, -up, *joints, self.action, self.command, phases, velocity))

    def reward(self, phases: Array) -> float:
        v, w = self.sensor("local_linvel"), self.sensor("gyro")
        contact = np.array([self.sensor(f"{leg}_foot_contact")[0] > 0.1 for leg in LEGS])
        height = np.array([self.sensor(f"{leg}_pos")[2] for leg in LEGS])
        total = 1.0 * np.exp(-((self.command[0] - v[0]) ** 2 + (self.command[1] - v[1]) ** 2) / 0.5)
        total += 0.2 * np.exp(-((self.command[2] - w[2]) ** 2) / 0.5)
        total -= 5.0 * v[2] ** 2 + 0.1 * (w[0] ** 2 + w[1] ** 2) + 20.0 * (self.data.qpos[2] - 0.3) ** 2
        total -= 0.02 * np.sum((self.action - self.previous) ** 2) + 0.4 * np.abs(self.data.qpos[7:] - HOME).sum()
        total += 1.5 * np.mean(contact == (phases < np.float32(0.6)))
        total += 4.0 * np.mean(np.exp(-((height - 0.1) ** 2) / 0.01) * (phases >= np.float32(0.6)))
        return float(0.02 * total)

    def terminated(self) -> bool:
        up = np.empty(3)
        mujoco.mju_rotVecQuat(up, np.array([0.0, 0.0, 1.0]), self.data.qpos[3:7])
        return bool(np.arccos(np.clip(up[2], -1, 1)) > 1.0471975512)


class Comparison(parity_rig.Comparison[ReferenceRobot]):
    def __init__(self, profile: str) -> None:
        config = Go2JoystickFlatConfig(
            observation_noise={"joint_pos": 0.0, "joint_vel": 0.0}, push_interval_seconds=0.02 * PUSH_EVERY
        )
        task = Go2JoystickFlat(config, Go2JoystickFlatRewards(), ROBOTS_SIDE_BY_SIDE, CPU, profile)
        super().__init__(task, [999, 980, 965, 0], lambda steps: ReferenceRobot(profile, steps))
        self.clock, self.ticks = np.float32(0), 0

    @property
    def phases(self) -> Array:
        """Float32 as the text says: 15 steps of 0.04 are at the bound of 0.6, where roundings decide."""
        return (self.clock + OFFSETS.astype(np.float32)) % np.float32(1)

    def reset(self, index: int) -> Array:
        row, command = (value[index].double().numpy() for value in (self.env.reset_rows, self.env.command))
        return self.robots[index].reset(row, command, self.phases)

    def compare(self) -> None:
        self.clock, self.ticks = (self.clock + np.float32(0.04)) % np.float32(1), self.ticks + 1
        env, pushed = self.env, self.ticks % PUSH_EVERY == 0
        kicks = (2 * env.uniforms[:, env.task.uniform_columns["push"]].double().numpy() - 1) * [1, 1, 0.5]
        for index, robot in enumerate(self.robots):
            self.note("qpos", env.fields[index, :19], robot.data.qpos)
            self.note("reward", env.reward[index], robot.reward(self.phases))
            self.compare_ends(index, robot.terminated(), robot.steps >= 1000)
            if pushed:
                robot.data.qvel[:3] += kicks[index]
            self.note("critic", env.next_critic[index], robot.observation(self.phases, up_to_date=pushed))


@pytest.mark.parametrize("profile", ["reference", "exact"])
def test_control_steps_match_an_independent_computation(profile: str) -> None:
    comparison = Comparison(profile)
    comparison.run(60, [0.3, 0.3, 1.0, 1.0, 1.0, 3.0, 6.0, 6.0])
    assert comparison.worst["qpos"] < 2.5e-7  # float32 of angles below 4 rad
    assert comparison.worst["critic"] < 4e-6  # float32 of joint velocities up to 30 rad/s
    assert comparison.worst["reset critic"] < 5e-7
    assert comparison.worst["reward"] < 5e-7
