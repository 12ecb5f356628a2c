"""`repro ab`: whether a change made training faster, by two commits or images that take turns on this host."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Protocol, TextIO, cast

from repro.arguments import build_parser
from repro.busy import warn_busy
from repro.commits import WORKING_TREE, Code, lay_out, require_repository
from repro.docker_executor import DockerExecutor
from repro.doctor import choose_matrix
from repro.dry_run import plan_lines
from repro.errors import HostUnfitError, UsageError
from repro.host import Host, find_host
from repro.images import are_images, open_images
from repro.launch import Runner, local_runner, signals_interrupt
from repro.matrix import AB_MATRIX, Case, Comparison, Matrix, adjust, load_matrix
from repro.place import Cpu
from repro.plan import LOCAL, Cell, Plan, make_plan
from repro.provenance import find_source
from repro.redact import AB_FOLDER, PROJECT
from unilab.names import EXIT_OK

MOST_WARMUPS = 8  # the even number below what a matrix may have
SAME_TRAINER = "Both commits have the same trainer, so that a difference of their rates is the host's."
SAME_TRAINER_IN_IMAGES = (
    "Both images have the same trainer, so that a difference of their rates is that of what else they hold, or the "
    "host's."
)
PROBES_OF_B = "Probes ran with the code of b, the change."
NO_PROBES = "No probe ran: the trainer of b has none."
CEILINGS = (
    "Each side measures the physics ceiling of its runs with its own code: the ratio of ceilings is how the host "
    "drifted, and what a change of the physics gives."
)


class RunPlan(Protocol):
    """Runs a plan into the folder that its arguments name, as `repro run` does."""

    def __call__(
        self,
        arguments: argparse.Namespace,
        plan: Plan,
        host: Host,
        trainer: Sequence[str],
        runner: Callable[[Cell], Runner],
        *,
        roots: Mapping[str, Path],
    ) -> int:
        """Return the exit code."""


def ab(arguments: argparse.Namespace, trainer: Sequence[str], run_plan: RunPlan) -> int:
    """Compare two commits or images in one session; commits lie in a temporary folder meanwhile.

    Args:
        arguments: Of the command line.
        trainer: Start of every run's command.
        run_plan: Runs the plan, or goes on with a session of the same.

    Raises:
        UsageError: For a ref, matrix or setting that cannot be used.
        HostUnfitError: Where this host cannot hold the case, or has no engine or image.
    """
    from repro.live import LastingStream

    host, topology = find_host()
    refs = {"a": arguments.ref_a, "b": arguments.ref_b}
    with signals_interrupt(), contextlib.ExitStack() as stack:
        images: dict[str, Code] = {}
        if are_images(refs):  # they come first: what a run can use is what its image says
            images, host = open_images(stack, refs, host)
        if arguments.require_gpu and host.gpu_unusable is not None:
            raise HostUnfitError(f"--require-gpu: {host.gpu_unusable}; see repro doctor")
        base = _choose(arguments.matrix, host, topology, contained=bool(images))
        code = images or _lay_out(stack, refs)
        executors = {side: one.executor for side, one in code.items() if one.executor is not None}
        plan = _plan(arguments, base, code, host, topology, trainer)
        if not plan.runnable:
            raise HostUnfitError(f"nothing was started: {plan.cells[0].skip_reason}; see repro doctor")
        for executor in executors.values():
            executor.check_gpus(plan)
        if arguments.dry_run:
            warn_busy(plan, host)
            sys.stdout.write("".join(f"{line}\n" for line in [*plan_lines(plan), *plan.remarks]))
            return EXIT_OK
        words = [] if arguments.out is None else [f"--out={arguments.out}"]
        with contextlib.redirect_stdout(cast(TextIO, LastingStream(sys.stdout))):
            roots = {side: one.root for side, one in code.items() if one.root is not None}
            run_arguments = build_parser().parse_args(["run", *words])
            return run_plan(run_arguments, plan, host, trainer, _runner(executors), roots=roots)


def _plan(
    arguments: argparse.Namespace,
    base: Matrix,
    code: Mapping[str, Code],
    host: Host,
    topology: tuple[Cpu, ...],
    trainer: Sequence[str],
) -> Plan:
    matrix = ab_matrix(base, code)
    images = {side: one.executor.facts for side, one in code.items() if one.executor is not None}
    return make_plan(
        adjust(matrix, arguments.iterations, arguments.repeats, tuple(arguments.override)),
        host,
        topology,
        find_source(),
        inherited=() if images else list(os.environ),  # a container inherits nothing
        trainer=trainer,
        executor=images.get("b", LOCAL),
        sources={side: one.source for side, one in code.items()},
        images=images,
        remarks=remarks(base, matrix, code),
    )


def _lay_out(stack: contextlib.ExitStack, refs: Mapping[str, str]) -> dict[str, Code]:
    """The code of both commits in a temporary folder, which goes with the stack."""
    require_repository(PROJECT)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=AB_FOLDER)))
    code = {side: lay_out(ref, folder / side, PROJECT) for side, ref in refs.items()}
    refuse_same(code["a"], code["b"])
    return code


def _runner(executors: Mapping[str, DockerExecutor]) -> Callable[[Cell], Runner]:
    """What runs a cell: the executor of its side's image, else the suite itself."""
    return lambda cell: executors[cell.case].runner(cell) if executors else local_runner(cell)


