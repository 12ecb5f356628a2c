"""The training loop of one rank, as named phases.

In a tick every environment takes one control step. Groups of them take turns: the learner waits for a group's rows,
uploads them, acts and sends the group's next command, while the pool steps the other group. After a tick's last turn
the learner updates, while the pool steps the first group again. The CPU pool does nothing but physics.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import psutil
import torch

from unilab.algorithm import AlgoParams
from unilab.capture import Phase, on_stream
from unilab.checkpoint import Checkpoint, contents
from unilab.config import RunConfig
from unilab.data_parallel import DataParallel
from unilab.environment import Environment
from unilab.event_log import EventLog, Record
from unilab.exchange import DeviceExchange, MetricReader, wait_event
from unilab.hardware import check_memory
from unilab.names import (
    ACTION_WAIT_MS,
    APPLY_MS,
    BACKEND_MS,
    COLLECTOR_WAIT_MS,
    EXPOSED_MS,
    INFERENCE_MS,
    ITERATION_TIME,
    LEARNING_TIME,
    PACK_MS,
    PHYSICS_FRACTION,
    STATES_FILE,
    TOTAL_FPS,
    TRAIN_ITERATION,
    rank_tag,
)
from unilab.phases import ActPhase, UpdatePhase, transition_widths
from unilab.physics.process import CollectorProcess
from unilab.physics.spec import row_groups
from unilab.physics.states import recorded_iterations
from unilab.provenance import gpu_facts
from unilab.rank_statistics import HOST_MEASURES, RankStatistics
from unilab.replay import ReplayRing, row_width
from unilab.run_dir import RunDirectory
from unilab.state import StateRegistry
from unilab.streams import PREFIX, STREAMS, stream_seed
from unilab.tasks.velocity_task import VelocityTask
from unilab.terminal import TerminalView
from unilab.trace import Clock, DeviceClock, HostClock, StageTimer, Trace, device_times

# Tracks of the timeline: what the host knows of a turn, by tag, and the name a reader sees.
_TIMELINE = {
    "learner/host": ((COLLECTOR_WAIT_MS, "wait for rows"), (INFERENCE_MS, "upload, act, download, command")),
    "collector/pool": ((ACTION_WAIT_MS, "wait for a command"), (BACKEND_MS, "Batch.step")),
    "collector/carrier": ((APPLY_MS, "apply"), (PACK_MS, "pack")),
}


@dataclass(frozen=True)
class Tick:
    """Host-side facts of one tick, kept until its device metrics are read.

    Attributes:
        iteration: training iteration, 0 while the ring fills, also again in a resumed run.
        env_steps: cumulative env steps of all ranks.
        committed: monotonic seconds when the tick's transitions were complete and the next command was out.
        measures: what this rank's host measured, in the order of `HOST_MEASURES`.
    """

    iteration: int
    env_steps: int
    committed: float
    measures: list[float]


class Runner:
    """One rank: environment, learner, replay ring and collector on one device.

    Use as a context manager; leaving it ends the collector.

    Args:
        config: the run.
        task: the task, on `device`.
        device: the learner's device.
        cpu_ids: CPUs of the physics workers, or None to leave them unpinned.
        ranks: the ranks of the run, left at the end; one by default.
        checkpoint: where a resumed run goes on; rank 0's is everybody's.

    Attributes:
        registry: everything mutable.
        env_steps: cumulative env steps collected by all ranks, also before a resume.
        iteration: finished training iterations, also before a resume.
        startup_seconds: process start to first training iteration, or None before it.
    """

    def __init__(
        self,
        config: RunConfig,
        task: VelocityTask,
        device: torch.device,
        cpu_ids: list[int] | None,
        ranks: DataParallel | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self._config, self._task, self._device, self._cpu_ids = config, task, device, cpu_ids
        self._ranks = ranks or DataParallel()
        self._global_envs = config.algo.num_envs * self._ranks.world_size
        self.registry = StateRegistry()
        self.env_steps = self.iteration = self._resumed = 0
        self.startup_seconds: float | None = None
        self._update_seconds = 0.0  # of the last update that was read
        self._update_tags = {rank_tag(LEARNING_TIME, rank) for rank in range(self._ranks.world_size)}
        # Warm-up, capture and replay share one stream of their own.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._build_learner()
        if checkpoint is not None:
            self.registry.restore(checkpoint.content["state"], lasting=True)
            self.env_steps, self.iteration = checkpoint.env_steps, checkpoint.iteration
        statistics = self._statistics
        self._metrics = MetricReader(statistics.values, statistics.names, statistics.host)
        wanted = 0 if self._ranks.rank else config.training.record_states
        snapshots = recorded_iterations(config.algo.max_iterations - self.iteration, wanted)
        self._snapshots = {self.iteration + number: index for index, number in enumerate(snapshots)}
        self._collector = CollectorProcess(
            task.spec, config.algo.num_envs, cpu_ids, config.env.physics_groups, len(snapshots)
        )
        self._timer: StageTimer | None = None
        try:
            if config.training.trace_enabled and not self._ranks.rank:
                self._clock: Clock = DeviceClock(wait_event) if device.type == "cuda" else HostClock()
                self._timer = StageTimer(self._clock)
            self._exchange = DeviceExchange(self._collector.channel, self._act_phase.parts, self._stage)
        except BaseException:  # nobody holds the collector yet
            self._collector.close()
            raise
        self._groups = len(self._act_phase.parts)
        self._stepped_ns = time.monotonic_ns()

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for phase in (*self._run_act, self._run_update):
                phase.release()
            self._ranks.close(failed=kind is not None)  # graphs held its collectives
            self._exchange.close()
        finally:  # a device that failed must not keep the collector alive
            self._collector.close()

    @property
    def warmup_ticks(self) -> int:
        """Ticks until the ring holds enough rows for the first update, that tick included."""
        algo = self._config.algo
        return math.ceil(max(algo.batch_size, algo.learning_starts * algo.num_envs) / algo.num_envs)

    def manifest(self) -> dict[str, Any]:
        """Content of `manifest.json` on rank 0; every rank contributes its part by calling this once."""
        spec = self._task.spec
        return {
            "ranks": self._ranks.collect(self._rank_facts()),
            "dp_sync": self._ranks.facts(self._update_phase.steps, self._captured),
            "physics": {
                "backend": self._config.training.sim_backend,
                "profile": spec.profile,
                "timestep": spec.timestep,
                "decimation": spec.decimation,
                "groups": self._groups,
                **self._workers(),
            },
            "learner": {
                "algo": self._config.algo.algo,
                "amp": self._amp,
                "compiled": self._compiled,
                "cuda_graph": self._captured,
                "torch_threads": torch.get_num_threads(),
                "replay_rows": self._replay.capacity,
                "replay_row_width": self._replay.width,
                "replay_saved": False,
            },
        }

    def _rank_facts(self) -> dict[str, Any]:
        on_cuda = self._device.type == "cuda"
        gpu = gpu_facts(self._device.index or 0) if on_cuda else {"name": None, "uuid": None}
        return {
            "rank": self._ranks.rank,
            "collector_backend_device": "cpu",
            "learner_device": str(self._device),
            "gpu_uuid": gpu["uuid"],
            "gpu_name": gpu["name"],
            "cpu_ids": self._cpu_ids,
            **self._workers(),
        }

    def _workers(self) -> dict[str, Any]:
        """This rank's physics threads."""
        placement = self._collector.placement
        return {"workers": len(placement), "placement": placement}

    def run(
        self,
        log: EventLog | None = None,
        view: TerminalView | None = None,
        directory: RunDirectory | None = None,
        trace: Trace | None = None,
    ) -> None:
        """Train up to iteration `algo.max_iterations`. Rank 0 alone has somewhere to write.

        Args:
            log: receives one record per logged iteration.
            view: shows the progress.
            directory: receives checkpoints and physics states.
            trace: receives the timeline, if the run was configured with one.
        """
        self._log, self._view, self._directory, self._trace = log, view, directory, trace
        self._states = directory.path / STATES_FILE if directory is not None and self._snapshots else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with on_stream(self._stream):
            self._train()

    def _train(self) -> None:
        self._start_equal()
        last = self.warmup_ticks - 1 + self._config.algo.max_iterations - self._resumed
        if self._captured:
            for phase in (*self._run_act, self._run_update):
                phase.capture(self.registry)
        self._begin()
        previous: Tick | None = None
        for number in range(last):
            if self._timer is not None:
                self._timer.next_tick()
            tick = self._tick(number, is_last=number == last - 1)
            if self._timer is not None:
                self._clock.renew()  # the device has nothing to do now
            metrics = self._read(previous)
            self._update(tick)
            self._report(previous, metrics)
            self._checkpoint(tick)
            previous = tick
        if self._timer is not None:
            self._timer.next_tick()
        self._report(previous, self._read(previous))
        if self._states is not None:
            self._collector.wait_for_states()

    def _start_equal(self) -> None:
        """Give every rank rank 0's parameters, optimizer state and statistics, and its place in a resumed run.

        Random streams of a resumed run are restored on rank 0; on others they go on with seeds of that place.
        """
        place = torch.tensor([self.iteration, self.env_steps], device=self._device)
        self._ranks.broadcast([place, *self.registry.lasting().values()])
        self.iteration, self.env_steps = place.tolist()
        self._resumed = self.iteration
        if self._ranks.rank and self._resumed:
            for name, generator in self.registry.generators().items():
                stream = name.removeprefix(PREFIX)
                generator.manual_seed(stream_seed(self._config.algo.seed, stream, self._ranks.rank, self._resumed))

    def _stage(self, name: str) -> AbstractContextManager[None]:
        """Surrounds a stage on the device; timed where there is a timeline."""
        return nullcontext() if self._timer is None else self._timer.stage(name)

    def _build_learner(self) -> None:
        config, task, device = self._config, self._task, self._device
        algo = config.algo
        torch.manual_seed(stream_seed(algo.seed, "weights", self._ranks.rank))
        widths = transition_widths(task.obs_dim, task.critic_dim, task.action_dim)
        self._amp = config.training.use_amp and device.type == "cuda"
        environment, exploration, update = map(self._generator, STREAMS)
        self._environment = Environment(task, algo.num_envs, device, environment, self.registry)
        dims = (task.obs_dim, task.critic_dim, task.action_dim)
        self._learner = algo.build_learner(dims, device, self._amp, self.registry, self._ranks)
        self._replay = ReplayRing(algo.num_envs * algo.replay_buffer_n, widths, device, self.registry)
        self._compiled, captured = _execution(algo.algo_params, device)
        self._captured = captured and (self._ranks.world_size == 1 or algo.algo_params.captures_collectives)
        groups = row_groups(algo.num_envs, config.env.physics_groups)
        self._act_phase = ActPhase(
            self._environment, self._learner, self._replay, exploration, self.registry, groups, self._compiled
        )
        self._update_phase = UpdatePhase(
            self._environment, self._learner, self._replay, algo, task.action_dim, update, self.registry
        )
        update_phase = self._update_phase
        self._statistics = RankStatistics(
            update_phase.metrics, update_phase.metric_names, self._ranks, update_phase.episodes
        )
        draws_of_acting = [environment, exploration]
        self._run_act = [Phase(partial(self._act_phase.run, group), draws_of_acting) for group in range(len(groups))]
        self._run_update = Phase(self._learn, [update])

    def _learn(self) -> None:
        """The update phase of a tick, and its statistics over all ranks."""
        self._update_phase.run()
        self._statistics.run()

    def _generator(self, stream: str) -> torch.Generator:
        generator = torch.Generator(self._device)
        generator.manual_seed(stream_seed(self._config.algo.seed, stream, self._ranks.rank))
        return self.registry.generator(f"{PREFIX}{stream}", generator)

    def _begin(self) -> None:
        """Tick 0's commands: reset every row and act once."""
        self._act_phase.begin()
        self._committed = time.monotonic()
        for group in range(self._groups):
            self._exchange.download(group)
            self._collector.command(group, self._recording(0))

    def _tick(self, number: int, is_last: bool) -> Tick:
        """Every group's turn."""
        turns = [self._turn(number * self._groups + group, is_last) for group in range(self._groups)]
        stages = {tag: sum(turn[tag] for turn in turns) for tag in turns[0]}
        committed = time.monotonic()
        wall, self._committed = committed - self._committed, committed
        self.env_steps += self._global_envs
        physics, idle = stages[BACKEND_MS], stages[ACTION_WAIT_MS]
        measures = {
            **stages,
            TOTAL_FPS: self._config.algo.num_envs / wall,
            ITERATION_TIME: wall,
            PHYSICS_FRACTION: physics / (physics + idle),
            EXPOSED_MS: idle,
        }
        return Tick(self._iteration(number), self.env_steps, committed, [measures[tag] for tag in HOST_MEASURES])

    def _iteration(self, number: int) -> int:
        """Training iteration that the tick of this number leads to; 0 while the ring fills."""
        trained = number + 2 - self.warmup_ticks
        return self._resumed + trained if trained > 0 else 0

    def _recording(self, number: int) -> tuple[int, int] | None:
        """Snapshot and iteration, where the physics inputs of a tick are to be kept."""
        iteration = self._iteration(number)
        return (self._snapshots[iteration], iteration) if iteration in self._snapshots else None

    def _turn(self, turn: int, is_last: bool) -> dict[str, float]:
        """Wait for a group's rows, upload, act, and send its next command unless there is none; milliseconds by tag."""
        group = turn % self._groups
        waited = time.monotonic_ns()
        header = self._collector.wait(turn)
        arrived = time.monotonic_ns()
        self._exchange.upload(turn)
        with self._stage("act"):
            self._run_act[group]()
        self._exchange.download(group)
        self._collector.channel.release(turn)
        if is_last:
            self._collector.retire(self._states)
        else:
            self._collector.command(turn + self._groups, self._recording(turn // self._groups + 1))
        spans = {
            COLLECTOR_WAIT_MS: (waited, arrived),
            INFERENCE_MS: (arrived, time.monotonic_ns()),
            ACTION_WAIT_MS: (self._stepped_ns, header["began_ns"]),
            APPLY_MS: (header["received_ns"], header["applied_ns"]),
            BACKEND_MS: (header["began_ns"], header["stepped_ns"]),
            PACK_MS: (header["packing_ns"], header["packed_ns"]),
        }
        self._stepped_ns = header["stepped_ns"]
        if self._trace is not None:
            for track, stages in _TIMELINE.items():
                self._trace.spans(track, [(name, *spans[tag]) for tag, name in stages], turn=turn)
        return {tag: (end - start) / 1e6 for tag, (start, end) in spans.items()}

    def _update(self, tick: Tick) -> None:
        """Run the update phase while physics runs, once the ring holds enough."""
        if not tick.iteration:
            return
        if self.startup_seconds is None:
            self.startup_seconds = time.time() - psutil.Process().create_time()
        began = time.monotonic_ns()
        self._metrics.write([*tick.measures, self._update_seconds])
        self._metrics.begin()
        with self._stage("update"):
            self._run_update()
        self._metrics.end()
        if self._trace is not None:
            self._trace.span("learner/host", "submit update", began, time.monotonic_ns(), iteration=tick.iteration)
        self.iteration = tick.iteration

    def _read(self, tick: Tick | None) -> dict[str, float]:
        """Metrics of a tick that is over, of all ranks; times on the device are this rank's."""
        if tick is None or not tick.iteration:
            return {}
        values, self._update_seconds = self._metrics.read()
        if tick.iteration == self._resumed + 1:  # no update came before it
            values = {tag: value for tag, value in values.items() if tag not in self._update_tags}
        return {**values, LEARNING_TIME: self._update_seconds, **self._device_stages(tick)}

    def _device_stages(self, tick: Tick) -> dict[str, float]:
        """Device times of the tick that is over, where there is a timeline."""
        if self._timer is None or self._trace is None:
            return {}
        spans = self._timer.read()
        self._trace.spans("learner/device", spans, iteration=tick.iteration)
        return device_times(spans)

    def _report(self, tick: Tick | None, metrics: dict[str, float]) -> None:
        """Write a finished tick's record with its own step and time, and show it."""
        if tick is None or not tick.iteration or self._log is None or self._view is None:
            return
        scalars = {TRAIN_ITERATION: float(tick.iteration), **metrics}
        interval, last = self._config.training.log_interval, self._config.algo.max_iterations
        if tick.iteration % interval == 0 or tick.iteration == last:
            self._log.write(Record(tick.iteration, tick.env_steps, tick.committed, metrics[BACKEND_MS] / 1e3, scalars))
        self._view.update(tick.iteration, scalars)

    def _checkpoint(self, tick: Tick) -> None:
        """Write the networks and the state registry where the interval asks for it, and at the end."""
        interval, last = self._config.algo.save_interval, self._config.algo.max_iterations
        if self._directory is None or not tick.iteration or interval < 0:
            return
        if tick.iteration == last or (interval > 0 and tick.iteration % interval == 0):
            place = tick.iteration, tick.env_steps
            content = contents(self._config, self._task, self._learner, self.registry, *place)
            self._directory.write_checkpoint(tick.iteration, content)


def build_task(config: RunConfig, device: torch.device, ranks: int = 1) -> VelocityTask:
    """The task of a run, after checking that its actor can act on it and slots and rings of this host's `ranks` fit.

    Raises:
        ValueError: if a number of the task is out of bounds, or an actor of one's own is not what it must be.
        HostUnfit: if memory is short.
    """
    task = config.build_task(config.algo.num_envs, device)
    config.algo.check_actor(task.obs_dim, task.action_dim)
    widths = transition_widths(task.obs_dim, task.critic_dim, task.action_dim)
    check_memory(config, task.spec, row_width(widths), device, ranks)
    return task


def _execution(params: AlgoParams, device: torch.device) -> tuple[bool, bool]:
    """Whether to compile and whether to capture graphs: as asked for on CUDA, neither elsewhere."""
    on_cuda = device.type == "cuda"
    return params.use_compile and on_cuda, params.captures and on_cuda
