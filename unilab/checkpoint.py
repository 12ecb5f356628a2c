"""Checkpoints of a run: found and read, never trusted before they are checked."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch

from unilab.actor_semantics import describe_actor, verify_actor
from unilab.algorithm import CUSTOM
from unilab.config import RunConfig, load_config, restore_config
from unilab.learner import Actor
from unilab.names import CHECKPOINT_PATTERN, CONFIG_FILE


def load_run(directory: Path, algo: str, task: str, sim: str) -> tuple[RunConfig, dict[str, Any]]:
    """The configuration of a run and its newest checkpoint, newest by the iteration stored inside.

    Raises:
        ValueError: if there is no such run, it was trained on something else, a checkpoint cannot be read, or the
            newest one's actor is not the configuration's, or cannot be built any more.
    """
    wanted = load_config(algo, task, sim, [])
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
    config.algo.check_actor(trained.obs_dim, trained.action_dim)
    expected = describe_actor(config.algo, trained.obs_dim, trained.action_dim)
    verify_actor(checkpoints[newest], expected, newest)
    if expected["kind"] == CUSTOM:
        _check_weights(config.algo.build_actor(trained.obs_dim, trained.action_dim), checkpoints[newest], newest)
    return config, checkpoints[newest]


def _check_weights(actor: Actor, checkpoint: dict[str, Any], file: Path) -> None:
    """Refuse weights that do not fit, as where an actor's source changed and its name and arguments did not."""
    own = {name: tuple(value.shape) for name, value in actor.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in checkpoint["actor"].items()}
    for name in sorted(own.keys() | found.keys()):
        shapes = found.get(name, "absent"), own.get(name, "absent")
        if shapes[0] != shapes[1]:
            apart = f"actor.{name} is {shapes[0]}, the actor that its builder makes now has {shapes[1]}"
            raise ValueError(f"{file}: {apart}; no weight was restored; the source it was trained with is needed")
