"""Checkpoints: what they hold, in which runs they are found, and how they are read, never trusted before checked."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import time
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unilab.actor_semantics import ENTRY, describe_actor, verify_actor
from unilab.algorithm import LATEST
from unilab.config import RunConfig, load_config, restore_config
from unilab.names import ATTEMPT_PATTERN, CHECKPOINT_PATTERN, CONFIG_FILE
from unilab.run_dir import runs_folder

if TYPE_CHECKING:
    from unilab.learner import Actor, Learner
    from unilab.state import StateRegistry
    from unilab.tasks.velocity_task import VelocityTask

FORMAT = 2
LARGEST = 2**53  # iteration or env steps: files and metrics hold them as doubles, too
_ATTEMPT = re.compile(ATTEMPT_PATTERN.format(number=r"\d{3,}"))
_CHECKPOINT = re.compile(CHECKPOINT_PATTERN.format(iteration=r"(\d+)"))

# Ends of names of entries that are never below zero: counts, variances, scales.
_NOT_NEGATIVE = ("_step", "count", "variance", "_var", "_sq", "_scale", "largest_return")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read.

    Attributes:
        file: where it is.
        sha256: of the file.
        content: as `contents` made it.
    """

    file: Path
    sha256: str
    content: dict[str, Any]

    @property
    def iteration(self) -> int:
        """Finished training iterations; each is one update cycle."""
        return int(self.content["iteration"])

    @property
    def env_steps(self) -> int:
        """Cumulative env steps of all ranks."""
        return int(self.content["env_steps"])


def contents(
    config: RunConfig, task: VelocityTask, learner: Learner, registry: StateRegistry, iteration: int, env_steps: int
) -> dict[str, Any]:
    """What a checkpoint holds: plain data and tensors on the CPU, so that reading it runs no code.

    Args:
        config: the run.
        task: its task.
        learner: whose networks it holds.
        registry: whose lasting entries it holds.
        iteration: finished training iterations.
        env_steps: cumulative env steps of all ranks.
    """
    networks = {name: _on_cpu(module.state_dict()) for name, module in learner.modules().items()}
    return {
        "format": FORMAT,
        "algo": config.algo.algo,
        "task": config.training.task_name,
        "obs_dim": task.obs_dim,
        "critic_dim": task.critic_dim,
        "action_dim": task.action_dim,
        ENTRY: describe_actor(config.algo, task.obs_dim, task.action_dim),
        "iteration": iteration,
        "env_steps": env_steps,
        "wall_time": time.time(),
        **networks,
        "log_alpha": learner.log_alpha.detach().cpu(),
        "state": {name: value.cpu() for name, value in registry.snapshot(lasting=True).items()},
    }


