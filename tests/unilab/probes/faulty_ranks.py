"""Ranks of one group that run the correctness checks once for each of some faults; `test_correctness.py` reads them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import distributed

from unilab.capture import Phase
from unilab.data_parallel import DataParallel
from unilab.optim import ParameterGroup
from unilab.probes import correctness_eager, correctness_graph, correctness_rank
from unilab.probes.findings import RankPart
from unilab.probes.learning import Learning
from unilab.probes.setting import Seat
from unilab.sac.learner import SacLearner
from unilab.state import StateRegistry

CPU = torch.device("cpu")
Patch = pytest.MonkeyPatch


def none(patch: Patch, ranks: DataParallel) -> None:
    pass


def no_averaging(patch: Patch, ranks: DataParallel) -> None:
    def count(flat: torch.Tensor) -> None:
        ranks.collectives += 1

    patch.setattr(ranks, "_average", count)


def sum_for_mean(patch: Patch, ranks: DataParallel) -> None:
    average: Callable[[torch.Tensor], None] = ranks._average
    patch.setattr(ranks, "_average", lambda flat: (average(flat), flat.mul_(ranks.world_size)))


def averaging_twice(patch: Patch, ranks: DataParallel) -> None:
    average: Callable[[torch.Tensor], None] = ranks._average
    patch.setattr(ranks, "_average", lambda flat: (average(flat), average(flat)))


def rank_1_keeps_its_start(patch: Patch, ranks: DataParallel) -> None:
    synchronize = SacLearner.synchronize

    def keep(self: SacLearner) -> None:
        flats = [group.flat.data for group in (self.actor_group, self.critic_group, self.alpha_group)]
        flats.append(self._target_flat)
        own = [flat.clone() for flat in flats]
        synchronize(self)
        for flat, value in zip(flats, own, strict=True):
            if ranks.rank == 1:
                flat.copy_(value)

    patch.setattr(SacLearner, "synchronize", keep)


def rank_1_skips_nothing(patch: Patch, ranks: DataParallel) -> None:
    step = ParameterGroup.step

    def always(self: ParameterGroup, gate: torch.Tensor | None = None) -> None:
        if ranks.rank == 1:
            self.wire.nan_to_num_()
        step(self, gate)

    patch.setattr(ParameterGroup, "step", always)


def steps_counted_twice(patch: Patch, ranks: DataParallel) -> None:
    step = ParameterGroup.step

    def count(self: ParameterGroup, gate: torch.Tensor | None = None) -> None:
        step(self, gate)
        self._count.add_(self.finite)

    patch.setattr(ParameterGroup, "step", count)


def _with_config(patch: Patch, change: Callable[[Any], Any]) -> None:
    build = SacLearner.__init__
    patch.setattr(SacLearner, "__init__", lambda self, config, *rest: build(self, change(config), *rest))


def rank_1_has_another_tau(patch: Patch, ranks: DataParallel) -> None:
    _with_config(patch, lambda config: replace(config, tau=0.2) if ranks.rank == 1 else config)


def temperature_stands_still(patch: Patch, ranks: DataParallel) -> None:
    _with_config(patch, lambda config: replace(config, algo_params=replace(config.algo_params, alpha_lr=0.0)))


# --- with graphs that are none: a replay runs again what was captured -------------------------------------------------


class FakeGraph:
    alive: ClassVar[weakref.WeakSet[FakeGraph]] = weakref.WeakSet()
    replaying = False

    def __init__(self, run: Callable[[], None], times: int) -> None:
        self._run, self._times = run, times
        self.alive.add(self)

    def replay(self) -> None:
        FakeGraph.replaying = True
        for _ in range(self._times):
            self._run()
        FakeGraph.replaying = False


def graphs(patch: Patch, ranks: DataParallel, times: int = 1, leak: int = 0) -> None:
    def capture(self: Phase, registry: StateRegistry) -> None:
        before = registry.snapshot()
        self._run()
        registry.restore(before)
        self._graph = FakeGraph(self._run, times)  # type: ignore[assignment]

    def within(collective: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            assert FakeGraph.replaying or not FakeGraph.alive, "a collective outside of the graph that holds others"
            collective(*arguments)

        return run

    bytes_ = iter(range(10**6, 10**9, leak or 1))
    patch.setattr(Phase, "capture", capture)
    for name in ("all_reduce", "broadcast"):
        patch.setattr(distributed, name, within(getattr(distributed, name)))
    patch.setattr(torch.cuda, "synchronize", lambda *_: None)
    patch.setattr(torch.cuda, "memory_allocated", lambda: next(bytes_) if leak else 10**6)
    patch.setattr(torch.cuda, "memory_reserved", lambda: 10**7)
    patch.setattr(torch.cuda, "mem_get_info", lambda: (10**8, 10**9))
    patch.setattr(correctness_graph, "REPLAYS", 3)

    def check(part: RankPart, *given: Any) -> None:
        eager = Learning(given[0], CPU, False, ranks)
        eager.rank.learner.synchronize()
        correctness_rank.release(correctness_rank.check_graphs(part, eager, *given))
        assert not FakeGraph.alive

    patch.setattr(correctness_rank, "check", check)


def graphs_of_two_cycles(patch: Patch, ranks: DataParallel) -> None:
    graphs(patch, ranks, times=2)


def graphs_compiled(patch: Patch, ranks: DataParallel) -> None:
    """Nothing is compiled on the CPU; what is compared with what is that of compiled cycles."""
    graphs(patch, ranks)


def graphs_compiled_of_two_cycles(patch: Patch, ranks: DataParallel) -> None:
    graphs(patch, ranks, times=2)


def graphs_that_leak(patch: Patch, ranks: DataParallel) -> None:
    graphs(patch, ranks, leak=512)


def main() -> None:
    seat = Seat.take(sys.argv[1:])
    torch.set_num_threads(1)
    ranks = DataParallel.join(seat.rank, seat.world_size, CPU, Path(seat.store))
    config = correctness_rank.configure(seat.rank, seat.backend)
    correctness_eager.CYCLES = correctness_graph.CYCLES = 2
    correctness_graph.SETTLING_CYCLES = 1
    for name in seat.options["faults"]:
        part = RankPart(Path(seat.options["out"]) / f"{name}-{seat.rank}.json")
        with pytest.MonkeyPatch.context() as patch:
            globals()[name](patch, ranks)
            correctness_rank.check(part, config, CPU, name.startswith("graphs_compiled"), ranks)
    ranks.close()


if __name__ == "__main__":
    main()
