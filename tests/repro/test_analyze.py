from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_trainer import WALL_START, write_events
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.util.tensor_util import make_tensor_proto
from torch.utils.tensorboard import SummaryWriter

from repro.cli import main
from repro.events import Refusal, read_events


@pytest.fixture(params=[False, True], ids=["simple_value", "tensor"])
def foreign(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of another program: 40 points, 3 of its steps every 12 s, beside tags with other steps and kinds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with SummaryWriter(str(tmp_path / "other")) as writer:  # type: ignore[no-untyped-call]
            for i in range(40):
                clock = WALL_START + 12.0 * i
                writer.add_scalar("train/speed", 7.0 + i, 3 * i, clock, new_style=request.param)  # type: ignore[no-untyped-call]
                writer.add_text("note", "any text", i, clock)  # type: ignore[no-untyped-call]
            for i in range(4):
                writer.add_scalar("eval/score", 0.5, 30 * i, WALL_START + 120.0 * i)  # type: ignore[no-untyped-call]
    return tmp_path / "other"


def test_a_folder_of_another_writer_is_measured_on_its_own_step_axis(
    foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found.json"
    assert main(["analyze", str(foreign), "--tag", "train/speed", "--output", str(output)]) == 0
    lines = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines()]
    shown = {name: value.strip() for name, value in lines}
    assert shown["steps/s"] == "0.2500  (57 steps in 228.00 s)"
    assert shown["window"] == "20 events of 40 (last 50%)"
    assert shown["mean of train/speed"].startswith("36.500")
    found = json.loads(output.read_text())
    assert found["steps_per_second"] == 0.25
    assert (found["window"]["first_step"], found["window"]["last_step"]) == (60, 117)
    assert (found["learner_rows_per_second"], found["physics_fraction"], found["startup_seconds"]) == (None,) * 3


def test_a_tag_that_is_not_there_names_the_nearest(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(foreign), "--tag", "train/spead"]) == 1
    assert "has no scalar train/spead; nearest are train/speed, " in capsys.readouterr().err
    assert main(["analyze", str(foreign), "--tag", "eval/score"]) == 1
    assert "has 4 points of eval/score, fewer than 20" in capsys.readouterr().err
    assert main(["analyze", str(foreign), "--tag", "note"]) == 1  # text is no scalar
    assert "missing_tag" in capsys.readouterr().err


def test_files_that_other_programs_call_so_too_do_not_make_it_a_run_of_this_trainer(
    foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["analyze", str(foreign), "--tag", "train/speed"])
    alone = capsys.readouterr()
    (foreign / "config.json").write_text('{"model_type": "bert"}')
    (foreign / "command.json").write_text('{"argv": []}')
    (foreign / "progress.jsonl").write_text('{"epoch": 1}\n')
    (foreign / "run_end.json").write_text("done")
    (foreign / "manifest.json").mkdir()
    assert main(["analyze", str(foreign), "--tag", "train/speed"]) == 0
    assert capsys.readouterr() == alone


@pytest.mark.parametrize("lost", [(), ("config.json",), ("command.json",), ("progress.jsonl", "manifest.json")])
def test_a_run_of_this_trainer_that_died_is_refused(
    fake_run: Callable[..., Path], capsys: pytest.CaptureFixture[str], lost: tuple[str, ...]
) -> None:
    run = fake_run(mode="crash")
    for name in lost:
        (run / name).unlink()
    assert main(["analyze", str(run)]) == 1
    assert "missing_run_end" in capsys.readouterr().err


def tensor_event(step: int, value: object, plugin: str | None) -> Event:
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin)) if plugin else None
    value = Summary.Value(tag="a", tensor=make_tensor_proto(value), metadata=metadata)
    return Event(step=step, wall_time=WALL_START + step, summary=Summary(value=[value]))


def test_a_plugin_said_once_holds_for_the_tag(tmp_path: Path) -> None:
    events = [tensor_event(step, 1.5 * step, "scalars" if step == 0 else None) for step in range(5)]
    write_events(tmp_path / "events.out.tfevents.1", events)
    assert read_events(tmp_path).scalars["a"].values.tolist() == [0.0, 1.5, 3.0, 4.5, 6.0]


def test_a_scalar_of_several_numbers_is_damage(tmp_path: Path) -> None:
    write_events(
        tmp_path / "events.out.tfevents.1", [tensor_event(0, 1.0, "scalars"), tensor_event(1, [1.0, 2.0], None)]
    )
    with pytest.raises(Refusal, match="record 2: the scalar a is not one number"):
        read_events(tmp_path)
