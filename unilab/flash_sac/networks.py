"""Networks of FlashSAC: a squashed Gaussian actor and a pair of categorical critics."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unilab.flash_sac.layers import Trunk, UnitLinear, normalize_

LOG_STD_MIN, LOG_STD_MAX = -10.0, 2.0


class SquashedGaussian(nn.Module):
    """A Gaussian policy squashed by tanh, whatever its network."""

    def forward(self, obs: Tensor, training: bool = False) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation before squashing, both `(B, A)` float32.

        Args:
            obs: `(B, O)`.
            training: normalise by the statistics of these rows, where there is batch normalisation.
        """
        raise NotImplementedError

    def sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Action `(B, A)` and log-density `(B,)` under noise `(B, A)`, by the running statistics."""
        mean, log_std = self(obs)
        return squash(mean, log_std, noise)

    def deterministic(self, obs: Tensor) -> Tensor:
        """The squashed mean, `(B, A)`."""
        mean, _ = self(obs)
        return torch.tanh(mean)


class Actor(SquashedGaussian):
    """FlashSAC's own policy.

    Args:
        obs_dim: width of the policy observation, O below.
        action_dim: width of the action, A below; each component in (-1, 1).
        hidden: width.
        blocks: inverted residual blocks.
    """

    def __init__(self, obs_dim: int, action_dim: int, hidden: int, blocks: int) -> None:
        super().__init__()
        self.trunk = Trunk(1, obs_dim, hidden, blocks)
        self.mean, self.log_std = (UnitLinear(1, hidden, action_dim, bias=True) for _ in range(2))
        normalize_(self)

    def forward(self, obs: Tensor, training: bool = False) -> tuple[Tensor, Tensor]:
        """See `SquashedGaussian.forward`; log-std lies in [-10, 2]."""
        features = self.trunk(obs, training)
        mean, raw = self.mean(features).squeeze(0).float(), self.log_std(features).squeeze(0).float()
        return mean, LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (1.0 + torch.tanh(raw))


def squash(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Reparameterised action and its log-density.

    Args:
        mean: before squashing, `(B, A)`.
        log_std: `(B, A)`.
        noise: standard normal, `(B, A)`.

    Returns:
        Action `(B, A)` and log pi `(B,)`: sum over components of log N(u; mean, std) - 2 (log 2 - u - softplus(-2u)),
        with u = mean + std * noise; the second term is log(1 - tanh(u)^2).
    """
    raw = mean + log_std.exp() * noise
    gaussian = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    correction = 2.0 * (math.log(2.0) - raw - F.softplus(-2.0 * raw))
    return torch.tanh(raw), (gaussian - correction).sum(-1)


class CriticPair(nn.Module):
    """Independent categorical critics as one batched network.

    Args:
        critic_dim: width of the critic observation, C below.
        action_dim: width of the action, A below.
        hidden: width.
        blocks: inverted residual blocks.
        atoms: support points.
        members: independent critics.
    """

    def __init__(
        self, critic_dim: int, action_dim: int, hidden: int, blocks: int, atoms: int, members: int = 2
    ) -> None:
        super().__init__()
        self.trunk = Trunk(members, critic_dim + action_dim, hidden, blocks)
        self.head = UnitLinear(members, hidden, atoms, bias=True)
        normalize_(self)

    def forward(self, critic_obs: Tensor, action: Tensor, training: bool) -> Tensor:
        """Logits `(members, B, atoms)` of critic observations `(B, C)` and actions `(B, A)`, float32.

        Args:
            critic_obs: `(B, C)`.
            action: `(B, A)`.
            training: normalise by the statistics of these rows.
        """
        logits: Tensor = self.head(self.trunk(torch.cat((critic_obs, action), -1), training)).float()
        return logits
