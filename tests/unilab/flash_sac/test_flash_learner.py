"""FlashSAC's update against an independent plain implementation, and what reaches what."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unilab.flash_sac.config import FlashSacConfig, FlashSacParams
from unilab.flash_sac.layers import BatchNorm
from unilab.flash_sac.learner import METRICS, FlashSacLearner
from unilab.learner import Batch
from unilab.state import StateRegistry

CPU = torch.device("cpu")
OBS, CRITIC, ACTION, ATOMS, ROWS, ENVS, HIDDEN = 6, 7, 3, 11, 32, 8, 8
PEAK, END, WARMUP, DECAY = 3e-3, 1e-3, 3, 10
SCHEDULE = {
    "learning_rate_init": 1e-3,
    "learning_rate_peak": PEAK,
    "learning_rate_end": END,
    "learning_rate_warmup_steps": WARMUP,
    "learning_rate_decay_steps": DECAY,
}


def config(**params: Any) -> FlashSacConfig:
    given = FlashSacParams(**{"temp_initial_value": 0.2, **SCHEDULE, **params})
    sizes = {"actor_hidden_dim": HIDDEN, "critic_hidden_dim": HIDDEN, "num_atoms": ATOMS, "num_envs": ENVS}
    return FlashSacConfig(tau=0.05, algo_params=given, **sizes)


def build(**params: Any) -> tuple[FlashSacLearner, StateRegistry]:
    torch.manual_seed(0)
    registry = StateRegistry()
    return FlashSacLearner(config(**params), OBS, CRITIC, ACTION, CPU, False, registry), registry


def draws(seed: int) -> tuple[Batch, Tensor, Tensor]:
    """Rows of which about a third are done, half of those by their time limit; noise of next and of actor's actions."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source)

    done = (torch.rand(ROWS, generator=source) < 0.35).float()
    timeout = done * (torch.rand(ROWS, generator=source) < 0.5).float()
    batch = Batch(
        obs=2 * normal(ROWS, OBS) + 1,
        next_obs=normal(ROWS, OBS),
        action=torch.tanh(normal(ROWS, ACTION)),
        reward=6 * normal(ROWS),
        done=done,
        timeout=timeout,
        critic=normal(ROWS, CRITIC) - 1,
        next_critic=3 * normal(ROWS, CRITIC),
    )
    return batch, normal(ROWS, ACTION), normal(ROWS, ACTION)


def update(learner: FlashSacLearner, batch: Batch, noise: Tensor, actor_noise: Tensor | None) -> None:
    learner.update(batch, *learner.next_action(batch.next_obs, noise), actor_noise)


# --- a plain FlashSAC, written from the specification alone ----------------------------------------------------------


class Rms(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(1, keepdim=True) + 1e-6) * self.scale


class PlainBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Linear(width, 4 * width, bias=False), nn.BatchNorm1d(4 * width, momentum=0.01), nn.ReLU()),
            *(nn.Linear(4 * width, width, bias=False), nn.BatchNorm1d(width, momentum=0.01), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def plain_trunk(inputs: int) -> nn.Sequential:
    embedding = nn.BatchNorm1d(inputs, momentum=0.01), nn.Linear(inputs, HIDDEN, bias=False)
    return nn.Sequential(*embedding, PlainBlock(HIDDEN), PlainBlock(HIDDEN), Rms(HIDDEN))


def load(net: nn.Module, values: list[Tensor], buffers: list[Tensor]) -> None:
    """Give a plain network the values of one member, in order."""
    for parameter, value in zip(net.parameters(), values, strict=True):
        parameter.data.copy_(value.reshape(parameter.shape))
    kept = [buffer for name, buffer in net.named_buffers() if not name.endswith("num_batches_tracked")]
    for buffer, value in zip(kept, buffers, strict=True):
        buffer.copy_(value.reshape(buffer.shape))


def values(net: nn.Module, member: int) -> list[Tensor]:
    return [parameter.detach()[member] for parameter in net.parameters()]


def buffers(net: nn.Module, member: int) -> list[Tensor]:
    return [buffer[min(member, len(buffer) - 1)] for buffer in net.buffers()]


def plain_normalize(net: nn.Module) -> None:
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Linear):
                module.weight /= module.weight.norm(dim=1, keepdim=True)
            elif isinstance(module, nn.BatchNorm1d):
                total = (module.weight**2).sum() + (module.bias**2).sum()
                factor = math.sqrt(module.num_features) / torch.sqrt(total + 1e-8)
                module.weight *= factor
                module.bias *= factor
            elif isinstance(module, Rms):
                module.scale *= math.sqrt(len(module.scale)) / torch.sqrt((module.scale**2).sum() + 1e-8)


