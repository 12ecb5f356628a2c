from __future__ import annotations

import json
import math
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_trainer import MODES, WALL_START, scalar_event, write_events
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.compat.proto.event_pb2 import Event

from repro.events import Reason, Refusal, Series, read_events
from repro.throughput import INVALID_ROWS, SKIPPED_UPDATES, _first_index, _span, measure
from unilab import names

FakeRun = Callable[..., Path]
# Ten events, 100 env steps and mostly one second apart; the fifth interval lasts two seconds.
STEPS = [100 * (i + 1) for i in range(10)]
TIMES = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0]
FPS = [500.0, 400.0, 300.0, 200.0, 100.0, 50.0, 100.0, 110.0, 120.0, 70.0]


def write_points(
    run_dir: Path, steps: list[int] = STEPS, times: list[float] = TIMES, values: list[float] = FPS, tag: str = "a/rate"
) -> Path:
    """A TensorBoard folder of another program: one tag, no other file."""
    run_dir.mkdir(parents=True, exist_ok=True)
    points = zip(steps, times, values, strict=True)
    events = [scalar_event(step, WALL_START + time, {tag: value}) for step, time, value in points]
    write_events(run_dir / "events.out.tfevents.1.host", events)
    return run_dir


def change_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def refusal(run_dir: Path, **options: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        measure(run_dir, **options)
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_main_metric_by_hand(tmp_path: Path) -> None:
    found = measure(write_points(tmp_path), tag="a/rate", min_points=10, own=False)
    # Index 5 to 9: 400 steps in 4 s; the slow interval before it and the logged values do not count.
    assert found.steps_per_second == 100.0
    assert (found.window.first_index, found.window.last_index, found.window.points) == (5, 9, 5)
    assert (found.window.first_step, found.window.last_step) == (600, 1000)
    assert (found.window.first_time, found.window.last_time) == (WALL_START + 6.0, WALL_START + 10.0)
    assert found.points == 10


def test_statistics_of_the_logged_values_by_hand(tmp_path: Path) -> None:
    found = measure(write_points(tmp_path), tag="a/rate", min_points=10, own=False)
    # Tail values 50, 100, 110, 120, 70; the 90th percentile lies at 0.9 * 4 = 3.6 of 50, 70, 100, 110, 120.
    assert (found.tail_mean, found.tail_median) == (90.0, 100.0)
    assert found.tail_p90 == pytest.approx(116.0)


def test_window_sensitivity_and_points_by_hand(tmp_path: Path) -> None:
    found = measure(write_points(tmp_path), tag="a/rate", min_points=10, own=False)
    # Tails of 25, 50 and 75 % begin at index 7, 5 and 2: 200 / 2, 400 / 4, 700 / 8.
    assert found.window_sensitivity == {0.25: 100.0, 0.5: 100.0, 0.75: 87.5}
    assert found.steps.tolist() == STEPS
    assert found.seconds.tolist() == TIMES
    assert found.rates.tolist() == [100.0] * 4 + [50.0] + [100.0] * 4


@pytest.mark.parametrize(("count", "first"), [(20, 10), (21, 10), (1000, 500), (1001, 500)])
def test_half_of_the_events_begins_at_the_rounded_down_half(tmp_path: Path, count: int, first: int) -> None:
    write_points(tmp_path, list(range(count)), [float(i) for i in range(count)], [1.0] * count)
    window = measure(tmp_path, tag="a/rate", own=False).window
    assert (window.first_index, window.points) == (first, count - first)


@pytest.mark.parametrize(
    ("count", "tail", "first"), [(10, 0.9, 1), (10, 0.1, 9), (10, 1.0, 0), (30, 0.7, 9), (7, 0.3, 4)]
)
def test_tails_are_taken_in_decimal(count: int, tail: float, first: int) -> None:
    assert _first_index(count, tail) == first  # 10 * (1 - 0.9) is 0.9999999999999998 in binary


@given(count=st.integers(2, 5000), tail=st.floats(0.001, 1.0))
def test_any_window_of_a_constant_rate_gives_that_rate(count: int, tail: float) -> None:
    steps = np.arange(count, dtype=np.int64) * 2048
    window = _span(Series(steps, steps / 4096.0, np.ones(count)), tail)
    if window is None:
        assert count * tail < 2
    else:
        assert window.steps_per_second == 4096.0
        assert window.points == pytest.approx(count * tail, abs=1)


@st.composite
def series(draw: st.DrawFn) -> Series:
    """A run whose every interval has its own length and number of env steps."""
    count = draw(st.integers(2, 60))
    intervals = draw(st.lists(st.floats(1e-3, 1e3), min_size=count - 1, max_size=count - 1))
    steps = draw(st.lists(st.integers(1, 10**6), min_size=count - 1, max_size=count - 1))
    values = draw(st.lists(st.floats(-1e9, 1e9), min_size=count, max_size=count))
    return Series(
        np.concatenate([[0], np.cumsum(steps)]), np.concatenate([[0.0], np.cumsum(intervals)]), np.array(values)
    )


tails = st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9, 1.0])


