from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unilab.sac.networks import Actor, CriticPair
from unilab.sac.objectives import Batch, actor_objective, critic_objective, project, support

CPU = torch.device("cpu")
POINTS = support(5, CPU)  # -20, -10, 0, 10, 20
GAMMA = 0.5


def two_neighbours(probabilities: Tensor, shifted: Tensor, points: Tensor) -> Tensor:
    """The projection as Bellemare et al. write it: floor and next atom, scattered with index_add; one member."""
    rows, atoms = probabilities.shape
    position = (shifted - points[0]) / (points[1] - points[0])
    lower = position.floor().clamp(0, atoms - 1)
    upper = (lower + 1).clamp(max=atoms - 1)
    share = position - lower
    offset = torch.arange(rows).unsqueeze(1) * atoms
    mass = torch.zeros(rows * atoms, dtype=probabilities.dtype)
    mass.index_add_(0, (lower.long() + offset).flatten(), (probabilities * (1 - share)).flatten())
    mass.index_add_(0, (upper.long() + offset).flatten(), (probabilities * share).flatten())
    return mass.view(rows, atoms)


def every_pair(probabilities: Tensor, shifted: Tensor, points: Tensor) -> Tensor:
    """The projection as a dense sum: every shifted atom against every support point; all members."""
    spacing = 40 / (len(points) - 1)
    hat = (1 - (shifted.unsqueeze(-1) - points).abs() / spacing).clamp(0, 1)  # (B, from, to)
    return torch.stack([(member.unsqueeze(-1) * hat).sum(1) for member in probabilities])


def shift(reward: Tensor, discount: Tensor, points: Tensor) -> Tensor:
    """Where the atoms land, `(B, K)`."""
    return (reward.unsqueeze(1) + discount.unsqueeze(1) * points).clamp(-20, 20)


def random_mass(members: int, rows: int, atoms: int) -> Tensor:
    return torch.softmax(2 * torch.randn(members, rows, atoms, generator=torch.Generator().manual_seed(1)), -1)


def random_returns(rows: int, gamma: float) -> tuple[Tensor, Tensor]:
    """Rewards on both sides, so that some atoms are cut off at the ends, and discounts of which a third are 0."""
    source = torch.Generator().manual_seed(2)
    reward = 8 * torch.randn(rows, generator=source)
    return reward, gamma * (torch.rand(rows, generator=source) > 0.35).float()


# --- projection ------------------------------------------------------------------------------------------------------


def test_support_spans_minus_twenty_to_twenty() -> None:
    assert POINTS.tolist() == [-20, -10, 0, 10, 20]
    points = support(101, CPU)
    assert [points[index].item() for index in (0, 50, 100)] == pytest.approx([-20, 0, 20], abs=1e-6)
    assert points.diff().tolist() == pytest.approx([0.4] * 100, abs=1e-5)


@pytest.mark.parametrize("gamma", [0.5, 0.0])
@pytest.mark.parametrize(
    ("at", "mass"),
    [
        (10.0, [0, 0, 0, 1, 0]),
        (0.0, [0, 0, 1, 0, 0]),
        (3.0, [0, 0, 0.7, 0.3, 0]),
        (-12.5, [0.25, 0.75, 0, 0, 0]),
        (19.0, [0, 0, 0, 0.1, 0.9]),
        (20.0, [0, 0, 0, 0, 1]),
        (-20.0, [1, 0, 0, 0, 0]),
        (25.0, [0, 0, 0, 0, 1]),
        (-25.0, [1, 0, 0, 0, 0]),
    ],
)
def test_projection_of_one_atom_by_hand(at: float, mass: list[float], gamma: float) -> None:
    """All mass sits on the fourth atom, 10, which moves to `at`; the others move elsewhere with none."""
    reward, discount = torch.tensor([at - gamma * 10]), torch.tensor([gamma])
    probabilities = torch.tensor([[[0.0, 0.0, 0.0, 1.0, 0.0]]])
    projected = project(probabilities, reward, discount, gamma, POINTS)
    assert projected.flatten().tolist() == pytest.approx(mass, abs=1e-6)