class PlainFlashSac:
    """Ordinary layers, separate critics, a scattered projection, torch's own Adam and a schedule set by hand."""

    def __init__(self, learner: FlashSacLearner, scaled: bool, entropy: float) -> None:
        self.scaled, self.entropy = scaled, entropy
        heads = nn.Linear(HIDDEN, ACTION), nn.Linear(HIDDEN, ACTION)
        self.actor = nn.ModuleList([plain_trunk(OBS), *heads])
        self.critics = [nn.Sequential(plain_trunk(CRITIC + ACTION), nn.Linear(HIDDEN, ATOMS)) for _ in range(2)]
        load(self.actor, values(learner.actor, 0), buffers(learner.actor, 0))
        for member, net in enumerate(self.critics):
            load(net, values(learner.critic, member), buffers(learner.critic, member))
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha = torch.tensor(math.log(0.2), requires_grad=True)
        self.z = torch.linspace(-5, 5, ATOMS)
        self.counts = [0, 0, 0]
        sets = [list(self.actor.parameters()), [p for net in self.critics for p in net.parameters()], [self.log_alpha]]
        self.optimizers = [torch.optim.Adam(parameters, 1.0, betas=(0.9, 0.999)) for parameters in sets]
        self.returns: list[float] = []
        self.g = [0.0] * ENVS

    def observe(self, reward: Tensor, done: Tensor, valid: Tensor) -> None:
        for env in range(ENVS):
            kept = 0.0 if done[env] else self.g[env]
            self.g[env] = 0.97 * kept + reward[env].item() if valid[env] else 0.0
            if valid[env]:
                self.returns.append(self.g[env])

    def divisor(self) -> float:
        if not self.scaled:
            return 1.0
        seen = torch.tensor(self.returns, dtype=torch.float64)
        total = len(seen) + 1e-4
        mean = seen.sum() / total
        variance = (((seen - mean) ** 2).sum() + 1e-4 * (1 + mean**2)) / total
        return max(math.sqrt(variance + 1e-8), seen.abs().max().item() / 5)

    def policy(self, obs: Tensor, training: bool) -> tuple[Tensor, Tensor]:
        trunk, mean, raw = self.actor.train(training)
        features = trunk(obs)
        return mean(features), torch.exp(-10 + 6 * (1 + torch.tanh(raw(features))))

    def sample(self, mean: Tensor, std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        u = mean + std * noise
        normal = torch.distributions.Normal(mean, std).log_prob(u)
        return torch.tanh(u), (normal - 2 * (math.log(2) - u - F.softplus(-2 * u))).sum(1)

    def target_mass(self, batch: Batch, action: Tensor, log_pi: Tensor) -> Tensor:
        inputs = torch.cat((torch.cat((batch.critic, batch.next_critic)), torch.cat((batch.action, action))), 1)
        distributions = [torch.softmax(net.train()(inputs)[ROWS:], 1) for net in self.targets]
        q = [(p * self.z).sum(1) for p in distributions]
        probabilities = torch.where((q[0] <= q[1]).unsqueeze(1), *distributions)
        runs_on = (1 - batch.done + batch.timeout).clamp(0, 1)
        bonus = (self.log_alpha.exp() * log_pi).unsqueeze(1)
        y = (batch.reward / self.divisor()).unsqueeze(1) + 0.97 * runs_on.unsqueeze(1) * (self.z - bonus)
        offset = (y.clamp(-5, 5) + 5) / (10 / (ATOMS - 1))
        lower, upper = offset.floor().long(), offset.ceil().long()
        mass = torch.zeros(ROWS, ATOMS)
        mass.scatter_add_(1, lower, probabilities * (1 - (offset - lower)))
        mass.scatter_add_(1, upper, probabilities * (offset - lower))
        return mass

    def update(self, batch: Batch, noise: Tensor, actor_noise: Tensor | None) -> None:
        with torch.no_grad():
            action, log_pi = self.sample(*self.policy(batch.next_obs, False), noise)
            mass = self.target_mass(batch, action, log_pi)
        inputs = torch.cat((torch.cat((batch.critic, batch.next_critic)), torch.cat((batch.action, action))), 1)
        losses = [-(mass * torch.log_softmax(net.train()(inputs)[:ROWS], 1)).sum(1).mean() for net in self.critics]
        self._step(1, (losses[0] + losses[1]) / 2)
        for net in self.critics:
            plain_normalize(net)
        if actor_noise is not None:
            self.update_actor(batch, actor_noise)
        with torch.no_grad():
            for net, target in zip(self.critics, self.targets, strict=True):
                for ours, theirs in zip(net.parameters(), target.parameters(), strict=True):
                    theirs.copy_(0.95 * theirs + 0.05 * ours)

    def update_actor(self, batch: Batch, noise: Tensor) -> None:
        mean, std = self.policy(torch.cat((batch.obs, batch.next_obs)), True)
        action, log_pi = self.sample(mean[:ROWS], std[:ROWS], noise)
        inputs = torch.cat((batch.critic, action), 1)
        q = [(torch.softmax(net.eval()(inputs), 1) * self.z).sum(1) for net in self.critics]
        loss = (self.log_alpha.exp().detach() * log_pi - torch.minimum(*q)).mean()
        self._step(0, loss)
        plain_normalize(self.actor)
        self._step(2, self.log_alpha.exp() * (-log_pi.detach().mean() - self.entropy))

    def _step(self, which: int, loss: Tensor) -> None:
        optimizer, count = self.optimizers[which], self.counts[which]
        rise = 1e-3 + (PEAK - 1e-3) * count / WARMUP
        fall = END + (PEAK - END) * (1 + math.cos(math.pi * min(1, (count - WARMUP) / DECAY))) / 2
        optimizer.param_groups[0]["lr"] = rise if count < WARMUP else fall
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        self.counts[which] += 1


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max((a.detach().reshape(-1) - b.detach().reshape(-1)).abs().max().item() for a, b in pairs)


def plain_values(net: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    kept = [buffer for name, buffer in net.named_buffers() if not name.endswith("num_batches_tracked")]
    return list(net.parameters()), kept


@pytest.mark.parametrize(
    "params", [{}, {"normalize_reward": False, "temp_target_entropy": -4.7}], ids=["scaled", "raw"]
)
def test_two_cycles_equal_a_plain_implementation(params: dict[str, Any]) -> None:
    """Two cycles of eight critic and target updates with every second one of the actor and the temperature.

    They pass the end of the warm-up, the critics' that of the decay; rewards are scaled by what was collected before.
    """
    learner, _ = build(**params)
    entropy = params.get("temp_target_entropy", ACTION * 0.5 * math.log(2 * math.pi * math.e * 0.15**2))
    plain = PlainFlashSac(learner, params.get("normalize_reward", True), entropy)
    start = values(learner.actor, 0)[1].clone()
    for cycle in range(2):
        source = torch.Generator().manual_seed(50 + cycle)
        reward, chance = 3 * torch.randn(ENVS, generator=source), torch.rand(2, ENVS, generator=source)
        for owner in (learner, plain):
            owner.observe(reward, chance[0] < 0.3, chance[1] < 0.8)
        for index in range(8):
            batch, noise, actor_noise = draws(100 * cycle + index)
            given = None if index % 2 else actor_noise
            update(learner, batch, noise, given)
            plain.update(batch, noise, given)
        # Values up to 3 after roundings in another order, divided by Adam's small moments; measured 3e-6.
        checks: list[tuple[nn.Module, int, nn.Module]] = [(learner.actor, 0, plain.actor)]
        checks += [(learner.critic, member, net) for member, net in enumerate(plain.critics)]
        checks += [(learner.target, member, net) for member, net in enumerate(plain.targets)]
        for ours, member, theirs in checks:
            expected, running = plain_values(theirs)
            assert distance(values(ours, member), expected) < 2e-5
            assert distance(buffers(ours, member), running) < 2e-5
        assert learner.log_alpha.item() == pytest.approx(plain.log_alpha.item(), abs=1e-6)
    assert (values(learner.actor, 0)[1] - start).abs().max() > PEAK
    assert abs(learner.log_alpha.item() - math.log(0.2)) > PEAK


# --- what reaches what -----------------------------------------------------------------------------------------------


def warm(**params: Any) -> tuple[FlashSacLearner, StateRegistry]:
    learner, registry = build(**params)
    for seed in (1, 2):
        update(learner, *draws(seed))
    return learner, registry


def changed(registry: StateRegistry, before: dict[str, Tensor]) -> set[str]:
    after = registry.snapshot()
    names = {name for name in before if not torch.equal(after[name], before[name])}
    return {name.split("/")[0] for name in names} - {"learner"}


def test_an_update_without_the_actor_leaves_actor_and_temperature_alone() -> None:
    learner, registry = warm()
    before = registry.snapshot()
    batch, noise, actor_noise = draws(3)
    update(learner, batch, noise, None)
    assert changed(registry, before) == {"critic", "critic_target"}
    update(learner, batch, noise, actor_noise)
    assert changed(registry, before) == {"critic", "critic_target", "actor", "temperature"}


def test_critics_judge_the_actor_by_the_running_statistics_they_share() -> None:
    learner, _ = warm()
    ours = dict(learner.critic.named_buffers())
    for name, buffer in learner._frozen_critic.named_buffers():
        assert buffer.data_ptr() == ours[name].data_ptr()
        assert not (buffer == 0).all() and not (buffer == 1).all()
    theirs = dict(learner.target.named_buffers())
    assert not any(torch.equal(theirs[name], ours[name]) for name in ours if "up_norm" in name)


def test_norms_hold_after_every_step() -> None:
    learner, _ = warm()
    for net in (learner.actor, learner.critic):
        for module in net.modules():
            parts = dict(module.named_parameters(recurse=False))
            if isinstance(module, BatchNorm):
                squares = parts["weight"].square().sum(-1) + parts["bias"].square().sum(-1)
                torch.testing.assert_close(squares, torch.full_like(squares, parts["weight"].shape[-1]))
                assert not torch.equal(parts["weight"], torch.ones_like(parts["weight"]))
            elif "scale" in parts:
                torch.testing.assert_close(parts["scale"].square().sum(-1), torch.full(parts["scale"].shape[:2], 8.0))
            elif "weight" in parts:
                norms = parts["weight"].norm(dim=-1)
                torch.testing.assert_close(norms, torch.ones_like(norms))
    assert learner.critic.head.bias.abs().max() > 1e-4  # free
    weight = learner.target.trunk.blocks[0].up.weight
    assert (weight.norm(dim=-1) - 1).abs().max() > 1e-7  # targets are averages, not normalised


@pytest.mark.parametrize("name", ["reward", "critic", "next_critic", "obs"])
def test_a_bad_row_skips_the_step_and_leaves_nothing_behind(name: str) -> None:
    learner, registry = warm()
    before = registry.snapshot()
    batch, noise, actor_noise = draws(3)
    damaged = getattr(batch, name).clone()
    damaged[3] = math.nan
    update(learner, Batch(**{**vars(batch), name: damaged}), noise, actor_noise)
    after = registry.snapshot()
    critic, actor = name != "obs", name in ("obs", "critic")
    assert torch.equal(after["critic/parameters"], before["critic/parameters"]) is critic
    assert torch.equal(after["critic_target/parameters"], before["critic_target/parameters"]) is critic
    for entry in ("actor/parameters", "temperature/parameters"):
        assert torch.equal(after[entry], before[entry]) is actor, entry
    assert after["learner/Train/skipped_updates"] == critic + actor
    for group in ("critic", "actor", "temperature"):
        assert after[f"{group}/schedule_step"] == before[f"{group}/schedule_step"] + 1  # also of skipped steps
    assert all(value.isfinite().all() for entry, value in after.items() if not entry.startswith("learner/"))
    update(learner, batch, noise, actor_noise)
    assert registry.snapshot()["learner/Train/skipped_updates"] == critic + actor


def test_next_actions_take_running_statistics_and_leave_them() -> None:
    learner, registry = warm()
    before = registry.snapshot()
    batch, noise, _ = draws(3)
    whole = learner.next_action(batch.next_obs, noise)
    part = learner.next_action(batch.next_obs[:5], noise[:5])
    torch.testing.assert_close((whole[0][:5], whole[1][:5]), part)  # not of the rows beside them
    assert changed(registry, before) == set()
    assert not whole[0].requires_grad


def test_the_report_names_everything_of_the_last_update() -> None:
    learner, _ = warm()
    learner.observe(torch.arange(float(ENVS)), torch.zeros(ENVS, dtype=torch.bool), torch.ones(ENVS, dtype=torch.bool))
    report = learner.report()
    assert tuple(report) == METRICS
    assert report["Policy/temperature"] == pytest.approx(learner.log_alpha.exp().item())
    assert report["Train/reward_scale_std"] == pytest.approx(torch.arange(8.0).std(correction=0).item(), rel=1e-3)
    assert all(value.isfinite() for value in report.values())


def test_bfloat16_stays_near_float32() -> None:
    torch.manual_seed(0)
    amp = FlashSacLearner(config(), OBS, CRITIC, ACTION, CPU, True, StateRegistry())
    plain, _ = build()
    for learner in (amp, plain):
        update(learner, *draws(1))
    assert amp.report()["Loss/critic"] == pytest.approx(plain.report()["Loss/critic"].item(), rel=0.02)
    assert all(buffer.dtype == torch.float32 for buffer in amp.critic.buffers())
    assert all(parameter.dtype == torch.float32 for parameter in amp.critic.parameters())


def test_it_learns_a_reward_of_the_state() -> None:
    """The action that pays most is a known function of the observation; at first the mean action loses 0.5."""
    torch.manual_seed(0)
    rates = dict.fromkeys(("learning_rate_init", "learning_rate_peak", "learning_rate_end"), 1e-3)
    params = FlashSacParams(learning_rate_warmup_steps=0, **rates)
    settings = FlashSacConfig(
        num_envs=64, actor_hidden_dim=32, critic_hidden_dim=32, num_atoms=51, tau=0.05, algo_params=params
    )
    learner = FlashSacLearner(settings, 3, 3, 2, CPU, False, StateRegistry())
    ends, nobody = torch.zeros(64, dtype=torch.bool), torch.zeros(128)

    def loss(obs: Tensor, action: Tensor) -> Tensor:
        return (action - torch.tanh(obs @ torch.tensor([[0.8, 0.0], [0.0, -0.8], [0.0, 0.3]]))).square().sum(1)

    def play(rows: int) -> tuple[Tensor, ...]:
        obs, noise = torch.randn(rows, 3), torch.randn(rows, 2)
        action = learner.act(obs, noise).detach()
        return obs, action, -loss(obs, action)

    data = play(64)
    held_out = torch.randn(512, 3)
    first = loss(held_out, learner.actor.deterministic(held_out)).mean()
    for _ in range(100):
        rows = play(64)
        learner.observe(rows[2], ends, ~ends)
        data = tuple(torch.cat(pair) for pair in zip(data, rows, strict=True))
        for index in range(4):
            chosen, following = torch.randint(len(data[0]), (128,)), torch.randn(128, 3)
            obs, action, reward = (column[chosen] for column in data)
            done = (torch.rand(128) < 0.1).float()
            batch = Batch(obs, following, action, reward, done, nobody, obs, following)
            update(learner, batch, torch.randn(128, 2), None if index % 2 else torch.randn(128, 2))
    last = loss(held_out, learner.actor.deterministic(held_out)).mean()
    assert first > 0.3 and last < 0.3 * first
