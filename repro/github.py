"""What GitHub Actions shows of the gate: failures and undecided checks as annotations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from repro.gate import Finding, State

COMMANDS: dict[State, str] = {"failed": "error", "undecided": "warning"}


def annotation_lines(suites: Mapping[str, Sequence[Finding]]) -> list[str]:
    """An `::error` line for each failure and a `::warning` line for each check that is undecided."""
    return [
        f"::{COMMANDS[item.state]} title={_property(f'repro gate: {name}')}::{_data(f'{item.name}: {item.message}')}"
        for name, findings in suites.items()
        for item in findings
        if item.state in COMMANDS
    ]


def _data(words: str) -> str:
    """A workflow command ends with its line, and percent signs begin its escapes."""
    return words.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(words: str) -> str:
    return _data(words).replace(":", "%3A").replace(",", "%2C")
