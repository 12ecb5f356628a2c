"""How NCCL carries data between the ranks of one host: as variables say, as asked, or the fastest way that works."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unilab.gpus import find_gpus
from unilab.names import AUTO_TRANSPORT, TRANSPORT_KEY, TRANSPORT_VARIABLES
from unilab.ranks import Ranks
from unilab.trial import try_ranks

# Transports, the fastest first, and the variables that choose them; NCCL itself falls back within what they allow.
FORMS = {
    "p2p": {"NCCL_P2P_DISABLE": "0", "NCCL_SHM_DISABLE": "0"},
    "shm": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "0"},
    "tcp": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
}
# What NCCL's log calls them, as in "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM".
WORDS = {"p2p": "P2P", "shm": "SHM", "tcp": "NET"}
CHANNEL = re.compile(r"Channel .* via (P2P|SHM|NET)/")
PROGRAM = (sys.executable, "-P", "-m", "unilab.transport_probe", "nccl")
SECONDS = 40.0  # of one attempt: start of Python, CUDA and NCCL, then milliseconds of traffic
WRONG_VALUES = 5  # exit code of a rank whose sums were wrong


@dataclass(frozen=True)
class Attempt:
    """One transport, tried.

    Attributes:
        name: `p2p`, `shm` or `tcp`.
        passed: whether every rank got every value right in time, over this transport.
        seconds: from the start of its processes to their end.
        all_reduce_ms: median time of a 4 MB all-reduce, None where it did not pass.
        detail: why it did not pass, else empty.
    """

    name: str
    passed: bool
    seconds: float
    all_reduce_ms: float | None
    detail: str


@dataclass(frozen=True)
class Transport:
    """What ranks are started with.

    Attributes:
        variables: environment of every rank.
        name: `p2p`, `shm`, `tcp`, `explicit` where the user's variables decide, `none` with a single rank.
        timings: what was tried for it, in order; empty where nothing had to be.
        reason: why it is this one, as a sentence.
    """

    variables: dict[str, str]
    name: str
    timings: tuple[Attempt, ...]
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a manifest."""
        return asdict(self) | {"timings": [asdict(attempt) for attempt in self.timings]}

    def facts(self) -> dict[str, Any]:
        """What `dp_sync` of the manifest says of it."""
        plain = self.to_json()
        return {"transport": self.name, "transport_reason": self.reason, "transport_timings": plain["timings"]}


@dataclass(frozen=True)
class Identity:
    """What a remembered choice holds for: ids of the ranks' GPUs, versions of driver and NCCL."""

    gpus: tuple[str, ...]
    driver: str
    nccl: str


def find_identity(entries: Sequence[str]) -> Identity | None:
    """The GPUs behind these entries of CUDA_VISIBLE_DEVICES, or None where one of the facts is not known."""
    import torch  # whoever starts ranks has it; whoever reads settings need not wait for it

    gpus, driver = find_gpus(entries)
    uuids = tuple(gpu.uuid for gpu in gpus if gpu is not None)
    if driver is None or len(uuids) < len(entries) or not torch.distributed.is_nccl_available():
        return None
    return Identity(uuids, driver, ".".join(map(str, torch.cuda.nccl.version())))


def check_transport(ranks: Ranks, setting: str) -> None:
    """Refuse a setting that cannot hold for all ranks: what joins the GPUs of one host does not reach another.

    Raises:
        ValueError: for `p2p` or `shm` where a launcher started ranks on several hosts.
    """
    if setting in ("p2p", "shm") and ranks.local_size < ranks.world_size:
        raise ValueError(
            f"{TRANSPORT_KEY}={setting} is for ranks of one host, and {ranks.local_size} of {ranks.world_size} are on "
            f"this one; type {TRANSPORT_KEY}=tcp, or leave it at {AUTO_TRANSPORT} and set NCCL's variables yourself"
        )


