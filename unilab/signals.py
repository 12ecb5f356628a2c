"""What Ctrl-C and a termination do within a part of a program; before and after it what they did."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM)


def sigterm_interrupts(reason: str = "") -> AbstractContextManager[None]:
    """Within, a termination ends the run as Ctrl-C does, and the `KeyboardInterrupt` says the reason."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt(reason)

    return _handling(interrupt, signal.SIGTERM)


def interrupts_once() -> AbstractContextManager[None]:
    """Within, what is half made is removed on the way out of an interrupt, and nothing interrupts that."""
    return _handling(_interrupt_once, *_ENDING)


def deaf() -> AbstractContextManager[None]:
    """Within, a second Ctrl-C or termination cannot keep the end of the run from being recorded."""
    return _handling(signal.SIG_IGN, *_ENDING)


class Arrivals:
    """Signals as they arrive, for another thread: the main thread may hang in a call that no handler interrupts.

    Made and closed in the main thread. Only signals that have a handler of Python are seen.

    Attributes:
        descriptor: readable when one has arrived.
    """

    def __init__(self) -> None:
        self.descriptor, self._end = os.pipe()
        for end in (self.descriptor, self._end):
            os.set_blocking(end, False)
        self._former = signal.set_wakeup_fd(self._end, warn_on_full_buffer=False)

    def interrupted(self) -> bool:
        """Whether a Ctrl-C or a termination has arrived since the last call."""
        with contextlib.suppress(BlockingIOError):
            return not set(os.read(self.descriptor, 4096)).isdisjoint(_ENDING)
        return False

    def close(self) -> None:
        """See no more."""
        signal.set_wakeup_fd(self._former)
        os.close(self.descriptor)
        os.close(self._end)


@contextmanager
def _handling(handler: Any, *signals: signal.Signals) -> Iterator[None]:
    previous = [signal.signal(number, handler) for number in signals]
    try:
        yield
    finally:
        for number, former in zip(signals, previous, strict=True):
            signal.signal(number, former)


def _interrupt_once(*_: object) -> None:
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
