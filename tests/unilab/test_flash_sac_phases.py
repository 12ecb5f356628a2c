"""FlashSAC inside the shared phases: what a captured graph relies on."""

from __future__ import annotations

import pytest
from rank_rig import ENVS, assert_registry_is_whole, begun, build, differences, flash_settings
from test_phases import no_host_sync


def test_no_phase_reads_on_the_host() -> None:
    rig = build(config=flash_settings())
    with no_host_sync():
        rig.act.begin()
    for falling, broken in (([], []), ([1, 2], [3])):
        rig.answer(falling, broken)
        with no_host_sync() as seen:
            rig.act.run()
            rig.update.run()
        assert {"var_mean", "bmm", "expm1", "lerp_", "cos"} <= set(seen)


def test_every_registered_tensor_keeps_its_address() -> None:
    rig = build(config=flash_settings())
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
    """Running statistics, schedules, held noise and reward scale too."""
    rig, other = (begun(seed, config=flash_settings()) for seed in (3, 4))
    apart = ("critic/trunk.norm.running_mean", "exploration/held", "reward_scale/returns", "actor/parameters")
    assert_registry_is_whole(rig, other, *apart)


def test_the_number_of_groups_changes_nothing() -> None:
    states = []
    for groups in (1, 2):
        rig = begun(groups=groups, config=flash_settings(num_envs=40))
        for number in range(4):
            rig.answer([number, 33], [2 * number, 39 - number])
            rig.turns()
            rig.update.run()
        states.append(rig.registry.snapshot())
    assert differences(*states) == []


def test_every_tick_is_seen_by_the_reward_scale_once_and_broken_rows_are_not() -> None:
    rig = begun(config=flash_settings())
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
    rig = begun(config=flash_settings(updates_per_step=updates, policy_frequency=frequency))
    for _ in range(2):
        rig.tick()
    state = rig.registry.snapshot()
    steps = [state[f"{name}/adamw_step"].item() for name in ("critic", "actor", "temperature")]
    assert steps == [2 * updates, 2 * actor, 2 * actor]
    assert rig.update.steps == updates + actor
    assert rig.learner.steps(updates, actor) == {"critic": updates, "temperature": actor, "actor": actor}
