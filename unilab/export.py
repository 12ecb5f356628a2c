"""`policy.onnx`: the deterministic actor of a checkpoint, checked against torch, with all that running it needs.

The graph maps observations `obs` (batch, O) to actions `action` (batch, A), float32, batch free. It holds everything
between the two, running statistics of batch norms included. Each value of the file's metadata is JSON.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unilab.atomic_file import write_atomically
from unilab.checkpoint import wrong_numbers
from unilab.config import RunConfig
from unilab.hardware import HostUnfit
from unilab.learner import Actor
from unilab.names import POLICY_FILE
from unilab.physics.mujoco_pool import load_model
from unilab.provenance import PACKAGE, git_facts, source_sha256
from unilab.tasks.velocity_task import VelocityTask

if TYPE_CHECKING:
    import onnx

FORMAT_VERSION = 1
OPSET = 18
TOLERANCE = 1e-4  # of an action in (-1, 1)
SCALES = (1.0, 1e3, 1e6)  # of the observations that are compared
ROWS = 1024  # of each scale
PACKAGES = ("onnx", "onnxscript", "onnxruntime")


class ExportError(RuntimeError):
    """The policy cannot be exported, or does not act as the actor does; no file was written."""


def missing_for_export() -> str | None:
    """One line if this host lacks a package that an export needs, else None; imports nothing."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if not missing:
        return None
    return f"{POLICY_FILE} needs {', '.join(missing)}: install what is missing, or type training.export_onnx=false"


def export_policy(config: RunConfig, checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write the policy of a checkpoint to `path`; the file is whole or absent, and replaces an older one.

    Args:
        config: the run's configuration.
        checkpoint: as `load_run` returns it.
        path: the file.

    Raises:
        HostUnfit: if a package is missing.
        ExportError: if the graph cannot be made, breaks a rule of ONNX or acts unlike the actor.
    """
    if (missing := missing_for_export()) is not None:
        raise HostUnfit(missing)
    task = config.build_task(1, torch.device("cpu"))
    actor = config.algo.build_actor(task.obs_dim, task.action_dim)
    actor.load_state_dict(checkpoint["actor"])
    export_actor(actor, task.obs_dim, describe_policy(config, task, checkpoint), path)


def describe_policy(config: RunConfig, task: VelocityTask, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What a deployer needs to know, as JSON values; everything about joints is in the order of `joints`."""
    model = load_model(task.spec)
    joints = [index for index in range(model.njnt) if model.jnt_qposadr[index] >= 7]
    actuators = [model.actuator_trnid[:, 0].tolist().index(joint) for joint in joints]
    kp, kd = (gains[actuators].tolist() for gains in task.middle_gains())
    return {
        "format_version": FORMAT_VERSION,
        "task": config.training.task_name,
        "algorithm": config.algo.algo,
        "iteration": checkpoint["iteration"],
        "env_steps": checkpoint["env_steps"],
        "git": git_facts(PACKAGE.parent),
        "source_sha256": source_sha256(),
        "observation": [_as_json(block) for block in task.observation_layout()],
        "joints": [model.joint(index).name for index in joints],
        "actuators": [model.actuator(index).name for index in actuators],
        "default_pose": task.joint_default.tolist(),
        "kp": kp,
        "kd": kd,
        "action_scale": config.env.action_scale,
        "control_rate": 1 / config.env.ctrl_dt,
        "timestep": task.spec.timestep,
        "decimation": task.spec.decimation,
        "scene": task.scene,
        "keyframe": task.keyframe,
        "gait": {"frequency": config.env.gait_frequency, "period": task.gait_period, "offsets": task.gait_offsets},
    }


def _as_json(block: Any) -> dict[str, Any]:
    columns = block.columns
    return {
        "name": block.name,
        "slice": [columns.start, columns.stop],
        "scale": block.scale,
        "sensor": block.sensor,
        "source": block.source,
    }


def export_actor(actor: Actor, obs_dim: int, metadata: Mapping[str, Any], path: Path) -> None:
    """Write an actor as one ONNX file, after comparing it with torch.

    Args:
        actor: a module on the CPU; it is put into evaluation mode.
        obs_dim: width of its observation.
        metadata: JSON values by name.
        path: the file.

    Raises:
        ExportError: as `export_policy`.
    """
    import onnx

    policy = _Policy(actor).eval()
    weights = {f"actor/{name}": value for name, value in actor.state_dict().items()}
    if (problem := wrong_numbers(weights, actor)) is not None:
        raise ExportError(f"no {path.name}: {problem}")
    model = _convert(policy, obs_dim, path.name)
    onnx.helper.set_model_props(model, {name: json.dumps(value) for name, value in metadata.items()})
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"no {path.name}: the graph is not valid ONNX: {_first_line(error)}") from error
    content = model.SerializeToString()
    _compare(policy, content, obs_dim, path.name)
    write_atomically(path, lambda file: file.write(content))


class _Policy(nn.Module):
    """The deterministic action as a forward pass."""

    def __init__(self, actor: Actor) -> None:
        super().__init__()
        self.actor = actor

    def forward(self, obs: Tensor) -> Tensor:
        return self.actor.deterministic(obs)


def _convert(policy: nn.Module, obs_dim: int, name: str) -> onnx.ModelProto:
    """The graph, without the source lines and paths that the exporter leaves in it."""
    try:
        with _quiet_exporter():
            program = torch.onnx.export(
                policy,
                (torch.zeros(2, obs_dim),),  # not one row: sizes of 1 are taken for constants
                dynamo=True,  # the older exporter is deprecated, and makes some 20 times the nodes of FlashSAC
                input_names=["obs"],
                output_names=["action"],
                dynamic_shapes={"obs": {0: torch.export.Dim("batch")}},
                opset_version=OPSET,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise ExportError(f"no {name}: torch cannot export this actor: {_cause(error)}") from error
    assert program is not None
    model = program.model_proto
    graph = model.graph
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    return model


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Within, torch's exporter says nothing of itself: it warns of its own deprecated calls and of torchvision."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _compare(policy: nn.Module, content: bytes, obs_dim: int, name: str) -> None:
    """Refuse a graph whose actions are not the actor's, on usual and extreme observations, many rows and one."""
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    rows = _probe_rows(obs_dim)
    for batch in (rows, rows[:1], rows[-1:]):
        with torch.no_grad():
            wanted = policy(batch)
        found = torch.from_numpy(session.run(["action"], {"obs": batch.numpy()})[0])
        if found.shape != wanted.shape:
            raise ExportError(f"no {name}: actions {tuple(found.shape)} where torch has {tuple(wanted.shape)}")
        if not (wanted.isfinite().all() and found.isfinite().all()):
            raise ExportError(f"no {name}: an action is not finite for observations up to {batch.abs().max():.0e}")
        apart = float((found - wanted).abs().max())
        if apart > TOLERANCE:
            raise ExportError(f"no {name}: its actions differ from torch's by {apart:.1e}, allowed are {TOLERANCE:.0e}")


def _probe_rows(obs_dim: int) -> Tensor:
    """Zeros first, then random rows of every scale, then all columns at plus and at minus every scale."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(ROWS, obs_dim, generator=generator)
    extremes = torch.tensor([sign * scale for scale in SCALES for sign in (1, -1)]).unsqueeze(1).expand(-1, obs_dim)
    return torch.cat((torch.zeros(1, obs_dim), *(scale * random for scale in SCALES), extremes))


def _cause(error: BaseException) -> str:
    """The first line of what an error came from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")
