"""Which process a container belongs to, written so that a later session can tell whether that one still lives."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")
BOOT = Path("sys/kernel/random/boot_id")
NAMESPACE = Path("self/ns/pid")


def own_label(proc: Path = PROC) -> str:
    """Boot, process-id namespace, process id and start time of this process; ids are given again, all four are not."""
    return "/".join((_boot(proc), _namespace(proc), str(os.getpid()), str(_start_time(proc, str(os.getpid())))))


def is_dead(label: str, running: bool, proc: Path = PROC) -> bool:
    """Whether the process of a label is gone for certain; what cannot be seen from here counts as alive.

    Args:
        label: As `own_label` wrote it.
        running: Whether the container runs. One of another boot does not, unless another machine uses this engine.
        proc: Where the kernel describes processes.
    """
    parts = label.split("/")
    if len(parts) != 4:
        return False
    boot, namespace, pid, started = parts
    if boot != _boot(proc):
        return not running
    return namespace == _namespace(proc) and _start_time(proc, pid) != started


def _boot(proc: Path) -> str:
    return (proc / BOOT).read_text().strip()


def _namespace(proc: Path) -> str:
    return str((proc / NAMESPACE).readlink())


def _start_time(proc: Path, pid: str) -> str | None:
    """Start of a process in clock ticks since the boot; None where it is gone, or dead and not yet waited for."""
    try:
        fields = (proc / pid / "stat").read_text().rpartition(")")[2].split()  # the name before may hold anything
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]
