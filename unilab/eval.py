"""The `eval` command: how a trained policy does, as numbers and as a video."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unilab.names import (
    EVAL_FILE,
    EXIT_FAILED,
    EXIT_HOST_UNFIT,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    POLICY_FILE,
    STILL_FILE,
    VIDEO_FILE,
)
from unilab.physics.process import bound_environment, end_with_parent, ending
from unilab.signals import interrupts_once

if TYPE_CHECKING:
    from unilab.checkpoint import Checkpoint
    from unilab.config import RunConfig
    from unilab.episodes import Evaluation

LEVEL = 0.95
OK = "ok"
PREFIX = "eval: "


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate a checkpoint of a run: print and write numbers, record a video; returns the exit code.

    Args:
        argv: arguments after the program's name; None takes the process's own.
    """
    parser = argparse.ArgumentParser(prog="eval", description=__doc__, allow_abbrev=False)
    for name in ("algo", "task", "sim"):
        parser.add_argument(f"--{name}", required=True, help=f"{name} the run was trained with")
    parser.add_argument("--load-run", required=True, metavar="DIR", help="run directory, or -1: the latest")
    parser.add_argument("--checkpoint", type=int, default=-1, metavar="N", help="its iteration (default: the newest)")
    parser.add_argument("--episodes", type=int, default=64, help="episodes, one per environment (default %(default)s)")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="training.no_play, training.export_onnx, training.play_*"
    )
    args = parser.parse_intermixed_args(argv)
    with interrupts_once():
        try:
            end_with_parent()
            return _evaluate_run(args)
        except KeyboardInterrupt:
            return _refuse("interrupted", EXIT_INTERRUPTED)


def _evaluate_run(args: argparse.Namespace) -> int:
    from unilab.checkpoint import load_run
    from unilab.config import change_playback
    from unilab.episodes import evaluate
    from unilab.run_dir import RunDirectory
    from unilab.video import VideoError, find_renderer

    try:
        if args.episodes < 1:
            raise ValueError(f"--episodes {args.episodes}: at least 1 is needed")
        config, checkpoint = load_run(args.load_run, args.algo, args.task, args.sim, args.checkpoint)
        config = change_playback(config, args.overrides)
        renderer = None if config.training.no_play else find_renderer()
        print(f"{checkpoint.file} at iteration {checkpoint.iteration}, {checkpoint.env_steps} env steps", flush=True)
        result = evaluate(config, checkpoint.content, args.episodes)
    except ValueError as error:
        return _refuse(str(error), EXIT_USAGE)
    except VideoError as error:
        return _refuse(f"{error}; for the numbers alone add training.no_play=true", EXIT_HOST_UNFIT)
    if (reason := _not_finite(result)) is not None:
        return _refuse(f"{EVAL_FILE}: {reason}", EXIT_FAILED)
    run, facts = checkpoint.file.parent, {**_identity(config, checkpoint), **summarize(result)}
    print("\n".join(table(facts)), flush=True)
    try:
        RunDirectory(run).write_evaluation(facts)
    except OSError as error:
        return _refuse(f"{EVAL_FILE}: {error}", EXIT_FAILED)
    if config.training.no_play and "training.no_play=true" not in args.overrides:
        print(
            f"no {POLICY_FILE} or {VIDEO_FILE} written: the run has training.no_play=true; add training.no_play=false"
        )
    return _make_files(config, checkpoint.content, run, renderer)


def _not_finite(result: Evaluation) -> str | None:
    """Which measure is not finite, as a return is where rewards are huge; None if all are."""
    for name, values in vars(result).items():
        count = sum(not math.isfinite(value) for value in values)
        if count:
            return f"{name} are not finite in {count} of {len(values)} episodes"
    return None


