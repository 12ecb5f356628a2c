"""What all tests of the trainer have in common."""

from __future__ import annotations

import pytest
import torch

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
