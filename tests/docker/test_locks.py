"""Locks against pyproject.toml, against each other and against what the Dockerfile says of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = ("build", "cpu", "cuda", "test")


def read_lock(name: str) -> dict[str, tuple[Requirement, list[str]]]:
    """Requirement and hashes by package."""
    text = (ROOT / "locks" / f"{name}.txt").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found = {}
    for line in lines:
        wanted, *hashes = re.split(r"\s+--hash=sha256:", line.strip())
        requirement = Requirement(wanted)
        assert requirement.name not in found, f"{requirement.name} stands twice in {name}.txt"
        found[requirement.name] = (requirement, hashes)
    return found


def versions(name: str) -> dict[str, Version]:
    """Version by package."""
    return {package: pinned(requirement) for package, (requirement, _) in read_lock(name).items()}


def pinned(requirement: Requirement) -> Version:
    """The one version that a requirement allows."""
    (only,) = requirement.specifier
    assert only.operator == "==" and "*" not in only.version, requirement
    return Version(only.version)


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_has_one_version_and_hashes(name: str) -> None:
    for requirement, hashes in read_lock(name).values():
        assert requirement.url is None
        pinned(requirement)
        assert hashes and all(re.fullmatch("[0-9a-f]{64}", value) for value in hashes), requirement


@pytest.mark.parametrize("name", LOCKS)
def test_one_lock_serves_every_interpreter(name: str) -> None:
    minors = [{"python_version": f"3.{m}", "python_full_version": f"3.{m}.1"} for m in (11, 12, 13)]
    for requirement, _ in read_lock(name).values():
        marker = requirement.marker
        assert marker is None or len({marker.evaluate({"sys_platform": "linux", **env}) for env in minors}) == 1


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_lock_holds_what_the_project_asks_for(name: str) -> None:
    locked = versions(name)
    for text in PROJECT["dependencies"]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(locked[wanted.name.lower()]), f"{text}: {name}.txt has {locked[wanted.name]}"


def test_test_tools_are_those_of_the_project() -> None:
    locked = versions("test")
    wanted = {item.name: item for item in map(Requirement, PROJECT["optional-dependencies"]["dev"])}
    asked = [Requirement(line).name for line in (ROOT / "locks" / "test.in").read_text().splitlines()]
    assert {name for name in wanted if name.startswith(("pytest", "hypothesis"))} == set(asked)
    assert all(wanted[name].specifier.contains(locked[name]) for name in asked)


def test_locks_agree_on_what_they_share() -> None:
    cpu, cuda = versions("cpu"), versions("cuda")
    assert cuda["torch"].public == cpu["torch"].public
    assert (cuda["torch"].local, cpu["torch"].local) == (None, "cpu")
    only_cuda = {name for name in cuda if name.startswith(("nvidia-", "cuda-", "triton"))} - {"nvidia-ml-py"}
    assert set(cuda) - set(cpu) == only_cuda
    assert set(cpu) <= set(cuda)
    for other in ("cpu", "build", "test"):
        shared = set(versions(other)) & set(cuda) - {"torch"}
        assert {name: versions(other)[name] for name in shared} == {name: cuda[name] for name in shared}


def test_the_build_has_what_builds_the_source_archives() -> None:
    assert {"pip", "setuptools"} == set(versions("build"))


def test_the_cuda_stack_is_locked_whole_and_labelled_as_locked() -> None:
    cuda = versions("cuda")
    text = (ROOT / "Dockerfile").read_text()
    for label, package in (
        ("CUDA", "nvidia-cuda-runtime"),
        ("CUDNN", "nvidia-cudnn-cu13"),
        ("NCCL", "nvidia-nccl-cu13"),
    ):
        (found,) = re.findall(rf"^ARG {label}_VERSION=(.+)$", text, re.MULTILINE)
        assert Version(found) == cuda[package]


@pytest.mark.parametrize("name", LOCKS)
def test_locks_name_no_place(name: str) -> None:
    assert not re.search(r"(://|index-url|find-links|file:|^-e)", (ROOT / "locks" / f"{name}.txt").read_text())
