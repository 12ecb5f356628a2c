"""What tasks of following a velocity command share, as pure functions of the physics fields.

Every function maps tensors to tensors of fixed shapes, on any device, without reading a value on the host; a captured
graph runs them unchanged. N is the number of environments, J the number of joints.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from unilab.physics.mujoco_pool import load_model
from unilab.physics.spec import PhysicsSpec
from unilab.tasks.velocity_task_config import NOISY, RewardWeights, VelocityTaskConfig, Widths

if TYPE_CHECKING:
    import mujoco


class ObservationBlock(NamedTuple):
    """Columns of the policy's observation: `scale` times what `source` says.

    Attributes:
        name: the term.
        columns: where it stands.
        scale: factor.
        sensor: the robot's sensor that it reads, or None.
        source: what it is, in words and SI units.
    """

    name: str
    columns: slice
    scale: float
    sensor: str | None
    source: str


class VelocityTask(ABC):
    """A task bound to a number of environments and a device.

    Args:
        env: numbers of the task.
        reward: reward weights.
        num_envs: environments.
        device: where the tensors live.
        physics_profile: solver path, see `PhysicsSpec`.

    Attributes:
        spec: the physics side of the task.
        reward_names: the reward terms in column order.
        uniform_columns: named columns of the draws in [0, 1) that one environment consumes per tick; `step_noise` and
            `reset_noise` are those of `observe`.
        idle_row: (width,) physics fields of a robot at rest, in place of readings that are not finite.
        joint_default: (J,) default joint pose, rad.
        kp: (J,) nominal actuator stiffness, N m / rad, actuator order.
        kd: (J,) nominal actuator damping, N m s / rad, actuator order.
        push_interval: control steps from one push of all robots to the next; None where nobody pushes.
        initial_penalty_scale: first common factor of the negative reward weights.
        curriculum_window: episodes over which the curriculum's mean length is taken.

    Raises:
        ValueError: if a number is out of bounds or the profile unknown.
    """

    scene: ClassVar[str]
    keyframe: ClassVar[str]
    sensors: ClassVar[Widths]
    model_fields: ClassVar[Widths]
    uniforms: ClassVar[Widths]
    observation: ClassVar[Widths]
    rewards: ClassVar[type[RewardWeights]]
    # Sensors of angular velocity, up-vector and linear velocity, their sites, and the body that the sites move with.
    gyro: ClassVar[str]
    upvector: ClassVar[str]
    velocimeter: ClassVar[str]
    gyro_site: ClassVar[str]
    velocity_site: ClassVar[str]
    root: ClassVar[str]
    # Observed phases are (offset + time * frequency * period) modulo the period, where a clock starts at 0.
    gait_period: ClassVar[float]
    gait_offsets: ClassVar[tuple[float, ...]]

    obs_dim: ClassVar[int]
    critic_dim: ClassVar[int]
    action_dim: ClassVar[int]
    phase_dim: ClassVar[int]
    uniform_width: ClassVar[int]
    reward_names: ClassVar[tuple[str, ...]]
    command_dim = 3
    push_interval: int | None = None
    initial_penalty_scale = 1.0
    curriculum_window = 1

    def __init_subclass__(cls) -> None:
        cls.obs_dim = sum(width for _, width in cls.observation[:-1])
        cls.critic_dim = sum(width for _, width in cls.observation)
        cls.action_dim = dict(cls.observation)["actions"]
        cls.uniform_width = sum(width for _, width in cls.uniforms)
        cls.reward_names = tuple(entry.name for entry in fields(cls.rewards))

    def __init__(
        self,
        env: VelocityTaskConfig,
        reward: RewardWeights,
        num_envs: int,
        device: torch.device,
        physics_profile: str,
    ) -> None:
        env.validate()
        reward.validate()
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, not {num_envs}")
        self.num_envs, self.device = num_envs, device
        self.uniform_columns = _columns(self.uniforms)
        self.control_dt = env.ctrl_dt
        self.max_episode_steps = env.max_episode_steps
        self._action_scale, self._tracking_sigma = env.action_scale, env.tracking_sigma
        joints = self.action_dim
        self.spec = PhysicsSpec(
            scene=self.scene,
            timestep=env.sim_dt,
            decimation=env.decimation,
            profile=physics_profile,
            nq=7 + joints,
            nv=6 + joints,
            nu=joints,
            sensors=self.sensors,
            model_fields=self.model_fields,
        )
        model = load_model(self.spec)
        assert (model.nq, model.nv, model.nu) == (self.spec.nq, self.spec.nv, self.spec.nu)
        self._place_robot(model)
        self._place_numbers(env, reward)

    def _tensor(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def _place_robot(self, model: mujoco.MjModel) -> None:
        stand = model.key(self.keyframe).qpos
        assert (stand[3:7] == (1, 0, 0, 0)).all(), "resets turn the keyframe by a yaw only"
        self.joint_default = self._tensor(stand[7:])
        self.kp = self._tensor(model.actuator_gainprm[:, 0])
        self.kd = self._tensor(-model.actuator_biasprm[:, 2])
        self._root_default = self._tensor(stand[:3])
        self._gyro_rotation, _ = self._site_in_root(model, self.gyro_site)
        self._velocity_rotation, self._velocity_offset = self._site_in_root(model, self.velocity_site)
        self.idle_row = torch.zeros(self.spec.width, device=self.device)
        self.idle_row[self.spec.columns["qpos"]] = self._tensor(stand)
        self.idle_row[self.spec.columns[self.upvector].stop - 1] = 1.0

    def _site_in_root(self, model: mujoco.MjModel, site: str) -> tuple[Tensor, Tensor]:
        """Rotation (3, 3) of site axes and position (3,) of the site in the root's frame, at the default pose."""
        import mujoco  # only now: `load_model`'s module imports it without a renderer

        data = mujoco.MjData(model)
        mujoco.mj_resetDataKeyframe(model, data, model.key(self.keyframe).id)
        mujoco.mj_kinematics(model, data)
        root = data.body(self.root).xmat.reshape(3, 3)
        rotation = root.T @ data.site(site).xmat.reshape(3, 3)
        offset = root.T @ (data.site(site).xpos - data.body(self.root).xpos)
        return self._tensor(rotation.tolist()), self._tensor(offset)

    def _place_numbers(self, env: VelocityTaskConfig, reward: RewardWeights) -> None:
        scales, noise, joints = env.observation_scales, env.observation_noise, self.action_dim
        self._scale = self._tensor([scales[name] for name, width in self.observation for _ in range(width)])
        self._noise = self._tensor([noise[name] * scales[name] for name in NOISY for _ in range(joints)])
        self._weights = self._tensor([getattr(reward, name) for name in self.reward_names])
        xy, linear, angular = env.reset_position_xy, env.reset_linear_velocity, env.reset_angular_velocity
        self._pose_range = self._range(xy, xy, env.reset_yaw)
        self._velocity_range = self._range(linear, linear, linear, angular, angular, angular)
        self._command_range = self._range(env.command_velocity_x, env.command_velocity_y, env.command_yaw_rate)

    def _range(self, *pairs: Sequence[float]) -> tuple[Tensor, Tensor]:
        return self._tensor([low for low, _ in pairs]), self._tensor([high for _, high in pairs])

    def fields(self, rows: Tensor) -> dict[str, Tensor]:
        """Named views of packed physics rows (N, width): qpos, qvel and every sensor."""
        return {name: rows[:, columns] for name, columns in self.spec.columns.items()}

    def control_targets(self, action: Tensor) -> Tensor:
        """Joint targets (N, J) in rad, actuator order: default pose + scale * action."""
        return self.joint_default + self._action_scale * action

    @abstractmethod
    def terminated(self, physics: Mapping[str, Tensor]) -> Tensor:
        """(N,) bool: the robot fell."""

    @abstractmethod
    def advance_phase(self, phase: Tensor) -> Tensor:
        """Gait phases (N, phase_dim) one control step later."""

    @abstractmethod
    def reset_phase(self, uniform: Tensor, phase: Tensor) -> Tensor:
        """Gait phases (N, phase_dim) of new episodes, from draws (N, uniform_width) or the phases so far."""

    def observed_phase(self, phase: Tensor) -> Tensor:
        """What observations hold of the gait phases (N, phase_dim)."""
        return phase

    @abstractmethod
    def reward_terms(
        self,
        physics: Mapping[str, Tensor],
        action: Tensor,
        previous_action: Tensor,
        command: Tensor,
        phase: Tensor,
        penalty_scale: Tensor,
    ) -> Tensor:
        """Weighted reward per second (N, terms), columns in the order of `reward_names`.

        Args:
            physics: named fields after the step.
            action: (N, J) raw action of the step.
            previous_action: (N, J) raw action of the step before, 0 at an episode's start.
            command: (N, 3) forward and sideways velocity in m/s, yaw rate in rad/s.
            phase: (N, phase_dim) gait phases after the step.
            penalty_scale: () factor of the negative weights.
        """

    def _tracking(self, physics: Mapping[str, Tensor], command: Tensor) -> tuple[Tensor, Tensor]:
        """Terms (N,) of the planar velocity and of the yaw rate: exp(-error^2 / sigma)."""
        gyro, velocity = physics[self.gyro], physics[self.velocimeter]
        linear_error = (command[:, :2] - velocity[:, :2]).square().sum(1)
        angular_error = (command[:, 2] - gyro[:, 2]).square()
        return torch.exp(-linear_error / self._tracking_sigma), torch.exp(-angular_error / self._tracking_sigma)

    def _weighted(self, terms: Sequence[Tensor], penalty_scale: Tensor) -> Tensor:
        weights = torch.where(self._weights < 0, self._weights * penalty_scale, self._weights)
        return torch.stack(list(terms), dim=1) * weights

    def tracking_errors(self, physics: Mapping[str, Tensor], command: Tensor) -> dict[str, Tensor]:
        """How far each robot is from its command, from the fields that the tracking rewards read.

        Args:
            physics: named fields after the step.
            command: (N, 3) forward and sideways velocity in m/s, yaw rate in rad/s.

        Returns:
            `tracking_error_lin`: (N,) norm of commanded minus actual planar velocity, m/s; `tracking_error_ang`: (N,)
            the yaw rate's absolute difference, rad/s.
        """
        planar = command[:, :2] - physics[self.velocimeter][:, :2]
        return {
            "tracking_error_lin": planar.square().sum(1).sqrt(),
            "tracking_error_ang": (command[:, 2] - physics[self.gyro][:, 2]).abs(),
        }

    def critic_observation(
        self, physics: Mapping[str, Tensor], action: Tensor, command: Tensor, phase: Tensor
    ) -> Tensor:
        """Observation without noise (N, critic_dim), columns as in `observation`.

        Gravity is minus the z axis of the gyro's site in *world* components, which turn with the robot's heading.
        """
        terms = (
            physics[self.gyro],
            -physics[self.upvector],
            physics["qpos"][:, 7:] - self.joint_default,
            physics["qvel"][:, 6:],
            action,
            command,
            self.observed_phase(phase),
            physics[self.velocimeter],
        )
        return torch.cat(terms, dim=1) * self._scale

    def observation_layout(self) -> list[ObservationBlock]:
        """The policy's observation, block by block in column order, as `critic_observation` puts it together."""
        sources = {
            "base_ang_vel": (self.gyro, "the sensor, rad/s"),
            "projected_gravity": (self.upvector, "minus the sensor"),
            "joint_pos": (None, "joint positions minus the default pose, rad"),
            "joint_vel": (None, "joint velocities, rad/s"),
            "actions": (None, "the last action, 0 at first"),
            "command": (None, "forward and sideways velocity, m/s, and yaw rate, rad/s"),
            "gait_phase": (None, "(offsets + seconds * frequency * period) modulo the period, of the gait"),
        }
        columns = _columns(self.observation[:-1])
        return [
            ObservationBlock(name, where, float(self._scale[where.start]), *sources[name])
            for name, where in columns.items()
        ]

    def policy_observation(self, critic: Tensor, uniform: Tensor) -> Tensor:
        """Policy observation (N, obs_dim) of one without noise (N, critic_dim); noise from draws (N, 2 J) in [0, 1)."""
        return self._noisy(critic, uniform)[:, : self.obs_dim]

    def _noisy(self, critic: Tensor, uniform: Tensor) -> Tensor:
        start, stop = 6, 6 + 2 * self.action_dim
        noisy = critic[:, start:stop] + (2 * uniform - 1) * self._noise
        return torch.cat((critic[:, :start], noisy, critic[:, stop:]), dim=1)

    def observe(
        self, physics: Mapping[str, Tensor], action: Tensor, command: Tensor, phase: Tensor, uniform: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The policy's observation (N, obs_dim), with noise from draws in [0, 1), and the critics' (N, critic_dim)."""
        critic = self.critic_observation(physics, action, command, phase)
        return self.policy_observation(critic, uniform), critic

    def push(self, physics: Mapping[str, Tensor], uniform: Tensor) -> dict[str, Tensor]:
        """Fields that a push changes, up to date: qvel (N, nv) and sensors, from draws (N, uniform_width)."""
        raise NotImplementedError(f"{type(self).__name__} has no pushes")

    def reset_rows(self, uniform: Tensor) -> Tensor:
        """Reset rows (N, reset width) from draws (N, uniform_width): qpos, qvel and model fields.

        The root is moved, turned about the vertical and pushed; joints rest at the default pose. The angular velocity
        is drawn in the world frame and stored, as MuJoCo wants it, in the body frame.
        """
        pose = between(self._pose_range, uniform[:, self.uniform_columns["root_pose"]])
        velocity = between(self._velocity_range, uniform[:, self.uniform_columns["root_velocity"]])
        zero = torch.zeros_like(pose[:, :1])
        half = pose[:, 2:] / 2
        quaternion = torch.cat((torch.cos(half), zero, zero, torch.sin(half)), dim=1)
        position = self._root_default + torch.cat((pose[:, :2], zero), dim=1)
        joints = self.joint_default.expand(len(uniform), -1)
        turned = _rotate_back(quaternion, velocity[:, 3:])
        state = (position, quaternion, joints, velocity[:, :3], turned, torch.zeros_like(joints))
        return torch.cat((*state, self._reset_model(uniform)), dim=1)

    def middle_gains(self) -> tuple[Tensor, Tensor]:
        """Stiffness and damping (J,) in the middle of what new episodes draw, actuator order."""
        middle = self._reset_model(torch.full((1, self.uniform_width), 0.5, device=self.device))[0]
        columns = _columns(self.model_fields)
        return middle[columns["kp"]], middle[columns["kd"]]

    @abstractmethod
    def _reset_model(self, uniform: Tensor) -> Tensor:
        """Model fields (N, their widths) of new episodes."""

    def reset_command(self, uniform: Tensor) -> Tensor:
        """Commands (N, 3) from draws (N, uniform_width)."""
        return between(self._command_range, uniform[:, self.uniform_columns["command"]])

    def reset_fields(self, rows: Tensor) -> dict[str, Tensor]:
        """Physics fields an observation reads, of reset rows (N, reset width), as a forward pass would give them."""
        columns = self.spec.reset_columns
        qpos, qvel = rows[:, columns["qpos"]], rows[:, columns["qvel"]]
        return {"qpos": qpos, "qvel": qvel, **self._site_fields(qpos, qvel)}

    def _site_fields(self, qpos: Tensor, qvel: Tensor) -> dict[str, Tensor]:
        """Readings of sensors whose sites move with the root as one rigid body.

        The sites turn with the root's angular velocity w and move with R^T v + w x offset, R being the root's rotation
        and v its world velocity.
        """
        quaternion, spin = qpos[:, 3:7], qvel[:, 3:6]
        up = _rotate(quaternion, self._gyro_rotation[:, 2].expand_as(spin))
        offset = self._velocity_offset.expand_as(spin)
        velocity = _rotate_back(quaternion, qvel[:, :3]) + torch.cross(spin, offset, dim=1)
        return {
            self.gyro: _in_axes(self._gyro_rotation, spin),
            self.upvector: up,
            self.velocimeter: _in_axes(self._velocity_rotation, velocity),
        }

    def next_penalty_scale(self, scale: Tensor, mean_length: Tensor) -> Tensor:
        """Penalty factor () after episodes ended, whose mean length is `mean_length` ()."""
        return scale


def between(bounds: tuple[Tensor, Tensor], uniform: Tensor) -> Tensor:
    """Draws in [0, 1) as draws between two bounds."""
    low, high = bounds
    return low + (high - low) * uniform


def _columns(widths: Widths) -> dict[str, slice]:
    stops = itertools.accumulate(width for _, width in widths)
    return {name: slice(stop - width, stop) for (name, width), stop in zip(widths, stops, strict=True)}


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
