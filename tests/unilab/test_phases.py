from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from rank_rig import ENVS, WIDTHS, assert_registry_is_whole, begun, build, differences, settings
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unilab.phases import UpdatePhase
from unilab.physics.spec import KEEP, RESET
from unilab.replay import ReplayRing
from unilab.sac.objectives import Batch
from unilab.state import StateRegistry

CPU = torch.device("cpu")


# --- what a captured graph must not hold -----------------------------------------------------------------------------


class HostSyncError(AssertionError):
    """A value was read on the host, crossed devices, or decided about a shape."""


class _NoPythonReads(TorchFunctionMode):
    """Reads that a CPU tensor answers without dispatching an operation."""

    forbidden = frozenset(
        {"tolist", "numpy", "cpu", "item", "__array__", "__bool__", "__int__", "__float__", "__index__"}
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self.forbidden:
            raise HostSyncError(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class _NoSyncingOperations(TorchDispatchMode):
    """Operations, those of the backward pass included, whose result or its shape the host has to learn."""

    tags = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.seen.append(name)
        if name in {"index", "index_put", "index_put_", "_index_put_impl_"}:  # tagged whatever their indices are
            if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
                raise HostSyncError(f"{name} with a mask")
        elif self.tags.intersection(func.tags):
            raise HostSyncError(name)
        if name == "lift_fresh":
            raise HostSyncError("a constant from the host")
        result = func(*args, **(kwargs or {}))
        if len({leaf.device for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)}) > 1:
            raise HostSyncError(f"{name} between devices")
        return result


@contextmanager
def no_host_sync() -> Iterator[list[str]]:
    """Raise `HostSyncError` on the first offence; gives the names of the operations run."""
    operations = _NoSyncingOperations()
    with _NoPythonReads(), operations:
        yield operations.seen


class _ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.ones(3)[gradient > 0].sum()


def _assign_by_mask(x: Tensor) -> None:
    x[x > 0] = torch.zeros(3)


@pytest.mark.parametrize(
    "offence",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: float(x[0]),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: x.to("meta"),
        lambda x: x.new_empty(3, device="meta").copy_(x),
        lambda x: x + torch.tensor(1.0),
        lambda x: x[x > 0],
        _assign_by_mask,
        torch.nonzero,
        torch.unique,
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.equal(x, x),
        lambda x: torch.repeat_interleave(x, x.long()),
        lambda x: _ReadsInBackward.apply(x.requires_grad_()).sum().backward(),
    ],
)
def test_the_detector_detects(offence: Callable[[Tensor], Any]) -> None:
    x = torch.ones(3)
    offence(x.clone())
    with pytest.raises(HostSyncError), no_host_sync():
        offence(x)


def test_the_detector_allows_indices_and_where() -> None:
    x, index = torch.ones(3), torch.tensor([2, 0])
    with no_host_sync() as seen:
        _ = x[index], torch.where(x > 0, x, 0.0), x.index_copy(0, index, x[:2]), x[1:].sum()
    assert {"index", "where", "index_copy"} <= set(seen)


def test_no_phase_reads_on_the_host() -> None:
    rig = build()
    with no_host_sync() as seen:
        rig.act.begin()
    for falling, broken in (([], []), ([1, 2], [3])):
        rig.answer(falling, broken)
        with no_host_sync() as seen:
            rig.act.run()
            rig.update.run()
        assert rig.env.finished.nonzero().flatten().tolist() == falling + broken
        assert {"index_copy_", "native_layer_norm_backward", "silu_backward", "expm1", "lerp_"} <= set(seen)
        assert seen.count("native_layer_norm_backward") >= 8 * 3


