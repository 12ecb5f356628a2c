"""Processes that try something together, one per rank: started, bounded in time, and all gone at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unilab.names import EXIT_FAILED

LIFELINE = "UNILAB_TRIAL_LIFELINE"  # variable with the descriptor that a rank follows
POLL = 0.02  # s
NO_ANSWER = "no answer within"  # how the fault of a trial that ran out of time begins


@dataclass(frozen=True)
class Trial:
    """How a trial ended.

    Attributes:
        fault: what went wrong first, of every rank that ended badly at that moment; None where all ended well.
        seconds: from the start of the processes to their end.
        logs: what each rank printed, both streams.
    """

    fault: str | None
    seconds: float
    logs: tuple[str, ...]


def try_ranks(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    seconds: float,
    folder: Path,
    meanings: Mapping[int, str] | None = None,
) -> Trial:
    """Run one process per rank; when this returns, none of them or of their children is left.

    Args:
        commands: program and arguments of each rank.
        environments: whole environment of each rank, to which the modules of this process are added.
        seconds: limit of all of them together.
        folder: where their logs are kept while they run.
        meanings: what exit codes say, as in `got wrong values`.
    """
    began = time.monotonic()
    paths = [folder / f"rank{rank}.log" for rank in range(len(commands))]
    followed, lifeline = os.pipe()  # its end-of-file is the death of this process
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for command, environment, path in zip(commands, environments, paths, strict=True):
            ranks.append(_start(command, environment, path, followed, ranks[0].pid if ranks else 0))
        fault = _wait(ranks, began + seconds, seconds, meanings or {})
    finally:
        _end(ranks)
        os.close(followed)
        os.close(lifeline)
    logs = tuple(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    return Trial(fault, time.monotonic() - began, logs)


def end_with_parent() -> None:
    """Let this process, a rank of a trial, end as soon as the one that started it is gone; else it does nothing."""
    name = os.environ.pop(LIFELINE, None)
    if name is None:
        return
    descriptor = int(name)
    os.set_inheritable(descriptor, False)

    def follow() -> None:
        os.read(descriptor, 1)
        os._exit(EXIT_FAILED)

    threading.Thread(target=follow, name="lifeline", daemon=True).start()


def _start(
    command: Sequence[str], environment: Mapping[str, str], log: Path, followed: int, group: int
) -> subprocess.Popen[bytes]:
    """Start a rank in a process group; 0 makes one, of which it is the first."""
    modules = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    with log.open("wb") as output:
        return subprocess.Popen(
            list(command),
            env={**environment, "PYTHONPATH": modules, LIFELINE: str(followed)},
            pass_fds=(followed,),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=group,
        )


def _wait(
    ranks: Sequence[subprocess.Popen[bytes]], deadline: float, seconds: float, meanings: Mapping[int, str]
) -> str | None:
    """Wait until all ranks ended well, or say what went wrong first; of several at once nobody knows which began."""
    while True:
        endings = [_ending(rank.pid, meanings) for rank in ranks]
        failed = [f"rank {rank} {ending}" for rank, ending in enumerate(endings) if ending]
        if failed:
            return ", ".join(failed)
        if all(ending == "" for ending in endings):
            return None
        if time.monotonic() > deadline:
            return f"{NO_ANSWER} {seconds:g} s"
        time.sleep(POLL)


def _ending(pid: int, meanings: Mapping[int, str]) -> str | None:
    """How a child ended, empty if well, None while it runs.

    The child is not waited for, so its id, which is also the group's, is nobody else's until the group is killed.
    """
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    if found.si_code != os.CLD_EXITED:
        return f"was killed by {signal.Signals(found.si_status).name}"
    code = found.si_status
    return meanings.get(code, f"ended with exit code {code}") if code else ""


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    if ranks:
        os.killpg(ranks[0].pid, signal.SIGKILL)
    for rank in ranks:
        rank.wait()
