"""Masses per simulation: the pool derives the constants that follow from them, when and where it should."""

from __future__ import annotations

import threading
from typing import Any

import mujoco
import numpy as np
import numpy.typing as npt
import pytest

from unilab.physics.c_loop import CLoop, NoCLoop
from unilab.physics.mujoco_pool import MODEL_FIELDS, MujocoPool, load_model
from unilab.physics.spec import KEEP, RESET, SET_VELOCITY, PhysicsSpec
from unilab.physics.states import States

ENVS, STEPS = 8, 12
FIELDS = (("kp", 12), ("kd", 12), ("root_mass", 1), ("root_com", 3))
GO2 = PhysicsSpec("unitree_go2/scene_flat.xml", 0.01, 2, "exact", 19, 18, 12, (("gyro", 3),), FIELDS)
Array = npt.NDArray[Any]
Command = tuple[Array, Array, Array]


def reset_rows(model: mujoco.MjModel, rng: np.random.Generator) -> Array:
    rows = np.zeros((ENVS, GO2.reset_width), np.float32)
    rows[:, :19] = model.key_qpos[0]
    rows[:, 19:25] = rng.uniform(-0.5, 0.5, (ENVS, 6))
    rows[:, 37:49], rows[:, 49:61] = rng.uniform(31.5, 38.5, (ENVS, 12)), rng.uniform(0.45, 0.55, (ENVS, 12))
    rows[:, 61] = model.body("base").mass + rng.uniform(-1.5, 1.5, ENVS)
    rows[:, 62:] = model.body("base").ipos
    rows[:, 62] += rng.uniform(-0.05, 0.05, ENVS)
    return rows


def script(model: mujoco.MjModel) -> list[Command]:
    rng = np.random.default_rng(1)
    commands = []
    for step in range(STEPS):
        codes = rng.choice([KEEP, RESET, SET_VELOCITY], ENVS, p=[0.6, 0.3, 0.1]).astype(np.int32)
        codes = np.full(ENVS, RESET, np.int32) if step == 0 else codes
        ctrl = (model.key_ctrl[0] + rng.normal(0, 0.3, (ENVS, 12))).astype(np.float32)
        commands.append((ctrl, codes, reset_rows(model, rng)))
    return commands


def set_model(model: mujoco.MjModel, data: mujoco.MjData, row: Array) -> None:
    model.actuator_gainprm[:, 0], model.actuator_biasprm[:, 1] = row[37:49], -row[37:49]
    model.actuator_biasprm[:, 2] = -row[49:61]
    model.body("base").mass[0], model.body("base").ipos[:] = row[61], row[62:]
    mujoco.mj_setConst(model, data)


def oracle(commands: list[Command]) -> Array:
    """qpos and qvel after every command, (steps, N, 37), by mj_step on one MjData."""
    model = load_model(GO2)
    data, scratch = mujoco.MjData(model), mujoco.MjData(model)
    states = np.empty((len(commands), ENVS, 37))
    for env in range(ENVS):
        for step, (ctrl, codes, rows) in enumerate(commands):
            row = rows[env].astype(np.float64)
            if codes[env] == RESET:
                mujoco.mj_resetData(model, data)
                set_model(model, scratch, row)
                data.qpos, data.qvel = row[:19], row[19:37]
            elif codes[env] == SET_VELOCITY:
                data.qvel = row[19:37]
            data.ctrl = ctrl[env]
            for _ in range(GO2.decimation):
                mujoco.mj_step(model, data)
            states[step, env] = np.concatenate([data.qpos, data.qvel])
    return states


def state_of(pool: MujocoPool) -> Array:
    return np.concatenate([pool._batch.bind("qpos"), pool._batch.bind("qvel")], axis=1)


@pytest.fixture(scope="module")
def model() -> mujoco.MjModel:
    return load_model(GO2)


def test_masses_and_their_constants_give_the_bits_of_a_plain_loop(model: mujoco.MjModel) -> None:
    commands = script(model)
    pool = MujocoPool(GO2, ENVS)
    for command, expected in zip(commands, oracle(commands), strict=True):
        pool.apply(*command)
        pool.step()
        assert state_of(pool).tobytes() == expected.tobytes()


def test_fields_of_a_reset_row_are_those_of_its_simulation_only(model: mujoco.MjModel) -> None:
    command = script(model)[0]
    command[2][2, 61:] = 8.0, 0.05, 0.01, -0.02
    pool = MujocoPool(GO2, ENVS)
    pool.apply(*command)
    pool.step()
    expected = load_model(GO2)
    set_model(expected, mujoco.MjData(expected), command[2][2].astype(np.float64))
    found = pool._batch.get_model(2)
    assert (found.body("base").mass[0], found.body("base").ipos[0]) == (8.0, np.float32(0.05))
    for name in ("body_mass", "body_ipos", "body_subtreemass", "body_invweight0", "dof_invweight0", "dof_M0"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    assert pool._batch.get_model(1).body("base").mass[0] == command[2][1, 61]


def test_a_snapshot_holds_the_masses_and_steps_to_the_same_bits(model: mujoco.MjModel) -> None:
    commands = script(model)
    pool = MujocoPool(GO2, ENVS)
    pool.apply(*commands[0])
    pool.step()
    pool.apply(*commands[1])
    snapshot = pool.snapshot()
    pool.step()
    after = state_of(pool).tobytes()
    for command in commands[2:5]:
        pool.apply(*command)
        pool.step()
    pool.restore(snapshot)
    pool.step()
    assert state_of(pool).tobytes() == after


def test_a_reset_does_not_wait_for_a_step_in_flight(model: mujoco.MjModel, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, (command, *_) = MujocoPool(GO2, ENVS), script(model)
    pool.apply(*command)
    derived: list[str] = []
    real = pool._batch.set_const
    monkeypatch.setattr(
        pool._batch, "set_const", lambda ids: (derived.append(threading.current_thread().name), real(ids))
    )
    carrier = threading.Thread(target=pool.apply, args=command, name="carrier")
    carrier.start()
    carrier.join()
    assert derived == []
    pool.step()
    pool.step()
    assert derived == [threading.current_thread().name]


def test_a_field_derives_where_mj_set_const_reads_what_it_writes() -> None:
    written = {"kp": "actuator_gainprm", "kd": "actuator_biasprm", "root_mass": "body_mass", "root_com": "body_ipos"}
    inputs = set(mujoco.MjModel._setconst_inputs)
    assert {name: field.derives for name, field in MODEL_FIELDS.items()} == {
        name: parameter in inputs for name, parameter in written.items()
    }


def test_the_c_loop_refuses_what_it_does_not_set() -> None:
    states = States(GO2, (1,), {"state": np.zeros((1, ENVS, 170))})
    with pytest.raises(NoCLoop, match="sets gains alone, not root_mass, root_com"):
        CLoop(states, [None])
