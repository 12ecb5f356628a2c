"""The two device phases of a tick: act and update.

Both are written so that a CUDA graph can hold them as they are: every input and output is a static buffer, all random
numbers are drawn at the head, shapes never depend on data, and nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from unilab.algorithm import AlgoConfig
from unilab.environment import Environment
from unilab.learner import Batch, Exploration, Learner
from unilab.replay import ReplayRing
from unilab.state import StateRegistry


def transition_widths(obs_dim: int, critic_dim: int, action_dim: int) -> dict[str, int]:
    """Parts of a replay row in column order; 0 stands for a single value."""
    return {
        "obs": obs_dim,
        "next_obs": obs_dim,
        "action": action_dim,
        "reward": 0,
        "done": 0,
        "timeout": 0,
        "critic": critic_dim,
        "next_critic": critic_dim,
    }


class ActPhase:
    """From physics rows to the next command: finish the transition, store it, restart finished rows, act.

    Groups of rows take turns. What a tick does once is done in the first turn (drawing) or the last (summarizing), so
    that the number of groups does not change what is computed.

    Args:
        environment: the vectorised task; its `fields` were just uploaded.
        learner: owner of the actor; sees every tick's transitions.
        replay: takes the finished transitions.
        generator: random stream of the exploration noise.
        registry: receives the buffers of that noise.
        groups: rows of every group, in order; all rows in one by default.
        compiled: compile the task functions and the actor with Inductor.

    Attributes:
        parts: the environment's rows by group.
    """

    def __init__(
        self,
        environment: Environment,
        learner: Learner,
        replay: ReplayRing,
        generator: torch.Generator,
        registry: StateRegistry,
        groups: Sequence[slice] = (slice(None),),
        compiled: bool = False,
    ) -> None:
        self._environment, self._learner, self._replay = environment, learner, replay
        self._exploration = learner.exploration(environment.num_envs, generator, registry, environment.device)
        self.parts = [environment.part(rows) for rows in groups]
        self._explorations = [self._exploration.part(rows) for rows in groups]
        self._advance = torch.compile(self._finish_and_restart, dynamic=False) if compiled else self._finish_and_restart
        self._summarize = torch.compile(self._count, dynamic=False) if compiled else self._count
        self._decide = torch.compile(self._act, dynamic=False) if compiled else self._act

    @torch.no_grad()
    def begin(self) -> None:
        """Tick 0: every row is reset and gets its first action."""
        self._exploration.draw()
        self._environment.begin()
        for part, exploration in zip(self.parts, self._explorations, strict=True):
            self._decide(part, exploration)

    @torch.no_grad()
    def run(self, group: int = 0) -> None:
        """The turn of one group in every later tick; groups come in order."""
        if group == 0:
            self._environment.draw()
            self._exploration.draw()
        part = self.parts[group]
        self._advance(part)
        if group == len(self.parts) - 1:
            self._summarize()
        self._decide(part, self._explorations[group])

    def _finish_and_restart(self, part: Environment) -> None:
        part.complete()
        self._replay.append(_transition(part), part.valid)
        part.restart(part.finished)

    def _count(self) -> None:
        """What is counted over all rows of a tick."""
        environment = self._environment
        environment.summarize()
        self._learner.observe(environment.reward, environment.done, environment.valid)

    def _act(self, part: Environment, exploration: Exploration) -> None:
        part.control(self._learner.act(part.obs, exploration.noise(part.finished)))


class UpdatePhase:
    """One learner cycle: draw, gather, and all updates of the iteration.

    Args:
        environment: source of the tick's task metrics.
        learner: networks and objectives.
        replay: where rows are drawn from.
        config: `algo.*`.
        action_dim: width of the action.
        generator: random stream of indices and action noise.
        registry: receives the draw buffers.

    Attributes:
        metric_names: tags of `metrics`.
        metrics: `(len(metric_names),)` values after the last update of the cycle.
        steps: optimizer steps of a cycle that need a gradient all-reduce; the temperature's is within another.
    """

    def __init__(
        self,
        environment: Environment,
        learner: Learner,
        replay: ReplayRing,
        config: AlgoConfig,
        action_dim: int,
        generator: torch.Generator,
        registry: StateRegistry,
    ) -> None:
        self._environment, self._learner, self._replay, self._generator = environment, learner, replay, generator
        self._updates, self._policy_frequency = config.updates_per_step, config.policy_frequency
        actor_updates = -(-self._updates // self._policy_frequency)
        rows, device = config.updates_per_step * config.batch_size, replay.rows.device
        self.steps = count = self._updates + actor_updates
        # A view of rows: the compiler guards on what a view is of, and a size there that happens to equal the rows of
        # one forward pass would make it compile the next one anew.
        noise = torch.zeros(count * config.batch_size, action_dim, device=device).view(count, -1, action_dim)
        indices = torch.zeros(rows, dtype=torch.int64, device=device)
        self._indices = registry.tensor("update/indices", indices, lasting=False)
        self._noise = registry.tensor("update/noise", noise, lasting=False)
        self._critic_noise, self._actor_noise = self._noise.split((self._updates, actor_updates))
        self._rows = torch.zeros(rows, replay.width, device=device)
        self._batches = [Batch(**replay.split(part)) for part in self._rows.split(config.batch_size)]
        self._next_obs = replay.split(self._rows)["next_obs"]
        # Between two changes of the actor, the next actions of several updates are one forward pass.
        bounds = sorted({0, self._updates, *(i + 1 for i in range(0, self._updates - 1, self._policy_frequency))})
        self._spans = [range(start, stop) for start, stop in pairwise(bounds)]
        self.metric_names = list(self._measure())
        self.metrics = torch.zeros(len(self.metric_names), device=device)

    @property
    def episodes(self) -> Tensor:
        """`()` int64 episodes finished so far, at a fixed address; their means are averaged over ranks by it."""
        return self._environment.episodes.count

    def run(self) -> None:
        """Draw at the head, gather into the static batch, then update `updates_per_step` times."""
        self._indices.random_(generator=self._generator)
        self._noise.normal_(generator=self._generator)
        self._replay.gather(self._indices, self._rows)
        for span in self._spans:
            self._run_span(span)
        torch.stack([value.reshape(()).float() for value in self._measure().values()], out=self.metrics)

    def _run_span(self, span: range) -> None:
        size = self._critic_noise.shape[1]
        rows = slice(span.start * size, span.stop * size)
        noise = self._critic_noise[span.start : span.stop].flatten(0, 1)
        actions, log_pi = self._learner.next_action(self._next_obs[rows], noise)
        for index, action, density in zip(span, actions.split(size), log_pi.split(size), strict=True):
            round_, rest = divmod(index, self._policy_frequency)
            actor_noise = None if rest else self._actor_noise[round_]
            self._learner.update(self._batches[index], action, density, actor_noise)

    def _measure(self) -> dict[str, Tensor]:
        return {**self._learner.report(), **self._environment.metrics()}


def _transition(environment: Environment) -> dict[str, Tensor]:
    return {
        "obs": environment.last_obs,
        "next_obs": environment.next_obs,
        "action": environment.actions,
        "reward": environment.reward,
        "done": environment.done.float(),
        "timeout": environment.timeout.float(),
        "critic": environment.last_critic,
        "next_critic": environment.next_critic,
    }
