"""Random streams of a run: a generator for each, seeded so that no two share numbers."""

from __future__ import annotations

import hashlib

STREAMS = ("environment", "exploration", "update")
PREFIX = "random/"  # of their entries in the registry


def stream_seed(seed: int, stream: str, rank: int = 0, resumed: int = 0) -> int:
    """The seed of a stream.

    Args:
        seed: the run's.
        stream: its name.
        rank: whose it is.
        resumed: the iteration that the run was resumed from, or 0.
    """
    text = f"{seed}/{rank}/{stream}" + (f"/{resumed}" if resumed else "")
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
