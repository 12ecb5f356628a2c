"""The ceiling program: what it prints, that its C loop does the same work, and its refusals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_states import ENVS, changed, recorded, rewrite

from unilab.physics import c_loop, ceiling, stepping
from unilab.physics.c_loop import CLoop
from unilab.physics.mujoco_pool import MujocoPool
from unilab.physics.pinning import LINUX, allowed_cpus
from unilab.physics.spec import PROFILES
from unilab.physics.states import load_states

compiled = pytest.mark.skipif(
    not LINUX or not any(map(shutil.which, c_loop.COMPILERS)), reason="needs Linux and a C compiler"
)


@pytest.fixture(scope="module")
def states_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("states") / "states.npz"
    recorded(path, steps=3)
    return path


def program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, since pinning confines the whole process."""
    command = [sys.executable, "-m", "unilab.physics.ceiling", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, check=False, timeout=100
    )


def measured(*arguments: str, **environment: str) -> dict[str, Any]:
    result = program(*arguments, **environment)
    assert (result.returncode, result.stderr) == (0, "")
    return dict(json.loads(result.stdout))


def test_the_rate_is_env_steps_over_time_inside_the_step(states_file: Path) -> None:
    found = measured("--states", str(states_file), "--seconds", "0.3")
    times = np.array(found["step_seconds"])
    assert times.shape[0] == 3 and times.shape[1] >= 1 and (times > 0).all()
    assert found["env_steps_per_second"] == pytest.approx(ENVS * times.size / times.sum(), rel=1e-12)
    assert (found["num_envs"], found["decimation"], found["profile"]) == (ENVS, 3, "exact")
    assert found["iterations"] == [10, 11, 12] and found["mujoco"].startswith("4.0.")
    assert found["c_loop"] is None and found["c_loop_reason"] is None
    assert times.sum() < found["seconds"]


@pytest.mark.skipif(not LINUX, reason="thread masks are a Linux feature")
def test_workers_and_profile_are_those_asked_for(states_file: Path, tmp_path: Path) -> None:
    last, output = allowed_cpus()[-1], tmp_path / "ceiling.json"
    arguments = ("--states", str(states_file), "--seconds", "0.1", "--output", str(output))
    result = program(*arguments, "--cpu-ids", str(last), "--profile", "fast")
    assert (result.returncode, result.stdout) == (0, "")
    found = json.loads(output.read_text())
    assert (found["cpu_ids"], found["workers"], found["profile"]) == ([last], 1, "fast")


def test_two_rounds_are_made_at_least_and_the_first_is_not_counted(states_file: Path) -> None:
    own, plain = stepping.rounds_for(1e-9)(lambda: [0.5, 0.25, 0.25], lambda: [9.0, 1.0, 2.0])
    assert own.rounds == [[0.5, 0.25, 0.25]] * 2
    assert [len(part.rounds) for part in (own, plain)] == [2, 2]
    assert plain.summary(ENVS) == {"env_steps_per_second": ENVS * 3 / 12.0, "step_seconds": [[9.0], [1.0], [2.0]]}


@pytest.mark.parametrize("rows", [[slice(0, ENVS)], [slice(0, 1), slice(1, ENVS)]], ids=["one", "two"])
def test_every_group_starts_from_its_snapshot(rows: list[slice], states_file: Path) -> None:
    """States are put back while the other group steps; in the end all are what one step of the last snapshot gives."""
    states = load_states(states_file)
    pool, expected = MujocoPool(states.spec, ENVS), MujocoPool(states.spec, ENVS)
    with stepping.Stepper(pool, states, rows, None) as stepper:
        seconds = [stepper.round() for _ in range(3)][-1]
    assert len(seconds) == 3 and min(seconds) > 0
    expected.restore(states.snapshot(2))
    expected.step()
    assert np.array_equal(pool.inputs()["state"], expected.inputs()["state"])


@compiled
@pytest.mark.parametrize("profile", PROFILES)
def test_the_c_loop_computes_the_states_of_the_pool(profile: str, states_file: Path) -> None:
    states = load_states(states_file)
    states = replace(states, spec=replace(states.spec, profile=profile))
    pool = MujocoPool(states.spec, ENVS)
    with CLoop(states, [None, None]) as loop:
        for _ in range(2):
            seconds = loop.round()
        assert len(seconds) == 3 and min(seconds) > 0
        for index in range(3):
            pool.restore(states.snapshot(index))
            pool.step()
            assert np.array_equal(pool.inputs()["state"], loop.after[index])
        loop.after[1, 2, 5] += 1e-12
        with pytest.raises(RuntimeError, match="the C loop steps the states of iteration 11 to others than the pool"):
            stepping._require_same(pool, states, loop)