def _make_files(config: RunConfig, content: dict[str, Any], run: Path, renderer: str | None) -> int:
    """The policy and the video of a run; the exit code."""
    from unilab.export import ExportError, export_policy
    from unilab.hardware import HostUnfit
    from unilab.video import VideoError

    makers: dict[str, Callable[[], None]] = {}
    if POLICY_FILE in files_after_training(config):
        makers[POLICY_FILE] = lambda: export_policy(config, content, run / POLICY_FILE)
    if renderer is not None:
        makers[VIDEO_FILE] = lambda: record_video(config, content, run, renderer)
    code = EXIT_OK
    for name, make in makers.items():
        try:
            make()
            print(f"wrote {run / name}", flush=True)
        except HostUnfit as error:
            code = _refuse(f"{name}: {error}", EXIT_HOST_UNFIT)
        except (OSError, ExportError, VideoError) as error:
            code = _refuse(f"{name}: {str(error).removeprefix(f'no {name}: ')}", EXIT_FAILED)
    return code


def files_after_training(config: RunConfig) -> tuple[str, ...]:
    """What `eval` makes of a run whose playback is wanted."""
    if config.training.no_play:
        return (EVAL_FILE,)
    return (EVAL_FILE, *((POLICY_FILE,) if config.training.export_onnx else ()), VIDEO_FILE)


def _refuse(message: str, code: int) -> int:
    print(f"{PREFIX}{' '.join(message.splitlines())}", file=sys.stderr)
    return code


