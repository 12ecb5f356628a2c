"""`mj_step_loop.c`, built at run time against the installed engine: the yardstick beside the pool."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from unilab.physics.mujoco_pool import ENGINE, Values, save_model
from unilab.physics.pinning import LINUX
from unilab.physics.states import States

SOURCE = Path(__file__).with_name("mj_step_loop.c")
GAINS = ("kp", "kd")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O2", "-std=gnu11", "-pthread", "-shared", "-fPIC")


class NoCLoop(RuntimeError):  # noqa: N818 - says what is missing
    """The C loop cannot be built here; one line says why."""


class CLoop:
    """Snapshots stepped by plain C threads, worker i on the i-th CPU; use as a context manager.

    Args:
        states: the snapshots and how they are stepped.
        cpu_ids: CPU of each worker; None for any.

    Attributes:
        after: integration states after the step of the last round, (K, N, S).

    Raises:
        NoCLoop: where it cannot be built.
    """

    def __init__(self, states: States, cpu_ids: Sequence[int | None]) -> None:
        others = [name for name, _ in states.spec.model_fields if name not in GAINS]
        if others:
            raise NoCLoop(f"the C loop sets gains alone, not {', '.join(others)}")
        self._states, self.after = states, np.zeros_like(states.arrays["state"])
        workers = min(len(cpu_ids), states.num_envs)
        cpus = (ctypes.c_int * workers)(*(-1 if cpu is None else cpu for cpu in cpu_ids[:workers]))
        with tempfile.TemporaryDirectory() as folder:
            self._library = _build(Path(folder))
            model = Path(folder) / "model.mjb"
            save_model(states.spec, model)
            self._loop = self._library.loop_open(str(model).encode(), workers, cpus)
        if not self._loop:
            raise NoCLoop("the engine cannot read the model that it saved")

    def __enter__(self) -> Self:
        """Return the loop."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free models and memory."""
        self._library.loop_close(self._loop)

    def round(self) -> list[float]:
        """Step every snapshot once; returns the seconds of each whole batch, (K,)."""
        arrays, spec = self._states.arrays, self._states.spec
        seconds = np.zeros(len(self._states.iterations))
        gains = [_pointer(arrays[name]) if name in arrays else None for name in GAINS]
        sizes = len(seconds), self._states.num_envs, spec.decimation
        self._library.loop_round(
            self._loop, *sizes, _pointer(arrays["state"]), *gains, _pointer(self.after), _pointer(seconds)
        )
        return seconds.tolist()


def _build(folder: Path) -> ctypes.CDLL:
    if not LINUX:
        raise NoCLoop("the C loop is written for Linux")
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NoCLoop(f"no C compiler: none of {', '.join(COMPILERS)} is on the path")
    library_file, built = next(ENGINE.glob("libmujoco.so*")), folder / "loop.so"
    command = [compiler, *FLAGS, "-I", str(ENGINE / "include"), str(SOURCE), str(library_file), "-o", str(built)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        line = next((line for line in result.stderr.splitlines() if "error" in line), "no message")
        raise NoCLoop(f"{Path(compiler).name} cannot build the C loop: {line}")
    try:  # it finds the engine loaded already: the pool and the loop run the same code
        library = ctypes.CDLL(str(built))
    except OSError as error:  # as where temporary files may not be executed
        raise NoCLoop(f"the C loop was built but cannot be loaded: {error}") from None
    library.loop_open.restype = ctypes.c_void_p
    library.loop_open.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p]
    library.loop_round.argtypes = [ctypes.c_void_p, *3 * [ctypes.c_int], *5 * [ctypes.c_void_p]]
    library.loop_round.restype = None
    library.loop_close.argtypes = [ctypes.c_void_p]
    library.loop_close.restype = None
    return library


def _pointer(values: Values) -> int:
    assert values.flags.c_contiguous
    return int(values.ctypes.data)
