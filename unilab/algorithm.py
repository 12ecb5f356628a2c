"""Algorithms by name, and the settings that all of them have. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unilab.validation import require

if TYPE_CHECKING:
    import torch

    from unilab.data_parallel import DataParallel
    from unilab.learner import Actor, Learner
    from unilab.state import StateRegistry

BUILTIN, CUSTOM = "builtin", "custom"  # kinds of actors
LATEST = "-1"  # of `load_run` and `checkpoint`
POSITIVE = (
    "num_envs",
    "batch_size",
    "replay_buffer_n",
    "updates_per_step",
    "learning_starts",
    "policy_frequency",
    "max_iterations",
)


class AlgoParams:
    """What `algo.algo_params` has for every algorithm.

    Attributes:
        amp_dtype: precision under `training.use_amp`; auto means bf16 on CUDA.
        use_compile: compile with Inductor on CUDA.
        use_whole_cycle_cuda_graph: replay the act and the update phase as CUDA graphs.
    """

    amp_dtype: str
    use_compile: bool
    use_whole_cycle_cuda_graph: bool

    @property
    def captures(self) -> bool:
        """Whether phases are captured where there is CUDA."""
        return self.use_whole_cycle_cuda_graph

    @property
    def captures_collectives(self) -> bool:
        """Whether they are captured where there are several ranks, too."""
        return True


@dataclass(kw_only=True)
class AlgoConfig:
    """What `algo.*` has for every algorithm; defaults are the algorithm's.

    Attributes:
        algo: identity, fixed.
        algo_log_name: folder below `logs/`.
        seed: seeds every random stream of the run.
        num_envs: environments per rank.
        batch_size: rows of one update, per rank.
        replay_buffer_n: ring rows per environment.
        updates_per_step: critic updates per iteration.
        learning_starts: control steps per environment before the first update.
        policy_frequency: an actor update every this many critic updates.
        max_iterations: training iterations; each is one control step of every environment and one update cycle.
        save_interval: iterations between checkpoints; 0 writes only the last one, -1 none at all.
        resume: go on from a checkpoint.
        load_run: directory of the run to go on with, or -1 for the latest one.
        checkpoint: iteration of the checkpoint to go on from, or -1 for the newest one.
        gamma: discount.
        tau: Polyak weight of every target update.
        actor_hidden_dim: hidden width of the actor.
        critic_hidden_dim: hidden width of each critic.
        num_atoms: support points of the return distribution.
        algo_params: the rest.
    """

    algo: str
    algo_log_name: str
    seed: int
    num_envs: int
    batch_size: int
    replay_buffer_n: int
    updates_per_step: int
    learning_starts: int
    policy_frequency: int
    max_iterations: int
    save_interval: int
    gamma: float
    tau: float
    actor_hidden_dim: int
    critic_hidden_dim: int
    num_atoms: int
    algo_params: AlgoParams
    resume: bool = False
    load_run: str = LATEST
    checkpoint: int = int(LATEST)

    def validate(self) -> None:
        """Check ranges.

        Raises:
            ValueError: naming the key, what it must be and what it is.
        """
        for name in POSITIVE:
            require(getattr(self, name) >= 1, f"algo.{name}", "at least 1", getattr(self, name))
        require(bool(self.algo_log_name.strip("./")), "algo.algo_log_name", "a folder name", self.algo_log_name)
        require(self.save_interval >= -1, "algo.save_interval", "-1, 0 or positive", self.save_interval)
        require(self.checkpoint >= -1, "algo.checkpoint", "an iteration, or -1 for the newest", self.checkpoint)
        require(self.load_run != "", "algo.load_run", "a run directory, or -1 for the latest run", self.load_run)
        resuming = self.resume or (self.load_run == LATEST and self.checkpoint == int(LATEST))
        require(resuming, "algo.resume", "true where algo.load_run or algo.checkpoint is given", self.resume)
        require(0 <= self.gamma < 1, "algo.gamma", "in [0, 1)", self.gamma)
        require(0 < self.tau <= 1, "algo.tau", "in (0, 1]", self.tau)
        require(self.num_atoms >= 2, "algo.num_atoms", "at least 2", self.num_atoms)
        dtype = self.algo_params.amp_dtype
        require(dtype in ("auto", "bf16"), "algo.algo_params.amp_dtype", "auto or bf16", dtype)

    def at_rest(self) -> AlgoConfig:
        """The same with learning rates of 0."""
        raise NotImplementedError

    def actor_facts(self) -> tuple[str, str, dict[str, Any]]:
        """The actor's kind, where it is built and with what, as every checkpoint records it."""
        raise NotImplementedError

    def check_actor(self, obs_dim: int, action_dim: int) -> None:
        """Look at an actor that is not this project's, before anything begins.

        Raises:
            ValueError: one line naming what is wrong with it.
        """

    def build_actor(self, obs_dim: int, action_dim: int, device: torch.device | str = "cpu") -> Actor:
        """The actor, freshly drawn, on a device."""
        raise NotImplementedError

    def build_learner(
        self,
        dims: tuple[int, int, int],
        device: torch.device,
        amp: bool,
        registry: StateRegistry,
        ranks: DataParallel | None = None,
    ) -> Learner:
        """The learner.

        Args:
            dims: widths of policy observation, critic observation and action.
            device: where everything lives.
            amp: run forward passes and losses under bfloat16 autocast.
            registry: receives parameters and optimizer state.
            ranks: averages gradients before each step; one rank by default.
        """
        raise NotImplementedError


def require_positive(config: object, names: tuple[str, ...], prefix: str) -> None:
    """Check that some attributes are positive and finite.

    Raises:
        ValueError: naming the key and what it is.
    """
    for name in names:
        value = getattr(config, name)
        require(0 < value < math.inf, f"{prefix}.{name}", "positive and finite", value)
