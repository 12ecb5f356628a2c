"""The other ranks of a run on this host: rank 0 starts and watches them, and no rank outlives it.

Two pipes per rank. The lifeline is held by rank 0: its end-of-file ends the rank, however rank 0 died. The report is
held by the rank: what it failed of, and its end-of-file is its death. A rank's own children end in the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from unilab.names import EXIT_FAILED, EXIT_INTERRUPTED
from unilab.physics.process import STOP_TIMEOUT, child_environment, ending
from unilab.ranks import VISIBLE_DEVICES
from unilab.signals import Arrivals

FINISH_TIMEOUT = 30.0  # from rank 0 being done to every other rank having ended
# From a failure or an interrupt to the end of rank 0's process, whatever it is doing: its collector is given up before.
ABANDON_TIMEOUT = STOP_TIMEOUT + 3.0
_LOOK_SECONDS = 0.2
_CAUSE_SECONDS = 0.3  # several ranks fail within this time of each other: the cause is among them
_VERDICT_SECONDS = 1.0  # from an error of rank 0 to the news that it came from another rank
_INTERRUPT = signal.SIGUSR1
_MESSAGE_END = "\0"  # what follows is for the person who looks for the fault


class RankFailed(RuntimeError):  # noqa: N818 - says what happened
    """Another rank failed, died or did not end; the message names it and says how."""


@dataclass
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    lifeline: int
    report: int
    said: bytes = b""

    def symptom(self) -> tuple[int, str, str] | None:
        """How likely its failure is the cause, 0 most; the failure; where it arose. None while all is well."""
        code = self.process.poll()
        message, _, trace = self.said.decode(errors="replace").partition(_MESSAGE_END)
        if code is not None and code < 0:
            return 0, f"rank {self.rank} {ending(code)}", ""
        if message:
            return 1, f"rank {self.rank} failed: {message}", trace
        return (2, f"rank {self.rank} {ending(code)}", "") if code else None


class RankProcesses:
    """Starts the ranks from 1 on and ends them; use as a context manager in the main thread.

    Args:
        command: program and arguments of a rank; what `RankSeat.take` reads is appended.
        entries: the device entry of every rank, rank 0's too; an empty list for a run of one rank.
        store: file where the ranks meet; removed at the end.
        last_words: called with a failure or an interrupt before rank 0's process is ended because it hangs.

    Attributes:
        failure: the failure of the rank that failed first.
        interrupt: the Ctrl-C or termination that ended the others.
    """

    def __init__(
        self,
        command: Sequence[str],
        entries: Sequence[str],
        store: Path,
        last_words: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.failure: RankFailed | None = None
        self.interrupt: KeyboardInterrupt | None = None
        self._store, self._last_words = store, last_words
        self._lock, self._over, self._watching = threading.Lock(), threading.Event(), False
        self._closing = self._abandoned = False
        self._children: list[_Child] = []
        self._arrivals = Arrivals()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        try:
            for rank in range(1, len(entries)):
                self._children.append(_start(command, rank, entries, store))
        except BaseException:
            self._end()
            raise
        if self._children:
            self._watcher.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks from 1 on."""
        return [child.process.pid for child in self._children]

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._end()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within, the failure of another rank is raised here, in the main thread.

        An error that arises here ends the other ranks at once, and is replaced by theirs where that was the cause.

        Raises:
            RankFailed: naming the rank that failed first and how.
        """
        if not self._children:
            yield
            return
        previous = signal.signal(_INTERRUPT, self._raise_failure)
        try:
            self._watching = True
            if self.failure is not None:
                raise self.failure
            yield
        except BaseException as error:
            self._watching = False
            cause = self._cause(error)
            self._abandon(cause)
            if cause is not error:
                raise cause from error
            raise
        finally:
            self._watching = False
            with self._lock:  # no interrupt is on its way any more, which the handler before might die of
                signal.signal(_INTERRUPT, previous)

    def _raise_failure(self, *_: object) -> None:
        if self._watching and self.failure is not None:
            self._watching = False
            raise self.failure

    def _cause(self, error: BaseException) -> BaseException:
        """What an error of this rank follows from: another's failure, an interrupt that ended the others, or itself."""
        if not isinstance(error, Exception):
            return self.failure or error
        deadline = time.monotonic() + _VERDICT_SECONDS
        while not (self.failure or self.interrupt) and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.failure or self.interrupt or error

    def _watch(self) -> None:
        """Look after the children and the signals that arrive, until one fails or an interrupt ends them."""
        while not self._closing:
            self._listen(_LOOK_SECONDS)
            if self._arrivals.interrupted():
                self.interrupt = KeyboardInterrupt()
                return self._abandon(self.interrupt)
            if self._symptoms():
                time.sleep(_CAUSE_SECONDS)
                self._listen(0.0)
                return self._declare(self._symptoms()[0])
        return None

    def _symptoms(self) -> list[RankFailed]:
        """What is wrong with the children, the likeliest cause first."""
        return [_failure(*found[1:]) for found in sorted(filter(None, (child.symptom() for child in self._children)))]

    def _listen(self, timeout: float) -> None:
        """Read what the children say; returns early when one says something or dies, or a signal arrives."""
        poll = select.poll()
        poll.register(self._arrivals.descriptor, select.POLLIN)
        open_reports = {child.report: child for child in self._children if child.report >= 0}
        for descriptor in open_reports:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(timeout * 1000):
            if descriptor not in open_reports:
                continue
            child = open_reports[descriptor]
            piece = os.read(descriptor, 65536)
            child.said += piece
            if not piece:
                os.close(descriptor)
                child.report = -1
                with contextlib.suppress(subprocess.TimeoutExpired):  # closed at its death, which is at hand
                    child.process.wait(_CAUSE_SECONDS)

    def _declare(self, failure: RankFailed) -> None:
        with self._lock:
            if self._closing:
                return
            self.failure = failure
        _kill(self._children)
        main = threading.main_thread().ident
        assert main is not None
        with self._lock:
            if self._watching:
                signal.pthread_kill(main, _INTERRUPT)
        self._abandon(failure)

    def _abandon(self, error: BaseException) -> None:
        """End the other ranks now, and this process if it has not ended by itself in time."""
        _kill(self._children)
        with self._lock:
            first, self._abandoned = not self._abandoned, True
        if first:
            threading.Thread(target=self._end_in_time, args=(error,), name="ranks-deadline", daemon=True).start()

    def _end_in_time(self, error: BaseException) -> None:
        if self._over.wait(ABANDON_TIMEOUT):
            return
        interrupted = isinstance(error, KeyboardInterrupt)
        said = "interrupted" if interrupted else f"the run failed: {str(error) or type(error).__name__}"
        try:
            print(f"train: {said}", file=sys.stderr, flush=True)
            self._store.unlink(missing_ok=True)
            self._last_words(error)
        finally:
            os._exit(EXIT_INTERRUPTED if interrupted else EXIT_FAILED)

    def _finish(self) -> None:
        """Wait until every rank has ended by itself.

        Raises:
            RankFailed: if one failed at the very end, or does not end.
        """
        deadline = time.monotonic() + FINISH_TIMEOUT
        for child in self._children:
            while child.process.poll() is None and self.failure is None:
                if time.monotonic() > deadline:
                    raise RankFailed(f"rank {child.rank} did not end within {FINISH_TIMEOUT:g} s of rank 0")
                time.sleep(0.01)
        symptoms = self._symptoms()
        if self.failure or symptoms:
            raise self.failure or symptoms[0]

    def _end(self) -> None:
        with self._lock:
            self._closing = True
        _kill(self._children)
        if self._watcher.is_alive():
            self._watcher.join()
        for child in self._children:
            child.process.wait()
            os.close(child.lifeline)
            if child.report >= 0:
                os.close(child.report)
        self._arrivals.close()
        self._store.unlink(missing_ok=True)
        self._over.set()


