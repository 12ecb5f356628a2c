"""Settings of SAC: `algo.*`, with the documented defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from unilab.algorithm import BUILTIN, AlgoConfig, AlgoParams, require_positive
from unilab.validation import require

if TYPE_CHECKING:
    import torch

    from unilab.data_parallel import DataParallel
    from unilab.learner import Learner
    from unilab.sac.networks import Actor
    from unilab.state import StateRegistry


@dataclass
class SacParams(AlgoParams):
    """`algo.algo_params.*`.

    Attributes:
        alpha_lr: learning rate of the log temperature.
        alpha_init: first temperature.
        target_entropy_ratio: target entropy is -action_dim times this.
        max_grad_norm: global gradient norm above which gradients are scaled down; 0 turns that off.
    """

    alpha_lr: float = 3e-4
    alpha_init: float = 0.01
    target_entropy_ratio: float = 0.0
    max_grad_norm: float = 0.0
    amp_dtype: str = "auto"
    use_compile: bool = True
    use_whole_cycle_cuda_graph: bool = True


@dataclass
class SacConfig(AlgoConfig):
    """`algo.*` of SAC, see `AlgoConfig`; hidden widths are the first ones and halve twice.

    Attributes:
        actor_lr: learning rate of the actor.
        critic_lr: learning rate of the critics.
    """

    algo: str = "sac"
    algo_log_name: str = "sac"
    seed: int = 1
    num_envs: int = 4096
    batch_size: int = 8192
    replay_buffer_n: int = 512
    updates_per_step: int = 4
    learning_starts: int = 1
    policy_frequency: int = 4
    max_iterations: int = 500
    save_interval: int = 500
    gamma: float = 0.97
    tau: float = 0.125
    actor_lr: float = 3e-4
    critic_lr: float = 3e-4
    actor_hidden_dim: int = 512
    critic_hidden_dim: int = 768
    num_atoms: int = 101
    algo_params: SacParams = field(default_factory=SacParams)

    def validate(self) -> None:
        """Check ranges.

        Raises:
            ValueError: naming the key, what it must be and what it is.
        """
        super().validate()
        for name in ("actor_hidden_dim", "critic_hidden_dim"):
            value = getattr(self, name)
            require(value >= 4 and value % 4 == 0, f"algo.{name}", "a positive multiple of 4 (it halves twice)", value)
        require_positive(self, ("actor_lr", "critic_lr"), "algo")
        require(self.algo == "sac", "algo.algo", "sac (the --algo option chooses)", self.algo)
        self._validate_params()

    def _validate_params(self) -> None:
        params = self.algo_params
        require_positive(params, ("alpha_lr", "alpha_init"), "algo.algo_params")
        norm, ratio = params.max_grad_norm, params.target_entropy_ratio
        require(0 <= norm < math.inf, "algo.algo_params.max_grad_norm", "0 or positive, and finite", norm)
        require(math.isfinite(ratio), "algo.algo_params.target_entropy_ratio", "finite", ratio)

    def at_rest(self) -> SacConfig:
        """The same with learning rates of 0."""
        return replace(self, actor_lr=0.0, critic_lr=0.0, algo_params=replace(self.algo_params, alpha_lr=0.0))

    def actor_facts(self) -> tuple[str, str, dict[str, Any]]:
        """See `AlgoConfig.actor_facts`."""
        return BUILTIN, "unilab.sac.networks:Actor", {"hidden": self.actor_hidden_dim}

    def build_actor(self, obs_dim: int, action_dim: int, device: torch.device | str = "cpu") -> Actor:
        """See `AlgoConfig.build_actor`."""
        from unilab.sac.networks import Actor

        return Actor(obs_dim, action_dim, self.actor_hidden_dim).to(device)

    def build_learner(
        self,
        dims: tuple[int, int, int],
        device: torch.device,
        amp: bool,
        registry: StateRegistry,
        ranks: DataParallel | None = None,
    ) -> Learner:
        """See `AlgoConfig.build_learner`."""
        from unilab.sac.learner import SacLearner

        return SacLearner(self, *dims, device, amp, registry, ranks)