@given(count=st.integers(1, 10**6), tail=st.floats(0.001, 1.0), other=st.floats(0.001, 1.0))
def test_a_window_holds_its_share_of_the_points_rounded_up(count: int, tail: float, other: float) -> None:
    first = _first_index(count, tail)
    assert 0 <= first < count
    assert count * (1 - tail) - 1 < first <= count * (1 - tail) + 1e-6
    assert (first <= _first_index(count, other)) or tail < other  # a longer tail begins no later


@given(series(), tails, st.floats(1.0, 1e4))
def test_what_lies_before_the_window_does_not_count(run: Series, tail: float, delay: float) -> None:
    """Start-up, however long and however many steps it took, is not in the rate; neither are logged values."""
    window = _span(run, tail)
    if window is None:
        return
    early = np.arange(len(run.steps)) < window.first_index
    changed = Series(run.steps + 7 * early - 7, run.wall_times + delay * ~early, np.zeros_like(run.values))
    found = _span(changed, tail)
    assert found is not None
    assert (found.first_index, found.points) == (window.first_index, window.points)
    assert found.last_step - found.first_step == window.last_step - window.first_step
    assert found.steps_per_second == pytest.approx(window.steps_per_second, rel=1e-6)


@given(series(), tails, st.integers(-20, 20), st.integers(1, 1000))
def test_units_of_time_and_steps_scale_the_rate(run: Series, tail: float, exponent: int, factor: int) -> None:
    window = _span(run, tail)
    found = _span(Series(factor * run.steps, 2.0**exponent * run.wall_times, run.values), tail)
    assert (window is None) == (found is None)
    if window is not None and found is not None:
        assert found.steps_per_second == pytest.approx(factor * window.steps_per_second / 2.0**exponent, rel=1e-12)


@given(series(), tails, st.data())
def test_a_window_is_the_sum_of_its_parts(run: Series, tail: float, data: st.DataObject) -> None:
    window = _span(run, tail)
    if window is None:
        return
    inside = slice(window.first_index, None)
    assert window.last_step - window.first_step == int(np.diff(run.steps[inside]).sum())
    rates = np.diff(run.steps[inside]) / np.diff(run.wall_times[inside])
    assert rates.min() * (1 - 1e-6) <= window.steps_per_second <= rates.max() * (1 + 1e-6)
    cut = data.draw(st.integers(window.first_index, window.last_index))
    parts = [
        (run.steps[b] - run.steps[a], run.wall_times[b] - run.wall_times[a])
        for a, b in ((window.first_index, cut), (cut, window.last_index))
    ]
    steps, seconds = (sum(part[side] for part in parts) for side in (0, 1))
    assert steps / seconds == pytest.approx(window.steps_per_second, rel=1e-9)


@settings(max_examples=15)
@given(st.lists(st.integers(1, 9), min_size=20, max_size=40), tails)
def test_measuring_a_file_gives_the_window_of_its_points(ticks: list[int], tail: float) -> None:
    times = np.cumsum(ticks).astype(float)
    steps = 64 * np.arange(len(ticks))
    with tempfile.TemporaryDirectory() as folder:
        write_points(Path(folder), steps.tolist(), times.tolist(), [1.0] * len(ticks))
        first = _first_index(len(ticks), tail)
        if first == len(ticks) - 1:
            assert refusal(Path(folder), tag="a/rate", tail=tail, own=False).code == "too_few_points"
            return
        found = measure(Path(folder), tag="a/rate", tail=tail, own=False)
    assert found.window.first_index == first
    assert found.steps_per_second == (steps[-1] - steps[first]) / (times[-1] - times[first])
    assert found.steadiness.intervals == found.window.points - 1


def test_a_complete_run(fake_run: FakeRun) -> None:
    found = measure(fake_run(rate=25_000.0, iterations=100, num_envs=16, batch_size=64, updates_per_step=8))
    assert found.steps_per_second == pytest.approx(25_000.0, rel=1e-5)
    assert list(found.window_sensitivity.values()) == pytest.approx([25_000.0] * 3, rel=1e-5)
    assert found.tail_mean == pytest.approx(1.08 * 25_000.0, rel=0.01)
    assert found.physics_fraction == pytest.approx(0.9)
    assert found.exposed_ms == pytest.approx(100.0 * 16 / 25_000.0)
    assert found.learner_cycle_ms == pytest.approx(0.3 * 1e3 * 16 / 25_000.0)
    # 64 rows x 8 updates in each iteration, which takes 16 / 25,000 s.
    assert found.learner_rows_per_second == pytest.approx(64 * 8 / (16 / 25_000.0), rel=1e-5)
    assert found.mean_reward == pytest.approx(-2.0 + 20.0 * 0.99)
    assert found.mean_episode_length == pytest.approx(20.0 + 80.0 * 0.99)
    assert found.startup_seconds == 3.5
    assert found.notes == []


