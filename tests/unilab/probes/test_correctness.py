"""The correctness probe: it passes on the CPU, and each fault fails the checks that are about it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from unilab.probes import __main__ as command
from unilab.probes import correctness
from unilab.probes.__main__ import main
from unilab.probes.findings import Check, RankPart, join_parts
from unilab.probes.setting import Setting
from unilab.transport import Transport

EAGER = {
    *("trainer_code", "own_states_differ", "initial_state_equal", "collectives_per_cycle", "parameters_equal"),
    *("targets_equal", "optimizer_state_equal", "rank_local_buffers", "optimizer_step_counts", "finite_updates"),
    *("gradient_is_mean_of_ranks", "gradient_of_joined_batch", "nonfinite_skips_on_all_ranks", "recovers_after_skip"),
}
GRAPHS = {
    *("graph_equals_eager", "replayed_state_equal", "replayed_nonfinite_skips_on_all_ranks"),
    *("replayed_recovers_after_skip", "flat_memory_over_replays", "recapture_after_shape_change"),
}
ENDING = {"group_left_within_30s", "ranks_ended"}
# Checks that fail under a fault, which are those about it and those of what follows from it.
FAULTS: dict[str, set[str]] = {
    "none": set(),
    "no_averaging": {
        *("gradient_is_mean_of_ranks", "gradient_of_joined_batch", "parameters_equal", "targets_equal"),
        *("optimizer_state_equal", "nonfinite_skips_on_all_ranks", "recovers_after_skip"),
    },
    "sum_for_mean": {"gradient_is_mean_of_ranks", "gradient_of_joined_batch"},
    "averaging_twice": {"collectives_per_cycle"},
    "rank_1_keeps_its_start": {
        *("initial_state_equal", "parameters_equal", "targets_equal", "gradient_of_joined_batch"),
        "recovers_after_skip",
    },
    "rank_1_skips_nothing": {"nonfinite_skips_on_all_ranks", "recovers_after_skip"},
    "steps_counted_twice": {"optimizer_step_counts", "recovers_after_skip"},
    "rank_1_has_another_tau": {"targets_equal", "recovers_after_skip"},
    "temperature_stands_still": {"finite_updates", "recovers_after_skip"},
    "graphs": set(),
    "graphs_of_two_cycles": {
        *("graph_equals_eager", "replayed_nonfinite_skips_on_all_ranks", "replayed_recovers_after_skip"),
    },
    "graphs_compiled": set(),
    "graphs_compiled_of_two_cycles": {
        *("graph_equals_eager", "replayed_nonfinite_skips_on_all_ranks", "replayed_recovers_after_skip"),
    },
    "graphs_that_leak": {"flat_memory_over_replays"},
}


def setting(**variables: str) -> Setting:
    return Setting(("0", "1"), "gloo", {**os.environ, **variables})


def probe(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    output = tmp_path / "found.json"
    words = [sys.executable, "-m", "unilab.probes", "correctness", "--output", str(output), *arguments]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=110)
    assert ended.stdout == "", ended.stdout
    return ended.returncode, json.loads(output.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.long)])  # the faults below are of two
def test_the_probe_passes_on_the_cpu(tmp_path: Path, world_size: int) -> None:
    code, found = probe(tmp_path, "--smoke", "--world-size", str(world_size))
    failed = [check for check in found["checks"] if not check["passed"]]
    assert (code, found["passed"], failed) == (0, True, [])
    assert (found["world_size"], found["backend"], found["smoke"]) == (world_size, "gloo", True)
    assert sorted(check["name"] for check in found["checks"]) == sorted(EAGER | ENDING)
    details = {check["name"]: check["detail"] for check in found["checks"]}
    assert "graph hooks: True" in details["trainer_code"]
    assert details["optimizer_step_counts"] == "after 5 cycles: critic 40 of 40, temperature 40 of 40, actor 10 of 10"
    wanted = 10 if world_size > 1 else 0
    assert details["collectives_per_cycle"].startswith(f"{wanted} gradient all-reduces")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Check]]:
    """Joined checks under every fault."""
    out = tmp_path_factory.mktemp("faults")
    run = setting().run("faulty_ranks", {"faults": list(FAULTS), "out": str(out)}, 100)
    assert run.fault is None, "\n".join(run.logs)
    return {name: join_parts([RankPart.read(out / f"{name}-{rank}.json") for rank in range(2)]) for name in FAULTS}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_the_checks_about_it_and_no_others(fault: str, found: dict[str, list[Check]]) -> None:
    names = GRAPHS if fault.startswith("graphs") else EAGER
    assert {check.name for check in found[fault]} == names
    assert {check.name for check in found[fault] if not check.passed} == FAULTS[fault], found[fault]


@pytest.mark.parametrize(
    ("ending", "detail"),
    [
        ("hang", "no answer within 3 s; rank 0 at 'a long wait'; rank 1 at 'a long wait'"),
        ("linger", "every rank, 4"),
        ("say_nothing", "rank 1 ended before its last check; rank 0 at 'its beginning'; rank 1 at 'its beginning'"),
    ],
)
def test_an_end_that_is_none_is_found_in_bounded_time(ending: str, detail: str) -> None:
    began = time.monotonic()
    checks, _ = correctness.run(setting(ENDING=ending), "ending_ranks", seconds=3)
    assert time.monotonic() - began < 10
    assert (checks[-1].name, checks[-1].passed) == ("ranks_ended", False)
    assert checks[-1].detail.startswith(detail)


def test_a_rank_that_fails_ends_all_and_says_why() -> None:
    checks, _ = correctness.run(setting(ENDING="fail"), "ending_ranks", seconds=50)
    found = {check.name: check for check in checks}
    assert not found["ranks_ended"].passed
    assert "ended with exit code 1" in found["ranks_ended"].detail
    assert "rank 1 at 'eager cycles': OSError: the device fell off" in found["ranks_ended"].detail
    assert found["initial_state_equal"].passed and "finite_updates" not in found


def test_a_check_whose_values_must_also_agree_is_one_check(tmp_path: Path) -> None:
    def part(rank: int, passed: bool, value: str) -> RankPart:
        found = RankPart(tmp_path / f"{rank}.json")
        found.check("both", passed, f"found by {rank}")
        found.same("both", value)
        return RankPart.read(found.path)

    for one, other, passed in (((True, "a"), (True, "a"), True), ((True, "a"), (True, "b"), False)):
        (joined,) = join_parts([part(0, *one), part(1, *other)])
        assert (joined.name, joined.passed, joined.required) == ("both", passed, True)
        assert joined.detail.startswith("found by 0; ")
    (joined,) = join_parts([part(0, True, "a"), part(1, False, "a")])
    assert (joined.passed, joined.detail) == (False, "rank 1: found by 1; the same on 2 ranks: a")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compile-loss"], "--compile-loss compiles on GPUs alone; leave it out with --smoke"),
        (["--world-size", "0"], "--world-size 0: must be at least 1"),
        (["--algo", "ppo"], "--algo ppo: there is sac, flashsac"),
        (["--world-size", "17"], "--world-size 17: must be at most 16 with --smoke"),
        (["--output", "/"], "--output / is a folder; name a file in it"),
        (["--output", "nowhere/found.json"], "--output nowhere/found.json: there is no folder nowhere"),
    ],
)
def test_refusals_are_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(correctness, "run", lambda _: pytest.fail("the probe was run"))
    assert main(["correctness", "--smoke", *arguments]) == 2
    assert capsys.readouterr() == ("", f"probe: {message}\n")


def test_an_interrupt_ends_the_probe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: Setting) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(correctness, "run", interrupted)
    assert main(["correctness", "--smoke"]) == 130
    assert capsys.readouterr() == ("", "probe: interrupted\n")


@pytest.mark.parametrize("name", ["choose_entries", "choose_transport", "import_module"])
def test_an_interrupt_before_the_probe_is_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "choose_entries", lambda *_: ["0", "1"])
    monkeypatch.setattr(command, "choose_transport", lambda *_: Transport({}, "tcp", (), "made up"))
    monkeypatch.setattr(command, name, interrupted)
    assert main(["communication"]) == 130
    assert capsys.readouterr() == ("", "probe: interrupted\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_findings_that_cannot_be_written_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(correctness, "run", lambda _: ([Check("made_up", True, "")], []))
    assert main(["correctness", "--smoke", "--output", "/dev/full"]) == 1
    out, said = capsys.readouterr()
    assert json.loads(out)["passed"]
    assert said == "probe: --output /dev/full: No space left on device; the findings are printed\n"
    assert Path("/dev/full").is_char_device()


def test_findings_are_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found.json"
    monkeypatch.setattr(correctness, "run", lambda _: ([Check("made_up", True, "")], []))
    assert main(["correctness", "--smoke", "--output", str(output)]) == 0
    before = output.read_bytes()
    assert capsys.readouterr() == ("", "") and json.loads(before)["passed"]

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["correctness", "--smoke", "--output", str(output)]) == 1
    assert (output.read_bytes(), list(tmp_path.iterdir())) == (before, [output])
    assert json.loads(capsys.readouterr().out)["passed"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(700)
@pytest.mark.parametrize("algo", ["sac", "flashsac"])
def test_the_probe_passes_on_a_gpu(tmp_path: Path, algo: str) -> None:
    code, found = probe(tmp_path, "--algo", algo, "--world-size", str(min(2, torch.cuda.device_count())))
    assert [check for check in found["checks"] if not check["passed"]] == []
    assert code == 0 and {check["name"] for check in found["checks"]} == EAGER | GRAPHS | ENDING
