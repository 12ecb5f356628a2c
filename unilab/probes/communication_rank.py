"""One rank of the communication probe: all-reduces of several sizes, timed and checked.

Every payload follows a tiny all-reduce. The tiny one ends when the last rank has come: its time is waiting. The ranks
then start the payload together: its time is transfer.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from unilab.capture import on_stream
from unilab.data_parallel import DataParallel
from unilab.probes.findings import RankPart
from unilab.probes.rank import KnownSums, serve
from unilab.probes.setting import Seat

WARM_UPS = 3
LATE_RANK = 1  # the one that an artificial delay holds up
AHEAD = 1_000_000  # clock cycles, about half a millisecond


class Stopwatch:
    """Moments on the current stream, on the CPU those of the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moments: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Take a moment."""
        if self._device.type == "cuda":
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._moments.append(1000 * time.perf_counter())

    def spans(self) -> list[float]:
        """Milliseconds between neighbours; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return [one.elapsed_time(other) for one, other in zip(self._events, self._events[1:], strict=False)]
        return [other - one for one, other in zip(self._moments, self._moments[1:], strict=False)]


class Payload:
    """Buffers of one size, each with a content of known sum, reduced eagerly until `capture`.

    Args:
        elements: float32 values of an all-reduce.
        copies: how many all-reduces are timed together; each has its own buffer, so that all can be checked.
        seat: this rank.
        device: where they live.

    Attributes:
        elements: as given.
        copies: as given.
        graph: what `run` replays, None where it is eager.
    """

    def __init__(self, elements: int, copies: int, seat: Seat, device: torch.device) -> None:
        self.elements, self.copies = elements, copies
        self.graph: torch.cuda.CUDAGraph | None = None
        self._buffers = [torch.zeros(elements, device=device) for _ in range(copies)]
        self._sums = KnownSums(elements, seat.rank, seat.world_size, device)

    def fill(self, turn: int) -> None:
        """Lay down what this rank has before."""
        for buffer in self._buffers:
            self._sums.fill(buffer, turn)

    def run(self) -> None:
        """All-reduce every buffer, on the current stream."""
        if self.graph is not None:
            self.graph.replay()
            return
        for buffer in self._buffers:
            dist.all_reduce(buffer)

    def wrong(self, turn: int) -> int:
        """How many values are wrong afterwards."""
        return sum(self._sums.wrong(buffer, turn) for buffer in self._buffers)

    def capture(self) -> None:
        """Replay a graph from now on; the current stream is captured."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            self.run()
        self.graph = graph

    def release(self) -> None:
        """Give the graph back."""
        if self.graph is not None:
            self.graph.reset()


class Turn(NamedTuple):
    """One all-reduce, or several in one graph, all as milliseconds but the last.

    Attributes:
        delay: how late this rank came on purpose.
        waiting: time of the tiny all-reduce.
        transfer: time of the payload.
        wrong: values that were not the sum.
    """

    delay: float
    waiting: float
    transfer: float
    wrong: int


class Measuring:
    """Times and checks all-reduces.

    Args:
        seat: this rank.
        part: receives checks and measurements.
        device: this rank's device.
        barrier: the tiny payload.
    """

    def __init__(self, seat: Seat, part: RankPart, device: torch.device, barrier: Payload) -> None:
        self._seat, self._part, self._device, self._barrier = seat, part, device, barrier
        self._number = 0

    def measure(self, name: str, payload: Payload, delay_ms: float = 0.0) -> None:
        """Repeat the all-reduce of one payload.

        Args:
            name: of the payload.
            payload: what is reduced.
            delay_ms: how late one rank comes.
        """
        captured = payload.graph is not None
        repeats = int(self._seat.options["replays" if captured else "repeats"])
        turns = [self._turn(payload, delay_ms) for _ in range(WARM_UPS + repeats)]
        wrong, sums = sum(turn.wrong for turn in turns), len(turns) * payload.copies
        self._part.check(check_name(name, captured, delay_ms > 0), wrong == 0, f"{wrong} values wrong in {sums} sums")
        measured = turns[WARM_UPS:]
        transfers = sorted(turn.transfer / payload.copies for turn in measured)
        median, size, count = statistics.median(transfers), 4 * payload.elements, self._seat.world_size
        self._part.measure(
            payload=name,
            bytes=size,
            captured=captured,
            repeats=repeats * payload.copies,
            delay_ms=statistics.median(turn.delay for turn in measured),
            waiting_ms=statistics.median(turn.waiting for turn in measured),
            transfer_ms=median,
            p90_ms=transfers[math.ceil(0.9 * repeats) - 1],
            bandwidth_gb_per_s=2 * (count - 1) / count * size / median / 1e6,
        )

    def _turn(self, payload: Payload, delay_ms: float) -> Turn:
        self._number += 1
        payload.fill(self._number)
        unmet = self._meet()
        self._barrier.fill(self._number)
        stopwatch = Stopwatch(self._device)
        delay = self._delay(delay_ms)
        if self._device.type == "cuda":  # the host gets ahead, so that its launches are not in the times
            torch.cuda._sleep(AHEAD)
        stopwatch.mark()
        self._barrier.run()
        stopwatch.mark()
        payload.run()
        stopwatch.mark()
        waiting, transfer = stopwatch.spans()
        wrong = unmet + payload.wrong(self._number) + self._barrier.wrong(self._number)
        return Turn(delay, waiting, transfer, wrong)

    def _meet(self) -> int:
        """Wait for the other ranks, on the host too; returns wrong values."""
        self._barrier.fill(self._number)
        self._barrier.run()
        return self._barrier.wrong(self._number)

    def _delay(self, milliseconds: float) -> float:
        """Come late, if this is the rank that does; returns by how much it was."""
        if self._seat.rank != LATE_RANK or not milliseconds:
            return 0.0
        began = time.perf_counter()
        time.sleep(milliseconds / 1000)
        return 1000 * (time.perf_counter() - began)


def check_name(payload: str, captured: bool, delayed: bool) -> str:
    """Name of the check of one measurement's values."""
    return f"{payload} {'captured' if captured else 'eager'}{' delayed' if delayed else ''}"


