"""The limit of a compiled cycle: it lets pass what rounding does, and no fault of an objective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from unilab.config import RunConfig, load_config
from unilab.flash_sac import learner as flash
from unilab.flash_sac.objectives import actor_loss, critic_loss, entropic_reward, joined_logits
from unilab.probes.correctness_eager import GRADIENT_TOLERANCE, _at_rest, _errors, _wires
from unilab.probes.correctness_graph import _compare_rounding, rounding_limits
from unilab.probes.findings import RankPart
from unilab.replay import ReplayRing
from unilab.synthetic import SyntheticRank, update_errors

SIZES = (
    *("training.smoke=true", "algo.num_envs=32", "algo.batch_size=128", "algo.replay_buffer_n=64"),
    *("algo.actor_hidden_dim=16", "algo.critic_hidden_dim=32", "algo.updates_per_step=4"),
)
CPU = torch.device("cpu")
State = dict[str, Tensor]
Patch = pytest.MonkeyPatch


def configuration() -> RunConfig:
    return load_config("flashsac", "g1_walk_flat", "mujoco", SIZES)


def rank(bfloat16: bool = True) -> SyntheticRank:
    made = SyntheticRank(configuration(), CPU, False)
    made.learner._amp = bfloat16  # type: ignore[attr-defined]
    return made


@pytest.fixture(scope="module")
def states() -> tuple[State, State, State]:
    """A settled state, and the same after an eager cycle in bfloat16 and in float32."""
    one, other = rank(), rank(False)
    for _ in range(4):
        one.update()
    start = one.registry.snapshot()
    one.update()
    other.registry.restore(start)
    other.update()
    return start, one.registry.snapshot(), other.registry.snapshot()


def cycle(start: State, made: SyntheticRank) -> State:
    made.registry.restore(start)
    made.update()
    return made.registry.snapshot()


def verdict(found: State, states: tuple[State, State, State], part: RankPart) -> tuple[bool, float]:
    """Whether the check passed, and the largest error in limits."""
    start, reference, exact = states
    _compare_rounding(part, found, reference, exact, start)
    limits, errors = rounding_limits(reference, exact, start), update_errors(found, exact, start)
    return part.checks[-1].passed, max(errors[name] / limits[name] for name in errors)


@pytest.fixture
def part(tmp_path: Any) -> RankPart:
    return RankPart(tmp_path / "part.json")


def test_other_roundings_pass(states: tuple[State, State, State], part: RankPart, monkeypatch: Patch) -> None:
    """Rows of each batch in another order: every sum rounds elsewhere, nothing else changes."""
    gather, made = ReplayRing.gather, rank()
    noise = made.phase._noise
    rows = configuration().algo.batch_size
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))

    def reordered(self: ReplayRing, indices: Tensor, out: Tensor) -> None:
        gather(self, indices, out)
        out.copy_(out.view(-1, rows, out.shape[-1])[:, order].reshape(out.shape))
        noise.copy_(noise[:, order])

    monkeypatch.setattr(ReplayRing, "gather", reordered)
    passed, error = verdict(cycle(states[0], made), states, part)
    assert passed and 0.25 < error < 0.75, part.checks
    assert part.checks[-1].detail.startswith("1 cycle, update error against float32 0.0")


def wrong_sign(patch: Patch) -> None:
    def changed(batch: Any, divisor: Any, alpha: Any, log_pi: Any, gamma: float) -> Any:
        return entropic_reward(batch, divisor, -alpha, log_pi, gamma)

    patch.setattr(flash, "entropic_reward", changed)


def no_entropy_of_the_actor(patch: Patch) -> None:
    patch.setattr(
        flash, "actor_loss", lambda log_pi, logits, alpha, points: actor_loss(log_pi, logits, 0 * alpha, points)
    )


def statistics_of_one_half(patch: Patch) -> None:
    def changed(critic: Any, batch: Any, next_action: Any) -> Any:
        now = critic(batch.critic, batch.action, training=True)
        return now, joined_logits(critic, batch, next_action)[1]

    patch.setattr(flash, "joined_logits", changed)


def ends_without_bootstrap(patch: Patch) -> None:
    def changed(batch: Any, *rest: Any) -> Any:
        batch = type(batch)(**{**vars(batch), "timeout": torch.zeros_like(batch.timeout)})
        return entropic_reward(batch, *rest)

    patch.setattr(flash, "entropic_reward", changed)


FAULTS = (wrong_sign, no_entropy_of_the_actor, statistics_of_one_half, ends_without_bootstrap)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_no_rounding(
    fault: Callable[[Patch], None], states: tuple[State, State, State], part: RankPart, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    passed, error = verdict(cycle(states[0], rank()), states, part)
    assert not passed and error > 3, part.checks  # 3.3 to 7.3


def one_row_missing(patch: Patch) -> None:
    def changed(logits: Tensor, target: Tensor, reward: Tensor, discount: Tensor, *rest: Any) -> Any:
        return critic_loss(logits[:, 1:], target[:, 1:], reward[1:], discount[1:], *rest)

    patch.setattr(flash, "critic_loss", changed)


def test_what_hides_in_rounding_shows_in_a_gradient(states: tuple[State, State, State], monkeypatch: Patch) -> None:
    """One row of 128 changes the critics' update by less than bfloat16 does, their float32 gradient by hundredths."""
    still = _at_rest(configuration())
    made = SyntheticRank(still, CPU, False)
    rows = made.replay.rows[: still.algo.batch_size]
    noise = torch.randn(2, len(rows), 29, generator=torch.Generator().manual_seed(1))
    whole = _wires(made, states[0], rows, noise)
    one_row_missing(monkeypatch)
    errors = _errors(_wires(SyntheticRank(still, CPU, False), states[0], rows, noise), whole)
    assert errors["critic gradient"] > 100 * GRADIENT_TOLERANCE
