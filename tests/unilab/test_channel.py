"""The shared block's layout and slot protocol, and the framing of the pipes."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from unilab.channel import ALIGNMENT, HEADER, SENTINEL, SLOTS, Channel, PeerGone, Pipe, channel_bytes
from unilab.physics.spec import PhysicsSpec

SPEC = PhysicsSpec("none.xml", 0.01, 2, "exact", 2, 1, 2, (("gyro", 3),), (("kp", 2),))
TIMES = (11, 22, 33, 44, 55, 66)


class OncePipe(Pipe):
    """A pipe that a test may close before its fixture does."""

    closed = False

    def close(self) -> None:
        if not self.closed:
            super().close()
        self.closed = True


def addresses(channel: Channel) -> list[tuple[int, int]]:
    """First and last byte of every part, counted from the first part."""
    parts = [channel.headers, *channel.slots, channel.ctrl, channel.codes, channel.reset_rows]
    base = channel.headers.ctypes.data
    return [(part.ctypes.data - base, part.ctypes.data - base + part.nbytes) for part in parts]


@pytest.fixture
def channel() -> Iterator[Channel]:
    block = Channel.create(SPEC, 3)
    yield block
    os.close(block.fd)


@pytest.fixture
def pipes() -> Iterator[tuple[Pipe, Pipe]]:
    """The learner's end and the collector's end."""
    down_read, down_write = os.pipe()
    up_read, up_write = os.pipe()
    ends = OncePipe(up_read, down_write, "collector"), OncePipe(down_read, up_write, "learner")
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    ("num_envs", "starts", "size"),
    [
        # pages: header 1, two slots of 28 bytes a row, ctrl 8, codes 4, reset rows 20
        (3, [0, 4096, 8192, 12288, 16384, 20480], 24576),
        (1000, [0, 4096, 32768, 61440, 69632, 73728], 94208),
    ],
)
def test_parts_follow_each_other_on_whole_pages(num_envs: int, starts: list[int], size: int) -> None:
    block = Channel.create(SPEC, num_envs)
    found = addresses(block)
    assert [start for start, _ in found] == starts
    assert channel_bytes(SPEC, num_envs) == size == os.fstat(block.fd).st_size
    assert all(end <= following for (_, end), following in zip(found, [*starts[1:], size], strict=True))
    assert size - found[-1][1] < ALIGNMENT
    assert block.headers.ctypes.data % ALIGNMENT == 0
    os.close(block.fd)


def test_shapes_and_types(channel: Channel) -> None:
    assert channel.headers.shape == (SLOTS, len(HEADER)) == (2, 8)
    assert [slot.shape for slot in channel.slots] == [(3, 7), (3, 7)]
    assert (channel.ctrl.shape, channel.codes.shape, channel.reset_rows.shape) == ((3, 2), (3,), (3, 5))
    parts = (channel.headers, *channel.slots, channel.ctrl, channel.codes, channel.reset_rows)
    assert [str(part.dtype) for part in parts] == ["int64", *["float32"] * 3, "int32", "float32"]


def test_groups_share_the_command_and_have_their_own_slots() -> None:
    block = Channel.create(SPEC, 40, 2)
    assert block.groups == [slice(0, 32), slice(32, 40)]
    assert [block.rows(turn) for turn in range(3)] == [slice(0, 32), slice(32, 40), slice(0, 32)]
    assert [block.slot(turn).shape for turn in range(3)] == [(32, 7), (8, 7), (32, 7)]
    assert [np.shares_memory(block.slot(turn), block.slots[1]) for turn in range(4)] == [False, True, False, True]
    assert block.ctrl.shape == (40, 2)
    assert channel_bytes(SPEC, 40, 2) < channel_bytes(SPEC, 2000, 2) < channel_bytes(SPEC, 2000, 1)
    os.close(block.fd)


def test_slots_start_as_nan_and_the_rest_as_zero(channel: Channel) -> None:
    assert all(np.isnan(slot).all() for slot in channel.slots)
    assert not any(part.any() for part in (channel.headers, channel.ctrl, channel.codes, channel.reset_rows))


def test_the_other_side_attaches_through_the_descriptor(channel: Channel) -> None:
    other = Channel(channel.fd, SPEC, 3)
    for number, part in enumerate((other.slots[0], other.slots[1], other.ctrl, other.codes, other.reset_rows)):
        part[...] = number + 1
    other.publish(5, TIMES)
    seen = (*channel.slots, channel.ctrl, channel.codes, channel.reset_rows)
    assert [np.unique(part).tolist() for part in seen] == [[1], [2], [3], [4], [5]]
    assert channel.check(5)["packed_ns"] == 66


def test_a_block_without_memfd_has_no_name_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    block = Channel.create(SPEC, 3)
    assert os.fstat(block.fd).st_nlink == 0
    Channel(block.fd, SPEC, 3).ctrl[...] = 7
    assert (block.ctrl == 7).all()
    os.close(block.fd)


def test_a_published_slot_shows_its_header(channel: Channel) -> None:
    channel.publish(4, TIMES)
    assert channel.check(4) == dict(zip(HEADER, (SENTINEL, 4, *TIMES), strict=True))


@pytest.mark.parametrize(
    "header",
    [
        (0, 0, 0, 0, 0, 0, 0, 0),  # never published
        (SENTINEL, 2, *TIMES),  # stale: the turn before last in the same slot
        (0, 4, *TIMES),  # torn: the sentinel is missing
        (SENTINEL + 1, 4, *TIMES),  # foreign memory
        (SENTINEL, 6, *TIMES),  # ahead
    ],
)
def test_a_slot_that_is_not_this_ticks_is_refused(channel: Channel, header: tuple[int, ...]) -> None:
    channel.headers[0] = header
    with pytest.raises(RuntimeError, match=r"^ingress slot 0 should hold turn 4, its header says \{'sentinel'"):
        channel.check(4)


def test_release_empties_one_slot_only(channel: Channel) -> None:
    channel.publish(8, TIMES)
    channel.publish(9, TIMES)
    channel.release(8)
    assert not channel.headers[0].any()
    assert channel.check(9)["turn"] == 9
    with pytest.raises(RuntimeError, match="turn 8"):
        channel.check(8)


def test_tick_zero_of_a_fresh_block_is_not_taken_for_published(channel: Channel) -> None:
    with pytest.raises(RuntimeError, match="turn 0"):
        channel.check(0)


@pytest.mark.parametrize("payload", [None, {"a": [1, 2.5, None]}, "x", "ö" * 50])
def test_a_message_arrives_as_it_was_sent(pipes: tuple[Pipe, Pipe], payload: object) -> None:
    learner, collector = pipes
    learner.send(-3, payload)
    assert collector.receive(1, "a message") == (-3, payload)


def test_messages_in_one_write_are_told_apart(pipes: tuple[Pipe, Pipe]) -> None:
    learner, collector = pipes
    for number in range(3):
        learner.send(number, [number])
    assert [collector.receive(1, "a message") for _ in range(3)] == [(0, [0]), (1, [1]), (2, [2])]


def test_a_message_in_many_writes_is_one_message(pipes: tuple[Pipe, Pipe], monkeypatch: pytest.MonkeyPatch) -> None:
    learner, collector = pipes
    write = os.write
    pieces: list[int] = []

    def dripping(descriptor: int, data: memoryview) -> int:
        pieces.append(write(descriptor, data[:3]))
        return pieces[-1]

    monkeypatch.setattr(os, "write", dripping)
    learner.send(7, "split")
    assert pieces == [3, 3, 3, 3, 3, 3, 3, 2]  # 16 bytes of frame, 7 of JSON
    assert collector.receive(1, "a message") == (7, "split")


def test_a_reader_waits_for_the_rest_of_a_frame(pipes: tuple[Pipe, Pipe]) -> None:
    learner, collector = pipes
    frame = struct.pack("<qq", 7, 4) + b"true"

    def drip() -> None:
        for byte in frame:
            os.write(learner._write_fd, bytes([byte]))
            time.sleep(0.001)

    writer = threading.Thread(target=drip)
    writer.start()
    assert collector.receive(5, "a message") == (7, True)
    writer.join()


def test_a_message_longer_than_the_pipe_holds(pipes: tuple[Pipe, Pipe]) -> None:
    learner, collector = pipes
    text = "x" * 300_000  # Linux pipes hold 65536 bytes
    writer = threading.Thread(target=collector.send, args=(-4, text))
    writer.start()
    assert learner.receive(5, "a message") == (-4, text)
    writer.join()


def test_end_of_file_means_the_peer_is_gone(pipes: tuple[Pipe, Pipe]) -> None:
    learner, collector = pipes
    collector.close()
    with pytest.raises(PeerGone, match=r"^the collector is gone$"):
        learner.receive(5, "its readiness")
    with pytest.raises(PeerGone, match=r"^the collector is gone$"):
        learner.send(0)


def test_end_of_file_inside_a_frame_means_the_peer_is_gone(pipes: tuple[Pipe, Pipe]) -> None:
    learner, collector = pipes
    os.write(collector._write_fd, struct.pack("<qq", 7, 100) + b"cut")
    collector.close()
    with pytest.raises(PeerGone):
        learner.receive(5, "tick 7")


def test_what_was_sent_before_the_end_is_still_read(pipes: tuple[Pipe, Pipe]) -> None:
    learner, collector = pipes
    collector.send(-4, "why")
    collector.close()
    assert learner.receive(1, "tick 0") == (-4, "why")


def test_a_deadline_names_what_was_awaited(pipes: tuple[Pipe, Pipe]) -> None:
    learner, _ = pipes
    message = r"^waited for tick 12 from the collector, nothing came before the deadline$"
    with pytest.raises(TimeoutError, match=message):
        learner.receive(0.01, "tick 12")


def test_dripping_bytes_do_not_extend_the_deadline(pipes: tuple[Pipe, Pipe]) -> None:
    learner, collector = pipes
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.01):
            os.write(collector._write_fd, b"\0")

    os.write(collector._write_fd, struct.pack("<qq", 7, 1000))
    writer = threading.Thread(target=drip)
    writer.start()
    with pytest.raises(TimeoutError, match="tick 7"):
        learner.receive(0.1, "tick 7")
    stop.set()
    writer.join()
