"""The train command end to end: what it refuses, what a run leaves behind, and how a run ends."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from unilab import config as config_module
from unilab import runner as runner_module
from unilab import terminal as terminal_module
from unilab.event_log import EventLog
from unilab.exchange import DeviceExchange
from unilab.run_dir import RunDirectory
from unilab.runner import Runner
from unilab.scripts import train_sac
from unilab.train import main

NAMES = ["--algo", "sac", "--task", "g1_walk_flat", "--sim", "mujoco"]
SMALL = [
    "training.smoke=true",
    "training.no_play=true",
    "algo.actor_hidden_dim=16",
    "algo.critic_hidden_dim=16",
    "algo.num_envs=8",
    "algo.batch_size=32",
    "algo.num_atoms=11",
    "algo.max_iterations=15",
]
POOLS = "training.dp_collector_cpu_ids"
CPUS = sorted(os.sched_getaffinity(0))
FILES = {"config.json", "command.json", "manifest.json", "progress.jsonl", "run_end.json"}


@dataclass(frozen=True)
class Run:
    """A run directory as its readers see it."""

    path: Path
    code: int = 0
    out: str = ""
    err: str = ""

    def json(self, name: str) -> dict[str, Any]:
        """One of the JSON files."""
        loaded: dict[str, Any] = json.loads((self.path / name).read_text())
        assert loaded["schema_version"] == 1
        return loaded

    @property
    def end(self) -> dict[str, Any]:
        """Content of `run_end.json`."""
        return self.json("run_end.json")

    @property
    def names(self) -> set[str]:
        """File names, the event file as `events`."""
        return {"events" if path.name.startswith("events.out.tfevents.") else path.name for path in self.path.iterdir()}

    @property
    def events(self) -> list[Any]:
        """Summary records of the event file."""
        (path,) = self.path.glob("events.out.tfevents.*")
        first, *rest = LegacyEventFileLoader(str(path)).Load()
        assert first.file_version == "brain.Event:2"
        return list(rest)

    @property
    def scalars(self) -> list[dict[str, float]]:
        """Values by tag of every record."""
        return [{value.tag: value.simple_value for value in event.summary.value} for event in self.events]

    @property
    def progress(self) -> list[dict[str, Any]]:
        """Lines of `progress.jsonl`."""
        return [json.loads(line) for line in (self.path / "progress.jsonl").read_text().splitlines()]

    def checkpoint(self, iteration: int) -> dict[str, Any]:
        """A checkpoint, read as data only."""
        loaded: dict[str, Any] = torch.load(self.path / f"model_{iteration}.pt", weights_only=True)
        return loaded


@pytest.fixture(autouse=True)
def _private_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty working folder; handlers of this process as they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
    children = psutil.Process().children()
    yield
    assert signal.getsignal(signal.SIGTERM) == handlers[1]
    signal.signal(signal.SIGINT, handlers[0])
    assert psutil.Process().children() == children


@pytest.fixture
def train(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    """Trains in this process into `run` below the working folder."""

    def start(*overrides: str, name: str = "run") -> Run:
        code = main([*NAMES, *SMALL, f"training.log_dir={tmp_path / name}", *overrides])
        out, err = capfd.readouterr()
        return Run(tmp_path / name, code, out, err)

    return start


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One completed run on one physics thread, from a folder nobody can write to and under a renderer nobody has."""
    path, home = tmp_path_factory.mktemp("train") / "deep" / "run", Path.cwd()
    os.environ["MUJOCO_GL"] = "nonsense"
    os.chdir("/proc")
    try:
        code = main([*NAMES, *SMALL, f"training.log_dir={path}", f"env.cpu_ids=[{CPUS[0]}]", "algo.save_interval=0"])
    finally:
        os.chdir(home)
        os.environ.pop("MUJOCO_GL", None)
    return Run(path, code)


def at_iteration(monkeypatch: pytest.MonkeyPatch, iteration: int, act: Callable[[Runner], object]) -> None:
    """Let `act` happen inside the training loop when it reaches `iteration`."""
    original = Runner._checkpoint

    def checkpoint(self: Runner, tick: Any) -> None:
        if tick.iteration == iteration:
            act(self)
        original(self, tick)

    monkeypatch.setattr(Runner, "_checkpoint", checkpoint)


