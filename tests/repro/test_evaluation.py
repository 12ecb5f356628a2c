"""Learning matrices that evaluate: the numbers of a report are those of the episodes, and no weights are published."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import fake_eval
import pytest
from session_builder import TRAINER
from test_learning import on_the_cpu

from repro import evaluation
from repro.cli import main
from repro.errors import UsageError
from repro.evaluation import Samples, measures, models_folder
from repro.evidence import read_evidence
from repro.headline import headline
from repro.journal import read_journal
from repro.layout import REPORT_FILE, RESULT_FILE
from repro.manifest import write_manifest
from repro.matrix import parse_matrix
from repro.report import derive_report
from repro.result import Result
from repro.schema import read_model
from repro.verify import verify

EPISODES: dict[str, list[Any]] = {
    "episode_return": [300.0, 310.0, 290.0, 300.0],
    "episode_length": [1000, 1000, 900, 1000],
    "tracking_error_lin": [0.1, 0.2, 0.1, 0.2],
    "tracking_error_ang": [0.1, 0.3, 0.2, 0.2],
    "standing_error_lin": [0.6, 0.4, 0.6, 0.4],
    "standing_error_ang": [0.3, 0.5, 0.3, 0.5],
    "fall": [False, False, True, False],
}


CHECKPOINT = {"file": "model_40.pt", "sha256": "0" * 64, "iteration": 40, "env_steps": 640}


def one_case() -> str:
    """The shipped learning matrix for the CPU with one case, judged by four episodes."""
    text, _, _ = on_the_cpu().rpartition("[[cases]]")
    for old, new in {"learning = true\n": "learning = true\nevaluate = 4\n", "ceiling = true\n": ""}.items():
        assert old in text
        text = text.replace(old, new)
    return text


def run(
    folder: Path,
    patch: pytest.MonkeyPatch,
    samples: Any = EPISODES,
    text: str | None = None,
    flags: tuple[str, ...] = (),
) -> tuple[int, Path]:
    patch.setattr(evaluation, "PROGRAM", (sys.executable, str(Path(fake_eval.__file__))))
    patch.setenv("FAKE_EPISODES", samples if isinstance(samples, str) else json.dumps(samples))
    patch.setenv("FAKE_LENGTH", "1000")
    matrix, out = folder / "judged.toml", folder / "out"
    matrix.write_text(text or one_case())
    code = main(["run", "--matrix", str(matrix), "--out", str(out), "--iterations", "40", *flags], trainer=TRAINER)
    return code, out


def result_of(out: Path) -> Result:
    return read_model(Result, out / RESULT_FILE)


@functools.cache
def _judged() -> Path:
    with pytest.MonkeyPatch.context() as patch:
        code, out = run(Path(tempfile.mkdtemp(prefix="repro-evaluation-")), patch)
    assert code == 0
    return out.parent


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A fresh copy of one finished session whose policy walks, and of what lies beside it."""
    return Path(shutil.copytree(_judged(), tmp_path / "session")) / "out"


def rewritten(out: Path, samples: dict[str, Any], written: dict[str, Any]) -> Result:
    """The result where the evaluation had these episodes, and then this content."""
    folder = out / "runs" / "exact_r1"
    weights = models_folder(out) / "exact_r1" / "model_40.pt"
    content = fake_eval.content_of(folder, weights, samples) | written
    (folder / "eval.json").write_text(json.dumps(content))
    return derive_report(out).result


def test_measures_by_hand() -> None:
    """t with three degrees of freedom is 3.182446 at 97.5 %; Wilson's interval of 1 in 4 is [0.0456, 0.6994]."""
    found = measures(Samples(**{name: tuple(values) for name, values in EPISODES.items()}))
    assert found.episode_return.mean == 300.0
    assert found.episode_return.ci_low == pytest.approx(300 - 3.182446 * (200 / 3) ** 0.5 / 2, abs=1e-4)
    assert found.tracking_error_lin.mean == pytest.approx(0.15)
    assert found.tracking_error_lin.ci_high == pytest.approx(0.15 + 3.182446 * (0.01 / 3) ** 0.5 / 2, abs=1e-5)
    assert (found.tracking_error_lin.standing_still, found.tracking_error_ang.standing_still) == (0.5, 0.4)
    assert (found.falls.count, found.falls.share) == (1, 0.25)
    assert (found.falls.ci_low, found.falls.ci_high) == pytest.approx((0.0456, 0.6994), abs=1e-4)


