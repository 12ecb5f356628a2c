"""What every rank of a probe does: end in bounded time, and leave its findings whatever happens."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from unilab.probes.findings import RankPart
from unilab.probes.setting import Seat
from unilab.trial import end_with_parent

GRACE = 5  # s that the parent's limit comes before this program's own
ERROR = "error"  # the fact that says what was raised, and by which rank
RAISED_AT = "raised_at"  # the fact that says when, s on the host's clock
MESSAGE = 600  # characters of a message that are kept


def serve(argv: Sequence[str], program: Callable[[Seat, RankPart], None]) -> int:
    """Run one rank; what it raises is printed and kept as the fact `error`.

    Args:
        argv: the rank's place; its option `seconds` is the limit.
        program: gets the place and the part it fills.
    """
    end_with_parent()
    seat = Seat.take(argv)
    part = RankPart(Path(seat.part))
    signal.alarm(int(seat.options["seconds"]) + GRACE)  # also where something does not let go of Python
    try:
        program(seat, part)
    except Exception as error:
        traceback.print_exc()
        part.facts |= {ERROR: f"rank {seat.rank}: {_describe(error)}", RAISED_AT: time.monotonic()}
        part.write()
        os._exit(1)  # a communicator may keep the interpreter from ending
    return 0


def find_raised(parts: Sequence[RankPart]) -> RankPart | None:
    """The part of the rank that raised something first; the others may then fail of its absence."""
    return min((part for part in parts if ERROR in part.facts), key=lambda part: part.facts[RAISED_AT], default=None)


def _describe(error: BaseException) -> str:
    """The error in one line, with the one it began with: the end of a capture hides what broke it."""
    first = error
    while first.__context__ is not None:
        first = first.__context__
    words = [f"{type(one).__name__}: {' '.join(str(one).split())}"[:MESSAGE] for one in (error, first)]
    return words[0] if first is error else f"{words[0]}, after {words[1]}"


class KnownSums:
    """Values whose sum over the ranks is known exactly.

    In turn t, element k of rank r is k mod 1024 + r + t. These are whole numbers and so are their sums, below 2^24 for
    any number of ranks and turns that a probe has, so float32 holds them exactly in any order of addition.

    Args:
        elements: number of values.
        rank: this process's rank.
        world_size: number of ranks.
        device: where they live.
    """

    def __init__(self, elements: int, rank: int, world_size: int, device: torch.device) -> None:
        self._pattern = torch.arange(elements, device=device).remainder_(1024).to(torch.float32)
        self._rank, self._world_size = rank, world_size

    def fill(self, values: Tensor, turn: int) -> None:
        """Write this rank's values, `(elements,)`."""
        torch.add(self._pattern, self._rank + turn, out=values)

    def wrong(self, values: Tensor, turn: int) -> int:
        """How many of `values`, `(elements,)`, are not the sum; uses them up and waits for the device."""
        size = self._world_size
        rest = values.sub_(self._pattern, alpha=size)
        return int(torch.count_nonzero(rest != size * turn + size * (size - 1) // 2))
