"""Unitree Go2 trotting on flat ground after a velocity command, as pure functions of the physics fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unilab.tasks.go2_joystick_flat_config import (
    LEGS,
    NUM_JOINTS,
    OBSERVATION,
    Go2JoystickFlatConfig,
    Go2JoystickFlatRewards,
)
from unilab.tasks.velocity_task import VelocityTask, between

__all__ = ["Go2JoystickFlat", "Go2JoystickFlatConfig", "Go2JoystickFlatRewards"]

if TYPE_CHECKING:
    import mujoco


class Go2JoystickFlat(VelocityTask):
    """The task bound to a number of environments and a device.

    Its phase (N, 1) is one clock for all environments: it starts at 0, advances with every control step and goes on
    through resets; a foot's phase is the clock plus its offset, in cycles. Joints and actions come in the order FL FR
    RL RR, actuators in the order FR FL RR RL.

    Args:
        env: numbers of the task.
        reward: reward weights.
        num_envs: environments.
        device: where the tensors live.
        physics_profile: solver path, see `PhysicsSpec`.

    Raises:
        ValueError: if a number is out of bounds or the profile unknown.
    """

    scene = "unitree_go2/scene_flat.xml"
    keyframe = "home"
    root = "base"
    gyro, upvector, gyro_site = "gyro", "upvector", "imu"
    velocimeter, velocity_site = "local_linvel", "imu"
    sensors = (
        ("gyro", 3),
        ("upvector", 3),
        ("local_linvel", 3),
        *((f"{leg}_foot_contact", 1) for leg in LEGS),
        *((f"{leg}_pos", 3) for leg in LEGS),
    )
    model_fields = (("kp", NUM_JOINTS), ("kd", NUM_JOINTS), ("root_mass", 1), ("root_com", 3))
    # Uniform draws one environment consumes per tick, in column order; noise for the policy, then for the critics.
    uniforms = (
        ("step_noise", 4 * NUM_JOINTS),
        ("reset_noise", 4 * NUM_JOINTS),
        ("root_pose", 3),
        ("root_velocity", 6),
        ("command", 3),
        ("model", 2 * NUM_JOINTS + 2),
        ("push", 3),
    )
    observation = OBSERVATION
    rewards = Go2JoystickFlatRewards
    phase_dim = 1
    gait_period = 1.0
    gait_offsets = (0.0, 0.5, 0.5, 0.0)  # in the order of LEGS: a trot

    def __init__(
        self,
        env: Go2JoystickFlatConfig,
        reward: Go2JoystickFlatRewards,
        num_envs: int,
        device: torch.device,
        physics_profile: str,
    ) -> None:
        super().__init__(env, reward, num_envs, device, physics_profile)
        self.config = env
        self.push_interval = env.push_interval_steps
        self._offsets = self._tensor(self.gait_offsets)
        gains = [env.kp] * NUM_JOINTS + [env.kd] * NUM_JOINTS
        self._model_range = self._range(*gains, env.base_mass_offset, env.base_com_x_offset)
        self._push_range = self._range(env.push_velocity_xy, env.push_velocity_xy, env.push_velocity_z)

    def _place_robot(self, model: mujoco.MjModel) -> None:
        super()._place_robot(model)
        self._joint_of_actuator = torch.tensor(model.jnt_qposadr[model.actuator_trnid[:, 0]] - 7, device=self.device)
        self._root_mass = float(model.body(self.root).mass[0])
        self._root_com = self._tensor(model.body(self.root).ipos)

    def control_targets(self, action: Tensor) -> Tensor:
        """Joint targets (N, 12) in rad, in the order of the actuators."""
        return super().control_targets(action)[:, self._joint_of_actuator]

    def terminated(self, physics: Mapping[str, Tensor]) -> Tensor:
        """(N,) bool: the base tilts too far. `cos(tilt)` is the z of its z axis, from its current orientation."""
        upright = 1 - 2 * physics["qpos"][:, 4:6].square().sum(1)
        return upright < math.cos(math.radians(self.config.max_tilt_degrees))

    def advance_phase(self, phase: Tensor) -> Tensor:
        """The clock (N, 1) one control step later, wrapped to [0, 1)."""
        return torch.remainder(
            phase + self.gait_period * self.config.gait_frequency * self.control_dt, self.gait_period
        )

    def reset_phase(self, uniform: Tensor, phase: Tensor) -> Tensor:
        """The clock (N, 1) as it is: episodes do not reset it."""
        return phase

    def observed_phase(self, phase: Tensor) -> Tensor:
        """Phases (N, 4) of the feet in [0, 1), from the clock (N, 1)."""
        return torch.remainder(phase + self._offsets, self.gait_period)

    def reward_terms(
        self,
        physics: Mapping[str, Tensor],
        action: Tensor,
        previous_action: Tensor,
        command: Tensor,
        phase: Tensor,
        penalty_scale: Tensor,
    ) -> Tensor:
        """Weighted reward per second (N, 9), see `VelocityTask.reward_terms`."""
        terms = (
            *self._tracking(physics, command),
            physics["local_linvel"][:, 2].square(),
            physics["gyro"][:, :2].square().sum(1),
            (physics["qpos"][:, 2] - self.config.base_height_target).square(),
            (action - previous_action).square().sum(1),
            (physics["qpos"][:, 7:] - self.joint_default).abs().sum(1),
            *self._gait(physics, phase),
        )
        return self._weighted(terms, penalty_scale)

    def _gait(self, physics: Mapping[str, Tensor], phase: Tensor) -> tuple[Tensor, Tensor]:
        """Share of feet that touch the floor when they should, and closeness of swinging feet to their height (N,)."""
        config = self.config
        touching = torch.cat([physics[f"{leg}_foot_contact"] for leg in LEGS], dim=1) > config.contact_threshold
        height = torch.stack([physics[f"{leg}_pos"][:, 2] for leg in LEGS], dim=1)
        standing = self.observed_phase(phase) < config.stance_share
        close = torch.exp(-(height - config.swing_height).square() / config.swing_sigma)
        return (touching == standing).float().mean(1), torch.where(standing, 0.0, close).mean(1)

    def observe(
        self, physics: Mapping[str, Tensor], action: Tensor, command: Tensor, phase: Tensor, uniform: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Observations of policy (N, 49) and critics (N, 52), each with noise of its own, from draws (N, 48)."""
        clean = self.critic_observation(physics, action, command, phase)
        policy, critic = uniform.split(2 * NUM_JOINTS, dim=1)
        return self.policy_observation(clean, policy), self._noisy(clean, critic)

    def push(self, physics: Mapping[str, Tensor], uniform: Tensor) -> dict[str, Tensor]:
        """Fields that a push changes: the root's world velocity in qvel (N, 18), and sensors, brought up to date."""
        kick = between(self._push_range, uniform[:, self.uniform_columns["push"]])
        qvel = torch.cat((physics["qvel"][:, :3] + kick, physics["qvel"][:, 3:]), dim=1)
        return {"qvel": qvel, **self._site_fields(physics["qpos"], qvel)}

    def _reset_model(self, uniform: Tensor) -> Tensor:
        """Gains (N, 24) and the base's mass (N, 1) and centre of mass (N, 3)."""
        drawn = between(self._model_range, uniform[:, self.uniform_columns["model"]])
        gains, mass, shift = drawn.split((2 * NUM_JOINTS, 1, 1), dim=1)
        com = torch.cat((self._root_com[:1] + shift, self._root_com[1:].expand(len(drawn), -1)), dim=1)
        return torch.cat((gains, self._root_mass + mass, com), dim=1)
