"""The vectorised environment: what happens on the learner's device between two physics steps.

Each tick calls `draw` once, then `complete`, `restart` and `control` for every group of rows, and `summarize` once
after the last `complete`. They may run eagerly or inside captured graphs: every buffer is allocated once and written in
place, shapes never depend on data, nothing is read back.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from unilab.names import (
    INVALID_ROWS,
    MEAN_EPISODE_LENGTH,
    MEAN_REWARD,
    TIMEOUT_RATE,
    TRACKING_ERROR_ANG,
    TRACKING_ERROR_LIN,
)
from unilab.physics.spec import KEEP, RESET, SET_VELOCITY
from unilab.state import StateRegistry
from unilab.tasks.velocity_task import VelocityTask

EPISODE_WINDOW = 100
TRACKING_ERRORS = (TRACKING_ERROR_LIN, TRACKING_ERROR_ANG)


class Environment:
    """`num_envs` environments of one task, without their physics.

    Args:
        task: the task, built for the same number of environments and device.
        num_envs: environments, N below.
        device: where the buffers live.
        generator: the only source of randomness, of that device; its owner registers it.
        registry: receives every buffer under `env/`.

    Attributes:
        fields: (N, width) physics rows that the upload fills: the outcome of `actions`.
        actions: (N, A) raw actions of the physics step in flight, kept until `control`.
        previous_actions: (N, A) raw actions of the step before; 0 at an episode's start.
        obs: (N, obs_dim) policy observation the next action is computed from.
        critic: (N, critic_dim) critic observation of the same moment.
        last_obs: (N, obs_dim) what the finished transition's action saw.
        last_critic: (N, critic_dim) the critic's view of it.
        next_obs: (N, obs_dim) what it led to; of an episode's last step the terminal observation.
        next_critic: (N, critic_dim) the critic's view of it.
        reward: (N,) reward of the transition, times the control step in s.
        terminated: (N,) bool, the robot fell.
        truncated: (N,) bool, the time limit; both may be set.
        done: (N,) bool, either of them.
        timeout: (N,) bool, truncated and not terminated: the value of `next_obs` counts.
        valid: (N,) bool, false where physics warned or a field is not finite. Such a transition is not to be stored.
        finished: (N,) bool, done or not valid: the mask for `restart`.
        command: (N, 3) velocity command.
        phase: (N, phase_dim) gait phase, as the task counts it.
        ctrl: (N, nu) joint targets for the physics.
        codes: (N,) int32 row codes for the physics.
        reset_rows: (N, reset width) states and model parameters; of rows coded SET_VELOCITY the velocities count, of
            those coded KEEP nothing.
        ticks: () int64 control steps since the start, the timer of pushes; only where the task has them.
        velocities: (N, nv) qvel after the step and a push; as above.
        episodes: returns, lengths and the penalty curriculum.
    """

    def __init__(
        self,
        task: VelocityTask,
        num_envs: int,
        device: torch.device,
        generator: torch.Generator,
        registry: StateRegistry,
    ) -> None:
        assert task.num_envs == num_envs
        assert torch.device(task.device).type == torch.device(device).type
        self.task, self.num_envs, self.device = task, num_envs, device
        self._row_buffers: list[str] = []
        self._generator, self._registry = generator, registry
        self._noise = {name: task.uniform_columns[name] for name in ("step_noise", "reset_noise")}
        self._allocate_inputs()
        self._allocate_transition()
        self.episodes = Episodes(task, num_envs, device, registry)

    def _allocate_inputs(self) -> None:
        task, spec = self.task, self.task.spec
        self.uniforms = self._buffer("uniforms", task.uniform_width)
        self.fields = self._buffer("fields", spec.width)
        self.actions = self._buffer("actions", task.action_dim)
        self.previous_actions = self._buffer("previous_actions", task.action_dim)
        self.command = self._buffer("command", task.command_dim)
        self.phase = self._buffer("phase", task.phase_dim)
        self.ctrl = self._buffer("ctrl", spec.nu)
        self.codes = self._buffer("codes", dtype=torch.int32)
        self.reset_rows = self._buffer("reset_rows", spec.reset_width)
        if task.push_interval is not None:
            ticks = torch.zeros((), dtype=torch.int64, device=self.device)
            self.ticks = self._registry.tensor("env/ticks", ticks, lasting=False)
            self.velocities = self._buffer("velocities", spec.nv)

    def _allocate_transition(self) -> None:
        obs, critic = self.task.obs_dim, self.task.critic_dim
        self.obs, self.critic = self._buffer("obs", obs), self._buffer("critic", critic)
        self.last_obs, self.last_critic = self._buffer("last_obs", obs), self._buffer("last_critic", critic)
        self.next_obs, self.next_critic = self._buffer("next_obs", obs), self._buffer("next_critic", critic)
        self.reward = self._buffer("reward")
        self.terminated = self._buffer("terminated", dtype=torch.bool)
        self.truncated = self._buffer("truncated", dtype=torch.bool)
        self.done = self._buffer("done", dtype=torch.bool)
        self.timeout = self._buffer("timeout", dtype=torch.bool)
        self.valid = self._buffer("valid", dtype=torch.bool)
        self.finished = self._buffer("finished", dtype=torch.bool)
        self.reward_terms = self._buffer("reward_terms", len(self.task.reward_names))
        self.tracking_errors = self._buffer("tracking_errors", len(TRACKING_ERRORS))
        errors = torch.zeros(len(TRACKING_ERRORS), device=self.device)
        self.tracking_means = self._registry.tensor("env/tracking_means", errors)
        scalars = torch.zeros(len(self.task.reward_names), device=self.device)
        self.reward_means = self._registry.tensor("env/reward_means", scalars)
        invalid = torch.zeros((), dtype=torch.int64, device=self.device)
        self.invalid_rows = self._registry.tensor("env/invalid_rows", invalid, lasting=False)

    def _buffer(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        self._row_buffers.append(name)
        value = torch.zeros(self.num_envs, *shape, dtype=dtype, device=self.device)
        return self._registry.tensor(f"env/{name}", value, lasting=False)

    def part(self, rows: slice) -> Environment:
        """Some rows of this environment as one of their own, on the same memory; what is no row stays common."""
        part = copy.copy(self)
        for name in self._row_buffers:
            setattr(part, name, alias(getattr(self, name)[rows]))
        part.num_envs = len(part.done)
        part.episodes = self.episodes.part(rows)
        return part

    def begin(self) -> None:
        """Tick 0: reset every environment, episodes at random places so that their time limits spread."""
        self.draw()
        self.restart(torch.ones_like(self.finished))
        self.episodes.steps.random_(0, self.task.max_episode_steps, generator=self._generator)
        if self.task.push_interval is not None:
            self.ticks.zero_()

    def draw(self) -> None:
        """Begin a tick: draw all its random numbers, advance the timer of pushes."""
        self.uniforms.uniform_(generator=self._generator)
        if self.task.push_interval is not None:
            self.ticks.add_(1)

    @torch.no_grad()
    def complete(self) -> None:
        """Turn `fields` into the finished transition."""
        self._advance()
        physics = self.task.fields(self._clean_fields())
        self._judge(self.task.terminated(physics))
        self._pay(physics)
        self._compare(physics)
        self._observe(self._push(physics))
        self.episodes.pay(self.reward)

    @torch.no_grad()
    def summarize(self) -> None:
        """Count the tick over all rows: means over the valid ones, invalid ones, finished episodes, the curriculum."""
        valid = self.valid.sum().clamp(min=1)
        self.reward_means.copy_(self.reward_terms.sum(0) / valid)
        self.tracking_means.copy_(self.tracking_errors.sum(0) / valid)
        self.invalid_rows.add_((~self.valid).sum())
        self.episodes.record(self.done, self.truncated)

    def _advance(self) -> None:
        self.episodes.steps.add_(1)
        self.phase.copy_(self.task.advance_phase(self.phase))
        self.last_obs.copy_(self.obs)
        self.last_critic.copy_(self.critic)

    def _clean_fields(self) -> Tensor:
        """Physics rows with those that broke replaced, so that nothing computed from them is NaN."""
        warnings = self.fields[:, self.task.spec.columns["warnings"]].abs().sum(1)
        self.valid.copy_(torch.isfinite(self.fields).all(1) & torch.isfinite(self.actions).all(1) & (warnings == 0))
        return torch.where(self.valid.unsqueeze(1), self.fields, self.task.idle_row)

    def _judge(self, terminated: Tensor) -> None:
        self.terminated.copy_(terminated & self.valid)
        self.truncated.copy_((self.episodes.steps >= self.task.max_episode_steps) & self.valid)
        self.done.copy_(self.terminated | self.truncated)
        self.timeout.copy_(self.truncated & ~self.terminated)
        self.finished.copy_(self.done | ~self.valid)

    def _pay(self, physics: dict[str, Tensor]) -> None:
        """Rewards with the penalty factor as it was before this tick's episodes ended."""
        scale = self.episodes.penalty_scale
        terms = self.task.reward_terms(physics, self.actions, self.previous_actions, self.command, self.phase, scale)
        self.reward_terms.copy_(torch.where(self.valid.unsqueeze(1), terms, 0.0))
        self.reward.copy_(self.reward_terms.sum(1) * self.task.control_dt)

    def _compare(self, physics: dict[str, Tensor]) -> None:
        """Distances from the command that the transition was under."""
        errors = self.task.tracking_errors(physics, self.command)
        stacked = torch.stack([errors[tag.rpartition("/")[2]] for tag in TRACKING_ERRORS], 1)
        self.tracking_errors.copy_(torch.where(self.valid.unsqueeze(1), stacked, 0.0))

    def _push(self, physics: dict[str, Tensor]) -> dict[str, Tensor]:
        """The fields, as a push of all robots leaves them where one is due."""
        if self.task.push_interval is None:
            return physics
        due = self.ticks % self.task.push_interval == 0
        pushed = self.task.push(physics, self.uniforms)
        physics = physics | {name: torch.where(due, value, physics[name]) for name, value in pushed.items()}
        self.velocities.copy_(physics["qvel"])
        return physics

    def _observe(self, physics: dict[str, Tensor]) -> None:
        noise = self.uniforms[:, self._noise["step_noise"]]
        obs, critic = self.task.observe(physics, self.actions, self.command, self.phase, noise)
        self.next_obs.copy_(obs)
        self.next_critic.copy_(critic)

    @torch.no_grad()
    def restart(self, mask: Tensor) -> None:
        """Give rows of `mask` (N,) a new episode and its first observation; other rows go on from `next_obs`.

        `actions` still holds the finished transition's actions afterwards.
        """
        rows, column = mask.unsqueeze(1), self.uniforms
        self.reset_rows.copy_(self.task.reset_rows(column))
        self.command.copy_(torch.where(rows, self.task.reset_command(column), self.command))
        self.phase.copy_(torch.where(rows, self.task.reset_phase(column, self.phase), self.phase))
        physics, still = self.task.reset_fields(self.reset_rows), torch.zeros_like(self.actions)
        noise = column[:, self._noise["reset_noise"]]
        obs, critic = self.task.observe(physics, still, self.command, self.phase, noise)
        self.critic.copy_(torch.where(rows, critic, self.next_critic))
        self.obs.copy_(torch.where(rows, obs, self.next_obs))
        self.codes.copy_(mask.to(torch.int32) * (RESET - KEEP) + KEEP)
        self._command_push(mask)
        self.episodes.restart(mask)

    def _command_push(self, restarted: Tensor) -> None:
        """Where a push is due, have the physics take over the velocities of rows that do not restart."""
        if self.task.push_interval is None:
            return
        velocities = self.reset_rows[:, self.task.spec.reset_columns["qvel"]]
        velocities.copy_(torch.where(restarted.unsqueeze(1), velocities, self.velocities))
        pushed = (self.ticks % self.task.push_interval == 0) & ~restarted
        self.codes.copy_(torch.where(pushed, SET_VELOCITY, self.codes))

    @torch.no_grad()
    def control(self, action: Tensor) -> None:
        """Take raw actions (N, A) as the next step's and write the joint targets."""
        started = (self.codes == RESET).unsqueeze(1)
        self.previous_actions.copy_(torch.where(started, 0.0, self.actions))
        self.actions.copy_(action)
        self.ctrl.copy_(self.task.control_targets(self.actions))

    def metrics(self) -> dict[str, Tensor]:
        """Tagged 0-d float tensors of the tick last summarized."""
        rewards = dict(zip(self.task.reward_names, self.reward_means.unbind(), strict=True))
        return {
            **self.episodes.metrics(),
            **dict(zip(TRACKING_ERRORS, self.tracking_means.unbind(), strict=True)),
            **{f"reward/{name}": value for name, value in rewards.items()},
            INVALID_ROWS: self.invalid_rows.to(torch.float32),
        }


