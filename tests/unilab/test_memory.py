"""Host memory of both processes stays flat, iteration after iteration."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 8 * 2**20  # bytes; a leak of 1 kB in each of 8,000 iterations
# The trainer as it is; at two iterations the resident memory of the learner and of its child is noted.
PROGRAM = """
import json, os, sys
import psutil
from unilab.terminal import TerminalView
from unilab.train import main

marks, leak = json.loads(sys.argv[1]), int(sys.argv[2])
found, kept, update = [], [], TerminalView.update

def noting(self, iteration, scalars):
    update(self, iteration, scalars)
    kept.append(os.urandom(leak))
    if iteration in marks:
        own = psutil.Process()
        # One that a compiler left may be dead.
        alive = [child for child in own.children() if child.status() != psutil.STATUS_ZOMBIE]
        found.append([process.memory_info().rss for process in (own, *alive)])

TerminalView.update = noting
code = main(sys.argv[3:])
print(json.dumps(found))
sys.exit(code)
"""
SMALL = [
    *("--algo", "sac", "--task", "g1_walk_flat", "--sim", "mujoco", "training.no_play=true", "algo.save_interval=-1"),
    *("algo.batch_size=16", "algo.actor_hidden_dim=8", "algo.critic_hidden_dim=8", "algo.num_atoms=5"),
    "algo.updates_per_step=1",
    "algo.replay_buffer_n=16",  # the ring's pages are all touched before the first mark
]
ON_THE_CPU = ["training.smoke=true", "algo.num_envs=4"]


def growth(tmp_path: Path, begin: int, end: int, *overrides: str, leak: int = 0) -> list[int]:
    """Bytes by which learner and collector grow between two iterations of one run."""
    after_the_last = end + 20  # the collector of a run's last iteration may be gone
    settings = [f"algo.max_iterations={after_the_last}", f"training.log_dir={tmp_path / 'run'}", *overrides]
    command = [sys.executable, "-c", PROGRAM, json.dumps([begin, end]), str(leak), *SMALL, *settings]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    before, after = json.loads(result.stdout.splitlines()[-1])
    assert len(before) == len(after) == 2, "one collector"
    return [b - a for a, b in zip(before, after, strict=True)]


def test_memory_is_flat_over_two_hundred_iterations(tmp_path: Path) -> None:
    assert max(growth(tmp_path, 100, 300, *ON_THE_CPU)) < LIMIT


def test_a_leak_would_be_seen(tmp_path: Path) -> None:
    learner, collector = growth(tmp_path, 30, 80, *ON_THE_CPU, leak=LIMIT // 40)
    assert learner > LIMIT > collector


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(900)
def test_memory_is_flat_over_ten_thousand_iterations_of_64_environments(tmp_path: Path) -> None:
    assert max(growth(tmp_path, 2000, 10_000, "algo.num_envs=64")) < LIMIT
