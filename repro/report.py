"""From a session's raw files to its published folder: result, page, figures, hash list; and back, to compare."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from repro.evaluation import put_models_beside
from repro.evidence import Evidence, read_evidence
from repro.figures import draw_figures, installed_version, matplotlib_version
from repro.layout import FIGURES_DIR, HOST_FILE, PLAN_FILE, REPORT_FILE, RESULT_FILE, is_derived
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

    Figures that are no longer drawn are removed, weights that are still there are moved beside it.
    """
    remove_unfinished(out_dir)
    for cell in read_canonical(Plan, out_dir / PLAN_FILE).cells:
        put_models_beside(out_dir, cell)
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
    """Raw files that do not fit an existing hash list; derived files may change, so they are not looked at."""
    return [line for line in check_manifest(out_dir)[1] if not is_derived(line.partition(": ")[0])]


def _first_difference(a: bytes, b: bytes) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
