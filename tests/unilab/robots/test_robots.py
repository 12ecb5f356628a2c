"""The compiled robots against the published facts of the existing system's compiled models (*_facts.json)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest

from unilab.physics.spec import ROBOTS

# The facts carry 12 significant digits, and 7 for values computed at the keyframe.
MODEL_DIGITS = {"rel_tol": 1e-11, "abs_tol": 1e-15}
KEYFRAME_DIGITS = {"rel_tol": 1e-6, "abs_tol": 1e-6}

# The existing system hands its model on as XML text of 6 digits. Of the G1's capsules given by two end points, that
# rounds the lengths and orientations of these five; this project keeps the end points. So it does with the angles of
# the Go2's calves: 0.05, 0.2 and 0.21 rad.
ROUNDED_CAPSULES = ("left_thigh", "right_thigh", "left_hand", "right_hand", "left_foot1")
LEGS = ("FL", "FR", "RL", "RR")
XML_DIGITS = {"rel_tol": 1e-6, "abs_tol": 5e-7}


@dataclass
class Robot:
    """A robot's files, its facts and what the tests below expect of it.

    Attributes:
        folder: its MJCF below `unilab/robots`.
        file: the robot alone, without a scene.
        facts: what the compiled model of the existing system holds.
        sizes: nq, nv, nu and geoms of the robot alone.
        timestep: seconds of a physics step.
        xml_sensors: sensors of the XML.
        rounded_geoms: geoms that the existing system's text rounds.
        contact_error: what that rounding moves a contact by, m.
        contact_kinds: part of a geom's name, and the entry of the facts that has its friction against the floor.
        owner: whose notice must be kept.
    """

    folder: Path
    file: str
    facts: dict[str, Any]
    sizes: tuple[int, int, int, int]
    timestep: float
    xml_sensors: int
    contact_kinds: dict[str, str]
    owner: str
    rounded_geoms: tuple[str, ...] = ()
    contact_error: float = 0.0
    sensors: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        # The existing system injects six sensors for its own reading of the root pose; nothing here needs them.
        self.sensors = [sensor for sensor in self.facts["sensors"] if not sensor["name"].startswith("track_")]


def read_facts(name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((Path(__file__).parent / name).read_text())
    return facts


G1 = Robot(
    folder=ROBOTS / "unitree_g1",
    file="g1.xml",
    facts=read_facts("g1_facts.json"),
    sizes=(36, 35, 29, 41),
    timestep=1 / 150,
    xml_sensors=21,
    contact_kinds={"foot_contact": "foot_sphere_vs_floor", "collision": "foot_capsule_or_other_vs_floor"},
    owner='Copyright (c) 2016-2023 HangZhou YuShu TECHNOLOGY CO.,LTD. ("Unitree Robotics")',
    rounded_geoms=tuple(f"{name}_collision" for name in ROUNDED_CAPSULES),
    contact_error=2.5e-8,  # the orientation of left_foot1 is off by 5e-7 rad, over 5 cm
)
GO2 = Robot(
    folder=ROBOTS / "unitree_go2",
    file="go2.xml",
    facts=read_facts("go2_facts.json"),
    sizes=(19, 18, 12, 23),
    timestep=0.01,
    xml_sensors=38,
    rounded_geoms=tuple(f"{leg}_calf_geom{part}" for leg in LEGS for part in (1, 2)),
    contact_kinds={"": "foot_sphere_vs_floor"},  # nothing but feet touches the floor at the keyframe
    owner='Copyright (c) 2016-2022 HangZhou YuShu TECHNOLOGY CO.,LTD. ("Unitree Robotics")',
)


@pytest.fixture(scope="module", params=[G1, GO2], ids=["g1", "go2"])
def robot(request: pytest.FixtureRequest) -> Robot:
    assert isinstance(request.param, Robot)
    return request.param


@pytest.fixture(scope="module")
def model(robot: Robot) -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_path(str(robot.folder / "scene_flat.xml"))


@pytest.fixture(scope="module")
def standing(model: mujoco.MjModel) -> mujoco.MjData:
    data = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, data, 0)
    mujoco.mj_forward(model, data)
    return data


def differences(found: Any, expected: Any, digits: dict[str, float], path: str = "") -> list[str]:
    """Leaves of two nested values that differ, as lines; every key of `expected` must be in `found`."""
    if isinstance(expected, dict):
        pairs = [(key, found[key], value) for key, value in expected.items()]
        return [line for key, a, b in pairs for line in differences(a, b, digits, f"{path}.{key}")]
    if isinstance(expected, list):
        if len(found) != len(expected):
            return [f"{path}: {len(found)} entries instead of {len(expected)}"]
        return [
            line
            for i, (a, b) in enumerate(zip(found, expected, strict=True))
            for line in differences(a, b, digits, f"{path}[{b.get('name', i) if isinstance(b, dict) else i}]")
        ]
    if isinstance(expected, (int, float)) and not isinstance(expected, bool):
        same = math.isclose(found, expected, **digits)
    else:
        same = found == expected
    return [] if same else [f"{path}: {found!r} instead of {expected!r}"]


def assert_facts(found: Any, expected: Any, digits: dict[str, float] = MODEL_DIGITS) -> None:
    assert differences(found, expected, digits) == []


def same_quaternions(found: list[dict[str, Any]], expected: list[dict[str, Any]], key: str) -> None:
    """q and -q are the same rotation: give `found` the sign that `expected` has."""
    for a, b in zip(found, expected, strict=True):
        if np.dot(a[key], b[key]) < 0:
            a[key] = [-x for x in a[key]]


def name_of(model: mujoco.MjModel, kind: mujoco.mjtObj, index: int) -> str:
    return str(mujoco.mj_id2name(model, kind, index))


def full_inertia(quat: np.ndarray, principal: np.ndarray) -> dict[str, float]:
    """Inertia about the centre of mass in body axes: R diag(principal) R^T."""
    flat = np.empty(9)
    mujoco.mju_quat2Mat(flat, quat)
    rotation = flat.reshape(3, 3)
    matrix = rotation @ np.diag(principal) @ rotation.T
    names = {"ixx": (0, 0), "iyy": (1, 1), "izz": (2, 2), "ixy": (0, 1), "ixz": (0, 2), "iyz": (1, 2)}
    return {name: float(matrix[index]) for name, index in names.items()}


def describe_body(model: mujoco.MjModel, i: int) -> dict[str, Any]:
    return {
        "name": name_of(model, mujoco.mjtObj.mjOBJ_BODY, i),
        "parent": name_of(model, mujoco.mjtObj.mjOBJ_BODY, model.body_parentid[i]),
        "pos": model.body_pos[i].tolist(),
        "quat": model.body_quat[i].tolist(),
        "mass": model.body_mass[i],
        "com_pos": model.body_ipos[i].tolist(),
        "inertia_full_in_body_axes_about_com": full_inertia(model.body_iquat[i], model.body_inertia[i]),
        "subtree_mass": model.body_subtreemass[i],
        "invweight0": model.body_invweight0[i].tolist(),
    }


def describe_joint(model: mujoco.MjModel, i: int) -> dict[str, Any]:
    kind = mujoco.mjtJoint(model.jnt_type[i])
    free = kind == mujoco.mjtJoint.mjJNT_FREE
    first_dof, first_qpos = model.jnt_dofadr[i], model.jnt_qposadr[i]
    dofs = slice(first_dof, first_dof + (6 if free else 1))
    return {
        "name": mujoco.mj_id2name(model, mujoco.mjtObj.mjOBJ_JOINT, i) or "(unnamed freejoint)",
        "body": name_of(model, mujoco.mjtObj.mjOBJ_BODY, model.jnt_bodyid[i]),
        "type": kind.name,
        "pos": model.jnt_pos[i].tolist(),
        "axis": model.jnt_axis[i].tolist(),
        "limited": bool(model.jnt_limited[i]),
        "range": model.jnt_range[i].tolist(),
        "qposadr": first_qpos,
        "dofadr": first_dof,
        "armature": model.dof_armature[dofs].tolist(),
        "damping": model.dof_damping[dofs].tolist(),
        "frictionloss": model.dof_frictionloss[dofs].tolist(),
        "stiffness": model.jnt_stiffness[i],
        "margin": model.jnt_margin[i],
        "limit_solref": model.jnt_solref[i].tolist(),
        "limit_solimp": model.jnt_solimp[i].tolist(),
        "friction_solref": model.dof_solref[first_dof].tolist(),
        "friction_solimp": model.dof_solimp[first_dof].tolist(),
        "actuatorfrc_limited": bool(model.jnt_actfrclimited[i]),
        "actuatorfrc_range": model.jnt_actfrcrange[i].tolist(),
        "qpos0": model.qpos0[first_qpos : first_qpos + (7 if free else 1)].tolist(),
    }


def describe_actuator(model: mujoco.MjModel, i: int) -> dict[str, Any]:
    return {
        "name": name_of(model, mujoco.mjtObj.mjOBJ_ACTUATOR, i),
        "joint": name_of(model, mujoco.mjtObj.mjOBJ_JOINT, model.actuator_trnid[i, 0]),
        "trntype": mujoco.mjtTrn(model.actuator_trntype[i]).name,
        "gear": model.actuator_gear[i].tolist(),
        "dyntype": mujoco.mjtDyn(model.actuator_dyntype[i]).name,
        "gaintype": mujoco.mjtGain(model.actuator_gaintype[i]).name,
        "biastype": mujoco.mjtBias(model.actuator_biastype[i]).name,
        "gainprm": model.actuator_gainprm[i, :3].tolist(),
        "biasprm": model.actuator_biasprm[i, :3].tolist(),
        "forcelimited": bool(model.actuator_forcelimited[i]),
        "forcerange": model.actuator_forcerange[i].tolist(),
        "ctrllimited": bool(model.actuator_ctrllimited[i]),
        "ctrlrange": model.actuator_ctrlrange[i].tolist(),
    }


def describe_geom(model: mujoco.MjModel, i: int) -> dict[str, Any]:
    integers = ("contype", "conaffinity", "condim", "priority")
    numbers = ("margin", "gap", "solmix")
    vectors = ("size", "pos", "quat", "friction", "solref", "solimp")
    return {
        "name": name_of(model, mujoco.mjtObj.mjOBJ_GEOM, i),
        "body": name_of(model, mujoco.mjtObj.mjOBJ_BODY, model.geom_bodyid[i]),
        "type": mujoco.mjtGeom(model.geom_type[i]).name,
        **{key: int(getattr(model, f"geom_{key}")[i]) for key in integers},
        **{key: float(getattr(model, f"geom_{key}")[i]) for key in numbers},
        **{key: getattr(model, f"geom_{key}")[i].tolist() for key in vectors},
    }


def describe_sensor(model: mujoco.MjModel, i: int) -> dict[str, Any]:
    reference = mujoco.mjtObj(model.sensor_reftype[i])
    named = reference != mujoco.mjtObj.mjOBJ_UNKNOWN
    return {
        "name": name_of(model, mujoco.mjtObj.mjOBJ_SENSOR, i),
        "type": mujoco.mjtSensor(model.sensor_type[i]).name,
        "objtype": mujoco.mjtObj(model.sensor_objtype[i]).name,
        "obj": name_of(model, model.sensor_objtype[i], model.sensor_objid[i]),
        "reftype": reference.name,
        "ref": name_of(model, reference, model.sensor_refid[i]) if named else None,
        "dim": model.sensor_dim[i],
        "adr": model.sensor_adr[i],
        "stage": mujoco.mjtStage(model.sensor_needstage[i]).name,
        "cutoff": model.sensor_cutoff[i],
        "noise": model.sensor_noise[i],
        "intprm": model.sensor_intprm[i].tolist(),
    }


def describe_contacts(model: mujoco.MjModel, data: mujoco.MjData) -> list[list[Any]]:
    names = [[name_of(model, mujoco.mjtObj.mjOBJ_GEOM, geom) for geom in contact.geom] for contact in data.contact]
    return [[*pair, contact.dist] for pair, contact in zip(names, data.contact, strict=True)]


def excluded_bodies(model: mujoco.MjModel) -> set[tuple[int, int]]:
    """Ascending body ids of every exclude; a signature holds one id in its upper and one in its lower 16 bits."""
    ids = [sorted((int(signature) >> 16, int(signature) & 0xFFFF)) for signature in model.exclude_signature]
    return {(one, other) for one, other in ids}


def can_collide(model: mujoco.MjModel, geom1: int, geom2: int) -> bool:
    """MuJoCo's static filters: same body, parent and child (the world excepted), excludes, contype and conaffinity."""
    body1, body2 = sorted(int(model.geom_bodyid[geom]) for geom in (geom1, geom2))
    adjacent = body1 != 0 and int(model.body_parentid[body2]) == body1
    excluded = (body1, body2) in excluded_bodies(model)
    types, affinities = model.geom_contype, model.geom_conaffinity
    masks = (types[geom1] & affinities[geom2]) | (types[geom2] & affinities[geom1])
    return body1 != body2 and not adjacent and not excluded and bool(masks)


