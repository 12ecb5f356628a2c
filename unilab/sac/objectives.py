"""The two objectives of SAC and the categorical projection: pure functions of tensors, compiled together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from unilab.sac.networks import Actor, CriticPair

V_MIN, V_MAX = -20.0, 20.0
LOG_PROBABILITY_FLOOR = -30.0


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


def support(atoms: int, device: torch.device | str) -> Tensor:
    """Support points of the return distribution, `(atoms,)`."""
    return torch.linspace(V_MIN, V_MAX, atoms, device=device)


def project(probabilities: Tensor, shifted: Tensor, points: Tensor) -> Tensor:
    """Project distributions on shifted atoms back onto the support (Bellemare et al. 2017, algorithm 1).

    Each shifted atom gives its mass to its two neighbours in proportion to nearness, written as the hat function
    max(0, 1 - |Tz - z| / spacing), so that no scatter is needed.

    Args:
        probabilities: `(E, B, K)` mass on the shifted atoms.
        shifted: `(B, K)` where those atoms lie, within the support.
        points: `(K,)` the support.

    Returns:
        `(E, B, K)` mass on the support.
    """
    spacing = (V_MAX - V_MIN) / (points.numel() - 1)
    with torch.autocast(points.device.type, enabled=False):  # bfloat16 weights would not sum to one
        hat = (1.0 - (shifted.unsqueeze(-1) - points).abs() / spacing).clamp(0.0, 1.0)  # (B, from, to)
        # A sum per member, not one product: compiled, the hat is then never written to memory.
        return torch.stack([(member.unsqueeze(-1) * hat).sum(-2) for member in probabilities.unbind()])


def critic_objective(
    critic: CriticPair,
    target: CriticPair,
    batch: Batch,
    next_action: Tensor,
    log_pi: Tensor,
    alpha: Tensor,
    gamma: float,
    points: Tensor,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each critic against the projected distribution of its own target.

    Args:
        critic: the critics that learn.
        target: their targets; not differentiated.
        batch: `B` transitions.
        next_action: the actor's action in the next state, `(B, A)`.
        log_pi: its log-density, `(B,)`.
        alpha: temperature, 0-d.
        gamma: discount.
        points: `(K,)` support.

    Returns:
        The loss, summed over the members, and the expected targets `(E, B)`.
    """
    with torch.no_grad():
        bootstrap = (1.0 - batch.done + batch.timeout).clamp(0.0, 1.0)
        discount = gamma * bootstrap
        reward = batch.reward - discount * alpha * log_pi
        shifted = (reward.unsqueeze(-1) + discount.unsqueeze(-1) * points).clamp(V_MIN, V_MAX)
        probabilities = F.softmax(target(batch.next_critic, next_action).float(), -1)
        mass = project(probabilities, shifted, points)
        expected = (probabilities * shifted).sum(-1)  # the projection keeps the mean
    log_probabilities = F.log_softmax(critic(batch.critic, batch.action).float(), -1).clamp(min=LOG_PROBABILITY_FLOOR)
    loss = -(mass * log_probabilities).sum(-1).mean(-1).sum()
    return loss, expected


def actor_objective(
    actor: Actor, critic: CriticPair, batch: Batch, noise: Tensor, alpha: Tensor, points: Tensor
) -> tuple[Tensor, Tensor]:
    """Entropy-regularised value of fresh actions, mean over the critics.

    Args:
        actor: the policy that learns.
        critic: critics whose parameters take no gradient.
        batch: `B` transitions.
        noise: standard normal, `(B, A)`.
        alpha: temperature, 0-d.
        points: `(K,)` support.

    Returns:
        The loss mean(alpha log pi - mean_j E[Q_j]) and the entropy -mean(log pi), which carries no gradient.
    """
    action, log_pi = actor.sample(batch.obs, noise)
    probabilities = F.softmax(critic(batch.critic, action).float(), -1)
    value = (probabilities * points).sum(-1).mean(0)
    return (alpha * log_pi - value).mean(), -log_pi.detach().mean()
