"""The capture probe with made-up ranks: its cases, what each outcome is called, and which of them decide."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from unilab.probes import nccl_capture
from unilab.probes.__main__ import main
from unilab.probes.findings import Check, RankPart
from unilab.probes.nccl_capture import CASES, classify
from unilab.probes.nccl_capture_rank import STAGE, VALUES
from unilab.probes.rank import ERROR, RAISED_AT
from unilab.probes.setting import Run, Setting

# A rank that does what FAKE_PLAN says for its case, `work` where it says nothing.
FAKE = """
import json, os, signal, sys, time
from pathlib import Path
from unilab.probes.findings import RankPart
from unilab.probes.setting import Seat

seat = Seat.take(sys.argv[1:])
case = [int(seat.options[key]) for key in ("asynchronous", "side_stream", "warmed_up", "early_communicator")]
what = json.loads(os.environ["FAKE_PLAN"]).get("".join(map(str, case)), "work")
part = RankPart(Path(seat.part), facts={"stage": "capture"})
part.write()
if what == "raise":
    if seat.rank == 0:
        time.sleep(60)
    part.facts |= {"error": "rank 1: RuntimeError: not permitted", "raised_at": 1.0}
    part.write()
    os._exit(1)
if what == "hang":
    time.sleep(60)
if what == "die":
    os.kill(os.getpid(), signal.SIGSEGV)
part.check("replayed values", what != "wrong" or seat.rank == 0, "5 values wrong in 10 replays")
part.facts["stage"] = "end"
part.write()
"""

WARMED = ["sync_default_warmed", "sync_side_warmed", "async_default_warmed", "async_side_warmed"]
UNWARMED = [name.replace("warmed", "unwarmed") for name in WARMED]
Probe = Callable[[dict[str, str]], tuple[list[Check], list[dict[str, Any]]]]


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Probe:
    (tmp_path / "fake_capture_rank.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(nccl_capture, "PROGRAM", "fake_capture_rank")
    monkeypatch.setattr(nccl_capture, "UNWARMED_SECONDS", 5.0)

    def run(plan: dict[str, str]) -> tuple[list[Check], list[dict[str, Any]]]:
        return nccl_capture.run(Setting(("0", "1"), "nccl", {**os.environ, "FAKE_PLAN": json.dumps(plan)}))

    return run


def test_the_cases() -> None:
    assert [case.name for case in CASES] == [*WARMED, *UNWARMED, "sync_default_unwarmed_early_communicator"]
    for case in CASES:
        assert case.asynchronous == case.name.startswith("async")
        assert case.side_stream == ("_side_" in case.name)
        assert case.warmed_up == ("_warmed" in case.name)
        assert case.early_communicator == (case.warmed_up or "early" in case.name)


def test_warm_up_is_what_decides(probe: Probe) -> None:
    """Without it one case raises, one hangs, one dies; of the others one raises."""
    began = time.monotonic()
    checks, rows = probe({"0000": "raise", "0100": "hang", "1000": "die", "1111": "raise", "0111": "wrong"})
    assert time.monotonic() - began < 40
    assert [check.name for check in checks if check.required] == WARMED
    assert [check.name for check in checks if not check.passed] == [
        "sync_side_warmed",
        "async_side_warmed",
        *UNWARMED[:3],
    ]
    assert [row["outcome"] for row in rows] == [
        "worked",
        "wrong values",
        "worked",
        "raised",
        "raised",
        "hung",
        "died",
        "worked",
        "worked",
    ]
    assert checks[1].detail == "wrong values: rank 1: 5 values wrong in 10 replays"
    assert checks[4].detail == "raised: rank 1: RuntimeError: not permitted (at capture)"
    assert checks[5].detail == "hung (no answer within 5 s, at capture)"
    assert checks[6].detail.startswith("died: rank ")
    assert checks[6].detail.endswith("was killed by SIGSEGV (at capture)")
    assert (rows[0]["case"], rows[0]["stage"], rows[0]["warmed_up"]) == ("sync_default_warmed", "end", True)
    assert rows[5]["seconds"] >= 5


def part(**facts: Any) -> RankPart:
    return RankPart(Path("unused"), facts=facts)


BROKEN = part(stage="capture", error="rank 1: E: x", raised_at=2.0)
LATER = part(stage="replay", error="rank 0: peer is gone", raised_at=2.1)


@pytest.mark.parametrize(
    ("fault", "parts", "word", "stage"),
    [
        (None, [part(), part()], "wrong values", "start"),  # nobody checked any
        (
            "rank 1 ended with exit code 1",
            [part(stage="replay"), BROKEN],
            "raised",
            "capture",
        ),
        ("rank 0 ended with exit code 1", [LATER, BROKEN], "raised", "capture"),
        ("no answer within 3 s", [part(stage="capture"), BROKEN], "raised", "capture"),
        ("no answer within 3 s", [part(stage="warm-up"), part()], "hung", "warm-up"),
        ("rank 0 ended with exit code 1", [part(), part()], "died", "start"),
    ],
)
def test_outcomes(fault: str | None, parts: list[RankPart], word: str, stage: str) -> None:
    assert (ERROR, RAISED_AT, STAGE) == ("error", "raised_at", "stage")
    found = classify(Run(fault, 1.0, ("", ""), parts))
    assert (found.word, found.stage) == (word, stage)
    assert found.detail.startswith(word)


def test_what_does_not_end_well_did_not_work(tmp_path: Path) -> None:
    done = part(stage="end")
    done.path = tmp_path / "rank0.json"
    done.check(VALUES, True, "0 values wrong in 10 replays")
    assert classify(Run(None, 1.0, ("", ""), [done, done])).word == "worked"
    assert classify(Run("rank 0 was killed by SIGABRT", 1.0, ("", ""), [done, done])).word == "died"


def test_there_is_nothing_of_it_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nccl-capture", "--smoke"]) == 2
    assert capsys.readouterr().err.startswith("probe: nccl-capture is about graphs on GPUs")


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="there are two CUDA devices")
def test_it_needs_two_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nccl-capture"]) == 3
    assert capsys.readouterr().err.startswith("probe: --world-size 2 needs as many GPUs")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.timeout(360)
def test_every_form_works_with_warm_up(tmp_path: Path) -> None:
    assert main(["nccl-capture", "--output", str(tmp_path / "found")]) == 0
    found = json.loads((tmp_path / "found").read_text())
    assert [row["case"] for row in found["measurements"] if row["warmed_up"]] == WARMED
