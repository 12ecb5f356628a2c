"""What all tests of the trainer have in common."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unilab.tasks.velocity_task import VelocityTask
from unilab.video import VideoError, find_renderer


@pytest.hookimpl(tryfirst=True)  # before fixtures, whatever their scope
def pytest_runtest_setup() -> None:
    """Small matrices gain nothing from threads, least of all where cores are shared; commands set their own number."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def renderer() -> str:
    """The renderer that works here; without one the test is skipped."""
    try:
        return find_renderer()
    except VideoError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def uniforms(task: VelocityTask) -> Tensor:
    """Draws of 4096 resets of a module's `task`."""
    return torch.rand(4096, task.uniform_width, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def resets(task: VelocityTask, uniforms: Tensor) -> dict[str, Tensor]:
    """What these draws give, by field."""
    rows = task.reset_rows(uniforms)
    return {name: rows[:, columns] for name, columns in task.spec.reset_columns.items()}
