from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from unilab.environment import EPISODE_WINDOW, TRACKING_ERRORS, Environment
from unilab.physics.spec import KEEP, RESET
from unilab.state import StateRegistry
from unilab.tasks.g1_walk_flat import G1WalkFlat, G1WalkFlatConfig, G1WalkFlatRewards

CPU = torch.device("cpu")
ALIVE_AT_REST = 2 + 1.5 + 10  # per second: both tracking terms of a command of zero, and being alive


def build(num_envs: int, seed: int = 3) -> tuple[Environment, StateRegistry]:
    task = G1WalkFlat(G1WalkFlatConfig(), G1WalkFlatRewards(), num_envs, CPU, "reference")
    registry = StateRegistry()
    return Environment(task, num_envs, CPU, torch.Generator().manual_seed(seed), registry), registry


@pytest.fixture
def env() -> Environment:
    """Eight environments, begun, with one action on its way; episode counters at 0."""
    env, _ = build(8)
    env.begin()
    env.episodes.steps.zero_()
    env.control(torch.full((8, 29), 0.25))
    return env


def stand_still(env: Environment) -> None:
    """Let the physics answer with upright robots at rest."""
    env.fields.copy_(env.task.idle_row.expand_as(env.fields))


def fall(env: Environment, rows: list[int]) -> None:
    env.fields[rows, 2] = 0.1


def tick(env: Environment, action: Tensor | None = None, falling: list[int] | None = None) -> None:
    """One whole tick with robots at rest, except those that fall."""
    stand_still(env)
    if falling:
        fall(env, falling)
    env.draw()
    env.complete()
    env.summarize()
    env.restart(env.finished)
    env.control(torch.zeros_like(env.actions) if action is None else action)


# --- begin -----------------------------------------------------------------------------------------------------------


def test_begin_resets_every_environment() -> None:
    env, _ = build(64)
    env.begin()
    assert env.codes.tolist() == [RESET] * 64
    assert env.codes.dtype == torch.int32
    assert env.critic[:, 64:93].abs().max() == 0
    assert (env.critic[:, 5] == -1).all()
    assert torch.equal(env.critic[:, 93:96], env.command)
    assert torch.equal(env.critic[:, 96:98], env.phase)
    assert torch.equal(env.obs[:, 93:98], env.critic[:, 93:98])
    assert not torch.equal(env.obs[:, 6:64], env.critic[:, 6:64])


def test_begin_spreads_the_time_limits() -> None:
    env, _ = build(4096)
    env.begin()
    steps = env.episodes.steps
    assert (int(steps.min()), int(steps.max())) in {(low, high) for low in range(4) for high in range(996, 1000)}
    assert abs(steps.double().mean().item() - 499.5) < 5 * 288.7 / 64


def test_begin_leaves_the_curriculum_alone() -> None:
    env, _ = build(8)
    env.begin()
    assert (env.episodes.penalty_scale.item(), env.episodes.mean_length.item()) == (0.0625, 0.0)


# --- transitions -----------------------------------------------------------------------------------------------------


def test_control_stores_actions_and_writes_targets(env: Environment) -> None:
    assert (env.previous_actions == 0).all()
    assert (env.actions == 0.25).all()
    assert torch.equal(env.ctrl, env.task.joint_default.expand(8, -1) + 0.25)


def test_transition_links_what_the_action_saw_to_what_it_led_to(env: Environment) -> None:
    saw, saw_critic, phase = env.obs.clone(), env.critic.clone(), env.phase.clone()
    tick(env)
    assert torch.equal(env.last_obs, saw)
    assert torch.equal(env.last_critic, saw_critic)
    assert torch.equal(env.obs, env.next_obs)
    assert torch.equal(env.critic, env.next_critic)
    assert (env.next_critic[:, 64:93] == 0.25).all()
    assert torch.equal(env.next_critic[:, 96:98], env.task.advance_phase(phase))
    assert env.codes.tolist() == [KEEP] * 8
    assert not (env.done.any() or env.finished.any())
    assert env.valid.all()