def test_rows_count_all_ranks(fake_run: FakeRun) -> None:
    one, two = measure(fake_run("one")), measure(fake_run("two", world_size=2))
    assert one.learner_rows_per_second is not None
    assert two.learner_rows_per_second == pytest.approx(one.learner_rows_per_second, rel=1e-4)
    assert two.window.last_step == 2 * one.window.last_step  # equal steps/s of twice the environments


def test_a_resumed_run_that_logs_every_fifth_iteration_and_its_last(fake_run: FakeRun) -> None:
    """Iterations 7 to 108 of a run of 108: logged are 10, 15 … 105 and 108."""
    run_dir = fake_run(iterations=108)
    logged = [*range(10, 108, 5), 108]
    log = read_events(run_dir)
    events = [
        scalar_event(16 * i, float(log.scalars[names.TOTAL_FPS].wall_times[i - 1]), {names.TOTAL_FPS: 1.0})
        for i in logged
    ]
    write_events(log.path, events)
    lines = (run_dir / names.PROGRESS_FILE).read_text().splitlines(keepends=True)
    with_file(run_dir, names.PROGRESS_FILE, "".join(lines[i - 1] for i in logged))
    with_end(run_dir, event_count=len(logged))
    change_json(run_dir / names.MANIFEST_FILE, resumed_from={"iteration": 6})
    with_setting(run_dir, names.CONFIG_FILE, "training", log_interval=5)
    assert measure(run_dir).steps_per_second == pytest.approx(10_000.0, rel=0.01)
    change_json(run_dir / names.MANIFEST_FILE, resumed_from=None)
    assert "108 iterations, 22 of them logged" in str(refusal(run_dir))


def test_rates_come_from_steps_and_time_even_where_logged_values_lie(fake_run: FakeRun) -> None:
    run_dir = fake_run(rate=25_000.0, tags={names.TOTAL_FPS: 1e9})
    assert measure(run_dir).steps_per_second == pytest.approx(25_000.0, rel=1e-5)


@pytest.mark.parametrize(
    ("tag", "attribute"),
    [
        (names.PHYSICS_FRACTION, "physics_fraction"),
        (names.EXPOSED_MS, "exposed_ms"),
        (names.LEARNING_TIME, "learner_cycle_ms"),
        (names.TRAIN_ITERATION, "learner_rows_per_second"),
        (names.MEAN_REWARD, "mean_reward"),
        (names.MEAN_EPISODE_LENGTH, "mean_episode_length"),
    ],
)
def test_an_absent_tag_gives_none_not_zero(fake_run: FakeRun, tag: str, attribute: str) -> None:
    assert getattr(measure(fake_run(tags={tag: None})), attribute) is None


def test_the_update_of_several_ranks_is_that_of_the_least_of_each_record(tmp_path: Path) -> None:
    """Two ranks that work 6 ms and wait in turn for each other; the run's own tag is rank 0's."""
    events = []
    for number, (step, seconds) in enumerate(zip(STEPS, TIMES, strict=True)):
        own = [0.006 + 0.040 * (number % 2 == rank) for rank in range(2)]
        tags = {names.rank_tag(names.LEARNING_TIME, rank): value for rank, value in enumerate(own)}
        events.append(scalar_event(step, WALL_START + seconds, {"a/rate": 1.0, names.LEARNING_TIME: own[0], **tags}))
    write_events(tmp_path / "events.out.tfevents.1.host", events)
    found = measure(tmp_path, tag="a/rate", min_points=10, own=False)
    assert found.learner_cycle_ms == pytest.approx(6.0)
    assert found.stages[names.LEARNING_TIME] == found.learner_cycle_ms
    # Rank 0 waits in two of the window's five records, rank 1 in the others.
    assert found.stages[names.rank_tag(names.LEARNING_TIME, 0)] == pytest.approx(6.0 + 40.0 * 2 / 5)
    assert found.stages[names.rank_tag(names.LEARNING_TIME, 1)] == pytest.approx(6.0 + 40.0 * 3 / 5)


@pytest.mark.parametrize("lost", [names.CONFIG_FILE, names.MANIFEST_FILE])
def test_rows_need_the_sizes_of_the_run(fake_run: FakeRun, lost: str) -> None:
    run_dir = fake_run()
    (run_dir / lost).unlink()
    assert measure(run_dir).learner_rows_per_second is None


def test_reward_before_the_first_finished_episode_is_none(fake_run: FakeRun) -> None:
    assert measure(fake_run(tags={names.MEAN_REWARD: math.nan})).mean_reward is None


def test_a_run_that_never_trained_has_no_startup_time(fake_run: FakeRun) -> None:
    run_dir = fake_run()
    change_json(run_dir / names.RUN_END_FILE, startup_seconds=None)
    assert measure(run_dir).startup_seconds is None


def test_another_programs_folder_is_measured_with_notes(tmp_path: Path) -> None:
    found = measure(write_points(tmp_path), tag="a/rate", min_points=10, own=False)
    assert [note.split(":")[0] for note in found.notes] == [
        "no run_end.json of this trainer",
        "no progress.jsonl of this trainer",
    ]
    assert found.learner_rows_per_second is None
    assert found.startup_seconds is None


