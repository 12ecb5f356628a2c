"""`repro bench`: what it starts, what it reads, and what its tables say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from session_builder import TRAINER, make_host

from repro import bench_training as bench
from repro.bench_training import CARRIER, POOL, LearnerBench, Variant, learner_lines, summarize_tick, tick_lines
from repro.cli import main
from repro.launch import Ended
from repro.schema import canonical_json
from repro.text import NOTHING

TIMES = "\N{MULTIPLICATION SIGN}"
SMALL = ["algo.actor_hidden_dim=8", "algo.critic_hidden_dim=8", "algo.replay_buffer_n=4", "algo.num_atoms=5"]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_host", make_host)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_host", lambda: make_host(cpus=16, gpu_count=2))


@pytest.mark.usefixtures("no_gpu")
def test_a_tick_without_a_gpu_is_smoke_and_leaves_only_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    output = tmp_path / "tick.json"
    assert main(["bench", "tick", "algo.seed=3", "--json", "--output", str(output)], trainer=TRAINER) == 0
    captured = capsys.readouterr()
    assert captured.out == output.read_text() and captured.err.startswith("SMOKE: the driver lists no GPU; small sizes")
    found = json.loads(captured.out)
    assert (found["smoke"], found["iterations"], found["points"]) == (True, 100, 50)
    assert found["pool_remainder_ms"] == pytest.approx(found["tick_ms"] - sum(found["pool"].values()), abs=1e-6)
    assert found["update_ms"] == pytest.approx(0.3 * found["tick_ms"], rel=1e-5)
    assert list(tmp_path.iterdir()) == [output]
    assert main(["bench", "tick", "--output", str(output)], trainer=TRAINER) == 2
    assert "older results are never replaced" in capsys.readouterr().err


def test_stages_are_means_of_the_tail_and_the_remainder_is_stated(fake_run: Callable[..., Path]) -> None:
    pool = dict(zip(POOL.values(), (1.5, 14.25), strict=True))  # a tick of 16 ms: 16 envs at 1000 steps/s
    stages = pool | dict(zip(CARRIER.values(), (0.25, 0.5), strict=True))
    learner = {"Perf/learner_collector_wait_ms": 12.0, "Perf/learner_inference_ms": 2.0}
    found = summarize_tick(fake_run(rate=1000.0, tags=stages | learner | {"Perf/exposed_ms": 2.0}), False, 60)
    assert found.tick_ms == pytest.approx(16.0, rel=1e-6)
    assert list(found.pool.values()) == [1.5, 14.25]
    assert list(found.carrier.values()) == [0.25, 0.5]
    assert found.pool_remainder_ms == pytest.approx(0.25, abs=1e-5)
    assert found.learner_remainder_ms == pytest.approx(2.0, abs=1e-5)
    assert (found.exposed_ms, found.update_ms) == (2.0, pytest.approx(4.8))
    lines = "\n".join(tick_lines(found)).splitlines()
    assert lines[0] == "1,000 env steps/s; means of the last 30 of 60 ticks"
    rows = {line[:24].strip(): line[24:].split() for line in lines[3:14]}
    assert rows["pool: inside step"] == ["14.25", "89.1", "%"]
    assert rows["pool: remainder"] == ["0.25", "1.6", "%"]


def test_a_stage_that_is_not_logged_leaves_no_remainder(fake_run: Callable[..., Path]) -> None:
    found = summarize_tick(fake_run(tags={POOL["idle"]: None}), True, 60)
    assert found.pool["idle"] is None and found.pool_remainder_ms is None


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["tick", "--iterations", "19"], 2, "--iterations 19: must be at least 20"),
        (["tick", "algo.max_iterations=5"], 2, "algo.max_iterations is set by the suite; use iterations"),
        (["learner", "batch"], 2, "override 'batch' is not key=value"),
    ],
)
def test_wrong_requests_are_one_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments], trainer=TRAINER) == code
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("repro: ") and message in error


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("mode", "code"), [("exit3", 3), ("crash", 1), ("dance", 2), ("nan", 1)])
def test_a_run_that_fails_gives_no_number(
    mode: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_MODE", mode)
    assert main(["bench", "tick", "--iterations", "20"], trainer=TRAINER) == code
    captured = capsys.readouterr()
    expected = "no number: non_finite: " if mode == "nan" else "the measured process failed: exit code"
    assert expected in captured.err and captured.out == ""


@pytest.mark.usefixtures("one_gpu")
def test_with_a_gpu_the_first_one_runs_the_tasks_own_sizes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: dict[str, list[str]] = {}
    found = learner(("eager", 50.0), ("graph", 10.0))

    def run(command: list[str], environment: dict[str, str], folder: Path, *_: object) -> Ended:
        started["command"], started["gpus"] = command, environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        (folder / "learner.json").write_text(canonical_json(found))
        return Ended("exited", 0, 1.0, None)

    monkeypatch.setattr(bench, "run_cell", run)
    assert main(["bench", "learner", "algo.batch_size=64", "--variants", "eager,graph", "--json"]) == 0
    assert capsys.readouterr().out == canonical_json(found)
    assert started["gpus"] == ["GPU-0"]
    words = started["command"]
    assert words[1:4] == ["-m", "unilab.bench", "learner"] and words[-1] == "algo.batch_size=64"
    assert words[words.index("--variants") + 1] == "eager,graph" and "training.smoke=true" not in words
    assert main(["bench", "learner", "training.smoke=true"]) == 0
    assert {"training.smoke=true", "algo.num_envs=32"} <= set(started["command"])
    assert capsys.readouterr().err == "SMOKE: asked for; small sizes on the CPU, never a benchmark\n"


@pytest.mark.usefixtures("one_gpu")
def test_an_interrupt_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "run_cell", lambda *_: Ended("interrupted", None, 1.0, "by the user"))
    assert main(["bench", "learner"]) == 130


def learner(*times: tuple[str, float]) -> LearnerBench:
    variants = tuple(
        Variant(
            variant=name,
            ms=ms,
            cycles_ms=(ms - 1.0, ms, ms + 2.0),
            kernels=1467 if name == "graph" else None,
            compile_seconds=None,
            capture_seconds=1.25 if name == "graph" else None,
            update_error={"actor": 0.0, "critic": 0.5 if name == "graph" else 0.0},
        )
        for name, ms in times
    )
    sizes = {"batch_size": 8192}
    return LearnerBench(
        schema_version=1,
        kind="learner",
        smoke=False,
        algo="sac",
        task="g1",
        device="NVIDIA H200",
        torch="2.13.0",
        sizes=sizes,
        variants=variants,
    )


def test_the_learners_table_says_speed_up_kernels_and_error() -> None:
    lines = "\n".join(learner_lines(learner(("eager", 50.0), ("graph", 10.0)))).splitlines()
    assert lines[0] == "sac on g1: one update cycle on NVIDIA H200, torch 2.13.0"
    rows = {line.split()[0]: line.split()[1:] for line in lines[4:6]}
    assert rows["eager"] == ["50.00", "49.00", "52.00", f"1.00{TIMES}", NOTHING, NOTHING, NOTHING, "0.0e+00"]
    assert rows["graph"] == ["10.00", "9.000", "12.00", f"5.00{TIMES}", "1,467", NOTHING, "1.2", "5.0e-01"]
    alone = "\n".join(learner_lines(learner(("graph", 10.0)))).splitlines()
    assert alone[4].split()[4] == NOTHING


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu")
def test_the_real_learner_is_measured_in_a_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "learner", *SMALL, "--cycles", "2"]) == 0
    assert capsys.readouterr().out.startswith("SMOKE, not a benchmark: sac on g1_walk_flat: one update cycle on cpu")
