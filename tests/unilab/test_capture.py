"""Phases as CUDA graphs and under Inductor.

A fake graph shows everywhere what capture does to the state; tests marked `gpu` hold real graphs and compiled phases
against the same phases run eagerly.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_rig import Rig, begun, differences
from torch import Tensor
from torch._dynamo.utils import counters

from unilab import exchange as exchange_module
from unilab import names
from unilab import runner as runner_module
from unilab.capture import WARMUP_RUNS, Phase
from unilab.channel import Channel
from unilab.config import load_config
from unilab.data_parallel import DataParallel
from unilab.exchange import DeviceExchange, MetricReader
from unilab.names import EXIT_OK
from unilab.sac import learner as learner_module
from unilab.sac.config import SacParams
from unilab.state import StateRegistry
from unilab.streams import STREAMS, stream_seed
from unilab.train import main

CPU = torch.device("cpu")
DRAWS = {"act": {"random/environment", "random/exploration"}, "update": {"random/update"}}


def phase_of(rig: Rig, name: str) -> Phase:
    """A phase of a rig with its generators."""
    generators = rig.registry.generators()
    return Phase(Recordable(getattr(rig, name).run), [generators[stream] for stream in sorted(DRAWS[name])])


# --- with a fake graph -----------------------------------------------------------------------------------------------


class FakeGraph:
    """Stands for a CUDA graph; a replay runs again what ran while it was recorded."""

    recording: FakeGraph | None = None

    def __init__(self) -> None:
        self.generators: list[torch.Generator] = []
        self.runs: list[Callable[[], None]] = []
        self.replays = 0

    def register_generator_state(self, generator: torch.Generator) -> None:
        assert FakeGraph.recording is None, "a generator is registered before the capture begins"
        self.generators.append(generator)

    def replay(self) -> None:
        self.replays += 1
        for run in self.runs:
            run()


class Recordable:
    """A phase's function that a fake graph can take down."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def __call__(self) -> None:
        if FakeGraph.recording is not None:
            FakeGraph.recording.runs.append(self._run)
        self._run()


class FakeCuda:
    """The pieces of `torch.cuda` that a capture uses.

    Attributes:
        graphs: every graph made.
        log: what was called, in order.
        arguments: how the last capture was begun.
        at_end: called when a capture ends, before anything is put back.
    """

    def __init__(self) -> None:
        self.stream = object()
        self.graphs: list[FakeGraph] = []
        self.log: list[str] = []
        self.arguments: dict[str, Any] = {}
        self.at_end: Callable[[], object] = lambda: None

    def make(self) -> FakeGraph:
        self.graphs.append(FakeGraph())
        return self.graphs[-1]

    @contextmanager
    def capture(self, graph: FakeGraph, **arguments: Any) -> Iterator[None]:
        self.log.append("begin")
        self.arguments, FakeGraph.recording = arguments, graph
        try:
            yield
            self.at_end()
        finally:
            FakeGraph.recording = None
        self.log.append("end")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", fake.make)
    monkeypatch.setattr(torch.cuda, "graph", fake.capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: fake.log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: fake.stream)
    return fake


def counting(log: list[str]) -> Recordable:
    return Recordable(lambda: log.append("run"))


def test_a_phase_runs_eagerly_without_any_graph() -> None:
    log: list[str] = []
    phase = Phase(counting(log), [])
    phase()
    phase()
    assert log == ["run", "run"]
    phase.release()
    phase()
    assert len(log) == 3


def test_a_captured_phase_only_replays(cuda: FakeCuda) -> None:
    phase = Phase(counting(cuda.log), [])
    phase.capture(StateRegistry())
    (graph,) = cuda.graphs
    assert (graph.replays, cuda.log.count("run")) == (0, WARMUP_RUNS + 1)
    phase()
    phase()
    assert graph.replays == 2


def test_release_drops_the_graph_and_returns_to_eager(cuda: FakeCuda) -> None:
    phase = Phase(counting(cuda.log), [])
    phase.capture(StateRegistry())
    phase.release()
    ran = cuda.log.count("run")
    phase()
    assert (cuda.graphs[0].replays, cuda.log.count("run")) == (0, ran + 1)
    phase.capture(StateRegistry())
    phase()
    assert [graph.replays for graph in cuda.graphs] == [0, 1]