def test_of_another_programs_folder_nothing_but_the_events_is_read(tmp_path: Path) -> None:
    run_dir = write_points(tmp_path)
    alone = measure(run_dir, tag="a/rate", min_points=10, own=False)
    for name in (names.CONFIG_FILE, names.MANIFEST_FILE, names.PROGRESS_FILE, names.RUN_END_FILE):
        (run_dir / name).write_text("what another program means by it\n")
    found = measure(run_dir, tag="a/rate", min_points=10, own=False)
    assert (found.steps_per_second, found.notes) == (alone.steps_per_second, alone.notes)


def test_a_cut_tail_is_noted_and_explains_one_missing_record(fake_run: FakeRun) -> None:
    found = measure(fake_run(mode="cut_log", rate=25_000.0, jitter=0.0))
    assert found.points == 59
    assert found.steps_per_second == pytest.approx(25_000.0, rel=1e-4)
    assert len(found.notes) == 1
    assert re.fullmatch(r"the last record of the event file is cut at byte \d+ and was left out", found.notes[0])


def test_a_gap_in_time_is_noted(tmp_path: Path) -> None:
    times = [float(i) + (15.0 if i >= 25 else 0.0) for i in range(40)]
    run_dir = write_points(tmp_path, list(range(40)), times, [1.0] * 40)
    notes = measure(run_dir, tag="a/rate", own=False).notes
    # Window 20 to 39: 19 s and the 15 s, median interval 1 s.
    assert notes[-1] == "one pause of 16 s is 47% of the window, after env step 24; the median interval is 1 s"


@pytest.mark.parametrize(("pause", "noted"), [(2.9, False), (3.2, True)])
def test_a_shorter_pause_is_noted_by_its_share_of_the_window(tmp_path: Path, pause: float, noted: bool) -> None:
    times = [float(i) + (pause - 1.0 if i >= 25 else 0.0) for i in range(40)]
    run_dir = write_points(tmp_path, list(range(40)), times, [1.0] * 40)
    assert (len(measure(run_dir, tag="a/rate", own=False).notes) == 3) == noted


def test_a_gap_before_the_window_is_not_noted(tmp_path: Path) -> None:
    times = [float(i) + (15.0 if i >= 5 else 0.0) for i in range(40)]
    run_dir = write_points(tmp_path, list(range(40)), times, [1.0] * 40)
    assert len(measure(run_dir, tag="a/rate", own=False).notes) == 2


def test_a_tag_logged_for_a_part_of_the_window_is_noted(tmp_path: Path) -> None:
    events = [
        scalar_event(
            i, WALL_START + i, {names.TOTAL_FPS: 1.0, **({names.EXPOSED_MS: float(i)} if i in (4, 30, 34) else {})}
        )
        for i in range(40)
    ]
    write_events(tmp_path / "events.out.tfevents.1", events)
    found = measure(tmp_path, own=False)
    assert found.exposed_ms == 32.0
    assert found.notes[-1] == "Perf/exposed_ms has 2 points in the window of 20"


def test_a_sparse_tag_need_not_reach_the_final_step(fake_run: FakeRun) -> None:
    run_dir = with_tag(fake_run(), "Eval/x", lambda i: 1.0 if i < 50 else None)
    assert measure(run_dir, tag="Eval/x").window.last_step == 800


@pytest.mark.parametrize(
    ("tag", "counter", "note"),
    [
        (INVALID_ROWS, lambda i: 4.0 * (i > 50), "grew by 4 of 464 env steps of the window (0.86%)"),
        (SKIPPED_UPDATES, lambda i: 2.0 * (i > 50), "grew by 2 of 232 updates of the window (0.86%)"),
    ],
)
def test_a_small_loss_of_work_is_noted(fake_run: FakeRun, tag: str, counter: Callable[[int], float], note: str) -> None:
    assert measure(with_tag(fake_run(), tag, counter)).notes == [f"{tag} {note}"]


def test_a_loss_of_work_before_the_window_does_not_count(fake_run: FakeRun) -> None:
    assert measure(with_tag(fake_run(), INVALID_ROWS, lambda i: 16.0 * min(i, 30))).notes == []


@pytest.mark.parametrize("size", [-64, 0, 2**31 + 1, 10**400, 64.0, True])
def test_an_absurd_size_gives_no_learner_rows(fake_run: FakeRun, size: object) -> None:
    run_dir = fake_run()
    config = json.loads((run_dir / names.CONFIG_FILE).read_text())
    change_json(run_dir / names.CONFIG_FILE, algo={**config["algo"], "batch_size": size})
    found = measure(run_dir)
    assert found.learner_rows_per_second is None
    assert found.notes == ["no learner rows/s: algo.batch_size is missing or not from 1 to 2147483648"]


@pytest.mark.parametrize("factor", [2.0, -1.0, 0.0])
def test_iterations_that_progress_does_not_count_give_no_learner_rows(fake_run: FakeRun, factor: float) -> None:
    found = measure(with_tag(fake_run(), names.TRAIN_ITERATION, lambda i: factor * i))
    assert found.learner_rows_per_second is None
    assert found.notes == [f"no learner rows/s: Train/iteration grew by {29 * factor:g}, progress.jsonl by 29"]


