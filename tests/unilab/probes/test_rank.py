"""How a rank of a probe ends, and what it leaves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from unilab.probes import rank
from unilab.probes.findings import RankPart
from unilab.probes.rank import ERROR, RAISED_AT, find_raised, serve
from unilab.probes.setting import Seat

Program = Callable[[Seat, RankPart], None]


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Program], tuple[int, RankPart]]:
    """Exit code and part of a program, and its alarm set to nothing."""

    def run(program: Program) -> tuple[int, RankPart]:
        alarms: list[int] = []
        monkeypatch.setattr(rank.signal, "alarm", alarms.append)
        monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"exit {code}") if code != 1 else None)
        path = tmp_path / "rank0.json"
        seat = Seat(0, 2, "gloo", "store", str(path), {"seconds": 40.0})
        code = serve([json.dumps(asdict(seat))], program)
        assert alarms == [45]
        return code, RankPart.read(path)

    return run


def fail_in_a_capture(seat: Seat, part: RankPart) -> None:
    """As `torch.cuda.graph` does: leaving it fails too, and that is what comes out."""
    part.check("before", True, "there")
    try:
        raise RuntimeError("operation not permitted\n  when stream is capturing")
    finally:
        raise ValueError("capture was\ninvalidated")


def fail_late(seat: Seat, part: RankPart) -> None:
    raise OSError("x" * 1000)


def test_what_broke_a_capture_is_kept(ended: Callable[[Program], tuple[int, RankPart]]) -> None:
    _, part = ended(fail_in_a_capture)
    assert part.facts[ERROR] == (
        "rank 0: ValueError: capture was invalidated, "
        "after RuntimeError: operation not permitted when stream is capturing"
    )
    assert [check.name for check in part.checks] == ["before"]


def test_long_messages_are_cut(ended: Callable[[Program], tuple[int, RankPart]]) -> None:
    _, part = ended(fail_late)
    assert part.facts[ERROR] == f"rank 0: OSError: {'x' * 591}"


def test_a_good_end_leaves_no_error(ended: Callable[[Program], tuple[int, RankPart]]) -> None:
    code, part = ended(lambda _, part: part.write())
    assert (code, find_raised([part])) == (0, None)


def test_the_rank_that_raised_first_is_found() -> None:
    parts = [RankPart(Path(name), facts={ERROR: name, RAISED_AT: when}) for name, when in (("a", 2.5), ("b", 2.4))]
    assert find_raised([RankPart(Path("c")), *parts]) is parts[1]