def test_warm_up_is_over_before_the_capture_begins(cuda: FakeCuda) -> None:
    Phase(counting(cuda.log), []).capture(StateRegistry())
    begin = cuda.log.index("begin")
    assert cuda.log[:begin] == ["run"] * WARMUP_RUNS + ["synchronize"]
    assert cuda.log[begin:] == ["begin", "run", "end", "synchronize"]
    assert cuda.arguments == {"stream": cuda.stream, "capture_error_mode": "thread_local"}


def test_a_capture_that_fails_leaves_the_phase_eager(cuda: FakeCuda) -> None:
    def fail() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    phase, cuda.at_end = Phase(counting(cuda.log), []), fail
    with pytest.raises(RuntimeError, match="not permitted"):
        phase.capture(StateRegistry())
    phase()
    assert cuda.log[-1] == "run"
    assert cuda.graphs[0].replays == 0


@pytest.mark.parametrize("name", ["act", "update"])
def test_capture_puts_every_entry_back(cuda: FakeCuda, name: str) -> None:
    rig = begun()
    for _ in range(2):
        rig.tick()
    rig.physics()
    before, during = rig.registry.snapshot(), {}
    cuda.at_end = lambda: during.update(rig.registry.snapshot())
    phase = phase_of(rig, name)
    phase.capture(rig.registry)
    assert differences(rig.registry.snapshot(), before) == []
    expected = {"act": {"env/obs", "replay/position"}, "update": {"critic/adamw_step", "actor/parameters"}}
    assert expected[name] | DRAWS[name] <= set(differences(before, during))
    getattr(rig, name).run()
    eager = rig.registry.snapshot()
    rig.registry.restore(before)
    phase()
    assert differences(rig.registry.snapshot(), eager) == []


@pytest.mark.parametrize("name", ["act", "update"])
def test_a_phase_draws_from_its_own_generators_alone(name: str) -> None:
    """Those are what its graph has to know."""
    rig = begun()
    rig.tick()
    rig.physics()
    before = rig.registry.snapshot()
    getattr(rig, name).run()
    moved = {entry for entry in differences(before, rig.registry.snapshot()) if entry.startswith("random/")}
    assert moved == DRAWS[name]


