from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from unilab import eval as evaluation
from unilab.actor_semantics import ENTRY, describe_actor
from unilab.checkpoint import load_run
from unilab.config import RunConfig, load_config
from unilab.sac.networks import Actor

ROUTE = ["--algo", "sac", "--task", "g1_walk_flat", "--sim", "mujoco"]


def write_run(path: Path, iterations: dict[str, int]) -> RunConfig:
    """A run directory as training leaves it, with an untrained actor; `iterations` by file name."""
    config = load_config("sac", "g1_walk_flat", "mujoco", ["algo.actor_hidden_dim=16"])
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"schema_version": 1, **config.to_json()}))
    for name, iteration in iterations.items():
        state = {"env/penalty_scale": torch.tensor(0.0625)}
        actor = Actor(98, 29, 16).state_dict()
        dims = {"obs_dim": 98, "action_dim": 29, ENTRY: describe_actor(config.algo, 98, 29)}
        torch.save(
            {"iteration": iteration, "env_steps": 2 * iteration, "actor": actor, "state": state, **dims}, path / name
        )
    return config


def test_the_newest_checkpoint_is_the_one_with_the_highest_iteration_inside(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {"model_9.pt": 9, "model_10.pt": 10, "model_99.pt": 3})
    _, checkpoint = load_run(tmp_path / "run", "sac", "g1_walk_flat", "mujoco")
    assert checkpoint["iteration"] == 10


def test_an_untrained_policy_falls_and_the_episode_count_is_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", {"model_1.pt": 1})
    assert evaluation.main([*ROUTE, "--load-run", str(tmp_path / "run"), "--episodes", "3"]) == 0
    printed = capsys.readouterr().out
    assert "at iteration 1, 3 episodes" in printed
    assert "falls                3 of 3" in printed


def test_evaluation_is_deterministic_and_counts_one_episode_per_environment(tmp_path: Path) -> None:
    config = write_run(tmp_path / "run", {"model_1.pt": 1})
    _, checkpoint = load_run(tmp_path / "run", "sac", "g1_walk_flat", "mujoco")
    first = evaluation.evaluate(config, checkpoint, 2)
    assert first == evaluation.evaluate(config, checkpoint, 2)
    assert all(5 < length < 200 for length in first.lengths)  # it falls within about 1.3 s
    assert all(0 < value < 0.37 * length for value, length in zip(first.returns, first.lengths, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--load-run", "nowhere"], "is no run directory: it has no config.json"),
        (["--load-run", "empty"], "holds no checkpoint"),
        (["--load-run", "damaged"], "cannot be read"),
        (["--load-run", "run", "--episodes", "0"], "at least 1 is needed"),
    ],
)
def test_refusals_are_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", {"model_1.pt": 1})
    write_run(tmp_path / "empty", {})
    write_run(tmp_path / "damaged", {})
    (tmp_path / "damaged" / "model_5.pt").write_bytes(b"not a checkpoint")
    assert evaluation.main([*ROUTE, *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
