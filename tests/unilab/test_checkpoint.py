"""What a checkpoint holds, that reading one runs no code and misses no damage, and which run or file is the newest."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_rig import begun, differences

from unilab.actor_semantics import ENTRY, describe_actor
from unilab.algorithm import AlgoConfig
from unilab.checkpoint import (
    _check_weights,
    attempts,
    contents,
    find_run,
    load_checkpoint,
    load_run,
    read_checkpoint,
    run_of,
)
from unilab.config import RunConfig, load_config
from unilab.export import export_policy
from unilab.flash_sac.config import FlashSacConfig
from unilab.learner import Actor
from unilab.run_dir import RunDirectory
from unilab.sac.config import SacConfig

SMALL = {"actor_hidden_dim": 8, "critic_hidden_dim": 8, "num_atoms": 11, "batch_size": 16, "num_envs": 8}
BY_ROW = {"actions", "codes", "command", "critic", "ctrl", "done", "fields", "finished", "last_critic", "last_obs"}
BY_ROW |= {"next_critic", "next_obs", "obs", "phase", "previous_actions", "reset_rows", "reward", "reward_terms"}
BY_ROW |= {"terminated", "timeout", "tracking_errors", "truncated", "uniforms", "valid", "invalid_rows"}
BY_ROW |= {"episode_steps", "episode_returns", "episode_last_steps", "episode_last_returns"}


class Hostile:
    """What a pickle can make of a file: a command that runs when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def write(file: Path, iteration: int, wall_time: float = 1.0, **more: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"iteration": iteration, "wall_time": wall_time, "pad": torch.arange(999.0), **more}, file)
    return file


def refusal(read: Callable[..., object], *arguments: Any) -> str:
    with pytest.raises(ValueError) as caught:
        read(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- content ---------------------------------------------------------------------------------------------------------


def test_all_that_lasts_is_in_it_and_nothing_that_begins_anew(tmp_path: Path) -> None:
    """The curriculum, optimizers, schedules, running statistics, reward scale and draws last; rows and ring do not."""
    rig = begun(config=FlashSacConfig(**SMALL, updates_per_step=2))
    rig.tick()
    config = RunConfig(algo=FlashSacConfig(**SMALL))
    content = contents(config, rig.env.task, rig.learner, rig.registry, 7, 56)
    left_out = {f"env/{name}" for name in BY_ROW} | {"replay/position", "replay/size", "update/indices", "update/noise"}
    left_out |= {"act/noise", "act/chance", "exploration/held", "exploration/remaining", "reward_scale/returns"}
    assert set(rig.registry.names()) - set(content["state"]) == left_out
    lasting = {"critic/adamw_step", "critic/adamw_exp_avg", "actor/adamw_exp_avg_sq", "temperature/parameters"}
    lasting |= {"critic_target/parameters", "critic/schedule_step", "critic/trunk.norm.running_mean"}
    lasting |= {"env/penalty_scale", "env/curriculum_mean_length", "env/episode_ring", "learner/Train/skipped_updates"}
    lasting |= {"reward_scale/variance", "random/environment", "random/exploration", "random/update"}
    assert lasting <= set(content["state"])
    assert (content["format"], content["iteration"], content["env_steps"]) == (2, 7, 56)
    file = RunDirectory(tmp_path).write_checkpoint(7, content)
    read = read_checkpoint(file)
    assert read.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    state = rig.registry.snapshot(lasting=True)
    assert all(torch.equal(read.content["state"][name], state[name]) for name in state)


@pytest.mark.parametrize("algo", [SacConfig, FlashSacConfig])
def test_weights_come_to_the_cpu_a_buffer_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algo: type[AlgoConfig]
) -> None:
    """As from a GPU: nothing is left of the learner's memory, and the file is as large as without copies."""
    rig = begun(config=algo(**SMALL))
    sizes, networks = [], rig.learner.modules()
    for copied in (False, True):
        if copied:
            monkeypatch.setattr(torch.UntypedStorage, "cpu", torch.UntypedStorage.clone)
        content = contents(RunConfig(algo=algo(**SMALL)), rig.env.task, rig.learner, rig.registry, 7, 56)
        sizes.append(RunDirectory(tmp_path).write_checkpoint(7, content).stat().st_size)
    assert sizes[0] == sizes[1]
    for name, network in networks.items():
        assert differences(content[name], network.state_dict()) == []
        own = {value.untyped_storage().data_ptr() for value in network.state_dict().values()}
        saved = {value.untyped_storage().data_ptr() for value in content[name].values()}
        assert len(saved) == len(own) and not saved & own


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [torch.save, lambda content, file: file.write_bytes(pickle.dumps(content))])
def test_reading_runs_no_code(tmp_path: Path, save: Callable[..., object]) -> None:
    marker, file = tmp_path / "ran", tmp_path / "model_1.pt"
    save({"iteration": 1, "actor": Hostile(marker)}, file)
    for read, argument in ((read_checkpoint, file), (load_checkpoint, tmp_path)):
        message = refusal(read, argument)
        assert message.startswith(f"checkpoint {file} cannot be read: it ")
        assert "holds more than data, and what it holds might run as code" in message or "it is no archive" in message
    assert not marker.exists()