# --- switches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A finished run's manifest, checkpoint and losses."""

    learner: dict[str, Any]
    state: dict[str, Tensor]
    losses: list[float]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Trains in this process; four iterations of a small run, or as overridden."""
    losses: list[float] = []
    read = MetricReader.read

    def remember(self: MetricReader) -> tuple[dict[str, float], float]:
        values, seconds = read(self)
        losses.append(values["Loss/critic"])
        return values, seconds

    monkeypatch.setattr(MetricReader, "read", remember)

    def start(*overrides: str) -> Run:
        losses.clear()
        path = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        small = ["actor_hidden_dim=16", "critic_hidden_dim=16", "num_envs=8", "batch_size=32", "num_atoms=11"]
        names = ["--algo", "sac", "--task", "g1_walk_flat", "--sim", "mujoco"]
        settings = [*(f"algo.{setting}" for setting in small), "algo.max_iterations=4", "algo.save_interval=0"]
        assert main([*names, *settings, "training.no_play=true", f"training.log_dir={path}", *overrides]) == EXIT_OK
        checkpoint = torch.load(path / "model_4.pt", weights_only=True)
        manifest = json.loads((path / "manifest.json").read_text())
        return Run(manifest["learner"], checkpoint["state"], list(losses))

    return start


@pytest.mark.parametrize("inductor", [True, False])
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize(("device", "able"), [("cuda", True), ("cuda:1", True), ("cpu", False), ("mps", False)])
def test_only_cuda_compiles_and_captures(device: str, able: bool, graph: bool, inductor: bool) -> None:
    params = SacParams(use_compile=inductor, use_whole_cycle_cuda_graph=graph)
    assert runner_module._execution(params, torch.device(device)) == (able and inductor, able and graph)


def test_a_run_on_the_cpu_says_that_it_is_eager(cuda: FakeCuda, train: Callable[..., Run]) -> None:
    run = train("training.smoke=true")
    assert (run.learner["compiled"], run.learner["cuda_graph"]) == (False, False)
    assert cuda.graphs == []


@pytest.mark.parametrize("inductor", [True, False])
@pytest.mark.parametrize("graph", [True, False])
def test_switches_reach_the_runner_and_change_nothing_else(
    cuda: FakeCuda, train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, graph: bool, inductor: bool
) -> None:
    """The runner takes the CPU for a CUDA device: its graphs are fake, and compiling is left out."""
    eager = train("training.smoke=true")
    execution, compiled, drawn = runner_module._execution, [], []

    def compile_nothing(function: Any, **_: Any) -> Any:
        compiled.append(function.__name__)
        return function

    def phase(run: Callable[[], None], generators: list[torch.Generator]) -> Phase:
        drawn.append([generator.initial_seed() for generator in generators])
        return Phase(Recordable(run), generators)

    monkeypatch.setattr(torch, "compile", compile_nothing)
    monkeypatch.setattr(runner_module, "Phase", phase)
    monkeypatch.setattr(runner_module, "_execution", lambda params, _: execution(params, torch.device("cuda")))
    switches = {"use_compile": inductor, "use_whole_cycle_cuda_graph": graph}
    run = train("training.smoke=true", *(f"algo.algo_params.{key}={value}".lower() for key, value in switches.items()))
    assert (run.learner["compiled"], run.learner["cuda_graph"]) == (inductor, graph)
    assert bool(compiled) is inductor
    assert [graph.replays for graph in cuda.graphs] == (
        [13, 4] if graph else []
    )  # ticks; the first updates in the 10th
    seeds = {stream: stream_seed(1, stream) for stream in STREAMS}
    assert drawn == [[seeds["environment"], seeds["exploration"]], [seeds["update"]]]
    if graph:
        registered = [[generator.initial_seed() for generator in graph.generators] for graph in cuda.graphs]
        assert registered == drawn
    assert run.losses == eager.losses
    assert differences(run.state, eager.state) == []


@pytest.mark.parametrize(("algo", "collectives"), [("sac", 10), ("flashsac", 12)])
def test_graph_hooks_say_that_the_update_graph_holds_every_all_reduce(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, algo: str, collectives: int
) -> None:
    """What `graph hooks: True` tells of the trainer, looked at in the loop's own graph of a rank of two."""
    held: list[bool] = []
    monkeypatch.setattr(DataParallel, "_all_reduce_mean", lambda *_: held.append(FakeGraph.recording is not None))
    monkeypatch.setattr(DataParallel, "gather", lambda self, values: values.repeat(self.world_size, 1))
    monkeypatch.setattr(runner_module, "_execution", lambda *_: (False, True))
    small = ["actor_hidden_dim=16", "critic_hidden_dim=16", "num_envs=8", "batch_size=32", "updates_per_step=8"]
    config = load_config(algo, "g1_walk_flat", "mujoco", [f"algo.{setting}" for setting in small])
    task = config.build_task(config.algo.num_envs, CPU)
    with runner_module.Runner(config, task, CPU, None, DataParallel(0, 2)) as runner:
        assert runner._captured
        runner._run_update.capture(runner.registry)
    assert len(cuda.graphs) == 1
    assert names.GRAPH_HOOKS is (held.count(True) == collectives)


# --- compiled --------------------------------------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "gcc", "clang++", "clang")), reason="needs a C++ compiler"
)
LEARNED = ("actor", "critic", "critic_target", "temperature")


@pytest.fixture
def compiling() -> Iterator[None]:
    """Nothing compiled before counts, and nothing compiled here stays; the C++ compiler does not optimise."""
    torch._dynamo.reset()
    counters.clear()
    with torch._inductor.config.patch({"cpp.simdlen": 1, "aot_inductor.debug_compile": True}):
        yield
    torch._dynamo.reset()


def copy_state(source: Rig, target: Rig) -> None:
    target.registry.restore(source.registry.snapshot())
    target.replay.rows.copy_(source.replay.rows)
    target.ticks = source.ticks


def distances(ours: Rig, theirs: Rig, prefix: str) -> dict[str, float]:
    """Largest difference by entry, where there is any; NaN equals itself."""
    found, expected = ours.registry.snapshot(), theirs.registry.snapshot()
    pairs = {name: (found[name], expected[name]) for name in expected if name.startswith(prefix)}
    largest = {
        name: (torch.nan_to_num(a).double() - torch.nan_to_num(b).double()).abs().max().item()
        for name, (a, b) in pairs.items()
    }
    return {name: value for name, value in largest.items() if value}


