"""The number that rewards are divided by, from the discounted returns that environments collect."""

from __future__ import annotations

import torch
from torch import Tensor

from unilab.state import StateRegistry

FIRST_COUNT = 1e-4
EPSILON = 1e-8


class RewardScale:
    """Running statistics of G <- gamma (1 - done) G + r of every environment.

    Transitions are seen once, tick by tick in the order of the ring, those that are not stored excepted; rewards in the
    ring stay as they are and are divided when they are drawn. Each rank has its own.

    Args:
        num_envs: environments, N below.
        gamma: discount.
        largest: the largest |G| ever seen is divided down to this.
        registry: receives the statistics.
        device: where they live.

    Attributes:
        returns: `(N,)` G.
        largest_return: 0-d, the largest |G| so far.
        mean: 0-d, of all G so far.
        variance: 0-d, biased.
        count: 0-d.
    """

    def __init__(
        self, num_envs: int, gamma: float, largest: float, registry: StateRegistry, device: torch.device
    ) -> None:
        def scalar(name: str, value: float) -> Tensor:
            return registry.tensor(f"reward_scale/{name}", torch.full((), value, device=device))

        self._gamma, self._largest = gamma, largest
        returns = torch.zeros(num_envs, device=device)
        self.returns = registry.tensor("reward_scale/returns", returns, lasting=False)
        self.largest_return, self.mean = scalar("largest_return", 0.0), scalar("mean", 0.0)
        self.variance, self.count = scalar("variance", 1.0), scalar("count", FIRST_COUNT)

    @torch.no_grad()
    def observe(self, reward: Tensor, done: Tensor, valid: Tensor) -> None:
        """See one tick's transitions.

        Args:
            reward: `(N,)`.
            done: `(N,)` bool, the episode ended, by a fall or by its time limit.
            valid: `(N,)` bool; where false the transition is not stored and another episode begins.
        """
        returns = torch.where(valid, self._gamma * torch.where(done, 0.0, self.returns) + reward, 0.0)
        self.returns.copy_(returns)
        self.largest_return.copy_(torch.maximum(self.largest_return, returns.abs().max()))
        self._merge(returns, valid)

    def _merge(self, returns: Tensor, valid: Tensor) -> None:
        """Chan et al. 1979: statistics of two sets from those of each."""
        seen = valid.sum()
        count = seen.clamp(min=1)
        mean = returns.sum() / count
        variance = torch.where(valid, (returns - mean).square(), 0.0).sum() / count
        total, shift = self.count + seen, mean - self.mean
        spread = self.variance * self.count + variance * seen + shift.square() * (self.count * seen / total)
        self.mean.add_(shift * (seen / total))
        self.variance.copy_(spread / total)
        self.count.copy_(total)

    def deviation(self) -> Tensor:
        """Standard deviation of G, 0-d."""
        return self.variance.sqrt()

    def divisor(self) -> Tensor:
        """What rewards are divided by, 0-d: at least the deviation, and enough for the largest G."""
        return torch.maximum((self.variance + EPSILON).sqrt(), self.largest_return / self._largest)
