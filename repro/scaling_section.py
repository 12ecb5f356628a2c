"""The part of a report that is about more ranks against fewer, as finished text."""

from __future__ import annotations

from repro import text
from repro.headline import expected_share
from repro.matrix import Case, Comparison, Matrix, Metric
from repro.result import ComparisonResult, Result

LINES: dict[Metric, str] = {
    "steps_per_second": "Env steps/s",
    "learner_rows_per_second": "Learner rows/s",
    "ceiling": "Physics alone, the ratio of the runs' physics ceilings",
    "ceiling_share": "Env steps/s over physics alone, the ratio of the ceiling shares",
}
WEAK = (
    "This is end-to-end *weak scaling*: environments, batch, collectors, CPU pools and GPUs grow together. It is not a "
    "patch's own gain nor pure GPU scaling; long-run convergence is not shown here. Physics alone is a fact about "
    "the host: it says what that many pools could give, and is no part of the verdict."
)

STRONG = (
    "This is end-to-end *strong scaling*: environments and batch are the same in all and are shared out, while "
    "collectors, CPU pools and GPUs grow. It is not a patch's own gain nor pure GPU scaling; long-run convergence is "
    "not shown here. Physics alone is a fact about the host: it says what that many pools could give for the same "
    "environments, and is no part of the verdict."
)
SAME_CPUS = "Where both cases have the same CPUs, the pools do not grow: what else grows shares them."


def scaling_section(matrix: Matrix, result: Result) -> str:
    """What more ranks give, one list for each pair of cases that differ in them; empty without such a comparison."""
    cases = {case.name: case for case in matrix.cases}
    ranks = {case.name: max(1, len(case.gpus)) for case in matrix.cases}
    pairs: dict[tuple[str, str], list[str]] = {}
    for found, item in zip(result.comparisons, matrix.comparisons, strict=True):
        if ranks[item.numerator] > ranks[item.denominator] and found.ratio is not None:
            own = pairs.setdefault((item.numerator, item.denominator), [])
            own.append(_line(found, item, ranks[item.numerator] / ranks[item.denominator]))
    same = {pair: _same_cpus(*(cases[name] for name in pair)) for pair in pairs}
    parts = [
        f"Scaling, `{more}` ({_count(ranks[more])}) over `{less}` ({_count(ranks[less])})"
        + f"{', both on the same CPUs' if same[more, less] else ''}:\n\n"
        + "\n".join(lines)
        for (more, less), lines in pairs.items()
    ]
    notes = [STRONG if matrix.strong else WEAK, *([SAME_CPUS] if any(same.values()) else [])]
    return "\n\n".join([*parts, *notes]) if parts else ""


def _same_cpus(one: Case, other: Case) -> bool:
    """Whether a case of fewer ranks has all pools of the other, by what the matrix asks for."""
    return one.width == other.width and one.workers == other.workers != "auto"


def _line(found: ComparisonResult, item: Comparison, ranks: float) -> str:
    """One ratio with its interval; for rates of all ranks also what it is of the ratio of ranks."""
    assert found.ratio is not None
    spread = f"{text.interval(found.ci_low, found.ci_high, '.3f')}, n = {found.n}" if found.ci_low else "one run"
    extra = ""
    if item.metric != "ceiling_share":
        extra = f"; efficiency {text.percent(found.ratio / ranks)} (ratio / {ranks:g})"
        if item.expected not in (1.0, ranks):
            extra += f", {expected_share(found.ratio, item.expected)}"
    return f"- {LINES[item.metric]}: {text.ratio(found.ratio)} ({spread}){extra}."


def _count(ranks: int) -> str:
    return text.count_of(ranks, "rank")
