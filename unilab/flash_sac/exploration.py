"""Exploration noise that every environment keeps for a random number of steps."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from unilab.environment import alias
from unilab.state import StateRegistry


def hold_probabilities(mu: float, longest: int) -> list[float]:
    """Probability of keeping noise for 1, 2, ... `longest` steps: a zeta distribution cut off there, n^-mu."""
    weights = [count**-mu for count in range(1, longest + 1)]
    return [weight / sum(weights) for weight in weights]


class HeldNoise:
    """Normal noise kept by each environment for some steps, and drawn anew where an episode begins.

    Args:
        num_envs: environments, N below.
        action_dim: width of the action, A below.
        mu: exponent of the zeta distribution of steps.
        longest: most steps.
        generator: random stream.
        registry: receives the buffers; what is held outlasts a tick.
        device: where they live.
    """

    def __init__(
        self,
        num_envs: int,
        action_dim: int,
        mu: float,
        longest: int,
        generator: torch.Generator,
        registry: StateRegistry,
        device: torch.device,
    ) -> None:
        self._generator = generator
        self._fresh = registry.tensor("act/noise", torch.zeros(num_envs, action_dim, device=device), lasting=False)
        self._chance = registry.tensor("act/chance", torch.zeros(num_envs, device=device), lasting=False)
        held = torch.zeros(num_envs, action_dim, device=device)
        self._held = registry.tensor("exploration/held", held, lasting=False)
        remaining = torch.zeros(num_envs, dtype=torch.int32, device=device)
        self._remaining = registry.tensor("exploration/remaining", remaining, lasting=False)
        cumulated = torch.tensor(hold_probabilities(mu, longest)).cumsum(0)[:-1]
        self._bounds = cumulated.to(device)  # (longest - 1,)

    def draw(self) -> None:
        """Draw noise and steps for every environment, whether it needs them or not."""
        self._fresh.normal_(generator=self._generator)
        self._chance.uniform_(generator=self._generator)

    def part(self, rows: slice) -> HeldNoise:
        """Some rows of it, on the same memory."""
        part = copy.copy(self)
        for name in ("_fresh", "_chance", "_held", "_remaining"):
            setattr(part, name, alias(getattr(self, name)[rows]))
        return part

    def noise(self, finished: Tensor) -> Tensor:
        """This step's noise, `(N, A)`; one step less remains.

        Args:
            finished: `(N,)` bool, an episode begins.
        """
        renew = finished | (self._remaining <= 0)
        steps = 1 + (self._chance.unsqueeze(1) >= self._bounds).sum(1)
        self._remaining.copy_(torch.where(renew, steps, self._remaining) - 1)
        self._held.copy_(torch.where(renew.unsqueeze(1), self._fresh, self._held))
        return self._held
