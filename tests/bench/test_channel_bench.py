"""Micro-benchmarks of what stands between collector and learner, and of what the learner's host thread hands away."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from unilab.event_log import Clock, EventLog, Record
from unilab.physics.process import CollectorProcess
from unilab.physics.spec import RESET
from unilab.tasks.g1_walk_flat import G1WalkFlat, G1WalkFlatConfig, G1WalkFlatRewards

CPU = torch.device("cpu")
ENVS = 1  # so that the signals weigh, not physics
RECORDS, TAGS = 100, 40


@pytest.fixture
def collector() -> Iterator[CollectorProcess]:
    task = G1WalkFlat(G1WalkFlatConfig(), G1WalkFlatRewards(), ENVS, CPU, "exact")
    process = CollectorProcess(task.spec, ENVS, None)
    reset = task.reset_rows(torch.full((ENVS, task.uniform_width), 0.5))
    process.channel.reset_rows[:] = reset.numpy()
    process.channel.codes[:] = RESET
    yield process
    process.close()


def test_channel_round_trip(benchmark: Any, collector: CollectorProcess) -> None:
    """Command out, one control step of one robot from its reset, its rows here, slot given back."""
    ticks = count()

    def tick() -> None:
        number = next(ticks)
        collector.command(number)
        collector.wait(number)
        collector.channel.release(number)

    benchmark(tick)


def test_writing_events(benchmark: Any, tmp_path: Path) -> None:
    """A hundred records of forty tags, on the disk."""
    scalars = {f"Perf/tag_{index}": float(index) for index in range(TAGS)}
    folders = count()

    def write() -> None:
        folder = tmp_path / f"{next(folders)}"
        folder.mkdir()
        log = EventLog(folder, Clock.start())
        for iteration in range(1, RECORDS + 1):
            log.write(Record(iteration, 2048 * iteration, 100.0 + iteration, 0.0, scalars))
        log.close()

    benchmark(write)
