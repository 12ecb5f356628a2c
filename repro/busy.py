"""Whether the GPUs of a plan are free: what is measured beside something else is not this trainer's speed."""

from __future__ import annotations

import sys

from repro.errors import HostUnfitError
from repro.gpus import gpu_loads, listed_position
from repro.host import Host
from repro.plan import Plan


def require_idle(plan: Plan, host: Host) -> None:
    """Refuse to start runs on a GPU that something else uses, what an earlier session left included.

    Raises:
        HostUnfitError: Naming the GPUs and what was found.
    """
    found = busy_gpus(plan, host)
    if found is not None:
        raise HostUnfitError(f"nothing was started: {found}")


def warn_busy(plan: Plan, host: Host) -> None:
    """Say on stderr what a run would be refused for now."""
    found = busy_gpus(plan, host)
    if found is not None:
        print(f"a run would be refused now: {found}", file=sys.stderr)


def busy_gpus(plan: Plan, host: Host) -> str | None:
    """Which GPUs of the plan's runs something else uses and what to do, in one line; None where none seems busy.

    Smoke ranks open none, and who uses which part of a GPU (MIG) is not known.
    """
    entries = () if plan.matrix.smoke else {entry for cell in plan.runnable for entry in cell.gpus}
    positions = {listed_position(entry, host.gpus) for entry in entries} - {None}
    loads = gpu_loads() if positions else ()
    busy = [f"GPU {load.position} is busy ({load.shown})" for load in loads if load.busy and load.position in positions]
    if not busy:
        return None
    return f"{', '.join(busy)}; end what uses it, nvidia-smi names it, or set CUDA_VISIBLE_DEVICES to other GPUs"
