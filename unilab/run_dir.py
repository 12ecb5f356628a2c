"""The run directory: what is written when, and always whole."""

from __future__ import annotations

import io
import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from unilab.atomic_file import partial_name, write_atomically
from unilab.config import RunConfig
from unilab.names import (
    CHECKPOINT_PATTERN,
    COMMAND_FILE,
    CONFIG_FILE,
    EVAL_FILE,
    MANIFEST_FILE,
    MEETING_FILE,
    RUN_END_FILE,
    SCHEMA_VERSION,
)
from unilab.provenance import redact

# Settings that may name people or machines, and that no run is built from: folders, and what W&B shows.
FREE_TEXT = {
    "algo": ("algo_log_name", "load_run"),
    "training": (
        *("log_root", "log_dir", "wandb_project", "wandb_entity", "wandb_group", "wandb_job_type", "wandb_name"),
        *("wandb_tags", "wandb_notes"),
    ),
}


def choose_run_dir(config: RunConfig, world_size: int, now: datetime) -> Path:
    """The run's directory: `training.log_dir`, else a generated one below the log root; not yet made.

    Raises:
        ValueError: if it exists and holds anything or cannot be written.
    """
    training = config.training
    if training.log_dir is not None:
        path = Path(training.log_dir).expanduser()
    else:
        ranks = f"_gpux{world_size}" if world_size > 1 else ""
        path = runs_folder(config) / f"{now:%Y-%m-%d_%H-%M-%S}_{training.sim_backend}{ranks}"
    if path.exists() and not path.is_dir():
        raise ValueError(f"the run directory {path} is a file; choose another training.log_dir")
    if path.exists() and not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"the run directory {path} cannot be written; choose another training.log_dir")
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"the run directory {path} is not empty; choose another training.log_dir")
    return path


def runs_folder(config: RunConfig) -> Path:
    """Where the directories of generated names lie."""
    training = config.training
    root = Path(training.log_root) if training.log_root is not None else Path("logs") / config.algo.algo_log_name
    return root / training.task_name


def remove_leftovers(folder: Path) -> None:
    """Remove what a run that was killed left half made in a folder: its meeting place and a part of a checkpoint."""
    parts = folder.glob(partial_name(CHECKPOINT_PATTERN.format(iteration="*")))
    for path in (folder / MEETING_FILE, *parts):
        path.unlink(missing_ok=True)


class RunDirectory:
    """Writes the files of one run.

    Args:
        path: the directory, empty or not yet there.

    Raises:
        ValueError: if it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"cannot make the run directory {path}: {error.strerror}; choose another training.log_dir"
            ) from None

    def write_config(self, config: RunConfig) -> None:
        """Write `config.json`, the resolved configuration; free text without names of people or machines.

        All else is read back as the truth: a name that is also a backend's, or part of a module's, stays.
        """
        values = config.to_json()
        for group, names in FREE_TEXT.items():
            values[group] |= {name: redact(values[group][name]) for name in names}
        self._write_json(CONFIG_FILE, values)

    def write_command(self, facts: dict[str, Any]) -> None:
        """Write `command.json`, where the run comes from."""
        self._write_json(COMMAND_FILE, facts)

    def write_manifest(self, facts: dict[str, Any]) -> None:
        """Write `manifest.json`, what the run is made of while it runs."""
        self._write_json(MANIFEST_FILE, facts)

    def write_evaluation(self, facts: dict[str, Any]) -> None:
        """Write `eval.json`, how a checkpoint does."""
        self._write_json(EVAL_FILE, facts)

    def write_end(self, facts: dict[str, Any]) -> None:
        """Write `run_end.json`, the last file of a run."""
        self._write_json(RUN_END_FILE, facts)

    def write_checkpoint(self, iteration: int, state: dict[str, Any]) -> Path:
        """Write `model_<iteration>.pt` and return its path."""
        path = self.path / CHECKPOINT_PATTERN.format(iteration=iteration)
        archive = io.BytesIO()  # torch writing to a full disk itself fails of a position, not of the disk
        torch.save(state, archive)
        write_atomically(path, lambda file: file.write(archive.getbuffer()))
        return path

    def _write_json(self, name: str, facts: dict[str, Any]) -> None:
        text = json.dumps({"schema_version": SCHEMA_VERSION, **facts}, indent=2, allow_nan=False) + "\n"
        write_atomically(self.path / name, lambda file: file.write(text.encode()))
