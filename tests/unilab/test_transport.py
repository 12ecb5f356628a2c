"""The choice of NCCL's transport with probes that hang, crash, lie or are slow; and the probe itself on gloo."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import distributed

from unilab import transport, transport_probe
from unilab.config import load_config
from unilab.gpus import Gpu
from unilab.names import TRANSPORT_VARIABLES
from unilab.rank import Place, follow
from unilab.ranks import Ranks
from unilab.transport import Identity, Transport, check_transport, choose_transport, find_identity, transport_of_ranks
from unilab.transport_probe import ELEMENTS, all_reduce_ms

P2P = {"NCCL_P2P_DISABLE": "0", "NCCL_SHM_DISABLE": "0"}
SHM = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "0"}
TCP = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
ENTRIES = ["GPU-a", "GPU-b"]
HOST = Identity(("GPU-a", "GPU-b"), "580.1", "2.28.9")
NOTHING = ("/nonexistent/program",)  # starting it would raise
LONG = 30.0

# A rank that does what FAKE_PLAN says for its transport, and leaves a note that it was there.
FAKE = """
import json, os, signal, subprocess, sys, time
seconds, rank, world, store = sys.argv[1:]
p2p, shm = os.environ["NCCL_P2P_DISABLE"], os.environ["NCCL_SHM_DISABLE"]
name = {"00": "p2p", "10": "shm", "11": "tcp"}[p2p + shm]
plan = json.loads(os.environ["FAKE_PLAN"])[name]
plan = plan[int(rank)] if isinstance(plan, list) else plan
note = {"pid": os.getpid(), "store": store, "world": world, "seconds": seconds, "environment": dict(os.environ)}
if plan == "hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note["grandchild"] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid
with open(f"{os.environ['FAKE_NOTES']}/{name}{rank}.json.part", "w") as file:
    json.dump(note, file)
os.rename(file.name, file.name[:-5])
if plan == "hang":
    time.sleep(60)
if plan == "crash":
    sys.exit("no luck")
if plan == "killed":
    os.kill(os.getpid(), signal.SIGSEGV)
if plan == "wrong":
    sys.exit(5)
if plan == "slow":
    time.sleep(0.5)
if plan.startswith("via"):
    for word in plan.split()[1:]:
        print(f"host:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via {word}/direct", flush=True)
if rank == "0" and plan != "silent":
    print("some noise")
    print('{"all_reduce_ms": broken' if plan == "garbled" else json.dumps({"all_reduce_ms": 0.25}))
