"""Where a probe runs: the ranks' devices, and how its processes are started and read."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unilab.probes.findings import RankPart
from unilab.ranks import VISIBLE_DEVICES
from unilab.trial import Trial, try_ranks

SHOWN = 25  # lines of a log


@dataclass(frozen=True)
class Setting:
    """Where a probe runs.

    Attributes:
        entries: entry of CUDA_VISIBLE_DEVICES of each rank; never opened with gloo.
        backend: `nccl` or `gloo`.
        environment: what the ranks inherit, the variables of the transport included.
        compile_loss: whether objectives and steps are compiled.
        algo: algorithm whose learner is looked at, where a probe looks at one.
        overrides: settings of that learner, `key=value`.
    """

    entries: tuple[str, ...]
    backend: str
    environment: dict[str, str]
    compile_loss: bool = False
    algo: str = "sac"
    overrides: tuple[str, ...] = ()

    def run(
        self,
        module: str,
        options: Mapping[str, Any],
        seconds: float,
        variables: Mapping[str, str] | None = None,
    ) -> Run:
        """Run `python -m MODULE` once per rank; nothing of it is left when this returns.

        Args:
            module: the program of a rank; reads its place by `Seat.take`.
            options: JSON values it gets.
            seconds: limit of all ranks together.
            variables: more environment, which wins.
        """
        size = len(self.entries)
        with tempfile.TemporaryDirectory(prefix="unilab-probe-") as name:
            folder = Path(name)
            seats = [
                Seat(rank, size, self.backend, str(folder / "store"), str(folder / f"rank{rank}.json"), dict(options))
                for rank in range(size)
            ]
            commands = [[sys.executable, "-P", "-m", module, json.dumps(asdict(seat))] for seat in seats]
            inherited = {**self.environment, **(variables or {})}
            environments = [{**inherited, VISIBLE_DEVICES: entry} for entry in self.entries]
            trial = try_ranks(commands, environments, seconds, folder)
            parts = [RankPart.read(Path(seat.part)) for seat in seats]
        _show(module, trial)
        return Run(trial.fault, trial.seconds, trial.logs, parts)


@dataclass(frozen=True)
class Run:
    """What the ranks of one run left.

    Attributes:
        fault: what went wrong first, None where every rank ended well.
        seconds: from the start of the processes to their end.
        logs: what each rank printed.
        parts: what each rank found.
    """

    fault: str | None
    seconds: float
    logs: tuple[str, ...]
    parts: list[RankPart]


@dataclass(frozen=True)
class Seat:
    """A rank's place in a run of a probe.

    Attributes:
        rank: its rank.
        world_size: number of ranks.
        backend: `nccl` or `gloo`.
        store: file where the ranks meet.
        part: file for what it finds.
        options: what the probe asked for.
    """

    rank: int
    world_size: int
    backend: str
    store: str
    part: str
    options: dict[str, Any]

    @classmethod
    def take(cls, argv: Sequence[str]) -> Seat:
        """The place given on the command line."""
        return cls(**json.loads(argv[0]))


def _show(module: str, trial: Trial) -> None:
    """The ends of the logs of a trial that failed, on the terminal alone: they name host and paths."""
    if trial.fault is None:
        return
    print(f"{module}: {trial.fault}", file=sys.stderr)
    for rank, log in enumerate(trial.logs):
        for line in log.splitlines()[-SHOWN:]:
            print(f"rank {rank}: {line}", file=sys.stderr)
