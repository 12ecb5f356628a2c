"""The part of a report that says how much host and runs varied, as finished text."""

from __future__ import annotations

from repro import text
from repro.noise import NoiseResult
from repro.result import CellResult, Result

SOURCES = {
    "ceilings": "the physics ceilings measured beside the runs of a case",
    "runs": "the env steps/s of the runs of a case",
}


def noise_sentence(found: NoiseResult | None) -> str:
    """The session's host-noise score, its limit and what it means."""
    if found is None:
        return "Host noise: not known, no case was measured twice."
    meaning = (
        "within it, so this session's absolute rates may be compared with those of an equal host that is as steady"
        if found.quiet
        else "above it, so absolute rates must not be compared with those of another session; ratios inside this may"
    )
    return (
        f"Host noise: {text.percent(found.score)}, limit {text.percent(found.limit)} ({meaning}). It is the standard "
        f"deviation of the logarithms of {SOURCES[found.source]}, pooled over the cases ({found.n} values)."
    )


def steadiness_table(result: Result) -> str:
    """Trend and autocorrelation inside the window of every measured run; empty where none was measured."""
    rows = [
        [
            cell.id,
            *_trend(cell),
            text.number(cell.autocorrelation),
            text.number(cell.effective_points, 0),
        ]
        for cell in result.cells
        if cell.status == "measured"
    ]
    headers = ("run", "trend over the window", "95 % interval", "autocorrelation", "effective points")
    return text.markdown_table(headers, rows, "lrrrr") if rows else ""


def _trend(cell: CellResult) -> list[str]:
    if cell.trend is None or cell.trend_ci_low is None or cell.trend_ci_high is None:
        return ["too few effective points", text.NOTHING]
    interval = f"[{text.change(cell.trend_ci_low)}, {text.change(cell.trend_ci_high)}]"
    return [text.change(cell.trend), interval]