def test_times_too_close_for_a_rate_are_refused(tmp_path: Path) -> None:
    run_dir = tmp_path / "x"
    run_dir.mkdir()
    events = [scalar_event(2**40 * i, 5e-324 * i, {"a/rate": 1.0}) for i in range(1, 41)]
    write_events(run_dir / "events.out.tfevents.1", events)
    assert refusal(run_dir, tag="a/rate", own=False).code == "non_finite"


@pytest.mark.parametrize(("tail", "min_points"), [(0.0, 20), (1.1, 20), (-0.5, 20), (math.nan, 20), (0.5, 1)])
def test_arguments_out_of_range_are_errors_of_the_caller(fake_run: FakeRun, tail: float, min_points: int) -> None:
    with pytest.raises(ValueError, match=r"tail must be|min_points must be"):
        measure(fake_run(), tail=tail, min_points=min_points)


def lose_records(run_dir: Path, count: int) -> Path:
    """Drop whole records from the end of the event file, which no checksum shows."""
    path = next(run_dir.glob("events*"))
    content, offsets = path.read_bytes(), [0]
    while offsets[-1] < len(content):
        offsets.append(offsets[-1] + 16 + int.from_bytes(content[offsets[-1] : offsets[-1] + 8], "little"))
    path.write_bytes(content[: offsets[-1 - count]])
    return run_dir


def with_file(run_dir: Path, name: str, content: str) -> Path:
    (run_dir / name).write_text(content)
    return run_dir


def without(run_dir: Path, name: str) -> Path:
    (run_dir / name).unlink()
    return run_dir


def with_end(run_dir: Path, **fields: Any) -> Path:
    change_json(run_dir / names.RUN_END_FILE, **fields)
    return run_dir


def with_tag(run_dir: Path, tag: str, value: Callable[[int], float | None]) -> Path:
    """Write the events again with one tag added or replaced; `value` takes the index of the record."""
    log = read_events(run_dir)
    base = log.scalars[names.TOTAL_FPS]
    events = []
    for i, (step, time) in enumerate(zip(base.steps.tolist(), base.wall_times.tolist(), strict=True)):
        tags = {name: float(series.values[i]) for name, series in log.scalars.items()}
        tags |= {} if (new := value(i)) is None else {tag: new}
        events.append(scalar_event(step, time, tags))
    write_events(log.path, events)
    return run_dir


def with_progress(run_dir: Path, line: int, **fields: Any) -> Path:
    path = run_dir / names.PROGRESS_FILE
    entries = [json.loads(text) for text in path.read_text().splitlines()]
    entries[line - 1].update(fields)
    return with_file(run_dir, path.name, "".join(json.dumps(entry) + "\n" for entry in entries))


def with_setting(run_dir: Path, name: str, section: str, **fields: Any) -> Path:
    found = json.loads((run_dir / name).read_text())
    change_json(run_dir / name, **{section: {**found.get(section, {}), **fields}})
    return run_dir


def with_records(run_dir: Path, kept: slice, lines: slice = slice(None)) -> Path:
    """Keep some records of the events and some lines of the progress; the run's end counts what is there."""
    log = read_events(run_dir)
    base = log.scalars[names.TOTAL_FPS]
    times = base.wall_times.tolist()
    events = [
        scalar_event(step, times[i], {tag: float(series.values[i]) for tag, series in log.scalars.items()})
        for i, step in enumerate(base.steps.tolist())
    ][kept]
    write_events(log.path, events)
    entries = (run_dir / names.PROGRESS_FILE).read_text().splitlines(keepends=True)[lines]
    with_file(run_dir, names.PROGRESS_FILE, "".join(entries))
    return with_end(run_dir, event_count=len(events), final_env_steps=events[-1].step)


def with_second_event_file(run_dir: Path) -> Path:
    path = next(run_dir.glob("events*"))
    path.with_name(path.name + ".bak").write_bytes(path.read_bytes())
    return run_dir


def with_event_file(run_dir: Path, content: bytes) -> Path:
    next(run_dir.glob("events*")).write_bytes(content)
    return run_dir


def with_version_only(run_dir: Path) -> Path:
    write_events(next(run_dir.glob("events*")), [])
    return run_dir


def with_second_session(run_dir: Path) -> Path:
    path = next(run_dir.glob("events*"))
    write_events(path, [scalar_event(1, WALL_START, {names.TOTAL_FPS: 1.0}), Event(file_version="brain.Event:2")])
    return run_dir


def with_progress_of(run_dir: Path, other: Path) -> Path:
    (run_dir / names.PROGRESS_FILE).write_bytes((other / names.PROGRESS_FILE).read_bytes())
    return run_dir


def with_times(run_dir: Path, change: Callable[[int], float]) -> Path:
    events = [
        scalar_event(16 * (i + 1), WALL_START + change(i), {names.TOTAL_FPS: 1.0, "Loss/a": 0.0}) for i in range(60)
    ]
    write_events(next(run_dir.glob("events*")), events)
    return run_dir


