from __future__ import annotations

import re
from pathlib import Path

import pytest

from repro.errors import UsageError
from repro.journal import Event, Journal, read_journal
from repro.layout import JOURNAL_FILE


def test_entries_come_back_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("session_started")
    journal.write("cell_started", cell="a_r1")
    written = journal.write("cell_ended", cell="a_r1", outcome="exited", exit_code=1, seconds=1.23456, reason="x")
    entries = read_journal(tmp_path)
    assert [entry.event for entry in entries] == ["session_started", "cell_started", "cell_ended"]
    assert entries[2] == written
    assert entries[2].seconds == 1.235
    assert len((tmp_path / JOURNAL_FILE).read_bytes().splitlines()) == 3


def test_a_line_cut_by_a_crash_is_left_out(tmp_path: Path) -> None:
    Journal(tmp_path).write("session_started")
    path = tmp_path / JOURNAL_FILE
    path.write_bytes(path.read_bytes() + b'{"event": "cell_sta')
    assert [entry.event for entry in read_journal(tmp_path)] == ["session_started"]


@pytest.mark.parametrize("line", [b"{}", b"nonsense", b'{"event": "coffee", "time": "now"}'])
def test_a_line_that_is_no_entry_is_refused_with_its_number(tmp_path: Path, line: bytes) -> None:
    Journal(tmp_path).write("session_started")
    path = tmp_path / JOURNAL_FILE
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(UsageError, match=r"^journal\.jsonl line 2: "):
        read_journal(tmp_path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"event": "session_ended", "time": "yesterday"}', "time: "),
        ('{"event": "session_ended", "time": "2026-11-30T00:00:00"}', "time: '2026-11-30T00:00:00' has no time zone"),
        ('{"event": "session_ended", "event": "session_ended", "time": "T"}', "key 'event' is there twice"),
        ('{"event": "session_started", "time": "T"}', "session_started; session_started is the first line and no"),
        ('{"event": "cell_ended", "time": "T", "cell": "a_r1"}', "cell 'a_r1' ends before it starts"),
        ('{"event": "cell_started", "time": "T"}', "cell_started names no cell"),
        ('{"event": "session_ended", "time": "T", "cell": "a_r1"}', "session_ended names cell 'a_r1'"),
    ],
)
def test_a_line_that_no_session_writes_is_refused(tmp_path: Path, line: str, problem: str) -> None:
    Journal(tmp_path).write("session_started")
    with (tmp_path / JOURNAL_FILE).open("a") as file:
        file.write(line.replace('"T"', '"2026-11-30T00:00:00Z"') + "\n")
    with pytest.raises(UsageError, match=re.escape(f"{JOURNAL_FILE} line 2: {problem}")):
        read_journal(tmp_path)


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ((), "holds no entry"),
        (("cell_started",), "line 1: cell_started; session_started is the first line"),
        (("session_started", "session_ended", "cell_started"), "line 2: session_ended is not the last line"),
        (("session_started", "session_interrupted", "session_ended"), "line 2: session_interrupted is not the last"),
        (("session_started", "cell_started", "cell_started"), "line 3: cell_started of cell 'a_r1' is there twice"),
        (("session_started", "cell_started", "cell_ended", "cell_ended"), "line 4: cell_ended of cell 'a_r1' is"),
    ],
)
def test_an_order_that_cannot_have_happened_is_refused(tmp_path: Path, events: tuple[Event, ...], problem: str) -> None:
    (tmp_path / JOURNAL_FILE).touch()
    for event in events:
        Journal(tmp_path).write(event, cell="a_r1" if event.startswith("cell_") else None)
    with pytest.raises(UsageError, match=problem):
        read_journal(tmp_path)


@pytest.mark.parametrize("ending", [("session_interrupted",), ("session_ended",), ()])  # the last was killed
def test_a_resumed_session_may_start_a_cell_again(tmp_path: Path, ending: tuple[Event, ...]) -> None:
    events: tuple[Event, ...] = ("session_started", "cell_started", "cell_ended", *ending)
    events += ("session_resumed", "session_resumed", "cell_started", "cell_ended", "session_ended")
    for event in events:
        Journal(tmp_path).write(event, cell="a_r1" if event.startswith("cell_") else None)
    assert [entry.event for entry in read_journal(tmp_path)] == list(events)


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        (("session_resumed",), "line 1: session_resumed; session_started is the first line"),
        (("session_started", "cell_started", "session_resumed", "cell_ended"), "line 4: cell 'a_r1' ends before it"),
        (("session_started", "session_resumed", "session_ended", "cell_started"), "line 3: session_ended is not the"),
    ],
)
def test_a_resumed_session_begins_anew_and_not_otherwise(
    tmp_path: Path, events: tuple[Event, ...], problem: str
) -> None:
    for event in events:
        Journal(tmp_path).write(event, cell="a_r1" if event.startswith("cell_") else None)
    with pytest.raises(UsageError, match=problem):
        read_journal(tmp_path)


def test_seconds_that_run_backwards_are_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("session_started")
    journal.write("session_ended")
    path = tmp_path / JOURNAL_FILE
    path.write_text(path.read_text().replace('"elapsed": 0.', '"elapsed": 7.', 1))
    with pytest.raises(UsageError, match=r"line 2: elapsed 0\.\d+ is before that of the line above"):
        read_journal(tmp_path)


def test_a_missing_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"journal\.jsonl is missing"):
        read_journal(tmp_path)