def assert_same(first: Any, second: Any, where: str = "") -> None:
    """Equality of checkpoints to the bit."""
    assert type(first) is type(second), where
    if isinstance(first, Mapping):
        assert list(first) == list(second), where
        for key in first:
            assert_same(first[key], second[key], f"{where}/{key}")
    elif isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype, where
        assert torch.equal(first, second), where
    else:
        assert first == second, where


def learning(run: Run) -> list[dict[str, float]]:
    """Everything logged that does not depend on how fast the host was."""
    return [{tag: value for tag, value in record.items() if not tag.startswith("Perf/")} for record in run.scalars]


# --- a completed run -------------------------------------------------------------------------------------------------


def test_a_completed_run_is_whole(run: Run) -> None:
    assert run.code == 0
    assert run.names == FILES | {"events", "model_15.pt"}
    end = run.end
    expected = {"status": "completed", "final_env_steps": 192, "iterations": 15, "event_count": 15, "exception": None}
    expected["artifacts"] = None  # of training.no_play=true
    assert {key: end[key] for key in expected} == expected
    assert set(end) == {*expected, "schema_version", "wall_seconds", "startup_seconds"}
    assert 0 < end["wall_seconds"] < 120
    assert end["startup_seconds"] > 0


def test_steps_begin_where_the_ring_is_full_and_times_only_grow(run: Run) -> None:
    steps, times = [event.step for event in run.events], [event.wall_time for event in run.events]
    assert steps == [80 + 8 * index for index in range(15)]  # 10 warm-up ticks of 8 environments
    assert all(second > first for first, second in pairwise(times))
    assert abs(times[-1] - time.time()) < 600


def test_progress_tells_what_the_events_tell(run: Run) -> None:
    lines, events = run.progress, run.events
    assert [line["iteration"] for line in lines] == list(range(1, 16))
    assert [line["env_steps"] for line in lines] == [event.step for event in events]
    offsets = [event.wall_time - line["monotonic_s"] for event, line in zip(events, lines, strict=True)]
    assert max(offsets) - min(offsets) < 1e-5
    for line, scalars in zip(lines, run.scalars, strict=True):
        physics, idle = 1e3 * line["physics_s"], scalars["Perf/exposed_ms"]
        assert scalars["Perf/physics_fraction"] == pytest.approx(physics / (physics + idle), rel=1e-5)
        assert idle == scalars["Perf/collector_learner_action_wait_ms"]
        assert physics == pytest.approx(scalars["Perf/collector_env_step_backend_ms"], rel=1e-5)


def test_the_pool_is_either_stepping_or_idle(run: Run) -> None:
    """The two are the pool's whole time: over the run they add up to the learner's clock."""
    later = zip(run.progress[1:], run.scalars[1:], strict=True)
    pool = sum(line["physics_s"] + scalars["Perf/exposed_ms"] / 1e3 for line, scalars in later)
    assert pool == pytest.approx(run.events[-1].wall_time - run.events[0].wall_time, rel=0.2)


def test_every_record_has_every_tag_and_only_finite_values(run: Run) -> None:
    scalars = run.scalars
    assert len({frozenset(record) for record in scalars}) == 1
    assert {
        "Perf/total_fps",
        "Perf/iteration_time",
        "Perf/learning_time",
        "Perf/physics_fraction",
        "Perf/exposed_ms",
        "Train/iteration",
        "Train/mean_reward",
        "Train/mean_episode_length",
        "Loss/critic",
        "Loss/actor",
    } <= set(scalars[0])
    assert all(math.isfinite(value) for record in scalars for value in record.values())
    assert [record["Train/iteration"] for record in scalars] == list(range(1, 16))
    for record, (before, after) in zip(scalars[1:], pairwise(run.events), strict=True):
        wall = after.wall_time - before.wall_time
        assert record["Perf/iteration_time"] == pytest.approx(wall, abs=1e-5)
        assert record["Perf/total_fps"] == pytest.approx(8 / wall, rel=1e-2)
        assert 0 < record["Perf/physics_fraction"] <= 1
        assert record["Perf/exposed_ms"] >= 0
        assert record["Perf/learning_time"] > 0
    assert len({record["Loss/critic"] for record in scalars}) == 15  # it learns


