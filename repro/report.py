"""From a session's raw files to its published folder: result, page, figures, hash list; and back, to compare."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from repro.attempts import attempts, last_ends
from repro.clean import clean_cell
from repro.evaluation import put_models_beside
from repro.evidence import Evidence, read_evidence
from repro.figures import draw_figures, installed_version, matplotlib_version
from repro.journal import ENDS, parse_journal, read_journal
from repro.layout import (
    FIGURES_DIR,
    HOST_FILE,
    JOURNAL_FILE,
    MANIFEST_FILE,
    PLAN_FILE,
    REPORT_FILE,
    RESULT_FILE,
    is_derived,
)
from repro.manifest import check_manifest, list_files, write_manifest
from repro.plan import Plan
from repro.redact import remove_unfinished
from repro.render import render_report
from repro.result import Result, compute_result
from repro.schema import canonical_json, read_canonical


@dataclass(frozen=True, eq=False)
class Report:
    """Everything that is derived from a folder's raw files.

    Attributes:
        evidence: The raw files, read.
        result: The numbers.
        files: Bytes by path relative to the folder: result, page, figures.
    """

    evidence: Evidence
    result: Result
    files: dict[str, bytes]


def derive_report(out_dir: Path, figures: bool = True) -> Report:
    """Compute a report from raw files; writes nothing.

    Args:
        out_dir: The session's folder.
        figures: Whether to draw the figures.

    Raises:
        UsageError: If the plan, the host's facts or the journal are missing or malformed.
    """
    evidence = read_evidence(out_dir)
    result = compute_result(evidence)
    files = {
        RESULT_FILE: canonical_json(result).encode(),
        REPORT_FILE: render_report(evidence, result).encode(),
        **(draw_figures(evidence, result) if figures else {}),
    }
    return Report(evidence, result, files)


def write_report(out_dir: Path) -> Report:
    """Write the derived files of a folder and its hash list.

    Figures that are no longer drawn are removed, weights that are still there are moved beside it, and what a run left
    that was cut off with its session is made fit to publish.
    """
    remove_unfinished(out_dir)
    plan, every = read_canonical(Plan, out_dir / PLAN_FILE), attempts(read_journal(out_dir))
    for cell in plan.cells:
        put_models_beside(out_dir, cell)
    cut_off = [cell for cell in plan.cells if cell.id in every and every[cell.id][-1].ended is None]
    if cut_off and check_manifest(out_dir)[1]:  # as it was published, a report stays: names are other ones elsewhere
        for cell in cut_off:
            clean_cell(out_dir, cell)
    report = derive_report(out_dir)
    for path in out_dir.glob(f"{FIGURES_DIR}/*.svg"):
        if path.relative_to(out_dir).as_posix() not in report.files:
            path.unlink()
    for name, content in report.files.items():
        (out_dir / name).parent.mkdir(exist_ok=True)
        (out_dir / name).write_bytes(content)
    write_manifest(out_dir)
    return report


def compare_report(out_dir: Path, report: Report) -> tuple[list[str], list[str]]:
    """Compare a folder's derived files with a fresh derivation.

    Returns:
        Files that differ or are missing, one line each; and remarks on figures that cannot be compared, because another
        version of matplotlib drew them.
    """
    problems = [
        f"{name}: is no part of the report that the raw files give"
        for name in list_files(out_dir)[0]
        if is_derived(name) and name not in report.files
    ]
    remarks = []
    recorded = report.evidence.host.versions.get("matplotlib")
    for name, expected in report.files.items():
        path = out_dir / name
        found = path.read_bytes() if path.is_file() else None
        if found is None:
            problems.append(f"{name}: missing")
        elif name.endswith(".svg") and matplotlib_version(found) != recorded:
            drawn = matplotlib_version(found) or "an unknown version"
            problems.append(
                f"{name}: drawn with matplotlib {drawn}, but {HOST_FILE} records {recorded}; "
                f"install that version, then: repro report {out_dir}"
            )
        elif name.endswith(".svg") and matplotlib_version(found) != installed_version():
            remarks.append(
                f"{name}: drawn with matplotlib {recorded}, here is {installed_version()}: hash checked, not redrawn"
            )
        elif found != expected:
            problems.append(
                f"{name}: differs from what its raw files give, first at byte {_first_difference(found, expected)}"
            )
    return problems, remarks


def changed_inputs(out_dir: Path) -> list[str]:
    """Raw files that do not fit the hash list, one line each; none where there is no list.

    Derived files may change, so they are not looked at. A list of a session without an end holds for the plan, the host
    and the cells that had ended when it was written: a run, or the session itself, may have gone on since.
    """
    if not (out_dir / MANIFEST_FILE).exists():
        return []
    listed, problems = check_manifest(out_dir)
    ended = _ended_when_listed(out_dir, listed.get(JOURNAL_FILE))
    names = [line.partition(": ")[0] for line in problems]
    return [
        line
        for name, line in zip(names, problems, strict=True)
        if not is_derived(name) and (ended is None or _owner(name) in {PLAN_FILE, HOST_FILE, MANIFEST_FILE, *ended})
    ]


def _ended_when_listed(out_dir: Path, listed: str | None) -> set[str] | None:
    """Cells that had ended when the hash list was written without the session's end; None where the list holds whole.

    The journal is only appended to, so it begins with what was listed.
    """
    path, digest, size = out_dir / JOURNAL_FILE, hashlib.sha256(), 0
    content = path.read_bytes() if path.is_file() else b""
    for line in content.splitlines(keepends=True):
        digest.update(line)
        size += len(line)
        if digest.hexdigest() == listed:
            journal = parse_journal(content[:size])
            return None if journal[-1].event in ENDS else set(last_ends(journal))
    return None


def _owner(name: str) -> str:
    """Cell whose file it is, or the name of a file of the whole session."""
    return name.split("/")[1].partition(".")[0] if "/" in name else name


def _first_difference(a: bytes, b: bytes) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
