"""The configuration of a run: Hydra's override grammar over typed schemas, and every refusal a key can cause."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_origin

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException

from unilab.algorithm import AlgoConfig
from unilab.flash_sac.config import FlashSacConfig
from unilab.names import AUTO_TRANSPORT, TRANSPORT_KEY
from unilab.sac.config import SacConfig
from unilab.tasks.g1_walk_flat_config import G1WalkFlatConfig, G1WalkFlatRewards
from unilab.tasks.go2_joystick_flat_config import Go2JoystickFlatConfig, Go2JoystickFlatRewards
from unilab.tasks.velocity_task_config import RewardWeights, VelocityTaskConfig
from unilab.transport import FORMS
from unilab.validation import require

if TYPE_CHECKING:
    import torch

    from unilab.tasks.velocity_task import VelocityTask


class TaskSchema(NamedTuple):
    """What the configuration knows of a task.

    Attributes:
        name: `training.task_name`.
        env: numbers of the task.
        reward: its reward weights.
    """

    name: str
    env: type[VelocityTaskConfig]
    reward: type[RewardWeights]


CONF = Path(__file__).parent / "conf"
ALGORITHMS: dict[str, type[AlgoConfig]] = {"sac": SacConfig, "flashsac": FlashSacConfig}
TASKS = {
    "g1_walk_flat": TaskSchema("G1WalkFlat", G1WalkFlatConfig, G1WalkFlatRewards),
    "go2_joystick_flat": TaskSchema("Go2JoystickFlat", Go2JoystickFlatConfig, Go2JoystickFlatRewards),
}
BACKENDS = ("mujoco",)
LOGGERS = ("tensorboard", "wandb", "none")
WANDB_MODES = (None, "online", "offline", "disabled")
NESTED = "for two ranks type {key}=[[2,3],[4,5]]"
TRANSPORTS = (AUTO_TRANSPORT, *FORMS)
GROUPS = ("algo", "training", "env", "reward")
MAX_STATES = 1000
NEAR = 0.85  # share of equal letters from which a name is suggested: below, keys of one group look alike
PLAYBACK = tuple(f"training.{name}" for name in ("no_play", "export_onnx", "play_env_num", "play_steps"))


@dataclass
class TrainingConfig:
    """`training.*`.

    Attributes:
        task_name: identity of the task and folder of its runs, fixed.
        sim_backend: physics backend.
        smoke: train on the CPU, small and eager, to see that everything works; never a benchmark.
        devices: deprecated choice of logical indices among the visible devices.
        dp_collector_cpu_ids: CPUs of every rank's physics workers, one list per rank of a host and the same lists on
            every host, none in two; null splits the allowed ones evenly.
        nccl_transport: how ranks exchange gradients, `p2p`, `shm` or `tcp`, under a launcher as well; `auto` takes the
            fastest that works, and leaves it to a launcher's environment. NCCL's own variables win. Between ranks on
            several hosts `p2p` and `shm` are refused.
        use_amp: bfloat16 autocast on CUDA.
        logger: `tensorboard`, `wandb` (beside the event file) or `none`.
        log_interval: iterations between written metrics; the last iteration is always written.
        log_root: parent of the generated run directory instead of `logs/<algo_log_name>`.
        log_dir: the exact run directory instead of a generated one.
        no_play: skip evaluation, video and export after training.
        export_onnx: export the policy after training.
        play_env_num: robots in the video.
        play_steps: control steps in the video, one frame each.
        trace_enabled: write a timeline of both processes and the device.
        record_states: snapshots of the physics taken in the second half of the run, to replay them; 0 takes none,
            1000 are the most.
        wandb_project: where W&B puts the run.
        wandb_entity: its user or team; null takes the login's.
        wandb_group: null takes the task.
        wandb_job_type: null takes the algorithm.
        wandb_name: null makes one of algorithm, task and run directory.
        wandb_tags: beside algorithm, task and backend.
        wandb_notes: free text.
        wandb_mode: `online`, `offline` or `disabled`; null leaves it to WANDB_MODE, else online.
    """

    task_name: str = "G1WalkFlat"
    sim_backend: str = "mujoco"
    smoke: bool = False
    devices: list[int] | None = None
    dp_collector_cpu_ids: list[list[int]] | None = None
    nccl_transport: str = AUTO_TRANSPORT
    use_amp: bool = True
    logger: str = "tensorboard"
    log_interval: int = 1
    log_root: str | None = None
    log_dir: str | None = None
    no_play: bool = False
    export_onnx: bool = True
    play_env_num: int = 16
    play_steps: int = 800
    trace_enabled: bool = False
    record_states: int = 0
    wandb_project: str = "unilab"
    wandb_entity: str | None = None
    wandb_group: str | None = None
    wandb_job_type: str | None = None
    wandb_name: str | None = None
    wandb_tags: list[str] = field(default_factory=list)
    wandb_notes: str | None = None
    wandb_mode: str | None = None

    def validate(self) -> None:
        """Check ranges.

        Raises:
            ValueError: naming the key, what it must be and what it is.
        """
        require(self.log_dir != "", "training.log_dir", "a path or null", self.log_dir)
        require(self.log_interval >= 1, "training.log_interval", "at least 1", self.log_interval)
        require(
            0 <= self.record_states <= MAX_STATES, "training.record_states", f"0 to {MAX_STATES}", self.record_states
        )
        for name in ("play_env_num", "play_steps"):
            require(getattr(self, name) >= 1, f"training.{name}", "at least 1", getattr(self, name))
        require(self.nccl_transport in TRANSPORTS, TRANSPORT_KEY, " or ".join(TRANSPORTS), self.nccl_transport)
        require(self.logger in LOGGERS, "training.logger", " or ".join(LOGGERS), self.logger)
        modes = "online, offline, disabled or null"
        require(self.wandb_mode in WANDB_MODES, "training.wandb_mode", modes, self.wandb_mode)
        require(bool(self.wandb_project), "training.wandb_project", "a name", self.wandb_project)
        require(self.sim_backend in BACKENDS, "training.sim_backend", "mujoco (--sim chooses)", self.sim_backend)


@dataclass
class RunConfig:
    """Everything that defines a run."""

    algo: AlgoConfig = field(default_factory=SacConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    env: VelocityTaskConfig = field(default_factory=G1WalkFlatConfig)
    reward: RewardWeights = field(default_factory=G1WalkFlatRewards)

    def build_task(self, num_envs: int, device: torch.device) -> VelocityTask:
        """The task for so many environments, on a device.

        Raises:
            ValueError: if a number is out of bounds.
        """
        return self.env.task_class()(self.env, self.reward, num_envs, device, self.env.physics_profile)

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `config.json` holds them."""
        return asdict(self)