def test_the_configuration_of_the_run_is_written(run: Run) -> None:
    config = run.json("config.json")
    assert set(config) == {"schema_version", "algo", "training", "env", "reward"}
    algo = {"algo": "sac", "num_envs": 8, "batch_size": 32, "updates_per_step": 8, "policy_frequency": 4, "seed": 1}
    assert algo.items() <= config["algo"].items()
    assert (config["training"]["smoke"], config["training"]["task_name"]) == (True, "G1WalkFlat")
    assert (config["env"]["physics_profile"], config["env"]["cpu_ids"]) == ("exact", [CPUS[0]])


def test_the_command_and_the_manifest_are_written(run: Run) -> None:
    command, manifest = run.json("command.json"), run.json("manifest.json")
    assert command["argv"][: len(NAMES)] == NAMES
    assert set(command["git"]) == {"commit", "dirty", "diff_sha256"}
    assert len(command["source_sha256"]) == 64
    assert command["affinity"] == CPUS
    (rank,) = manifest["ranks"]
    assert (rank["rank"], rank["collector_backend_device"], rank["cpu_ids"]) == (0, "cpu", [CPUS[0]])
    assert (rank["gpu_uuid"], rank["gpu_name"]) == (None, None)
    assert manifest["dp_sync"]["world_size"] == 1
    physics = manifest["physics"]
    assert (physics["profile"], physics["decimation"], physics["workers"]) == ("exact", 3, 1)
    assert not psutil.pid_exists(physics["placement"][0][0])  # its first worker was the collector's main thread


def test_a_checkpoint_holds_the_networks_and_the_state(run: Run) -> None:
    checkpoint = run.checkpoint(15)
    assert {"actor", "critic", "critic_target", "log_alpha", "state"} <= set(checkpoint)
    assert (checkpoint["iteration"], checkpoint["env_steps"], checkpoint["algo"]) == (15, 192, "sac")
    assert (checkpoint["obs_dim"], checkpoint["critic_dim"], checkpoint["action_dim"]) == (98, 101, 29)
    assert {"random/environment", "random/exploration", "random/update"} <= set(checkpoint["state"])
    assert not [name for name in checkpoint["state"] if name.startswith(("replay/", "act/", "update/", "env/obs"))]
    assert any(weight.shape[0] == 16 for weight in checkpoint["actor"].values() if weight.dim())


# --- same seed, same run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_seed_is_the_same_run(run: Run, train: Callable[..., Run], threads: int) -> None:
    if threads > len(CPUS):
        pytest.skip("needs two CPUs")
    again = train(f"env.cpu_ids={json.dumps(CPUS[:threads], separators=(',', ':'))}", "algo.save_interval=0")
    assert again.code == 0
    assert len(again.json("manifest.json")["physics"]["placement"]) == threads
    assert learning(again) == learning(run)
    checkpoints = [found.checkpoint(15) for found in (again, run)]
    assert all(abs(checkpoint.pop("wall_time") - time.time()) < 600 for checkpoint in checkpoints)
    assert_same(*checkpoints)


def test_another_seed_is_another_run(run: Run, train: Callable[..., Run]) -> None:
    other = train("algo.seed=2", "algo.max_iterations=3", "algo.save_interval=0")
    assert other.code == 0
    assert [record["Loss/critic"] for record in other.scalars] != [record["Loss/critic"] for record in run.scalars[:3]]
    (weight, *_), (first, *_) = other.checkpoint(3)["actor"].values(), run.checkpoint(15)["actor"].values()
    assert not torch.allclose(weight, first, atol=1e-3)


# --- how much is written ---------------------------------------------------------------------------------------------


def test_checkpoints_and_records_at_intervals(train: Callable[..., Run]) -> None:
    found = train("algo.save_interval=6", "training.log_interval=7")
    assert found.code == 0
    assert found.names == FILES | {"events", "model_6.pt", "model_12.pt", "model_15.pt"}
    assert found.checkpoint(6)["iteration"] == 6
    assert [event.step for event in found.events] == [128, 184, 192]
    assert [line["iteration"] for line in found.progress] == [7, 14, 15]
    assert found.end["event_count"] == 3
    assert found.out.startswith("SMOKE: ")


def test_no_checkpoint_and_no_events_when_none_are_wanted(train: Callable[..., Run]) -> None:
    found = train("algo.save_interval=-1", "training.logger=none", "algo.max_iterations=3")
    assert found.code == 0
    assert found.names == FILES
    assert (found.end["event_count"], len(found.progress)) == (0, 3)


# --- evaluation and video afterwards ---------------------------------------------------------------------------------


