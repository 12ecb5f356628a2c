"""The command line of the suite: every flag, and nothing else."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn, get_args

from repro.matrix import ProbeName, builtin_names
from unilab.names import EXIT_USAGE, TOTAL_FPS


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and where help is, exit 2."""
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse what is unknown here: the parser of the whole command line cannot say whose it is."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def build_parser() -> Parser:
    """Build the parser; a test lists every flag, so a change here is a change of the interface."""
    parser = Parser(prog="repro", description="Run, measure, report and verify training matrices.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, summary, add in (
        ("doctor", "what this host can run", _add_doctor),
        ("plan", "cells, order, placement and time of a matrix; starts nothing", _add_plan),
        ("run", "run a matrix and write its report", _add_run),
        ("scaling", "a quick look at one GPU against several, for diagnosis", _add_scaling),
        ("ab", "whether a change made training faster: two commits or images, interleaved on this host", _add_ab),
        ("analyze", "the metric of one run", _add_analyze),
        ("probe", "whether ranks compute, communicate and capture as they must", _add_probe),
        ("report", "compute and render a report again from its raw files", _add_report),
        ("verify", "check reports against their raw files", _add_verify),
        ("gate", "judge a report against a baseline; exit 1 on a regression or a failed probe", _add_gate),
        ("bench", "short benchmarks of this host; nothing is published", _add_bench),
    ):
        add(commands.add_parser(name, help=summary, description=summary, allow_abbrev=False))
    return parser


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--matrix", metavar="M", help="look at this matrix only; exit 3 if the host cannot hold it")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_selection(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_selection(parser)
    parser.add_argument("--out", metavar="DIR", type=Path, help="report folder; -2, -3 … is appended if it has content")
    parser.add_argument("--prefix", metavar="P", help="start of every run's name")
    parser.add_argument(
        "--override", metavar="K=V", action="append", default=[], help="a trainer setting of every run; repeatable"
    )
    parser.add_argument("--trace", action="store_true", help="every run writes a timeline for ui.perfetto.dev")
    parser.add_argument("--timeout", metavar="S", type=float, help="seconds before a run is ended")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the session in --out: run what has no number yet"
    )
    parser.add_argument(
        "--executor", choices=("local", "docker"), default="local", help="docker: each run in a container of its own"
    )
    parser.add_argument("--image", metavar="NAME", help="image of the containers (default unilab-repro:cuda or :cpu)")
    parser.add_argument("--require-gpu", action="store_true", help="exit 3 where no GPU can be used")
    parser.add_argument("--fail-fast", action="store_true", help="stop after the first run without a number")
    parser.add_argument("--dry-run", action="store_true", help="print commands, environment, placement; start nothing")


def _add_ab(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "ref_a", metavar="REF_A", help="what was before: a commit, . for the working tree, or image:NAME"
    )
    parser.add_argument("ref_b", metavar="REF_B", help="the change: another commit, . or another image:NAME")
    parser.add_argument(
        "--matrix", metavar="M", default="auto", help="its case of most ranks is run (default: auto, widest that fits)"
    )
    parser.add_argument("--repeats", metavar="R", type=int, help="measured runs of each side")
    parser.add_argument("--iterations", metavar="I", type=int, help="training iterations of a run")
    parser.add_argument("--out", metavar="DIR", type=Path, help="report folder; -2, -3 … is appended if it has content")
    parser.add_argument(
        "--override", metavar="K=V", action="append", default=[], help="a trainer setting of every run; repeatable"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the session in --out: run what has no number yet"
    )
    parser.add_argument("--require-gpu", action="store_true", help="exit 3 where no GPU can be used")
    parser.add_argument("--dry-run", action="store_true", help="print commands, environment, placement; start no run")


def _add_selection(parser: argparse.ArgumentParser) -> None:
    shipped = ", ".join(builtin_names())
    parser.add_argument(
        "cases",
        metavar="CASE",
        nargs="*",
        help="only these cases of --matrix, or of the one shipped matrix that has them",
    )
    parser.add_argument("--matrix", metavar="NAME|FILE", help=f"{shipped}, a TOML file, or auto (widest that fits)")
    parser.add_argument("--repeats", metavar="R", type=int, help="measured runs of each case")
    parser.add_argument("--iterations", metavar="I", type=int, help="training iterations of a run")


