"""Scripts around an image, run on the host: stamp, facts of a build, digests, wheelhouse, the session."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from repro.provenance import find_source, sources_sha256

ROOT = Path(__file__).parent.parent.parent
DIGEST = f"sha256:{'0123456789abcdef' * 4}"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"container_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(command: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small copy of the project: what the scripts read."""
    for name in ("docker", "scripts", "locks", "repro"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "unilab").mkdir()
    for name in ("__init__.py", "names.py"):
        shutil.copy(ROOT / "unilab" / name, tmp_path / "unilab")
    for name in ("Dockerfile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.fixture
def repository(tree: Path) -> Path:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run(["git", "-C", str(tree), *who, *arguments], check=True, capture_output=True, timeout=30)
    return tree


# The stamp: the facts that the suite finds where there is git.


def test_a_stamp_says_what_the_suite_finds(repository: Path) -> None:
    (repository / "repro" / "text.py").write_text("changed = 1\n")
    (repository / "unilab" / "new.py").write_text("new = 1\n")
    truth = find_source(repository)
    result = run([sys.executable, str(repository / "scripts" / "stamp.py")])
    stamp = json.loads((repository / "source_stamp.json").read_text())
    assert stamp == {"commit": truth.commit, "dirty": True, "diff_sha256": truth.diff_sha256}
    assert result.stdout == f"REVISION={truth.commit}-dirty\nSOURCE_SHA256={truth.sources_sha256}\n"


def test_no_git_is_no_stamp(tree: Path) -> None:
    result = run([sys.executable, str(tree / "scripts" / "stamp.py")], {"GIT_CEILING_DIRECTORIES": str(tree.parent)})
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)
    assert not (tree / "source_stamp.json").exists()


# The facts of an image: read from what is installed, compared with what the labels will say.


def build_facts(tree: Path, **arguments: str) -> subprocess.CompletedProcess[str]:
    given = {
        "LOCK": "cpu",
        "PYTHON_IMAGE": f"python:3.12-slim-trixie@{DIGEST}",
        "REVISION": "unknown",
        "SOURCE_SHA256": "unknown",
        "CUDA_VERSION": "unknown",
        "CUDNN_VERSION": "unknown",
        "NCCL_VERSION": "unknown",
        "PYTHONPATH": str(tree),
    }
    return run([sys.executable, str(tree / "docker" / "image_facts.py")], {**given, **arguments})


def write_stamp(tree: Path) -> Path:
    stamp = tree / "source_stamp.json"
    stamp.write_text(json.dumps({"commit": "a" * 40, "dirty": True, "diff_sha256": "b" * 64}))
    return stamp


def test_an_image_records_its_base_lock_and_sources(tree: Path) -> None:
    stamp = write_stamp(tree)
    result = build_facts(tree, SOURCE_SHA256=sources_sha256(tree), REVISION=f"{'a' * 40}-dirty")
    assert result.returncode == 0, result.stderr
    facts = json.loads((tree / "image.json").read_text())
    assert facts["base"]["digest"] == DIGEST
    assert facts["revision"] == f"{'a' * 40}-dirty"
    assert facts["source_sha256"] == sources_sha256(tree)
    assert stamp.exists()


def test_a_stamp_without_a_hash_is_dropped(tree: Path) -> None:
    stamp = write_stamp(tree)
    assert build_facts(tree).returncode == 0
    assert not stamp.exists()
    assert json.loads((tree / "image.json").read_text())["revision"] == "unknown"


@pytest.mark.parametrize(
    ("name", "value"),
    [("SOURCE_SHA256", "0" * 64), ("REVISION", "c" * 40), ("CUDNN_VERSION", "1.2.3"), ("NCCL_VERSION", "1.2.3")],
)
def test_a_label_that_is_not_true_stops_the_build(tree: Path, name: str, value: str) -> None:
    result = build_facts(tree, **{name: value})
    assert result.returncode == 1
    assert result.stderr.startswith(f"image_facts: build argument {name}={value}, but this image has ")
    assert not (tree / "image.json").exists()


# Digests: what a registry says, or nothing.


