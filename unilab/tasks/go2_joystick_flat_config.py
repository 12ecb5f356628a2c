"""The numbers of the Go2 joystick task and their bounds. Defaults are those of UniLab 1.5.2's FlashSAC task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from unilab.tasks.velocity_task_config import RewardWeights, VelocityTaskConfig, Widths, observation_terms
from unilab.validation import require

if TYPE_CHECKING:
    from unilab.tasks.go2_joystick_flat import Go2JoystickFlat

LEGS = ("FL", "FR", "RL", "RR")
NUM_JOINTS = 3 * len(LEGS)
OBSERVATION = observation_terms(NUM_JOINTS, phases=len(LEGS))


@dataclass(kw_only=True)
class Go2JoystickFlatConfig(VelocityTaskConfig):
    """Numbers of the task beside those of `VelocityTaskConfig`. The noise is on the policy's and the critics' terms.

    Attributes:
        base_height_target: height of the base that costs nothing, m.
        stance_share: share of a foot's cycle that it is to stand; the rest it is to swing.
        contact_threshold: contact reading above which a foot stands.
        swing_height: height of a swinging foot's centre, m.
        swing_sigma: width of the swing term, m^2.
        kp: stiffness of each actuator at a reset, N m / rad.
        kd: damping of each actuator at a reset, N m s / rad.
        base_mass_offset: added to the base's mass at a reset, kg; its inertia stays.
        base_com_x_offset: added to the base's centre of mass at a reset, m.
        push_interval_seconds: all robots are pushed at once after every such time, s.
        push_velocity_xy: world frame, added to the base's velocity, m/s, each axis.
        push_velocity_z: the same for the vertical.
    """

    sim_dt: float = 0.01
    action_scale: float = 0.4
    observation_scales: dict[str, float] = field(default_factory=lambda: {name: 1.0 for name, _ in OBSERVATION})
    gait_frequency: float = 2.0
    tracking_sigma: float = 0.5
    max_tilt_degrees: float = 60.0
    base_height_target: float = 0.3
    stance_share: float = 0.6
    contact_threshold: float = 0.1
    swing_height: float = 0.1
    swing_sigma: float = 0.01
    kp: list[float] = field(default_factory=lambda: [31.5, 38.5])
    kd: list[float] = field(default_factory=lambda: [0.45, 0.55])
    base_mass_offset: list[float] = field(default_factory=lambda: [-1.5, 1.5])
    base_com_x_offset: list[float] = field(default_factory=lambda: [-0.05, 0.05])
    push_interval_seconds: float = 15.0
    push_velocity_xy: list[float] = field(default_factory=lambda: [-1.0, 1.0])
    push_velocity_z: list[float] = field(default_factory=lambda: [-0.5, 0.5])

    observation: ClassVar[Widths] = OBSERVATION
    positive: ClassVar[tuple[str, ...]] = (*VelocityTaskConfig.positive, "swing_sigma", "push_interval_seconds")
    not_negative: ClassVar[tuple[str, ...]] = (
        *VelocityTaskConfig.not_negative,
        "base_height_target",
        "contact_threshold",
        "swing_height",
    )
    ranges: ClassVar[tuple[str, ...]] = (
        *VelocityTaskConfig.ranges,
        "kp",
        "kd",
        "base_mass_offset",
        "base_com_x_offset",
        "push_velocity_xy",
        "push_velocity_z",
    )
    whole: ClassVar[tuple[tuple[str, str], ...]] = (*VelocityTaskConfig.whole, ("push_interval_seconds", "ctrl_dt"))

    @property
    def push_interval_steps(self) -> int:
        """Control steps from one push to the next."""
        return round(self.push_interval_seconds / self.ctrl_dt)

    def task_class(self) -> type[Go2JoystickFlat]:
        """The task that these numbers are for."""
        from unilab.tasks.go2_joystick_flat import Go2JoystickFlat  # torch only where a task is built

        return Go2JoystickFlat

    def validate(self) -> None:
        """Refuse values the task cannot run with.

        Raises:
            ValueError: naming the field and what it holds.
        """
        super().validate()
        require(self.kp[0] > 0, "env.kp", "positive", self.kp)
        require(self.kd[0] >= 0, "env.kd", "at least 0", self.kd)
        require(0 <= self.stance_share <= 1, "env.stance_share", "in [0, 1]", self.stance_share)


@dataclass
class Go2JoystickFlatRewards(RewardWeights):
    """Reward weights per second (config group `reward`)."""

    tracking_lin_vel: float = 1.0
    tracking_ang_vel: float = 0.2
    lin_vel_z: float = -5.0
    ang_vel_xy: float = -0.1
    base_height: float = -20.0
    action_rate: float = -0.02
    similar_to_default: float = -0.4
    contact: float = 1.5
    swing_feet_z: float = 4.0