def without(records: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key not in keys} for record in records]


def test_the_robot_compiles_without_a_scene(robot: Robot) -> None:
    alone = mujoco.MjModel.from_xml_path(str(robot.folder / robot.file))
    assert (alone.nq, alone.nv, alone.nu, alone.ngeom) == robot.sizes


def test_totals(robot: Robot, model: mujoco.MjModel) -> None:
    expected = dict(robot.facts["totals"])
    expected["nsensor"] -= 6
    expected["nsensordata"] -= 3 + 4 + 3 + 3 + 3 + 4
    found: dict[str, Any] = {key: getattr(model, key, None) for key in expected}
    found["nM"] = model.nM
    found["total_mass"] = model.body_mass.sum()
    found["meaninertia"] = model.stat.meaninertia
    found["nstate_integration"] = mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION)
    assert_facts(found, expected)


def test_options(robot: Robot, model: mujoco.MjModel) -> None:
    enums = {
        "integrator": mujoco.mjtIntegrator,
        "cone": mujoco.mjtCone,
        "jacobian": mujoco.mjtJacobian,
        "solver": mujoco.mjtSolver,
    }
    found = {key: getattr(model.opt, key) for key in robot.facts["option"]}
    found |= {key: enum(found[key]).name for key, enum in enums.items()}
    assert_facts(found, robot.facts["option"])
    assert model.opt.timestep == robot.timestep


