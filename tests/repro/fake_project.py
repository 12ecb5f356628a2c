"""A git repository with a trainer package that is the fake trainer, so that every commit of it trains in no time."""

from __future__ import annotations

import subprocess
from pathlib import Path

import fake_probe
import fake_trainer

import unilab
from unilab import provenance

ROOT = Path(unilab.__file__).parent.parent
WHO = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
TRAIN = """
import json, os, sys
from unilab.provenance import PACKAGE, git_facts, source_sha256
code = {{"git": git_facts(PACKAGE.parent), "source_sha256": source_sha256()}}
os.environ |= {{"FAKE_RATE": "{rate}", "FAKE_CODE": json.dumps(code), "PYTHONPATH": {root!r}}}
os.execv(sys.executable, [sys.executable, {program!r}, *sys.argv[1:]])
"""
PROBES = """
import os, sys
print("probed by the trainer of rate {rate}", flush=True)
os.environ["PYTHONPATH"] = {root!r}
os.execv(sys.executable, [sys.executable, {program!r}, *sys.argv[1:]])
"""


def git(project: Path, *arguments: str) -> str:
    command = ["git", "-C", str(project), *WHO, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def write_trainer(project: Path, rate: int, probes: bool = False) -> None:
    """Make the trainer of the working tree one of `rate` env steps/s; its provenance is the real one's."""
    package = project / "unilab"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    source = Path(provenance.__file__).read_text(encoding="utf-8")
    for line in ("import psutil\n", "import torch\n", "from unilab.physics.pinning import allowed_cpus, cpu_model\n"):
        assert line in source
        source = source.replace(line, "")  # they take seconds to import
    (package / "provenance.py").write_text(source)
    (package / "train.py").write_text(TRAIN.format(rate=rate, root=str(ROOT), program=fake_trainer.__file__))
    if probes:
        (package / "probes").mkdir(exist_ok=True)
        (package / "probes" / "__init__.py").write_text("")
        main = PROBES.format(rate=rate, root=str(ROOT), program=fake_probe.__file__)
        (package / "probes" / "__main__.py").write_text(main)


def commit(project: Path, message: str) -> str:
    """Commit the whole working tree; return the commit."""
    git(project, "add", "-A")
    git(project, "commit", "-qm", message)
    return git(project, "rev-parse", "HEAD")


def make_project(project: Path, *rates: int, probes: bool = False) -> list[str]:
    """A repository with a commit for each rate; return the commits, oldest first."""
    project.mkdir()
    git(project, "init", "-q")
    (project / "repro").mkdir()
    (project / "repro" / "__init__.py").write_text("")
    (project / "pyproject.toml").write_text('[project]\nname = "x"\ndependencies = ["torch>=2", "numpy >= 2"]\n')
    commits = []
    for number, rate in enumerate(rates):
        write_trainer(project, rate, probes)
        commits.append(commit(project, f"Subject of {number}"))
    return commits
