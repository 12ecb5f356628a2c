"""What probes found as tables: of a report in Markdown, of `repro probe` for a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from pydantic import JsonValue

from repro import text
from repro.evidence import Evidence
from repro.probe import Check, Findings, plain
from repro.session_probes import ProbeEvidence
from repro.text import markdown_table, plain_table

Table = Callable[[Sequence[str], Sequence[Sequence[str]], str], str]
INTRODUCTION = "Run before everything else; no run is started where one fails. A check that is *noted* decides nothing."


def probes_section(evidence: Evidence) -> str:
    """Every check and measurement of a session's probes as Markdown; empty where the matrix names none."""
    if not evidence.probes:
        return ""
    rows = [[f"`{probe.name}`", *row] for probe in evidence.probes for row in _rows(probe)]
    parts = [INTRODUCTION, markdown_table(("probe", "check", "outcome", "found"), rows, "llll")]
    for probe in evidence.probes:
        if probe.findings is not None:
            parts += _found(probe.findings)
    return "\n\n".join(parts)


def outcome(check: Check) -> str:
    """How a check ended, in one word."""
    if not check.required:
        return "noted"
    return "ok" if check.passed else "FAILED"


def measurement_tables(found: Findings, table: Table = plain_table) -> list[str]:
    """The measurements; those with the same fields stand in one table, names before numbers."""
    kinds: dict[tuple[str, ...], list[dict[str, JsonValue]]] = {}
    for measurement in found.measurements:
        if measurement:
            kinds.setdefault(tuple(sorted(measurement)), []).append(measurement)
    return [_table(rows, table) for rows in kinds.values()]


def _table(rows: list[dict[str, JsonValue]], table: Table) -> str:
    names = [name for name in rows[0] if any(isinstance(row[name], str) for row in rows)]
    numbers = [name for name in rows[0] if name not in names]
    headers = [*names, *numbers]
    cells = [[_value(row[name]) for name in headers] for row in rows]
    return table([header.replace("_", " ") for header in headers], cells, "l" * len(names) + "r" * len(numbers))


def _value(value: JsonValue) -> str:
    match value:
        case None:
            return text.NOTHING
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return text.significant(value, 4)
        case str():
            return plain(value)
        case _:
            return json.dumps(value, sort_keys=True)


def _rows(probe: ProbeEvidence) -> list[list[str]]:
    if probe.findings is None or not probe.findings.checks:
        return [[text.NOTHING, "FAILED" if probe.status == "failed" else probe.status.replace("_", " "), probe.detail]]
    return [[check.name, outcome(check), plain(check.detail)] for check in probe.findings.checks]


def _found(found: Findings) -> list[str]:
    tables = measurement_tables(found, markdown_table)
    measured = " Measured:" if tables else ""
    return [f"`{found.probe}`: {found.setting}; {text.number(found.seconds, 1)} s.{measured}", *tables]
