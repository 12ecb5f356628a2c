"""What the correctness probe checks of ranks whose cycle is a CUDA graph that holds their collectives.

While such a graph exists no collective runs outside of it, so ranks are compared by what they write down.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from unilab.config import RunConfig
from unilab.data_parallel import DataParallel
from unilab.probes.correctness_eager import CYCLES, check_updates
from unilab.probes.findings import RankPart
from unilab.probes.learning import Learning, State, changed, digest, learned
from unilab.synthetic import SETTLING_CYCLES, update_errors

# A compiled cycle rounds elsewhere than an eager one: fused operations keep float32 where separate ones go to bfloat16
# in between. Measured on the CPU, both lie equally far from float32 (critic 3.4 % each, actor 2.5 %) and 2.9 % from
# each other; the order of a batch's rows alone makes 1.6 %. So the eager cycle's own distance from float32 is the
# measure. What hides in it, as one row of a batch does, shows in the gradients that are compared in float32.
ROUNDING = 2.0  # times that
SCALAR_TOLERANCE = 6e-2  # of the temperature, whose one gradient follows a mean; 1.7e-2 was seen
FLOAT_TOLERANCE = 1e-3  # of float32, where a row may choose the other critic; 4e-4 was seen
REORDERED_TOLERANCE = 2e-2  # of eager cycles whose gradients are summed in another order
REPLAYS = 1000
FREE_MEMORY_SLACK = 8 * 2**20  # bytes; the driver hands out device memory in pieces of 2 MiB


def check_graph(
    part: RankPart, eager: Learning, config: RunConfig, device: torch.device, compiled: bool, ranks: DataParallel
) -> Learning:
    """Capture a cycle and compare its replays with eager cycles from the same start; the graph is left alive.

    Args:
        part: receives the checks.
        eager: runs the eager cycles, not compiled.
        config: the run, with this rank's seed.
        device: where everything lives.
        compiled: compile what is captured.
        ranks: the group.

    Returns:
        The learner whose cycle is a graph.
    """
    eager.cycles(SETTLING_CYCLES)
    count = 1 if compiled else CYCLES  # rounding of bfloat16 grows from cycle to cycle
    start = eager.state()
    eager.cycles(count)
    reference = eager.state()
    exact = _float32_state(config, device, ranks, start) if compiled else reference
    learning = Learning(config, device, compiled, ranks)
    learning.rank.registry.restore(start)
    learning.cycle.capture(learning.rank.registry)
    learning.cycles(count)
    state = learning.state()
    if compiled:
        _compare_rounding(part, state, reference, exact, start)
    else:
        _compare(part, state, reference, start, f"{count} cycles", ranks.world_size <= 2)
    part.same("replayed_state_equal", digest(state, learned(state)))
    return learning


def _float32_state(config: RunConfig, device: torch.device, ranks: DataParallel, start: State) -> State:
    """The state after one eager cycle without autocast."""
    plain = Learning(replace(config, training=replace(config.training, use_amp=False)), device, False, ranks)
    plain.rank.registry.restore(start)
    plain.cycle()
    return plain.state()


def rounding_limits(reference: State, exact: State, start: State) -> dict[str, float]:
    """How far from the float32 update a compiled one may lie, by group: `ROUNDING` times as far as the eager one does.

    Args:
        reference: after one eager cycle.
        exact: after one eager cycle in float32.
        start: before.
    """
    least = {"temperature": SCALAR_TOLERANCE}
    own = update_errors(reference, exact, start)
    return {name: max(ROUNDING * error, least.get(name, FLOAT_TOLERANCE)) for name, error in own.items()}


def _compare_rounding(part: RankPart, state: State, reference: State, exact: State, start: State) -> None:
    """Compiled cycles differ from eager ones by rounding, and by no more."""
    limits, errors = rounding_limits(reference, exact, start), update_errors(state, exact, start)
    worst = max(errors, key=lambda name: errors[name] / limits[name])
    between = update_errors(state, reference, start)[worst]
    detail = f"1 cycle, update error against float32 {errors[worst]:.2g} ({worst}), at most {limits[worst]:.2g}"
    part.check("graph_equals_eager", errors[worst] <= limits[worst], f"{detail}; against eager {between:.2g}")


def _compare(part: RankPart, state: State, reference: State, start: State, what: str, exact: bool) -> None:
    """Bit for bit where `exact`: not where a sum of more than two has an order."""
    apart, errors = changed(state, reference, state), update_errors(state, reference, start)
    limits = {name: SCALAR_TOLERANCE if name == "temperature" else REORDERED_TOLERANCE for name in errors}
    worst = max(errors, key=lambda name: errors[name] / limits[name])
    detail = f"{what}, update error {errors[worst]:.2g} ({worst}), "
    if exact:
        names = f": {', '.join(apart[:5])}" if apart else ""
        detail += f"{len(apart)} of {len(state)} entries differ, none may{names}"
    else:
        detail += f"at most {limits[worst]:g}"
    part.check("graph_equals_eager", not apart if exact else errors[worst] <= limits[worst], detail)


def check_memory(part: RankPart, learning: Learning) -> None:
    """Device memory is flat over many replays."""
    learning.cycles(CYCLES)
    before = _memory()
    learning.cycles(REPLAYS)
    after = _memory()
    allocated, reserved, free = (end - begin for begin, end in zip(before, after, strict=True))
    flat = allocated == reserved == 0 and free >= -FREE_MEMORY_SLACK
    detail = f"{REPLAYS} replays: allocated {allocated:+d}, reserved {reserved:+d}, device free {free:+d} bytes"
    if allocated == reserved == 0 and not flat:
        detail += "; a graph leaks, or another process took memory of this GPU: check that it is idle"
    part.check("flat_memory_over_replays", flat, detail)


def _memory() -> tuple[int, int, int]:
    """Bytes allocated, reserved, and free on the device."""
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]


def check_recapture(
    part: RankPart, config: RunConfig, device: torch.device, compiled: bool, ranks: DataParallel
) -> Learning:
    """A learner of half the batch is captured in the same group, after the first graph's release.

    Returns:
        That learner, its graph alive.
    """
    torch._dynamo.reset()
    algo = replace(config.algo, batch_size=config.algo.batch_size // 2)
    learning = Learning(replace(config, algo=algo), device, compiled, ranks)
    learning.rank.learner.synchronize()
    learning.cycle.capture(learning.rank.registry)
    start, reports = learning.state(), []
    for _ in range(CYCLES):
        learning.cycle()
        reports.append(learning.reported())
    state = learning.state()
    check_updates(part, "recapture_after_shape_change", reports, start, state)
    part.same("recapture_after_shape_change", digest(state, learned(state)))
    return learning