def test_projection_of_a_whole_distribution_by_hand() -> None:
    """r = 4, discount 0.5: atoms go to -6, -1, 4, 9, 14 and carry 0.1, 0.2, 0.4, 0.2, 0.1."""
    probabilities = torch.tensor([[[0.1, 0.2, 0.4, 0.2, 0.1]]])
    expected = [0, 0.1 * 0.6 + 0.2 * 0.1, 0.1 * 0.4 + 0.2 * 0.9 + 0.4 * 0.6 + 0.2 * 0.1]
    expected += [0.4 * 0.4 + 0.2 * 0.9 + 0.1 * 0.6, 0.1 * 0.4]
    projected = project(probabilities, torch.tensor([4.0]), torch.tensor([0.5]), 0.5, POINTS)
    assert projected.flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_projection_cuts_off_at_both_ends_by_hand() -> None:
    """r = 12 and r = -12, discount 0.9: atoms go to -6, 3, 12, 21, 30 and to -30, -21, -12, -3, 6."""
    probabilities = torch.tensor([[[0.1, 0.2, 0.4, 0.2, 0.1]]]).expand(1, 2, 5)
    up = [0, 0.1 * 0.6, 0.1 * 0.4 + 0.2 * 0.7, 0.2 * 0.3 + 0.4 * 0.8, 0.4 * 0.2 + 0.2 + 0.1]
    projected = project(probabilities, torch.tensor([12.0, -12.0]), torch.tensor([0.9, 0.9]), 0.9, POINTS)
    assert projected[0, 0].tolist() == pytest.approx(up, abs=1e-6)
    assert projected[0, 1].tolist() == pytest.approx(up[::-1], abs=1e-6)


def test_unmoved_atoms_keep_their_mass() -> None:
    mass = random_mass(2, 4, 5)
    projected = project(mass, torch.zeros(4), torch.ones(4), 1.0, POINTS)
    torch.testing.assert_close(projected, mass, rtol=0, atol=1e-7)


@pytest.mark.parametrize("gamma", [0.5, 0.97])
@pytest.mark.parametrize("atoms", [5, 101])
def test_projection_equals_two_neighbours_with_index_add(atoms: int, gamma: float) -> None:
    points, mass = support(atoms, CPU), random_mass(2, 64, atoms)
    reward, discount = random_returns(64, gamma)
    shifted = shift(reward, discount, points)
    assert (shifted.abs() == 20).any()
    ours = project(mass, reward, discount, gamma, points)
    exact_points = torch.linspace(-20, 20, atoms, dtype=torch.float64)
    for member in range(2):
        exact = two_neighbours(mass[member].double(), shifted.double(), exact_points)
        # float32 points near 20 are off by up to 1e-6, a share of 2.5e-6 of the spacing of 0.4.
        torch.testing.assert_close(ours[member].double(), exact, rtol=0, atol=2e-6)


GAMMAS = [0.0, 0.001, 0.02, 0.1, 1 / 3, 0.5, 2 / 3, 0.9, 0.97, 0.99, 0.9999]


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("atoms", [2, 3, 5, 101, 501])
def test_projection_equals_the_sum_over_every_pair(atoms: int, gamma: float) -> None:
    """Also where shifted atoms fall exactly on support points, on the ends and far beyond them."""
    points, mass = support(atoms, CPU), random_mass(2, 128, atoms)
    reward, discount = random_returns(128, gamma)
    reward[:40] = points[torch.arange(40) % atoms]
    reward[40:60] = 40 / (atoms - 1) * torch.arange(-10, 10)
    reward[60:70] = torch.tensor([20.0, -20, 40, -40, 1e6, -1e6, 1e30, -1e30, math.inf, -math.inf])
    reward[70:80], discount[60:75], discount[75:80] = reward[60:70].clone(), gamma, 0.0
    ours = project(mass, reward, discount, gamma, points)
    # Both round where an atom lands alike; sums of shares in another order remain, measured 1.1e-6.
    expected = every_pair(mass, shift(reward, discount, points), points)
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("gamma", [0.1, 0.5, 0.97])
@pytest.mark.parametrize("atoms", [101, 501])
def test_projection_loses_no_atom_that_lands_on_a_support_point(atoms: int, gamma: float) -> None:
    """Rounding decides there which atoms seem in reach; too narrow a reach would lose up to 3e-5 of the mass."""
    rows, source, points = 150, torch.Generator().manual_seed(3), support(atoms, CPU)
    start, landing = torch.randint(atoms, (2, rows), generator=source)
    mass = torch.nn.functional.one_hot(start, atoms).float().unsqueeze(0)
    reward = points[landing] - gamma * points[start] + 1e-5 * torch.randn(rows, generator=source)
    discount = torch.full((rows,), gamma)
    ours = project(mass, reward, discount, gamma, points)
    expected = every_pair(mass, shift(reward, discount, points), points)
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("gamma", [0.5, 0.97])
@pytest.mark.parametrize("atoms", [2, 5, 101])
def test_projection_keeps_mass_and_mean(atoms: int, gamma: float) -> None:
    points, mass = support(atoms, CPU), random_mass(3, 64, atoms)
    reward, discount = random_returns(64, gamma)
    ours = project(mass, reward, discount, gamma, points)
    assert ours.shape == (3, 64, atoms)
    assert (ours >= 0).all()
    torch.testing.assert_close(ours.sum(-1), torch.ones(3, 64), rtol=0, atol=5e-6)
    mean = (mass * shift(reward, discount, points)).sum(-1)
    torch.testing.assert_close((ours * points).sum(-1), mean, rtol=0, atol=5e-5)


