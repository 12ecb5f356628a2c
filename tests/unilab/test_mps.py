"""What MPS must never get: graphs, compiled code, streams, side threads; on the CPU, with a device that says `mps`.

Only the learner's thread may submit work to an MPS device, so every operation on tensors and every copy happens on it.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from unilab import event_log, hardware
from unilab.channel import Channel
from unilab.event_log import EventLog, Record
from unilab.exchange import DeviceExchange, MetricReader
from unilab.physics import pinning
from unilab.physics.spec import PhysicsSpec
from unilab.train import main

MPS, CPU = torch.device("mps"), torch.device("cpu")
N = 3
SPEC = PhysicsSpec("none.xml", 0.01, 2, "exact", nq=2, nv=1, nu=2, sensors=(("gyro", 3),), model_fields=(("kp", 2),))
NAMES = ["--algo", "sac", "--task", "g1_walk_flat", "--sim", "mujoco"]
SMALL = [
    *("algo.actor_hidden_dim=16", "algo.critic_hidden_dim=16", "algo.num_envs=8", "algo.batch_size=32"),
    *("algo.num_atoms=11", "algo.max_iterations=4", "algo.save_interval=-1", "training.no_play=true"),
]


class Watched(Tensor):
    """A tensor that says it is on MPS and notes who does what with it: function, thread, keywords."""

    calls: list[tuple[str, int, dict[str, Any]]] = []  # noqa: RUF012 - one list, whatever tensor

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return MPS

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append((func.__name__, threading.get_ident(), kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


class OnTheCpu(TorchFunctionMode):
    """Makes everything that is asked for on MPS on the CPU; owners still decide by the device they were given.

    Attributes:
        doubles: functions that gave a float64 tensor, which MPS does not have.
    """

    def __init__(self) -> None:
        super().__init__()
        self.doubles: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def there(value: Any) -> Any:
            return CPU if isinstance(value, torch.device) and value.type == "mps" else value

        result = func(*map(there, args), **{name: there(value) for name, value in (kwargs or {}).items()})
        if isinstance(result, Tensor) and result.dtype == torch.float64:
            self.doubles.add(func.__name__)
        return result


def watched(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype).as_subclass(Watched)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything of CUDA, and any compilation, is an error."""

    def refuse(name: str) -> Any:
        def call(*_: Any, **__: Any) -> None:
            raise AssertionError(f"{name} on MPS")

        return call

    for name in ("Stream", "Event", "CUDAGraph", "graph", "cudart", "synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, refuse(f"torch.cuda.{name}"))
    monkeypatch.setattr(torch, "compile", refuse("torch.compile"))


@pytest.fixture
def calls() -> Iterator[list[tuple[str, int, dict[str, Any]]]]:
    Watched.calls.clear()
    yield Watched.calls
    Watched.calls.clear()


@pytest.mark.usefixtures("no_cuda")
def test_rows_and_command_are_copied_by_the_calling_thread(calls: list[tuple[str, int, dict[str, Any]]]) -> None:
    channel = Channel.create(SPEC, N)
    environment: Any = SimpleNamespace(
        fields=watched(N, SPEC.width),
        ctrl=watched(N, 2),
        codes=watched(N, dtype=torch.int32),
        reset_rows=watched(N, SPEC.reset_width),
    )
    channel.slots[1].fill(7)
    link, before = DeviceExchange(channel, [environment]), threading.active_count()
    calls.clear()
    link.upload(1)
    link.download(0)
    assert [name for name, _, _ in calls] == ["copy_"] * 4
    assert {thread for _, thread, _ in calls} == {threading.get_ident()}
    assert not any(keywords.get("non_blocking") for _, _, keywords in calls)  # the slot is given back right afterwards
    assert environment.fields.min() == 7 and channel.ctrl.min() == 1 and channel.codes.min() == 1
    assert threading.active_count() == before
    link.close()


@pytest.mark.usefixtures("no_cuda")
def test_metrics_are_copied_by_the_calling_thread_when_the_update_ends(
    calls: list[tuple[str, int, dict[str, Any]]],
) -> None:
    values = watched(2)
    reader = MetricReader(values, ["a", "b"])
    reader.begin()
    calls.clear()
    reader.end()
    assert [(name, thread) for name, thread, _ in calls] == [("copy_", threading.get_ident())]
    assert not calls[0][2]["non_blocking"]
    calls.clear()
    values_read, _ = reader.read()
    assert values_read == {"a": 1.0, "b": 1.0}
    assert calls == []  # reading touches the host's copy alone


def test_the_device_that_says_mps_sees_float64() -> None:
    with OnTheCpu() as mode:
        assert torch.zeros(2, device=MPS).sum().double().device == CPU
    assert mode.doubles == {"double"}


@pytest.mark.usefixtures("no_cuda")
def test_a_run_on_mps_is_eager_and_hands_other_threads_plain_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The whole trainer with a device that says `mps`: it decides as there, and computes on the CPU."""
    records: list[Record] = []
    threads: set[str] = set()
    write = EventLog.write

    def remember(self: EventLog, record: Record) -> None:
        records.append(record)
        threads.update(thread.name for thread in threading.enumerate())
        write(self, record)

    make = torch.Generator

    class Generator:
        def __new__(cls, device: object = None) -> Any:
            return make()

    monkeypatch.setattr(EventLog, "write", remember)
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    before = {thread.name for thread in threading.enumerate()}
    with OnTheCpu() as mode:
        code = main([*NAMES, *SMALL, f"training.log_dir={tmp_path / 'run'}"])
    assert code == 0, capfd.readouterr().err
    assert mode.doubles == set()
    manifest = (tmp_path / "run" / "manifest.json").read_text()
    assert '"learner_device": "mps"' in manifest
    assert '"compiled": false' in manifest and '"cuda_graph": false' in manifest
    assert threads - before <= {"event-log"}
    assert [record.iteration for record in records] == [1, 2, 3, 4]
    for record in records:
        assert {type(value) for value in record.scalars.values()} == {float}
        assert type(record.env_steps) is type(record.iteration) is int


def test_the_thread_that_writes_events_has_no_torch() -> None:
    """So with plain numbers in its queue it cannot touch a device."""
    tree = ast.parse(Path(event_log.__file__).read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert "unilab.names" in modules
    assert not [name for name in modules if name is not None and name.partition(".")[0] == "torch"]


def test_a_list_of_cpus_is_refused_where_threads_cannot_be_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pinning, "LINUX", False)
    monkeypatch.setattr(hardware, "LINUX", False)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.chdir(tmp_path)
    assert main([*NAMES, "env.cpu_ids=[0]"]) == 2
    assert capfd.readouterr().err == "train: env.cpu_ids=[0]: pinning needs Linux, this is darwin; use null\n"
    assert list(tmp_path.iterdir()) == []
