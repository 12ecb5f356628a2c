"""Whether a run is the one that its plan asked for: its settings, ranks, code and command."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import BooleanNode, FloatNode, IntegerNode, StringNode, ValidationError

from repro.plan import PLACEHOLDER, Cell, Plan, asked_transport, is_pinned, pinning, same_words
from repro.run_files import find_value, flatten
from unilab.names import COMMAND_FILE, GRADIENT_MEAN, TRANSPORT_KEY

# Reasons why a run's number does not count.
NOT_AS_PLANNED = "not_as_planned"
MISSING_PROVENANCE = "missing_provenance"
OTHER_CODE = "other_code"
GIT_FACTS = ("commit", "dirty", "diff_sha256")
# Settings of a run that say where it runs, not what it does.
PLACED = ("training.log_dir", "env.cpu_ids", "training.dp_collector_cpu_ids", "training.devices")
# What the trainer's configuration makes of a value, by the type it has then.
_NODES: dict[type, Any] = {bool: BooleanNode, int: IntegerNode, float: FloatNode, str: StringNode}
# A run's folder as the trainer may record it: relative, or in a folder that was made absolute and then replaced.
LOG_DIR = re.compile(r"^(training\.log_dir=)(?:\.|[/<].*)/(runs/[^/]+)$")


def departure(
    plan: Plan,
    cell: Cell,
    config: Mapping[str, Any],
    manifest: Mapping[str, Any],
    command: Mapping[str, Any],
) -> str | None:
    """Why a run is not its plan's, or None.

    Args:
        plan: The plan.
        cell: The run's cell.
        config: Its settings.
        manifest: What it is made of.
        command: Where it comes from; empty if it does not say.
    """
    return _deviation(plan, cell, config, manifest) or _wrong_command(plan, cell, command)


def _deviation(plan: Plan, cell: Cell, config: Mapping[str, Any], manifest: Mapping[str, Any]) -> str | None:
    """What the run did differently from its plan, or None. A section that is missing deviates."""
    matrix = plan.matrix
    asked: dict[str, tuple[Any, Any]] = {
        "training.smoke": (matrix.smoke, find_value(config, "training", "smoke")),
        "algo.algo": (matrix.algo, find_value(config, "algo", "algo")),
        "training.sim_backend": (matrix.sim, find_value(config, "training", "sim_backend")),
        "algo.max_iterations": (matrix.iterations, find_value(config, "algo", "max_iterations")),
        "world size": (cell.world_size, find_value(manifest, "dp_sync", "world_size")),
    }
    if is_pinned(cell):
        key, _, lists = pinning(cell.pools).partition("=")
        asked[key] = (json.loads(lists), find_value(config, *key.split(".")))
    if cell.world_size > 1:
        asked |= _planned_ranks(cell, manifest, matrix.smoke)
    transport = asked_transport(matrix, cell)
    if transport is not None:
        asked[TRANSPORT_KEY] = (transport, find_value(manifest, "dp_sync", "transport"))
    for what, (planned, found) in asked.items():
        if found != planned:
            return f"{NOT_AS_PLANNED}: {what} was planned as {json.dumps(planned)}, the run says {json.dumps(found)}"
    return _overridden(cell, config)


def _overridden(cell: Cell, config: Mapping[str, Any]) -> str | None:
    """Which setting of a cell's command the configuration lacks, or None. Words that were redacted are passed over."""
    parser, found = OverridesParser.create(), flatten(config)
    words = [word for word in cell.arguments if "=" in word and "${" not in word and not PLACEHOLDER.search(word)]
    asked: dict[str, Any] = {}
    for word in words:
        try:
            override = parser.parse_override(word)
        except HydraException:
            return f"{NOT_AS_PLANNED}: {word} is no setting, so no run can have it"
        key = override.key_or_group
        asked = {name: value for name, value in asked.items() if not f"{name}.".startswith(f"{key}.")}  # taken back
        asked |= flatten({key: override.value()})
    for key, planned in asked.items():
        if key not in PLACED and not _same_setting(planned, found.get(key)):
            said = json.dumps(found.get(key))
            return f"{NOT_AS_PLANNED}: {key} was planned as {json.dumps(planned)}, the run says {said}"
    return None