@dataclass(frozen=True)
class RankSeat:
    """A started rank's place: who it is, where it meets the others, and its two pipes.

    Attributes:
        rank: its rank, from 1 on.
        entries: the device entry of every rank.
        store: file where the ranks meet.
        lifeline: descriptor whose end-of-file is the death of rank 0.
        report: descriptor that takes what this rank failed of.
    """

    rank: int
    entries: tuple[str, ...]
    store: Path
    lifeline: int
    report: int

    @classmethod
    def take(cls, arguments: Sequence[str]) -> tuple[RankSeat, list[str]]:
        """Read the seat from the end of a command line, and watch over rank 0's life from now on.

        Returns:
            The seat, and the arguments that are not about it.
        """
        parser = argparse.ArgumentParser(description="internal: started by rank 0", allow_abbrev=False)
        for name in ("rank", "lifeline-fd", "report-fd"):
            parser.add_argument(f"--{name}", type=int, required=True)
        parser.add_argument("--store", type=Path, required=True)
        parser.add_argument("--entries", required=True)
        args, rest = parser.parse_known_args(arguments)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to stop
        for descriptor in (args.lifeline_fd, args.report_fd):
            os.set_inheritable(descriptor, False)
        entries = tuple(args.entries.split(","))
        seat = cls(args.rank, entries, args.store, args.lifeline_fd, args.report_fd)
        threading.Thread(target=seat._follow, name="lifeline", daemon=True).start()
        return seat, rest

    def fail(self, error: BaseException) -> int:
        """Tell rank 0 what this rank failed of, and wait to be ended, so that others do not fail of it first.

        Returns:
            The exit code, where nobody came.
        """
        message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        trace = "".join(traceback.format_exception(error))
        text = " ".join(message.split())[:4096] + _MESSAGE_END + trace[-16384:]
        with contextlib.suppress(OSError):  # rank 0 is gone as well
            os.write(self.report, text.encode(errors="replace"))
        time.sleep(ABANDON_TIMEOUT)
        return EXIT_FAILED

    def _follow(self) -> None:
        while os.read(self.lifeline, 1):
            pass
        os._exit(EXIT_FAILED)


def _failure(message: str, trace: str) -> RankFailed:
    failure = RankFailed(message)
    if trace:
        failure.add_note(trace)
    return failure


def _start(command: Sequence[str], rank: int, entries: Sequence[str], store: Path) -> _Child:
    child_follows, lifeline = os.pipe()
    report, child_reports = os.pipe()
    seat = ["--rank", str(rank), f"--entries={','.join(entries)}", "--store", str(store.absolute())]
    seat += ["--lifeline-fd", str(child_follows), "--report-fd", str(child_reports)]
    try:
        process = subprocess.Popen(
            [*command, *seat],
            pass_fds=(child_follows, child_reports),
            env={**child_environment(), VISIBLE_DEVICES: entries[rank]},
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
    except BaseException:
        os.close(lifeline)
        os.close(report)
        raise
    finally:
        os.close(child_follows)
        os.close(child_reports)
    return _Child(rank, process, lifeline, report)


def _kill(children: Sequence[_Child]) -> None:
    for child in children:
        child.process.kill()