@pytest.mark.parametrize("discount", [0.0, 0.97])
def test_projection_hides_no_nan(discount: float) -> None:
    """Neither of the reward nor of the probabilities, and only in the row that has it."""
    points, mass = support(101, CPU), random_mass(2, 3, 101)
    mass[1, 2, 50] = math.nan
    reward = torch.tensor([0.0, math.nan, 0.0])
    ours = project(mass, reward, torch.full((3,), discount), 0.97, points)
    assert ours.isnan().any(-1).tolist() == [[False, True, False], [False, True, True]]


def test_projection_ignores_autocast() -> None:
    """In bfloat16 the weights of two neighbours would not sum to one."""
    points, mass = support(101, CPU), random_mass(2, 64, 101)
    arguments = (mass, *random_returns(64, 0.97), 0.97, points)
    with torch.autocast("cpu", torch.bfloat16):
        ours = project(*arguments)
    assert torch.equal(ours, project(*arguments))


# --- critic objective ------------------------------------------------------------------------------------------------


class FixedActor:
    """Returns the action and log pi it was given, and remembers what it saw."""

    def __init__(self, action: Tensor, log_pi: Tensor) -> None:
        self.action, self.log_pi, self.seen = action, log_pi, []

    def sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append((obs, noise))
        return self.action, self.log_pi


class FixedCritic:
    """Returns the logits it was given, and remembers what it saw."""

    def __init__(self, logits: Tensor) -> None:
        self.logits, self.seen = logits, []

    def __call__(self, critic_obs: Tensor, action: Tensor) -> Tensor:
        self.seen.append((critic_obs, action))
        return self.logits


def certain(*values: float) -> Tensor:
    """Logits (1, B, 5) that put all mass on these support points."""
    return 1000.0 * (torch.tensor(values).unsqueeze(1) == POINTS).float().unsqueeze(0)


def batch(rows: int, **given: Tensor) -> Batch:
    zeros = {name: torch.zeros(rows) for name in ("reward", "done", "timeout")}
    for index, (name, width) in enumerate(
        (("obs", 2), ("next_obs", 2), ("action", 1), ("critic", 3), ("next_critic", 3))
    ):
        zeros[name] = torch.full((rows, width), float(index))
    return Batch(**{**zeros, **given})


def evaluate(
    data: Batch, online: Tensor, target: Tensor, alpha: float = 0.5, log_pi: float = -2.0
) -> tuple[Tensor, Tensor]:
    rows = len(data.reward)
    drawn = (torch.zeros(rows, 1), torch.full((rows,), log_pi))
    critics: Any = (FixedCritic(online), FixedCritic(target))
    return critic_objective(*critics, data, *drawn, torch.tensor(alpha), GAMMA, POINTS)


@pytest.mark.parametrize(
    ("done", "timeout", "expected"),
    [
        (0.0, 0.0, 1.5 + 0.5 * (0.5 * 2) + 0.5 * 10),  # runs on
        (1.0, 0.0, 1.5),  # fell: neither value nor entropy of the next state counts
        (1.0, 1.0, 1.5 + 0.5 * (0.5 * 2) + 0.5 * 10),  # cut by the time limit: as if it ran on
        (0.0, 1.0, 1.5 + 0.5 * (0.5 * 2) + 0.5 * 10),  # never written so; the bootstrap stays 1
    ],
)
def test_target_by_hand(done: float, timeout: float, expected: float) -> None:
    """r = 1.5, gamma 0.5, alpha 0.5, log pi -2, and a target certain of 10."""
    data = batch(1, reward=torch.tensor([1.5]), done=torch.tensor([done]), timeout=torch.tensor([timeout]))
    _, target = evaluate(data, torch.zeros(1, 1, 5), certain(10))
    assert target.item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("log_pi", "expected"), [(-2.0, 3.5), (2.0, 1.5), (0.0, 2.5)])
