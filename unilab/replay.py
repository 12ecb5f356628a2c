"""The replay ring: complete transitions on the learner's device, written and sampled with static shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from unilab.state import StateRegistry


def row_width(widths: dict[str, int]) -> int:
    """Columns of a packed row with these parts, see `ReplayRing`."""
    return sum(max(width, 1) for width in widths.values())


class ReplayRing:
    """A ring of packed float32 transitions.

    Args:
        capacity: rows.
        widths: name and width of every part of a row, in column order; width 0 is one column without an axis.
        device: where the ring lives.
        registry: receives the write position and the fill; the rows themselves are not state to save.

    Attributes:
        rows: `(capacity + 1, width)`; the last row takes what must not be stored.
        position: next row to write, int64, 0-d.
        size: valid rows, int64, 0-d.
    """

    def __init__(self, capacity: int, widths: dict[str, int], device: torch.device, registry: StateRegistry) -> None:
        self.capacity = capacity
        self._widths = widths
        self.width = row_width(widths)
        self.rows = torch.zeros(capacity + 1, self.width, device=device)
        position, size = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        self.position = registry.tensor("replay/position", position, lasting=False)
        self.size = registry.tensor("replay/size", size, lasting=False)

    def append(self, parts: dict[str, Tensor], valid: Tensor) -> None:
        """Store one transition of every environment, those that are not valid excepted.

        Args:
            parts: `(N, width)` or `(N,)` per name of `widths`.
            valid: `(N,)` bool.
        """
        columns = [parts[name] if width else parts[name].unsqueeze(-1) for name, width in self._widths.items()]
        row = (self.position + torch.cumsum(valid, 0) - 1) % self.capacity
        row = torch.where(valid, row, self.capacity)
        self.rows.index_copy_(0, row, torch.cat(columns, -1))
        count = valid.sum()
        self.position.copy_((self.position + count) % self.capacity)
        self.size.copy_((self.size + count).clamp(max=self.capacity))

    def gather(self, draws: Tensor, out: Tensor) -> None:
        """Gather uniformly drawn rows, with replacement.

        Args:
            draws: `(M,)` int64, non-negative; taken modulo the fill.
            out: `(M, width)`.
        """
        torch.index_select(self.rows, 0, draws % self.size.clamp(min=1), out=out)

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """Views of the parts of packed rows `(M, width)`."""
        parts, start = {}, 0
        for name, width in self._widths.items():
            piece = rows[:, start : start + max(width, 1)]
            parts[name] = piece if width else piece.squeeze(-1)
            start += max(width, 1)
        return parts
