"""Names inside a report folder."""

from __future__ import annotations

# Raw: what the session wrote.
PLAN_FILE = "plan.json"
HOST_FILE = "host.json"
JOURNAL_FILE = "journal.jsonl"
BENCHMARKS_FILE = "benchmarks.json"
RUNS_DIR = "runs"
LOGS_DIR = "logs"
TELEMETRY_DIR = "telemetry"
SUPERSEDED_DIR = "superseded"  # what attempts left whose cells were run again
PROBES_DIR = "probes"
CEILING_FILE = "ceiling.json"  # in the folder of a run

# Derived: a function of the raw files.
RESULT_FILE = "result.json"
REPORT_FILE = "report.md"
FIGURES_DIR = "figures"

# Hashes of all of them.
MANIFEST_FILE = "MANIFEST.sha256"


def is_derived(name: str) -> bool:
    """Whether a relative path is a derived file of a report."""
    return name in (RESULT_FILE, REPORT_FILE) or name.startswith(f"{FIGURES_DIR}/")
