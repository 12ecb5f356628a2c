"""The exported policy: its graph, its metadata, the refusals, and the example that runs it in plain MuJoCo."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from unilab import eval as evaluation
from unilab import export, requirements, train
from unilab.checkpoint import Checkpoint
from unilab.config import RunConfig, load_config
from unilab.environment import Environment
from unilab.episodes import Evaluation
from unilab.export import ExportError, describe_policy, export_actor, export_policy, missing_for_export
from unilab.hardware import HostUnfit
from unilab.learner import Actor
from unilab.physics.mujoco_pool import MujocoPool
from unilab.physics.spec import ROBOTS
from unilab.state import StateRegistry
from unilab.tasks.velocity_task import VelocityTask

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "run_policy.py"
CPU = torch.device("cpu")
ROUTES = [("sac", "g1_walk_flat"), ("flashsac", "go2_joystick_flat")]
COMMAND = (0.5, -0.3, 0.2)
# Episodes that all begin alike: at the keyframe, at rest, with gains in the middle of their range, without noise.
STILL = {
    "g1_walk_flat": ["env.gain_scale=[1.0,1.0]"],
    "go2_joystick_flat": [
        "env.kp=[35,35]",
        "env.kd=[0.5,0.5]",
        "env.base_mass_offset=[0,0]",
        "env.base_com_x_offset=[0,0]",
    ],
}
PLACED = [
    *(f"env.{name}=[0,0]" for name in ("reset_position_xy", "reset_yaw", "reset_linear_velocity")),
    "env.reset_angular_velocity=[0,0]",
    f"env.command_velocity_x=[{COMMAND[0]},{COMMAND[0]}]",
    f"env.command_velocity_y=[{COMMAND[1]},{COMMAND[1]}]",
    f"env.command_yaw_rate=[{COMMAND[2]},{COMMAND[2]}]",
]


class Exported:
    """A policy with drawn weights, as a run would leave it, and its file."""

    def __init__(self, algo: str, task: str, folder: Path) -> None:
        config = load_config(algo, task, "mujoco", ["algo.actor_hidden_dim=32", *STILL[task], *PLACED])
        quiet = dict.fromkeys(config.env.observation_noise, 0.0)
        self.config: RunConfig = replace(config, env=replace(config.env, observation_noise=quiet))
        self.task: VelocityTask = self.config.build_task(1, CPU)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.actor: Actor = config.algo.build_actor(self.task.obs_dim, self.task.action_dim)
            assert isinstance(self.actor, nn.Module)
            for name, value in self.actor.state_dict().items():
                drawn = 0.1 * torch.randn_like(value)
                value.add_(drawn.abs() if name.endswith("running_var") else drawn)
        self.path = folder / "policy.onnx"
        self.checkpoint = {"iteration": 7, "env_steps": 2**40 + 1, "actor": self.actor.state_dict()}
        export_policy(self.config, self.checkpoint, self.path)
        self.session = onnxruntime.InferenceSession(self.path, providers=["CPUExecutionProvider"])
        found = self.session.get_modelmeta().custom_metadata_map
        self.about: dict[str, Any] = {key: json.loads(value) for key, value in found.items()}


@pytest.fixture(scope="module", params=ROUTES, ids=["-".join(route) for route in ROUTES])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return Exported(*request.param, tmp_path_factory.mktemp("export"))


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_policy", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("rows", [1, 2, 3, 5000])
def test_the_graph_acts_as_the_actor_for_any_number_of_rows(exported: Exported, rows: int) -> None:
    obs = 3 * torch.randn(rows, exported.task.obs_dim, generator=torch.Generator().manual_seed(rows))
    (found,) = exported.session.run(None, {"obs": obs.numpy()})
    with torch.no_grad():
        wanted = exported.actor.deterministic(obs)
    assert wanted.abs().max() > 0.1  # these weights do act
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=0, atol=2e-6)


def test_the_interface_is_named_free_in_the_batch_and_small(exported: Exported) -> None:
    model = onnx.load(exported.path)
    (obs,), (action,) = model.graph.input, model.graph.output
    shapes = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in (obs, action)]
    assert (obs.name, action.name) == ("obs", "action")
    assert shapes == [["batch", exported.task.obs_dim], ["batch", exported.task.action_dim]]
    assert {v.type.tensor_type.elem_type for v in (obs, action)} == {onnx.TensorProto.FLOAT}
    assert [(item.domain, item.version) for item in model.opset_import] == [("", 18)]
    assert len(model.graph.node) < 80
    assert [path.name for path in exported.path.parent.iterdir()] == ["policy.onnx"]  # no data beside it


def test_no_path_of_this_machine_is_in_the_file(exported: Exported) -> None:
    content = exported.path.read_bytes()
    assert str(ROOT).encode() not in content
    assert b".py" not in content


def test_the_metadata_says_how_to_run_it(exported: Exported) -> None:
    about, task = exported.about, exported.task
    assert (about["format_version"], about["iteration"], about["env_steps"]) == (1, 7, 2**40 + 1)
    assert (about["task"], about["algorithm"]) == (exported.config.training.task_name, exported.config.algo.algo)
    assert about["control_rate"] == 50
    assert about["timestep"] * about["decimation"] == pytest.approx(0.02)
    assert set(about["git"]) == {"commit", "dirty", "diff_sha256"}
    assert len(about["source_sha256"]) == 64
    for name in ("joints", "actuators", "default_pose", "kp", "kd"):
        assert len(about[name]) == task.action_dim
    slices = [block["slice"] for block in about["observation"]]
    assert [start for start, _ in slices] == [0, *(stop for _, stop in slices[:-1])]
    assert slices[-1][1] == task.obs_dim


def described(task: str) -> dict[str, Any]:
    config = load_config("sac", task, "mujoco", [])
    return describe_policy(config, config.build_task(1, CPU), {"iteration": 1, "env_steps": 2})


def test_numbers_of_the_g1() -> None:
    about = described("g1_walk_flat")
    assert about["joints"][3] == about["actuators"][3] == "left_knee_joint"
    assert about["default_pose"][3] == pytest.approx(0.669)
    assert (about["kp"][3], about["kd"][3]) == pytest.approx((99.098, 6.309))
    assert about["observation"][0] == {
        "name": "base_ang_vel",
        "slice": [0, 3],
        "scale": 0.25,
        "sensor": "torso_gyro",
        "source": "the sensor, rad/s",
    }
    assert about["gait"] == {"frequency": 1.5, "period": 2 * np.pi, "offsets": (0.0, np.pi)}
    assert about["action_scale"] == 1.0


def test_joints_of_the_go2_are_in_the_order_of_its_actions_not_of_its_actuators() -> None:
    about = described("go2_joystick_flat")
    assert about["joints"][:4] == ["FL_hip_joint", "FL_thigh_joint", "FL_calf_joint", "FR_hip_joint"]
    assert about["actuators"][:4] == ["FL_hip", "FL_thigh", "FL_calf", "FR_hip"]
    assert (about["kp"][0], about["kd"][0]) == (35.0, 0.5)  # the file of the robot has no damping
    assert about["gait"] == {"frequency": 2.0, "period": 1.0, "offsets": (0.0, 0.5, 0.5, 0.0)}
    assert about["action_scale"] == 0.4


@pytest.mark.parametrize("name", ["base_ang_vel", "projected_gravity", "joint_pos", "joint_vel", "actions", "command"])
def test_the_layout_is_that_of_the_observation(exported: Exported, name: str) -> None:
    task = exported.task
    (block,) = (block for block in task.observation_layout() if block.name == name)
    physics = task.fields(task.idle_row.unsqueeze(0).clone())
    action, command, phase = torch.zeros(1, task.action_dim), torch.zeros(1, 3), torch.zeros(1, task.phase_dim)
    base = task.critic_observation(physics, action, command, phase)[0, : task.obs_dim]
    source = {
        "joint_pos": physics["qpos"][:, 7:],
        "joint_vel": physics["qvel"][:, 6:],
        "actions": action,
        "command": command,
    }
    moved = physics[block.sensor] if block.sensor is not None else source[name]
    moved += 1 + torch.arange(moved.shape[1])
    change = task.critic_observation(physics, action, command, phase)[0, : task.obs_dim] - base
    expected = torch.zeros(task.obs_dim)
    sign = -1 if name == "projected_gravity" else 1
    expected[block.columns] = sign * block.scale * (1 + torch.arange(moved.shape[1]))
    torch.testing.assert_close(change, expected, rtol=1e-6, atol=1e-6)


def test_the_gait_is_that_of_the_observation(exported: Exported) -> None:
    task, gait = exported.task, exported.about["gait"]
    phase = task.reset_phase(torch.zeros(1, task.uniform_width), torch.zeros(1, task.phase_dim))
    for _ in range(40):  # more than a cycle
        phase = task.advance_phase(phase)
    expected = (np.array(gait["offsets"]) + 0.8 * gait["frequency"] * gait["period"]) % gait["period"]
    around = np.abs(task.observed_phase(phase)[0].numpy() - expected)
    assert np.minimum(around, gait["period"] - around).max() < 1e-4


def test_the_example_sees_and_does_what_the_trainers_environment_does(exported: Exported) -> None:
    task = exported.task
    environment = Environment(task, 1, CPU, torch.Generator(), StateRegistry())
    pool = MujocoPool(task.spec, 1)
    if task.push_interval is not None:
        environment.ticks.fill_(1)  # no push is due
    environment.restart(torch.ones(1, dtype=torch.bool))  # all draws are 0
    scene = ROBOTS / task.scene
    steps = 0
    for _, obs, action in islice(load_example().rollout(exported.path, str(scene), COMMAND, 1.0), 6):
        np.testing.assert_allclose(obs, environment.obs[0].numpy(), rtol=1e-5, atol=1e-5, err_msg=f"step {steps}")
        with torch.no_grad():
            environment.control(exported.actor.deterministic(environment.obs))
        np.testing.assert_allclose(action, environment.actions[0].numpy(), rtol=0, atol=1e-5)
        pool.apply(environment.ctrl.numpy(), environment.codes.numpy(), environment.reset_rows.numpy())
        pool.step()
        pool.pack(environment.fields.numpy())
        environment.complete()
        assert not environment.finished.any()
        environment.restart(environment.finished)
        steps += 1
    assert steps == 6  # later the rounding of targets to float32 parts the two
    assert environment.actions.abs().max() > 0.05


def test_the_example_is_a_program_without_this_project(exported: Exported) -> None:
    command = [
        sys.executable,
        "-W",
        "error",
        str(EXAMPLE),
        str(exported.path),
        str(ROBOTS / exported.task.scene),
        "0.2",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.startswith("after 0.2 s: ")
    text = EXAMPLE.read_text()
    assert "unilab" not in text and "torch" not in text


class Faulty(nn.Module):
    """An actor of one layer that misbehaves in one way."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.layer = nn.Linear(3, 2)
        nn.init.constant_(self.layer.weight, 1e-9)
        if fault == "weight":
            nn.init.constant_(self.layer.bias, float("nan"))

    def deterministic(self, obs: Tensor) -> Tensor:
        action = torch.tanh(self.layer(obs))
        if self.fault == "mismatch" and torch.compiler.is_exporting():
            return action + 2e-4
        if self.fault == "large":  # differs where observations are large alone
            return action + (1e-3 * obs[:, :2] / 1e6 if torch.compiler.is_exporting() else 0.0)
        if self.fault == "overflow":
            return action + (obs[:, :2] * 1e35)
        if self.fault == "reads" and obs.sum().item() > 0:
            return -action
        return action


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("mismatch", "its actions differ from torch's by 2.0e-04, allowed are 1e-04"),
        ("large", "its actions differ from torch's by"),
        ("overflow", "an action is not finite for observations up to"),
        ("weight", "actor/layer.bias has values that are not finite"),
        ("reads", "torch cannot export this actor: "),
    ],
)
def test_a_policy_that_is_wrong_leaves_no_file(tmp_path: Path, fault: str, message: str) -> None:
    with pytest.raises(ExportError, match=message) as caught:
        export_actor(Faulty(fault), 3, {}, tmp_path / "policy.onnx")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_policy_does_not_replace_an_older_one(tmp_path: Path) -> None:
    (tmp_path / "policy.onnx").write_bytes(b"older")
    with pytest.raises(ExportError):
        export_actor(Faulty("mismatch"), 3, {}, tmp_path / "policy.onnx")
    assert (tmp_path / "policy.onnx").read_bytes() == b"older"


