"""Micro-benchmarks of what a tick is made of, at the task's own size where one core allows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from repro.events import read_events
from unilab.environment import Environment
from unilab.event_log import Clock, EventLog, Record
from unilab.physics.mujoco_pool import MujocoPool
from unilab.physics.spec import KEEP, RESET
from unilab.state import StateRegistry
from unilab.tasks.g1_walk_flat import G1WalkFlat, G1WalkFlatConfig, G1WalkFlatRewards

ENVS = 2048
STEPPED_ENVS = 64  # a physics step of 2048 environments takes half a second on one core
CPU = torch.device("cpu")


def make_task(num_envs: int) -> G1WalkFlat:
    return G1WalkFlat(G1WalkFlatConfig(), G1WalkFlatRewards(), num_envs, CPU, "exact")


def make_environment(num_envs: int) -> Environment:
    environment = Environment(make_task(num_envs), num_envs, CPU, torch.Generator(), StateRegistry())
    environment.begin()
    environment.control(torch.zeros(num_envs, environment.task.action_dim))
    return environment


def started_pool(num_envs: int) -> tuple[MujocoPool, Environment]:
    environment = make_environment(num_envs)
    pool = MujocoPool(environment.task.spec, num_envs, None)
    pool.apply(environment.ctrl.numpy(), environment.codes.numpy(), environment.reset_rows.numpy())
    return pool, environment


def test_apply_with_48_resets(benchmark: Any) -> None:
    pool, environment = started_pool(ENVS)
    codes = np.full(ENVS, KEEP, np.int32)
    codes[:: ENVS // 48] = RESET
    benchmark(pool.apply, environment.ctrl.numpy(), codes, environment.reset_rows.numpy())


def test_pack(benchmark: Any) -> None:
    pool, environment = started_pool(ENVS)
    benchmark(pool.pack, environment.fields.numpy())


def test_control_step(benchmark: Any) -> None:
    pool, _ = started_pool(STEPPED_ENVS)
    benchmark(pool.step)


def test_task_logic(benchmark: Any) -> None:
    environment = make_environment(ENVS)
    environment.fields.copy_(environment.task.idle_row)

    def tick() -> None:
        environment.draw()
        environment.complete()
        environment.restart(environment.finished)
        environment.control(environment.actions)

    benchmark(tick)


def test_reading_events(benchmark: Any, tmp_path: Path) -> None:
    log = EventLog(tmp_path, Clock.start())
    for iteration in range(1, 201):
        scalars = {f"Perf/tag_{index}": float(iteration) for index in range(40)}
        log.write(Record(iteration, 2048 * iteration, 100.0 + iteration, 0.0, scalars))
    log.close()
    assert len(benchmark(read_events, tmp_path).scalars) == 40
