"""Fixtures of the suite's tests: synthetic runs, in the process or as a command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_trainer
import pytest


@pytest.fixture(scope="session", autouse=True)
def _idle_gpus() -> Iterator[None]:
    """Made-up GPUs are idle, whatever this machine's do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("repro.busy.gpu_loads", tuple)
        yield


@pytest.fixture
def fake_run(tmp_path: Path) -> Callable[..., Path]:
    """Factory of run directories: `fake_run("name", rate=…, mode=…, iterations=…)`, fields of `RunOptions`."""

    def write(name: str = "run", **options: Any) -> Path:
        return fake_trainer.write_run(tmp_path / name, replace(fake_trainer.RunOptions(), **options))

    return write


@pytest.fixture
def fake_trainer_command() -> list[str]:
    """What stands for `python -m unilab.train` in a test of the launcher."""
    return [sys.executable, str(Path(fake_trainer.__file__))]