def _same_setting(planned: Any, found: Any) -> bool:
    """Whether a run's setting is the planned one, read as the type that the setting has: "on" is true, "1e-4" 0.0001.

    What was redacted of a run, as the user's name in a path, is passed over.
    """
    if planned == found or (isinstance(found, str) and PLACEHOLDER.search(found)):
        return True
    if isinstance(planned, list) and isinstance(found, list):
        return len(planned) == len(found) and all(map(_same_setting, planned, found))
    node = _NODES.get(type(found))
    try:
        return node is not None and planned is not None and bool(node(planned)._value() == found)
    except ValidationError:
        return False


def _planned_ranks(cell: Cell, manifest: Mapping[str, Any], smoke: bool) -> dict[str, tuple[Any, Any]]:
    """What several ranks must say of themselves, planned and found: all there, learning as one, a GPU each."""
    listed = manifest.get("ranks")
    ranks = [rank for rank in listed if isinstance(rank, dict)] if isinstance(listed, list) else []
    asked: dict[str, tuple[Any, Any]] = {
        "ranks": (list(range(cell.world_size)), [rank.get("rank") for rank in ranks]),
        "dp_sync.mode": (GRADIENT_MEAN, find_value(manifest, "dp_sync", "mode")),
    }
    if not smoke:
        asked["number of GPUs"] = (cell.world_size, len({f"{rank.get('gpu_uuid')}" for rank in ranks}))
    return asked


def _wrong_command(plan: Plan, cell: Cell, command: Mapping[str, Any]) -> str | None:
    """Why `command.json` is not that of this cell and of the code the plan was made for, or None."""
    if not command:
        return f"{MISSING_PROVENANCE}: {cell.run} has no {COMMAND_FILE}, so nothing says which code ran"
    ran = {name: find_value(command, "git", name) for name in GIT_FACTS}
    source = plan.source_of(cell.case)
    planned = {name: getattr(source, name) for name in GIT_FACTS}
    if ran != planned:
        return f"{OTHER_CODE}: ran code {_code(ran)}, but the plan was made for {_code(planned)}"
    trainer = source.trainer_sha256  # a trainer imported from elsewhere may lie in a checkout of the same commit
    if trainer is not None and command.get("source_sha256") != trainer:
        found = shortened(f"{command.get('source_sha256')}")
        return f"{OTHER_CODE}: ran trainer sources {found}, but the plan was made for {shortened(trainer)}"
    if cell.cpuset is not None and command.get("affinity") != list(cell.cpuset):
        planned_cpus, found_cpus = json.dumps(cell.cpuset), json.dumps(command.get("affinity"))
        return f"{NOT_AS_PLANNED}: its container was planned with CPUs {planned_cpus}, the run says {found_cpus}"
    argv = command.get("argv")
    words = [LOG_DIR.sub(r"\1\2", str(word)) for word in argv] if isinstance(argv, list) else []
    if not same_words(cell.arguments, words):
        found, wanted = next(
            ((word, own) for word, own in zip(words, cell.arguments, strict=False) if not same_words([own], [word])),
            (f"{len(words)} words", f"{len(cell.arguments)} words"),
        )
        return f"{NOT_AS_PLANNED}: its command was planned with {wanted}, the run says {found}"
    return None


def _code(git: Mapping[str, Any]) -> str:
    """Commit and difference in words."""
    commit = "of an unknown commit" if git["commit"] is None else f"{git['commit']}"[:12]
    state = {True: "with changes", False: "without changes"}.get(git["dirty"], "changes unknown")
    difference = "" if git["diff_sha256"] is None else f" {git['diff_sha256']}"[:13]
    return f"{commit} ({state}{difference})"


def shortened(value: str | None) -> str:
    """The beginning of a hash or another long value."""
    text = (value or "nothing").strip('"')
    return text if len(text) <= 20 else f"{text[:12]}…"
