"""That a file is whole or absent, and that what stood there before stays until then."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import pytest

from unilab.atomic_file import write_atomically


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, lambda file: file.write(b"old"))

    def fails(file: BinaryIO) -> None:
        file.write(b"half of the ne")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, fails)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_content_is_on_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[list[str]] = []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append([path.name for path in tmp_path.iterdir()]))
    write_atomically(tmp_path / "file", lambda file: file.write(b"new"))
    assert synced == [[".file.partial"]]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
