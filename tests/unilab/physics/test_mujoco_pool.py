"""The pool against a plain mj_step loop, its refusals, its warnings and its threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import numpy.typing as npt
import pytest

from unilab.physics import mujoco_pool, pinning
from unilab.physics.mujoco_pool import MujocoPool, load_model
from unilab.physics.spec import KEEP, PROFILES, RESET, SET_VELOCITY, PhysicsSpec

ENVS, STEPS = 16, 20
SENSORS = (
    ("torso_gyro", 3),
    ("torso_upvector", 3),
    ("pelvis_local_linvel", 3),
    ("left_foot_quat", 4),
    ("right_foot_quat", 4),
    ("left_foot_pos", 3),
    ("right_foot_pos", 3),
)
G1 = PhysicsSpec("unitree_g1/scene_flat.xml", 1 / 150, 3, "exact", 36, 35, 29, SENSORS, (("kp", 29), ("kd", 29)))
ARRAY = npt.NDArray[Any]


@pytest.fixture(autouse=True)
def _private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def model() -> mujoco.MjModel:
    return load_model(G1)


def reset_rows(model: mujoco.MjModel, rng: np.random.Generator, count: int) -> ARRAY:
    """Standing poses with random yaw, root velocity and gains (+-10 %)."""
    rows = np.empty((count, G1.reset_width), np.float32)
    yaw = rng.uniform(-np.pi, np.pi, count)
    rows[:, :36] = model.key_qpos[0]
    rows[:, 3], rows[:, 6] = np.cos(yaw / 2), np.sin(yaw / 2)
    rows[:, 36:71] = 0
    rows[:, 36:42] = rng.uniform(-0.5, 0.5, (count, 6))
    rows[:, 71:100] = model.actuator_gainprm[:, 0] * rng.uniform(0.9, 1.1, (count, 29))
    rows[:, 100:] = -model.actuator_biasprm[:, 2] * rng.uniform(0.9, 1.1, (count, 29))
    return rows


def script(model: mujoco.MjModel, seed: int, steps: int = STEPS, envs: int = ENVS) -> list[tuple[ARRAY, ARRAY, ARRAY]]:
    """Commands of one run: every row reset first, then about one row in five reset and one in five pushed."""
    rng = np.random.default_rng(seed)
    commands = []
    for step in range(steps):
        codes = rng.choice([KEEP, RESET, SET_VELOCITY], envs, p=[0.6, 0.2, 0.2]).astype(np.int32)
        codes = np.full(envs, RESET, np.int32) if step == 0 else codes
        rows = reset_rows(model, rng, envs)
        rows[codes == KEEP] = np.nan  # must never be read
        rows[codes == SET_VELOCITY, :36] = np.nan
        rows[codes == SET_VELOCITY, 71:] = np.nan
        ctrl = (model.key_ctrl[0] + rng.normal(0, 0.3, (envs, 29))).astype(np.float32)
        commands.append((ctrl, codes, rows))
    return commands


def play(pool: MujocoPool, commands: list[tuple[ARRAY, ARRAY, ARRAY]]) -> list[ARRAY]:
    """Packed rows after every command."""
    packed = []
    for command in commands:
        pool.apply(*command)
        pool.step()
        out = np.full((len(command[1]), G1.width), np.nan, np.float32)
        pool.pack(out)
        packed.append(out)
    return packed


def oracle(spec: PhysicsSpec, commands: list[tuple[ARRAY, ARRAY, ARRAY]]) -> ARRAY:
    """qpos, qvel and all sensors after every command, (steps, N, 36 + 35 + 49), by mj_step on one MjData."""
    model = load_model(spec)
    data = mujoco.MjData(model)
    envs = len(commands[0][1])
    states = np.empty((len(commands), envs, 36 + 35 + model.nsensordata))
    for env in range(envs):
        mujoco.mj_resetData(model, data)
        for step, (ctrl, codes, rows) in enumerate(commands):
            row = rows[env].astype(np.float64)
            if codes[env] == RESET:
                mujoco.mj_resetData(model, data)
                data.qpos, data.qvel = row[:36], row[36:71]
                model.actuator_gainprm[:, 0], model.actuator_biasprm[:, 1] = row[71:100], -row[71:100]
                model.actuator_biasprm[:, 2] = -row[100:]
            elif codes[env] == SET_VELOCITY:
                data.qvel = row[36:71]
            data.ctrl = ctrl[env]
            for _ in range(spec.decimation):
                mujoco.mj_step(model, data)
            states[step, env] = np.concatenate([data.qpos, data.qvel, data.sensordata])
    return states


def states_of(pool: MujocoPool) -> ARRAY:
    batch = pool._batch
    return np.concatenate([batch.bind("qpos"), batch.bind("qvel"), batch.bind("sensordata")], axis=1)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_pool_has_the_bits_of_a_plain_loop(model: mujoco.MjModel, profile: str) -> None:
    spec = replace(G1, profile=profile)
    commands = script(model, seed=1)
    expected = oracle(spec, commands)
    pool = MujocoPool(spec, ENVS)
    sensors = np.concatenate([np.arange(n) + 71 + model.sensor(name).adr[0] for name, n in SENSORS])
    for command, states in zip(commands, expected, strict=True):
        packed = play(pool, [command])[0]
        assert states_of(pool).tobytes() == states.tobytes()
        assert np.array_equal(packed[:, :71], states[:, :71].astype(np.float32))
        assert np.array_equal(packed[:, 71:94], states[:, sensors].astype(np.float32))
        assert not packed[:, 94].any()


def test_threads_do_not_change_the_bits(model: mujoco.MjModel, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = script(model, seed=2)
    rows = []
    for workers in (1, 2):
        monkeypatch.setattr(mujoco_pool, "allowed_cpus", lambda workers=workers: list(range(workers)))
        pool = MujocoPool(G1, ENVS)
        assert len(pool.placement) == workers
        rows.append(np.stack(play(pool, commands)))
    assert rows[0].tobytes() == rows[1].tobytes()


def spread(model: mujoco.MjModel, profile: str, steps: int) -> ARRAY:
    """Largest difference of qpos to the reference profile per simulation, after `steps` from standing."""
    commands = script(model, seed=3, steps=steps, envs=64)
    commands = [commands[0], *((ctrl, np.zeros(64, np.int32), rows) for ctrl, _, rows in commands[1:])]
    pools = [MujocoPool(replace(G1, profile=name), 64) for name in ("reference", profile)]
    for pool in pools:
        play(pool, commands)
    a, b = (pool._batch.bind("qpos") for pool in pools)
    return np.asarray(np.abs(a - b).max(axis=1))


def test_the_exact_profile_is_the_reference_to_round_off(model: mujoco.MjModel) -> None:
    # Other sums in the same equations: 15 control steps (45 physics steps) were measured to drift by 4e-15 rad.
    assert spread(model, "exact", 15).max() < 1e-13


def test_the_fast_profile_is_the_reference_to_the_tolerance_of_the_solver(model: mujoco.MjModel) -> None:
    # Newton stops at an improvement of 1e-8 from another start: where a contact is near its edge that is worth
    # microradians (measured: 4e-6 at most), elsewhere round-off.
    difference = spread(model, "fast", 3)
    assert np.median(difference) < 1e-13
    assert difference.max() < 5e-5


def test_the_profiles_differ_in_solver_options_only() -> None:
    flags, jacobians = {}, {}
    for profile in PROFILES:
        option = load_model(replace(G1, profile=profile, timestep=0.005)).opt
        flags[profile], jacobians[profile] = option.disableflags, option.jacobian
        assert option.timestep == 0.005
        assert option.integrator == mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    island, warmstart = mujoco.mjtDisableBit.mjDSBL_ISLAND, mujoco.mjtDisableBit.mjDSBL_WARMSTART
    assert flags == {"reference": 0, "exact": island, "fast": island | warmstart}
    auto, sparse = mujoco.mjtJacobian.mjJAC_AUTO, mujoco.mjtJacobian.mjJAC_SPARSE
    assert jacobians == {"reference": auto, "exact": sparse, "fast": sparse}


@pytest.fixture
def pool() -> MujocoPool:
    return MujocoPool(G1, 4)


def standing(model: mujoco.MjModel, envs: int = 4) -> tuple[ARRAY, ARRAY, ARRAY]:
    """A command that resets every row to the keyframe with the model's own gains."""
    rows = np.zeros((envs, G1.reset_width), np.float32)
    rows[:, :36] = model.key_qpos[0]
    rows[:, 71:100], rows[:, 100:] = model.actuator_gainprm[:, 0], -model.actuator_biasprm[:, 2]
    ctrl = np.tile(model.key_ctrl[0].astype(np.float32), (envs, 1))
    return ctrl, np.full(envs, RESET, np.int32), rows