def test_modules_are_exported_in_evaluation_mode(tmp_path: Path) -> None:
    class Dropping(Faulty):
        def deterministic(self, obs: Tensor) -> Tensor:
            return nn.functional.dropout(torch.ones_like(obs), 0.5, self.training)

    export_actor(Dropping("").train(), 3, {}, tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    (found,) = session.run(None, {"obs": np.zeros((4, 3), np.float32)})
    np.testing.assert_array_equal(found, np.ones((4, 3)))


def test_a_missing_package_is_named_with_what_to_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert missing_for_export() is None
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == "onnxscript" else object())
    line = "policy.onnx needs onnxscript: install what is missing, or type training.export_onnx=false"
    assert missing_for_export() == line
    with pytest.raises(HostUnfit, match="needs onnxscript"):
        export_policy(load_config("sac", "g1_walk_flat", "mujoco", []), {}, tmp_path / "policy.onnx")


def test_a_host_without_the_packages_does_not_begin_to_train(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    run = ["--algo", "sac", "--task", "g1_walk_flat", "--sim", "mujoco", "training.smoke=true"]
    assert train.main([*run, f"training.log_dir={tmp_path / 'run'}"]) == 3
    error = capfd.readouterr().err
    assert error.startswith("train: policy.onnx needs onnx, onnxscript, onnxruntime: ")
    assert "training.export_onnx=false" in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("override", ["training.export_onnx=false", "training.no_play=true"])
def test_who_wants_no_policy_needs_no_package(monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    requirements.require_packages(load_config("sac", "g1_walk_flat", "mujoco", [override]))


@pytest.mark.parametrize(
    ("overrides", "failure", "code", "written"),
    [
        ([], None, 0, True),
        (["training.export_onnx=false"], None, 0, False),
        (["training.no_play=true"], None, 0, False),
        ([], ExportError("no policy.onnx: reason"), 1, True),
        ([], HostUnfit("policy.onnx needs onnx"), 3, True),
        ([], OSError("read-only file system"), 1, True),
    ],
)
def test_eval_exports_after_the_evaluation(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    overrides: list[str],
    failure: Exception | None,
    code: int,
    written: bool,
) -> None:
    paths: list[Path] = []

    def note(config: RunConfig, checkpoint: Mapping[str, Any], path: Path) -> None:
        paths.append(path)
        if failure is not None:
            raise failure

    config = load_config("sac", "g1_walk_flat", "mujoco", overrides)
    loaded = Checkpoint(tmp_path / "model_1.pt", "0" * 64, {"iteration": 1, "env_steps": 2})
    result = Evaluation([1.0], [1], [False], *([0.0] for _ in range(4)))  # type: ignore[arg-type]
    monkeypatch.setattr("unilab.checkpoint.load_run", lambda *_: (config, loaded))
    monkeypatch.setattr("unilab.episodes.evaluate", lambda *_: result)
    monkeypatch.setattr("unilab.video.find_renderer", lambda: "egl")
    monkeypatch.setattr(evaluation, "record_video", lambda *_: None)
    monkeypatch.setattr(export, "export_policy", note)
    names = ["--algo", "sac", "--task", "g1_walk_flat", "--sim", "mujoco"]
    assert evaluation.main([*names, "--load-run", str(tmp_path)]) == code
    assert paths == ([tmp_path / "policy.onnx"] if written else [])
    printed = capsys.readouterr()
    reason = str(failure).removeprefix("no policy.onnx: ")
    assert printed.err == (f"eval: policy.onnx: {reason}\n" if failure is not None else "")
    assert ("wrote " in printed.out and "policy.onnx\n" in printed.out) == (written and failure is None)


def test_every_key_of_the_metadata_is_documented(exported: Exported) -> None:
    table = (ROOT / "docs" / "deploy.md").read_text().partition("## The metadata")[2]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(exported.about)
