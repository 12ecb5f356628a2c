from __future__ import annotations

import hashlib
import json
import math
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from unilab import eval as evaluation
from unilab.actor_semantics import ENTRY, describe_actor
from unilab.checkpoint import load_run
from unilab.config import RunConfig, load_config
from unilab.sac.networks import Actor
from unilab.video import Recording, VideoError

SHORT = ("training.play_steps=3", "training.play_env_num=2", "training.export_onnx=false")
ROUTE = ["--algo", "sac", "--task", "g1_walk_flat", "--sim", "mujoco"]


def write_run(path: Path, iterations: dict[str, int]) -> RunConfig:
    """A run directory as training leaves it, with an untrained actor; `iterations` by file name."""
    config = load_config("sac", "g1_walk_flat", "mujoco", ["algo.actor_hidden_dim=16"])
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"schema_version": 1, **config.to_json()}))
    for name, iteration in iterations.items():
        state = {"env/penalty_scale": torch.tensor(0.0625)}
        actor = Actor(98, 29, 16).state_dict()
        dims = {"obs_dim": 98, "action_dim": 29, ENTRY: describe_actor(config.algo, 98, 29)}
        torch.save({"iteration": iteration, "actor": actor, "state": state, "env_steps": 40, **dims}, path / name)
    return config


def evaluate(run: Path, *arguments: str) -> int:
    return evaluation.main([*ROUTE, "--load-run", str(run), "--episodes", "3", *arguments])


def names(run: Path) -> set[str]:
    return {path.name for path in run.iterdir()} - {"config.json"}


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_the_newest_checkpoint_is_the_one_with_the_highest_iteration_inside(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {"model_9.pt": 9, "model_10.pt": 10, "model_99.pt": 3})
    _, checkpoint = load_run(tmp_path / "run", "sac", "g1_walk_flat", "mujoco")
    assert checkpoint.iteration == 10
    assert checkpoint.file.name == "model_10.pt"


def test_another_checkpoint_is_chosen_by_its_iteration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", {"model_9.pt": 9, "model_10.pt": 10})
    asked = ["--checkpoint", "9", "--episodes", "1", "training.no_play=true"]
    assert evaluate(tmp_path / "run", *asked) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'run' / 'model_9.pt'} at iteration 9, ")


def test_an_untrained_policy_falls_and_everything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    write_run(run, {"model_1.pt": 1})
    assert evaluate(run, "training.no_play=true") == 0
    printed = capsys.readouterr().out
    assert "model_1.pt at iteration 1, 40 env steps\n3 episodes without noise" in printed
    assert re.search(r"falls +3 of 3  100.0 %  \[43.9, 100.0\] %", printed)
    assert names(run) == {"model_1.pt", "eval.json"}
    facts = json.loads((run / "eval.json").read_text())
    digest = hashlib.sha256((run / "model_1.pt").read_bytes()).hexdigest()
    assert facts["checkpoint"] == {"file": "model_1.pt", "sha256": digest, "iteration": 1, "env_steps": 40}
    assert (facts["schema_version"], facts["episodes"], facts["falls"]["count"]) == (1, 3, 3)
    assert all(5 < length < 200 for length in facts["samples"]["episode_length"])  # it falls within about 1.3 s
    assert 0 < facts["episode_return"]["mean"] < 0.37 * facts["episode_length"]["mean"]
    assert facts["tracking_error_lin"]["standing_still"] < 1.08  # of a command of at most (1.0, 0.4) m/s


def test_two_evaluations_are_the_same(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {"model_1.pt": 1})
    assert evaluate(tmp_path / "run", "training.no_play=true") == 0
    first = (tmp_path / "run" / "eval.json").read_bytes()
    assert evaluate(tmp_path / "run", "training.no_play=true") == 0
    assert (tmp_path / "run" / "eval.json").read_bytes() == first


def test_the_interval_of_a_mean_is_students() -> None:
    found = evaluation.mean_interval([1.0, 2.0, 3.0])
    half = 4.302653 / 3**0.5  # the 0.975 quantile of t with 2 degrees of freedom; the deviation is 1
    assert found == {"mean": 2.0, "ci_low": pytest.approx(2 - half), "ci_high": pytest.approx(2 + half)}
    assert evaluation.mean_interval([4.0]) == {"mean": 4.0, "ci_low": None, "ci_high": None}
    assert evaluation.mean_interval([4.0, 4.0]) == {"mean": 4.0, "ci_low": 4.0, "ci_high": 4.0}