def keep(command: tuple[ARRAY, ARRAY, ARRAY]) -> tuple[ARRAY, ARRAY, ARRAY]:
    ctrl, codes, rows = command
    return ctrl, np.zeros_like(codes), np.full_like(rows, np.nan)


def test_a_reset_leaves_what_mj_reset_data_leaves(model: mujoco.MjModel, pool: MujocoPool) -> None:
    command = standing(model)
    play(pool, [command, keep(command)])
    pool._batch.bind("xfrc_applied")[:] = 7
    pool._batch.bind("qfrc_applied")[:] = 7
    pool.apply(*command)
    data = mujoco.MjData(model)
    data.qpos[:] = command[2][0, :36]
    data.ctrl[:] = command[0][0]
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    expected = np.empty(mujoco.mj_stateSize(model, kind))
    mujoco.mj_getState(model, data, expected, kind)
    assert np.array_equal(pool._batch.state, np.tile(expected, (4, 1)))


def test_gains_of_a_reset_row_are_those_of_its_simulation_only(model: mujoco.MjModel, pool: MujocoPool) -> None:
    ctrl, codes, rows = standing(model)
    rows[2, 71:100], rows[2, 100:] = 3, 0.5
    pool.apply(ctrl, codes, rows)
    for env in (0, 2):
        one = pool._batch.get_model(env)
        kp, kd = (np.full(29, 3), np.full(29, 0.5)) if env == 2 else (rows[0, 71:100], rows[0, 100:])
        assert np.array_equal(one.actuator_gainprm[:, 0], kp)
        assert np.array_equal(one.actuator_biasprm[:, :3], np.stack([np.zeros(29), -kp, -kd], axis=1))


