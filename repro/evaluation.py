"""How the policy of a learning run does without exploration: asked right after the run, read again by every report.

The trainer's `eval` command writes `eval.json`. Its means and intervals are computed again here from its episodes.
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator
from scipy.stats import binomtest, t

from repro.launch import Ended, Runner
from repro.matrix import Matrix
from repro.plan import Cell
from repro.schema import Strict, read_model
from repro.stats import CONFIDENCE
from unilab.names import CHECKPOINT_PATTERN, CONFIG_FILE, EVAL_FILE, EXIT_OK, POLICY_FILE, VIDEO_FILE

PROGRAM = (sys.executable, "-P", "-m", "unilab.eval")
LIMIT_SECONDS = 600.0
MODELS = "_models"  # behind a report's name: the folder beside it with what is too large to publish
KEPT_THERE = (CHECKPOINT_PATTERN.format(iteration="*"), POLICY_FILE, VIDEO_FILE)

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
NotNegative = Annotated[float, Field(ge=0)]


class Summary(Strict):
    """Mean over episodes and its Student t interval; one episode has none."""

    mean: float
    ci_low: float | None
    ci_high: float | None


class Tracking(Summary):
    """A velocity error, and what it would be of a robot that stands still under the same commands."""

    standing_still: NotNegative


class Falls(Strict):
    """Episodes that ended in a fall, and Wilson's interval of their share."""

    count: Annotated[int, Field(ge=0)]
    share: float
    ci_low: float
    ci_high: float


class Measures(Strict):
    """What the episodes say together."""

    episode_return: Summary
    episode_length: Summary
    tracking_error_lin: Tracking
    tracking_error_ang: Tracking
    falls: Falls


class Samples(Strict):
    """One number per episode: returns, control steps, mean errors in m/s and rad/s, the same standing still, falls."""

    episode_return: Annotated[tuple[float, ...], Field(min_length=1)]
    episode_length: tuple[Annotated[int, Field(ge=1)], ...]
    tracking_error_lin: tuple[NotNegative, ...]
    tracking_error_ang: tuple[NotNegative, ...]
    standing_error_lin: tuple[NotNegative, ...]
    standing_error_ang: tuple[NotNegative, ...]
    fall: tuple[bool, ...]

    @model_validator(mode="after")
    def _equally_many(self) -> Self:
        counts = {name: len(getattr(self, name)) for name in type(self).model_fields}
        if len(set(counts.values())) > 1:
            raise ValueError(f"its lists have different lengths: {counts}")
        return self


class Checkpoint(Strict):
    """The weights that were evaluated."""

    file: str
    sha256: Sha256
    iteration: Annotated[int, Field(ge=0)]
    env_steps: Annotated[int, Field(ge=0)]


class Evaluation(Measures):
    """`eval.json`, as the trainer writes it."""

    schema_version: Literal[1]
    algo: str
    task: str
    checkpoint: Checkpoint
    seed: int
    versions: dict[str, Any]
    episodes: int
    confidence_level: float
    samples: Samples

    @model_validator(mode="after")
    def _of_its_episodes(self) -> Self:
        if self.episodes != len(self.samples.fall):
            raise ValueError(f"episodes is {self.episodes}, its samples are of {len(self.samples.fall)}")
        if self.confidence_level != CONFIDENCE:
            raise ValueError(f"confidence_level is {self.confidence_level}, reports have {CONFIDENCE}")
        computed = measures(self.samples)
        for name in Measures.model_fields:
            stated, found = getattr(self, name), getattr(computed, name)
            for key in type(found).model_fields:
                one, other = getattr(stated, key), getattr(found, key)
                if not _alike(one, other):
                    raise ValueError(f"{name}.{key} is {one}, its episodes give {other}")
        return self


def measures(samples: Samples) -> Measures:
    """Means, shares and their 95 % intervals."""

    def tracking(errors: Sequence[float], standing: Sequence[float]) -> Tracking:
        return Tracking(**_summary(errors).model_dump(), standing_still=float(np.mean(standing)))

    count, total = sum(samples.fall), len(samples.fall)
    wilson = binomtest(count, total).proportion_ci(CONFIDENCE, method="wilson")
    return Measures(
        episode_return=_summary(samples.episode_return),
        episode_length=_summary(samples.episode_length),
        tracking_error_lin=tracking(samples.tracking_error_lin, samples.standing_error_lin),
        tracking_error_ang=tracking(samples.tracking_error_ang, samples.standing_error_ang),
        falls=Falls(count=count, share=count / total, ci_low=float(wilson.low), ci_high=float(wilson.high)),
    )


