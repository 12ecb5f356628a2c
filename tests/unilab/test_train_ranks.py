"""The train command with two ranks, on the CPU: what it leaves behind, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from test_train import NAMES, SMALL, Run

from unilab import train
from unilab.names import BACKEND_MS, INVALID_ROWS, ITERATION_TIME, LEARNING_TIME, TOTAL_FPS, rank_tag
from unilab.physics.pinning import LINUX, allowed_cpus
from unilab.rank_processes import RankFailed
from unilab.ranks import Ranks
from unilab.run_dir import RunDirectory

LIMIT = 10.0  # seconds from a failure to the end of everything
PROGRAM = ["-m", "unilab.train", *NAMES, *SMALL]
ROOT = Path(__file__).resolve().parents[2]


def environment(**variables: str) -> dict[str, str]:
    """Two opaque entries, which smoke mode counts and never opens."""
    inherited = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    return {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


def finished(command: list[str], folder: Path, **variables: str) -> Run:
    """A run to its end, in a generated directory."""
    ended = subprocess.run(
        [sys.executable, *command, f"training.log_root={folder}"],
        env=environment(**variables),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 0, ended.stderr
    (path,) = (folder / "G1WalkFlat").iterdir()
    return Run(path, ended.returncode, ended.stdout, ended.stderr)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(PROGRAM, tmp_path_factory.mktemp("two"), CUDA_VISIBLE_DEVICES="GPU-5f5b, MIG-7/1/0")


def test_one_directory_with_the_files_of_one_run(run: Run) -> None:
    assert run.path.name.endswith("_gpux2")
    expected = {"config.json", "command.json", "manifest.json", "progress.jsonl", "run_end.json"}
    assert run.names == expected | {"events", "model_15.pt"}
    assert "2 ranks\n" in run.out and run.err == ""


def test_the_manifest_names_every_rank_and_how_they_learn_together(run: Run) -> None:
    manifest = run.json("manifest.json")
    assert [rank["rank"] for rank in manifest["ranks"]] == [0, 1]
    assert [rank["collector_backend_device"] for rank in manifest["ranks"]] == ["cpu", "cpu"]
    pools = [rank["cpu_ids"] for rank in manifest["ranks"]]
    assert all(pools) and not set(pools[0]) & set(pools[1])
    assert [[cpu for _, cpu in rank["placement"]] for rank in manifest["ranks"]] == pools
    assert [rank["workers"] for rank in manifest["ranks"]] == [len(pool) for pool in pools]
    threads = [{thread for thread, _ in rank["placement"]} for rank in manifest["ranks"]]
    assert not threads[0] & threads[1]
    first = {name: manifest["ranks"][0][name] for name in ("workers", "placement")}
    assert first.items() <= manifest["physics"].items()
    assert manifest["dp_sync"] == {
        "world_size": 2,
        "backend": "gloo",
        "mode": "gradient_mean_per_optimizer_step",
        "gradient_collectives_per_iteration": 10,
        "cuda_graph_optimizer_capture": None,
        "cuda_graph_collective_warmup": True,
        "transport": "none",
        "transport_reason": "ranks on the CPU do not use NCCL",
        "transport_timings": [],
    }
    assert run.json("command.json")["environment"]["CUDA_VISIBLE_DEVICES"] == "GPU-5f5b, MIG-7/1/0"


def test_steps_and_rates_are_those_of_all_ranks(run: Run) -> None:
    """Sixteen env steps a tick; the rates of both ranks together, which take their ticks side by side."""
    steps = [event.step for event in run.events]
    assert [later - earlier for earlier, later in pairwise(steps)] == [16] * 14
    assert run.end["final_env_steps"] == steps[-1] == run.checkpoint(15)["env_steps"]
    for record, line in zip(run.scalars, run.progress, strict=True):
        assert record[INVALID_ROWS] == 0
        # The mean of two rates is at least the rate of the mean time, and never above it by much.
        assert 0.99 < record[TOTAL_FPS] * record[ITERATION_TIME] / 16 < 2
        assert line["physics_s"] == pytest.approx(record[BACKEND_MS] / 1e3, rel=1e-6)


def test_every_rank_keeps_its_own_times(run: Run) -> None:
    """Both ranks' values give those of the run; the update's time comes one record later."""
    for number, record in enumerate(run.scalars):
        for tag, combine in ((TOTAL_FPS, sum), (ITERATION_TIME, fmean), (BACKEND_MS, fmean)):
            own = [record[rank_tag(tag, rank)] for rank in range(2)]
            assert min(own) > 0 and combine(own) == pytest.approx(record[tag], rel=1e-5)
        assert (rank_tag(LEARNING_TIME, 1) in record) == (number > 0)
    for before, record in pairwise(run.scalars):
        assert record[rank_tag(LEARNING_TIME, 0)] == before[LEARNING_TIME]


@pytest.mark.slow
@pytest.mark.skipif(not LINUX or len(allowed_cpus()) < 2, reason="pins two pools")
def test_ranks_of_torchrun_learn_the_same(run: Run, tmp_path: Path) -> None:
    """Rank by rank the same run, whoever starts them and wherever their physics runs."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    pools = [[allowed_cpus()[1]], [allowed_cpus()[0]]]
    other = finished([*launcher, *PROGRAM, f"training.dp_collector_cpu_ids={pools}"], tmp_path)
    assert [rank["cpu_ids"] for rank in other.json("manifest.json")["ranks"]] == pools
    ours, theirs = (each.checkpoint(15)["state"] for each in (run, other))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert other.json("manifest.json")["dp_sync"] == run.json("manifest.json")["dp_sync"]
    assert other.path.name.endswith("_gpux2")


