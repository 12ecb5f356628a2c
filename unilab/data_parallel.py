"""What ranks do together: average gradients, start equal, gather statistics. One rank is a value, not another path."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from unilab.names import GRADIENT_MEAN

START_TIMEOUT = 180.0  # seconds for every rank to arrive
COLLECTIVE_TIMEOUT = 600.0  # of an eager collective; a rank may compile for minutes before it takes part
_CONNECT_SECONDS = 1.0  # of one attempt to reach rank 0
_LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"


class DataParallel:
    """The ranks of a run as a group. With one rank there is no group and nothing below does anything.

    Gradients are averaged by one blocking flat all-reduce before each optimizer step. Once a graph holds collectives,
    none may run outside graphs until the graph is released; `close` comes after that release.

    Args:
        rank: this process's rank.
        world_size: number of ranks; for more than one use `join`.

    Attributes:
        rank: this process's rank.
        world_size: number of ranks.
        backend: `nccl`, `gloo`, or None for one rank.
        warmed_up: whether an eager collective ran and was waited for.
        collectives: gradient all-reduces asked for so far, warm-up and capture included, replays not.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.backend: str | None = None
        self.warmed_up = False
        self.collectives = 0
        self._store: Store | None = None
        if world_size > 1:  # compiled steps stop before it and go on after it
            self._average = torch.compiler.disable(self._all_reduce_mean)

    @classmethod
    def join(
        cls,
        rank: int,
        world_size: int,
        device: torch.device,
        store_file: Path | None,
        timeout: float = START_TIMEOUT,
    ) -> DataParallel:
        """Meet the other ranks and make the group.

        Args:
            rank: this process's rank.
            world_size: number of ranks.
            device: this rank's device, CUDA or the CPU.
            store_file: where ranks of one host meet; None to meet where a launcher's variables say.
            timeout: seconds for all to arrive.

        Raises:
            TimeoutError: naming the ranks that did not arrive.
        """
        group = cls(rank, world_size)
        if world_size > 1:
            group._store = store = _store(store_file, rank, world_size, timeout)
            store.set(f"here/{rank}", "")
            _wait_for(store, "here", rank, world_size, timeout)
            group.backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                group.backend,
                store=PrefixStore("group", store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT),
                device_id=device if device.type == "cuda" else None,
            )
            group._warm_up(device)
        return group

    def average(self, flat: Tensor) -> None:
        """Replace `flat` by its mean over the ranks, in place, on the current stream."""
        if self.world_size > 1:
            self._average(flat)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite every tensor with rank 0's."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def gather(self, values: Tensor) -> Tensor:
        """Every rank's `(M,)` values, `(world_size, M)`."""
        if self.world_size == 1:
            return values.unsqueeze(0)
        rows = values.new_zeros(self.world_size, *values.shape)  # the sum of rows that are zero elsewhere
        rows[self.rank].copy_(values)
        dist.all_reduce(rows)
        return rows

    def collect(self, facts: dict[str, Any], timeout: float = START_TIMEOUT) -> list[dict[str, Any]]:
        """JSON facts of every rank, in order, on rank 0; the others give theirs and get them back alone. Once a run.

        Raises:
            TimeoutError: naming the ranks that gave none.
        """
        if self._store is None:
            return [facts]
        self._store.set(f"facts/{self.rank}", json.dumps(facts))
        if self.rank:
            return [facts]
        _wait_for(self._store, "facts", self.rank, self.world_size, timeout)
        return [json.loads(self._store.get(f"facts/{rank}")) for rank in range(self.world_size)]

    def facts(self, collectives: int, captured: bool) -> dict[str, Any]:
        """`dp_sync` of the manifest.

        Args:
            collectives: gradient all-reduces of one iteration.
            captured: whether graphs hold them.
        """
        alone = self.world_size == 1
        return {
            "world_size": self.world_size,
            "backend": self.backend,
            "mode": "none" if alone else GRADIENT_MEAN,
            "gradient_collectives_per_iteration": 0 if alone else collectives,
            "cuda_graph_optimizer_capture": "enabled_after_collective_warmup" if captured and not alone else None,
            "cuda_graph_collective_warmup": self.warmed_up,
        }

    def close(self, failed: bool = False) -> None:
        """Leave the group; safe to call twice. Every graph that holds collectives must be released before.

        Args:
            failed: do not wait for the other ranks, which may be gone.
        """
        if self.backend is None:
            return
        self.backend = None
        if failed:
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()

    def _all_reduce_mean(self, flat: Tensor) -> None:
        self.collectives += 1
        dist.all_reduce(flat)
        flat.div_(self.world_size)

    def _warm_up(self, device: torch.device) -> None:
        """One eager collective, waited for: a communicator that is first used within a capture fails."""
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if total.item() != self.world_size:
            raise RuntimeError(f"the first collective of {self.world_size} ranks summed to {total.item():g}")
        self.warmed_up = True


def _store(file: Path | None, rank: int, world_size: int, timeout: float) -> Store:
    if file is None:
        return _launchers_store(rank, world_size, timeout)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)  # one host; its name may lead nowhere
    return FileStore(str(file.absolute()), world_size)


def _launchers_store(rank: int, world_size: int, timeout: float) -> Store:
    """Where a launcher's variables say, as `env://` of torch does; but every wait is one that Python can interrupt."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serves:
        _wait_for_port(address, port, rank, timeout)
    limit = timedelta(seconds=timeout)
    return TCPStore(address, port, world_size, is_master=serves, timeout=limit, wait_for_workers=False)


def _wait_for_port(address: str, port: int, rank: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((address, port), _CONNECT_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                place = f"MASTER_ADDR={address}, MASTER_PORT={port}"
                raise TimeoutError(f"rank {rank} waited {timeout:g} s for rank 0 at {place}: {error}") from None
        time.sleep(0.1)


def _wait_for(store: Store, what: str, rank: int, world_size: int, timeout: float) -> None:
    """Wait until every rank has set `what`; a wait that Python can interrupt, and that says who is missing."""
    missing, deadline = list(range(world_size)), time.monotonic() + timeout
    while missing := [other for other in missing if not store.check([f"{what}/{other}"])]:
        if time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise TimeoutError(f"rank {rank} waited {timeout:g} s for {world_size} ranks; not there: {names}")
        time.sleep(0.02)
