"""Which numbers of two reports may be compared: other runs of the same work; rates only on hosts of one class."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from repro.as_planned import PLACED
from repro.errors import UsageError
from repro.evidence import EVENT_FILE_MARK, Evidence
from repro.foreign import ForeignKeys
from repro.host import Host
from repro.matrix import Matrix
from repro.plan import Cell
from repro.result import Result
from repro.run_files import find_count, flatten, read_json
from repro.spin import NOISE_LIMIT
from repro.verify import Verification, check_folder
from unilab.names import CONFIG_FILE, MANIFEST_FILE

MATRIX_SETTINGS = ("algo", "task", "sim", "iterations", "interval", "ceiling", "overrides")
CASE_SETTINGS = ("gpus", "workers", "pools", "overrides", "environment", *ForeignKeys.model_fields)
WORKERS = "number of workers per rank"
ADVICE = "run the baseline's settings, or take a new baseline"


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two reports, verified and computed again from its raw files.

    Attributes:
        name: How messages call it: its folder.
        source: The code it measured, in short, and whether it had changes.
        matrix: Its matrix.
        result: Its numbers.
        settings: Resolved settings of a measured run of each case by dotted key, and its number of workers.
        events: Hashes of its event files.
    """

    name: str
    source: str
    matrix: Matrix
    result: Result
    settings: Mapping[str, Mapping[str, Any]]
    events: frozenset[str]

    def values(self, case: str, metric: str) -> dict[int, float]:
        """One metric of a case's measured runs by repeat, without the runs that lack it.

        `ceiling` is the physics ceiling itself, env steps/s.
        """
        if metric == "ceiling":
            shares = self.values(case, "ceiling_share")
            return {repeat: rate / shares[repeat] for repeat, rate in self._values(case).items() if repeat in shares}
        return self._values(case, metric)

    def _values(self, case: str, metric: str = "steps_per_second") -> dict[int, float]:
        cells = [cell for cell in self.result.cells if cell.case == case and cell.status == "measured"]
        return {cell.repeat: value for cell in cells if (value := getattr(cell, metric)) is not None}


def read_side(folder: Path) -> Side:
    """Verify a report's folder and compute its numbers again.

    Raises:
        UsageError: If it is no report, or does not verify; with the first reason.
    """
    check = Verification(check_folder(folder), lambda line: None)
    if not check.run():
        more = f" (and {len(check.problems) - 1} more)" if len(check.problems) > 1 else ""
        raise UsageError(f"{folder} does not verify: {check.problems[0]}{more}; see repro verify {folder}")
    assert check.report is not None
    evidence, result = check.report.evidence, check.report.result
    if evidence.plan.sources:
        raise UsageError(f"{folder} compares two commits or images and has its own verdict; give a report of repro run")
    source = evidence.plan.source
    return Side(
        name=str(folder),
        source=f"{source.short} with changes" if source.dirty else source.short,
        matrix=evidence.plan.matrix,
        result=result,
        settings=_settings(folder, evidence),
        events=frozenset(digest for name, digest in evidence.inputs.items() if EVENT_FILE_MARK in name),
    )


def refuse_incomparable(base: Side, current: Side) -> None:
    """Refuse two reports that no verdict on speed can come from.

    Raises:
        UsageError: Naming the side, or the first setting that differs and its two values.
    """
    for side in (base, current):
        if side.result.smoke:
            raise UsageError(f"{side.name} is a smoke report, which is never a benchmark; give one of a GPU host")
        if side.matrix.learning:
            raise UsageError(f"{side.name} is a learning report, which gives no verdict on speed; give another matrix")
    failed = [probe.name for probe in base.result.probes if not probe.passed]
    if failed:
        raise UsageError(f"{base.name} is no baseline, its probe {failed[0]} did not pass; give another report")
    if base.events & current.events:
        raise UsageError(f"{current.name} and {base.name} hold the same runs; give the report of other runs")
    found = _differing(base, current)
    if found is not None:
        what, old, new = found
        raise UsageError(
            f"not comparable: {what} is {_short(old)} in the baseline {base.name}, "
            f"{_short(new)} in {current.name}; {ADVICE}"
        )


