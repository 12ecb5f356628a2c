"""The gate: whether a report is slower than a baseline by more than a limit, and whether its probes passed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean
from typing import Literal

from repro import stats, text
from repro.comparable import Side, rates_obstacle, refuse_incomparable, remarks
from repro.errors import UsageError
from repro.matrix import Comparison, Matrix
from repro.result import WORST_FIRST, CellResult, ProbeResult
from unilab.names import EXIT_FAILED, EXIT_INCOMPLETE, EXIT_OK

RowVerdict = Literal[
    "vanished", "regression", "suspicious", "insufficient_data", "no_regression", "improved", "not_judged"
]
State = Literal["passed", "failed", "undecided", "not_judged"]
STATES: dict[RowVerdict, State] = {
    "vanished": "failed",
    "regression": "failed",
    "suspicious": "undecided",
    "insufficient_data": "undecided",
    "no_regression": "passed",
    "improved": "passed",
    "not_judged": "not_judged",
}
SENTENCES: dict[RowVerdict, str] = {
    "regression": "lower by more than {limit}: {change}",
    "suspicious": "looks lower, undecided: {change}; more runs may tell",
    "insufficient_data": "undecided: {change}; more runs may tell",
    "no_regression": "not lower by more than {limit}: {change}",
    "improved": "higher, beyond the noise: {change}",
}
# Every number of a run: one that a baseline has and a report lacks has vanished.
METRICS = tuple(name for name, field in CellResult.model_fields.items() if field.annotation == float | None)
# What a run's own noise decides whether there is: without enough effective points a run has no trend.
OF_THE_NOISE = ("trend", "trend_ci_low", "trend_ci_high", "autocorrelation", "effective_points")
FORMS: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "ceiling_share": ("share of the physics ceiling", text.percent),
    "steps_per_second": ("env steps/s", text.rate),
    "ceiling": ("physics ceiling, env steps/s", text.rate),
}
# A number of one report: its runs, or denominator and numerator of a ratio; empty where it has none.
Groups = tuple[Sequence[float], ...]
OF_THE_HOST = ("ceiling",)  # metrics that say how fast the host was and nothing about the trainer


@dataclass(frozen=True)
class Row:
    """One number of both reports.

    Attributes:
        name: What it is.
        base: The baseline's geometric mean as text.
        current: The report's.
        n: Runs, or pairs, of both.
        ratio: Current over base, or None where they are not compared.
        interval: Its 95 % interval, or None without one.
        verdict: What it says.
        reason: Why it is not judged, or has vanished; empty otherwise.
    """

    name: str
    base: str
    current: str
    n: tuple[int, int]
    ratio: float | None
    interval: tuple[float, float] | None
    verdict: RowVerdict
    reason: str = ""

    @property
    def change(self) -> str:
        """The change with its interval, as in ``-9.6 % [-10.4, -8.7]``."""
        if self.ratio is None:
            return text.NOTHING
        inside = "no interval" if self.interval is None else ", ".join(f"{_percent(end):+.1f}" for end in self.interval)
        return f"{_percent(self.ratio):+.1f} % [{inside}]"

    def sentence(self, max_drop: float) -> str:
        """What the number says, with the change and n."""
        if self.verdict not in SENTENCES:
            return self.reason
        change = f"{self.change}, n = {self.n[0]} and {self.n[1]}"
        return SENTENCES[self.verdict].format(limit=text.percent(max_drop), change=change)


@dataclass(frozen=True)
class Finding:
    """What a machine is told about one check: its name, how it ended, and why."""

    name: str
    state: State
    message: str


@dataclass(frozen=True, eq=False)
class Gate:
    """Both verdicts and what they rest on.

    Attributes:
        base: The baseline.
        current: The report.
        max_drop: Relative loss that is tolerated.
        probes: Every probe that was asked for.
        rows: Numbers, judged or not; empty where a probe failed, since a wrong program has no speed.
        missing: Cells of the report that gave no number, each with its status.
        remarks: What else a reader must know.
    """

    base: Side
    current: Side
    max_drop: float
    probes: tuple[ProbeResult, ...]
    rows: tuple[Row, ...]
    missing: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def probes_passed(self) -> bool:
        """Whether no probe failed or is missing."""
        return all(probe.passed for probe in self.probes)

    @property
    def speed(self) -> RowVerdict:
        """The worst verdict of all judged numbers."""
        found = {row.verdict for row in self.rows}
        order: tuple[RowVerdict, ...] = ("vanished", *WORST_FIRST)
        return next((verdict for verdict in order if verdict in found), "not_judged")

    @property
    def exit_code(self) -> int:
        """In this order: a failed probe, an incomplete report, a regression or a vanished number, success."""
        if not self.probes_passed:
            return EXIT_FAILED
        if self.missing:
            return EXIT_INCOMPLETE
        return EXIT_FAILED if STATES[self.speed] == "failed" else EXIT_OK

    def findings(self) -> dict[str, list[Finding]]:
        """Every check by suite."""
        probes = [Finding(p.name, "passed" if p.passed else "failed", p.detail) for p in self.probes]
        speed = [Finding(row.name, STATES[row.verdict], row.sentence(self.max_drop)) for row in self.rows]
        if self.missing:
            speed.append(Finding("cells", "failed", f"without a number: {', '.join(self.missing)}"))
        return {
            "probes": probes or [Finding("probes", "not_judged", "the matrix names no probe")],
            "speed": speed or [Finding("speed", "not_judged", "no verdict: a probe failed")],
        }


def judge(base: Side, current: Side, max_drop: float) -> Gate:
    """Compare a report with its baseline.

    Args:
        base: The baseline.
        current: The report.
        max_drop: Relative loss that is tolerated, in (0, 1).

    Raises:
        UsageError: If they are not comparable, or have no number that can be judged.
    """
    refuse_incomparable(base, current)
    probes = judge_probes(current.matrix, base.result.probes, current.result.probes)
    failed = not all(probe.passed for probe in probes)
    rows = () if failed else tuple(_rows(base, current, max_drop))
    missing = _missing(current)
    if not failed and not missing and all(row.verdict == "not_judged" for row in rows):
        reasons = "; ".join(f"{row.name}: {row.reason}" for row in rows)
        raise UsageError(f"no number of {current.name} can be judged: {reasons}")
    incomplete = [f"the baseline is incomplete: {', '.join(gone)}"] if (gone := _missing(base)) else []
    return Gate(base, current, max_drop, probes, rows, missing, (*incomplete, *remarks(base, current)))


def judge_probes(
    matrix: Matrix, base: Iterable[ProbeResult], current: Sequence[ProbeResult]
) -> tuple[ProbeResult, ...]:
    """Every probe that the report has, that its matrix names or that the baseline had; a missing one has not passed."""
    found = {probe.name: probe for probe in current}
    missing = "asked for by the matrix or in the baseline, but the report has none"
    names = dict.fromkeys((*matrix.probes, *(probe.name for probe in base), *found))
    return tuple(found.get(name) or ProbeResult(name=name, passed=False, detail=missing) for name in names)


def _rows(base: Side, current: Side, max_drop: float) -> Iterator[Row]:
    rates = rates_obstacle(base, current)
    for case in dict.fromkeys(case.name for side in (base, current) for case in side.matrix.cases):
        for metric, (what, form) in FORMS.items():
            sides = [_group(side, case, metric) for side in (base, current)]
            if metric in OF_THE_HOST and not all(sides):
                continue  # the share is missing with it
            obstacle = rates if metric == "steps_per_second" else None
            yield from compare_number(
                f"{case}: {what}", form, sides[0], sides[1], _obstacle(metric) or obstacle, max_drop
            )
        yield from _vanished(base, current, case)
    for item in {item.name: item for side in (current, base) for item in side.matrix.comparisons}.values():
        sides = [_groups(side, item) for side in (base, current)]
        metric = next(m for side in (base, current) if (m := _metric(side, item)) is not None)
        what = "" if metric == "steps_per_second" else f", {FORMS[metric][0] if metric in FORMS else metric}"
        name = f"{item.name}: {item.numerator} / {item.denominator}{what}"
        yield from compare_number(name, text.ratio, sides[0], sides[1], _obstacle(metric), max_drop)


def compare_number(
    name: str,
    form: Callable[[float | None], str],
    base: Groups,
    current: Groups,
    obstacle: str | None,
    max_drop: float,
) -> Iterator[Row]:
    """The row of one number; none where neither side has it.

    Args:
        name: What it is.
        form: How it is written.
        base: The baseline's runs.
        current: The report's.
        obstacle: Why it is not judged, or None.
        max_drop: Relative loss that is tolerated, in (0, 1).
    """
    if not base and not current:
        return
    n = (min(map(len, base), default=0), min(map(len, current), default=0))
    means = [_mean(side) if side else None for side in (base, current)]
    shown = (name, form(means[0]), form(means[1]), n)
    if not current:
        yield Row(*shown, None, None, "vanished", f"the baseline has it, n = {n[0]}; this report does not")
    elif not base:
        yield Row(*shown, None, None, "not_judged", "the baseline has none")
    elif obstacle is not None:
        yield Row(*shown, None, None, "not_judged", obstacle)
    else:
        ratio, interval = _change(base, current)
        low, high = interval or (None, None)
        yield Row(*shown, ratio, interval, stats.verdict(ratio, low, high, max_drop))


def _change(base: Groups, current: Groups) -> tuple[float, tuple[float, float] | None]:
    """Current over base with its interval; none where a group has a single run."""
    if min(map(len, (*base, *current))) < 2:
        return _mean(current) / _mean(base), None
    if len(base) == 1:
        found = stats.welch_ratio(base[0], current[0])
    else:
        found = stats.ratio_change((base[0], base[1]), (current[0], current[1]))
    return found.ratio, (found.ci_low, found.ci_high)


def _group(side: Side, case: str, metric: str) -> Groups:
    values = side.values(case, metric)
    return (list(values.values()),) if values else ()


def _groups(side: Side, item: Comparison) -> Groups:
    """Denominator and numerator of a comparison, or the ratios of its pairs; nothing where the report has no ratio."""
    metric = _metric(side, item)
    if metric is None or all(one.ratio is None for one in side.result.comparisons if one.name == item.name):
        return ()
    below, above = (side.values(case, metric) for case in (item.denominator, item.numerator))
    if side.matrix.interval == "paired":
        return ([above[repeat] / below[repeat] for repeat in sorted(below.keys() & above.keys())],)
    return list(below.values()), list(above.values())


def _metric(side: Side, item: Comparison) -> str | None:
    return next((found.metric for found in side.result.comparisons if found.name == item.name), None)


def _mean(side: Groups) -> float:
    """Geometric mean of one group, or the ratio of two; the arithmetic mean of one that is not all above zero."""
    if len(side) == 1 and min(side[0]) <= 0.0:  # as a return; such a number is shown and never judged
        return fmean(side[0])
    return geometric_mean(side[-1]) / (geometric_mean(side[0]) if len(side) == 2 else 1.0)


def _obstacle(metric: str) -> str | None:
    return "it is the host's, not the trainer's" if metric in OF_THE_HOST else None


def _vanished(base: Side, current: Side, case: str) -> Iterator[Row]:
    """Numbers that nobody judges, and that the runs of the baseline have and those of the report lack."""
    if not current.values(case, "steps_per_second"):
        return  # the whole case is missing, which is said once
    for metric in (name for name in METRICS if name not in (*FORMS, *OF_THE_NOISE)):
        if not current.values(case, metric):
            yield from compare_number(f"{case}: {metric}", text.significant, _group(base, case, metric), (), None, 0.0)


def _missing(side: Side) -> tuple[str, ...]:
    """Cells without a number, each with its status."""
    cells = [cell for cell in side.result.cells if cell.status not in ("measured", "discarded")]
    return tuple(f"{cell.id} {cell.status.replace('_', ' ')}" for cell in cells)


def _percent(ratio: float) -> float:
    """Relative change in percent with one digit; adding zero turns -0.0 into 0.0."""
    return round(100.0 * (ratio - 1.0), 1) + 0.0
