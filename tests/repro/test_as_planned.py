"""Whether a run of two GPUs used the transport that its case asks for."""

from __future__ import annotations

from typing import Any

import pytest
from fake_trainer import override
from session_builder import SOURCE, make_host

from repro.as_planned import _overridden, departure
from repro.matrix import adjust, load_matrix
from repro.plan import Plan, make_plan
from unilab.config import load_config
from unilab.names import GRADIENT_MEAN


def plan_of(matrix: str, *overrides: str) -> Plan:
    return make_plan(adjust(load_matrix(matrix), None, 1, overrides), *make_host(32, 2), SOURCE)


def found(plan: Plan, case: str, transport: str | None, *settings: str) -> str | None:
    """What is wrong with a run of a case whose manifest names this transport, with other settings than asked for."""
    cell = next(cell for cell in plan.cells if cell.case == case and not cell.warmup)
    defaults = {"algo": {"algo": plan.matrix.algo}, "training": {"sim_backend": plan.matrix.sim, "smoke": False}}
    config = override(defaults, [word for word in cell.arguments if "=" in word] + [*settings])
    dp_sync: dict[str, Any] = {"world_size": 2, "mode": GRADIENT_MEAN}
    manifest = {
        "dp_sync": dp_sync | ({} if transport is None else {"transport": transport}),
        "ranks": [{"rank": rank, "gpu_uuid": f"GPU-{rank}"} for rank in range(2)],
    }
    command = {
        "git": {name: getattr(SOURCE, name) for name in ("commit", "dirty", "diff_sha256")},
        "source_sha256": SOURCE.trainer_sha256,
        "argv": list(cell.arguments),
    }
    return departure(plan, cell, config, manifest, command)


@pytest.mark.parametrize(
    ("transport", "said"), [("explicit", '"explicit"'), ("tcp", '"tcp"'), ("none", '"none"'), (None, "null")]
)
def test_a_run_over_another_transport_than_its_case_asks_for_is_refused(transport: str | None, said: str) -> None:
    expected = f'not_as_planned: training.nccl_transport was planned as "shm", the run says {said}'
    assert found(plan_of("ablation"), "ranks2_shm", transport) == expected


def test_a_run_over_the_transport_of_its_case_counts() -> None:
    assert found(plan_of("ablation"), "ranks2_shm", "shm") is None
    assert found(plan_of("ablation"), "ranks2_tcp", "tcp") is None


def test_the_last_setting_counts_and_auto_takes_any_transport() -> None:
    for transport in ("explicit", "p2p"):
        assert found(plan_of("dual"), "n2", transport) is None
        assert found(plan_of("dual", "training.nccl_transport=auto"), "n2", transport) is None
    assert found(plan_of("dual", "training.nccl_transport=shm", "++training.nccl_transport='p2p'"), "n2", "p2p") is None
    assert "was planned as" in (found(plan_of("dual", "training.nccl_transport=shm"), "n2", "p2p") or "")


@pytest.mark.parametrize(
    ("asked", "ran", "said"),
    [
        ("algo.batch_size=4096", "algo.batch_size=8192", "algo.batch_size was planned as 4096, the run says 8192"),
        ("+env.gain_scale=[1.0,1.0]", "env.gain_scale=[0.9,1.1]", "env.gain_scale was planned as [1.0, 1.0], the run"),
        ("training.use_amp=false", "training.use_amp=true", "training.use_amp was planned as false, the run says true"),
        ("algo.batch_size=[1", "algo.batch_size=1", "algo.batch_size=[1 is no setting"),
    ],
)
def test_a_run_with_another_setting_than_its_command_is_refused(asked: str, ran: str, said: str) -> None:
    assert (found(plan_of("dual", asked), "n2", "p2p", ran) or "").startswith(f"not_as_planned: {said}")


@pytest.mark.parametrize(
    ("asked", "ran"),
    [
        ("algo.tau=1", "algo.tau=1.0"),
        ("training.use_amp=1", "training.use_amp=true"),
        ("algo.load_run=-1", 'algo.load_run="-1"'),
        ("training.wandb_name='7'", "training.wandb_name=7"),
        ("algo.actor=<home>/a.pt", "algo.actor=/b/a.pt"),
        ("training.devices=[0]", "training.devices=[1]"),  # says where it ran
    ],
)
def test_a_setting_may_have_the_type_of_its_key(asked: str, ran: str) -> None:
    assert found(plan_of("dual", asked), "n2", "p2p", ran) is None


@pytest.mark.parametrize(
    "settings",
    [
        ("training.use_amp=off", "algo.seed=007"),
        ("algo.actor_lr='1e-4'", "training.use_amp=yes", "algo.seed='+7'"),
        ('env.gain_scale=["0.9","1.10"]', "algo.gamma=99e-2", "training.wandb_notes=null"),
        ("algo.seed=2", "algo.seed=3"),
    ],
)
def test_every_spelling_that_the_trainer_takes_is_the_planned_setting(settings: tuple[str, ...]) -> None:
    cell = plan_of("single", *settings).cells[-1]
    words = [word for word in cell.arguments if "=" in word]
    config = load_config("sac", "g1_walk_flat", "mujoco", words).to_json()
    assert _overridden(cell, config) is None
    config["algo"].update(seed=99, gamma=0.5)
    assert "was planned as" in (_overridden(cell, config) or "")


def test_a_mapping_that_is_taken_back_is_not_asked_for() -> None:
    actor = "algo.algo_params.actor_config"
    cell = plan_of("learning_flashsac", f"{actor}={{builder:a.b,kwargs:{{x:1}}}}", f"{actor}=null").cells[-1]
    config = load_config("flashsac", "g1_walk_flat", "mujoco", [w for w in cell.arguments if "=" in w]).to_json()
    assert _overridden(cell, config) is None


def test_what_was_redacted_of_a_run_is_passed_over() -> None:
    plan = plan_of("single", "training.wandb_entity=alice")
    cell = plan.cells[-1]
    config = load_config("sac", "g1_walk_flat", "mujoco", [w for w in cell.arguments if "=" in w]).to_json()
    config["training"]["wandb_entity"] = "<user>"
    assert _overridden(cell, config) is None
    config["training"]["wandb_entity"] = "bob"
    assert "training.wandb_entity was planned as" in (_overridden(cell, config) or "")
