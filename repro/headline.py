"""What a result says in one sentence each: used by the report and by the last lines of ``repro run``."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from types import MappingProxyType

from repro import text
from repro.learning import WALKING_LENGTH
from repro.matrix import Comparison, Matrix, Metric
from repro.result import CellResult, ComparisonResult, EvaluationResult, GroupResult, LearningResult, Result

VERDICT_WORDS = {
    "improved": "faster, beyond the noise",
    "no_regression": "not slower by more than {margin}",
    "regression": "slower by more than {margin}",
}
# Against an expected ratio other than one, and for metrics that are no rate.
NEUTRAL_WORDS = {
    "improved": "higher, beyond the noise",
    "no_regression": "not lower by more than {margin}",
    "regression": "lower by more than {margin}",
}
UNDECIDED_WORDS = {"suspicious": "Looks {lower}, undecided", "insufficient_data": "Undecided"}
METRIC_WORDS: dict[Metric, str] = {
    "steps_per_second": "runs at {ratio} the rate of",
    "learner_rows_per_second": "learns from {ratio} the rows/s of",
    "ceiling": "has {ratio} the physics ceiling of",
    "ceiling_share": "reaches {ratio} the ceiling share of",
}
METRIC_NAMES: dict[Metric, str] = {
    "steps_per_second": "env steps/s",
    "learner_rows_per_second": "rows/s",
    "ceiling": "physics ceiling",
    "ceiling_share": "ceiling share",
}
ONE_RUN = "one run, no interval"
NO_LABELS: Mapping[str, str] = MappingProxyType({})


def headline(result: Result, matrix: Matrix, labels: Mapping[str, str] = NO_LABELS) -> str:
    """The answer of the matrix in one line; `labels` are names of cases that are commits."""
    said = _answer(result, matrix)
    for case, label in labels.items():
        said = said.replace(f"`{case}`", label)
    return said


def _answer(result: Result, matrix: Matrix) -> str:
    if result.verdict == "probe_failed":
        return _failed_probe(result)
    parts = [_incomplete(result)] if result.verdict == "incomplete" else []
    if matrix.learning:
        parts += [learning_sentence(found, case_of(result, found)) for found in result.learning]
        return " ".join(parts) or "Nothing was measured."
    parts += [
        comparison_sentence(found, item, matrix.margin)
        for found, item in zip(result.comparisons, matrix.comparisons, strict=True)
        if found.ratio is not None and _leads(found)
    ]
    if not any(found.ratio is not None and _leads(found) for found in result.comparisons):
        parts += [group_sentence(group) for group in result.groups if group.n]
    return " ".join(parts) or "Nothing was measured."


def comparison_sentence(found: ComparisonResult, item: Comparison, margin: float) -> str:
    """One comparison, with its interval, n and verdict; one that is not decided does not begin with its ratio."""
    spread = (
        ONE_RUN
        if found.ci_low is None
        else f"95 % interval {text.interval(found.ci_low, found.ci_high, '.3f')}, n = {found.n}"
    )
    plain = item.expected == 1.0 and item.metric == "steps_per_second"
    of_expected = "" if item.expected == 1.0 or found.ratio is None else expected_share(found.ratio, item.expected)
    if found.verdict in UNDECIDED_WORDS:
        words = UNDECIDED_WORDS[found.verdict].format(lower="slower" if plain else "lower")
        what = f"ratio {text.ratio(found.ratio)}{' of ' + METRIC_NAMES[item.metric] if not plain else ''}"
        parts = ", ".join(filter(None, (what, of_expected, spread)))
        return f"{words}: `{item.numerator}` against `{item.denominator}` ({parts})."
    words = (VERDICT_WORDS if plain else NEUTRAL_WORDS)[found.verdict].format(margin=text.percent(margin))
    what = METRIC_WORDS[item.metric].format(ratio=text.ratio(found.ratio))
    outcome = ", ".join(filter(None, (of_expected, words)))
    return f"`{item.numerator}` {what} `{item.denominator}` ({spread}): {outcome}."


def expected_share(ratio: float, expected: float) -> str:
    """A ratio as a share of the one that was expected."""
    return f"{text.percent(ratio / expected)} of the {expected:g} expected"


def _leads(found: ComparisonResult) -> bool:
    """Whether a comparison stands in the headline: rates of env steps, and any other bad news of the verdict."""
    good = found.verdict in ("improved", "no_regression")
    return found.metric == "steps_per_second" or (found.metric != "ceiling" and not good)


def learning_sentence(found: LearningResult, case: str) -> str:
    """Whether a policy walks, and the numbers that say so; one that does not begins with that."""
    if found.evaluation is not None:
        return _evaluated_sentence(found, found.evaluation, case)
    if found.episode_length is None:
        return f"`{case}` does not walk: no episode ended (seed {found.seed})."
    length = f"mean episode length {text.number(found.episode_length, 1)} control steps"
    outcome = f"return {text.number(found.episode_return, 1)} after {text.rate(found.env_steps)} env steps"
    trained = f"{outcome}, {text.duration(found.wall_seconds)}, seed {found.seed}"
    if not found.walks:
        return f"`{case}` does not walk: {length}, {WALKING_LENGTH:g} are needed ({trained})."
    return f"`{case}` walks: {length} ({trained})."


def _evaluated_sentence(found: LearningResult, asked: EvaluationResult, case: str) -> str:
    """The same of a policy that was evaluated without exploration."""
    error, falls = asked.tracking_error_lin, text.count_of(asked.falls.count, "fall")
    length = f"{asked.episodes} episodes last {text.number(asked.episode_length.mean, 1)} control steps, {falls}"
    still = f"{text.number(error.standing_still, 2)} standing still"
    wrong = f"planar velocity error {text.number(error.mean, 2)} m/s, {still}"
    trained = f"{text.rate(found.env_steps)} env steps in {text.duration(found.wall_seconds)}, seed {found.seed}"
    if found.walks:
        return f"`{case}` walks: {length}; {wrong} ({trained})."
    if not asked.stays_up:
        return f"`{case}` does not walk: {length}, {WALKING_LENGTH:g} steps are needed; {wrong} ({trained})."
    return f"`{case}` does not follow its command: {wrong}, surely under half of that is needed; {length} ({trained})."


def case_of(result: Result, found: LearningResult) -> str:
    """Name of the case that a learning result belongs to."""
    return next(cell.case for cell in result.cells if cell.run == found.run)


def group_sentence(group: GroupResult) -> str:
    """The rate of one case, with its interval and n; no interval for a single run."""
    if group.ci_low is None:
        return f"`{group.case}` trains at {text.rate(group.mean)} env steps/s ({ONE_RUN})."
    spread = f"geometric mean, 95 % interval {text.interval(group.ci_low, group.ci_high)}, n = {group.n}"
    return f"`{group.case}` trains at {text.rate(group.mean)} env steps/s ({spread})."


def ceiling_share(result: Result, case: str) -> float | None:
    """Mean share of the same-run physics ceiling over the runs of a case that have one."""
    return mean_of([cell for cell in result.cells if cell.case == case], "ceiling_share")


def ceiling_shares(result: Result) -> str:
    """The share of every case that has one, as in ``n1 97.1 %``; empty where none has."""
    shares = {group.case: ceiling_share(result, group.case) for group in result.groups}
    return ", ".join(f"{case} {text.percent(share)}" for case, share in shares.items() if share is not None)


def mean_of(cells: list[CellResult], field: str) -> float | None:
    """Mean of one field over the runs that have it; None when none has."""
    values = [value for cell in cells if (value := getattr(cell, field)) is not None]
    return fmean(values) if values else None


def closing_lines(
    result: Result,
    matrix: Matrix,
    stages: Mapping[str, str],
    report: str,
    next_step: str,
    labels: Mapping[str, str] = NO_LABELS,
) -> list[str]:
    """The six last lines of ``repro run``; the last one is the report's path alone. `stages` say what bounds a case."""
    cases = [*(item.numerator for item in matrix.comparisons), *(case.name for case in matrix.cases)]
    stage = next((stages[case] for case in cases if case in stages), None)
    smoke = "SMOKE, not a benchmark: " if result.smoke else ""
    probes = (
        f"{sum(probe.passed for probe in result.probes)} of {len(result.probes)} passed" if result.probes else "none"
    )
    return [
        f"{smoke}{headline(result, matrix, labels)}".replace("`", ""),
        f"share of the physics ceiling: {ceiling_shares(result) or 'not measured'}",
        f"bounding stage: {stage.replace('`', '') if stage else 'not measured'}",
        f"probes: {probes}",
        f"next: {next_step}",
        report,
    ]


def _failed_probe(result: Result) -> str:
    """The first one; a later one may have been interrupted."""
    failed = next(probe for probe in result.probes if not probe.passed)
    return f"Probe `{failed.name}` failed: {failed.detail}. No run was started, so there is no verdict on speed."


def _incomplete(result: Result) -> str:
    missing = sum(cell.status not in ("measured", "discarded") for cell in result.cells)
    return f"Incomplete: {missing} of {text.count_of(len(result.cells), 'cell')} gave no number."
