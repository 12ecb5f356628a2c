"""One rank of a transport probe: all-reduces 4 MB, checks every value, prints how long it took.

Started by `unilab.transport`: `python -m unilab.transport_probe BACKEND SECONDS RANK WORLD_SIZE STORE`.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import distributed

from unilab.transport import WRONG_VALUES
from unilab.trial import end_with_parent

ELEMENTS = 2**20  # float32: 4 MB
WARM_UPS, REPEATS = 2, 10
GRACE = 5  # s that the parent's deadline comes before this program's own


def main(argv: Sequence[str]) -> int:
    """Run one rank; returns the exit code, `WRONG_VALUES` where a sum was not what it must be.

    Args:
        argv: backend, deadline in seconds, rank, number of ranks, path of the file store.
    """
    backend, seconds, rank, world_size, store = argv
    end_with_parent()
    signal.alarm(int(float(seconds)) + GRACE)
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    distributed.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(seconds=float(seconds)),
        device_id=device if device.type == "cuda" else None,
    )
    milliseconds = all_reduce_ms(int(rank), int(world_size), device)
    if milliseconds is None:
        return WRONG_VALUES
    if int(rank) == 0:
        print(json.dumps({"all_reduce_ms": milliseconds}), flush=True)
    distributed.destroy_process_group()
    return 0


def all_reduce_ms(rank: int, world_size: int, device: torch.device) -> float | None:
    """Median milliseconds of an all-reduce, or None as soon as one value is wrong.

    The sums are whole numbers below 2^24, so float32 holds them exactly in any order of addition.
    """
    pattern = torch.arange(ELEMENTS, dtype=torch.float32, device=device) % 1024  # (ELEMENTS,)
    expected = world_size * pattern + world_size * (world_size - 1) // 2
    samples = []
    for _ in range(WARM_UPS + REPEATS):
        values = pattern + rank
        _finish(device)
        began = time.perf_counter()
        distributed.all_reduce(values)
        _finish(device)
        samples.append(1000 * (time.perf_counter() - began))
        if not torch.equal(values, expected):
            return None
    return statistics.median(samples[WARM_UPS:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
