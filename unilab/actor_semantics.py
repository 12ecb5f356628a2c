"""What a checkpoint's actor is, beside its weights, and the refusal of one that is not what a run's configuration says.

The entry is checked before any weight is restored. Weights of the right shapes may still mean another policy, so
nothing is guessed, repaired or migrated.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unilab.algorithm import BUILTIN, CUSTOM, AlgoConfig
from unilab.flash_sac.actor_spec import split_builder

ENTRY = "actor_semantics"
SCHEMA_VERSION = 1
TRANSFORM = "tanh"  # what both learners make of a Gaussian's values, and the only one they support
FIELDS = ("kind", "builder", "kwargs", "obs_dim", "action_dim", "action_transform")
UNTOUCHED = "no weight was restored"
RECOVERY = (
    f"{UNTOUCHED}; the minimum supported format is {ENTRY} with schema_version={SCHEMA_VERSION} and "
    f"{', '.join(FIELDS)}; retraining with the current version is the only way to recover"
)


def describe_actor(algo: AlgoConfig, obs_dim: int, action_dim: int) -> dict[str, Any]:
    """The entry of a checkpoint.

    Args:
        algo: the run's settings.
        obs_dim: width of the policy observation.
        action_dim: width of the action.
    """
    kind, builder, kwargs = algo.actor_facts()
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "builder": builder,
        "kwargs": kwargs,
        "obs_dim": obs_dim,
        "action_dim": action_dim,
        "action_transform": TRANSFORM,
    }


def verify_actor(checkpoint: Mapping[str, Any], expected: Mapping[str, Any], file: Path) -> None:
    """Refuse a checkpoint whose actor is not the expected one; call it before weights are touched.

    Args:
        checkpoint: the file's content.
        expected: as `describe_actor` gives it for the run's configuration.
        file: named in the message.

    Raises:
        ValueError: one line naming the file and, for each field that differs, what was found and expected. It says that
            only retraining helps where this version does not know the entry's form, else to set what was found.
    """
    found = checkpoint.get(ENTRY)
    if found is None:
        raise ValueError(f"{file}: {ENTRY} is missing, so this checkpoint is older than the format; {RECOVERY}")
    if not isinstance(found, Mapping):
        raise ValueError(f"{file}: {ENTRY} must be a mapping, found {type(found).__name__}; {RECOVERY}")
    version = found.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ValueError(f"{file}: {ENTRY}.schema_version is {version!r}, expected {SCHEMA_VERSION}; {RECOVERY}")
    apart = [
        f"{ENTRY}.{name} is {_plain(found, name)}, the configuration expects {_plain(expected, name)}"
        for name in FIELDS
        if _plain(found, name) != _plain(expected, name)
    ]
    if apart:
        advice = f"{UNTOUCHED}; set what it was trained with" if _is_known_form(found) else RECOVERY
        raise ValueError(f"{file}: {'; '.join(apart)}; {advice}")


def _is_known_form(entry: Mapping[str, Any]) -> bool:
    """Whether some configuration of this version could have written the entry, as far as its form says."""
    whole = all(name in entry for name in FIELDS)
    return whole and entry["kind"] in (BUILTIN, CUSTOM) and entry["action_transform"] == TRANSFORM


def _plain(entry: Mapping[str, Any], name: str) -> str:
    """A field as JSON with sorted keys; what is no JSON is its text.

    No arguments are empty arguments, and a builder has one spelling.
    """
    value = entry.get(name, "absent")
    if name == "kwargs" and value is None:
        value = {}
    if name == "builder" and isinstance(value, str):
        value = ":".join(filter(None, split_builder(value)))
    try:
        return json.dumps(value, sort_keys=True, default=repr)
    except (TypeError, ValueError, RecursionError):  # keys that are no names, a value within itself
        return " ".join(reprlib.repr(value).split())
