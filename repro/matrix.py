"""Matrices: named sets of cases to run and compare, as TOML data with a strict schema."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from repro.errors import UsageError
from repro.foreign import ForeignKeys
from repro.schema import Strict, nearest, parse_model, plain_line
from repro.text import count_of

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_]*$", max_length=40)]
ProbeName = Literal["correctness", "communication", "nccl-capture"]
# Rates over all ranks, and the physics ceiling of a run: its rate, and the run's share of it.
Metric = Literal["steps_per_second", "learner_rows_per_second", "ceiling", "ceiling_share"]
CEILING_METRICS = ("ceiling", "ceiling_share")
AB_MATRIX = "ab"  # the one that `repro ab` makes
Workers = Annotated[int, Field(ge=1, le=65536)] | Literal["default", "all_but_one", "all", "auto"]
FIXED_WORK = ("algo.num_envs", "algo.batch_size")  # what all ranks together keep in strong scaling
MOST_RANKS = 1024
MOST_ITERATIONS, MOST_REPEATS, MOST_SECONDS, MOST_EPISODES = 10**9, 10**4, 1e9, 4096
FEWEST_POINTS = 20  # events that a rate needs
LOG_INTERVAL = "training.log_interval"  # iterations between two events; the last one is always written


Reason = Annotated[str, Field(min_length=1, max_length=400), AfterValidator(plain_line)]
WHOLE = re.compile(r"[0-9]{1,18}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
CODE_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "LD_PRELOAD")

OVERRIDE = re.compile(r"^[+~]{0,2}(?P<key>[A-Za-z_][\w.]*(?:@[\w.]+)?)=.*$")
NO_CHECKPOINT = "algo.save_interval=-1"
OPTIONAL = ("learning", "evaluate", "strong", "width", "probes")  # keys of a matrix that most do not have
TRACE_OVERRIDE = "training.trace_enabled=true"  # what --trace adds to every run
# Keys the suite sets by itself, and where the user says the same thing instead.
OWNED_KEYS = {
    "training.log_dir": "the suite gives every cell its own folder; use --out",
    "training.no_play": "the suite always sets it to true",
    "training.smoke": "it follows the matrix's smoke flag",
    "algo.max_iterations": "use iterations in the matrix or --iterations",
    "training.record_states": "use ceiling = true in the matrix",
    "env.cpu_ids": "use workers in the case; placement picks the CPUs of this host",
    "training.dp_collector_cpu_ids": "use workers in the case; placement picks the CPUs of this host",
}

# Keys of a case that came later, with the value they have where they are not set.
LATER: dict[str, Any] = {"pools": 1} | {
    "command": [],
    "event_tag": None,
    "step_axis": None,
    "events": None,
    "affinity": False,
}


class Case(ForeignKeys):
    """One configuration to measure.

    Attributes:
        name: Short name; the first part of its cells' ids.
        reason: Why the case is in the matrix.
        gpus: Positions within the visible GPUs, one rank each; empty means the CPU. In a smoke matrix several positions
            only say how many ranks there are, no GPU is looked for.
        workers: Physics threads per rank: a count, ``default`` (an equal share of the allowed CPUs for each rank of the
            matrix's widest case, less one that stays free for the rank's learner), ``all_but_one`` (the same of a share
            of the case's own ranks), ``all`` (that whole share) or ``auto`` (no CPU is named, the trainer chooses).
        pools: Pools of `workers` that each rank has, as one: 2 for a rank with the CPUs of two.
        overrides: Trainer overrides in Hydra's grammar, after the matrix's own.
        environment: Variables set for the trainer.
    """

    name: Name
    reason: Reason
    gpus: tuple[Annotated[int, Field(ge=0, lt=MOST_RANKS)], ...] = ()
    workers: Workers = "default"
    pools: Annotated[int, Field(ge=1, le=MOST_RANKS)] = 1
    overrides: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)

    @field_validator("gpus")
    @classmethod
    def _distinct(cls, gpus: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(gpus)) != len(gpus):
            raise ValueError(f"GPU positions {list(gpus)} repeat; one rank needs its own GPU")
        return gpus

    @field_validator("overrides")
    @classmethod
    def _grammar(cls, overrides: tuple[str, ...]) -> tuple[str, ...]:
        return check_overrides(overrides)

    @field_validator("environment")
    @classmethod
    def _variables(cls, environment: dict[str, str]) -> dict[str, str]:
        for name, value in environment.items():
            if VARIABLE.fullmatch(name) is None:
                raise ValueError(f"{name!r} is no name of a variable; use letters, digits and _")
            if name in CODE_VARIABLES:
                raise ValueError(f"{name} changes the code that is measured; install what a case needs instead")
            if name == "CUDA_VISIBLE_DEVICES":
                raise ValueError(f"{name} is set by the suite; a case names its GPUs by gpus, as in gpus = [0]")
            plain_line(value)
        return environment

    @model_validator(mode="after")
    def _pooled(self) -> Self:
        if self.workers == "auto" and self.pools > 1:
            raise ValueError(f"pools = {self.pools} needs CPUs that the suite names; take out workers = 'auto'")
        return self

    @model_validator(mode="after")
    def _of_another_trainer(self) -> Self:
        if self.foreign and self.overrides:
            raise ValueError("overrides are this trainer's settings; write those of another into its command")
        needing = [name for name, needs in (("{cpu_ids}", self.uses("cpu_ids")), ("affinity", self.affinity)) if needs]
        if self.workers == "auto" and needing:
            raise ValueError(f"{needing[0]} needs CPUs that the suite names; take out workers = 'auto'")
        if self.uses("gpus") and not self.gpus:
            raise ValueError("command has {gpus}, but the case names none; set gpus = [0]")
        return self

    @property
    def width(self) -> int:
        """Pools of all its ranks: in so many shares its CPUs are split at least."""
        return max(1, len(self.gpus)) * self.pools

    @model_serializer(mode="wrap")
    def _short(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what most cases do not set and older files do not have."""
        content: dict[str, Any] = serialize(self)
        return {key: value for key, value in content.items() if key not in LATER or value != LATER[key]}


class Comparison(Strict):
    """A ratio of one metric of two cases, ``numerator / denominator``.

    Attributes:
        name: What the ratio is called in reports.
        metric: What is compared; those of the ceiling need ``ceiling = true``.
        numerator: A case of the matrix.
        denominator: Another case of the matrix.
        expected: The ratio from which a change is counted, as 2 where twice the ranks shall give twice the rate.
        gate: Whether a `regression` verdict makes ``repro run`` end with exit code 1.
    """

    name: Name
    metric: Metric = "steps_per_second"
    numerator: str
    denominator: str
    expected: Annotated[float, Field(ge=0.001, le=MOST_RANKS)] = 1.0
    gate: bool = False


class Matrix(Strict):
    """A set of cases run in one session on one host.

    Attributes:
        name: Name of the matrix.
        reason: The question it answers.
        smoke: Runs the trainer's CPU smoke mode; never a benchmark.
        learning: Asks whether the policies walk; its report has learning curves and no verdict on speed.
        evaluate: Episodes without exploration that each policy of a learning matrix is judged by; 0 judges none.
        strong: All cases have the same environments and batch in all, however many ranks share them: strong scaling.
        width: CPUs are split into so many shares where no case has more pools: that of the whole matrix where only some
            of its cases were named, so that each runs as it does among them.
        algo: Algorithm of every case.
        task: Task of every case.
        sim: Physics backend of every case.
        iterations: Training iterations of a cell.
        repeats: Measured cells of each case.
        warmup: Cells run first and discarded.
        interval: Interval of the log ratio: Welch's, or paired by repeat.
        margin: Relative change that counts as a regression, in (0, 1).
        timeout_seconds: Limit for one cell.
        startup_estimate_seconds: Expected time from start to the first iteration, for the plan's estimate only.
        iteration_estimate_seconds: Expected time of one iteration, for the plan's estimate only.
        benchmarks: Whether the micro-benchmarks of the checkout run before the first cell.
        ceiling: Measures after each measured cell how fast its CPUs step its recorded states and do nothing else.
        probes: Run before everything else, with the ranks of the widest case; where one fails, no cell is run.
        overrides: Trainer overrides of every case.
        comparisons: Ratios to report.
        cases: The configurations, in the order of the first block.
    """

    name: Name
    reason: Reason
    smoke: bool
    learning: bool = False
    evaluate: Annotated[int, Field(ge=0, le=MOST_EPISODES)] = 0
    strong: bool = False
    width: Annotated[int, Field(ge=0, le=MOST_RANKS**2)] = 0
    algo: Name
    task: Name
    sim: Name
    iterations: Annotated[int, Field(ge=1, le=MOST_ITERATIONS)]
    repeats: Annotated[int, Field(ge=1, le=MOST_REPEATS)]
    warmup: Annotated[int, Field(ge=0, le=9)]
    interval: Literal["welch", "paired"]
    margin: Annotated[float, Field(gt=0, lt=1)]
    timeout_seconds: Annotated[float, Field(gt=0, le=MOST_SECONDS)] = 1800.0
    startup_estimate_seconds: Annotated[float, Field(ge=0, le=MOST_SECONDS)] = 30.0
    iteration_estimate_seconds: Annotated[float, Field(ge=0, le=MOST_SECONDS)] = 0.1
    benchmarks: bool = False
    ceiling: bool = False
    probes: tuple[ProbeName, ...] = ()
    overrides: tuple[str, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    cases: Annotated[tuple[Case, ...], Field(min_length=1)]

    @field_validator("overrides")
    @classmethod
    def _grammar(cls, overrides: tuple[str, ...]) -> tuple[str, ...]:
        return check_overrides(overrides)

    @model_validator(mode="after")
    def _names(self) -> Self:
        names = [case.name for case in self.cases]
        for kind, all_names in (("case", names), ("comparison", [item.name for item in self.comparisons])):
            twice = [name for name, count in Counter(all_names).items() if count > 1]
            if twice:
                raise ValueError(f"{kind} name {twice[0]!r} is used {all_names.count(twice[0])} times")
        for item in self.comparisons:
            for name in (item.numerator, item.denominator):
                if name not in names:
                    raise ValueError(f"comparison {item.name!r} names case {name!r}{nearest(name, names)}")
            if item.numerator == item.denominator:
                raise ValueError(f"comparison {item.name!r} compares {item.numerator!r} with itself")
            if item.metric in CEILING_METRICS and not self.ceiling:
                raise ValueError(f"comparison {item.name!r} needs the physics ceiling; set ceiling = true")
        return self

    @model_validator(mode="after")
    def _only_of_this_trainer(self) -> Self:
        foreign = [case.name for case in self.cases if case.foreign]
        asked = "a learning report" if self.learning else "a total of strong scaling" if self.strong else None
        if len(foreign) == len(self.cases) and (self.probes or self.ceiling):
            asked = "probes" if self.probes else "a physics ceiling"
        if foreign and asked is not None:
            raise ValueError(f"case {foreign[0]!r} is of another trainer, which has no {asked.removeprefix('a ')}")
        for item in self.comparisons:
            name = next((name for name in (item.numerator, item.denominator) if name in foreign), None)
            if name is not None and item.metric != "steps_per_second":
                raise ValueError(
                    f"comparison {item.name!r}: {name!r} is of another trainer, which has no {item.metric}"
                )
        return self

    @model_validator(mode="after")
    def _one_question(self) -> Self:
        if self.learning and self.comparisons:
            raise ValueError(
                f"learning = true, but comparison {self.comparisons[0].name!r} compares rates; "
                "a learning matrix gives no verdict on speed, take it out"
            )
        if self.evaluate and not self.learning:
            raise ValueError(f"evaluate = {self.evaluate} is for a learning report; set learning = true")
        for case in self.cases if self.evaluate else ():
            if NO_CHECKPOINT in (*self.overrides, *case.overrides):
                raise ValueError(
                    f"evaluate = {self.evaluate} needs the weights of {case.name!r}; take out {NO_CHECKPOINT}"
                )
        return self

    @property
    def widest(self) -> int:
        """Shares that CPUs are split into: `width`, or the pools of the case that has most."""
        return max(self.width, *(case.width for case in self.cases))

    @model_serializer(mode="wrap")
    def _short(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what older files do not have, so that their bytes stay what they were."""
        content: dict[str, Any] = serialize(self)
        return {key: value for key, value in content.items() if value or key not in OPTIONAL}

    @model_validator(mode="after")
    def _fixed_work(self) -> Self:
        for key in FIXED_WORK if self.strong else ():
            totals = {case.name: self._total(case, key) for case in self.cases}
            if None in totals.values() or len(set(totals.values())) > 1:
                found = ", ".join(f"{name} {total}" for name, total in totals.items())
                raise ValueError(f"strong = true, but {key} of all ranks differs or is not set: {found}")
        return self

    def _total(self, case: Case, key: str) -> int | None:
        """What an override of each rank makes of all ranks of a case, or None where it sets no whole number."""
        each = self.setting(case, key)
        return None if each is None else each * max(1, len(case.gpus))

    def setting(self, case: Case, key: str) -> int | None:
        """What the last override of a key sets for a case, or None where that is no whole number."""
        value = last_override((*self.overrides, *case.overrides), key)
        return int(value) if value is not None and WHOLE.fullmatch(value) else None

    @model_validator(mode="after")
    def _distinct_probes(self) -> Self:
        twice = [name for name, count in Counter(self.probes).items() if count > 1]
        if twice:
            raise ValueError(f"probe {twice[0]!r} is named {self.probes.count(twice[0])} times; once is enough")
        if self.smoke and "nccl-capture" in self.probes:
            raise ValueError("probe 'nccl-capture' is about graphs on GPUs; take it out of a smoke matrix")
        return self

    @model_validator(mode="after")
    def _devices(self) -> Self:
        for case in self.cases:
            if self.smoke and len(case.gpus) == 1:
                raise ValueError(
                    f"case {case.name!r} names GPUs {list(case.gpus)}, but the matrix is smoke (CPU), where one rank "
                    "needs none; leave gpus out, or list two or more for as many ranks"
                )
            if not self.smoke and not case.gpus:
                raise ValueError(f"case {case.name!r} names no GPU; set gpus = [0], or smoke = true for the CPU")
        return self


def check_overrides(overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse overrides that are not ``key=value`` or that set what the suite sets itself.

    Raises:
        UsageError: With the key and what to use instead.
    """
    for text in overrides:
        plain_line(text)
        match = OVERRIDE.match(text)
        if match is None:
            raise UsageError(f"override {text!r} is not key=value, for example algo.num_envs=1024")
        key = match["key"]
        if key in OWNED_KEYS:
            raise UsageError(f"override {text!r}: {key} is set by the suite; {OWNED_KEYS[key]}")
    return overrides


def last_override(words: Sequence[str], key: str) -> str | None:
    """What the last override of a key says, or None where no word sets it."""
    values = [value for name, _, value in (word.lstrip("+").partition("=") for word in words) if name == key]
    return values[-1] if values else None


def builtin_names() -> list[str]:
    """Return the names of the matrices shipped with the suite, sorted."""
    folder = resources.files("repro") / "matrices"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_matrix(name: str) -> Matrix:
    """Load a built-in matrix by name, or any matrix by the path of its TOML file.

    Raises:
        UsageError: If there is no such matrix or its file does not fit the schema.
    """
    if name in builtin_names():
        text = (resources.files("repro") / "matrices" / f"{name}.toml").read_text(encoding="utf-8")
        return parse_matrix(text, f"matrix {name}")
    path = Path(name)
    if path.is_file():
        try:
            return parse_matrix(path.read_text(encoding="utf-8"), path.name)
        except UnicodeDecodeError as error:
            raise UsageError(f"{path.name}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    if path.suffix == ".toml" or "/" in name:
        raise UsageError(f"matrix file {name} does not exist")
    raise UsageError(f"unknown matrix {name!r}{nearest(name, [*builtin_names(), 'auto'])}")


def parse_matrix(text: str, source: str) -> Matrix:
    """Parse the TOML text of one matrix; `source` names it in messages.

    Raises:
        UsageError: If the text is not TOML (duplicate keys included) or does not fit the schema.
    """
    try:
        content = json.dumps(tomllib.loads(text), default=str)
    except RecursionError:
        raise UsageError(f"{source}: nested too deeply; a matrix needs three levels") from None
    except ValueError as error:  # not TOML, or a number of thousands of digits
        raise UsageError(f"{source}: not valid TOML: {error}") from None
    return parse_model(Matrix, content, source)


def matrix_of_cases(names: list[str]) -> Matrix:
    """Build a matrix from named cases of one built-in matrix, with that matrix's settings.

    Raises:
        UsageError: If a name is unknown, repeated, found in several matrices, or the names come from different ones.
    """
    matrices = [load_matrix(name) for name in builtin_names()]
    homes = {name: [matrix for matrix in matrices if name in [case.name for case in matrix.cases]] for name in names}
    known = [case.name for matrix in matrices for case in matrix.cases]
    for name, found in homes.items():
        if not found and any(name == matrix.name for matrix in matrices):
            raise UsageError(f"{name} is a matrix, not a case; type --matrix {name}")
        if not found:
            raise UsageError(f"unknown case {name!r}{nearest(name, known)}")
    common = [matrix for matrix in matrices if all(matrix in found for found in homes.values())]
    if len(common) != 1:
        where = ", ".join(f"{name} in {'/'.join(m.name for m in found)}" for name, found in homes.items())
        advice = f"say which, as in --matrix {common[0].name} {' '.join(homes)}" if common else "name cases of one"
        raise UsageError(f"the cases do not point to one matrix ({where}); {advice}")
    return select_cases(common[0], names)


def select_cases(matrix: Matrix, names: list[str]) -> Matrix:
    """Return the matrix with only the named cases, in the given order, placed as in it, and their comparisons.

    Without a case of this trainer there is nothing to probe and no physics ceiling.

    Raises:
        UsageError: If the matrix has no case of a name, or a name is repeated.
    """
    known = {case.name: case for case in matrix.cases}
    for name in names:
        if name not in known:
            raise UsageError(f"matrix {matrix.name} has no case {name!r}{nearest(name, list(known))}")
    if len(set(names)) != len(names):
        raise UsageError(f"cases {' '.join(names)} repeat a name; use --repeats for more runs of a case")
    cases = tuple(known[name] for name in names)
    kept = tuple(c for c in matrix.comparisons if c.numerator in names and c.denominator in names)
    changes: dict[str, Any] = {"cases": cases, "comparisons": kept}
    if all(case.foreign for case in cases):
        changes |= {"probes": (), "ceiling": False}
    selected = matrix.model_copy(update=changes)
    wider = matrix.widest > selected.widest
    return selected.model_copy(update={"width": matrix.widest}) if wider else selected


def adjust(matrix: Matrix, iterations: int | None, repeats: int | None, overrides: tuple[str, ...]) -> Matrix:
    """Apply the command line's changes; ``None`` keeps the matrix's value.

    Raises:
        UsageError: If a number is out of range, an override is malformed, or a run would be too short for a rate.
    """
    for flag, value, most in (
        ("--iterations", iterations, MOST_ITERATIONS),
        ("--repeats", repeats, MOST_REPEATS),
    ):
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value}: must be at least 1")
        if value is not None and value > most:
            raise UsageError(f"{flag} {value}: must be at most {most}")
    changed = matrix.model_copy(
        update={
            "iterations": matrix.iterations if iterations is None else iterations,
            "repeats": matrix.repeats if repeats is None else repeats,
            "overrides": (*matrix.overrides, *check_overrides(overrides)),
        }
    )
    _require_points(changed)
    return changed


def _require_points(matrix: Matrix) -> None:
    """Refuse iterations that log too few events for a rate; what another trainer logs is not known."""
    for case in (case for case in matrix.cases if not case.foreign):
        interval = matrix.setting(case, LOG_INTERVAL) or 1
        points = -(-matrix.iterations // interval)
        if points < FEWEST_POINTS:
            asked = count_of(matrix.iterations, "iteration")
            every = f" with {LOG_INTERVAL}={interval}" if interval > 1 else ""
            raise UsageError(
                f"case {case.name!r} logs {count_of(points, 'event')} in {asked}{every}, a rate needs {FEWEST_POINTS}; "
                f"type --iterations {(FEWEST_POINTS - 1) * interval + 1} or more"
            )
