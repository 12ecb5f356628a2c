"""What the correctness probe checks of ranks that learn eagerly: starts, gradients, states, skips."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from unilab.config import RunConfig
from unilab.data_parallel import DataParallel
from unilab.learner import Batch
from unilab.optim import ALIGNMENT
from unilab.probes.findings import RankPart
from unilab.probes.learning import (
    SKIPPED,
    TARGETS,
    Learning,
    State,
    changed,
    counts,
    digest,
    learned,
    local_buffers,
    optimizer_state,
    parameters,
)
from unilab.synthetic import SyntheticRank

CYCLES = 5
# Of float32 gradients whose sums go over other numbers of rows in another order, and whose operations a compiler may
# fuse; a mean over the wrong ranks is off by tenths.
GRADIENT_TOLERANCE = 1e-4


def check_start(part: RankPart, learning: Learning) -> None:
    """Ranks of different seeds start equal after rank 0's state was broadcast."""
    own = learning.ranks.gather(learning.rank.learner.groups["critic"].flat.detach())  # (W, P)
    apart = [bool((row != own[0]).any()) for row in own[1:]]
    part.check(
        "own_states_differ", all(apart), f"before the broadcast {sum(apart)} of {len(apart)} ranks unlike rank 0"
    )
    learning.rank.learner.synchronize()
    state = learning.state()
    part.same("initial_state_equal", digest(state, learned(state)))


def check_cycles(part: RankPart, learning: Learning) -> None:
    """Ranks stay equal over cycles on rows of their own, and take the configured steps."""
    start, before = learning.state(), learning.ranks.collectives
    reports = []
    for number in range(CYCLES):
        learning.cycle()
        reports.append(learning.reported())
        if number == 0:
            _check_collectives(part, learning, learning.ranks.collectives - before)
    state = learning.state()
    part.same("parameters_equal", digest(state, parameters(state)))
    part.same("targets_equal", digest(state, [TARGETS]))
    part.same("optimizer_state_equal", digest(state, optimizer_state(state)))
    local = ", ".join(local_buffers(learning.rank.learner)) or "none"
    part.check("rank_local_buffers", True, f"left out of these comparisons: {local}", required=False)
    check_counts(part, learning, start, state)
    check_updates(part, "finite_updates", reports, start, state)


def _check_collectives(part: RankPart, learning: Learning, found: int) -> None:
    wanted = learning.rank.phase.steps if learning.ranks.world_size > 1 else 0
    detail = f"{found} gradient all-reduces in an eager cycle, {wanted} wanted"
    part.check("collectives_per_cycle", found == wanted, detail)


def check_counts(part: RankPart, learning: Learning, start: State, state: State) -> None:
    """The optimizers' own counts over `CYCLES` cycles."""
    begin, end, wanted = counts(start), counts(state), learning.steps_after(CYCLES)
    found = {name: end[name] - begin[name] for name in wanted}
    detail = ", ".join(f"{name} {found[name]} of {wanted[name]}" for name in wanted)
    part.check("optimizer_step_counts", found == wanted, f"after {CYCLES} cycles: {detail}")


def check_updates(part: RankPart, name: str, reports: list[dict[str, float]], start: State, state: State) -> None:
    """Everything reported was finite, no step was skipped, and all parameters moved."""
    odd = sorted({tag for report in reports for tag, value in report.items() if not math.isfinite(value)})
    still = sorted(set(learned(state)) - set(changed(start, state, learned(state))))
    skipped = (state[SKIPPED] - start[SKIPPED]).item()
    last = reports[-1]
    detail = f"critic loss {last['Loss/critic']:.4g}, gradient norm {last['Train/critic_gradient_norm']:.4g}"
    for what, names in (("not finite", odd), ("did not move", still)):
        detail += f"; {what}: {', '.join(names)}" if names else ""
    part.check(name, not odd and not still and skipped == 0, f"{detail}; {skipped:g} steps skipped")


