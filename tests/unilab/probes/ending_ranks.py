"""Ranks of the correctness probe that end otherwise than they must, as the variable ENDING says."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from unilab.probes.findings import RankPart
from unilab.probes.setting import Seat


def hang(seat: Seat, part: RankPart) -> None:
    part.enter("a long wait")
    if seat.rank == 1:
        time.sleep(60)
    leave(seat, part)


def leave(seat: Seat, part: RankPart) -> None:
    part.facts["leaving"] = time.monotonic()
    part.check("some", True, "")


def linger(seat: Seat, part: RankPart) -> None:
    part.facts["leaving"] = time.monotonic() - 40 * seat.rank
    part.check("some", True, "")


def say_nothing(seat: Seat, part: RankPart) -> None:
    if seat.rank == 0:
        leave(seat, part)


def fail(seat: Seat, part: RankPart) -> None:
    """A real rank, whose rank 1 fails while rank 0 waits for it in a collective."""
    from unilab.probes import correctness_rank

    learn = correctness_rank.check_cycles

    def check_cycles(*given: Any) -> None:
        if seat.rank == 1:
            raise OSError("the device fell off")
        learn(*given)
        time.sleep(60)

    correctness_rank.check_cycles = check_cycles
    correctness_rank.main(sys.argv[1:])


if __name__ == "__main__":
    place = Seat.take(sys.argv[1:])
    globals()[os.environ["ENDING"]](place, RankPart(Path(place.part)))
