#!/usr/bin/env python3
"""Write source_stamp.json, the commit of a tree that travels without git, and print an image's build arguments.

An image keeps the stamp only if built with the hash printed here from these very sources; an old stamp is dropped.
Needs Python and git alone; `repro.provenance` computes the same facts and a test compares the two.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

SOURCES = ("unilab", "repro", "pyproject.toml")
SUFFIXES = (".py", ".c", ".yaml", ".xml", ".toml", ".j2")
PLAIN_DIFF = ("--no-ext-diff", "--no-textconv", "--no-color", "--full-index", "--binary")


def main(root: Path) -> int:
    """Stamp the tree in `root`; exit code 1 where git knows no commit of it."""
    try:
        stamp = git_facts(root)
    except (OSError, subprocess.SubprocessError):
        print("scripts/stamp.py: git knows no commit of this folder; the image gets no revision", file=sys.stderr)
        return 1
    (root / "source_stamp.json").write_text(json.dumps(stamp, indent=2, sort_keys=True) + "\n")
    print(f"REVISION={stamp['commit']}{'-dirty' if stamp['dirty'] else ''}")
    print(f"SOURCE_SHA256={sources_sha256(root)}")
    return 0


def git_facts(root: Path) -> dict[str, str | bool | None]:
    """Commit, whether the sources differ from it, and the hash of the difference."""
    if Path(_git(root, "rev-parse", "--show-toplevel").decode().strip()).resolve() != root.resolve():
        raise FileNotFoundError(root)  # a repository around it has commits of something else
    commit = _git(root, "rev-parse", "HEAD").decode().strip()
    difference = _git(root, "diff", *PLAIN_DIFF, "HEAD", "--", *SOURCES)
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *SOURCES)
    for name in untracked.split(b"\0")[:-1]:
        content = (root / name.decode(errors="surrogateescape")).read_bytes()
        difference += name + b"\0" + hashlib.sha256(content).hexdigest().encode() + b"\n"
    digest = hashlib.sha256(difference).hexdigest() if difference else None
    return {"commit": commit, "dirty": bool(difference), "diff_sha256": digest}


def sources_sha256(root: Path) -> str:
    """Hash over names and contents of the source files of both packages."""
    digest = hashlib.sha256()
    for package in ("repro", "unilab"):
        for path in sorted(p for p in (root / package).rglob("*") if p.suffix in SUFFIXES):
            digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _git(root: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, timeout=60).stdout


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
