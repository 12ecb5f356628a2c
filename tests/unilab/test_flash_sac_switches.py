"""FlashSAC's acceleration switches: what every combination chooses, and that all of them learn the same on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from unilab.capture import on_stream
from unilab.config import RunConfig, load_config
from unilab.flash_sac import learner as flash
from unilab.flash_sac.config import FlashSacConfig, FlashSacParams
from unilab.flash_sac.learner import FlashSacLearner
from unilab.probes.correctness_graph import rounding_limits
from unilab.runner import _execution
from unilab.state import StateRegistry
from unilab.synthetic import SETTLING_CYCLES, SyntheticRank, update_errors

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SWITCHES = ("use_compile", "compile_full_objectives", "use_whole_cycle_cuda_graph", "dp_whole_cycle_cuda_graph")
STEPS = {"_critic_step", "_actor_step"}
WHOLE = {"_sample", "_judge_critic", "_judge_actor", *STEPS}
REGION = {"_sample", "critic_loss", "actor_loss", *STEPS}


@pytest.mark.parametrize("values", list(product((True, False), repeat=4)))
def test_every_combination_chooses_as_documented(values: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """No combination is refused; without compilation there is no graph, whatever the other switches say."""
    use_compile, full, graph, graph_of_ranks = values
    params = FlashSacParams(**dict(zip(SWITCHES, values, strict=True)))
    config = FlashSacConfig(algo_params=params, actor_hidden_dim=8, critic_hidden_dim=8, num_envs=2)
    config.validate()
    assert _execution(params, CUDA) == (use_compile, use_compile and graph)
    assert params.captures_collectives is graph_of_ranks
    assert _execution(params, CPU) == _execution(params, torch.device("mps")) == (False, False)

    learner, seen = FlashSacLearner(config, 4, 5, 2, CPU, False, StateRegistry()), set[str]()

    def compiled(function: Callable[..., Any], enabled: bool, dynamic: bool = False) -> Callable[..., Any]:
        seen.update([function.__name__] if enabled else [])
        return function

    monkeypatch.setattr(flash, "compiled", compiled)
    learner._compile()
    assert seen == set()
    learner._device = CUDA
    learner._compile()
    assert seen == ((WHOLE if full else REGION) if use_compile else set())


# --- on a GPU: few compilations, each of them run plainly and as a graph ---------------------------------------------

SMALL = [
    *("algo.num_envs=256", "algo.replay_buffer_n=64", "algo.updates_per_step=2", "algo.actor_hidden_dim=32"),
    *("algo.critic_hidden_dim=64", "algo.num_atoms=51"),
    *("algo.algo_params.actor_num_blocks=1", "algo.algo_params.critic_num_blocks=1"),
]
OWN_ACTOR = "algo.algo_params.actor_config={builder:own_actors:Normalised}"
State = dict[str, Tensor]


def configuration(full: bool = True, bfloat16: bool = False, *more: str) -> RunConfig:
    switches = f"algo.algo_params.compile_full_objectives={full}", f"training.use_amp={bfloat16}"
    return load_config("flashsac", "g1_walk_flat", "mujoco", [*SMALL, *(word.lower() for word in switches), *more])


@contextmanager
def device_stream() -> Iterator[None]:
    stream = torch.cuda.Stream()
    with on_stream(stream):
        yield
    torch.cuda.synchronize()


@pytest.fixture(scope="module")
def settled() -> Iterator[Callable[[str], State]]:
    """The state that all cycles begin at, by what is more in the configuration; found once."""
    torch._dynamo.reset()
    found: dict[str, State] = {}

    def state(more: str) -> State:
        if more not in found:
            with device_stream():
                rank = SyntheticRank(configuration(True, False, *more.split()), CUDA, False)
                for _ in range(SETTLING_CYCLES):
                    rank.update()
                found[more] = rank.registry.snapshot()
        return found[more]

    yield state
    torch._dynamo.reset()


def cycles(config: RunConfig, compiled: bool, start: State) -> tuple[State, State]:
    """What a cycle makes of `start`, run plainly and then as a graph by the same rank."""
    with device_stream():
        rank = SyntheticRank(config, CUDA, compiled)
        rank.registry.restore(start)
        rank.update()
        plain = rank.registry.snapshot()
        rank.registry.restore(start)
        rank.update.capture(rank.registry)
        assert unequal(rank.registry.snapshot(), start) == []  # capture leaves no trace
        rank.update()
        replayed = rank.registry.snapshot()
        rank.update.release()
    return plain, replayed


def unequal(one: State, other: State) -> list[str]:
    return [name for name in one if not torch.equal(one[name], other[name])]


gpu = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(150),
    pytest.mark.filterwarnings("default"),  # compilers may warn
)


@pytest.mark.parametrize("bfloat16", [pytest.param(value, marks=gpu) for value in (False, True)])
def test_a_graph_of_eager_code_equals_it_bit_for_bit(settled: Callable[[str], State], bfloat16: bool) -> None:
    plain, replayed = cycles(configuration(True, bfloat16), False, settled(""))
    assert unequal(plain, replayed) == []


@pytest.mark.parametrize(
    ("full", "more"),
    [
        pytest.param(True, "", marks=gpu, id="objectives"),
        pytest.param(False, "", marks=gpu, id="losses"),
        pytest.param(True, OWN_ACTOR, marks=gpu, id="own-actor"),
    ],
)
def test_compiled_float32_equals_eager_to_rounding(settled: Callable[[str], State], full: bool, more: str) -> None:
    start = settled(more)
    config = configuration(full, False, *more.split())
    eager, _ = cycles(config, False, start)
    for found in cycles(config, True, start):
        # Sums in another order, where a row may choose the other critic; 4e-4 was seen with 256 rows.
        assert max(update_errors(found, eager, start).values()) < 1e-3
        for name in (name for name in eager if "running_" in name):
            torch.testing.assert_close(found[name], eager[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("full", [pytest.param(True, marks=gpu)])
def test_compiled_bfloat16_lies_no_farther_from_float32_than_eager(settled: Callable[[str], State], full: bool) -> None:
    start = settled("")
    (exact, _), (eager, _) = (cycles(configuration(full, bfloat16), False, start) for bfloat16 in (False, True))
    limits = rounding_limits(eager, exact, start)
    for found in cycles(configuration(full, True), True, start):
        errors = update_errors(found, exact, start)
        assert all(errors[name] <= limit for name, limit in limits.items()), (errors, limits)
