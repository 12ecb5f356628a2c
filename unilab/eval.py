"""The `eval` command: deterministic episodes of a trained policy on the CPU, without observation noise."""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unilab.names import CHECKPOINT_PATTERN, CONFIG_FILE, EXIT_OK, EXIT_USAGE

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
    parser.add_argument("--load-run", required=True, type=Path, metavar="DIR", help="run directory")
    parser.add_argument("--episodes", type=int, default=16, help="episodes, one per environment (default 16)")
    args = parser.parse_args(argv)
    try:
        if args.episodes < 1:
            raise ValueError(f"--episodes {args.episodes}: at least 1 is needed")
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
    return EXIT_OK


def load_run(directory: Path, algo: str, task: str, sim: str) -> tuple[RunConfig, dict[str, Any]]:
    """The configuration of a run and its newest checkpoint, newest by the iteration stored inside.

    Raises:
        ValueError: if there is no such run, it was trained on something else, a checkpoint cannot be read, or the
            newest one's actor is not the configuration's.
    """
    import torch

    from unilab.actor_semantics import describe_actor, verify_actor
    from unilab.config import load_config, restore_config

    wanted = load_config(algo, task, sim, [])
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{directory} is no run directory: it has no {CONFIG_FILE}")
    config = restore_config(json.loads(path.read_text()))
    asked, found = ((c.algo.algo, c.training.task_name, c.training.sim_backend) for c in (wanted, config))
    if asked != found:
        raise ValueError(f"{directory} was trained with {'/'.join(found)}, not {'/'.join(asked)}")
    files = sorted(directory.glob(CHECKPOINT_PATTERN.format(iteration="*")))
    if not files:
        raise ValueError(f"{directory} holds no checkpoint; train with algo.save_interval=0 or more")
    checkpoints = {}
    for file in files:
        try:
            checkpoints[file] = torch.load(file, weights_only=True, map_location="cpu")
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"checkpoint {file} cannot be read: {str(error).splitlines()[0]}") from None
    newest = max(checkpoints, key=lambda file: checkpoints[file]["iteration"])
    trained = config.env.task_class()
    expected = describe_actor(config.algo, trained.obs_dim, trained.action_dim)
    verify_actor(checkpoints[newest], expected, newest)
    return config, checkpoints[newest]


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