"""

Choose = Callable[..., Transport]


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


@pytest.fixture
def choose(tmp_path: Path, notes: Path) -> Choose:
    """`choose_transport` for two ranks whose probes follow a plan."""
    (tmp_path / "fake.py").write_text(FAKE)

    def call(plan: Any, seconds: float = LONG, identity: Identity | None = HOST, **environment: str) -> Transport:
        given = {
            "FAKE_PLAN": json.dumps(plan if isinstance(plan, dict) else dict.fromkeys(("p2p", "shm", "tcp"), plan)),
            "FAKE_NOTES": str(notes),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        program = NOTHING if plan is None else (sys.executable, "-I", "-S", str(tmp_path / "fake.py"))
        return choose_transport(ENTRIES, "auto", given | environment, lambda _: identity, program, seconds)

    return call


def names(notes: Path) -> list[str]:
    """Transports whose probes were started, and ranks."""
    return sorted(path.stem for path in notes.glob("*.json"))


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


@pytest.mark.parametrize("entries", [[], ["0"]])
@pytest.mark.parametrize("setting", ["auto", "p2p"])
def test_one_rank_needs_nothing(entries: list[str], setting: str) -> None:
    found = choose_transport(entries, setting, {"NCCL_SHM_DISABLE": "0"}, program=NOTHING)
    assert found == Transport({}, "none", (), "one rank sends nothing")


@pytest.mark.parametrize(("setting", "variables"), [("p2p", P2P), ("shm", SHM), ("tcp", TCP)])
def test_a_setting_forces(setting: str, variables: dict[str, str]) -> None:
    environment = {"NCCL_DEBUG": "WARN", "NCCL_P2P_DISABLE": ""}  # neither decides
    found = choose_transport(ENTRIES, setting, environment, program=NOTHING)
    assert found == Transport(variables, setting, (), f"training.nccl_transport={setting}")


@pytest.mark.parametrize(
    ("explicit", "setting", "added", "reason"),
    [
        (TCP, "auto", {}, "NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1 of the environment"),
        (
            {"NCCL_SHM_DISABLE": "0"},
            "auto",
            {"NCCL_P2P_DISABLE": "1"},
            "NCCL_SHM_DISABLE=0 of the environment, NCCL_P2P_DISABLE=1 from training.nccl_transport=auto",
        ),
        (
            {"NCCL_P2P_DISABLE": "1"},
            "shm",
            {"NCCL_SHM_DISABLE": "0"},
            "NCCL_P2P_DISABLE=1 of the environment, NCCL_SHM_DISABLE=0 from training.nccl_transport=shm",
        ),
        (SHM, "shm", {}, "NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=0 of the environment, as training.nccl_transport=shm"),
        (
            SHM,
            "p2p",
            {},
            "NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=0 of the environment, against training.nccl_transport=p2p",
        ),
        ({"NCCL_P2P_LEVEL": "NVL"}, "auto", {}, "NCCL_P2P_LEVEL=NVL of the environment"),
    ],
)
def test_variables_of_the_user_win(explicit: dict[str, str], setting: str, added: dict[str, str], reason: str) -> None:
    environment = {**explicit, "NCCL_DEBUG": "WARN", "HOME": "/"}
    found = choose_transport(ENTRIES, setting, environment, program=NOTHING)
    assert found == Transport({**explicit, **added}, "explicit", (), reason)


LAUNCHED = Ranks(1, 2, ("0", "1"), 1, 2, launched=True)


@pytest.mark.parametrize(
    ("setting", "environment", "expected"),
    [
        ("auto", {}, Transport({}, "explicit", (), "left to the launcher's environment")),
        ("auto", {"NCCL_SHM_DISABLE": "0"}, Transport({}, "explicit", (), "left to the launcher's environment")),
        ("tcp", {}, Transport(TCP, "tcp", (), "training.nccl_transport=tcp")),
        ("shm", {"NCCL_P2P_DISABLE": "0"}, choose_transport(ENTRIES, "shm", {"NCCL_P2P_DISABLE": "0"})),
    ],
)
def test_a_setting_holds_under_a_launcher_as_without_one(
    setting: str, environment: dict[str, str], expected: Transport
) -> None:
    assert transport_of_ranks(LAUNCHED, True, setting, environment) == expected


def test_a_rank_of_a_launcher_has_the_variables_before_it_meets_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("sac", "g1_walk_flat", "mujoco", ["training.nccl_transport=shm"])
    task: Any = None
    for name in TRANSPORT_VARIABLES:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(Place, "prepare", lambda *asked: Place(*asked, torch.device("cuda", 0), None, task))

    def join(*_: Any) -> None:
        assert {name: os.environ[name] for name in SHM} == SHM
        raise InterruptedError("met")

    monkeypatch.setattr(Place, "join", join)
    with pytest.raises(InterruptedError, match="met"):
        follow(config, LAUNCHED, Path())


@pytest.mark.parametrize("setting", ["p2p", "shm"])
def test_what_ends_at_a_host_is_refused_on_several(setting: str) -> None:
    with pytest.raises(ValueError, match=rf"^training.nccl_transport={setting} .*, and 2 of 4 are on this one; type "):
        check_transport(Ranks(3, 4, ("0", "1"), 1, 2, launched=True), setting)
    check_transport(LAUNCHED, setting)


@pytest.mark.parametrize("setting", ["auto", "tcp"])
def test_what_reaches_other_hosts_is_not(setting: str) -> None:
    check_transport(Ranks(3, 4, ("0", "1"), 1, 2, launched=True), setting)


@pytest.mark.parametrize("plan", ["ok", "slow", "via P2P", "via P2P SHM"])
def test_the_fastest_is_tried_first_and_taken(choose: Choose, notes: Path, plan: str) -> None:
    found = choose(plan)
    assert (found.name, found.variables, found.reason) == ("p2p", P2P, "fastest that works, 4 MB in 0.25 ms")
    assert [(a.name, a.passed, a.all_reduce_ms, a.detail) for a in found.timings] == [("p2p", True, 0.25, "")]
    assert (0.5 if plan == "slow" else 0) < found.timings[0].seconds < LONG
    assert names(notes) == ["p2p0", "p2p1"]


@pytest.mark.parametrize(
    ("plan", "detail"),
    [
        ("crash", r"rank [01] ended with exit code 1"),
        ("killed", r"rank [01] was killed by SIGSEGV"),
        ("wrong", r"rank [01] got wrong values"),
        (["hang", "wrong"], r"rank 1 got wrong values"),
        (["crash", "hang"], r"rank 0 ended with exit code 1"),
        (["ok", "crash"], r"rank 1 ended with exit code 1"),
        ("silent", "rank 0 printed no time"),
        ("garbled", "rank 0 printed no time"),
        ("via SHM", "NCCL used SHM instead"),
        ("via SHM NET", "NCCL used NET and SHM instead"),
    ],
)
def test_what_does_not_pass_gives_way_to_the_next(choose: Choose, plan: str | list[str], detail: str) -> None:
    began = time.monotonic()
    found = choose({"p2p": plan, "shm": "ok"})
    assert time.monotonic() - began < LONG / 2  # no rank is waited for once one has failed
    failed, passed = found.timings
    assert (found.name, found.variables, passed.name, passed.all_reduce_ms) == ("shm", SHM, "shm", 0.25)
    assert (failed.name, failed.passed, failed.all_reduce_ms) == ("p2p", False, None)
    assert re.fullmatch(f"{detail}(, {detail})?", failed.detail)  # ranks may fail at the same time
    assert found.reason == f"fastest that works, 4 MB in 0.25 ms; p2p: {failed.detail}"


def test_a_hang_ends_at_the_deadline_with_everything_it_started(choose: Choose, notes: Path) -> None:
    found = choose({"p2p": "hang", "shm": "hang", "tcp": "via NET"}, seconds=3)
    assert (found.name, found.variables) == ("tcp", TCP)
    assert [attempt.detail for attempt in found.timings] == ["no answer within 3 s"] * 2 + [""]
    assert all(3 <= attempt.seconds < 10 for attempt in found.timings[:2])
    started = [json.loads(path.read_text()) for path in notes.glob("[ps]*.json")]
    assert len(started) == 4
    assert all(wait_until(lambda pid=pid: gone(pid)) for note in started for pid in (note["pid"], note["grandchild"]))
    assert not Path(started[0]["store"]).parent.exists()


def test_where_nothing_passes_it_is_tcp_and_says_so(choose: Choose, tmp_path: Path) -> None:
    found = choose({"p2p": "crash", "shm": "wrong", "tcp": "silent"})
    assert (found.name, found.variables) == ("tcp", TCP)
    assert found.reason.startswith("nothing passed, so TCP, untested (p2p: rank ")
    assert found.reason.endswith("; tcp: rank 0 printed no time)")
    assert [attempt.passed for attempt in found.timings] == [False] * 3
    assert not (tmp_path / "cache").exists()
    assert choose("ok").name == "p2p"


def test_each_rank_gets_its_gpu_and_the_transport(choose: Choose, notes: Path) -> None:
    choose("ok", NCCL_DEBUG="WARN", NCCL_DEBUG_FILE="/nonexistent/log", NCCL_SOCKET_IFNAME="lo", HOME="/root")
    told = [json.loads((notes / f"p2p{rank}.json").read_text()) for rank in (0, 1)]
    assert [note["environment"]["CUDA_VISIBLE_DEVICES"] for note in told] == ENTRIES
    assert {note["store"] for note in told} == {told[0]["store"]}
    assert [(note["world"], note["seconds"]) for note in told] == [("2", "30")] * 2
    environment = told[0]["environment"]
    expected = {**P2P, "NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "lo", "HOME": "/root"}
    assert expected.items() <= environment.items()
    assert "NCCL_DEBUG_FILE" not in environment
    assert all(Path(folder).is_absolute() for folder in environment["PYTHONPATH"].split(os.pathsep))


def test_a_choice_is_remembered_for_these_gpus_driver_and_nccl(choose: Choose, tmp_path: Path) -> None:
    first = choose({"p2p": "crash", "shm": "ok"})
    (file,) = (tmp_path / "cache" / "unilab").iterdir()
    again = choose(None, NCCL_DEBUG="INFO")
    assert (again.name, again.variables, again.timings) == ("shm", SHM, first.timings)
    assert again.reason == f"remembered in {file.name}: {first.reason}"
    for other in (
        Identity(("GPU-b", "GPU-a"), "580.1", "2.28.9"),
        Identity(("GPU-a", "GPU-b"), "581", "2.28.9"),
        Identity(("GPU-a", "GPU-b"), "580.1", "2.29"),
    ):
        assert choose("ok", identity=other).name == "p2p"
    assert choose("ok", NCCL_CUMEM_ENABLE="0").name == "p2p"
    assert choose(None).name == "shm"


def test_without_an_identity_nothing_is_remembered(choose: Choose, tmp_path: Path) -> None:
    assert choose("ok", identity=None).name == "p2p"
    assert choose({"p2p": "crash", "shm": "ok"}, identity=None).name == "shm"
    assert not (tmp_path / "cache").exists()


def edited(**changes: Any) -> Callable[[str], str]:
    return lambda text: json.dumps(json.loads(text) | changes)


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: "",
        lambda text: text[:40],
        lambda _: "[]",
        lambda _: "\udcff",
        edited(name="tcp"),
        edited(name="carrier pigeon"),
        edited(name=["p2p"]),
        edited(key={}),
        edited(timings=[]),
        edited(timings=[{"name": "p2p"}]),
        edited(timings=[{"name": "p2p", "passed": True, "seconds": 1, "all_reduce_ms": None, "detail": ""}]),
        edited(timings=[{"name": "p2p", "passed": False, "seconds": 1, "all_reduce_ms": 1.0, "detail": ""}]),
    ],
)
def test_a_damaged_memory_is_ignored_and_repaired(choose: Choose, tmp_path: Path, damage: Callable[[str], str]) -> None:
    choose("ok")
    (file,) = (tmp_path / "cache" / "unilab").iterdir()
    whole = json.loads(file.read_text())
    file.write_text(damage(file.read_text()), errors="surrogateescape")
    assert choose("ok").reason.startswith("fastest")
    assert json.loads(file.read_text())["key"] == whole["key"]
    assert choose(None).reason.startswith("remembered")


def test_a_cache_that_cannot_be_written_is_no_fault(
    choose: Choose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    assert choose("ok", XDG_CACHE_HOME=str(tmp_path / "file")).name == "p2p"

    def refuse(self: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert choose("ok").name == "p2p"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/unilab"),
        ({"XDG_CACHE_HOME": "x", "HOME": "/h"}, "/h/.cache/unilab"),  # the standard has relative ones ignored
        ({"HOME": "/h"}, "/h/.cache/unilab"),
        ({}, None),
    ],
)
def test_where_choices_are_kept(environment: dict[str, str], folder: str | None) -> None:
    path, _ = transport._memory(HOST, environment)
    assert (None if path is None else str(path.parent)) == folder


def test_a_choice_is_plain_data(choose: Choose) -> None:
    facts = json.loads(json.dumps(choose("ok").to_json()))
    assert set(facts) == {"variables", "name", "timings", "reason"}
    assert set(facts["timings"][0]) == {"name", "passed", "seconds", "all_reduce_ms", "detail"}


@pytest.mark.parametrize(
    ("gpus", "driver", "nccl", "found"),
    [
        ([Gpu("GPU-a", ""), Gpu("GPU-b", "")], "580.1", True, HOST),
        ([Gpu("GPU-a", ""), None], "580.1", True, None),
        ([Gpu("GPU-a", ""), Gpu("GPU-b", "")], None, True, None),
        ([Gpu("GPU-a", ""), Gpu("GPU-b", "")], "580.1", False, None),
    ],
)
def test_the_identity_of_a_host(
    monkeypatch: pytest.MonkeyPatch,
    gpus: Sequence[Gpu | None],
    driver: str | None,
    nccl: bool,
    found: Identity | None,
) -> None:
    monkeypatch.setattr(transport, "find_gpus", lambda _: (gpus, driver))
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert find_identity(["0", "1"]) == found


def test_every_value_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of 3 holds k mod 1024 + 1; the sum of all ranks is 3 (k mod 1024) + 3."""
    calls = []

    def reduce(values: torch.Tensor, spoil: int | None = None) -> None:
        calls.append(values.clone())
        values.mul_(3)
        if spoil is not None and len(calls) == 12:
            values[spoil] += 1

    monkeypatch.setattr(distributed, "all_reduce", reduce)
    milliseconds = all_reduce_ms(1, 3, torch.device("cpu"))
    assert milliseconds is not None
    assert milliseconds > 0
    assert len(calls) == 12
    assert calls[0].nbytes == 2**22
    assert [float(calls[-1][k]) for k in (0, 1023, 1024, ELEMENTS - 1)] == [1, 1024, 1, 1024]
    calls.clear()
    monkeypatch.setattr(distributed, "all_reduce", lambda values: reduce(values, ELEMENTS - 1))
    assert all_reduce_ms(1, 3, torch.device("cpu")) is None


