"""Pushes and the gait clock in the environment: one timer and one clock for all rows, through resets and groups."""

from __future__ import annotations

import pytest
import torch
from test_environment import NoHostReads

from unilab.environment import Environment
from unilab.physics.spec import KEEP, RESET, SET_VELOCITY
from unilab.state import StateRegistry
from unilab.tasks.go2_joystick_flat import Go2JoystickFlat, Go2JoystickFlatConfig, Go2JoystickFlatRewards

CPU = torch.device("cpu")
N = 8


def build(interval_seconds: float = 0.06) -> tuple[Environment, StateRegistry]:
    """Eight environments, begun, that are pushed after every third step."""
    config = Go2JoystickFlatConfig(push_interval_seconds=interval_seconds)
    task, registry = Go2JoystickFlat(config, Go2JoystickFlatRewards(), N, CPU, "reference"), StateRegistry()
    env = Environment(task, N, CPU, torch.Generator().manual_seed(3), registry)
    env.begin()
    env.episodes.steps.zero_()
    env.control(torch.zeros(N, 12))
    return env, registry


@pytest.fixture
def env() -> Environment:
    return build()[0]


def physics(env: Environment, falling: list[int]) -> None:
    """Robots at rest but for a root velocity of 1 m/s; those that fall lie on their back."""
    env.fields.copy_(env.task.idle_row.expand_as(env.fields))
    env.fields[:, env.task.spec.columns["qvel"].start] = 1.0
    for row in falling:
        env.fields[row, 3:7] = torch.tensor([0.0, 1.0, 0.0, 0.0])


def tick(env: Environment, falling: list[int] | None = None) -> None:
    physics(env, falling or [])
    env.draw()
    env.complete()
    env.summarize()
    env.restart(env.finished)
    env.control(torch.zeros(N, 12))


def qvel(env: Environment) -> torch.Tensor:
    return env.reset_rows[:, env.task.spec.reset_columns["qvel"]]


def test_all_rows_are_pushed_at_once_after_every_interval(env: Environment) -> None:
    codes = []
    for _ in range(9):
        tick(env)
        codes.append(env.codes.tolist())
    expected = [[SET_VELOCITY if step % 3 == 0 else KEEP] * N for step in range(1, 10)]
    assert codes == expected


def test_a_push_adds_to_the_world_velocity_and_is_observed_at_once(env: Environment) -> None:
    tick(env)
    tick(env)
    assert (env.next_critic[:, 49:] == 0).all()  # the sensors say so
    tick(env)
    kick = 2 * env.uniforms[:, env.task.uniform_columns["push"]] - 1
    kick[:, 2] /= 2
    expected = kick + torch.tensor([1.0, 0.0, 0.0])
    assert torch.allclose(qvel(env)[:, :3], expected, atol=1e-6)
    assert not qvel(env)[:, 3:].any()
    assert torch.allclose(
        env.next_critic[:, 49:], expected, atol=1e-6
    )  # upright, not turned: base axes are the world's
    assert torch.equal(env.critic, env.next_critic)


def test_rewards_are_of_the_state_before_the_push(env: Environment) -> None:
    env.command.zero_()
    rewards = []
    for _ in range(3):
        tick(env)
        env.command.zero_()
        rewards.append(env.metrics()["reward/tracking_lin_vel"].item())
    assert rewards == [1.0] * 3


def test_a_robot_that_fell_is_reset_instead_but_its_last_observation_is_pushed(env: Environment) -> None:
    tick(env)
    tick(env)
    tick(env, falling=[2])
    assert env.codes.tolist() == [RESET if row == 2 else SET_VELOCITY for row in range(N)]
    assert env.next_critic[2, 49:].abs().max() > 0
    fresh = env.task.reset_rows(env.uniforms)[:, env.task.spec.reset_columns["qvel"]]
    assert torch.equal(qvel(env)[2], fresh[2])


def test_the_clock_is_one_for_all_and_goes_on_through_resets(env: Environment) -> None:
    clock = torch.zeros(1)
    assert (env.phase == 0).all()
    assert env.critic[:, 45:49].tolist() == [[0.0, 0.5, 0.5, 0.0]] * N
    for step in range(30):
        tick(env, falling=[step % N])
        clock = torch.remainder(clock + 0.04, 1.0)
        assert (env.phase == clock).all()
        assert torch.equal(env.critic[:, 45:49], env.next_critic[:, 45:49])
        assert (env.critic[:, 45] == clock).all()


def test_groups_of_rows_are_pushed_in_the_same_tick_to_the_same_bits() -> None:
    (whole, one), (split, two) = build(), build()
    for _ in range(4):
        tick(whole, falling=[1, 6])
        physics(split, [1, 6])
        split.draw()
        for rows in (slice(0, 4), slice(4, 8)):
            part = split.part(rows)
            part.complete()
            part.restart(part.finished)
            part.control(torch.zeros(4, 12))
        split.summarize()
        states = one.snapshot(), two.snapshot()
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_timer_and_clock_are_state(env: Environment) -> None:
    names = build()[1].names()
    assert {"env/ticks", "env/phase", "env/velocities"} <= set(names)


def test_the_shipped_interval_is_fifteen_seconds() -> None:
    env, _ = build(15.0)
    env.ticks.fill_(748)
    tick(env)
    assert env.codes.tolist() == [KEEP] * N
    tick(env)
    assert env.codes.tolist() == [SET_VELOCITY] * N


def test_no_phase_reads_on_the_host(env: Environment) -> None:
    tick(env)
    physics(env, [1])
    action = torch.zeros(N, 12)
    with NoHostReads():
        env.draw()
        env.complete()
        env.summarize()
        env.restart(env.finished)
        env.control(action)
