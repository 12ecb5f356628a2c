"""The result file: numbers that may be published, computed from a session's folder and nothing else."""

from __future__ import annotations

import sys
from statistics import geometric_mean
from typing import Any, Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer

from repro import stats
from repro.evaluation import Evaluation, Measures, measures
from repro.evidence import CellEvidence, Evidence, mixed_cases
from repro.host import Host
from repro.learning import WALKING_LENGTH
from repro.matrix import Comparison, Matrix, Metric
from repro.noise import NoiseResult, session_noise
from repro.schema import Strict, canonical_json
from unilab.names import TOTAL_FPS

FOLLOWING = 0.5  # of the planar velocity error of a robot that stands still
DECIMALS = 6  # kept of small differences of large numbers, of which few digits are the same on all machines
DIGITS = 10  # significant digits kept, so that the last bits of another machine's libm do not change the file

CellStatus = Literal[
    "measured", "discarded", "refused", "failed", "host_unfit", "timeout", "interrupted", "not_run", "skipped"
]
ComparisonVerdict = Literal["regression", "improved", "no_regression", "suspicious", "insufficient_data"]
ResultVerdict = Literal[
    "probe_failed",
    "incomplete",
    "does_not_walk",
    "regression",
    "suspicious",
    "insufficient_data",
    "no_regression",
    "improved",
    "measured",
]
# Of several comparisons the first of these that occurs is the verdict of the whole.
WORST_FIRST: tuple[ComparisonVerdict, ...] = (
    "regression",
    "suspicious",
    "insufficient_data",
    "no_regression",
    "improved",
)


class CellResult(Strict):
    """One run. Rates are per wall second, times in ms unless named otherwise; null means there is no number.

    `trend` is the change of the rate over the window as a share of its mean, `autocorrelation` that of neighbouring
    intervals, and `effective_points` what the window's intervals are worth; see `repro/steadiness.py`.
    """

    id: str
    case: str
    repeat: int
    status: CellStatus
    reason: str | None
    world_size: int
    steps_per_second: float | None
    learner_rows_per_second: float | None
    tail_mean_total_fps: float | None
    physics_fraction: float | None
    ceiling_share: float | None
    exposed_ms: float | None
    learner_cycle_ms: float | None
    startup_seconds: float | None
    run: str | None
    trend: float | None = None
    trend_ci_low: float | None = None
    trend_ci_high: float | None = None
    autocorrelation: float | None = None
    effective_points: float | None = None


class GroupResult(Strict):
    """The measured runs of one case: geometric mean of env steps/s, sample standard deviation, 95 % interval."""

    case: str
    n: int
    mean: float | None
    sd: float | None
    ci_low: float | None
    ci_high: float | None


class ComparisonResult(Strict):
    """A ratio of one metric of two cases with its 95 % interval; the verdict is about ratio / expected ratio."""

    name: str
    metric: Metric
    ratio: float | None
    ci_low: float | None
    ci_high: float | None
    n: int
    verdict: ComparisonVerdict


class ProbeResult(Strict):
    """A probe that ran before the cells; `detail` is what it found, or why it failed or was not run."""

    name: str
    passed: bool
    detail: str


class EvaluationResult(Measures):
    """Episodes without exploration of the policy of a run, weights by their SHA-256; `repro/evaluation.py` says how."""

    episodes: int
    checkpoint_sha256: str

    @property
    def stays_up(self) -> bool:
        """Whether the mean episode is long enough."""
        return self.episode_length.mean >= WALKING_LENGTH

    @property
    def follows(self) -> bool:
        """Whether its planar velocity is surely less than half as wrong as that of a robot that stands still."""
        error = self.tracking_error_lin
        return (error.mean if error.ci_high is None else error.ci_high) < FOLLOWING * error.standing_still


