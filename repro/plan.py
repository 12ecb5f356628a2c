"""From a matrix and a host to the list of cells: order, ids, commands, placement, estimated time."""

from __future__ import annotations

import hashlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from repro.errors import UsageError
from repro.foreign import fill_command
from repro.host import Host
from repro.layout import LOGS_DIR, PLAN_FILE, RUNS_DIR, TELEMETRY_DIR
from repro.matrix import MOST_RANKS, Case, Matrix, ProbeName, last_override
from repro.place import CannotHoldError, Cpu, Offer, Placement, choose_cpuset, place
from repro.provenance import Source
from repro.redact import Redactor
from repro.schema import Strict, canonical_json
from unilab.names import AUTO_TRANSPORT, TRANSPORT_KEY, TRANSPORT_VARIABLES

TRAINER = (sys.executable, "-m", "unilab.train")
# Variables that change what is measured behind a case's back; a case that wants one sets it.
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
CLEARED = ("NCCL_PROTO", "NCCL_ALGO", "NCCL_GRAPH_MIXING_SUPPORT", "NCCL_GRAPH_STREAM_ORDERING", VISIBLE_DEVICES)
NAME = r"^[a-z0-9][a-z0-9_]*$"  # of a cell, whose folder and log are called so, and of the start of its name
PINNING = ("env.cpu_ids=", "training.dp_collector_cpu_ids=")  # of one rank, of several
CREATED = "%Y-%m-%dT%H:%M:%SZ"  # form of the time of planning
CEILING_SNAPSHOTS = 8  # states of a run that its ceiling is measured on
PROBE_ESTIMATE_SECONDS = {True: 15.0, False: 60.0}  # of one probe by smoke, for the plan's estimate only
CEILING_ESTIMATE_SECONDS = {True: 3.0, False: 10.0}  # of one measurement by smoke, for the plan's estimate only
# What `Redactor` puts for a name or a path: it stands for any word, and for anything that begins like a path.
PLACEHOLDER = re.compile(r"<(?:(?P<name>user|host)|home|project|python)>")


class Cell(Strict):
    """One training run of the plan.

    Attributes:
        id: Name of the run's folder and log.
        case: Case it belongs to.
        repeat: From 1; 0 for a discarded warm-up.
        warmup: Whether its number is discarded.
        content_sha256: Hash of everything that defines the run, independent of host and order.
        world_size: Ranks.
        cpu_ids: CPUs of the physics workers, rank after rank, equally many each; none where the trainer chooses, None
            when skipped.
        gpus: Entries of CUDA_VISIBLE_DEVICES.
        arguments: Arguments of the trainer, paths relative to the report's folder.
        environment: Variables set for the trainer.
        skip_reason: Why this host cannot hold it, or None.
        foreign: Whether it is of another trainer; its arguments are then its whole command.
        cpuset: CPUs of its container, ascending; None without one.
    """

    id: Annotated[str, Field(pattern=NAME)]
    case: str
    repeat: int
    warmup: bool
    content_sha256: str
    world_size: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    cpu_ids: tuple[int, ...] | None
    gpus: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: dict[str, str]
    skip_reason: str | None
    foreign: bool = False
    cpuset: tuple[int, ...] | None = None

    @property
    def pools(self) -> tuple[tuple[int, ...], ...]:
        """CPUs of the physics workers of each rank; none when skipped or where the trainer chooses."""
        if not self.cpu_ids:
            return ()
        size = len(self.cpu_ids) // self.world_size
        return tuple(self.cpu_ids[rank * size : (rank + 1) * size] for rank in range(self.world_size))

    @property
    def chooses_cpus(self) -> bool:
        """Whether the trainer chooses the CPUs itself."""
        return self.cpu_ids == ()

    @property
    def run(self) -> str:
        """Run directory, relative to the report's folder."""
        return f"{RUNS_DIR}/{self.id}"

    @property
    def log(self) -> str:
        """Log file, relative to the report's folder."""
        return f"{LOGS_DIR}/{self.id}.log"

    @property
    def stacks(self) -> str:
        """Where its processes stood when its time was over, relative to the report's folder."""
        return f"{LOGS_DIR}/{self.id}.stacks.txt"

    @property
    def telemetry(self) -> str:
        """Samples of the host while it ran, relative to the report's folder."""
        return f"{TELEMETRY_DIR}/{self.id}.jsonl"


