"""The objectives of FlashSAC: pure functions of tensors but for the running statistics of the networks they call."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from unilab.flash_sac.networks import CriticPair, SquashedGaussian, squash
from unilab.learner import Batch
from unilab.sac.objectives import project, shift

Bounds = tuple[float, float]


def target_entropy(action_dim: int, sigma: float) -> float:
    """Entropy of independent normal actions of deviation `sigma`: A/2 log(2 pi e sigma^2)."""
    return action_dim * 0.5 * math.log(2.0 * math.pi * math.e * sigma**2)


def lower_distribution(probabilities: Tensor, points: Tensor) -> Tensor:
    """For each row the whole distribution of the member that expects less.

    Args:
        probabilities: `(E, B, K)`.
        points: `(K,)` support.

    Returns:
        `(1, B, K)`.
    """
    lower = (probabilities * points).sum(-1).argmin(0)  # (B,)
    index = lower.view(1, -1, 1).expand(1, -1, probabilities.shape[-1])
    return probabilities.gather(0, index)


def joined_logits(critic: CriticPair, batch: Batch, next_action: Tensor) -> tuple[Tensor, Tensor]:
    """Logits `(E, B, K)` of this and of the next state and action, normalised over the rows of both."""
    states = torch.cat((batch.critic, batch.next_critic))
    actions = torch.cat((batch.action, next_action))
    now, following = critic(states, actions, training=True).chunk(2, 1)
    return now, following


def critic_loss(
    logits: Tensor,
    target_logits: Tensor,
    reward: Tensor,
    discount: Tensor,
    gamma: float,
    points: Tensor,
    bounds: Bounds,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of every critic against the projected distribution of the lower target.

    Args:
        logits: `(E, B, K)`.
        target_logits: `(E, B, K)` of the next states.
        reward: `(B,)`, scaled and with the discounted entropy of the next action.
        discount: `(B,)`, each 0 or `gamma`.
        gamma: discount of rows that run on.
        points: `(K,)` support.
        bounds: its ends.

    Returns:
        The loss, mean over members and rows, and the expected targets `(B,)`.
    """
    with torch.no_grad():
        chosen = lower_distribution(F.softmax(target_logits, -1), points)
        mass = project(chosen, reward, discount, gamma, points, bounds)
        expected = (chosen * shift(reward, discount, points, bounds)).sum(-1).squeeze(0)
    return -(mass * F.log_softmax(logits, -1)).sum(-1).mean(), expected


def entropic_reward(
    batch: Batch, divisor: Tensor, alpha: Tensor, log_pi: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """What the atoms are shifted by, `(B,)`, and their discount `(B,)`: a target is r + discount (z - alpha log pi)."""
    discount = gamma * (1.0 - batch.done + batch.timeout).clamp(0.0, 1.0)
    return batch.reward / divisor - discount * alpha * log_pi, discount


def actor_loss(action_log_pi: Tensor, logits: Tensor, alpha: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy-regularised value of fresh actions, by the critic that expects less of each.

    Args:
        action_log_pi: log-densities of the actions, `(B,)`.
        logits: `(E, B, K)` of the critics.
        alpha: temperature.
        points: `(K,)` support.

    Returns:
        The loss mean(alpha log pi - min_j E[Q_j]) and the entropy -mean(log pi), which carries no gradient.
    """
    value = (F.softmax(logits, -1) * points).sum(-1).amin(0)
    return (alpha * action_log_pi - value).mean(), -action_log_pi.detach().mean()


def joined_policy(actor: SquashedGaussian, batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean and log-std `(B, A)` of this state's actions, normalised over the rows of this and the next state."""
    mean, log_std = actor(torch.cat((batch.obs, batch.next_obs)), training=True)
    rows = len(batch.obs)
    return mean[:rows], log_std[:rows]


def act_and_judge(
    mean: Tensor, log_std: Tensor, noise: Tensor, critic: CriticPair, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Log-densities `(B,)` of the policy's actions and the critics' logits of them, by their running statistics."""
    action, log_pi = squash(mean, log_std, noise)
    return log_pi, critic(batch.critic, action, training=False)
