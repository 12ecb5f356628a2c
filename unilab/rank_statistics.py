"""The statistics of a tick over all ranks: counts and rates summed, the rest averaged; each rank's own times beside.

What is a mean over episodes is averaged by how many each rank has, so that a rank without one does not count as 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unilab.data_parallel import DataParallel
from unilab.environment import EPISODE_WINDOW
from unilab.names import (
    ACTION_WAIT_MS,
    APPLY_MS,
    BACKEND_MS,
    COLLECTOR_WAIT_MS,
    EXPOSED_MS,
    INFERENCE_MS,
    INVALID_ROWS,
    ITERATION_TIME,
    LEARNING_TIME,
    MEAN_EPISODE_LENGTH,
    MEAN_REWARD,
    PACK_MS,
    PHYSICS_FRACTION,
    TIMEOUT_RATE,
    TOTAL_FPS,
    rank_tag,
)

SUMMED = (TOTAL_FPS, INVALID_ROWS)
EPISODIC = (MEAN_REWARD, MEAN_EPISODE_LENGTH, TIMEOUT_RATE)
# What the host of a rank measures of a tick.
HOST_MEASURES = (
    TOTAL_FPS,
    ITERATION_TIME,
    PHYSICS_FRACTION,
    EXPOSED_MS,
    COLLECTOR_WAIT_MS,
    INFERENCE_MS,
    ACTION_WAIT_MS,
    APPLY_MS,
    BACKEND_MS,
    PACK_MS,
)
# Values of a rank's row after its metrics: its host's measures, the last update's time, its episodes.
BESIDE_METRICS = len(HOST_MEASURES) + 2


class RankStatistics:
    """The last part of the update phase: one row per rank becomes one row, and each rank's times stay beside it.

    Args:
        metrics: `(M,)` this rank's metrics of the tick, at a fixed address.
        names: their tags.
        ranks: the ranks.
        episodes: `()` int64 episodes that this rank has finished, at a fixed address.

    Attributes:
        host: `(len(HOST_MEASURES) + 1,)` what this rank's host measured of the tick and the seconds of the update
            before, to be written before.
        names: tags of `values`.
        values: `(len(names),)`: metrics and measures over all ranks, then, of several ranks, what each one wrote.
    """

    def __init__(self, metrics: Tensor, names: Sequence[str], ranks: DataParallel, episodes: Tensor) -> None:
        self._metrics, self._ranks, self._episodes = metrics, ranks, episodes
        joined = [*names, *HOST_MEASURES]
        own = [rank_tag(tag, rank) for rank in range(ranks.world_size) for tag in (*HOST_MEASURES, LEARNING_TIME)]
        self.names = joined + own if ranks.world_size > 1 else joined
        weights = [1.0 if name in SUMMED else 1.0 / ranks.world_size for name in joined]
        self._weights = torch.tensor(weights, device=metrics.device)
        self._episodic = torch.tensor([name in EPISODIC for name in joined], device=metrics.device)
        self.host = torch.zeros(len(HOST_MEASURES) + 1, device=metrics.device)
        self.values = torch.zeros(len(self.names), device=metrics.device)

    def run(self) -> None:
        """Gather and combine; static buffers, nothing read on the host."""
        episodes = self._episodes.clamp(max=EPISODE_WINDOW).to(self.host.dtype).reshape(1)
        rows = self._ranks.gather(torch.cat((self._metrics, self.host, episodes)))  # (ranks, M + BESIDE_METRICS)
        share = rows[:, -1:] / rows[:, -1].sum().clamp(min=1)  # (ranks, 1); all 0 before the first episode
        weights = torch.where(self._episodic, share, self._weights)
        joined, own = self.values.split((len(self._weights), len(self.values) - len(self._weights)))
        torch.sum(rows[:, :-2] * weights, 0, out=joined)
        if own.numel():
            own.copy_(rows[:, len(self._metrics) : -1].flatten())
