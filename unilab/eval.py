"""The `eval` command: deterministic episodes of a trained policy on the CPU, without observation noise."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unilab.names import EXIT_FAILED, EXIT_HOST_UNFIT, EXIT_OK, EXIT_USAGE, POLICY_FILE

if TYPE_CHECKING:
    from unilab.config import RunConfig


@dataclass(frozen=True)
class Evaluation:
    """Outcome of one episode per environment.

    Attributes:
        returns: sum of rewards, with the penalty factor of the checkpoint.
        lengths: control steps.
        falls: whether the robot fell.
    """

    returns: list[float]
    lengths: list[int]
    falls: list[bool]


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate the newest checkpoint of a run and print what came out; returns the exit code.

    Args:
        argv: arguments after the program's name; None takes the process's own.
    """
    parser = argparse.ArgumentParser(prog="eval", description=__doc__, allow_abbrev=False)
    for name in ("algo", "task", "sim"):
        parser.add_argument(f"--{name}", required=True, help=f"{name} the run was trained with")
    parser.add_argument("--load-run", required=True, type=Path, metavar="DIR", help="run directory, or -1: the latest")
    parser.add_argument("--episodes", type=int, default=16, help="episodes, one per environment (default 16)")
    args = parser.parse_args(argv)
    from unilab.checkpoint import find_run, load_run
    from unilab.config import load_config

    try:
        if args.episodes < 1:
            raise ValueError(f"--episodes {args.episodes}: at least 1 is needed")
        args.load_run = find_run(args.load_run, load_config(args.algo, args.task, args.sim, []))
        config, checkpoint = load_run(args.load_run, args.algo, args.task, args.sim)
    except ValueError as error:
        print(f"eval: {error}", file=sys.stderr)
        return EXIT_USAGE
    result = evaluate(config, checkpoint, args.episodes)
    count = len(result.returns)
    print(f"{args.load_run} at iteration {checkpoint['iteration']}, {count} episodes without noise:")
    print(f"  return          {sum(result.returns) / count:9.2f}")
    print(f"  episode length  {sum(result.lengths) / count:9.1f}")
    print(f"  falls           {sum(result.falls):6d} of {count}")
    if config.training.export_onnx and not config.training.no_play:
        return _export(config, checkpoint, args.load_run / POLICY_FILE)
    return EXIT_OK


def _export(config: RunConfig, checkpoint: dict[str, Any], path: Path) -> int:
    """Write the policy; the exit code."""
    from unilab.export import ExportError, export_policy
    from unilab.hardware import HostUnfit

    try:
        export_policy(config, checkpoint, path)
    except (ExportError, HostUnfit, OSError) as error:
        print(f"eval: {error}", file=sys.stderr)
        return EXIT_HOST_UNFIT if isinstance(error, HostUnfit) else EXIT_FAILED
    print(f"wrote {path}")
    return EXIT_OK


def evaluate(config: RunConfig, checkpoint: dict[str, Any], episodes: int) -> Evaluation:
    """Run one episode in each of `episodes` environments with the squashed mean action.

    Args:
        config: the run's configuration; its observation noise is left out.
        checkpoint: as `load_run` returns it.
        episodes: environments.
    """
    import torch

    from unilab.environment import Environment
    from unilab.physics.mujoco_pool import MujocoPool
    from unilab.state import StateRegistry

    env = replace(config.env, observation_noise=dict.fromkeys(config.env.observation_noise, 0.0))
    device = torch.device("cpu")
    task = replace(config, env=env).build_task(episodes, device)
    generator = torch.Generator().manual_seed(config.algo.seed)
    environment = Environment(task, episodes, device, generator, StateRegistry())
    environment.episodes.penalty_scale.copy_(checkpoint["state"]["env/penalty_scale"])
    actor = config.algo.build_actor(task.obs_dim, task.action_dim)
    actor.load_state_dict(checkpoint["actor"])
    pool = MujocoPool(task.spec, episodes)
    returns, lengths = torch.zeros(episodes), torch.zeros(episodes, dtype=torch.int64)
    fell, running = torch.zeros(episodes, dtype=torch.bool), torch.ones(episodes, dtype=torch.bool)
    environment.begin()
    environment.episodes.steps.zero_()
    while running.any():
        with torch.no_grad():
            environment.control(actor.deterministic(environment.obs))
        pool.apply(environment.ctrl.numpy(), environment.codes.numpy(), environment.reset_rows.numpy())
        pool.step()
        pool.pack(environment.fields.numpy())
        environment.draw()
        environment.complete()
        returns += torch.where(running, environment.reward, 0.0)
        lengths += running
        fell |= running & (environment.terminated | ~environment.valid)
        running &= ~environment.finished
        environment.restart(environment.finished)
    return Evaluation(returns.tolist(), lengths.tolist(), fell.tolist())


if __name__ == "__main__":
    sys.exit(main())
