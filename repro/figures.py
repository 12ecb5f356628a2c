"""Figures of a report as SVG whose bytes depend on the numbers and on matplotlib's version alone."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from repro.evidence import CellEvidence, Evidence
from repro.layout import FIGURES_DIR
from repro.learning import WALKING_LENGTH, Learning
from repro.result import Result
from unilab.names import MEAN_EPISODE_LENGTH, MEAN_REWARD, TRACKING_ERROR_ANG, TRACKING_ERROR_LIN

RATES_FIGURE = f"{FIGURES_DIR}/rates.svg"
STEPS_FIGURE = f"{FIGURES_DIR}/steps.svg"
# Learning curves: the tags of each figure's rows and their labels.
LEARNING_FIGURES = {
    f"{FIGURES_DIR}/return.svg": {MEAN_REWARD: "mean return"},
    f"{FIGURES_DIR}/episode_length.svg": {MEAN_EPISODE_LENGTH: "mean episode length, control steps"},
    f"{FIGURES_DIR}/tracking_error.svg": {
        TRACKING_ERROR_LIN: "planar velocity error, m/s",
        TRACKING_ERROR_ANG: "yaw rate error, rad/s",
    },
}
COLOURS = ("#1f6fb4", "#d1662a", "#2f8f4e", "#8a4fa8", "#a8871c", "#b03a5b")
STYLE: Any = {
    "svg.hashsalt": "unilab-repro",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.solid_capstyle": "round",
    "path.simplify": False,
}
MAX_POINTS = 400  # of one line; longer runs are thinned evenly


def matplotlib_version(svg: bytes) -> str | None:
    """Version of matplotlib that a figure says it was drawn with."""
    _, mark, rest = svg.partition(b"<dc:title>Matplotlib v")
    end = rest.find(b",")
    return rest[:end].decode(errors="replace") if mark and end > 0 else None


def installed_version() -> str:
    """Version of the installed matplotlib."""
    return version("matplotlib")


def draw_figures(evidence: Evidence, result: Result) -> dict[str, bytes]:
    """Draw all figures of a report; none where nothing was measured.

    Returns:
        SVG bytes by path relative to the report's folder.
    """
    measured = [item for item in evidence.cells if item.status == "measured"]
    if not measured:
        return {}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's own settings must not change the bytes
        matplotlib.rcParams.update(STYLE)
        title = _title(result)
        if evidence.plan.matrix.learning:  # one run of a case is no rate to compare
            return {**dict(_learning_figures(measured, title)), STEPS_FIGURE: _steps(measured, title)}
        return {RATES_FIGURE: _rates(result), STEPS_FIGURE: _steps(measured, title)}


def learning_figures(evidence: Evidence) -> list[str]:
    """Names of the figures of learning curves that a report has: of those tags that a measured run logged."""
    runs = [item.learning for item in evidence.cells if item.status == "measured" and item.learning]
    return [name for name, rows in LEARNING_FIGURES.items() if _drawn(rows, runs)]


def _title(result: Result) -> str:
    return f"{result.matrix}{' (SMOKE, not a benchmark)' if result.smoke else ''}"


def _rates(result: Result) -> bytes:
    """One point for each measured run, beside each group's geometric mean and 95 % interval."""
    groups = [group for group in result.groups if group.n]
    figure = Figure(figsize=(6.4, 0.9 + 0.62 * len(groups)), layout="constrained")
    axes = figure.add_subplot()
    for row, group in enumerate(groups):
        colour = _colour(result, group.case)
        values = _values(result, group.case)
        axes.plot(values, [row] * len(values), "o", color=colour, markersize=5, alpha=0.8, markeredgewidth=0)
        if group.mean is not None and group.ci_low is not None and group.ci_high is not None:
            axes.plot([group.ci_low, group.ci_high], [row + 0.22] * 2, color=colour, linewidth=1.6)
            axes.plot([group.mean], [row + 0.22], "|", color=colour, markersize=9, markeredgewidth=1.6)
    axes.set_yticks(range(len(groups)), [f"{group.case} (n = {group.n})" for group in groups])
    axes.set_ylim(len(groups) - 0.4, -0.5)
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("env steps/s of each run (points); geometric mean and 95 % interval (bar)")
    _thousands(axes, "x")
    axes.set_title(_title(result), loc="left", fontsize=9)
    return _svg(figure)


