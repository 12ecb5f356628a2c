"""Checks published reports: hashes, schemas, numbers from raw events, page and figures byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from repro.attempts import attempt_problems
from repro.errors import UsageError
from repro.evidence import unowned
from repro.figures import installed_version
from repro.layout import LOGS_DIR, MANIFEST_FILE, REPORT_FILE, RESULT_FILE, RUNS_DIR
from repro.manifest import check_manifest
from repro.report import Report, compare_report, derive_report
from repro.result import Result, missing_cells
from repro.schema import read_model
from repro.text import count_of


class Verification:
    """The checks of one folder; later ones are left out once one failed, since they would judge altered files.

    Attributes:
        folder: The report folder.
        files: Files listed with their hashes.
        runs: Runs whose numbers were computed again.
        cells: Planned cells.
        missing: Those that gave no number.
        problems: Every deviation, each line naming the file.
        report: The folder computed again, or None where that was not possible.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self._say = folder, say
        self.files, self.runs, self.cells, self.missing = 0, 0, 0, 0
        self.problems: list[str] = []
        self.report: Report | None = None

    def run(self) -> bool:
        """Check the folder, saying one line for each check; return whether all passed."""
        self._say(f"{self.folder}")
        if not self._check_hashes():
            return False
        self.report = self._check_schemas()
        return self.report is not None and self._check_derived(self.report)

    def _check_hashes(self) -> bool:
        listed, problems = check_manifest(self.folder)
        self.files = len(listed)
        return self._conclude("hashes", problems, f"ok, {count_of(len(listed), 'file')}, none missing, none extra")

    def _check_schemas(self) -> Report | None:
        problems: list[str] = []
        report = None
        try:
            read_model(Result, self.folder / RESULT_FILE)
            report = derive_report(self.folder)
            problems += unowned(self.folder, report.evidence.plan)
            problems += attempt_problems(self.folder, report.evidence.journal)
        except UsageError as error:
            problems.append(str(error))
        passed = self._conclude("schemas", problems, "ok, plan, host, journal and result fit")
        return report if passed else None

    def _check_derived(self, report: Report) -> bool:
        problems, remarks = compare_report(self.folder, report)
        self.runs = sum(item.throughput is not None for item in report.evidence.cells)
        self.cells, self.missing = len(report.evidence.cells), len(missing_cells(report.evidence))
        cells = count_of(self.runs, "run")
        drawn = any(name.endswith(".svg") for name in report.files)
        redrawn = f"ok, drawn again with matplotlib {installed_version()}, equal" if drawn else "none"
        parts: dict[str, tuple[list[str], str]] = {
            "numbers": (_of(problems, RESULT_FILE), f"ok, {RESULT_FILE} recomputed from the events of {cells}, equal"),
            "page": (_of(problems, REPORT_FILE), f"ok, {REPORT_FILE} rendered again, equal"),
            "figures": (
                [line for line in problems if not line.startswith((f"{RESULT_FILE}:", f"{REPORT_FILE}:"))],
                f"ok, {'; '.join(remarks)}" if remarks else redrawn,
            ),
        }
        return all([self._conclude(name, found, good) for name, (found, good) in parts.items()])

    def _conclude(self, check: str, problems: list[str], good: str) -> bool:
        self.problems += problems
        self._say(f"  {check}: {'FAILED' if problems else good}")
        for problem in problems:
            self._say(f"    {problem}")
        return not problems


def find_reports(root: Path) -> list[Path]:
    """Report folders below `root` that hold a hash list, sorted.

    Raises:
        UsageError: If there is none.
    """
    found = sorted(path.parent for path in root.glob(f"*/{MANIFEST_FILE}"))
    if not found:
        raise UsageError(f"no report with a {MANIFEST_FILE} below {root}; name a folder, or make one with repro run")
    return found


def verify(folders: list[Path], say: Callable[[str], None]) -> bool:
    """Check report folders; the last line says how many files and runs were checked, or what failed."""
    checks = [Verification(folder, say) for folder in folders]
    passed = [check.run() for check in checks]
    if all(passed):
        files, runs, cells, missing = (
            sum(getattr(check, what) for check in checks) for what in ("files", "runs", "cells", "missing")
        )
        incomplete = f", but incomplete: {missing:,} of {count_of(cells, 'cell')} gave no number" if missing else ""
        say(f"verified{incomplete}: {count_of(files, 'file')}, {count_of(runs, 'run')} recomputed")
        return True
    failed = [check for check in checks if check.problems]
    names = ", ".join(str(check.folder) for check in failed)
    say(f"NOT verified: {names}: {count_of(sum(len(check.problems) for check in failed), 'problem')}")
    return False


def check_folder(folder: Path) -> Path:
    """Return the folder if it can be a report's.

    Raises:
        UsageError: If there is no such folder, or it holds neither a hash list nor runs.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; give a report's folder, as in reports/DATE_MATRIX_COMMIT")
    if not any((folder / name).exists() for name in (MANIFEST_FILE, RUNS_DIR, LOGS_DIR)):
        raise UsageError(f"{folder} is no report's folder: it has no {MANIFEST_FILE} and no {RUNS_DIR}/")
    return folder


def _of(problems: list[str], name: str) -> list[str]:
    return [line for line in problems if line.startswith(f"{name}:")]