class Episodes:
    """Returns and lengths of the episodes, and the penalty curriculum that follows their length.

    Args:
        task: gives the curriculum.
        num_envs: environments, N below.
        device: where the buffers live.
        registry: receives every buffer under `env/`.

    Attributes:
        steps: (N,) int64 control steps of the running episodes.
        returns: (N,) sums of their rewards.
        last_steps: (N,) `steps` as the last transition left them, before a restart.
        last_returns: (N,) `returns` of the same moment.
        ring: (2, 101) returns and lengths of the last 100 finished episodes; the last column is scratch.
        count: () int64 episodes finished so far.
        timeout_rate: () truncations per finished episode, of the last tick in which one finished.
        mean_length: () exponential mean of episode lengths that the curriculum reads.
        penalty_scale: () common factor of the negative reward weights.
    """

    def __init__(self, task: VelocityTask, num_envs: int, device: torch.device, registry: StateRegistry) -> None:
        def buffer(name: str, *shape: int, dtype: torch.dtype = torch.float32, lasting: bool = True) -> Tensor:
            return registry.tensor(f"env/{name}", torch.zeros(shape, dtype=dtype, device=device), lasting)

        self._task = task
        self.steps = buffer("episode_steps", num_envs, dtype=torch.int64, lasting=False)
        self.returns = buffer("episode_returns", num_envs, lasting=False)
        self.last_steps = buffer("episode_last_steps", num_envs, dtype=torch.int64, lasting=False)
        self.last_returns = buffer("episode_last_returns", num_envs, lasting=False)
        self.ring = buffer("episode_ring", 2, EPISODE_WINDOW + 1)
        self.count = buffer("episode_count", dtype=torch.int64)
        self.timeout_rate = buffer("timeout_rate")
        self.mean_length = buffer("curriculum_mean_length")
        self.penalty_scale = buffer("penalty_scale").fill_(task.initial_penalty_scale)

    def part(self, rows: slice) -> Episodes:
        """Some rows of the running episodes, see `Environment.part`."""
        part = copy.copy(self)
        for name in ("steps", "returns", "last_steps", "last_returns"):
            setattr(part, name, alias(getattr(self, name)[rows]))
        return part

    def pay(self, reward: Tensor) -> None:
        """Add rewards (N,) to the running episodes."""
        self.returns.add_(reward)
        self.last_returns.copy_(self.returns)
        self.last_steps.copy_(self.steps)

    def record(self, done: Tensor, truncated: Tensor) -> None:
        """Count the episodes that the tick ended.

        Args:
            done: (N,) bool, the episode ended and counts.
            truncated: (N,) bool, by the time limit.
        """
        finished = done.sum()
        self._remember(done, finished)
        rate = truncated.sum() / finished.clamp(min=1)
        self.timeout_rate.copy_(torch.where(finished > 0, rate, self.timeout_rate))
        self._follow(done, finished)

    def _remember(self, done: Tensor, finished: Tensor) -> None:
        """Write the last 100 finished episodes behind each other; every other row goes to the scratch column."""
        order = done.cumsum(0) - 1
        kept = done & (order >= finished - EPISODE_WINDOW)
        slot = torch.where(kept, (self.count + order) % EPISODE_WINDOW, EPISODE_WINDOW)
        values = torch.stack((self.last_returns, self.last_steps.to(self.last_returns.dtype)))
        self.ring.scatter_(1, slot.expand_as(values), values)
        self.ring[:, EPISODE_WINDOW:].zero_()
        self.count.add_(finished)

    def _follow(self, done: Tensor, finished: Tensor) -> None:
        """Move the mean length by min(1, finished / window) towards this tick's, and the penalty factor after it."""
        weight = (finished / self._task.curriculum_window).clamp(max=1)
        mean = torch.where(done, self.last_steps, 0).sum() / finished.clamp(min=1)
        self.mean_length.add_(weight * (mean - self.mean_length))
        scale = self._task.next_penalty_scale(self.penalty_scale, self.mean_length)
        self.penalty_scale.copy_(torch.where(finished > 0, scale, self.penalty_scale))

    def restart(self, mask: Tensor) -> None:
        """Begin a new episode in the rows of `mask` (N,)."""
        self.steps.copy_(torch.where(mask, 0, self.steps))
        self.returns.copy_(torch.where(mask, 0.0, self.returns))

    def metrics(self) -> dict[str, Tensor]:
        """Tagged 0-d float tensors; means over the last 100 episodes are 0 before the first ends."""
        mean_return, mean_length = (self.ring.sum(1) / self.count.clamp(1, EPISODE_WINDOW)).unbind()
        return {
            MEAN_REWARD: mean_return,
            MEAN_EPISODE_LENGTH: mean_length,
            TIMEOUT_RATE: self.timeout_rate,
            "Train/penalty_scale": self.penalty_scale,
        }


def alias(view: Tensor) -> Tensor:
    """The memory of a view as a tensor of its own: compilers treat views of one tensor with suspicion."""
    return view.new_empty(0).set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
