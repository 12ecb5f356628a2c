"""The docker executor with an engine that only writes down what it is asked; `tests/docker` has a real one."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import IMAGE_ID, FakeContainer, FakeEngine, RefusedError, image_labels
from session_builder import SOURCE, make_host, matrix_text, toy_matrix

from repro.cli import main
from repro.docker_executor import (
    CELL_LABEL,
    OWNER_LABEL,
    SESSION_LABEL,
    DockerExecutor,
    _visible_pid,
    docker_executor,
)
from repro.docker_image import REVISION_LABEL, SOURCES_LABEL, connect
from repro.errors import HostUnfitError, UsageError
from repro.host import Host
from repro.launch import Ended
from repro.matrix import load_matrix
from repro.place import CannotHoldError, Cpu, choose_cpuset
from repro.plan import Cell, Executor, Plan, check_plan, make_plan
from repro.schema import canonical_json, parse_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the executor is for Linux")

FACTS = Executor(kind="docker", image="suite:cpu", image_id=IMAGE_ID)
COMMAND = [sys.executable, "-m", "unilab.train", "a=b"]


def plan_for(cpus: int = 4, gpus: int = 0, matrix: str | None = None) -> Plan:
    host, topology = make_host(cpus, gpus)
    return make_plan(load_matrix(matrix) if matrix else toy_matrix(), host, topology, SOURCE, executor=FACTS)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out" / "logs").mkdir(parents=True)
    return tmp_path / "out"


def run(engine: FakeEngine, out: Path, cell: Cell | None = None, timeout: float = 60.0, grace: float = 5.0) -> Ended:
    """Run a cell of the toy plan; whatever happens, no container may be left."""
    cell = cell or plan_for().runnable[0]
    try:
        return DockerExecutor(engine, FACTS).runner(cell)(COMMAND, {"HOST": "x"}, out, out / cell.log, timeout, grace)
    finally:
        assert engine.present == []


def pass_time(container: FakeContainer, timeout: float) -> None:
    """What the SDK does when nothing ends in time."""
    time.sleep(timeout)
    raise OSError("read timed out")


# What a container gets.


def test_a_container_gets_its_cpus_and_nothing_of_the_host(engine: FakeEngine, out: Path) -> None:
    ended = run(engine, out)
    assert (ended.outcome, ended.exit_code, ended.reason) == ("exited", 0, None)
    (options,) = engine.created
    assert options["image"] == IMAGE_ID
    assert options["command"] == ["python", *COMMAND[1:]]
    assert options["environment"] == {"PYTHONUNBUFFERED": "1", "FAKE_RATE": "10000"}
    assert options["cpuset_cpus"] == "0,1"  # a worker on CPU 0, and one more for the learner
    assert options["user"] == f"{os.getuid()}:{os.getgid()}"
    assert (options["network_mode"], options["read_only"], options["cap_drop"]) == ("none", True, ["ALL"])
    assert options["device_requests"] is None
    assert options["working_dir"] == str(out)
    report, caches = options["mounts"]
    assert report == {"Type": "bind", "Source": str(out), "Target": str(out)}
    assert caches["Type"] == "volume"
    assert options["labels"][CELL_LABEL] == "warmup1_slow"
    assert (out / "logs/warmup1_slow.log").read_bytes() == b"first\nlast\n"


def test_compose_does_not_take_a_cell_for_its_own(engine: FakeEngine, out: Path) -> None:
    run(engine, out)  # an image that compose built says so in labels, which its containers inherit
    assert engine.created[0]["labels"]["com.docker.compose.project"] == ""


def test_a_gpu_is_given_by_its_id(engine: FakeEngine, out: Path) -> None:
    cell = plan_for(cpus=16, gpus=2, matrix="single").runnable[0]
    run(engine, out, cell)
    (options,) = engine.created
    assert options["device_requests"] == [{"driver": "nvidia", "device_ids": ["GPU-0"], "capabilities": [["gpu"]]}]
    assert options["environment"]["CUDA_VISIBLE_DEVICES"] == "GPU-0"
    assert options["cpuset_cpus"] == ",".join(map(str, range(16)))


def test_a_log_elsewhere_brings_its_folder_along(engine: FakeEngine, out: Path, tmp_path: Path) -> None:
    log = tmp_path / "other" / "logs" / "ceiling.log"
    log.parent.mkdir(parents=True)
    DockerExecutor(engine, FACTS).runner(plan_for().runnable[0])(COMMAND, {}, out, log, 60.0, 5.0)
    sources = [mount["Source"] for mount in engine.created[0]["mounts"]]
    assert sources[:-1] == [str(tmp_path / "other"), str(out)]


# How it ends.


def test_a_bad_end_names_code_memory_and_last_line(engine: FakeEngine, out: Path) -> None:
    engine.state = {"ExitCode": 137, "OOMKilled": True}
    engine.output = b"iteration 3\n"
    ended = run(engine, out)
    assert (ended.outcome, ended.exit_code) == ("exited", 137)
    assert ended.reason == "exit code 137, out of memory: iteration 3"


def test_a_time_limit_ends_the_container_politely(engine: FakeEngine, out: Path) -> None:
    def wait(container: FakeContainer, timeout: float) -> None:
        if not container.signals:
            pass_time(container, timeout)

    engine.on_wait = wait
    ended = run(engine, out, timeout=0.05)
    assert (ended.outcome, ended.exit_code) == ("timeout", None)
    assert ended.reason == "no end after 0.05 s; its container ended on SIGTERM"
    assert engine.removed[0].signals == ["SIGTERM"]


def test_a_container_that_ignores_sigterm_is_killed(engine: FakeEngine, out: Path) -> None:
    engine.on_wait = pass_time
    ended = run(engine, out, timeout=0.05, grace=0.05)
    assert ended.reason is not None and ended.reason.endswith("did not end on SIGTERM within 0.05 s and was killed")
    assert engine.removed[0].signals == ["SIGTERM", "SIGKILL"]


@pytest.mark.parametrize(("group", "pid"), [(f"0::/docker/{64 * 'c'}", 7), ("0::/other", None), (None, None)])
def test_only_a_container_that_can_be_seen_is_looked_at(
    engine: FakeEngine, tmp_path: Path, group: str | None, pid: int | None
) -> None:
    engine.state = {"Pid": 7}
    if group is not None:
        (tmp_path / "7").mkdir()
        (tmp_path / "7" / "cgroup").write_text(f"{group}\n")
    assert _visible_pid(FakeContainer(engine, {}), tmp_path) == pid


def test_an_interrupt_ends_it_and_is_told(engine: FakeEngine, out: Path) -> None:
    def wait(container: FakeContainer, timeout: float) -> None:
        if not container.signals:
            signal.raise_signal(signal.SIGINT)

    engine.on_wait = wait
    ended = run(engine, out)
    assert (ended.outcome, ended.reason) == ("interrupted", "by the user; its container ended on SIGTERM")


@pytest.mark.parametrize("moment", ["on_create", "on_start"])
def test_an_interrupt_while_it_starts_leaves_nothing(engine: FakeEngine, out: Path, moment: str) -> None:
    setattr(engine, moment, lambda: signal.raise_signal(signal.SIGINT))
    assert run(engine, out).outcome == "interrupted"
    assert len(engine.removed) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("moment", ["on_create", "on_start"])
def test_what_the_engine_refuses_is_the_reason(engine: FakeEngine, out: Path, moment: str) -> None:
    def refuse() -> None:
        raise RefusedError("no such CPU")

    setattr(engine, moment, refuse)
    ended = run(engine, out)
    assert (ended.outcome, ended.exit_code) == ("exited", None)
    assert ended.reason == "the container engine refused or failed: no such CPU"
    assert len(engine.removed) == 1  # also where the engine made it and its answer was lost


def test_an_engine_that_goes_away_is_no_time_limit(engine: FakeEngine, out: Path) -> None:
    def wait(container: FakeContainer, timeout: float) -> None:
        raise RefusedError("connection reset")

    engine.on_wait = wait
    ended = run(engine, out)
    assert (ended.outcome, ended.exit_code) == ("exited", None)
    assert ended.reason == "the container engine refused or failed: connection reset"


def test_any_other_error_leaves_nothing_too(engine: FakeEngine, out: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    engine.on_start = fail
    with pytest.raises(ZeroDivisionError):
        run(engine, out)
    assert len(engine.removed) == 1


# What earlier sessions left.


def test_only_containers_of_dead_sessions_are_removed(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("repro.docker_executor.is_dead", lambda label, running: label == "dead")
    for owner in ("dead", "alive", "dead"):
        engine.present.append(FakeContainer(engine, {SESSION_LABEL: "s", OWNER_LABEL: owner}))
    engine.present.append(FakeContainer(engine, {"somebody": "else"}))
    DockerExecutor(engine, FACTS).remove_leftovers()
    assert [item.labels.get(OWNER_LABEL) for item in engine.present] == ["alive", None]
    assert capsys.readouterr().err == "removed 2 containers of a session that was killed\n"


# Where it is refused.


@pytest.fixture
def answering(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    """An engine with an image of the made-up source, which says what the made-up host says."""
    engine.image_labels = image_labels(SOURCE)
    engine.output = make_host()[0].model_dump_json().encode() + b"\n"
    monkeypatch.setattr("repro.docker_executor.connect", lambda: engine)
    monkeypatch.setattr("repro.cli.find_source", lambda: SOURCE)
    monkeypatch.setattr("repro.cli.find_host", make_host)
    yield engine
    assert engine.is_closed and engine.present == []


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and message of `repro run --executor docker`, which must be one line."""
    code = main(["run", "--executor", "docker", *arguments])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return code, error


