"""The hash list of a report folder, in sha256sum's format, checked more strictly than sha256sum does."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from repro.errors import UsageError
from repro.layout import MANIFEST_FILE

LINE = re.compile(r"(?P<digest>[0-9a-f]{64})  (?P<path>[^\n\r\\]+)")
BOM = b"\xef\xbb\xbf"


def write_manifest(out_dir: Path) -> int:
    """List every file of a folder with its hash; return how many there are.

    Raises:
        UsageError: If the folder holds a link, something that is no plain file, or a name the list cannot hold.
    """
    files, problems = list_files(out_dir)
    problems += [f"{name!r}: the name cannot be listed" for name in files if not LINE.fullmatch(f"{'0' * 64}  {name}")]
    if problems:
        raise UsageError(f"{out_dir}: {problems[0]}; remove it, then: repro report {out_dir}")
    text = "".join(f"{file_sha256(out_dir / name)}  {name}\n" for name in files)
    (out_dir / MANIFEST_FILE).write_bytes(text.encode())
    return len(files)


def read_manifest(out_dir: Path) -> tuple[dict[str, str], list[str]]:
    """Parse the hash list.

    Returns:
        Hash by path, and every deviation from the format, each naming the list and the line.
    """
    path = out_dir / MANIFEST_FILE
    if path.is_symlink() or not path.is_file():
        return {}, [f"{MANIFEST_FILE}: missing, or not a plain file"]
    content = path.read_bytes()
    problems = _byte_problems(content)
    try:
        lines = content.removeprefix(BOM).decode("utf-8").split("\n")
    except UnicodeDecodeError:
        return {}, [*problems, f"{MANIFEST_FILE}: not UTF-8"]
    if lines[-1] == "":
        lines.pop()
    listed: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        match = LINE.fullmatch(line.removesuffix("\r"))
        problem = f"not '<64 hex digits>  <path>': {line!r}" if match is None else _path_problem(match["path"], listed)
        if problem is not None:
            problems.append(f"{MANIFEST_FILE}: line {number}: {problem}")
        elif match is not None:
            listed[match["path"]] = match["digest"]
    if list(listed) != sorted(listed):
        problems.append(f"{MANIFEST_FILE}: lines are not sorted by path")
    return listed, problems


def check_manifest(out_dir: Path) -> tuple[dict[str, str], list[str]]:
    """Compare a folder with its hash list.

    Returns:
        Hash by path, and one line for every deviation: format, changed, missing and extra files, links.
    """
    listed, problems = read_manifest(out_dir)
    present, found = list_files(out_dir)
    problems += found
    problems += [f"{name}: in the folder, not in {MANIFEST_FILE}" for name in present if name not in listed]
    for name, digest in listed.items():
        if name not in present:
            if not any(problem.startswith(f"{name}: ") for problem in found):
                problems.append(f"{name}: in {MANIFEST_FILE}, not in the folder")
        elif (actual := file_sha256(out_dir / name)) != digest:
            problems.append(
                f"{name}: the file or its line in {MANIFEST_FILE} changed: SHA-256 {actual}, listed {digest}"
            )
    return listed, problems


def list_files(out_dir: Path) -> tuple[list[str], list[str]]:
    """Plain files below a folder except its hash list, as sorted relative paths; and links and special files found."""
    files: list[str] = []
    problems: list[str] = []
    for path in out_dir.rglob("*"):
        name = path.relative_to(out_dir).as_posix()
        if path.is_symlink():
            problems.append(f"{name}: is a link; a report holds plain files only")
        elif path.is_file():
            files.append(name)
        elif not path.is_dir():
            problems.append(f"{name}: is neither a file nor a folder")
    return sorted(name for name in files if name != MANIFEST_FILE), sorted(problems)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content as hexadecimal text."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _byte_problems(content: bytes) -> list[str]:
    problems = []
    if content.startswith(BOM):
        problems.append(f"{MANIFEST_FILE}: begins with a byte order mark")
    if b"\r" in content:
        problems.append(f"{MANIFEST_FILE}: holds a carriage return; lines end in LF only")
    if not content.endswith(b"\n"):
        problems.append(f"{MANIFEST_FILE}: {'its last line has no end' if content else 'is empty'}")
    return problems


def _path_problem(path: str, listed: dict[str, str]) -> str | None:
    parts = path.split("/")
    if path.startswith("/") or re.match(r"[A-Za-z]:", path):
        return f"absolute path {path!r}"
    if any(part in ("", ".", "..") for part in parts):
        return f"path {path!r} has an empty, '.' or '..' part"
    if path == MANIFEST_FILE:
        return "the list cannot hold itself"
    if path in listed:
        return f"path {path!r} is listed twice"
    return None
