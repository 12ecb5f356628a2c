"""Micro-benchmarks of a session: what is run, kept, shown and verified."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from session_builder import matrix_text, run_session

from repro import benchmarks, session
from repro.benchmarks import Benchmark, Benchmarks, benchmark_table, convert, run_benchmarks
from repro.journal import read_journal
from repro.launch import Ended, trainer_environment
from repro.layout import BENCHMARKS_FILE, MANIFEST_FILE
from repro.manifest import read_manifest, write_manifest
from repro.matrix import load_matrix
from repro.redact import PROJECT
from repro.schema import canonical_json
from repro.verify import verify

ASKING = matrix_text({"a": {}}, extra="benchmarks = true\n")
FOUND = Benchmarks(reason=None, benchmarks=(Benchmark(name="test_x.py::test_y", nanoseconds=(3000.0, 1000.0, 2500.0)),))


@pytest.fixture
def checkout(tmp_path: Path) -> Callable[..., Path]:
    """Makes a checkout with one file of benchmarks."""

    def make(body: str) -> Path:
        folder = tmp_path / "checkout"
        (folder / "tests" / "bench").mkdir(parents=True)
        shutil.copy(PROJECT / "pyproject.toml", folder)
        (folder / "tests" / "bench" / "test_some.py").write_text(f"import time\n\n\n{body}\n")
        return folder

    return make


@pytest.fixture
def environment() -> dict[str, str]:
    """Without what says that pytest runs its tests in several processes, where there are no benchmarks."""
    return {name: value for name, value in trainer_environment(os.environ).items() if "XDIST" not in name}


def written(folder: Path) -> Benchmarks:
    return Benchmarks.model_validate_json((folder / BENCHMARKS_FILE).read_text())


def test_benchmarks_are_run_and_kept_without_names(
    checkout: Callable[..., Path], environment: dict[str, str], tmp_path: Path
) -> None:
    body = "    import warnings\n    warnings.warn('old')\n    benchmark(time.sleep, 0.01)"  # a warning is no failure
    project = checkout(f"def test_sleep(benchmark):\n{body}\n\n\ndef test_other():\n    pass")
    ended = run_benchmarks(tmp_path, environment, project)
    assert ended is not None and (ended.outcome, ended.exit_code) == ("exited", 0)
    (found,) = written(tmp_path).benchmarks
    assert found.name == "test_some.py::test_sleep"
    assert len(found.nanoseconds) >= 5 and min(found.nanoseconds) >= 10e6
    content = (tmp_path / BENCHMARKS_FILE).read_text()
    assert socket.gethostname() not in content and str(tmp_path) not in content and "machine" not in content
    assert content == canonical_json(written(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"checkout", BENCHMARKS_FILE}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("def test_it(benchmark):\n    benchmark(time.sleep, 0)\n    assert False", "exit code 1: "),
        ("def test_it():\n    pass", "tests/bench holds no benchmark"),
        ("def test_it(benchmark):\n    time.sleep(60)", "no end after 4 s; "),
    ],
)
def test_what_gives_no_benchmarks_leaves_its_reason(
    body: str,
    reason: str,
    checkout: Callable[..., Path],
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "no end" in reason:
        monkeypatch.setattr(benchmarks, "LIMIT_SECONDS", 4.0)
    run_benchmarks(tmp_path, environment, checkout(body))
    found = written(tmp_path)
    assert found.benchmarks == () and (found.reason or "").startswith(reason), found.reason


def test_an_installation_without_tests_or_pytest_says_so(
    checkout: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_benchmarks(tmp_path, {}, tmp_path / "nowhere") is None
    assert written(tmp_path).reason == "tests/bench is not part of this installation"
    monkeypatch.setattr(benchmarks.importlib.util, "find_spec", lambda name: None if "_" in name else object())
    assert run_benchmarks(tmp_path, {}, checkout("")) is None
    assert written(tmp_path).reason == "pytest-benchmark is not installed"


def test_of_pytest_benchmarks_report_names_and_durations_are_kept() -> None:
    report: dict[str, Any] = {
        "machine_info": {"node": "secret"},
        "benchmarks": [
            {"fullname": "tests/bench/test_b.py::test_2", "stats": {"data": [2e-6]}, "extra_info": {"who": "secret"}},
            {"fullname": "tests/bench/test_a.py::test_1", "stats": {"data": [1.23456e-3, 5e-4]}},
        ],
    }
    first, second = convert(report)
    assert (first.name, first.nanoseconds) == ("test_a.py::test_1", (1234560.0, 500000.0))
    assert (second.name, second.nanoseconds) == ("test_b.py::test_2", (2000.0,))


def test_the_table_shows_median_and_rounds() -> None:
    assert benchmark_table(FOUND).splitlines()[-1].split() == ["|", "`test_x.py::test_y`", "|", "2.500", "|", "3", "|"]
    assert benchmark_table(Benchmarks(reason="x", benchmarks=())) == ""


# --- in a session ----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Benchmarks that take no time; the environments they were given."""
    given: list[dict[str, str]] = []

    def run(out_dir: Path, environment: dict[str, str]) -> Ended:
        given.append(environment)
        (out_dir / BENCHMARKS_FILE).write_text(canonical_json(FOUND))
        return Ended("exited", 0, 1.5, None)

    monkeypatch.setattr(session, "run_benchmarks", run)
    return given


