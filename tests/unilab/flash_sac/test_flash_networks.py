"""Layers and networks of FlashSAC against hand-computed numbers and torch's own layers."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from unilab.flash_sac.layers import BatchNorm, Normalizer, RMSNorm, UnitLinear, normalize_, share_buffers
from unilab.flash_sac.networks import Actor, CriticPair, squash


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("obs", "critic", "action", "actor_count", "critic_count"),
    [(98, 101, 29, 285_054, 2_226_898), (49, 52, 12, 274_298, 2_192_842)],
    ids=["g1", "go2"],
)
def test_parameter_counts_are_the_documented_ones(
    obs: int, critic: int, action: int, actor_count: int, critic_count: int
) -> None:
    nets = Actor(obs, action, 128, 2), CriticPair(critic, action, 256, 2, 101)
    assert [sum(p.numel() for p in net.parameters()) for net in nets] == [actor_count, critic_count]


def test_a_linear_layer_is_that_of_each_member() -> None:
    """At widths that are padded and at one that is not."""
    for inputs, outputs in ((98, 29), (16, 8)):
        layer = UnitLinear(2, inputs, outputs, bias=True)
        nn.init.normal_(layer.bias)
        features = torch.randn(2, 5, inputs)
        for member in range(2):
            expected = nn.functional.linear(features[member], layer.weight[member], layer.bias[member])
            torch.testing.assert_close(layer(features)[member], expected)
        torch.testing.assert_close(layer(features[:1])[1], layer(features[:1].expand(2, -1, -1))[1])


def test_rows_are_orthogonal_and_of_norm_1_at_first_and_members_differ() -> None:
    actor = Actor(98, 29, 128, 2)
    weight = actor.mean.weight[0]
    torch.testing.assert_close(weight @ weight.T, torch.eye(29), atol=1e-5, rtol=0)
    wide = actor.trunk.blocks[0].up.weight[0]  # more rows than columns: of norm 1, no longer orthogonal
    torch.testing.assert_close(wide.norm(dim=1), torch.ones(512))
    critic = CriticPair(5, 3, 16, 1, 11)
    assert not torch.allclose(critic.head.weight[0], critic.head.weight[1])
    assert critic.head.bias.count_nonzero() == actor.mean.bias.count_nonzero() == 0


def test_a_batch_norm_is_torchs_and_tracks_as_it_does() -> None:
    layer, plain = BatchNorm(2, 6), [nn.BatchNorm1d(6, momentum=0.01) for _ in range(2)]
    for training in (True, True, False):
        features = 3 * torch.randn(2, 10, 6) + 1
        for member in range(2):
            plain[member].train(training)
            torch.testing.assert_close(layer(features, training)[member], plain[member](features[member]))
        layer.running_mean.copy_(torch.stack([net.running_mean for net in plain]).unsqueeze(1))
        layer.running_var.copy_(torch.stack([net.running_var for net in plain]).unsqueeze(1))


def test_running_statistics_by_hand() -> None:
    """Rows 1 and 3: mean 2, biased variance 1, unbiased 2; momentum 0.01 from 0 and 1."""
    layer = BatchNorm(1, 1)
    out = layer(torch.tensor([[[1.0], [3.0]]]), training=True)
    assert out.flatten().tolist() == pytest.approx([-1 / math.sqrt(1 + 1e-5), 1 / math.sqrt(1 + 1e-5)])
    assert layer.running_mean.item() == pytest.approx(0.02)
    assert layer.running_var.item() == pytest.approx(1.01)
    layer(torch.tensor([[[5.0]]]), training=True)  # a single row has no variance
    assert layer.running_var.item() == pytest.approx(0.99 * 1.01)


def test_the_flag_alone_decides_about_statistics() -> None:
    layer = BatchNorm(1, 4)
    before = [buffer.clone() for buffer in layer.buffers()]
    layer.train()
    layer(torch.randn(1, 8, 4), training=False)
    assert all(torch.equal(a, b) for a, b in zip(before, layer.buffers(), strict=True))
    layer.eval()
    layer(torch.randn(1, 8, 4), training=True)
    assert not any(torch.equal(a, b) for a, b in zip(before, layer.buffers(), strict=True))


def test_rows_that_are_not_finite_leave_no_trace() -> None:
    layer, address = BatchNorm(1, 2), None
    address = layer.running_mean.data_ptr()
    layer(torch.tensor([[[1.0, math.nan], [3.0, 1.0]]]), training=True)
    assert layer.running_mean.flatten().tolist() == pytest.approx([0.02, 0.0])
    assert layer.running_var.flatten().tolist() == pytest.approx([1.01, 1.0])
    assert layer.running_mean.data_ptr() == address


def test_statistics_are_of_both_halves_of_a_joined_batch() -> None:
    """The first half alone is normalised otherwise."""
    critic = CriticPair(3, 2, 8, 1, 5)
    states, actions = torch.randn(8, 3) + torch.arange(8.0).unsqueeze(1), torch.randn(8, 2)
    joined = critic(states, actions, training=True)
    mean = torch.cat((states, actions), 1).mean(0)
    torch.testing.assert_close(critic.trunk.norm.running_mean[1, 0], 0.01 * mean)
    assert (joined[:, :4] - critic(states[:4], actions[:4], training=True)).abs().max() > 0.05


def test_rms_norm_by_hand() -> None:
    layer = RMSNorm(1, 2)
    layer.scale.data.copy_(torch.tensor([[[1.0, 2.0]]]))
    out = layer(torch.tensor([[[3.0, 4.0]]])).flatten().tolist()  # root mean square sqrt(12.5)
    assert out == pytest.approx([3 / math.sqrt(12.5), 8 / math.sqrt(12.5)])


def test_normalisation_by_hand() -> None:
    linear, norm, rms = UnitLinear(1, 2, 1, bias=True), BatchNorm(1, 2), RMSNorm(1, 2)
    linear.weight.data.copy_(torch.tensor([[[3.0, 4.0]]]))
    linear.bias.data.fill_(7.0)
    norm.weight.data.copy_(torch.tensor([[[3.0, 1.0]]]))
    norm.bias.data.copy_(torch.tensor([[[2.0, -2.0]]]))  # squares 18 together: a third of it
    rms.scale.data.copy_(torch.tensor([[[4.0, 4.0]]]))
    normalize_(nn.Sequential(linear, norm, rms))
    assert linear.weight.flatten().tolist() == pytest.approx([0.6, 0.8])
    assert linear.bias.item() == 7.0
    assert norm.weight.flatten().tolist() == pytest.approx([1.0, 1 / 3])
    assert norm.bias.flatten().tolist() == pytest.approx([2 / 3, -2 / 3])
    assert rms.scale.flatten().tolist() == pytest.approx([1.0, 1.0])


def test_every_member_has_its_own_norm_and_every_parameter_a_rule() -> None:
    critic = CriticPair(3, 2, 8, 1, 5)
    shares = torch.tensor([2.0, 5.0])
    grown = [p.detach() * shares.view(2, *[1] * (p.dim() - 1)) for p in critic.parameters()]
    for name, before, after in zip(
        dict(critic.named_parameters()), critic.parameters(), Normalizer(critic)(grown), strict=True
    ):
        if name != "head.bias":
            torch.testing.assert_close(after, before.detach(), msg=name)
    free = nn.Linear(2, 2)
    kept = list(free.parameters())
    assert Normalizer(nn.Sequential(critic, free))([*grown, *kept])[-2:] == kept


def test_log_std_is_minus_4_in_the_middle_and_stays_within_its_bounds() -> None:
    actor = Actor(6, 3, 16, 2)
    actor.log_std.weight.data.zero_()
    assert actor(torch.randn(5, 6))[1].unique().tolist() == [-4.0]
    for value, bound in ((50.0, 2.0), (-50.0, -10.0)):
        actor.log_std.bias.data.fill_(value)
        assert actor(torch.randn(5, 6))[1].unique().tolist() == pytest.approx([bound])


def test_log_density_is_that_of_the_squashed_action() -> None:
    mean, log_std, noise = torch.randn(3, 7, 4).unbind()
    action, log_pi = squash(mean, log_std, noise)
    transformed = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean.double(), log_std.double().exp()),
        [torch.distributions.TanhTransform(cache_size=1)],
    )
    exact = transformed.log_prob(torch.tanh(mean.double() + log_std.double().exp() * noise.double())).sum(1)
    torch.testing.assert_close(log_pi.double(), exact, rtol=1e-4, atol=1e-4)
    assert action.abs().max() < 1
    far, density = squash(torch.full((1, 1), 40.0), torch.zeros(1, 1), torch.zeros(1, 1))
    assert far.item() == 1.0 and density.item() == pytest.approx(-0.918939 + 80 - 2 * math.log(2), rel=1e-6)


def test_the_deterministic_action_is_the_squashed_mean_and_moves_nothing() -> None:
    actor = Actor(6, 3, 16, 2)
    obs, before = torch.randn(4, 6), copy.deepcopy(actor.state_dict())
    torch.testing.assert_close(actor.deterministic(obs), torch.tanh(actor(obs)[0]))
    torch.testing.assert_close(actor.sample(obs, torch.zeros(4, 3))[0], actor.deterministic(obs))
    assert all(torch.equal(value, before[name]) for name, value in actor.state_dict().items())


def test_buffers_are_shared_both_ways() -> None:
    critic = CriticPair(3, 2, 8, 1, 5)
    other = copy.deepcopy(critic)
    share_buffers(other, critic)
    critic(torch.randn(6, 3), torch.randn(6, 2), training=True)
    for ours, theirs in zip(critic.buffers(), other.buffers(), strict=True):
        assert ours.data_ptr() == theirs.data_ptr()
