"""Benchmarks compute with as many threads as a run does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from unilab.hardware import learner_threads


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(learner_threads())
    yield
    torch.set_num_threads(before)
