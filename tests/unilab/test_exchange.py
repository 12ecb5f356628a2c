from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from unilab import exchange
from unilab.channel import Channel
from unilab.exchange import DeviceExchange, MetricReader, wait_event
from unilab.physics.spec import PhysicsSpec

N = 3
SPEC = PhysicsSpec(
    scene="none.xml",
    timestep=0.01,
    decimation=2,
    profile="exact",
    nq=2,
    nv=1,
    nu=2,
    sensors=(("gyro", 3),),
    model_fields=(("kp", 2),),
)


@pytest.fixture
def channel() -> Channel:
    return Channel.create(SPEC, N)


@pytest.fixture
def environment() -> Any:
    """What the exchange sees of an environment: four buffers."""
    return SimpleNamespace(
        fields=torch.zeros(N, SPEC.width),
        ctrl=torch.arange(6.0).reshape(N, 2),
        codes=torch.tensor([0, 1, 2], dtype=torch.int32),
        reset_rows=torch.arange(15.0).reshape(N, 5) / 4,
    )


@pytest.fixture
def link(channel: Channel, environment: Any) -> DeviceExchange:
    return DeviceExchange(channel, [environment])


def test_upload_takes_the_slot_asked_for(channel: Channel, environment: Any, link: DeviceExchange) -> None:
    address = environment.fields.data_ptr()
    for slot in (0, 1):
        channel.slots[slot][:] = np.arange(N * SPEC.width).reshape(N, -1) + 100 * slot
    for slot in (1, 0, 1):
        link.upload(slot)
        assert environment.fields.flatten().tolist() == [value + 100 * slot for value in range(N * SPEC.width)]
    assert environment.fields.data_ptr() == address


def test_upload_is_a_copy(channel: Channel, environment: Any, link: DeviceExchange) -> None:
    channel.slots[0].fill(1)
    link.upload(0)
    channel.slots[0].fill(2)
    assert (environment.fields == 1).all()


def test_an_unwritten_slot_uploads_as_nan(environment: Any, link: DeviceExchange) -> None:
    link.upload(0)
    assert environment.fields.isnan().all()


def test_download_writes_the_command(channel: Channel, environment: Any, link: DeviceExchange) -> None:
    link.download(0)
    assert channel.ctrl.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert channel.codes.tolist() == [0, 1, 2]
    assert channel.reset_rows.tolist() == (np.arange(15).reshape(N, 5) / 4).tolist()
    environment.ctrl.zero_()
    environment.codes.fill_(1)
    assert channel.ctrl[2, 1] == 5  # the command in flight stays until the next download
    link.download(0)
    assert channel.ctrl.max() == 0
    assert channel.codes.tolist() == [1, 1, 1]


def test_download_leaves_the_slots_alone(channel: Channel, link: DeviceExchange) -> None:
    channel.slots[0].fill(3)
    channel.slots[1].fill(4)
    link.download(0)
    assert [float(slot.min()) for slot in channel.slots] == [3, 4]
    assert [float(slot.max()) for slot in channel.slots] == [3, 4]


def test_close_may_be_repeated(link: DeviceExchange) -> None:
    link.close()
    link.close()


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_come_back_by_name_as_floats() -> None:
    reader = MetricReader(torch.tensor([1.5, 7.0, 1.0, math.nan]), ["b", "a", "c", "d"])
    reader.begin()
    reader.end()
    values, seconds = reader.read()
    assert list(values) == ["b", "a", "c", "d"]
    assert [values["b"], values["a"], values["c"]] == [1.5, 7.0, 1.0]
    assert math.isnan(values["d"])
    assert all(type(value) is float for value in values.values())
    assert seconds >= 0


def test_metrics_are_those_of_the_end() -> None:
    """They are read a tick later, when the buffer may already hold the next tick's values."""
    buffer = torch.tensor([1.0])
    reader = MetricReader(buffer, ["loss"])
    reader.begin()
    reader.end()
    buffer.fill_(2.0)
    assert reader.read()[0] == {"loss": 1.0}
    reader.begin()
    reader.end()
    assert reader.read()[0] == {"loss": 2.0}


def test_every_metric_has_a_name() -> None:
    reader = MetricReader(torch.zeros(2), ["a"])
    reader.begin()
    reader.end()
    with pytest.raises(ValueError, match="longer"):
        reader.read()


def test_seconds_span_begin_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(exchange, "time", SimpleNamespace(monotonic=lambda: now[0]))
    reader = MetricReader(torch.zeros(1), ["a"])
    now[0] = 110.0
    reader.begin()
    now[0] = 110.25
    reader.end()
    now[0] = 120.0
    assert reader.read()[1] == 0.25


# --- device waits ----------------------------------------------------------------------------------------------------


class FakeEvent:
    """Completes at the given query."""

    def __init__(self, at: float) -> None:
        self.at, self.queries = at, 0

    def query(self) -> bool:
        self.queries += 1
        return self.queries >= self.at


def test_wait_event_polls_until_done() -> None:
    event = FakeEvent(4)
    wait_event(event, "the upload")
    assert event.queries == 4


def test_wait_event_names_what_it_waited_for() -> None:
    event = FakeEvent(math.inf)
    with pytest.raises(TimeoutError, match=r"waited 0\.01 s for the upload, the device did not finish"):
        wait_event(event, "the upload", 0.01)
    assert event.queries > 1


def test_wait_event_accepts_what_is_already_done() -> None:
    wait_event(FakeEvent(1), "the upload", 0.0)


def test_written_values_arrive_in_the_buffer_of_the_phase() -> None:
    inputs = torch.zeros(3)
    reader = MetricReader(torch.zeros(1), ["a"], inputs)
    reader.write([1.5, 2.0, 1e9])
    assert inputs.tolist() == [1.5, 2.0, 1e9]
