"""What a run says about where it comes from, and what it keeps to itself."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from unilab import provenance
from unilab.provenance import command_facts, git_facts, redact, source_sha256

UNKNOWN = {"commit": None, "dirty": None, "diff_sha256": None}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host node7 of example.org, user ann, home /home/ann."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ann"))


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("/home/ann", "<home>"),
        ("training.log_dir=/home/ann/runs/1", "training.log_dir=<home>/runs/1"),
        ("[Errno 13] Permission denied: '/home/ann/x'", "[Errno 13] Permission denied: '<home>/x'"),
        ("PATH=/bin:/home/ann:/usr", "PATH=/bin:<home>:/usr"),
        ("/home/anna/x", "/home/anna/x"),
        ("/home/ann2", "/home/ann2"),
        ("/data/ann/runs", "/data/<user>/runs"),
        ("/data/ann-runs/ann_1", "/data/<user>-runs/<user>_1"),
        ("ann@node7: no", "<user>@<host>: no"),
        ("belongs to ann.", "belongs to <user>."),
        ("annual planner, Joann", "annual planner, Joann"),
        ("node7.example.org:29500", "<host>:29500"),
        ("node7.cluster", "<host>.cluster"),
        ("events.out.tfevents.1.node7.5.0", "events.out.tfevents.1.<host>.5.0"),
        ("node71 and xnode7", "node71 and xnode7"),
        ("", ""),
    ],
)
@pytest.mark.usefixtures("names")
def test_names_go_wherever_they_stand_alone(text: str, redacted: str) -> None:
    assert redact(text) == redacted


@pytest.mark.usefixtures("names")
def test_every_string_of_a_value_is_read_and_nothing_else_changes() -> None:
    value = {"ann": ["ann", {"k": "/home/ann"}, 3, None, True, 2.5]}
    assert redact(value) == {"ann": ["<user>", {"k": "<home>"}, 3, None, True, 2.5]}


@pytest.mark.usefixtures("names")
def test_names_are_plain_text_not_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "a.n")
    assert redact("aXn and a.n") == "aXn and <user>"


@pytest.mark.parametrize("error", [KeyError("uid"), OSError("no user name")])
@pytest.mark.usefixtures("names")
def test_a_user_without_name_or_home(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def nameless() -> str:
        raise error

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(getpass, "getuser", nameless)
    monkeypatch.setattr(Path, "home", homeless)
    assert redact("ann at node7 in /home/ann") == "ann at <host> in /home/ann"


@pytest.mark.usefixtures("names")
def test_a_home_that_is_the_root_hides_no_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    assert redact("/usr/bin/python") == "/usr/bin/python"


@pytest.mark.usefixtures("names")
def test_an_empty_host_name_is_nothing_to_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "")
    assert redact("a-b c") == "a-b c"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A committed tree with a package, a project file and a folder of reports."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # set where a hook runs the tests
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    root = tmp_path / "tree"
    for name in ("unilab/a.py", "repro/b.py", "pyproject.toml", "reports/r.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{name}\n")
    (root / ".gitignore").write_text("__pycache__/\n")
    git(root, "init", "-q")
    commit(root)
    return root


def git(root: Path, *arguments: str) -> str:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "x")


def test_a_clean_tree(repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    assert len(head) == 40
    assert git_facts(repository) == {"commit": head, "dirty": False, "diff_sha256": None}


def test_what_is_no_source_does_not_make_a_tree_dirty(repository: Path) -> None:
    (repository / "reports" / "new.md").write_text("x")
    (repository / "reports" / "r.md").write_text("changed")
    (repository / "unilab" / "__pycache__").mkdir()
    (repository / "unilab" / "__pycache__" / "a.py").write_text("x")
    assert git_facts(repository)["dirty"] is False


def test_changed_staged_and_untracked_sources_make_it_dirty(repository: Path) -> None:
    hashes = {git_facts(repository)["diff_sha256"]}
    for name, text in (("unilab/a.py", "1"), ("unilab/a.py", "2"), ("repro/new.py", "1"), ("repro/new.py", "2")):
        (repository / name).write_text(text)
        facts = git_facts(repository)
        assert facts["dirty"] is True
        assert len(facts["diff_sha256"]) == 64
        hashes.add(facts["diff_sha256"])
    assert len(hashes) == 5  # each state of the tree has its own
    git(repository, "add", "-A")
    assert git_facts(repository)["dirty"] is True
    commit(repository)
    assert git_facts(repository)["dirty"] is False


def test_a_deleted_source_makes_it_dirty(repository: Path) -> None:
    (repository / "pyproject.toml").unlink()
    assert git_facts(repository)["dirty"] is True


def test_the_hash_of_a_change_does_not_depend_on_settings(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "unilab" / "a.py").write_bytes(b"gr\xf6\xdfe\n")  # not UTF-8
    (repository / "unilab" / "b\xf6 c.py").write_text("untracked")
    plain = git_facts(repository)
    for setting in (("color.ui", "always"), ("diff.external", "false"), ("core.quotePath", "false")):
        git(repository, "config", *setting)
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
    assert plain["dirty"] is True
    assert git_facts(repository) == plain


def test_a_folder_inside_another_repository_is_not_that_repository(repository: Path) -> None:
    assert git_facts(repository / "unilab") == UNKNOWN


def test_a_stamp_stands_in_for_git(tmp_path: Path) -> None:
    assert git_facts(tmp_path) == UNKNOWN
    (tmp_path / "source_stamp.json").write_text(json.dumps({"commit": "c" * 40, "dirty": False}))
    assert git_facts(tmp_path) == {"commit": "c" * 40, "dirty": False, "diff_sha256": None}


def test_git_wins_over_a_stamp(repository: Path) -> None:
    (repository / "source_stamp.json").write_text(json.dumps({"commit": "c" * 40}))
    assert git_facts(repository)["commit"] == git(repository, "rev-parse", "HEAD")


def test_a_repository_without_commits_is_unknown(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert git_facts(tmp_path) == UNKNOWN


def test_no_git_and_a_git_that_hangs_are_unknown(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_: Any, **__: Any) -> str:
        raise subprocess.TimeoutExpired("git", 20)

    monkeypatch.setenv("PATH", str(repository))
    assert git_facts(repository) == UNKNOWN
    monkeypatch.setattr(subprocess, "run", hangs)
    assert git_facts(repository) == UNKNOWN


def test_the_source_hash_follows_content_and_names(tmp_path: Path) -> None:
    def write(name: str, text: str) -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        return source_sha256(tmp_path)

    hashes = [
        write("a.py", "x"),
        write("a.py", "y"),
        write("conf/c.yaml", "x"),
        write("robot.xml", "x"),
    ]
    assert len(set(hashes)) == 4
    assert write("notes.txt", "x") == hashes[-1]
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert source_sha256(tmp_path) not in hashes


def test_the_source_hash_is_that_of_its_definition(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"x")
    (tmp_path / "b.py").write_bytes(b"y")
    parts = [name + b"\0" + hashlib.sha256(text).digest() for name, text in ((b"a.py", b"x"), (b"b.py", b"y"))]
    assert source_sha256(tmp_path) == hashlib.sha256(b"".join(parts)).hexdigest()


def test_the_command_facts(names: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("NCCL_DEBUG_FILE", "/home/ann/nccl")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    facts = command_facts(["training.log_dir=/home/ann/run"])
    assert set(facts) == {"argv", "environment", "git", "source_sha256", "versions", "affinity", "host"}
    assert facts["argv"] == ["training.log_dir=<home>/run"]
    assert facts["environment"]["OMP_NUM_THREADS"] == "3"
    assert facts["environment"]["NCCL_DEBUG_FILE"] == "<home>/nccl"
    assert "secret" not in json.dumps(facts)
    assert set(facts["git"]) == set(UNKNOWN)
    assert facts["source_sha256"] == source_sha256()
    assert {"python", "torch", "mujoco", "numpy", "cuda", "nccl"} <= set(facts["versions"])
    assert facts["affinity"] == sorted(os.sched_getaffinity(0))
    assert set(facts["host"]) == {"cpu_model", "cpu_count", "memory_bytes", "gpus", "platform"}
    assert not {"ann", "node7"} & set(json.dumps(facts).replace("/", " ").split())


def test_versions_name_what_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "VERSIONED", ("torch", "no-such-distribution"))
    found = provenance.versions()
    assert found["no-such-distribution"] is None
    assert found["torch"]
