"""Whose container it is, with a made-up /proc."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from repro.container_owner import is_dead, own_label

STAT = "{pid} (a ) b) {state} 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 {start} 20 21\n"


def write_process(proc: Path, pid: int, start: int, state: str = "S") -> None:
    (proc / str(pid)).mkdir(exist_ok=True)
    (proc / str(pid) / "stat").write_text(STAT.format(pid=pid, state=state, start=start))


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    boot = tmp_path / "sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("boot-1\n")
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[1]")
    write_process(tmp_path, 7, 700)
    return tmp_path


@pytest.mark.parametrize(
    ("label", "running", "dead"),
    [
        ("boot-1/pid:[1]/7/700", True, False),
        ("boot-1/pid:[1]/7/699", True, True),  # its number was given to another process
        ("boot-1/pid:[1]/8/700", True, True),
        ("boot-1/pid:[2]/8/700", True, False),  # a process that cannot be seen from here
        ("boot-0/pid:[1]/7/700", False, True),
        ("boot-0/pid:[1]/7/700", True, False),  # of another machine that uses this engine
        ("", False, False),
        ("somebody else's", False, False),
    ],
)
def test_a_process_is_dead_only_for_certain(proc: Path, label: str, running: bool, dead: bool) -> None:
    assert is_dead(label, running, proc) == dead


def test_a_process_that_nobody_waited_for_is_dead(proc: Path) -> None:
    write_process(proc, 7, 700, state="Z")
    assert is_dead("boot-1/pid:[1]/7/700", True, proc)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' /proc")
def test_this_process_lives_and_a_child_dies_with_its_label() -> None:
    assert not is_dead(own_label(), True)
    assert own_label().split("/")[2] == str(os.getpid())
    program = "from repro.container_owner import own_label; print(own_label())"
    child = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert is_dead(child.stdout.strip(), True)
