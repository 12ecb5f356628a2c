"""What the phases, the loop, benchmarks and probes need of a learner, whatever its networks and objectives are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from unilab.data_parallel import DataParallel
from unilab.environment import alias
from unilab.optim import ParameterGroup, bind
from unilab.state import StateRegistry

_P = ParamSpec("_P")
_R = TypeVar("_R")

METRICS = (
    "Loss/critic",
    "Loss/temperature",
    "Loss/actor",
    "Loss/entropy",
    "Policy/temperature",
    "Train/critic_gradient_norm",
    "Train/actor_gradient_norm",
    "Train/target_q_max",
    "Train/target_q_min",
    "Train/skipped_updates",
)


@dataclass(frozen=True)
class Batch:
    """Rows of one update: views of the gathered replay rows.

    Attributes:
        obs: `(B, O)`.
        next_obs: `(B, O)`; the terminal observation where the episode ended.
        action: `(B, A)`.
        reward: `(B,)`, scaled by the control step.
        done: `(B,)` 1 where the episode ended.
        timeout: `(B,)` 1 where it ended by its time limit alone.
        critic: `(B, C)`.
        next_critic: `(B, C)`.
    """

    obs: Tensor
    next_obs: Tensor
    action: Tensor
    reward: Tensor
    done: Tensor
    timeout: Tensor
    critic: Tensor
    next_critic: Tensor


class Actor(Protocol):
    """A policy, of which a checkpoint holds the state dict."""

    def deterministic(self, obs: Tensor) -> Tensor:
        """Its action without noise, `(B, A)`."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Take weights."""

    def state_dict(self) -> dict[str, Tensor]:
        """Its weights and buffers by name."""

    def named_buffers(self) -> Iterable[tuple[str, Tensor]]:
        """Those of them that are not learned."""


class Exploration(Protocol):
    """The noise of the actions that environments take."""

    def draw(self) -> None:
        """Draw all random numbers of the tick."""

    def part(self, rows: slice) -> Exploration:
        """Some rows of it, on the same memory."""

    def noise(self, finished: Tensor) -> Tensor:
        """Standard normal noise of this tick's actions, `(N, A)`.

        Args:
            finished: `(N,)` bool, a new episode begins.
        """