def test_reward_is_per_control_step_and_uses_the_advanced_phase(env: Environment) -> None:
    env.command.zero_()
    env.phase.copy_(torch.tensor([[1.0, 1.0 + math.pi]]).expand(8, -1))
    stand_still(env)
    env.draw()
    env.complete()
    env.summarize()
    height = env.task.swing_height(torch.tensor([1.0, 1.0 + math.pi]) + 2 * math.pi * 1.5 * 0.02)
    feet = 5 * math.exp(-float(height.square().sum()) / 0.04)
    rate = 0.0625 * -4 * 29 * 0.25**2
    assert env.reward.tolist() == pytest.approx([0.02 * (ALIVE_AT_REST + feet + rate)] * 8)


def test_action_rate_counts_from_zero_after_a_reset(env: Environment) -> None:
    tick(env, torch.full((8, 29), 0.5), falling=[3])
    assert (env.previous_actions[3] == 0).all()
    assert (env.previous_actions[2] == 0.25).all()
    assert (env.actions == 0.5).all()


def test_finished_rows_keep_their_terminal_observation(env: Environment) -> None:
    tick(env, falling=[3])
    assert env.terminated.tolist() == env.done.tolist() == [row == 3 for row in range(8)]
    assert (env.next_critic[3, 64:93] == 0.25).all()
    assert (env.critic[3, 64:93] == 0).all()
    assert not torch.equal(env.next_critic[3, 93:98], env.critic[3, 93:98])
    assert torch.equal(env.next_critic[:3], env.critic[:3])
    assert env.codes.tolist() == [RESET if row == 3 else KEEP for row in range(8)]
    assert env.episodes.steps.tolist() == [0 if row == 3 else 1 for row in range(8)]


def test_the_finished_transitions_action_survives_the_restart(env: Environment) -> None:
    stand_still(env)
    fall(env, [3])
    env.draw()
    env.complete()
    env.summarize()
    env.restart(env.finished)
    assert (env.actions == 0.25).all()


def test_reset_phase_is_wrapped_from_the_next_step_on() -> None:
    env, _ = build(512)
    env.begin()
    assert env.critic[:, 97].max() > 2 * math.pi
    env.control(torch.zeros(512, 29))
    tick(env)
    assert env.critic[:, 96:98].max() < 2 * math.pi


def test_step_and_reset_noise_are_different_draws(env: Environment) -> None:
    tick(env, falling=[3])
    noise = env.uniforms[3].mul(2).sub(1).mul(0.01)
    assert (env.next_obs[3, 6:35] - env.next_critic[3, 6:35]).tolist() == pytest.approx(noise[:29].tolist(), abs=1e-8)
    assert (env.obs[3, 6:35] - env.critic[3, 6:35]).tolist() == pytest.approx(noise[58:87].tolist(), abs=1e-8)


def test_timeouts_and_terminations(env: Environment) -> None:
    env.episodes.steps.copy_(torch.tensor([998, 999, 999, 5, 5, 998, 0, 0]))
    tick(env, falling=[2, 3])
    assert env.truncated.nonzero().flatten().tolist() == [1, 2]
    assert env.terminated.nonzero().flatten().tolist() == [2, 3]
    assert env.done.nonzero().flatten().tolist() == [1, 2, 3]
    assert env.timeout.nonzero().flatten().tolist() == [1]
    assert env.metrics()["Episode/timeout_rate"].item() == pytest.approx(2 / 3)
    tick(env)
    assert env.timeout.nonzero().flatten().tolist() == [0, 5]
    assert env.metrics()["Episode/timeout_rate"].item() == 1
    tick(env)
    assert env.metrics()["Episode/timeout_rate"].item() == 1  # nothing finished: the last report stands


