from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from repro.errors import UsageError
from repro.provenance import STAMP_FILE, find_source, graph_hooks, trainer_package, trainer_sha256
from unilab import names


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for package in ("repro", "unilab"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    return tmp_path


def git(project: Path, *arguments: str) -> str:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(project), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(project: Path) -> Path:
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-qm", "x")
    return project


def test_a_clean_checkout_is_its_commit(checkout: Path) -> None:
    source = find_source(checkout)
    assert (source.origin, source.dirty, source.diff_sha256) == ("git", False, None)
    assert source.commit == git(checkout, "rev-parse", "HEAD")
    assert source.short == source.commit[:7]


def test_changed_and_new_sources_make_it_dirty_and_reports_do_not(checkout: Path) -> None:
    (checkout / "reports").mkdir()
    (checkout / "reports" / "x").write_text("x")
    assert find_source(checkout).dirty is False
    (checkout / "unilab" / "__init__.py").write_text("a = 1\n")
    changed = find_source(checkout)
    (checkout / "repro" / "new.py").write_text("b = 2\n")
    added = find_source(checkout)
    assert changed.dirty and added.dirty
    assert len({changed.diff_sha256, added.diff_sha256, None}) == 3
    assert changed.sources_sha256 != added.sources_sha256


def test_without_git_a_stamp_tells_the_commit(project: Path) -> None:
    (project / STAMP_FILE).write_text('{"commit": "abcdef0123", "dirty": true, "diff_sha256": "77"}')
    source = find_source(project)
    assert (source.origin, source.commit, source.dirty, source.diff_sha256) == ("stamp", "abcdef0123", True, "77")
    assert source.short == "abcdef0"
    (project / STAMP_FILE).write_text("{}")
    with pytest.raises(UsageError, match=r"source_stamp\.json must hold"):
        find_source(project)


def test_without_either_the_sources_are_hashed(project: Path) -> None:
    source = find_source(project)
    assert (source.origin, source.commit, source.dirty) == ("hash", None, None)
    assert source.short == f"src{source.sources_sha256[:7]}"


def test_a_package_inside_another_repository_does_not_take_its_commit(checkout: Path) -> None:
    inner = checkout / "venv"
    for package in ("repro", "unilab"):
        (inner / package).mkdir(parents=True)
    assert find_source(inner).origin == "hash"


def test_the_trainer_package_is_found_and_its_hooks_are_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trainer_package() == Path(names.__file__).parent
    monkeypatch.setattr(names, "GRAPH_HOOKS", True, raising=False)
    assert graph_hooks() is True
    monkeypatch.delattr(names, "GRAPH_HOOKS")
    assert graph_hooks() is False


def test_the_trainers_hash_is_the_one_its_runs_write() -> None:
    from unilab.provenance import source_sha256

    package = trainer_package()
    assert package is not None
    assert find_source().trainer_sha256 == trainer_sha256(package) == source_sha256()


def test_the_trainers_folder_is_named_without_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_source().trainer == "<project>/unilab"
    monkeypatch.setattr("repro.provenance.trainer_package", lambda: None)
    assert (find_source().trainer, find_source().trainer_sha256) == (None, None)
