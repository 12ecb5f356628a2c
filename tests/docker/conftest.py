"""An engine, images, and one report made in a container; skipped where there is no engine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from compose_cli import NAME, Compose

OWNER = (4321, 4322)  # of the report folder: a user that no image knows
BASES = ("python:3.12-slim-trixie", "python:3.11-slim-trixie")


@pytest.fixture(scope="session")
def base_image() -> str:
    """A Python image that this engine holds or can pull; LOCAL_PYTHON_IMAGE names one."""
    if shutil.which("docker") is None or _docker("info").returncode or _docker("compose", "version").returncode:
        pytest.skip("no container engine answers; start one or set DOCKER_HOST")
    named = os.environ.get("LOCAL_PYTHON_IMAGE")
    for name in (named,) if named else BASES:
        if _docker("image", "inspect", name).returncode == 0 or _docker("pull", "--quiet", name).returncode == 0:
            return name
    pytest.skip("the engine holds no Python image and no registry answers; set LOCAL_PYTHON_IMAGE")


@pytest.fixture(scope="session")
def compose(base_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    """Compose with images built from a wheelhouse; without a network on a base image that lacks nothing."""
    reports = tmp_path_factory.mktemp("reports")
    if os.geteuid() == 0:
        os.chown(reports, *OWNER)
    reports.parent.chmod(0o755)
    own = {
        "PYTHON_IMAGE": base_image,
        "BUILD_NETWORK": "none" if "LOCAL_PYTHON_IMAGE" in os.environ else "default",
        "REPORTS_DIR": str(reports),
        "IMAGE_NAME": NAME,
        "COMPOSE_PROJECT_NAME": NAME,
    }
    found = Compose(reports, {**os.environ, **own})
    asked = "import sys; print('%d.%d' % sys.version_info[:2])"
    version = _docker("run", "--rm", "--network", "none", base_image, "python3", "-c", asked).stdout.strip()
    found.make("wheelhouse", "LOCK=cpu", f"PYTHON_VERSION={version}")
    found.make("image", "SERVICE=smoke test")
    yield found
    found("down", "--volumes", "--remove-orphans", check=False)


@pytest.fixture(scope="session")
def owner() -> tuple[int, int]:
    """User and group that the report folder belongs to."""
    return OWNER if os.geteuid() == 0 else (os.geteuid(), os.getegid())


@pytest.fixture(scope="session")
def smoke(compose: Compose) -> subprocess.CompletedProcess[str]:
    """`docker compose run smoke`, ended."""
    return compose.run("smoke", check=False)


@pytest.fixture(scope="session")
def report(compose: Compose, smoke: subprocess.CompletedProcess[str]) -> Path:
    """The report that it wrote, on the host."""
    assert smoke.returncode == 0, smoke.stdout + smoke.stderr
    return compose.reports / Path(smoke.stdout.splitlines()[-1]).parent.name


def _docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False, timeout=600)
