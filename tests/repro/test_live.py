from __future__ import annotations

import io
from pathlib import Path
from typing import IO, cast

import pytest
from rich.console import Console
from session_builder import SOURCE, finished_session, make_host, toy_matrix

from repro.evidence import CellEvidence, read_evidence
from repro.live import LastingStream, SessionView
from repro.noise import session_noise
from repro.plan import Plan, make_plan


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def plan() -> Plan:
    matrix = toy_matrix(startup_estimate_seconds=10.0, iteration_estimate_seconds=0.0)
    return make_plan(matrix, *make_host(), SOURCE)


def ended(plan: Plan, index: int, status: str, reason: str | None = None) -> CellEvidence:
    return CellEvidence(plan.cells[index], status, reason, None, None, has_run=False)


def test_plain_lines_without_a_terminal(plan: Plan) -> None:
    stream, clock = io.StringIO(), Clock()
    with SessionView(plan, Console(file=stream, force_terminal=False), clock) as view:
        view.started(plan.cells[0])
        clock.now += 4
        view.ended(ended(plan, 0, "failed", "exit code 1: no [bold]luck[/]"), 4.0)
    assert stream.getvalue().splitlines() == [
        "[1/5] warmup1_slow: running",
        "[1/5] warmup1_slow: failed (exit code 1: no [bold]luck[/]), 4 s, about 16 s left",
    ]


class ClosedPipe(io.StringIO):
    def write(self, words: str) -> int:
        raise BrokenPipeError


def test_the_view_goes_on_when_nobody_reads(plan: Plan) -> None:
    for terminal in (False, True):
        console = Console(file=cast(IO[str], LastingStream(ClosedPipe())), force_terminal=terminal, width=80)
        with SessionView(plan, console, Clock()) as view:
            for cell in range(2):
                view.started(plan.cells[cell])
                view.ended(ended(plan, cell, "failed", "exit code 1"), 1.0)
            assert view.remaining_seconds() == 4.0 - cell


def test_the_rest_is_estimated_from_the_plan_then_from_what_ran(plan: Plan) -> None:
    clock = Clock()
    view = SessionView(plan, Console(file=io.StringIO(), force_terminal=False), clock)
    assert view.remaining_seconds() == 50.0
    view.started(plan.cells[0])
    clock.now += 4
    assert view.remaining_seconds() == 46.0
    view.ended(ended(plan, 0, "discarded"), 6.0)
    assert view.remaining_seconds() == 24.0


def shown(view: SessionView) -> str:
    return str(view.__rich__().caption or "")


def test_a_cell_that_takes_longer_is_not_about_to_end(plan: Plan) -> None:
    clock = Clock()
    view = SessionView(plan, Console(file=io.StringIO(), force_terminal=False), clock)
    captions = []
    for index in range(5):
        view.started(plan.cells[index])
        clock.now += 7.8
        captions.append(shown(view))
        clock.now += 4.2
        captions.append(shown(view))
        view.ended(ended(plan, index, "failed"), 8.0)
    assert captions[:4] == [
        "about 43 s left",
        "warmup1_slow takes longer than expected, then about 40 s left",
        "about 25 s left",
        "slow_r1 takes longer than expected, then about 24 s left",
    ]
    assert captions[-2:] == ["about 1 s left", "slow_r2 takes longer than expected"]
    assert shown(view) == ""


def test_the_noise_is_that_of_the_page_as_far_as_cases_were_measured_twice(tmp_path: Path) -> None:
    evidence = read_evidence(finished_session(tmp_path))
    stream = io.StringIO()
    view = SessionView(evidence.plan, Console(file=stream, force_terminal=False), Clock())
    captions = []
    for item in evidence.cells:
        view.started(item.cell)
        view.ended(item, 1.0)
        captions.append(shown(view))
    final = session_noise(evidence.cells)
    assert final is not None and final.n == 4
    assert ["noise" in caption for caption in captions] == [False, False, False, True, True]
    assert captions[-1] == f"host noise {100 * final.score:.1f} %"
    assert stream.getvalue().splitlines()[-1].endswith(f", {captions[-1]}")


def test_cells_that_did_not_run_are_waited_for_no_more(plan: Plan) -> None:
    with SessionView(plan, Console(file=io.StringIO(), force_terminal=False), Clock()) as view:
        assert shown(view) == "about 50 s left"
    assert shown(view) == ""


def test_a_table_on_a_terminal(plan: Plan) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    with SessionView(plan, console, Clock()) as view:
        view.started(plan.cells[0])
        view.ended(ended(plan, 0, "timeout", "no end after 3 s"), 3.0)
    output = stream.getvalue()
    for word in ("cell", "elapsed", "steps/s", "warmup1_slow", "timeout", "waiting", "left"):
        assert word in output
    assert "no end after 3 s" in output
