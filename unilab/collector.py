"""The collector: a child process that does nothing but step physics on its CPU list.

Started as `python -m unilab.collector` with three inherited descriptors. It holds no actor and never imports torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback

from unilab.channel import ERROR, READY, SETUP, SLOTS, STOP, Channel, PeerGone, Pipe
from unilab.physics.mujoco_pool import MujocoPool
from unilab.physics.spec import PhysicsSpec

# A learner may compile for minutes before the first command; its death is seen at once, as end-of-file.
COMMAND_TIMEOUT = 1800.0


class Collector:
    """Serves ticks: reads the command, steps, publishes the physics rows.

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
        self._pool = MujocoPool(spec, setup["num_envs"], setup["cpu_ids"])
        self._channel = Channel(memory_fd, spec, setup["num_envs"])
        pipe.send(READY, {"placement": self._pool.placement, "torch_imported": "torch" in sys.modules})

    def serve(self) -> None:
        """Run ticks until the learner says stop."""
        while True:
            tick, _ = self._pipe.receive(COMMAND_TIMEOUT, "a command")
            if tick == STOP:
                return
            self._run(tick)
            self._pipe.send(tick)

    def _run(self, tick: int) -> None:
        channel, pool = self._channel, self._pool
        if channel.headers[tick % SLOTS].any():
            raise RuntimeError(f"tick {tick} was commanded before its ingress slot was released")
        received = time.monotonic_ns()
        pool.apply(channel.ctrl, channel.codes, channel.reset_rows)
        applied = time.monotonic_ns()
        pool.step()
        stepped = time.monotonic_ns()
        pool.pack(channel.slots[tick % SLOTS])
        channel.publish(tick, (received, applied, stepped, time.monotonic_ns()))


def main() -> int:
    """Entry point of the child process."""
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
