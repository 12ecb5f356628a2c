"""The communication probe: over gloo as it is, with a sum that is wrong, with made-up ranks for NCCL's transports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from unilab.config import load_config
from unilab.data_parallel import DataParallel
from unilab.environment import Environment
from unilab.phases import UpdatePhase, transition_widths
from unilab.probes import communication
from unilab.probes.__main__ import main
from unilab.probes.communication import fastest_is_used, told_apart, transports_to_try
from unilab.probes.communication_rank import Payload
from unilab.probes.findings import Check
from unilab.probes.rank import KnownSums
from unilab.probes.setting import Seat, Setting
from unilab.rank_statistics import RankStatistics
from unilab.replay import ReplayRing
from unilab.sac.learner import SacLearner
from unilab.state import StateRegistry
from unilab.tasks.g1_walk_flat import G1WalkFlat

CPU = torch.device("cpu")
TINY = {"latency": 1, "critic": 1030}

# A rank that does what FAKE_PLAN says for the transport its variables name, and leaves its process id.
FAKE = """
import json, os, subprocess, sys, time
from pathlib import Path
from unilab.probes.findings import RankPart
from unilab.probes.setting import Seat

seat = Seat.take(sys.argv[1:])
p2p, shm = os.environ["NCCL_P2P_DISABLE"], os.environ["NCCL_SHM_DISABLE"]
name = {"00": "p2p", "10": "shm", "11": "tcp"}[p2p + shm]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
Path(os.environ["FAKE_NOTES"], f"{name}{seat.rank}").write_text(f"{os.getpid()} {child.pid}")
plan = json.loads(os.environ["FAKE_PLAN"])[name]
print(f"host:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via {plan['via']}/direct", flush=True)
part = RankPart(Path(seat.part))
for form in ("eager", "captured"):
    for payload, elements in seat.options["payloads"].items():
        if (payload, form) == tuple(plan.get("stop", ())):
            if plan["how"] == "hang":
                time.sleep(60)
            if seat.rank == 1:
                sys.exit(9)
            time.sleep(60)
        for delay in (0.0, 20.0) if (payload, form) == ("critic", "eager") else (0.0,):
            late = " delayed" if delay else ""
            part.check(f"{payload} {form}{late}", plan.get("wrong") != payload, "7 values wrong in 53 sums")
            part.measure(
                payload=payload, bytes=4 * elements, captured=form == "captured", repeats=50,
                delay_ms=delay * seat.rank, waiting_ms=0.01 + delay, transfer_ms=plan["ms"], p90_ms=1.0,
                bandwidth_gb_per_s=1.0,
            )
"""


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def named(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command finds on the CPU; its temporary files were its own."""
    folder = tmp_path_factory.mktemp("communication")
    (folder / "tmp").mkdir()
    command = [sys.executable, "-m", "unilab.probes", "communication", "--smoke", "--output", str(folder / "found")]
    ended = subprocess.run(
        command, env={**os.environ, "TMPDIR": str(folder / "tmp")}, capture_output=True, text=True, timeout=100
    )
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert not list((folder / "tmp").glob("unilab-*"))
    found: dict[str, Any] = json.loads((folder / "found").read_text())
    return found


def test_over_gloo_every_payload_is_measured(smoke: dict[str, Any]) -> None:
    rows = smoke["measurements"]
    assert [(row["payload"], row["delay_ms"] > 0) for row in rows] == [
        ("latency", False),
        ("statistics", False),
        ("actor", False),
        ("critic", False),
        ("critic", True),
        ("peak", False),
    ]
    for row in rows:
        assert (row["transport"], row["captured"], row["repeats"]) == ("gloo", False, 10)
        assert 0 < row["transfer_ms"] <= row["p90_ms"] < 60_000
        assert row["waiting_ms"] > 0
        assert row["bandwidth_gb_per_s"] == pytest.approx(row["bytes"] / row["transfer_ms"] / 1e6)  # 2 (2 - 1) / 2 = 1


def test_over_gloo_a_late_rank_is_waited_for(smoke: dict[str, Any]) -> None:
    late = smoke["measurements"][4]
    assert late["delay_ms"] >= 50
    assert late["waiting_ms"] >= 25  # of 50; a busy host may hold up the other rank too