def test_constants_of_the_model_do_not_derive_from_servo_gains() -> None:
    assert not {"actuator_gainprm", "actuator_biasprm"} & set(mujoco.MjModel._setconst_inputs)


def test_a_velocity_row_changes_qvel_alone(model: mujoco.MjModel, pool: MujocoPool) -> None:
    command = standing(model)
    play(pool, [command])
    before = pool._batch.state.copy()
    ctrl, codes, rows = keep(command)
    codes[1] = SET_VELOCITY
    rows[1, 36:71] = np.arange(35) / 4  # exact in float32
    pool.apply(ctrl, codes, rows)
    qvel = pool._batch.bind("qvel")
    assert np.array_equal(qvel[1], np.arange(35) / 4)
    qvel[1] = before[1, 37:72]
    assert np.array_equal(pool._batch.state, before)


def test_only_coded_rows_are_read(model: mujoco.MjModel, pool: MujocoPool) -> None:
    command = standing(model)
    play(pool, [command])
    ctrl, codes, rows = keep(command)
    codes[3], rows[3] = RESET, command[2][3]
    pool.apply(ctrl, codes, rows)
    assert np.isfinite(pool._batch.state).all()
    assert np.isfinite(pool._batch.expand("actuator_biasprm")).all()
    assert pool._batch.bind("time").tolist() == pytest.approx([0.02, 0.02, 0.02, 0])


def test_the_length_of_a_reset_quaternion_does_not_matter(model: mujoco.MjModel, pool: MujocoPool) -> None:
    ctrl, codes, rows = standing(model)
    rows[:, 3], rows[:, 6] = np.cos(0.7), np.sin(0.7)
    rows[1, 3:7] *= np.float32(1 + 1e-6)
    rows[2, 3:7] *= 2
    play(pool, [(ctrl, codes, rows)])
    qpos = pool._batch.bind("qpos")
    # float32 scaled once more by 1 + 1e-6 is off by half a unit in the last place, 6e-8; doubling is exact.
    assert np.abs(qpos[1] - qpos[0]).max() < 1e-7
    assert np.abs(qpos[2] - qpos[0]).max() < 1e-14
    assert np.abs(np.linalg.norm(qpos[:, 3:7], axis=1) - 1).max() < 1e-15


def test_unknown_row_codes_are_refused(model: mujoco.MjModel, pool: MujocoPool) -> None:
    ctrl, codes, rows = standing(model)
    codes[0] = 5
    with pytest.raises(ValueError, match=r"row codes are 0, 1 and 2, found \[1, 5\]"):
        pool.apply(ctrl, codes, rows)


