"""Ranks as processes: how they end, together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from unilab import rank_processes

PROGRAM = Path(__file__).with_name("rank_program.py")
LIMIT = 10.0  # seconds from a failure to the end of everything


class Group:
    """A run of `rank_program.py` and everything it started."""

    def __init__(self, what: str, out: Path, world_size: int = 2) -> None:
        self.out = out
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), what, str(out), str(world_size)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.seen: list[psutil.Process] = []

    def started(self, processes: int) -> None:
        """Wait until rank 0 has started the others and `processes` run below it."""
        deadline = time.monotonic() + 30
        while not ((self.out / "started").exists() and len(self.look()) >= processes):
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)

    def look(self) -> list[psutil.Process]:
        """Every process below rank 0, remembered."""
        self.seen = psutil.Process(self.process.pid).children(recursive=True)
        return self.seen

    def kill(self, rank: int) -> None:
        """End a rank the hard way."""
        os.kill(int((self.out / f"pid{rank}").read_text()), signal.SIGKILL)

    def ended(self) -> tuple[int, str, str]:
        """Exit code and output, once nothing is left; within the limit."""
        began = time.monotonic()
        out, err = self.process.communicate(timeout=LIMIT + 20)
        _, alive = psutil.wait_procs(self.seen, timeout=max(0.0, LIMIT - (time.monotonic() - began)))
        alive = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]  # their reaper's, not ours
        assert not alive, alive
        assert time.monotonic() - began < LIMIT
        return self.process.returncode, out, err


Start = Callable[..., Group]


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[list[Group]]:
    made: list[Group] = []
    yield made
    for group in made:
        for process in (*group.seen, group.process):
            if process.is_running() if isinstance(process, psutil.Process) else process.poll() is None:
                process.kill()
        group.process.wait()
        for pipe in (group.process.stdout, group.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def group(groups: list[Group], tmp_path: Path) -> Start:
    def start(what: str, world_size: int = 2) -> Group:
        groups.append(Group(what, tmp_path, world_size))
        return groups[-1]

    return start


def test_ranks_that_end_well(group: Start, tmp_path: Path) -> None:
    """Rank 0 goes on although the others are done; each saw one entry, and the meeting place is gone."""
    run = group("end", 3)
    assert run.ended() == (0, "completed\n", "")
    assert [(tmp_path / f"sees{rank}").read_text() for rank in (1, 2)] == ["1", "2"]
    assert not (tmp_path / "meeting").exists()


@pytest.mark.parametrize(("victim", "world_size"), [(1, 2), (2, 3)])
def test_a_killed_rank_ends_all(group: Start, victim: int, world_size: int) -> None:
    run = group("wait", world_size)
    run.started(2 * world_size - 1)
    run.kill(victim)
    hint = "(the system kills so when memory runs out)"
    assert run.ended() == (1, f"failed: rank {victim} was killed by SIGKILL {hint}\n", "")


def test_a_killed_rank_0_leaves_nothing(group: Start) -> None:
    run = group("wait", 3)
    run.started(5)
    run.kill(0)
    assert run.ended() == (-signal.SIGKILL, "", "")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raise_", "failed: rank 1 failed: ValueError: no more of this\n"),
        ("raise_in_0", "failed myself: zero\n"),
        ("exit_7", "failed: rank 1 ended with exit code 7\n"),
        ("fail_after_1", "failed: rank 1 was killed by SIGKILL (the system kills so when memory runs out)\n"),
        ("absent", "failed myself: rank 0 waited 0.5 s for 2 ranks; not there: 1\n"),
    ],
)
def test_one_message_says_which_rank_and_how(group: Start, what: str, said: str) -> None:
    run = group(what, 3 if what in ("raise_", "raise_in_0", "exit_7") else 2)
    run.started(1)
    assert run.ended() == (1, said, "")


def test_a_rank_0_that_hears_nothing_is_ended_as_well(group: Start) -> None:
    run = group("deaf")
    run.started(0)
    code, out, err = run.ended()
    assert (code, out) == (1, "")
    assert err == "train: the run failed: rank 1 was killed by SIGKILL (the system kills so when memory runs out)\n"


@pytest.mark.parametrize(
    ("what", "out", "err"), [("deaf_alone", "", "train: interrupted\n"), ("fail_of_an_interrupt", "interrupted\n", "")]
)
def test_an_interrupt_ends_all_where_rank_0_does_not_hear_it(
    group: Start, tmp_path: Path, what: str, out: str, err: str
) -> None:
    run = group(what)
    run.started(1)
    while not (tmp_path / "deaf").exists():
        assert run.process.poll() is None
        time.sleep(0.02)
    run.process.send_signal(signal.SIGINT)
    assert run.ended() == (130, out, err)
    assert not (tmp_path / "meeting").exists()


def test_a_rank_that_does_not_end_is_ended(group: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "FINISH_TIMEOUT", 0.5)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    others = rank_processes.RankProcesses(command, ["0", "1"], Path("meeting"))
    (pid,) = others.pids
    with pytest.raises(rank_processes.RankFailed, match=r"rank 1 did not end within 0\.5 s of rank 0"), others:
        pass
    assert not psutil.pid_exists(pid)
