"""`repro gate`: judges a report against a baseline for a person, for CI and for GitHub Actions."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from repro import text
from repro.comparable import Side, read_side
from repro.errors import UsageError
from repro.gate import Gate, judge
from repro.github import annotation_lines
from repro.junit import junit_xml
from repro.verify import check_folder
from unilab.names import EXIT_INCOMPLETE, EXIT_OK

HEADERS = ("what", "base", "current", "change [95 % interval]", "n", "verdict")
ALIGN = "lrrrrl"


def gate(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> int:
    """Print both verdicts, write what was asked for, return the exit code.

    Raises:
        UsageError: If an argument is unusable, a report does not verify, or the two are not comparable.
    """
    folders = (arguments.baseline, arguments.current)
    _check(folders, arguments.max_drop, arguments.junit)
    found = judge(read_side(folders[0]), read_side(folders[1]), arguments.max_drop)
    if arguments.junit is not None:
        arguments.junit.write_bytes(junit_xml(found.findings()))
    if environment.get("GITHUB_ACTIONS") == "true":
        print("\n".join(annotation_lines(found.findings())))
    if environment.get("GITHUB_STEP_SUMMARY"):
        with Path(environment["GITHUB_STEP_SUMMARY"]).open("a", encoding="utf-8") as stream:
            stream.write(summary(found))
    print("\n".join(gate_lines(found)))
    return found.exit_code


def gate_lines(found: Gate) -> list[str]:
    """What a terminal shows; the last line is the verdict."""
    table = [text.plain_table(HEADERS, _rows(found), ALIGN)] if found.rows else []
    return [*_plain(_sides(found)), *table, *_plain(_notes(found)), verdict_line(found)]


def summary(found: Gate) -> str:
    """The same in Markdown."""
    table = [text.markdown_table(HEADERS, _rows(found), ALIGN)] if found.rows else []
    listed = [f"- {line}" for line in _plain([*_sides(found), *_notes(found)])]
    return "\n".join([f"### {verdict_line(found)}", "", *table, "", *listed, ""])


def verdict_line(found: Gate) -> str:
    """Both verdicts in one line, the outcome first."""
    outcome = {EXIT_OK: "passed", EXIT_INCOMPLETE: "INCOMPLETE"}.get(found.exit_code, "FAILED")
    if outcome == "passed" and _undecided(found):
        outcome = "passed, but UNDECIDED"
    return f"gate {outcome}: probes: {_probes(found)}; speed: {_speed(found)}"


def _undecided(found: Gate) -> bool:
    return found.speed in ("suspicious", "insufficient_data")


def _probes(found: Gate) -> str:
    if not found.probes:
        return "the matrix names none"
    failed = [probe.name for probe in found.probes if not probe.passed]
    passed = f"{len(found.probes) - len(failed)} of {len(found.probes)} passed"
    return f"{passed}, not {', '.join(failed)}" if failed else passed


def _speed(found: Gate) -> str:
    if not found.rows:
        return "no verdict, a probe failed"
    judged = sum(row.verdict != "not_judged" for row in found.rows)
    return (
        f"{found.speed.replace('_', ' ')}, the worst of {text.count_of(judged, 'number')} "
        f"(limit {text.percent(found.max_drop)})"
    )


def _sides(found: Gate) -> list[str]:
    def facts(side: Side) -> str:
        return f"{side.name} (matrix {side.matrix.name}, code {side.source})"

    return [f"base: {facts(found.base)}", f"current: {facts(found.current)}"]


def _rows(found: Gate) -> list[list[str]]:
    return [
        [row.name, row.base, row.current, row.change, f"{row.n[0]}, {row.n[1]}", row.verdict.replace("_", " ")]
        for row in found.rows
    ]


def _notes(found: Gate) -> list[str]:
    """Reasons of rows that are not judged, failed probes, cells without a number, what else differs."""
    reasons = [f"{row.name}: {row.reason}" for row in found.rows if row.reason]
    probes = [f"probe {probe.name}: {probe.detail}" for probe in found.probes if not probe.passed]
    missing = [f"without a number: {', '.join(found.missing)}"] if found.missing else []
    return [*reasons, *probes, *missing, *(f"also: {line}" for line in found.remarks)]


def _plain(lines: Sequence[str]) -> list[str]:
    """One line each, whatever a report's files hold: in CI a line can be a command."""
    return [" ".join(line.split()) for line in lines]


def _check(folders: tuple[Path, Path], max_drop: float, junit: Path | None) -> None:
    """Refuse what is wrong before the reports are read, which takes seconds."""
    if not 0.0 < max_drop < 1.0:
        raise UsageError(f"--max-drop {max_drop:g}: must be above 0 and below 1, for example 0.05")
    base, current = (check_folder(folder).resolve() for folder in folders)
    if base == current:
        raise UsageError(f"CURRENT and --baseline are the same folder, {folders[0]}; give an older report as baseline")
    if junit is None:
        return
    if any(junit.resolve().is_relative_to(folder) for folder in (base, current)):
        raise UsageError(f"--junit {junit} lies in a report, whose files are fixed; choose a place outside")
    _check_writable(junit)


def _check_writable(path: Path) -> None:
    try:
        path.open("xb").close()
    except FileExistsError:
        raise UsageError(f"--junit {path} exists; older results are never replaced, choose another name") from None
    except OSError as error:
        raise UsageError(f"--junit {path} cannot be written: {error.strerror}; choose another place") from None
    path.unlink()