def test_shapes_do_not_depend_on_data() -> None:
    """The same operations with the same shapes, whether every robot stands, falls or breaks."""
    traces: list[list[Any]] = []

    class Trace(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            shapes = [leaf.shape for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
            traces[-1].append((str(func), shapes))
            return result

    everyone = list(range(ENVS))
    for falling, broken in (([], []), (everyone, []), ([], everyone), ([1], [2, 3])):
        rig = begun()
        rig.answer(falling, broken)
        traces.append([])
        with Trace():
            rig.act.run()
            rig.update.run()
    assert len(traces[0]) > 500
    assert all(trace == traces[0] for trace in traces)


def test_every_registered_tensor_keeps_its_address() -> None:
    rig = build()
    watched = {**rig.registry.tensors, **{f"report/{name}": value for name, value in rig.learner.report().items()}}
    watched |= {f"module/{n}/{m}": p for n, net in rig.learner.modules().items() for m, p in net.named_parameters()}
    watched |= {"rows": rig.replay.rows, "log_alpha": rig.learner.log_alpha}
    addresses = {name: (value.data_ptr(), value.shape, value.stride()) for name, value in watched.items()}
    assert all(pointer for pointer, *_ in addresses.values())
    rig.act.begin()
    for _ in range(3):
        rig.tick()
    rig.registry.restore(rig.registry.snapshot())
    assert {name: (value.data_ptr(), value.shape, value.stride()) for name, value in watched.items()} == addresses
    assert rig.learner.report().keys() == {name.split("/", 1)[1] for name in watched if name.startswith("report/")}


# --- reproducibility -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ring", "ticks"), [(64, 3), (2, 1)], ids=["filling", "wrapping"])
def test_running_again_from_a_snapshot_is_bit_equal(ring: int, ticks: int) -> None:
    """What capture relies on: warm-up ticks can be undone. In a full ring that holds for one tick.

    Rows are not part of the snapshot: a tick writes the same ones again before it draws.
    """
    rig = begun(ring=ring)
    for _ in range(4):
        rig.tick()
    before, start = rig.registry.snapshot(), rig.ticks
    runs = []
    for _ in range(2):
        rig.registry.restore(before)
        rig.ticks = start
        for _ in range(ticks):
            rig.tick()
        runs.append(rig.registry.snapshot() | {"rows": rig.replay.rows[:-1].clone()})
    assert differences(*runs) == []
    moved = differences(before, rig.registry.snapshot())
    assert {"actor/parameters", "critic_target/parameters", "replay/position", "random/update"} <= set(moved)


def test_the_registry_is_the_whole_state() -> None:
    assert_registry_is_whole(begun(seed=3), begun(seed=4), "critic/parameters")


def test_the_seed_decides_everything() -> None:
    states = []
    for seed in (3, 3, 4):
        rig = build(seed=seed)
        rig.act.begin()
        for _ in range(2):
            rig.tick()
        states.append(rig.registry.snapshot() | {"rows": rig.replay.rows[:-1].clone()})
    assert differences(states[0], states[1]) == []
    drawn = {"act/noise", "update/noise", "update/indices", "env/uniforms", "actor/parameters", "env/obs", "rows"}
    assert drawn <= set(differences(states[0], states[2]))


def test_the_number_of_groups_changes_nothing() -> None:
    """Rows of one tick are worked on in one piece or in two of unequal size, with falls and broken rows in both."""
    states = []
    for groups in (1, 2):
        rig = build(num_envs=40, groups=groups, batch_size=32)
        assert [part.num_envs for part in rig.act.parts] == ([40] if groups == 1 else [32, 8])
        rig.act.begin()
        rig.env.episodes.steps.copy_(1000 - 5 * torch.arange(40))  # time limits in every other tick
        for number in range(12):
            rig.answer([number, 33, 38], [2 * number, 39 - number])
            rig.turns()
            rig.update.run()
        states.append(rig.registry.snapshot() | {"rows": rig.replay.rows[:-1].clone()})
    assert states[0]["env/episode_count"] > 20
    assert states[0]["env/invalid_rows"] == 24
    assert differences(*states) == []


def test_every_tick_draws_anew() -> None:
    rig = begun()
    seen: dict[str, list[Tensor]] = {"act/noise": [], "update/noise": [], "update/indices": [], "env/uniforms": []}
    for _ in range(3):
        rig.tick()
        for name, values in seen.items():
            values.append(rig.registry.tensors[name].clone())
    for name, (first, second, third) in seen.items():
        assert (first != second).float().mean() > 0.99, name
        assert (second != third).float().mean() > 0.99, name


# --- update phase ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("updates", "frequency", "actor_updates"), [(8, 4, 2), (5, 2, 3), (3, 1, 3), (2, 4, 1)], ids=str
)
def test_updates_per_cycle(updates: int, frequency: int, actor_updates: int) -> None:
    rig = begun(updates_per_step=updates, policy_frequency=frequency)
    for _ in range(3):
        rig.tick()
    state = rig.registry.snapshot()
    steps = [state[f"{name}/adamw_step"].item() for name in ("critic", "temperature", "actor")]
    assert steps == [3 * updates, 3 * updates, 3 * actor_updates]
    assert state["update/noise"].shape == (updates + actor_updates, 16, 29)


class RecordingLearner:
    """Keeps what every update was given.

    The next "action" is the noise itself and its "density" the sum of the next observation, so that both show where
    they come from; `ages` are actor updates done when they were computed and when they were used.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Batch, Tensor, Tensor | None]] = []
        self.densities: list[Tensor] = []
        self.passes: list[int] = []
        self.ages: list[tuple[int, int]] = []
        self.actor_updates = 0

    def next_action(self, next_obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        self.passes.append(self.actor_updates)
        return noise, next_obs.sum(1)

    def update(self, batch: Batch, next_action: Tensor, log_pi: Tensor, actor_noise: Tensor | None) -> None:
        self.calls.append((batch, next_action, actor_noise))
        self.densities.append(log_pi)
        self.ages.append((self.passes[-1], self.actor_updates))
        self.actor_updates += actor_noise is not None

    def report(self) -> dict[str, Tensor]:
        return {"Loss/a": torch.tensor([float(len(self.calls))])}


class FixedMetrics:
    """What the update phase sees of an environment."""

    def metrics(self) -> dict[str, Tensor]:
        return {"Train/b": torch.tensor(7), "Train/c": torch.tensor(True)}


def recorded(updates: int, frequency: int, fill: int = 40) -> tuple[UpdatePhase, Any, ReplayRing, torch.Generator]:
    """An update phase around a recorder, and a ring whose row r holds r + column / 1000."""
    registry, learner = StateRegistry(), RecordingLearner()
    config = settings(updates_per_step=updates, policy_frequency=frequency, batch_size=5)
    replay = ReplayRing(64, WIDTHS, CPU, registry)
    replay.rows.copy_(torch.arange(65.0).unsqueeze(1) + torch.arange(430) / 1000)
    replay.size.fill_(fill)
    generator = torch.Generator().manual_seed(9)
    environment: Any = FixedMetrics()
    phase = UpdatePhase(environment, learner, replay, config, 29, generator, registry)
    return phase, learner, replay, generator


def test_a_row_has_the_documented_width_and_order() -> None:
    assert sum(max(width, 1) for width in WIDTHS.values()) == 2 * 98 + 29 + 3 + 2 * 101 == 430
    assert list(WIDTHS) == ["obs", "next_obs", "action", "reward", "done", "timeout", "critic", "next_critic"]


@pytest.mark.parametrize(("updates", "frequency", "actor_at"), [(8, 4, [0, 4]), (5, 2, [0, 2, 4]), (3, 1, [0, 1, 2])])
def test_actor_updates_come_first_and_then_every_policy_frequency(
    updates: int, frequency: int, actor_at: list[int]
) -> None:
    phase, learner, _, _ = recorded(updates, frequency)
    phase.run()
    assert len(learner.calls) == updates
    assert [index for index, (_, _, noise) in enumerate(learner.calls) if noise is not None] == actor_at


def test_every_update_has_its_own_noise() -> None:
    phase, learner, _, _ = recorded(8, 4)
    for _ in range(2):
        phase.run()
    assert [call[1].data_ptr() for call in learner.calls[:8]] == [call[1].data_ptr() for call in learner.calls[8:]]
    given = [noise for call in learner.calls[8:] for noise in call[1:] if noise is not None]
    assert len(given) == 10
    assert all(noise.shape == (5, 29) for noise in given)
    stacked = torch.stack(given).flatten(1)
    assert len(stacked.flatten().unique()) > 0.99 * stacked.numel()
    assert abs(stacked.mean().item()) < 0.1
    assert stacked.std().item() == pytest.approx(1, abs=0.1)


def test_updates_take_consecutive_slices_of_the_gathered_rows() -> None:
    """Indices are the first draw of the stream, noise the second."""
    phase, learner, replay, generator = recorded(3, 4)
    begin = generator.get_state()
    phase.run()
    generator.set_state(begin)
    indices = torch.empty(15, dtype=torch.int64).random_(generator=generator) % 40
    noise = torch.empty(4, 5, 29).normal_(generator=generator)
    for update, (batch, critic_noise, _) in enumerate(learner.calls):
        rows = replay.rows[indices[5 * update : 5 * update + 5]]
        for name, part in replay.split(rows).items():
            assert torch.equal(getattr(batch, name), part), name
        assert torch.equal(critic_noise, noise[update])
    assert torch.equal(learner.calls[0][2], noise[3])


@pytest.mark.parametrize(("updates", "frequency", "passes"), [(8, 4, 3), (5, 2, 3), (3, 1, 3), (2, 4, 2), (1, 4, 1)])
def test_next_actions_are_those_of_the_actor_at_their_update(updates: int, frequency: int, passes: int) -> None:
    """One forward pass per stretch without a change of the actor, and every update gets its own rows of it."""
    phase, learner, _, _ = recorded(updates, frequency)
    phase.run()
    assert len(learner.passes) == passes
    assert all(computed == used for computed, used in learner.ages)
    for (batch, action, _), density in zip(learner.calls, learner.densities, strict=True):
        assert action.shape == (5, 29)
        assert torch.equal(density, batch.next_obs.sum(1))


def test_shared_forward_passes_equal_one_per_update(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, seen = begun(), []
    update = rig.learner.update

    def compare(batch: Batch, action: Tensor, log_pi: Tensor, actor_noise: Tensor | None) -> None:
        noise = rig.registry.tensors["update/noise"][len(seen)]
        seen.append(rig.learner.next_action(batch.next_obs, noise))
        # Other row counts take other matrix kernels, which round in another order.
        torch.testing.assert_close((action, log_pi), seen[-1], rtol=1e-5, atol=1e-5)
        update(batch, action, log_pi, actor_noise)

    monkeypatch.setattr(rig.learner, "update", compare)
    rig.tick()
    assert len(seen) == 8


def test_metrics_of_the_whole_cycle_stand_in_one_buffer() -> None:
    """Whatever their type and shape, and in the order of their names."""
    phase, _, _, _ = recorded(3, 4)
    address = phase.metrics.data_ptr()
    for cycle in (1, 2):
        phase.run()
        assert dict(zip(phase.metric_names, phase.metrics.tolist(), strict=True)) == {
            "Loss/a": 3.0 * cycle,
            "Train/b": 7.0,
            "Train/c": 1.0,
        }
    assert (phase.metrics.dtype, phase.metrics.data_ptr()) == (torch.float32, address)


def test_metrics_are_those_of_learner_and_environment() -> None:
    rig = begun()
    rig.tick()
    expected = {**rig.learner.report(), **rig.env.metrics()}
    assert rig.update.metric_names == list(expected)
    assert rig.update.metrics.tolist() == [value.item() for value in expected.values()]


def test_the_batch_is_gathered_anew_into_the_same_memory() -> None:
    phase, learner, replay, _ = recorded(2, 4)
    for fill in (40, 1):
        replay.size.fill_(fill)
        phase.run()
        values = torch.cat([call[0].obs for call in learner.calls[-2:]])[:, 0]
        assert len(values.unique()) == (1 if fill == 1 else pytest.approx(9, abs=2))
    assert learner.calls[0][0] is learner.calls[2][0]


# --- act phase -------------------------------------------------------------------------------------------------------


def test_begin_acts_on_the_first_observation_and_stores_nothing() -> None:
    rig = build()
    rig.act.begin()
    noise = rig.registry.tensors["act/noise"]
    expected, _ = rig.learner.actor.sample(rig.env.obs, noise)
    assert torch.equal(rig.env.actions, expected)
    assert rig.env.codes.tolist() == [RESET] * ENVS
    assert rig.replay.size.item() == 0
    assert noise.abs().min() > 0


def test_a_transition_joins_what_the_action_saw_to_what_it_led_to() -> None:
    rig = begun()
    saw, critic_saw, action = rig.env.obs.clone(), rig.env.critic.clone(), rig.env.actions.clone()
    rig.env.episodes.steps[5:7] = 999
    rig.answer(falling=[1, 6], broken=[2])
    rig.act.run()
    assert (rig.replay.size.item(), rig.replay.position.item()) == (7, 7)
    parts = rig.replay.split(rig.replay.rows[:7])
    kept = [0, 1, 3, 4, 5, 6, 7]
    assert torch.equal(parts["obs"], saw[kept])
    assert torch.equal(parts["critic"], critic_saw[kept])
    assert torch.equal(parts["action"], action[kept])
    assert torch.equal(parts["next_obs"], rig.env.next_obs[kept])
    assert torch.equal(parts["next_critic"], rig.env.next_critic[kept])
    assert torch.equal(parts["reward"], rig.env.reward[kept])
    assert parts["done"].tolist() == [0, 1, 0, 0, 1, 1, 0]
    assert parts["timeout"].tolist() == [0, 0, 0, 0, 1, 0, 0]  # row 6 fell in its last step
    assert (rig.env.actions != action).all()


def test_the_stored_next_observation_is_the_terminal_one() -> None:
    rig = begun()
    rig.answer(falling=[1], broken=[])
    rig.act.run()
    parts = rig.replay.split(rig.replay.rows[:ENVS])
    assert torch.equal(parts["next_obs"][0], rig.env.obs[0])
    assert not torch.equal(parts["next_obs"][1], rig.env.obs[1])
    assert rig.env.codes.tolist() == [KEEP, RESET] + [KEEP] * 6


def test_transitions_chain_over_ticks() -> None:
    """The next observation of one tick is the observation of the following, unless an episode ended."""
    rig = begun()
    for _ in range(3):
        rig.answer(falling=[], broken=[])
        rig.act.run()
    parts = rig.replay.split(rig.replay.rows[: 3 * ENVS])
    assert torch.equal(parts["next_obs"][:-ENVS], parts["obs"][ENVS:])
    assert torch.equal(parts["next_critic"][:-ENVS], parts["critic"][ENVS:])
    assert torch.equal(parts["action"][:-ENVS], parts["obs"][ENVS:, 64:93])  # the last action is part of what is seen


def test_the_next_action_comes_from_the_new_observation_and_the_current_weights() -> None:
    rig = begun()
    for falling in ([], [4]):
        with torch.no_grad():
            rig.learner.actor.mean.bias.add_(0.1)
        rig.answer(falling, broken=[])
        rig.act.run()
        expected, _ = rig.learner.actor.sample(rig.env.obs, rig.registry.tensors["act/noise"])
        assert torch.equal(rig.env.actions, expected)
        assert torch.equal(rig.env.ctrl, rig.env.task.joint_default + expected)


def test_acting_records_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = build()
    actions = []
    monkeypatch.setattr(rig.act.parts[0], "control", actions.append)
    rig.act.begin()
    rig.answer([1], [2])
    rig.act.run()
    assert [action.requires_grad for action in actions] == [False, False]
    assert not any(value.requires_grad for value in rig.registry.tensors.values())


def test_broken_rows_never_reach_an_update() -> None:
    rig = begun(ring=2)
    for _ in range(5):
        rig.answer([0], [1, 2, 3])
        rig.act.run()
        rig.update.run()
    assert rig.replay.rows[:-1].isfinite().all()
    assert rig.learner.report()["Train/skipped_updates"].item() == 0
    assert rig.replay.size.item() == 2 * ENVS
