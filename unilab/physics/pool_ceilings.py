"""The physics ceiling of several pools: one process each, which step the same states in the same window.

Every process builds its pool and warms up, then all start together and go on until the program says stop. Only rounds
that ended before that count, so all pools were busy throughout what is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from unilab.channel import DONE, ERROR, READY, SETUP, STOP, PeerGone, Pipe
from unilab.names import EXIT_FAILED, EXIT_OK, SCHEMA_VERSION
from unilab.physics.pinning import check_cpu_ids
from unilab.physics.process import child_environment, ending
from unilab.physics.states import load_states
from unilab.physics.stepping import Round, Times, step_states, with_profile

GO, COUNTED = 1, 2  # signals beside those of a collector: all pools are ready; a round was counted
LIMIT = 600.0  # s, for building a pool and for one round over all snapshots
PATIENCE = 1e6  # s; the program's death is seen at once, as end-of-file
NO_C_LOOP = "several pools are timed without it"


@dataclass(frozen=True)
class Job:
    """What every pool does.

    Attributes:
        states: file of recorded states.
        profile: solver path; None takes that of the run.
        groups: groups of simulations that take turns.
        c_loop: whether a C loop was asked for.
    """

    states: Path
    profile: str | None
    groups: int
    c_loop: bool = False


def step_together(job: Job, pools: Sequence[list[int]], seconds: float) -> dict[str, Any]:
    """Step the same states in several pools at the same time.

    Args:
        job: what each of them steps.
        pools: CPUs of each pool's workers, at least two pools.
        seconds: how long; longer where a pool has not made a round by then.

    Returns:
        The sum of the pools' rates, and of each pool what one pool alone prints.

    Raises:
        ValueError: if CPUs or states do not fit.
        RuntimeError: if a pool failed or died.
    """
    _check_pools(pools)
    workers: list[_PoolProcess] = []
    try:
        for number, pool in enumerate(pools):
            workers.append(_PoolProcess(number, job, pool))
        for worker in workers:
            worker.wait_for(READY)
        began = time.monotonic()
        for worker in workers:
            worker.send(GO)
        for worker in workers:
            worker.wait_for(COUNTED)
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        stopped = time.monotonic()
        for worker in workers:
            worker.send(STOP, stopped)
        found = [worker.wait_for(DONE) for worker in workers]
    finally:
        for worker in workers:
            worker.close()
    rate = sum(pool["env_steps_per_second"] for pool in found)
    return {"schema_version": SCHEMA_VERSION, "env_steps_per_second": rate, "pools": found}


def _check_pools(pools: Sequence[list[int]]) -> None:
    owned: set[int] = set()
    for pool in pools:
        check_cpu_ids(pool, key="--cpu-ids")
        twice = sorted(owned & set(pool))
        if twice:
            raise ValueError(f"--cpu-ids gives CPU {twice[0]} to two pools; give it to one")
        owned |= set(pool)


class _PoolProcess:
    """The program's end of one pool. The child dies with it, since its pipe then ends."""

    def __init__(self, number: int, job: Job, cpu_ids: list[int]) -> None:
        self._name = f"pool {number}"
        child_reads, parent_writes = os.pipe()
        parent_reads, child_writes = os.pipe()
        command = [sys.executable, "-P", "-m", __spec__.name]
        command += ["--read-fd", str(child_reads), "--write-fd", str(child_writes)]
        try:
            self._process = subprocess.Popen(
                command, pass_fds=(child_reads, child_writes), env=child_environment(), stdin=subprocess.DEVNULL
            )
        except BaseException:
            os.close(parent_reads)
            os.close(parent_writes)
            raise
        finally:
            os.close(child_reads)
            os.close(child_writes)
        self._pipe = Pipe(parent_reads, parent_writes, self._name)
        try:
            self.send(SETUP, {**asdict(job), "states": str(job.states), "cpu_ids": cpu_ids})
        except BaseException:
            self.close()
            raise

    def send(self, word: int, payload: Any = None) -> None:
        """Send a signal.

        Raises:
            RuntimeError: if the process is gone.
        """
        try:
            self._pipe.send(word, payload)
        except PeerGone:
            raise RuntimeError(self._obituary()) from None

    def wait_for(self, word: int) -> Any:
        """Wait for a signal and return what came with it.

        Raises:
            ValueError: if the process refused its job.
            RuntimeError: if it failed, died or did not answer.
        """
        try:
            found, payload = self._pipe.receive(LIMIT, "its next word")
        except PeerGone:
            raise RuntimeError(self._obituary()) from None
        except TimeoutError as error:
            raise RuntimeError(f"{error} ({LIMIT:g} s)") from None
        if found == ERROR:
            raise (ValueError if payload["usage"] else RuntimeError)(payload["message"])
        assert found == word, (found, word)
        return payload

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def _obituary(self) -> str:
        return f"{self._name} {ending(self._process.wait(LIMIT))}"


class _Program:
    """The child's end: a thread hears what the program says, and ends this process when the program is gone."""

    def __init__(self, pipe: Pipe) -> None:
        self.send = pipe.send
        self._pipe, self._go = pipe, threading.Event()
        self._stopped: float | None = None
        self.setup: dict[str, Any] = pipe.receive(LIMIT, "the setup")[1]
        threading.Thread(target=self._listen, name="program", daemon=True).start()

    def rounds(self, pool: Round, _: Round | None) -> tuple[Times, Times]:
        """Warm up, wait for the others, and make rounds until the program says stop; those that ended later are left
        out.
        """
        own, ends = Times([pool()]), [0.0]
        self.send(READY)
        self._go.wait()
        while self._stopped is None:
            own.rounds.append(pool())
            ends.append(time.monotonic())  # one clock for all processes
            if len(ends) == 2:
                self.send(COUNTED)
        return Times([times for times, end in zip(own.rounds, ends, strict=True) if end <= self._stopped]), Times()

    def _listen(self) -> NoReturn:
        try:
            while True:
                word, payload = self._pipe.receive(PATIENCE, "its next word")
                if word == GO:
                    self._go.set()
                elif word == STOP:
                    self._stopped = payload
        except (PeerGone, TimeoutError):
            os._exit(EXIT_FAILED)


def _serve(program: _Program) -> None:
    setup = program.setup
    states = with_profile(load_states(Path(setup["states"])), setup["profile"])
    found = step_states(states, setup["cpu_ids"], setup["groups"], program.rounds)
    program.send(DONE, {**found, "c_loop_reason": NO_C_LOOP if setup["c_loop"] else None})


def _main() -> int:
    parser = argparse.ArgumentParser(description="internal: started by unilab.physics.ceiling", allow_abbrev=False)
    for name in ("read-fd", "write-fd"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program decides when to stop
    program = _Program(Pipe(arguments.read_fd, arguments.write_fd, "ceiling program"))
    try:
        _serve(program)
    except Exception as error:  # whatever it is, the program says it in one line
        message = str(error) or type(error).__name__
        with contextlib.suppress(PeerGone):
            program.send(ERROR, {"message": message, "usage": isinstance(error, ValueError)})
        return EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(_main())
