from __future__ import annotations

import copy
import math
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from unilab.learner import METRICS
from unilab.sac.config import SacConfig, SacParams
from unilab.sac.learner import SacLearner
from unilab.sac.objectives import Batch
from unilab.state import StateRegistry

CPU = torch.device("cpu")
OBS, CRITIC, ACTION, ATOMS, ROWS = 6, 7, 3, 11, 32
LR = 3e-3


def config(**params: float) -> SacConfig:
    return SacConfig(
        actor_hidden_dim=16,
        critic_hidden_dim=24,
        num_atoms=ATOMS,
        actor_lr=LR,
        critic_lr=2 * LR,
        algo_params=SacParams(**{"alpha_init": 0.2, "alpha_lr": 0.05, **params}),
    )


def build(amp: bool = False, **params: float) -> tuple[SacLearner, StateRegistry]:
    torch.manual_seed(0)
    registry = StateRegistry()
    return SacLearner(config(**params), OBS, CRITIC, ACTION, CPU, amp, registry), registry


def random_batch(source: torch.Generator) -> Batch:
    """Random rows, about a third done, half of those by their time limit; returns reach both ends of the support."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source)

    done = (torch.rand(ROWS, generator=source) < 0.35).float()
    timeout = done * (torch.rand(ROWS, generator=source) < 0.5).float()
    return Batch(
        obs=normal(ROWS, OBS),
        next_obs=normal(ROWS, OBS),
        action=torch.tanh(normal(ROWS, ACTION)),
        reward=6 * normal(ROWS),
        done=done,
        timeout=timeout,
        critic=normal(ROWS, CRITIC),
        next_critic=normal(ROWS, CRITIC),
    )


def draws(seed: int) -> tuple[Batch, Tensor, Tensor]:
    """A batch, noise of the next actions and noise of the actor's actions."""
    source = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, ROWS, ACTION, generator=source)
    return random_batch(source), noise[0], noise[1]


def update(learner: SacLearner, batch: Batch, critic_noise: Tensor, actor_noise: Tensor | None) -> None:
    """One update whose next actions come from the actor as it is now."""
    learner.update(batch, *learner.next_action(batch.next_obs, critic_noise), actor_noise)


def spoil(batch: Batch, name: str, value: float = math.nan) -> Batch:
    """The batch with one bad number in row 3."""
    damaged = getattr(batch, name).clone()
    damaged[3] = value
    return Batch(**{**vars(batch), name: damaged})


# --- a plain SAC, written from the specification alone ---------------------------------------------------------------


