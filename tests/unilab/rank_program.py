"""A run of ranks that does nothing but what a test asks for: `rank_program.py WHAT OUT WORLD_SIZE`.

Started as rank 0; it starts the others, which run the same function. Every rank writes its process id first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent), str(HERE.parent / "sac")]

from unilab import rank_processes  # noqa: E402
from unilab.rank_processes import RankFailed, RankProcesses, RankSeat  # noqa: E402


def wait(*_: Any) -> None:
    """Wait for something to happen, with a child that lives as long as the pipe from this rank."""
    read, write = os.pipe()
    subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=read)
    os.close(read)
    time.sleep(60)
    os.close(write)


def end(rank: int, *_: Any) -> None:
    """Rank 0 goes on for a moment, the others end at once."""
    if rank == 0:
        time.sleep(0.5)


def raise_(rank: int, *_: Any) -> None:
    """Rank 1 fails; the rest would wait."""
    if rank == 1:
        raise ValueError("no more\nof this")
    time.sleep(60)


def raise_in_0(rank: int, *_: Any) -> None:
    """Rank 0 fails; the rest would wait."""
    if rank == 0:
        raise ValueError("zero")
    time.sleep(60)


def exit_7(rank: int, *_: Any) -> None:
    """Rank 1 ends without a word."""
    if rank == 1:
        os._exit(7)
    time.sleep(60)


def linger(rank: int, *_: Any) -> None:
    """Rank 0 is done, rank 1 is not."""
    if rank == 1:
        time.sleep(60)


def deaf(rank: int, *_: Any) -> None:
    """Rank 1 is killed while rank 0 is where no signal reaches it."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _hear_nothing()


def deaf_alone(rank: int, *_: Any) -> None:
    """Rank 0 is where no signal reaches it, the rest is well."""
    if rank == 0:
        _hear_nothing()
    time.sleep(60)


def _hear_nothing() -> None:
    rank_processes.ABANDON_TIMEOUT = 1.0  # as long as what it does not hear is not about its collector
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGINT})
    (Path(sys.argv[2]) / "deaf").touch()
    time.sleep(60)


def fail_of_an_interrupt(rank: int, *_: Any) -> None:
    """Rank 0 loses an interrupt, as in a destructor, and fails of the other rank's end."""
    if rank == 0:
        (Path(sys.argv[2]) / "deaf").touch()
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(60)
        raise ConnectionError("peer")
    time.sleep(60)


def fail_after_1(rank: int, *_: Any) -> None:
    """Rank 1 is killed, and rank 0 fails of it in its own way."""
    time.sleep(0.3)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
    raise ConnectionError("peer")


def absent(rank: int, world_size: int, store: Path, out: Path) -> None:
    """Rank 1 never comes to the meeting."""
    if rank == 1:
        time.sleep(60)
    from unilab.data_parallel import DataParallel, torch

    DataParallel.join(rank, world_size, torch.device("cpu"), store, timeout=0.5)


def learn(rank: int, world_size: int, store: Path, out: Path) -> None:
    """See `rank_learning`."""
    from rank_learning import learn as run

    run(rank, world_size, store, out)


def resume(rank: int, world_size: int, store: Path, out: Path) -> None:
    """See `rank_resume`."""
    from rank_resume import start as run

    run(rank, world_size, store, out)


def serve(what: Callable[..., None], out: Path, world_size: int) -> int:
    """Rank 0: start the others, do it, print how it ended."""
    store = out / "meeting"
    (out / "pid0").write_text(str(os.getpid()))
    command = [sys.executable, str(HERE), *sys.argv[1:]]
    try:
        with RankProcesses(command, [str(rank) for rank in range(world_size)], store) as others:
            for rank, pid in enumerate(others.pids, 1):
                (out / f"pid{rank}").write_text(str(pid))
            (out / "started").touch()
            with others.watching():
                what(0, world_size, store, out)
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    except RankFailed as error:
        print(f"failed: {error}")
        return 1
    except Exception as error:
        print(f"failed myself: {error}")
        return 1
    print("completed")
    return 0


def main() -> int:
    """Entry point."""
    name, folder, world_size = sys.argv[1:4]
    what, out = globals()[name], Path(folder)
    if len(sys.argv) == 4:
        return serve(what, out, int(world_size))
    seat, rest = RankSeat.take(sys.argv[1:])
    assert rest == sys.argv[1:4]
    (out / f"sees{seat.rank}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    try:
        what(seat.rank, len(seat.entries), seat.store, out)
    except Exception as error:
        return seat.fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
