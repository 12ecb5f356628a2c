"""A resumed run of two ranks, with gloo on the CPU: equal starts, streams of their own, one attempt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train import NAMES, SMALL, Run
from test_train_ranks import environment

from unilab.checkpoint import load_checkpoint
from unilab.streams import STREAMS, stream_seed
from unilab.train import main

RANK_PROGRAM = Path(__file__).resolve().parent / "rank_program.py"
FLASH = ["--algo", "flashsac", *NAMES[2:], *SMALL, "algo.learning_starts=4", "algo.updates_per_step=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank with FlashSAC, which has more state than SAC, in `run`."""
    folder = tmp_path_factory.mktemp("ranks")
    assert main([*FLASH, "algo.max_iterations=4", f"training.log_dir={folder / 'run'}"]) == 0
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    """How two ranks start from it."""
    command = [sys.executable, str(RANK_PROGRAM), "resume", str(folder), "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, "completed\n"), ended.stdout + ended.stderr
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def test_all_ranks_start_with_all_that_rank_0_restored(folder: Path, seen: list[dict[str, Any]]) -> None:
    """Weights, targets, optimizers, schedules, running statistics, reward scale and curriculum, bit for bit."""
    checkpoint = load_checkpoint(folder / "run")
    saved = checkpoint.content["state"]
    assert [rank["place"].tolist() for rank in seen] == [[checkpoint.iteration, checkpoint.env_steps]] * 2
    lasting = [name for name in saved if not name.startswith("random/")]
    assert {"critic/adamw_exp_avg", "actor/schedule_step", "actor/parameters", "reward_scale/mean"} <= set(lasting)
    for rank in seen:
        assert [name for name in lasting if not torch.equal(rank["start"][name], saved[name])] == []
    apart = [name for name in lasting if not torch.equal(seen[1]["fresh"][name], saved[name])]
    assert {"critic/adamw_exp_avg", "actor/schedule_step", "actor/parameters", "reward_scale/mean"} <= set(apart)


def test_streams_neither_repeat_nor_meet(folder: Path, seen: list[dict[str, Any]]) -> None:
    """Rank 0's are restored; rank 1's begin where no stream began before."""
    saved = load_checkpoint(folder / "run").content["state"]
    draws = []
    for stream in STREAMS:
        name = f"random/{stream}"
        assert torch.equal(seen[0]["start"][name], saved[name])
        generator = torch.Generator()
        assert torch.equal(seen[1]["start"][name], generator.manual_seed(stream_seed(1, stream, 1, 4)).get_state())
        for state in (seen[0]["start"][name], seen[1]["start"][name], seen[1]["fresh"][name]):
            generator.set_state(state)
            draws.append(tuple(torch.rand(4, generator=generator).tolist()))
    assert len(set(draws)) == 3 * len(STREAMS)


def test_seeds_of_ranks_streams_and_places_differ() -> None:
    seeds = [stream_seed(1, stream, rank, at) for stream in STREAMS for rank in range(3) for at in (0, 4, 5)]
    assert len(set(seeds)) == len(seeds)


def test_two_ranks_go_on_with_the_run_of_one(folder: Path) -> None:
    arguments = [*FLASH, "algo.max_iterations=6", "algo.resume=true", f"algo.load_run={folder / 'run'}"]
    ended = subprocess.run(
        [sys.executable, "-m", "unilab.train", *arguments],
        env=environment(CUDA_VISIBLE_DEVICES="0,1"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("RESUMED from ") == 1
    assert "changed since then: ranks=2 (1), algo.max_iterations=6 (4)\n" in ended.stdout
    run = Run(folder / "run" / "attempt-002")
    before = load_checkpoint(folder / "run", 4).content["env_steps"]
    assert [event.step for event in run.events] == [before + 16 * 4, before + 16 * 5]  # the fourth tick is the first
    assert (run.end["iterations"], run.end["final_env_steps"]) == (6, before + 16 * 5)
    assert run.checkpoint(6)["state"]["critic/schedule_step"] == 2 * 6
