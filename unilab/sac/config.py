"""Settings of SAC: `algo.*`, with the documented defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from unilab.validation import require

POSITIVE = (
    "num_envs",
    "batch_size",
    "replay_buffer_n",
    "updates_per_step",
    "learning_starts",
    "policy_frequency",
    "max_iterations",
)


@dataclass
class SacParams:
    """`algo.algo_params.*`.

    Attributes:
        alpha_lr: learning rate of the log temperature.
        alpha_init: first temperature.
        target_entropy_ratio: target entropy is -action_dim times this.
        max_grad_norm: global gradient norm above which gradients are scaled down; 0 turns that off.
        amp_dtype: precision under `training.use_amp`; auto means bf16 on CUDA.
        use_compile: compile objectives and task functions with Inductor on CUDA.
        use_whole_cycle_cuda_graph: replay the act and the update phase as one CUDA graph each.
    """

    alpha_lr: float = 3e-4
    alpha_init: float = 0.01
    target_entropy_ratio: float = 0.0
    max_grad_norm: float = 0.0
    amp_dtype: str = "auto"
    use_compile: bool = True
    use_whole_cycle_cuda_graph: bool = True


@dataclass
class SacConfig:
    """`algo.*` of SAC.

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
        gamma: discount.
        tau: Polyak weight of every target update.
        actor_lr: learning rate of the actor.
        critic_lr: learning rate of the critics.
        actor_hidden_dim: first hidden width of the actor; it halves twice.
        critic_hidden_dim: first hidden width of each critic; it halves twice.
        num_atoms: support points of the return distribution.
        algo_params: the rest.
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
        for name in POSITIVE:
            require(getattr(self, name) >= 1, f"algo.{name}", "at least 1", getattr(self, name))
        for name in ("actor_hidden_dim", "critic_hidden_dim"):
            value = getattr(self, name)
            require(value >= 4 and value % 4 == 0, f"algo.{name}", "a positive multiple of 4 (it halves twice)", value)
        for name in ("actor_lr", "critic_lr"):
            require(0 < getattr(self, name) < math.inf, f"algo.{name}", "positive and finite", getattr(self, name))
        require(self.algo == "sac", "algo.algo", "sac (the --algo option chooses)", self.algo)
        require(bool(self.algo_log_name.strip("./")), "algo.algo_log_name", "a folder name", self.algo_log_name)
        require(self.save_interval >= -1, "algo.save_interval", "-1, 0 or positive", self.save_interval)
        require(0 <= self.gamma < 1, "algo.gamma", "in [0, 1)", self.gamma)
        require(0 < self.tau <= 1, "algo.tau", "in (0, 1]", self.tau)
        require(self.num_atoms >= 2, "algo.num_atoms", "at least 2", self.num_atoms)
        self._validate_params()

    def _validate_params(self) -> None:
        params = self.algo_params
        for name in ("alpha_lr", "alpha_init"):
            value = getattr(params, name)
            require(0 < value < math.inf, f"algo.algo_params.{name}", "positive and finite", value)
        norm, ratio = params.max_grad_norm, params.target_entropy_ratio
        require(0 <= norm < math.inf, "algo.algo_params.max_grad_norm", "0 or positive, and finite", norm)
        require(math.isfinite(ratio), "algo.algo_params.target_entropy_ratio", "finite", ratio)
        require(params.amp_dtype in ("auto", "bf16"), "algo.algo_params.amp_dtype", "auto or bf16", params.amp_dtype)
