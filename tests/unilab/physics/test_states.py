"""Recorded physics: stepping a snapshot again gives the same bits; files that cannot be trusted are refused."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        recorded(tmp_path / "states.npz", steps=1)
    assert not list(tmp_path.iterdir())


def test_the_state_of_a_robot_is_no_wider_than_its_bound() -> None:
    width = MujocoPool(G1, 1).inputs()["state"].shape[1]
    assert width <= G1.state_bound < 1.1 * width


def rewrite(path: Path, meta: dict[str, Any] | None = None, spec: dict[str, Any] | None = None, **arrays: Any) -> None:
    """Change values of a file in place."""
    with np.load(path) as file:
        content = dict(file)
    found = json.loads(str(content["meta"]))
    found.update(meta or {})
    found["spec"].update(spec or {})
    content.update(arrays, meta=np.array(json.dumps(found)))
    np.savez(path, **content)


def changed(path: Path, name: str, at: tuple[int, ...], value: float) -> dict[str, Any]:
    with np.load(path) as file:
        values = file[name]
    values[at] = value
    return {name: values}


def hostile(path: Path, header: str) -> None:
    """Give `kp` a header of its own, and nothing after it."""
    with np.load(path) as file:
        np.savez(path, **{name: file[name] for name in file.files if name != "kp"})
    text = header.encode().ljust(117) + b"\n"
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("kp.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)


HEADER = "{'descr': '<f8', 'fortran_order': False, 'shape': %s}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: rewrite(path, **changed(path, "state", (0, 1, 7), np.nan)), "state is empty or not finite"),
        (lambda path: rewrite(path, **changed(path, "kd", (1, 0, 3), -np.inf)), "kd is empty or not finite"),
        (lambda path: rewrite(path, state=np.zeros((2, ENVS, 0))), "state is empty or not finite"),
        (lambda path: rewrite(path, state=np.zeros((2, ENVS, 357), np.float32)), "state is float32 (2, 6, 357), not"),
        (lambda path: rewrite(path, kp=np.zeros((2, ENVS, 1))), "kp is float64 (2, 6, 1), not"),
        (lambda path: rewrite(path, kp=np.zeros((2, 29))), "kp is float64 (2, 29), not"),
        (lambda path: rewrite(path, spec={"timestep": float("nan")}), "timestep must be positive and finite, got nan"),
        (lambda path: rewrite(path, spec={"decimation": 1001}), "decimation must be at most 1000, got 1001"),
        (lambda path: rewrite(path, spec={"nq": None}), "nq must be an integer above 0, got None"),
        (lambda path: rewrite(path, spec={"more": 1}), "unexpected keyword argument 'more'"),
        (lambda path: rewrite(path, {"spec": {}}), "('sensors')"),
        (lambda path: rewrite(path, {"iterations": [11, 10]}), "not ascending and above 0: (11, 10)"),
        (lambda path: rewrite(path, {"iterations": [10, 10]}), "not ascending and above 0: (10, 10)"),
        (lambda path: rewrite(path, {"iterations": [0, 1]}), "not ascending and above 0: (0, 1)"),
        (lambda path: rewrite(path, {"iterations": [1.0, 2.0]}), "not ascending and above 0: (1.0, 2.0)"),
        (lambda path: rewrite(path, {"iterations": "ab"}), "not ascending and above 0: ('a', 'b')"),
        (lambda path: rewrite(path, {"iterations": 3}), "'int' object is not iterable"),
        (lambda path: np.savez(path, meta=np.array("[" * 100_000)), "recursion"),
        (lambda path: np.savez_compressed(path, meta=np.array("{}")), "it is compressed"),
        (lambda path: hostile(path, HEADER % "(99999999999999,)"), "Unable to allocate"),
        (lambda path: hostile(path, HEADER % "(9999999999999999999999,)"), "Python int too large"),
        (lambda path: hostile(path, HEADER % "(-1, 6, 29)"), "negative dimensions"),
        (lambda path: hostile(path, HEADER % "(10L,)"), "additional header parsing"),
        (lambda path: hostile(path, HEADER.replace("'<f8'", "(('<f8', 3),)") % "(2,)"), "tuple index out of range"),
        (lambda path: hostile(path, "-" * 5000 + "1"), ""),  # each version of Python has its own words
        (lambda path: hostile(path, "(" * 5000), ""),
    ],
)
def test_hostile_files_are_refused_in_one_line(change: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    path = tmp_path / "states.npz"
    recorded(path, steps=2)
    change(path)
    with pytest.raises(ValueError, match="holds no recorded physics") as caught:
        load_states(path)
    assert message in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_arrays_in_fortran_order_are_read_as_the_same_numbers(tmp_path: Path) -> None:
    path = tmp_path / "states.npz"
    recorded(path, steps=2)
    before = load_states(path).arrays
    rewrite(path, **{name: np.asfortranarray(values) for name, values in before.items()})
    after = load_states(path).arrays
    assert all(np.array_equal(after[name], values) for name, values in before.items())
    assert all(values.flags.c_contiguous for values in after.values())


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
