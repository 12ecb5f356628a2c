"""The numbers that tasks of following a velocity command share, and the bounds they must keep."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar

from unilab.physics.spec import GROUP_COUNTS, PROFILES
from unilab.validation import require

if TYPE_CHECKING:
    from unilab.tasks.velocity_task import VelocityTask

Widths = tuple[tuple[str, int], ...]  # names and widths, in column order
NOISY = ("joint_pos", "joint_vel")


def observation_terms(joints: int, phases: int) -> Widths:
    """Observation terms in column order; the policy sees all but the last."""
    return (
        ("base_ang_vel", 3),
        ("projected_gravity", 3),
        ("joint_pos", joints),
        ("joint_vel", joints),
        ("actions", joints),
        ("command", 3),
        ("gait_phase", phases),
        ("base_lin_vel", 3),
    )


@dataclass(kw_only=True)
class VelocityTaskConfig(ABC):
    """Numbers of a task and how its physics is run (config group `env`).

    Pairs are [low, high] of a uniform distribution.

    Attributes:
        sim_dt: physics step, s.
        ctrl_dt: control step, s; a whole number of physics steps.
        max_episode_seconds: time limit, s.
        action_scale: joint target offset per unit of action, rad.
        observation_scales: factor of each observation term.
        observation_noise: half width of the uniform noise on a term, added before scaling.
        command_velocity_x: m/s.
        command_velocity_y: m/s.
        command_yaw_rate: rad/s.
        gait_frequency: Hz.
        tracking_sigma: width of both tracking terms, exp(-error^2 / sigma).
        max_tilt_degrees: tilt beyond which an episode terminates.
        reset_position_xy: m, for x and for y.
        reset_yaw: rad.
        reset_linear_velocity: world frame, m/s, each axis.
        reset_angular_velocity: world frame, rad/s, each axis.
        physics_profile: solver path, `reference`, `exact` or `fast`.
        physics_groups: groups of environments that take turns on the CPU pool; with 2 the pool steps one group while
            the other is packed, uploaded, acted on and commanded. What is computed does not depend on it.
        cpu_ids: CPUs of the physics workers, worker i on the i-th; null takes the allowed ones, less one for the
            learner where there is more than one.
    """

    sim_dt: float
    ctrl_dt: float = 0.02
    max_episode_seconds: float = 20.0
    action_scale: float
    observation_scales: dict[str, float]
    observation_noise: dict[str, float] = field(default_factory=lambda: {"joint_pos": 0.01, "joint_vel": 0.1})
    command_velocity_x: list[float] = field(default_factory=lambda: [-0.6, 1.0])
    command_velocity_y: list[float] = field(default_factory=lambda: [-0.4, 0.4])
    command_yaw_rate: list[float] = field(default_factory=lambda: [-0.8, 0.8])
    gait_frequency: float
    tracking_sigma: float
    max_tilt_degrees: float
    reset_position_xy: list[float] = field(default_factory=lambda: [-0.5, 0.5])
    reset_yaw: list[float] = field(default_factory=lambda: [-math.pi, math.pi])
    reset_linear_velocity: list[float] = field(default_factory=lambda: [-0.5, 0.5])
    reset_angular_velocity: list[float] = field(default_factory=lambda: [-0.5, 0.5])
    physics_profile: str = "exact"
    physics_groups: int = 2
    cpu_ids: list[int] | None = None

    observation: ClassVar[Widths]
    positive: ClassVar[tuple[str, ...]] = (
        "sim_dt",
        "ctrl_dt",
        "max_episode_seconds",
        "tracking_sigma",
        "max_tilt_degrees",
    )
    not_negative: ClassVar[tuple[str, ...]] = ("gait_frequency",)
    ranges: ClassVar[tuple[str, ...]] = (
        "command_velocity_x",
        "command_velocity_y",
        "command_yaw_rate",
        "reset_position_xy",
        "reset_yaw",
        "reset_linear_velocity",
        "reset_angular_velocity",
    )
    # Times that must be a whole number of shorter ones.
    whole: ClassVar[tuple[tuple[str, str], ...]] = (("ctrl_dt", "sim_dt"), ("max_episode_seconds", "ctrl_dt"))

    @abstractmethod
    def task_class(self) -> type[VelocityTask]:
        """The task that these numbers are for."""

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
        check_finite(self, "env")
        self._check_timing()
        for name in self.positive:
            require(getattr(self, name) > 0, f"env.{name}", "positive", getattr(self, name))
        for name in self.not_negative:
            require(getattr(self, name) >= 0, f"env.{name}", "at least 0", getattr(self, name))
        for name in self.ranges:
            pair = getattr(self, name)
            require(len(pair) == 2 and pair[0] <= pair[1], f"env.{name}", "[low, high] with low <= high", pair)
        require(self.max_tilt_degrees <= 180, "env.max_tilt_degrees", "at most 180", self.max_tilt_degrees)
        self._check_terms()
        require(self.physics_groups in GROUP_COUNTS, "env.physics_groups", "1 or 2", self.physics_groups)
        require(self.physics_profile in PROFILES, "env.physics_profile", " or ".join(PROFILES), self.physics_profile)

    def _check_timing(self) -> None:
        for longer, shorter in self.whole:
            long, short = getattr(self, longer), getattr(self, shorter)
            ratio = long / short if short > 0 else 0.0
            whole = ratio > 0.5 and abs(ratio - round(ratio)) < 1e-6 * ratio
            require(whole, f"env.{longer}", f"a whole number of {shorter} steps of {short!r} s", long)

    def _check_terms(self) -> None:
        names = [name for name, _ in self.observation]
        for key, value, wanted in (
            ("observation_scales", self.observation_scales, names),
            ("observation_noise", self.observation_noise, list(NOISY)),
        ):
            require(set(value) == set(wanted), f"env.{key}", f"one number for each of {', '.join(wanted)}", value)
        noise = self.observation_noise
        require(min(noise.values()) >= 0, "env.observation_noise", "at least 0", noise)


@dataclass
class RewardWeights:
    """Reward weights per second (config group `reward`), one field for each term."""

    def validate(self) -> None:
        """Refuse weights that are not finite.

        Raises:
            ValueError: naming the field and what it holds.
        """
        check_finite(self, "reward")


def check_finite(config: VelocityTaskConfig | RewardWeights, group: str) -> None:
    """Refuse numbers that are not finite.

    Raises:
        ValueError: naming the field and what it holds.
    """
    for entry in fields(config):
        value = getattr(config, entry.name)
        numbers = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        finite = all(math.isfinite(number) for number in numbers if isinstance(number, int | float))
        require(finite, f"{group}.{entry.name}", "finite", value)
