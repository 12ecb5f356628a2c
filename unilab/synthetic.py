"""A rank's learner on made-up rows, without physics and task logic: what the learner's benchmark and probe run."""

from __future__ import annotations

import math
from copy import deepcopy

import torch
from torch import Tensor

from unilab.capture import Phase
from unilab.config import RunConfig
from unilab.data_parallel import DataParallel
from unilab.environment import Environment
from unilab.phases import UpdatePhase, transition_widths
from unilab.replay import ReplayRing
from unilab.state import StateRegistry
from unilab.streams import PREFIX

SETTLING_CYCLES = 10  # AdamW's first steps are signs of gradients, and those of rounding too
DONE_SHARE = 0.02


class SyntheticRank:
    """Learner, full replay ring and update phase.

    Args:
        config: the run; two of one configuration and device hold the same rows and weights.
        device: where everything lives.
        compiled: compile objectives and steps with Inductor (CUDA only).
        ranks: averages gradients; one rank by default.

    Attributes:
        registry: everything that an update changes.
        learner: networks and optimizers.
        replay: the ring, all of its rows valid.
        phase: what `update` runs.
        update: one learner cycle.
    """

    def __init__(
        self, config: RunConfig, device: torch.device, compiled: bool, ranks: DataParallel | None = None
    ) -> None:
        self._seed, self._device, self.registry = config.algo.seed, device, StateRegistry()
        algo = deepcopy(config.algo)
        algo.algo_params.use_compile = compiled
        task = config.build_task(algo.num_envs, device)
        torch.manual_seed(algo.seed)
        environment = Environment(task, algo.num_envs, device, self._generator("environment"), self.registry)
        dims = (task.obs_dim, task.critic_dim, task.action_dim)
        amp = config.training.use_amp and device.type == "cuda"
        self.learner = algo.build_learner(dims, device, amp, self.registry, ranks)
        self.replay = ReplayRing(algo.num_envs * algo.replay_buffer_n, transition_widths(*dims), device, self.registry)
        _fill(self.replay, self._generator("rows"))
        generator = self._generator("update")
        self.phase = UpdatePhase(
            environment, self.learner, self.replay, algo, task.action_dim, generator, self.registry
        )
        self.update = Phase(self.phase.run, [generator])

    def _generator(self, stream: str) -> torch.Generator:
        return self.registry.generator(f"{PREFIX}{stream}", torch.Generator(self._device).manual_seed(self._seed))


def update_errors(found: dict[str, Tensor], reference: dict[str, Tensor], start: dict[str, Tensor]) -> dict[str, float]:
    """Relative error of one cycle's parameter update by group: |found - reference| / |reference - start|.

    Raises:
        RuntimeError: if one is not finite, also where the reference did not move.
    """
    errors = {}
    for name in sorted(name for name in start if name.endswith("/parameters")):
        change = (reference[name] - start[name]).double().norm()
        group = name.removesuffix("/parameters")
        errors[group] = ((found[name] - reference[name]).double().norm() / change).item()
        if not math.isfinite(errors[group]):
            raise RuntimeError(f"the update of {group} is not finite, or eager execution does not change it")
    return errors


def _fill(replay: ReplayRing, generator: torch.Generator) -> None:
    """Normal rows, a few of which end an episode, half of those by the time limit."""
    replay.rows.normal_(generator=generator)
    parts = replay.split(replay.rows)
    chance = torch.rand(len(replay.rows), generator=generator, device=replay.rows.device)
    parts["done"].copy_(chance < DONE_SHARE)
    parts["timeout"].copy_(chance < DONE_SHARE / 2)
    replay.size.fill_(replay.capacity)
