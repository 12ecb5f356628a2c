"""A real collector child: same rows as a pool in this process, and every way it can die or fall silent."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import numpy.typing as npt
import psutil
import pytest

from unilab.channel import Pipe
from unilab.physics import process as process_module
from unilab.physics.mujoco_pool import MujocoPool, load_model
from unilab.physics.pools import parse_cpu_list
from unilab.physics.process import CollectorFailed, CollectorProcess, child_environment
from unilab.physics.spec import KEEP, RESET, SET_VELOCITY, PhysicsSpec
from unilab.physics.states import load_states

ENVS = 6
G1 = PhysicsSpec(
    "unitree_g1/scene_flat.xml",
    1 / 150,
    3,
    "exact",
    36,
    35,
    29,
    (("torso_gyro", 3), ("left_foot_pos", 3)),
    (("kp", 29), ("kd", 29)),
)
ARRAY = npt.NDArray[Any]
Command = tuple[ARRAY, ARRAY, ARRAY]


@pytest.fixture(autouse=True)
def _private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def model() -> mujoco.MjModel:
    return load_model(G1)


@pytest.fixture
def collector() -> Iterator[CollectorProcess]:
    child = CollectorProcess(G1, ENVS, None)
    yield child
    child.close()


def standing_rows(model: mujoco.MjModel, envs: int = ENVS) -> ARRAY:
    rows = np.zeros((envs, G1.reset_width), np.float32)
    rows[:, :36] = model.key_qpos[0]
    rows[:, 71:100] = model.actuator_gainprm[:, 0]
    rows[:, 100:] = -model.actuator_biasprm[:, 2]
    return rows


def commands(model: mujoco.MjModel, count: int, envs: int = ENVS) -> list[Command]:
    """All rows reset first, then random targets with some rows reset and some pushed."""
    rng = np.random.default_rng(3)
    made: list[Command] = []
    for number in range(count):
        codes = rng.choice([KEEP, RESET, SET_VELOCITY], envs, p=[0.5, 0.25, 0.25]).astype(np.int32)
        codes = np.full(envs, RESET, np.int32) if number == 0 else codes
        rows = standing_rows(model, envs)
        rows[:, 36:42] = rng.uniform(-0.5, 0.5, (envs, 6))
        rows[codes == KEEP] = np.nan
        made.append(((model.key_ctrl[0] + rng.normal(0, 0.3, (envs, 29))).astype(np.float32), codes, rows))
    return made


def put(child: CollectorProcess, command: Command, rows: slice = slice(None)) -> None:
    channel = child.channel
    for target, source in zip((channel.ctrl, channel.codes, channel.reset_rows), command, strict=True):
        target[rows] = source[rows]


def stand(child: CollectorProcess, model: mujoco.MjModel) -> None:
    """A command that resets every row to the standing pose."""
    put(child, (np.tile(model.key_ctrl[0], (ENVS, 1)), np.full(ENVS, RESET), standing_rows(model)))


def run_tick(child: CollectorProcess, tick: int) -> dict[str, int]:
    child.command(tick)
    return child.wait(tick, 30)


def wait_until_gone(pid: int, seconds: float) -> bool:
    """Whether a process ends in time; a zombie nobody reaps has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def descriptors() -> set[str]:
    gc.collect()
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names, not paths


def test_rows_are_those_of_a_pool_in_this_process(collector: CollectorProcess, model: mujoco.MjModel) -> None:
    pool, expected = MujocoPool(G1, ENVS), np.empty((ENVS, G1.width), np.float32)
    script = commands(model, 12)
    assert sum(int((codes == RESET).sum()) for _, codes, _ in script[1:]) > 5
    for tick, command in enumerate(script):
        put(collector, command)
        header = run_tick(collector, tick)
        pool.apply(*command)
        pool.step()
        pool.pack(expected)
        np.testing.assert_array_equal(collector.channel.slots[tick % 2], expected)
        times = [
            header[name] for name in ("received_ns", "applied_ns", "began_ns", "stepped_ns", "packing_ns", "packed_ns")
        ]
        assert times == sorted(times)
        assert 0 < time.monotonic_ns() - times[-1] < 30e9
        collector.channel.release(tick)
    assert np.isfinite(expected).all()


