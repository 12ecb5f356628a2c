"""Shared memory and signals between the learner and its collector.

Environments take part in one or two groups of rows. A turn is one control step of one group; turns are numbered through
the run, so that turn t belongs to group t modulo the number of groups. One anonymous block holds two ingress slots and
the command block; one pipe per direction carries the signals. Nothing has a name, so nothing is left behind, and
end-of-file on a pipe is the death of the other side.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import struct
import tempfile
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unilab.physics.spec import PhysicsSpec, row_groups

SLOTS = 2
SENTINEL = 0x5EA1ED_51075
ALIGNMENT = 4096  # a page, so that each part can be registered as pinned memory

# Signals other than turn numbers, which are zero or positive.
STOP, SETUP, READY, ERROR, DONE = -1, -2, -3, -4, -5

# Slot header, int64: written by the collector after the rows, checked by the learner before it reads them.
# Times are nanoseconds of the monotonic clock both processes share.
HEADER = ("sentinel", "turn", "received_ns", "applied_ns", "began_ns", "stepped_ns", "packing_ns", "packed_ns")

_FRAME = struct.Struct("<qq")  # signal, payload bytes


class PeerGone(RuntimeError):  # noqa: N818 - says what happened
    """The process at the other end of the channel has closed its pipe."""


class Channel:
    """The shared block, seen as arrays.

    Args:
        fd: descriptor of the block.
        spec: the columns.
        num_envs: rows of all groups.
        groups: groups that take turns, see `row_groups`.

    Attributes:
        fd: descriptor of the anonymous block; a child process inherits it.
        groups: rows of every group.
        headers: `(SLOTS, len(HEADER))` int64.
        slots: `SLOTS` arrays `(rows of the largest group, spec.width)` float32, what physics publishes.
        ctrl: `(num_envs, nu)` float32 control targets.
        codes: `(num_envs,)` int32 row codes.
        reset_rows: `(num_envs, spec.reset_width)` float32, read where a row's code asks for it.
    """

    def __init__(self, fd: int, spec: PhysicsSpec, num_envs: int, groups: int = 1) -> None:
        self.fd = fd
        self.groups = row_groups(num_envs, groups)
        self._map = mmap.mmap(fd, channel_bytes(spec, num_envs, groups))
        self._offset = 0
        self.headers = self._part((SLOTS, len(HEADER)), np.int64)
        self.slots = [self._part((self.groups[0].stop, spec.width), np.float32) for _ in range(SLOTS)]
        self.ctrl = self._part((num_envs, spec.nu), np.float32)
        self.codes = self._part((num_envs,), np.int32)
        self.reset_rows = self._part((num_envs, spec.reset_width), np.float32)

    @classmethod
    def create(cls, spec: PhysicsSpec, num_envs: int, groups: int = 1) -> Channel:
        """Make the block; slots start as NaN, so that a row nobody wrote cannot pass for physics."""
        fd = os.memfd_create("unilab-channel") if hasattr(os, "memfd_create") else _unlinked_file()
        os.truncate(fd, channel_bytes(spec, num_envs, groups))
        channel = cls(fd, spec, num_envs, groups)
        for slot in channel.slots:
            slot.fill(np.nan)
        return channel

    def rows(self, turn: int) -> slice:
        """Rows of the group whose turn it is."""
        return self.groups[turn % len(self.groups)]

    def slot(self, turn: int) -> NDArray[np.float32]:
        """The ingress slot of `turn`, one row per environment of its group."""
        rows = self.rows(turn)
        return self.slots[turn % SLOTS][: rows.stop - rows.start]

    def publish(self, turn: int, times_ns: tuple[int, ...]) -> None:
        """Stamp the slot of `turn` as complete; times in `HEADER` order."""
        self.headers[turn % SLOTS] = (SENTINEL, turn, *times_ns)

    def check(self, turn: int) -> dict[str, int]:
        """Return the header of the slot that should hold `turn`.

        Raises:
            RuntimeError: if the slot was not completed or belongs to another turn.
        """
        header = dict(zip(HEADER, self.headers[turn % SLOTS].tolist(), strict=True))
        if header["sentinel"] != SENTINEL or header["turn"] != turn:
            raise RuntimeError(f"ingress slot {turn % SLOTS} should hold turn {turn}, its header says {header}")
        return header

    def release(self, turn: int) -> None:
        """Give the slot of `turn` back to the collector."""
        self.headers[turn % SLOTS] = 0

    def _part(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        count = int(np.prod(shape))
        part = np.frombuffer(self._map, dtype, count, self._offset).reshape(shape)
        self._offset += _aligned(count * np.dtype(dtype).itemsize)
        return part


class Pipe:
    """Framed signals over a pair of descriptors.

    Args:
        read_fd: descriptor to receive from.
        write_fd: descriptor to send to.
        peer: what the other side is called in messages.
    """

    def __init__(self, read_fd: int, write_fd: int, peer: str) -> None:
        self._read_fd, self._write_fd, self._peer = read_fd, write_fd, peer
        self._poll = select.poll()
        self._poll.register(read_fd, select.POLLIN)

    def send(self, signal: int, payload: Any = None) -> None:
        """Send a turn number or a signal, with an optional JSON payload.

        Raises:
            PeerGone: if the other side has closed its end.
        """
        body = b"" if payload is None else json.dumps(payload).encode()
        frame = memoryview(_FRAME.pack(signal, len(body)) + body)
        try:
            while frame:  # a signal handler can cut a long write short
                frame = frame[os.write(self._write_fd, frame) :]
        except BrokenPipeError:
            raise PeerGone(f"the {self._peer} is gone") from None

    def receive(self, timeout: float, waiting_for: str) -> tuple[int, Any]:
        """Wait for one message.

        Args:
            timeout: seconds to wait at most.
            waiting_for: what is awaited, for the message of a deadline.

        Returns:
            The signal or turn number and its payload.

        Raises:
            PeerGone: if the other side has closed its end.
            TimeoutError: after `timeout`.
        """
        deadline = time.monotonic() + timeout
        signal, size = _FRAME.unpack(self._exactly(_FRAME.size, deadline, waiting_for))
        return signal, json.loads(self._exactly(size, deadline, waiting_for)) if size else None

    def close(self) -> None:
        """Close both ends; the peer sees end-of-file."""
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _exactly(self, size: int, deadline: float, waiting_for: str) -> bytes:
        received = b""
        while len(received) < size:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not self._poll.poll(remaining * 1000):
                raise TimeoutError(f"waited for {waiting_for} from the {self._peer}, nothing came before the deadline")
            piece = os.read(self._read_fd, size - len(received))
            if not piece:
                raise PeerGone(f"the {self._peer} is gone")
            received += piece
        return received


def channel_bytes(spec: PhysicsSpec, num_envs: int, groups: int = 1) -> int:
    """Size of the shared block in bytes."""
    slot = _aligned(4 * row_groups(num_envs, groups)[0].stop * spec.width)
    command = sum(_aligned(4 * num_envs * width) for width in (spec.nu, 1, spec.reset_width))
    return _aligned(8 * SLOTS * len(HEADER)) + SLOTS * slot + command


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _unlinked_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
