"""The benchmark of the learner: what it refuses, and what its numbers are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from unilab import bench, synthetic
from unilab.bench import choose_variants, kernel_count, main, variants_of
from unilab.config import load_config
from unilab.synthetic import SyntheticRank, update_errors

SMALL = [
    *("algo.actor_hidden_dim=16", "algo.critic_hidden_dim=16", "algo.num_envs=8", "algo.batch_size=32"),
    *("algo.num_atoms=11", "algo.replay_buffer_n=4"),
]
SMOKE = ["learner", "training.smoke=true", *SMALL]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_smoke_measures_the_eager_cycle_and_says_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "bench.json"
    assert main([*SMOKE, "--cycles", "4", "--json", "--output", str(output)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(output.read_text())
    assert (found["smoke"], found["device"], found["sizes"]["replay_rows"]) == (True, "cpu", 32)
    (eager,) = found["variants"]
    assert (eager["variant"], len(eager["cycles_ms"])) == ("eager", 4)
    assert min(eager["cycles_ms"]) <= eager["ms"] <= max(eager["cycles_ms"])
    assert set(eager["update_error"]) == {"actor", "critic", "critic_target", "temperature"}
    assert set(eager["update_error"].values()) == {0.0}  # a second rank repeats the first, bit for bit
    assert eager["kernels"] is eager["compile_seconds"] is eager["capture_seconds"] is None
    assert main([*SMOKE, "--cycles", "1"]) == 0
    assert capsys.readouterr().out.startswith("SMOKE, not a benchmark: ")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["learner", *SMALL], 3, "training needs a CUDA or MPS device"),
        ([*SMOKE, "--variants", "eager,graph"], 2, "graph needs CUDA, this is cpu; type --variants eager"),
        ([*SMOKE, "--variants", "eagre"], 2, "unknown variant 'eagre'; there is eager, inductor, graph"),
        ([*SMOKE, "--variants", "eager,eager"], 2, "names one twice"),
        ([*SMOKE, "--cycles", "0"], 2, "--cycles 0: must be at least 1"),
        ([*SMOKE, "algo.batchsize=4"], 2, "unknown key 'algo.batchsize', did you mean 'algo.batch_size'?"),
        ([*SMOKE, "--cycles", "1", "--output", "/nonexistent/a.json"], 1, "No such file"),
    ],
)
def test_refusals_are_one_line(
    arguments: list[str], code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for backend in (torch.cuda, torch.backends.mps, torch.xpu):
        monkeypatch.setattr(backend, "is_available", lambda: False)
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_only_cuda_runs_more_than_the_eager_variant() -> None:
    assert choose_variants(None, CUDA) == ["eager", "inductor", "graph", "inductor+graph"]
    assert choose_variants("graph", CUDA) == ["graph"]
    assert choose_variants(None, CPU) == choose_variants(None, torch.device("mps")) == ["eager"]


def test_flashsac_has_a_variant_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    sac, flash = (variants_of(load_config(algo, "g1_walk_flat", "mujoco", [])) for algo in ("sac", "flashsac"))
    assert list(sac) == ["eager", "inductor", "graph", "inductor+graph"]
    assert choose_variants(None, CUDA, flash) == [*sac, "inductor-loss", "inductor-loss+graph", "eager-reads"]
    assert choose_variants(None, CPU, flash) == ["eager", "eager-reads"]
    with pytest.raises(ValueError, match="graph needs CUDA, this is cpu; type --variants eager,eager-reads"):
        choose_variants("graph", CPU, flash)
    with pytest.raises(ValueError, match="unknown variant 'inductor-loss'"):
        choose_variants("inductor-loss", CUDA, sac)
    assert main([*SMOKE, "--algo", "flashsac", "--cycles", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["algo"], [item["variant"] for item in found["variants"]]) == ("flashsac", ["eager", "eager-reads"])
    assert {error for item in found["variants"] for error in item["update_error"].values()} == {0.0}


def test_reads_come_after_every_update(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = SyntheticRank(load_config("flashsac", "g1_walk_flat", "mujoco", SMALL), CPU, False)
    read, report = [], rank.learner.report
    monkeypatch.setattr(rank.learner, "report", lambda: read.append(1) or report())
    bench._read_every_update(rank.learner)
    rank.update()
    assert len(read) == 8 + 1  # one for each update, one for the cycle


def test_the_ring_is_full_of_rows_that_differ_and_sometimes_end() -> None:
    rank = SyntheticRank(load_config("sac", "g1_walk_flat", "mujoco", [*SMALL, "algo.replay_buffer_n=256"]), CPU, False)
    start = rank.registry.snapshot()
    assert int(start["replay/size"]) == rank.replay.capacity == 2048
    rank.update()
    after = rank.registry.snapshot()
    assert not torch.equal(after["actor/parameters"], start["actor/parameters"])
    ring: Any = synthetic.ReplayRing(4000, {"obs": 3, "done": 0, "timeout": 0}, CPU, synthetic.StateRegistry())
    synthetic._fill(ring, torch.Generator().manual_seed(1))
    obs, done, timeout = ring.split(ring.rows).values()
    assert obs.std() == pytest.approx(1.0, abs=0.05)
    assert set(done.unique().tolist()) == set(timeout.unique().tolist()) == {0.0, 1.0}
    assert done.mean() == pytest.approx(0.02, abs=0.01) and bool((timeout <= done).all())
    assert 0 < timeout.sum() < done.sum()


def test_the_error_is_relative_to_the_eager_update() -> None:
    start = {"a/parameters": torch.zeros(2), "other": torch.zeros(1)}
    reference = {"a/parameters": torch.tensor([3.0, 4.0]), "other": torch.ones(1)}
    found = {"a/parameters": torch.tensor([3.0, 4.5]), "other": torch.zeros(1)}
    assert update_errors(found, reference, start) == {"a": pytest.approx(0.1)}
    with pytest.raises(RuntimeError, match="the update of a is not finite"):
        update_errors({"a/parameters": torch.full((2,), torch.nan)}, reference, start)
    with pytest.raises(RuntimeError, match="does not change it"):
        update_errors(start, start, start)


def test_a_variant_that_computes_something_else_shows_its_error() -> None:
    config = load_config("sac", "g1_walk_flat", "mujoco", [*SMALL, "training.smoke=true"])
    start, reference, _ = bench._eager_cycle(config, CPU)
    other = load_config("sac", "g1_walk_flat", "mujoco", [*SMALL, "training.smoke=true", "algo.critic_lr=6e-4"])
    found = bench.measure(other, CPU, "eager", start, reference, cycles=1).update_error
    assert found["critic"] > 0.1 and found["temperature"] < found["critic"]


def test_kernels_are_counted_without_copies_and_without_host_events() -> None:
    events = [
        ("CUDA", "gemm"),
        ("CPU", "aten::mm"),
        ("CUDA", "Memcpy HtoD"),
        ("CUDA", "triton_red"),
        ("CUDA", "Memset"),
    ]
    assert kernel_count(events) == 2
    assert kernel_count([("CPU", "aten::mm")]) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # compilers and the profiler may warn
def test_every_variant_does_the_same_work_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learner", *SMALL, "training.use_amp=false", "--cycles", "5", "--json"]) == 0
    found = {item["variant"]: item for item in json.loads(capsys.readouterr().out)["variants"]}
    assert list(found) == ["eager", "inductor", "graph", "inductor+graph"]
    assert set(found["graph"]["update_error"].values()) == {0.0}
    for item in found.values():
        assert max(item["update_error"].values()) < 1e-4  # rounding of fused float32 operations
        assert item["kernels"] is None or item["kernels"] > 10
    assert found["inductor"]["compile_seconds"] > 0 and found["inductor"]["capture_seconds"] is None
    assert found["graph"]["capture_seconds"] > 0 and found["graph"]["compile_seconds"] is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # compilers and the profiler may warn
def test_every_variant_of_flashsac_does_the_same_work_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = "algo.algo_params.actor_num_blocks=1", "algo.algo_params.critic_num_blocks=1"  # less to compile
    arguments = ["learner", "--algo", "flashsac", *SMALL, *blocks, "training.use_amp=false", "--cycles", "5", "--json"]
    assert main(arguments) == 0
    found = {item["variant"]: item for item in json.loads(capsys.readouterr().out)["variants"]}
    assert list(found) == list(bench.FLASH_VARIANTS)
    assert set(found["eager-reads"]["update_error"].values()) == {0.0}
    assert set(found["graph"]["update_error"].values()) == {0.0}
    for item in found.values():
        assert max(item["update_error"].values()) < 1e-3  # rounding of fused float32 operations; 2e-5 on the CPU
    kernels = {name: item["kernels"] for name, item in found.items()}
    if None not in kernels.values():
        assert kernels["inductor"] < kernels["inductor-loss"] < kernels["eager"]
