"""Going on with a run: equal to a run that was never stopped, in an attempt of its own, or refused in one line."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from own_actors import Masked
from rank_rig import Rig, begun, differences, flash_settings, settings
from test_checkpoint import Hostile
from test_train import FILES, NAMES, SMALL, Run

from repro.events import Reason, Refusal
from repro.throughput import measure
from unilab import eval as evaluation
from unilab.algorithm import AlgoConfig
from unilab.checkpoint import Checkpoint, contents, load_checkpoint, read_checkpoint
from unilab.config import RunConfig
from unilab.event_log import Clock, EventLog
from unilab.flash_sac.config import FlashSacConfig, FlashSacParams
from unilab.flash_sac.custom_actor import CustomActor
from unilab.optim import WarmupCosine
from unilab.resume import _check_values
from unilab.run_dir import RunDirectory
from unilab.streams import STREAMS
from unilab.train import main


def train(*overrides: str, algo: str = "sac") -> Run:
    """The train command in this process; its directory is the one it names."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["--algo", algo, *NAMES[2:], *SMALL, *overrides])
    named = [line for line in out.getvalue().splitlines() if line.startswith("run directory ")]
    path = Path(named[0].removeprefix("run directory ")) if named else Path()
    return Run(path, code, out.getvalue(), err.getvalue())


# --- the same as a straight run --------------------------------------------------------------------------------------


def flash() -> FlashSacConfig:
    params = FlashSacParams(learning_rate_init=1e-5, learning_rate_warmup_steps=20, learning_rate_decay_steps=40)
    return flash_settings(algo_params=params)


def resumed(straight: Rig, folder: Path, algo: AlgoConfig, kept: Callable[[str], bool]) -> Rig:
    """Another seed's rank after a checkpoint of `straight` came to it through a file, with its ring and what is kept.

    Args:
        straight: the run.
        folder: takes the file.
        algo: its settings.
        kept: which entries that no checkpoint holds are handed over all the same.
    """
    content = contents(RunConfig(algo=algo), straight.env.task, straight.learner, straight.registry, 3, 24)
    checkpoint = read_checkpoint(RunDirectory(folder).write_checkpoint(3, content))
    other = begun(seed=4, config=algo)
    addresses = {name: value.data_ptr() for name, value in other.registry.tensors.items()}
    other.tick()
    other.registry.restore(checkpoint.content["state"], lasting=True)
    left_out = set(straight.registry.tensors) - set(straight.registry.lasting())
    for name in filter(kept, left_out):
        other.registry.tensors[name].copy_(straight.registry.tensors[name])
    other.replay.rows.copy_(straight.replay.rows)
    other.ticks = straight.ticks
    assert {name: value.data_ptr() for name, value in other.registry.tensors.items()} == addresses  # graphs keep them
    return other


@pytest.mark.parametrize("algo", [settings(), flash()], ids=["sac", "flashsac"])
def test_updates_go_on_to_the_bit_where_the_ring_is_kept(algo: AlgoConfig, tmp_path: Path) -> None:
    straight = begun(seed=3, config=algo)
    for _ in range(3):
        straight.tick()
    other = resumed(straight, tmp_path, algo, lambda name: name.startswith("replay/"))
    for _ in range(3):
        straight.update.run()
        other.update.run()
    apart = differences(straight.registry.snapshot(lasting=True), other.registry.snapshot(lasting=True))
    assert apart == []
    assert differences(dict(straight.learner.report()), dict(other.learner.report())) == []


@pytest.mark.parametrize("algo", [settings(), flash()], ids=["sac", "flashsac"])
def test_whole_ticks_go_on_to_the_bit_where_rows_are_kept_too(algo: AlgoConfig, tmp_path: Path) -> None:
    """Draws of all streams, the curriculum and the reward scale with them."""
    straight = begun(seed=3, config=algo)
    for _ in range(3):
        straight.tick()
    other = resumed(straight, tmp_path, algo, lambda name: True)
    for _ in range(3):
        straight.tick()
        other.tick()
    assert differences(straight.registry.snapshot(), other.registry.snapshot()) == []


