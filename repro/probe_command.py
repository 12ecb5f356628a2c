"""`repro probe`: one probe on this host, as lines or JSON."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from repro import text
from repro.errors import HostUnfitError, UsageError
from repro.host import Host, find_host
from repro.launch import signals_interrupt, trainer_environment
from repro.output import require_new
from repro.plan import VISIBLE_DEVICES
from repro.probe import DEFAULT_ALGO, Asked, Findings, Probed, plain, run_probe
from repro.probes_section import measurement_tables, outcome
from repro.schema import canonical_json
from repro.session_probes import SMOKE_RANKS
from unilab.names import EXIT_FAILED, EXIT_HOST_UNFIT, EXIT_OK, EXIT_USAGE


def probe(arguments: argparse.Namespace) -> int:
    """Run a probe and print what it found; returns the exit code.

    Raises:
        UsageError: If the request is wrong.
        HostUnfitError: If this host cannot run it.
        ChildProcessError: If it ended without findings.
    """
    require_new(arguments.output)
    host, _ = find_host()
    asked = choose(arguments, host)
    variables = {} if asked.smoke else {VISIBLE_DEVICES: ",".join(host.visible_gpus[: asked.world_size])}
    with signals_interrupt(), tempfile.TemporaryDirectory(prefix="repro-probe-") as name:
        log = Path(name) / "logs" / "probe.log"
        log.parent.mkdir()
        probed = run_probe(asked, trainer_environment(os.environ) | variables, Path(name), log)
    if probed.ended.outcome == "interrupted":
        raise KeyboardInterrupt
    if probed.findings is None:
        raise _failure(asked, variables, probed)
    if arguments.output is not None:
        arguments.output.write_text(canonical_json(probed.findings), encoding="utf-8")
    shown = canonical_json(probed.findings) if arguments.json else "\n".join(probe_lines(probed.findings)) + "\n"
    sys.stdout.write(shown)
    return EXIT_OK if probed.findings.passed else EXIT_FAILED


def choose(arguments: argparse.Namespace, host: Host) -> Asked:
    """What to run: without --world-size two ranks, or one where this host shows one GPU.

    Raises:
        UsageError: For fewer than one rank, `nccl-capture` with --smoke, or a learner where the probe looks at none.
        HostUnfitError: If this host shows fewer GPUs.
    """
    name, smoke, ranks = arguments.probe, arguments.smoke, arguments.world_size
    if ranks is not None and ranks < 1:
        raise UsageError(f"--world-size {ranks}: must be at least 1")
    if name != "correctness" and arguments.algo != DEFAULT_ALGO:
        raise UsageError(f"{name} looks at no learner; leave --algo out, or type repro probe correctness")
    on_cpu = "" if name == "nccl-capture" else "; add --smoke to run it with gloo on the CPU"
    if smoke:
        if not on_cpu:
            raise UsageError(f"{name} is about graphs on GPUs; leave --smoke out, on a host with a GPU")
        return Asked(name, ranks or SMOKE_RANKS, True, arguments.compile_loss, arguments.algo)
    if host.gpu_unusable is not None:
        raise HostUnfitError(f"probe {name} needs a GPU, and {host.gpu_unusable}{on_cpu}")
    shown = len(host.visible_gpus)
    if ranks is not None and ranks > shown:
        raise HostUnfitError(
            f"--world-size {ranks} needs {ranks} GPUs, this host shows {shown}; ask for at most {shown}{on_cpu}"
        )
    return Asked(name, ranks or min(SMOKE_RANKS, shown), False, arguments.compile_loss, arguments.algo)


def probe_lines(found: Findings) -> list[str]:
    """What a probe found: where, one line for each check, measurements, and the verdict last."""
    smoke = "SMOKE: " if found.smoke else ""
    width = max((len(check.name) for check in found.checks), default=0)
    verdict = found.detail if found.passed else f"FAILED, {found.detail}"
    return [
        f"{smoke}{found.probe}: {found.setting}; {text.number(found.seconds, 1)} s",
        *(f"{outcome(item):<6}  {item.name:<{width}}  {plain(item.detail)}" for item in found.checks),
        *(line for table in measurement_tables(found) for line in ("", table)),
        *([""] if found.measurements else []),
        f"{smoke}{found.probe}: {verdict}",
    ]


def _failure(asked: Asked, variables: dict[str, str], probed: Probed) -> Exception:
    """The error that a probe without findings becomes."""
    message = f"probe {asked.probe}: {probed.reason}"
    if probed.ended.exit_code == EXIT_USAGE:
        return UsageError(message)
    if probed.ended.exit_code == EXIT_HOST_UNFIT:
        return HostUnfitError(message)
    return ChildProcessError(f"{message}; its whole output: {asked.shell_command(variables)}")
