"""Recorded physics: stepping a snapshot again gives the same bits; files that cannot be trusted are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mujoco
import numpy as np
import pytest
from test_mujoco_pool import G1, play, script

from unilab.physics.mujoco_pool import MujocoPool, load_model
from unilab.physics.spec import PROFILES, PhysicsSpec
from unilab.physics.states import StateRecorder, load_states, recorded_iterations

ENVS = 6


def recorded(path: Path, spec: PhysicsSpec = G1, steps: int = 5) -> tuple[MujocoPool, list[bytes]]:
    """A run of resets with gains, pushes and kept rows, recorded before every step; and the outcomes of the steps."""
    pool, outcomes = MujocoPool(spec, ENVS), []
    recorder = StateRecorder(pool, steps)
    for index, command in enumerate(script(load_model(spec), 3, steps, ENVS)):
        pool.apply(*command)
        for rows in (slice(0, 2), slice(2, ENVS)):
            recorder.take(index, rows, 10 + index)
        pool.step()
        outcomes.append(outcome(pool))
    recorder.write(path)
    return pool, outcomes


def outcome(pool: MujocoPool) -> bytes:
    return bytes(pool.snapshot()["state"].tobytes() + pool._batch.bind("sensordata").tobytes())


@pytest.mark.parametrize("profile", PROFILES)
def test_stepping_a_recorded_state_again_gives_the_same_bits(profile: str, tmp_path: Path) -> None:
    spec = replace(G1, profile=profile)
    _, outcomes = recorded(tmp_path / "states.npz", spec)
    states = load_states(tmp_path / "states.npz")
    assert (states.spec, states.num_envs, states.iterations) == (spec, ENVS, (10, 11, 12, 13, 14))
    pool = MujocoPool(spec, ENVS)  # has seen none of the commands
    for index in (4, 1, 3, 0, 2, 3):
        pool.restore(states.snapshot(index))
        pool.step()
        assert outcome(pool) == outcomes[index]


def test_warm_start_and_gains_are_part_of_a_snapshot(tmp_path: Path) -> None:
    pool, outcomes = recorded(tmp_path / "states.npz")
    last = load_states(tmp_path / "states.npz").snapshot(4)
    model = load_model(G1)
    at = sum(mujoco.mj_stateSize(model, getattr(mujoco.mjtState, f"mjSTATE_{part}")) for part in ("TIME", "QPOS"))
    at += mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_QVEL)
    cold = {**last, "state": last["state"].copy()}
    cold["state"][:, at : at + G1.nv] = 0
    assert last["state"][:, at : at + G1.nv].any(axis=1).sum() >= ENVS // 2  # the warm start of rows not just reset
    for changed in (cold, {**last, "kp": 1.01 * last["kp"]}, {**last, "kd": 1.01 * last["kd"]}):
        pool.restore(changed)
        pool.step()
        assert outcome(pool) != outcomes[4]


def test_a_snapshot_is_a_copy() -> None:
    pool = MujocoPool(G1, ENVS)
    commands = script(load_model(G1), 3, 2, ENVS)
    play(pool, commands[:1])
    kept = pool.snapshot(slice(1, 3))
    before = {name: values.copy() for name, values in kept.items()}
    play(pool, commands[1:])
    assert {name: values.shape for name, values in kept.items()} == {
        "state": (2, pool._batch.nstate),
        "kp": (2, 29),
        "kd": (2, 29),
    }
    assert all(np.array_equal(kept[name], before[name]) for name in kept)


def test_only_whole_snapshots_are_written(tmp_path: Path) -> None:
    pool = MujocoPool(G1, ENVS)
    recorder = StateRecorder(pool, 3)
    recorder.write(tmp_path / "none.npz")
    recorder.take(0, slice(0, 3), 7)
    recorder.take(1, slice(None), 8)
    recorder.write(tmp_path / "states.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["states.npz"]
    assert load_states(tmp_path / "states.npz").iterations == (8,)
    StateRecorder(pool, 0).write(tmp_path / "none.npz")
    assert not (tmp_path / "none.npz").exists()


@pytest.mark.parametrize(
    ("iterations", "count", "expected"),
    [(300, 4, [169, 207, 244, 282]), (100, 1, [76]), (5, 8, [3, 4, 5]), (1, 2, [1]), (10, 0, [])],
)
def test_snapshots_are_evenly_spaced_in_the_second_half(iterations: int, count: int, expected: list[int]) -> None:
    assert recorded_iterations(iterations, count) == expected


def write_foreign(path: Path, kind: str) -> None:
    recorded(path, steps=1)
    whole = path.read_bytes()
    if kind == "cut":
        path.write_bytes(whole[:-100])
    elif kind == "flipped":
        middle = len(whole) // 2
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    elif kind == "text":
        path.write_text("hello")
    elif kind == "array":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    else:
        with np.load(path) as file:
            content = dict(file)
        if kind == "other archive":
            content = {"x": np.zeros(3)}
        elif kind == "old format":
            content["meta"] = np.array(str(content["meta"]).replace('"format": 1', '"format": 0'))
        elif kind == "other size":
            content["state"] = content["state"][:, :2]
        elif kind == "no gains":
            del content["kp"]
        else:
            content["meta"] = np.array("[]")
        np.savez(path, **content)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut", "its end is missing"),
        ("flipped", "Bad CRC-32"),
        ("text", "it is no archive"),
        ("array", "it is no archive"),
        ("other archive", "it has no meta"),
        ("old format", "format 0, this version reads 1"),
        ("other size", "state is float64 (1, 2, "),
        ("no gains", "it has kd, state of 1 snapshots"),
        ("no meta", "list indices"),
    ],
)
def test_damaged_and_foreign_files_are_refused_in_one_line(kind: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "states.npz"
    write_foreign(path, kind)
    with pytest.raises(ValueError, match="holds no recorded physics") as caught:
        load_states(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).endswith("record it again with training.record_states=8")


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a file; record one with training\.record_states=8"):
        load_states(tmp_path / "nowhere.npz")
