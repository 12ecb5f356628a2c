"""The registry of everything mutable, used by capture, checkpoints and probes alike."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class StateRegistry:
    """Named device tensors and random generators that together are the state of a run.

    Entries are registered once, at construction of their owner, and from then on only written in place: a captured
    graph keeps their addresses. Lasting ones are what a checkpoint holds; the others begin anew in a resumed run.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._passing: set[str] = set()
        self._generators: dict[str, torch.Generator] = {}

    def tensor(self, name: str, value: Tensor, lasting: bool = True) -> Tensor:
        """Register `value` under `name` and return it.

        Args:
            name: its name.
            value: the tensor.
            lasting: whether a resumed run continues it; not so draws, rows of single environments and what counts them.

        Raises:
            ValueError: if the name is taken.
        """
        self._refuse_taken(name)
        self._tensors[name] = value
        if not lasting:
            self._passing.add(name)
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

    def lasting(self) -> dict[str, Tensor]:
        """The lasting tensors themselves by name, in registration order."""
        return {name: value for name, value in self._tensors.items() if name not in self._passing}

    def snapshot(self, lasting: bool = False) -> dict[str, Tensor]:
        """Copies of every entry, or of the lasting ones; generators, which all last, as their byte state."""
        copies = {name: value.detach().clone() for name, value in self._chosen(lasting).items()}
        return copies | {name: generator.get_state() for name, generator in self._generators.items()}

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, Tensor], lasting: bool = False) -> None:
        """Write a snapshot back, in place.

        Args:
            snapshot: as `snapshot` returned it, of this run or another.
            lasting: it holds the lasting entries alone.

        Raises:
            ValueError: as `check` does; nothing is written then.
        """
        self.check(snapshot, lasting)
        for name, value in self._chosen(lasting).items():
            value.copy_(snapshot[name])
        for name, generator in self._generators.items():
            generator.set_state(snapshot[name])

    def check(self, snapshot: Mapping[str, Tensor], lasting: bool = False) -> None:
        """Refuse what is no snapshot of a run like this one.

        Raises:
            ValueError: if names, or a shape or type, differ from the registered ones.
        """
        expected = self._chosen(lasting) | {name: draws.get_state() for name, draws in self._generators.items()}
        if set(snapshot) != set(expected):
            difference = sorted(set(snapshot) ^ set(expected))
            raise ValueError(f"the snapshot and this run differ in {', '.join(difference)}")
        for name, value in expected.items():
            found, wanted = snapshot[name].shape, value.shape
            if found != wanted:
                raise ValueError(f"{name} has shape {tuple(wanted)}, the snapshot {tuple(found)}")
            if snapshot[name].dtype != value.dtype:
                raise ValueError(f"{name} is {value.dtype}, the snapshot {snapshot[name].dtype}")

    def _chosen(self, lasting: bool) -> dict[str, Tensor]:
        return self.lasting() if lasting else self._tensors

    def _refuse_taken(self, name: str) -> None:
        if name in self._tensors or name in self._generators:
            raise ValueError(f"state {name!r} is registered twice")