def checked(out: Path) -> tuple[bool, str]:
    lines: list[str] = []
    return verify([out], lines.append), "\n".join(lines)


def test_a_session_runs_them_first_shows_and_verifies_them(quick: list[dict[str, str]], tmp_path: Path) -> None:
    code, out = run_session(tmp_path, ASKING)
    assert code == 0 and len(quick) == 1 and quick[0]["PYTHONUNBUFFERED"] == "1"  # the first cell's
    assert [entry.event for entry in read_journal(out)][:4] == [
        "session_started",
        "benchmarks_started",
        "benchmarks_ended",
        "cell_started",
    ]
    page = (out / "report.md").read_text()
    assert "## Micro-benchmarks" in page and re.search(r"\| `test_x.py::test_y` +\| +2\.500 \| +3 \|", page)
    assert BENCHMARKS_FILE in read_manifest(out)[0] and BENCHMARKS_FILE in page
    assert checked(out)[0]


def test_a_session_without_them_says_why_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks, "_missing", lambda _: "tests/bench is not part of this installation")
    code, out = run_session(tmp_path / "asks", ASKING)
    assert code == 0 and "None: tests/bench is not part of this installation." in (out / "report.md").read_text()
    assert checked(out)[0]
    _, out = run_session(tmp_path / "does_not_ask", matrix_text({"a": {}}))
    assert "Micro-benchmarks" not in (out / "report.md").read_text()
    assert not (out / BENCHMARKS_FILE).exists()


def test_an_interrupt_during_them_ends_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks, "run_cell", lambda *_: Ended("interrupted", None, 1.0, "by the user"))
    code, out = run_session(tmp_path, ASKING)
    assert code == 130 and "None: by the user." in (out / "report.md").read_text()
    assert [entry.event for entry in read_journal(out)][-1] == "session_interrupted"
    assert checked(out)[0]


def change(name: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(out: Path) -> None:
        text = (out / name).read_text()
        assert old in text
        (out / name).write_text(text.replace(old, new))

    return edit


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (change(BENCHMARKS_FILE, "2500.0", "250.0"), "report.md: differs"),
        (change(BENCHMARKS_FILE, "2500.0", "-1.0"), f"{BENCHMARKS_FILE}: benchmarks.0.nanoseconds.2: "),
        (change(BENCHMARKS_FILE, '"reason": null', '"reason": "why"'), "either benchmarks or a reason"),
        (change(BENCHMARKS_FILE, '"reason": null', '"reason": null, "host": "x"'), "unknown key 'host'"),
        (change(BENCHMARKS_FILE, '"reason"', ' "reason"'), f"{BENCHMARKS_FILE}: not as the suite writes it"),
        (lambda out: (out / BENCHMARKS_FILE).unlink(), f"{BENCHMARKS_FILE} is missing"),
        (change("plan.json", '    "benchmarks": true,\n', ""), "journal.jsonl has micro-benchmarks, though"),
        (change("journal.jsonl", "benchmarks_ended", "benchmarks_started"), "benchmarks_started of cell None is there"),
    ],
)
def test_a_change_of_them_is_found_though_hashes_fit(
    quick: list[dict[str, str]], edit: Callable[[Path], None], problem: str, tmp_path: Path
) -> None:
    _, out = run_session(tmp_path, ASKING)
    edit(out)
    write_manifest(out)
    passed, lines = checked(out)
    assert not passed and problem in lines, lines
    assert (out / MANIFEST_FILE).is_file()


def test_benchmarks_that_nobody_asked_for_are_found(tmp_path: Path) -> None:
    _, out = run_session(tmp_path, matrix_text({"a": {}}))
    (out / BENCHMARKS_FILE).write_text(canonical_json(FOUND))
    write_manifest(out)
    assert "says that no micro-benchmark was started" in checked(out)[1]


def test_a_record_matrix_asks_for_them_and_smoke_does_not() -> None:
    assert load_matrix("single").benchmarks and not load_matrix("smoke").benchmarks