def update_errors(compiled: Rig, eager: Rig, update: Callable[[], None]) -> dict[str, float]:
    """Relative errors of one cycle's parameter updates from a common start: |ours - theirs| / |theirs - start|."""
    copy_state(eager, compiled)
    start = eager.registry.snapshot()
    eager.update.run()
    update()
    found, expected = compiled.registry.snapshot(), eager.registry.snapshot()
    errors = {}
    for name in (f"{group}/parameters" for group in LEARNED):
        change = (expected[name] - start[name]).double().norm()
        assert change > 0
        errors[name] = ((found[name] - expected[name]).double().norm() / change).item()
    return errors


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.long, needs_compiler])])
def test_compiled_phases_equal_eager_ones(backend: str, compiling: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where the learner is made to compile as on CUDA; without Inductor the same graphs run eagerly."""
    compile_with = partial(torch.compile, backend=backend)
    monkeypatch.setattr(torch, "compile", compile_with)
    eager = begun()
    maybe_compiled = learner_module._compiled
    monkeypatch.setattr(learner_module, "_compiled", lambda run, _, **options: maybe_compiled(run, True, **options))
    compiled = begun(compiled=True)
    for _ in range(10):  # AdamW's first steps are signs of gradients, and those of rounding too
        eager.tick()
    copy_state(eager, compiled)
    for rig in (eager, compiled):
        rig.physics()
        rig.act.run()
    apart = distances(compiled, eager, "env/")
    assert not {"env/done", "env/codes", "env/episode_steps", "env/episode_count", "env/valid"} & set(apart)
    # Fused arithmetic rounds elsewhere; values up to 30, measured 2.4e-7.
    assert max(apart.values(), default=0.0) < 1e-5
    errors = update_errors(compiled, eager, compiled.update.run)
    assert max(errors.values()) < 1e-5, errors  # rounding as well; measured 1.4e-7
    # Act: after the transition, summary, actor. Update: next actions whatever their number of rows, critic, actor, and
    # the steps of the last two.
    assert counters["stats"]["unique_graphs"] == 8


# --- on a GPU --------------------------------------------------------------------------------------------------------

GPU = torch.device("cuda", 0)
REAL = {
    "num_envs": 2048,
    "batch_size": 8192,
    "actor_hidden_dim": 512,
    "critic_hidden_dim": 768,
    "num_atoms": 101,
}


def on_gpu(test: Any) -> Any:
    """Needs a CUDA device; compilers and debug modes may warn there."""
    for mark in (
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        pytest.mark.timeout(600),
        pytest.mark.filterwarnings("default"),
    ):
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def stream() -> Iterator[None]:
    """One stream for warm-up, capture and replay, as in a run."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    torch.cuda.synchronize()


def captured(rig: Rig) -> tuple[list[Phase], Phase]:
    """The turn of every group, and the update."""
    generators = rig.registry.generators()
    draws = [generators["random/environment"], generators["random/exploration"]]
    turns = [Phase(partial(rig.act.run, group), draws) for group in range(len(rig.act.parts))]
    update = phase_of(rig, "update")
    for phase in (*turns, update):
        phase.capture(rig.registry)
    return turns, update


@dataclass(frozen=True)
class Real:
    """A compiled and captured rank of the documented size, and its state before and after capture."""

    rig: Rig
    turns: list[Phase]
    update: Phase
    before: dict[str, Tensor]
    after: dict[str, Tensor]


@pytest.fixture(scope="module")
def real(stream: None) -> Real:
    torch._dynamo.reset()
    rig = begun(device=GPU, compiled=True, amp=True, ring=16, groups=2, **REAL)
    for _ in range(2):
        rig.physics()
        rig.turns()
    before = rig.registry.snapshot()
    turns, update = captured(rig)
    return Real(rig, turns, update, before, rig.registry.snapshot())


@pytest.fixture
def tick(real: Real) -> Iterator[Callable[[int], None]]:
    """One tick as the runner makes it, without physics; its metrics are read in the next one."""
    env, parts = real.rig.env, real.rig.act.parts
    channel = Channel.create(env.task.spec, env.num_envs, len(parts))
    for slot in channel.slots:
        slot[:] = env.task.idle_row.cpu().numpy()
    link, metrics = DeviceExchange(channel, parts), MetricReader(real.rig.update.metrics, real.rig.update.metric_names)

    def run(number: int) -> None:
        for group, turn in enumerate(real.turns):
            link.upload(number * len(parts) + group)
            turn()
            link.download(group)
        if number:
            metrics.read()
        metrics.begin()
        real.update()
        metrics.end()

    yield run
    link.close()


@on_gpu
@pytest.mark.parametrize("amp", [True, False], ids=["bf16", "fp32"])
def test_fifty_cycles_of_graphs_are_bit_equal_to_eager_ones(stream: None, amp: bool) -> None:
    eager, graph = begun(device=GPU, amp=amp), begun(device=GPU, amp=amp)
    turns, update = captured(graph)
    for cycle in range(50):
        for rig in (eager, graph):
            rig.physics()
        eager.act.run()
        eager.update.run()
        for turn in turns:
            turn()
        update()
        metrics = {"eager": eager.update.metrics.tolist(), "graph": graph.update.metrics.tolist()}
        assert metrics["graph"] == metrics["eager"], cycle
    assert differences(graph.registry.snapshot(), eager.registry.snapshot()) == []
    size = int(eager.replay.size)
    assert size > 300
    assert torch.equal(graph.replay.rows[:size], eager.replay.rows[:size])


@on_gpu
def test_capture_on_the_device_puts_every_entry_back(real: Real) -> None:
    assert differences(real.before, real.after) == []


@on_gpu
def test_a_compiled_act_phase_equals_an_eager_one(real: Real) -> None:
    eager = begun(device=GPU, amp=True, ring=16, **REAL)
    eager.tick()
    copy_state(eager, real.rig)
    for rig in (eager, real.rig):
        rig.physics()
    eager.turns()
    for turn in real.turns:
        turn()
    apart = distances(real.rig, eager, "env/")
    assert not {"env/done", "env/codes", "env/episode_steps", "env/episode_count", "env/valid"} & set(apart)
    assert max(apart.values(), default=0.0) < 1e-3, apart  # float32 rounding of values up to about 100
    assert distances(real.rig, eager, "random/") == {}


@on_gpu
def test_a_compiled_cycle_equals_an_eager_one_in_bfloat16(real: Real) -> None:
    """Fused operations keep float32 where separate ones round to bfloat16 in between."""
    eager = begun(device=GPU, amp=True, ring=16, **REAL)
    for _ in range(10):
        eager.tick()
    errors = update_errors(real.rig, eager, real.update)
    assert max(errors.values()) <= 2e-2, errors


@on_gpu
def test_a_compiled_cycle_equals_an_eager_one_in_float32(stream: None, compiling: None) -> None:
    size = {"num_envs": 256, "batch_size": 1024, "actor_hidden_dim": 256, "critic_hidden_dim": 384, "num_atoms": 101}
    eager, compiled = (begun(device=GPU, compiled=compiled, **size) for compiled in (False, True))
    for _ in range(10):
        eager.tick()
    update = phase_of(compiled, "update")
    update.capture(compiled.registry)
    errors = update_errors(compiled, eager, update)
    assert max(errors.values()) <= 1e-4, errors


@on_gpu
def test_device_memory_is_flat_over_a_thousand_replays(real: Real, tick: Callable[[int], None]) -> None:
    def used() -> tuple[int, int]:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    for number in range(20):
        tick(number)
    before = used()
    for number in range(20, 1020):
        tick(number)
    assert used() == before


@on_gpu
def test_a_tick_waits_for_one_event_and_synchronises_nothing(
    tick: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group's download of its command is waited for; the last update's metrics are then there already."""
    waits: list[tuple[str, bool]] = []
    wait = exchange_module.wait_event

    def remember(event: torch.cuda.Event, waiting_for: str, *rest: float) -> None:
        waits.append((waiting_for, event.query()))
        wait(event, waiting_for, *rest)

    def forbidden(*_: Any) -> None:
        raise AssertionError("a host synchronisation")

    tick(0)
    torch.cuda.synchronize()
    with monkeypatch.context() as patched:
        patched.setattr(exchange_module, "wait_event", remember)
        for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
            patched.setattr(owner, "synchronize", forbidden)
        torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(RuntimeError, match="synchroniz"):  # the mode finds what it is to find
                torch.ones((), device=GPU).item()
            for number in range(1, 11):
                tick(number)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [waiting_for for waiting_for, _ in waits] == [
        *["the act phase and its command"] * 2,
        "the update phase and its metrics",
    ] * 10
    assert all(done for waiting_for, done in waits if "metrics" in waiting_for)


@on_gpu
def test_a_run_of_graphs_is_the_eager_run(train: Callable[..., Run]) -> None:
    eager = train("algo.algo_params.use_compile=false", "algo.algo_params.use_whole_cycle_cuda_graph=false")
    graph = train("algo.algo_params.use_compile=false")
    assert (eager.learner["compiled"], eager.learner["cuda_graph"]) == (False, False)
    assert (graph.learner["compiled"], graph.learner["cuda_graph"]) == (False, True)
    assert graph.losses == eager.losses
    assert differences(graph.state, eager.state) == []
