"""Deterministic episodes: numbers by hand, what is switched off, and checkpoints that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from unilab import episodes
from unilab.config import RunConfig, load_config
from unilab.episodes import evaluate, record, rollout
from unilab.physics.spec import KEEP, RESET


def untrained(task: str, *overrides: str) -> tuple[RunConfig, dict[str, Any]]:
    config = load_config("sac", task, "mujoco", ["algo.actor_hidden_dim=16", *overrides])
    trained = config.env.task_class()
    actor = config.algo.build_actor(trained.obs_dim, trained.action_dim)
    return config, {"actor": actor.state_dict(), "state": {"env/penalty_scale": torch.tensor(0.0625)}}


def step(**values: Any) -> SimpleNamespace:
    """What `evaluate` reads of the environment after a step of two robots, both well and neither at its end."""
    plain = {"valid": [True, True], "terminated": [False, False], "finished": [False, False], "reward": [1.0, 1.0]}
    commands = {"command": [[3.0, 4.0, -1.0], [0.0, 0.0, 0.5]]}
    return SimpleNamespace(**{name: torch.tensor(value) for name, value in (plain | commands | values).items()})


def test_means_over_the_first_episode_of_each_robot(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [
        step(tracking_errors=[[1.0, 0.2], [0.1, 0.3]]),
        # The first robot falls; afterwards it is another episode, with another command.
        step(tracking_errors=[[2.0, 0.4], [0.3, 0.3]], terminated=[True, False], finished=[True, False]),
        step(
            tracking_errors=[[9.0, 9.0], [0.5, 0.6]],
            command=[[9.0, 9.0, 9.0], [0.0, 0.0, 0.5]],
            reward=[7.0, 0.5],
            finished=[False, True],
        ),
        step(tracking_errors=[[9.0, 9.0], [9.0, 9.0]]),
    ]
    monkeypatch.setattr(episodes, "rollout", lambda *_: iter(steps))
    found = evaluate(*untrained("g1_walk_flat"), 2)
    assert (found.returns, found.lengths, found.falls) == ([2.0, 2.5], [2, 3], [True, False])
    assert found.errors_lin == pytest.approx([1.5, 0.3])
    assert found.errors_ang == pytest.approx([0.3, 0.4])
    assert (found.standing_lin, found.standing_ang) == ([5.0, 0.0], [1.0, 0.5])


def test_broken_physics_is_a_fall_and_no_step_without_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[SimpleNamespace]:
        zero = [[0.0, 0.0], [0.0, 0.0]]  # what the environment writes where physics broke
        yield step(tracking_errors=zero, valid=[False, False], finished=[True, True], reward=[0.0, 0.0])

    monkeypatch.setattr(episodes, "rollout", lambda *_: broken())
    found = evaluate(*untrained("g1_walk_flat"), 2)
    assert (found.falls, found.lengths) == ([True, True], [1, 1])
    assert (found.errors_lin, found.errors_ang) == ([5.0, 0.0], [1.0, 0.5])


def test_nobody_is_pushed_and_nothing_is_noisy() -> None:
    config, checkpoint = untrained("go2_joystick_flat", "env.push_interval_seconds=0.02")  # every step, in training
    codes = set()
    for environment in islice(rollout(config, checkpoint, 3), 6):
        codes |= set(environment.codes.tolist())
        assert torch.equal(environment.next_obs, environment.next_critic[:, : environment.task.obs_dim])
    assert codes == {KEEP, RESET}


def test_gains_and_masses_are_drawn_as_in_training() -> None:
    config, checkpoint = untrained("go2_joystick_flat")
    environment = next(rollout(config, checkpoint, 64))
    columns = environment.task.spec.reset_columns
    for name in ("kp", "root_mass"):
        assert environment.reset_rows[:, columns[name]].std(0).min() > 0, name


def test_every_control_step_is_recorded_and_robots_that_fell_stand_up_again() -> None:
    config, checkpoint = untrained("g1_walk_flat")
    first = record(config, checkpoint, 4, 90)
    assert (first.shape, first.dtype) == ((90, 4, 36), np.float32)
    assert np.array_equal(first, record(config, checkpoint, 4, 90))
    height = first[:, :, 2]
    assert (height[:5] > 0.6).all()
    assert (np.diff(height, axis=0).max(0) > 0.2).any()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda checkpoint: checkpoint["state"].clear(), "'env/penalty_scale'"),
        (lambda checkpoint: checkpoint.update(state=None), "not subscriptable"),
        (lambda checkpoint: checkpoint["state"].update({"env/penalty_scale": torch.zeros(3)}), "penalty"),
    ],
)
def test_a_checkpoint_without_a_penalty_factor_is_refused_in_one_line(damage: Any, message: str) -> None:
    config, checkpoint = untrained("g1_walk_flat")
    damage(checkpoint)
    with pytest.raises(ValueError, match="does not hold a penalty factor") as found:
        evaluate(config, checkpoint, 1)
    assert "\n" not in str(found.value)
    assert message in str(found.value) or message == "penalty"
