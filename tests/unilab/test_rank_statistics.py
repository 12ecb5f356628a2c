"""Statistics of several ranks as one row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unilab.data_parallel import DataParallel
from unilab.environment import EPISODE_WINDOW
from unilab.names import (
    EXPOSED_MS,
    INVALID_ROWS,
    ITERATION_TIME,
    LEARNING_TIME,
    MEAN_EPISODE_LENGTH,
    MEAN_REWARD,
    PACK_MS,
    TIMEOUT_RATE,
    TOTAL_FPS,
    rank_tag,
)
from unilab.rank_statistics import EPISODIC, HOST_MEASURES, SUMMED, RankStatistics


class Pretended(DataParallel):
    """Three ranks, each with its rank number times what this one has."""

    def gather(self, values: Tensor) -> Tensor:
        return torch.stack([values, 2 * values, 3 * values])


def test_counts_and_rates_are_summed_and_the_rest_averaged() -> None:
    metrics = torch.tensor([4.0, 10.0])
    statistics = RankStatistics(metrics, ["Loss/critic", INVALID_ROWS], Pretended(0, 3), torch.tensor(0))
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


class Rows(DataParallel):
    """Two ranks that have these rows beside the host's measures, and these episodes."""

    def __init__(self, metrics: list[list[float]], episodes: list[int]) -> None:
        super().__init__(0, 2)
        host = [0.0] * (len(HOST_MEASURES) + 1)
        self._rows = [[*row, *host, float(count)] for row, count in zip(metrics, episodes, strict=True)]

    def gather(self, values: Tensor) -> Tensor:
        assert values.tolist() == self._rows[0]
        return torch.tensor(self._rows)


@pytest.mark.parametrize(
    ("episodes", "expected"),
    [
        ((100, 100), (5.0, 15.0, 0.5, 5.0)),
        ((0, 3), (8.0, 20.0, 1.0, 5.0)),  # the first has no episode, so its zeros say nothing
        ((1, 3), (6.5, 17.5, 0.75, 5.0)),
        ((0, 0), (0.0, 0.0, 0.0, 5.0)),
    ],
)
def test_means_over_episodes_weigh_each_rank_by_its_episodes(
    episodes: tuple[int, int], expected: tuple[float, ...]
) -> None:
    own, other = [2.0, 10.0, 0.0, 2.0], [8.0, 20.0, 1.0, 8.0]
    names = [MEAN_REWARD, MEAN_EPISODE_LENGTH, TIMEOUT_RATE, "Loss/critic"]
    assert set(EPISODIC) == set(names[:3])
    statistics = RankStatistics(torch.tensor(own), names, Rows([own, other], [*episodes]), torch.tensor(episodes[0]))
    statistics.run()
    assert statistics.values[:4].tolist() == pytest.approx(expected)


def test_only_the_episodes_of_the_means_weigh() -> None:
    """A rank's mean is over its last 100 episodes, however many it has finished."""
    ranks = Rows([[2.0], [8.0]], [EPISODE_WINDOW, 50])
    statistics = RankStatistics(torch.tensor([2.0]), [MEAN_REWARD], ranks, torch.tensor(10**6))
    statistics.run()
    assert statistics.values[0].item() == pytest.approx(4.0)


@pytest.mark.parametrize("episodes", [0, 1, 7, 99, 10**6])
def test_one_rank_keeps_its_episodes_means(episodes: int) -> None:
    metrics = torch.tensor([0.1 if episodes else 0.0])
    statistics = RankStatistics(metrics, [MEAN_REWARD], DataParallel(), torch.tensor(episodes))
    statistics.run()
    assert torch.equal(statistics.values[:1], metrics)


def test_one_rank_keeps_its_bits() -> None:
    metrics = torch.tensor([0.1, torch.inf, -3e-30])
    statistics = RankStatistics(metrics, ["a", "b", INVALID_ROWS], DataParallel(), torch.tensor(0))
    statistics.host.fill_(1 / 3)
    statistics.run()
    assert torch.equal(statistics.values, torch.cat((metrics, statistics.host[:-1])))
    assert len(statistics.names) == len(statistics.values)
