"""A short look at how evenly this host computes right now."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from statistics import stdev

from repro.schema import Strict

NOISE_LIMIT = 0.05  # a host that varies more is noisy: now, and from run to run of a session
SECONDS = 0.5
BATCHES = 10
WORK = bytes(2**18)  # hashed in about 0.2 ms; short against a time slice, long against the clock


class SpinNoise(Strict):
    """How much repeated fixed work on one CPU varied.

    Attributes:
        score: Standard deviation of the logarithms of the rates of `BATCHES` equal spans of time.
        seconds: How long it was measured.
        repetitions: How often the work was done.
    """

    score: float
    seconds: float
    repetitions: int


def measure_spin(seconds: float = SECONDS, clock: Callable[[], float] = time.perf_counter) -> SpinNoise:
    """Repeat the same work for a while on whatever CPU the kernel chooses.

    Args:
        seconds: How long.
        clock: Monotonic clock in s.
    """
    began = clock()
    logs, repetitions = [], 0
    for batch in range(1, BATCHES + 1):
        start, done = clock(), 0
        while done == 0 or clock() < began + seconds * batch / BATCHES:
            hashlib.sha256(WORK).digest()
            done += 1
        logs.append(math.log(done / max(clock() - start, 1e-9)))
        repetitions += done
    return SpinNoise(score=round(stdev(logs), 6), seconds=round(clock() - began, 3), repetitions=repetitions)