def test_a_missing_image_says_how_to_build_it(answering: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    answering.image_labels = {}
    code, error = refusal(capsys, "--matrix", "smoke")
    assert code == 3
    assert error == (
        "repro: the engine gives no image unilab-repro:cpu (No such image: unilab-repro:cpu); "
        "build it: make image LOCK=cpu\n"
    )


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (SOURCES_LABEL, "image x:1 holds sources other, this checkout aaaaaaaaaaaa; build it again: make image"),
        (REVISION_LABEL, f"image x:1 is of revision other, this checkout {SOURCE.commit}; build it again: make image"),
    ],
)
def test_an_image_of_other_code_is_refused(
    answering: FakeEngine, capsys: pytest.CaptureFixture[str], label: str, message: str
) -> None:
    answering.image_labels[label] = "other"
    code, error = refusal(capsys, "--matrix", "smoke", "--image", "x:1")
    assert code == 3 and message in error
    assert answering.created == []


def test_an_image_that_does_not_start_is_refused(answering: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    answering.state, answering.output = {"ExitCode": 127}, b"python: not found\n"
    code, error = refusal(capsys, "--matrix", "smoke")
    assert code == 3
    assert error == "repro: image unilab-repro:cpu does not start: exit code 127: python: not found\n"


def test_gpus_need_a_runtime_of_the_engine(
    answering: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("repro.cli.find_host", lambda: make_host(cpus=16, gpu_count=1))

    def refuse() -> None:
        if answering.created[-1]["device_requests"]:
            raise RefusedError('could not select device driver "nvidia"')

    answering.on_start = refuse
    code, error = refusal(capsys, "--matrix", "single", "--dry-run")
    assert code == 3
    assert "gives containers no GPU: the container engine refused or failed: could not select device driver" in error
    assert answering.created[0]["image"] == IMAGE_ID


def test_a_gpu_that_is_not_named_by_its_id_is_refused(
    answering: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, topology = make_host(cpus=16, gpu_count=1, visible_gpus=("0",))
    monkeypatch.setattr("repro.cli.find_host", lambda: (host, topology))
    code, error = refusal(capsys, "--matrix", "single")
    assert code == 2
    assert "takes GPUs by id, CUDA_VISIBLE_DEVICES has '0'; unset it" in error


def test_a_mask_without_a_cpu_for_the_learner_is_refused(
    answering: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("repro.cli.find_host", lambda: make_host(cpus=1))
    code, error = refusal(capsys, "workers1")
    assert code == 3
    assert "workers1: in a container 1 worker and 1 learner need 2 CPUs, this host offers 1; lower" in error


def test_an_image_without_the_executor_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--matrix", "smoke", "--image", "x:1"]) == 2
    assert capsys.readouterr().err == ("repro: --image x:1 is for --executor docker; add it, or leave --image out\n")


def test_without_the_sdk_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker.client", None)
    with pytest.raises(HostUnfitError, match="needs the docker package, which is not installed: pip install docker"):
        connect()


def test_without_an_engine_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class DockerError(Exception):
        pass

    def from_env() -> Any:
        raise DockerError("Connection aborted")

    modules = {
        "docker.client": SimpleNamespace(from_env=from_env),
        "docker.errors": SimpleNamespace(DockerException=DockerError),
    }
    monkeypatch.setattr(importlib, "import_module", modules.__getitem__)
    with pytest.raises(HostUnfitError, match=r"no container engine answers \(Connection aborted\); start one"):
        connect()


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repro.docker_executor.sys.platform", "darwin")
    with pytest.raises(HostUnfitError, match="needs Linux"), docker_executor(None, make_host()[0], SOURCE):
        pass


# What is written down.


def test_the_host_is_that_of_the_suite_with_the_versions_of_the_image(engine: FakeEngine) -> None:
    outside, _ = make_host(environment={"NCCL_DEBUG": "INFO"})
    outside = outside.model_copy(update={"versions": {"torch": "1", "matplotlib": "3.11", "nccl": "2.28.9"}})
    inside = {"torch": "2+cpu", "matplotlib": "9", "python": "3.12", "nccl": "2.29.7"}
    engine.output = make_host(versions=inside, compiler="cc")[0].model_dump_json().encode()
    found: Host = DockerExecutor(engine, FACTS).host_inside(outside)
    assert (found.versions["torch"], found.versions["matplotlib"]) == ("2+cpu", "3.11")  # figures are drawn outside
    assert found.versions["nccl"] == "2.29.7"
    assert (found.compiler, found.environment) == ("cc", {})


def test_a_plan_names_the_image_and_every_cpuset_and_can_be_checked() -> None:
    plan = plan_for()
    assert plan.executor == FACTS
    assert {cell.cpuset for cell in plan.cells} == {(0, 1)}
    check_plan(parse_model(Plan, canonical_json(plan), "plan.json"))


@pytest.mark.parametrize("cpuset", [None, (0,), (1, 2)])
def test_a_plan_whose_cpuset_leaves_the_learner_nothing_is_refused(cpuset: tuple[int, ...] | None) -> None:
    plan = plan_for()
    cells = tuple(cell.model_copy(update={"cpuset": cpuset}) for cell in plan.cells)
    with pytest.raises(UsageError, match="cpuset"):
        parse_model(Plan, canonical_json(plan.model_copy(update={"cells": cells})), "plan.json")


def test_the_learner_gets_the_next_cpu_in_filling_order_one_for_each_rank() -> None:
    siblings = tuple(Cpu(cpu, cpu % 4, 0) for cpu in range(8))  # 4 is the sibling of 0
    assert choose_cpuset(((0, 1),), siblings) == (0, 1, 2)
    assert choose_cpuset(((0, 1), (2, 3)), siblings) == (0, 1, 2, 3, 4, 5)
    with pytest.raises(CannotHoldError, match=r"8 workers and 2 learners need 10 CPUs, this host offers 8; lower"):
        choose_cpuset(((0, 1, 2, 3), (4, 5, 6, 7)), siblings)


def test_a_dry_run_shows_image_and_cpus(answering: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--executor", "docker", "--matrix", "smoke", "--dry-run"]) == 0
    page = capsys.readouterr().out
    assert f"each run in a container of unilab-repro:cpu ({IMAGE_ID}); CPUs: workers1 0-1, workers2 0-2" in page
    assert len(answering.created) == 1  # the look into the image


def test_a_session_goes_through_containers_alone(
    answering: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix, out = tmp_path / "m.toml", tmp_path / "out"
    matrix.write_text(matrix_text({"a": {}, "b": {}}, extra="benchmarks = true\n"))
    monkeypatch.setattr("repro.launch.subprocess.Popen", None)  # nothing may be started on the host
    assert main(["run", "--matrix", str(matrix), "--out", str(out), "--executor", "docker"]) == 4
    assert [options["labels"][CELL_LABEL] for options in answering.created] == ["facts", "a_r1", "b_r1"]
    assert len({options["labels"][SESSION_LABEL] for options in answering.created}) == 1
    assert f"unilab-repro:cpu {IMAGE_ID}" in (out / "report.md").read_text()
    assert "their image holds no benchmarks" in (out / "benchmarks.json").read_text()
    assert main(["verify", str(out)]) == 0


def test_probes_of_a_session_run_in_a_container_too(
    answering: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, out = tmp_path / "m.toml", tmp_path / "out"
    matrix.write_text(matrix_text({"a": {}}, extra='probes = ["correctness"]\n'))
    monkeypatch.setattr("repro.launch.subprocess.Popen", None)
    assert main(["run", "--matrix", str(matrix), "--out", str(out), "--executor", "docker"]) != 0  # it wrote nothing
    command = answering.created[-1]["command"]
    assert command[:5] == ["python", "-P", "-m", "unilab.probes", "correctness"]
    assert Path(command[command.index("--output") + 1]).parent.parent == out  # which the container may write
    assert answering.created[-1]["cpuset_cpus"] == "0,1"