def check_gradients(
    part: RankPart, config: RunConfig, device: torch.device, compiled: bool, ranks: DataParallel, start: State
) -> None:
    """The averaged gradient is the mean of the ranks' own, and that of one process on the rows of all.

    Learning rates are 0, so that critics and actor are judged at the same parameters; float32 without autocast.

    Args:
        part: receives the checks.
        config: the run, with this rank's seed.
        device: where everything lives.
        compiled: compile the averaged side; the single process always runs eagerly.
        ranks: the group.
        start: state to judge at; rank 0's is taken on every rank.
    """
    still = _at_rest(config)
    averaging, alone = SyntheticRank(still, device, compiled, ranks), SyntheticRank(still, device, False)
    averaging.registry.restore(start)
    averaging.learner.synchronize()
    start = averaging.registry.snapshot()
    rows = averaging.replay.rows[: config.algo.batch_size]  # (B, width)
    source = torch.Generator(device).manual_seed(config.algo.seed)
    noise = torch.randn(2, len(rows), _action_dim(averaging, rows), generator=source, device=device)
    found, own = _wires(averaging, start, rows, noise), _wires(alone, start, rows, noise)
    everyones = {name: ranks.gather(wire) for name, wire in own.items()}  # (W, P + ALIGNMENT) each
    mean = {name: wires.mean(0) for name, wires in everyones.items()}
    apart = max(_error(own[name], mean[name]) for name in own)
    errors = _errors(found, mean)
    told_apart = ranks.world_size == 1 or apart > 10 * GRADIENT_TOLERANCE
    part.check(
        "gradient_is_mean_of_ranks",
        _within(errors) and told_apart,
        f"{_worst(errors)}; this rank's own lie {apart:.2g} from the mean",
    )
    if local_buffers(averaging.learner):
        detail = "left out: batch statistics are each rank's own, so a batch of all ranks' rows has another gradient"
        part.check("gradient_of_joined_batch", True, detail, required=False)
        return
    joined = _wires(alone, start, ranks.gather(rows).flatten(0, 1), ranks.gather(noise).transpose(0, 1).flatten(1, 2))
    errors = _errors(found, joined)
    part.check("gradient_of_joined_batch", _within(errors), f"{_worst(errors)}; {ranks.world_size} x {len(rows)} rows")


def _at_rest(config: RunConfig) -> RunConfig:
    return replace(config, algo=config.algo.at_rest(), training=replace(config.training, use_amp=False))


def _action_dim(rank: SyntheticRank, rows: Tensor) -> int:
    return rank.replay.split(rows)["action"].shape[1]


def _wires(rank: SyntheticRank, start: State, rows: Tensor, noise: Tensor) -> dict[str, Tensor]:
    """Gradient and loss of every group after one update from `start`; noise `(2, B, A)`."""
    rank.registry.restore(start)
    batch = Batch(**rank.replay.split(rows))
    action, log_pi = rank.learner.next_action(batch.next_obs, noise[0])
    rank.learner.update(batch, action, log_pi, noise[1])
    return {name: group.wire.clone() for name, group in rank.learner.groups.items()}


def _errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative errors of gradients and losses."""
    errors = {}
    for name, wire in expected.items():
        errors[f"{name} gradient"] = _error(found[name][:-ALIGNMENT], wire[:-ALIGNMENT])
        errors[f"{name} loss"] = _error(found[name][-ALIGNMENT:], wire[-ALIGNMENT:])
    return errors


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).double().norm() / expected.double().norm())


def _within(errors: dict[str, float]) -> bool:
    return all(error <= GRADIENT_TOLERANCE for error in errors.values())  # a NaN is not


def _worst(errors: dict[str, float]) -> str:
    name = max(errors, key=lambda key: math.inf if math.isnan(errors[key]) else errors[key])
    return f"largest relative error {errors[name]:.2g} ({name}), float32, at most {GRADIENT_TOLERANCE:g}"


def check_skip(part: RankPart, learning: Learning, prefix: str = "") -> None:
    """The last rank's rows are not finite for a cycle, which no rank may learn from; in the next one all go on.

    Nothing here but the cycles asks for collectives, so that they may be graphs.
    """
    rows, ranks = learning.rank.replay.rows, learning.ranks
    before, kept = learning.state(), rows.clone()
    if ranks.rank == ranks.world_size - 1:
        rows.fill_(torch.nan)
    learning.cycle()
    rows.copy_(kept)
    after = learning.state()
    taken = sum(group.finite.item() for group in learning.rank.learner.groups.values())
    moved = changed(before, after, learned(before))
    skipped, wanted = (after[SKIPPED] - before[SKIPPED]).item(), learning.rank.phase.steps
    detail = f"rows of rank {ranks.world_size - 1} were NaN: {skipped:g} of {wanted} steps skipped"
    detail += f"; changed: {', '.join(moved)}" if moved else ", nothing changed"
    part.check(f"{prefix}nonfinite_skips_on_all_ranks", not moved and taken == 0 and skipped == wanted, detail)
    learning.cycle()
    _check_recovery(part, learning, f"{prefix}recovers_after_skip", after)


def _check_recovery(part: RankPart, learning: Learning, name: str, before: State) -> None:
    state = learning.state()
    begin, end, wanted = counts(before), counts(state), learning.steps_after(1)
    found = {group: end[group] - begin[group] for group in wanted}
    finite = all(bool(state[entry].isfinite().all()) for entry in learned(state))
    still = sorted(set(learned(state)) - set(changed(before, state, learned(state))))
    detail = f"steps of the next cycle: {', '.join(f'{group} {found[group]} of {wanted[group]}' for group in wanted)}"
    part.check(name, found == wanted and finite and not still, detail)
    part.same(name, digest(state, learned(state)))
