"""Unitree G1 walking on flat ground after a velocity command, as pure functions of the physics fields.

Every function maps tensors to tensors of fixed shapes, on any device, without reading a value on the host; a captured
graph runs them unchanged. N is the number of environments.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unilab.physics.mujoco_pool import load_model
from unilab.physics.spec import PhysicsSpec
from unilab.tasks.g1_walk_flat_config import NOISY, NUM_JOINTS, OBSERVATION, G1WalkFlatConfig, G1WalkFlatRewards

__all__ = ["G1WalkFlat", "G1WalkFlatConfig", "G1WalkFlatRewards"]

if TYPE_CHECKING:
    import mujoco

SCENE = "unitree_g1/scene_flat.xml"
KEYFRAME = "stand"
SENSORS = (
    ("torso_gyro", 3),
    ("torso_upvector", 3),
    ("pelvis_local_linvel", 3),
    ("left_foot_quat", 4),
    ("right_foot_quat", 4),
    ("left_foot_pos", 3),
    ("right_foot_pos", 3),
)
# Uniform draws one environment consumes per tick, in column order.
UNIFORMS = (
    ("step_noise", 2 * NUM_JOINTS),
    ("reset_noise", 2 * NUM_JOINTS),
    ("root_pose", 3),
    ("root_velocity", 6),
    ("command", 3),
    ("phase", 1),
    ("gains", 2 * NUM_JOINTS),
)


class G1WalkFlat:
    """The task bound to a number of environments and a device.

    Args:
        env: numbers of the task.
        reward: reward weights.
        num_envs: environments, which set the length of the curriculum's memory.
        device: where the tensors live.
        physics_profile: solver path, see `PhysicsSpec`.

    Attributes:
        spec: the physics side of the task.
        reward_names: the nine reward terms in column order.
        uniform_columns: named columns of the draws in [0, 1) that one environment consumes per tick.
        idle_row: (width,) physics fields of a robot at rest, in place of readings that are not finite.
        joint_default: (29,) default joint pose, rad.
        kp: (29,) nominal actuator stiffness, N m / rad.
        kd: (29,) nominal actuator damping, N m s / rad.

    Raises:
        ValueError: if a number is out of bounds or the profile unknown.
    """

    obs_dim = sum(width for _, width in OBSERVATION[:-1])
    critic_dim = sum(width for _, width in OBSERVATION)
    action_dim = NUM_JOINTS
    command_dim = 3
    phase_dim = 2
    reward_names = tuple(entry.name for entry in fields(G1WalkFlatRewards))
    uniform_width = sum(width for _, width in UNIFORMS)

    def __init__(
        self,
        env: G1WalkFlatConfig,
        reward: G1WalkFlatRewards,
        num_envs: int,
        device: torch.device,
        physics_profile: str,
    ) -> None:
        env.validate()
        reward.validate()
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, not {num_envs}")
        self.config, self.num_envs, self.device = env, num_envs, device
        self.uniform_columns = _columns(UNIFORMS)
        self.control_dt = env.ctrl_dt
        self.max_episode_steps = env.max_episode_steps
        self.initial_penalty_scale = env.penalty_scale_initial
        self.curriculum_window = max(1, int(env.penalty_window_at_4096_envs * num_envs / 4096))
        self.spec = _spec(env, physics_profile)
        model = load_model(self.spec)
        assert (model.nq, model.nv, model.nu) == (self.spec.nq, self.spec.nv, self.spec.nu)
        self._place_robot(model)
        self._place_numbers(reward)

    def _tensor(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def _place_robot(self, model: mujoco.MjModel) -> None:
        stand = model.key(KEYFRAME).qpos
        assert (stand[3:7] == (1, 0, 0, 0)).all(), "resets turn the keyframe by a yaw only"
        self.joint_default = self._tensor(stand[7:])
        self.kp = self._tensor(model.actuator_gainprm[:, 0])
        self.kd = self._tensor(-model.actuator_biasprm[:, 2])
        self._root_default = self._tensor(stand[:3])
        self._torso_rotation, _ = self._site_in_pelvis(model, "imu_in_torso")
        self._pelvis_rotation, self._pelvis_offset = self._site_in_pelvis(model, "imu_in_pelvis")
        self.idle_row = torch.zeros(self.spec.width, device=self.device)
        self.idle_row[self.spec.columns["qpos"]] = self._tensor(stand)
        for column in (self.spec.columns[name].start for name in ("left_foot_quat", "right_foot_quat")):
            self.idle_row[column] = 1.0
        self.idle_row[self.spec.columns["torso_upvector"].stop - 1] = 1.0

    def _site_in_pelvis(self, model: mujoco.MjModel, site: str) -> tuple[Tensor, Tensor]:
        """Rotation (3, 3) of site axes and position (3,) of the site in the pelvis frame, at the default pose."""
        import mujoco  # only now: `load_model`'s module copes with a MUJOCO_GL that does not work here

        data = mujoco.MjData(model)
        mujoco.mj_resetDataKeyframe(model, data, model.key(KEYFRAME).id)
        mujoco.mj_kinematics(model, data)
        pelvis = data.body("pelvis").xmat.reshape(3, 3)
        rotation = pelvis.T @ data.site(site).xmat.reshape(3, 3)
        offset = pelvis.T @ (data.site(site).xpos - data.body("pelvis").xpos)
        return self._tensor(rotation.tolist()), self._tensor(offset)

    def _place_numbers(self, reward: G1WalkFlatRewards) -> None:
        config, scales, noise = self.config, self.config.observation_scales, self.config.observation_noise
        self._scale = self._tensor([scales[name] for name, width in OBSERVATION for _ in range(width)])
        self._noise = self._tensor([noise[name] * scales[name] for name in NOISY for _ in range(NUM_JOINTS)])
        self._weights = self._tensor([getattr(reward, name) for name in self.reward_names])
        self._pose_weights = self._tensor(config.pose_weights)
        self._gains = torch.cat((self.kp, self.kd))
        xy, linear, angular = config.reset_position_xy, config.reset_linear_velocity, config.reset_angular_velocity
        self._pose_range = self._range(xy, xy, config.reset_yaw)
        self._velocity_range = self._range(linear, linear, linear, angular, angular, angular)
        self._command_range = self._range(config.command_velocity_x, config.command_velocity_y, config.command_yaw_rate)

    def _range(self, *pairs: Sequence[float]) -> tuple[Tensor, Tensor]:
        return self._tensor([low for low, _ in pairs]), self._tensor([high for _, high in pairs])

    def fields(self, rows: Tensor) -> dict[str, Tensor]:
        """Named views of packed physics rows (N, width): qpos, qvel and every sensor."""
        return {name: rows[:, columns] for name, columns in self.spec.columns.items()}

    def control_targets(self, action: Tensor) -> Tensor:
        """Joint targets (N, 29) in rad: default pose + scale * action."""
        return self.joint_default + self.config.action_scale * action

    def terminated(self, physics: Mapping[str, Tensor]) -> Tensor:
        """(N,) bool: the torso tilts too far or the pelvis is too low. `cos(tilt)` is the up-vector's z."""
        tilted = physics["torso_upvector"][:, 2] < math.cos(math.radians(self.config.max_tilt_degrees))
        return tilted | (physics["qpos"][:, 2] < self.config.min_pelvis_height)

    def advance_phase(self, phase: Tensor) -> Tensor:
        """Gait phases (N, 2) one control step later, wrapped to [0, 2 pi)."""
        return torch.remainder(phase + 2 * math.pi * self.config.gait_frequency * self.control_dt, 2 * math.pi)

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
        """Weighted reward per second (N, 9), columns in the order of `reward_names`.

        Args:
            physics: named fields after the step.
            action: (N, 29) raw action of the step.
            previous_action: (N, 29) raw action of the step before, 0 at an episode's start.
            command: (N, 3) forward and sideways velocity in m/s, yaw rate in rad/s.
            phase: (N, 2) gait phases after the step, rad.
            penalty_scale: () factor of the negative weights.
        """
        gyro, velocity = physics["torso_gyro"], physics["pelvis_local_linvel"]
        linear_error = (command[:, :2] - velocity[:, :2]).square().sum(1)
        angular_error = (command[:, 2] - gyro[:, 2]).square()
        deviation = (physics["qpos"][:, 7:] - self.joint_default).square()
        tilt = physics["left_foot_quat"][:, 1:3].square() + physics["right_foot_quat"][:, 1:3].square()
        terms = (
            torch.exp(-linear_error / self.config.tracking_sigma),
            torch.exp(-angular_error / self.config.tracking_sigma),
            gyro[:, :2].square().sum(1),
            physics["torso_upvector"][:, :2].square().sum(1),
            (action - previous_action).square().sum(1),
            (self._pose_weights * deviation).sum(1),
            tilt.sum(1),
            self._feet_phase(physics, phase),
            torch.ones_like(angular_error),
        )
        weights = torch.where(self._weights < 0, self._weights * penalty_scale, self._weights)
        return torch.stack(terms, dim=1) * weights

    @staticmethod
    def tracking_errors(physics: Mapping[str, Tensor], command: Tensor) -> dict[str, Tensor]:
        """How far each robot is from its command, from the fields that the tracking rewards read.

        Args:
            physics: named fields after the step.
            command: (N, 3) forward and sideways velocity in m/s, yaw rate in rad/s.

        Returns:
            `tracking_error_lin`: (N,) norm of commanded minus actual planar velocity, m/s; `tracking_error_ang`: (N,)
            the yaw rate's absolute difference, rad/s.
        """
        planar = command[:, :2] - physics["pelvis_local_linvel"][:, :2]
        return {
            "tracking_error_lin": planar.square().sum(1).sqrt(),
            "tracking_error_ang": (command[:, 2] - physics["torso_gyro"][:, 2]).abs(),
        }

    def _feet_phase(self, physics: Mapping[str, Tensor], phase: Tensor) -> Tensor:
        height = torch.stack((physics["left_foot_pos"][:, 2], physics["right_foot_pos"][:, 2]), dim=1)
        error = (height - self.swing_height(phase)).square().sum(1)
        return torch.exp(-error / self.config.feet_phase_sigma)

    def critic_observation(
        self, physics: Mapping[str, Tensor], action: Tensor, command: Tensor, phase: Tensor
    ) -> Tensor:
        """Observation without noise (N, 101), columns as in `OBSERVATION`.

        Gravity is minus the torso's z axis in *world* components, which turn with the robot's heading.
        """
        terms = (
            physics["torso_gyro"],
            -physics["torso_upvector"],
            physics["qpos"][:, 7:] - self.joint_default,
            physics["qvel"][:, 6:],
            action,
            command,
            phase,
            physics["pelvis_local_linvel"],
        )
        return torch.cat(terms, dim=1) * self._scale

    def policy_observation(self, critic: Tensor, uniform: Tensor) -> Tensor:
        """Policy observation (N, 98) of a critic observation (N, 101); noise from draws (N, 58) in [0, 1)."""
        start, stop = 6, 6 + 2 * NUM_JOINTS
        noisy = critic[:, start:stop] + (2 * uniform - 1) * self._noise
        return torch.cat((critic[:, :start], noisy, critic[:, stop : self.obs_dim]), dim=1)

    def reset_rows(self, uniform: Tensor) -> Tensor:
        """Reset rows (N, reset width) from draws (N, uniform_width): qpos, qvel, kp, kd.

        The root is moved, turned about the vertical and pushed; joints rest at the default pose. The angular velocity
        is drawn in the world frame and stored, as MuJoCo wants it, in the body frame.
        """
        pose = _between(self._pose_range, uniform[:, self.uniform_columns["root_pose"]])
        velocity = _between(self._velocity_range, uniform[:, self.uniform_columns["root_velocity"]])
        zero = torch.zeros_like(pose[:, :1])
        half = pose[:, 2:] / 2
        quaternion = torch.cat((torch.cos(half), zero, zero, torch.sin(half)), dim=1)
        position = self._root_default + torch.cat((pose[:, :2], zero), dim=1)
        joints = self.joint_default.expand(len(uniform), -1)
        turned = _rotate_back(quaternion, velocity[:, 3:])
        low, high = self.config.gain_scale
        gains = self._gains * (low + (high - low) * uniform[:, self.uniform_columns["gains"]])
        row = (position, quaternion, joints, velocity[:, :3], turned, torch.zeros_like(joints), gains)
        return torch.cat(row, dim=1)

    def reset_command(self, uniform: Tensor) -> Tensor:
        """Commands (N, 3) from draws (N, uniform_width); planar parts inside the dead zone are 0."""
        command = _between(self._command_range, uniform[:, self.uniform_columns["command"]])
        still = command[:, :2].square().sum(1, keepdim=True).sqrt() <= self.config.planar_dead_zone
        return torch.cat((torch.where(still, 0.0, command[:, :2]), command[:, 2:]), dim=1)

    def reset_phase(self, uniform: Tensor) -> Tensor:
        """Gait phases (N, 2) from draws (N, uniform_width): left in [0, 2 pi), right = left + pi, not wrapped."""
        left = 2 * math.pi * uniform[:, self.uniform_columns["phase"]]
        return torch.cat((left, left + math.pi), dim=1)

    def reset_fields(self, rows: Tensor) -> dict[str, Tensor]:
        """Physics fields an observation reads, of reset rows (N, reset width), as a forward pass would give them.

        With the joints at rest in the default pose the robot is one rigid body: its sites turn with the pelvis's
        angular velocity w and move with R^T v + w x offset, R being the pelvis's rotation and v its world velocity.
        """
        columns = self.spec.reset_columns
        qpos, qvel = rows[:, columns["qpos"]], rows[:, columns["qvel"]]
        quaternion, spin = qpos[:, 3:7], qvel[:, 3:6]
        up = _rotate(quaternion, self._torso_rotation[:, 2].expand_as(spin))
        offset = self._pelvis_offset.expand_as(spin)
        velocity = _rotate_back(quaternion, qvel[:, :3]) + torch.cross(spin, offset, dim=1)
        return {
            "qpos": qpos,
            "qvel": qvel,
            "torso_gyro": _in_axes(self._torso_rotation, spin),
            "torso_upvector": up,
            "pelvis_local_linvel": _in_axes(self._pelvis_rotation, velocity),
        }

    def next_penalty_scale(self, scale: Tensor, mean_length: Tensor) -> Tensor:
        """Penalty factor () after episodes ended: down while they are short, up once they are long, clamped."""
        config = self.config
        falling = (mean_length < config.penalty_down_below_steps).to(scale.dtype)
        rising = (mean_length > config.penalty_up_above_steps).to(scale.dtype)
        changed = scale * (1 + config.penalty_scale_degree * (rising - falling))
        return changed.clamp(config.penalty_scale_min, config.penalty_scale_max)


