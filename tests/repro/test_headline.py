from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from repro.headline import stage_sentence


def result(**fields: float | None) -> Any:
    cell = {"case": "n1", "status": "measured", "physics_fraction": 0.6, "exposed_ms": 26.0, "learner_cycle_ms": 58.0}
    return SimpleNamespace(cells=[SimpleNamespace(**{**cell, **fields})])


@pytest.mark.parametrize(
    ("fields", "stage"),
    [
        ({}, "learner in `n1` (physics takes 39.00 ms of a tick of 65.00 ms, the learner's update beside it 58.00 ms)"),
        ({"learner_cycle_ms": 38.0}, "physics in `n1` (physics takes 39.00 ms"),
        ({"physics_fraction": 0.4, "exposed_ms": 3.0, "learner_cycle_ms": 1.0}, "physics in `n1` (physics takes 2.00"),
    ],
)
def test_the_bounding_stage_is_the_longer_of_physics_and_update(fields: dict[str, float], stage: str) -> None:
    sentence = stage_sentence(result(**fields), "n1")
    assert sentence is not None and sentence.startswith(stage)


@pytest.mark.parametrize("missing", ["physics_fraction", "exposed_ms", "learner_cycle_ms"])
def test_no_stage_without_its_numbers(missing: str) -> None:
    assert stage_sentence(result(**{missing: None}), "n1") is None


def test_cells_without_a_number_do_not_count() -> None:
    assert stage_sentence(result(status="failed"), "n1") is None