def test_bodies(robot: Robot, model: mujoco.MjModel) -> None:
    found = [describe_body(model, i) for i in range(model.nbody)]
    same_quaternions(found, robot.facts["bodies"], "quat")
    assert_facts(found, without(robot.facts["bodies"], "world_pos_at_key", "world_quat_at_key"))


def test_joints(robot: Robot, model: mujoco.MjModel) -> None:
    assert_facts([describe_joint(model, i) for i in range(model.njnt)], robot.facts["joints"])


def test_actuators(robot: Robot, model: mujoco.MjModel) -> None:
    assert_facts([describe_actuator(model, i) for i in range(model.nu)], robot.facts["actuators"])
    assert not model.actuator_gainprm[:, 3:].any()
    assert not model.actuator_biasprm[:, 3:].any()


def test_geoms(robot: Robot, model: mujoco.MjModel) -> None:
    found = [describe_geom(model, i) for i in range(model.ngeom)]
    same_quaternions(found, robot.facts["geoms"], "quat")
    assert_facts(found, robot.facts["geoms"], XML_DIGITS)
    rounded = robot.rounded_geoms
    exact = [{**geom, "size": [], "quat": []} if geom["name"] in rounded else geom for geom in robot.facts["geoms"]]
    kept = [{**geom, "size": [], "quat": []} if geom["name"] in rounded else geom for geom in found]
    assert_facts(kept, exact)