@compiled
def test_the_c_loop_is_timed_in_turn_with_the_pool(states_file: Path) -> None:
    found = measured("--states", str(states_file), "--seconds", "0.3", "--workers", "1", "--c-loop")
    assert np.shape(found["c_loop"]["step_seconds"]) == np.shape(found["step_seconds"])
    assert found["c_loop"]["env_steps_per_second"] > 0 and found["c_loop_reason"] is None


def test_without_a_compiler_the_c_loop_is_left_out_and_said_so(states_file: Path, tmp_path: Path) -> None:
    found = measured("--states", str(states_file), "--seconds", "0.1", "--c-loop", PATH=str(tmp_path))
    assert found["c_loop"] is None and found["env_steps_per_second"] > 0
    assert found["c_loop_reason"] in (
        "no C compiler: none of cc, gcc, clang is on the path",
        "the C loop is written for Linux",
    )


@pytest.mark.skipif(not LINUX, reason="elsewhere the C loop is refused before")
def test_a_compiler_that_fails_is_said_so(states_file: Path, tmp_path: Path) -> None:
    (tmp_path / "cc").write_text("#!/bin/sh\necho 'x.c:1: error: mujoco.h: no such file' >&2\nexit 1\n")
    (tmp_path / "cc").chmod(0o755)
    found = measured("--states", str(states_file), "--seconds", "0.1", "--c-loop", PATH=f"{tmp_path}:/bin:/usr/bin")
    assert found["c_loop_reason"] == "cc cannot build the C loop: x.c:1: error: mujoco.h: no such file"


@pytest.mark.skipif(not LINUX, reason="elsewhere the C loop is refused before")
def test_a_library_that_cannot_be_loaded_is_said_so(states_file: Path, tmp_path: Path) -> None:
    (tmp_path / "cc").write_text('#!/bin/sh\nfor last; do :; done\necho no library > "$last"\n')
    (tmp_path / "cc").chmod(0o755)
    found = measured("--states", str(states_file), "--seconds", "0.1", "--c-loop", PATH=f"{tmp_path}:/bin:/usr/bin")
    assert found["c_loop_reason"].startswith("the C loop was built but cannot be loaded: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--states", "nowhere.npz"], "ceiling: nowhere.npz is not a file; record one with"),
        (["--workers", "0"], "ceiling: --workers 0: "),
        (["--workers", "4096"], "ceiling: --workers 4096: this process may use "),
        (["--cpu-ids", "0,0"], "ceiling: env.cpu_ids=[0, 0] "),
        (["--cpu-ids", "a"], "ceiling: argument --cpu-ids: 'a' is no list of CPUs"),
        (["--seconds", "0"], "ceiling: argument --seconds: 0: must be above 0"),
        (["--seconds", "nan"], "ceiling: argument --seconds: nan: must be above 0"),
        (["--profile", "quick"], "ceiling: argument --profile: invalid choice: 'quick'"),
        (["--cpu-ids", "0", "--workers", "1"], "not allowed with argument"),
    ],
)
def test_wrong_requests_are_one_line_and_exit_code_2(arguments: list[str], message: str, states_file: Path) -> None:
    states = [] if "--states" in arguments else ["--states", str(states_file)]
    result = program(*states, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("width", [1, 356, 358])
@pytest.mark.parametrize("options", [(), ("--c-loop",)], ids=["pool", "c_loop"])
def test_states_of_another_width_are_refused(width: int, options: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "states.npz"
    recorded(path, steps=1)
    rewrite(path, state=np.zeros((1, ENVS, width)))
    result = program("--states", str(path), "--seconds", "0.1", *options)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"ceiling: the recorded states hold {width} numbers each, those of unitree_g1/scene_flat.xml have 357; "
        "record them again with training.record_states=8\n"
    )


def test_a_hostile_file_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "states.npz"
    recorded(path, steps=1)
    rewrite(path, spec={"decimation": 10**9})
    result = program("--states", str(path), "--seconds", "0.1")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "decimation must be at most 1000" in result.stderr


def test_physics_that_the_engine_resets_has_no_rate(tmp_path: Path) -> None:
    path = tmp_path / "states.npz"
    recorded(path, steps=1)
    rewrite(path, **changed(path, "state", (0, 2, 8), 1e300))
    result = program("--states", str(path), "--seconds", "0.1")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"ceiling: the engine warned of bad physics in 1 of {ENVS} simulations\n"


@pytest.mark.parametrize(
    ("name", "message"), [(".", " is a folder; name a file"), ("no/c.json", "there is no folder ")]
)
def test_an_output_that_cannot_be_written_is_refused_before_measuring(
    name: str, message: str, states_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(ceiling, "_measure", lambda *_: pytest.fail("it measured"))
    assert ceiling.main(["--states", str(states_file), "--output", str(tmp_path / name)]) == 2
    found = capsys.readouterr().err
    assert message in found and found.count("\n") == 1


def test_the_program_imports_no_torch() -> None:
    code = "import sys, unilab.physics.ceiling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
