"""The Go2 task through the commands: a short run with pushes on the CPU, then an evaluation of it."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from repro.events import read_scalars
from unilab import eval as evaluation
from unilab.tasks.go2_joystick_flat_config import Go2JoystickFlatRewards

SETTINGS = (
    "training.smoke=true training.no_play=true algo.num_envs=32 algo.batch_size=64 algo.max_iterations=30 "
    "algo.learning_starts=1 algo.actor_hidden_dim=32 algo.critic_hidden_dim=32 env.push_interval_seconds=0.2"
)


def route(algo: str, task: str = "go2_joystick_flat") -> list[str]:
    return ["--algo", algo, "--task", task, "--sim", "mujoco"]


@pytest.fixture(scope="module", params=["sac", "flashsac"])
def algo(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def run_dir(algo: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(algo) / "run"
    command = [sys.executable, "-m", "unilab.train", *route(algo), *SETTINGS.split(), f"training.log_dir={path}"]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    return path


def test_a_short_run_has_finite_metrics_and_the_rewards_of_its_task(run_dir: Path) -> None:
    scalars = read_scalars(run_dir)
    rewards = {tag.removeprefix("reward/") for tag in scalars if tag.startswith("reward/")}
    assert rewards == {entry.name for entry in fields(Go2JoystickFlatRewards)}
    for tag, series in scalars.items():
        assert len(series.values) >= 29, tag
        assert all(map(math.isfinite, series.values)), tag
    assert scalars["Train/invalid_rows"].values[-1] == 0
    assert set(scalars["Train/penalty_scale"].values) == {1.0}


def test_a_run_is_evaluated_as_its_own_task_alone(algo: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--load-run", str(run_dir), "--episodes", "1"]
    assert evaluation.main([*route(algo), *arguments]) == 0
    assert "1 episode without noise" in capsys.readouterr().out
    assert evaluation.main([*route(algo, "g1_walk_flat"), *arguments]) == 2
    assert f"was trained with {algo}/Go2JoystickFlat/mujoco, not {algo}/G1WalkFlat/mujoco" in capsys.readouterr().err
