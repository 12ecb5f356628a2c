"""`repro bench physics`: its table and JSON, where its states come from, and its refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fake_trainer
import pytest
from session_builder import TRAINER, make_host

from repro.arguments import build_parser
from repro.bench_physics import PhysicsBench, _worker_counts, bench_physics, physics_lines
from repro.cli import main
from repro.host import find_host
from repro.schema import parse_model
from repro.telemetry import Sample
from unilab.names import STATES_FILE

QUICK = ("--workers", "1", "--profiles", "exact", "--seconds", "0.1")


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("states") / STATES_FILE
    fake_trainer.write_states(path, 4, 2)
    return path


def test_each_profile_and_worker_count_has_a_row(
    states: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And other work is what the samples of the host say, here the mean of two that know it."""
    samples = tuple(Sample(seconds=i, foreign_cpus=cpus) for i, cpus in enumerate((0.5, None, 0.1), start=1))
    monkeypatch.setattr("repro.bench_physics.read_telemetry", lambda path, count: samples if count else ())
    monkeypatch.setattr("repro.bench_physics.usable_cpus", lambda *_: find_host()[0].allowed_cpus[:1])
    flags = ["--states", str(states), "--workers", "1", "--profiles", "fast,exact", "--seconds", "0.1"]
    assert main(["bench", "physics", *flags, "--json"]) == 0
    found = parse_model(PhysicsBench, capfd.readouterr().out, "stdout")
    assert [(row.profile, row.workers) for row in found.rows] == [("fast", 1), ("exact", 1)]
    assert (found.num_envs, found.snapshots, found.decimation) == (4, 2, 3)
    assert found.foreign_share == pytest.approx(0.3)
    for row in found.rows:
        assert row.env_steps_per_second > 0
        if row.c_loop_env_steps_per_second is None:
            assert found.c_loop_reason is not None and row.ratio is None
        else:
            assert row.ratio == pytest.approx(row.env_steps_per_second / row.c_loop_env_steps_per_second)


def test_the_table_names_what_was_stepped_and_why_there_is_no_c_loop(states: Path) -> None:
    row = {
        **{"workers": 2, "cpu_ids": [0, 1], "profile": "exact", "env_steps_per_second": 9876.0},
        **{"c_loop_env_steps_per_second": None, "ratio": None},
    }
    found = parse_model(
        PhysicsBench,
        json.dumps(
            {
                **{"schema_version": 1, "num_envs": 64, "snapshots": 8, "decimation": 3, "mujoco": "4.0.0"},
                **{"cpu_model": "A CPU", "c_loop_reason": "no C compiler", "rows": [row], "foreign_share": 0.05},
            }
        ),
        "test",
    )
    title, table, reason = physics_lines(found)
    assert title == "mj_step ceiling: 8 recorded states of 64 environments, 3 physics steps each, MuJoCo 4.0.0, A CPU"
    assert table.splitlines()[1].split() == ["2", "0-1", "exact", "9,876", "\N{EN DASH}", "\N{EN DASH}"]
    assert reason == "no C loop: no C compiler"
    noisy = physics_lines(found.model_copy(update={"foreign_share": 0.0512}))
    assert noisy[:-1] == [title, table, reason]
    assert noisy[-1] == (
        "NOISY: work of other processes took 5.1 % of the CPUs meanwhile, the limit is 5.0 %; end it and measure again"
    )
    assert physics_lines(found.model_copy(update={"foreign_share": None})) == [title, table, reason]


def test_without_states_a_short_training_records_them(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "physics", *QUICK, "--json"], trainer=TRAINER) == 0
    found = parse_model(PhysicsBench, capfd.readouterr().out, "stdout")
    assert found.snapshots == 8
    assert found.num_envs in (64, 16)  # of the small training without a GPU; with one the trainer's own


def test_the_training_of_a_gpu_host_is_not_smoke(tmp_path: Path) -> None:
    log = tmp_path / "argv.json"
    code = (
        f"import json, os, sys; json.dump([sys.argv[1:], os.environ['CUDA_VISIBLE_DEVICES']], open({str(log)!r}, 'w'))"
    )
    arguments = build_parser().parse_args(["bench", "physics", *QUICK])
    host, topology = make_host(gpu_count=2)
    with pytest.raises(ChildProcessError, match=r"the training left no physics_states\.npz"):
        bench_physics(arguments, host, topology, (sys.executable, "-c", code))
    words, visible = json.loads(log.read_text())
    assert visible == "GPU-0" and "training.record_states=8" in words and "training.smoke=true" not in words


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere one count is measured")
def test_worker_counts_default_to_one_all_but_one_and_all() -> None:
    assert _worker_counts(None, tuple(range(16))) == [1, 15, 16]
    assert _worker_counts(None, (0, 1)) == [1, 2]
    assert _worker_counts(None, (5,)) == [1]
    assert _worker_counts("4,2", tuple(range(16))) == [4, 2]


@pytest.mark.parametrize(
    ("flags", "environment", "code", "message"),
    [
        (["--states", "nowhere"], {}, 2, "--states nowhere is not a file; leave it out"),
        (["--workers", "0"], {}, 2, "--workers 0: write counts with commas, for example 1,"),
        (["--workers", "a"], {}, 2, "--workers a: write counts with commas"),
        (["--workers", "1,4096"], {}, 2, "--workers 1,4096: this host offers "),
        (["--profiles", "exact,quick"], {}, 2, "--profiles exact,quick: no profile 'quick'; there are reference, "),
        (["--seconds", "0"], {}, 2, "--seconds 0: must be above 0"),
        (["--seconds", "nan"], {}, 2, "--seconds nan: must be above 0"),
        ([], {"FAKE_MODE": "crash"}, 1, "the training that records states: exit code 1: RuntimeError: asked to crash"),
        ([], {"FAKE_MODE": "exit3"}, 3, "the training that records states: exit code 3: train: no GPU is visible"),
        ([], {"FAKE_STATES": "none"}, 1, "the training left no physics_states.npz"),
        ([], {"FAKE_STATES": "damaged"}, 2, "the ceiling program: exit code 2: ceiling: "),
    ],
)
def test_refusals_and_failures_are_one_line_with_their_code(
    flags: list[str],
    environment: dict[str, str],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "physics", *flags], trainer=TRAINER) == code
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.count("\n") == 1


def test_a_bench_needs_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench"])
    assert caught.value.code == 2
    assert "repro bench: the following arguments are required: PART" in capsys.readouterr().err


def test_cpus_of_a_bench_are_those_that_a_cell_would_get(states: Path) -> None:
    host, topology = find_host()
    arguments = build_parser().parse_args(["bench", "physics", "--states", str(states), *QUICK])
    found = bench_physics(arguments, host, topology, ("/nonexistent",))
    (row,) = found.rows
    assert (found.foreign_share is not None) == (sys.platform == "linux")
    assert row.cpu_ids == (host.allowed_cpus[:1] if sys.platform == "linux" else None)