def load_config(algo: str, task: str, sim: str, overrides: Sequence[str]) -> RunConfig:
    """Compose and check the configuration of a run.

    Args:
        algo: algorithm name.
        task: task name.
        sim: physics backend name.
        overrides: `key=value` in Hydra's grammar; a leading `+` is accepted on known keys.

    Returns:
        The typed, validated configuration.

    Raises:
        ValueError: one line naming what is wrong and what to type instead.
    """
    for what, value, known in (
        ("algorithm", algo, tuple(ALGORITHMS)),
        ("task", task, tuple(TASKS)),
        ("backend", sim, BACKENDS),
    ):
        if value not in known:
            raise ValueError(f"unknown {what} {value!r}{_nearest(value, known)}; there is {', '.join(known)}")
    schema = _schema(ALGORITHMS[algo], TASKS[task])
    checked = [_checked(text, schema) for text in overrides]
    try:
        with initialize_config_dir(str(CONF / algo), version_base=None):
            composed = compose("config", [f"task={task}/{sim}", *checked])
        merged = OmegaConf.merge(schema, composed)
        config = OmegaConf.to_object(merged)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_one_line(error)) from None
    assert isinstance(config, RunConfig)
    for part in (config.algo, config.training, config.env, config.reward):
        part.validate()
    chosen, name = TASKS[task].name, config.training.task_name
    require(name == chosen, "training.task_name", f"{chosen} (--task chooses)", name)
    return config


def restore_config(values: dict[str, Any]) -> RunConfig:
    """The configuration that a `config.json` holds.

    Raises:
        ValueError: if it does not fit this version's schema.
    """
    try:
        (task,) = (task for task in TASKS.values() if task.name == values["training"]["task_name"])
        algo = ALGORITHMS[values["algo"]["algo"]]
        merged = OmegaConf.merge(_schema(algo, task), {k: v for k, v in values.items() if k in GROUPS})
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(f"the saved configuration does not fit this version: {_one_line(error)}") from None
    except (KeyError, TypeError, ValueError):
        reason = "it names no known algo.algo or training.task_name"
        raise ValueError(f"the saved configuration does not fit this version: {reason}") from None
    assert isinstance(config, RunConfig)
    return config


