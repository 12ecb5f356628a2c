"""`python -m unilab.physics.ceiling`: how fast this host steps the states of a run when it does nothing else."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from unilab.names import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from unilab.physics.pinning import LINUX, allowed_cpus
from unilab.physics.pool_ceilings import Job, step_together
from unilab.physics.spec import GROUP_COUNTS, PROFILES
from unilab.physics.states import load_states
from unilab.physics.stepping import rounds_for, step_states, with_profile

SECONDS = 2.0
GROUPS = 2  # as env.physics_groups


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"ceiling: {message}; see --help", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print or write one JSON object; returns the exit code.

    Args:
        argv: arguments after the program's name; None takes the process's own.
    """
    arguments = _parser().parse_args(argv)
    try:
        _check_output(arguments.output)
        text = json.dumps(_measure(arguments), sort_keys=True) + "\n"
        if arguments.output is None:
            sys.stdout.write(text)
        else:
            arguments.output.write_text(text, encoding="utf-8")
    except ValueError as error:
        return _refuse(str(error), EXIT_USAGE)
    except (MemoryError, OSError, RuntimeError) as error:
        return _refuse(str(error) or type(error).__name__, EXIT_FAILED)
    except KeyboardInterrupt:
        return _refuse("interrupted", EXIT_INTERRUPTED)
    return EXIT_OK


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    pools: list[list[int]] = arguments.cpu_ids or []
    if len(pools) > 1:
        job = Job(arguments.states, arguments.profile, arguments.groups, arguments.c_loop)
        return step_together(job, pools, arguments.seconds)
    states = with_profile(load_states(arguments.states), arguments.profile)
    cpu_ids = pools[0] if pools else _chosen_cpus(arguments.workers)
    return step_states(states, cpu_ids, arguments.groups, rounds_for(arguments.seconds), arguments.c_loop)


def _check_output(path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"--output {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise ValueError(f"--output {path}: there is no folder {path.parent}; make it first or name another file")


def _chosen_cpus(workers: int | None) -> list[int] | None:
    """CPUs of the workers: so many of the allowed ones, or as training chooses: all but the first."""
    allowed = allowed_cpus()
    if workers is None:
        return (allowed[1:] or allowed) if LINUX else None
    if not LINUX:
        raise ValueError(f"--workers {workers}: pinning needs Linux, this is {sys.platform}; leave it out")
    if not 1 <= workers <= len(allowed):
        raise ValueError(f"--workers {workers}: this process may use {len(allowed)} CPUs; use 1 to {len(allowed)}")
    return allowed[:workers]


def _parser() -> _Parser:
    parser = _Parser(prog="python -m unilab.physics.ceiling", description=__doc__, allow_abbrev=False)
    parser.add_argument("--states", metavar="FILE", type=Path, required=True, help="recorded states of a run")
    cpus = parser.add_mutually_exclusive_group()
    cpus.add_argument(
        "--cpu-ids",
        metavar="0,1,…",
        type=_numbers,
        action="append",
        help="CPUs of the workers, worker i on the i-th; given several times: as many pools at the same time",
    )
    cpus.add_argument("--workers", metavar="N", type=int, help="workers, on the first allowed CPUs")
    parser.add_argument("--profile", choices=PROFILES, help="solver path (default: that of the run)")
    parser.add_argument("--seconds", metavar="S", type=_seconds, default=SECONDS, help="how long (default 2)")
    parser.add_argument("--groups", type=int, default=GROUPS, choices=GROUP_COUNTS, help="as the run's (default 2)")
    parser.add_argument("--c-loop", action="store_true", help="also time a plain C loop")
    parser.add_argument("--output", metavar="FILE", type=Path, help="write there instead of printing")
    return parser


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of CPUs; write numbers with commas, as in 0,1,2")
    return [int(part) for part in parts]


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 3600:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0 and below 3600")
    return value


def _refuse(message: str, code: int) -> int:
    print(f"ceiling: {' '.join(message.splitlines())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
