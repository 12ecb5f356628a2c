"""`python -m unilab.probes NAME`: run one probe in bounded time and write what it found as JSON."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from unilab.atomic_file import write_atomically
from unilab.config import ALGORITHMS
from unilab.names import AUTO_TRANSPORT, EXIT_FAILED, EXIT_HOST_UNFIT, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from unilab.probes.findings import Check, Findings
from unilab.probes.setting import Setting
from unilab.ranks import VISIBLE_DEVICES
from unilab.transport import Transport, choose_transport

# Each module has `run(setting) -> (checks, measurements)`.
PROBES = {
    "correctness": "unilab.probes.correctness",
    "communication": "unilab.probes.communication",
    "nccl-capture": "unilab.probes.nccl_capture",
}
DEFAULT_ALGO = "sac"
Probe = Callable[[Setting], tuple[list[Check], list[dict[str, Any]]]]
MOST_ON_CPU = 16  # ranks with --smoke, where no count of GPUs bounds them; each is a process with torch


def main(argv: Sequence[str] | None = None) -> int:
    """Run a probe; returns the exit code: 0 passed, 1 failed, 2 wrong usage, 3 host unfit, 130 interrupted."""
    arguments = _parser().parse_intermixed_args(argv)
    try:
        return _probe(arguments)
    except KeyboardInterrupt:
        return _refuse("interrupted", EXIT_INTERRUPTED)


def _probe(arguments: argparse.Namespace) -> int:
    """Check what is asked for, run it and give the findings; returns the exit code."""
    began, backend = time.monotonic(), "gloo" if arguments.smoke else "nccl"
    try:
        entries = choose_entries(arguments.world_size, arguments.smoke, os.environ)
        _check(arguments, backend)
    except LookupError as error:
        return _refuse(error.args[0], EXIT_HOST_UNFIT)
    except ValueError as error:
        return _refuse(str(error), EXIT_USAGE)
    transport = Transport({}, "none", (), "gloo")
    if not arguments.smoke:
        transport = choose_transport(entries, AUTO_TRANSPORT, os.environ)
    environment, overrides = {**os.environ, **transport.variables}, tuple(arguments.overrides)
    setting = Setting(tuple(entries), backend, environment, arguments.compile_loss, arguments.algo, overrides)
    run: Probe = import_module(PROBES[arguments.probe]).run
    checks, measurements = run(setting)
    found = Findings(
        probe=arguments.probe,
        smoke=arguments.smoke,
        backend=backend,
        world_size=len(entries),
        devices=_device_names(len(entries), arguments.smoke),
        versions=_versions(entries, arguments.smoke),
        transport=transport.name,
        settings=_settings(arguments),
        seconds=time.monotonic() - began,
        checks=tuple(checks),
        measurements=tuple(measurements),
    )
    text = json.dumps(found.to_json(), indent=1) + "\n"
    written = _give(text, arguments.output)
    return EXIT_OK if found.passed and written else EXIT_FAILED


def _give(text: str, output: Path | None) -> bool:
    """Write the findings whole or not at all, else print them; returns whether they are where they were asked for."""
    if output is None:
        print(text, end="")
        return True
    try:
        if output.exists() and not output.is_file():  # a device or a pipe, which nothing may replace
            output.write_text(text)
        else:
            write_atomically(output, lambda file: file.write(text.encode()))
    except OSError as error:
        print(text, end="")
        print(f"probe: --output {output}: {error.strerror}; the findings are printed", file=sys.stderr)
        return False
    return True


def _check(arguments: argparse.Namespace, backend: str) -> None:
    """Refuse a command line that asks for nothing that can be probed; settings of a learner are tried.

    Raises:
        ValueError: one line.
    """
    if arguments.probe != "correctness" and arguments.world_size == 1:
        raise ValueError(f"{arguments.probe} is about data between ranks; --world-size must be at least 2")
    if arguments.probe == "nccl-capture" and arguments.smoke:
        raise ValueError("nccl-capture is about graphs on GPUs; there is nothing of it to see with --smoke")
    if arguments.compile_loss and arguments.smoke:
        raise ValueError("--compile-loss compiles on GPUs alone; leave it out with --smoke")
    if arguments.algo not in ALGORITHMS:
        raise ValueError(f"--algo {arguments.algo}: there is {', '.join(ALGORITHMS)}")
    if arguments.probe != "correctness" and (arguments.algo != DEFAULT_ALGO or arguments.overrides):
        raise ValueError(f"{arguments.probe} looks at no learner; leave --algo and settings out")
    if arguments.smoke and arguments.world_size > MOST_ON_CPU:
        raise ValueError(f"--world-size {arguments.world_size}: must be at most {MOST_ON_CPU} with --smoke")
    if arguments.output is not None and arguments.output.is_dir():
        raise ValueError(f"--output {arguments.output} is a folder; name a file in it")
    if arguments.output is not None and not arguments.output.parent.is_dir():
        raise ValueError(f"--output {arguments.output}: there is no folder {arguments.output.parent}")
    if arguments.probe == "correctness":
        from unilab.probes.correctness_rank import configure

        configure(0, backend, arguments.algo, arguments.overrides)


def choose_entries(world_size: int, smoke: bool, environment: Mapping[str, str]) -> list[str]:
    """Entries of CUDA_VISIBLE_DEVICES for so many ranks: the first of those given, else of all GPUs.

    Raises:
        LookupError: where this host shows fewer.
        ValueError: for fewer than one rank.
    """
    if world_size < 1:
        raise ValueError(f"--world-size {world_size}: must be at least 1")
    if smoke:
        return [str(rank) for rank in range(world_size)]
    import torch

    visible = environment.get(VISIBLE_DEVICES)
    given = [entry.strip() for entry in visible.split(",") if entry.strip()] if visible is not None else None
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    entries = given[:there] if given is not None else [str(index) for index in range(there)]
    if len(entries) < world_size:
        raise LookupError(f"--world-size {world_size} needs as many GPUs, this host shows {len(entries)}; try --smoke")
    return entries[:world_size]


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the findings say was asked for."""
    learner = {"algo": arguments.algo, "overrides": arguments.overrides} if arguments.probe == "correctness" else {}
    return {"compile_loss": arguments.compile_loss, **learner}


def _device_names(count: int, smoke: bool) -> tuple[str, ...]:
    """Names of the first visible devices, which are the ranks'."""
    import torch

    return tuple("cpu" if smoke else torch.cuda.get_device_name(index) for index in range(count))


def _versions(entries: Sequence[str], smoke: bool) -> dict[str, str]:
    import torch

    from unilab.gpus import find_gpus

    found = {"torch": str(torch.__version__)}
    if smoke:
        return found
    driver = find_gpus(entries)[1]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return found | {"cuda": str(torch.version.cuda), "nccl": nccl} | ({} if driver is None else {"driver": driver})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m unilab.probes", description=__doc__, allow_abbrev=False)
    parser.add_argument("probe", choices=list(PROBES))
    parser.add_argument("--world-size", type=int, default=2, metavar="N", help="ranks (default 2)")
    parser.add_argument(
        "--algo", default=DEFAULT_ALGO, metavar="A", help="whose learner, for correctness (default sac)"
    )
    parser.add_argument("--compile-loss", action="store_true", help="compile objectives and steps")
    parser.add_argument("--smoke", action="store_true", help="gloo on the CPU in place of NCCL on GPUs")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write JSON to a file, not to the terminal")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the learner, for correctness")
    return parser


def _refuse(message: str, code: int) -> int:
    print(f"probe: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    # A probe that is told to end must end its ranks, which are a process group of their own.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
