"""Where a command writes its JSON, looked at before anything is measured."""

from __future__ import annotations

from pathlib import Path

from repro.errors import UsageError


def require_new(output: Path | None, flag: str = "--output") -> None:
    """Refuse a file that cannot be written or would replace another, before minutes are spent on its content.

    Raises:
        UsageError: Naming the file and what to choose instead.
    """
    if output is None:
        return
    if output.is_dir():
        raise UsageError(f"{flag} {output} is a folder; name a new file in it")
    if output.exists():
        raise UsageError(f"{flag} {output} exists; older results are never replaced, choose another name")
    if not output.parent.is_dir():
        raise UsageError(f"{flag} {output}: {output.parent} is not a folder; make it first, or choose another")
