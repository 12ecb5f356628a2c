"""W&B beside the event file: the same numbers, nothing about people or machines, and no way to harm a training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from unilab import wandb_log
from unilab.config import load_config
from unilab.event_log import Record
from unilab.train import main
from unilab.wandb_log import WandbLog, run_settings

NAMES = ["--algo", "sac", "--task", "g1_walk_flat", "--sim", "mujoco"]
TINY = [
    "training.smoke=true",
    "training.no_play=true",
    "training.logger=wandb",
    "algo.num_envs=2",
    "algo.batch_size=2",
    "algo.updates_per_step=2",
    "algo.max_iterations=4",
    "algo.learning_starts=1",
    "algo.replay_buffer_n=4",
    "algo.actor_hidden_dim=4",
    "algo.critic_hidden_dim=4",
    "algo.num_atoms=3",
]
READER = Path(__file__).parent / "wandb_file.py"


def record(iteration: int) -> Record:
    return Record(iteration, 8 * iteration, float(iteration), 0.0, {"a/b": iteration / 4})


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, without a login."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    environment |= {"HOME": str(folder), "NETRC": str(folder / "netrc")}
    command = [sys.executable, "-W", "error", "-m", "unilab.train", *NAMES, *TINY]
    command += [f"training.log_dir={folder / 'run'}", *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)


def test_an_offline_run_holds_what_the_event_file_holds(tmp_path: Path) -> None:
    result = train(tmp_path, "training.wandb_mode=offline", "training.wandb_tags=[night]")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    (file,) = (tmp_path / "run" / "wandb").rglob("*.wandb")
    assert f"W&B run {file.parent}\n" in result.stdout
    read = subprocess.run([sys.executable, str(READER), str(file)], capture_output=True, check=True, timeout=60)
    found = json.loads(read.stdout)
    (events,) = (tmp_path / "run").glob("events.out.tfevents.*")
    written = list(LegacyEventFileLoader(str(events)).Load())[1:]
    assert [row["_step"] for row in found["history"]] == [event.step for event in written] == [2, 4, 6, 8]
    for row, event in zip(found["history"], written, strict=True):
        values = {value.tag: value.simple_value for value in event.summary.value}
        assert {tag: value for tag, value in row.items() if not tag.startswith("_")} == pytest.approx(values)
    assert (found["run"]["host"], found["run"]["git"]) == ("", 0)
    assert found["run"]["tags"] == ["night", "sac", "G1WalkFlat", "mujoco"]
    assert found["run"]["config"]["training"]["log_dir"] == "<home>/run"
    assert not {"environment", "files", "stats", "output", "output_raw"} & set(found["kinds"])
    assert str(tmp_path).encode() not in file.read_bytes()
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]


def test_without_a_login_there_is_one_line_and_the_directory_may_be_used_again(tmp_path: Path) -> None:
    result = train(tmp_path, "training.wandb_mode=online")
    assert result.returncode == 2
    assert result.stderr.startswith("train: W&B cannot start: No API key configured")
    assert "training.wandb_mode=offline" in result.stderr
    assert result.stderr.count("\n") == 1
    assert list((tmp_path / "run").iterdir()) == []


def test_without_the_package_there_is_one_line_and_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wandb_log, "find_spec", lambda name: None)
    assert main([*NAMES, *TINY, f"training.log_dir={tmp_path / 'run'}"]) == 3
    wanted = "training.logger=wandb needs wandb: install unilab-repro[wandb], or type training.logger=tensorboard"
    assert capfd.readouterr().err == f"train: {wanted}\n"
    assert not (tmp_path / "run").exists()


def test_nothing_imports_it_unasked() -> None:
    assert "wandb" not in sys.modules  # though unilab.train and unilab.wandb_log are loaded


def test_a_run_is_called_by_what_it_is_unless_asked_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    found = run_settings(load_config("sac", "g1_walk_flat", "mujoco", ["training.log_root=/home/ada/x"]), tmp_path)
    config = found.pop("config")
    assert config["training"]["log_root"] == "<home>/x"
    assert found == {
        "project": "unilab",
        "entity": None,
        "group": "G1WalkFlat",
        "job_type": "sac",
        "name": f"sac__G1WalkFlat__{tmp_path.name}",
        "tags": ["sac", "G1WalkFlat", "mujoco"],
        "notes": None,
        "mode": None,
    }
    keys = ("project", "entity", "group", "job_type", "name", "notes")
    overrides = [f"training.wandb_{key}=my_{key}" for key in keys]
    overrides += ["training.wandb_tags=[sac,b]", "training.wandb_mode=offline"]
    asked = run_settings(load_config("sac", "g1_walk_flat", "mujoco", overrides), tmp_path)
    assert {key: asked[key] for key in keys} == {key: f"my_{key}" for key in keys}
    assert (asked["tags"], asked["mode"]) == (["sac", "b", "G1WalkFlat", "mujoco"], "offline")


class Fake:
    """A run of W&B that can fail or hang."""

    sync_dir = "nowhere"

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.open = fails, threading.Event()
        self.open.set()
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.ends: list[Any] = []

    def log(self, row: dict[str, float], step: int) -> None:
        self.open.wait(20)
        if self.fails:
            raise OSError("no route\nto host")
        self.rows.append((step, row))

    def finish(self, exit_code: int) -> None:
        self.ends.append(exit_code)

    def teardown(self, exit_code: int | None = None) -> None:
        self.ends.append("teardown")
        if self.fails:
            raise SystemExit(9)  # what wandb does when its process ended badly


@pytest.fixture
def hanging() -> Iterator[Fake]:
    fake = Fake()
    fake.open.clear()
    yield fake
    fake.open.set()


def test_records_arrive_in_order_and_the_exit_code_ends_the_run() -> None:
    fake = Fake()
    log = WandbLog(fake, fake.teardown)
    for iteration in (1, 2, 3):
        log.write(record(iteration))
    log.close(1)
    assert fake.rows == [(8, {"a/b": 0.25}), (16, {"a/b": 0.5}), (24, {"a/b": 0.75})]
    assert fake.ends == [1, "teardown"]


def test_a_failure_is_said_once_and_training_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    fake = Fake(fails=True)
    log = WandbLog(fake, fake.teardown)
    for iteration in range(1, 20):
        log.write(record(iteration))
    log.close(0)
    said = "W&B stopped: no route; training goes on and its event file has everything\n"
    assert capfd.readouterr().err == said


def test_training_never_waits_for_it(
    hanging: Fake, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wandb_log, "BACKLOG", 5)
    monkeypatch.setattr(wandb_log, "FINISH_SECONDS", -9.8)  # and ten more
    log = WandbLog(hanging, hanging.teardown)
    began = time.monotonic()
    for iteration in range(1, 100):
        log.write(record(iteration))
    log.close(0)
    assert time.monotonic() - began < 5
    assert log._queue.qsize() <= 6
    said = "W&B stopped: it is 5 records behind; training goes on and its event file has everything\n"
    assert capfd.readouterr().err == said


HUNG = """
import sys
from pathlib import Path
import psutil
from unilab import wandb_log
from unilab.config import load_config
from unilab.event_log import Record
wandb_log.FINISH_SECONDS = -8.0
config = load_config("sac", "g1_walk_flat", "mujoco", ["training.wandb_mode=offline"])
log = wandb_log.start_wandb(config, Path(sys.argv[1]))
(service,) = (child for child in psutil.Process().children() if child.name() == wandb_log.SERVICE)
service.send_signal(int(sys.argv[2]))
for iteration in range(2000):
    log.write(Record(iteration, iteration, 0.0, 0.0, {"a": 1.0}))
log.close(0)
assert not service.is_running() or service.status() == psutil.STATUS_ZOMBIE
"""


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_service_that_hangs_or_dies_does_not_keep_the_program(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-W", "error", "-c", HUNG, str(tmp_path), str(int(number))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stderr.startswith("W&B stopped: ")
    assert result.stderr.count("\n") == 1
