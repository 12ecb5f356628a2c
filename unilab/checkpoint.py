"""Checkpoints of a run: found and read, never trusted before they are checked."""

from __future__ import annotations

import hashlib
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unilab.actor_semantics import describe_actor, verify_actor
from unilab.config import RunConfig, load_config, restore_config
from unilab.names import CHECKPOINT_PATTERN, CONFIG_FILE


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read.

    Attributes:
        file: where it is.
        sha256: of the file.
        content: what it holds.
    """

    file: Path
    sha256: str
    content: dict[str, Any]

    @property
    def iteration(self) -> int:
        """Finished training iterations."""
        return int(self.content["iteration"])

    @property
    def env_steps(self) -> int:
        """Cumulative env steps of all ranks."""
        return int(self.content["env_steps"])


def load_run(run: Path | str, algo: str, task: str, sim: str) -> tuple[RunConfig, Checkpoint]:
    """The configuration of a run and its newest checkpoint, newest by the iteration stored inside.

    Raises:
        ValueError: if there is no such run, it was trained on something else, a checkpoint cannot be read, or the
            newest one's actor is not the configuration's.
    """
    wanted, directory = load_config(algo, task, sim, []), Path(run)
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{directory} is no run directory: it has no {CONFIG_FILE}")
    config = restore_config(json.loads(path.read_text()))
    asked, found = ((c.algo.algo, c.training.task_name, c.training.sim_backend) for c in (wanted, config))
    if asked != found:
        raise ValueError(f"{directory} was trained with {'/'.join(found)}, not {'/'.join(asked)}")
    files = sorted(directory.glob(CHECKPOINT_PATTERN.format(iteration="*")))
    if not files:
        raise ValueError(f"{directory} holds no checkpoint; train with algo.save_interval=0 or more")
    checkpoints = {}
    for file in files:
        try:
            checkpoints[file] = torch.load(file, weights_only=True, map_location="cpu")
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"checkpoint {file} cannot be read: {str(error).splitlines()[0]}") from None
    newest = max(checkpoints, key=lambda file: checkpoints[file]["iteration"])
    trained = config.env.task_class()
    expected = describe_actor(config.algo, trained.obs_dim, trained.action_dim)
    verify_actor(checkpoints[newest], expected, newest)
    return config, Checkpoint(newest, hashlib.sha256(newest.read_bytes()).hexdigest(), checkpoints[newest])