# Every reason with the ways to meet it, and what its line must contain.
REFUSED: list[tuple[Reason, Callable[[FakeRun], Path], str]] = [
    (Reason.MISSING_RUN_DIR, lambda run: run() / "absent", "absent"),
    (Reason.NO_EVENT_FILE, lambda run: without(run(), "events.out.tfevents.1790000000"), "no *tfevents* file"),
    (Reason.SEVERAL_RUNS, lambda run: with_second_event_file(run()), ".bak"),
    (Reason.SEVERAL_RUNS, lambda run: run("run/attempt-002").parent, "attempt-002"),
    (Reason.SEVERAL_RUNS, lambda run: with_second_session(run()), "record 2"),
    (Reason.FOREIGN_FILE, lambda run: with_event_file(run(), b"this is not an event file"), "not a TensorBoard"),
    (Reason.EMPTY_EVENTS, lambda run: with_event_file(run(), b""), "no events"),
    (Reason.EMPTY_EVENTS, lambda run: with_version_only(run()), "no events"),
    (Reason.DAMAGED_RECORD, lambda run: run(mode="damaged"), "record "),
    (Reason.DAMAGED_FILE, lambda run: with_file(run(), names.RUN_END_FILE, "{"), names.RUN_END_FILE),
    (Reason.DAMAGED_FILE, lambda run: with_file(run(), names.RUN_END_FILE, "[]"), names.RUN_END_FILE),
    (Reason.DAMAGED_FILE, lambda run: with_file(run(), names.CONFIG_FILE, "{"), names.CONFIG_FILE),
    (Reason.DAMAGED_FILE, lambda run: with_file(run(), names.MANIFEST_FILE, "{"), names.MANIFEST_FILE),
    (Reason.DAMAGED_FILE, lambda run: with_file(run(), names.PROGRESS_FILE, '{"env_steps":1}\n'), "line 1"),
    (Reason.DAMAGED_FILE, lambda run: with_file(run(), names.PROGRESS_FILE, "{}\nx\n"), "line 1"),
    (Reason.DAMAGED_FILE, lambda run: with_file(run(), names.PROGRESS_FILE, "[" * 10**5 + "\n"), "line 1"),
    (Reason.DAMAGED_FILE, lambda run: with_file(run(), names.CONFIG_FILE, "[" * 10**5), names.CONFIG_FILE),
    (Reason.DAMAGED_FILE, lambda run: with_file(run(), names.RUN_END_FILE, "[" * 10**5), names.RUN_END_FILE),
    (Reason.DAMAGED_FILE, lambda run: with_end(run(), startup_seconds=math.inf), "startup_seconds"),
    (Reason.DAMAGED_FILE, lambda run: with_progress(run(), 7, monotonic_s=math.inf), "line 7"),
    (Reason.DAMAGED_FILE, lambda run: with_progress(run(), 7, monotonic_s=math.nan), "line 7"),
    (Reason.DAMAGED_FILE, lambda run: with_progress(run(), 7, monotonic_s=10**400), "line 7"),
    (Reason.DAMAGED_FILE, lambda run: with_progress(run(), 7, monotonic_s=1.0), "line 7 has monotonic_s 1.0 after"),
    (Reason.DAMAGED_FILE, lambda run: with_progress(run(), 7, env_steps=96), "line 7 has env_steps 96 after 96"),
    (Reason.DAMAGED_FILE, lambda run: with_progress(run(), 7, env_steps=112.0), "line 7"),
    (Reason.MISSING_RUN_END, lambda run: run(mode="no_run_end"), names.RUN_END_FILE),
    (Reason.MISSING_RUN_END, lambda run: run(mode="crash"), names.RUN_END_FILE),
    (Reason.MISSING_RUN_END, lambda run: run(mode="hang"), names.RUN_END_FILE),
    (Reason.RUN_FAILED, lambda run: run(mode="failed_end"), "failed"),
    (Reason.EVENT_COUNT_MISMATCH, lambda run: lose_records(run(), 1), "59 summaries and run_end.json counted 60"),
    (Reason.EVENT_COUNT_MISMATCH, lambda run: lose_records(run(mode="cut_log"), 2), "counted 60"),
    (Reason.EVENT_COUNT_MISMATCH, lambda run: with_end(run(), final_env_steps=976), "run_end.json says 976"),
    (Reason.EVENT_COUNT_MISMATCH, lambda run: with_end(run(mode="cut_log"), final_env_steps=944), "is at step 944"),
    (Reason.MISSING_TAG, lambda run: run(tags={names.TOTAL_FPS: None}), "nearest are Perf/"),
    (Reason.TOO_FEW_POINTS, lambda run: run(iterations=19), "19 points of Perf/total_fps, fewer than 20"),
    (Reason.STEPS_NOT_INCREASING, lambda run: run(mode="duplicate_steps"), "step 720 at point 44 and 720"),
    (Reason.TIME_NOT_INCREASING, lambda run: with_times(run(), lambda i: 9.0 if i == 50 else i), "at point 49"),
    (Reason.TIME_NOT_INCREASING, lambda run: with_times(run(), lambda i: i - (i == 3)), "at point 2"),
    (Reason.TIME_NOT_INCREASING, lambda run: with_times(run(), lambda i: i if i else math.nan), "nan at point 0"),
    (Reason.NON_FINITE, lambda run: run(mode="nan"), "Loss/critic is nan at step 496 and at 29 more"),
    (Reason.NON_FINITE, lambda run: run(tags={names.TOTAL_FPS: math.inf}), "Perf/total_fps is inf"),
    (Reason.NON_FINITE, lambda run: run(tags={names.EXPOSED_MS: math.nan}), "Perf/exposed_ms is nan"),
    (Reason.TIME_NOT_INCREASING, lambda run: with_times(run(), lambda i: i if i < 59 else math.inf), "at point 58"),
    (Reason.TIME_NOT_INCREASING, lambda run: with_times(run(), lambda i: i if i < 50 else math.inf), "at point 49"),
    (Reason.NON_FINITE, lambda run: with_tag(run(), INVALID_ROWS, lambda i: math.nan), "invalid_rows is nan"),
    (Reason.INVALID_PHYSICS, lambda run: with_tag(run(), INVALID_ROWS, lambda i: 16.0 * i), "464 of 464 env steps"),
    (Reason.INVALID_PHYSICS, lambda run: with_tag(run(), INVALID_ROWS, lambda i: 5.0 * (i > 50)), "grew by 5 of 464"),
    (Reason.SKIPPED_UPDATES, lambda run: with_tag(run(), SKIPPED_UPDATES, lambda i: 8.0 * i), "232 of 232 updates"),
    (Reason.SKIPPED_UPDATES, lambda run: with_tag(run(), SKIPPED_UPDATES, lambda i: 3.0 * (i > 50)), "3 of 232"),
    (
        Reason.SKIPPED_UPDATES,
        lambda run: without(with_tag(run(), SKIPPED_UPDATES, lambda i: 1.0 * (i > 50)), names.CONFIG_FILE),
        "grew by 1 updates of an unknown number",
    ),
    (Reason.PROGRESS_MISMATCH, lambda run: without(run(), names.PROGRESS_FILE), "has no progress.jsonl"),
    (Reason.PROGRESS_MISMATCH, lambda run: with_progress_of(run(), run("other", num_envs=7)), "lacks env step 496"),
    (Reason.PROGRESS_MISMATCH, lambda run: with_progress_of(run(), run("other", iterations=59)), "lacks env step 960"),
    (Reason.PROGRESS_MISMATCH, lambda run: with_records(run(), slice(10, None)), "lacks env step 16;"),
    (Reason.PROGRESS_MISMATCH, lambda run: with_records(run(), slice(0, -5)), "55 iterations, progress.jsonl of 60"),
    (Reason.PROGRESS_MISMATCH, lambda run: with_records(run(), slice(10, None), slice(10, None)), "50 lines, from it"),
    (
        Reason.PROGRESS_MISMATCH,
        lambda run: with_records(run(), slice(0, -5), slice(0, -5)),
        "says 60 iterations, 60 of",
    ),
    (Reason.PROGRESS_MISMATCH, lambda run: with_end(run(), iterations=10**12), "says 1000000000000 iterations"),
    (Reason.PROGRESS_MISMATCH, lambda run: with_progress(run(), 7, iteration=8), "from iteration 1 to 60"),
    (
        Reason.PROGRESS_MISMATCH,
        lambda run: with_setting(run(), names.CONFIG_FILE, "training", log_interval=2),
        "60 iterations, 30 of them logged",
    ),
    (
        Reason.SETTINGS_MISMATCH,
        lambda run: with_setting(run(), names.CONFIG_FILE, "algo", num_envs=99),
        "16 env steps in 1 iterations up to 2, but config.json has algo.num_envs=99 and manifest.json 1 ranks",
    ),
    (
        Reason.SETTINGS_MISMATCH,
        lambda run: with_setting(run(), names.MANIFEST_FILE, "dp_sync", world_size=2),
        "config.json has algo.num_envs=16 and manifest.json 2 ranks",
    ),
    (
        Reason.SETTINGS_MISMATCH,
        lambda run: with_setting(run(), names.CONFIG_FILE, "algo", max_iterations=90),
        "algo.max_iterations gives 90, run_end.json 60",
    ),
    (
        Reason.SETTINGS_MISMATCH,
        lambda run: with_setting(run(), names.CONFIG_FILE, "algo", algo="flashsac"),
        "algo.algo gives flashsac, manifest.json sac",
    ),
    (
        Reason.SETTINGS_MISMATCH,
        lambda run: with_setting(run(), names.CONFIG_FILE, "env", physics_profile="fast"),
        "env.physics_profile gives fast, manifest.json exact",
    ),
    (
        Reason.SETTINGS_MISMATCH,
        lambda run: with_setting(run(), names.CONFIG_FILE, "algo", replay_buffer_n=513),
        "algo.num_envs x algo.replay_buffer_n gives 8208, manifest.json 8192",
    ),
    (
        Reason.SETTINGS_MISMATCH,
        lambda run: with_setting(run(world_size=2), names.CONFIG_FILE, "algo", updates_per_step=16),
        "algo.updates_per_step with algo.policy_frequency gives 20, manifest.json 10",
    ),
    (Reason.CLOCK_STEP, lambda run: run(mode="clock_step"), "the wall clock stepped during the run"),
    (Reason.CLOCK_STEP, lambda run: with_progress_of(run(), run("other", rate=9_890.0)), "the wall clock stepped"),
]


