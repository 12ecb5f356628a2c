"""One rank of the correctness probe: the checks in their order, eager ones before anything is captured.

Started by `unilab.probes.correctness`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from unilab.capture import on_stream
from unilab.config import RunConfig, load_config
from unilab.data_parallel import DataParallel
from unilab.hardware import choose_device, learner_threads
from unilab.names import GRAPH_HOOKS
from unilab.probes.correctness_eager import check_cycles, check_gradients, check_skip, check_start
from unilab.probes.correctness_graph import check_graph, check_memory, check_recapture
from unilab.probes.findings import RankPart
from unilab.probes.learning import Learning
from unilab.probes.rank import serve
from unilab.probes.setting import Seat
from unilab.provenance import PACKAGE, redact, source_sha256

# The task's own sizes but for the ring, whose length is no part of what is checked; on the CPU all of them small.
FULL = ("algo.replay_buffer_n=16",)
SMALL = (
    *("training.smoke=true", "algo.num_envs=8", "algo.batch_size=32", "algo.replay_buffer_n=8"),
    *("algo.actor_hidden_dim=16", "algo.critic_hidden_dim=16", "algo.num_atoms=11"),
)
LEAVING_LIMIT = 30.0  # seconds


def main(argv: Sequence[str]) -> int:
    """Run one rank; returns the exit code."""
    return serve(argv, run)


def run(seat: Seat, part: RankPart) -> None:
    """Meet the others, make every check and leave."""
    part.enter("meeting the other ranks")
    config = configure(seat.rank, seat.backend, seat.options["algo"], seat.options["overrides"])
    device = choose_device(config, seat.world_size)
    torch.set_num_threads(learner_threads(seat.world_size))
    ranks = DataParallel.join(seat.rank, seat.world_size, device, Path(seat.store))
    leave(part, check(part, config, device, bool(seat.options["compile_loss"]), ranks), ranks)


def configure(rank: int, backend: str, algo: str = "sac", overrides: Sequence[str] = ()) -> RunConfig:
    """The run of a rank, with a seed of its own.

    Raises:
        ValueError: if an override is wrong, or an actor of one's own.
    """
    config = load_config(algo, "g1_walk_flat", "mujoco", [*(SMALL if backend == "gloo" else FULL), *overrides])
    task = config.env.task_class()
    config.algo.check_actor(task.obs_dim, task.action_dim)
    return replace(config, algo=replace(config.algo, seed=config.algo.seed + rank))


def check(
    part: RankPart, config: RunConfig, device: torch.device, compiled: bool, ranks: DataParallel
) -> Learning | None:
    """Make every check that this device allows.

    Returns:
        A learner whose graph is still alive, None without CUDA.
    """
    hooks = f"graph hooks: {GRAPH_HOOKS}"
    code = f"{redact(str(PACKAGE))} \N{MIDDLE DOT} {hooks} \N{MIDDLE DOT} sources {source_sha256()[:16]}"
    part.check("trainer_code", True, code, required=False)
    # Warm-up, capture and replay share one stream of their own, as in a run.
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with on_stream(stream):
        eager = Learning(config, device, False, ranks)
        part.enter("start")
        check_start(part, eager)
        part.enter("eager cycles")
        check_cycles(part, eager)
        part.enter("gradients")
        check_gradients(part, config, device, compiled, ranks, eager.state())
        part.enter("skipping eagerly")
        check_skip(part, eager)
        return None if stream is None else check_graphs(part, eager, config, device, compiled, ranks)


def check_graphs(
    part: RankPart, eager: Learning, config: RunConfig, device: torch.device, compiled: bool, ranks: DataParallel
) -> Learning:
    """Make the checks of captured cycles; returns the last learner, its graph alive."""
    part.enter("capture")
    torch._dynamo.reset()
    learning = check_graph(part, eager, config, device, compiled, ranks)
    part.enter("skipping in replays")
    check_skip(part, learning, "replayed_")
    part.enter("many replays")
    check_memory(part, learning)
    release(learning)
    part.enter("another capture")
    return check_recapture(part, config, device, compiled, ranks)


def release(learning: Learning) -> None:
    """Drop the graph when the device is done with it; from then on collectives may run outside of graphs."""
    torch.cuda.synchronize()
    learning.cycle.release()


def leave(part: RankPart, learning: Learning | None, ranks: DataParallel) -> None:
    """Release the graph that is left and leave the group, within `LEAVING_LIMIT`."""
    part.facts["leaving"] = began = time.monotonic()
    part.enter("leaving")
    if learning is not None:
        release(learning)
    ranks.close()
    seconds = time.monotonic() - began
    what = "group left" if learning is None else "graph released and group left"
    part.check("group_left_within_30s", seconds <= LEAVING_LIMIT, f"{what} in {seconds:.2f} s")
    part.enter("end")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
