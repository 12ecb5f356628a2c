from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from session_builder import finished_session

from repro.evidence import read_evidence
from repro.noise import NoiseResult, session_noise
from repro.noise_section import noise_sentence, steadiness_table
from repro.result import compute_result
from repro.spin import NOISE_LIMIT


def cell(case: str, rate: float, ceiling: float | None = None, status: str = "measured") -> Any:
    return SimpleNamespace(
        status=status,
        ceiling=ceiling,
        cell=SimpleNamespace(case=case),
        throughput=SimpleNamespace(steps_per_second=rate),
    )


def noise(*cells: Any) -> NoiseResult | None:
    return session_noise(cells)


def test_the_score_by_hand() -> None:
    # Logs 0, 0.02 and 1, 1.04: squared deviations 2 * 0.01^2 + 2 * 0.02^2 = 0.001 over two degrees of freedom.
    rates = [("a", 1.0), ("a", math.exp(0.02)), ("b", math.exp(1.0)), ("b", math.exp(1.04))]
    found = noise(*(cell(case, rate) for case, rate in rates))
    assert found == NoiseResult(score=round(math.sqrt(0.0005), 6), limit=0.05, source="runs", n=4)


def test_ceilings_are_preferred_where_a_case_has_two() -> None:
    found = noise(cell("a", 1.0, 100.0), cell("a", 2.0, 100.0), cell("b", 5.0, 7.0))
    assert found == NoiseResult(score=0.0, limit=NOISE_LIMIT, source="ceilings", n=2)
    found = noise(cell("a", 3.0, 100.0), cell("a", 3.0), cell("b", 5.0, 7.0))
    assert found is not None and (found.source, found.n) == ("runs", 2)


def test_one_run_of_each_case_has_no_score() -> None:
    assert noise(cell("a", 1.0, 9.0), cell("b", 2.0, 9.0)) is None
    assert noise(cell("a", 1.0), cell("a", 2.0, status="discarded")) is None
    assert noise_sentence(None) == "Host noise: not known, no case was measured twice."


@pytest.mark.parametrize(("score", "meaning"), [(0.05, "within it, so this session"), (0.051, "must not")])
def test_the_sentence_says_what_the_limit_means(score: float, meaning: str) -> None:
    text = noise_sentence(NoiseResult(score=score, limit=0.05, source="runs", n=6))
    assert (
        text.startswith(f"Host noise: {100 * score:.1f} %, limit 5.0 % (") and meaning in text and "(6 values)" in text
    )


def test_a_session_has_its_score_and_every_run_its_trend(tmp_path: Path) -> None:
    out = finished_session(tmp_path)
    result = compute_result(read_evidence(out))
    rates = {c.id: c.steps_per_second or 0.0 for c in result.cells}
    squares = [math.log(rates[f"{case}_r1"] / rates[f"{case}_r2"]) ** 2 / 2 for case in ("slow", "fast")]
    assert result.noise is not None
    assert result.noise.score == pytest.approx(math.sqrt(sum(squares) / 2), abs=1e-6)
    page = (out / "report.md").read_text()
    assert noise_sentence(result.noise) in page
    table = steadiness_table(result)
    assert table in page and len(table.splitlines()) == 2 + 4  # warm-ups have no row
    for found in (c for c in result.cells if c.status == "measured"):
        assert found.effective_points is not None and 1 <= found.effective_points <= 19  # 40 events, 19 intervals
        assert found.autocorrelation == round(found.autocorrelation or 0.0, 6)
    shutil.rmtree(out / "runs" / "slow_r2")
    shutil.rmtree(out / "runs" / "fast_r2")
    assert compute_result(read_evidence(out)).noise is None
