#!/usr/bin/env python3
"""A probe that probes nothing; command line, JSON and exit codes as those of `python -m unilab.probes`.

Environment variables:
    FAKE_PROBE    how a probe ends (see `main`): one mode for all, or `probe:mode,probe:mode`; default `ok`
    FAKE_PROBE_LOG  file to which the visible devices and arguments of every call are added
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from unilab.probes.findings import Check, Findings

TORCH = version("torch").partition("+")[0]
# Checks that no probe lacks; the last one can be made to fail.
NAMES = {
    "correctness": ("parameters_equal", "initial_state_equal", "ranks_ended", "gradient_is_mean_of_ranks"),
    "communication": ("ended_x", "values_correct_x"),
    "nccl-capture": ("sync_side_warmed", "sync_default_warmed"),
}


def mode_of(probe: str) -> str:
    """The mode that FAKE_PROBE gives a probe."""
    asked = os.environ.get("FAKE_PROBE", "ok")
    modes = dict(item.split(":") for item in asked.split(",")) if ":" in asked else {probe: asked}
    return modes.get(probe, "ok")


def findings(arguments: argparse.Namespace, mode: str) -> dict[str, Any]:
    """What a probe of this mode finds."""
    probe = "correctness" if mode == "wrong_probe" else arguments.probe
    *always, last = NAMES[probe]
    algo = "sac" if mode == "other_algo" else arguments.algo
    learner = {"algo": algo, "overrides": []} if arguments.probe == "correctness" else {}
    found = Findings(
        probe=probe,
        smoke=arguments.smoke,
        backend="gloo" if arguments.smoke else "nccl",
        world_size=arguments.world_size,
        devices=("cpu" if arguments.smoke else "Fake GPU",) * arguments.world_size,
        versions={"torch": TORCH},
        transport="none" if arguments.smoke else "p2p",
        settings={"compile_loss": arguments.compile_loss, **learner},
        seconds=1.25,
        checks=(
            *(Check(name, True, "the same on 2 ranks: 0123456789abcdef") for name in always),
            Check(last, mode not in ("fail", "contradict"), "largest difference\n3e-8"),
            Check("bits_equal", False, "last bits differ", required=False),
        ),
        measurements=(
            {"operation": "all_reduce", "bytes": 1024, "microseconds": 12.5},
            {"operation": "broadcast", "bytes": 2048, "microseconds": float("nan") if mode == "nan" else 7.25},
            {"host": str(Path.home() / "probe")},
        ),
    )
    content = found.to_json()
    if mode == "none_required":
        content |= {"checks": [], "passed": False}
    if mode == "extra":
        content["host"] = "x"
    return content


def main() -> int:
    """Run the mode."""
    parser = argparse.ArgumentParser()
    parser.add_argument("probe")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--compile-loss", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--algo", default="sac")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    mode = mode_of(arguments.probe)
    if "FAKE_PROBE_LOG" in os.environ:
        with Path(os.environ["FAKE_PROBE_LOG"]).open("a") as file:
            file.write(f"{os.environ.get('CUDA_VISIBLE_DEVICES')} {' '.join(sys.argv[1:-2])}\n")
    print(f"probing in {Path.home()}/probe", flush=True)
    if mode == "crash":
        raise RuntimeError("asked to crash")
    if mode == "hang":
        time.sleep(3600)
    if mode in ("exit2", "exit3"):
        print("probe: as it was asked", file=sys.stderr)
        return int(mode[-1])
    if mode == "garbage":
        arguments.output.write_text("no JSON")
        return 0
    if mode == "silent":
        return 0
    content = findings(arguments, mode)
    arguments.output.write_text(json.dumps(content))
    return 0 if content["passed"] != (mode == "contradict") else 1


if __name__ == "__main__":
    sys.exit(main())
