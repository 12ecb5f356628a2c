"""Phases as CUDA graphs: captured once, replayed every tick, released before anything they hold is destroyed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from unilab.state import StateRegistry

WARMUP_RUNS = 3


class Phase:
    """A device phase that runs eagerly until `capture`, and as one graph replay from then on.

    Args:
        run: the phase. It reads and writes static buffers only, so that a graph can hold it unchanged.
        generators: random generators the phase draws from.
    """

    def __init__(self, run: Callable[[], None], generators: Sequence[torch.Generator]) -> None:
        self._run, self._generators = run, list(generators)
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Run the phase once, on the current stream."""
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

    def capture(self, registry: StateRegistry) -> None:
        """Warm up, capture on the current stream, and put every registered entry back as it was.

        Warm-up compiles what is compiled and lets every library allocate; both happen outside the graph.
        """
        before = registry.snapshot()
        for _ in range(WARMUP_RUNS):
            self._run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            self._run()
        registry.restore(before)
        torch.cuda.synchronize()
        self._graph = graph

    def release(self) -> None:
        """Drop the graph; the next call runs eagerly."""
        self._graph = None


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Within, work goes to this stream; to the device's only one for None (`torch.cuda.stream(None)` fails on MPS)."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)
