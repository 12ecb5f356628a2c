"""What a person sees: lines without a terminal, a live table on one, and honest rates."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from unilab import terminal
from unilab.terminal import Scale, TerminalView

SCALE = Scale("sac · G1WalkFlat · SMOKE", iterations=100, env_steps=50, rows=400)
SCALARS = {
    "Train/mean_reward": 1.234,
    "Train/mean_episode_length": 87.6,
    "Perf/iteration_time": 0.1,
    "Perf/physics_fraction": 0.25,
    "Perf/exposed_ms": 0.7512,
    "Perf/learning_time": 0.0123,
    "Loss/critic": 1.5,
    "Loss/actor": -20.25,
    "Loss/entropy": 12345678.0,
    "Policy/temperature": 0.001,
}


class Ticking:
    """A clock a test sets."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Ticking:
    ticking = Ticking()
    monkeypatch.setattr(terminal, "time", ticking)
    return ticking


def plain() -> tuple[TerminalView, io.StringIO]:
    text = io.StringIO()
    return TerminalView(SCALE, Console(file=text, force_terminal=False, width=40)), text


def test_plain_lines_come_at_the_start_every_five_seconds_and_at_the_end(clock: Ticking) -> None:
    view, text = plain()
    with view:
        for iteration in range(1, 101):
            view.update(iteration, SCALARS)
            clock.now += 0.1
    lines = text.getvalue().splitlines()
    assert [line.split(" · ")[0] for line in lines] == [
        "iteration 1/100",
        "iteration 51/100",
        "iteration 100/100",
    ]
    assert lines[0].endswith("Steps/s 500 · Rows/s 4,000 · reward 1.23 · episode length 88 · ETA 0:00:10")
    # 10 iterations a second: 500 env steps, 4000 rows, 49 iterations left
    assert lines[1].endswith("Steps/s 500 · Rows/s 4,000 · reward 1.23 · episode length 88 · ETA 0:00:05")
    assert lines[2].endswith("ETA 0:00:00")
    assert "\x1b" not in text.getvalue()


def test_rates_are_those_of_the_ticks_of_the_last_two_seconds() -> None:
    view, _ = plain()
    for iteration in range(1, 11):
        view.update(iteration, SCALARS | {"Perf/iteration_time": 1.0})
    assert view._summary(10, SCALARS)["Steps/s"] == "50"
    for iteration in range(11, 61):
        view.update(iteration, SCALARS | {"Perf/iteration_time": 0.05})
    assert view._summary(60, SCALARS)["Steps/s"] == "1,000"
    assert view._summary(60, SCALARS)["ETA"] == "0:00:02"


def test_the_last_tick_is_no_faster_for_being_shown_right_after_the_one_before_it(clock: Ticking) -> None:
    """Each tick is shown when the next has come; the last has none, so its line follows at once."""
    view, text = plain()
    for iteration in range(97, 101):
        view.update(iteration, SCALARS | {"Perf/iteration_time": 10.0})
        clock.now += 10.0 * (iteration < 99)
    assert "iteration 100/100 · Steps/s 5 · Rows/s 40" in text.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00:00"),
        (59.4, "0:00:59"),
        (59.6, "0:01:00"),
        (3599.7, "1:00:00"),
        (3661, "1:01:01"),
        (90061, "25:01:01"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert terminal._duration(seconds) == text


def test_a_live_table_on_a_terminal(clock: Ticking) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, record=True)
    with TerminalView(SCALE, console) as view:
        for iteration in range(1, 21):
            view.update(iteration, SCALARS)
            clock.now += 0.1
    text = console.export_text()
    assert "sac · G1WalkFlat · SMOKE · iteration 20/100" in text
    shown = {row.split("│")[1].strip(): row.split("│")[2].strip() for row in text.splitlines() if row.count("│") == 3}
    expected = {
        "Steps/s": "500",
        "Rows/s": "4,000",
        "reward": "1.23",
        "episode length": "88",
        "ETA": "0:00:08",
        "tick": "100.0 ms",
        "physics share": "25.0%",
        "exposed": "0.75 ms",
        "update": "12.30 ms",
        "Loss/critic": "1.5",
        "Loss/actor": "-20.25",
        "Loss/entropy": "1.235e+07",
        "Policy/temperature": "0.001",
    }
    assert shown == expected


def test_the_live_table_ends_when_the_run_fails() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)

    def fails() -> None:
        with TerminalView(SCALE, console) as view:
            view.update(1, SCALARS)
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fails()
    with TerminalView(SCALE, console):  # a console holds one live display at a time
        pass
