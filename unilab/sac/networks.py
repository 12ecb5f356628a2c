"""Networks of SAC: a squashed Gaussian actor and a pair of categorical critics evaluated as one batched network."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unilab.sac import fused

LOG_STD_MIN, LOG_STD_MAX = -5.0, 0.0
MEAN_LIMIT = 10.0
SQUASH_EPSILON = 1e-6
ALIGNMENT = 8  # matrix sizes that are no multiple of 8 fall off the fast bfloat16 kernels


class Actor(nn.Module):
    """Gaussian policy squashed by tanh, with zero-initialised heads.

    Three Linear-LayerNorm-SiLU blocks of widths `hidden`, `hidden / 2`, `hidden / 4`, then a mean and a log-std head.

    Args:
        obs_dim: width of the policy observation.
        action_dim: width of the action, each component in (-1, 1).
        hidden: first width.
    """

    def __init__(self, obs_dim: int, action_dim: int, hidden: int) -> None:
        super().__init__()
        widths = (obs_dim, hidden, hidden // 2, hidden // 4)
        blocks: list[nn.Module] = []
        for before, after in pairwise(widths):
            blocks += [nn.Linear(before, after), nn.LayerNorm(after), nn.SiLU()]
        self.trunk = nn.Sequential(*blocks)
        self.mean = _zero_linear(widths[-1], action_dim)
        self.log_std = _zero_linear(widths[-1], action_dim)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation before squashing, both `(B, A)`; log-std lies in [-5, 0]."""
        if fused.fusing(obs):
            mean, log_std = _joint(_fused_trunk(self.trunk, obs), self.mean, self.log_std)
        else:
            features = self.trunk(obs)
            mean, log_std = self.mean(features), self.log_std(features)
        mean = torch.nan_to_num(mean.float(), nan=0.0).clamp(-MEAN_LIMIT, MEAN_LIMIT)
        squashed = torch.tanh(log_std.float())
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (squashed + 1.0)
        return mean, torch.nan_to_num(log_std, nan=LOG_STD_MIN)

    def sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Reparameterised action and its log-density.

        Args:
            obs: `(B, O)`.
            noise: standard normal, `(B, A)`.

        Returns:
            Action `(B, A)` and log pi `(B,)`: sum over components of log N(u; mean, std) - log(1 - tanh(u)^2 + 1e-6)
            - log(1 + 1e-6), with u = mean + std * noise (Haarnoja et al. 2018, appendix C).
        """
        mean, log_std = self(obs)
        action = torch.tanh(mean + log_std.exp() * noise)
        gaussian = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        correction = torch.log(1.0 - action.square() + SQUASH_EPSILON) + math.log1p(SQUASH_EPSILON)
        return action, (gaussian - correction).sum(-1)

    def deterministic(self, obs: Tensor) -> Tensor:
        """The squashed mean, `(B, A)`."""
        mean, _ = self(obs)
        return torch.tanh(mean)


class CriticPair(nn.Module):
    """Independent categorical critics as one batched network: every parameter has a leading axis of members.

    Each member is three Linear-LayerNorm-SiLU blocks of widths `hidden`, `hidden / 2`, `hidden / 4` and a linear
    output of `atoms` logits.

    Args:
        critic_dim: width of the critic observation.
        action_dim: width of the action.
        hidden: first width.
        atoms: support points.
        members: independent critics.
    """

    def __init__(self, critic_dim: int, action_dim: int, hidden: int, atoms: int, members: int = 2) -> None:
        super().__init__()
        widths = (critic_dim + action_dim, hidden, hidden // 2, hidden // 4)
        self.blocks = nn.ModuleList(_Block(members, i, o) for i, o in pairwise(widths))
        self.head = _BatchedLinear(members, widths[-1], atoms)

    def forward(self, critic_obs: Tensor, action: Tensor) -> Tensor:
        """Logits `(members, B, atoms)` of critic observations `(B, C)` and actions `(B, A)`."""
        features = torch.cat((critic_obs, action), -1).unsqueeze(0)
        for block in self.blocks:
            features = block(features)
        logits: Tensor = self.head(features)
        return logits


class _BatchedLinear(nn.Module):
    def __init__(self, members: int, in_features: int, out_features: int) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(in_features)  # torch's default for a linear layer, weight and bias alike
        self.weight = nn.Parameter(torch.empty(members, in_features, out_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, out_features).uniform_(-bound, bound))

    def forward(self, features: Tensor) -> Tensor:
        return self.product(features) + self.bias

    def product(self, features: Tensor) -> Tensor:
        """`(members, B, out)` without the bias."""
        members, in_features, out_features = self.weight.shape
        pad_in, pad_out = -in_features % ALIGNMENT, -out_features % ALIGNMENT
        weight = F.pad(self.weight, (0, pad_out, 0, pad_in))
        product = torch.bmm(F.pad(features, (0, pad_in)).expand(members, -1, -1), weight)
        return product[..., :out_features]


class _Block(nn.Module):
    def __init__(self, members: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = _BatchedLinear(members, in_features, out_features)
        self.scale = nn.Parameter(torch.ones(members, 1, out_features))
        self.shift = nn.Parameter(torch.zeros(members, 1, out_features))

    def forward(self, features: Tensor) -> Tensor:
        if fused.fusing(features):
            product = self.linear.product(features)
            activation: Tensor = fused.norm_silu(product, self.linear.bias, self.scale, self.shift)
            return activation
        hidden = self.linear(features)
        return F.silu(F.layer_norm(hidden, hidden.shape[-1:]) * self.scale + self.shift)


def _zero_linear(in_features: int, out_features: int) -> nn.Linear:
    layer = nn.Linear(in_features, out_features)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _joint(features: Tensor, first: nn.Linear, second: nn.Linear) -> tuple[Tensor, ...]:
    """Two layers of one width in one product of an aligned size."""
    width = 2 * first.out_features
    weight = F.pad(torch.cat((first.weight, second.weight)), (0, 0, 0, -width % ALIGNMENT))
    product = F.linear(features, weight)[..., :width] + torch.cat((first.bias, second.bias))
    return product.chunk(2, -1)


def _fused_trunk(trunk: nn.Sequential, features: Tensor) -> Tensor:
    """The actor's blocks as a network of one member."""
    for index in range(0, len(trunk), 3):
        linear, norm = trunk[index], trunk[index + 1]
        assert isinstance(linear, nn.Linear) and isinstance(norm, nn.LayerNorm)
        pad = -linear.in_features % ALIGNMENT
        product = F.linear(F.pad(features, (0, pad)), F.pad(linear.weight, (0, pad)))
        rows = [parameter.view(1, 1, -1) for parameter in (linear.bias, norm.weight, norm.bias)]
        features = fused.norm_silu(product.unsqueeze(0), *rows).squeeze(0)
    return features
