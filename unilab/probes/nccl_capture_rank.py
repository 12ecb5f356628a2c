"""One rank of the capture probe: one all-reduce in a CUDA graph, replayed with new inputs; as little else as can be."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from unilab.capture import on_stream
from unilab.probes.findings import RankPart
from unilab.probes.rank import KnownSums, serve
from unilab.probes.setting import Seat

STAGE = "stage"  # the fact that says what was begun last
ELEMENTS = 2**18  # 1 MiB
REPLAYS = 10
VALUES = "replayed values"  # name of the check


def capture(seat: Seat, part: RankPart) -> None:
    """Join, warm up if asked for, capture, replay and check, release the graph, leave."""
    device = torch.device("cuda", 0)
    _begin(part, "start")
    torch.cuda.set_device(device)
    early = seat.options["early_communicator"]  # else the first collective makes it
    dist.init_process_group(
        "nccl",
        init_method=f"file://{seat.store}",
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=timedelta(minutes=10),  # long, so that the parent ends what hangs
        device_id=device if early else None,
    )
    if seat.options["warmed_up"]:
        _begin(part, "warm-up")
        dist.all_reduce(torch.ones(1, device=device))
        torch.cuda.synchronize(device)
    _capture_and_replay(seat, part, device)
    _begin(part, "end")
    dist.destroy_process_group()


def _capture_and_replay(seat: Seat, part: RankPart, device: torch.device) -> None:
    """The graph does not outlive this."""
    side = torch.cuda.Stream() if seat.options["side_stream"] else None
    sums = KnownSums(ELEMENTS, seat.rank, seat.world_size, device)
    given, summed = torch.zeros(ELEMENTS, device=device), torch.zeros(ELEMENTS, device=device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    _begin(part, "capture")
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):  # None: a stream of torch's own
        summed.copy_(given)
        _all_reduce(summed, seat.options["asynchronous"])
    torch.cuda.synchronize(device)
    _begin(part, "replay")
    wrong = 0
    with on_stream(side):
        for turn in range(1, REPLAYS + 1):
            sums.fill(given, turn)
            graph.replay()
            wrong += sums.wrong(summed, turn)
    part.check(VALUES, wrong == 0, f"{wrong} values wrong in {REPLAYS} replays")
    _begin(part, "release")
    torch.cuda.synchronize(device)
    graph.reset()


def _all_reduce(values: Tensor, asynchronous: bool) -> None:
    if asynchronous:
        work = dist.all_reduce(values, async_op=True)
        assert work is not None
        work.wait()
    else:
        dist.all_reduce(values)


def _begin(part: RankPart, stage: str) -> None:
    part.facts[STAGE] = stage
    part.write()


def main(argv: Sequence[str]) -> int:
    """Run one rank; returns the exit code."""
    return serve(argv, capture)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