def refuse_same(a: Code, b: Code) -> None:
    """Refuse to compare code with itself.

    Raises:
        UsageError: Naming it.
    """
    if (a.source.commit, a.source.diff_sha256) == (b.source.commit, b.source.diff_sha256):
        raise UsageError(
            f"{a.ref} and {b.ref} are the same code, {a.source.label}; name two commits, "
            f"or {WORKING_TREE} for a working tree with changes"
        )


def ab_matrix(base: Matrix, code: Mapping[str, Code]) -> Matrix:
    """A matrix of one case in two versions, with a warm-up for each of both.

    Args:
        base: Its settings are kept, and of this trainer's cases that of most ranks, the first of equals.
        code: Of sides a and b.
    """
    case = _widest(base)
    comparisons = [Comparison(name="change", numerator="b", denominator="a", gate=True)]
    if base.ceiling:
        comparisons.append(Comparison(name="host", metric="ceiling", numerator="b", denominator="a"))
    return base.model_copy(
        update={
            "name": AB_MATRIX,
            "reason": f"Does {code['b'].label} (b) train faster than {code['a'].label} (a)? "
            f"Case {case.name} of matrix {base.name}, in turn.",
            "warmup": min(2 * base.warmup, MOST_WARMUPS),
            "benchmarks": False,
            "probes": base.probes if code["b"].has_probes else (),
            "comparisons": tuple(comparisons),
            "cases": tuple(_case(case, side, one) for side, one in code.items()),
        }
    )


def remarks(base: Matrix, matrix: Matrix, code: Mapping[str, Code]) -> list[str]:
    """What a reader must know about both commits or images, one sentence each."""
    a, b = code["a"], code["b"]
    same = SAME_TRAINER if a.executor is None else SAME_TRAINER_IN_IMAGES
    found = [same] if a.source.trainer_sha256 == b.source.trainer_sha256 else []
    if a.dependencies != b.dependencies:
        found.append(_other_dependencies(a, b))
    if base.probes:
        found.append(PROBES_OF_B if matrix.probes else NO_PROBES)
    return [*found, *([CEILINGS] if matrix.ceiling else [])]


def _choose(asked: str, host: Host, topology: tuple[Cpu, ...], contained: bool) -> Matrix:
    """The matrix whose case is compared; which case, and why this matrix, is said on stderr."""
    name, why = choose_matrix(host, topology, contained) if asked == "auto" else (asked, "asked for")
    matrix = load_matrix(name)
    if matrix.learning:
        raise UsageError(f"--matrix {asked} asks what policies learn and gives no verdict on speed; name another")
    if all(case.foreign for case in matrix.cases):
        raise UsageError(f"--matrix {asked} has cases of other trainers alone, in which no commit runs; name another")
    print(f"matrix {matrix.name}: {why}; case {_widest(matrix).name}", file=sys.stderr)
    return matrix


def _widest(matrix: Matrix) -> Case:
    return max((case for case in matrix.cases if not case.foreign), key=lambda case: len(case.gpus))


def _case(case: Case, side: str, code: Code) -> Case:
    reason = f"{'Commit' if code.executor is None else 'Image'} {code.label}, case {case.name}."
    return case.model_copy(update={"name": side, "reason": reason})


def _other_dependencies(a: Code, b: Code) -> str:
    if a.executor is not None:
        sides = (", ".join(sorted(one - other)) for one, other in permutations((a.dependencies, b.dependencies)))
        return "The images hold different versions: {} in a, {} in b.".format(*sides)
    differing = sorted({_package(item) for item in a.dependencies ^ b.dependencies})
    return f"The commits ask for different dependencies ({', '.join(differing)}); both ran with those installed here."


def _package(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return found[0] if found else requirement