def test_one_episode_has_no_interval() -> None:
    found = measures(Samples(**{name: tuple(values[:1]) for name, values in EPISODES.items()}))
    assert (found.episode_return.mean, found.episode_return.ci_low, found.episode_return.ci_high) == (300.0, None, None)


def test_a_report_has_the_evaluation_and_not_the_weights(out: Path) -> None:
    (found,) = result_of(out).learning
    asked = found.evaluation
    assert asked is not None and found.walks
    assert (asked.episodes, asked.episode_length.mean, asked.falls.count) == (4, 975.0, 1)
    page = (out / REPORT_FILE).read_text(encoding="utf-8")
    said = "4 episodes last 975.0 control steps, 1 fall; planar velocity error 0.15 m/s, 0.50 standing still"
    assert f"**`exact` walks: {said} (640 env steps in 0 s, seed 1).**" in page
    assert re.search(r"\| 300\.0 \[287\.0, 313\.0\] \| +975\.0 \[895\.4, 1,054\.6\] \|", page)
    assert "25.0 % [4.6%, 69.9%]" in page and "play_still" not in page and "\n\n\n" not in page
    kept = models_folder(out) / "exact_r1"
    assert sorted(path.name for path in kept.iterdir()) == ["config.json", "model_40.pt"]
    assert not list(out.rglob("*.pt"))
    lines: list[str] = []
    assert verify([out], lines.append), lines


def test_weights_lie_beside_a_report_that_is_named_by_a_dot(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(out)
    assert models_folder(Path()) == models_folder(out)


def test_a_still_beside_the_run_is_shown(out: Path) -> None:
    (out / "runs" / "exact_r1" / "play_still.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert main(["report", str(out)]) == 1  # a raw file that the hash list does not know
    (out / "MANIFEST.sha256").unlink()
    assert main(["report", str(out)]) == 0
    assert "](runs/exact_r1/play_still.png)" in (out / REPORT_FILE).read_text(encoding="utf-8")
    assert verify([out], lambda line: None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"episode_length": [1000, 800, 800, 900]},
            "`exact` does not walk: 4 episodes last 875.0 control steps",
        ),
        ({"tracking_error_lin": [0.2, 0.2, 0.3, 0.25]}, "`exact` does not follow its command: planar velocity error"),
    ],
)
def test_who_falls_or_does_not_follow_does_not_walk(changes: dict[str, list[float]], said: str, out: Path) -> None:
    """In the second case the mean is below half of standing still, the end of its interval is not."""
    result = rewritten(out, EPISODES | changes, {})
    assert result.verdict == "does_not_walk"
    assert headline(result, read_evidence(out).plan.matrix).startswith(said)


def test_an_evaluation_that_fails_leaves_the_matrix_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out = run(tmp_path, monkeypatch, "fail")
    assert code == 4
    (cell,) = result_of(out).cells
    assert cell.status == "refused" and cell.reason is not None
    assert cell.reason.startswith("no_evaluation: exit code 1") and "eval: the policy is missing" in cell.reason
    assert not list(out.rglob("*.pt"))
    assert verify([out], lambda line: None)


def unjudged(warmup: int = 0) -> str:
    """The same matrix without an evaluation."""
    text = one_case()
    for old, new in {"evaluate = 4\n": "", "warmup = 0": f"warmup = {warmup}"}.items():
        assert old in text
        text = text.replace(old, new)
    return text


def weights_of(out: Path) -> dict[str, list[str]]:
    return {folder.name: sorted(path.name for path in folder.iterdir()) for folder in models_folder(out).iterdir()}