def test_bad_physics_is_counted_in_its_row_and_writes_no_file(
    model: mujoco.MjModel, pool: MujocoPool, capfd: pytest.CaptureFixture[str]
) -> None:
    command = standing(model)
    play(pool, [command])
    for _ in range(2):  # the counter of the engine is one both times
        pool._batch.bind("qpos")[1, 7] = np.nan
        pool._batch.bind("qvel")[2] = 1e12
        packed = play(pool, [keep(command)])[0]
        assert (packed[:, 94] > 0).tolist() == [False, True, True, False]
    assert play(pool, [keep(command)])[0][:, 94].tolist() == [0, 0, 0, 0]
    assert list(Path.cwd().iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_an_explosion_is_counted(model: mujoco.MjModel, pool: MujocoPool) -> None:
    ctrl, codes, rows = standing(model)
    rows[0, 71:100] = 1e9  # a servo far stiffer than the step allows
    rows[0, 100:] = -1e9
    seen = sum(packed[:, 94] for packed in play(pool, [(ctrl, codes, rows), *[keep((ctrl, codes, rows))] * 10]))
    assert np.asarray(seen > 0).tolist() == [True, False, False, False]


def test_warnings_without_bad_physics_do_not_count(model: mujoco.MjModel, pool: MujocoPool) -> None:
    pool._batch.warning[:, int(mujoco.mjtWarning.mjWARN_INERTIA), 1] = 3
    pool._batch.warning[2, int(mujoco.mjtWarning.mjWARN_BADQACC), 1] = 3
    out = np.empty((4, G1.width), np.float32)
    pool.pack(out)
    assert out[:, 94].tolist() == [0, 0, 3, 0]


def test_a_simulation_in_which_the_engine_raises_keeps_its_state(model: mujoco.MjModel, pool: MujocoPool) -> None:
    command = standing(model)
    play(pool, [command])
    pool._batch.expand("opt.integrator")[1] = 99
    before = pool._batch.state.copy()
    packed = play(pool, [keep(command)])[0]
    assert packed[:, 94].tolist() == [0, 1, 0, 0]
    assert np.array_equal(pool._batch.state[1], before[1])
    assert not np.array_equal(pool._batch.state[0], before[0])
    assert "simulation 1" in str(pool.failure)
    pool.pack(packed)
    assert packed[:, 94].tolist() == [0, 0, 0, 0]


def test_an_infinite_state_packs_without_a_warning(pool: MujocoPool) -> None:
    pool._batch.bind("qpos")[0, 0] = 1e300
    out = np.empty((4, G1.width), np.float32)
    pool.pack(out)
    assert np.isinf(out[0, 0])


def test_a_warning_handler_of_the_process_is_kept(model: mujoco.MjModel, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    mujoco.set_mju_user_warning(heard.append)
    try:
        pool = MujocoPool(G1, 4)
        command = standing(model)
        play(pool, [command])
        pool._batch.bind("qpos")[1, 7] = np.nan
        pool.step()
    finally:
        mujoco.set_mju_user_warning(None)
    assert len(heard) == 1
    assert "QPOS" in heard[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"profile": "quick"}, "env.physics_profile=quick; use one of reference, exact, fast"),
        ({"scene": "unitree_g1/scene.xml"}, "no scene unitree_g1/scene.xml; there are: .*unitree_g1/scene_flat.xml"),
        ({"timestep": 0.0}, "timestep 0.0 s and decimation 3: both must be positive"),
        ({"decimation": 0}, "decimation 0"),
        ({"nq": 35}, "nq=35, but unitree_g1/scene_flat.xml has 36"),
        ({"nv": 36}, "nv=36, but .* has 35"),
        ({"nu": 12}, "nu=12, but .* has 29"),
        ({"sensors": (("nose_gyro", 3),)}, "no sensor nose_gyro in .*; there are: pelvis_local_linvel, "),
        ({"sensors": (("left_foot_quat", 3),)}, "sensor left_foot_quat has 4 values in .*, not 3"),
        ({"model_fields": (("mass", 30),)}, "no model field mass in .*; there are: kp, kd"),
        ({"model_fields": (("kp", 28),)}, "model field kp has 29 values in .*, not 28"),
    ],
)
def test_a_spec_that_does_not_fit_the_robot_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MujocoPool(replace(G1, **change), 2)


def test_no_simulations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"algo\.num_envs=0; use 1 or more"):
        MujocoPool(G1, 0)


def test_the_engine_is_named(pool: MujocoPool) -> None:
    assert pool.mujoco_version == mujoco.__version__
    assert pool.mujoco_version.startswith("4.0.")


linux = pytest.mark.skipif(not pinning.LINUX, reason="thread masks are a Linux feature")


