"""Copies between the channel and the device, and the reading of metrics: all that the host waits for there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from unilab.channel import SLOTS, Channel
from unilab.environment import Environment

DEVICE_TIMEOUT = 120.0
POLL_SECONDS = 2e-5  # the CPU is not spun: its hardware may be shared with a physics worker


class DeviceExchange:
    """Uploads ingress slots and downloads commands.

    On CUDA the channel is registered as pinned memory, copies run on a side stream, and the host waits on an event
    against a deadline: a device that hangs inside a replayed graph would escape every other watchdog. On the CPU and
    on MPS the calling thread copies.

    Args:
        channel: the shared block.
        parts: owners of the device buffers, one environment per group of the channel.
        stage: surrounds each copy by name on its stream, to time it.
    """

    def __init__(
        self,
        channel: Channel,
        parts: Sequence[Environment],
        stage: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> None:
        self._stage = stage
        device = parts[0].fields.device
        blocks = [torch.from_numpy(part) for part in (channel.ctrl, channel.codes, channel.reset_rows)]
        self._uploads = [
            (parts[turn % len(parts)].fields, torch.from_numpy(channel.slot(turn))) for turn in range(SLOTS)
        ]
        self._downloads = [
            list(zip((block[rows] for block in blocks), (part.ctrl, part.codes, part.reset_rows), strict=True))
            for rows, part in zip(channel.groups, parts, strict=True)
        ]
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._side = torch.cuda.Stream(device)
            self._uploaded, self._downloaded = torch.cuda.Event(), torch.cuda.Event()
            self._registered = [_pin(torch.from_numpy(part)) for part in channel.slots] + [
                _pin(block) for block in blocks
            ]

    def upload(self, turn: int) -> None:
        """Copy the ingress slot of `turn` into the `fields` of its group; later work on the current stream sees it."""
        target, source = self._uploads[turn % SLOTS]
        if not self._cuda:
            with self._stage("upload"):
                target.copy_(source)
            return
        main = torch.cuda.current_stream()
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            with self._stage("upload"):
                target.copy_(source, non_blocking=True)
            self._uploaded.record()
        main.wait_event(self._uploaded)

    def download(self, group: int) -> None:
        """Copy a group's command into the channel and wait for it; the uploaded slot is free afterwards too.

        Raises:
            TimeoutError: if the device does not finish within the deadline.
        """
        copies = self._downloads[group]
        if not self._cuda:
            with self._stage("download"):
                for target, source in copies:
                    target.copy_(source)
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            with self._stage("download"):
                for target, source in copies:
                    target.copy_(source, non_blocking=True)
            self._downloaded.record()
        wait_event(self._downloaded, "the act phase and its command")

    def close(self) -> None:
        """Unregister the pinned memory; the channel may be unmapped afterwards."""
        if self._cuda:
            torch.cuda.synchronize()
            for address in self._registered:
                torch.cuda.cudart().cudaHostUnregister(address)
            self._registered = []


class MetricReader:
    """Brings a tick's metrics to the host one tick later, in one copy, and times the update phase.

    Args:
        values: the metrics on the device, a static buffer.
        names: their tags.
        inputs: what `write` fills on the device.
    """

    def __init__(self, values: Tensor, names: list[str], inputs: Tensor | None = None) -> None:
        self._cuda = values.device.type == "cuda"
        self._values, self._names = values, names
        self._host = torch.empty(values.shape, pin_memory=self._cuda)
        self._inputs = torch.empty(0) if inputs is None else inputs
        self._written = torch.empty(self._inputs.shape, pin_memory=self._cuda)
        self._began = self._ended = time.monotonic()
        if self._cuda:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]

    def write(self, values: Sequence[float]) -> None:
        """Start the copy of values to the device; those before have arrived once they were read back."""
        self._written.copy_(torch.tensor(values))
        self._inputs.copy_(self._written, non_blocking=self._cuda)

    def begin(self) -> None:
        """Mark the start of the update phase."""
        self._began = time.monotonic()
        if self._cuda:
            self._events[0].record()

    def end(self) -> None:
        """Mark the end of the update phase and start the copy of its metrics."""
        if self._cuda:
            self._events[1].record()
        self._ended = time.monotonic()
        self._host.copy_(self._values, non_blocking=self._cuda)
        if self._cuda:
            self._events[2].record()

    def read(self) -> tuple[dict[str, float], float]:
        """Values of the last `end`, and the seconds the update phase took (device time on CUDA).

        Raises:
            TimeoutError: if the device does not finish within the deadline.
        """
        seconds = self._ended - self._began
        if self._cuda:
            wait_event(self._events[2], "the update phase and its metrics")
            seconds = self._events[0].elapsed_time(self._events[1]) / 1000.0
        return dict(zip(self._names, self._host.tolist(), strict=True)), seconds


def wait_event(event: torch.cuda.Event, waiting_for: str, timeout: float = DEVICE_TIMEOUT) -> None:
    """Wait for a device event, polling against a deadline.

    Raises:
        TimeoutError: naming what was awaited.
    """
    deadline = time.monotonic() + timeout
    while not event.query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:g} s for {waiting_for}, the device did not finish")
        time.sleep(POLL_SECONDS)


def _pin(part: Tensor) -> int:
    size = part.numel() * part.element_size()
    result = torch.cuda.cudart().cudaHostRegister(part.data_ptr(), size, 0)
    if int(result) != 0:
        raise RuntimeError(f"registering {size} bytes of the channel as pinned memory failed with CUDA error {result}")
    return part.data_ptr()