def test_sites(robot: Robot, model: mujoco.MjModel, standing: mujoco.MjData) -> None:
    found = [
        {
            "name": name_of(model, mujoco.mjtObj.mjOBJ_SITE, i),
            "body": name_of(model, mujoco.mjtObj.mjOBJ_BODY, model.site_bodyid[i]),
            "pos": model.site_pos[i].tolist(),
            "quat": model.site_quat[i].tolist(),
            "size": model.site_size[i].tolist(),
            "world_pos_at_key": standing.site_xpos[i].tolist(),
        }
        for i in range(model.nsite)
    ]
    assert_facts(found, without(robot.facts["sites"], "world_pos_at_key"))
    assert_facts(found, robot.facts["sites"], KEYFRAME_DIGITS)


def test_sensors_are_those_of_the_xml_without_the_injected_tracking(robot: Robot, model: mujoco.MjModel) -> None:
    assert len(robot.sensors) == robot.xml_sensors
    found = [describe_sensor(model, i) for i in range(model.nsensor)]
    assert_facts(found, without(robot.sensors, "value_at_key", "stage"))


def test_sensor_stages(robot: Robot, model: mujoco.MjModel) -> None:
    # The facts are of MuJoCo 3.11. Since 3.16 a contact sensor's stage follows from its data: a flag needs positions.
    facts = [(s["type"], s["stage"]) for s in robot.sensors]
    expected = ["mjSTAGE_POS" if kind == "mjSENS_CONTACT" else stage for kind, stage in facts]
    assert [describe_sensor(model, i)["stage"] for i in range(model.nsensor)] == expected