@pytest.mark.parametrize(("launched", "message"), [(False, "^$"), (True, "^SIGTERM, which a launcher sends when")])
def test_a_termination_under_a_launcher_says_where_to_look(launched: bool, message: str) -> None:
    with pytest.raises(KeyboardInterrupt, match=message), train._terminations(Ranks(0, 2, launched=launched)):
        signal.raise_signal(signal.SIGTERM)


Start = Callable[[], tuple[subprocess.Popen[str], list[psutil.Process]]]


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Start]:
    """Starts a run that would go on for hours; rank 0 and all processes below it, once it trains."""
    processes: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], list[psutil.Process]]:
        overrides = ["algo.max_iterations=1000000", f"training.log_dir={tmp_path / 'run'}"]
        rank_0 = subprocess.Popen(
            [sys.executable, *PROGRAM, *overrides],
            env=environment(CUDA_VISIBLE_DEVICES="0,1"),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(rank_0)
        progress, deadline = tmp_path / "run" / "progress.jsonl", time.monotonic() + 90
        while not (progress.exists() and progress.stat().st_size):
            assert rank_0.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        return rank_0, psutil.Process(rank_0.pid).children(recursive=True)

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def below(processes: list[psutil.Process], module: str, parent: int | None = None) -> psutil.Process:
    """The process that runs a module."""
    (found,) = [process for process in processes if module in process.cmdline() and parent in (None, process.ppid())]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "message"),
    [
        ("collector of rank 1", "rank 1 failed: CollectorFailed: the collector was killed by SIGKILL"),
        ("collector of rank 0", "the collector was killed by SIGKILL"),
    ],
)
def test_any_death_ends_everything_with_one_message(endless: Start, tmp_path: Path, victim: str, message: str) -> None:
    rank_0, processes = endless()
    assert len(processes) == 3
    rank_1 = below(processes, "unilab.rank")
    killed = {
        "collector of rank 1": below(processes, "unilab.collector", rank_1.pid),
        "collector of rank 0": below(processes, "unilab.collector", rank_0.pid),
    }
    killed[victim].kill()
    began = time.monotonic()
    _, err = rank_0.communicate(timeout=60)
    assert time.monotonic() - began < LIMIT
    assert rank_0.returncode == 1
    last = err.splitlines()[-1]
    assert last.startswith(f"train: the run failed: {message}") and err.count("train: ") == 1
    _, alive = psutil.wait_procs(processes, timeout=LIMIT)
    assert not alive
    run = Run(tmp_path / "run")
    assert run.end["status"] == "failed" and run.end["exception"]["message"].startswith(message)
    assert ".ranks" not in run.names


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), "interrupted"), (RankFailed("rank 1 failed"), "failed")]
)
def test_the_end_of_a_rank_0_that_hangs_says_why(tmp_path: Path, error: BaseException, status: str) -> None:
    nothing: Any = SimpleNamespace(count=3)
    train._Run(nothing, RunDirectory(tmp_path), nothing, None, 0.0).write_last_words(error)
    end = Run(tmp_path).end
    assert (end["status"], end["exception"]) == (status, {"type": type(error).__name__, "message": str(error)})


@pytest.mark.slow
def test_a_killed_rank_0_leaves_nothing_running(endless: Start) -> None:
    rank_0, processes = endless()
    rank_0.kill()
    began = time.monotonic()
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
        assert time.monotonic() - began < LIMIT
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["", "unilab.rank"], ids=["in_order", "while_another_does_not_progress"])
def test_an_interrupt_ends_all_ranks(endless: Start, tmp_path: Path, stopped: str) -> None:
    rank_0, processes = endless()
    if stopped:
        below(processes, stopped).suspend()
        time.sleep(0.5)  # rank 0 waits in a collective
    rank_0.send_signal(signal.SIGTERM)
    _, err = rank_0.communicate(timeout=LIMIT)
    assert (rank_0.returncode, err) == (130, f"interrupted; what was written stays in {tmp_path / 'run'}\n")
    _, alive = psutil.wait_procs(processes, timeout=LIMIT)
    assert not alive
    assert Run(tmp_path / "run").end["status"] == "interrupted"
