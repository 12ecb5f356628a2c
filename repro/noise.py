"""How much a host varies between runs of the same work: one number for a session, with its limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from repro.evidence import CellEvidence
from repro.schema import Strict
from repro.spin import NOISE_LIMIT
from repro.stats import pooled_spread


class NoiseResult(Strict):
    """The host-noise score of a session.

    Attributes:
        score: Standard deviation of log values within a case, pooled over the cases; about a relative spread.
        limit: Score above which absolute rates of the session must not be compared with those of another.
        source: `ceilings`, the physics alone measured beside each run, where a case has two of them; else `runs`.
        n: Values behind the score.
    """

    score: float
    limit: float
    source: Literal["ceilings", "runs"]
    n: int

    @property
    def quiet(self) -> bool:
        """Whether the score is within its limit."""
        return self.score <= self.limit


def session_noise(cells: Iterable[CellEvidence]) -> NoiseResult | None:
    """The score of a session's cells, or None where no case was measured twice."""
    measured = [item for item in cells if item.status == "measured" and item.throughput is not None]
    ceilings: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    for item in measured:
        assert item.throughput is not None
        rates.setdefault(item.cell.case, []).append(item.throughput.steps_per_second)
        if item.ceiling:
            ceilings.setdefault(item.cell.case, []).append(item.ceiling)
    return _score("ceilings", list(ceilings.values())) or _score("runs", list(rates.values()))


def _score(source: Literal["ceilings", "runs"], groups: Sequence[Sequence[float]]) -> NoiseResult | None:
    repeated = [group for group in groups if len(group) > 1]
    if not repeated:
        return None
    # Decimals, not digits: a difference of nearly equal logs has few digits that all machines agree on.
    score = round(pooled_spread(repeated), 6)
    return NoiseResult(score=score, limit=NOISE_LIMIT, source=source, n=sum(map(len, repeated)))
