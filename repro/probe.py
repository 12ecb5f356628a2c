"""One probe of the trainer: how it is asked, run in bounded time, and what it may answer."""

from __future__ import annotations

import fnmatch
import json
import shlex
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from repro.errors import UsageError
from repro.launch import GRACE_SECONDS, REASON_LENGTH, Ended, Runner, run_cell
from repro.matrix import ProbeName
from repro.redact import Redactor
from repro.schema import Strict, parse_model
from repro.text import count_of
from unilab.names import EXIT_FAILED, EXIT_OK

PROGRAM = (sys.executable, "-P", "-m", "unilab.probes")
LIMIT_SECONDS = 600.0
DEFAULT_ALGO = "sac"
OLDER: dict[str, JsonValue] = {"algo": DEFAULT_ALGO, "overrides": []}  # of commits whose findings do not say it
# What no passing probe lacks, on any device and of any version: without it nothing was probed. `*` stands for a name.
ESSENTIAL: dict[ProbeName, tuple[str, ...]] = {
    "correctness": ("initial_state_equal", "parameters_equal", "gradient_is_mean_of_ranks", "ranks_ended"),
    "communication": ("ended_*", "values_correct_*"),
    "nccl-capture": ("*_warmed",),
}


class Check(Strict):
    """One thing that must hold; where it is not required, it is recorded and decides nothing."""

    name: Annotated[str, Field(min_length=1)]
    passed: bool
    detail: str
    required: bool


class Findings(Strict):
    """What `python -m unilab.probes` writes.

    Attributes:
        schema_version: Of this object.
        passed: Whether there are required checks and all of them passed.
        probe: Name of the probe.
        smoke: Whether it ran on the CPU.
        backend: `nccl`, or `gloo` in smoke.
        world_size: Number of ranks.
        devices: Name of each rank's device.
        versions: Of the libraries and the driver.
        transport: How NCCL carried data.
        settings: What was asked for.
        seconds: Wall time.
        checks: The checks, in order.
        measurements: What was measured, one object each; every number is finite.
    """

    schema_version: Literal[1]
    passed: bool
    probe: ProbeName
    smoke: bool
    backend: Literal["nccl", "gloo"]
    world_size: Annotated[int, Field(ge=1)]
    devices: tuple[str, ...]
    versions: dict[str, str]
    transport: str
    settings: dict[str, JsonValue]
    seconds: Annotated[float, Field(ge=0)]
    checks: tuple[Check, ...]
    measurements: tuple[dict[str, JsonValue], ...]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [check.name for check in self.checks]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"check {twice!r} is there twice")
        if len(self.devices) != self.world_size:
            raise ValueError(f"{len(self.devices)} devices of {count_of(self.world_size, 'rank')}")
        if self.backend != ("gloo" if self.smoke else "nccl"):
            raise ValueError(f"backend {self.backend} with smoke = {json.dumps(self.smoke)}")
        required = [check.passed for check in self.checks if check.required]
        if self.passed != (bool(required) and all(required)):
            raise ValueError(f"passed is {json.dumps(self.passed)}, its checks say otherwise")
        made = [check.name for check in self.checks if check.required]
        lacking = [pattern for pattern in ESSENTIAL[self.probe] if not fnmatch.filter(made, pattern)]
        if self.passed and lacking:
            raise ValueError(f"passed is true without the check {lacking[0]!r}")
        if any((name == "cpu") != self.smoke for name in self.devices):
            raise ValueError(f"devices {', '.join(self.devices)} with smoke = {json.dumps(self.smoke)}")
        return self

    @model_validator(mode="after")
    def _finite(self) -> Self:
        try:
            json.dumps([self.settings, self.measurements], allow_nan=False)
        except ValueError:
            raise ValueError("settings or measurements hold a number that is not finite") from None
        return self

    @property
    def detail(self) -> str:
        """How many checks passed, or the first one that failed."""
        required = [check for check in self.checks if check.required]
        failed = next((check for check in required if not check.passed), None)
        if failed is not None:
            return f"{failed.name}: {plain(failed.detail)}"
        return f"{len(required)} of {count_of(len(required), 'check')} passed" if required else "it made no check"

    @property
    def setting(self) -> str:
        """Where it ran, in words."""
        devices = ", ".join(
            f"{self.devices.count(name)} \N{MULTIPLICATION SIGN} {name}" for name in dict.fromkeys(self.devices)
        )
        versions = ", ".join(f"{name} {version}" for name, version in sorted(self.versions.items()))
        by = self.backend if self.smoke else f"{self.backend} over {self.transport}"
        asked = [name for name, value in sorted(self.settings.items()) if value is True]
        asked += [f"{name} {value}" for name, value in sorted(self.settings.items()) if isinstance(value, str)]
        return "; ".join([f"{count_of(self.world_size, 'rank')}, {by}, {devices}", versions, *asked])


