"""Which ranks a run has."""

from __future__ import annotations

import pytest

from unilab.ranks import Ranks, plan_ranks, visible_entries

FIVE = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}
TORCHRUN = FIVE | {"LOCAL_WORLD_SIZE": "2"}


def visible(text: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": text}


@pytest.mark.parametrize("environment", [{}, visible(""), visible(" "), visible("-1")])
def test_no_entries_are_one_rank_without_a_choice(environment: dict[str, str]) -> None:
    assert visible_entries(environment) == []
    plan = plan_ranks(environment)
    assert plan == Ranks() and plan.entry is None


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("3", ["3"]),
        ("4, 5", ["4", "5"]),
        ("GPU-5f5b2c,GPU-5f5b2d", ["GPU-5f5b2c", "GPU-5f5b2d"]),
        ("MIG-GPU-8/1/0,MIG-GPU-8/2/0,7", ["MIG-GPU-8/1/0", "MIG-GPU-8/2/0", "7"]),
        ("1,10,100", ["1", "10", "100"]),
        ("a b".replace(" ", ","), ["a", "b"]),
    ],
)
def test_every_entry_is_a_rank_as_it_is(text: str, entries: list[str]) -> None:
    assert visible_entries(visible(text)) == entries
    plan = plan_ranks(visible(text))
    assert (plan.rank, plan.world_size, plan.entry, plan.launched) == (0, len(entries), entries[0], False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,0", r"entry 2 of CUDA_VISIBLE_DEVICES='0,0' is the device of '0' again; list each device once"),
        ("1,2,01", "entry 3 .* is the device of '1' again"),
        ("GPU-5f5b2c,gpu-5F5B", "entry 2 .* is the device of 'GPU-5f5b2c' again"),
        ("MIG-1/2,0,MIG-1/2", "entry 3 .* is the device of 'MIG-1/2' again"),
        ("0,,1", "entry 2 .* is empty"),
        ("0,1,", "entry 3 .* is empty"),
        (",", "entry 1 .* is empty"),
        ("0 1", "entry 1 .* separate devices by commas"),
        ("0,1\x00", "entry 2 .* is no device"),
        ("0\n1", "entry 1 .* separate devices by commas"),
        ("0,-1,1", "entry 2 .* hides a device"),
    ],
)
def test_hostile_entries_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        plan_ranks(visible(text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "devices", "entries"),
    [
        (visible("4,GPU-a,6"), [1, 0], ("GPU-a", "4")),
        (visible("4,5"), [1], ("5",)),
        ({}, [0, 1], ("0", "1")),
        ({}, [3], ("3",)),
    ],
)
def test_the_deprecated_list_chooses_by_position(
    environment: dict[str, str], devices: list[int], entries: tuple[str, ...]
) -> None:
    plan = plan_ranks(environment, devices)
    assert (plan.entries, plan.world_size) == (entries, len(entries))


@pytest.mark.parametrize(
    ("environment", "devices", "message"),
    [
        (visible("4,5"), [], r"training\.devices=\[\] names no device"),
        (visible("4,5"), [0, 0], "names a device twice"),
        (visible("4,5"), [4, 5], "no device 4, CUDA_VISIBLE_DEVICES=4,5 has 2; count from 0"),
        (visible(""), [0], "no device 0, CUDA_VISIBLE_DEVICES= has 0"),
        (visible("4,5"), [-1], "no device -1"),
        ({}, [0, -2], "no device -2"),
        ({}, [0, 2], "no device 2, this host has 2"),
    ],
)
def test_impossible_lists_are_refused(environment: dict[str, str], devices: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_ranks(environment, devices, device_count=2)


@pytest.mark.parametrize(("environment", "entry"), [({}, "1"), (visible("6,MIG-b"), "MIG-b")])
def test_a_launchers_ranks_each_see_their_own_entry(environment: dict[str, str], entry: str) -> None:
    plan = plan_ranks(TORCHRUN | environment)
    assert (plan.rank, plan.world_size, plan.local_rank, plan.entry, plan.launched) == (3, 4, 1, entry, True)


@pytest.mark.parametrize("missing", sorted(FIVE))
def test_a_launchers_variables_come_together(missing: str) -> None:
    with pytest.raises(ValueError, match=f"set without {missing}; a launcher sets all five"):
        plan_ranks({name: value for name, value in FIVE.items() if name != missing})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "4"}, "RANK=4, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2 contradict each other"),
        ({"WORLD_SIZE": "0"}, "contradict"),
        ({"LOCAL_RANK": "4"}, "contradict"),
        ({"RANK": "-1"}, "RANK must be a number from 0, got '-1'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE must be a number"),
        ({"LOCAL_RANK": "½"}, "LOCAL_RANK must be a number"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT must be a number from 0, got 'abc'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT must be a port from 1 to 65535, got '65536'"),
        ({"LOCAL_WORLD_SIZE": "1"}, "contradict"),
        ({"LOCAL_WORLD_SIZE": "5"}, "contradict"),
        (visible("7"), "2 ranks on this host need a device each, 1 visible: 7; start fewer"),
    ],
)
def test_a_launchers_nonsense_is_refused(changed: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_ranks(TORCHRUN | changed)
