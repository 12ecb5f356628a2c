"""Micro-benchmarks of the learner: the ring and the update cycle, small on the CPU, at the task's own sizes on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from unilab.config import load_config
from unilab.phases import transition_widths
from unilab.replay import ReplayRing
from unilab.state import StateRegistry
from unilab.synthetic import SyntheticRank

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
WIDTHS = transition_widths(98, 101, 29)
ENVS, ROWS = 2048, 4096
SMALL = [
    *("algo.num_envs=32", "algo.batch_size=64", "algo.replay_buffer_n=64"),
    *("algo.actor_hidden_dim=64", "algo.critic_hidden_dim=64"),
]
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return CUDA if request.param == "cuda" else CPU


@pytest.fixture
def stream() -> Iterator[None]:
    with torch.cuda.stream(torch.cuda.Stream() if torch.cuda.is_available() else None):
        yield


def finished(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The function, over only when the device is done with it."""

    def wait() -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return wait


def test_append_and_gather(benchmark: Any, device: torch.device) -> None:
    """One transition of 2048 environments into the ring, 4096 rows out of it."""
    ring = ReplayRing(16 * ENVS, WIDTHS, device, StateRegistry())
    parts = {name: torch.rand((ENVS, width) if width else (ENVS,), device=device) for name, width in WIDTHS.items()}
    valid = torch.rand(ENVS, device=device) < 0.99
    draws, out = torch.randint(2**40, (ROWS,), device=device), torch.zeros(ROWS, ring.width, device=device)

    def both() -> None:
        ring.append(parts, valid)
        ring.gather(draws, out)

    benchmark(finished(both, device))


@pytest.mark.usefixtures("stream")
@pytest.mark.filterwarnings("default")  # libraries of the device may warn
def test_update_cycle(benchmark: Any, device: torch.device) -> None:
    """Eight updates: eager and small on the CPU, one CUDA graph at the task's own sizes on a GPU; not compiled."""
    sizes = SMALL if device.type == "cpu" else []
    rank = SyntheticRank(load_config("sac", "g1_walk_flat", "mujoco", sizes), device, compiled=False)
    if device.type == "cuda":
        rank.update.capture(rank.registry)
    benchmark(finished(rank.update, device))
    rank.update.release()
