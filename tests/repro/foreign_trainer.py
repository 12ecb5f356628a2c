#!/usr/bin/env python3
"""Another trainer: it knows nothing of the suite, and leaves TensorBoard events and files of its own.

Command line: `foreign_trainer.py --out DIR --iterations N [--cpus LIST] [--mode MODE]`. One iteration is 64 env steps
and takes 10 ms of made-up wall time, so its rate is 6400 env steps/s; the step of an event is its iteration.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

MODES = ("ok", "sub", "several", "none", "exit3")
TAG = "rollout/fps"


def write_events(folder: Path, iterations: int) -> None:
    """As TensorBoard's writer does it: the file's name carries the host's."""
    writer = EventFileWriter(str(folder))
    for i in range(iterations):
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in ((TAG, 1.0), ("Perf/exposed_ms", 5.0))]
        writer.add_event(Event(step=i, wall_time=1_790_000_000.0 + 0.01 * i, summary=Summary(value=values)))
    writer.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--cpus", default="")
    parser.add_argument("--mode", choices=MODES, default="ok")
    arguments = parser.parse_args()
    out: Path = arguments.out
    if arguments.mode == "exit3":
        return 3
    out.mkdir(parents=True)
    if arguments.mode != "none":
        write_events(out / "tb" if arguments.mode in ("sub", "several") else out, arguments.iterations)
    if arguments.mode == "several":
        write_events(out / "eval", arguments.iterations)
    facts = {"cpus": arguments.cpus, "mask": sorted(os.sched_getaffinity(0)), "path": os.environ.get("PYTHONPATH")}
    (out / "facts.json").write_text(json.dumps(facts))
    (out / "settings.yaml").write_text(f"out: {out}\nhome: {Path.home()}/x\n")
    (out / "config.json").write_text("this is not JSON")  # names of this project mean nothing in another
    (out / "run_end.json").write_text("[]")
    (out / "latest").symlink_to(out / "facts.json")
    (out / "model.bin").write_bytes(b"\0\1\2")
    return 0


if __name__ == "__main__":
    sys.exit(main())
