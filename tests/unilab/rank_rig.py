"""Everything of a rank but the collector, whose answers are made up; on any device, small unless told otherwise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unilab.algorithm import AlgoConfig
from unilab.environment import Environment
from unilab.flash_sac.config import FlashSacConfig
from unilab.phases import ActPhase, UpdatePhase, transition_widths
from unilab.physics.spec import row_groups
from unilab.replay import ReplayRing
from unilab.sac.config import SacConfig, SacParams
from unilab.sac.learner import SacLearner
from unilab.state import StateRegistry
from unilab.streams import PREFIX, STREAMS
from unilab.tasks.g1_walk_flat import G1WalkFlat, G1WalkFlatConfig, G1WalkFlatRewards

CPU = torch.device("cpu")
ENVS = 8
WIDTHS = transition_widths(98, 101, 29)


class OpenRegistry(StateRegistry):
    """A registry that shows the tensors themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}

    def tensor(self, name: str, value: Tensor, lasting: bool = True) -> Tensor:
        self.tensors[name] = value
        return super().tensor(name, value, lasting)


@dataclass
class Rig:
    """Everything of a rank but the collector, whose answers are made up."""

    env: Environment
    learner: Any
    replay: ReplayRing
    act: ActPhase
    update: UpdatePhase
    registry: OpenRegistry
    ticks: int = 0

    def answer(self, falling: list[int], broken: list[int]) -> None:
        """Physics rows of robots near rest, some of which fall and some of which are not finite."""
        source = torch.Generator().manual_seed(1000 + self.ticks)
        rows = self.env.task.idle_row.cpu().repeat(self.env.num_envs, 1)
        rows[:, :-1] += 0.01 * torch.randn(rows[:, :-1].shape, generator=source)
        rows[falling, 2] = 0.1
        rows[broken, 20] = math.nan
        self.env.fields.copy_(rows)
        self.ticks += 1

    def physics(self) -> None:
        """What a tick begins with; another robot falls in each, and in every third the rows of another are broken."""
        self.answer([self.ticks % ENVS], [(self.ticks + 3) % ENVS] if self.ticks % 3 == 0 else [])

    def tick(self) -> None:
        """One whole tick."""
        self.physics()
        self.turns()
        self.update.run()

    def turns(self) -> None:
        """The act phase of every group."""
        for group in range(len(self.act.parts)):
            self.act.run(group)


def settings(**given: Any) -> SacConfig:
    small = {"actor_hidden_dim": 16, "critic_hidden_dim": 16, "num_atoms": 11, "batch_size": 16}
    return SacConfig(**{**small, "num_envs": ENVS, "updates_per_step": 8, "policy_frequency": 4, **given})


def build(
    seed: int = 3,
    ring: int = 64,
    device: torch.device = CPU,
    compiled: bool = False,
    amp: bool = False,
    groups: int = 1,
    config: AlgoConfig | None = None,
    **given: Any,
) -> Rig:
    """A rig whose actor depends on what it sees; a fresh one of SAC would not. `config` in place of SAC's `given`."""
    registry = OpenRegistry()
    if config is None:
        config = settings(algo_params=SacParams(use_compile=compiled), **given)
    torch.manual_seed(seed)
    streams = []
    for index, name in enumerate(STREAMS):
        generator = torch.Generator(device).manual_seed(10 * seed + index)
        streams.append(registry.generator(f"{PREFIX}{name}", generator))
    task = G1WalkFlat(G1WalkFlatConfig(), G1WalkFlatRewards(), config.num_envs, device, "reference")
    env = Environment(task, config.num_envs, device, streams[0], registry)
    learner = config.build_learner((task.obs_dim, task.critic_dim, task.action_dim), device, amp, registry)
    if isinstance(learner, SacLearner):
        nn.init.normal_(learner.actor.mean.weight.data, std=0.1)
    replay = ReplayRing(ring * config.num_envs, WIDTHS, device, registry)
    rows = row_groups(config.num_envs, groups)
    act = ActPhase(env, learner, replay, streams[1], registry, rows, compiled)
    update = UpdatePhase(env, learner, replay, config, task.action_dim, streams[2], registry)
    return Rig(env, learner, replay, act, update, registry)


def begun(seed: int = 3, ring: int = 64, **given: Any) -> Rig:
    """A rig after tick 0's command, no time limit near."""
    rig = build(seed, ring, **given)
    rig.act.begin()
    rig.env.episodes.steps.zero_()
    return rig


def flash_settings(**given: Any) -> FlashSacConfig:
    small = {"actor_hidden_dim": 8, "critic_hidden_dim": 8, "num_atoms": 11, "batch_size": 16}
    return FlashSacConfig(**{**small, "num_envs": ENVS, "updates_per_step": 4, **given})


def assert_registry_is_whole(rig: Rig, other: Rig, *apart: str) -> None:
    """Another seed's rank goes on exactly like this one once it has its registry and rows; `apart` differs before."""
    for _ in range(2):
        rig.tick()
        other.tick()
    assert set(apart) <= set(differences(rig.registry.snapshot(), other.registry.snapshot()))
    other.registry.restore(rig.registry.snapshot())
    other.replay.rows.copy_(rig.replay.rows)
    for _ in range(2):
        rig.tick()
        other.tick()
    assert differences(rig.registry.snapshot(), other.registry.snapshot()) == []


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of entries that are not bit-equal, NaN counting as itself."""
    assert set(one) == set(other)
    return [name for name in one if not torch.equal(torch.nan_to_num(one[name]), torch.nan_to_num(other[name]))]