def test_a_run_is_evaluated_and_recorded_before_its_end_is_written(train: Callable[..., Run], renderer: str) -> None:
    found = train(
        "training.no_play=false", "training.play_steps=1", "training.play_env_num=1", "training.export_onnx=false"
    )
    assert found.code == 0
    assert found.names == FILES | {"events", "model_15.pt", "eval.json", "play_video.mp4", "play_still.png"}
    assert found.end["artifacts"] == {"eval.json": "ok", "play_video.mp4": "ok"}
    assert found.json("eval.json")["checkpoint"]["iteration"] == 15
    written = {name: (found.path / name).stat().st_mtime for name in ("eval.json", "play_video.mp4", "run_end.json")}
    assert max(written, key=lambda name: written[name]) == "run_end.json"
    assert "64 episodes without noise" in found.out


@pytest.mark.parametrize("code", [1, 130])
def test_a_file_that_is_missing_afterwards_is_no_failure_of_training(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def late(*_: object) -> tuple[dict[str, str], int]:
        time.sleep(1.5)
        return {"eval.json": "ok", "play_video.mp4": "the disk: full"}, code

    monkeypatch.setattr("unilab.video.find_renderer", lambda: "egl")
    monkeypatch.setattr("unilab.eval.evaluate_trained", late)
    began = time.monotonic()
    found = train("training.no_play=false", "algo.max_iterations=3")
    assert found.code == code
    assert (found.end["status"], found.end["exception"]) == ("completed", None)
    assert found.end["artifacts"] == {"eval.json": "ok", "play_video.mp4": "the disk: full"}
    assert found.err == "train: the training is complete, but there is no play_video.mp4\n"
    assert found.end["wall_seconds"] < time.monotonic() - began - 1.5


def test_the_end_is_recorded_where_nobody_reads_what_is_printed(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> NoReturn:
        raise BrokenPipeError("Broken pipe")

    monkeypatch.setattr("unilab.video.find_renderer", lambda: "egl")
    monkeypatch.setattr("unilab.eval.evaluate_trained", broken)
    found = train("training.no_play=false", "algo.max_iterations=3")
    assert (found.code, found.end["status"]) == (1, "completed")
    assert found.end["artifacts"] == dict.fromkeys(("eval.json", "policy.onnx", "play_video.mp4"), "Broken pipe")


def test_an_end_that_cannot_be_written_is_one_line_and_a_failure(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunDirectory, "write_end", full)
    found = train("algo.max_iterations=2")
    assert (found.code, found.err) == (1, "train: run_end.json was not written: [Errno 28] No space left on device\n")


def test_two_interrupts_of_what_follows_training_leave_its_end_recorded(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> NoReturn:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)  # while what was begun is put away
        pytest.fail("nothing was interrupted")

    monkeypatch.setattr("unilab.video.find_renderer", lambda: "egl")
    monkeypatch.setattr("unilab.eval.evaluate_trained", interrupted)
    found = train("training.no_play=false", "algo.max_iterations=3")
    assert (found.code, found.end["status"], found.end["iterations"]) == (130, "completed", 3)
    assert found.end["artifacts"] == dict.fromkeys(("eval.json", "policy.onnx", "play_video.mp4"), "interrupted")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_no_run_begins_where_no_video_can_be_made(train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    found = train("training.no_play=false")
    assert (found.code, found.path.exists()) == (3, False)
    assert found.err.startswith("train: no video can be made here: MUJOCO_GL=nonsense does not draw (")
    assert found.err.endswith("; add training.no_play=true to go without\n")
    assert found.err.count("\n") == 1


def test_no_run_begins_that_leaves_nothing_to_evaluate(train: Callable[..., Run]) -> None:
    found = train("training.no_play=false", "algo.save_interval=-1")
    assert (found.code, found.path.exists()) == (2, False)
    assert found.err == (
        "train: algo.save_interval=-1 leaves no policy to evaluate; add training.no_play=true to go without\n"
    )


# --- how a run ends --------------------------------------------------------------------------------------------------


def assert_ended(found: Run, code: int, status: str, iterations: int) -> None:
    end = found.end
    assert (found.code, end["status"], end["iterations"]) == (code, status, iterations)
    assert end["event_count"] == len(found.events) == len(found.progress) == iterations - 1  # the last was in flight
    assert end["final_env_steps"] == 72 + 8 * iterations
    assert "model_15.pt" not in found.names
    assert not psutil.pid_exists(found.json("manifest.json")["physics"]["placement"][0][0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupt_ends_the_run_in_order(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    at_iteration(monkeypatch, 5, lambda _: signal.raise_signal(number))
    found = train()
    assert_ended(found, 130, "interrupted", 5)
    assert found.end["exception"]["type"] == "KeyboardInterrupt"
    assert found.err == f"interrupted; what was written stays in {found.path}\n"


def test_a_killed_collector_fails_the_run(train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    at_iteration(monkeypatch, 5, lambda runner: os.kill(runner._collector.pid, signal.SIGKILL))
    found = train()
    assert found.end["iterations"] in (5, 6)  # the tick it was killed in may have been answered
    assert_ended(found, 1, "failed", found.end["iterations"])
    assert found.end["exception"]["type"] == "CollectorFailed"
    assert "killed by SIGKILL" in found.end["exception"]["message"]
    assert found.err.splitlines()[-1].startswith("train: the run failed: the collector was killed by SIGKILL")


def test_a_log_that_cannot_be_written_fails_the_run(train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(runner: Runner) -> None:
        runner._log._progress.close()

    at_iteration(monkeypatch, 3, fail)
    found = train()
    assert (found.code, found.end["status"]) == (1, "failed")
    assert found.end["exception"] == {"type": "RuntimeError", "message": "writing the run's events failed"}


def test_a_log_that_fails_at_the_very_end_fails_the_run(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: EventLog) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("unilab.event_log.FLUSH_SECONDS", 600.0)
    monkeypatch.setattr(EventLog, "_flush", full)
    found = train("algo.max_iterations=2")
    assert (found.code, found.end["status"], found.end["iterations"]) == (1, "failed", 2)
    assert "No space left on device" in found.err


def test_a_runner_that_cannot_be_built_is_recorded(train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> Runner:
        raise RuntimeError(f"no luck in {Path.home()}/x")

    monkeypatch.setattr(runner_module, "Runner", build)
    found = train()
    assert found.code == 1
    assert found.names == FILES - {"manifest.json"} | {"events"}
    expected = {"status": "failed", "iterations": 0, "final_env_steps": 0, "event_count": 0, "startup_seconds": None}
    assert expected.items() <= found.end.items()
    assert found.end["exception"] == {"type": "RuntimeError", "message": "no luck in <home>/x"}


def test_a_collector_that_cannot_start_is_recorded(train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unilab.hardware.check_cpu_ids", lambda _: None)
    found = train("env.cpu_ids=[99999]")
    assert (found.code, found.end["status"]) == (1, "failed")
    assert found.end["exception"]["message"].startswith("the collector raised ValueError: env.cpu_ids=[99999]")


def test_an_exchange_that_cannot_be_built_leaves_no_collector(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange(*_: object) -> None:
        raise RuntimeError("registering failed")

    monkeypatch.setattr(runner_module, "DeviceExchange", exchange)
    found = train()  # the fixture looks for children
    assert (found.code, found.end["exception"]["message"]) == (1, "registering failed")


def test_a_device_that_fails_does_not_keep_the_collector(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(_: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(DeviceExchange, "close", close)
    found = train("algo.max_iterations=1")
    assert (found.code, found.end["status"]) == (1, "failed")


def test_a_reader_that_went_away_fails_the_run(train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> None:
        raise SystemExit(1)  # what rich makes of a broken pipe

    monkeypatch.setattr(Console, "print", gone)
    found = train()
    assert (found.code, found.end["status"], found.end["exception"]["type"]) == (1, "failed", "SystemExit")


def test_a_second_interrupt_does_not_lose_the_end(train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    original = RunDirectory.write_end

    def write_end(self: RunDirectory, facts: dict[str, Any]) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        original(self, facts)

    monkeypatch.setattr(RunDirectory, "write_end", write_end)
    at_iteration(monkeypatch, 2, lambda _: signal.raise_signal(signal.SIGINT))
    assert_ended(train(), 130, "interrupted", 2)


def test_another_run_in_the_same_folder_is_left_alone(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = RunDirectory.__init__

    def claimed(self: RunDirectory, path: Path) -> None:
        original(self, path)
        (path / "progress.jsonl").write_text("theirs\n")

    monkeypatch.setattr(RunDirectory, "__init__", claimed)
    found = train()
    assert found.code == 1
    assert found.names == {"progress.jsonl"}
    assert (found.path / "progress.jsonl").read_text() == "theirs\n"


def test_no_log_of_the_engine_appears(train: Callable[..., Run], tmp_path: Path) -> None:
    assert train("algo.max_iterations=1", "algo.save_interval=-1", "env.action_scale=1e6").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_on_a_terminal_there_is_a_table(train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        terminal_module, "Console", lambda **_: Console(file=screen, force_terminal=True, width=100, highlight=False)
    )
    assert train("algo.max_iterations=2").code == 0
    assert "sac · G1WalkFlat · SMOKE · iteration 2/2" in screen.getvalue()


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture
def bare_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without an accelerator."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 3, "training needs a CUDA or MPS device, found neither; .* add training.smoke=true"),
        (["training.smok=true"], 2, "unknown key 'training.smok', did you mean 'training.smoke'"),
        (["training.devices=0,1"], 2, r"for a list type training.devices=\[0,1\]"),
        (["training.log_root=a\nb"], 2, "cannot read 'training.log_root=a.*type 'training.log_root=\"a b\"'"),
        (["training.smoke=true", "training.log_dir=full"], 2, "the run directory full is not empty"),
        (["training.smoke=true", "training.log_dir=full/file"], 2, "the run directory full/file is a file"),
        (["training.smoke=true", "training.log_dir=full/file/run"], 2, "cannot make the run directory full/file/run"),
        (["training.smoke=true", "env.cpu_ids=[99999]"], 2, "CPU 99999, which this process may not use; allowed: "),
        (["training.smoke=true", "env.cpu_ids=[]"], 2, r"env.cpu_ids=\[\] names no CPU"),
        (["training.smoke=true", f"{POOLS}=[[{CPUS[0]}],[{CPUS[0]}]]"], 2, f"{POOLS} has 2 lists for 1 rank on this"),
        (["training.smoke=true", f"{POOLS}=[[{CPUS[0]},{CPUS[0]}]]"], 2, "names CPU . twice; list each CPU once"),
        (["training.smoke=true", f"{POOLS}=[0,1]"], 2, r"per rank, got \[0,1\]; for two ranks type "),
        (["training.smoke=true", f"{POOLS}=[[0]]", "env.cpu_ids=[0]"], 2, "is for a single rank and training.dp_"),
        (["training.smoke=true", "env.sim_dt=0.007"], 2, "ctrl_dt must be a whole number of sim_dt steps"),
        (
            ["training.smoke=true", "algo.num_envs=500000000"],
            3,
            r"need \d{6}\.\d\d GiB, \d+\.\d\d GiB are free .* lower algo.num_envs, algo.replay_buffer_n",
        ),
        (["training.smoke=true", "algo.num_envs=" + "9" * 23], 3, "GiB are free"),
    ],
)
@pytest.mark.usefixtures("bare_host")
def test_refusals_are_one_line_and_leave_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    assert main([*NAMES, *arguments]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("train: ")
    assert err.count("\n") == 1
    assert re.search(message, err)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["--algo", "sacc", *NAMES[2:]], "unknown algorithm 'sacc', did you mean 'sac'?"),
        ([*NAMES[:2], "--task", "walk", *NAMES[4:]], "unknown task 'walk'"),
        ([*NAMES[:4], "--sim", "mjwarp"], "unknown backend 'mjwarp'"),
    ],
)
def test_unknown_names_are_refused(capfd: pytest.CaptureFixture[str], names: list[str], message: str) -> None:
    assert main(names) == 2
    assert capfd.readouterr().err.startswith(f"train: {message}")


@pytest.mark.parametrize("arguments", [[], NAMES[:4], [*NAMES, "--devices", "0"], [*NAMES, "--ta", "x"]])
def test_options_argparse_refuses(capfd: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "train: error: " in capfd.readouterr().err


def test_settings_may_stand_between_the_options(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["algo.nope=1", *NAMES[:4], "algo.nope=2", *NAMES[4:]]) == 2
    assert "unknown key 'algo.nope'" in capfd.readouterr().err


TWO_HOSTS = {
    **{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    **{"MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
}


@pytest.mark.parametrize(
    ("variables", "overrides", "message"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,0"}, [], "is the device of '0' again"),
        ({"CUDA_VISIBLE_DEVICES": "0,,1"}, [], "is empty; list one device per rank"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a\nGPU-b"}, [], "separate devices by commas"),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, ["training.devices=[4,5]"], "there is no device 4"),
        ({}, ["training.devices=[0,0]"], "names a device twice"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, [], "RANK, WORLD_SIZE set without LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, ["env.cpu_ids=[0]"], "is for a single rank"),
        (TWO_HOSTS, ["training.nccl_transport=shm"], "is for ranks of one host, and 1 of 2 are on this one"),
        (TWO_HOSTS | {"RANK": "1"}, ["training.nccl_transport=p2p"], "type training.nccl_transport=tcp, or leave"),
    ],
)
def test_ranks_that_make_no_sense_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    variables: dict[str, str],
    overrides: list[str],
    message: str,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main([*NAMES, *SMALL, *overrides]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1) and message in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("bare_host")
def test_an_xpu_is_refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert main(NAMES) == 3
    assert "found an XPU, which is not supported" in capfd.readouterr().err


def test_an_interrupt_before_the_run_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(config_module, "load_config", interrupted)
    assert main([*NAMES, *SMALL]) == 130
    assert capfd.readouterr() == ("", "train: interrupted\n")
    assert list(tmp_path.iterdir()) == []


# --- the documents' script -------------------------------------------------------------------------------------------


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the script passes on."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(train_sac, "train", lambda *arguments: calls.append(arguments) or 0)  # type: ignore[func-returns-value]
    return calls


def test_the_script_takes_the_documents_spelling(scripted: list[tuple[Any, ...]]) -> None:
    line = ["task=g1_walk_flat/mujoco", "algo.num_envs=8"]
    assert train_sac.main(line) == 0
    assert train_sac.main(["algo.seed=2"]) == 0
    assert train_sac.main(["task=a/b", "task=c/d/e"]) == 0
    assert scripted == [
        ("sac", "g1_walk_flat", "mujoco", ["algo.num_envs=8"], line),
        ("sac", "g1_walk_flat", "mujoco", ["algo.seed=2"], ["algo.seed=2"]),
        ("sac", "c", "d/e", [], ["task=a/b", "task=c/d/e"]),
    ]


def test_the_script_wants_task_and_backend(scripted: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    assert train_sac.main(["task=g1_walk_flat"]) == 2
    message = "train: task=g1_walk_flat must name task and backend, as in task=g1_walk_flat/mujoco\n"
    assert capsys.readouterr().err == message
    assert scripted == []


# --- as a user starts it ---------------------------------------------------------------------------------------------

# Handlers as a shell's foreground job has them, though the tests may run as a background job.
AS_FOREGROUND = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from unilab.train import "
)
AS_FOREGROUND += "main; sys.exit(main())"


@pytest.mark.slow
def test_commands_in_processes_of_their_own(tmp_path: Path) -> None:
    """Ctrl-C on a terminal reaches every process of the group; beside it, two refusals."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "MUJOCO_GL": "nonsense"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    arguments = [*NAMES, *SMALL, "algo.max_iterations=100000", "training.log_dir=run"]
    training = subprocess.Popen(
        [sys.executable, "-c", AS_FOREGROUND, *arguments], cwd=tmp_path, start_new_session=True, **pipes
    )
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    module = subprocess.Popen([sys.executable, "-m", "unilab.train", *NAMES], cwd=quiet, **pipes)
    script = subprocess.Popen([sys.executable, train_sac.__file__, "algo.sead=1"], cwd=quiet, **pipes)

    _, err = script.communicate(timeout=60)
    assert (script.returncode, err) == (2, "train: unknown key 'algo.sead', did you mean 'algo.seed'?\n")
    out, err = module.communicate(timeout=60)
    if not torch.backends.mps.is_available():
        assert (module.returncode, out, err.count("\n")) == (3, "", 1)
    assert list(quiet.iterdir()) == []

    found = Run(tmp_path / "run")
    deadline = time.monotonic() + 60
    while not (progress := found.path / "progress.jsonl").exists() or not progress.stat().st_size:
        assert training.poll() is None, training.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    collector = found.json("manifest.json")["physics"]["placement"][0][0]
    assert psutil.pid_exists(collector)
    os.killpg(training.pid, signal.SIGINT)
    _, err = training.communicate(timeout=30)
    assert (training.returncode, err) == (130, "interrupted; what was written stays in run\n")
    assert not psutil.pid_exists(collector)
    assert found.end["status"] == "interrupted"
    assert found.end["event_count"] == len(found.events) == len(found.progress) > 0
    assert found.names == FILES | {"events"}