def transport_of_ranks(ranks: Ranks, on_cuda: bool, setting: str, environment: Mapping[str, str]) -> Transport:
    """How NCCL carries data between the ranks of a run.

    Where a launcher started them, `auto` leaves it to the launcher's environment, and nothing is tried.

    Args:
        ranks: the ranks.
        on_cuda: whether they learn on GPUs.
        setting: as for `choose_transport`, after `check_transport`.
        environment: what ranks inherit.
    """
    if ranks.world_size > 1 and not on_cuda:
        return Transport({}, "none", (), "ranks on the CPU do not use NCCL")
    if ranks.world_size > 1 and ranks.launched:
        told = None if setting == AUTO_TRANSPORT else _told(setting, environment)
        return told or Transport({}, "explicit", (), "left to the launcher's environment")
    return choose_transport(ranks.entries, setting, environment)


def choose_transport(
    entries: Sequence[str],
    setting: str,
    environment: Mapping[str, str],
    identify: Callable[[Sequence[str]], Identity | None] = find_identity,
    program: Sequence[str] = PROGRAM,
    seconds: float = SECONDS,
) -> Transport:
    """Choose the variables that ranks on one host are started with.

    A user's own NCCL variables win. Else a forced setting does. Else each transport is tried in processes of its own,
    the fastest first, and the first that passes is taken and remembered for these GPUs, driver and NCCL. Where none
    passes it is TCP, which needs the least of a host, and nothing is remembered.

    Args:
        entries: entry of CUDA_VISIBLE_DEVICES of each rank.
        setting: `auto`, `p2p`, `shm` or `tcp`.
        environment: what ranks inherit.
        identify: finds what a remembered choice holds for.
        program: one rank of a probe; it gets the seconds, its rank, the number of ranks and a path for a file store.
        seconds: limit of one attempt.
    """
    if len(entries) < 2:
        return Transport({}, "none", (), "one rank sends nothing")
    told = _told(setting, environment)
    if told is not None:
        return told
    path, key = _memory(identify(entries), environment)
    remembered = _recall(path, key)
    if remembered is not None:
        return remembered
    attempts: list[Attempt] = []
    for name in FORMS:
        attempts.append(_attempt(name, entries, environment, program, seconds))
        if attempts[-1].passed:
            chosen = Transport(dict(FORMS[name]), name, tuple(attempts), _found(attempts))
            _remember(path, key, chosen)
            return chosen
    tried = "; ".join(f"{attempt.name}: {attempt.detail}" for attempt in attempts)
    return Transport(dict(FORMS["tcp"]), "tcp", tuple(attempts), f"nothing passed, so TCP, untested ({tried})")


def _told(setting: str, environment: Mapping[str, str]) -> Transport | None:
    """What the user's variables or else the setting say; None where neither says anything."""
    explicit = {name: environment[name] for name in TRANSPORT_VARIABLES if environment.get(name)}
    if explicit:
        return _explicit(explicit, setting)
    if setting == AUTO_TRANSPORT:
        return None
    return Transport(dict(FORMS[setting]), setting, (), f"{TRANSPORT_KEY}={setting}")


def _explicit(explicit: Mapping[str, str], setting: str) -> Transport:
    """The user's variables, and for one of the two switches left open what the setting says, `auto` meaning TCP."""
    switches = FORMS["tcp"].keys() & explicit.keys()
    base = FORMS["tcp" if setting == AUTO_TRANSPORT else setting] if switches or setting != AUTO_TRANSPORT else {}
    added = {name: value for name, value in base.items() if name not in explicit}
    reason = f"{_assignments(explicit)} of the environment"
    if added:
        reason += f", {_assignments(added)} from {TRANSPORT_KEY}={setting}"
    elif setting != AUTO_TRANSPORT:
        agree = base.items() <= explicit.items()
        reason += f", {'as' if agree else 'against'} {TRANSPORT_KEY}={setting}"
    return Transport(added | dict(explicit), "explicit", (), reason)


def _assignments(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(variables.items()))


