"""The metric of one run, as lines and as JSON."""

from __future__ import annotations

from typing import Any

from repro import text
from repro.schema import canonical_json
from repro.steadiness import Steadiness
from repro.throughput import Throughput
from unilab.names import TOTAL_FPS


def analysis(found: Throughput) -> dict[str, Any]:
    """Every number of a measurement by name; series are left out."""
    window = found.window
    return {
        "schema_version": 1,
        "tag": found.tag,
        "tail": found.tail,
        "steps_per_second": found.steps_per_second,
        "tail_mean": found.tail_mean,
        "tail_median": found.tail_median,
        "tail_p90": found.tail_p90,
        "points": found.points,
        "window": {
            "points": window.points,
            "first_step": window.first_step,
            "last_step": window.last_step,
            "seconds": window.seconds,
        },
        "window_sensitivity": {f"{tail:g}": value for tail, value in found.window_sensitivity.items()},
        "trend": found.steadiness.trend,
        "trend_ci_low": found.steadiness.trend_low,
        "trend_ci_high": found.steadiness.trend_high,
        "autocorrelation": found.steadiness.autocorrelation,
        "effective_points": found.steadiness.effective_points,
        "learner_rows_per_second": found.learner_rows_per_second,
        "physics_fraction": found.physics_fraction,
        "exposed_ms": found.exposed_ms,
        "learner_cycle_ms": found.learner_cycle_ms,
        "mean_reward": found.mean_reward,
        "mean_episode_length": found.mean_episode_length,
        "startup_seconds": found.startup_seconds,
        "notes": found.notes,
    }


def analysis_json(found: Throughput) -> str:
    """The measurement as JSON text."""
    return canonical_json(analysis(found))


def analysis_lines(found: Throughput) -> list[str]:
    """The measurement as aligned lines; what was not recorded is left out."""
    window = found.window
    steps = window.last_step - window.first_step
    sensitivity = ", ".join(
        f"{_rate(value)} (last {tail:.0%})" for tail, value in sorted(found.window_sensitivity.items())
    )
    unit = "env steps/s" if found.tag == TOTAL_FPS else "steps/s"  # of whatever another program counts
    pairs: list[tuple[str, str | None]] = [
        (unit, f"{_rate(found.steps_per_second)}  ({steps:,} steps in {text.number(window.seconds)} s)"),
        ("window", f"{text.count_of(window.points, 'event')} of {found.points:,} (last {found.tail:.0%})"),
        ("other windows", sensitivity),
        ("trend", _trend(found.steadiness)),
        ("worth", _worth(found.steadiness)),
        (f"mean of {found.tag}", f"{text.significant(found.tail_mean, 5)}  (a mean of logged values, not the metric)"),
        ("learner rows/s", _if(found.learner_rows_per_second, text.rate(found.learner_rows_per_second))),
        ("physics share", _if(found.physics_fraction, text.percent(found.physics_fraction))),
        ("exposed", _if(found.exposed_ms, f"{text.number(found.exposed_ms)} ms")),
        ("learner", _if(found.learner_cycle_ms, f"{text.number(found.learner_cycle_ms)} ms")),
        ("start-up", _if(found.startup_seconds, f"{text.number(found.startup_seconds, 1)} s")),
        ("last reward", _if(found.mean_reward, text.number(found.mean_reward))),
        ("last episode", _if(found.mean_episode_length, f"{text.number(found.mean_episode_length, 1)} control steps")),
        *(("note", note) for note in found.notes),
    ]
    width = max(len(name) for name, _ in pairs)
    return [f"{name:<{width}}  {value}" for name, value in pairs if value is not None]


def _rate(value: float | None) -> str:
    """A rate; another program's may be a few steps a minute."""
    return text.rate(value) if value is None or value >= 100 else text.significant(value, 4)


def _trend(found: Steadiness) -> str | None:
    if found.trend is None:
        return None
    interval = f"95 % interval {text.change(found.trend_low)} to {text.change(found.trend_high)}"
    return f"{text.change(found.trend)} over the window  ({interval})"


def _worth(found: Steadiness) -> str | None:
    """What the points of one run are worth, and that they are not n."""
    if found.autocorrelation is None or found.effective_points is None:
        return None
    points = f"{text.count_of(found.intervals, 'interval')} worth {text.number(found.effective_points, 0)}"
    return f"{points}  (autocorrelation {text.number(found.autocorrelation)}; all of them are one run)"


def _if(value: float | None, shown: str) -> str | None:
    return None if value is None else shown