# --- rows with bad physics -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["nan", "inf", "warning", "nan action"])
def test_invalid_rows_are_reset_and_not_counted(env: Environment, damage: str) -> None:
    env.command.zero_()
    stand_still(env)
    fall(env, [2])
    env.episodes.steps[2] = 999
    if damage == "nan action":
        env.actions[2, 7] = math.nan
    else:
        column = env.task.spec.columns["warnings"].start if damage == "warning" else 40
        env.fields[2, column] = {"nan": math.nan, "inf": -math.inf, "warning": 1.0}[damage]
    env.draw()
    env.complete()
    env.summarize()
    assert env.valid.tolist() == [row != 2 for row in range(8)]
    assert env.finished.nonzero().flatten().tolist() == [2]
    assert not (env.done.any() or env.terminated.any() or env.truncated.any() or env.timeout.any())
    assert env.reward[2].item() == 0
    assert env.episodes.count.item() == 0
    assert env.metrics()["reward/alive"].item() == pytest.approx(10)
    env.restart(env.finished)
    env.control(torch.zeros(8, 29))
    assert env.codes.tolist() == [RESET if row == 2 else KEEP for row in range(8)]
    for name, value in env.metrics().items():
        assert value.isfinite(), name
    for value in (env.reward, env.obs, env.critic, env.ctrl, env.previous_actions, env.episodes.returns):
        assert value.isfinite().all()
    assert (env.episodes.steps[2].item(), env.episodes.returns[2].item()) == (0, 0)
    tick(env)
    assert env.valid.all()
    assert env.metrics()["Train/invalid_rows"].item() == 1


def test_every_row_invalid_leaves_finite_metrics(env: Environment) -> None:
    env.fields.fill_(math.nan)
    env.draw()
    env.complete()
    env.summarize()
    assert not env.valid.any()
    assert env.metrics()["Train/invalid_rows"].item() == 8
    assert all(value.isfinite() for value in env.metrics().values())


# --- episode statistics and curriculum -------------------------------------------------------------------------------


def test_metrics_are_tagged_scalars(env: Environment) -> None:
    tick(env)
    metrics = env.metrics()
    rewards = [f"reward/{name}" for name in env.task.reward_names]
    train = ["mean_reward", "mean_episode_length", "penalty_scale", "invalid_rows"]
    assert set(metrics) == {*rewards, *(f"Train/{name}" for name in train), "Episode/timeout_rate", *TRACKING_ERRORS}
    assert all(value.shape == () and value.dtype == torch.float32 for value in metrics.values())
    assert metrics["Train/mean_reward"].item() == 0


def test_reward_terms_are_means_before_the_time_step(env: Environment) -> None:
    stand_still(env)
    env.fields[0, env.task.spec.columns["torso_gyro"].start] = 2.0
    env.draw()
    env.complete()
    env.summarize()
    assert env.metrics()["reward/penalty_ang_vel_xy"].item() == pytest.approx(-0.0625 * 4 / 8)
    assert env.metrics()["reward/alive"].item() == pytest.approx(10)


def test_tracking_errors_are_means_over_valid_rows(env: Environment) -> None:
    env.command.copy_(torch.tensor([0.3, 0.4, -0.2]).expand(8, -1))
    env.command[5] = 100.0
    stand_still(env)
    env.fields[5, 20] = math.nan
    env.draw()
    env.complete()
    env.summarize()
    assert [env.metrics()[tag].item() for tag in TRACKING_ERRORS] == pytest.approx([0.5, 0.2])


def test_returns_add_up_until_the_episode_ends(env: Environment) -> None:
    total = 0.0
    for step in range(3):
        tick(env, falling=[5] if step == 2 else [])
        total += env.reward[5].item()
    assert env.metrics()["Train/mean_reward"].item() == pytest.approx(total)
    assert env.metrics()["Train/mean_episode_length"].item() == 3
    assert env.episodes.returns[5].item() == 0
    assert env.episodes.returns[4].item() > 0


def record(env: Environment, lengths: list[int]) -> None:
    """End episodes of these lengths, one per environment from the first, each with its length as its return."""
    done = torch.arange(env.num_envs) < len(lengths)
    env.episodes.steps[: len(lengths)] = torch.tensor(lengths)
    env.episodes.returns.copy_(env.episodes.steps)
    env.episodes.pay(torch.zeros(env.num_envs))
    env.episodes.record(done, done)


