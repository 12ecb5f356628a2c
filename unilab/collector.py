"""The collector: a child process that does nothing but step physics on its CPU list.

Started as `python -m unilab.collector` with three inherited descriptors. It holds no actor and never imports torch.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
import threading
import time
import traceback
from itertools import count
from pathlib import Path

from unilab.channel import DONE, ERROR, READY, SETUP, SLOTS, STOP, Channel, PeerGone, Pipe
from unilab.physics.mujoco_pool import MujocoPool
from unilab.physics.pinning import confine
from unilab.physics.spec import PhysicsSpec
from unilab.physics.states import StateRecorder
from unilab.stacks import print_stacks_on_signal

# A learner may compile for minutes before the first command; its death is seen at once, as end-of-file.
COMMAND_TIMEOUT = 1800.0
SWITCH_INTERVAL = 1e-4  # seconds; the pool must not wait long for the carrier to let go of the interpreter


class Collector:
    """Serves turns: takes the command, steps the rows of the turn's group, publishes them.

    The calling thread does nothing but step. Another thread, the carrier, applies commands and packs rows, so that with
    two groups the pool steps one while the other is packed, learned from and commanded.

    Args:
        pipe: signals from and to the learner.
        memory_fd: descriptor of the channel's shared block.
    """

    def __init__(self, pipe: Pipe, memory_fd: int) -> None:
        self._pipe = pipe
        signal_, setup = pipe.receive(COMMAND_TIMEOUT, "the setup")
        if signal_ != SETUP:
            raise RuntimeError(f"expected the setup first, got signal {signal_}")
        spec = PhysicsSpec.from_json(setup["spec"])
        self._cpu_ids: list[int] | None = setup["cpu_ids"]
        self._pool = MujocoPool(spec, setup["num_envs"], self._cpu_ids)
        self._channel = Channel(memory_fd, spec, setup["num_envs"], setup["groups"])
        self._recorder = StateRecorder(self._pool, setup["record_states"])
        self._states_path: str | None = None
        self._due: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._stepped: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._applied = [(0, 0)] * len(self._channel.groups)
        self._failure: Exception | None = None
        pipe.send(READY, {"placement": self._pool.placement, "torch_imported": "torch" in sys.modules})

    def serve(self) -> None:
        """Step turn after turn until the learner says stop.

        Raises:
            Exception: whatever the carrier died of, after the step in flight.
        """
        sys.setswitchinterval(SWITCH_INTERVAL)
        threading.Thread(target=self._carry_until_stopped, name="carrier", daemon=True).start()
        while (turn := self._due.get()) is not None:
            began = time.monotonic_ns()
            self._pool.step(self._channel.rows(turn))
            self._stepped.put((began, time.monotonic_ns()))
        if self._failure is not None:
            raise self._failure
        if self._states_path is not None:
            self._recorder.write(Path(self._states_path))
            self._pipe.send(DONE)

    def _carry_until_stopped(self) -> None:
        try:
            if self._cpu_ids is not None:  # any CPU of the list, not only that of the thread it was started from
                confine(threading.get_native_id(), self._cpu_ids)
            self._carry()
        except Exception as error:  # raised again by `serve`
            self._failure = error
        self._due.put(None)

    def _carry(self) -> None:
        """Turn by turn: publish what the group stepped last, then take over its next command."""
        groups = len(self._channel.groups)
        running = [False] * groups
        for turn in count():
            group = turn % groups
            if running[group]:
                self._publish(turn - groups)
            running[group] = self._accept(turn)
            if not any(running):
                return

    def _accept(self, turn: int) -> bool:
        """Apply the command of `turn`; false if there is none any more."""
        signal_, payload = self._pipe.receive(COMMAND_TIMEOUT, "a command")
        if signal_ == STOP:
            self._states_path = self._states_path or payload
            return False
        if signal_ != turn:
            raise RuntimeError(f"turn {signal_} was commanded when turn {turn} was due")
        channel = self._channel
        if channel.headers[turn % SLOTS].any():
            raise RuntimeError(f"turn {turn} was commanded before its ingress slot was released")
        received = time.monotonic_ns()
        self._pool.apply(channel.ctrl, channel.codes, channel.reset_rows, channel.rows(turn))
        self._applied[turn % len(channel.groups)] = received, time.monotonic_ns()
        if payload is not None:
            self._recorder.take(payload[0], channel.rows(turn), payload[1])
        self._due.put(turn)
        return True

    def _publish(self, turn: int) -> None:
        """Wait for the step of `turn`, pack its rows and tell the learner."""
        channel = self._channel
        stepping, packing = self._stepped.get(), time.monotonic_ns()
        self._pool.pack(channel.slot(turn), channel.rows(turn))
        applying = self._applied[turn % len(channel.groups)]
        channel.publish(turn, (*applying, *stepping, packing, time.monotonic_ns()))
        self._pipe.send(turn)


def main() -> int:
    """Entry point of the child process."""
    print_stacks_on_signal()
    parser = argparse.ArgumentParser(description="internal: started by the trainer")
    for name in ("read-fd", "write-fd", "memory-fd"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the learner decides when to stop
    pipe = Pipe(args.read_fd, args.write_fd, "learner")
    try:
        Collector(pipe, args.memory_fd).serve()
    except PeerGone:
        return 1
    except Exception as error:  # everything a collector can die of must reach the learner
        sys.stderr.write(traceback.format_exc())
        pipe.send(ERROR, f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # physics threads hold nothing that needs an orderly end
