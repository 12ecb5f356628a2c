"""How fast gradients travel between ranks, over every transport, and how waiting for a late rank is told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from unilab.config import load_config
from unilab.environment import Environment
from unilab.probes.communication_rank import check_name
from unilab.probes.findings import Check, join_parts
from unilab.probes.rank import ERROR, find_raised
from unilab.probes.setting import Run, Setting
from unilab.rank_statistics import BESIDE_METRICS
from unilab.state import StateRegistry
from unilab.transport import FORMS, WORDS, logging_environment, other_transport

PROGRAM = "unilab.probes.communication_rank"
SECONDS = 45.0  # limit of one transport
SMOKE_SECONDS = 60.0  # the same on CPUs that others use too
PEAK_ELEMENTS = 2**24  # 64 MiB, where bandwidth no longer depends on size
DELAYED = "critic"  # the payload before which one rank comes late; also the one that transports are compared by
COPIES = 10  # all-reduces in one graph
TOLERANCE = 0.2  # of the delay, by which waiting may rise by more or less
SPILL = 0.05  # of the delay, that may be found in the transfer
NOISE = 0.5  # of the transfer, by which it differs from one measurement to the next


def run(setting: Setting) -> tuple[list[Check], list[dict[str, Any]]]:
    """Measure the transport that training uses, then each other one forced; only the first decides."""
    on_gpu = setting.backend == "nccl"
    seconds = SECONDS if on_gpu else SMOKE_SECONDS
    payloads = payload_elements(len(setting.entries))
    options = {
        "payloads": payloads,
        "delayed": DELAYED,
        "delay_ms": 20.0 if on_gpu else 50.0,
        "copies": COPIES,
        "repeats": 50 if on_gpu else 10,
        "replays": 20,
        "seconds": seconds,
    }
    checks: list[Check] = []
    rows: list[dict[str, Any]] = []
    logged = replace(setting, environment=logging_environment(setting.environment))
    transports = transports_to_try(setting)
    used = next(iter(transports))
    for name, variables in transports.items():
        trial = logged.run(PROGRAM, options, seconds, variables)
        found = _check(name, trial, expected_checks(payloads, on_gpu), required=name == used)
        checks += found
        if all(check.passed for check in found if check.name == f"carried_by_{name}"):
            rows += join_rows(name, trial)
    checks += [told_apart(rows, used), fastest_is_used(rows, used, captured=on_gpu)]
    return checks, rows


def payload_elements(world_size: int) -> dict[str, int]:
    """Float32 values of every all-reduce: those of training by the default configuration, the smallest and a large one.

    Returns:
        `latency`; `statistics`, the rows of all ranks; `actor` and `critic`, their gradients and losses, the latter
        with the temperature's; `peak`.
    """
    config = load_config("sac", "g1_walk_flat", "mujoco", [])
    cpu, registry = torch.device("cpu"), StateRegistry()
    task = config.build_task(1, cpu)
    environment = Environment(task, 1, cpu, torch.Generator(), registry)
    learner = config.algo.build_learner((task.obs_dim, task.critic_dim, task.action_dim), cpu, False, registry)
    row = len(learner.metrics) + len(environment.metrics()) + BESIDE_METRICS
    return {
        "latency": 1,
        "statistics": world_size * row,
        "actor": learner.groups["actor"].wire.numel(),
        "critic": learner.groups["critic"].wire.numel() + learner.groups["temperature"].wire.numel(),
        "peak": PEAK_ELEMENTS,
    }


def transports_to_try(setting: Setting) -> dict[str, dict[str, str]]:
    """Variables of every run: first those that training would use, by name, then the others, forced."""
    if setting.backend != "nccl":
        return {"gloo": {}}
    given = setting.environment.items()
    used = next((name for name, form in FORMS.items() if form.items() <= given), "explicit")
    return {used: {}} | {name: form for name, form in FORMS.items() if name != used}


def expected_checks(payloads: Mapping[str, int], captured: bool) -> list[str]:
    """Names of all checks of values that every rank makes, in order."""
    names = [check_name(name, False, late) for name in payloads for late in (False, True)[: 1 + (name == DELAYED)]]
    return names + [check_name(name, True, False) for name in payloads if captured]


def _check(name: str, trial: Run, expected: Sequence[str], required: bool) -> list[Check]:
    """How a transport did: that it ended, that values were right, and, where NCCL told, that it was used at all."""
    raised, ended = find_raised(trial.parts), trial.fault is None
    detail = f"after {trial.seconds:.1f} s" if ended else str(trial.fault)
    if raised is not None:
        detail += f"; {raised.facts[ERROR]}"
    checks = [Check(f"ended_{name}", ended, detail, required), _check_values(name, trial, expected, required)]
    if name in WORDS:
        other = other_transport(name, trial.logs)
        checks.append(Check(f"carried_by_{name}", other is None, other or "as its log says, if it says so", False))
    return checks


def _check_values(name: str, trial: Run, expected: Sequence[str], required: bool) -> Check:
    found = {check.name: check for check in join_parts(trial.parts)}
    wrong = [f"{check.name}: {check.detail}" for check in found.values() if not check.passed]
    absent = [part for part in expected if part not in found]
    if absent:
        wrong.append(f"did not come to {', '.join(absent)}")
    right = f"every value of {', '.join(expected)}"
    return Check(f"values_correct_{name}", not wrong, "; ".join(wrong) or right, required)


def join_rows(name: str, trial: Run) -> list[dict[str, Any]]:
    """Rank 0's measurements that every rank made, with the delay that another rank had."""
    return [
        {"transport": name, **rows[0], "delay_ms": max(row["delay_ms"] for row in rows)}
        for rows in zip(*(part.measurements for part in trial.parts), strict=False)
    ]


def told_apart(rows: Sequence[Mapping[str, Any]], used: str) -> Check:
    """Whether a rank's delay is in the time the other one waits, and not in that of the transfer."""
    name = "waiting_told_apart"
    found = [row for row in rows if (row["transport"], row["payload"], row["captured"]) == (used, DELAYED, False)]
    if len(found) < 2:
        return Check(name, False, f"{used} was not measured with and without a delay", required=False)
    plain, late = found
    delay, waiting, transfer = late["delay_ms"], late["waiting_ms"], late["transfer_ms"]
    waits = abs(waiting - plain["waiting_ms"] - delay) <= TOLERANCE * delay
    stays = abs(transfer - plain["transfer_ms"]) <= NOISE * plain["transfer_ms"] + SPILL * delay
    detail = (
        f"one rank {delay:.3g} ms late: waiting {plain['waiting_ms']:.3g} → {waiting:.3g} ms, "
        f"transfer {plain['transfer_ms']:.3g} → {transfer:.3g} ms"
    )
    return Check(name, waits and stays, detail, required=False)


def fastest_is_used(rows: Sequence[Mapping[str, Any]], used: str, captured: bool) -> Check:
    """Whether no transport carries the critics' gradient in less time than the one that training uses."""
    times = {
        row["transport"]: row["transfer_ms"]
        for row in rows
        if row["payload"] == DELAYED and row["captured"] == captured and not row["delay_ms"]
    }
    detail = f"{used} is used; the {DELAYED}s' gradient takes " + (
        ", ".join(f"{time:.3g} ms by {name}" for name, time in sorted(times.items(), key=lambda item: item[1]))
        or "an unknown time"
    )
    return Check("fastest_is_used", bool(times) and min(times, key=times.__getitem__) == used, detail, required=False)
