"""Cases that measure another trainer: its command, where its events are and what their steps count."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from repro.schema import Strict, nearest, plain_line

PLACEHOLDERS = ("run_dir", "cpu_ids", "gpus", "iterations")
PLACEHOLDER = re.compile(r"(?<!\$)\{(\w+)\}")  # `${name}` is the command's own
MOST_STEPS = 2**31

Word = Annotated[str, Field(min_length=1), AfterValidator(plain_line)]


class ForeignKeys(Strict):
    """What a case says about another trainer; nothing for this one.

    Attributes:
        command: Its program and arguments, with ``{run_dir}``, ``{cpu_ids}``, ``{gpus}`` and ``{iterations}``.
        event_tag: The scalar whose events are counted.
        step_axis: Global env steps of one step of these events, or ``env_steps`` where they count env steps themselves.
        events: Folder of its event file below the run directory; None where there is one event file in all of it.
        affinity: Confines the whole process, the learner too, to the CPUs of the case.
    """

    command: tuple[Word, ...] = ()
    event_tag: Word | None = None
    step_axis: Literal["env_steps"] | Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = None
    events: Word | None = None
    affinity: bool = False

    @model_validator(mode="after")
    def _whole(self) -> Self:
        set_keys = [key for key in ForeignKeys.model_fields if getattr(self, key)]
        if set_keys and not self.command:
            raise ValueError(f"{set_keys[0]} is about another trainer; give its command too")
        missing = [key for key in ("event_tag", "step_axis") if self.command and getattr(self, key) is None]
        if missing:
            raise ValueError(f"command without {missing[0]}: say which events count, and what their steps are")
        return self

    @model_validator(mode="after")
    def _placeholders(self) -> Self:
        named = [name for word in self.command for name in PLACEHOLDER.findall(word)]
        unknown = next((name for name in named if name not in PLACEHOLDERS), None)
        if unknown is not None:
            raise ValueError(f"command has unknown placeholder {{{unknown}}}{nearest(unknown, list(PLACEHOLDERS))}")
        if self.command and "run_dir" not in named:
            raise ValueError("command has no {run_dir}; nothing tells the trainer where its events are looked for")
        return self

    @model_validator(mode="after")
    def _below(self) -> Self:
        parts = PurePosixPath(self.events or ".").parts
        if self.events is not None and (not parts or parts[0] == "/" or ".." in parts):
            raise ValueError(f"events {self.events!r} is no folder below the run directory; for example 'tensorboard'")
        return self

    @property
    def foreign(self) -> bool:
        """Whether the case is about another trainer."""
        return bool(self.command)

    def uses(self, placeholder: str) -> bool:
        """Whether the command has a placeholder."""
        return any(placeholder in PLACEHOLDER.findall(word) for word in self.command)

    def content(self) -> dict[str, object]:
        """What defines a run of another trainer, beside where it is placed."""
        return {key: getattr(self, key) for key in ForeignKeys.model_fields}


def fill_command(
    command: Sequence[str], run_dir: str, pools: Sequence[Sequence[int]], gpus: Sequence[str], iterations: int
) -> tuple[str, ...]:
    """Replace the placeholders of a command.

    `cpu_ids` is ``0,1,2`` for one rank and ``[0,1],[2,3]`` for two, so brackets around it make one list or a list of
    lists; `gpus` are the entries of CUDA_VISIBLE_DEVICES with commas between them.
    """
    lists = [",".join(map(str, pool)) for pool in pools]
    values = {
        "run_dir": run_dir,
        "cpu_ids": lists[0] if len(lists) == 1 else ",".join(f"[{cpus}]" for cpus in lists),
        "gpus": ",".join(gpus),
        "iterations": str(iterations),
    }
    return tuple(PLACEHOLDER.sub(lambda match: values[match[1]], word) for word in command)