def _steps(measured: Sequence[CellEvidence], title: str) -> bytes:
    """Cumulative env steps over time; the measured window is drawn thick."""
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.add_subplot()
    cases = list(dict.fromkeys(item.cell.case for item in sorted(measured, key=lambda item: item.cell.case)))
    for item in measured:
        assert item.throughput is not None
        found = item.throughput
        colour = COLOURS[cases.index(item.cell.case) % len(COLOURS)]
        first = found.window.first_index
        for indices, width in ((_thin(0, first + 1), 0.9), (_thin(first, len(found.steps)), 2.0)):
            axes.plot(found.seconds[indices], found.steps[indices], color=colour, linewidth=width)
    for number, case in enumerate(cases):
        axes.plot([], [], color=COLOURS[number % len(COLOURS)], linewidth=2.0, label=case)
    axes.set_xlabel("seconds since the first training iteration (thick: the measured window)")
    axes.set_ylabel("global env steps")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    _thousands(axes, "y")
    axes.legend(frameon=False, loc="upper left")
    axes.set_title(title, loc="left", fontsize=9)
    return _svg(figure)


def _learning_figures(measured: Sequence[CellEvidence], title: str) -> Iterator[tuple[str, bytes]]:
    """Every figure of learning curves: a row for each tag, over env steps on the left and seconds on the right."""
    runs = [(item.cell.case, item.learning) for item in measured if item.learning is not None]
    for name, rows in LEARNING_FIGURES.items():
        drawn = _drawn(rows, [run for _, run in runs])
        if drawn:
            yield name, _curves(runs, drawn, title)


def _drawn(rows: dict[str, str], runs: Sequence[Learning]) -> dict[str, str]:
    """Those rows of a figure that have a point in some run."""
    return {
        tag: label
        for tag, label in rows.items()
        if any(tag in run.curves and not np.isnan(run.curves[tag]).all() for run in runs)
    }


def _curves(runs: Sequence[tuple[str, Learning]], rows: dict[str, str], title: str) -> bytes:
    figure = Figure(figsize=(7.2, 0.5 + 2.5 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 2, sharey="row", squeeze=False)
    cases = sorted({case for case, _ in runs})
    for (tag, label), (over_steps, over_seconds) in zip(rows.items(), panels, strict=True):
        for case, run in runs:
            if tag in run.curves:
                kept = _thin(0, len(run.steps))
                style: Any = {"color": COLOURS[cases.index(case) % len(COLOURS)], "linewidth": 1.3}
                over_steps.plot(run.steps[kept] / 1e6, run.curves[tag][kept], **style)
                over_seconds.plot(run.seconds[kept], run.curves[tag][kept], **style)
        over_steps.set_ylabel(label)
        if tag != MEAN_REWARD:
            over_steps.set_ylim(bottom=0)
        for axes in (over_steps, over_seconds):
            axes.set_xlim(left=0)
            if tag == MEAN_EPISODE_LENGTH:
                axes.axhline(WALKING_LENGTH, color="#777777", linewidth=0.8, linestyle=(0, (4, 3)))
    panels[-1][0].set_xlabel("million env steps")
    panels[-1][1].set_xlabel("seconds since the first record")
    _legend(panels[0][1], cases)
    panels[0][0].set_title(title, loc="left", fontsize=9)
    return _svg(figure)


def _legend(axes: Axes, cases: Sequence[str]) -> None:
    for number, case in enumerate(cases):
        axes.plot([], [], color=COLOURS[number % len(COLOURS)], linewidth=2.0, label=case)
    axes.legend(frameon=False, loc="best")


def _colour(result: Result, case: str) -> str:
    cases = sorted(group.case for group in result.groups if group.n)
    return COLOURS[cases.index(case) % len(COLOURS)]


def _values(result: Result, case: str) -> list[float]:
    return [
        cell.steps_per_second
        for cell in result.cells
        if cell.case == case and cell.status == "measured" and cell.steps_per_second is not None
    ]


def _thin(first: int, end: int) -> list[int]:
    """Indices from `first` to `end` - 1, both kept, at most `MAX_POINTS` of them."""
    count = min(MAX_POINTS, end - first)
    return sorted({int(index) for index in np.linspace(first, end - 1, count)}) if count > 0 else []


def _thousands(axes: Axes, which: str) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(nbins=6))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _svg(figure: Figure) -> bytes:
    stream = io.BytesIO()
    FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None})  # type: ignore[no-untyped-call]
    return stream.getvalue()