def test_one_wrong_bit_is_found(tmp_path: Path) -> None:
    file = write(tmp_path / "model_1.pt", 1)
    data = bytearray(file.read_bytes())
    data[data.index(torch.tensor(500.0).numpy().tobytes())] ^= 1  # inside the tensor, which torch does not check
    file.write_bytes(data)
    assert torch.load(file, weights_only=True)["iteration"] == 1
    message = refusal(load_checkpoint, tmp_path)
    assert "model_1.pt cannot be read: the checksum of " in message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([1], "it must hold a mapping, found list"),
        ({"env_steps": 3}, "its iteration must be a whole number from 0, found None"),
        ({"iteration": -1}, "its iteration must be a whole number from 0, found -1"),
        ({"iteration": True}, "found True"),
        ({"iteration": "3"}, "found '3'"),
    ],
)
def test_content_that_is_no_checkpoint(tmp_path: Path, content: Any, reason: str) -> None:
    torch.save(content, tmp_path / "model_3.pt")
    assert reason in refusal(load_checkpoint, tmp_path)


# --- which one -------------------------------------------------------------------------------------------------------


def test_the_newest_is_the_highest_iteration_inside_over_all_attempts(tmp_path: Path) -> None:
    write(tmp_path / "model_99.pt", 3)
    write(tmp_path / "model_10.pt", 10)
    write(tmp_path / "attempt-002" / "model_12.pt", 12)
    write(tmp_path / "attempt-010" / "model_11.pt", 11)
    write(tmp_path / "attempt-old" / "model_70.pt", 70)
    assert load_checkpoint(tmp_path).file == tmp_path / "attempt-002" / "model_12.pt"
    assert load_checkpoint(tmp_path, 3).file == tmp_path / "model_99.pt"
    assert load_checkpoint(tmp_path / "attempt-010").iteration == 11
    assert [path.name for path in attempts(tmp_path)] == ["attempt-002", "attempt-010"]


def test_of_one_iteration_the_last_written_counts(tmp_path: Path) -> None:
    write(tmp_path / "model_5.pt", 5, wall_time=30.0)
    write(tmp_path / "attempt-002" / "model_5.pt", 5, wall_time=20.0)
    assert load_checkpoint(tmp_path, 5).file == tmp_path / "model_5.pt"


def test_an_iteration_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    write(tmp_path / "model_5.pt", 5)
    write(tmp_path / "model_20.pt", 20)
    (tmp_path / "model_30.pt").write_bytes(b"damaged")
    message = refusal(load_checkpoint, tmp_path, 7)
    assert "has no checkpoint of iteration 7; there is 5, 20; checkpoint " in message and "model_30.pt" in message


