"""Where a process stands, on demand: every entry point of the trainer prints its Python stacks on `STACKS_SIGNAL`.

For a person, `kill -USR2 PID`; for `repro run`, what it does to a run that does not end. Nothing runs until the signal
comes, and system calls it interrupts are resumed. The dump is made in C without the interpreter's lock, so that a
process that waits in a library answers too.
"""

from __future__ import annotations

import faulthandler
import signal

from unilab.names import STACKS_SIGNAL

STANDARD_ERROR = 2  # the descriptor, since `sys.stderr` may be replaced by something that has none


def print_stacks_on_signal() -> None:
    """From now on, print the stacks of all threads on standard error when the signal comes; the process goes on."""
    faulthandler.register(signal.Signals[STACKS_SIGNAL], file=STANDARD_ERROR, all_threads=True)
