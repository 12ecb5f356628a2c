"""An NCCL all-reduce in a CUDA graph, in every form; and what happens where the first one of all is in a graph."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from unilab.probes.findings import Check, join_parts
from unilab.probes.nccl_capture_rank import STAGE, VALUES
from unilab.probes.rank import ERROR, find_raised
from unilab.probes.setting import Run, Setting
from unilab.trial import NO_ANSWER

PROGRAM = "unilab.probes.nccl_capture_rank"
WARMED_SECONDS, UNWARMED_SECONDS = 35.0, 30.0  # limits of one case


@dataclass(frozen=True)
class Case:
    """One way to capture an all-reduce.

    Attributes:
        asynchronous: `async_op=True` and `Work.wait()`, else a blocking call.
        side_stream: captured on a stream of the program's own, else on the one `torch.cuda.graph` takes by itself.
        warmed_up: an eager all-reduce came before.
        early_communicator: NCCL's communicator is made when ranks join, else by the first collective.
    """

    asynchronous: bool
    side_stream: bool
    warmed_up: bool
    early_communicator: bool

    @property
    def name(self) -> str:
        """As in `sync_default_warmed`."""
        words = [
            "async" if self.asynchronous else "sync",
            "side" if self.side_stream else "default",
            "warmed" if self.warmed_up else "unwarmed",
        ]
        if self.early_communicator and not self.warmed_up:
            words.append("early_communicator")
        return "_".join(words)


# Training makes its communicator early and warms it up. Without warm-up the telling case is that of a communicator that
# does not exist before the capture; one case shows the other.
CASES = (
    *(Case(asynchronous, side, True, True) for asynchronous, side in product((False, True), repeat=2)),
    *(Case(asynchronous, side, False, False) for asynchronous, side in product((False, True), repeat=2)),
    Case(False, False, False, True),
)


@dataclass(frozen=True)
class Outcome:
    """How a case went.

    Attributes:
        word: `worked`, `wrong values`, `raised`, `hung` or `died`.
        detail: the word with what there is to say.
        stage: what a rank had begun last: the one that raised, else the first that told.
    """

    word: str
    detail: str
    stage: str


def run(setting: Setting) -> tuple[list[Check], list[dict[str, Any]]]:
    """Try every case in processes of its own; what comes without warm-up is recorded and decides nothing."""
    checks, rows = [], []
    for case in CASES:
        seconds = WARMED_SECONDS if case.warmed_up else UNWARMED_SECONDS
        trial = setting.run(PROGRAM, {**asdict(case), "seconds": seconds}, seconds)
        outcome = classify(trial)
        checks.append(Check(case.name, outcome.word == "worked", outcome.detail, required=case.warmed_up))
        facts = {"outcome": outcome.word, "detail": outcome.detail, "stage": outcome.stage, "seconds": trial.seconds}
        rows.append({"case": case.name, **asdict(case), **facts})
    return checks, rows


def classify(trial: Run) -> Outcome:
    """What a run of one case shows."""
    raised = find_raised(trial.parts)
    sources = trial.parts if raised is None else [raised]
    stage = next((part.facts[STAGE] for part in sources if STAGE in part.facts), "start")
    if trial.fault is None:
        values = next((check for check in join_parts(trial.parts) if check.name == VALUES), None)
        word = "worked" if values is not None and values.passed else "wrong values"
        return Outcome(word, f"{word}: {values.detail if values is not None else 'none were checked'}", stage)
    if raised is not None:
        return Outcome("raised", f"raised: {raised.facts[ERROR]} (at {stage})", stage)
    if trial.fault.startswith(NO_ANSWER):
        return Outcome("hung", f"hung ({trial.fault}, at {stage})", stage)
    return Outcome("died", f"died: {trial.fault} (at {stage})", stage)
