"""The ceiling of several pools: counted work overlaps, rates add up, and no process outlives the program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from test_ceiling import measured, program
from test_states import ENVS, changed, recorded, rewrite

from unilab.channel import READY, SETUP, STOP, Pipe
from unilab.physics import pool_ceilings
from unilab.physics.pinning import LINUX, allowed_cpus

pytestmark = pytest.mark.skipif(
    not LINUX or len(allowed_cpus()) < 2, reason="needs thread masks, a Linux feature, and two CPUs"
)


@pytest.fixture(scope="module")
def states_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("states") / "states.npz"
    recorded(path, steps=3)
    return path


def two_pools() -> list[str]:
    first, second = allowed_cpus()[:2]
    return ["--cpu-ids", str(first), "--cpu-ids", str(second)]


def test_the_rate_of_two_pools_is_the_sum_of_both(states_file: Path) -> None:
    found = measured("--states", str(states_file), "--seconds", "0.3", *two_pools(), "--profile", "fast", "--c-loop")
    pools = found["pools"]
    assert sorted(found) == ["env_steps_per_second", "pools", "schema_version"]
    assert [pool["cpu_ids"] for pool in pools] == [[cpu] for cpu in allowed_cpus()[:2]]
    rates = []
    for pool in pools:
        times = np.array(pool["step_seconds"])
        assert times.shape[0] == 3 and times.shape[1] >= 1 and times.sum() < pool["seconds"]
        assert (pool["iterations"], pool["profile"], pool["workers"]) == ([10, 11, 12], "fast", 1)
        assert (pool["c_loop"], pool["c_loop_reason"]) == (None, "several pools are timed without it")
        rates.append(ENVS * times.size / times.sum())
    assert found["env_steps_per_second"] == pytest.approx(sum(rates), rel=1e-12)


def test_one_list_of_cpus_prints_what_it_always_printed(states_file: Path) -> None:
    found = measured("--states", str(states_file), "--seconds", "0.1", *two_pools()[:2])
    assert "pools" not in found and found["cpu_ids"] == allowed_cpus()[:1]


def test_rounds_that_ended_after_the_stop_are_left_out() -> None:
    """So that nothing counts that ran while another pool had stopped already."""
    (reads, to_child), (from_child, writes) = os.pipe(), os.pipe()
    outside = Pipe(from_child, to_child, "child")
    outside.send(SETUP, {})
    child = pool_ceilings._Program(Pipe(reads, writes, "program"))
    outside.send(pool_ceilings.GO)
    rounds = iter(range(1, 100))

    def pool() -> list[float]:
        number = next(rounds)
        if number == 4:  # the third counted one: the program stopped before it ended
            outside.send(STOP, time.monotonic())
        time.sleep(0.05)
        return [float(number)]

    own, plain = child.rounds(pool, None)
    assert own.rounds == [[1.0], [2.0], [3.0]] and plain.rounds == []  # the first warms up
    assert [outside.receive(1.0, "a word")[0] for _ in range(2)] == [READY, pool_ceilings.COUNTED]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("first", "ceiling: --cpu-ids gives CPU {first} to two pools; give it to one\n"),
        ("4095", "ceiling: --cpu-ids=[4095] names CPU 4095, which this process may not use; allowed: "),
    ],
)
def test_pools_that_cannot_be_had_are_refused(second: str, message: str, states_file: Path) -> None:
    first = str(allowed_cpus()[0])
    pools = ["--cpu-ids", first, "--cpu-ids", first if second == "first" else second]
    result = program("--states", str(states_file), *pools)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(message.format(first=first)) and result.stderr.count("\n") == 1


def test_a_file_that_no_pool_can_read_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    result = program("--states", str(tmp_path / "no.npz"), *two_pools())
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"ceiling: {tmp_path}/no.npz is not a file") and result.stderr.count("\n") == 1


def test_a_pool_that_fails_ends_all_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "states.npz"
    recorded(path, steps=1)
    rewrite(path, **changed(path, "state", (0, 2, 8), 1e300))
    result = program("--states", str(path), "--seconds", "0.1", *two_pools())
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"ceiling: the engine warned of bad physics in 1 of {ENVS} simulations\n"


@contextmanager
def measuring(states: Path, seconds: float) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """The program with its two pools, which have begun to step."""
    command = [sys.executable, "-m", "unilab.physics.ceiling", "--states", str(states), "--seconds", str(seconds)]
    with subprocess.Popen(
        [*command, *two_pools()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        pools: list[psutil.Process] = []
        deadline = time.monotonic() + 60
        while len(pools) < 2 or min(sum(pool.cpu_times()[:2]) for pool in pools) < 0.6:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
            pools = psutil.Process(process.pid).children()
        try:
            yield process, pools
        finally:
            process.kill()


def test_pools_die_with_the_program(states_file: Path) -> None:
    with measuring(states_file, 60.0) as (process, pools):
        process.kill()
        _, alive = psutil.wait_procs(pools, timeout=10)
        assert not alive


def test_a_pool_that_is_killed_ends_all_with_one_line(states_file: Path) -> None:
    with measuring(states_file, 2.0) as (process, pools):
        pools[1].send_signal(signal.SIGKILL)
        output, error = process.communicate(timeout=30)
        assert (process.returncode, output) == (1, "")
        assert error.startswith("ceiling: pool 1 was killed by SIGKILL") and error.count("\n") == 1
        assert not psutil.wait_procs(pools, timeout=10)[1]


def test_an_interrupt_ends_all_with_one_line(states_file: Path) -> None:
    with measuring(states_file, 60.0) as (process, pools):
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
        assert (process.returncode, error) == (130, "ceiling: interrupted\n")
        assert not psutil.wait_procs(pools, timeout=10)[1]


def test_the_output_file_holds_every_pool(states_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "ceiling.json"
    result = program("--states", str(states_file), "--seconds", "0.1", *two_pools(), "--output", str(output))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert len(json.loads(output.read_text())["pools"]) == 2
