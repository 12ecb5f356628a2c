from __future__ import annotations

import json
import re
from typing import Any

import pytest

from unilab.physics.spec import ROBOTS, PhysicsSpec, row_groups

SPEC = PhysicsSpec(
    scene="cart/scene_flat.xml",
    timestep=0.01,
    decimation=2,
    profile="exact",
    nq=7,
    nv=6,
    nu=2,
    sensors=(("gyro", 3), ("foot_quat", 4)),
    model_fields=(("kp", 2), ("kd", 2)),
)


def test_ingress_columns_follow_each_other_and_end_with_the_warnings() -> None:
    assert SPEC.columns == {
        "qpos": slice(0, 7),
        "qvel": slice(7, 13),
        "gyro": slice(13, 16),
        "foot_quat": slice(16, 20),
        "warnings": slice(20, 21),
    }
    assert list(SPEC.columns) == ["qpos", "qvel", "gyro", "foot_quat", "warnings"]
    assert SPEC.width == 21


def test_reset_columns() -> None:
    assert SPEC.reset_columns == {"qpos": slice(0, 7), "qvel": slice(7, 13), "kp": slice(13, 15), "kd": slice(15, 17)}
    assert SPEC.reset_width == 17


def test_a_spec_without_sensors_and_fields() -> None:
    bare = PhysicsSpec("cart/scene_flat.xml", 0.01, 2, "exact", 7, 6, 2, (), ())
    assert (bare.width, bare.reset_width) == (14, 13)
    assert bare.columns["warnings"] == slice(13, 14)


def test_json_round_trip() -> None:
    text = json.dumps(SPEC.to_json())
    assert PhysicsSpec.from_json(json.loads(text)) == SPEC
    assert hash(PhysicsSpec.from_json(json.loads(text))) == hash(SPEC)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scene": 3}, "a name must be text, got 3"),
        ({"profile": None}, "a name must be text, got None"),
        ({"sensors": [[["gyro"], 3]]}, "a name must be text, got ['gyro']"),
        ({"sensors": [["gyro", "3"]]}, "gyro must be an integer above 0, got '3'"),
        ({"model_fields": [["kp", 0]]}, "kp must be an integer above 0, got 0"),
        ({"decimation": 1.5}, "decimation must be an integer above 0, got 1.5"),
        ({"decimation": True}, "decimation must be an integer above 0, got True"),
        ({"nq": "7"}, "nq must be an integer above 0, got '7'"),
        ({"timestep": float("nan")}, "timestep must be positive and finite, got nan"),
        ({"timestep": float("inf")}, "timestep must be positive and finite, got inf"),
        ({"timestep": "0.01"}, "timestep must be positive and finite, got '0.01'"),
    ],
)
def test_values_that_describe_no_physics_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        PhysicsSpec.from_json({**SPEC.to_json(), **change})


def test_robots_are_package_data() -> None:
    assert (ROBOTS / "unitree_g1" / "scene_flat.xml").is_file()


@pytest.mark.parametrize(
    ("num_envs", "groups", "rows"),
    [
        (2048, 1, [(0, 2048)]),
        (2048, 2, [(0, 1024), (1024, 2048)]),
        (100, 2, [(0, 64), (64, 100)]),
        (17, 2, [(0, 16), (16, 17)]),
        (16, 2, [(0, 16)]),
        (1, 2, [(0, 1)]),
    ],
)
def test_groups_cover_every_row_once(num_envs: int, groups: int, rows: list[tuple[int, int]]) -> None:
    assert [(group.start, group.stop) for group in row_groups(num_envs, groups)] == rows


@pytest.mark.parametrize("groups", [0, 3, -1])
def test_other_numbers_of_groups_are_refused(groups: int) -> None:
    with pytest.raises(ValueError, match=rf"^env.physics_groups={groups}; use 1 or 2$"):
        row_groups(64, groups)
