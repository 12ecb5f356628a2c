"""Sessions of the fake trainer for tests: a small matrix, a host, a finished report folder."""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import fake_trainer

from repro.cli import main
from repro.host import Gpu, Host
from repro.matrix import Matrix, parse_matrix
from repro.place import Cpu
from repro.provenance import Source

TRAINER = (sys.executable, str(Path(fake_trainer.__file__)))
SOURCE = Source(origin="git", commit="0123456789" * 4, dirty=False, diff_sha256=None, sources_sha256="a" * 64)
HEAD = """
name = "{name}"
reason = "A test."
smoke = true
algo = "sac"
task = "g1_walk_flat"
sim = "mujoco"
iterations = 40
repeats = {repeats}
warmup = {warmup}
interval = "{interval}"
margin = 0.05
timeout_seconds = {timeout}
"""
COMPARISON = """
[[comparisons]]
name = "speedup"
numerator = "fast"
denominator = "slow"
"""


def matrix_text(
    cases: dict[str, dict[str, str]],
    *,
    name: str = "toy",
    repeats: int = 1,
    warmup: int = 0,
    interval: str = "welch",
    timeout: float = 60.0,
    extra: str = "",
) -> str:
    """TOML of a smoke matrix: cases by name, each with the environment of its trainer."""
    text = HEAD.format(name=name, repeats=repeats, warmup=warmup, interval=interval, timeout=timeout) + extra
    for case, environment in cases.items():
        pairs = ", ".join(f'{key} = "{value}"' for key, value in environment.items())
        text += (
            f'\n[[cases]]\nname = "{case}"\nreason = "One of the cases."\nworkers = 1\nenvironment = {{ {pairs} }}\n'
        )
    return text


TOY = matrix_text(
    {"slow": {"FAKE_RATE": "10000"}, "fast": {"FAKE_RATE": "15000"}}, repeats=2, warmup=1, extra=COMPARISON
)


def toy_matrix(**changes: Any) -> Matrix:
    return parse_matrix(TOY, "toy.toml").model_copy(update=changes)


def make_host(cpus: int = 4, gpu_count: int = 0, **changes: Any) -> tuple[Host, tuple[Cpu, ...]]:
    """A made-up host with `cpus` physical cores and `gpu_count` GPUs, and its topology."""
    found = tuple(Gpu(name="NVIDIA H200", uuid=f"GPU-{i}", memory_bytes=140 * 2**30) for i in range(gpu_count))
    facts: dict[str, Any] = {
        "platform": "Linux 6.1 x86_64",
        "cpu_model": "Made-up CPU",
        "cpu_count": cpus,
        "allowed_cpus": tuple(range(cpus)),
        "physical_cores": cpus,
        "cgroup_cpus": None,
        "memory_bytes": 8 * 2**30,
        "memory_limit_bytes": None,
        "shm_bytes": 2**30,
        "gpus": found,
        "visible_gpus": tuple(gpu.uuid for gpu in found),
        "driver": "600.1" if gpu_count else None,
        "compiler": "gcc",
        "versions": {"python": "3.12.0", "torch": "2.13.0", "mujoco": "4.0.0"},
        "environment": {},
    }
    return Host(**facts | changes), tuple(Cpu(cpu, cpu, 0) for cpu in range(cpus))


def run_session(folder: Path, text: str, *flags: str) -> tuple[int, Path]:
    """Run a matrix with the fake trainer; return the exit code and the report folder."""
    folder.mkdir(parents=True, exist_ok=True)
    matrix = folder / "matrix.toml"
    matrix.write_text(text)
    out = folder / "out"
    return main(["run", "--matrix", str(matrix), "--out", str(out), *flags], trainer=TRAINER), out


@functools.cache
def _finished() -> Path:
    code, out = run_session(Path(tempfile.mkdtemp(prefix="repro-session-")), TOY)
    assert code == 0
    return out


def finished_session(folder: Path) -> Path:
    """A fresh copy of one finished toy session, which is run once."""
    return Path(shutil.copytree(_finished(), folder / "report"))
