"""`python unilab/scripts/train_flashsac.py task=g1_walk_flat/mujoco key=value ...`, as the documents spell it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from unilab.names import EXIT_USAGE
from unilab.train import train

DEFAULT_TASK = "g1_walk_flat/mujoco"


def main(argv: Sequence[str] | None = None) -> int:
    """Train FlashSAC; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = [text.removeprefix("task=") for text in arguments if text.startswith("task=")]
    task, slash, sim = (chosen or [DEFAULT_TASK])[-1].partition("/")
    if not slash:
        print(f"train: task={task} must name task and backend, as in task={DEFAULT_TASK}", file=sys.stderr)
        return EXIT_USAGE
    return train("flashsac", task, sim, [text for text in arguments if not text.startswith("task=")], arguments)


if __name__ == "__main__":
    sys.exit(main())