def _summary(values: Sequence[float]) -> Summary:
    count, mean = len(values), float(np.mean(values))
    if count == 1:
        return Summary(mean=mean, ci_low=None, ci_high=None)
    half = float(t.ppf((1 + CONFIDENCE) / 2, count - 1) * np.std(values, ddof=1) / math.sqrt(count))
    return Summary(mean=mean, ci_low=mean - half, ci_high=mean + half)


def _alike(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


def record_evaluation(
    matrix: Matrix, cell: Cell, ended: Ended, environment: Mapping[str, str], out_dir: Path, grace: float, run: Runner
) -> tuple[str | None, bool]:
    """Evaluate the policy of a cell whose trainer just ended.

    Returns:
        Why there is no evaluation, or None; and whether the user interrupted it.
    """
    if cell.warmup or ended.exit_code != EXIT_OK or not (out_dir / cell.run).is_dir():
        return None, False
    names = ("--algo", matrix.algo, "--task", matrix.task, "--sim", matrix.sim)
    command = [*PROGRAM, *names, "--load-run", cell.run, "--episodes", str(matrix.evaluate), "training.no_play=true"]
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "logs" / "eval.log"
        log.parent.mkdir()
        found = run(command, environment, out_dir, log, LIMIT_SECONDS, grace)
    failed = found.outcome != "exited" or found.exit_code != EXIT_OK
    return (found.reason or f"eval ended with exit code {found.exit_code}") if failed else None, (
        found.outcome == "interrupted"
    )


def models_folder(out_dir: Path) -> Path:
    """Where the weights of a report's policies are: beside it, since they are too large to publish."""
    folder = out_dir.absolute()  # "." has no name
    return folder.with_name(folder.name + MODELS)


def put_models_beside(out_dir: Path, cell: Cell) -> None:
    """Move weights, policy and video of a run, with its settings, so that `eval` can be asked again there.

    However the run ended; of another trainer nothing is known to be weights. What an error of the disk left is moved by
    the next call.
    """
    run_dir, kept = out_dir / cell.run, models_folder(out_dir) / cell.id
    found = [] if cell.foreign else [path for pattern in KEPT_THERE for path in run_dir.glob(pattern)]
    if not found:
        return
    kept.mkdir(parents=True, exist_ok=True)
    if (run_dir / CONFIG_FILE).exists() and not (kept / CONFIG_FILE).exists():
        shutil.copy2(run_dir / CONFIG_FILE, kept)
    for path in found:
        shutil.move(path, kept / path.name)


def put_models_aside(out_dir: Path, cell: Cell, attempt: str) -> None:
    """Keep the weights of an attempt that is run again under its own name, so that none of two attempts mix."""
    kept = models_folder(out_dir) / cell.id
    if kept.exists():
        kept.rename(kept.with_name(attempt))


def read_evaluation(run_dir: Path, matrix: Matrix, env_steps: int) -> Evaluation:
    """Read the evaluation of a run's last checkpoint.

    Args:
        run_dir: Directory of the run.
        matrix: Says what was trained and how many episodes were asked for.
        env_steps: Global env steps at the end of the run.

    Raises:
        ValueError: If there is none, it does not fit its own schema, or is of another policy or number of episodes.
    """
    found = read_model(Evaluation, run_dir / EVAL_FILE)
    asked = {
        "algo": (matrix.algo, found.algo),
        "episodes": (matrix.evaluate, found.episodes),
        "checkpoint.iteration": (matrix.iterations, found.checkpoint.iteration),
        "checkpoint.env_steps": (env_steps, found.checkpoint.env_steps),
    }
    for name, (wanted, stated) in asked.items():
        if wanted != stated:
            raise ValueError(f"{EVAL_FILE}: {name} is {stated}, {wanted} was asked for")
    return found