def test_groups_take_turns_and_the_pool_does_not_wait_for_the_learner(model: mujoco.MjModel) -> None:
    """One group's step begins before the other is packed, and the rows are those of a pool without groups."""
    count, script = 24, commands(model, 10, 24)
    pool, expected = MujocoPool(G1, count), np.empty((count, G1.width), np.float32)
    child = CollectorProcess(G1, count, None, groups=2)
    rows, overlapped, packed = [slice(0, 16), slice(16, 24)], 0, 0
    assert child.channel.groups == rows
    for turn in range(2):
        put(child, script[0], rows[turn])
        child.command(turn)
    for tick, command in enumerate(script):
        pool.apply(*command)
        pool.step()
        pool.pack(expected)
        for turn in (2 * tick, 2 * tick + 1):
            header = child.wait(turn, 30)
            np.testing.assert_array_equal(child.channel.slot(turn), expected[rows[turn % 2]])
            times = [
                header[name]
                for name in ("received_ns", "applied_ns", "began_ns", "stepped_ns", "packing_ns", "packed_ns")
            ]
            assert times == sorted(times)
            overlapped += header["began_ns"] < packed
            packed = header["packed_ns"]
            child.channel.release(turn)
            if tick + 1 < len(script):
                put(child, script[tick + 1], rows[turn % 2])
                child.command(turn + 2)
            else:
                child.retire()  # what is in flight of the other group still arrives
    child.close()
    assert child._process.returncode == 0
    assert overlapped >= 5


