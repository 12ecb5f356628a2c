"""Where a run comes from: code, versions and host, without names of people or machines."""

from __future__ import annotations

import getpass
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from unilab.physics.pinning import allowed_cpus

PACKAGE = Path(__file__).parent
STAMP_FILE = "source_stamp.json"  # commit of a tree that travelled without its git metadata
SOURCES = ("unilab", "repro", "pyproject.toml")  # what makes a tree dirty; a report being written does not
SOURCE_SUFFIXES = (".py", ".yaml", ".xml")
VERSIONED = ("torch", "mujoco", "numpy", "hydra-core", "tensorboard", "triton")
ENVIRONMENT_PREFIXES = ("CUDA_", "NCCL_", "TORCH", "OMP_", "MKL_", "OPENBLAS_", "PYTORCH_", "MUJOCO_", "UNILAB_")


def command_facts(argv: list[str]) -> dict[str, Any]:
    """Content of `command.json`."""
    environment = {key: value for key, value in sorted(os.environ.items()) if key.startswith(ENVIRONMENT_PREFIXES)}
    facts = {
        "argv": argv,
        "environment": environment,
        "git": git_facts(PACKAGE.parent),
        "source_sha256": source_sha256(),
        "versions": versions(),
        "affinity": allowed_cpus(),
        "host": host_facts(),
    }
    redacted = redact(facts)
    assert isinstance(redacted, dict)
    return redacted


def git_facts(root: Path) -> dict[str, Any]:
    """Commit, whether the tree differs from it, and the hash of the difference.

    Read from git, else from a `source_stamp.json` in `root`, else unknown (all None).
    """
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel").strip()).resolve() != root.resolve():
            raise FileNotFoundError(root)
        commit = _git(root, "rev-parse", "HEAD").strip()
        diff = _git(root, "diff", "HEAD", "--", *SOURCES)
        diff += _git(root, "ls-files", "--others", "--exclude-standard", "--", *SOURCES)
    except (OSError, subprocess.CalledProcessError):
        stamp = root / STAMP_FILE
        unknown = {"commit": None, "dirty": None, "diff_sha256": None}
        return unknown | (json.loads(stamp.read_text()) if stamp.exists() else {})
    return {
        "commit": commit,
        "dirty": bool(diff),
        "diff_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else None,
    }


def source_sha256() -> str:
    """Hash over every source file of this package, names included."""
    digest = hashlib.sha256()
    for path in sorted(p for p in PACKAGE.rglob("*") if p.suffix in SOURCE_SUFFIXES):
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def versions() -> dict[str, str | None]:
    """Versions of the interpreter, the libraries and the CUDA stack torch was built with; None where absent."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    found["cuda"] = torch.version.cuda
    has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None
    return found


def host_facts() -> dict[str, Any]:
    """CPU, memory, GPUs and platform of this host."""
    return {
        "cpu_model": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "gpus": [gpu_facts(index) for index in range(torch.cuda.device_count())],
        "platform": f"{sys.platform} {platform.machine()}",
    }


def gpu_facts(index: int) -> dict[str, str]:
    """Name and UUID of a visible CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    return {"name": properties.name, "uuid": f"GPU-{properties.uuid}"}


def redact(value: Any) -> Any:
    """Replace host name, user name and home folder in every string of a JSON value."""
    if isinstance(value, Mapping):
        return {key: redact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [redact(item) for item in value]
    if not isinstance(value, str):
        return value
    value = value.replace(str(Path.home()), "<home>")
    for name, placeholder in ((socket.gethostname(), "<host>"), (getpass.getuser(), "<user>")):
        if name:
            value = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", placeholder, value)
    return value


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
