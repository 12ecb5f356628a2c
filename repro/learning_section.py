"""The part of a report that is about learning, as finished text."""

from __future__ import annotations

from typing import Any

from repro import text
from repro.evaluation import Summary
from repro.evidence import Evidence
from repro.figures import LEARNING_FIGURES, learning_figures
from repro.headline import case_of
from repro.learning import WALKING_LENGTH, tenth
from repro.matrix import Matrix
from repro.result import FOLLOWING, LearningResult, Result
from repro.text import count_of, markdown_table
from unilab.names import STILL_FILE

NO_SPREAD = "One run has no spread, so a difference between cases is no finding."


def learning_context(evidence: Evidence, result: Result) -> dict[str, Any]:
    """Everything that `templates/learning.md.j2` shows; empty where a sentence has nothing to say."""
    curves = [item.learning for item in evidence.cells if item.status == "measured" and item.learning is not None]
    records = dict.fromkeys(count_of(tenth(len(found.steps)), "record") for found in curves)
    without = [case_of(result, found) for found in result.learning if not _has_errors(found)]
    return {
        "table": _table(result),
        "records": ", ".join(records),
        "walking": f"{WALKING_LENGTH:g}",
        "spread": _spread(result),
        "figures": [(name, " and ".join(LEARNING_FIGURES[name].values())) for name in learning_figures(evidence)],
        "evaluation": _evaluation_table(result),
        "following": text.percent(FOLLOWING),
        "stills": [
            (f"{item.cell.run}/{STILL_FILE}", item.cell.case)
            for item in evidence.cells
            if f"{item.cell.run}/{STILL_FILE}" in evidence.inputs
        ],
        "without_errors": ", ".join(f"`{case}`" for case in dict.fromkeys(without)),
    }


def learning_limit(matrix: Matrix, result: Result) -> str:
    """What a report says, or does not say, about learning."""
    iterations = count_of(matrix.iterations, "iteration")
    if not matrix.learning:
        return f"Convergence was not verified: a run has {iterations}; learning is not judged."
    seeds = sorted({found.seed for found in result.learning})
    named = f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds)) or text.NOTHING}"
    return f"Learning was judged over {iterations} with {named} alone; other seeds and longer runs may differ."


def _has_errors(found: LearningResult) -> bool:
    return found.tracking_error_lin is not None and found.tracking_error_ang is not None


def _table(result: Result) -> str:
    headers = (
        *("case", "seed", "walks", "return", "length", "tracking error, m/s", "rad/s"),
        *("env steps", "seconds", "walks after, s"),
    )
    rows = [
        [
            *(case_of(result, found), str(found.seed), "yes" if found.walks else "NO"),
            *(text.number(found.episode_return, 1), text.number(found.episode_length, 1)),
            *(text.number(found.tracking_error_lin, 3), text.number(found.tracking_error_ang, 3)),
            *(f"{found.env_steps:,}", text.number(found.wall_seconds, 1), text.number(found.seconds_to_walk, 1)),
        ]
        for found in result.learning
    ]
    return markdown_table(headers, rows, "lrlrrrrrrr")


def _evaluation_table(result: Result) -> str:
    """What policies do without exploration; empty where none was evaluated."""
    headers = (
        *("case", "seed", "episodes", "return", "length", "falls", "share of falls"),
        *("velocity error, m/s", "standing still", "yaw rate error, rad/s", "standing still"),
    )
    rows = []
    for found in result.learning:
        asked = found.evaluation
        if asked is None:
            continue
        lin, ang, falls = asked.tracking_error_lin, asked.tracking_error_ang, asked.falls
        rows.append(
            [
                *(case_of(result, found), str(found.seed), str(asked.episodes)),
                *(_mean(asked.episode_return, 1), _mean(asked.episode_length, 1)),
                *(str(falls.count), f"{text.percent(falls.share)} {text.interval(falls.ci_low, falls.ci_high, '.1%')}"),
                *(_mean(lin, 3), text.number(lin.standing_still, 3)),
                *(_mean(ang, 3), text.number(ang.standing_still, 3)),
            ]
        )
    return markdown_table(headers, rows, "lr" + "r" * 9) if rows else ""


def _mean(found: Summary, digits: int) -> str:
    mean = text.number(found.mean, digits)
    if found.ci_low is None or found.ci_high is None:
        return mean
    return f"{mean} {text.interval(found.ci_low, found.ci_high, f',.{digits}f')}"


def _spread(result: Result) -> str:
    """How many runs with which seeds stand behind each case."""
    seeds: dict[str, list[str]] = {}
    for found in result.learning:
        seeds.setdefault(case_of(result, found), []).append(str(found.seed))
    counts = "; ".join(f"`{case}` n = {len(own)}, seed {', '.join(own)}" for case, own in seeds.items())
    return f"{counts}. {NO_SPREAD}" if any(len(own) == 1 for own in seeds.values()) else f"{counts}."