def rates_obstacle(base: Side, current: Side) -> str | None:
    """Why rates of the two reports are not compared, or None where they may be."""
    classes = host_class(base.result.host), host_class(current.result.host)
    for what, old in classes[0].items():
        if old != classes[1][what]:
            return f"another class of host: {what} {_short(old)}, now {_short(classes[1][what])}"
    noise = host_noise(base, current)
    if noise is None:
        return "not both reports have a physics ceiling, so nothing says how steady the host was"
    if noise > NOISE_LIMIT:
        return f"the host was not steady: its physics ceilings scatter by {noise:.1%}, the limit is {NOISE_LIMIT:.0%}"
    return None


def host_class(host: Host) -> dict[str, Any]:
    """What two hosts must have in common for their rates to be compared."""
    return {
        "CPU model": host.cpu_model,
        "physical cores": host.physical_cores,
        "allowed CPUs": len(host.allowed_cpus),
        "CPU limit of the control group": host.cgroup_cpus,
        "GPUs": sorted(gpu.name for gpu in host.gpus),
        "visible GPUs": len(host.visible_gpus),
    }


def host_noise(base: Side, current: Side) -> float | None:
    """Standard deviation of the log ceilings of both reports together, of the case where it is largest.

    Taken together, so that a host that is steady within each session and another one between them counts as noisy.
    """
    found: list[float] = []
    for case in base.matrix.cases:
        sides = [list(side.values(case.name, "ceiling").values()) for side in (base, current)]
        if all(sides):
            found.append(float(np.std([math.log(value) for side in sides for value in side], ddof=1)))
    return max(found, default=None)


def remarks(base: Side, current: Side) -> list[str]:
    """What else differs and is not judged: libraries, driver, kernel, settings that one side does not know."""
    hosts = base.result.host, current.result.host
    facts = [{"kernel": host.platform, "driver": host.driver, **host.versions} for host in hosts]
    differing = [
        f"{name} {facts[0].get(name)}, now {facts[1].get(name)}"
        for name in sorted(facts[0].keys() & facts[1].keys())  # an older report names fewer
        if facts[0].get(name) != facts[1].get(name)
    ]
    keys = [{key for settings in side.settings.values() for key in settings} for side in (base, current)]
    unknown = [
        f"settings of {whose} alone: {', '.join(sorted(only))}"
        for whose, only in (("the baseline", keys[0] - keys[1]), ("this report", keys[1] - keys[0]))
        if only and all(keys)
    ]
    return [*differing, *unknown]


def _settings(folder: Path, evidence: Evidence) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for item in evidence.cells:
        cell = item.cell
        if item.status == "measured" and cell.case not in found:
            config = {} if cell.foreign else flatten(read_json(folder / cell.run / CONFIG_FILE))
            found[cell.case] = _workers(folder, cell) | config
    return found


def _workers(folder: Path, cell: Cell) -> dict[str, Any]:
    """What `workers` came to: a policy, as `default`, is another number in a wider matrix and on other CPUs."""
    manifest = read_json(folder / cell.run / MANIFEST_FILE)
    count = len(cell.pools[0]) if cell.pools else find_count(manifest, "physics", "workers")
    return {} if count is None else {WORKERS: count}


def _differing(base: Side, current: Side) -> tuple[str, Any, Any] | None:
    """The first setting that both have and that differs, with both values."""
    pairs: list[tuple[str, Any, Any]] = [
        (name, getattr(base.matrix, name), getattr(current.matrix, name)) for name in MATRIX_SETTINGS
    ]
    cases = {case.name: case for case in current.matrix.cases}
    for case in base.matrix.cases:
        other = cases.get(case.name)
        if other is not None:
            pairs += [(f"{name} of {case.name}", getattr(case, name), getattr(other, name)) for name in CASE_SETTINGS]
            old, new = (side.settings.get(case.name, {}) for side in (base, current))
            pairs += [(f"{key} of {case.name}", old[key], new[key]) for key in old if key in new and key not in PLACED]
    comparisons = {item.name: item for item in current.matrix.comparisons}
    for item in base.matrix.comparisons:
        if item.name in comparisons:
            old, new = (one.model_dump(exclude={"gate"}) for one in (item, comparisons[item.name]))
            pairs.append((f"comparison {item.name}", old, new))
    return next((pair for pair in pairs if pair[1] != pair[2]), None)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}…"