@pytest.mark.parametrize(
    ("reason", "make", "text"), REFUSED, ids=[f"{i}-{reason}" for i, (reason, _, _) in enumerate(REFUSED)]
)
def test_no_number_but_a_reason(fake_run: FakeRun, reason: Reason, make: Callable[[FakeRun], Path], text: str) -> None:
    run_dir = make(fake_run)
    found = refusal(run_dir)
    assert found.code == reason.value
    assert text in str(found)
    assert str(run_dir.parent) not in str(found)  # reasons are published: no path of this machine


def test_every_reason_is_tested() -> None:
    elsewhere = {Reason.MIXED_CODE, Reason.READERS_DISAGREE}  # of groups; of test_events, where tbparse is replaced
    assert {reason for reason, _, _ in REFUSED} == set(Reason) - elsewhere


@pytest.mark.parametrize("size", [0, 3, 11, 12, 40])
def test_lost_ends_of_the_events_are_never_silent(fake_run: FakeRun, size: int) -> None:
    """A run that ended cannot miss whole records; without its end, what is there is measured and marked."""
    run_dir = lose_records(fake_run(), 2)
    path = next(run_dir.glob("events*"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size - size])
    assert refusal(run_dir).code == "event_count_mismatch"
    (run_dir / names.RUN_END_FILE).unlink()
    notes = measure(run_dir, own=False).notes
    assert any("cut at byte" in note for note in notes) == (size > 0)