def test_excludes(robot: Robot, model: mujoco.MjModel) -> None:
    body = mujoco.mjtObj.mjOBJ_BODY
    pairs = [
        [name_of(model, body, int(s) >> 16), name_of(model, body, int(s) & 0xFFFF)] for s in model.exclude_signature
    ]
    assert sorted(map(sorted, pairs)) == sorted(map(sorted, robot.facts["excludes"]))


def test_keyframe(robot: Robot, model: mujoco.MjModel) -> None:
    found = [
        {
            "name": name_of(model, mujoco.mjtObj.mjOBJ_KEY, 0),
            "qpos": model.key_qpos[0].tolist(),
            "qvel": model.key_qvel[0].tolist(),
            "ctrl": model.key_ctrl[0].tolist(),
        }
    ]
    assert_facts(found, robot.facts["keyframes"])


def test_dof_inertia_and_weights(robot: Robot, model: mujoco.MjModel) -> None:
    assert_facts({"M0": model.dof_M0.tolist(), "invweight0": model.dof_invweight0.tolist()}, robot.facts["dof"])


def test_candidate_collision_pairs(robot: Robot, model: mujoco.MjModel) -> None:
    pairs = [pair for pair in combinations(range(model.ngeom), 2) if can_collide(model, *pair)]
    with_floor = sum(0 in pair for pair in pairs)
    found = {"total_candidate": len(pairs), "with_floor": with_floor, "self": len(pairs) - with_floor}
    assert_facts(found, robot.facts["collision_pairs"])


def test_contacts_of_the_standing_pose(robot: Robot, model: mujoco.MjModel, standing: mujoco.MjData) -> None:
    facts = robot.facts["at_keyframe"]
    assert (standing.ncon, standing.nefc) == (facts["ncon"], facts["nefc"])
    found = describe_contacts(model, standing)
    assert_facts(found, facts["contacts"], {"rel_tol": 1e-11, "abs_tol": robot.contact_error})
    other = [i for i, (_, geom, _) in enumerate(found) if geom not in robot.rounded_geoms]
    # A penetration is a difference of heights near 1 m, known to 1e-15; the facts carry 12 digits of it.
    assert_facts([found[i] for i in other], [facts["contacts"][i] for i in other], {"rel_tol": 1e-11, "abs_tol": 1e-14})
    assert_facts(standing.subtree_com[1].tolist(), facts["subtree_com_root"], KEYFRAME_DIGITS)


def test_friction_of_soles_against_the_floor(robot: Robot, model: mujoco.MjModel, standing: mujoco.MjData) -> None:
    facts = robot.facts["effective_contact_parameters"]
    for (_, geom, _), contact in zip(describe_contacts(model, standing), standing.contact, strict=True):
        expected = next(facts[value] for key, value in robot.contact_kinds.items() if key in geom)
        assert_facts({"condim": contact.dim, "friction": contact.friction.tolist()}, expected)
        assert contact.includemargin == facts["margin"]


def test_world_poses_of_the_standing_pose(robot: Robot, standing: mujoco.MjData) -> None:
    found = [
        {"world_pos_at_key": pos.tolist(), "world_quat_at_key": quat.tolist()}
        for pos, quat in zip(standing.xpos, standing.xquat, strict=True)
    ]
    same_quaternions(found, robot.facts["bodies"], "world_quat_at_key")
    expected = [{key: body[key] for key in found[0]} for body in robot.facts["bodies"]]
    assert_facts(found, expected, KEYFRAME_DIGITS)


def test_sensor_values_of_the_standing_pose(robot: Robot, standing: mujoco.MjData) -> None:
    found = [standing.sensor(sensor["name"]).data.tolist() for sensor in robot.sensors]
    assert_facts(found, [sensor["value_at_key"] for sensor in robot.sensors], KEYFRAME_DIGITS)


def test_the_notice_of_the_description_is_kept(robot: Robot) -> None:
    root = ROBOTS.parent.parent
    for path in (robot.folder / "LICENSE", root / "NOTICE", robot.folder / robot.file):
        assert robot.owner in path.read_text()
    assert "Redistributions in binary form must reproduce" in (robot.folder / "LICENSE").read_text()
    assert "Apache License" in (root / "LICENSE").read_text()