def change_playback(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A saved configuration with other settings of what happens after training.

    Args:
        config: of the run.
        overrides: `key=value` as for `load_config`.

    Raises:
        ValueError: one line naming what is wrong, also for a setting that says how the run was trained.
    """
    node: DictConfig = OmegaConf.structured(config)
    for text in overrides:
        checked, parsed = _checked(text, node), _parsed(text, node)
        if parsed.key_or_group not in PLAYBACK:
            raise ValueError(
                f"{checked.removeprefix('++')!r} says how the run was trained; eval takes {', '.join(PLAYBACK)}"
            )
        try:
            OmegaConf.update(node, parsed.key_or_group, parsed.value())
        except OmegaConfBaseException as error:
            raise ValueError(_one_line(error)) from None
    changed = OmegaConf.to_object(node)
    assert isinstance(changed, RunConfig)
    changed.training.validate()
    return changed


def _schema(algo: type[AlgoConfig], task: TaskSchema) -> DictConfig:
    """The schema of an algorithm's runs on a task."""
    config = RunConfig(algo=algo(), env=task.env(), reward=task.reward())  # type: ignore[call-arg]
    schema: DictConfig = OmegaConf.structured(config)
    return schema


def _checked(text: str, schema: DictConfig) -> str:
    """The override with its key checked, in the spelling that sets a key whether or not a file mentions it."""
    override = _parsed(text, schema)
    key = override.key_or_group
    known = _keys(schema)
    if key == "task":
        spelling = f"--task {next(iter(TASKS))} --sim {BACKENDS[0]}"
        raise ValueError(f"{text!r} is no setting; the task is chosen as in {spelling}")
    if key not in known:
        raise ValueError(f"unknown key {key!r}{_nearest(key, known)}")
    node = _node(schema, key)
    if isinstance(node, DictConfig) and is_dataclass(OmegaConf.get_type(node)):
        raise ValueError(f"{key!r} is a group of keys; set one of them, as in {key}.{next(iter(node))!s}=VALUE")
    if override.package is not None:
        raise ValueError(f"{text!r} names a package; type {key}=VALUE")
    if override.is_delete():
        raise ValueError(f"{text!r} deletes a key; every key has a value, set it with {key}=VALUE")
    value = text.split("=", 1)[1]
    if override.is_sweep_override():
        raise ValueError(f"{text!r} is a sweep over values; {_one_value(key, value, schema)}")
    if isinstance(node, ListConfig):
        _check_list(key, value, override.value(), _is_nested(node))
    return f"++{key}={value}"


def _check_list(key: str, text: str, value: Any, nested: bool) -> None:
    """Refuse a number where a list belongs, and anything but lists of whole numbers where there must be several."""
    if nested and value is not None and not (isinstance(value, list) and all(map(_is_whole_numbers, value))):
        raise ValueError(f"{key} takes one list of CPUs per rank, got {text}; {NESTED.format(key=key)}")
    if isinstance(value, int | float):
        raise ValueError(f"{key} takes a list, got {text}; type {key}=[{text}]")


def _is_whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _is_nested(node: Any) -> bool:
    """Whether the elements of a list are lists themselves."""
    return get_origin(node._metadata.element_type) is list


def _one_value(key: str, value: str, schema: DictConfig) -> str:
    """How to write a value that holds characters of the grammar, by the type of its key."""
    node = _node(schema, key)
    if isinstance(node, ListConfig):
        return NESTED.format(key=key) if _is_nested(node) else f"for a list type {key}=[{value}]"
    if isinstance(node, StringNode):
        escaped = value.replace('"', r"\"")
        argument = shlex.quote(f'{key}="{escaped}"')
        return f"for text with such characters type {argument}"
    return f"give {key} one value"


def _node(schema: DictConfig, key: str) -> Any:
    *groups, name = key.split(".")
    for group in groups:
        schema = schema[group]
    return schema._get_node(name)


def _parsed(text: str, schema: DictConfig) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        key, _, value = text.partition("=")
        key = key.lstrip("+")
        hint = f"; {_one_value(key, value, schema)}" if value and key in _keys(schema) else ""
        raise ValueError(f"cannot read {text!r} as key=value: {_one_line(error)}{hint}") from None


def _keys(node: DictConfig, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name in node:
        keys.append(f"{prefix}{name!s}")
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none():
            keys += _keys(child, f"{prefix}{name!s}.")
    return keys


def _nearest(value: str, known: Sequence[str]) -> str:
    """A suggestion where one is near: the nearest whole key, or the key whose last part is nearest."""
    matches = difflib.get_close_matches(value, known, 1, NEAR)
    if not matches:
        tails = {key.rsplit(".", 1)[-1]: key for key in known}
        matches = [tails[tail] for tail in difflib.get_close_matches(value.rsplit(".", 1)[-1], tails, 1, NEAR)]
    return f", did you mean {matches[0]!r}?" if matches else ""


def _one_line(error: Exception) -> str:
    """An error of the configuration libraries as one line that names the key."""
    text = str(error)
    key = re.search(r"full_key: (\S+)", text)
    first = text.splitlines()[0].rstrip(".")
    return f"{key.group(1)}: {first}" if key else first
