"""SAC's update cycle: networks, objectives and their order. Everything else is the shared update phase."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from unilab.data_parallel import DataParallel
from unilab.learner import ActorCritic, Batch, NormalNoise
from unilab.learner import compiled as _compiled
from unilab.optim import ParameterGroup, share_wire
from unilab.sac.config import SacConfig
from unilab.sac.networks import Actor, CriticPair
from unilab.sac.objectives import actor_objective, critic_objective, support, temperature_objective
from unilab.state import StateRegistry

WEIGHT_DECAY = 1e-3


class SacLearner(ActorCritic):
    """Actor, critic pair, target pair and temperature, and one update of all of them.

    Args:
        config: `algo.*`.
        obs_dim: width of the policy observation.
        critic_dim: width of the critic observation.
        action_dim: width of the action.
        device: where everything lives.
        amp: run forward passes and losses under bfloat16 autocast.
        registry: receives parameters and optimizer state.
        ranks: averages gradients before each step; one rank by default.
    """

    actor: Actor
    critic: CriticPair
    target: CriticPair
    _frozen_critic: CriticPair

    def __init__(
        self,
        config: SacConfig,
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
        self.actor = Actor(obs_dim, action_dim, config.actor_hidden_dim).to(device)
        self.critic = CriticPair(critic_dim, action_dim, config.critic_hidden_dim, config.num_atoms).to(device)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        # The same weights seen without gradients: the actor's objective goes through the critics, never into them.
        self._frozen_critic = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.full((1,), math.log(params.alpha_init), device=device))
        norm = params.max_grad_norm
        self.actor_group = ParameterGroup(
            "actor", self.actor.parameters(), config.actor_lr, WEIGHT_DECAY, registry, norm
        )
        self.critic_group = ParameterGroup(
            "critic", self.critic.parameters(), config.critic_lr, WEIGHT_DECAY, registry, norm
        )
        self.alpha_group = ParameterGroup("temperature", [self.log_alpha], params.alpha_lr, 0.0, registry)
        self.groups = {"critic": self.critic_group, "temperature": self.alpha_group, "actor": self.actor_group}
        self._critic_wire = share_wire((self.critic_group, self.alpha_group))
        self._tie_copies(registry)
        self._points = support(config.num_atoms, device)
        self._target_entropy = -action_dim * params.target_entropy_ratio
        compiling = params.use_compile and device.type == "cuda"
        self._next_action = _compiled(self._sample, compiling, dynamic=True)  # one compilation for all numbers of rows
        self._critic_objective = _compiled(critic_objective, compiling)
        self._actor_objective = _compiled(actor_objective, compiling)
        self._step_critic = _compiled(self._critic_step, compiling)
        self._step_actor = _compiled(self._actor_step, compiling)
        self._prepare(registry)

    def exploration(
        self, num_envs: int, generator: torch.Generator, registry: StateRegistry, device: torch.device
    ) -> NormalNoise:
        """Fresh noise in every tick."""
        return NormalNoise(num_envs, self._action_dim, generator, registry, device)

    def observe(self, reward: Tensor, done: Tensor, valid: Tensor) -> None:
        """Nothing: SAC keeps no statistics of its own."""

    def update(self, batch: Batch, next_action: Tensor, log_pi: Tensor, actor_noise: Tensor | None) -> None:
        """One critic, temperature and target update, and an actor update where `actor_noise` is given.

        Args:
            batch: `B` transitions.
            next_action: the actor's actions in the next states, `(B, A)`.
            log_pi: their log-densities, `(B,)`.
            actor_noise: standard normal for the actor's actions, `(B, A)`, or None to leave the actor as it is.
        """
        self._update_critic(batch, next_action, log_pi)
        if actor_noise is not None:
            self._update_actor(batch, actor_noise)

    def steps(self, updates: int, actor_updates: int) -> dict[str, int]:
        """Optimizer steps by group; the temperature's go with the critics', so do its gradients."""
        return {"critic": updates, "temperature": updates, "actor": actor_updates}

    def _sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor.sample(obs, noise)

    def _update_critic(self, batch: Batch, next_action: Tensor, log_pi: Tensor) -> None:
        alpha = self.log_alpha.detach().exp()
        with self._autocast():
            loss, self._expected = self._critic_objective(
                self.critic, self.target, batch, next_action, log_pi, alpha, self._config.gamma, self._points
            )
        self.critic_group.backward(loss)
        self._step_critic(log_pi)

    def _critic_step(self, log_pi: Tensor) -> None:
        """Critics, temperature and targets; the last two follow the critics' verdict on the batch."""
        loss = temperature_objective(self.alpha_group.flat.data[:1], log_pi, self._target_entropy)
        self.alpha_group.loss.copy_(loss)
        self.alpha_group.gradient[:1].copy_(loss)  # exp is its own derivative
        self._ranks.average(self._critic_wire)
        finite = self.critic_group.finite
        self.critic_group.step()
        self.alpha_group.step(finite)
        self._target_flat.lerp_(self.critic_group.flat.data, self._config.tau * finite)
        self._reported["Train/skipped_updates"].add_(1.0 - finite)

    def _update_actor(self, batch: Batch, noise: Tensor) -> None:
        alpha = self.log_alpha.detach().exp()
        with self._autocast():
            loss, entropy = self._actor_objective(self.actor, self._frozen_critic, batch, noise, alpha, self._points)
        self.actor_group.backward(loss)
        self._reported["Loss/entropy"].copy_(entropy)
        self._step_actor()

    def _actor_step(self) -> None:
        self._ranks.average(self.actor_group.wire)
        self.actor_group.step()
        self._reported["Train/skipped_updates"].add_(1.0 - self.actor_group.finite)
