"""What was trained, as the runs' own `config.json` and `manifest.json` say it: the tables of settings on the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from repro import text
from repro.evidence import Evidence
from repro.run_files import find_count, find_value

Files = tuple[Mapping[str, Any], Mapping[str, Any]]  # configuration and manifest of a run


def settings_section(evidence: Evidence) -> str:
    """One table of what all cases with a run have in common, one of what differs, a column for each case.

    Empty where no run says anything.
    """
    cases = _runs_of(evidence)
    if not any(cases.values()):
        return ""
    rows = {name: [_shown(look, runs) for runs in cases.values()] for name, look in SETTINGS.items()}
    common = [[name, values[0]] for name, values in rows.items() if len(set(values)) == 1]
    differing = [[name, *values] for name, values in rows.items() if len(set(values)) > 1]
    whose = next(iter(cases)) if len(cases) == 1 else "every case"
    tables = [text.markdown_table(("setting", whose), common, "lr")] if common else []
    if differing:
        tables.append(text.markdown_table(("setting", *cases), differing, "l" + "r" * len(cases)))
    return "\n\n".join(tables)


def _runs_of(evidence: Evidence) -> dict[str, list[Files]]:
    """Files of the runs of every case that has a run, in the matrix's order; those of another trainer say nothing."""
    found: dict[str, list[Files]] = {}
    for case in evidence.plan.matrix.cases:
        runs = [item for item in evidence.cells if item.cell.case == case.name and not item.cell.warmup]
        if any(item.config is not None or item.throughput is not None for item in runs):
            found[case.name] = [(item.config, item.manifest or {}) for item in runs if item.config is not None]
    return found


def _shown(look: Callable[[Mapping[str, Any], Mapping[str, Any]], str | None], runs: list[Files]) -> str:
    values = list(dict.fromkeys(look(*run) or text.NOTHING for run in runs)) or [text.NOTHING]
    return values[0] if len(values) == 1 else f"its runs differ: {'; '.join(values)}"


def _count(section: str, key: str, of_manifest: bool = False) -> Callable[..., str | None]:
    def look(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> str | None:
        value = find_value(manifest if of_manifest else config, section, key)
        return f"{value:,}" if type(value) is int else None

    return look


def _of_manifest(section: str, key: str) -> Callable[..., str | None]:
    def look(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> str | None:
        value = find_value(manifest, section, key)
        if isinstance(value, bool):
            return "yes" if value else "no"
        return text.escaped(value) if isinstance(value, str) else None

    return look


def _updates(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> str | None:
    updates, frequency = (find_count(config, "algo", name) for name in ("updates_per_step", "policy_frequency"))
    return f"{updates}, {-(-updates // frequency)}" if updates and frequency else None


def _transport(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> str | None:
    if find_value(manifest, "dp_sync", "world_size") == 1:
        return "none"
    named = _of_manifest("dp_sync", "transport")(config, manifest)
    return _of_manifest("dp_sync", "backend")(config, manifest) if named == "none" else named  # gloo has one way


SETTINGS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], str | None]] = {
    "ranks": _count("dp_sync", "world_size", of_manifest=True),
    "environments per rank": _count("algo", "num_envs"),
    "batch per rank": _count("algo", "batch_size"),
    "critic, actor updates per iteration": _updates,
    "physics workers per rank": _count("physics", "workers", of_manifest=True),
    "seed": _count("algo", "seed"),
    "physics profile": _of_manifest("physics", "profile"),
    "groups of environments": _count("physics", "groups", of_manifest=True),
    "AMP": _of_manifest("learner", "amp"),
    "Inductor": _of_manifest("learner", "compiled"),
    "whole-cycle graph": _of_manifest("learner", "cuda_graph"),
    "transport between ranks": _transport,
}
