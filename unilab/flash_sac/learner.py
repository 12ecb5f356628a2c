"""FlashSAC's update cycle: networks, objectives and their order. Everything else is the shared update phase."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from unilab.data_parallel import DataParallel
from unilab.flash_sac.config import FlashSacConfig
from unilab.flash_sac.exploration import HeldNoise
from unilab.flash_sac.layers import Normalizer, share_buffers
from unilab.flash_sac.networks import CriticPair, SquashedGaussian
from unilab.flash_sac.objectives import (
    act_and_judge,
    actor_loss,
    critic_loss,
    entropic_reward,
    joined_logits,
    joined_policy,
    target_entropy,
)
from unilab.flash_sac.reward_scale import RewardScale
from unilab.learner import METRICS as COMMON_METRICS
from unilab.learner import ActorCritic, Batch, compiled
from unilab.optim import ParameterGroup, WarmupCosine, share_wire
from unilab.sac.objectives import support
from unilab.state import StateRegistry

BETAS = (0.9, 0.999)
METRICS = (*COMMON_METRICS, "Train/reward_scale_std")


class FlashSacLearner(ActorCritic):
    """Actor, critic pair, target pair, temperature and reward scale, and one update of all of them.

    Args:
        config: `algo.*`.
        obs_dim: width of the policy observation.
        critic_dim: width of the critic observation.
        action_dim: width of the action.
        device: where everything lives.
        amp: run forward passes and losses under bfloat16 autocast.
        registry: receives parameters, running statistics and optimizer state.
        ranks: averages gradients before each step; one rank by default. Running statistics are each rank's own.
    """

    metrics: tuple[str, ...] = METRICS
    actor: SquashedGaussian
    critic: CriticPair
    target: CriticPair
    _frozen_critic: CriticPair

    def __init__(
        self,
        config: FlashSacConfig,
        obs_dim: int,
        critic_dim: int,
        action_dim: int,
        device: torch.device,
        amp: bool,
        registry: StateRegistry,
        ranks: DataParallel | None = None,
    ) -> None:
        self._config, self._device, self._amp, self._action_dim = config, device, amp, action_dim
        self._ranks = ranks or DataParallel()
        params = config.algo_params
        given = params.temp_target_entropy
        self._target_entropy = target_entropy(action_dim, params.temp_target_sigma) if given is None else given
        self._build_networks(obs_dim, critic_dim, registry)
        self._build_groups(registry)
        self._bounds = (params.critic_min_v, params.critic_max_v)
        self._points = support(config.num_atoms, device, self._bounds)
        self._one = torch.ones((), device=device)
        self._scale: RewardScale | None = None
        if params.normalize_reward:
            self._scale = RewardScale(config.num_envs, config.gamma, params.normalized_g_max, registry, device)
        self._compile()
        self._prepare(registry)

    def _build_networks(self, obs_dim: int, critic_dim: int, registry: StateRegistry) -> None:
        config, params, action_dim = self._config, self._config.algo_params, self._action_dim
        widths = (critic_dim, action_dim, config.critic_hidden_dim, params.critic_num_blocks, config.num_atoms)
        self.actor = config.build_actor(obs_dim, action_dim, self._device)
        self.critic = CriticPair(*widths).to(self._device)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        # The same weights seen without gradients: the actor's objective goes through the critics, never into them.
        self._frozen_critic = copy.deepcopy(self.critic).requires_grad_(False)
        share_buffers(self._frozen_critic, self.critic)
        self._normalize_actor, self._normalize_critic = Normalizer(self.actor), Normalizer(self.critic)
        for name, network in self.modules().items():
            for path, buffer in network.named_buffers():
                registry.tensor(f"{name}/{path}", buffer)
        first = math.log(params.temp_initial_value)
        self.log_alpha = nn.Parameter(torch.full((1,), first, device=self._device))

    def _build_groups(self, registry: StateRegistry) -> None:
        params = self._config.algo_params
        rates = params.learning_rate_init, params.learning_rate_peak, params.learning_rate_end
        schedule = WarmupCosine(*rates, params.learning_rate_warmup_steps, params.learning_rate_decay_steps)

        def group(name: str, parameters: list[nn.Parameter]) -> ParameterGroup:
            return ParameterGroup(name, parameters, schedule, 0.0, registry, betas=BETAS)

        self.actor_group = group("actor", list(self.actor.parameters()))
        self.critic_group = group("critic", list(self.critic.parameters()))
        self.alpha_group = group("temperature", [self.log_alpha])
        self.groups = {"critic": self.critic_group, "temperature": self.alpha_group, "actor": self.actor_group}
        self._actor_wire = share_wire((self.actor_group, self.alpha_group))
        self._tie_copies(registry)

    def _compile(self) -> None:
        """Whole objectives, or their losses alone; the steps and the policy in either case."""
        params = self._config.algo_params
        compiling = params.use_compile and self._device.type == "cuda"
        whole = compiling and params.compile_full_objectives
        self._next_action = compiled(self._sample, compiling, dynamic=True)  # one compilation for all numbers of rows
        self._critic_loss = compiled(critic_loss, compiling and not whole)
        self._actor_loss = compiled(actor_loss, compiling and not whole)
        self._critic_objective = compiled(self._judge_critic, whole)
        self._actor_objective = compiled(self._judge_actor, whole)
        self._step_critic = compiled(self._critic_step, compiling)
        self._step_actor = compiled(self._actor_step, compiling)

    def exploration(
        self, num_envs: int, generator: torch.Generator, registry: StateRegistry, device: torch.device
    ) -> HeldNoise:
        """Noise that every environment keeps for some steps."""
        params = self._config.algo_params
        mu, longest = params.actor_noise_zeta_mu, params.actor_noise_zeta_max
        return HeldNoise(num_envs, self._action_dim, mu, longest, generator, registry, device)

    def observe(self, reward: Tensor, done: Tensor, valid: Tensor) -> None:
        """Follow the returns that scale rewards."""
        if self._scale is not None:
            self._scale.observe(reward, done, valid)

    def update(self, batch: Batch, next_action: Tensor, log_pi: Tensor, actor_noise: Tensor | None) -> None:
        """One critic and target update, and one of actor and temperature where `actor_noise` is given.

        Args:
            batch: `B` transitions.
            next_action: the actor's actions in the next states, `(B, A)`.
            log_pi: their log-densities, `(B,)`.
            actor_noise: standard normal for the actor's actions, `(B, A)`, or None to leave the actor as it is.
        """
        with self._autocast():
            loss, self._expected = self._critic_objective(batch, next_action, log_pi)
        self.critic_group.backward(loss)
        self._step_critic()
        if actor_noise is not None:
            self._update_actor(batch, actor_noise)

    def steps(self, updates: int, actor_updates: int) -> dict[str, int]:
        """Optimizer steps by group; the temperature's go with the actor's, so do its gradients."""
        return {"critic": updates, "temperature": actor_updates, "actor": actor_updates}

    def _own_metrics(self) -> dict[str, Tensor]:
        return {} if self._scale is None else {"Train/reward_scale_std": self._scale.deviation()}

    def _sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor.sample(obs, noise)

    def _judge_critic(self, batch: Batch, next_action: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor]:
        """The critics' loss and the expected targets `(B,)`."""
        gamma = self._config.gamma
        with torch.no_grad():
            divisor = self._one if self._scale is None else self._scale.divisor()
            alpha = self.log_alpha.exp()
            reward, discount = entropic_reward(batch, divisor, alpha, log_pi, gamma)
            _, target_logits = joined_logits(self.target, batch, next_action)
        logits, _ = joined_logits(self.critic, batch, next_action)
        return self._critic_loss(logits, target_logits, reward, discount, gamma, self._points, self._bounds)

    def _critic_step(self) -> None:
        """Critics and targets; the latter follow the former's verdict on the batch."""
        self._ranks.average(self.critic_group.wire)
        finite = self.critic_group.finite
        self.critic_group.step()
        self.critic_group.constrain(self._normalize_critic)
        self._target_flat.lerp_(self.critic_group.flat.data, self._config.tau * finite)
        self._reported["Train/skipped_updates"].add_(1.0 - finite)

    def _update_actor(self, batch: Batch, noise: Tensor) -> None:
        with self._autocast():
            loss, entropy = self._actor_objective(batch, noise)
        self.actor_group.backward(loss)
        self._reported["Loss/entropy"].copy_(entropy)
        self._step_actor(entropy)

    def _judge_actor(self, batch: Batch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The actor's loss and its entropy."""
        mean, log_std = joined_policy(self.actor, batch)
        log_pi, logits = act_and_judge(mean, log_std, noise, self._frozen_critic, batch)
        return self._actor_loss(log_pi, logits, self.log_alpha.detach().exp(), self._points)

    def _actor_step(self, entropy: Tensor) -> None:
        """Actor and temperature; the latter follows the former's verdict on the batch."""
        loss = self.alpha_group.flat.data[:1].exp() * (entropy - self._target_entropy)
        self.alpha_group.loss.copy_(loss.squeeze(0))
        self.alpha_group.gradient[:1].copy_(loss)  # exp is its own derivative
        self._ranks.average(self._actor_wire)
        finite = self.actor_group.finite
        self.actor_group.step()
        self.actor_group.constrain(self._normalize_actor)
        self.alpha_group.step(finite)
        self._reported["Train/skipped_updates"].add_(1.0 - finite)