def test_over_gloo_values_and_ends_decide(smoke: dict[str, Any]) -> None:
    assert [(check["name"], check["required"]) for check in smoke["checks"]] == [
        ("ended_gloo", True),
        ("values_correct_gloo", True),
        ("waiting_told_apart", False),
        ("fastest_is_used", False),
    ]
    assert smoke["passed"]
    assert smoke["checks"][-1]["passed"]


def test_payloads_are_those_of_a_learner(smoke: dict[str, Any]) -> None:
    small = ["algo.num_envs=2", "algo.batch_size=2", "algo.updates_per_step=1"]
    config = load_config("sac", "g1_walk_flat", "mujoco", small)
    registry, generator = StateRegistry(), torch.Generator()
    task = G1WalkFlat(config.env, config.reward, 2, CPU, "exact")
    env = Environment(task, 2, CPU, generator, registry)
    learner = SacLearner(config.algo, 98, 101, 29, CPU, False, registry)
    ring = ReplayRing(4, transition_widths(98, 101, 29), CPU, registry)
    update = UpdatePhase(env, learner, ring, config.algo, 29, generator, registry)
    statistics = RankStatistics(update.metrics, update.metric_names, DataParallel(), update.episodes)
    assert {row["payload"]: row["bytes"] for row in smoke["measurements"]} == {
        "latency": 4,
        "statistics": 2 * (statistics.values.nbytes + 8),  # the last update's time and the episodes too
        "actor": learner.actor_group.wire.nbytes,
        "critic": learner._critic_wire.nbytes,
        "peak": 64 * 2**20,
    }