def test_a_learning_rate_goes_on_where_it_was(tmp_path: Path) -> None:
    algo = flash()
    straight = begun(seed=3, config=algo)
    for _ in range(3):
        straight.tick()
    other = resumed(straight, tmp_path, algo, lambda name: name.startswith("replay/"))
    group = other.learner.groups["critic"]
    rate = group._next_lr()
    assert float(rate) == pytest.approx(1e-5 + (3e-4 - 1e-5) * 12 / 20)  # after 3 ticks of 4 critic steps
    assert isinstance(group._lr, WarmupCosine)


# --- runs ------------------------------------------------------------------------------------------------------------

ENVS, WARMUP = 8, 10
SAVING = ["algo.save_interval=3", "training.record_states=2"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log root with one run of 6 iterations."""
    folder = tmp_path_factory.mktemp("resume")
    assert train(f"training.log_root={folder}", "algo.max_iterations=6", *SAVING).code == 0
    return folder


@pytest.fixture(scope="module")
def first(root: Path) -> Run:
    """That run."""
    (path,) = (root / "G1WalkFlat").iterdir()
    return Run(path)


@pytest.fixture(scope="module")
def second(root: Path, first: Run) -> Run:
    """It goes on for 21 iterations."""
    return train(f"training.log_root={root}", "algo.resume=true", "algo.load_run=-1", "algo.max_iterations=27", *SAVING)


def test_the_attempt_says_where_it_comes_from(first: Run, second: Run) -> None:
    assert (second.code, second.err) == (0, "")
    assert second.path == first.path / "attempt-002"
    ring = "the replay ring is not saved and fills anew before the first update"
    line = f"RESUMED from {first.path / 'model_6.pt'} at iteration 6, env step 120, up to iteration 27; {ring}\n"
    assert second.out.count(line) == 1
    assert "changed since then: algo.max_iterations=27 (6)\n" in second.out
    origin = {
        "file": "model_6.pt",
        "iteration": 6,
        "env_steps": 120,
        "sha256": hashlib.sha256((first.path / "model_6.pt").read_bytes()).hexdigest(),
        "new_streams": False,
    }
    assert second.json("manifest.json")["resumed_from"] == second.json("command.json")["resumed_from"] == origin
    assert first.json("manifest.json")["resumed_from"] is first.json("command.json")["resumed_from"] is None
    assert second.json("manifest.json")["learner"]["replay_saved"] is False
    algo = second.json("config.json")["algo"]
    assert (algo["resume"], algo["load_run"], algo["checkpoint"]) == (True, "-1", -1)


def test_the_attempt_has_the_files_of_a_run(first: Run, second: Run) -> None:
    checkpoints = {f"model_{iteration}.pt" for iteration in range(9, 28, 3)}
    assert second.names == FILES | {"events", "physics_states.npz"} | checkpoints
    assert first.names == FILES | {"events", "physics_states.npz", "model_3.pt", "model_6.pt", "attempt-002"}


def test_steps_go_on_without_gap_or_repeat_and_filling_counts(first: Run, second: Run) -> None:
    """A first start counts the rows that fill the ring as env steps; so does this one."""
    assert [event.step for event in first.events] == [ENVS * (WARMUP + index) for index in range(6)]
    assert [event.step for event in second.events] == [120 + ENVS * (WARMUP + index) for index in range(21)]
    assert [line["iteration"] for line in second.progress] == list(range(7, 28))
    assert [record["Train/iteration"] for record in second.scalars] == list(range(7, 28))
    end = second.end
    assert (end["iterations"], end["final_env_steps"], end["event_count"]) == (27, 120 + 30 * ENVS, 21)
    checkpoint = second.checkpoint(27)
    assert (checkpoint["iteration"], checkpoint["env_steps"]) == (27, end["final_env_steps"])


def test_no_update_is_owed_for_the_time_of_filling(first: Run, second: Run) -> None:
    for run, iteration in ((first, 6), (second, 9), (second, 27)):
        state = run.checkpoint(iteration)["state"]
        assert (state["critic/adamw_step"], state["actor/adamw_step"]) == (8 * iteration, 2 * iteration)


def test_physics_is_recorded_in_the_second_half_of_what_was_left(second: Run) -> None:
    from unilab.physics.states import load_states

    assert load_states(second.path / "physics_states.npz").iterations == (19, 25)


def test_an_attempt_is_measured_by_itself_and_never_as_the_run(first: Run, second: Run) -> None:
    found = measure(second.path)
    assert (found.points, found.window.first_step, found.window.last_step) == (21, 280, 360)
    times = [event.wall_time for event in second.events]
    assert found.steps_per_second == pytest.approx(80 / (times[20] - times[10]), rel=1e-6)
    with pytest.raises(Refusal) as caught:
        measure(first.path, min_points=2)
    assert caught.value.code == Reason.SEVERAL_RUNS


def test_a_further_resume_sees_all_attempts(first: Run, second: Run) -> None:
    """It also removes what a killed run left half made, and nothing else."""
    before = first.names, second.names
    for left in (first.path / ".ranks", first.path / ".model_9.pt.partial", second.path / ".model_30.pt.partial"):
        left.touch()
    inside = train(f"algo.load_run={second.path}", "algo.resume=true", "algo.checkpoint=24", "algo.max_iterations=25")
    assert (inside.code, inside.path) == (0, first.path / "attempt-003")
    assert inside.json("manifest.json")["resumed_from"]["file"] == "attempt-002/model_24.pt"
    named = train(f"training.log_dir={first.path}", "algo.resume=true", "algo.max_iterations=28")
    assert (named.code, named.path) == (0, first.path / "attempt-004")
    assert named.json("manifest.json")["resumed_from"]["file"] == "attempt-002/model_27.pt"
    assert (first.names - {"attempt-003", "attempt-004"}, second.names) == before


def test_a_resumed_run_repeats_itself(first: Run, tmp_path: Path) -> None:
    """Random streams are restored: two attempts from one file are the same to the bit, and unlike a first start."""
    states = []
    for name in ("one", "two"):
        copied = shutil.copytree(first.path, tmp_path / name, ignore=shutil.ignore_patterns("attempt-*"))
        run = train(f"algo.load_run={copied}", "algo.resume=true", "algo.max_iterations=7")
        states.append(run.checkpoint(7)["state"])
    assert differences(*states) == []


def test_other_numbers_of_environments_may_go_on(first: Run, tmp_path: Path) -> None:
    copied = shutil.copytree(first.path, tmp_path / "run", ignore=shutil.ignore_patterns("attempt-*"))
    run = train(f"algo.load_run={copied}", "algo.resume=true", "algo.max_iterations=8", "algo.num_envs=4")
    assert run.code == 0
    assert run.end["final_env_steps"] == 120 + 4 * (WARMUP + 1)
    assert "changed since then: algo.num_envs=4 (8), algo.max_iterations=8 (6)" in run.out


def test_a_run_that_fails_at_once_ends_where_it_began(
    first: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr("unilab.runner.Runner", build)
    copied = shutil.copytree(first.path, tmp_path / "run", ignore=shutil.ignore_patterns("attempt-*"))
    run = train(f"algo.load_run={copied}", "algo.resume=true", "algo.max_iterations=8")
    assert (run.code, run.end["status"], run.end["iterations"], run.end["final_env_steps"]) == (1, "failed", 6, 120)


def test_the_latest_checkpoint_of_the_latest_run_is_evaluated(
    first: Run, second: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(first.path, "logs/sac/G1WalkFlat/run")
    assert evaluation.main([*NAMES, "--load-run", "-1", "--episodes", "1"]) == 0
    newest = load_checkpoint(first.path)  # of whichever attempt
    where = f"logs/sac/G1WalkFlat/run/{newest.file.relative_to(first.path)} at iteration {newest.iteration}, "
    assert re.match(re.escape(where) + r"\d+ env steps\n1 episode ", capsys.readouterr().out)


def test_what_a_gpu_trained_goes_on_here_with_random_streams_of_its_own(first: Run, tmp_path: Path) -> None:
    copied = shutil.copytree(first.path, tmp_path / "run", ignore=shutil.ignore_patterns("attempt-*"))
    from_cuda()(copied)
    run = train(f"algo.load_run={copied}", "algo.resume=true", "algo.max_iterations=7", *SAVING)
    assert (run.code, run.end["iterations"]) == (0, 7)
    assert run.out.count("random streams begin anew: the checkpoint was trained on another kind of device\n") == 1
    assert run.json("manifest.json")["resumed_from"]["new_streams"] is True
    assert run.checkpoint(7)["state"]["random/update"].numel() == torch.Generator().get_state().numel()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("algo", ["sac", "flashsac"])
def test_a_run_on_a_gpu_goes_on_captured(tmp_path: Path, algo: str) -> None:
    """Restored before capture: graphs replay on the restored state, with as many updates an iteration as before."""
    arguments = ["--algo", algo, *NAMES[2:], *SMALL[1:], f"training.log_dir={tmp_path / 'run'}"]
    for more in (["algo.max_iterations=4"], ["algo.max_iterations=7", "algo.resume=true"]):
        subprocess.run([sys.executable, "-m", "unilab.train", *arguments, *more], check=True, timeout=280)
    first, second = Run(tmp_path / "run"), Run(tmp_path / "run" / "attempt-002")
    assert second.json("manifest.json")["learner"]["cuda_graph"] is True
    weights = torch.load(first.path / "model_4.pt", weights_only=True)["critic"].values()
    assert all(value.device.type == "cpu" for value in weights)
    before, after = first.checkpoint(4)["state"], second.checkpoint(7)["state"]
    assert after["critic/adamw_step"] == before["critic/adamw_step"] * 7 / 4
    assert [line["iteration"] for line in second.progress] == [5, 6, 7]
    assert second.progress[0]["env_steps"] > first.end["final_env_steps"]
    assert not torch.equal(after["critic/parameters"], before["critic/parameters"])
    assert all(after[name].isfinite().all() for name in after if name.startswith(("actor", "critic", "env")))


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(first: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The run's directory without attempts, relative to a working folder of its own."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(first.path, "run", ignore=shutil.ignore_patterns("attempt-*"))
    yield Path("run")
    assert not (tmp_path / "ran").exists()


def refused(*overrides: str, algo: str = "sac") -> str:
    """The one line of a refusal, after which nothing is left behind."""
    before = sorted(path.as_posix() for path in Path().rglob("*"))
    run = train("algo.max_iterations=8", "algo.resume=true", *overrides, algo=algo)
    assert (run.code, run.out, run.err.count("\n")) == (2, "", 1), run.err
    assert run.err.startswith("train: ")
    assert sorted(path.as_posix() for path in Path().rglob("*")) == before
    return run.err


def altered(**fields: Any) -> Callable[[Path], None]:
    """Changes the newest checkpoint; None takes a field out."""

    def alter(run: Path) -> None:
        file = run / "model_6.pt"
        content = torch.load(file, weights_only=True) | fields
        torch.save({name: value for name, value in content.items() if value is not None}, file)

    return alter


def state(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Changes the state of the newest checkpoint."""

    def alter(run: Path) -> None:
        content = torch.load(run / "model_6.pt", weights_only=True)
        change(content["state"])
        torch.save(content, run / "model_6.pt")

    return alter


def filled(name: str, value: float) -> Callable[[Path], None]:
    """Changes the last value of an entry of the state."""
    return state(lambda found: found[name].view(-1)[-1].fill_(value))


def from_cuda(**others: torch.Tensor | None) -> Callable[[Path], None]:
    """Gives the newest checkpoint CUDA's random streams, and some others; None takes one out."""
    streams = {name: torch.zeros(16, dtype=torch.uint8) for name in STREAMS} | others

    def change(found: dict[str, Any]) -> None:
        for name, value in streams.items():
            del found[f"random/{name}"]
            found |= {} if value is None else {f"random/{name}": value}

    return state(change)


def other_actor(run: Path) -> None:
    """Another actor, and weights that nobody may have looked at before that is found."""
    content = torch.load(run / "model_6.pt", weights_only=True)
    entry = content["actor_semantics"] | {"kwargs": {"hidden": 4}}
    torch.save(content | {"actor_semantics": entry, "actor": "no weights", "state": "none"}, run / "model_6.pt")


def truncated(run: Path) -> None:
    data = (run / "model_6.pt").read_bytes()
    (run / "model_6.pt").write_bytes(data[: len(data) // 2])


FORMAT = "the minimum supported format is 2, retraining with the current version is the only way to recover"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (altered(format=1), f"run/model_6.pt has format 1; {FORMAT}"),
        (altered(format=None), f"run/model_6.pt has format None; {FORMAT}"),
        (altered(format=3), "has format 3, this version reads 2; use the one that wrote it"),
        (altered(algo="flashsac"), "run/model_6.pt has algo 'flashsac', not 'sac'"),
        (altered(task="Go2JoystickFlat"), "has task 'Go2JoystickFlat', not 'G1WalkFlat'"),
        (altered(obs_dim=97, action_dim=12), "has obs_dim 97, not 98; action_dim 12, not 29"),
        (altered(obs_dim=torch.tensor([49, 49])), "has obs_dim tensor([49, 49]), not 98; choose what it was"),
        (altered(obs_dim=torch.eye(2)), "has obs_dim tensor([[1., 0.], [0., 1.]]), not 98"),
        (altered(obs_dim=98.0), "has obs_dim 98.0, not 98"),
        (altered(env_steps=10**30), "run/model_6.pt: env_steps must be at most 2**53, found 1000000000"),
        (altered(env_steps=torch.eye(2)), "must be a whole number from 0, found tensor([[1., 0.], [0., 1.]])"),
        (altered(iteration=10**30), "its iteration must be at most 2**53, found 1000000000"),
        (altered(algo=torch.eye(2)), "has algo tensor([[1., 0.], [0., 1.]]), not 'sac'"),
        (altered(env_steps=-1), "env_steps must be a whole number from 0, found -1"),
        (altered(iteration=None), "its iteration must be a whole number from 0, found None"),
        (altered(iteration=-6), "its iteration must be a whole number from 0, found -6"),
        (altered(actor_semantics=None), "actor_semantics is missing, so this checkpoint is older than the format"),
        (other_actor, 'actor_semantics.kwargs is {"hidden": 4}, the configuration expects {"hidden": 16}'),
        (altered(state=[1]), "run/model_6.pt: state must hold tensors by name"),
        (state(lambda found: found.update({"env/penalty_scale": 3})), "state must hold tensors by name"),
        (state(lambda found: found.pop("critic/adamw_step")), "this run differ in critic/adamw_step; set what"),
        (state(lambda found: found.update({"a\nb": torch.ones(1)})), "this run differ in a b; set what"),
        (state(lambda found: found.update({"actor/adamw_step": torch.ones(2)})), "actor/adamw_step has shape ()"),
        (state(lambda found: found.update({"actor/adamw_step": torch.tensor(1)})), "is torch.float32, the snapshot"),
        (state(lambda found: found.update({"random/update": torch.zeros(16, dtype=torch.uint8)})), "has shape (5056,)"),
        (state(lambda found: found["random/update"].zero_()), "run/model_6.pt does not fit this run: "),
        (from_cuda(update=None), "this run differ in random/update; set what"),
        (from_cuda(update=torch.zeros(16)), "random/environment has shape (5056,), the snapshot (16,)"),
        (from_cuda(**dict.fromkeys(STREAMS, torch.zeros(16))), "random/environment has shape (5056,)"),
        (from_cuda(**dict.fromkeys(STREAMS, torch.zeros(4, 4, dtype=torch.uint8))), "the snapshot (4, 4)"),
        (from_cuda(update=torch.zeros(4, 4, dtype=torch.uint8)), "random/environment has shape (5056,)"),
        (filled("critic/parameters", float("nan")), "run/model_6.pt: critic/parameters has values that are not finite"),
        (filled("env/penalty_scale", float("inf")), "has values that are not finite; choose an earlier one with algo."),
        (filled("critic/adamw_step", -1), "run/model_6.pt: critic/adamw_step has negative values; choose an earlier"),
        (filled("actor/adamw_exp_avg_sq", -1e-3), "actor/adamw_exp_avg_sq has negative values"),
        (filled("env/episode_count", -1), "env/episode_count has negative values"),
        (lambda run: torch.save([1], run / "model_6.pt"), "it must hold a mapping, found list"),
        (truncated, "model_6.pt cannot be read: it is no archive, or its end is missing; name another iteration"),
        (altered(extra=Hostile(Path("ran"))), "it holds more than data, and what it holds might run as code"),
    ],
)
def test_checkpoints_that_are_refused(copied: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(copied)
    assert message in refused(f"algo.load_run={copied}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algo.load_run=run", "algo.max_iterations=6"], "at iteration 6 of algo.max_iterations=6: nothing is left"),
        (["algo.load_run=run", "algo.checkpoint=5"], "run has no checkpoint of iteration 5; there is 3, 6"),
        (["algo.load_run=run", "algo.critic_hidden_dim=32"], "critic/parameters has shape"),
        (["algo.load_run=run", "algo.actor_hidden_dim=32"], "no weight was restored"),
        (["algo.load_run=nowhere"], "nowhere is no run directory: it has no config.json"),
        (["algo.load_run=."], ". is no run directory"),
        (
            ["algo.load_run=run/model_3.pt"],
            "type algo.load_run=run algo.checkpoint=3, for eval --load-run run",
        ),
        ([], "no run of sac/G1WalkFlat/mujoco below logs/sac/G1WalkFlat has a checkpoint; name a run directory"),
        (["algo.load_run=run", "training.log_dir=new"], "is written on inside that run, not in training.log_dir=new"),
        (["algo.load_run=run", "algo.resume=false"], "algo.resume must be true where algo.load_run or algo.checkpoint"),
        (["algo.load_run=run", "algo.checkpoint=-2"], "algo.checkpoint must be an iteration, or -1 for the newest"),
    ],
)
@pytest.mark.usefixtures("copied")
def test_requests_that_are_refused(overrides: list[str], message: str) -> None:
    assert message in refused(*overrides)