def test_ring_keeps_the_last_hundred_over_several_ticks() -> None:
    env, _ = build(64)
    for start in (1, 61, 121):
        record(env, list(range(start, start + 60)))
    kept = range(81, 181)
    assert sorted(env.episodes.ring[0, :EPISODE_WINDOW].tolist()) == list(kept)
    assert env.metrics()["Train/mean_episode_length"].item() == pytest.approx(sum(kept) / 100)
    assert env.metrics()["Train/mean_reward"].item() == pytest.approx(sum(kept) / 100)


def test_ring_takes_more_than_a_hundred_at_once() -> None:
    env, _ = build(256)
    record(env, [7] * 3)
    record(env, list(range(1, 251)))
    assert sorted(env.episodes.ring[1, :EPISODE_WINDOW].tolist()) == list(range(151, 251))
    assert env.episodes.count.item() == 253
    record(env, [1000])
    assert sorted(env.episodes.ring[1, :EPISODE_WINDOW].tolist()) == [*range(152, 251), 1000]
    assert env.episodes.ring[:, EPISODE_WINDOW:].abs().max() == 0


def test_ring_writes_no_slot_twice() -> None:
    """A device scatters in any order, so only the last hundred may have a slot of their own."""
    slots = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ == "scatter_":
                slots.extend(args[2][0].tolist())
            return func(*args, **(kwargs or {}))

    env, _ = build(256)
    with Spy():
        record(env, list(range(1, 251)))
    assert sorted(slots) == [*range(EPISODE_WINDOW), *[EPISODE_WINDOW] * 156]


def test_mean_covers_only_finished_episodes() -> None:
    env, _ = build(8)
    record(env, [10, 20])
    assert env.metrics()["Train/mean_episode_length"].item() == 15


def test_curriculum_mean_moves_by_the_share_of_the_window() -> None:
    env, _ = build(64)  # window 15
    record(env, [600, 900, 300])
    assert env.episodes.mean_length.item() == pytest.approx(3 / 15 * 600)
    record(env, [400])
    assert env.episodes.mean_length.item() == pytest.approx(120 + (400 - 120) / 15)
    record(env, [900] * 40)
    assert env.episodes.mean_length.item() == pytest.approx(900)


def test_curriculum_changes_only_when_an_episode_ends() -> None:
    env, _ = build(64)
    env.episodes.penalty_scale.fill_(0.1)
    env.episodes.mean_length.fill_(800.0)
    record(env, [])
    assert env.episodes.penalty_scale.item() == pytest.approx(0.1)
    record(env, [800])
    assert env.episodes.penalty_scale.item() == pytest.approx(0.1001)
    record(env, [10] * 20)
    assert env.episodes.penalty_scale.item() == pytest.approx(0.1001 * 0.999)
    assert env.metrics()["Train/penalty_scale"].item() == pytest.approx(0.1001 * 0.999)


def test_reward_uses_the_factor_before_the_episodes_of_its_tick(env: Environment) -> None:
    env.episodes.mean_length.fill_(800.0)
    env.episodes.steps.fill_(900)
    tick(env, falling=[0])
    assert env.metrics()["reward/penalty_action_rate"].item() == pytest.approx(0.0625 * -4 * 29 * 0.25**2)
    assert env.episodes.penalty_scale.item() == pytest.approx(0.0625 * 1.001)


def test_lengths_include_the_random_offset(env: Environment) -> None:
    env.episodes.steps[1] = 700
    tick(env, falling=[1])
    assert env.metrics()["Train/mean_episode_length"].item() == 701


# --- determinism and static buffers ----------------------------------------------------------------------------------


