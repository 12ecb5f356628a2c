"""Record in image.json what an image was built from, and refuse to build one whose labels would say otherwise."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path

from repro.provenance import STAMP_FILE, UNKNOWN, find_source, sources_sha256
from repro.schema import canonical_json

PROJECT = Path(__file__).resolve().parent.parent
NVIDIA = {"cuda": "cuda-runtime", "cudnn": "cudnn", "nccl": "nccl"}  # label → middle of the package's name
ABSENT = "none"


def main() -> int:
    """Write the file; exit code 1, naming both values, where a build argument contradicts what is installed."""
    sources = sources_sha256(PROJECT)
    if os.environ["SOURCE_SHA256"] == UNKNOWN:
        (PROJECT / STAMP_FILE).unlink(missing_ok=True)  # nothing says that it belongs to these sources
    source = find_source(PROJECT)
    truth = {
        "SOURCE_SHA256": sources,
        "REVISION": source.revision,
        **{f"{name.upper()}_VERSION": version for name, version in nvidia_versions().items()},
    }
    wrong = [
        f"{name}={os.environ[name]}, but this image has {value}"
        for name, value in truth.items()
        if os.environ[name] not in (value, UNKNOWN)
    ]
    for line in wrong:
        print(f"image_facts: build argument {line}", file=sys.stderr)
    if wrong:
        return 1
    (PROJECT / "image.json").write_text(canonical_json(facts(truth)), encoding="utf-8")
    return 0


def facts(truth: dict[str, str]) -> dict[str, object]:
    """Content of image.json."""
    lock, base = os.environ["LOCK"], os.environ["PYTHON_IMAGE"]
    names = ("torch", "mujoco", "numpy", "unilab-repro")
    return {
        "schema_version": 1,
        "base": {"name": base, "digest": base.partition("@")[2] or UNKNOWN, "system": system()},
        "lock": {"name": lock, "sha256": hashlib.sha256((PROJECT / "locks" / f"{lock}.txt").read_bytes()).hexdigest()},
        "revision": truth["REVISION"],
        "source_sha256": truth["SOURCE_SHA256"],
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in names},
            **nvidia_versions(),
        },
    }


def nvidia_versions() -> dict[str, str]:
    """Versions of the CUDA runtime, cuDNN and NCCL as installed by wheels, ``none`` for a CPU image."""
    found = dict.fromkeys(NVIDIA, ABSENT)
    for distribution in importlib.metadata.distributions():
        for label, middle in NVIDIA.items():
            if re.fullmatch(rf"nvidia-{middle}(-cu\d+)?", distribution.name.lower()):
                found[label] = distribution.version
    return found


def system() -> str:
    """Name of the distribution below."""
    return platform.freedesktop_os_release()["PRETTY_NAME"]


if __name__ == "__main__":
    sys.exit(main())