def _add_scaling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--iterations", metavar="I", type=int, help="training iterations of a run (default 60)")
    parser.add_argument(
        "--devices", metavar="N,N", help="positions within the visible GPUs; one runs one GPU only (default: first two)"
    )
    parser.add_argument("--extra-overrides", metavar="K=V", nargs="+", default=[], help="trainer settings of every run")
    parser.add_argument("--out-json", metavar="FILE", type=Path, help="also write the results to a new file")


def _add_analyze(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder with one TensorBoard event file")
    parser.add_argument("--tag", metavar="T", default=TOTAL_FPS, help=f"events to use (default {TOTAL_FPS})")
    parser.add_argument("--tail", metavar="F", type=float, default=0.5, help="last part of the events (default 0.5)")
    parser.add_argument("--output", metavar="FILE", type=Path, help="also write JSON to a new file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_probe(parser: argparse.ArgumentParser) -> None:
    names = get_args(ProbeName)
    parser.add_argument("probe", metavar="PROBE", choices=names, help=", ".join(names))
    parser.add_argument(
        "--world-size", metavar="N", type=int, help="ranks, on the first N visible GPUs (default 2, or 1 with one GPU)"
    )
    parser.add_argument("--algo", metavar="A", default="sac", help="whose learner, for correctness (default sac)")
    parser.add_argument("--compile-loss", action="store_true", help="compile objectives and steps")
    parser.add_argument("--smoke", action="store_true", help="gloo on the CPU in place of NCCL on GPUs")
    parser.add_argument("--output", metavar="FILE", type=Path, help="also write JSON to a new file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="report folder")
    parser.add_argument("--check", action="store_true", help="write nothing, compare bytes; exit 1 if they differ")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "out_dir", metavar="OUT_DIR", type=Path, nargs="?", help="report folder (default: all of reports/)"
    )


def _add_gate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("current", metavar="CURRENT", type=Path, help="report folder to judge")
    parser.add_argument("--baseline", metavar="BASE", type=Path, required=True, help="report folder to compare with")
    parser.add_argument(
        "--max-drop", metavar="F", type=float, default=0.05, help="relative loss that is tolerated (default 0.05)"
    )
    parser.add_argument("--junit", metavar="FILE", type=Path, help="also write JUnit XML to a new file")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART", parser_class=Parser)
    for name, summary, add in (
        ("physics", "the mj_step ceiling, beside a plain C loop", _add_bench_physics),
        ("learner", "milliseconds of an update cycle: eager, Inductor, CUDA graph, both", _add_bench_learner),
        ("tick", "where the time of a tick goes, from a short run", _add_bench_tick),
    ):
        add(parts.add_parser(name, help=summary, description=summary, allow_abbrev=False))


def _add_bench_physics(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--states", metavar="FILE", type=Path, help="recorded states (default: record a short training)"
    )
    parser.add_argument("--workers", metavar="N,N", help="worker counts (default: one, all CPUs but one, all)")
    parser.add_argument("--profiles", metavar="P,P", help="solver paths (default: reference,exact,fast)")
    parser.add_argument("--seconds", metavar="S", type=float, default=4.0, help="of each measurement (default 4)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_bench_learner(parser: argparse.ArgumentParser) -> None:
    _add_bench_common(parser)
    parser.add_argument(
        "--variants",
        metavar="A,B",
        help="some of eager,inductor,graph,inductor+graph and flashsac's inductor-loss,inductor-loss+graph,eager-reads "
        "(default: all)",
    )
    parser.add_argument("--cycles", metavar="N", type=int, default=50, help="cycles to time (default 50)")


def _add_bench_tick(parser: argparse.ArgumentParser) -> None:
    _add_bench_common(parser)
    parser.add_argument("--iterations", metavar="I", type=int, default=100, help="training iterations (default 100)")


def _add_bench_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="trainer settings")
    parser.add_argument("--algo", metavar="A", default="sac", help="algorithm, as in flashsac (default sac)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output", metavar="FILE", type=Path, help="also write JSON to a new file")
