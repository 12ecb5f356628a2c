"""Whether what a run says of itself holds together: events, progress, end and settings tell of the same iterations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from repro.events import EventLog, Reason, Refusal
from repro.run_files import Progress, RunEnd, find_count, find_value, read_json, read_progress
from unilab.names import CONFIG_FILE, MANIFEST_FILE, PROGRESS_FILE, RUN_END_FILE


def check_account(run_dir: Path, log: EventLog, end: RunEnd) -> None:
    """Compare the files of a run with each other; what an older version did not write is passed over.

    Args:
        run_dir: Its directory.
        log: Its events.
        end: How it ended.

    Raises:
        Refusal: `progress_mismatch` where events, `progress.jsonl` and `run_end.json` count other iterations,
            `settings_mismatch` where `config.json` is not of these iterations or not of `manifest.json`.
    """
    config, manifest = read_json(run_dir / CONFIG_FILE), read_json(run_dir / MANIFEST_FILE)
    progress = list(read_progress(run_dir / PROGRESS_FILE).values())
    _check_records(log, progress)
    _check_iterations(progress, end, config, manifest)
    _check_steps(progress, config, manifest)
    for setting, expected, found, where in _settings(config, manifest, end):
        if None not in (expected, found) and found != expected:
            raise Refusal(
                Reason.SETTINGS_MISMATCH,
                f"{CONFIG_FILE}: {setting} gives {expected}, {where} {found}; the files are not of one run",
            )


def _check_records(log: EventLog, progress: Sequence[Progress]) -> None:
    """Every record has its line; a cut tail explains exactly one missing record."""
    recorded = sorted({step for series in log.scalars.values() for step in series.steps.tolist()})
    lines = [entry.env_steps for entry in progress][: -1 if log.scan.cut_tail else None]
    if recorded != lines:
        step = min(set(recorded) ^ set(lines))
        raise Refusal(
            Reason.PROGRESS_MISMATCH,
            f"{log.path.name} has records of {len(recorded)} iterations, {PROGRESS_FILE} of {len(lines)}, and one of "
            f"them lacks env step {step}; the files are not of one run, run it again",
        )


def _check_iterations(
    progress: Sequence[Progress], end: RunEnd, config: Mapping[str, Any], manifest: Mapping[str, Any]
) -> None:
    """The lines are those of every `log_interval`-th iteration, and of the last, which `run_end.json` names."""
    before = find_count(manifest, "resumed_from", "iteration") or 0
    interval = find_count(config, "training", "log_interval") or 1
    found = [entry.iteration for entry in progress]
    earlier = range(before - before % interval + interval, end.iterations, interval)
    if len(found) != len(earlier) + 1 or found != [*earlier, end.iterations]:
        raise Refusal(
            Reason.PROGRESS_MISMATCH,
            f"{PROGRESS_FILE} has {len(found)} lines, from iteration {found[0]} to {found[-1]}; {RUN_END_FILE} says "
            f"{end.iterations} iterations, {len(earlier) + 1} of them logged; the files are not of one run",
        )


def _check_steps(progress: Sequence[Progress], config: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Every iteration steps every environment of every rank once."""
    envs, ranks = find_count(config, "algo", "num_envs"), find_count(manifest, "dp_sync", "world_size")
    if envs is None or ranks is None:
        return
    for one, other in pairwise(progress):
        steps, iterations = other.env_steps - one.env_steps, other.iteration - one.iteration
        if steps != iterations * envs * ranks:
            raise Refusal(
                Reason.SETTINGS_MISMATCH,
                f"{PROGRESS_FILE}: {steps} env steps in {iterations} iterations up to {other.iteration}, but "
                f"{CONFIG_FILE} has algo.num_envs={envs} and {MANIFEST_FILE} {ranks} ranks; "
                "the files are not of one run",
            )


def _settings(
    config: Mapping[str, Any], manifest: Mapping[str, Any], end: RunEnd
) -> Iterator[tuple[str, Any, Any, str]]:
    """What of a configuration other files say too: setting, its value, theirs, and where; None where one is silent."""
    envs, rows = (find_count(config, "algo", name) for name in ("num_envs", "replay_buffer_n"))
    updates, frequency = (find_count(config, "algo", name) for name in ("updates_per_step", "policy_frequency"))
    yield "algo.max_iterations", find_count(config, "algo", "max_iterations"), end.iterations, RUN_END_FILE
    for key, section, name in (("algo.algo", "learner", "algo"), ("env.physics_profile", "physics", "profile")):
        yield key, find_value(config, *key.split(".")), find_value(manifest, section, name), MANIFEST_FILE
    if envs and rows:
        replay = find_value(manifest, "learner", "replay_rows")
        yield "algo.num_envs x algo.replay_buffer_n", envs * rows, replay, MANIFEST_FILE
    collectives = find_count(manifest, "dp_sync", "gradient_collectives_per_iteration")  # one for each optimizer step
    if updates and frequency and collectives:
        steps = updates - (-updates // frequency)
        yield "algo.updates_per_step with algo.policy_frequency", steps, collectives, MANIFEST_FILE
