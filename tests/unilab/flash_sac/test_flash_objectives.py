"""Objectives, held noise and reward scale of FlashSAC against hand-computed numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from unilab.flash_sac.exploration import HeldNoise, hold_probabilities
from unilab.flash_sac.objectives import (
    actor_loss,
    critic_loss,
    entropic_reward,
    joined_logits,
    lower_distribution,
    target_entropy,
)
from unilab.flash_sac.reward_scale import RewardScale
from unilab.learner import Batch
from unilab.sac.objectives import project, support
from unilab.state import StateRegistry

CPU = torch.device("cpu")
BOUNDS = (-5.0, 5.0)
POINTS = support(101, CPU, BOUNDS)


def batch(reward: list[float], done: list[float], timeout: list[float]) -> Batch:
    rows = len(reward)
    blank = torch.zeros(rows, 1)
    return Batch(blank, blank, blank, *map(torch.tensor, (reward, done, timeout)), blank, blank)


def atom(value: float) -> Tensor:
    """All mass on one support point, `(1, 1, 101)`."""
    return torch.isclose(POINTS, torch.tensor(value), atol=1e-4).float().view(1, 1, -1)


def test_target_entropies_are_the_documented_ones() -> None:
    assert target_entropy(29, 0.15) == pytest.approx(-13.867, abs=5e-4)
    assert target_entropy(12, 0.15) == pytest.approx(-5.738, abs=5e-4)
    assert target_entropy(1, 0.15) == pytest.approx(-0.47818, abs=5e-6)


def test_the_documented_projection() -> None:
    """z = 1, r = 0.5, gamma = 0.97: 1.47 lies 0.7 of the way from bin 64 to bin 65."""
    reward, discount = entropic_reward(batch([0.5], [0.0], [0.0]), torch.ones(()), torch.ones(()), torch.zeros(1), 0.97)
    mass = project(atom(1.0), reward, discount, 0.97, POINTS, BOUNDS)[0, 0]
    assert mass.nonzero().flatten().tolist() == [64, 65]
    assert mass[64:66].tolist() == pytest.approx([0.3, 0.7], abs=1e-4)


def test_entropy_is_a_bonus_before_the_clamp() -> None:
    """alpha 0.5 and log pi -0.4 move an atom up by 0.97 * 0.2, log pi 0.4 down; at the upper end it stays inside."""
    for log_pi, sign in ((-0.4, 1), (0.4, -1)):
        reward, discount = entropic_reward(
            batch([0.5], [0.0], [0.0]), torch.ones(()), torch.tensor([0.5]), torch.tensor([log_pi]), 0.97
        )
        mass = project(atom(1.0), reward, discount, 0.97, POINTS, BOUNDS)
        assert (mass * POINTS).sum().item() == pytest.approx(0.5 + 0.97 * (1 + sign * 0.2), abs=1e-5)
    reward, discount = entropic_reward(
        batch([4.0], [0.0], [0.0]), torch.ones(()), torch.tensor([1.0]), torch.tensor([3.0]), 0.97
    )
    mass = project(atom(5.0), reward, discount, 0.97, POINTS, BOUNDS)  # 4 + 0.97 (5 - 3), not min(5, 4 + 4.85) - 2.91
    assert (mass * POINTS).sum().item() == pytest.approx(5.0, abs=1e-5)


def test_ends_bootstrap_only_where_time_was_up_and_take_no_entropy() -> None:
    rows = batch([1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 1.0])
    reward, discount = entropic_reward(rows, torch.tensor(2.0), torch.tensor([0.1]), torch.full((3,), 5.0), 0.97)
    assert discount.tolist() == pytest.approx([0.97, 0.0, 0.97])
    assert reward.tolist() == pytest.approx([0.5 - 0.485, 0.5, 0.5 - 0.485])  # the reward alone is scaled


def test_the_whole_distribution_of_the_lower_member_is_chosen() -> None:
    """Row 0: the second member expects less; row 1: the first. No mixture of both."""
    points = torch.tensor([-1.0, 0.0, 1.0])
    first = torch.tensor([[0.0, 0.5, 0.5], [0.6, 0.1, 0.3]])
    second = torch.tensor([[0.3, 0.0, 0.7], [0.1, 0.8, 0.1]])
    chosen = lower_distribution(torch.stack((first, second)), points)
    assert torch.equal(chosen, torch.stack((second[0], first[1])).unsqueeze(0))


def test_the_critics_loss_is_a_mean_over_members_and_rows_against_one_target() -> None:
    source = torch.Generator().manual_seed(1)
    logits, target = torch.randn(2, 2, 4, 101, generator=source).unbind()
    reward, discount = torch.zeros(4), torch.full((4,), 0.97)
    loss, expected = critic_loss(logits, target, reward, discount, 0.97, POINTS, BOUNDS)
    probabilities = torch.softmax(target, -1)
    q = (probabilities * POINTS).sum(-1)
    lower = torch.where((q[0] < q[1]).unsqueeze(1), *probabilities)
    mass = project(lower.unsqueeze(0), reward, discount, 0.97, POINTS, BOUNDS)[0]
    logarithms = torch.log_softmax(logits, -1)
    parts = [-(mass * logarithms[member]).sum(1).mean() for member in range(2)]
    assert loss.item() == pytest.approx((parts[0] + parts[1]).item() / 2)
    torch.testing.assert_close(expected, 0.97 * q.amin(0))
    assert not expected.requires_grad


def test_the_actor_maximises_the_lower_value_and_the_entropy() -> None:
    points = torch.tensor([-1.0, 1.0])
    logits = torch.tensor([[[0.0, 0.0], [0.0, math.log(3)]], [[0.0, math.log(9)], [math.log(3), 0.0]]])
    # Values 0 and 0.5 of the first member, 0.8 and -0.5 of the second.
    log_pi = torch.tensor([2.0, -1.0], requires_grad=True)
    loss, entropy = actor_loss(log_pi, logits, torch.tensor([0.2]), points)
    assert loss.item() == pytest.approx(((0.4 - 0.0) + (-0.2 + 0.5)) / 2)
    assert entropy.item() == -0.5 and not entropy.requires_grad


def test_both_halves_go_through_the_critics_together() -> None:
    seen: list[tuple[Tensor, Tensor, bool]] = []

    def critic(states: Tensor, actions: Tensor, training: bool) -> Tensor:
        seen.append((states, actions, training))
        return states.unsqueeze(0)

    rows = replace(batch([0.0] * 2, [0.0] * 2, [0.0] * 2), critic=torch.tensor([[1.0], [2.0]]))
    rows = replace(rows, next_critic=torch.tensor([[3.0], [4.0]]), action=torch.tensor([[5.0], [6.0]]))
    now, following = joined_logits(critic, rows, torch.tensor([[7.0], [8.0]]))  # type: ignore[arg-type]
    ((states, actions, training),) = seen
    assert (states.flatten().tolist(), actions.flatten().tolist(), training) == ([1, 2, 3, 4], [5, 6, 7, 8], True)
    assert (now.flatten().tolist(), following.flatten().tolist()) == ([1, 2], [3, 4])


# --- held noise ------------------------------------------------------------------------------------------------------


def test_holding_times_are_the_documented_ones() -> None:
    found = hold_probabilities(2.0, 16)
    documented = "6312 1578 0701 0394 0252 0175 0129 0099 0078 0063 0052 0044 0037 0032 0028 0025"
    assert found == pytest.approx([int(part) / 10_000 for part in documented.split()], abs=5e-5)
    assert sum((index + 1) * share for index, share in enumerate(found)) == pytest.approx(2.134, abs=5e-4)


def held(envs: int) -> HeldNoise:
    generator = torch.Generator().manual_seed(3)
    return HeldNoise(envs, 2, 2.0, 16, generator, StateRegistry(), CPU)


def test_noise_is_held_for_a_zeta_number_of_steps() -> None:
    """Over 600 steps, so that spans cut off by the end weigh little."""
    noise, nobody, spans = held(300), torch.zeros(300, dtype=torch.bool), torch.zeros(17)
    age, before = torch.zeros(300), torch.zeros(300, 2)
    for _ in range(600):
        noise.draw()
        now = noise.noise(nobody).clone()
        new = (now != before).any(1)
        spans += torch.bincount(age[new].long(), minlength=17)[:17]
        age, before = torch.where(new, 1.0, age + 1), now
    shares = (spans[1:] / spans[1:].sum()).tolist()
    assert shares[:4] == pytest.approx(hold_probabilities(2.0, 16)[:4], abs=0.012)
    assert age.max() <= 16
    assert before.mean().abs() < 0.15 and before.std() == pytest.approx(1, abs=0.1)


def test_an_episodes_end_draws_anew_and_others_keep_theirs() -> None:
    noise = held(6)
    noise.draw()
    first = noise.noise(torch.ones(6, dtype=torch.bool)).clone()
    noise._remaining.fill_(5)
    noise.draw()
    finished = torch.tensor([True, False, False, False, False, True])
    second = noise.noise(finished)
    assert (second != first).any(1).tolist() == finished.tolist()
    assert noise._remaining[1:5].tolist() == [4] * 4


def test_parts_are_rows_of_the_whole() -> None:
    whole, parts = held(6), held(6)
    groups = [parts.part(slice(0, 4)), parts.part(slice(4, 6))]
    for number in range(8):
        finished = torch.arange(6) == number
        whole.draw()
        parts.draw()
        expected = whole.noise(finished)
        found = [part.noise(rows) for part, rows in zip(groups, finished.split((4, 2)), strict=True)]
        assert torch.equal(torch.cat(found), expected)


# --- reward scale ----------------------------------------------------------------------------------------------------


def scale(envs: int, gamma: float = 0.5, largest: float = 5.0) -> RewardScale:
    return RewardScale(envs, gamma, largest, StateRegistry(), CPU)


def mask(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def test_reward_scale_by_hand() -> None:
    """G of two environments: (2, 4); (0.5 * 2 + 1, 3), where the second's episode ends; (-1.5, 0 and not seen)."""
    found = scale(2)
    found.observe(torch.tensor([2.0, 4.0]), mask(0, 0), mask(1, 1))
    found.observe(torch.tensor([1.0, 3.0]), mask(0, 1), mask(1, 1))
    assert found.returns.tolist() == [2.0, 3.0]
    found.observe(torch.tensor([-2.5, 9.0]), mask(0, 0), mask(1, 0))
    assert found.returns.tolist() == [-1.5, 0.0]
    assert found.largest_return.item() == 4.0
    seen = torch.tensor([2.0, 4.0, 2.0, 3.0, -1.5], dtype=torch.float64)
    assert found.count.item() == pytest.approx(5, abs=1e-3)
    assert found.mean.item() == pytest.approx(seen.mean().item(), rel=1e-4)
    assert found.variance.item() == pytest.approx(seen.var(correction=0).item(), rel=1e-4)
    assert found.divisor().item() == pytest.approx(seen.std(correction=0).item(), rel=1e-4)


def test_the_largest_return_bounds_scaled_ones() -> None:
    found = scale(100)
    rewards = torch.zeros(100)
    rewards[0] = -40.0
    found.observe(rewards, torch.zeros(100, dtype=torch.bool), torch.ones(100, dtype=torch.bool))
    assert found.deviation().item() == pytest.approx(0.4 * math.sqrt(99), rel=1e-3)
    assert found.divisor().item() == pytest.approx(40 / 5)


def test_nothing_seen_changes_nothing_and_divides_by_one() -> None:
    found = scale(2)
    found.observe(torch.tensor([2.0, 4.0]), mask(0, 0), mask(0, 0))
    assert (found.mean.item(), found.variance.item(), found.largest_return.item()) == (0.0, 1.0, 0.0)
    assert found.count.item() == pytest.approx(1e-4)
    assert found.divisor().item() == pytest.approx(1.0)
