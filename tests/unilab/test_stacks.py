"""Entry points of the trainer print their stacks on demand and go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unilab.channel import Pipe
from unilab.names import MANIFEST_FILE, STACKS_SIGNAL

SMOKE = (
    "training.smoke=true training.no_play=true algo.num_envs=2 algo.batch_size=2 algo.updates_per_step=2 "
    "algo.learning_starts=1 algo.replay_buffer_n=4 algo.actor_hidden_dim=4 algo.critic_hidden_dim=4 algo.num_atoms=3"
)


def ask_until(text: str, path: Path, process: subprocess.Popen[bytes]) -> None:
    """Ask for stacks until they hold `text`: the first may come before the process is where it waits."""
    deadline = time.monotonic() + 60
    while text not in path.read_text():
        assert process.poll() is None and time.monotonic() < deadline, path.read_text()
        process.send_signal(signal.Signals[STACKS_SIGNAL])
        time.sleep(0.2)


def caught(pid: int) -> bool:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(line.split()[1], 16) >> (signal.Signals[STACKS_SIGNAL] - 1) & 1)


def await_handler(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not caught(process.pid):
        assert process.poll() is None and time.monotonic() < deadline, "no handler"
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_collector_that_waits_for_its_learner_names_where(tmp_path: Path) -> None:
    (to_child, from_here), (here, from_child) = os.pipe(), os.pipe()
    descriptors = ["--read-fd", str(to_child), "--write-fd", str(from_child), "--memory-fd", "0"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "unilab.collector", *descriptors],
            stdin=subprocess.DEVNULL,
            stderr=log,
            pass_fds=(to_child, from_child),
        )
    try:
        await_handler(process)
        ask_until("in receive", tmp_path / "log", process)
        ask_until("in main", tmp_path / "log", process)
        assert process.poll() is None
    finally:
        for descriptor in (to_child, from_child):
            os.close(descriptor)
        Pipe(here, from_here, "collector").close()  # the end of its learner ends it
        assert process.wait(timeout=30) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_training_run_prints_its_stacks_and_completes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unilab.train", "--algo", "sac", "--task", "g1_walk_flat", "--sim", "mujoco"]
    command += [*SMOKE.split(), "algo.max_iterations=200", f"training.log_dir={tmp_path / 'run'}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "run" / MANIFEST_FILE).exists():  # before the first tick
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.Signals[STACKS_SIGNAL])
        assert process.wait(timeout=100) == 0
    finally:
        process.kill()
    assert " in train\n" in (tmp_path / "log").read_text()
