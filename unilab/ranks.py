"""Which ranks a run has: one per visible device, or those of a launcher. Imports no torch.

`CUDA_VISIBLE_DEVICES` has to be set before CUDA starts, so all of this is decided before torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
LOCAL_SIZE = "LOCAL_WORLD_SIZE"  # a launcher's too; all ranks are on this host where it is missing
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run as one of them sees them.

    Attributes:
        rank: this process's rank; rank 0 owns files and terminal.
        world_size: number of ranks.
        entries: visible device entry of every rank on this host; empty where none was chosen, then there is one rank
            on the first device there is.
        local_rank: this process's number among those of this host.
        local_size: ranks on this host.
        launched: whether a launcher such as torchrun started every rank; otherwise rank 0 starts the others.
    """

    rank: int = 0
    world_size: int = 1
    entries: tuple[str, ...] = ()
    local_rank: int = 0
    local_size: int = 1
    launched: bool = False

    @property
    def entry(self) -> str | None:
        """The device entry of this rank, the only one it may see; None leaves visibility as it is."""
        return self.entries[self.local_rank] if self.entries else None


def plan_ranks(environment: Mapping[str, str], devices: Sequence[int] | None = None, device_count: int = 0) -> Ranks:
    """The ranks that environment and configuration ask for.

    Args:
        environment: the process's variables.
        devices: `training.devices`, a deprecated choice among the visible devices, by position.
        device_count: devices on this host, looked at where `devices` chooses and the variable is unset; 0 for unknown.

    Raises:
        ValueError: one line, for entries or variables that contradict themselves or each other.
    """
    entries = visible_entries(environment)
    if devices is not None:
        entries = _selected(entries, devices, environment.get(VISIBLE_DEVICES), device_count)
    launched = _launched(environment)
    if launched is None:
        world_size = max(1, len(entries))
        return Ranks(0, world_size, tuple(entries), local_size=world_size)
    rank, world_size, local_rank, local_size = launched
    if world_size > 1 and not entries and VISIBLE_DEVICES not in environment:
        entries = [str(index) for index in range(local_size)]
    if entries and local_size > len(entries):
        raise ValueError(
            f"{local_size} ranks on this host need a device each, {len(entries)} visible: {', '.join(entries)}; start "
            f"fewer or extend {VISIBLE_DEVICES}"
        )
    return Ranks(rank, world_size, tuple(entries), local_rank, local_size, launched=True)


def visible_entries(environment: Mapping[str, str]) -> list[str]:
    """Entries of `CUDA_VISIBLE_DEVICES`, one rank each: indices, GPU ids or MIG names, taken as they are.

    Unset, empty and `-1` give none.

    Raises:
        ValueError: one line, where an entry is empty, hides others, or names a device twice.
    """
    text = environment.get(VISIBLE_DEVICES, "")
    entries = [entry.strip() for entry in text.split(",")]
    if entries in ([""], ["-1"]):
        return []
    for position, entry in enumerate(entries):
        where = f"entry {position + 1} of {VISIBLE_DEVICES}={text!r}"
        if not entry:
            raise ValueError(f"{where} is empty; list one device per rank, as in {VISIBLE_DEVICES}=0,1")
        if not entry.isprintable() or any(character.isspace() for character in entry):
            raise ValueError(f"{where} is no device; separate devices by commas, as in {VISIBLE_DEVICES}=0,1")
        if entry.startswith("-"):
            raise ValueError(f"{where} hides a device; list only devices to use, as in {VISIBLE_DEVICES}=0,1")
        twin = next((other for other in entries[:position] if _same(entry, other)), None)
        if twin is not None:
            raise ValueError(f"{where} is the device of {twin!r} again; list each device once")
    return entries


def _same(one: str, other: str) -> bool:
    """Whether two entries name one device: equal numbers, or an id and a beginning of it."""
    if one.isdecimal() and other.isdecimal():
        return int(one) == int(other)
    short, long = sorted((one.lower(), other.lower()), key=len)
    return short == long or (short.startswith(("gpu-", "mig-")) and long.startswith(short))


def _selected(entries: list[str], devices: Sequence[int], visible: str | None, device_count: int) -> list[str]:
    asked = f"training.devices={list(devices)}"
    if visible is not None:
        choices = entries
    else:
        choices = [str(index) for index in range(device_count or max([0, *devices]) + 1)]
    if not devices:
        raise ValueError(f"{asked} names no device; leave it out and choose GPUs with {VISIBLE_DEVICES}")
    if len(set(devices)) < len(devices):
        raise ValueError(f"{asked} names a device twice; each is one rank")
    outside = [index for index in devices if not 0 <= index < len(choices)]
    if outside:
        there = f"{VISIBLE_DEVICES}={visible} has" if visible is not None else "this host has"
        raise ValueError(f"{asked}: there is no device {outside[0]}, {there} {len(choices)}; count from 0")
    return [choices[index] for index in devices]


def _launched(environment: Mapping[str, str]) -> tuple[int, int, int, int] | None:
    """Rank and number of ranks, in all and on this host, from a launcher's variables; None where there are none."""
    present = [name for name in LAUNCHER_VARIABLES if name in environment]
    if not present:
        return None
    missing = [name for name in LAUNCHER_VARIABLES if name not in environment]
    if missing:
        raise ValueError(
            f"{', '.join(present)} set without {', '.join(missing)}; a launcher sets all five, otherwise unset them"
        )
    rank, world_size, local_rank = (_number(environment, name) for name in LAUNCHER_VARIABLES[:3])
    if not 0 < _number(environment, "MASTER_PORT") < 65536:
        raise ValueError(f"MASTER_PORT must be a port from 1 to 65535, got {environment['MASTER_PORT']!r}")
    local_size = _number(environment, LOCAL_SIZE) if LOCAL_SIZE in environment else world_size
    if not rank < world_size or local_rank > rank or not local_rank < local_size <= world_size:
        raise ValueError(
            f"RANK={rank}, WORLD_SIZE={world_size}, LOCAL_RANK={local_rank}, {LOCAL_SIZE}={local_size} contradict "
            "each other; a rank is at least its local rank and below the number of ranks"
        )
    return rank, world_size, local_rank, local_size


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{name} must be a number from 0, got {text!r}")
    return int(text)
