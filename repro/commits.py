"""The code of a commit, or of the working tree, in a folder of its own; nothing in the repository changes."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.errors import UsageError
from repro.launch import trainer_environment
from repro.provenance import SOURCES, STAMP_FILE, Source, find_source, sources_sha256, trainer_sha256

if TYPE_CHECKING:
    from repro.docker_executor import DockerExecutor

WORKING_TREE = "."
LIMIT_SECONDS = 120.0
# What a commit's own trainer says about itself, in the environment of its runs. An editable installation offers the
# modules that a package of the same name elsewhere lacks, so it matters where they lie.
LOOK = """
import importlib.util, json, pathlib, unilab
package = pathlib.Path(unilab.__file__).resolve().parent
def has(name):
    spec = importlib.util.find_spec(f"unilab.{name}")
    return spec is not None and spec.origin is not None and package in pathlib.Path(spec.origin).resolve().parents
found = {name: has(name) for name in ("train", "probes")}
from unilab.provenance import git_facts, source_sha256
print(json.dumps({"package": str(package), **found, "git": git_facts(package.parent), "sources": source_sha256()}))
"""


@dataclass(frozen=True)
class Code:
    """The code of one side: of a commit in a folder, or of an image.

    Attributes:
        ref: What the user typed.
        label: What a reader is told that it is.
        source: Its facts.
        dependencies: Requirements that a commit's pyproject.toml names; versions that an image holds.
        has_probes: Whether its trainer has the programs of probes.
        root: Folder that holds it; None in an image.
        executor: What runs it in containers of its image; None of a commit.
    """

    ref: str
    label: str
    source: Source
    dependencies: frozenset[str]
    has_probes: bool = True
    root: Path | None = None
    executor: DockerExecutor | None = None


def require_repository(project: Path) -> None:
    """Refuse an installation that is no checkout.

    Raises:
        UsageError: With what git says.
    """
    top = _git(project, "rev-parse", "--show-toplevel").decode().strip()
    if Path(top).resolve() != project.resolve():
        raise UsageError("this suite is not installed from its git repository; clone it and run repro there")


def lay_out(ref: str, root: Path, project: Path) -> Code:
    """Put the code that `ref` names into the new folder `root`, and let its trainer say which code it is.

    Args:
        ref: Whatever git takes for a commit, or `WORKING_TREE` for the checkout with its changes.
        root: The folder.
        project: The checkout.

    Raises:
        UsageError: If there is no such commit, or its trainer cannot be started here or records its code otherwise.
    """
    root.mkdir()
    if ref == WORKING_TREE:
        source = _copy_working_tree(root, project)
    else:
        commit = _resolve(ref, project)
        _extract(commit, root, project)
        (root / STAMP_FILE).write_text(json.dumps({"commit": commit, "dirty": False, "diff_sha256": None}))
        source = find_source(root)
    source = source.model_copy(update={"trainer": None, "trainer_sha256": trainer_sha256(root / "unilab")})
    return Code(ref, source.label, source, _dependencies(root), _look(ref, root, source), root)


def _resolve(ref: str, project: Path) -> str:
    try:
        return _git(project, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").decode().strip()
    except UsageError:
        raise UsageError(
            f"{ref!a} is no commit of this repository; name one (HEAD~1, a branch, a tag, a hash), "
            f"or {WORKING_TREE} for the working tree"
        ) from None


def _extract(commit: str, root: Path, project: Path) -> None:
    present = _git(project, "ls-tree", "--name-only", commit, "--", *SOURCES).decode().split()
    if not present:
        return  # and without names, git would archive everything
    with tarfile.open(fileobj=io.BytesIO(_git(project, "archive", "--format=tar", commit, *present))) as archive:
        archive.extractall(root, filter="data")


def _copy_working_tree(root: Path, project: Path) -> Source:
    source = find_source(project)
    for name in SOURCES:
        if (project / name).is_dir():
            shutil.copytree(project / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(project / name, root / name)
    if sources_sha256(root) != source.sources_sha256:
        raise UsageError("the working tree changed while it was copied; leave it alone for a moment and start again")
    facts = {name: getattr(source, name) for name in ("commit", "dirty", "diff_sha256")}
    (root / STAMP_FILE).write_text(json.dumps(facts))
    return source


def _look(ref: str, root: Path, source: Source) -> bool:
    """Check that a run would import this code and record it as such; return whether it has probes."""
    command = [sys.executable, "-P", "-c", LOOK]
    environment = trainer_environment(os.environ, root)
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        raise UsageError(f"{ref}: importing its trainer took longer than {LIMIT_SECONDS:g} s") from None
    if done.returncode != 0:
        raise _unusable(ref, source, _last_line(done.stderr))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    facts = {name: getattr(source, name) for name in ("commit", "dirty", "diff_sha256")}
    if Path(found["package"]) != (root / "unilab").resolve():
        raise _unusable(ref, source, "it has no package unilab")
    if not found["train"]:
        raise _unusable(ref, source, "it has no unilab/train.py")
    if found["git"] != facts or found["sources"] != source.trainer_sha256:
        raise _unusable(ref, source, "its runs do not record their code as this suite reads it")
    return bool(found["probes"])


def _unusable(ref: str, source: Source, why: str) -> UsageError:
    return UsageError(f"{ref} ({source.label}) cannot be measured by this suite: {why}; name a later commit")


def _dependencies(root: Path) -> frozenset[str]:
    """Requirements of the project, without spaces; none where it has no readable pyproject.toml."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return frozenset(re.sub(r"\s", "", item) for item in project["dependencies"])
    except (OSError, ValueError, LookupError, TypeError):
        return frozenset()


def _git(project: Path, *arguments: str) -> bytes:
    """Standard output of a git command.

    Raises:
        UsageError: With its last line where it failed, or where there is no git.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}  # a hook sets GIT_DIR
    try:
        done = subprocess.run(["git", "-C", str(project), *arguments], env=environment, capture_output=True, timeout=60)
    except FileNotFoundError:
        raise UsageError("repro ab needs git, which is not installed") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"git {arguments[0]} took longer than a minute") from None
    if done.returncode != 0:
        raise UsageError(f"repro ab needs the git repository of this suite: git says: {_last_line(done.stderr)}")
    return done.stdout


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing"
