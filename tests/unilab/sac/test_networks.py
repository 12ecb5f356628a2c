from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from unilab.sac.networks import Actor, CriticPair, _BatchedLinear

OBS, CRITIC, ACTION, HIDDEN, ATOMS = 6, 7, 3, 16, 11


def noise_of(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def fresh() -> Actor:
    torch.manual_seed(1)
    return Actor(OBS, ACTION, HIDDEN)


@pytest.fixture
def actor(fresh: Actor) -> Actor:
    """An actor whose heads are not zero: means of about 0.5, log-stds on both sides of -2.5."""
    for head in (fresh.mean, fresh.log_std):
        nn.init.normal_(head.weight, std=0.4)
        nn.init.normal_(head.bias, std=0.2)
    return fresh


@pytest.fixture
def critic() -> CriticPair:
    """Critics with every parameter moved, those that start at 1 and 0 included."""
    torch.manual_seed(2)
    critic = CriticPair(CRITIC, ACTION, HIDDEN, ATOMS)
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return critic


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_default_sizes_have_the_published_numbers_of_parameters() -> None:
    actor, critic = Actor(98, 29, 512), CriticPair(101, 29, 768, 101)
    assert sum(p.numel() for p in actor.parameters()) == 224_186
    assert len(list(actor.parameters())) == 16
    assert sum(p.numel() for p in critic.parameters()) == 984_010
    assert all(p.shape[0] == 2 for p in critic.parameters())
    assert 2 * len(list(critic.parameters())) == 28


def test_widths_halve_twice(fresh: Actor) -> None:
    layers = [layer for layer in fresh.trunk if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in layers] == [(6, 16), (16, 8), (8, 4)]
    assert [type(layer) for layer in fresh.trunk] == [nn.Linear, nn.LayerNorm, nn.SiLU] * 3


# --- actor -----------------------------------------------------------------------------------------------------------


def test_zero_heads_start_at_mean_zero_and_log_std_minus_two_and_a_half(fresh: Actor) -> None:
    mean, log_std = fresh(noise_of(4, OBS))
    assert mean.tolist() == [[0.0] * ACTION] * 4
    assert log_std.tolist() == [[-2.5] * ACTION] * 4
    assert (fresh.deterministic(noise_of(4, OBS)) == 0).all()


def test_log_pi_by_hand(fresh: Actor) -> None:
    """One component at mean 0.3 and std exp(-2.5), noise -1.5: u = 0.17687250, log N = 0.45606147."""
    fresh.mean.bias.data.fill_(0.3)
    action, log_pi = fresh.sample(noise_of(2, OBS), torch.full((2, ACTION), -1.5))
    a = math.tanh(0.3 - 1.5 * math.exp(-2.5))
    normal = -0.5 * 1.5**2 + 2.5 - 0.5 * math.log(2 * math.pi)
    assert normal == pytest.approx(0.45606147, abs=1e-8)
    single = normal - math.log(1 - a * a + 1e-6) - math.log(1 + 1e-6)
    assert action.flatten().tolist() == pytest.approx([a] * 6, rel=1e-6)
    assert log_pi.tolist() == pytest.approx([ACTION * single] * 2, rel=1e-6)


def test_log_pi_against_torch_distributions(actor: Actor) -> None:
    """Against the exact density in float64. Each component's 1e-6 lowers ours by at most 1e-6 / (1 - a^2)."""
    obs, noise = noise_of(256, OBS, seed=3), noise_of(256, ACTION, seed=4)
    mean, log_std = (part.detach().double() for part in actor(obs))
    assert mean.abs().max() > 0.5
    base = Independent(Normal(mean, log_std.exp()), 1)
    squash = TanhTransform(cache_size=1)  # the cache keeps u, so that no atanh is taken
    exact_action = squash(mean + log_std.exp() * noise.double())
    exact = TransformedDistribution(base, squash).log_prob(exact_action)
    action, log_pi = actor.sample(obs, noise)
    torch.testing.assert_close(action.double(), exact_action, rtol=1e-6, atol=1e-6)
    slack = (1e-6 / (1 - exact_action.square()) + 1e-6).sum(-1)
    error = (log_pi.detach().double() - exact).abs()
    assert (error <= slack + 5e-6).all()  # float32 rounding


def test_log_pi_integrates_to_one(fresh: Actor) -> None:
    """exp(log pi) is the density of the *squashed* action: its integral over (-1, 1) is 1."""
    actor = Actor(OBS, 1, HIDDEN)
    actor.mean.bias.data.fill_(0.4)
    actor.log_std.bias.data.fill_(0.3)
    noise = torch.linspace(-6, 6, 4001).unsqueeze(1)
    action, log_pi = actor.sample(torch.zeros(4001, OBS), noise)
    assert torch.trapezoid(log_pi.exp(), action[:, 0]).item() == pytest.approx(1, abs=1e-4)


def test_action_is_the_squashed_gaussian(actor: Actor) -> None:
    obs, noise = noise_of(8, OBS), noise_of(8, ACTION, seed=6)
    mean, log_std = actor(obs)
    action, _ = actor.sample(obs, noise)
    torch.testing.assert_close(action, torch.tanh(mean + log_std.exp() * noise))
    assert torch.equal(actor.deterministic(obs), torch.tanh(mean))
    assert torch.equal(actor.sample(obs, torch.zeros(8, ACTION))[0], actor.deterministic(obs))


def test_samples_are_differentiable_through_mean_and_std(actor: Actor) -> None:
    """With u = m + s e: da/dm = 1 - a^2 and da/d(log s) = (1 - a^2) s e."""
    obs, noise = noise_of(1, OBS), noise_of(1, ACTION, seed=6)
    mean, log_std = actor(obs)
    action, _ = actor.sample(obs, noise)
    action.sum().backward()
    slope = 1 - action.square()
    torch.testing.assert_close(actor.mean.bias.grad, slope[0])
    raw = torch.tanh(actor.log_std(actor.trunk(obs)))
    expected = slope * log_std.exp() * noise * 2.5 * (1 - raw.square())
    torch.testing.assert_close(actor.log_std.bias.grad, expected[0])
    assert mean.requires_grad


def test_log_pi_is_differentiable(actor: Actor) -> None:
    """d log pi / dm = 2 a (1 - a^2) / (1 - a^2 + 1e-6): the Gaussian part does not move with its mean."""
    action, log_pi = actor.sample(noise_of(1, OBS), noise_of(1, ACTION, seed=6))
    log_pi.sum().backward()
    torch.testing.assert_close(actor.mean.bias.grad, 2 * action[0].detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("raw", "log_std"), [(-50.0, -5.0), (50.0, 0.0), (0.5, -5 + 2.5 * (math.tanh(0.5) + 1))])
def test_log_std_lies_between_minus_five_and_zero(fresh: Actor, raw: float, log_std: float) -> None:
    fresh.log_std.bias.data.fill_(raw)
    assert fresh(noise_of(2, OBS))[1].flatten().tolist() == pytest.approx([log_std] * 6, abs=1e-6)


@pytest.mark.parametrize(("raw", "mean"), [(-50.0, -10.0), (50.0, 10.0), (math.inf, 10.0), (9.5, 9.5)])
def test_mean_is_clamped(fresh: Actor, raw: float, mean: float) -> None:
    fresh.mean.bias.data.fill_(raw)
    assert fresh(noise_of(2, OBS))[0].flatten().tolist() == [mean] * 6


def test_a_saturated_action_has_a_finite_density(fresh: Actor) -> None:
    """tanh(10) is 1 in float32; the added 1e-6 keeps its logarithm."""
    fresh.mean.bias.data.fill_(10.0)
    action, log_pi = fresh.sample(noise_of(1, OBS), torch.zeros(1, ACTION))
    assert (action == 1).all()
    single = 2.5 - 0.5 * math.log(2 * math.pi) - math.log(1e-6) - math.log(1 + 1e-6)
    assert log_pi.item() == pytest.approx(ACTION * single, rel=1e-6)


def test_nan_observations_give_mean_zero_and_the_smallest_std(actor: Actor) -> None:
    obs = noise_of(3, OBS)
    clean = actor(obs)
    obs[1, 2] = math.nan
    mean, log_std = actor(obs)
    assert mean[1].tolist() == [0.0] * ACTION
    assert log_std[1].tolist() == [-5.0] * ACTION
    for part, before in zip((mean, log_std), clean, strict=True):
        assert torch.equal(part[::2], before[::2])
    action, log_pi = actor.sample(obs, noise_of(3, ACTION))
    assert action.isfinite().all()
    assert log_pi.isfinite().all()


def test_bfloat16_autocast_leaves_the_distribution_in_float32(actor: Actor) -> None:
    obs, noise = noise_of(64, OBS), noise_of(64, ACTION, seed=6)
    exact, _ = actor.sample(obs, noise)
    with torch.autocast("cpu", torch.bfloat16):
        mean, log_std = actor(obs)
        action, log_pi = actor.sample(obs, noise)
    assert {part.dtype for part in (mean, log_std, action, log_pi)} == {torch.float32}
    assert 0 < (action - exact).abs().mean() < 0.02  # bfloat16 has 8 bits


# --- critics ---------------------------------------------------------------------------------------------------------


def plain_critic(critic: CriticPair, member: int) -> nn.Sequential:
    """One member as ordinary layers holding the same numbers."""
    layers: list[nn.Module] = []
    for block in critic.blocks:
        linear, norm = _plain_linear(block.linear, member), nn.LayerNorm(block.scale.shape[-1])
        norm.weight.data.copy_(block.scale[member, 0])
        norm.bias.data.copy_(block.shift[member, 0])
        layers += [linear, norm, nn.SiLU()]
    return nn.Sequential(*layers, _plain_linear(critic.head, member))


def _plain_linear(batched: _BatchedLinear, member: int) -> nn.Linear:
    _, in_features, out_features = batched.weight.shape
    linear = nn.Linear(in_features, out_features)
    linear.weight.data.copy_(batched.weight[member].T)
    linear.bias.data.copy_(batched.bias[member, 0])
    return linear


def test_batched_critics_equal_two_ordinary_networks(critic: CriticPair) -> None:
    obs, action = noise_of(32, CRITIC), noise_of(32, ACTION, seed=6)
    logits = critic(obs, action)
    assert logits.shape == (2, 32, ATOMS)
    for member in range(2):
        expected = plain_critic(critic, member)(torch.cat((obs, action), 1))
        # float32 roundings of sums taken in another order.
        torch.testing.assert_close(logits[member], expected, rtol=2e-6, atol=2e-6)
    assert (logits[0] - logits[1]).abs().max() > 0.1


def test_batched_gradients_equal_those_of_two_ordinary_networks(critic: CriticPair) -> None:
    obs, action, weight = noise_of(32, CRITIC), noise_of(32, ACTION, seed=6), noise_of(2, 32, ATOMS, seed=7)
    (critic(obs, action) * weight).sum().backward()
    for member in range(2):
        plain = plain_critic(critic, member)
        (plain(torch.cat((obs, action), 1)) * weight[member]).sum().backward()
        for index, block in enumerate(critic.blocks):
            linear, norm = plain[3 * index], plain[3 * index + 1]
            for ours, theirs in (
                (block.linear.weight.grad[member], linear.weight.grad.T),
                (block.linear.bias.grad[member, 0], linear.bias.grad),
                (block.scale.grad[member, 0], norm.weight.grad),
                (block.shift.grad[member, 0], norm.bias.grad),
            ):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_members_do_not_touch_each_other(critic: CriticPair) -> None:
    obs, action = noise_of(4, CRITIC), noise_of(4, ACTION, seed=6)
    before = critic(obs, action)
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter[1].mul_(1.5)
    after = critic(obs, action)
    assert torch.equal(after[0], before[0])
    assert (after[1] - before[1]).abs().min() > 0


def test_members_start_apart_with_the_default_initialisation() -> None:
    """Weights and biases uniform within 1 / sqrt(inputs), as torch's own linear layer; layer norms at 1 and 0."""
    torch.manual_seed(3)
    critic = CriticPair(101, 29, 768, 101)
    linears = [*(block.linear for block in critic.blocks), critic.head]
    for linear, inputs in zip(linears, (130, 768, 384, 192), strict=True):
        bound = 1 / math.sqrt(inputs)
        for parameter in (linear.weight, linear.bias):
            assert 0.97 * bound < parameter.abs().max() <= bound
            assert not torch.equal(parameter[0], parameter[1])
        assert linear.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
        assert abs(linear.weight.mean().item()) < 0.02 * bound
    for block in critic.blocks:
        assert (block.scale == 1).all()
        assert (block.shift == 0).all()


def test_critic_reads_every_input(critic: CriticPair) -> None:
    obs = noise_of(1, CRITIC).requires_grad_()
    action = noise_of(1, ACTION, seed=6).requires_grad_()
    critic(obs, action).square().sum().backward()
    assert (obs.grad != 0).all()
    assert (action.grad != 0).all()