class PlainSac:
    """The same algorithm with ordinary layers, separate critics, a scattered projection and torch's own AdamW.

    Starts from the weights of `learner`.
    """

    def __init__(self, learner: SacLearner, settings: SacConfig) -> None:
        self.settings = settings
        self.trunk = copy.deepcopy(learner.actor.trunk)
        self.mean, self.log_std = nn.Linear(4, ACTION), nn.Linear(4, ACTION)
        for ours in (self.mean, self.log_std):
            nn.init.zeros_(ours.weight)
            nn.init.zeros_(ours.bias)
        self.trunk.load_state_dict(learner.actor.trunk.state_dict())
        self.critics = [plain_critic(learner.critic, member) for member in range(2)]
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha = torch.tensor(math.log(settings.algo_params.alpha_init), requires_grad=True)
        self.z = torch.linspace(-20, 20, ATOMS)
        betas = (0.9, 0.95)
        self.actor_optimizer = torch.optim.AdamW(self.actor_parameters(), settings.actor_lr, betas, weight_decay=1e-3)
        self.critic_optimizers = [
            torch.optim.AdamW(net.parameters(), settings.critic_lr, betas, weight_decay=1e-3) for net in self.critics
        ]
        self.alpha_optimizer = torch.optim.AdamW([self.log_alpha], settings.algo_params.alpha_lr, betas, weight_decay=0)

    def actor_parameters(self) -> list[nn.Parameter]:
        return [*self.trunk.parameters(), *self.mean.parameters(), *self.log_std.parameters()]

    def sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(obs)
        mean = self.mean(features).clamp(-10, 10)
        std = torch.exp(-5 + 2.5 * (torch.tanh(self.log_std(features)) + 1))
        u = mean + std * noise
        action = torch.tanh(u)
        log_pi = torch.distributions.Normal(mean, std).log_prob(u) - torch.log(1 - action**2 + 1e-6)
        return action, (log_pi - math.log(1 + 1e-6)).sum(1)

    def target_mass(self, net: nn.Module, batch: Batch, action: Tensor, log_pi: Tensor) -> Tensor:
        probabilities = torch.softmax(net(torch.cat((batch.next_critic, action), 1)), 1)
        runs_on = (1 - batch.done + batch.timeout).clamp(0, 1)
        discount = (self.settings.gamma * runs_on).unsqueeze(1)
        reward = (batch.reward - self.settings.gamma * runs_on * self.log_alpha.exp() * log_pi).unsqueeze(1)
        position = ((reward + discount * self.z).clamp(-20, 20) + 20) / (40 / (ATOMS - 1))
        lower = position.floor().long().clamp(0, ATOMS - 1)
        upper, share = (lower + 1).clamp(max=ATOMS - 1), position - lower
        offset = ATOMS * torch.arange(ROWS).unsqueeze(1)
        mass = torch.zeros(ROWS * ATOMS)
        mass.index_add_(0, (lower + offset).flatten(), (probabilities * (1 - share)).flatten())
        mass.index_add_(0, (upper + offset).flatten(), (probabilities * share).flatten())
        return mass.view(ROWS, ATOMS)

    def update(self, batch: Batch, noise: Tensor, actor_noise: Tensor | None) -> None:
        with torch.no_grad():
            action, log_pi = self.sample(batch.next_obs, noise)
            masses = [self.target_mass(net, batch, action, log_pi) for net in self.targets]
        loss = torch.zeros(())
        for net, mass in zip(self.critics, masses, strict=True):
            logits = net(torch.cat((batch.critic, batch.action), 1))
            loss = loss - (mass * torch.log_softmax(logits, 1).clamp(min=-30)).sum(1).mean()
        self._step(loss, self.critic_optimizers, [p for net in self.critics for p in net.parameters()])
        target_entropy = -ACTION * self.settings.algo_params.target_entropy_ratio
        temperature_loss = -self.log_alpha.exp() * (log_pi + target_entropy).mean()
        self._step(temperature_loss, [self.alpha_optimizer], [])
        if actor_noise is not None:
            self.update_actor(batch, actor_noise)
        with torch.no_grad():
            for net, target in zip(self.critics, self.targets, strict=True):
                for ours, theirs in zip(net.parameters(), target.parameters(), strict=True):
                    theirs.copy_((1 - self.settings.tau) * theirs + self.settings.tau * ours)

    def update_actor(self, batch: Batch, noise: Tensor) -> None:
        action, log_pi = self.sample(batch.obs, noise)
        inputs = torch.cat((batch.critic, action), 1)
        values = [(torch.softmax(net(inputs), 1) * self.z).sum(1) for net in self.critics]
        loss = (self.log_alpha.exp().detach() * log_pi - (values[0] + values[1]) / 2).mean()
        self._step(loss, [self.actor_optimizer], self.actor_parameters())

    def _step(self, loss: Tensor, optimizers: list[torch.optim.AdamW], clipped: list[nn.Parameter]) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        if self.settings.algo_params.max_grad_norm and clipped:
            nn.utils.clip_grad_norm_(clipped, self.settings.algo_params.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()


def plain_critic(critic: nn.Module, member: int) -> nn.Sequential:
    """One member of a critic pair as ordinary layers."""
    values = {name: value[member] for name, value in critic.state_dict().items()}
    layers: list[nn.Module] = []
    for index, (inputs, outputs) in enumerate(((CRITIC + ACTION, 24), (24, 12), (12, 6))):
        linear, norm = nn.Linear(inputs, outputs), nn.LayerNorm(outputs)
        linear.weight.data.copy_(values[f"blocks.{index}.linear.weight"].T)
        linear.bias.data.copy_(values[f"blocks.{index}.linear.bias"][0])
        layers += [linear, norm, nn.SiLU()]
    head = nn.Linear(6, ATOMS)
    head.weight.data.copy_(values["head.weight"].T)
    head.bias.data.copy_(values["head.bias"][0])
    return nn.Sequential(*layers, head)


def batched(nets: list[nn.Sequential]) -> list[Tensor]:
    """Parameters of ordinary critics in the order and shapes of a critic pair."""
    linears = [[layer for layer in net if isinstance(layer, nn.Linear)] for net in nets]
    norms = [[layer for layer in net if isinstance(layer, nn.LayerNorm)] for net in nets]
    parts: list[list[Tensor]] = []
    for index in range(3):
        parts.append([norm[index].weight.unsqueeze(0) for norm in norms])
        parts.append([norm[index].bias.unsqueeze(0) for norm in norms])
        parts.append([linear[index].weight.T for linear in linears])
        parts.append([linear[index].bias.unsqueeze(0) for linear in linears])
    parts.append([linear[3].weight.T for linear in linears])
    parts.append([linear[3].bias.unsqueeze(0) for linear in linears])
    return [torch.stack(part) for part in parts]


def distance(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max((a.detach() - b.detach()).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize(
    "params",
    [{}, {"target_entropy_ratio": 1.5, "alpha_init": 0.01}, {"max_grad_norm": 0.3}],
    ids=["defaults", "entropy target", "clipping"],
)
def test_three_cycles_equal_a_plain_implementation(params: dict[str, float]) -> None:
    """Three cycles of eight critic, temperature and target updates with actor updates at the first and the fifth."""
    learner, _ = build(**params)
    plain = PlainSac(learner, config(**params))
    start = [p.detach().clone() for p in learner.actor.parameters()]
    for cycle in range(3):
        for index in range(8):
            batch, noise, actor_noise = draws(100 * cycle + index)
            given = None if index % 4 else actor_noise
            update(learner, batch, noise, given)
            plain.update(batch, noise, given)
        # Values below 4 after roundings in another order; measured 5e-7.
        assert distance(learner.actor.parameters(), plain.actor_parameters()) < 1e-6
        assert distance(learner.critic.parameters(), batched(plain.critics)) < 1e-6
        assert distance(learner.target.parameters(), batched(plain.targets)) < 1e-6
        assert distance([learner.log_alpha], [plain.log_alpha.reshape(1)]) < 1e-6
    assert distance(learner.actor.parameters(), start) > LR
    assert abs(learner.log_alpha.item() - math.log(config(**params).algo_params.alpha_init)) > 0.05


# --- what reaches what -----------------------------------------------------------------------------------------------


def warm(**params: float) -> tuple[SacLearner, StateRegistry]:
    """A learner after two updates, so that its heads and moments are not zero."""
    learner, registry = build(**params)
    for seed in (1, 2):
        update(learner, *draws(seed))
    return learner, registry


def changed(registry: StateRegistry, before: dict[str, Tensor]) -> set[str]:
    """Owners (actor, critic, critic_target, temperature) with a value that differs from the snapshot."""
    after = registry.snapshot()
    names = {name for name in before if not torch.equal(after[name], before[name])}
    return {name.split("/")[0] for name in names} - {"learner"}


def test_starts_with_target_and_frozen_copies_of_the_critic() -> None:
    learner, registry = build()
    state = registry.snapshot()
    assert distance(learner.target.parameters(), learner.critic.parameters()) == 0
    assert torch.equal(state["critic_target/parameters"], state["critic/parameters"])
    assert learner.log_alpha.item() == pytest.approx(math.log(0.2))
    assert set(learner.modules()) == {"actor", "critic", "critic_target"}
    assert all(p.requires_grad for p in [*learner.actor.parameters(), *learner.critic.parameters()])
    assert not any(p.requires_grad for p in learner.target.parameters())


def test_critic_update_leaves_the_actor_alone() -> None:
    learner, registry = warm()
    before = registry.snapshot()
    gradient = learner.actor_group.gradient.clone()
    batch, noise, _ = draws(3)
    update(learner, batch, noise, None)
    assert changed(registry, before) == {"critic", "critic_target", "temperature"}
    assert torch.equal(learner.actor_group.gradient, gradient)


def test_next_actions_come_from_the_actor_as_it_is_and_carry_no_gradient() -> None:
    learner, _ = warm()
    batch, noise, actor_noise = draws(3)
    for _ in range(2):
        action, log_pi = learner.next_action(batch.next_obs, noise)
        expected = learner.actor.sample(batch.next_obs, noise)
        assert not action.requires_grad and not log_pi.requires_grad
        assert torch.equal(action, expected[0].detach())
        assert torch.equal(log_pi, expected[1].detach())
        update(learner, batch, noise, actor_noise)


def test_target_moves_by_tau_towards_the_new_critic() -> None:
    learner, _ = warm()
    old = [p.clone() for p in learner.target.parameters()]
    batch, noise, _ = draws(3)
    update(learner, batch, noise, None)
    expected = [0.875 * o + 0.125 * c for o, c in zip(old, learner.critic.parameters(), strict=True)]
    assert distance(learner.target.parameters(), expected) < 3e-7
    assert distance(old, expected) > 1e-4
    assert all(p.grad is None for p in learner.target.parameters())


def test_actor_update_leaves_everything_else_alone() -> None:
    """With and without it, critics, targets, temperature and their gradients end bit-equal."""
    (with_actor, one), (without, other) = warm(), warm()
    batch, noise, actor_noise = draws(3)
    start = one.snapshot()["actor/parameters"]
    update(with_actor, batch, noise, actor_noise)
    update(without, batch, noise, None)
    first, second = one.snapshot(), other.snapshot()
    apart = {name for name in first if not torch.equal(first[name], second[name])}
    assert {name.split("/")[0] for name in apart} == {"actor", "learner"}
    assert torch.equal(with_actor.critic_group.gradient, without.critic_group.gradient)
    assert torch.equal(with_actor.alpha_group.gradient, without.alpha_group.gradient)
    assert not torch.equal(first["actor/parameters"], start)
    assert all(p.grad.count_nonzero() for p in with_actor.actor.parameters())


def test_the_actor_is_judged_by_the_critic_of_this_update() -> None:
    """Its critics share the memory that the critic step has just written."""
    learner, _ = warm()
    batch, noise, actor_noise = draws(3)
    update(learner, batch, noise, None)
    with torch.no_grad():
        action, log_pi = learner.actor.sample(batch.obs, actor_noise)
        probabilities = torch.softmax(learner.critic(batch.critic, action), -1)
        value = (probabilities * torch.linspace(-20, 20, ATOMS)).sum(-1).mean(0)
        expected = (learner.log_alpha.exp() * log_pi - value).mean().item()
    again, _ = warm()
    update(again, batch, noise, actor_noise)
    assert again.report()["Loss/actor"].item() == pytest.approx(expected, rel=1e-6)


def test_updates_are_counted_by_their_optimizers() -> None:
    learner, registry = build()
    for index in range(8):
        batch, noise, actor_noise = draws(index)
        update(learner, batch, noise, None if index % 4 else actor_noise)
    state = registry.snapshot()
    steps = [state[f"{name}/adamw_step"].item() for name in ("critic", "temperature", "actor")]
    assert steps == [8, 8, 2]


# --- temperature -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "direction"), [(0.0, 1), (2.0, -1)])
def test_temperature_follows_the_entropy(ratio: float, direction: int) -> None:
    """A fresh policy has an entropy of -1.08 per component: below a target of 0, above one of -2 per component.

    Too little entropy raises the temperature. AdamW's first step is the learning rate itself.
    """
    learner, _ = build(target_entropy_ratio=ratio)
    batch, noise, _ = draws(1)
    update(learner, batch, noise, None)
    assert learner.log_alpha.item() - math.log(0.2) == pytest.approx(direction * 0.05, rel=1e-5)


# --- steps that are not finite ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reward", "critic", "next_critic", "action"])
def test_a_bad_critic_loss_leaves_critic_temperature_and_target_alone(name: str) -> None:
    learner, registry = warm()
    before = registry.snapshot()
    batch, noise, _ = draws(3)
    update(learner, spoil(batch, name), noise, None)
    assert changed(registry, before) == set()
    assert learner.report()["Train/skipped_updates"].item() == 1
    update(learner, batch, noise, None)
    assert changed(registry, before) == {"critic", "critic_target", "temperature"}
    assert learner.report()["Train/skipped_updates"].item() == 1
    assert all(value.isfinite().all() for value in registry.snapshot().values())


def test_a_skipped_update_leaves_no_trace() -> None:
    (skipping, one), (untouched, other) = warm(), warm()
    batch, noise, actor_noise = draws(3)
    everything = spoil(spoil(batch, "reward"), "critic")
    update(skipping, everything, noise, actor_noise)
    assert skipping.report()["Train/skipped_updates"].item() == 2
    for learner in (skipping, untouched):
        update(learner, *draws(4))
        learner.report()
    first, second = one.snapshot(), other.snapshot()
    apart = {name for name in first if not torch.equal(first[name], second[name])}
    assert apart == {"learner/Train/skipped_updates"}


def test_the_actor_has_its_own_gate() -> None:
    """A bad reward concerns the critics, a bad policy observation the actor; the other one goes on."""
    learner, registry = warm()
    before = registry.snapshot()
    batch, noise, actor_noise = draws(3)
    update(learner, spoil(batch, "reward"), noise, actor_noise)
    assert changed(registry, before) == {"actor"}
    before = registry.snapshot()
    update(learner, spoil(batch, "obs"), noise, actor_noise)
    assert changed(registry, before) == {"critic", "critic_target", "temperature"}
    assert learner.report()["Train/skipped_updates"].item() == 2


# --- reports and precision -------------------------------------------------------------------------------------------


def test_reports_what_the_update_did() -> None:
    learner, _ = build()
    batch, noise, actor_noise = draws(1)
    update(learner, batch, noise, actor_noise)
    report = learner.report()
    assert tuple(report) == METRICS == learner.metrics
    assert all(value.shape == () and value.isfinite() for value in report.values())
    assert report["Loss/critic"].item() == pytest.approx(2 * math.log(ATOMS), rel=0.2)  # nearly uniform at first
    assert report["Loss/critic"] == learner.critic_group.loss
    assert report["Loss/entropy"].item() == pytest.approx(-1.08 * ACTION, abs=0.5)
    assert report["Policy/temperature"].item() == pytest.approx(learner.log_alpha.exp().item())
    assert report["Train/critic_gradient_norm"].item() == pytest.approx(learner.critic_group.gradient.norm().item())
    assert report["Train/actor_gradient_norm"].item() == pytest.approx(learner.actor_group.gradient.norm().item())
    assert -20 <= report["Train/target_q_min"] < report["Train/target_q_max"] <= 20
    assert report["Train/skipped_updates"] == 0


def test_reports_keep_their_addresses() -> None:
    learner, _ = build()
    addresses = {name: value.data_ptr() for name, value in learner.report().items()}
    update(learner, *draws(1))
    assert {name: value.data_ptr() for name, value in learner.report().items()} == addresses


def test_bfloat16_changes_an_update_by_rounding_alone() -> None:
    exact, _ = build()
    rounded, registry = build(amp=True)
    for learner in (exact, rounded):
        update(learner, *draws(1))
    assert all(value.dtype == torch.float32 for name, value in registry.snapshot().items())
    for name in ("Loss/critic", "Loss/actor", "Loss/entropy", "Train/critic_gradient_norm"):
        ours, theirs = rounded.report()[name].item(), exact.report()[name].item()
        assert ours == pytest.approx(theirs, rel=0.05), name
    assert rounded.report()["Loss/critic"] != exact.report()["Loss/critic"]
    assert rounded.report()["Train/skipped_updates"] == 0
