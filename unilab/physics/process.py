"""The learner's end of a collector: starts it, waits for its turns, ends it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unilab.channel import DONE, ERROR, READY, SETUP, STOP, Channel, PeerGone, Pipe
from unilab.physics.spec import PhysicsSpec

_PARENT = "UNILAB_PARENT"
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
START_TIMEOUT = 120.0
TURN_TIMEOUT = 120.0
STOP_TIMEOUT = 5.0
STATES_TIMEOUT = 120.0


class CollectorFailed(RuntimeError):  # noqa: N818 - says what happened
    """The collector raised, died or fell silent; the message names which and how."""


class CollectorProcess:
    """One collector child and the channel to it.

    Args:
        spec: the robot and the row layout.
        num_envs: simulations.
        cpu_ids: CPUs of the physics workers, worker i on the i-th; None leaves placement to the system.
        groups: groups of environments that take turns, see `unilab.physics.spec.row_groups`.
        record_states: snapshots of physics inputs that the child has room for.

    Attributes:
        channel: the shared block.
        placement: `[thread id, CPU]` of every physics worker, as the collector reported it.

    Raises:
        CollectorFailed: if the child does not come up.
    """

    def __init__(
        self,
        spec: PhysicsSpec,
        num_envs: int,
        cpu_ids: Sequence[int] | None,
        groups: int = 1,
        record_states: int = 0,
    ) -> None:
        self.channel = Channel.create(spec, num_envs, groups)
        self._process, pipe = _start(self.channel.fd)
        self._pipe: Pipe | None = pipe
        setup = {
            "spec": spec.to_json(),
            "num_envs": num_envs,
            "cpu_ids": None if cpu_ids is None else list(cpu_ids),
            "groups": groups,
            "record_states": record_states,
        }
        try:
            self._send(SETUP, setup)
            ready = self._receive(START_TIMEOUT, READY, "its readiness")
        except BaseException:  # an interrupt too: without an object there is nobody to end the child
            self.close()
            raise
        self.placement: list[tuple[int, int | None]] = ready["placement"]
        self.torch_imported: bool = ready["torch_imported"]

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def command(self, turn: int, recording: tuple[int, int] | None = None) -> None:
        """Let the collector run `turn` with what its rows of the command block hold.

        Args:
            turn: the group's next turn.
            recording: keep what the turn's physics starts from as this snapshot, of this iteration.

        Raises:
            CollectorFailed: if it is gone.
        """
        self._send(turn, recording)

    def retire(self, states: Path | None = None) -> None:
        """Say, in place of the next group's command, that it gets none any more.

        Args:
            states: file for the snapshots taken, written when the last group is retired.

        Raises:
            CollectorFailed: if it is gone.
        """
        self._send(STOP, None if states is None else str(states.absolute()))

    def wait_for_states(self, timeout: float = STATES_TIMEOUT) -> None:
        """Wait until the file that the last `retire` named is written.

        Raises:
            CollectorFailed: if the collector raised, died, or did not answer within `timeout` seconds.
        """
        self._receive(timeout, DONE, "the recorded states")

    def wait(self, turn: int, timeout: float = TURN_TIMEOUT) -> dict[str, int]:
        """Wait until `turn` is published and return its slot header.

        Raises:
            CollectorFailed: if the collector raised, died, or did not answer within `timeout` seconds.
        """
        self._receive(timeout, turn, f"turn {turn}")
        return self.channel.check(turn)

    def close(self) -> None:
        """End the child: ask, then wait, then kill. Safe to call twice."""
        if self._pipe is None:
            return
        try:
            for _ in self.channel.groups:
                self._pipe.send(STOP)
            self._process.wait(STOP_TIMEOUT)
        except (PeerGone, subprocess.TimeoutExpired):
            pass  # gone already, or killed below
        finally:
            self._process.kill()
            self._process.wait()
            self._pipe.close()
            os.close(self.channel.fd)
            self._pipe = None

    def _send(self, signal_: int, payload: Any = None) -> None:
        assert self._pipe is not None, "the collector was closed"
        try:
            self._pipe.send(signal_, payload)
        except PeerGone:
            raise CollectorFailed(self._obituary()) from None

    def _receive(self, timeout: float, expected: int, waiting_for: str) -> Any:
        assert self._pipe is not None, "the collector was closed"
        try:
            signal_, payload = self._pipe.receive(timeout, waiting_for)
        except PeerGone:
            raise CollectorFailed(self._obituary()) from None
        except TimeoutError as error:
            raise CollectorFailed(f"{error} ({timeout:g} s)") from None
        if signal_ == ERROR:
            raise CollectorFailed(f"the collector raised {payload}")
        if signal_ != expected:
            raise CollectorFailed(f"expected {waiting_for} from the collector, got signal {signal_}")
        return payload

    def _obituary(self) -> str:
        try:
            code = self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            return "the collector closed its pipe but is still running"
        return f"the collector {ending(code)}"


def ending(code: int) -> str:
    """How a child process ended, from its return code."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = {"SIGKILL": " (the system kills so when memory runs out)", "SIGBUS": " (shared memory ran out)"}
    return f"was killed by {name}{hint.get(name, '')}"


def _start(memory_fd: int) -> tuple[subprocess.Popen[bytes], Pipe]:
    child_reads, parent_writes = os.pipe()
    parent_reads, child_writes = os.pipe()
    # -P and this process's own path: the child must run the same code, whatever lies in the working folder.
    command = [sys.executable, "-P", "-m", "unilab.collector", "--read-fd", str(child_reads)]
    command += ["--write-fd", str(child_writes), "--memory-fd", str(memory_fd)]
    process = subprocess.Popen(
        command,
        pass_fds=(child_reads, child_writes, memory_fd),
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        process_group=0,
    )
    os.close(child_reads)
    os.close(child_writes)
    return process, Pipe(parent_reads, parent_writes, "collector")


def end_with_parent() -> None:
    """Where `bound_environment` started this process: a termination when its parent dies, however it does. On Linux."""
    parent = os.environ.pop(_PARENT, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != int(parent):  # it died before
        signal.raise_signal(signal.SIGTERM)


def bound_environment() -> dict[str, str]:
    """`child_environment` of a program that calls `end_with_parent`."""
    return {**child_environment(), _PARENT: str(os.getpid())}


def child_environment() -> dict[str, str]:
    """The child's: modules are found where this process finds them."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)}