def pin(tree: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a docker that does this."""
    folder = tree / "bin"
    folder.mkdir(exist_ok=True)
    (folder / "docker").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "docker").chmod(0o755)
    return run([str(tree / "scripts" / "pin_images")], {"PATH": f"{folder}:{os.environ['PATH']}"})


def test_a_digest_is_pinned_as_the_registry_gives_it_and_can_be_pinned_again(tree: Path) -> None:
    other = DIGEST.replace("0123", "3210")
    for digest in (DIGEST, other):
        result = pin(tree, f'[ "$4" = python:3.12-slim-trixie ] && echo {digest}')
        assert (result.returncode, result.stdout) == (0, f"python:3.12-slim-trixie@{digest}\n")
        assert f"\nARG PYTHON_IMAGE=python:3.12-slim-trixie@{digest}\n" in (tree / "Dockerfile").read_text()
    before = (ROOT / "Dockerfile").read_text().splitlines()
    changed = [line for line in (tree / "Dockerfile").read_text().splitlines() if line not in before]
    assert changed == [f"ARG PYTHON_IMAGE=python:3.12-slim-trixie@{other}"]
    assert not list(tree.glob("Dockerfile.*"))


@pytest.mark.parametrize(
    ("script", "code"), [("echo 'no such host' >&2; exit 1", 3), ("echo sha256:123", 1), ("echo", 1)]
)
def test_without_a_digest_nothing_changes(tree: Path, script: str, code: int) -> None:
    before = (tree / "Dockerfile").read_bytes()
    result = pin(tree, script)
    assert (result.returncode, len(result.stderr.splitlines())) == (code, 1)
    assert "the Dockerfile is unchanged" in result.stderr
    assert (tree / "Dockerfile").read_bytes() == before


# The wheelhouse: what may be asked for. Filling it is part of the container tests.


@pytest.mark.parametrize("arguments", [[], ["rocm", "3.12"], ["cpu"], ["cpu", "3.9"], ["cpu", "3.12.1"]])
def test_a_wheelhouse_is_for_a_lock_and_an_interpreter(tree: Path, arguments: list[str]) -> None:
    result = run([str(tree / "scripts" / "wheelhouse"), *arguments])
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)


def test_a_filled_wheelhouse_is_left_alone_until_a_lock_changes(tree: Path) -> None:
    folder, locks = tree / "wheelhouse" / "cpu-py3.12", ["locks/cpu.txt", "locks/build.txt", "locks/test.txt"]
    folder.mkdir(parents=True)
    sums = subprocess.run(["sha256sum", *locks], cwd=tree, check=True, capture_output=True, timeout=10).stdout
    (folder / "LOCKS.sha256").write_bytes(sums)
    command, no_pip = [str(tree / "scripts" / "wheelhouse"), "cpu", "3.12"], {"PYTHON": "false"}
    assert run(command, no_pip).stdout == "wheelhouse/cpu-py3.12: up to date with the locks\n"
    with (tree / "locks" / "cpu.txt").open("a") as lock:
        lock.write("# changed\n")
    assert run(command, no_pip).returncode != 0


# The session: run, then verify, and the code of whichever failed first.


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reports" / "it").mkdir(parents=True)
    (tmp_path / "reports" / "it" / "report.md").touch()
    return load(ROOT / "docker" / "session.py")


@pytest.mark.parametrize(
    ("codes", "expected", "calls"),
    [
        ({"run": 0, "verify": 0}, 0, ["run", "verify"]),
        ({"run": 0, "verify": 1}, 1, ["run", "verify"]),
        ({"run": 4, "verify": 0}, 4, ["run", "verify"]),
        ({"run": 4, "verify": 1}, 4, ["run", "verify"]),
        ({"run": 130, "verify": 0}, 130, ["run"]),
    ],
)
def test_a_run_is_verified_and_its_code_kept(
    session: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    codes: dict[str, int],
    expected: int,
    calls: list[str],
) -> None:
    seen: list[list[str]] = []

    def command(argv: list[str]) -> int:
        seen.append(argv)
        print("one line\nreports/it/report.md" if argv[0] == "run" else "checked")
        return codes[argv[0]]

    monkeypatch.setattr(session.cli, "main", command)
    assert session.main(["run", "--matrix", "auto"]) == expected
    assert [argv[0] for argv in seen] == calls
    assert seen[0] == ["run", "--matrix", "auto"]
    assert seen[1:] in ([], [["verify", "reports/it"]])
    assert capsys.readouterr().out.splitlines()[-1] == "reports/it/report.md"


@pytest.mark.parametrize("argv", [["verify", "reports/it"], ["run", "--dry-run"], ["doctor"]])
def test_nothing_else_is_verified(session: ModuleType, monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    seen: list[list[str]] = []

    def command(given: list[str]) -> int:
        seen.append(given)
        print("a last line that is no report")
        return 3

    monkeypatch.setattr(session.cli, "main", command)
    assert session.main(argv) == 3
    assert seen == [argv]


def test_the_stamp_hashes_the_files_that_the_suite_hashes() -> None:
    """An image whose source hash is another than its stamp says is refused at its build."""
    assert load(ROOT / "scripts" / "stamp.py").sources_sha256(ROOT) == sources_sha256(ROOT)
