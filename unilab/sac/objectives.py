"""The two objectives of SAC and the categorical projection: pure functions of tensors, compiled together."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from unilab.learner import Batch
from unilab.sac import fused
from unilab.sac.networks import Actor, CriticPair

V_MIN, V_MAX = -20.0, 20.0
BOUNDS = V_MIN, V_MAX
LOG_PROBABILITY_FLOOR = -30.0
INDEX_SLACK = 1e-3  # of one atom; covers the rounding of computed positions


def support(atoms: int, device: torch.device | str, bounds: tuple[float, float] = BOUNDS) -> Tensor:
    """Support points of the return distribution, `(atoms,)`."""
    return torch.linspace(*bounds, atoms, device=device)


def project(
    probabilities: Tensor,
    reward: Tensor,
    discount: Tensor,
    gamma: float,
    points: Tensor,
    bounds: tuple[float, float] = BOUNDS,
) -> Tensor:
    """Project the distributions of reward + discount * Z back onto the support (Bellemare et al. 2017, algorithm 1).

    Each shifted atom gives its mass to its two neighbours in proportion to nearness. Shifted atoms lie gamma spacings
    apart, so that a support point takes from a few consecutive ones, found by inverting the shift: no scatter.

    Args:
        probabilities: `(E, B, K)` mass on the atoms.
        reward: `(B,)`.
        discount: `(B,)`, each either 0 or `gamma`.
        gamma: the discount of rows that run on; 2 / gamma atoms lie within a spacing of a support point.
        points: `(K,)` the support.
        bounds: its ends.

    Returns:
        `(E, B, K)` mass on the support.
    """
    v_min, v_max = bounds
    atoms = points.numel()
    count = reach(atoms, gamma)
    reward, discount = reward.unsqueeze(-1), discount.unsqueeze(-1)
    low, high = reward + discount * points <= v_min, reward + discount * points >= v_max
    mass = (probabilities * low).sum(-1, keepdim=True) * (points == points[0])
    mass = mass + (probabilities * high).sum(-1, keepdim=True) * (points == points[-1])
    spacing = (v_max - v_min) / (atoms - 1)
    first = ((points - spacing - reward) / discount - v_min) / spacing - INDEX_SLACK
    first = torch.nan_to_num(first).ceil().clamp(0, atoms - count).long()  # (B, to)
    for source in (first + index for index in range(count)):  # unrolled: compiled, one pass over the support points
        shifted = reward + discount * points[source]
        inside = _hat(shifted, points, bounds).masked_fill((shifted <= v_min) | (shifted >= v_max), 0.0)
        mass = mass + probabilities.gather(-1, source.expand_as(probabilities)) * inside
    alone = probabilities.sum(-1, keepdim=True) * _hat(reward.clamp(v_min, v_max), points, bounds)
    return torch.where(discount == 0, alone, mass)  # without a discount all atoms land on the reward


def reach(atoms: int, gamma: float) -> int:
    """How many consecutive shifted atoms can lie within a spacing of a support point."""
    return min(atoms, int(2.0 / max(gamma, 1.0 / atoms) + INDEX_SLACK) + 1)


def shift(reward: Tensor, discount: Tensor, points: Tensor, bounds: tuple[float, float] = BOUNDS) -> Tensor:
    """Where the atoms land, cut off at the ends, `(B, K)`."""
    return (reward.unsqueeze(-1) + discount.unsqueeze(-1) * points).clamp(*bounds)


def _hat(shifted: Tensor, points: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Share of a shifted atom's mass that a support point takes: max(0, 1 - distance / spacing)."""
    return (1.0 - (shifted - points).abs() * ((points.numel() - 1) / (bounds[1] - bounds[0]))).clamp(min=0.0)


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
        target_logits = target(batch.next_critic, next_action).float()
    logits = critic(batch.critic, batch.action).float()
    if fused.fusing(logits):
        losses, _, expected = fused.cross_entropy(logits, target_logits, reward, discount, points, gamma)
        return losses.mean(-1).sum(), expected
    with torch.no_grad():
        probabilities = F.softmax(target_logits, -1)
        mass = project(probabilities, reward, discount, gamma, points)
        expected = (probabilities * shift(reward, discount, points)).sum(-1)  # the projection keeps the mean
    log_probabilities = F.log_softmax(logits, -1).clamp(min=LOG_PROBABILITY_FLOOR)
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


def temperature_objective(log_alpha: Tensor, log_pi: Tensor, target_entropy: float) -> Tensor:
    """Temperature times the excess of the entropy over its target.

    Args:
        log_alpha: `(1,)`.
        log_pi: log-densities of the actor's actions, `(B,)`; not differentiated.
        target_entropy: entropy to hold.
    """
    return -(log_alpha.exp() * (log_pi + target_entropy).mean()).sum()
