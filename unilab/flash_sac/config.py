"""Settings of FlashSAC: `algo.*`, with the documented defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from unilab.algorithm import BUILTIN, CUSTOM, AlgoConfig, AlgoParams, require_positive
from unilab.flash_sac.actor_spec import ActorSpec
from unilab.validation import require

if TYPE_CHECKING:
    import torch

    from unilab.data_parallel import DataParallel
    from unilab.flash_sac.networks import SquashedGaussian
    from unilab.learner import Learner
    from unilab.state import StateRegistry

PARAMS = "algo.algo_params"
POSITIVE = ("normalized_g_max", "actor_noise_zeta_mu", "temp_initial_value", "temp_target_sigma")
RATES = ("learning_rate_init", "learning_rate_peak", "learning_rate_end")
COUNTS = ("actor_num_blocks", "critic_num_blocks", "actor_noise_zeta_max", "learning_rate_decay_steps")


@dataclass
class FlashSacParams(AlgoParams):
    """`algo.algo_params.*`, see `AlgoParams`.

    Attributes:
        normalize_reward: divide rewards by the scale of the returns collected.
        normalized_g_max: the largest return so far is divided down to this at least.
        actor_num_blocks: residual blocks of the actor.
        critic_num_blocks: residual blocks of each critic.
        actor_noise_zeta_mu: exponent of the distribution of steps for which an environment keeps its noise.
        actor_noise_zeta_max: most such steps.
        actor_config: an actor of one's own, `{builder: package.module:name, kwargs: {…}}`; null is the built-in one.
        critic_min_v: lower end of the support.
        critic_max_v: upper end of the support.
        temp_initial_value: first temperature.
        temp_target_sigma: the target entropy is that of independent normal actions of this deviation.
        temp_target_entropy: the target entropy itself, in place of that.
        learning_rate_init: at step 0, if there is a warm-up; of all three optimizers, as what follows.
        learning_rate_peak: after the warm-up.
        learning_rate_end: after the decay.
        learning_rate_warmup_steps: optimizer steps of the linear warm-up.
        learning_rate_decay_steps: optimizer steps of the cosine after it.
        n_step: steps of a return; only 1 is supported.
        compile_full_objectives: compile whole objectives; otherwise only losses, the policy and optimizer steps.
        dp_whole_cycle_cuda_graph: capture graphs also where there are several ranks.
    """

    normalize_reward: bool = True
    normalized_g_max: float = 5.0
    actor_num_blocks: int = 2
    critic_num_blocks: int = 2
    actor_noise_zeta_mu: float = 2.0
    actor_noise_zeta_max: int = 16
    actor_config: Any = None
    critic_min_v: float = -5.0
    critic_max_v: float = 5.0
    temp_initial_value: float = 0.01
    temp_target_sigma: float = 0.15
    temp_target_entropy: float | None = None
    learning_rate_init: float = 3e-4
    learning_rate_peak: float = 3e-4
    learning_rate_end: float = 1.5e-4
    learning_rate_warmup_steps: int = 0
    learning_rate_decay_steps: int = 500_000
    n_step: int = 1
    amp_dtype: str = "auto"
    use_compile: bool = True
    compile_full_objectives: bool = True
    dp_whole_cycle_cuda_graph: bool = True
    use_whole_cycle_cuda_graph: bool = True

    @property
    def captures(self) -> bool:
        """Whether phases are captured where there is CUDA: never without compilation."""
        return self.use_compile and self.use_whole_cycle_cuda_graph

    @property
    def captures_collectives(self) -> bool:
        """Whether they are captured where there are several ranks, too."""
        return self.dp_whole_cycle_cuda_graph


@dataclass
class FlashSacConfig(AlgoConfig):
    """`algo.*` of FlashSAC, see `AlgoConfig`."""

    algo: str = "flashsac"
    algo_log_name: str = "flash_sac"
    seed: int = 1
    num_envs: int = 1024
    batch_size: int = 2048
    replay_buffer_n: int = 512
    updates_per_step: int = 2
    learning_starts: int = 98
    policy_frequency: int = 2
    max_iterations: int = 5000
    save_interval: int = 1000
    gamma: float = 0.97
    tau: float = 0.01
    actor_hidden_dim: int = 128
    critic_hidden_dim: int = 256
    num_atoms: int = 101
    algo_params: FlashSacParams = field(default_factory=FlashSacParams)

    def validate(self) -> None:
        """Check ranges.

        Raises:
            ValueError: naming the key, what it must be and what it is.
        """
        super().validate()
        for name in ("actor_hidden_dim", "critic_hidden_dim"):
            require(getattr(self, name) >= 1, f"algo.{name}", "at least 1", getattr(self, name))
        require(self.algo == "flashsac", "algo.algo", "flashsac (the --algo option chooses)", self.algo)
        self._validate_params()

    def _validate_params(self) -> None:
        params = self.algo_params
        require_positive(params, (*POSITIVE, *RATES), PARAMS)
        for name in COUNTS:
            require(getattr(params, name) >= 1, f"{PARAMS}.{name}", "at least 1", getattr(params, name))
        warmup, entropy = params.learning_rate_warmup_steps, params.temp_target_entropy
        require(warmup >= 0, f"{PARAMS}.learning_rate_warmup_steps", "0 or positive", warmup)
        if entropy is not None:
            require(math.isfinite(entropy), f"{PARAMS}.temp_target_entropy", "null or finite", entropy)
        low, high = params.critic_min_v, params.critic_max_v
        require(-math.inf < low < high < math.inf, f"{PARAMS}.critic_max_v", f"finite and above {low!r}", high)
        require(params.n_step == 1, f"{PARAMS}.n_step", "1, returns of more steps are not supported", params.n_step)
        if params.actor_config is not None:
            ActorSpec.parse(params.actor_config)

    def at_rest(self) -> FlashSacConfig:
        """The same with learning rates of 0."""
        still = replace(self.algo_params, learning_rate_init=0.0, learning_rate_peak=0.0, learning_rate_end=0.0)
        return replace(self, algo_params=still)

    @property
    def _custom_actor(self) -> ActorSpec | None:
        """The actor of one's own, or None. Raises ValueError where it is written wrong."""
        given = self.algo_params.actor_config
        return None if given is None else ActorSpec.parse(given)

    def actor_facts(self) -> tuple[str, str, dict[str, Any]]:
        """See `AlgoConfig.actor_facts`; noise counts, as the weights were trained under it."""
        params, custom = self.algo_params, self._custom_actor
        if custom is not None:
            return CUSTOM, custom.builder, custom.kwargs
        return (
            BUILTIN,
            "unilab.flash_sac.networks:Actor",
            {
                "hidden_dim": self.actor_hidden_dim,
                "num_blocks": params.actor_num_blocks,
                "noise_zeta_mu": params.actor_noise_zeta_mu,
                "noise_zeta_max": params.actor_noise_zeta_max,
            },
        )

    def check_actor(self, obs_dim: int, action_dim: int) -> None:
        """See `AlgoConfig.check_actor`."""
        if self._custom_actor is not None:
            from unilab.flash_sac.custom_actor import check_custom_actor

            check_custom_actor(self._custom_actor, obs_dim, action_dim)

    def build_actor(self, obs_dim: int, action_dim: int, device: torch.device | str = "cpu") -> SquashedGaussian:
        """See `AlgoConfig.build_actor`."""
        if self._custom_actor is not None:
            from unilab.flash_sac.custom_actor import build_custom_actor

            return build_custom_actor(self._custom_actor, obs_dim, action_dim, device)
        from unilab.flash_sac.networks import Actor

        return Actor(obs_dim, action_dim, self.actor_hidden_dim, self.algo_params.actor_num_blocks).to(device)

    def build_learner(
        self,
        dims: tuple[int, int, int],
        device: torch.device,
        amp: bool,
        registry: StateRegistry,
        ranks: DataParallel | None = None,
    ) -> Learner:
        """See `AlgoConfig.build_learner`."""
        from unilab.flash_sac.learner import FlashSacLearner

        return FlashSacLearner(self, *dims, device, amp, registry, ranks)
