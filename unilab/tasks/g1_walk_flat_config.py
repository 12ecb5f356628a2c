"""The numbers of the G1 walking task and the bounds they must keep. Defaults are those of UniLab 1.5.2's SAC task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from unilab.tasks.velocity_task_config import RewardWeights, VelocityTaskConfig, Widths, observation_terms
from unilab.validation import require

if TYPE_CHECKING:
    from unilab.tasks.g1_walk_flat import G1WalkFlat

NUM_JOINTS = 29
OBSERVATION = observation_terms(NUM_JOINTS, phases=2)
LEG_POSE_WEIGHTS = (0.01, 1.0, 5.0, 0.01, 5.0, 5.0)
UPPER_BODY_POSE_WEIGHT = 50.0


def _scales() -> dict[str, float]:
    return {name: 1.0 for name, _ in OBSERVATION} | {"base_ang_vel": 0.25, "joint_vel": 0.05, "base_lin_vel": 2.0}


def _pose_weights() -> list[float]:
    return [*LEG_POSE_WEIGHTS, *LEG_POSE_WEIGHTS, *[UPPER_BODY_POSE_WEIGHT] * 17]


@dataclass(kw_only=True)
class G1WalkFlatConfig(VelocityTaskConfig):
    """Numbers of the task beside those of `VelocityTaskConfig`. The noise is on the policy's terms alone.

    Attributes:
        planar_dead_zone: planar commands of at most this norm become zero, m/s.
        swing_height: highest foot target of a step, m.
        feet_phase_sigma: width of the foot height term, m^2.
        pose_weights: weight of each joint's squared deviation, joint order.
        min_pelvis_height: pelvis height below which an episode terminates, m.
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
    action_scale: float = 1.0
    observation_scales: dict[str, float] = field(default_factory=_scales)
    gait_frequency: float = 1.5
    tracking_sigma: float = 0.25
    max_tilt_degrees: float = 65.0
    planar_dead_zone: float = 0.2
    swing_height: float = 0.09
    feet_phase_sigma: float = 0.04
    pose_weights: list[float] = field(default_factory=_pose_weights)
    min_pelvis_height: float = 0.3
    gain_scale: list[float] = field(default_factory=lambda: [0.9, 1.1])
    penalty_scale_initial: float = 0.0625
    penalty_scale_min: float = 0.0625
    penalty_scale_max: float = 0.125
    penalty_scale_degree: float = 0.001
    penalty_down_below_steps: float = 150.0
    penalty_up_above_steps: float = 750.0
    penalty_window_at_4096_envs: int = 1000

    observation: ClassVar[Widths] = OBSERVATION
    positive: ClassVar[tuple[str, ...]] = (
        *VelocityTaskConfig.positive,
        "feet_phase_sigma",
        "penalty_scale_min",
        "penalty_window_at_4096_envs",
    )
    not_negative: ClassVar[tuple[str, ...]] = (
        *VelocityTaskConfig.not_negative,
        "planar_dead_zone",
        "swing_height",
        "min_pelvis_height",
        "penalty_down_below_steps",
    )
    ranges: ClassVar[tuple[str, ...]] = (*VelocityTaskConfig.ranges, "gain_scale")

    def task_class(self) -> type[G1WalkFlat]:
        """The task that these numbers are for."""
        from unilab.tasks.g1_walk_flat import G1WalkFlat  # torch only where a task is built

        return G1WalkFlat

    def validate(self) -> None:
        """Refuse values the task cannot run with.

        Raises:
            ValueError: naming the field and what it holds.
        """
        super().validate()
        require(self.gain_scale[0] > 0, "env.gain_scale", "positive", self.gain_scale)
        weights = self.pose_weights
        require(len(weights) == NUM_JOINTS, "env.pose_weights", f"{NUM_JOINTS} numbers, one per joint", weights)
        self._check_curriculum()

    def _check_curriculum(self) -> None:
        low, first, high = self.penalty_scale_min, self.penalty_scale_initial, self.penalty_scale_max
        require(low <= first <= high, "env.penalty_scale_initial", f"within [{low!r}, {high!r}]", first)
        degree = self.penalty_scale_degree
        require(0 <= degree < 1, "env.penalty_scale_degree", "at least 0 and below 1", degree)
        down, up = self.penalty_down_below_steps, self.penalty_up_above_steps
        require(down <= up, "env.penalty_down_below_steps", f"at most penalty_up_above_steps={up!r}", down)


@dataclass
class G1WalkFlatRewards(RewardWeights):
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
