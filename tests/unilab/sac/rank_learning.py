"""What ranks do in `test_data_parallel.py`: learn together, and write down what they see."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from test_learner import ACTION, CPU, CRITIC, OBS, config, draws, spoil, update

from unilab.data_parallel import DataParallel
from unilab.sac.learner import SacLearner
from unilab.state import StateRegistry

UPDATES, FREQUENCY = 8, 4


def build(seed: int, ranks: DataParallel | None = None, **params: float) -> tuple[SacLearner, StateRegistry]:
    """A small learner with its own first weights."""
    torch.manual_seed(seed)
    registry = StateRegistry()
    return SacLearner(config(**params), OBS, CRITIC, ACTION, CPU, False, registry, ranks), registry


def cycle(learner: SacLearner, seed: int) -> None:
    """Eight updates, two of them with the actor."""
    for index in range(UPDATES):
        batch, noise, actor_noise = draws(seed + index)
        update(learner, batch, noise, None if index % FREQUENCY else actor_noise)


def wires(learner: SacLearner) -> dict[str, torch.Tensor]:
    """Gradients and losses by group, as the last update left them."""
    groups = {"actor": learner.actor_group, "critic": learner.critic_group, "temperature": learner.alpha_group}
    return {name: group.wire.clone() for name, group in groups.items()}


def learn(rank: int, world_size: int, store: Path, out: Path) -> None:
    """Different data on every rank, then a bad row on one, then the same data on all."""
    torch.set_num_threads(1)
    ranks = DataParallel.join(rank, world_size, CPU, store)
    seen: dict[str, Any] = {"facts": ranks.facts(10, captured=False)}
    learner, registry = build(10 + rank, ranks)
    seen["own start"] = registry.snapshot()
    learner.synchronize()
    seen["start"] = registry.snapshot()
    update(learner, *draws(1000 * rank))
    seen["wires"], seen["first"] = wires(learner), registry.snapshot()
    addresses = [group.wire.data_ptr() for group in (learner.actor_group, learner.critic_group)]
    before = ranks.collectives
    for number in range(2):
        cycle(learner, 1000 * rank + 100 * number)
    seen["collectives"] = ranks.collectives - before
    seen["cycles"] = registry.snapshot()
    seen["moved"] = addresses != [group.wire.data_ptr() for group in (learner.actor_group, learner.critic_group)]
    seen["skips"] = skips(learner, registry, rank)
    alone, same = build(77), build(77, ranks)
    for one, _ in (alone, same):
        cycle(one, 5)
    seen["alone"], seen["same"] = alone[1].snapshot(), same[1].snapshot()
    seen["gathered"] = ranks.gather(torch.tensor([float(rank), torch.nan if rank else 2.0]))
    ranks.close()
    assert not torch.distributed.is_initialized()
    torch.save(seen, out / f"rank{rank}.pt")


def skips(learner: SacLearner, registry: StateRegistry, rank: int) -> list[dict[str, Any]]:
    """States around updates in which one rank's batch has a bad number, and the update after."""
    found = []
    for victim, name, value in ((0, "critic", torch.inf), (1, "obs", torch.nan), (1, "reward", torch.nan)):
        before = copy.deepcopy(registry.snapshot())
        batch, noise, actor_noise = draws(1000 * rank + 500)
        update(learner, spoil(batch, name, value) if rank == victim else batch, noise, actor_noise)
        after = registry.snapshot()
        update(learner, batch, noise, actor_noise)
        found.append({"before": before, "after": after, "next": registry.snapshot(), "name": name})
    return found