@dataclass(frozen=True)
class Asked:
    """A probe as it is asked for.

    Attributes:
        probe: Its name.
        world_size: Number of ranks.
        smoke: On the CPU.
        compile_loss: Objectives and steps are compiled.
        algo: Whose learner `correctness` looks at; the other probes look at none.
    """

    probe: ProbeName
    world_size: int
    smoke: bool
    compile_loss: bool = False
    algo: str = DEFAULT_ALGO

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of the program."""
        return (
            *(self.probe, "--world-size", str(self.world_size)),
            *(("--compile-loss",) if self.compile_loss else ()),
            *(("--smoke",) if self.smoke else ()),
            *(("--algo", self.algo) if self.algo != DEFAULT_ALGO else ()),  # commits before it know no other
        )

    def shell_command(self, variables: Mapping[str, str]) -> str:
        """The command as a shell takes it, with variables before it."""
        assigned = [f"{name}={shlex.quote(value)}" for name, value in sorted(variables.items())]
        return " ".join([*assigned, shlex.join(["python", *PROGRAM[1:], *self.arguments])])

    def deviation(self, found: Findings) -> str | None:
        """What the findings are of, where that is not what was asked for."""
        learner: dict[str, JsonValue] = {}
        if self.probe == "correctness":
            learner = {"algo": self.algo, "overrides": []}
        for what, asked, got in (
            ("probe", self.probe, found.probe),
            ("world_size", self.world_size, found.world_size),
            ("smoke", self.smoke, found.smoke),
            ("settings.compile_loss", self.compile_loss, found.settings.get("compile_loss")),
            *((f"settings.{name}", value, found.settings.get(name, OLDER[name])) for name, value in learner.items()),
        ):
            if asked != got:
                return f"{what} was asked as {json.dumps(asked)}, its findings say {json.dumps(got)}"
        return None


@dataclass(frozen=True)
class Probed:
    """How a probe ended: with findings, or with a reason why there are none."""

    ended: Ended
    findings: Findings | None
    reason: str | None


def run_probe(
    asked: Asked,
    environment: Mapping[str, str],
    out_dir: Path,
    log: Path,
    grace: float = GRACE_SECONDS,
    run: Runner = run_cell,
) -> Probed:
    """Run a probe to its end, at most `LIMIT_SECONDS`.

    Args:
        asked: What to run.
        environment: Its whole environment.
        out_dir: Its working directory.
        log: File for its output, in a folder of `out_dir`.
        grace: Seconds between SIGTERM and SIGKILL.
        run: What runs it; in a container it can write `out_dir` alone.
    """
    with tempfile.TemporaryDirectory(prefix="repro-probe-", dir=out_dir) as name:
        output = out_dir.resolve() / Path(name).name / "findings.json"
        command = [*PROGRAM, *asked.arguments, "--output", str(output)]
        ended = run(command, environment, out_dir, log, LIMIT_SECONDS, grace)
        try:
            return Probed(ended, read_findings(asked, ended, output), None)
        except UsageError as error:
            reason = Redactor(out_dir).text(plain(str(error)))
    return Probed(ended, None, reason if len(reason) <= REASON_LENGTH else f"{reason[: REASON_LENGTH - 1]}…")


def read_findings(asked: Asked, ended: Ended, path: Path) -> Findings:
    """Read what a probe wrote.

    Raises:
        UsageError: If it did not end by itself, or its findings are missing, malformed, of another probe, or contradict
            its exit code.
    """
    if ended.outcome != "exited" or not path.is_file():
        raise UsageError(ended.reason or f"exit code {ended.exit_code}, but it wrote no findings")
    found = parse_model(Findings, path.read_bytes(), "its findings")
    problem = asked.deviation(found) or contradiction(found, ended.exit_code)
    if problem is not None:
        raise UsageError(problem)
    return found


def contradiction(found: Findings, exit_code: int | None) -> str | None:
    """What is wrong where findings and exit code do not say the same, or None."""
    if exit_code == (EXIT_OK if found.passed else EXIT_FAILED):
        return None
    return f"its findings say {'passed' if found.passed else 'failed'}, its exit code is {exit_code}"


def plain(words: str) -> str:
    """Text on one line."""
    return " ".join(words.split())
