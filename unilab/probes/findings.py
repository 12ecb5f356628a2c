"""What probes find, as JSON: named checks that pass or not, and measurements beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Check:
    """One thing that must hold.

    Attributes:
        name: as in `parameters_equal`.
        passed: whether it held.
        detail: what was found, in a few words with its numbers.
        required: False for what is recorded alone and decides nothing.
    """

    name: str
    passed: bool
    detail: str
    required: bool = True


@dataclass(frozen=True)
class Findings:
    """What a probe found.

    Attributes:
        probe: its name.
        smoke: whether it ran on the CPU.
        backend: `nccl` or `gloo`.
        world_size: number of ranks.
        devices: name of each rank's device.
        versions: of torch, CUDA, NCCL and the driver, those that are there.
        transport: how NCCL carried data, as in `p2p`; `none` without NCCL.
        settings: what was asked for.
        seconds: wall time of the probe.
        checks: the checks, in order.
        measurements: what was measured, one object each.
    """

    probe: str
    smoke: bool
    backend: str
    world_size: int
    devices: tuple[str, ...]
    versions: dict[str, str]
    transport: str
    settings: dict[str, Any]
    seconds: float
    checks: tuple[Check, ...]
    measurements: tuple[dict[str, Any], ...] = ()

    @property
    def passed(self) -> bool:
        """Whether there are required checks and all of them passed."""
        required = [check.passed for check in self.checks if check.required]
        return bool(required) and all(required)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"schema_version": SCHEMA_VERSION, "passed": self.passed, **asdict(self)}


@dataclass
class RankPart:
    """What one rank found; written to its file after every addition, so that a crash loses nothing.

    Attributes:
        path: its file.
        checks: what this rank found by itself.
        agree: values, usually digests, that must be the same on every rank, by the name of the check.
        facts: whatever else the program that started the ranks must know.
        measurements: as in `Findings`.
    """

    path: Path
    checks: list[Check] = field(default_factory=list)
    agree: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    measurements: list[dict[str, Any]] = field(default_factory=list)

    def check(self, name: str, passed: bool, detail: str, required: bool = True) -> None:
        """Add a check."""
        self.checks.append(Check(name, bool(passed), detail, required))
        self.write()

    def same(self, name: str, value: str) -> None:
        """Add a value that must be the same on every rank."""
        self.agree[name] = value
        self.write()

    def measure(self, **values: Any) -> None:
        """Add a measurement."""
        self.measurements.append(values)
        self.write()

    def enter(self, stage: str) -> None:
        """Note what comes next, for whoever finds this rank stuck or dead."""
        self.facts["stage"] = stage
        self.write()

    def write(self) -> None:
        """Write the file, whole or not at all."""
        content = {key: value for key, value in asdict(self).items() if key != "path"}
        partial = self.path.with_suffix(".part")
        partial.write_text(json.dumps(content))
        partial.replace(self.path)

    @classmethod
    def read(cls, path: Path) -> RankPart:
        """What a rank wrote; an empty part where it wrote nothing."""
        if not path.exists():
            return cls(path)
        content = json.loads(path.read_text())
        checks = [Check(**check) for check in content.pop("checks")]
        return cls(path, checks, **content)


def join_parts(parts: Sequence[RankPart]) -> list[Check]:
    """One check for each name: passed where it passed on every rank, and was made there.

    The detail is rank 0's, or that of the first rank that failed. A name that is also one of values that must agree
    stands for both.
    """
    names = {check.name: None for part in parts for check in part.checks}
    joined = {name: _join(name, [{check.name: check for check in part.checks} for part in parts]) for name in names}
    for name in {name: None for part in parts for name in part.agree}:
        compared = _compare(name, [part.agree for part in parts])
        joined[name] = _both(joined[name], compared) if name in joined else compared
    return list(joined.values())


def _both(made: Check, compared: Check) -> Check:
    detail = f"{made.detail}; {compared.detail}"
    return Check(made.name, made.passed and compared.passed, detail, made.required)


def _join(name: str, ranks: Sequence[Mapping[str, Check]]) -> Check:
    found = [rank.get(name) for rank in ranks]
    required = any(check.required for check in found if check is not None)
    for number, check in enumerate(found):
        if check is None:
            return Check(name, False, f"rank {number} did not come so far", required)
        if not check.passed:
            return Check(name, False, f"rank {number}: {check.detail}", required)
    assert found[0] is not None
    return found[0]


def _compare(name: str, ranks: Sequence[Mapping[str, str]]) -> Check:
    absent = [str(number) for number, values in enumerate(ranks) if name not in values]
    if absent:
        return Check(name, False, f"rank {', '.join(absent)} did not come so far")
    values = [values[name] for values in ranks]
    if len(set(values)) == 1:
        return Check(name, True, f"the same on {len(values)} ranks: {values[0][:16]}")
    return Check(name, False, "; ".join(f"rank {number}: {value[:16]}" for number, value in enumerate(values)))