@pytest.mark.parametrize("missing", [False, True], ids=["written", "refused"])
def test_recorded_states_arrive_or_their_loss_is_an_error(
    missing: bool, model: mujoco.MjModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ("nowhere" if missing else ".") / "states.npz"
    child = CollectorProcess(G1, 24, None, groups=2, record_states=1)
    put(child, commands(model, 1, 24)[0])
    for turn in range(2):
        child.command(turn, (0, 7))
    for turn in range(2):
        child.wait(turn, 30)
        child.retire(path)
    if missing:
        with pytest.raises(CollectorFailed, match="the collector raised FileNotFoundError"):
            child.wait_for_states(30)
    else:
        child.wait_for_states(30)
        assert load_states(path).iterations == (7,)
    child.close()
    assert capfd.readouterr().err.startswith("Traceback") == missing


@pytest.mark.parametrize("commanded", [0, 1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_stop_is_orderly_whatever_is_in_flight(model: mujoco.MjModel, groups: int, commanded: int) -> None:
    child = CollectorProcess(G1, 24, None, groups)
    put(child, commands(model, 1, 24)[0], slice(None))
    for turn in range(min(commanded, groups)):
        child.command(turn)
    child.close()
    assert child._process.returncode == 0


def test_the_child_has_no_torch_and_its_workers_are_reported(collector: CollectorProcess) -> None:
    assert collector.torch_imported is False
    assert len(collector.placement) == min(len(os.sched_getaffinity(0)), ENVS)
    threads = {thread.id for thread in psutil.Process(collector.pid).threads()}
    assert {thread for thread, _ in collector.placement} <= threads


def test_the_child_imports_no_torch_after_ticks_either(collector: CollectorProcess, model: mujoco.MjModel) -> None:
    stand(collector, model)
    run_tick(collector, 0)
    maps = Path(f"/proc/{collector.pid}/maps").read_text()
    assert "libmujoco" in maps
    assert "libtorch" not in maps


def test_a_cpu_list_confines_the_child_and_not_the_learner() -> None:
    mask = os.sched_getaffinity(0)
    cpu = max(mask)
    child = CollectorProcess(G1, ENVS, [cpu])
    assert [cpu_id for _, cpu_id in child.placement] == [cpu]
    assert {frozenset(os.sched_getaffinity(t.id)) for t in psutil.Process(child.pid).threads()} == {frozenset({cpu})}
    child.close()
    assert os.sched_getaffinity(0) == mask


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_the_carrier_may_use_every_cpu_of_the_list(model: mujoco.MjModel) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    child = CollectorProcess(G1, ENVS, cpus)
    stand(child, model)
    run_tick(child, 0)
    masks = [frozenset(os.sched_getaffinity(t.id)) for t in psutil.Process(child.pid).threads()]
    child.close()
    assert set().union(*masks) == set(cpus)
    assert {frozenset({cpu}) for cpu in cpus} <= set(masks)
    assert frozenset(cpus) in masks


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_two_collectors_keep_to_their_pools_and_the_learner_to_its_mask(model: mujoco.MjModel) -> None:
    before, mask = thread_masks(os.getpid()), sorted(os.sched_getaffinity(0))
    half = min(len(mask) // 2, 3)
    pools = [mask[half : 2 * half][::-1], mask[:half]]
    children = [CollectorProcess(G1, ENVS, pool) for pool in pools]
    try:
        for child in children:
            stand(child, model)
            child.command(0)
        for child, pool in zip(children, pools, strict=True):
            child.wait(0, 30)
            masks = thread_masks(child.pid)
            assert [cpu for _, cpu in child.placement] == pool
            assert {thread: masks[thread] for thread, _ in child.placement} == {t: {c} for t, c in child.placement}
            assert set().union(*masks.values()) == set(pool)
        after = thread_masks(os.getpid())
    finally:
        for child in children:
            child.close()
    assert {thread: after[thread] for thread in before if thread in after} == before
    assert sorted(os.sched_getaffinity(0)) == mask


def thread_masks(pid: int) -> dict[int, set[int]]:
    """CPUs each thread of a process may use, as the kernel tells."""
    status = {int(task.name): (task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()}
    lists = {thread: text.split("Cpus_allowed_list:")[1].split()[0] for thread, text in status.items()}
    return {thread: set(parse_cpu_list(listed)) for thread, listed in lists.items()}


def test_two_slots_may_be_in_flight_a_third_tick_may_not(collector: CollectorProcess, model: mujoco.MjModel) -> None:
    stand(collector, model)
    run_tick(collector, 0)
    run_tick(collector, 1)
    collector.command(2)
    message = "the collector raised RuntimeError: turn 2 was commanded before its ingress slot was released"
    with pytest.raises(CollectorFailed, match=message):
        collector.wait(2, 30)
    with pytest.raises(CollectorFailed, match="the collector ended with exit code 1"):
        collector.wait(3, 30)


def test_diverging_physics_is_counted_and_leaves_no_log(
    collector: CollectorProcess, model: mujoco.MjModel, tmp_path: Path
) -> None:
    stand(collector, model)
    collector.channel.reset_rows[0, 36:71] = 1e12
    run_tick(collector, 0)
    assert collector.channel.slots[0][0, -1] > 0
    assert collector.channel.slots[0][1, -1] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("when", ["idle", "commanded"])
def test_a_killed_child_is_named(collector: CollectorProcess, model: mujoco.MjModel, when: str) -> None:
    stand(collector, model)
    run_tick(collector, 0)
    began = time.monotonic()
    os.kill(collector.pid, signal.SIGSTOP)
    if when == "commanded":
        collector.command(1)
    os.kill(collector.pid, signal.SIGKILL)
    with pytest.raises(CollectorFailed, match=r"^the collector was killed by SIGKILL \(the system kills so when"):
        run_tick(collector, 1) if when == "idle" else collector.wait(1)
    assert time.monotonic() - began < 5


def test_a_silent_child_is_an_error_after_the_deadline(collector: CollectorProcess, model: mujoco.MjModel) -> None:
    stand(collector, model)
    os.kill(collector.pid, signal.SIGSTOP)
    collector.command(0)
    with pytest.raises(CollectorFailed, match=r"^waited for turn 0 from the collector, nothing came .* \(0\.2 s\)$"):
        collector.wait(0, 0.2)
    os.kill(collector.pid, signal.SIGCONT)
    assert collector.wait(0, 30)["turn"] == 0


def test_a_stopped_child_does_not_survive_close(collector: CollectorProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "STOP_TIMEOUT", 0.1)
    os.kill(collector.pid, signal.SIGSTOP)
    collector.close()
    assert not psutil.pid_exists(collector.pid)


def test_a_command_out_of_turn_is_refused(collector: CollectorProcess, model: mujoco.MjModel) -> None:
    stand(collector, model)
    collector.command(1)
    message = "the collector raised RuntimeError: turn 1 was commanded when turn 0 was due"
    with pytest.raises(CollectorFailed, match=message):
        collector.wait(0, 30)


def test_an_answer_to_another_turn_is_refused(collector: CollectorProcess, model: mujoco.MjModel) -> None:
    stand(collector, model)
    collector.command(0)
    with pytest.raises(CollectorFailed, match="expected turn 1 from the collector, got signal 0"):
        collector.wait(1, 30)


def test_a_setup_error_arrives_as_one_message(capfd: pytest.CaptureFixture[str]) -> None:
    before, children = descriptors(), psutil.Process().children()
    with pytest.raises(CollectorFailed) as caught:
        CollectorProcess(G1, ENVS, [99999])
    text = str(caught.value)
    assert text.startswith("the collector raised ValueError: env.cpu_ids=[99999] names CPU 99999")
    assert "\n" not in text
    assert "Traceback" in capfd.readouterr().err
    del caught
    assert descriptors() == before
    assert psutil.Process().children() == children


def test_an_interrupt_while_starting_leaves_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before, children = descriptors(), psutil.Process().children()
    monkeypatch.setattr(Pipe, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        CollectorProcess(G1, ENVS, None)
    assert psutil.Process().children() == children
    assert descriptors() == before


def test_closing_twice_leaves_neither_process_nor_descriptor() -> None:
    before = descriptors()
    child = CollectorProcess(G1, ENVS, None)
    pid = child.pid
    child.close()
    child.close()
    assert not psutil.pid_exists(pid)
    del child
    assert descriptors() == before


def test_code_in_the_working_folder_is_not_taken_for_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unilab").mkdir()
    for name in ("unilab/__init__.py", "unilab/collector.py", "json.py", "mujoco.py"):
        (tmp_path / name).write_text("raise SystemExit(77)\n")
    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    child = CollectorProcess(G1, ENVS, None)
    child.close()


PARENT = """
import sys, numpy as np
from unilab.physics.process import CollectorProcess
from unilab.physics.spec import PhysicsSpec
child = CollectorProcess(PhysicsSpec.from_json({spec!r}), {envs}, None)
print(child.pid, flush=True)
tick = 0
while True:
    child.command(tick)
    child.wait(tick)
    child.channel.release(tick)
    tick += 1
"""


def test_a_killed_parent_leaves_no_collector_behind() -> None:
    code = PARENT.format(spec=G1.to_json(), envs=ENVS)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until_gone(pid, 10)


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
@pytest.mark.parametrize("late", [False, True], ids=["afterwards", "before it was bound"])
def test_a_bound_program_ends_with_its_parent_however_that_dies(late: bool) -> None:
    wait = "import sys, time; sys.stdin.readline(); " if late else ""
    bind = "from unilab.physics.process import end_with_parent as bind; bind(); print('bound', flush=True);"
    child = f"{wait}{bind} import time; time.sleep(60)"
    parent = (
        "import subprocess, sys, time; from unilab.physics.process import bound_environment as bound\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], env=bound())\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", parent], stdin=pipe, stdout=pipe, env=child_environment()) as process:
        assert process.stdin is not None and process.stdout is not None
        bound = psutil.Process(int(process.stdout.readline()))
        assert late or process.stdout.readline() == b"bound\n"
        process.kill()
        process.stdin.close()  # the late one goes on now
        assert process.stdout.read() == b""  # the end of the child too, long before a minute is over
    psutil.wait_procs([bound], 5)
    assert not bound.is_running()