def _spec(env: G1WalkFlatConfig, profile: str) -> PhysicsSpec:
    return PhysicsSpec(
        scene=SCENE,
        timestep=env.sim_dt,
        decimation=env.decimation,
        profile=profile,
        nq=7 + NUM_JOINTS,
        nv=6 + NUM_JOINTS,
        nu=NUM_JOINTS,
        sensors=SENSORS,
        model_fields=(("kp", NUM_JOINTS), ("kd", NUM_JOINTS)),
    )


def _columns(widths: tuple[tuple[str, int], ...]) -> dict[str, slice]:
    stops = itertools.accumulate(width for _, width in widths)
    return {name: slice(stop - width, stop) for (name, width), stop in zip(widths, stops, strict=True)}


def _between(bounds: tuple[Tensor, Tensor], uniform: Tensor) -> Tensor:
    low, high = bounds
    return low + (high - low) * uniform


def _rotate(quaternion: Tensor, vector: Tensor) -> Tensor:
    """Vectors (N, 3) turned by unit quaternions (N, 4), w first."""
    axis = quaternion[:, 1:]
    twice = 2 * torch.cross(axis, vector, dim=1)
    return vector + quaternion[:, :1] * twice + torch.cross(axis, twice, dim=1)


def _rotate_back(quaternion: Tensor, vector: Tensor) -> Tensor:
    """The inverse of `_rotate`."""
    return _rotate(torch.cat((-quaternion[:, :1], quaternion[:, 1:]), dim=1), vector)


def _in_axes(rotation: Tensor, vector: Tensor) -> Tensor:
    """Components (N, 3) of vectors (N, 3) along the columns of `rotation`; no matmul, which may run in TF32."""
    return (vector.unsqueeze(2) * rotation).sum(1)
