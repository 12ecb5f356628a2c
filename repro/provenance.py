"""Which code is measured: commit and difference of the checkout, hash of the installed sources."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from repro.errors import UsageError
from repro.redact import PROJECT, Redactor
from repro.schema import Strict
from unilab import names

STAMP_FILE = "source_stamp.json"
SOURCES = ("unilab", "repro", "pyproject.toml")  # what makes a checkout dirty; a report being written does not
TRAINER_SUFFIXES = (".py", ".c", ".yaml", ".xml")  # as the trainer counts its own in `command.json`
UNKNOWN = "unknown"
SOURCE_SUFFIXES = (".py", ".c", ".yaml", ".xml", ".toml", ".j2")


class Source(Strict):
    """Where the code comes from.

    Attributes:
        origin: `git`, `stamp` (`source_stamp.json` of a tree that travelled without git), or `hash` (neither).
        commit: Full commit id, or None.
        dirty: Whether the sources differ from the commit, or None when unknown.
        diff_sha256: Hash of that difference, or None.
        sources_sha256: Hash over the installed files of both packages.
        trainer: Folder of the trainer package that cells import, redacted; None in files of older versions.
        trainer_sha256: Hash over that package, as its runs write it; None likewise.
    """

    origin: Literal["git", "stamp", "hash"]
    commit: str | None
    dirty: bool | None
    diff_sha256: str | None
    sources_sha256: str
    trainer: str | None = None
    trainer_sha256: str | None = None

    @property
    def short(self) -> str:
        """Seven characters of the commit, or ``src`` and seven of the source hash."""
        return self.commit[:7] if self.commit else f"src{self.sources_sha256[:7]}"

    @property
    def revision(self) -> str:
        """What an image of these sources has as its revision: commit, with ``-dirty`` where they differ from it."""
        if self.commit is None:
            return UNKNOWN
        return f"{self.commit}-dirty" if self.dirty else self.commit


class _Stamp(Strict):
    commit: str
    dirty: bool
    diff_sha256: str | None


def find_source(project: Path = PROJECT) -> Source:
    """Describe the code of this installation: git first, then a stamp file, else the hash alone; and its trainer.

    Raises:
        UsageError: If a stamp file is there but malformed.
    """
    package = trainer_package()
    if package is None:
        return _find_code(project)
    trainer = {"trainer": Redactor().text(str(package)), "trainer_sha256": trainer_sha256(package)}
    return _find_code(project).model_copy(update=trainer)


def _find_code(project: Path) -> Source:
    sources = sources_sha256(project)
    commit = _git(project, "rev-parse", "HEAD")
    top = _git(project, "rev-parse", "--show-toplevel")
    if commit and top and Path(top.decode().strip()).resolve() == project.resolve():
        difference = _difference(project)
        digest = hashlib.sha256(difference).hexdigest() if difference else None
        return Source(
            origin="git",
            commit=commit.decode().strip(),
            dirty=bool(difference),
            diff_sha256=digest,
            sources_sha256=sources,
        )
    stamp = project / STAMP_FILE
    if stamp.is_file():
        try:
            found = _Stamp.model_validate_json(stamp.read_bytes())
        except ValidationError:
            raise UsageError(f"{STAMP_FILE} must hold commit, dirty and diff_sha256; write it again") from None
        return Source(origin="stamp", sources_sha256=sources, **found.model_dump())
    return Source(origin="hash", commit=None, dirty=None, diff_sha256=None, sources_sha256=sources)


def sources_sha256(project: Path) -> str:
    """Hash over names and contents of the source files of both packages."""
    digest = hashlib.sha256()
    for package in ("repro", "unilab"):
        for path in sorted(p for p in (project / package).rglob("*") if p.suffix in SOURCE_SUFFIXES):
            digest.update(f"{path.relative_to(project).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def trainer_sha256(package: Path) -> str:
    """Hash over names and contents of the trainer's source files, equal to `source_sha256` of its `command.json`."""
    digest = hashlib.sha256()
    for path in sorted(p for p in package.rglob("*") if p.suffix in TRAINER_SUFFIXES):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def trainer_package() -> Path | None:
    """Return the folder of the trainer package that a cell would import, without importing it."""
    spec = importlib.util.find_spec("unilab")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def graph_hooks() -> bool:
    """Return whether the trainer says that its updates are captured in CUDA graphs with gradient hooks."""
    return bool(getattr(names, "GRAPH_HOOKS", False))


def _difference(project: Path) -> bytes:
    """Diff of tracked sources, then name and hash of every untracked one; empty for a clean tree."""
    plain = ("--no-ext-diff", "--no-textconv", "--no-color", "--full-index", "--binary")
    difference = _git(project, "diff", *plain, "HEAD", "--", *SOURCES) or b""
    untracked = _git(project, "ls-files", "--others", "--exclude-standard", "-z", "--", *SOURCES) or b""
    for name in untracked.split(b"\0")[:-1]:
        content = (project / name.decode(errors="surrogateescape")).read_bytes()
        difference += name + b"\0" + hashlib.sha256(content).hexdigest().encode() + b"\n"
    return difference


def _git(project: Path, *arguments: str) -> bytes | None:
    """Standard output of a git command, or None where git or the repository is absent."""
    command = ["git", "-C", str(project), *arguments]
    try:
        return subprocess.run(command, check=True, capture_output=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