def test_a_damaged_newest_file_is_refused_and_named_ones_still_work(tmp_path: Path) -> None:
    write(tmp_path / "model_5.pt", 5)
    whole = write(tmp_path / "model_20.pt", 20).read_bytes()
    (tmp_path / "model_20.pt").write_bytes(whole[: len(whole) // 2])
    message = refusal(load_checkpoint, tmp_path)
    assert "model_20.pt cannot be read: it is no archive, or its end is missing; name another iteration" in message
    assert load_checkpoint(tmp_path, 5).iteration == 5


# --- which run -------------------------------------------------------------------------------------------------------


def wanted(tmp_path: Path, algo: str = "sac") -> RunConfig:
    return load_config(algo, "g1_walk_flat", "mujoco", [f"training.log_root={tmp_path}"])


def run(tmp_path: Path, name: str, algo: str = "sac", **times: float) -> Path:
    """A run directory with checkpoints by iteration (`at_5=` the time it was written)."""
    path = tmp_path / "G1WalkFlat" / name
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"schema_version": 1, **wanted(tmp_path, algo).to_json()}))
    for iteration, wall_time in times.items():
        number = int(iteration.removeprefix("at_"))
        write(path / f"model_{number}.pt", number, wall_time)
    return path


def test_the_latest_run_is_the_one_written_last_whatever_its_name(tmp_path: Path) -> None:
    run(tmp_path, "2030-newest-name", at_9=100.0)
    latest = run(tmp_path, "2020-oldest-name", at_5=90.0)
    write(latest / "attempt-002" / "model_8.pt", 8, 200.0)
    run(tmp_path, "2025-other", algo="flashsac", at_9=300.0)
    run(tmp_path, "2026-nothing-yet")
    (tmp_path / "G1WalkFlat" / "notes").mkdir()
    for given in ("-1", Path("-1")):
        assert find_run(given, wanted(tmp_path)) == latest
    assert find_run("elsewhere", wanted(tmp_path)) == Path("elsewhere")


def test_no_run_to_be_the_latest(tmp_path: Path) -> None:
    message = refusal(find_run, "-1", wanted(tmp_path))
    assert message.startswith("no run of sac/G1WalkFlat/mujoco below ") and message.endswith("; name a run directory")


def test_a_run_that_cannot_be_judged_is_named(tmp_path: Path) -> None:
    run(tmp_path, "good", at_9=100.0)
    other = run(tmp_path, "old")
    torch.save({"iteration": 1}, other / "model_1.pt")
    assert refusal(find_run, "-1", wanted(tmp_path)).startswith(f"{other} holds checkpoints of an older format")
    (other / "model_1.pt").write_bytes(b"damaged")
    assert f"checkpoint {other / 'model_1.pt'} cannot be read" in refusal(find_run, "-1", wanted(tmp_path))
    (other / "config.json").write_text("{")
    assert f"{other / 'config.json'} cannot be read: " in refusal(find_run, "-1", wanted(tmp_path))


def test_a_run_is_loaded_by_minus_one_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = run(tmp_path / "logs" / "sac", "run")
    algo = wanted(tmp_path).algo
    entry = {"env_steps": 8, "actor": algo.build_actor(98, 29).state_dict(), ENTRY: describe_actor(algo, 98, 29)}
    write(path / "model_4.pt", 4, **entry)
    write(path / "attempt-002" / "model_6.pt", 6, **entry)
    config = json.loads((path / "config.json").read_text())
    config["algo"]["max_iterations"] = 6  # a resume may change settings, so those of the attempt count
    (path / "attempt-002" / "config.json").write_text(json.dumps(config))
    loaded, checkpoint = load_run(Path("-1"), "sac", "g1_walk_flat", "mujoco")
    assert (checkpoint.iteration, loaded.algo.max_iterations) == (6, 6)


MEAN, VARIANCE = "mean.bias", "trunk.norm.running_var"