def test_entropy_raises_the_target(log_pi: float, expected: float) -> None:
    """r' = 2.5 - 0.5 * 1 * 1.0 * log pi, the next value being 0: an unlikely action is worth more."""
    data = batch(1, reward=torch.tensor([2.5]))
    _, target = evaluate(data, torch.zeros(1, 1, 5), certain(0), alpha=1.0, log_pi=log_pi)
    assert target.item() == pytest.approx(expected, abs=1e-5)


def test_targets_are_clamped_to_the_support() -> None:
    data = batch(2, reward=torch.tensor([50.0, -50.0]))
    _, target = evaluate(data, torch.zeros(1, 2, 5), certain(20, -20))
    assert target.flatten().tolist() == [20, -20]


def test_cross_entropy_by_hand() -> None:
    """Each member against its own target: done, r = 3 gives 0.7 on atom 0 and 0.3 on atom 10; sums over members."""
    data = batch(2, reward=torch.tensor([3.0, -20.0]), done=torch.ones(2))
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0, 0.0]], [[0.0, 0.0, 1.0, 0.0, 0.0]] * 2])
    loss, _ = evaluate(data, logits, torch.zeros(2, 2, 5))
    first = (math.log(5) + math.log(math.exp(2) + 4) - 2) / 2
    partition = math.log(math.exp(1) + 4)
    second = ((partition - 0.7) + partition) / 2
    assert loss.item() == pytest.approx(first + second, rel=1e-6)


def test_each_critic_learns_from_its_own_target() -> None:
    """Targets certain of 20 and -20, gamma 0.5: own returns 10 and -10. A minimum or a mean would pull both alike."""
    data, online = batch(1), torch.zeros(2, 1, 5, requires_grad=True)
    loss, target = evaluate(data, online, torch.cat((certain(20), certain(-20))), alpha=0.0)
    assert target.tolist() == [[10.0], [-10.0]]
    loss.backward()
    expected = torch.full((2, 1, 5), 0.2)
    expected[0, 0, 3] -= 1
    expected[1, 0, 1] -= 1
    torch.testing.assert_close(online.grad, expected)


def test_log_probabilities_have_a_floor() -> None:
    """A return on an atom with log-probability -100 costs 30 and pulls no more."""
    data = batch(2, reward=torch.tensor([20.0, 20.0]), done=torch.ones(2))
    online = torch.tensor([[[0.0, -100, -100, -100, -100], [0.0, -100, -100, -100, -20]]], requires_grad=True)
    loss, _ = evaluate(data, online, torch.zeros(1, 2, 5))
    assert loss.item() == pytest.approx((30 + 20) / 2)
    loss.backward()
    assert (online.grad[0, 0] == 0).all()
    assert online.grad[0, 1, 4].item() == pytest.approx(-0.5)


def test_critics_see_what_belongs_to_them() -> None:
    """Target: next critic observation and the actor's next action; online: what was stored."""
    data = batch(2)
    next_action, log_pi = torch.full((2, 1), 0.25), torch.tensor([-1.0, -3.0])
    online: Any = FixedCritic(torch.zeros(2, 2, 5, requires_grad=True))
    target: Any = FixedCritic(torch.zeros(2, 2, 5, requires_grad=True))
    args = (data, next_action, log_pi, torch.tensor(0.1), GAMMA, POINTS)
    loss, expected = critic_objective(online, target, *args)
    assert target.seen == [(data.next_critic, next_action)]
    assert online.seen == [(data.critic, data.action)]
    assert expected.shape == (2, 2)
    assert loss.shape == ()
    loss.backward()
    assert target.logits.grad is None
    assert not expected.requires_grad