class Learner(Protocol):
    """Networks, objectives and their optimizers, and one update of all of them.

    Attributes:
        metrics: tags of `report`.
        groups: parameters that step together, by name: critic, temperature, actor.
        log_alpha: log temperature, `(1,)`.
    """

    metrics: tuple[str, ...]
    groups: dict[str, ParameterGroup]
    log_alpha: nn.Parameter

    def exploration(
        self, num_envs: int, generator: torch.Generator, registry: StateRegistry, device: torch.device
    ) -> Exploration:
        """Noise of so many environments; its draws come from `generator` alone, its buffers go to `registry`."""

    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        """Actions `(N, A)` of observations `(N, O)` under noise `(N, A)`."""

    def observe(self, reward: Tensor, done: Tensor, valid: Tensor) -> None:
        """See the tick's transitions, `(N,)` each, in the order in which the ring takes them; not all are stored."""

    def next_action(self, next_obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions `(M, A)` and log-densities `(M,)` in the next states; the same between two updates of the actor."""

    def update(self, batch: Batch, next_action: Tensor, log_pi: Tensor, actor_noise: Tensor | None) -> None:
        """One update of the critics, and of the actor where `actor_noise` `(B, A)` is given."""

    def report(self) -> Mapping[str, Tensor]:
        """0-d tensors of the last update, by tag, at fixed addresses."""

    def synchronize(self) -> None:
        """Give every rank rank 0's parameters."""

    def modules(self) -> dict[str, nn.Module]:
        """Networks of a checkpoint, by name; their buffers are each rank's own."""

    def steps(self, updates: int, actor_updates: int) -> dict[str, int]:
        """Optimizer steps of so many updates, by group. One all-reduce comes before each critic and actor step."""


class NormalNoise:
    """Fresh noise in every tick.

    Args:
        num_envs: environments.
        action_dim: width of the action.
        generator: random stream.
        registry: receives the buffer.
        device: where it lives.
    """

    def __init__(
        self, num_envs: int, action_dim: int, generator: torch.Generator, registry: StateRegistry, device: torch.device
    ) -> None:
        self._generator = generator
        self._noise = registry.tensor("act/noise", torch.zeros(num_envs, action_dim, device=device), lasting=False)

    def draw(self) -> None:
        """Draw the tick's noise."""
        self._noise.normal_(generator=self._generator)

    def part(self, rows: slice) -> NormalNoise:
        """Some rows of it, on the same memory."""
        part = copy.copy(self)
        part._noise = alias(self._noise[rows])
        return part

    def noise(self, finished: Tensor) -> Tensor:
        """The tick's noise, `(N, A)`."""
        return self._noise


class ActorCritic:
    """What learners with an actor, critics, their targets and a temperature have in common.

    A learner builds `actor`, `critic`, `target`, `log_alpha` and the groups, then calls `_tie_copies` and `_prepare`.
    """

    metrics: tuple[str, ...] = METRICS
    groups: dict[str, ParameterGroup]
    actor: nn.Module
    critic: nn.Module
    target: nn.Module
    log_alpha: nn.Parameter
    _frozen_critic: nn.Module
    _device: torch.device
    _amp: bool
    _ranks: DataParallel
    _next_action: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        """Actions `(N, A)` of observations `(N, O)`."""
        action, _ = self._sample(obs, noise)
        return action

    @torch.no_grad()
    def next_action(self, next_obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions of the actor as it is now in the next states, for the critic's target.

        Args:
            next_obs: `(M, O)`; rows of all updates up to the actor's next change may come at once.
            noise: standard normal, `(M, A)`.

        Returns:
            Actions `(M, A)` and their log-densities `(M,)`.
        """
        with self._autocast():
            return self._next_action(next_obs, noise)

    @torch.no_grad()
    def report(self) -> dict[str, Tensor]:
        """0-d tensors of the last update, by tag, at fixed addresses; written now."""
        critic, temperature, actor = (self.groups[name] for name in ("critic", "temperature", "actor"))
        values = {
            "Loss/critic": critic.loss,
            "Loss/temperature": temperature.loss,
            "Loss/actor": actor.loss,
            "Policy/temperature": self.log_alpha.exp().squeeze(0),
            "Train/critic_gradient_norm": critic.norm,
            "Train/actor_gradient_norm": actor.norm,
            **self._own_metrics(),
        }
        if self._expected is not None:
            smallest, largest = torch.aminmax(self._expected)
            values |= {"Train/target_q_max": largest, "Train/target_q_min": smallest}
            for name, value in values.items():
                self._reported[name].copy_(value)
        return self._reported

    def synchronize(self) -> None:
        """Give every rank rank 0's actor, critics, targets and temperature."""
        self._ranks.broadcast([*(group.flat.data for group in self.groups.values()), self._target_flat])

    def modules(self) -> dict[str, nn.Module]:
        """Networks of a checkpoint, by name."""
        return {"actor": self.actor, "critic": self.critic, "critic_target": self.target}

    def _sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _own_metrics(self) -> dict[str, Tensor]:
        """What this learner reports beside `METRICS`."""
        return {}

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._amp)

    def _tie_copies(self, registry: StateRegistry) -> None:
        """Let the frozen critics see the critics' weights, and the targets weights of their own that start equal."""
        weights = self.groups["critic"].flat.data
        bind(self._frozen_critic.parameters(), weights)
        self._target_flat = registry.tensor("critic_target/parameters", weights.clone())
        bind(self.target.parameters(), self._target_flat)

    def _prepare(self, registry: StateRegistry) -> None:
        """Register what `report` writes."""
        self._expected: Tensor | None = None
        self._reported = {
            name: registry.tensor(f"learner/{name}", torch.zeros((), device=self._device)) for name in self.metrics
        }


def compiled(function: Callable[_P, _R], enabled: bool, dynamic: bool = False) -> Callable[_P, _R]:
    """The function, compiled by Inductor where asked for."""
    return torch.compile(function, dynamic=dynamic) if enabled else function
