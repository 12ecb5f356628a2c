"""What the collector and the learner agree on: the robot, the timing and the columns of a packed physics row."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unilab.validation import require

ROBOTS = Path(__file__).parent.parent / "robots"

PROFILES = ("reference", "exact", "fast")

# Row codes of the command block.
KEEP, RESET, SET_VELOCITY = 0, 1, 2

GROUP_COUNTS = (1, 2)
_GROUP_ALIGNMENT = 16  # rows; a later group's rows then start where vector loads of every buffer are aligned


@dataclass(frozen=True)
class PhysicsSpec:
    """One robot scene and how it is stepped.

    Attributes:
        scene: MJCF file below `unilab/robots`.
        timestep: physics step in seconds.
        decimation: physics steps per control step, controls held.
        profile: solver path, one of `PROFILES`.
        nq: generalized positions.
        nv: generalized velocities.
        nu: actuators.
        sensors: names and widths of the sensors that travel, in column order.
        model_fields: names and widths of the per-environment model parameters written at a reset.
    """

    scene: str
    timestep: float
    decimation: int
    profile: str
    nq: int
    nv: int
    nu: int
    sensors: tuple[tuple[str, int], ...]
    model_fields: tuple[tuple[str, int], ...]

    @property
    def columns(self) -> dict[str, slice]:
        """Columns of an ingress row: qpos, qvel, every sensor by name, and the count of new physics warnings."""
        return _slices((("qpos", self.nq), ("qvel", self.nv), *self.sensors, ("warnings", 1)))

    @property
    def reset_columns(self) -> dict[str, slice]:
        """Columns of a reset row: qpos, qvel and every model field by name."""
        return _slices((("qpos", self.nq), ("qvel", self.nv), *self.model_fields))

    @property
    def width(self) -> int:
        """Columns of an ingress row."""
        return self.nq + self.nv + sum(width for _, width in self.sensors) + 1

    @property
    def reset_width(self) -> int:
        """Columns of a reset row."""
        return self.nq + self.nv + sum(width for _, width in self.model_fields)

    @property
    def state_bound(self) -> int:
        """At least the numbers of an integration state, where no body hangs on another without a joint.

        Time, qpos, qvel, warm start, controls, applied joint forces, and six applied forces for each body; those are
        counted as one for each degree of freedom and the world. `MujocoPool` knows the exact number.
        """
        return 1 + self.nq + 3 * self.nv + self.nu + 6 * (self.nv + 1)

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> PhysicsSpec:
        """The inverse of `to_json`.

        Raises:
            ValueError: if a value has another type, or is no possible size or time.
            KeyError, TypeError: if `values` has other keys or another form.
        """
        pairs = {key: tuple((name, width) for name, width in values[key]) for key in ("sensors", "model_fields")}
        spec = cls(**{**values, **pairs})
        named = (*spec.sensors, *spec.model_fields)
        for text in (spec.scene, spec.profile, *(name for name, _ in named)):
            require(isinstance(text, str), "a name", "text", text)
        for name, size in (*((key, getattr(spec, key)) for key in ("decimation", "nq", "nv", "nu")), *named):
            require(type(size) is int and size > 0, name, "an integer above 0", size)
        time = spec.timestep
        require(type(time) in (int, float) and 0 < time < math.inf, "timestep", "positive and finite", time)
        return spec


def row_groups(num_envs: int, groups: int) -> list[slice]:
    """Rows of each group of environments, in order; one group where there are too few rows for two.

    Args:
        num_envs: all rows.
        groups: one of `GROUP_COUNTS`.

    Raises:
        ValueError: if `groups` is another number.
    """
    if groups not in GROUP_COUNTS:
        raise ValueError(f"env.physics_groups={groups}; use 1 or 2")
    middle = -(-num_envs // (groups * _GROUP_ALIGNMENT)) * _GROUP_ALIGNMENT
    if middle >= num_envs:
        return [slice(0, num_envs)]
    return [slice(0, middle), slice(middle, num_envs)]


def _slices(widths: tuple[tuple[str, int], ...]) -> dict[str, slice]:
    slices, start = {}, 0
    for name, width in widths:
        slices[name] = slice(start, start + width)
        start += width
    return slices
