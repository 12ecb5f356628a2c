"""What ranks do in `test_resume_ranks.py`: rank 0 brings a checkpoint, and each writes down how it starts."""

from __future__ import annotations

from pathlib import Path

import torch

from unilab.algorithm import LATEST
from unilab.checkpoint import load_checkpoint, load_config_file
from unilab.data_parallel import DataParallel
from unilab.runner import Runner

CPU = torch.device("cpu")


def start(rank: int, world_size: int, store: Path, out: Path) -> None:
    """The state of a rank that is about to fill its ring, and what its streams draw first."""
    torch.set_num_threads(1)
    ranks = DataParallel.join(rank, world_size, CPU, store)
    config = load_config_file(out / "run")
    checkpoint = None if rank else load_checkpoint(out / "run", int(LATEST))
    with Runner(config, config.build_task(config.algo.num_envs, CPU), CPU, None, ranks, checkpoint) as runner:
        fresh = runner.registry.snapshot()
        runner._start_equal()
        place = torch.tensor([runner.iteration, runner.env_steps])
        seen = {"fresh": fresh, "start": runner.registry.snapshot(), "place": place}
    torch.save(seen, out / f"rank{rank}.pt")
