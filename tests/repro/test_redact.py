from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from repro.redact import PROJECT, Redactor


@pytest.fixture
def redactor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Redactor:
    monkeypatch.setattr("socket.gethostname", lambda: "box7.example.org")
    monkeypatch.setattr("getpass.getuser", lambda: "marie")
    monkeypatch.setattr("pathlib.Path.home", lambda: Path("/home/marie"))
    return Redactor(tmp_path / "out")


def test_paths_and_names_are_replaced(redactor: Redactor, tmp_path: Path) -> None:
    text = f"{tmp_path}/out/runs/a {PROJECT}/unilab/x.py /home/marie/data by marie@box7 on box7.example.org"
    assert redactor.text(text) == "./runs/a <project>/unilab/x.py <home>/data by <user>@<host> on <host>"


def test_only_whole_names_and_whole_paths_are_replaced(redactor: Redactor, tmp_path: Path) -> None:
    assert redactor.text("rosemarie box77") == "rosemarie box77"
    assert redactor.text("/data/marie-runs") == "/data/<user>-runs"
    assert redactor.text(f"{tmp_path}/out-2/x") == f"{tmp_path}/out-2/x"


def test_json_keeps_its_keys_and_stays_json(redactor: Redactor, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"marie": ["/home/marie/x", 1, null]}')
    assert redactor.file(path)
    assert json.loads(path.read_text()) == {"marie": ["<home>/x", 1, None]}


def test_untouched_files_keep_their_bytes(redactor: Redactor, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'{"a":   1}')
    assert not redactor.file(path)
    assert path.read_bytes() == b'{"a":   1}'


def test_damaged_and_foreign_bytes_survive(redactor: Redactor, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'{"a": "marie')
    (tmp_path / "b.log").write_bytes(b"\xff\xfe marie\n")
    (tmp_path / "model_1.pt").write_bytes(b"marie")
    assert redactor.folder(tmp_path) == ["a.json", "b.log"]
    assert (tmp_path / "a.json").read_bytes() == b'{"a": "<user>'
    assert (tmp_path / "b.log").read_bytes() == b"\xff\xfe <user>\n"
    assert (tmp_path / "model_1.pt").read_bytes() == b"marie"


def test_a_file_that_could_not_be_rewritten_leaves_nothing_beside_it(
    redactor: Redactor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.log"
    path.write_text("marie")

    def replace(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="No space"):
        redactor.file(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.log"] and path.read_text() == "marie"


@pytest.mark.parametrize("name", ["root", "runner"])
def test_common_account_names_are_words(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: name)
    assert Redactor().text(f"the {name} of it") == f"the {name} of it"
