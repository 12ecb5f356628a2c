"""Benchmark of the learner alone: update cycles on random rows, run eagerly, compiled and captured.

`python -m unilab.bench learner`; `repro bench learner` runs it and prints its table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from unilab.capture import on_stream
from unilab.config import RunConfig, load_config
from unilab.flash_sac.config import FlashSacParams
from unilab.hardware import HostUnfit, choose_device, learner_threads
from unilab.learner import Batch, Learner
from unilab.names import EXIT_FAILED, EXIT_HOST_UNFIT, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, SCHEMA_VERSION
from unilab.runner import build_task
from unilab.synthetic import SETTLING_CYCLES, SyntheticRank, update_errors


@dataclass(frozen=True)
class Variant:
    """One way to run the update cycle.

    Attributes:
        compiled: objectives and steps are compiled.
        captured: the phase is captured.
        full: whole objectives are compiled, not their losses alone.
        reads: what an update reports is read on the host after each, not once after the cycle.
    """

    compiled: bool = False
    captured: bool = False
    full: bool = True
    reads: bool = False

    @property
    def needs_cuda(self) -> bool:
        """Whether it is something else than eager code."""
        return self.compiled or self.captured


VARIANTS = {
    "eager": Variant(),
    "inductor": Variant(compiled=True),
    "graph": Variant(captured=True),
    "inductor+graph": Variant(compiled=True, captured=True),
}
# Of an algorithm that can compile less than its whole objectives, and whose published times include such reads.
FLASH_VARIANTS = VARIANTS | {
    "inductor-loss": Variant(compiled=True, full=False),
    "inductor-loss+graph": Variant(compiled=True, captured=True, full=False),
    "eager-reads": Variant(reads=True),
}
CYCLES = 50
WARMUP_CYCLES = 3


@dataclass(frozen=True)
class Measurement:
    """One variant.

    Attributes:
        variant: one of `variants_of` the run.
        ms: median of `cycles_ms`.
        cycles_ms: milliseconds of every cycle; device time on CUDA, wall time elsewhere.
        kernels: kernels of one cycle, copies and fills left out; None where the profiler does not list them.
        compile_seconds: seconds of the first cycle, compilation included; None where nothing is compiled.
        capture_seconds: seconds of warm-up and capture; None where nothing is captured.
        update_error: by parameter group, |update - eager update| / |eager update| of one cycle from a common state.
    """

    variant: str
    ms: float
    cycles_ms: list[float]
    kernels: int | None
    compile_seconds: float | None
    capture_seconds: float | None
    update_error: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code.

    Args:
        argv: arguments after the program's name; None takes the process's own.
    """
    arguments = _parser().parse_intermixed_args(argv)
    try:
        with redirect_stdout(sys.stderr):  # notes about the chosen device do not belong to the result
            found = bench_learner(arguments)
            if arguments.output is not None:
                arguments.output.write_text(json.dumps(found, indent=2) + "\n")
    except HostUnfit as error:
        return _refuse(error, EXIT_HOST_UNFIT)
    except ValueError as error:
        return _refuse(error, EXIT_USAGE)
    except (RuntimeError, OSError) as error:  # of the device, of a file
        return _refuse(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return _refuse("interrupted", EXIT_INTERRUPTED)
    print(json.dumps(found, indent=2) if arguments.json else "\n".join(_lines(found)))
    return EXIT_OK


def bench_learner(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every asked variant, each from the same state and seed, and what was measured, as JSON values.

    Raises:
        HostUnfit: without a GPU and without `training.smoke=true`, or where memory is short.
        ValueError: for a wrong setting, variant or number of cycles.
        RuntimeError: if a cycle's update is not finite.
    """
    config = load_config(arguments.algo, arguments.task, arguments.sim, arguments.overrides)
    if arguments.cycles < 1:
        raise ValueError(f"--cycles {arguments.cycles}: must be at least 1")
    device = choose_device(config)
    names = choose_variants(arguments.variants, device, variants_of(config))
    torch.set_num_threads(learner_threads())
    build_task(config, device)  # refuses what does not fit
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with on_stream(stream):
        start, reference, rows = _eager_cycle(config, device)
        measured = [measure(config, device, name, start, reference, arguments.cycles) for name in names]
    sizes = ("num_envs", "batch_size", "updates_per_step", "policy_frequency", "actor_hidden_dim", "critic_hidden_dim")
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "learner",
        "smoke": config.training.smoke,
        "algo": arguments.algo,
        "task": arguments.task,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "sizes": {name: getattr(config.algo, name) for name in sizes} | {"replay_rows": rows},
        "variants": [asdict(item) for item in measured],
    }


def variants_of(config: RunConfig) -> dict[str, Variant]:
    """The variants that a run's algorithm has."""
    return FLASH_VARIANTS if isinstance(config.algo.algo_params, FlashSacParams) else VARIANTS


def choose_variants(asked: str | None, device: torch.device, variants: Mapping[str, Variant] = VARIANTS) -> list[str]:
    """Names of the variants to run: those asked for, else all that the device can run.

    Raises:
        ValueError: for an unknown or repeated name, or one that the device cannot run.
    """
    able = [name for name, variant in variants.items() if device.type == "cuda" or not variant.needs_cuda]
    names = able if asked is None else asked.split(",")
    for name in names:
        if name not in variants:
            raise ValueError(f"--variants {asked}: unknown variant {name!r}; there is {', '.join(variants)}")
        if name not in able:
            instead = f"type --variants {','.join(able)}"
            raise ValueError(f"--variants {asked}: {name} needs CUDA, this is {device.type}; {instead}")
    if len(set(names)) != len(names):
        raise ValueError(f"--variants {asked} names one twice")
    return names


def measure(
    config: RunConfig,
    device: torch.device,
    name: str,
    start: dict[str, Tensor],
    reference: dict[str, Tensor],
    cycles: int,
) -> Measurement:
    """Measure one variant.

    Args:
        config: the run.
        device: where to run.
        name: one of `variants_of` the run.
        start: state of the registry to begin from.
        reference: that state after one eager cycle.
        cycles: cycles to time.

    Raises:
        RuntimeError: if the update is not finite.
    """
    variant, config = variants_of(config)[name], deepcopy(config)
    if isinstance(config.algo.algo_params, FlashSacParams):
        config.algo.algo_params.compile_full_objectives = variant.full
    torch._dynamo.reset()
    rank = SyntheticRank(config, device, variant.compiled)
    if variant.reads:
        _read_every_update(rank.learner)
    rank.registry.restore(start)
    compile_seconds = _seconds(rank.update, device) if variant.compiled else None
    rank.registry.restore(start)
    capture_seconds = _seconds(lambda: rank.update.capture(rank.registry), device) if variant.captured else None
    rank.update()
    errors = update_errors(rank.registry.snapshot(), reference, start)
    for _ in range(WARMUP_CYCLES):
        rank.update()
    times = _cycle_times(rank.update, device, cycles)
    kernels = _count_kernels(rank.update) if device.type == "cuda" else None
    rank.update.release()
    return Measurement(name, median(times), times, kernels, compile_seconds, capture_seconds, errors)


def _eager_cycle(config: RunConfig, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """A settled state, the same after one eager cycle, and the rows of the ring."""
    rank = SyntheticRank(config, device, compiled=False)
    for _ in range(SETTLING_CYCLES):
        rank.update()
    start = rank.registry.snapshot()
    rank.update()
    return start, rank.registry.snapshot(), rank.replay.capacity


def _read_every_update(learner: Learner) -> None:
    """Make every update of this learner wait for what it reports."""
    update = learner.update

    def update_and_read(batch: Batch, next_action: Tensor, log_pi: Tensor, actor_noise: Tensor | None) -> None:
        update(batch, next_action, log_pi, actor_noise)
        torch.stack([value.reshape(()) for value in learner.report().values()]).tolist()

    learner.update = update_and_read  # type: ignore[method-assign]


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _cycle_times(run: Callable[[], None], device: torch.device, cycles: int) -> list[float]:
    """Milliseconds of each cycle."""
    if device.type != "cuda":
        return [1e3 * _seconds(run, device) for _ in range(cycles)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(cycles + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairwise(marks)]


def _count_kernels(run: Callable[[], None]) -> int | None:
    """Kernels of one cycle, or None where the profiler lists none."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return kernel_count([(event.device_type.name, event.name) for event in profile.events() or []])


def kernel_count(events: Sequence[tuple[str, str]]) -> int | None:
    """Kernels among a profiler's events (device and name), copies and fills left out; None for none."""
    device = [name for kind, name in events if kind == "CUDA"]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in device) or None


def _lines(found: dict[str, Any]) -> list[str]:
    smoke = "SMOKE, not a benchmark: " if found["smoke"] else ""
    return [
        f"{smoke}one update cycle on {found['device']}, torch {found['torch']}",
        *(
            f"{item['variant']}: {item['ms']:.3f} ms, update error {max(item['update_error'].values()):.1e}"
            for item in found["variants"]
        ),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__, allow_abbrev=False)
    parser.add_argument("kind", choices=["learner"], help="what to measure")
    parser.add_argument("--algo", default="sac", help="algorithm (default sac)")
    parser.add_argument("--task", default="g1_walk_flat", help="task (default g1_walk_flat)")
    parser.add_argument("--sim", default="mujoco", help="physics backend whose sizes are taken (default mujoco)")
    parser.add_argument("--variants", metavar="A,B", help=f"of {', '.join(FLASH_VARIANTS)} (default: all that can run)")
    parser.add_argument("--cycles", metavar="N", type=int, default=CYCLES, help=f"cycles to time (default {CYCLES})")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output", metavar="FILE", type=Path, help="also write JSON to a file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as in algo.batch_size=4096")
    return parser


def _refuse(error: Exception | str, code: int) -> int:
    print(f"bench: {' '.join(str(error).splitlines())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