def test_the_interval_of_a_share_is_wilsons() -> None:
    square = 1.959964**2
    assert evaluation.share_interval(0, 10) == {
        "count": 0,
        "share": 0.0,
        "ci_low": pytest.approx(0.0, abs=1e-12),
        "ci_high": pytest.approx(square / (10 + square)),
    }
    centre, half = (5 + square / 2) / (10 + square), (square * (10 + square)) ** 0.5 / 2 / (10 + square)
    found = evaluation.share_interval(5, 10)
    assert (found["ci_low"], found["ci_high"]) == (pytest.approx(centre - half), pytest.approx(centre + half))


def test_one_episode_has_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", {"model_1.pt": 1})
    assert evaluate(tmp_path / "run", "--episodes", "1", "training.no_play=true") == 0
    assert "[no interval of one episode]" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "eval.json").read_text())["episode_return"]["ci_low"] is None


def test_a_return_that_overflows_is_one_line_and_no_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    write_run(run, {"model_1.pt": 1})
    content = torch.load(run / "model_1.pt", weights_only=True)
    torch.save(content | {"state": {"env/penalty_scale": torch.tensor(3e38)}}, run / "model_1.pt")
    assert evaluate(run, "training.no_play=true") == 1
    printed = capsys.readouterr()
    assert printed.err == "eval: eval.json: returns are not finite in 3 of 3 episodes\n"
    assert printed.out == f"{run / 'model_1.pt'} at iteration 1, 40 env steps\n"  # which one, before it is played
    assert names(run) == {"model_1.pt"}


# --- video -----------------------------------------------------------------------------------------------------------


def test_numbers_video_and_still(tmp_path: Path, renderer: str) -> None:
    write_run(tmp_path / "run", {"model_1.pt": 1})
    assert evaluate(tmp_path / "run", *SHORT) == 0
    assert names(tmp_path / "run") == {"model_1.pt", "eval.json", "play_video.mp4", "play_still.png"}


def test_without_a_renderer_nothing_is_simulated_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", {"model_1.pt": 1})
    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    monkeypatch.setattr("unilab.episodes.evaluate", lambda *_: pytest.fail("simulated"))
    assert evaluate(tmp_path / "run") == 3
    said = capsys.readouterr().err
    assert said.startswith("eval: no video can be made here: MUJOCO_GL=nonsense does not draw (")
    assert said.endswith("; for the numbers alone add training.no_play=true\n")
    assert said.count("\n") == 1
    assert names(tmp_path / "run") == {"model_1.pt"}


def test_a_video_that_fails_leaves_the_numbers_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(recording: Path, *_: object) -> None:
        assert Recording.load(recording).qpos.shape == (3, 2, 36)
        raise VideoError("the process that draws frame 0 of 3 died")

    monkeypatch.setattr("unilab.video.find_renderer", lambda: "egl")
    monkeypatch.setattr("unilab.video.make_video", fail)
    write_run(tmp_path / "run", {"model_1.pt": 1})
    assert evaluate(tmp_path / "run", *SHORT) == 1
    assert capsys.readouterr().err == "eval: play_video.mp4: the process that draws frame 0 of 3 died\n"
    assert names(tmp_path / "run") == {"model_1.pt", "eval.json"}


def test_an_interrupt_while_drawing_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("unilab.video.find_renderer", lambda: "egl")
    monkeypatch.setattr("unilab.video.make_video", lambda *_: signal.raise_signal(signal.SIGTERM))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    write_run(tmp_path / "run", {"model_1.pt": 1})
    assert evaluate(tmp_path / "run", *SHORT) == 130
    assert capsys.readouterr().err == "eval: interrupted\n"
    assert names(tmp_path / "run") == {"model_1.pt", "eval.json"}
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# --- refusals --------------------------------------------------------------------------------------------------------

