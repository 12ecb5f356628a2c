"""Whether a run of two GPUs used the transport that its case asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from session_builder import SOURCE, make_host

from repro.as_planned import departure
from repro.matrix import adjust, load_matrix
from repro.plan import Plan, make_plan, pinning
from unilab.names import GRADIENT_MEAN


def plan_of(matrix: str, *overrides: str) -> Plan:
    return make_plan(adjust(load_matrix(matrix), None, 1, overrides), *make_host(32, 2), SOURCE)


def found(plan: Plan, case: str, transport: str | None) -> str | None:
    """What is wrong with a run of a case whose manifest names this transport."""
    cell = next(cell for cell in plan.cells if cell.case == case and not cell.warmup)
    pools = json.loads(pinning(cell.pools).partition("=")[2])
    config = {
        "training": {"smoke": False, "dp_collector_cpu_ids": pools},
        "algo": {"max_iterations": plan.matrix.iterations},
    }
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
