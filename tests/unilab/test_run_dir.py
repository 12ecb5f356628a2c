"""Where a run's files go, which folders are refused, and what its files hold."""

from __future__ import annotations

import json
import math
import os
import resource
from datetime import datetime
from pathlib import Path

import pytest
import torch

from unilab.checkpoint import load_config_file
from unilab.config import RunConfig, TrainingConfig, load_config
from unilab.run_dir import RunDirectory, choose_run_dir
from unilab.sac.config import SacConfig

NOW = datetime(2026, 1, 2, 3, 4, 5)


def config(**training: str) -> RunConfig:
    return RunConfig(training=TrainingConfig(**training))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("training", "ranks", "path"),
    [
        ({}, 1, "logs/sac/G1WalkFlat/2026-01-02_03-04-05_mujoco"),
        ({}, 2, "logs/sac/G1WalkFlat/2026-01-02_03-04-05_mujoco_gpux2"),
        ({"log_root": "runs"}, 1, "runs/G1WalkFlat/2026-01-02_03-04-05_mujoco"),
        ({"log_root": "runs", "log_dir": "here/exactly"}, 2, "here/exactly"),
        ({"task_name": "Other"}, 1, "logs/sac/Other/2026-01-02_03-04-05_mujoco"),
    ],
)
def test_names(
    training: dict[str, str], ranks: int, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert choose_run_dir(config(**training), ranks, NOW) == Path(path)
    assert list(tmp_path.iterdir()) == []


def test_the_log_name_is_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = RunConfig(algo=SacConfig(algo_log_name="mine"))
    assert choose_run_dir(named, 1, NOW).parts[:2] == ("logs", "mine")


def test_a_tilde_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert choose_run_dir(config(log_dir="~/run"), 1, NOW) == tmp_path / "run"


def test_an_empty_folder_is_accepted(tmp_path: Path) -> None:
    assert choose_run_dir(config(log_dir=str(tmp_path)), 1, NOW) == tmp_path


def test_folders_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / ".hidden").write_text("")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, reason in (("full", "is not empty"), ("file", "is a file")):
        with pytest.raises(ValueError, match=rf"the run directory \S+/{name} {reason}; choose another"):
            choose_run_dir(config(log_dir=str(tmp_path / name)), 1, NOW)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="cannot be written; choose another"):
        choose_run_dir(config(log_dir=str(tmp_path / "empty")), 1, NOW)


def test_folders_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path, reason in (
        (tmp_path / "file" / "run", "Not a directory"),
        (tmp_path / "link", "File exists"),
        (Path("/proc/none/run"), "No such file or directory"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(ValueError, match=rf"cannot make the run directory .*: {reason}; choose another"):
            RunDirectory(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_the_json_files(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "a" / "run")
    directory.write_config(config())
    directory.write_command({"argv": []})
    directory.write_manifest({"ranks": []})
    directory.write_end({"status": "completed"})
    written = {path.name: json.loads(path.read_text()) for path in directory.path.iterdir()}
    assert written == {
        "config.json": {"schema_version": 1, **config().to_json()},
        "command.json": {"schema_version": 1, "argv": []},
        "manifest.json": {"schema_version": 1, "ranks": []},
        "run_end.json": {"schema_version": 1, "status": "completed"},
    }


def test_the_configuration_is_written_without_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ann"))
    RunDirectory(tmp_path).write_config(config(log_dir="/home/ann/run"))
    assert json.loads((tmp_path / "config.json").read_text())["training"]["log_dir"] == "<home>/run"


@pytest.mark.parametrize("user", ["mujoco", "flashsac", "offline", "my"])
def test_a_name_that_is_also_a_setting_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: user)
    actor = "algo.algo_params.actor_config={builder:my_actor:Plain,kwargs:{path:/home/my/x}}"
    overrides = [actor, "training.wandb_mode=offline", f"training.wandb_notes={user}"]
    written = load_config("flashsac", "g1_walk_flat", "mujoco", overrides)
    RunDirectory(tmp_path).write_config(written)
    assert written.training.wandb_notes == user
    written.training.wandb_notes = "<user>"
    assert load_config_file(tmp_path) == written


def test_free_text_is_written_without_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    shown = ("project", "entity", "group", "job_type", "name", "notes")
    training = ["log_root", "log_dir", *(f"wandb_{name}" for name in shown)]
    overrides = [f"training.{name}=ann" for name in training]
    overrides += ["training.wandb_tags=[ann]", "algo.algo_log_name=ann", "algo.load_run=ann", "algo.resume=true"]
    RunDirectory(tmp_path).write_config(load_config("sac", "g1_walk_flat", "mujoco", overrides))
    assert (tmp_path / "config.json").read_text().count("<user>") == len(training) + 3
    assert "ann" not in (tmp_path / "config.json").read_text()


def test_a_number_json_has_no_word_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        RunDirectory(tmp_path).write_end({"wall_seconds": math.nan})
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    path = RunDirectory(tmp_path).write_checkpoint(40, {"weight": torch.arange(3), "iteration": 40})
    assert path == tmp_path / "model_40.pt"
    loaded = torch.load(path, weights_only=True)
    assert loaded["weight"].tolist() == [0, 1, 2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["model_40.pt"]


def test_a_checkpoint_that_a_disk_does_not_take_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    directory, (_, hard) = RunDirectory(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            directory.write_checkpoint(1, {"weight": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert list(tmp_path.iterdir()) == []