class LearningResult(Strict):
    """What a run learned and how fast; `Learning` in `repro/learning.py` says how each number is computed.

    Attributes:
        run: Run directory, as in the run's cell.
        evaluation: Its policy without exploration, where the matrix asks for it.
    """

    algo: str
    task: str
    sim: str
    world_size: int
    seed: int
    env_steps: int
    wall_seconds: float
    seconds_to_walk: float | None
    episode_return: float | None
    episode_length: float | None
    tracking_error_lin: float | None
    tracking_error_ang: float | None
    run: str
    evaluation: EvaluationResult | None = None

    @model_serializer(mode="wrap")
    def _short(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what older results do not have, so that their bytes stay what they were."""
        content: dict[str, Any] = serialize(self)
        return {key: value for key, value in content.items() if key != "evaluation" or value is not None}

    @property
    def walks(self) -> bool:
        """Whether the policy stays up and follows its command; without an evaluation, whether it stays up at the end
        of training.
        """
        if self.evaluation is not None:
            return self.evaluation.stays_up and self.evaluation.follows
        return self.episode_length is not None and self.episode_length >= WALKING_LENGTH


class Result(Strict):
    """`result.json`; other programs rely on these names."""

    schema_version: Literal[1]
    matrix: str
    smoke: bool
    host: Host
    cells: tuple[CellResult, ...]
    groups: tuple[GroupResult, ...]
    comparisons: tuple[ComparisonResult, ...]
    probes: tuple[ProbeResult, ...]
    learning: tuple[LearningResult, ...]
    verdict: ResultVerdict
    noise: NoiseResult | None = None


def compute_result(evidence: Evidence) -> Result:
    """Compute every number of a session; the same evidence gives the same bytes."""
    matrix = evidence.plan.matrix
    comparisons = tuple(_compare(evidence, matrix, item) for item in matrix.comparisons)
    learning = tuple(_learning(matrix, item) for item in evidence.cells if item.status == "measured" and item.learning)
    return Result(
        schema_version=1,
        matrix=matrix.name,
        smoke=matrix.smoke,
        host=evidence.host,
        cells=tuple(_cell(item) for item in evidence.cells),
        groups=tuple(_group(case.name, evidence) for case in matrix.cases),
        comparisons=comparisons,
        probes=tuple(ProbeResult(name=p.name, passed=p.status == "passed", detail=p.detail) for p in evidence.probes),
        learning=learning,
        verdict=_verdict(evidence, comparisons, learning),
        noise=session_noise(evidence.cells),
    )


def values(evidence: Evidence, case: str, metric: Metric = "steps_per_second") -> dict[int, float]:
    """One metric of a case's measured runs by repeat; without the runs that have no value."""
    found = {
        item.cell.repeat: metric_of(item, metric)
        for item in evidence.cells
        if item.cell.case == case and item.status == "measured"
    }
    return {repeat: value for repeat, value in found.items() if value}


def metric_of(item: CellEvidence, metric: Metric) -> float | None:
    """One metric of a run, or None where there is no number."""
    measured = item.throughput
    if measured is None:
        return None
    match metric:
        case "steps_per_second":
            return measured.steps_per_second
        case "learner_rows_per_second":
            return measured.learner_rows_per_second
        case "ceiling":
            return item.ceiling
        case "ceiling_share":
            return measured.steps_per_second / item.ceiling if item.ceiling else None


def missing_cells(evidence: Evidence) -> tuple[CellEvidence, ...]:
    """Cells that were planned and gave nothing: the matrix is incomplete while there is one."""
    return tuple(item for item in evidence.cells if item.status not in ("measured", "discarded"))


def _cell(item: CellEvidence) -> CellResult:
    measured = item.throughput
    steady = measured.steadiness if measured else None
    assert item.status in CellStatus.__args__  # type: ignore[attr-defined]
    return CellResult(
        id=item.cell.id,
        case=item.cell.case,
        repeat=item.cell.repeat,
        status=item.status,  # type: ignore[arg-type]
        reason=item.reason,
        world_size=item.cell.world_size,
        steps_per_second=_rounded(measured.steps_per_second if measured else None),
        learner_rows_per_second=_rounded(measured.learner_rows_per_second if measured else None),
        tail_mean_total_fps=_rounded(measured.tail_mean if measured and measured.tag == TOTAL_FPS else None),
        physics_fraction=_rounded(measured.physics_fraction if measured else None),
        ceiling_share=_rounded(metric_of(item, "ceiling_share")),
        exposed_ms=_rounded(measured.exposed_ms if measured else None),
        learner_cycle_ms=_rounded(measured.learner_cycle_ms if measured else None),
        startup_seconds=_rounded(measured.startup_seconds if measured else None),
        run=item.cell.run if item.has_run else None,
        trend=_small(steady.trend if steady else None),
        trend_ci_low=_small(steady.trend_low if steady else None),
        trend_ci_high=_small(steady.trend_high if steady else None),
        autocorrelation=_small(steady.autocorrelation if steady else None),
        effective_points=_small(steady.effective_points if steady else None),
    )


def _learning(matrix: Matrix, item: CellEvidence) -> LearningResult:
    found = item.learning
    assert found is not None
    return LearningResult(
        algo=matrix.algo,
        task=matrix.task,
        sim=matrix.sim,
        world_size=item.cell.world_size,
        seed=found.seed,
        env_steps=found.env_steps,
        wall_seconds=float(f"{found.wall_seconds:.{DIGITS}g}"),
        seconds_to_walk=_rounded(found.seconds_to_walk),
        episode_return=_rounded(found.episode_return),
        episode_length=_rounded(found.episode_length),
        tracking_error_lin=_rounded(found.tracking_error_lin),
        tracking_error_ang=_rounded(found.tracking_error_ang),
        run=item.cell.run,
        evaluation=None if item.evaluation is None else _evaluation(item.evaluation),
    )


def _evaluation(found: Evaluation) -> EvaluationResult:
    """From its episodes alone; what the file says of them was compared when it was read."""
    computed = measures(found.samples).model_dump()
    rounded = {
        name: {key: _rounded(value) if isinstance(value, float) else value for key, value in part.items()}
        for name, part in computed.items()
    }
    facts = {"episodes": found.episodes, "checkpoint_sha256": found.checkpoint.sha256}
    return EvaluationResult.model_validate({**rounded, **facts})


def _group(case: str, evidence: Evidence) -> GroupResult:
    rates = list(values(evidence, case).values())
    if not rates:
        return GroupResult(case=case, n=0, mean=None, sd=None, ci_low=None, ci_high=None)
    found = stats.summarize(rates)
    return GroupResult(
        case=case,
        n=found.n,
        mean=_rounded(found.mean),
        sd=_rounded(found.sd),
        ci_low=_rounded(found.ci_low),
        ci_high=_rounded(found.ci_high),
    )


def _compare(evidence: Evidence, matrix: Matrix, item: Comparison) -> ComparisonResult:
    below, above = (values(evidence, case, item.metric) for case in (item.denominator, item.numerator))
    if matrix.interval == "paired":
        both = below.keys() & above.keys()
        below, above = ({repeat: side[repeat] for repeat in both} for side in (below, above))
    n = min(len(below), len(above))
    old, new = ([side[repeat] for repeat in sorted(side)] for side in (below, above))
    if n == 0 or mixed_cases(evidence, item.denominator, item.numerator):
        return _comparison(item, None, None, None, n, "insufficient_data")
    if n == 1:
        return _comparison(item, geometric_mean(new) / geometric_mean(old), None, None, n, "insufficient_data")
    found = (stats.paired_ratio if matrix.interval == "paired" else stats.welch_ratio)(old, new)
    ratio, low, high = (value / item.expected for value in (found.ratio, found.ci_low, found.ci_high))
    verdict = stats.verdict(ratio, low, high, matrix.margin)
    return _comparison(item, found.ratio, found.ci_low, found.ci_high, found.n, verdict)


def _comparison(
    item: Comparison, ratio: float | None, low: float | None, high: float | None, n: int, verdict: ComparisonVerdict
) -> ComparisonResult:
    return ComparisonResult(
        name=item.name,
        metric=item.metric,
        ratio=_rounded(ratio),
        ci_low=_rounded(low),
        ci_high=_rounded(high),
        n=n,
        verdict=verdict,
    )


def _verdict(
    evidence: Evidence, comparisons: tuple[ComparisonResult, ...], learning: tuple[LearningResult, ...]
) -> ResultVerdict:
    if any(probe.status == "failed" for probe in evidence.probes):
        return "probe_failed"
    if missing_cells(evidence):
        return "incomplete"
    if not all(item.walks for item in learning):
        return "does_not_walk"
    found = {item.verdict for item in comparisons if item.metric != "ceiling"}  # that one is the host's
    return next((verdict for verdict in WORST_FIRST if verdict in found), "measured")


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _small(value: float | None) -> float | None:
    return None if value is None else round(value, DECIMALS) + 0.0  # no -0.0


if __name__ == "__main__":
    sys.stdout.write(canonical_json(Result.model_json_schema()))
