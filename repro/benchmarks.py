"""Micro-benchmarks beside a session: run before its first cell, kept without names, shown as a table."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from repro import text
from repro.launch import Ended, run_cell
from repro.layout import BENCHMARKS_FILE
from repro.redact import PROJECT
from repro.schema import Strict, canonical_json

SUITE = "tests/bench"
LIMIT_SECONDS = 90.0
SECONDS_EACH = "0.3"  # so that a session does not wait long for them, and the file stays small
OPTIONS = (
    *("--benchmark-enable", "--benchmark-only", f"--benchmark-max-time={SECONDS_EACH}"),
    *("-q", "-W", "default", "-p", "no:cacheprovider"),  # a warning is no reason to have no number
)


class Benchmark(Strict):
    """One benchmark.

    Attributes:
        name: File and test.
        nanoseconds: Duration of one call in each round; where a round is several calls, their mean.
    """

    name: Annotated[str, Field(min_length=1)]
    nanoseconds: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]


class Benchmarks(Strict):
    """`benchmarks.json`.

    Attributes:
        reason: Why there is no benchmark, or None.
        benchmarks: All of them, by name.
    """

    schema_version: Literal[1] = 1
    reason: str | None
    benchmarks: tuple[Benchmark, ...]

    @model_validator(mode="after")
    def _either(self) -> Self:
        if (self.reason is None) != bool(self.benchmarks):
            raise ValueError("there are either benchmarks or a reason why not")
        return self


def run_benchmarks(out_dir: Path, environment: Mapping[str, str], project: Path = PROJECT) -> Ended | None:
    """Run the benchmarks of this checkout and write `benchmarks.json`, which says why where there are none.

    Args:
        out_dir: The report folder.
        environment: Of the process.
        project: The checkout.

    Returns:
        How the process ended, or None where nothing was started.
    """
    missing = _missing(project)
    if missing is not None:
        leave_out(out_dir, missing)
        return None
    with tempfile.TemporaryDirectory() as name:
        folder, output = Path(name), Path(name) / "pytest.json"
        (folder / "logs").mkdir()
        own = ("-c", str(project / "pyproject.toml"), "--rootdir", str(project), f"--benchmark-json={output}")
        command = [sys.executable, "-m", "pytest", str(project / SUITE), *OPTIONS, *own]
        ended = run_cell(command, environment, folder, folder / "logs" / "benchmarks.log", LIMIT_SECONDS)
        _write(out_dir, _read(ended, output))
    return ended


def leave_out(out_dir: Path, reason: str) -> None:
    """Write `benchmarks.json` with the reason why there are none."""
    _write(out_dir, Benchmarks(reason=reason, benchmarks=()))


def convert(report: Any) -> tuple[Benchmark, ...]:
    """What is kept of pytest-benchmark's report: names and durations, nothing of machine or user."""
    return tuple(
        Benchmark(
            name=item["fullname"].removeprefix(f"{SUITE}/"),
            nanoseconds=tuple(round(1e9 * seconds, 1) for seconds in item["stats"]["data"]),
        )
        for item in sorted(report["benchmarks"], key=lambda item: str(item["fullname"]))
    )


def benchmark_table(found: Benchmarks) -> str:
    """Median and rounds of every benchmark as Markdown; empty where there is none."""
    rows = [
        [f"`{item.name}`", text.significant(median(item.nanoseconds) / 1e3, 4), f"{len(item.nanoseconds):,}"]
        for item in found.benchmarks
    ]
    return text.markdown_table(("benchmark", "median, \N{MICRO SIGN}s", "rounds"), rows, "lrr") if rows else ""


def _missing(project: Path) -> str | None:
    """Why no benchmark can be run here, or None."""
    if not (project / SUITE).is_dir():
        return f"{SUITE} is not part of this installation"
    absent = [name for name in ("pytest", "pytest_benchmark") if importlib.util.find_spec(name) is None]
    return f"{absent[0].replace('_', '-')} is not installed" if absent else None


def _read(ended: Ended, output: Path) -> Benchmarks:
    """Benchmarks of a process that ended well, else its reason alone: half a set is no set."""
    if ended.outcome != "exited" or ended.exit_code != 0:
        return Benchmarks(reason=ended.reason, benchmarks=())
    if not output.exists():
        return Benchmarks(reason=f"{SUITE} holds no benchmark", benchmarks=())
    return Benchmarks(reason=None, benchmarks=convert(json.loads(output.read_bytes())))


def _write(out_dir: Path, found: Benchmarks) -> None:
    (out_dir / BENCHMARKS_FILE).write_text(canonical_json(found), encoding="utf-8")
