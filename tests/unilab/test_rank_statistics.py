"""Statistics of several ranks as one row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unilab.data_parallel import DataParallel
from unilab.names import EXPOSED_MS, INVALID_ROWS, ITERATION_TIME, LEARNING_TIME, PACK_MS, TOTAL_FPS, rank_tag
from unilab.rank_statistics import HOST_MEASURES, SUMMED, RankStatistics


class Pretended(DataParallel):
    """Three ranks, each with its rank number times what this one has."""

    def gather(self, values: Tensor) -> Tensor:
        return torch.stack([values, 2 * values, 3 * values])


def test_counts_and_rates_are_summed_and_the_rest_averaged() -> None:
    metrics = torch.tensor([4.0, 10.0])
    statistics = RankStatistics(metrics, ["Loss/critic", INVALID_ROWS], Pretended(0, 3))
    statistics.host.copy_(torch.arange(1.0, 2 + len(HOST_MEASURES)))
    address = statistics.values.data_ptr()
    statistics.run()
    found = dict(zip(statistics.names, statistics.values.tolist(), strict=True))
    own = dict(zip(HOST_MEASURES, range(1, 1 + len(HOST_MEASURES)), strict=True))
    assert found["Loss/critic"] == pytest.approx(8.0)
    assert found[INVALID_ROWS] == 60.0
    assert found[TOTAL_FPS] == 6 * own[TOTAL_FPS]
    assert found[ITERATION_TIME] == pytest.approx(2 * own[ITERATION_TIME])
    assert found[EXPOSED_MS] == pytest.approx(2 * own[EXPOSED_MS])
    assert statistics.values.data_ptr() == address
    assert set(SUMMED) < set(found)
    assert found["Perf/rank0/iteration_time"] == own[ITERATION_TIME]
    assert found[rank_tag(PACK_MS, 1)] == 2 * own[PACK_MS]
    assert [found[rank_tag(LEARNING_TIME, rank)] for rank in range(3)] == [11.0, 22.0, 33.0]
    assert len(found) == len(statistics.names) == 2 + len(HOST_MEASURES) + 3 * (len(HOST_MEASURES) + 1)


def test_one_rank_keeps_its_bits() -> None:
    metrics = torch.tensor([0.1, torch.inf, -3e-30])
    statistics = RankStatistics(metrics, ["a", "b", INVALID_ROWS], DataParallel())
    statistics.host.fill_(1 / 3)
    statistics.run()
    assert torch.equal(statistics.values, torch.cat((metrics, statistics.host[:-1])))
    assert len(statistics.names) == len(statistics.values)