def _identity(config: RunConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    from unilab.episodes import SEED
    from unilab.provenance import versions

    return {
        "algo": config.algo.algo,
        "task": config.training.task_name,
        "checkpoint": {
            "file": checkpoint.file.name,
            "sha256": checkpoint.sha256,
            "iteration": checkpoint.iteration,
            "env_steps": checkpoint.env_steps,
        },
        "seed": SEED,
        "versions": versions(),
    }


def summarize(result: Evaluation) -> dict[str, Any]:
    """The measures of `eval.json`: means with their intervals, and the numbers of every episode."""
    errors = {
        "tracking_error_lin": (result.errors_lin, result.standing_lin),
        "tracking_error_ang": (result.errors_ang, result.standing_ang),
    }
    return {
        "episodes": len(result.returns),
        "confidence_level": LEVEL,
        "episode_return": mean_interval(result.returns),
        "episode_length": mean_interval(result.lengths),
        **{
            name: {**mean_interval(values), "standing_still": sum(standing) / len(standing)}
            for name, (values, standing) in errors.items()
        },
        "falls": share_interval(sum(result.falls), len(result.falls)),
        "samples": {
            "episode_return": result.returns,
            "episode_length": result.lengths,
            **{name: values for name, (values, _) in errors.items()},
            "standing_error_lin": result.standing_lin,
            "standing_error_ang": result.standing_ang,
            "fall": result.falls,
        },
    }


def mean_interval(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and Student's t interval of it; one value has no interval."""
    import numpy as np
    from scipy.stats import t

    count, mean = len(values), float(np.mean(values))
    if count < 2:
        return {"mean": mean, "ci_low": None, "ci_high": None}
    half = float(t.ppf((1 + LEVEL) / 2, count - 1) * np.std(values, ddof=1) / np.sqrt(count))
    return {"mean": mean, "ci_low": mean - half, "ci_high": mean + half}


def share_interval(count: int, total: int) -> dict[str, float | int]:
    """Share and Wilson's interval of it."""
    from scipy.stats import binomtest

    interval = binomtest(count, total).proportion_ci(LEVEL, method="wilson")
    return {"count": count, "share": count / total, "ci_low": float(interval.low), "ci_high": float(interval.high)}


def table(facts: dict[str, Any]) -> list[str]:
    """The measures of `eval.json` as lines of text."""
    episodes = facts["episodes"]
    count = "1 episode" if episodes == 1 else f"{episodes} episodes"
    lines = [
        f"{count} without noise, pushes or exploration; mean and {LEVEL:.0%} interval",
    ]
    for name, key, digits in (
        ("return", "episode_return", 2),
        ("episode length, control steps", "episode_length", 1),
        ("planar velocity error, m/s", "tracking_error_lin", 3),
        ("yaw rate error, rad/s", "tracking_error_ang", 3),
    ):
        found = facts[key]
        still = f"   standing still {found['standing_still']:.{digits}f}" if "standing_still" in found else ""
        lines.append(f"  {name:<30}{found['mean']:>9.{digits}f}  {_interval(found, digits)}{still}")
    falls = facts["falls"]
    share = {key: None if value is None else 100 * value for key, value in falls.items()}
    lines.append(f"  {'falls':<30}{falls['count']:>4} of {episodes}  {share['share']:.1f} %  {_interval(share, 1)} %")
    return lines


def _interval(found: dict[str, Any], digits: int) -> str:
    if found["ci_low"] is None:
        return "[no interval of one episode]"
    return f"[{found['ci_low']:.{digits}f}, {found['ci_high']:.{digits}f}]"


def record_video(config: RunConfig, checkpoint: dict[str, Any], run: Path, renderer: str) -> None:
    """Simulate robots anew, draw them, and put video and still into the directory of a run.

    Args:
        config: the run, with the playback wanted.
        checkpoint: content of one, as `load_run` returns it.
        run: the directory.
        renderer: from `unilab.video.find_renderer`.

    Raises:
        OSError: if nothing can be written there.
        VideoError: if it cannot be drawn or encoded.
    """
    from unilab.episodes import record
    from unilab.video import Recording, make_video

    training = config.training
    with tempfile.TemporaryDirectory(prefix=".play_", dir=run) as name:
        folder = Path(name)
        states, video, still = folder / "states.npz", folder / VIDEO_FILE, folder / STILL_FILE
        qpos = record(config, checkpoint, training.play_env_num, training.play_steps)
        Recording(config.env.task_class().scene, qpos, 1 / config.env.ctrl_dt).save(states)
        make_video(states, video, still, renderer)
        for file in (video, still):
            file.replace(run / file.name)


def evaluate_trained(config: RunConfig, run: Path) -> tuple[dict[str, str], int]:
    """Evaluate a run that has just been trained, in a process of its own.

    Args:
        config: the run.
        run: its directory.

    Returns:
        What became of each file by its name, `ok` or why it is not there, and the exit code.
    """
    from unilab.config import TASKS

    (task,) = (name for name, task in TASKS.items() if task.name == config.training.task_name)
    names = ["--algo", config.algo.algo, "--task", task, "--sim", config.training.sim_backend]
    command = [sys.executable, "-P", "-m", "unilab.eval", *names, "--load-run", str(run.absolute())]
    said: dict[str, str] = {}
    with subprocess.Popen(command, env=bound_environment(), stderr=subprocess.PIPE, text=True) as child:
        try:
            _pass_on(child, said)
            code = EXIT_FAILED if child.wait() else EXIT_OK
        except KeyboardInterrupt:
            child.terminate()  # where only this process was interrupted
            child.communicate()
            code = EXIT_INTERRUPTED
    files = {name: OK if (run / name).is_file() else "" for name in files_after_training(config)}
    otherwise = "interrupted" if code == EXIT_INTERRUPTED else said.get("", ending(child.returncode))
    return {name: found or said.get(name, otherwise) for name, found in files.items()}, code


def _pass_on(child: subprocess.Popen[str], said: dict[str, str]) -> None:
    """Print what a child says, and keep its complaints by what they are about, the last one also under no name."""
    assert child.stderr is not None
    for line in child.stderr:
        sys.stderr.write(line)
        if line.startswith(PREFIX):
            said[""] = line.removeprefix(PREFIX).strip()
            name, _, reason = said[""].partition(": ")
            said[name] = reason


if __name__ == "__main__":
    sys.exit(main())