@pytest.fixture(scope="module")
def actor() -> Actor:
    return FlashSacConfig(actor_hidden_dim=8).build_actor(98, 29)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda _: [1, 2], "actor must hold dense tensors by name"),
        (lambda _: {1: torch.zeros(1)}, "actor must hold dense tensors by name"),
        (lambda _: {MEAN: "text"}, "actor must hold dense tensors by name"),
        (lambda _: {MEAN: None}, "actor must hold dense tensors by name"),
        (lambda own: {MEAN: own[MEAN].to_sparse()}, "actor must hold dense tensors by name"),
        (lambda own: {MEAN: own[MEAN].to("meta")}, "actor must hold dense tensors by name"),
        (lambda own: {MEAN: own[MEAN][:, :3]}, "is float32 (1, 3), the actor that its builder makes now has float32"),
        (lambda own: {MEAN: own[MEAN] + 0j}, "is complex64 (1, 29), the actor that its builder makes now has float32"),
        (lambda own: {MEAN: own[MEAN] / 0}, f"actor/{MEAN} has values that are not finite"),
        (lambda own: {VARIANCE: -own[VARIANCE]}, f"actor/{VARIANCE} has negative values"),
    ],
)
def test_what_is_no_actors_weights_is_refused(actor: Actor, damage: Callable[[Any], Any], message: str) -> None:
    own = actor.state_dict()
    _check_weights(actor, own, Path("model_1.pt"))
    found = damage(own)
    weights = {**own, **found} if isinstance(found, dict) else found
    said = refusal(_check_weights, actor, weights, Path("model_1.pt"))
    assert said.startswith("model_1.pt: actor") and message in said and "no weight was restored" in said


@pytest.mark.parametrize("setting", ["actor_hidden_dim=8", "algo_params.actor_config={builder:own_actors:Plain}"])
def test_weights_are_looked_at_whoever_built_the_actor(tmp_path: Path, setting: str) -> None:
    config = load_config("flashsac", "g1_walk_flat", "mujoco", [f"algo.{setting}"])
    (tmp_path / "config.json").write_text(json.dumps({"schema_version": 1, **config.to_json()}))
    entry = {"env_steps": 8, ENTRY: describe_actor(config.algo, 98, 29)}
    wrong = {name: value / 0 for name, value in config.algo.build_actor(98, 29).state_dict().items()}
    for more, message in (({}, "must hold dense tensors by name"), ({"actor": wrong}, "has values that are not")):
        write(tmp_path / "model_1.pt", 1, **entry, **more)
        assert message in refusal(load_run, tmp_path, "flashsac", "g1_walk_flat", "mujoco")


def test_a_mask_with_infinities_is_loaded_and_exported(tmp_path: Path) -> None:
    """What its owner's actor trains with is refused nowhere afterwards, but for NaN."""
    setting = "algo.algo_params.actor_config={builder:own_actors:Masked}"
    config = load_config("flashsac", "g1_walk_flat", "mujoco", [setting])
    (tmp_path / "config.json").write_text(json.dumps({"schema_version": 1, **config.to_json()}))
    weights = config.algo.build_actor(98, 29).state_dict()
    entry = {"env_steps": 8, ENTRY: describe_actor(config.algo, 98, 29)}
    write(tmp_path / "model_1.pt", 1, **entry, actor=weights)
    loaded, checkpoint = load_run(tmp_path, "flashsac", "g1_walk_flat", "mujoco")
    export_policy(loaded, checkpoint.content, tmp_path / "policy.onnx")
    assert (tmp_path / "policy.onnx").stat().st_size > 0
    weights["network.mask"][1] = float("nan")
    write(tmp_path / "model_2.pt", 2, **entry, actor=weights)
    message = "actor/network.mask has values that are not finite"
    assert message in refusal(load_run, tmp_path, "flashsac", "g1_walk_flat", "mujoco")


def test_the_run_of_an_attempt_is_the_folder_around_it(tmp_path: Path) -> None:
    path = run(tmp_path, "run")
    assert run_of(path / "attempt-002") == path == run_of(path)
    assert run_of(tmp_path / "attempt-002") == tmp_path / "attempt-002"  # nothing around it is a run
