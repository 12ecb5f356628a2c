"""The registry of everything mutable, used by capture, checkpoints and probes alike."""

from __future__ import annotations

import torch
from torch import Tensor


class StateRegistry:
    """Named device tensors and random generators that together are the state of a run.

    Entries are registered once, at construction of their owner, and from then on only written in place: a captured
    graph keeps their addresses.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._generators: dict[str, torch.Generator] = {}

    def tensor(self, name: str, value: Tensor) -> Tensor:
        """Register `value` under `name` and return it.

        Raises:
            ValueError: if the name is taken.
        """
        self._refuse_taken(name)
        self._tensors[name] = value
        return value

    def generator(self, name: str, value: torch.Generator) -> torch.Generator:
        """Register a random generator under `name` and return it.

        Raises:
            ValueError: if the name is taken.
        """
        self._refuse_taken(name)
        self._generators[name] = value
        return value

    def names(self) -> list[str]:
        """Every registered name, in registration order."""
        return [*self._tensors, *self._generators]

    def generators(self) -> dict[str, torch.Generator]:
        """The registered generators by name."""
        return dict(self._generators)

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of every entry; generators as their byte state."""
        copies = {name: value.detach().clone() for name, value in self._tensors.items()}
        return copies | {name: generator.get_state() for name, generator in self._generators.items()}

    @torch.no_grad()
    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """Write a snapshot back, in place.

        Raises:
            ValueError: if the snapshot's names or a shape differ from the registered ones.
        """
        if set(snapshot) != set(self.names()):
            difference = sorted(set(snapshot) ^ set(self.names()))
            raise ValueError(f"the snapshot and this run differ in {', '.join(difference)}")
        for name, value in self._tensors.items():
            if value.shape != snapshot[name].shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, the snapshot {tuple(snapshot[name].shape)}")
        for name, value in self._tensors.items():
            value.copy_(snapshot[name])
        for name, generator in self._generators.items():
            generator.set_state(snapshot[name])

    def _refuse_taken(self, name: str) -> None:
        if name in self._tensors or name in self._generators:
            raise ValueError(f"state {name!r} is registered twice")
