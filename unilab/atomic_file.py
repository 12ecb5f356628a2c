"""A file is written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO


def partial_name(name: str) -> str:
    """What a file is called until it is whole; stays behind where its writer was killed."""
    return f".{name}.partial"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path` to write to; it becomes `path` at the end, and is removed on a failure."""
    temporary = path.with_name(partial_name(path.name))
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file that also survives a crash of the host: its content is on the disk before it has its name."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