def test_a_run_of_another_algorithm_is_refused(copied: Path) -> None:
    message = refused(f"algo.load_run={copied}", algo="flashsac")
    assert "run was trained with sac/G1WalkFlat/mujoco, not flashsac/G1WalkFlat/mujoco" in message


def test_a_run_without_checkpoints_is_refused(copied: Path) -> None:
    for file in copied.glob("model_*.pt"):
        file.unlink()
    assert "run holds no checkpoint: it ended before the first was due, every" in refused(f"algo.load_run={copied}")


def test_a_configuration_that_is_damaged_is_refused(copied: Path) -> None:
    (copied / "config.json").write_text(json.dumps({"algo": {}}))
    assert "run/config.json: the saved configuration does not fit this version" in refused(f"algo.load_run={copied}")


def test_a_run_that_is_not_over_is_not_gone_on_with(copied: Path) -> None:
    """Two runs would both write checkpoints of one run, and the newest could be either's."""
    (copied / "attempt-002").mkdir()
    with closing(EventLog(copied / "attempt-002", Clock.start())):
        message = refused(f"algo.load_run={copied}")
    assert "a run still writes run/attempt-002; wait for its end, or end it, before going on" in message
    assert train("algo.resume=true", f"algo.load_run={copied}", "algo.max_iterations=7").code == 0


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("reward_scale/largest_return", float("nan"), "values that are not finite"),
        ("reward_scale/variance", -1.0, "negative values"),
        ("reward_scale/count", -1.0, "negative values"),
        ("critic/trunk.norm.running_var", -1.0, "negative values"),
        ("actor/network.mask", float("nan"), "values that are not finite"),
        ("actor/network.mean.weight", float("inf"), "values that are not finite"),
    ],
)
def test_statistics_that_cannot_be_are_refused(tmp_path: Path, name: str, value: float, problem: str) -> None:
    rig = begun(config=flash())
    content = contents(RunConfig(algo=flash()), rig.env.task, rig.learner, rig.registry, 1, 8)
    actor = CustomActor(Masked(obs_dim=3, action_dim=1, device="cpu"))
    content["state"].update({f"actor/{name}": weight for name, weight in actor.state_dict().items()})
    _check_values(Checkpoint(tmp_path, "", content), actor)
    content["state"][name].view(-1)[0] = value
    with pytest.raises(ValueError, match=f": {name} has {problem}; choose an earlier one with algo.checkpoint"):
        _check_values(Checkpoint(tmp_path, "", content), actor)


def test_a_run_whose_last_update_was_skipped_goes_on(copied: Path) -> None:
    """Its metrics say why it was skipped, and are written anew."""
    filled("learner/Train/critic_gradient_norm", float("inf"))(copied)
    assert train("algo.resume=true", f"algo.load_run={copied}", "algo.max_iterations=7").code == 0
