"""Unitree G1 walking on flat ground after a velocity command, as pure functions of the physics fields."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from unilab.tasks.g1_walk_flat_config import NUM_JOINTS, OBSERVATION, G1WalkFlatConfig, G1WalkFlatRewards
from unilab.tasks.velocity_task import VelocityTask, between

__all__ = ["G1WalkFlat", "G1WalkFlatConfig", "G1WalkFlatRewards"]


class G1WalkFlat(VelocityTask):
    """The task bound to a number of environments and a device; phases are (left, right) in rad.

    `reset_fields` holds while the joints are in the default pose: only then is the robot one rigid body.

    Args:
        env: numbers of the task.
        reward: reward weights.
        num_envs: environments, which set the length of the curriculum's memory.
        device: where the tensors live.
        physics_profile: solver path, see `PhysicsSpec`.

    Raises:
        ValueError: if a number is out of bounds or the profile unknown.
    """

    scene = "unitree_g1/scene_flat.xml"
    keyframe = "stand"
    root = "pelvis"
    gyro, upvector, gyro_site = "torso_gyro", "torso_upvector", "imu_in_torso"
    velocimeter, velocity_site = "pelvis_local_linvel", "imu_in_pelvis"
    sensors = (
        ("torso_gyro", 3),
        ("torso_upvector", 3),
        ("pelvis_local_linvel", 3),
        ("left_foot_quat", 4),
        ("right_foot_quat", 4),
        ("left_foot_pos", 3),
        ("right_foot_pos", 3),
    )
    model_fields = (("kp", NUM_JOINTS), ("kd", NUM_JOINTS))
    # Uniform draws one environment consumes per tick, in column order.
    uniforms = (
        ("step_noise", 2 * NUM_JOINTS),
        ("reset_noise", 2 * NUM_JOINTS),
        ("root_pose", 3),
        ("root_velocity", 6),
        ("command", 3),
        ("phase", 1),
        ("gains", 2 * NUM_JOINTS),
    )
    observation = OBSERVATION
    rewards = G1WalkFlatRewards
    phase_dim = 2
    gait_period = 2 * math.pi
    gait_offsets = (0.0, math.pi)

    def __init__(
        self,
        env: G1WalkFlatConfig,
        reward: G1WalkFlatRewards,
        num_envs: int,
        device: torch.device,
        physics_profile: str,
    ) -> None:
        super().__init__(env, reward, num_envs, device, physics_profile)
        self.config = env
        self.initial_penalty_scale = env.penalty_scale_initial
        self.curriculum_window = max(1, int(env.penalty_window_at_4096_envs * num_envs / 4096))
        self._pose_weights = self._tensor(env.pose_weights)
        self._gains = torch.cat((self.kp, self.kd))
        for column in (self.spec.columns[name].start for name in ("left_foot_quat", "right_foot_quat")):
            self.idle_row[column] = 1.0

    def terminated(self, physics: Mapping[str, Tensor]) -> Tensor:
        """(N,) bool: the torso tilts too far or the pelvis is too low. `cos(tilt)` is the up-vector's z."""
        tilted = physics["torso_upvector"][:, 2] < math.cos(math.radians(self.config.max_tilt_degrees))
        return tilted | (physics["qpos"][:, 2] < self.config.min_pelvis_height)

    def advance_phase(self, phase: Tensor) -> Tensor:
        """Gait phases (N, 2) one control step later, wrapped to [0, 2 pi)."""
        step = self.gait_period * self.config.gait_frequency * self.control_dt
        return torch.remainder(phase + step, self.gait_period)

    def swing_height(self, phase: Tensor) -> Tensor:
        """Target height in m of a foot at `phase` rad: 0 at +-pi, `swing_height` at 0, a cubic smoothstep between."""
        share = torch.remainder(phase + math.pi, 2 * math.pi) / (2 * math.pi)
        rise = 1 - (2 * share - 1).abs()
        return self.config.swing_height * rise * rise * (3 - 2 * rise)

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
        linear, angular = self._tracking(physics, command)
        deviation = (physics["qpos"][:, 7:] - self.joint_default).square()
        tilt = physics["left_foot_quat"][:, 1:3].square() + physics["right_foot_quat"][:, 1:3].square()
        terms = (
            linear,
            angular,
            physics["torso_gyro"][:, :2].square().sum(1),
            physics["torso_upvector"][:, :2].square().sum(1),
            (action - previous_action).square().sum(1),
            (self._pose_weights * deviation).sum(1),
            tilt.sum(1),
            self._feet_phase(physics, phase),
            torch.ones_like(angular),
        )
        return self._weighted(terms, penalty_scale)

    def _feet_phase(self, physics: Mapping[str, Tensor], phase: Tensor) -> Tensor:
        height = torch.stack((physics["left_foot_pos"][:, 2], physics["right_foot_pos"][:, 2]), dim=1)
        error = (height - self.swing_height(phase)).square().sum(1)
        return torch.exp(-error / self.config.feet_phase_sigma)

    def _reset_model(self, uniform: Tensor) -> Tensor:
        low, high = self.config.gain_scale
        return self._gains * (low + (high - low) * uniform[:, self.uniform_columns["gains"]])

    def reset_command(self, uniform: Tensor) -> Tensor:
        """Commands (N, 3) from draws (N, uniform_width); planar parts inside the dead zone are 0."""
        command = between(self._command_range, uniform[:, self.uniform_columns["command"]])
        still = command[:, :2].square().sum(1, keepdim=True).sqrt() <= self.config.planar_dead_zone
        return torch.cat((torch.where(still, 0.0, command[:, :2]), command[:, 2:]), dim=1)

    def reset_phase(self, uniform: Tensor, phase: Tensor) -> Tensor:
        """Gait phases (N, 2) from draws (N, uniform_width): left in [0, 2 pi), right = left + pi, not wrapped."""
        left = self.gait_period * uniform[:, self.uniform_columns["phase"]]
        return torch.cat([left + offset for offset in self.gait_offsets], dim=1)

    def next_penalty_scale(self, scale: Tensor, mean_length: Tensor) -> Tensor:
        """Penalty factor () after episodes ended: down while they are short, up once they are long, clamped."""
        config = self.config
        falling = (mean_length < config.penalty_down_below_steps).to(scale.dtype)
        rising = (mean_length > config.penalty_up_above_steps).to(scale.dtype)
        changed = scale * (1 + config.penalty_scale_degree * (rising - falling))
        return changed.clamp(config.penalty_scale_min, config.penalty_scale_max)
