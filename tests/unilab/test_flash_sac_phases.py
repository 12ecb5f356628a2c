"""FlashSAC inside the shared phases: what a captured graph relies on, and graphs and compiled code on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rank_rig import ENVS, Rig, build, differences
from test_phases import no_host_sync

from unilab.capture import Phase
from unilab.flash_sac.config import FlashSacConfig, FlashSacParams

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small matrices gain nothing from threads, least of all where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config(**given: Any) -> FlashSacConfig:
    sizes = {"actor_hidden_dim": 8, "critic_hidden_dim": 8, "num_atoms": 11, "batch_size": 16, "num_envs": ENVS}
    return FlashSacConfig(**{"updates_per_step": 4, **sizes, **given})


def begun(seed: int = 3, **given: Any) -> Rig:
    options = {name: given.pop(name) for name in ("device", "compiled", "amp", "groups") if name in given}
    rig = build(seed, config=config(**given), **options)
    rig.act.begin()
    rig.env.episodes.steps.zero_()
    return rig


def test_no_phase_reads_on_the_host() -> None:
    rig = build(config=config())
    with no_host_sync():
        rig.act.begin()
    for falling, broken in (([], []), ([1, 2], [3])):
        rig.answer(falling, broken)
        with no_host_sync() as seen:
            rig.act.run()
            rig.update.run()
        assert {"var_mean", "bmm", "expm1", "lerp_", "cos"} <= set(seen)


def test_every_registered_tensor_keeps_its_address() -> None:
    rig = build(config=config())
    modules = rig.learner.modules().items()
    watched = {**rig.registry.tensors, **rig.learner.report()}
    watched |= {f"{n}.{path}": p for n, net in modules for path, p in (*net.named_parameters(), *net.named_buffers())}
    addresses = {name: value.data_ptr() for name, value in watched.items()}
    rig.act.begin()
    for _ in range(3):
        rig.tick()
    rig.registry.restore(rig.registry.snapshot())
    assert {name: value.data_ptr() for name, value in watched.items()} == addresses


def test_the_registry_is_the_whole_state() -> None:
    """Running statistics, schedules, held noise and reward scale too: another seed's rank goes on like this one."""
    rig, other = begun(seed=3), begun(seed=4)
    for _ in range(2):
        rig.tick()
        other.tick()
    names = set(differences(rig.registry.snapshot(), other.registry.snapshot()))
    assert {"critic/trunk.norm.running_mean", "exploration/held", "reward_scale/returns", "actor/parameters"} <= names
    other.registry.restore(rig.registry.snapshot())
    other.replay.rows.copy_(rig.replay.rows)
    for _ in range(2):
        rig.tick()
        other.tick()
    assert differences(rig.registry.snapshot(), other.registry.snapshot()) == []


def test_the_number_of_groups_changes_nothing() -> None:
    states = []
    for groups in (1, 2):
        rig = begun(groups=groups, num_envs=40)
        for number in range(4):
            rig.answer([number, 33], [2 * number, 39 - number])
            rig.turns()
            rig.update.run()
        states.append(rig.registry.snapshot())
    assert differences(*states) == []


def test_every_tick_is_seen_by_the_reward_scale_once_and_broken_rows_are_not() -> None:
    rig = begun()
    for _ in range(3):
        rig.answer([0], [1, 2])
        rig.turns()
    state = rig.registry.snapshot()
    assert state["reward_scale/count"] == pytest.approx(3 * (ENVS - 2), abs=1e-3)
    assert state["reward_scale/returns"][1:3].tolist() == [0.0, 0.0]
    assert state["reward_scale/returns"][3] != 0
    assert state["critic/adamw_step"] == 0


@pytest.mark.parametrize(("updates", "frequency", "actor"), [(8, 2, 4), (3, 2, 2), (1, 2, 1)])
def test_updates_per_cycle(updates: int, frequency: int, actor: int) -> None:
    rig = begun(updates_per_step=updates, policy_frequency=frequency)
    for _ in range(2):
        rig.tick()
    state = rig.registry.snapshot()
    steps = [state[f"{name}/adamw_step"].item() for name in ("critic", "actor", "temperature")]
    assert steps == [2 * updates, 2 * actor, 2 * actor]
    assert rig.update.steps == updates + actor
    assert rig.learner.steps(updates, actor) == {"critic": updates, "temperature": actor, "actor": actor}


# --- on a GPU --------------------------------------------------------------------------------------------------------

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]
REAL = {"batch_size": 2048, "actor_hidden_dim": 128, "critic_hidden_dim": 256, "num_atoms": 101, "num_envs": 1024}


@pytest.fixture
def stream() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    torch.cuda.synchronize()


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize(
    ("compiled", "full", "amp"),
    [
        *(pytest.param(*case, marks=gpu) for case in ((False, False, False), (False, False, True))),
        *(pytest.param(*case, marks=gpu) for case in ((True, True, False), (True, False, False))),
    ],
)
def test_a_captured_cycle_equals_an_eager_one(compiled: bool, full: bool, amp: bool) -> None:
    """Bit for bit where nothing is compiled; compiled float32 to rounding."""
    plain = FlashSacParams(use_compile=False)
    fast = FlashSacParams(use_compile=compiled, compile_full_objectives=full)
    eager = begun(device=GPU, amp=amp, algo_params=plain, **REAL)
    for _ in range(10):
        eager.tick()
    rig = begun(device=GPU, amp=amp, compiled=compiled, algo_params=fast, **REAL)
    rig.registry.restore(eager.registry.snapshot())
    rig.replay.rows.copy_(eager.replay.rows)
    start = rig.registry.snapshot()
    phase = Phase(rig.update.run, [rig.registry.generators()["random/update"]])
    phase.capture(rig.registry)
    assert differences(rig.registry.snapshot(), start) == []
    phase()
    eager.update.run()
    found, expected = rig.registry.snapshot(), eager.registry.snapshot()
    phase.release()
    if not compiled:
        assert differences(found, expected) == []
        return
    for name in ("actor", "critic", "critic_target", "temperature"):
        entry = f"{name}/parameters"
        change = (expected[entry] - start[entry]).double().norm()
        assert (found[entry] - expected[entry]).double().norm() < 1e-3 * change, name
    for name in (name for name in expected if "running_" in name):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5, msg=name)
