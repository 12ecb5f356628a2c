"""Rules that the Dockerfile, the services and the build context keep; nothing is started."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = ("repro", "smoke", "test")


def instructions(name: str) -> list[str]:
    """Arguments of every instruction of one kind, in order."""
    return [" ".join(found.split()) for found in re.findall(rf"^{name} (.+)$", DOCKERFILE, re.MULTILINE)]


def test_the_base_is_an_exact_tag() -> None:
    default = instructions("ARG")[0]
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.\d+-slim-[a-z]+(@sha256:[0-9a-f]{64})?", default)
    stages = {line.split(" AS ")[1] for line in instructions("FROM") if " AS " in line}
    assert {line.split(" AS ")[0] for line in instructions("FROM")} <= {"${PYTHON_IMAGE}"} | stages
    assert "latest" not in DOCKERFILE + (ROOT / "compose.yaml").read_text()


def test_no_frontend_is_fetched() -> None:
    assert not re.search(r"^#\s*syntax\s*=", DOCKERFILE, re.MULTILINE)


def test_an_image_runs_as_a_number_that_is_not_root() -> None:
    (user,) = instructions("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    assert DOCKERFILE.index("USER ") < DOCKERFILE.index("FROM suite AS test")
    assert instructions("STOPSIGNAL") == ["SIGINT"]


def test_packages_come_by_hash_alone() -> None:
    install = (ROOT / "docker" / "install_lock.sh").read_text()
    assert install.count("pip install") == 1
    assert "--require-hashes" in install
    assert "--no-deps" in install
    others = [line for line in instructions("RUN") if "pip" in line]
    assert len(others) == 1
    assert "--no-deps --no-index" in others[0]
    assert not [line for line in instructions("RUN") if re.search(r"\b(curl|wget)\b", line)]
    assert not instructions("ADD")


def test_the_image_holds_what_it_runs_and_nothing_of_a_checkout() -> None:
    assert "COPY . " not in DOCKERFILE
    assert instructions("FROM")[-1] == "suite"


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_sealed(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["network_mode"] == "none"
    assert service["cap_drop"] == ["ALL"]
    assert set(service["cap_add"]) == {"KILL", "SETGID", "SETUID"}
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert not {"privileged", "pid", "ipc", "devices", "ports"} & set(service)
    reports, _ = service["volumes"]
    assert reports["bind"] == {"create_host_path": False}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_ends_in_time_to_close_its_journal(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["stop_signal"] == "SIGINT"
    assert int(service["stop_grace_period"].removesuffix("s")) >= 30


def test_only_repro_asks_for_gpus() -> None:
    repro = COMPOSE["services"]["repro"]
    (device,) = repro["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert repro["ulimits"] == {"memlock": -1}
    assert repro["command"] == ["run", "--matrix", "auto", "--require-gpu"]
    assert not any("deploy" in COMPOSE["services"][name] for name in ("smoke", "test"))


def test_ranks_meet_on_the_loopback() -> None:
    (environment,) = [line for line in instructions("ENV") if "NCCL" in line]
    assert "NCCL_SOCKET_IFNAME=lo" in environment
    assert "GLOO_SOCKET_IFNAME=lo" in environment


def test_the_context_is_an_allow_list() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    allowed = {line.removeprefix("!") for line in lines[1:] if line.startswith("!")}
    assert {"unilab", "repro", "locks", "docker", "pyproject.toml"} <= allowed
    assert not allowed & {".git", ".venv", "reports", ".env", "logs", "out"}
    copied = {word for line in instructions("COPY") if "--from" not in line for word in line.split()[:-1]}
    sources = {re.sub(r"\[(.)\]", r"\1", word).split("/")[0] for word in copied}
    assert sources <= allowed


@pytest.mark.parametrize("script", sorted((ROOT / "docker").glob("*.sh")), ids=lambda path: path.name)
def test_shell_scripts_parse_and_stop_at_errors(script: Path) -> None:
    subprocess.run(["sh", "-n", str(script)], check=True, timeout=10)
    assert "\nset -eu\n" in script.read_text()
