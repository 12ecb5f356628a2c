"""Whether ranks learn as one: equal starts, averaged gradients, equal states, skips, and the same by CUDA graphs.

Every rank has rows and first weights of its own; `unilab/probes/correctness_rank.py` is its program.
"""

from __future__ import annotations

import time
from typing import Any

from unilab.probes.findings import Check, join_parts
from unilab.probes.setting import Run, Setting
from unilab.provenance import redact

PROGRAM = "unilab.probes.correctness_rank"
SMOKE_SECONDS, GPU_SECONDS, COMPILING_SECONDS = 90.0, 300.0, 600.0
ENDING_LIMIT = 30.0  # seconds from the release of the graphs to the end of the processes
LINE = 200  # characters of a log's last line


def run(
    setting: Setting, program: str = PROGRAM, seconds: float | None = None
) -> tuple[list[Check], list[dict[str, Any]]]:
    """Run the ranks and judge what they found.

    Args:
        setting: where.
        program: module of one rank.
        seconds: limit of all ranks together; by default what the setting needs.

    Returns:
        Checks, and measurements, of which there are none.
    """
    limit = _limit(setting) if seconds is None else seconds
    asked = {"algo": setting.algo, "overrides": list(setting.overrides), "compile_loss": setting.compile_loss}
    done = setting.run(program, {**asked, "seconds": limit}, limit)
    return [*join_parts(done.parts), _check_ending(done, time.monotonic())], []


def _limit(setting: Setting) -> float:
    if setting.backend == "gloo":
        return SMOKE_SECONDS
    return COMPILING_SECONDS if setting.compile_loss else GPU_SECONDS


def _check_ending(done: Run, now: float) -> Check:
    """Every rank came to its end, and soon after it began to leave."""
    absent = [str(rank) for rank, part in enumerate(done.parts) if "leaving" not in part.facts]
    if done.fault is not None or absent:
        fault = done.fault or f"rank {', '.join(absent)} ended before its last check"
        return Check("ranks_ended", False, "; ".join([fault, *_last_words(done)]))
    slowest = max(now - part.facts["leaving"] for part in done.parts)
    return Check("ranks_ended", slowest <= ENDING_LIMIT, f"every rank, {slowest:.1f} s after it began to leave")


def _last_words(done: Run) -> list[str]:
    """Where each rank was, and the last line it printed."""
    words = []
    for rank, (part, log) in enumerate(zip(done.parts, done.logs, strict=True)):
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        said = f": {redact(lines[-1])[:LINE]}" if lines else ""
        words.append(f"rank {rank} at {part.facts.get('stage', 'its beginning')!r}{said}")
    return words
