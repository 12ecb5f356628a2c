"""`repro scaling`: a quick look at one GPU against several, as a session of its own.

It is for diagnosis: one short run of each, so no interval. Numbers for the record come from a matrix with repeats.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from repro import text
from repro.arguments import build_parser
from repro.busy import require_idle
from repro.errors import HostUnfitError, UsageError
from repro.host import Host, find_host, gpu_label
from repro.layout import RESULT_FILE
from repro.matrix import Case, Comparison, Matrix, Metric, adjust
from repro.output import require_new
from repro.plan import Plan, make_plan
from repro.provenance import find_source
from repro.schema import canonical_json, read_model

RunPlan = Callable[..., int]


def scaling(arguments: argparse.Namespace, trainer: Sequence[str], run_plan: RunPlan) -> int:
    """Run one GPU, then several; print and keep what each gives relative to one.

    Args:
        arguments: Of the command line.
        trainer: Start of every run's command.
        run_plan: Runs a plan into the folder `out_dir`, as `repro run` does.

    Raises:
        UsageError: For indices, iterations, overrides or an output file that cannot be used.
        HostUnfitError: Where this host cannot hold every case, or something else uses a GPU of one.
    """
    from repro.live import LastingStream
    from repro.session import REPORTS, create_out_dir

    require_new(arguments.out_json, "--out-json")
    host, topology = find_host()
    devices = choose_devices(arguments.devices, host)
    matrix = adjust(scaling_matrix(devices), arguments.iterations, None, tuple(arguments.extra_overrides))
    plan = make_plan(matrix, host, topology, find_source(), inherited=list(os.environ), trainer=trainer)
    unfit = [f"{cell.case}: {cell.skip_reason}" for cell in plan.cells if cell.skip_reason is not None]
    if unfit:
        raise HostUnfitError(f"nothing was started: {unfit[0]}; see repro doctor")
    require_idle(plan, host)  # before there is a folder
    label = gpu_label(host.gpus, len(devices))
    out_dir = create_out_dir(REPORTS / f"{plan.created[:10]}_{matrix.name}_{label}_{plan.source.short}")
    with contextlib.redirect_stdout(cast(TextIO, LastingStream(sys.stdout))):
        code = run_plan(build_parser().parse_args(["run"]), plan, host, trainer, out_dir=out_dir)
        found = summarize(plan, devices, out_dir)
        sys.stdout.write(scaling_table(found))
        if arguments.out_json is not None:
            with arguments.out_json.open("x", encoding="utf-8") as stream:
                stream.write(canonical_json(found))
    return code


def choose_devices(asked: str | None, host: Host) -> tuple[int, ...]:
    """Positions within the visible GPUs: those asked for, else the first two or the only one.

    Raises:
        UsageError: For a text that is no list of distinct positions.
        HostUnfitError: Where no GPU can be used.
    """
    if asked is not None:
        words = asked.split(",")
        if not all(word.isascii() and word.isdigit() for word in words) or len(set(map(int, words))) != len(words):
            raise UsageError(f"--devices {asked!a}: give distinct positions within the visible GPUs, as in 0,1 or 0")
    if host.gpu_unusable is not None:
        raise HostUnfitError(f"scaling needs a GPU: {host.gpu_unusable}; on the CPU use repro run --matrix smoke")
    return tuple(map(int, words)) if asked is not None else tuple(range(min(2, len(host.visible_gpus))))


def scaling_matrix(devices: Sequence[int]) -> Matrix:
    """One run on the first device, and one on all of them where there are several."""
    cases = [Case(name="n1", reason="One rank.", gpus=(devices[0],))]
    comparisons: list[Comparison] = []
    if len(devices) > 1:
        name = f"n{len(devices)}"
        reason = f"{len(devices)} ranks, each with environments and a batch of its own."
        cases.append(Case(name=name, reason=reason, gpus=tuple(devices)))
        metrics: dict[str, Metric] = {"steps": "steps_per_second", "rows": "learner_rows_per_second"}
        comparisons += [
            Comparison(name=what, metric=metric, numerator=name, denominator="n1", expected=float(len(devices)))
            for what, metric in metrics.items()
        ]
    return Matrix(
        name="scaling",
        reason="A quick look at one GPU against several, for diagnosis: one short run of each.",
        smoke=False,
        algo="sac",
        task="g1_walk_flat",
        sim="mujoco",
        iterations=60,
        repeats=1,
        warmup=0,
        interval="welch",
        margin=0.05,
        timeout_seconds=900.0,
        overrides=("algo.save_interval=-1",),
        comparisons=tuple(comparisons),
        cases=tuple(cases),
    )


def summarize(plan: Plan, devices: Sequence[int], out_dir: Path) -> dict[str, Any]:
    """Every run with its env steps/s of all collectors and rows/s of all learners, each also relative to one rank."""
    from repro.result import Result

    result = read_model(Result, out_dir / RESULT_FILE)
    one = result.cells[0]
    runs = [
        {
            "ranks": cell.world_size,
            "devices": list(devices[: cell.world_size]),
            "status": cell.status,
            "reason": cell.reason,
            "steps_per_second": cell.steps_per_second,
            "steps_relative": _relative(cell.steps_per_second, one.steps_per_second),
            "learner_rows_per_second": cell.learner_rows_per_second,
            "learner_rows_relative": _relative(cell.learner_rows_per_second, one.learner_rows_per_second),
        }
        for cell in result.cells
    ]
    matrix = plan.matrix
    asked = {"iterations": matrix.iterations, "overrides": list(matrix.overrides)}
    return {"schema_version": 1, **asked, "report": str(out_dir), "verdict": result.verdict, "runs": runs}


def scaling_table(found: dict[str, Any]) -> str:
    """The runs as lines for a terminal."""
    headers = ("ranks", "GPUs", "env steps/s", "of one", "learner rows/s", "of one")
    rows = [
        [
            *(str(run["ranks"]), ",".join(map(str, run["devices"]))),
            *(text.rate(run["steps_per_second"]), text.ratio(run["steps_relative"])),
            *(text.rate(run["learner_rows_per_second"]), text.ratio(run["learner_rows_relative"])),
        ]
        for run in found["runs"]
    ]
    note = (
        f"One run of {found['iterations']} iterations each, no interval: for diagnosis. Environments, batch and pools "
        "grow with the ranks (weak scaling)."
    )
    return f"{text.plain_table(headers, rows, 'rlrrrr')}\n{note}\n"


def _relative(value: float | None, one: float | None) -> float | None:
    return value / one if value is not None and one is not None else None
