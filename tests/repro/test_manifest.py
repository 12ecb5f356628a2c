from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from repro.errors import UsageError
from repro.layout import MANIFEST_FILE
from repro.manifest import check_manifest, write_manifest

A, B = (hashlib.sha256(text).hexdigest() for text in (b"a\n", b"b\n"))
X = hashlib.sha256(b"x\n").hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    (tmp_path / "a.txt").write_bytes(b"a\n")
    (tmp_path / "runs" / "b.txt").write_bytes(b"b\n")
    write_manifest(tmp_path)
    return tmp_path


def test_the_list_is_what_sha256sum_writes(folder: Path) -> None:
    assert (folder / MANIFEST_FILE).read_text() == f"{A}  a.txt\n{B}  runs/b.txt\n"
    assert check_manifest(folder) == ({"a.txt": A, "runs/b.txt": B}, [])


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_sha256sum_accepts_the_list(folder: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", MANIFEST_FILE], cwd=folder, check=True)


def replaced(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / MANIFEST_FILE).write_bytes(text.encode()) and None


def link(folder: Path) -> None:
    (folder / "runs" / "link").symlink_to("b.txt")


def linked_file(folder: Path) -> None:
    (folder / "b2").write_bytes(b"b\n")
    (folder / "runs" / "b.txt").unlink()
    (folder / "runs" / "b.txt").symlink_to("../b2")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda f: (f / "a.txt").write_bytes(b"x\n"),
            f"a.txt: the file or its line in {MANIFEST_FILE} changed: SHA-256 {X}, listed {A}",
        ),
        (
            replaced(f"{A[:-1]}{'0' if A[-1] != '0' else '1'}  a.txt\n{B}  runs/b.txt\n"),
            f"a.txt: the file or its line in {MANIFEST_FILE} changed: SHA-256 {A}, listed {A[:-1]}",
        ),
        (lambda f: (f / "a.txt").unlink(), f"a.txt: in {MANIFEST_FILE}, not in the folder"),
        (lambda f: (f / "runs" / "c").write_bytes(b""), f"runs/c: in the folder, not in {MANIFEST_FILE}"),
        (link, "runs/link: is a link"),
        (linked_file, "runs/b.txt: is a link"),
        (lambda f: (f / MANIFEST_FILE).unlink(), f"{MANIFEST_FILE}: missing"),
        (replaced(""), f"{MANIFEST_FILE}: is empty"),
        (replaced(f"\ufeff{A}  a.txt\n{B}  runs/b.txt\n"), f"{MANIFEST_FILE}: begins with a byte order mark"),
        (replaced(f"{A}  a.txt\r\n{B}  runs/b.txt\r\n"), f"{MANIFEST_FILE}: holds a carriage return"),
        (replaced(f"{A}  a.txt\n{B}  runs/b.txt"), f"{MANIFEST_FILE}: its last line has no end"),
        (replaced(f"{B}  runs/b.txt\n{A}  a.txt\n"), f"{MANIFEST_FILE}: lines are not sorted"),
        (
            replaced(f"{A}  a.txt\n{A}  a.txt\n{B}  runs/b.txt\n"),
            f"{MANIFEST_FILE}: line 2: path 'a.txt' is listed twice",
        ),
        (replaced(f"{A}  a.txt\n{B}  ../b.txt\n"), f"{MANIFEST_FILE}: line 2: path '../b.txt' has an empty"),
        (replaced(f"{A}  a.txt\n{B}  runs/../runs/b.txt\n"), f"{MANIFEST_FILE}: line 2: path 'runs/../runs/b.txt'"),
        (replaced(f"{A}  a.txt\n{B}  runs//b.txt\n"), f"{MANIFEST_FILE}: line 2: path 'runs//b.txt'"),
        (replaced(f"{A}  a.txt\n{B}  /runs/b.txt\n"), f"{MANIFEST_FILE}: line 2: absolute path"),
        (replaced(f"{A}  a.txt\n{B}  C:/b.txt\n"), f"{MANIFEST_FILE}: line 2: absolute path"),
        (replaced(f"{A}  a.txt\n{B} *runs/b.txt\n"), f"{MANIFEST_FILE}: line 2: not '<64 hex digits>"),
        (replaced(f"{A.upper()}  a.txt\n{B}  runs/b.txt\n"), f"{MANIFEST_FILE}: line 1: not '<64 hex digits>"),
        (replaced(f"{A}  a.txt\n\n{B}  runs/b.txt\n"), f"{MANIFEST_FILE}: line 2: not '<64 hex digits>"),
        (replaced(f"{A}  {MANIFEST_FILE}\n{A}  a.txt\n{B}  runs/b.txt\n"), f"{MANIFEST_FILE}: line 1: the list cannot"),
        (lambda f: (f / MANIFEST_FILE).write_bytes(b"\xff\n"), f"{MANIFEST_FILE}: not UTF-8"),
    ],
)
def test_every_deviation_is_named(folder: Path, change: Callable[[Path], None], problem: str) -> None:
    change(folder)
    problems = check_manifest(folder)[1]
    assert any(line.startswith(problem) for line in problems), problems


def test_a_linked_list_is_no_list(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "list"
    (folder / MANIFEST_FILE).rename(elsewhere)
    (folder / MANIFEST_FILE).symlink_to(elsewhere)
    assert any(line.startswith(f"{MANIFEST_FILE}: ") for line in check_manifest(folder)[1])


@pytest.mark.parametrize("make", [link, lambda folder: (folder / "a\nb").write_bytes(b"")])
def test_a_folder_that_cannot_be_listed_is_refused(folder: Path, make: Callable[[Path], None]) -> None:
    make(folder)
    with pytest.raises(UsageError):
        write_manifest(folder)