def _on_cpu(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict on the CPU, in place. Views of one buffer stay views of one, which a file holds once."""
    buffers: dict[int, torch.UntypedStorage] = {}
    for name, value in weights.items():
        storage = value.untyped_storage()
        if storage.data_ptr() not in buffers:
            buffers[storage.data_ptr()] = storage.cpu()
        place = value.storage_offset(), value.shape, value.stride()
        weights[name] = torch.empty(0, dtype=value.dtype).set_(buffers[storage.data_ptr()], *place)
    return weights


def load_run(
    run: Path | str, algo: str, task: str, sim: str, iteration: int = int(LATEST)
) -> tuple[RunConfig, Checkpoint]:
    """The configuration of a run and a checkpoint of it.

    Args:
        run: as `find_run` takes it.
        algo: algorithm that it was trained with.
        task: task that it was trained on.
        sim: physics backend.
        iteration: as `load_checkpoint` takes it.

    Raises:
        ValueError: as `find_run`, `load_run_config`, `load_checkpoint` and `check_origin` do, or if the checkpoint's
            actor is not the configuration's or cannot be built any more, or its weights are none of such an actor.
    """
    wanted = load_config(algo, task, sim, [])
    directory = find_run(run, wanted)
    load_run_config(directory, wanted)  # before any checkpoint is read
    checkpoint = load_checkpoint(directory, iteration)
    config = load_run_config(checkpoint.file.parent, wanted)  # of the attempt that wrote it
    trained = config.env.task_class()
    check_origin(checkpoint, config)
    config.algo.check_actor(trained.obs_dim, trained.action_dim)
    expected = describe_actor(config.algo, trained.obs_dim, trained.action_dim)
    verify_actor(checkpoint.content, expected, checkpoint.file)
    actor = config.algo.build_actor(trained.obs_dim, trained.action_dim)
    _check_weights(actor, checkpoint.content.get("actor"), checkpoint.file)
    return config, checkpoint


def find_run(run: Path | str, wanted: RunConfig) -> Path:
    """The directory of a run.

    Args:
        run: the directory, or -1 for the run of the same algorithm, task and backend, among those in the folder of
            generated runs, whose newest checkpoint was written last, by the time stored inside.
        wanted: configuration that says algorithm, task, backend and that folder.

    Raises:
        ValueError: for -1, if there is no such run, or one of them cannot be judged; for the name of a checkpoint.
    """
    if str(run) != LATEST:
        return _named_run(Path(run).expanduser())
    folder = runs_folder(wanted)
    candidates = [path.parent for path in sorted(folder.glob(f"*/{CONFIG_FILE}"))]
    same = [path for path in candidates if _names(load_config_file(path)) == _names(wanted)]
    written = {path: _wall_time(path) for path in same if checkpoint_files(path)}
    if not written:
        raise ValueError(f"no run of {'/'.join(_names(wanted))} below {folder} has a checkpoint; name a run directory")
    return max(written, key=lambda path: written[path])


def _named_run(path: Path) -> Path:
    checkpoint = _CHECKPOINT.fullmatch(path.name)
    if checkpoint and not path.is_dir():
        folder, iteration = path.parent, checkpoint.group(1)
        raise ValueError(
            f"{path} names a checkpoint where a run directory belongs; type algo.load_run={folder} "
            f"algo.checkpoint={iteration}, for eval --load-run {folder} --checkpoint {iteration}"
        )
    return path


def load_config_file(directory: Path) -> RunConfig:
    """The configuration of a run.

    Raises:
        ValueError: if the directory is no run's, or its configuration is damaged or does not fit this version.
    """
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{directory} is no run directory: it has no {CONFIG_FILE}")
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    try:
        return restore_config(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def load_run_config(directory: Path, wanted: RunConfig) -> RunConfig:
    """The configuration of a run that was trained with the wanted algorithm, task and backend.

    Raises:
        ValueError: as `load_config_file` does, or if it was trained with others.
    """
    config = load_config_file(directory)
    asked, found = _names(wanted), _names(config)
    if asked != found:
        raise ValueError(f"{directory} was trained with {'/'.join(found)}, not {'/'.join(asked)}")
    return config


def attempts(directory: Path) -> list[Path]:
    """Folders inside a run's directory that hold what it did after each resume, in order."""
    found = [path for path in directory.glob(ATTEMPT_PATTERN.format(number="*")) if _ATTEMPT.fullmatch(path.name)]
    return sorted((path for path in found if path.is_dir()), key=lambda path: int(path.name.rpartition("-")[2]))


def run_of(directory: Path) -> Path:
    """The run's own directory, also where one of its attempts is given."""
    parent = directory.absolute().parent
    inside = _ATTEMPT.fullmatch(directory.absolute().name) and (parent / CONFIG_FILE).is_file()
    return parent if inside else directory


def checkpoint_files(directory: Path) -> list[Path]:
    """Checkpoints of a run and of its attempts; of a single attempt its own alone."""
    pattern = CHECKPOINT_PATTERN.format(iteration="*")
    return [file for folder in (directory, *attempts(directory)) for file in sorted(folder.glob(pattern))]


def load_checkpoint(directory: Path, iteration: int = int(LATEST)) -> Checkpoint:
    """A checkpoint of a run, by the iteration stored inside; of several with the same one the last written.

    Args:
        directory: the run.
        iteration: which; -1 for the highest. A file that cannot be read does not hide another iteration's.

    Raises:
        ValueError: one line, if there is none, the chosen one is damaged, or for -1 any of them cannot be read.
    """
    files = checkpoint_files(directory)
    if not files:
        raise ValueError(
            f"{directory} holds no checkpoint: it ended before the first was due, every algo.save_interval iterations"
        )
    places: dict[Path, tuple[int, float]] = {}
    unreadable: list[ValueError] = []
    for file in files:
        try:
            places[file] = _place(file)
        except ValueError as error:
            unreadable.append(error)
    if iteration == int(LATEST):
        if unreadable:
            raise unreadable[0]
    elif iteration not in (found for found, _ in places.values()):
        raise ValueError(_unknown(directory, iteration, places.values(), unreadable))
    chosen = {file: place for file, place in places.items() if iteration in (int(LATEST), place[0])}
    return read_checkpoint(max(chosen, key=lambda file: chosen[file]))


def read_checkpoint(file: Path) -> Checkpoint:
    """Read a file whole, check that every byte is as it was written, and take it for data only.

    Raises:
        ValueError: one line, if it is damaged, holds more than data, or is no checkpoint.
    """
    data = _bytes(file)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:  # torch does not compare the checksums
        try:
            damaged = archive.testzip()
        except Exception as error:
            raise _unreadable(file, f"its archive is damaged ({error})") from None
    if damaged is not None:
        raise _unreadable(file, f"the checksum of {damaged} is wrong")
    content = _load(file, io.BytesIO(data))
    _check_place(file, content)
    return Checkpoint(file, hashlib.sha256(data).hexdigest(), content)


def check_origin(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Refuse a checkpoint that a later version wrote, or that says another algorithm or task than the configuration.

    Raises:
        ValueError: one line, also if its env steps are no number of steps.
    """
    content, file = checkpoint.content, checkpoint.file
    version = content.get("format")
    if type(version) is int and version > FORMAT:
        raise ValueError(f"{file} has format {version}, this version reads {FORMAT}; use the one that wrote it")
    wanted = {"algo": config.algo.algo, "task": config.training.task_name}
    apart = [
        f"{name} {shown(content[name])}, not {value!r}"
        for name, value in wanted.items()
        if content.get(name, value) != value  # older ones do not say
    ]
    if apart:
        raise ValueError(f"{file} has {'; '.join(apart)}; choose what it was trained with")
    wrong = _wrong_count(content, "env_steps")
    if wrong is not None:
        raise ValueError(f"{file}: {wrong}")


def shown(value: Any) -> str:
    """The beginning of any value, on one line."""
    return " ".join(f"{value!r:.60}".split())


def _bytes(file: Path) -> bytes:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise _unreadable(file, str(error.strerror)) from None
    if not zipfile.is_zipfile(io.BytesIO(data)):
        raise _unreadable(file, "it is no archive, or its end is missing")
    return data


def _place(file: Path) -> tuple[int, float]:
    """Iteration and time of a checkpoint, without reading its tensors."""
    if not zipfile.is_zipfile(file):
        raise _unreadable(file, "it is no archive, or its end is missing")
    content = _load(file, file, mmap=True)
    _check_place(file, content)
    written = content.get("wall_time")
    return content["iteration"], written if isinstance(written, float) else 0.0


def _wall_time(directory: Path) -> float:
    """When the newest checkpoint of a run was written."""
    newest = max(map(_place, checkpoint_files(directory)))
    if not newest[1]:
        raise ValueError(f"{directory} holds checkpoints of an older format, which do not say when; name a run")
    return newest[1]


def _load(file: Path, source: Any, mmap: bool = False) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # as of a pickle that this trainer would not write
            return torch.load(source, weights_only=True, map_location="cpu", mmap=mmap)
    except pickle.UnpicklingError:
        raise _unreadable(file, "it holds more than data, and what it holds might run as code") from None
    except Exception as error:  # a file made by others can make the reader raise anything
        raise _unreadable(file, (str(error) or type(error).__name__).splitlines()[0]) from None


def _check_place(file: Path, content: Any) -> None:
    if not isinstance(content, Mapping):
        raise _unreadable(file, f"it must hold a mapping, found {type(content).__name__}")
    wrong = _wrong_count(content, "iteration")
    if wrong is not None:
        raise _unreadable(file, f"its {wrong}")


def _wrong_count(content: Mapping[str, Any], name: str) -> str | None:
    """Why a field is no number of steps or iterations, or None."""
    value = content.get(name)
    if type(value) is not int or value < 0:
        return f"{name} must be a whole number from 0, found {shown(value)}"
    return f"{name} must be at most 2**53, found {shown(value)}" if value > LARGEST else None


def _unreadable(file: Path, reason: str) -> ValueError:
    return ValueError(f"checkpoint {file} cannot be read: {reason}; name another iteration, or move the file away")


def _unknown(
    directory: Path, iteration: int, places: Iterable[tuple[int, float]], unreadable: Iterable[ValueError]
) -> str:
    known = ", ".join(map(str, sorted({found for found, _ in places}))) or "none"
    return "; ".join(
        (f"{directory} has no checkpoint of iteration {iteration}; there is {known}", *map(str, unreadable))
    )


def _names(config: RunConfig) -> tuple[str, str, str]:
    return config.algo.algo, config.training.task_name, config.training.sim_backend


def _check_weights(actor: Actor, weights: Any, file: Path) -> None:
    """Refuse weights that do not fit, as where an actor's source changed, and numbers that no training leaves."""
    if not isinstance(weights, Mapping) or not all(
        isinstance(name, str) and _is_dense(value) for name, value in weights.items()
    ):
        raise ValueError(f"{file}: actor must hold dense tensors by name; no weight was restored")
    own, found = ({name: _form(value) for name, value in held.items()} for held in (actor.state_dict(), weights))
    for name in sorted(own.keys() | found.keys()):
        forms = found.get(name, "absent"), own.get(name, "absent")
        if forms[0] != forms[1]:
            apart = f"actor.{name} is {forms[0]}, the actor that its builder makes now has {forms[1]}"
            raise ValueError(f"{file}: {apart}; no weight was restored; the source it was trained with is needed")
    if (problem := wrong_numbers({f"actor/{name}": value for name, value in weights.items()}, actor)) is not None:
        raise ValueError(f"{file}: {problem}; no weight was restored")


def wrong_numbers(state: Mapping[str, Tensor], actor: Actor) -> str | None:
    """The first entry whose numbers no training leaves, and what is wrong with them; None if there is none.

    Of another's actor less is known: a buffer can be a mask with infinities, and a name can mean anything.

    Args:
        state: entries of a run's state by name; an actor's weights are `actor/` and their name in its state_dict.
        actor: such a one as the weights belong to.
    """
    buffers = {f"actor/{name}" for name, _ in actor.named_buffers()}
    for name, value in state.items():
        foreign = name.startswith("actor/network.")
        if value.isnan().any() or (value.isinf().any() and not (foreign and name in buffers)):
            return f"{name} has values that are not finite"
        if name.endswith(_NOT_NEGATIVE) and (value < 0).any() and not foreign:
            return f"{name} has negative values"
    return None


def _is_dense(value: Any) -> bool:
    """Whether it is a tensor whose numbers are there, one by one."""
    if not isinstance(value, Tensor) or value.is_nested:
        return False
    return value.layout == torch.strided and value.device.type == "cpu"


def _form(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