def test_clocks_may_differ_by_a_hundredth(fake_run: FakeRun) -> None:
    run_dir = with_progress_of(fake_run(), fake_run("other", rate=9_910.0))
    assert measure(run_dir).notes == []


def test_a_tail_of_one_point_is_too_few(fake_run: FakeRun) -> None:
    found = refusal(fake_run(), tail=0.01)
    assert found.code == "too_few_points"
    assert "a tail of 0.01 holds fewer than two of the 60 points" in str(found)


def test_values_before_the_tail_need_not_be_finite(fake_run: FakeRun, tmp_path: Path) -> None:
    values = [math.nan] * 20 + [1.0] * 20
    run_dir = write_points(tmp_path / "x", list(range(40)), [float(i) for i in range(40)], values)
    assert measure(run_dir, tag="a/rate", own=False).steps_per_second == 1.0


def test_losses_of_another_program_need_not_be_finite(fake_run: FakeRun) -> None:
    run_dir = fake_run(mode="nan", rate=25_000.0)
    assert measure(run_dir, own=False).steps_per_second == pytest.approx(25_000.0, rel=1e-5)


@pytest.mark.parametrize(
    ("mode", "exit_code", "code"),
    [
        ("ok", 0, None),
        ("crash", 1, "missing_run_end"),
        ("cut_log", 0, None),
        ("nan", 0, "non_finite"),
        ("clock_step", 0, "clock_step"),
        ("no_run_end", 0, "missing_run_end"),
        ("failed_end", 1, "run_failed"),
        ("damaged", 0, "damaged_record"),
        ("duplicate_steps", 0, "steps_not_increasing"),
        ("exit3", 3, "missing_run_dir"),
    ],
)
def test_the_fake_trainer_keeps_its_word(
    fake_trainer_command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    exit_code: int,
    code: str | None,
) -> None:
    for name, value in {"FAKE_MODE": mode, "FAKE_RATE": "5000", "FAKE_NOISE": "0"}.items():
        monkeypatch.setenv(name, value)
    run_dir = tmp_path / "cell"
    arguments = ["--algo", "sac", "--task", "g1_walk_flat", "--sim", "mujoco", "algo.max_iterations=40"]
    command = [*fake_trainer_command, *arguments, f"training.log_dir={run_dir}", "training.smoke=true"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == exit_code
    if code is None:
        assert measure(run_dir).steps_per_second == pytest.approx(5_000.0, rel=0.02)
    else:
        assert refusal(run_dir).code == code


def test_the_fake_trainer_can_hang(
    fake_trainer_command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "hang" in MODES
    monkeypatch.setenv("FAKE_MODE", "hang")
    arguments = ["--algo", "sac", "--task", "t", "--sim", "mujoco", f"training.log_dir={tmp_path / 'cell'}"]
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([*fake_trainer_command, *arguments], capture_output=True, timeout=2.0, check=False)
    assert not (tmp_path / "cell" / names.RUN_END_FILE).exists()
