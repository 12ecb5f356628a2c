"""One rank of a run: what it trains with, and the program of the ranks that rank 0 starts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unilab.config import RunConfig, load_config
from unilab.rank_processes import RankSeat
from unilab.ranks import VISIBLE_DEVICES, Ranks
from unilab.stacks import print_stacks_on_signal
from unilab.transport import Transport, transport_of_ranks

if TYPE_CHECKING:
    import torch

    from unilab.checkpoint import Checkpoint
    from unilab.runner import Runner
    from unilab.tasks.velocity_task import VelocityTask


@dataclass(frozen=True)
class Place:
    """What a rank trains with.

    Attributes:
        config: the run.
        ranks: who it is.
        device: its device, the only one it sees where ranks have entries.
        cpu_ids: CPUs of its physics workers, or None where they are not pinned.
        task: the task, on `device`.
    """

    config: RunConfig
    ranks: Ranks
    device: torch.device
    cpu_ids: list[int] | None
    task: VelocityTask

    @classmethod
    def prepare(cls, config: RunConfig, ranks: Ranks) -> Place:
        """Look at the host, after narrowing what this process sees to the rank's own device.

        Raises:
            HostUnfit: where the host cannot do it.
            ValueError: for settings that do not fit it.
        """
        smoke = config.training.smoke  # entries count as ranks there and are never opened
        if ranks.entry is not None and not smoke:
            os.environ[VISIBLE_DEVICES] = ranks.entry
        import torch

        from unilab.hardware import choose_cpus, choose_device, learner_threads, visible_entry
        from unilab.runner import build_task

        device = choose_device(config, ranks.world_size)
        size = ranks.local_size
        gpus = list(ranks.entries[:size]) if ranks.entries and not smoke else [visible_entry(device)] * size
        cpu_ids = choose_cpus(config, ranks.local_rank, size, gpus)
        torch.set_num_threads(learner_threads(size))
        return cls(config, ranks, device, cpu_ids, build_task(config, device, size - ranks.local_rank))

    def set_transport(self, environment: Mapping[str, str]) -> Transport:
        """Choose how NCCL carries data, and set its variables for this process and those it starts.

        Args:
            environment: that of the command.
        """
        on_cuda, setting = self.device.type == "cuda", self.config.training.nccl_transport
        transport = transport_of_ranks(self.ranks, on_cuda, setting, environment)
        os.environ.update(transport.variables)
        return transport

    def join(self, meeting: Path, checkpoint: Checkpoint | None = None) -> Runner:
        """Meet the other ranks and build this one.

        Args:
            meeting: file where ranks meet that rank 0 started.
            checkpoint: what rank 0 of a resumed run goes on from.

        Raises:
            TimeoutError: naming the ranks that did not come.
        """
        from unilab.data_parallel import DataParallel
        from unilab.runner import Runner

        where = None if self.ranks.launched else meeting
        group = DataParallel.join(self.ranks.rank, self.ranks.world_size, self.device, where)
        try:
            return Runner(self.config, self.task, self.device, self.cpu_ids, group, checkpoint)
        except BaseException:
            group.close(failed=True)
            raise


def follow(config: RunConfig, ranks: Ranks, meeting: Path) -> None:
    """Train as a rank other than 0, which writes and says nothing.

    Raises:
        Exception: whatever it failed of.
    """
    place = Place.prepare(config, ranks)
    if ranks.launched:  # what rank 0 started has its variables already
        place.set_transport(os.environ)
    with place.join(meeting) as runner:
        runner.manifest()
        runner.run()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of a rank that rank 0 started."""
    print_stacks_on_signal()
    seat, arguments = RankSeat.take(sys.argv[1:] if argv is None else argv)
    try:
        parser = argparse.ArgumentParser(description="internal: started by the trainer", allow_abbrev=False)
        for name in ("algo", "task", "sim"):
            parser.add_argument(f"--{name}", required=True)
        parser.add_argument("overrides", nargs="*")
        args = parser.parse_intermixed_args(arguments)
        config = load_config(args.algo, args.task, args.sim, args.overrides)
        size = len(seat.entries)
        follow(config, Ranks(seat.rank, size, seat.entries, seat.rank, size), seat.store)
    except BaseException as error:  # everything a rank can die of must reach rank 0
        return seat.fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