def test_weights_of_warm_ups_and_of_runs_that_are_not_judged_leave_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out = run(tmp_path, monkeypatch, text=unjudged(warmup=1))
    assert code == 0 and not list(out.rglob("*.pt"))
    kept = ["config.json", "model_40.pt"]
    assert weights_of(out) == {"exact_r1": kept, "warmup1_exact": kept}


def test_weights_of_a_failed_run_leave_the_report_and_do_not_mix_with_those_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that a killed session left behind."""
    monkeypatch.setenv("FAKE_MODE", "crash")
    code, out = run(tmp_path, monkeypatch)
    assert code == 4 and not list(out.rglob("*.pt"))
    (out / "MANIFEST.sha256").unlink()
    (out / "runs" / "exact_r1" / "play_video.mp4").write_bytes(b"a video")
    monkeypatch.setenv("FAKE_MODE", "ok")
    assert run(tmp_path, monkeypatch, flags=("--resume",))[0] == 0
    assert not list(out.rglob("*.pt")) and not list(out.rglob("*.mp4"))
    assert weights_of(out) == {
        "exact_r1": ["config.json", "model_40.pt"],
        "exact_r1.1": ["config.json", "model_40.pt", "play_video.mp4"],
    }


def test_a_full_disk_while_weights_are_moved_costs_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says so and ends with 1; with --resume it goes on with the move alone."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(evaluation.shutil, "move", full)
        code, out = run(tmp_path, monkeypatch, text=unjudged())
    assert code == 1 and not (out / "MANIFEST.sha256").exists()
    assert f"No space left on device; what was reached is in {out}: " in capsys.readouterr().err
    assert run(tmp_path, monkeypatch, text=unjudged(), flags=("--resume",))[0] == 0
    assert [entry.event for entry in read_journal(out)].count("cell_started") == 1
    assert not list(out.rglob("*.pt")) and weights_of(out) == {"exact_r1": ["config.json", "model_40.pt"]}


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ({"episodes": 5}, "episodes is 5, its samples are of 4"),
        ({"episode_return": {"mean": 301.0, "ci_low": 287.0, "ci_high": 313.0}}, "episode_return.mean is 301.0, its"),
        ({"algo": "flashsac"}, "algo is flashsac, sac was asked for"),
        ({"confidence_level": 0.9}, "confidence_level is 0.9, reports have 0.95"),
        ({"samples": EPISODES | {"fall": [False]}}, "samples: its lists have different lengths"),
        ({"extra": 1}, "unknown key 'extra'"),
        ({"checkpoint": CHECKPOINT | {"iteration": 39}}, "checkpoint.iteration is 39, 40 was asked for"),
        ({"checkpoint": CHECKPOINT | {"env_steps": 1}}, "checkpoint.env_steps is 1, 640 was asked for"),
    ],
)
def test_an_evaluation_of_something_else_is_refused(written: dict[str, Any], reason: str, out: Path) -> None:
    (cell,) = rewritten(out, EPISODES, written).cells
    assert cell.reason is not None and cell.reason.startswith(f"no_evaluation: eval.json: {reason}")


def test_a_changed_episode_is_found(out: Path) -> None:
    """Also where the hashes were written anew."""
    file = out / "runs" / "exact_r1" / "eval.json"
    file.write_text(file.read_text().replace("310.0", "350.0"))
    write_manifest(out)
    assert not verify([out], lambda line: None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"learning = true\nevaluate": "evaluate"}, "evaluate = 4 is for a learning report; set learning = true"),
        ({"algo.save_interval=0": "algo.save_interval=-1"}, "evaluate = 4 needs the weights of 'exact'"),
        ({"evaluate = 4": "evaluate = -1"}, "evaluate: input should be greater than or equal to 0, found -1"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(changes: dict[str, str], said: str) -> None:
    text = one_case()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    with pytest.raises(UsageError, match=said):
        parse_matrix(text, "toy.toml")
