"""What a person sees while a run goes on: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table

from unilab.names import EXPOSED_MS, ITERATION_TIME, LEARNING_TIME, MEAN_EPISODE_LENGTH, MEAN_REWARD, PHYSICS_FRACTION

AVERAGE_SECONDS = 2.0
LINE_SECONDS = 5.0
_LOSSES = ("Loss/critic", "Loss/actor", "Loss/entropy", "Policy/temperature")


@dataclass(frozen=True)
class Scale:
    """Sizes that turn iterations into rates.

    Attributes:
        title: heading of the view.
        iterations: iterations of the whole run.
        env_steps: env steps of one iteration, all ranks.
        rows: replay rows of one iteration, all ranks.
    """

    title: str
    iterations: int
    env_steps: int
    rows: int


class TerminalView:
    """Shows the progress of a run; use as a context manager.

    Args:
        scale: sizes of the run.
        console: where to show it.
    """

    def __init__(self, scale: Scale, console: Console | None = None) -> None:
        self._scale = scale
        self._console = console or Console(highlight=False)
        self._recent: deque[float] = deque()  # s of each tick of the last seconds
        self._said = 0.0
        self._live = Live(console=self._console, refresh_per_second=2) if self._console.is_terminal else None

    def __enter__(self) -> TerminalView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, iteration: int, scalars: dict[str, float]) -> None:
        """Show iteration `iteration` with its metrics by tag."""
        self._recent.append(scalars[ITERATION_TIME])
        while len(self._recent) > 1 and sum(self._recent) - self._recent[0] >= AVERAGE_SECONDS:
            self._recent.popleft()
        now = time.monotonic()
        if self._live is not None:
            self._live.update(self._table(iteration, scalars))
        elif now - self._said >= LINE_SECONDS or iteration == self._scale.iterations:
            self._said = now
            self._console.print(self._line(iteration, scalars), soft_wrap=True)

    def _rate(self) -> float:
        """Iterations per second, by the time of the ticks: the last one is shown right after the one before it."""
        return len(self._recent) / sum(self._recent)

    def _summary(self, iteration: int, scalars: dict[str, float]) -> dict[str, str]:
        rate = self._rate()
        return {
            "Steps/s": f"{rate * self._scale.env_steps:,.0f}",
            "Rows/s": f"{rate * self._scale.rows:,.0f}",
            "reward": f"{scalars[MEAN_REWARD]:.2f}",
            "episode length": f"{scalars[MEAN_EPISODE_LENGTH]:.0f}",
            "ETA": _duration((self._scale.iterations - iteration) / rate),
        }

    def _line(self, iteration: int, scalars: dict[str, float]) -> str:
        summary = " · ".join(f"{name} {value}" for name, value in self._summary(iteration, scalars).items())
        return f"iteration {iteration}/{self._scale.iterations} · {summary}"

    def _table(self, iteration: int, scalars: dict[str, float]) -> Table:
        table = Table(title=f"{self._scale.title} · iteration {iteration}/{self._scale.iterations}", min_width=60)
        table.add_column("what")
        table.add_column("value", justify="right")
        for name, value in self._summary(iteration, scalars).items():
            table.add_row(name, value)
        table.add_row("tick", f"{1000 * scalars[ITERATION_TIME]:.1f} ms")
        table.add_row("physics share", f"{scalars[PHYSICS_FRACTION]:.1%}")
        table.add_row("exposed", f"{scalars[EXPOSED_MS]:.2f} ms")
        table.add_row("update", f"{1000 * scalars[LEARNING_TIME]:.2f} ms")
        for name in _LOSSES:
            table.add_row(name, f"{scalars[name]:.4g}")
        return table


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
