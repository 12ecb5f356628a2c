"""Weights & Biases beside the event file, where `training.logger=wandb` asks for it; nothing else imports it.

The event file stays the evidence. A thread of its own hands the records over, so that neither training nor the event
file waits for W&B, and what goes wrong after the start is said once.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import shutil
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from unilab.config import RunConfig
from unilab.event_log import Record
from unilab.hardware import HostUnfit
from unilab.provenance import redact

FOLDER = "wandb"  # inside the run directory
BACKLOG = 1000  # records that may wait
START_SECONDS, FINISH_SECONDS = 30.0, 60.0
SERVICE = "wandb-core"  # the process that the package starts
# No code, no package list, no facts of host, user or hardware; no capture of the output.
SETTINGS: dict[str, Any] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "finish_timeout": FINISH_SECONDS,
    "finish_timeout_raises": True,
    "host": "",
    "init_timeout": START_SECONDS,
    "program": "train",
    "save_code": False,
    "silent": True,
    "symlink": False,
    "username": "",
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


def missing_for_wandb() -> str | None:
    """One line if this host lacks the package, else None; imports nothing."""
    if find_spec("wandb") is not None:
        return None
    return "training.logger=wandb needs wandb: install unilab-repro[wandb], or type training.logger=tensorboard"


def run_settings(config: RunConfig, directory: Path) -> dict[str, Any]:
    """What the run is called: as asked for, else by algorithm, task and run directory, without names of people."""
    training, algo = config.training, config.algo.algo
    return {
        "project": training.wandb_project,
        "entity": training.wandb_entity,
        "group": training.wandb_group or training.task_name,
        "job_type": training.wandb_job_type or algo,
        "name": training.wandb_name or redact(f"{algo}__{training.task_name}__{directory.name}"),
        "tags": list(dict.fromkeys([*training.wandb_tags, algo, training.task_name, training.sim_backend])),
        "notes": training.wandb_notes,
        "mode": training.wandb_mode,
        "config": redact(config.to_json()),
    }


def start_wandb(config: RunConfig, directory: Path) -> WandbLog:
    """Start a run of W&B that keeps its files in the run directory.

    Args:
        config: the run.
        directory: the run directory, made already.

    Raises:
        HostUnfit: if the package is missing or its server cannot be reached.
        ValueError: if a login is needed or a setting is refused.
    """
    if (missing := missing_for_wandb()) is not None:
        raise HostUnfit(missing)
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its crash reports; read at import
    wandb = importlib.import_module("wandb")
    try:
        wandb.setup(wandb.Settings(**SETTINGS))  # already here, so that a login is never asked for on the terminal
        run = wandb.init(dir=str(directory), settings=wandb.Settings(**SETTINGS), **run_settings(config, directory))
    except wandb.Error as error:
        wandb.teardown()
        shutil.rmtree(directory / FOLDER, ignore_errors=True)  # a second try may use the directory
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        if isinstance(error, wandb.errors.UsageError | wandb.errors.AuthenticationError):
            hint = "type wandb login, set WANDB_API_KEY, or type training.wandb_mode=offline"
            raise ValueError(f"W&B cannot start: {reason}; {hint}") from None
        raise HostUnfit(f"W&B cannot start: {reason}; type training.wandb_mode=offline") from None
    print(f"W&B run {run.url or run.sync_dir}")
    return WandbLog(run, wandb.teardown)


class WandbLog:
    """Hands records to a run of W&B.

    Args:
        run: as `wandb.init` returns it.
        teardown: ends the process that W&B works in.
    """

    def __init__(self, run: Any, teardown: Any) -> None:
        self._wandb_run, self._teardown = run, teardown
        self._broken = False
        self._queue: queue.Queue[Record | int] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="wandb-log", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Queue one iteration; never waits, never raises."""
        if self._broken:
            return
        if self._queue.qsize() >= BACKLOG:
            self._give_up(f"it is {BACKLOG} records behind")
            return
        self._queue.put(record)

    def close(self, exit_code: int) -> None:
        """Hand over what is queued and end the run; waits a bounded time, never raises.

        Args:
            exit_code: of the training; other than 0 the run counts as failed.
        """
        self._queue.put(exit_code)
        self._thread.join(FINISH_SECONDS + 10)
        if self._thread.is_alive():
            self._give_up("it does not end")
        if self._broken:
            self._kill()

    def _kill(self) -> None:
        """End the process of W&B, for which the interpreter's exit would wait; what it has on disk stays."""
        for child in psutil.Process().children():
            if child.name() == SERVICE:
                child.kill()
        with contextlib.suppress(Exception, SystemExit):  # takes back its exit hook, then finds the process gone
            self._teardown()

    def _run(self) -> None:
        try:
            while isinstance(item := self._queue.get(), Record):
                if not self._broken:
                    self._wandb_run.log(item.scalars, step=item.env_steps)
            self._wandb_run.finish(exit_code=item)
            self._teardown(exit_code=item)
        except Exception as error:  # whatever it is, training goes on
            self._give_up(next(iter(str(error).splitlines()), type(error).__name__))

    def _give_up(self, reason: str) -> None:
        if not self._broken:
            self._broken = True
            print(f"W&B stopped: {reason}; training goes on and its event file has everything", file=sys.stderr)
