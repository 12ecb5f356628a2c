"""Processes of a trial do not outlive the one that started them, however it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from unilab import trial

PARENT = """
import os, sys
from pathlib import Path
from unilab.trial import try_ranks
rank = "import os, time; from unilab.trial import end_with_parent as tie; tie(); "
rank += "print(os.getpid(), flush=True); time.sleep(60)"
try_ranks([[sys.executable, "-c", rank]] * 2, [dict(os.environ)] * 2, 50.0, Path(sys.argv[1]))
"""


def test_ranks_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    logs = [tmp_path / f"rank{rank}.log" for rank in range(2)]
    deadline = time.monotonic() + 30
    while not all(log.exists() and log.read_text().endswith("\n") for log in logs):
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.05)
    ranks = [psutil.Process(int(log.read_text())) for log in logs]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _, alive = psutil.wait_procs(ranks, timeout=5)
    for process in alive:
        os.kill(process.pid, signal.SIGKILL)
    assert alive == []


def test_of_ranks_that_failed_at_once_every_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "POLL", 2.0)  # s, in which all of them end
    programs = ["raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)", "import time; time.sleep(60)"]
    commands = [[sys.executable, "-S", "-c", program] for program in programs]
    found = trial.try_ranks(commands, [dict(os.environ)] * 3, 30.0, tmp_path)
    assert found.fault == "rank 0 ended with exit code 3, rank 1 was killed by SIGKILL"