def _found(attempts: Sequence[Attempt]) -> str:
    *failed, passed = attempts
    why = "".join(f"; {attempt.name}: {attempt.detail}" for attempt in failed)
    return f"fastest that works, 4 MB in {passed.all_reduce_ms:.3g} ms{why}"


def _attempt(
    name: str, entries: Sequence[str], environment: Mapping[str, str], program: Sequence[str], seconds: float
) -> Attempt:
    """Try one transport with one process per rank."""
    with tempfile.TemporaryDirectory(prefix="unilab-transport-") as folder:
        size, store = str(len(entries)), str(Path(folder, "store"))
        commands = [[*program, f"{seconds:g}", str(rank), size, store] for rank in range(len(entries))]
        environments = [_probe_environment(name, entry, environment) for entry in entries]
        trial = try_ranks(commands, environments, seconds, Path(folder), {WRONG_VALUES: "got wrong values"})
    fault = trial.fault or other_transport(name, trial.logs)
    milliseconds = _result(trial.logs[0]) if fault is None else None
    if fault is None and milliseconds is None:
        fault = "rank 0 printed no time"
    return Attempt(name, fault is None, trial.seconds, milliseconds, fault or "")


def _probe_environment(name: str, entry: str, environment: Mapping[str, str]) -> dict[str, str]:
    """A rank's environment, with a log that names the transport."""
    return logging_environment(environment) | FORMS[name] | {"CUDA_VISIBLE_DEVICES": entry}


def logging_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment, with NCCL telling on its output which transport it uses."""
    inherited = {key: value for key, value in environment.items() if key != "NCCL_DEBUG_FILE"}
    return inherited | {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM,NET"}


def other_transport(name: str, logs: Sequence[str]) -> str | None:
    """What NCCL used in place of the transport that was tried, if its log says so.

    Args:
        name: `p2p`, `shm` or `tcp`.
        logs: what each rank printed.
    """
    used = {word for log in logs for word in CHANNEL.findall(log)}
    return None if not used or WORDS[name] in used else f"NCCL used {' and '.join(sorted(used))} instead"


def _result(log: str) -> float | None:
    """Milliseconds that rank 0 printed."""
    for line in log.splitlines():
        if line.startswith('{"all_reduce_ms"'):
            with contextlib.suppress(ValueError):
                return float(json.loads(line)["all_reduce_ms"])
    return None


def _memory(identity: Identity | None, environment: Mapping[str, str]) -> tuple[Path | None, dict[str, Any]]:
    """File of a remembered choice, None where there is no place or no identity; and what it holds for."""
    home = environment.get("HOME", "")
    base = environment.get("XDG_CACHE_HOME", "")
    folder = Path(base) if Path(base).is_absolute() else Path(home) / ".cache"
    if identity is None or not folder.is_absolute():
        return None, {}
    others = {k: v for k, v in sorted(environment.items()) if k.startswith("NCCL_") and not k.startswith("NCCL_DEBUG")}
    key: dict[str, Any] = asdict(identity) | {"gpus": list(identity.gpus), "environment": others}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / "unilab" / f"transport-{digest[:16]}.json", key


def _recall(path: Path | None, key: Mapping[str, Any]) -> Transport | None:
    """A remembered choice; None if there is none or it is damaged, which the next choice repairs."""
    if path is None:
        return None
    try:
        content = json.loads(path.read_text())
        timings = tuple(Attempt(**attempt) for attempt in content["timings"])
        name = content["name"]
        if content["key"] != key or not timings[-1].passed or timings[-1].name != name:
            return None
        return Transport(dict(FORMS[name]), name, timings, f"remembered in {path.name}: {_found(timings)}")
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def _remember(path: Path | None, key: Mapping[str, Any], chosen: Transport) -> None:
    """Write the choice whole or not at all; where that cannot be done, the next start tries again."""
    if path is None:
        return
    content = {"key": key, "name": chosen.name, "timings": [asdict(attempt) for attempt in chosen.timings]}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(path)
