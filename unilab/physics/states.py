"""Recorded physics: what a pool was given to step at some ticks of a run, kept to be stepped again."""

from __future__ import annotations

import json
import textwrap
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from unilab.atomic_file import write_atomically
from unilab.physics.spec import PhysicsSpec
from unilab.validation import require

if TYPE_CHECKING:  # the learner plans recordings without importing the engine
    from unilab.physics.mujoco_pool import MujocoPool, Values

FORMAT = 1
MAX_DECIMATION = 1000  # a step of a file that asks for more might never end
_META = "meta"


@dataclass(frozen=True, eq=False)
class States:
    """A file of snapshots, read.

    Attributes:
        spec: the robot, its timing and the profile it was stepped with.
        iterations: training iteration of each snapshot, K of them.
        arrays: `state` and model fields as `MujocoPool.inputs` names them, (K, N, …).
    """

    spec: PhysicsSpec
    iterations: tuple[int, ...]
    arrays: dict[str, Values]

    @property
    def num_envs(self) -> int:
        """Simulations of a snapshot, N."""
        return int(self.arrays["state"].shape[1])

    def snapshot(self, index: int) -> dict[str, Values]:
        """What `MujocoPool.restore` takes, of the snapshot `index`."""
        return {name: values[index] for name, values in self.arrays.items()}


class StateRecorder:
    """Keeps snapshots in memory during a run and writes them at its end.

    Memory is taken and touched at the start, so that `take` is a copy and nothing else.

    Args:
        pool: where the snapshots come from.
        count: the most snapshots, K.
    """

    def __init__(self, pool: MujocoPool, count: int) -> None:
        self._pool = pool
        self._iterations = [0] * count
        self._taken = np.zeros((count, pool.num_envs), bool)
        self._arrays = {
            name: np.full((count, *values.shape), np.nan) for name, values in pool.snapshot().items() if count
        }

    def take(self, index: int, rows: slice, iteration: int) -> None:
        """Copy what `pool.step` is about to use of some simulations.

        Args:
            index: number of the snapshot, below `count`.
            rows: the simulations.
            iteration: training iteration, counted from 1.
        """
        for name, values in self._pool.inputs(rows).items():
            self._arrays[name][index, rows] = values
        self._taken[index, rows] = True
        self._iterations[index] = iteration

    def write(self, path: Path) -> None:
        """Write the snapshots that hold every simulation; whole or not at all. Without any, no file is made."""
        whole = np.flatnonzero(self._taken.all(axis=1))
        if not whole.size:
            return
        meta = {
            "format": FORMAT,
            "spec": self._pool.spec.to_json(),
            "num_envs": self._pool.num_envs,
            "iterations": [self._iterations[index] for index in whole],
            "mujoco": self._pool.mujoco_version,
        }
        arrays = {name: values if whole.size == len(values) else values[whole] for name, values in self._arrays.items()}
        content = {_META: np.array(json.dumps(meta)), **arrays}
        write_atomically(path, lambda file: np.savez(file, allow_pickle=False, **content))


def recorded_iterations(iterations: int, count: int) -> list[int]:
    """Iterations before whose step a snapshot is taken: evenly spaced in the second half of a run.

    Args:
        iterations: of the run.
        count: snapshots asked for; a second half with fewer iterations gives one for each.

    Returns:
        Ascending iterations, counted from 1.
    """
    first = iterations // 2 + 1
    length = iterations - first + 1
    taken = min(count, length)
    return [first + (2 * index + 1) * length // (2 * taken) for index in range(taken)]


def load_states(path: Path) -> States:
    """Read a file of snapshots. The width of `state` is for `MujocoPool` to judge, which knows the robot.

    Raises:
        ValueError: one line, if there is no such file, or it is damaged or of another kind.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a file; record one with training.record_states=8")
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no archive, or its end is missing")
        return _states(_content(path))
    except Exception as error:  # a file made by others can make the readers of archive, header and JSON raise anything
        what = textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" …")
        raise ValueError(
            f"{path} holds no recorded physics ({what}); record it again with training.record_states=8"
        ) from None


def _content(path: Path) -> dict[str, Values]:
    with zipfile.ZipFile(path) as archive:  # `write` compresses nothing, and what is not compressed cannot explode
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise ValueError("it is compressed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as of a header that only an old version would write
        with np.load(path, allow_pickle=False) as file:
            return {name: np.ascontiguousarray(file[name]) if name != _META else file[name] for name in file.files}


def _states(content: dict[str, Values]) -> States:
    if _META not in content:
        raise ValueError(f"it has no {_META}")
    meta = json.loads(str(content.pop(_META)))
    if meta["format"] != FORMAT:
        raise ValueError(f"format {meta['format']}, this version reads {FORMAT}")
    spec, iterations = PhysicsSpec.from_json(meta["spec"]), tuple(meta["iterations"])
    require(spec.decimation <= MAX_DECIMATION, "decimation", f"at most {MAX_DECIMATION}", spec.decimation)
    if not all(type(value) is int and value > 0 for value in iterations) or sorted(set(iterations)) != [*iterations]:
        raise ValueError(f"its iterations are not ascending and above 0: {iterations}")
    widths = {"state": None, **dict(spec.model_fields)}
    if set(content) != set(widths) or not iterations:
        raise ValueError(f"it has {', '.join(sorted(content)) or 'nothing'} of {len(iterations)} snapshots")
    for name, width in widths.items():
        shape, leading = content[name].shape, (len(iterations), meta["num_envs"])
        if len(shape) != 3 or shape[:2] != leading or width not in (None, shape[2]) or content[name].dtype != float:
            raise ValueError(f"{name} is {content[name].dtype} {shape}, not float64 {leading} of {width or 'states'}")
        if not content[name].size or not np.isfinite(content[name]).all():
            raise ValueError(f"{name} is empty or not finite")
    return States(spec, iterations, content)
