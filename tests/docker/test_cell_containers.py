"""Cells in containers for real: what a cell sees from inside, how it ends, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from compose_cli import NAME, ROOT, Compose

from repro.docker_executor import CACHES, SESSION_LABEL, DockerExecutor, docker_executor
from repro.docker_image import SOURCES_LABEL
from repro.errors import HostUnfitError
from repro.host import find_host
from repro.matrix import load_matrix
from repro.plan import Cell, Plan, make_plan
from repro.provenance import find_source, sources_sha256

pytest.importorskip("docker.client", reason="the docker package is not installed")
pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

IMAGE = f"{NAME}:cpu"
MATRIX = """
name = "boxes"
reason = "Two small cells."
smoke = true
algo = "sac"
task = "g1_walk_flat"
sim = "mujoco"
iterations = 20
repeats = 1
warmup = 0
interval = "welch"
margin = 0.05
timeout_seconds = 120
ceiling = true
overrides = ["algo.num_envs=4", "algo.batch_size=8", "algo.actor_hidden_dim=8", "algo.critic_hidden_dim=8"]
[[cases]]
name = "one"
reason = "One of two."
workers = 1
[[cases]]
name = "two"
reason = "Two of two."
workers = 1
"""
MASK = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
SLEEP = [sys.executable, "-c", "import time; print('asleep', flush=True); time.sleep(100)"]


@pytest.fixture(scope="module")
def image(compose: Compose) -> Iterator[str]:
    """The image of this checkout; the volume of its caches goes where the tests brought it."""
    had_caches = compose.docker("volume", "inspect", CACHES, check=False).returncode == 0
    yield IMAGE
    if not had_caches:
        compose.docker("volume", "rm", "--force", CACHES)


@pytest.fixture
def executor(image: str) -> Iterator[DockerExecutor]:
    with docker_executor(image, find_host()[0], find_source()) as opened:
        yield opened


@pytest.fixture(scope="module")
def report(image: str, compose: Compose, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two cells."""
    folder = tmp_path_factory.mktemp("boxes")
    (folder / "boxes.toml").write_text(MATRIX)
    arguments = ["--matrix", str(folder / "boxes.toml"), "--out", str(folder / "out"), "--image", image]
    done = repro("run", "--executor", "docker", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out"


@pytest.fixture
def changed_image(image: str, compose: Compose, tmp_path: Path) -> Iterator[str]:
    """The image with a line more in its trainer, labelled as what it then holds."""
    for package in ("unilab", "repro"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "unilab" / "__init__.py").open("a") as file:
        file.write("# A line more.\n")
    (tmp_path / "Dockerfile").write_text(
        f"FROM {image}\nCOPY unilab/__init__.py /opt/unilab-repro/unilab/__init__.py\n"
        f"LABEL {SOURCES_LABEL}={sources_sha256(tmp_path)}\n"
    )
    name = f"{NAME}:changed"
    compose.docker("build", "--quiet", "--network", "none", "--tag", name, str(tmp_path))
    yield name
    compose.docker("rmi", name)


def repro(*arguments: str, program: str = "") -> subprocess.CompletedProcess[str]:
    """Run the suite of this checkout, after a program of one line."""
    program = f"{program}; import sys; from repro.cli import main; sys.exit(main(sys.argv[1:]))".removeprefix("; ")
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


def containers(compose: Compose) -> list[str]:
    """Ids of every container that an executor made."""
    return compose.docker("ps", "--all", "--quiet", "--filter", f"label={SESSION_LABEL}").stdout.split()


def processes_below(pid: int) -> str:
    """What a container does, as the host sees it."""
    commands = [" ".join(process.cmdline()) for process in psutil.Process(pid).children(recursive=True)]
    return "asleep" if any("asleep" in command for command in commands) else f"not seen below {pid}: {commands}"


def plan_for(executor: DockerExecutor) -> Plan:
    host, topology = find_host()
    return make_plan(load_matrix("smoke"), host, topology, find_source(), executor=executor.facts)


def cell_on(executor: DockerExecutor, cpuset: tuple[int, ...] | None) -> Cell:
    return plan_for(executor).runnable[0].model_copy(update={"cpuset": cpuset})


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a container needs a CPU beside its worker's")
def test_cells_run_on_their_cpus_and_the_report_verifies(report: Path, image: str, compose: Compose) -> None:
    plan = json.loads((report / "plan.json").read_text())
    host = json.loads((report / "host.json").read_text())
    assert len(plan["cells"]) == 2
    for cell in plan["cells"]:
        run = report / "runs" / cell["id"]
        inside, config = (json.loads((run / name).read_text()) for name in ("command.json", "config.json"))
        assert inside["affinity"] == cell["cpuset"]
        assert set(cell["cpuset"]) > set(cell["cpu_ids"]) and len(cell["cpuset"]) == 2
        assert config["env"]["cpu_ids"] == cell["cpu_ids"]
        assert json.loads((run / "ceiling.json").read_text())["ceiling"]["cpu_ids"] == cell["cpu_ids"]
        assert inside["versions"]["torch"] == host["versions"]["torch"]
        assert inside["versions"]["torch"].endswith("+cpu")
        assert "completed 20 iterations" in (report / "logs" / f"{cell['id']}.log").read_text()
    found = compose.docker("inspect", image, "--format", "{{.Id}}").stdout.strip()
    assert plan["executor"] == {"kind": "docker", "image": image, "image_id": found}
    assert {(path.stat().st_uid, path.stat().st_gid) for path in report.rglob("*")} == {(os.getuid(), os.getgid())}
    verified = repro("verify", str(report))
    assert verified.returncode == 0, verified.stdout
    assert containers(compose) == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two masks need two CPUs")
def test_masks_that_share_no_cpu_are_kept_apart(executor: DockerExecutor, tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    for cpu in cpus:  # one CPU and no worker: a plan would refuse to leave a learner nothing else
        log = tmp_path / f"{cpu}.log"
        ended = executor.runner(cell_on(executor, (cpu,)))(MASK, {}, tmp_path, log, 60.0, 5.0)
        assert ended.exit_code == 0, ended.reason
    assert [(tmp_path / f"{cpu}.log").read_text() for cpu in cpus] == [f"[{cpu}]\n" for cpu in cpus]


def test_a_worker_on_the_only_cpu_is_refused(image: str) -> None:
    one_cpu = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    refused = repro("run", "workers1", "--executor", "docker", "--image", image, program=one_cpu)
    assert refused.returncode == 3
    assert "in a container 1 worker and 1 learner need 2 CPUs, this host offers 1" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_a_time_limit_ends_a_container_and_keeps_its_log(
    executor: DockerExecutor, compose: Compose, tmp_path: Path
) -> None:
    log = tmp_path / "cell.log"
    runner = cast(Any, executor.runner(cell_on(executor, None)))
    ended = runner(SLEEP, {}, tmp_path, log, 2.0, 10.0, processes_below)
    assert (ended.outcome, ended.reason) == ("timeout", "asleep; no end after 2 s; its container ended on SIGTERM")
    assert log.read_text() == "asleep\n"
    assert containers(compose) == []


def test_what_a_killed_session_left_goes_at_the_next_start_and_not_before(
    image: str, compose: Compose, tmp_path: Path
) -> None:
    program = f"""
import sys; from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_cell_containers import SLEEP, cell_on, docker_executor, find_host, find_source
with docker_executor({image!r}, find_host()[0], find_source()) as executor:
    executor.runner(cell_on(executor, None))(SLEEP, {{}}, Path.cwd(), Path("cell.log"), 100.0, 5.0)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=environment) as session:
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "cell.log").exists() or not (tmp_path / "cell.log").read_text():
                assert session.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            with docker_executor(image, find_host()[0], find_source()):
                assert len(containers(compose)) == 1  # of a session that lives
        finally:
            session.send_signal(signal.SIGKILL)
    assert len(containers(compose)) == 1
    with docker_executor(image, find_host()[0], find_source()):
        assert containers(compose) == []


def test_an_engine_without_a_gpu_runtime_is_refused(executor: DockerExecutor) -> None:
    cell = cell_on(executor, None).model_copy(update={"gpus": ("GPU-0",), "arguments": ()})
    plan = plan_for(executor).model_copy(update={"cells": (cell,)})
    with pytest.raises(HostUnfitError, match=r"the engine gives containers no GPU: .*; install the NVIDIA") as refused:
        executor.check_gpus(plan)
    assert "\n" not in str(refused.value)


def test_an_image_of_other_code_is_refused(image: str, compose: Compose, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {image}\nLABEL unilab-repro.source-sha256=other\n")
    compose.docker("build", "--quiet", "--network", "none", "--tag", f"{NAME}:other", str(tmp_path))
    refused = repro("run", "--matrix", "smoke", "--executor", "docker", "--image", f"{NAME}:other")
    compose.docker("rmi", f"{NAME}:other")
    assert refused.returncode == 3
    assert f"image {NAME}:other holds sources other, this checkout" in refused.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a container needs a CPU beside its worker's")
@pytest.mark.long
def test_two_images_are_compared_each_with_its_own_code(
    image: str, changed_image: str, compose: Compose, tmp_path: Path
) -> None:
    (tmp_path / "boxes.toml").write_text(MATRIX.replace("ceiling = true\n", ""))
    out, names = tmp_path / "out", {"a": image, "b": changed_image}
    words = ["ab", *(f"image:{name}" for name in names.values()), "--matrix", str(tmp_path / "boxes.toml"), "--out"]
    done = repro(*words, str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads((out / "plan.json").read_text())
    ran = {}
    for side, name in names.items():
        identity = compose.docker("inspect", name, "--format", "{{.Id}}").stdout.strip()
        assert plan["images"][side] == {"kind": "docker", "image": name, "image_id": identity}
        command = json.loads((out / "runs" / f"{side}_r1" / "command.json").read_text())
        ran[side] = command["source_sha256"]
        assert ran[side] == plan["sources"][side]["trainer_sha256"]
    assert ran["a"] == find_source().trainer_sha256 != ran["b"]
    assert f"B ({changed_image})" in done.stdout and f"A ({image})" in done.stdout
    again = repro(*words, str(out), "--resume")
    assert (again.returncode, again.stdout) == (0, f"nothing to do: every run in {out} has its number\n")
    assert repro("verify", str(out)).returncode == 0
    assert containers(compose) == []
