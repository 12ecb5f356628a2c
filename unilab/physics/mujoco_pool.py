"""The CPU physics pool: many simulations of one robot, stepped by `mujoco.batch` on a list of CPUs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from unilab.physics.pinning import allowed_cpus, check_cpu_ids, confine, confine_process, thread_ids
from unilab.physics.spec import KEEP, PROFILES, RESET, ROBOTS, SET_VELOCITY, PhysicsSpec

# Physics never renders. mujoco loads a renderer at import: it fails when MUJOCO_GL names one that is missing here, and
# without the variable it starts a process that looks for one.
_asked = os.environ.get("MUJOCO_GL")
os.environ["MUJOCO_GL"] = "disable"
import mujoco  # noqa: E402

if _asked is None:
    del os.environ["MUJOCO_GL"]
else:
    os.environ["MUJOCO_GL"] = _asked
from mujoco import batch as mujoco_batch  # noqa: E402

Floats: TypeAlias = npt.NDArray[np.float32]
Ids: TypeAlias = npt.NDArray[np.intp]
Values: TypeAlias = npt.NDArray[np.float64]

ENGINE = Path(mujoco.__file__).parent  # headers and library of the engine

# Warnings that mean the state of a simulation cannot be trusted; MuJoCo resets a simulation on these.
BAD_PHYSICS = tuple(getattr(mujoco.mjtWarning, f"mjWARN_BAD{what}") for what in ("QPOS", "QVEL", "QACC"))

# Solver paths. Sparse Jacobians without constraint islands give the same motion to round-off, faster for this size of
# model; without warm start the same to the solver's tolerance.
_EXACT_FLAGS = int(mujoco.mjtDisableBit.mjDSBL_ISLAND)
_FAST_FLAGS = _EXACT_FLAGS | int(mujoco.mjtDisableBit.mjDSBL_WARMSTART)
_DISABLED = {"reference": 0, "exact": _EXACT_FLAGS, "fast": _FAST_FLAGS}


ROOT = 1  # the body that everything hangs on; 0 is the world


def _write_kp(batch: mujoco_batch.Batch, ids: Ids, kp: Floats | Values) -> None:
    batch.expand("actuator_gainprm")[ids, :, 0] = kp
    batch.expand("actuator_biasprm")[ids, :, 1] = -kp


def _write_kd(batch: mujoco_batch.Batch, ids: Ids, kd: Floats | Values) -> None:
    batch.expand("actuator_biasprm")[ids, :, 2] = -kd


def _write_root_mass(batch: mujoco_batch.Batch, ids: Ids, mass: Floats | Values) -> None:
    batch.expand("body_mass")[ids, ROOT] = mass[:, 0]


def _write_root_com(batch: mujoco_batch.Batch, ids: Ids, com: Floats | Values) -> None:
    batch.expand("body_ipos")[ids, ROOT] = com


class ModelField(NamedTuple):
    """A per-simulation model parameter.

    Attributes:
        width: its numbers in a model.
        write: writes rows of it.
        read: what was written, of some simulations.
        derives: whether mj_setConst derives other parameters from it, as MjModel._setconst_inputs says.
    """

    width: Callable[[mujoco.MjModel], int]
    write: Callable[[mujoco_batch.Batch, Ids, Floats | Values], None]
    read: Callable[[mujoco_batch.Batch, slice], Values]
    derives: bool = False


MODEL_FIELDS = {
    "kp": ModelField(
        lambda model: int(model.nu), _write_kp, lambda batch, rows: batch.expand("actuator_gainprm")[rows, :, 0]
    ),
    "kd": ModelField(
        lambda model: int(model.nu), _write_kd, lambda batch, rows: -batch.expand("actuator_biasprm")[rows, :, 2]
    ),
    "root_mass": ModelField(
        lambda _: 1,
        _write_root_mass,
        lambda batch, rows: batch.expand("body_mass")[rows, ROOT : ROOT + 1],
        derives=True,
    ),
    "root_com": ModelField(
        lambda _: 3, _write_root_com, lambda batch, rows: batch.expand("body_ipos")[rows, ROOT], derives=True
    ),
}


class MujocoPool:
    """`num_envs` simulations of one robot, their commands and their packed rows.

    With `cpu_ids`, the calling thread is worker 0 on the first CPU, every further worker sits alone on one of the
    following, and every other thread that runs already is confined to the list. A pool never has more workers than
    simulations. Warnings of MuJoCo, which it would append to MUJOCO_LOG.TXT in the working folder, are counted in the
    rows instead; this holds for the whole process unless it has a warning handler of its own.

    Args:
        spec: the robot, the timing and the columns.
        num_envs: simulations, N.
        cpu_ids: CPUs of the workers; None leaves placement to the system, on as many workers as there are allowed CPUs.

    Attributes:
        placement: kernel thread id and CPU (None when not pinned) of every worker.
        mujoco_version: version of the engine.
        failure: message of the last simulation in which the engine raised, or None.

    Raises:
        ValueError: if `num_envs`, `cpu_ids` or a field of `spec` does not fit the robot or this process.
    """

    def __init__(self, spec: PhysicsSpec, num_envs: int, cpu_ids: Sequence[int] | None = None) -> None:
        if num_envs < 1:
            raise ValueError(f"algo.num_envs={num_envs}; use 1 or more")
        model = load_model(spec)
        _check_layout(spec, model)
        _silence_warnings()
        self.mujoco_version: str = mujoco.__version__
        self.failure: str | None = None
        self._spec = spec
        self._batch, self.placement = _start(model, num_envs, cpu_ids)
        self._qpos, self._qvel, self._ctrl = (self._batch.bind(name) for name in ("qpos", "qvel", "ctrl"))
        self._sensordata = self._batch.bind("sensordata")
        self._counters = [self._batch.warning[:, int(kind), 1] for kind in BAD_PHYSICS]
        self._failed = np.zeros(num_envs, bool)
        self._default_state = _default_state(model)
        self._sensor_index = _sensor_index(spec, model)
        self._sensors = np.empty((num_envs, self._sensor_index.size))
        self._columns, self._reset_columns = spec.columns, spec.reset_columns
        self._sensor_columns = slice(spec.nq + spec.nv, spec.width - 1)
        self._ids = np.arange(num_envs)
        self._derives = any(MODEL_FIELDS[name].derives for name, _ in spec.model_fields)
        self._stale = np.zeros(num_envs, bool)  # constants of the model are to be derived again
        self.inputs()  # makes the model fields per simulation now: later that would wait for a step in flight

    def apply(self, ctrl: Floats, codes: npt.NDArray[np.int32], reset_rows: Floats, rows: slice = slice(None)) -> None:
        """Take over one command; nothing is computed until the next `step`.

        A reset leaves what mj_resetData leaves (time, warm start and applied forces zero), then the row's qpos, qvel
        and model fields. A quaternion that went through float32 needs no care: the engine normalizes what it reads and
        what it integrates.

        Args:
            ctrl: servo targets in radians, (N, nu).
            codes: KEEP, RESET or SET_VELOCITY, (N,).
            reset_rows: (N, spec.reset_width); only rows with a code other than KEEP are read.
            rows: simulations to take it over for; the others may be stepping meanwhile.

        Raises:
            ValueError: if a code is unknown.
        """
        ids, codes, reset_rows = self._ids[rows], codes[rows], reset_rows[rows]
        if ((codes < KEEP) | (codes > SET_VELOCITY)).any():
            raise ValueError(f"row codes are {KEEP}, {RESET} and {SET_VELOCITY}, found {np.unique(codes).tolist()}")
        resets = np.flatnonzero(codes == RESET)
        if resets.size:
            self._reset(ids[resets], reset_rows[resets])
        pushes = np.flatnonzero(codes == SET_VELOCITY)
        if pushes.size:
            self._qvel[ids[pushes]] = reset_rows[pushes, self._reset_columns["qvel"]]
        self._ctrl[rows] = ctrl[rows]

    def step(self, rows: slice = slice(None)) -> None:
        """Run one control step of `rows`: `spec.decimation` physics steps with the controls held.

        While it runs, another thread may `apply` and `pack` other rows, and nothing else. A simulation in which the
        engine raises keeps its state; its row says so in `warnings`. Where a reset changed masses, the constants that
        follow are derived first: in `apply` they would wait for a step in flight.
        """
        ids = self._ids[rows]
        stale = ids[self._stale[rows]]
        try:
            if stale.size:
                self._stale[rows] = False
                self._batch.set_const(stale)
            self._batch.step(ids, nstep=self._spec.decimation)
        except mujoco_batch.SimulationError as error:
            self._failed[error.ids] = True
            self.failure = str(error)

    def pack(self, out: Floats, rows: slice = slice(None)) -> None:
        """Write the ingress rows of some simulations.

        Sensors are one physics step behind qpos and qvel, as mj_step leaves them. `warnings` counts the bad-physics
        warnings since the last `pack`, plus one if the engine raised.

        Args:
            out: (rows, spec.width), overwritten.
            rows: the simulations.
        """
        sensors = self._sensors[rows]
        with np.errstate(over="ignore", invalid="ignore"):  # a state that blew up may become infinite
            out[:, self._columns["qpos"]] = self._qpos[rows]
            out[:, self._columns["qvel"]] = self._qvel[rows]
            np.take(self._sensordata[rows], self._sensor_index, axis=1, out=sensors, mode="clip")
            out[:, self._sensor_columns] = sensors
        out[:, -1] = sum((counter[rows] for counter in self._counters), start=self._failed[rows])
        # Cleared, not subtracted: the reset on a bad state sets the engine's counter back to one.
        self._batch.warning[rows] = 0
        self._failed[rows] = False

    @property
    def untrusted(self) -> int:
        """Simulations with a bad-physics warning, or in which the engine raised, since they were last packed."""
        return int(np.count_nonzero(sum(self._counters, start=self._failed)))

    def _reset(self, ids: Ids, rows: Floats) -> None:
        columns = self._reset_columns
        self._batch.state[ids] = self._default_state
        self._qpos[ids] = rows[:, columns["qpos"]]
        self._qvel[ids] = rows[:, columns["qvel"]]
        for name, _ in self._spec.model_fields:
            MODEL_FIELDS[name].write(self._batch, ids, rows[:, columns[name]])
        self._stale[ids] = self._derives

    @property
    def spec(self) -> PhysicsSpec:
        """The robot, the timing and the columns."""
        return self._spec

    @property
    def num_envs(self) -> int:
        """Simulations, N."""
        return len(self._failed)

    def inputs(self, rows: slice = slice(None)) -> dict[str, Values]:
        """All that decides what the next `step` does and costs; views where they can be, so copy before stepping.

        Args:
            rows: simulations, n of them.

        Returns:
            `state`: time, qpos, qvel, warm start, controls and applied forces as MuJoCo's integration state (n, S);
            and every declared model field by name (n, width).
        """
        fields = {name: MODEL_FIELDS[name].read(self._batch, rows) for name, _ in self._spec.model_fields}
        return {"state": self._batch.state[rows], **fields}

    def snapshot(self, rows: slice = slice(None)) -> dict[str, Values]:
        """A copy of `inputs`."""
        return {name: values.copy() for name, values in self.inputs(rows).items()}

    def restore(self, snapshot: Mapping[str, Values], rows: slice = slice(None)) -> None:
        """Put simulations back to a snapshot of all, so that `step` does again what it did after it.

        Args:
            snapshot: arrays as in `inputs`, (N, …).
            rows: the simulations; the others may be stepping meanwhile.
        """
        self._batch.state[rows] = snapshot["state"][rows]
        for name, _ in self._spec.model_fields:
            MODEL_FIELDS[name].write(self._batch, self._ids[rows], snapshot[name][rows])
        if self._derives:  # here, where nobody measures the step
            self._batch.set_const(self._ids[rows])
            self._stale[rows] = False


def load_model(spec: PhysicsSpec) -> mujoco.MjModel:
    """The robot's compiled scene with the step and solver options of `spec`.

    Raises:
        ValueError: if the scene, the profile or the timing is unknown or impossible.
    """
    if spec.profile not in PROFILES:
        raise ValueError(f"env.physics_profile={spec.profile}; use one of {', '.join(PROFILES)}")
    if spec.timestep <= 0 or spec.decimation < 1:
        raise ValueError(f"timestep {spec.timestep} s and decimation {spec.decimation}: both must be positive")
    model = load_scene(spec.scene)
    model.opt.timestep = spec.timestep
    if spec.profile != "reference":
        model.opt.jacobian = mujoco.mjtJacobian.mjJAC_SPARSE
    model.opt.disableflags |= _DISABLED[spec.profile]
    return model


def load_scene(scene: str) -> mujoco.MjModel:
    """The compiled scene as it is published.

    Raises:
        ValueError: if there is none, or it is not MJCF.
    """
    path = ROBOTS / scene
    if not path.is_file():
        scenes = sorted(str(found.relative_to(ROBOTS)) for found in ROBOTS.glob("*/scene*.xml"))
        raise ValueError(f"no scene {scene}; there are: {', '.join(scenes)}")
    return mujoco.MjModel.from_xml_path(str(path))


def save_model(spec: PhysicsSpec, path: Path) -> None:
    """Write the compiled scene as the engine's own binary file.

    Raises:
        ValueError: as `load_model`.
    """
    mujoco.mj_saveModel(load_model(spec), str(path), None)


def _check_layout(spec: PhysicsSpec, model: mujoco.MjModel) -> None:
    for size in ("nq", "nv", "nu"):
        if getattr(spec, size) != getattr(model, size):
            raise ValueError(f"{size}={getattr(spec, size)}, but {spec.scene} has {getattr(model, size)}")
    sensors = {model.sensor(i).name: int(model.sensor_dim[i]) for i in range(model.nsensor)}
    fields = {name: field.width(model) for name, field in MODEL_FIELDS.items()}
    for kind, asked, known in (("sensor", spec.sensors, sensors), ("model field", spec.model_fields, fields)):
        for name, width in asked:
            if name not in known:
                raise ValueError(f"no {kind} {name} in {spec.scene}; there are: {', '.join(known)}")
            if width != known[name]:
                raise ValueError(f"{kind} {name} has {known[name]} values in {spec.scene}, not {width}")


def _sensor_index(spec: PhysicsSpec, model: mujoco.MjModel) -> Ids:
    """Columns of sensordata, in the order of `spec.sensors`."""
    columns = [np.arange(model.sensor(name).adr[0], model.sensor(name).adr[0] + dim) for name, dim in spec.sensors]
    return np.concatenate([np.empty(0, np.intp), *columns]).astype(np.intp)


def _default_state(model: mujoco.MjModel) -> npt.NDArray[np.float64]:
    """The state row that mj_resetData leaves."""
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(model, kind))
    mujoco.mj_getState(model, mujoco.MjData(model), state, kind)
    return state


def _start(
    model: mujoco.MjModel, num_envs: int, cpu_ids: Sequence[int] | None
) -> tuple[mujoco_batch.Batch, list[tuple[int, int | None]]]:
    """Build the batch; returns it and its workers' threads and CPUs, the calling thread first."""
    if cpu_ids is not None:
        check_cpu_ids(cpu_ids)
        confine_process(cpu_ids)  # the workers inherit it, so that they never run elsewhere
    cpus: Sequence[int | None] = [None] * len(allowed_cpus()) if cpu_ids is None else cpu_ids
    running = thread_ids()
    batch = mujoco_batch.Batch(model, num_envs, nthread=min(len(cpus), num_envs))
    workers = [threading.get_native_id(), *sorted(thread_ids() - running)]
    placement = list(zip(workers, cpus, strict=False))
    if cpu_ids is not None:
        assert len(workers) == batch.nthread, f"{batch.nthread} workers, but {len(workers)} threads appeared"
        for thread, cpu in zip(workers, cpu_ids, strict=False):
            confine(thread, (cpu,))
    return batch, placement


def _silence_warnings() -> None:
    if mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(_ignore)


def _ignore(message: str) -> None:
    """The rows count warnings; the text adds nothing."""
