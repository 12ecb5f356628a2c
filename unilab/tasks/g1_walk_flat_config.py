"""The numbers of the G1 walking task and the bounds they must keep. Defaults are those of UniLab 1.5.2's SAC task."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from unilab.validation import require

NUM_JOINTS = 29
# Observation terms in column order; the policy sees all but the last.
OBSERVATION = (
    ("base_ang_vel", 3),
    ("projected_gravity", 3),
    ("joint_pos", NUM_JOINTS),
    ("joint_vel", NUM_JOINTS),
    ("actions", NUM_JOINTS),
    ("command", 3),
    ("gait_phase", 2),
    ("base_lin_vel", 3),
)
NOISY = ("joint_pos", "joint_vel")
LEG_POSE_WEIGHTS = (0.01, 1.0, 5.0, 0.01, 5.0, 5.0)
UPPER_BODY_POSE_WEIGHT = 50.0


def _scales() -> dict[str, float]:
    return {name: 1.0 for name, _ in OBSERVATION} | {"base_ang_vel": 0.25, "joint_vel": 0.05, "base_lin_vel": 2.0}


def _pose_weights() -> list[float]:
    return [*LEG_POSE_WEIGHTS, *LEG_POSE_WEIGHTS, *[UPPER_BODY_POSE_WEIGHT] * 17]


@dataclass
class G1WalkFlatConfig:
    """Numbers of the task (config group `env`); pairs are [low, high] of a uniform distribution.

    Attributes:
        sim_dt: physics step, s.
        ctrl_dt: control step, s; a whole number of physics steps.
        max_episode_seconds: time limit, s.
        action_scale: joint target offset per unit of action, rad.
        observation_scales: factor of each observation term.
        observation_noise: half width of the uniform noise on the policy's term, added before scaling.
        command_velocity_x: m/s.
        command_velocity_y: m/s.
        command_yaw_rate: rad/s.
        planar_dead_zone: planar commands of at most this norm become zero, m/s.
        gait_frequency: Hz.
        tracking_sigma: width of both tracking terms, exp(-error^2 / sigma).
        swing_height: highest foot target of a step, m.
        feet_phase_sigma: width of the foot height term, m^2.
        pose_weights: weight of each joint's squared deviation, joint order.
        max_tilt_degrees: torso tilt beyond which an episode terminates.
        min_pelvis_height: pelvis height below which an episode terminates, m.
        reset_position_xy: m, for x and for y.
        reset_yaw: rad.
        reset_linear_velocity: world frame, m/s, each axis.
        reset_angular_velocity: world frame, rad/s, each axis.
        gain_scale: factor on each kp and kd at a reset.
        penalty_scale_initial: first common factor of the negative reward weights.
        penalty_scale_min: its lower bound.
        penalty_scale_max: its upper bound.
        penalty_scale_degree: its relative change per tick in which an episode ended.
        penalty_down_below_steps: mean episode length below which it falls.
        penalty_up_above_steps: mean episode length above which it rises.
        penalty_window_at_4096_envs: episodes the mean length looks back on, in proportion to the environments.
    """

    sim_dt: float = 0.006666666666666667
    ctrl_dt: float = 0.02
    max_episode_seconds: float = 20.0
    action_scale: float = 1.0
    observation_scales: dict[str, float] = field(default_factory=_scales)
    observation_noise: dict[str, float] = field(default_factory=lambda: {"joint_pos": 0.01, "joint_vel": 0.1})
    command_velocity_x: list[float] = field(default_factory=lambda: [-0.6, 1.0])
    command_velocity_y: list[float] = field(default_factory=lambda: [-0.4, 0.4])
    command_yaw_rate: list[float] = field(default_factory=lambda: [-0.8, 0.8])
    planar_dead_zone: float = 0.2
    gait_frequency: float = 1.5
    tracking_sigma: float = 0.25
    swing_height: float = 0.09
    feet_phase_sigma: float = 0.04
    pose_weights: list[float] = field(default_factory=_pose_weights)
    max_tilt_degrees: float = 65.0
    min_pelvis_height: float = 0.3
    reset_position_xy: list[float] = field(default_factory=lambda: [-0.5, 0.5])
    reset_yaw: list[float] = field(default_factory=lambda: [-math.pi, math.pi])
    reset_linear_velocity: list[float] = field(default_factory=lambda: [-0.5, 0.5])
    reset_angular_velocity: list[float] = field(default_factory=lambda: [-0.5, 0.5])
    gain_scale: list[float] = field(default_factory=lambda: [0.9, 1.1])
    penalty_scale_initial: float = 0.0625
    penalty_scale_min: float = 0.0625
    penalty_scale_max: float = 0.125
    penalty_scale_degree: float = 0.001
    penalty_down_below_steps: float = 150.0
    penalty_up_above_steps: float = 750.0
    penalty_window_at_4096_envs: int = 1000

    @property
    def decimation(self) -> int:
        """Physics steps per control step."""
        return round(self.ctrl_dt / self.sim_dt)

    @property
    def max_episode_steps(self) -> int:
        """Control steps until an episode is truncated."""
        return round(self.max_episode_seconds / self.ctrl_dt)

    def validate(self) -> None:
        """Refuse values the task cannot run with.

        Raises:
            ValueError: naming the field and what it holds.
        """
        _check_finite(self, "env")
        _check_timing(self)
        for name in POSITIVE:
            require(getattr(self, name) > 0, f"env.{name}", "positive", getattr(self, name))
        for name in NOT_NEGATIVE:
            require(getattr(self, name) >= 0, f"env.{name}", "at least 0", getattr(self, name))
        for name in RANGES:
            pair = getattr(self, name)
            require(len(pair) == 2 and pair[0] <= pair[1], f"env.{name}", "[low, high] with low <= high", pair)
        require(self.gain_scale[0] > 0, "env.gain_scale", "positive", self.gain_scale)
        weights = self.pose_weights
        require(len(weights) == NUM_JOINTS, "env.pose_weights", f"{NUM_JOINTS} numbers, one per joint", weights)
        require(self.max_tilt_degrees <= 180, "env.max_tilt_degrees", "at most 180", self.max_tilt_degrees)
        _check_terms(self)
        _check_curriculum(self)


POSITIVE = (
    "sim_dt",
    "ctrl_dt",
    "max_episode_seconds",
    "tracking_sigma",
    "feet_phase_sigma",
    "max_tilt_degrees",
    "penalty_scale_min",
    "penalty_window_at_4096_envs",
)
NOT_NEGATIVE = ("planar_dead_zone", "gait_frequency", "swing_height", "min_pelvis_height", "penalty_down_below_steps")
RANGES = (
    "command_velocity_x",
    "command_velocity_y",
    "command_yaw_rate",
    "reset_position_xy",
    "reset_yaw",
    "reset_linear_velocity",
    "reset_angular_velocity",
    "gain_scale",
)


@dataclass
class G1WalkFlatRewards:
    """Reward weights per second (config group `reward`); negative ones are scaled by the penalty curriculum."""

    tracking_lin_vel: float = 2.0
    tracking_ang_vel: float = 1.5
    penalty_ang_vel_xy: float = -1.0
    penalty_orientation: float = -10.0
    penalty_action_rate: float = -4.0
    pose: float = -0.5
    penalty_feet_ori: float = -20.0
    feet_phase: float = 5.0
    alive: float = 10.0

    def validate(self) -> None:
        """Refuse weights that are not finite.

        Raises:
            ValueError: naming the field and what it holds.
        """
        _check_finite(self, "reward")


def _check_finite(config: G1WalkFlatConfig | G1WalkFlatRewards, group: str) -> None:
    for entry in fields(config):
        value = getattr(config, entry.name)
        numbers = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        finite = all(math.isfinite(number) for number in numbers if isinstance(number, int | float))
        require(finite, f"{group}.{entry.name}", "finite", value)


def _check_timing(config: G1WalkFlatConfig) -> None:
    for longer, shorter in (("ctrl_dt", "sim_dt"), ("max_episode_seconds", "ctrl_dt")):
        long, short = getattr(config, longer), getattr(config, shorter)
        ratio = long / short if short > 0 else 0.0
        whole = ratio > 0.5 and abs(ratio - round(ratio)) < 1e-6 * ratio
        require(whole, f"env.{longer}", f"a whole number of {shorter} steps of {short!r} s", long)


def _check_terms(config: G1WalkFlatConfig) -> None:
    names = [name for name, _ in OBSERVATION]
    for key, value, wanted in (
        ("observation_scales", config.observation_scales, names),
        ("observation_noise", config.observation_noise, list(NOISY)),
    ):
        require(set(value) == set(wanted), f"env.{key}", f"one number for each of {', '.join(wanted)}", value)
    noise = config.observation_noise
    require(min(noise.values()) >= 0, "env.observation_noise", "at least 0", noise)


def _check_curriculum(config: G1WalkFlatConfig) -> None:
    low, first, high = config.penalty_scale_min, config.penalty_scale_initial, config.penalty_scale_max
    require(low <= first <= high, "env.penalty_scale_initial", f"within [{low!r}, {high!r}]", first)
    degree = config.penalty_scale_degree
    require(0 <= degree < 1, "env.penalty_scale_degree", "at least 0 and below 1", degree)
    down, up = config.penalty_down_below_steps, config.penalty_up_above_steps
    require(down <= up, "env.penalty_down_below_steps", f"at most penalty_up_above_steps={up!r}", down)
