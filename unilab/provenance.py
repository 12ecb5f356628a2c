"""Where a run comes from: code, versions and host, without names of people or machines."""

from __future__ import annotations

import contextlib
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

from unilab.physics.pinning import allowed_cpus, cpu_model

PACKAGE = Path(__file__).parent
STAMP_FILE = "source_stamp.json"  # commit of a tree that travelled without its git metadata
SOURCES = ("unilab", "repro", "pyproject.toml")  # what makes a tree dirty; a report being written does not
PLAIN_DIFF = ("--no-ext-diff", "--no-textconv", "--no-color", "--full-index", "--binary")  # whatever git is set to
SOURCE_SUFFIXES = (".py", ".c", ".yaml", ".xml")
VERSIONED = ("torch", "mujoco", "numpy", "hydra-core", "tensorboard", "triton")
ENVIRONMENT_PREFIXES = ("CUDA_", "NCCL_", "TORCH", "OMP_", "MKL_", "OPENBLAS_", "PYTORCH_", "MUJOCO_", "UNILAB_")


def command_facts(argv: list[str], variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Content of `command.json`.

    Args:
        argv: the command line.
        variables: the environment as it was found; None for this process's as it is.
    """
    found = os.environ if variables is None else variables
    environment = {key: value for key, value in sorted(found.items()) if key.startswith(ENVIRONMENT_PREFIXES)}
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
        diff = _git(root, "diff", *PLAIN_DIFF, "HEAD", "--", *SOURCES)
        for name in _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *SOURCES).split("\0")[:-1]:
            diff += f"{name}\0{hashlib.sha256((root / name).read_bytes()).hexdigest()}\n"
    except (OSError, subprocess.SubprocessError):
        stamp = root / STAMP_FILE
        unknown = {"commit": None, "dirty": None, "diff_sha256": None}
        return unknown | (json.loads(stamp.read_text()) if stamp.exists() else {})
    return {
        "commit": commit,
        "dirty": bool(diff),
        "diff_sha256": hashlib.sha256(diff.encode(errors="surrogateescape")).hexdigest() if diff else None,
    }


def source_sha256(package: Path = PACKAGE) -> str:
    """Hash over every source file of a package, names included."""
    digest = hashlib.sha256()
    for path in sorted(p for p in package.rglob("*") if p.suffix in SOURCE_SUFFIXES):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode())
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
        "cpu_model": cpu_model(),
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
    """Replace host name, user name and home folder in every string of a JSON value.

    A name counts wherever no letter or digit touches it, so also within `/data/NAME-runs`: a word too many is hidden
    rather than a name too few.
    """
    return _redact(value, _names())


def _redact(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _redact(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [_redact(item, names) for item in value]
    if not isinstance(value, str):
        return value
    for name, placeholder in names.items():
        value = re.sub(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", placeholder, value)
    return value


def _names() -> dict[str, str]:
    """What must not be published and what stands for it, the longest first."""
    host = socket.gethostname()
    names = {host: "<host>", host.partition(".")[0]: "<host>"}
    with contextlib.suppress(RuntimeError, KeyError, OSError):  # a container's user may have no name
        names[getpass.getuser()] = "<user>"
    with contextlib.suppress(RuntimeError):  # and no home
        names[str(Path.home())] = "<home>"
    return {name: names[name] for name in sorted(names, key=len, reverse=True) if name.strip("/")}


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}  # a hook sets GIT_DIR
    result = subprocess.run(command, check=True, capture_output=True, env=environment, timeout=20)
    return result.stdout.decode(errors="surrogateescape")
