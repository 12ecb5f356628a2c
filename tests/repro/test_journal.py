from __future__ import annotations

from pathlib import Path

import pytest

from repro.errors import UsageError
from repro.journal import Journal, read_journal
from repro.layout import JOURNAL_FILE


def test_entries_come_back_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("session_started")
    written = journal.write("cell_ended", cell="a_r1", outcome="exited", exit_code=1, seconds=1.23456, reason="x")
    entries = read_journal(tmp_path)
    assert [entry.event for entry in entries] == ["session_started", "cell_ended"]
    assert entries[1] == written
    assert entries[1].seconds == 1.235
    assert len((tmp_path / JOURNAL_FILE).read_bytes().splitlines()) == 2


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


def test_a_missing_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"journal\.jsonl is missing"):
        read_journal(tmp_path)