def test_critic_objective_differentiates_the_online_critic_alone() -> None:
    torch.manual_seed(0)
    actor, online, target = Actor(2, 1, 8), CriticPair(3, 1, 8, 5), CriticPair(3, 1, 8, 5)
    data = batch(4, reward=torch.randn(4))
    drawn = actor.sample(data.next_obs, torch.randn(4, 1))
    assert all(value.requires_grad for value in drawn)
    loss, expected = critic_objective(online, target, data, *drawn, torch.tensor(0.1), GAMMA, POINTS)
    loss.backward()
    assert not expected.requires_grad
    assert _has_gradient(online) == [True] * len(list(online.parameters()))
    assert not any(_has_gradient(actor) + _has_gradient(target))


@pytest.mark.parametrize("done", [0.0, 1.0])
def test_a_nan_reward_is_not_hidden(done: float) -> None:
    data = batch(2, reward=torch.tensor([1.0, math.nan]), done=torch.full((2,), done))
    loss, _ = evaluate(data, torch.zeros(2, 2, 5), torch.zeros(2, 2, 5))
    assert loss.isnan()


# --- actor objective -------------------------------------------------------------------------------------------------


def test_actor_loss_by_hand() -> None:
    """Members certain of 10 and -20 in row 0, 20 and 20 in row 1: values -5 and 20; alpha 0.5, log pi -2 and 4."""
    data, noise = batch(2), torch.ones(2, 1)
    action = torch.full((2, 1), 0.25)
    actor: Any = FixedActor(action, torch.tensor([-2.0, 4.0]))
    critic: Any = FixedCritic(torch.cat((certain(10, 20), certain(-20, 20))))
    loss, entropy = actor_objective(actor, critic, data, noise, torch.tensor(0.5), POINTS)
    assert loss.item() == pytest.approx(((-1 + 5) + (2 - 20)) / 2)
    assert entropy.item() == -1
    assert actor.seen == [(data.obs, noise)]
    assert critic.seen == [(data.critic, action)]


def test_actor_objective_reaches_the_actor_through_frozen_critics() -> None:
    torch.manual_seed(0)
    actor, critic = Actor(2, 1, 8), CriticPair(3, 1, 8, 5).requires_grad_(False)
    nn.init.normal_(actor.mean.weight)
    nn.init.normal_(actor.log_std.weight)
    args = (batch(4, obs=torch.randn(4, 2)), torch.randn(4, 1), torch.tensor(0.1), POINTS)
    loss, entropy = actor_objective(actor, critic, *args)
    loss.backward()
    assert not entropy.requires_grad
    assert all(_has_gradient(actor))
    assert not any(_has_gradient(critic))


def test_actor_gradient_by_finite_differences() -> None:
    """Both ways to the loss count: the value of the action and its log-density, alpha times."""
    torch.manual_seed(0)
    actor, critic = Actor(2, 1, 8), CriticPair(3, 1, 8, 5).requires_grad_(False)
    for parameter in critic.parameters():
        parameter.mul_(3)
    args = (critic, batch(4), torch.randn(4, 1), torch.tensor(2.0), POINTS)
    actor_objective(actor, *args)[0].backward()
    for bias in (actor.mean.bias, actor.log_std.bias):
        losses = []
        for step in (1e-2, -2e-2):
            bias.data.add_(step)
            losses.append(actor_objective(actor, *args)[0].item())
        bias.data.add_(1e-2)
        assert abs(bias.grad.item()) > 0.1
        assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(bias.grad.item(), rel=1e-2)


def test_bfloat16_autocast_changes_losses_by_rounding_alone() -> None:
    torch.manual_seed(0)
    actor, online, target = Actor(2, 1, 32), CriticPair(3, 1, 32, 101), CriticPair(3, 1, 32, 101)
    data = batch(64, critic=torch.randn(64, 3), reward=torch.randn(64))
    noise, alpha, points = torch.randn(64, 1), torch.tensor(0.1), support(101, CPU)

    def losses() -> tuple[Tensor, ...]:
        next_action, log_pi = actor.sample(data.next_obs, noise)
        args = (data, next_action, log_pi, alpha, GAMMA, points)
        critic_loss, expected = critic_objective(online, target, *args)
        actor_loss, entropy = actor_objective(actor, online, data, noise, alpha, points)
        return critic_loss, actor_loss, entropy, log_pi, expected

    exact = losses()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = losses()
    for ours, theirs in zip(rounded, exact, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.1)
    assert rounded[0] != exact[0]


def _has_gradient(module: nn.Module) -> list[bool]:
    return [p.grad is not None and bool(p.grad.count_nonzero()) for p in module.parameters()]