def roll(env: Environment, ticks: int, seed: int) -> None:
    """Ticks of invented physics with falls and broken rows."""
    noise = torch.Generator().manual_seed(seed)
    env.begin()
    for number in range(ticks):
        env.control(torch.rand(env.num_envs, 29, generator=noise) * 2 - 1)
        stand_still(env)
        env.fields.add_(torch.rand(env.fields.shape, generator=noise) * 0.1)
        env.fields[:, env.task.spec.columns["warnings"]] = float(number == 3)
        fall(env, [number % env.num_envs])
        env.draw()
        env.complete()
        env.summarize()
        env.restart(env.finished)


def test_same_seed_same_stream() -> None:
    (first, one), (second, two), (other, three) = build(16), build(16), build(16, seed=4)
    for env in (first, second, other):
        roll(env, 6, seed=9)
    states = [registry.snapshot() for registry in (one, two, three)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    for name in ("env/uniforms", "env/obs", "env/command", "env/reset_rows"):
        assert not torch.equal(states[0][name], states[2][name])


def test_a_restored_snapshot_continues_the_same_way() -> None:
    env, registry = build(16)
    generator = registry.generator("env/generator", env._generator)
    roll(env, 3, seed=9)
    snapshot = registry.snapshot()
    tick(env, falling=[1])
    expected = registry.snapshot()
    registry.restore(snapshot)
    tick(env, falling=[1])
    assert generator is env._generator
    assert all(torch.equal(value, expected[name]) for name, value in registry.snapshot().items())


def test_every_tensor_of_the_environment_is_registered_and_keeps_its_address() -> None:
    env, registry = build(16)
    held = {
        name: value for owner in (env, env.episodes) for name, value in vars(owner).items() if torch.is_tensor(value)
    }
    registered = registry._tensors
    assert {value.data_ptr() for value in held.values()} == {value.data_ptr() for value in registered.values()}
    assert all(name.startswith("env/") for name in registered)
    before = {name: value.data_ptr() for name, value in registered.items()}
    roll(env, 5, seed=1)
    assert {name: value.data_ptr() for name, value in registered.items()} == before
    for owner in (env, env.episodes):
        assert all(value is held[name] for name, value in vars(owner).items() if torch.is_tensor(value))


class NoHostReads(TorchDispatchMode):
    """Fails on operations that read a value on the host or whose result's shape depends on data."""

    forbidden = frozenset(
        {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "repeat_interleave", "item"}
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.forbidden, f"{name} reads on the host"
        if name in {"index", "index_put", "index_put_"}:
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "boolean mask indexing"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "read", [lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: x[x > 0], torch.nonzero, torch.unique]
)
def test_the_detector_detects(read: Callable[[Tensor], Any]) -> None:
    with pytest.raises(AssertionError), NoHostReads():
        read(torch.ones(3))


def test_no_phase_reads_on_the_host() -> None:
    env, _ = build(16)
    action = torch.zeros(16, 29)
    with NoHostReads():
        env.begin()
        env.control(action)
    stand_still(env)
    fall(env, [1, 2])
    env.fields[3, 0] = math.nan
    with NoHostReads():
        env.draw()
        env.complete()
        env.summarize()
        env.restart(env.finished)
        env.control(action)
        env.metrics()
    assert env.finished.nonzero().flatten().tolist() == [1, 2, 3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_tick_equals_an_eager_one() -> None:
    device = torch.device("cuda")
    states = []
    for captured in (False, True):
        task = G1WalkFlat(G1WalkFlatConfig(), G1WalkFlatRewards(), 256, device, "reference")
        registry, generator = StateRegistry(), torch.Generator(device).manual_seed(3)
        env = Environment(task, 256, device, generator, registry)
        env.begin()
        env.control(torch.zeros_like(env.actions))
        stand_still(env)
        fall(env, [1, 2])
        action = torch.full_like(env.actions, 0.25)

        def whole(env: Environment = env, action: Tensor = action) -> None:
            env.complete()
            env.summarize()
            env.restart(env.finished)
            env.control(action)

        before = registry.snapshot()
        whole()  # loads every kernel before a capture
        registry.restore(before)
        step: Callable[[], None] = whole
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                whole()
            step = graph.replay
        for _ in range(3):
            env.draw()
            step()
        states.append(registry.snapshot())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
