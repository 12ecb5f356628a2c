"""The learner that the correctness probe looks at, and its state in a few words."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from unilab.capture import Phase
from unilab.config import RunConfig
from unilab.data_parallel import DataParallel
from unilab.learner import Learner
from unilab.rank_statistics import RankStatistics
from unilab.synthetic import SyntheticRank

State = dict[str, Tensor]
SKIPPED = "learner/Train/skipped_updates"
TARGETS = "critic_target/parameters"


class Learning:
    """A rank's learner on made-up rows within the group, its cycle as in a run: with the statistics of all ranks.

    Args:
        config: the run, with this rank's seed.
        device: where everything lives.
        compiled: compile objectives and steps (CUDA only).
        ranks: the group.

    Attributes:
        config: the run.
        ranks: the group.
        rank: learner, ring and update phase.
        cycle: one learner cycle and the statistics after it, eager until captured.
    """

    def __init__(self, config: RunConfig, device: torch.device, compiled: bool, ranks: DataParallel) -> None:
        self.config, self.ranks = config, ranks
        self.rank = SyntheticRank(config, device, compiled, ranks)
        phase = self.rank.phase
        self._statistics = RankStatistics(phase.metrics, phase.metric_names, ranks, phase.episodes)
        self.cycle = Phase(self._run, [self.rank.registry.generators()["random/update"]])

    def _run(self) -> None:
        self.rank.phase.run()
        self._statistics.run()

    def state(self) -> State:
        """Copies of everything an update changes, random streams included."""
        return self.rank.registry.snapshot()

    def cycles(self, count: int) -> None:
        """Run some cycles."""
        for _ in range(count):
            self.cycle()

    def reported(self) -> dict[str, float]:
        """Losses, gradient norms and what else the learner reports of the last update."""
        found = zip(self.rank.phase.metric_names, self.rank.phase.metrics.tolist(), strict=True)
        return {name: value for name, value in found if name in self.rank.learner.metrics}

    def steps_after(self, cycles: int) -> dict[str, int]:
        """Optimizer steps that so many cycles take, by parameter group."""
        updates = self.config.algo.updates_per_step
        actor = math.ceil(updates / self.config.algo.policy_frequency)
        return self.rank.learner.steps(cycles * updates, cycles * actor)


def local_buffers(learner: Learner) -> list[str]:
    """Buffers of networks, as of batch norms, which every rank keeps to itself."""
    return [f"{name}.{path}" for name, module in learner.modules().items() for path, _ in module.named_buffers()]


def parameters(state: Iterable[str]) -> list[str]:
    """Names of what optimizers step."""
    return sorted(name for name in state if name.endswith("/parameters") and name != TARGETS)


def optimizer_state(state: Iterable[str]) -> list[str]:
    """Names of what optimizers keep."""
    return sorted(name for name in state if "/adamw_" in name)


def learned(state: Iterable[str]) -> list[str]:
    """Names of everything that must be the same on every rank."""
    names = list(state)
    return [*parameters(names), TARGETS, *optimizer_state(names)]


def digest(state: Mapping[str, Tensor], names: Iterable[str]) -> str:
    """SHA-256 over names and bytes of some entries."""
    total = hashlib.sha256()
    for name in names:
        total.update(f"{name}\0".encode())
        total.update(state[name].detach().cpu().numpy().tobytes())
    return total.hexdigest()


def changed(one: Mapping[str, Tensor], other: Mapping[str, Tensor], names: Iterable[str]) -> list[str]:
    """Names of entries that are not bit-equal."""
    return [name for name in names if digest(one, [name]) != digest(other, [name])]


def counts(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Steps that each optimizer has taken, by parameter group."""
    found = {name.removesuffix("/adamw_step"): value for name, value in state.items() if name.endswith("/adamw_step")}
    return {name: int(value) for name, value in found.items()}