def test_the_probe_itself_over_gloo(tmp_path: Path) -> None:
    program = (sys.executable, "-P", "-m", "unilab.transport_probe", "gloo")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "XDG_CACHE_HOME": str(tmp_path)}
    found = choose_transport(ENTRIES, "auto", environment, lambda _: HOST, program, 60)
    assert [(attempt.name, attempt.detail) for attempt in found.timings] == [("p2p", "")]
    assert found.timings[0].all_reduce_ms is not None
    assert 0 < found.timings[0].all_reduce_ms < 1000 * found.timings[0].seconds


def test_a_rank_that_sums_wrongly_says_so_by_its_exit_code(tmp_path: Path) -> None:
    """The probe of rank 1 adds one to one value after every sum."""
    (tmp_path / "spoiled.py").write_text(
        "import sys\n"
        "from torch import distributed\n"
        "from unilab import transport_probe\n"
        "honest = distributed.all_reduce\n"
        "def spoiled(values):\n"
        "    honest(values)\n"
        "    values[7] += sys.argv[2] == '1'\n"
        "distributed.all_reduce = spoiled\n"
        "sys.exit(transport_probe.main(['gloo', *sys.argv[1:]]))\n"
    )
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    program = (sys.executable, str(tmp_path / "spoiled.py"))
    attempt = transport._attempt("shm", ENTRIES, environment, program, 60)
    assert (attempt.passed, attempt.all_reduce_ms, attempt.detail) == (False, None, "rank 1 got wrong values")


def test_a_probe_ends_itself_where_nobody_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    alarms = []

    def group(backend: str, **given: Any) -> None:
        raise RuntimeError(f"{backend} {given['rank']} of {given['world_size']} after {alarms}")

    monkeypatch.setattr(transport_probe.signal, "alarm", alarms.append)
    monkeypatch.setattr(distributed, "init_process_group", group)
    with pytest.raises(RuntimeError, match=r"^gloo 1 of 2 after \[45\]$"):
        transport_probe.main(["gloo", "40", "1", "2", "/nonexistent/store"])
