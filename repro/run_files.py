"""Reads the JSON files that a run leaves beside its events, as far as measuring needs them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, ValidationError

from repro.events import Reason, Refusal
from unilab.names import COMMAND_FILE, COMPLETED, CONFIG_FILE, RUN_END_FILE

MOST = 2**31  # of anything that a run counts within one iteration
# Keys that config.json and command.json of this trainer have, together of no other program's.
OF_CONFIG = {"schema_version", "algo", "training"}
OF_COMMAND = {"schema_version", "argv", "source_sha256"}


class RunEnd(BaseModel):
    """`run_end.json`, which a run writes last; fields that the suite does not read are passed over."""

    model_config = ConfigDict(strict=True, frozen=True)

    schema_version: Literal[1]
    status: Literal["completed", "failed", "interrupted"]
    final_env_steps: NonNegativeInt
    iterations: NonNegativeInt
    event_count: NonNegativeInt
    startup_seconds: FiniteFloat | None = Field(ge=0)


def is_own(run_dir: Path) -> bool:
    """Whether a folder is of a run of this trainer: before the first step it writes settings and provenance.

    Other programs have files of these names too, so what is in them decides.
    """
    config, command = (_lenient(run_dir / name) for name in (CONFIG_FILE, COMMAND_FILE))
    return config.keys() >= OF_CONFIG or command.keys() >= OF_COMMAND


def _lenient(path: Path) -> Mapping[str, Any]:
    """A JSON object, empty where there is none that can be read."""
    try:
        return read_json(path) if path.is_file() else {}
    except Refusal:
        return {}


def read_run_end(run_dir: Path) -> RunEnd:
    """Read `run_end.json` of a run that completed.

    Raises:
        Refusal: `missing_run_end`, `run_failed` or `damaged_file`.
    """
    path = run_dir / RUN_END_FILE
    if not path.exists():
        raise Refusal(
            Reason.MISSING_RUN_END,
            f"{run_dir.resolve().name} has no {RUN_END_FILE}: the run did not end; run it again",
        )
    try:
        end = RunEnd.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise Refusal(Reason.DAMAGED_FILE, f"{path.name}: {field}: {first['msg']}; run it again") from error
    if end.status != COMPLETED:
        raise Refusal(
            Reason.RUN_FAILED,
            f"{path.name} says the run is {end.status}; only completed runs are measured, run it again",
        )
    return end


class Progress(NamedTuple):
    """One line of `progress.jsonl`; `monotonic_s` is in seconds from an arbitrary start."""

    iteration: int
    env_steps: int
    monotonic_s: float


def read_progress(path: Path) -> dict[int, Progress]:
    """Entries of `progress.jsonl` by env step; a last line without its newline was cut and is left out.

    Raises:
        Refusal: `damaged_file`, also where steps or seconds do not grow from line to line.
    """
    found: dict[int, Progress] = {}
    before: Progress | None = None
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            entry = _progress(line)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise Refusal(
                Reason.DAMAGED_FILE, f"{path.name}: line {number} is no progress entry ({error!r}); run it again"
            ) from error
        for name in ("env_steps", "monotonic_s"):
            if before is not None and getattr(entry, name) <= getattr(before, name):
                raise Refusal(
                    Reason.DAMAGED_FILE,
                    f"{path.name}: line {number} has {name} {getattr(entry, name)} after {getattr(before, name)}; "
                    "it must grow, run it again",
                )
        found[entry.env_steps] = before = entry
    return found


def _progress(line: bytes) -> Progress:
    content = json.loads(line)
    iteration, env_steps, seconds = (content[name] for name in Progress._fields)
    if type(iteration) is not int or type(env_steps) is not int or type(seconds) not in (int, float):
        raise ValueError("iteration and env_steps must be integers, monotonic_s a number")
    if not (math.isfinite(seconds) if isinstance(seconds, float) else abs(seconds) < 2**63):
        raise ValueError("monotonic_s is not finite")
    return Progress(iteration, env_steps, float(seconds))


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object, empty where there is no file.

    Raises:
        Refusal: `damaged_file`.
    """
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Refusal(Reason.DAMAGED_FILE, f"{path.name} is no JSON ({error}); run it again") from error
    return content if isinstance(content, dict) else {}


def find_value(content: Mapping[str, Any], section: str, key: str) -> Any:
    """What is at `content[section][key]`, or None where there is nothing."""
    inner = content.get(section)
    return inner.get(key) if isinstance(inner, dict) else None


def find_count(content: Mapping[str, Any], section: str, key: str) -> int | None:
    """The integer from 1 to `MOST` at `content[section][key]`, or None where there is none."""
    value = find_value(content, section, key)
    return value if type(value) is int and 1 <= value <= MOST else None


def flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of a nested mapping by dotted key; lists are leaves."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