@pytest.fixture
def spoiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Check]]:
    """The probe over gloo with tiny payloads and ranks whose all-reduce is followed by a line of code."""

    def run(line: str) -> dict[str, Check]:
        (tmp_path / "spoiled_rank.py").write_text(
            "import sys\n"
            "import torch.distributed as dist\n"
            "from unilab.probes import communication_rank\n"
            "honest, calls = dist.all_reduce, []\n"
            "rank = communication_rank.Seat.take(sys.argv[1:]).rank\n"
            "def spoiled(values):\n"
            "    honest(values)\n"
            "    calls.append(values.numel())\n"
            f"    {line}\n"
            "dist.all_reduce = spoiled\n"
            "sys.exit(communication_rank.main(sys.argv[1:]))\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(communication, "PROGRAM", "spoiled_rank")
        monkeypatch.setattr(communication, "payload_elements", lambda _: TINY)
        checks, _ = communication.run(Setting(("0", "1"), "gloo", dict(os.environ)))
        return named(checks)

    return run


def test_one_wrong_value_of_one_rank_is_found(spoiled: Callable[[str], dict[str, Check]]) -> None:
    check = spoiled("values[7 % len(values)] += rank and calls.count(1030) == 1 and len(values) == 1030")
    found = check["values_correct_gloo"]
    assert (found.passed, found.required) == (False, True)
    assert found.detail == "critic eager: rank 1: 1 values wrong in 13 sums"
    assert check["ended_gloo"].passed


def test_what_a_rank_raises_is_told(
    spoiled: Callable[[str], dict[str, Check]], capfd: pytest.CaptureFixture[str]
) -> None:
    check = spoiled("if rank and len(calls) > 60: raise OSError('cable\\n  cut')")
    assert check["ended_gloo"].detail.endswith(" ended with exit code 1; rank 1: OSError: cable cut")  # 0 fails of it
    assert not check["ended_gloo"].passed
    assert check["values_correct_gloo"].detail.endswith("did not come to critic eager, critic eager delayed")
    assert "rank 1: OSError: cable" in capfd.readouterr().err


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


@pytest.fixture
def faked(
    tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[dict[str, Check], list[dict[str, Any]]]]:
    """The probe as with NCCL, whose ranks follow a plan; training would use P2P."""
    (tmp_path / "fake_communication_rank.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(communication, "PROGRAM", "fake_communication_rank")
    monkeypatch.setattr(communication, "payload_elements", lambda _: TINY)

    def run(seconds: float = 30.0, **plan: Any) -> tuple[dict[str, Check], list[dict[str, Any]]]:
        monkeypatch.setattr(communication, "SECONDS", seconds)
        good = {
            "p2p": {"via": "P2P", "ms": 0.1},
            "shm": {"via": "SHM", "ms": 0.4},
            "tcp": {"via": "NET", "ms": 3.0},
        }
        environment = {
            **os.environ,
            "NCCL_DEBUG_FILE": str(tmp_path / "elsewhere"),
            "NCCL_P2P_DISABLE": "0",
            "NCCL_SHM_DISABLE": "0",
            "FAKE_PLAN": json.dumps({name: good[name] | plan.get(name, {}) for name in good}),
            "FAKE_NOTES": str(notes),
        }
        checks, rows = communication.run(Setting(("GPU-a", "GPU-b"), "nccl", environment))
        pids = [int(pid) for note in notes.iterdir() for pid in note.read_text().split()]
        deadline = time.monotonic() + 10
        while not all(gone(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [pid for pid in pids if not gone(pid)] == []
        return named(checks), rows

    return run


def test_every_transport_is_measured_and_only_the_used_one_decides(faked: Callable[..., Any]) -> None:
    checks, rows = faked()
    assert [name for name, check in checks.items() if check.required] == ["ended_p2p", "values_correct_p2p"]
    assert all(check.passed for check in checks.values())
    assert {row["transport"] for row in rows} == {"p2p", "shm", "tcp"}
    assert len(rows) == 3 * 5
    assert [row["delay_ms"] for row in rows[:5]] == [0, 0, 20, 0, 0]  # rank 1's, beside what rank 0 measured
    assert list(checks)[-1] == "fastest_is_used"


def test_a_forced_transport_that_fails_is_recorded_and_decides_nothing(faked: Callable[..., Any]) -> None:
    began = time.monotonic()
    checks, rows = faked(
        seconds=4.0,
        shm={"how": "hang", "stop": ["critic", "captured"]},
        tcp={"how": "crash", "stop": ["critic", "eager"]},
    )
    assert time.monotonic() - began < 30
    assert checks["ended_shm"] == Check("ended_shm", False, "no answer within 4 s", required=False)
    assert checks["values_correct_shm"].detail == "did not come to critic captured"
    assert checks["ended_tcp"] == Check("ended_tcp", False, "rank 1 ended with exit code 9", required=False)
    assert not [check for check in checks.values() if check.required and not check.passed]
    assert [row["payload"] for row in rows if row["transport"] == "shm"] == ["latency", "critic", "critic", "latency"]


def test_the_transport_in_use_must_work(faked: Callable[..., Any]) -> None:
    checks, _ = faked(p2p={"wrong": "critic"})
    assert checks["values_correct_p2p"].required
    assert checks["values_correct_p2p"].detail.startswith(
        "critic eager: rank 0: 7 values wrong in 53 sums; critic eager"
    )


def test_times_of_another_transport_are_not_taken(faked: Callable[..., Any]) -> None:
    checks, rows = faked(shm={"via": "NET"})
    assert checks["carried_by_shm"] == Check("carried_by_shm", False, "NCCL used NET instead", required=False)
    assert {row["transport"] for row in rows} == {"p2p", "tcp"}


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({"NCCL_P2P_DISABLE": "0", "NCCL_SHM_DISABLE": "0"}, ["p2p", "shm", "tcp"]),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, ["tcp", "p2p", "shm"]),
        ({"NCCL_P2P_LEVEL": "SYS"}, ["explicit", "p2p", "shm", "tcp"]),
    ],
)
def test_the_transport_in_use_comes_first(variables: dict[str, str], names: list[str]) -> None:
    found = transports_to_try(Setting(("0", "1"), "nccl", variables))
    assert list(found) == names
    assert found[names[0]] == {}  # as it is
    assert found[names[1]]
    assert transports_to_try(Setting(("0", "1"), "gloo", variables)) == {"gloo": {}}


def row(**given: Any) -> dict[str, Any]:
    plain = {"transport": "p2p", "payload": "critic", "captured": False, "delay_ms": 0.0, "transfer_ms": 0.1}
    return {**plain, "waiting_ms": 0.02, **given}


@pytest.mark.parametrize(
    ("waiting", "transfer", "passed"),
    [
        (20.0, 0.1, True),
        (23.9, 1.1, True),  # 4 ms more waiting and 1.05 ms more transfer are allowed, 0.05 of them as half the transfer
        (24.1, 0.1, False),
        (15.9, 0.1, False),
        (20.0, 1.2, False),
        (0.02, 20.0, False),  # all of it in the transfer
        (0.02, 0.1, False),  # nowhere
        (float("nan"), 0.1, False),
    ],
)
def test_waiting_is_judged_by_the_delay(waiting: float, transfer: float, passed: bool) -> None:
    late = row(delay_ms=20.0, waiting_ms=waiting, transfer_ms=transfer)
    others = [row(transport="shm"), row(captured=True), row(payload="actor")]
    check = told_apart([*others, row(), late], "p2p")
    assert (check.passed, check.required) == (passed, False)
    assert "one rank 20 ms late: waiting 0.02 → " in check.detail


def test_waiting_that_was_not_measured_is_not_told_apart() -> None:
    assert not told_apart([row()], "p2p").passed
    assert not told_apart([row(), row(delay_ms=20.0)], "shm").passed


def test_the_fastest_is_named() -> None:
    rows = [
        row(captured=True, transfer_ms=0.3),
        row(captured=True, transport="shm", transfer_ms=0.2),
        row(transport="tcp", transfer_ms=0.01),  # eager
        row(captured=True, transport="tcp", delay_ms=5.0, transfer_ms=0.01),
        row(captured=True, transport="tcp", payload="actor", transfer_ms=0.01),
    ]
    check = fastest_is_used(rows, "p2p", captured=True)
    assert check.detail == "p2p is used; the critics' gradient takes 0.2 ms by shm, 0.3 ms by p2p"
    assert (check.passed, check.required) == (False, False)
    assert fastest_is_used(rows, "shm", captured=True).passed
    assert not fastest_is_used([], "p2p", captured=True).passed


def test_known_sums_are_known() -> None:
    """Element 1025 of rank 2 in turn 5 is 1 + 2 + 5; over three ranks 3 (1 + 5) + 0 + 1 + 2 = 21."""
    sums, values = KnownSums(2000, 2, 3, CPU), torch.zeros(2000)
    sums.fill(values, 5)
    assert [float(values[k]) for k in (0, 1, 1023, 1025)] == [7, 8, 1030, 8]
    total = sum(torch.arange(2000) % 1024 + rank + 5 for rank in range(3)).float()
    assert total[1025] == 21
    assert sums.wrong(total.clone(), 5) == 0
    assert sums.wrong(total.clone(), 6) == 2000  # those of another turn
    total[[3, 1999]] += torch.tensor([1, float("nan")])
    assert sums.wrong(total, 5) == 2


def test_every_copy_of_a_payload_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def reduce(values: torch.Tensor) -> None:
        calls.append(values)
        values.mul_(2).add_(1 + (len(calls) == 3))  # rank 1 has one more than rank 0, here

    monkeypatch.setattr(torch.distributed, "all_reduce", reduce)
    payload = Payload(5, 3, Seat(0, 2, "gloo", "", "", {}), CPU)
    payload.fill(1)
    payload.run()
    assert payload.wrong(1) == 5
    assert len({values.data_ptr() for values in calls}) == 3


@pytest.mark.parametrize("probe", ["communication", "nccl-capture"])
def test_one_rank_has_nothing_to_say(probe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([probe, "--smoke", "--world-size", "1"]) == 2
    assert capsys.readouterr().err == f"probe: {probe} is about data between ranks; --world-size must be at least 2\n"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.timeout(300)
def test_over_nccl_values_are_right_eager_and_captured(tmp_path: Path) -> None:
    assert main(["communication", "--output", str(tmp_path / "found")]) == 0
    found = json.loads((tmp_path / "found").read_text())
    assert {(row["payload"], row["captured"]) for row in found["measurements"]} >= {("critic", True), ("critic", False)}