def communicate(seat: Seat, part: RankPart) -> None:
    """Measure every payload eagerly, one of them with a late rank too, then all of them captured on CUDA."""
    device = torch.device("cuda", 0) if seat.backend == "nccl" else torch.device("cpu")
    torch.set_num_threads(1)  # ranks on CPUs would be in each other's way
    group = DataParallel.join(seat.rank, seat.world_size, device, Path(seat.store), seat.options["seconds"])
    with on_stream(torch.cuda.Stream() if device.type == "cuda" else None):
        barrier = Payload(1, 1, seat, device)
        measuring = Measuring(seat, part, device, barrier)
        _measure_eager(seat, measuring, device)
        if device.type == "cuda":
            _measure_captured(seat, measuring, barrier, device)
    group.close()


def _measure_eager(seat: Seat, measuring: Measuring, device: torch.device) -> None:
    options = seat.options
    for name, elements in options["payloads"].items():
        payload = Payload(elements, 1, seat, device)
        measuring.measure(name, payload)
        if name == options["delayed"]:
            measuring.measure(name, payload, options["delay_ms"])


def _measure_captured(seat: Seat, measuring: Measuring, barrier: Payload, device: torch.device) -> None:
    """Nothing runs eagerly from the first capture on; every graph is gone before the group is left."""
    copies = seat.options["copies"]
    payloads = {name: Payload(elements, copies, seat, device) for name, elements in seat.options["payloads"].items()}
    for payload in (barrier, *payloads.values()):
        payload.capture()
    for name, payload in payloads.items():
        measuring.measure(name, payload)
    torch.cuda.synchronize(device)
    for payload in (barrier, *payloads.values()):
        payload.release()


def main(argv: Sequence[str]) -> int:
    """Run one rank; returns the exit code."""
    return serve(argv, communicate)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