TAKEN = "eval takes training.no_play, training.export_onnx, training.play_env_num, training.play_steps"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--load-run", "nowhere"], "is no run directory: it has no config.json"),
        (["--load-run", "empty"], "holds no checkpoint"),
        (["--load-run", "damaged"], "cannot be read"),
        (["--load-run", "foreign"], "log_std.weight is float32 (29, 8), the actor that its builder makes now"),
        (["--load-run", "run", "--episodes", "0"], "at least 1 is needed"),
        (["--load-run", "run", "--checkpoint", "7"], "run has no checkpoint of iteration 7; there is 1"),
        (["--load-run", "run", "algo.seed=3"], f"'algo.seed=3' says how the run was trained; {TAKEN}"),
        (["--load-run", "run", "+env.cpu_ids=[0]"], f"'env.cpu_ids=[0]' says how the run was trained; {TAKEN}"),
        (["--load-run", "run", "training.play_step=3"], "unknown key 'training.play_step', did you mean"),
        (["--load-run", "run", "training.play_steps=0"], "training.play_steps must be at least 1, got 0"),
        (
            ["--load-run", "run", "training.play_steps=many"],
            "training.play_steps: Value 'many' of type 'str' could not",
        ),
        (["--load-run", "run", "training.play_steps=1,2"], "is a sweep over values"),
        (["--load-run", "run", "training.no_play"], "cannot read 'training.no_play' as key=value"),
    ],
)
def test_refusals_are_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", {"model_1.pt": 1})
    write_run(tmp_path / "empty", {})
    write_run(tmp_path / "damaged", {})
    (tmp_path / "damaged" / "model_5.pt").write_bytes(b"not a checkpoint")
    write_run(tmp_path / "foreign", {"model_1.pt": 1})
    foreign = torch.load(tmp_path / "foreign" / "model_1.pt", weights_only=True)
    torch.save(foreign | {"actor": Actor(98, 29, 32).state_dict()}, tmp_path / "foreign" / "model_1.pt")
    assert evaluation.main([*ROUTE, *arguments, "training.no_play=true"]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "run" / "eval.json").exists()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", 3, "model_1.pt has format 3, this version reads 2; use the one that wrote it"),
        ("algo", "flashsac", "model_1.pt has algo 'flashsac', not 'sac'; choose what it was trained with"),
        ("task", "Go2JoystickFlat", "model_1.pt has task 'Go2JoystickFlat', not 'G1WalkFlat'"),
        ("env_steps", None, "model_1.pt: env_steps must be a whole number from 0, found None"),
        ("env_steps", -5, "env_steps must be a whole number from 0, found -5"),
        ("actor", {1: 2}, "model_1.pt: actor must hold dense tensors by name; no weight was restored"),
        ("state", {"env/penalty_scale": torch.tensor(math.nan)}, "not hold a penalty factor: it is not finite"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, value: Any, message: str
) -> None:
    write_run(tmp_path / "run", {"model_1.pt": 1})
    content = torch.load(tmp_path / "run" / "model_1.pt", weights_only=True)
    torch.save(content | {field: value}, tmp_path / "run" / "model_1.pt")
    assert evaluate(tmp_path / "run", "training.no_play=true") == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1 and "return" not in printed.out
    assert names(tmp_path / "run") == {"model_1.pt"}


# --- after training --------------------------------------------------------------------------------------------------


def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> RunConfig:
    """Have a script stand in for the process that evaluates; it runs in the run's directory."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ncd {tmp_path}/run\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return write_run(tmp_path / "run", {})


def test_what_became_of_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = child(
        tmp_path,
        monkeypatch,
        'echo "$@" > asked; echo $UNILAB_PARENT > parent; touch eval.json policy.onnx play_video.mp4',
    )
    assert evaluation.evaluate_trained(config, tmp_path / "run") == (
        {"eval.json": "ok", "policy.onnx": "ok", "play_video.mp4": "ok"},
        0,
    )
    asked = (tmp_path / "run" / "asked").read_text().strip()
    assert asked == f"-P -m unilab.eval {' '.join(ROUTE)} --load-run {tmp_path / 'run'}"
    assert (tmp_path / "run" / "parent").read_text() == f"{os.getpid()}\n"


def test_the_reason_of_a_missing_file_is_kept_and_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "echo a warning >&2; echo 'eval: play_video.mp4: the disk: full' >&2"
    config = child(tmp_path, monkeypatch, f"touch eval.json policy.onnx; {said}; exit 1")
    found = evaluation.evaluate_trained(config, tmp_path / "run")
    assert found == ({"eval.json": "ok", "policy.onnx": "ok", "play_video.mp4": "the disk: full"}, 1)
    assert capsys.readouterr().err == "a warning\neval: play_video.mp4: the disk: full\n"


def test_a_refusal_or_a_death_is_the_reason_of_every_missing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = child(tmp_path, monkeypatch, "echo 'eval: no video: none' >&2; exit 3")
    reason = "no video: none"
    expected = {"eval.json": reason, "policy.onnx": reason, "play_video.mp4": reason}
    assert evaluation.evaluate_trained(config, tmp_path / "run") == (expected, 1)
    (tmp_path / "python").write_text("#!/bin/sh\nkill -9 $$\n")
    found, code = evaluation.evaluate_trained(config, tmp_path / "run")
    assert code == 1
    assert all("SIGKILL" in text for text in found.values())


def test_an_interrupt_ends_the_child_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = child(tmp_path, monkeypatch, "touch eval.json; exec sleep 100")
    before, previous = psutil.Process().children(), signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        found = evaluation.evaluate_trained(config, tmp_path / "run")
    finally:
        timer.join()
        signal.signal(signal.SIGINT, previous)
    assert found == ({"eval.json": "ok", "policy.onnx": "interrupted", "play_video.mp4": "interrupted"}, 130)
    assert psutil.Process().children() == before