@linux
@pytest.mark.parametrize(
    ("cpu_ids", "message"),
    [
        ([], r"env.cpu_ids=\[\] names no CPU"),
        ([0, 1, 0], r"env.cpu_ids=\[0, 1, 0\] names CPU 0 twice"),
        ([0, 63], r"env.cpu_ids=\[0, 63\] names CPU 63, which this process may not use; allowed: \[0, 1\]"),
    ],
)
def test_cpu_lists_that_cannot_hold_are_refused(
    cpu_ids: list[int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "allowed_cpus", lambda: [0, 1])
    before = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match=message):
        MujocoPool(G1, 4, cpu_ids)
    assert os.sched_getaffinity(0) == before


@linux
def test_a_mask_that_the_kernel_narrows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {3})
    with pytest.raises(ValueError, match="cannot pin thread 17 to CPU 3, 5: the kernel kept CPU 3"):
        pinning.confine(17, [5, 3])


@linux
def test_a_mask_that_the_kernel_refuses_names_the_cpu() -> None:
    with pytest.raises(ValueError, match=r"cannot pin thread \d+ to CPU 1020: Invalid argument"):
        pinning.confine(os.getpid(), [1020])


def test_pinning_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "LINUX", False)
    with pytest.raises(ValueError, match=r"env.cpu_ids=\[0\]: pinning needs Linux"):
        MujocoPool(G1, 4, [0])


PINNED = """
import json, os, sys, threading
import numpy as np
from pathlib import Path
done = threading.Event()
bystander = threading.Thread(target=done.wait)
bystander.start()
sys.path.insert(0, sys.argv[1])
from test_mujoco_pool import G1
from unilab.physics.mujoco_pool import MujocoPool
cpu_ids = json.loads(sys.argv[2])
pool = MujocoPool(G1, int(sys.argv[3]), cpu_ids)
pool.step()
status = {int(task.name): (task / "status").read_text() for task in Path("/proc/self/task").iterdir()}
masks = {tid: text.split("Cpus_allowed_list:")[1].split()[0] for tid, text in status.items()}
print(json.dumps({"main": threading.get_native_id(), "placement": pool.placement, "masks": masks,
                  "bystander": bystander.native_id, "torch": "torch" in sys.modules}))
done.set()
"""


def in_subprocess(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, so that this one keeps its masks and its modules."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def pinned_process(cpu_ids: list[int], envs: int) -> dict[str, Any]:
    result = in_subprocess(PINNED, str(Path(__file__).parent), json.dumps(cpu_ids), str(envs))
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout))


two_cpus = pytest.mark.skipif(len(pinning.allowed_cpus()) < 2, reason="needs two CPUs")


@linux
@two_cpus
def test_workers_sit_on_their_cpus_and_everything_else_on_the_list() -> None:
    first, second = pinning.allowed_cpus()[:2]
    before = os.sched_getaffinity(0)
    found = pinned_process([second, first], 8)
    (main, main_cpu), (worker, worker_cpu) = found["placement"]
    assert (main, main_cpu, worker_cpu) == (found["main"], second, first)
    masks = {int(thread): mask for thread, mask in found["masks"].items()}
    assert masks.pop(main) == str(second)
    assert masks.pop(worker) == str(first)
    assert found["bystander"] in masks
    assert set(masks.values()) <= {f"{first}-{second}", f"{first},{second}"}
    assert os.sched_getaffinity(0) == before
    assert not found["torch"]


@linux
@two_cpus
def test_there_are_no_more_workers_than_simulations() -> None:
    first, second = pinning.allowed_cpus()[:2]
    found = pinned_process([second, first], 1)
    assert found["placement"] == [[found["main"], second]]


@linux
@two_cpus
def test_threads_that_ran_before_are_confined_to_the_list() -> None:
    last = pinning.allowed_cpus()[-1]
    found = pinned_process([last], 8)
    assert str(found["bystander"]) in found["masks"]
    assert set(found["masks"].values()) == {str(last)}


@linux
def test_without_a_list_no_mask_changes() -> None:
    before = {thread: os.sched_getaffinity(thread) for thread in pinning.thread_ids()}
    pool = MujocoPool(G1, 2)
    assert len(pool.placement) == min(2, len(pinning.allowed_cpus()))
    assert all(cpu is None for _, cpu in pool.placement)
    assert {thread: os.sched_getaffinity(thread) for thread in before} == before


@pytest.mark.parametrize("asked", [None, "nonsense", "glfw"])
def test_the_pool_imports_no_renderer_and_leaves_what_was_asked_for(
    asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    code = "import os, sys, unilab.physics.mujoco_pool; print(os.environ.get('MUJOCO_GL'), 'glfw' in sys.modules)"
    result = in_subprocess(code, **({} if asked is None else {"MUJOCO_GL": asked}))
    assert (result.stdout.split(), result.stderr) == ([str(asked), "False"], "")
