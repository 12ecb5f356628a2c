"""Which CPU a thread may run on (Linux): the masks of the physics workers; and what CPU that is."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

LINUX = sys.platform.startswith("linux")
_TASKS = Path("/proc/self/task")


def allowed_cpus() -> list[int]:
    """CPUs the calling thread may run on, ascending; all of the machine's where the system keeps no mask."""
    if LINUX:
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_model() -> str:
    """Name of the CPU, as the kernel gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def thread_ids() -> set[int]:
    """Kernel ids of this process's running threads; elsewhere than on Linux only the calling thread's."""
    if LINUX:
        return {int(task.name) for task in _TASKS.iterdir()}
    return {threading.get_native_id()}


def check_cpu_ids(cpu_ids: Sequence[int], allowed: Sequence[int] | None = None, key: str = "env.cpu_ids") -> None:
    """Refuse a list of CPUs that physics workers cannot be pinned to, one each.

    Args:
        cpu_ids: CPUs, worker i on the i-th.
        allowed: CPUs that may be named; None takes the calling thread's mask.
        key: the setting that holds the list, for the message.

    Raises:
        ValueError: if the list is empty, names a CPU twice or one that is not allowed, or if the system has no thread
            masks.
    """
    asked = f"{key}={list(cpu_ids)}"
    if not LINUX:
        raise ValueError(f"{asked}: pinning needs Linux, this is {sys.platform}; use null")
    if not cpu_ids:
        raise ValueError(f"{asked} names no CPU; list at least one, or use null for no pinning")
    repeated = sorted({cpu for cpu in cpu_ids if list(cpu_ids).count(cpu) > 1})
    if repeated:
        raise ValueError(f"{asked} names CPU {repeated[0]} twice; list each CPU once")
    usable = allowed_cpus() if allowed is None else list(allowed)
    outside = [cpu for cpu in cpu_ids if cpu not in usable]
    if outside:
        raise ValueError(f"{asked} names CPU {outside[0]}, which this process may not use; allowed: {usable}")


def confine(thread: int, cpus: Collection[int]) -> None:
    """Let `thread` run on `cpus` only, and read back that the kernel took exactly this mask.

    The kernel narrows a mask to the process's cpuset without saying so.

    Args:
        thread: kernel thread id.
        cpus: CPU numbers.

    Raises:
        ValueError: if the kernel refused the mask or kept another one.
        ProcessLookupError: if there is no such thread.
    """
    asked = sorted(cpus)
    try:
        os.sched_setaffinity(thread, asked)
    except ProcessLookupError:
        raise
    except OSError as error:
        raise ValueError(f"cannot pin thread {thread} to CPU {_listed(asked)}: {error.strerror}") from None
    kept = sorted(os.sched_getaffinity(thread))
    if kept != asked:
        raise ValueError(f"cannot pin thread {thread} to CPU {_listed(asked)}: the kernel kept CPU {_listed(kept)}")


def confine_process(cpus: Collection[int]) -> None:
    """`confine` every running thread of this process; threads that end meanwhile are passed over.

    Raises:
        ValueError: as `confine`.
    """
    for thread in thread_ids():
        try:
            confine(thread, cpus)
        except ProcessLookupError:
            continue


def _listed(cpus: Sequence[int]) -> str:
    return ", ".join(map(str, cpus))