class Executor(Strict):
    """What starts cells.

    Attributes:
        kind: `local`, the suite itself; or `docker`, each cell in a container of its own.
        image: Name of the containers' image, or None.
        image_id: Its id, or None.
    """

    kind: Literal["local", "docker"] = "local"
    image: str | None = None
    image_id: str | None = None

    @model_validator(mode="after")
    def _named(self) -> Self:
        if {self.image is None, self.image_id is None} != {self.kind == "local"}:
            raise ValueError("docker has an image and its id, local has neither")
        return self


LOCAL = Executor()


class Plan(Strict):
    """What a session is going to do, written before its first cell.

    Attributes:
        schema_version: Of this file.
        created: UTC time of planning.
        matrix: The matrix, with the command line's changes.
        source: The code that is measured.
        trainer: Start of every cell's command, redacted.
        cleared_environment: Variables taken out of the inherited environment, present ones only.
        timeout_seconds: Limit for one cell.
        estimated_seconds: Expected duration of all cells and probes.
        cells: In the order they run.
        executor: What starts them.
        sources: The code of each case where cases are commits or images, as `repro ab` has them; else empty.
        images: What starts the cells of each case where cases are images; `executor` is then the last one's.
        remarks: What a reader must know about these.
    """

    schema_version: Literal[1]
    created: str
    matrix: Matrix
    source: Source
    trainer: tuple[str, ...]
    cleared_environment: tuple[str, ...]
    timeout_seconds: float
    estimated_seconds: float
    cells: tuple[Cell, ...]
    executor: Executor = LOCAL
    sources: dict[str, Source] = Field(default_factory=dict)
    images: dict[str, Executor] = Field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @field_validator("created")
    @classmethod
    def _is_time(cls, created: str) -> str:
        if datetime.strptime(created, CREATED).strftime(CREATED) != created:
            raise ValueError(f"{created!r} is not of the form {CREATED}")
        return created

    @model_validator(mode="after")
    def _cpusets(self) -> Self:
        for cell in self.cells:
            if (cell.cpuset is not None) != (self.executor.kind == "docker" and cell.skip_reason is None):
                raise ValueError(f"cell {cell.id!r} has a cpuset if and only if it runs in a container")
            if cell.cpuset is not None and not set(cell.cpuset) > set(cell.cpu_ids or ()):
                raise ValueError(f"cell {cell.id!r}: its cpuset must hold its workers' CPUs and one for its learner")
        return self

    @model_serializer(mode="wrap")
    def _short(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what only some plans have."""
        content: dict[str, Any] = serialize(self)
        return {key: value for key, value in content.items() if value or key not in ("sources", "images", "remarks")}

    @property
    def labels(self) -> dict[str, str]:
        """What cases that are commits or images are called, as in ``B (abc1234)``."""
        names = {case: source.label for case, source in self.sources.items()}
        names |= {case: f"{image.image}" for case, image in self.images.items()}
        return {case: f"{case.upper()} ({name})" for case, name in names.items()}

    def source_of(self, case: str) -> Source:
        """The code of a case's cells."""
        return self.sources.get(case, self.source)

    @property
    def runnable(self) -> tuple[Cell, ...]:
        """Cells this host can hold."""
        return tuple(cell for cell in self.cells if cell.skip_reason is None)


def make_plan(
    matrix: Matrix,
    host: Host,
    topology: tuple[Cpu, ...],
    source: Source,
    *,
    inherited: Sequence[str] = (),
    prefix: str | None = None,
    timeout: float | None = None,
    trainer: Sequence[str] = TRAINER,
    executor: Executor = LOCAL,
    sources: Mapping[str, Source] = MappingProxyType({}),
    images: Mapping[str, Executor] = MappingProxyType({}),
    remarks: Sequence[str] = (),
    now: datetime | None = None,
) -> Plan:
    """Plan a matrix for a host; starts nothing.

    Args:
        matrix: What to run.
        host: Facts of the host.
        topology: Its allowed CPUs.
        source: The code.
        inherited: Names of the inherited environment variables.
        prefix: Start of every cell's id.
        timeout: Limit for one cell in seconds; None takes the matrix's.
        trainer: Start of the command.
        executor: What starts cells.
        sources: The code of each case where it is not `source`.
        images: What starts the cells of each case where it is not `executor` for all.
        remarks: About these.
        now: Time of planning; None takes the clock.

    Raises:
        UsageError: If the prefix or the timeout is malformed, two cells would have the same id, or a variable would win
            over the transport that a cell asks for.
    """
    if prefix is not None and not re.fullmatch(NAME, prefix):
        raise UsageError(f"--prefix {prefix!r}: use small letters, digits and _, beginning with a letter or digit")
    if timeout is not None and not timeout > 0:
        raise UsageError(f"--timeout {timeout:g}: must be above 0 seconds")
    placements = _place_all(matrix, host, topology, contained=executor.kind == "docker")
    cells = tuple(
        _cell(matrix, case, repeat, number, placements[case.name], prefix)
        for case, repeat, number in _order(matrix, placements)
    )
    _check_ids(cells)
    _check_transports(matrix, cells, inherited)
    return Plan(
        schema_version=1,
        created=(now or datetime.now(UTC)).strftime(CREATED),
        matrix=matrix,
        source=source,
        trainer=_published(trainer),
        cleared_environment=tuple(name for name in CLEARED if name in inherited),
        timeout_seconds=matrix.timeout_seconds if timeout is None else float(timeout),
        estimated_seconds=_estimate(matrix, cells),
        cells=cells,
        executor=executor,
        sources=dict(sources),
        images=dict(images),
        remarks=tuple(remarks),
    )


def unfit_cases(matrix: Matrix, host: Host, topology: tuple[Cpu, ...], contained: bool = False) -> dict[str, str]:
    """Cases that this host cannot hold, in containers where `contained`, each with the reason."""
    placements = _place_all(matrix, host, topology, contained)
    return {case: placement for case, placement in placements.items() if isinstance(placement, str)}


def check_plan(plan: Plan) -> None:
    """Plan the matrix again, with the CPUs and GPUs that the plan names, and compare every cell.

    Raises:
        UsageError: Naming the first cell that its own matrix does not give.
    """
    _check_ids(plan.cells, f"{PLAN_FILE}: ")
    recorded = {cell.case: _recorded_placement(cell) for cell in reversed(plan.cells)}
    unplanned = [case.name for case in plan.matrix.cases if case.name not in recorded]
    if unplanned:
        raise UsageError(f"{PLAN_FILE}: case {unplanned[0]!r} has no cell; write the plan again with repro run")
    if plan.sources and plan.sources.keys() != recorded.keys():
        raise UsageError(f"{PLAN_FILE}: sources names {', '.join(plan.sources)}, its cases are {', '.join(recorded)}")
    if plan.images and (
        plan.images.keys() != plan.sources.keys() or plan.executor != plan.images[plan.matrix.cases[-1].name]
    ):
        raise UsageError(f"{PLAN_FILE}: images must name one for each of its sources, and executor the last of them")
    placements = {case.name: recorded[case.name] for case in plan.matrix.cases}
    order = _order(plan.matrix, placements)
    if len(order) != len(plan.cells):
        raise UsageError(f"{PLAN_FILE}: its matrix gives {len(order)} cells, it holds {len(plan.cells)}")
    start = plan.cells[0].id.removesuffix(_name(*order[0]))
    for (case, repeat, warmup), cell in zip(order, plan.cells, strict=True):
        expected = _cell(plan.matrix, case, repeat, warmup, placements[case.name], start.removesuffix("_") or None)
        differing = _differing_field(expected, cell, _is_redacted(plan.matrix, case))
        if differing is not None:
            raise UsageError(f"{PLAN_FILE}: {differing} of cell {cell.id!r} is not what its own matrix gives")


def asked_probes(matrix: Matrix, cells: Sequence[Cell]) -> tuple[ProbeName, ...]:
    """Probes that are run: those about data between ranks only where a case that the host can hold has several."""
    own = [cell.world_size for cell in cells if cell.skip_reason is None and not cell.foreign]
    several = matrix.smoke or max(own, default=1) > 1  # smoke probes have ranks of their own
    return tuple(name for name in matrix.probes if several or name == "correctness")


def asked_transport(matrix: Matrix, cell: Cell) -> str | None:
    """The transport that a cell's ranks on GPUs are to use, or None where its settings leave that open."""
    if matrix.smoke or cell.foreign or cell.world_size == 1:
        return None
    value = last_override(cell.arguments, TRANSPORT_KEY)
    transport = None if value is None else value.strip("'\"")
    return None if transport == AUTO_TRANSPORT else transport


def is_pinned(cell: Cell) -> bool:
    """Whether the trainer is told which CPUs to use; only where threads can be pinned."""
    return not cell.foreign and any(argument.startswith(PINNING) for argument in cell.arguments)


def pinning(pools: Sequence[Sequence[int]]) -> str:
    """The override that tells the trainer which CPUs each rank's physics workers use."""
    lists = ["[" + ",".join(map(str, pool)) + "]" for pool in pools]
    return f"{PINNING[0]}{lists[0]}" if len(lists) == 1 else f"{PINNING[1]}[{','.join(lists)}]"


def same_words(planned: Sequence[str], found: Sequence[str]) -> bool:
    """Whether two lists of words are equal, up to names and paths that were replaced before publishing."""
    return len(planned) == len(found) and all(map(_same_word, planned, found))


def interleave(names: Sequence[str], repeats: int) -> list[tuple[str, int]]:
    """Blocks of all cases, every second one reversed: A B, B A, A B … so that a drift of the host hits all alike."""
    blocks = [list(names) if repeat % 2 else list(reversed(names)) for repeat in range(1, repeats + 1)]
    return [(name, repeat) for repeat, block in enumerate(blocks, start=1) for name in block]


def shell_command(plan: Plan, cell: Cell, variables: Mapping[str, str]) -> str:
    """A cell's command as a shell takes it, with variables before it; where cases are commits, also a checkout's."""
    own = None if plan.images else plan.sources.get(cell.case)
    code = {} if own is None else {"PYTHONPATH": f"checkout_of_{own.label.replace(' ', '_')}"}
    assigned = [f"{name}={shlex.quote(value)}" for name, value in sorted({**variables, **code}.items())]
    trainer = () if cell.foreign else plan.trainer
    if case_of(plan.matrix, cell).affinity:
        trainer = ("taskset", "-c", ",".join(map(str, cell.cpu_ids or ())))  # the suite sets the same mask itself
    return " ".join([*assigned, shlex.join([*trainer, *cell.arguments])])


def case_of(matrix: Matrix, cell: Cell) -> Case:
    """The case that a cell belongs to."""
    return next(case for case in matrix.cases if case.name == cell.case)


def _order(matrix: Matrix, placements: dict[str, Placement | str]) -> list[tuple[Case, int, int]]:
    """Cells as (case, repeat, number of the warm-up or 0): warm-ups of runnable cases in turn, then the blocks."""
    cases = {case.name: case for case in matrix.cases}
    able = [name for name, placement in placements.items() if isinstance(placement, Placement)]
    warmups = [(cases[able[i % len(able)]], 0, i + 1) for i in range(matrix.warmup)] if able else []
    return warmups + [(cases[name], repeat, 0) for name, repeat in interleave(list(cases), matrix.repeats)]


def _estimate(matrix: Matrix, cells: Sequence[Cell]) -> float:
    """Expected seconds of all cells that this host can hold, their ceilings and the probes."""
    able = [cell for cell in cells if cell.skip_reason is None]
    each = matrix.startup_estimate_seconds + matrix.iterations * matrix.iteration_estimate_seconds
    ceilings = CEILING_ESTIMATE_SECONDS[matrix.smoke] * sum(not cell.warmup for cell in able) if matrix.ceiling else 0.0
    probes = PROBE_ESTIMATE_SECONDS[matrix.smoke] * len(asked_probes(matrix, cells))
    return round(probes + each * len(able) + ceilings, 1)


def _place_all(matrix: Matrix, host: Host, topology: tuple[Cpu, ...], contained: bool) -> dict[str, Placement | str]:
    """Where every case runs, or why this host cannot hold it. Entries of a smoke matrix are counted, never opened."""
    offer = Offer(topology, host.cgroup_cpus, host.visible_gpus, host.gpu_unusable, host.gpu_nodes)
    if matrix.smoke:
        offer = Offer(topology, host.cgroup_cpus, tuple(map(str, range(MOST_RANKS))))
    placements = {case.name: _place(case, offer, matrix.widest) for case in matrix.cases}
    if not matrix.smoke:
        placements = {case.name: _listed(case, placements[case.name], host) for case in matrix.cases}
    if not contained:
        return placements
    return {case.name: _contained(case, placements[case.name], topology) for case in matrix.cases}


def _place(case: Case, offer: Offer, widest: int) -> Placement | str:
    try:
        if case.affinity and sys.platform != "linux":
            return "asks for affinity, which only Linux has"
        return place(case.workers, case.gpus, offer, widest, case.pools)
    except CannotHoldError as error:
        return str(error)


def _listed(case: Case, placement: Placement | str, host: Host) -> Placement | str:
    """A placement on GPUs that the driver lists, as far as that is known, or why there is none."""
    entries = () if isinstance(placement, str) else placement.gpus
    for position, entry in zip(case.gpus, entries, strict=False):
        if host.is_unlisted(entry):
            return (
                f"asks for GPU position {position}: {VISIBLE_DEVICES} has {entry!a} there, the driver lists no such GPU"
            )
    return placement


def _contained(case: Case, placement: Placement | str, topology: tuple[Cpu, ...]) -> Placement | str:
    """A placement in a container, or why there is none."""
    if isinstance(placement, str):
        return placement
    if case.foreign:
        return "is of another trainer, which the image does not hold; run it with --executor local"
    if case.workers == "auto":
        return "names no CPUs for its container; run it with --executor local"
    try:
        return replace(placement, cpuset=choose_cpuset(placement.pools, topology))
    except CannotHoldError as error:
        return str(error)


def _name(case: Case, repeat: int, warmup: int) -> str:
    return f"warmup{warmup}_{case.name}" if warmup else f"{case.name}_r{repeat}"


def _cell(matrix: Matrix, case: Case, repeat: int, warmup: int, placement: Placement | str, prefix: str | None) -> Cell:
    name = _name(case, repeat, warmup)
    identity = f"{prefix}_{name}" if prefix else name
    placed = placement if isinstance(placement, Placement) else None
    gpus, pools = (placed.gpus, placed.pools) if placed else ((), ())
    visible = {VISIBLE_DEVICES: ",".join(gpus)} if gpus else {}
    return Cell(
        id=identity,
        case=case.name,
        repeat=repeat,
        warmup=warmup > 0,
        content_sha256=_content_hash(matrix, case, repeat, warmup),
        world_size=max(1, len(case.gpus)),
        cpu_ids=tuple(chain.from_iterable(pools)) if placed else None,
        gpus=gpus,
        arguments=_arguments(matrix, case, f"{RUNS_DIR}/{identity}", placed),
        environment={"PYTHONUNBUFFERED": "1", **visible, **case.environment},
        skip_reason=None if placed else str(placement),
        foreign=case.foreign,
        cpuset=placed.cpuset if placed else None,
    )


def _arguments(matrix: Matrix, case: Case, run: str, placed: Placement | None) -> tuple[str, ...]:
    pools = placed.pools if placed else ()
    if case.foreign:
        gpus = placed.gpus if placed else ()
        return fill_command(case.command, run, pools, gpus, matrix.iterations)
    # Threads can be pinned on Linux only; elsewhere the trainer refuses a list.
    pinned = any(pools) and sys.platform == "linux"
    return (
        *("--algo", matrix.algo, "--task", matrix.task, "--sim", matrix.sim),
        f"training.log_dir={run}",
        "training.no_play=true",
        *(("training.smoke=true",) if matrix.smoke else ()),
        *((f"training.record_states={CEILING_SNAPSHOTS}",) if matrix.ceiling else ()),
        f"algo.max_iterations={matrix.iterations}",
        *((pinning(pools),) if pinned else ()),
        *matrix.overrides,
        *case.overrides,
    )


def _content_hash(matrix: Matrix, case: Case, repeat: int, warmup: int) -> str:
    """Hash of what a cell asks for; the same on every host and in every order."""
    own = {
        "algo": matrix.algo,
        "task": matrix.task,
        "sim": matrix.sim,
        "smoke": matrix.smoke,
        "overrides": [*matrix.overrides, *case.overrides],
        **({"ceiling": CEILING_SNAPSHOTS} if matrix.ceiling else {}),
    }
    content = {
        **(case.content() if case.foreign else own),
        "iterations": matrix.iterations,
        "environment": case.environment,
        "gpus": list(case.gpus),
        "workers": case.workers,
        "case": case.name,
        "repeat": repeat,
        "warmup": warmup,
        **({"pools": case.pools} if case.pools > 1 else {}),
    }
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def _check_ids(cells: tuple[Cell, ...], source: str = "") -> None:
    seen: set[str] = set()
    for cell in cells:
        if cell.id in seen:
            raise UsageError(f"{source}two cells would be called {cell.id!r}; rename one of the cases")
        seen.add(cell.id)


def _check_transports(matrix: Matrix, cells: tuple[Cell, ...], inherited: Sequence[str]) -> None:
    for cell in (cell for cell in cells if cell.skip_reason is None):
        asked = asked_transport(matrix, cell)
        winning = [name for name in TRANSPORT_VARIABLES if name in inherited or cell.environment.get(name)]
        if asked is not None and winning:
            raise UsageError(
                f"case {cell.case!r} sets {TRANSPORT_KEY}={asked}, but {' and '.join(winning)} of the environment "
                "would win over it; unset what is set"
            )


def _recorded_placement(cell: Cell) -> Placement | str:
    return Placement(cell.pools, cell.gpus, cell.cpuset) if cell.skip_reason is None else cell.skip_reason


def _differing_field(expected: Cell, found: Cell, redacted: bool) -> str | None:
    """Name of the first field that differs. Whether CPUs are pinned depends on the planning host's system."""
    exact = set(Cell.model_fields) - {"arguments", "environment"} - ({"content_sha256"} if redacted else set())
    for name in (name for name in Cell.model_fields if name in exact):
        if getattr(expected, name) != getattr(found, name):
            return name
    if not same_words(_unpinned(expected), _unpinned(found)):
        return "arguments"
    pins = [word for word in found.arguments if word.startswith(PINNING) and not found.foreign]
    if pins and pins != [pinning(found.pools)]:
        return pins[0].partition("=")[0]
    sides = [[f"{name}={value}" for name, value in sorted(cell.environment.items())] for cell in (expected, found)]
    return None if same_words(*sides) else "environment"


def _unpinned(cell: Cell) -> list[str]:
    return [word for word in cell.arguments if cell.foreign or not word.startswith(PINNING)]


def _is_redacted(matrix: Matrix, case: Case) -> bool:
    """Whether what a user typed was replaced, so that the hash of it cannot be computed again."""
    return any(map(PLACEHOLDER.search, [*matrix.overrides, *case.overrides, *case.command, *case.environment.values()]))


def _same_word(one: str, other: str) -> bool:
    if one == other:
        return True
    return any(
        PLACEHOLDER.search(a) is not None and _pattern(a).fullmatch(b) is not None
        for a, b in ((one, other), (other, one))
    )


def _pattern(word: str) -> re.Pattern[str]:
    """What a word with placeholders may have been."""
    text, end = "", 0
    for match in PLACEHOLDER.finditer(word):
        text += re.escape(word[end : match.start()]) + (r"[\w.<>-]+" if match["name"] else r"[/<].*")
        end = match.end()
    return re.compile(text + re.escape(word[end:]))


def _published(trainer: Sequence[str]) -> tuple[str, ...]:
    """The trainer's command as it is recorded: this interpreter is ``python``, paths are redacted."""
    redactor = Redactor()
    return tuple("python" if word == sys.executable else redactor.text(word) for word in trainer)
