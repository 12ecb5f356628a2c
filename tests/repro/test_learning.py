"""Learning reports: numbers of one run, and sessions of the shipped matrix cut down for the CPU."""

from __future__ import annotations

import functools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path

import fake_trainer
import numpy as np
import pytest
from session_builder import SOURCE, TRAINER, make_host, matrix_text, toy_matrix

from repro.cli import main
from repro.errors import UsageError
from repro.events import Refusal
from repro.evidence import read_evidence
from repro.figures import draw_figures
from repro.headline import headline
from repro.layout import REPORT_FILE, RESULT_FILE
from repro.learning import TRACKING_ERROR_ANG, TRACKING_ERROR_LIN, WALKING_LENGTH, Learning, learn, tenth
from repro.matrix import Matrix, load_matrix, parse_matrix
from repro.plan import TRAINER as REAL_TRAINER
from repro.plan import make_plan
from repro.report import derive_report
from repro.result import LearningResult, Result, compute_result
from repro.run_files import read_run_end
from repro.schema import canonical_json, read_model
from repro.session import default_out_dir, next_step
from repro.throughput import measure
from repro.verify import verify
from unilab.names import CONFIG_FILE, MEAN_EPISODE_LENGTH, MEAN_REWARD

TINY = (
    *("algo.num_envs=4", "algo.batch_size=4", "algo.updates_per_step=2", "algo.learning_starts=1"),
    *("algo.replay_buffer_n=8", "algo.actor_hidden_dim=4", "algo.critic_hidden_dim=4", "algo.num_atoms=3"),
    "env.max_episode_seconds=0.1",
)


def on_the_cpu() -> str:
    """The shipped learning matrix with smoke sizes: no GPU, one worker; its policies are not evaluated."""
    text = (resources.files("repro") / "matrices" / "learning.toml").read_text(encoding="utf-8")
    changes = {"smoke = false": "smoke = true", "evaluate = 64\n": ""}
    changes |= {"gpus = [0]\n": "", 'workers = "default"': "workers = 1", ', "training.log_interval=5"': ""}
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


def run_learning(
    folder: Path, *flags: str, trainer: tuple[str, ...] = TRAINER, text: str | None = None
) -> tuple[int, Path]:
    matrix, out = folder / "learning_cpu.toml", folder / "out"
    matrix.write_text(text or on_the_cpu())
    return main(["run", "--matrix", str(matrix), "--out", str(out), *flags], trainer=trainer), out


@functools.cache
def _walked() -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_LENGTH", "1000")
        patch.setenv("FAKE_TRACKING", "1")
        code, out = run_learning(Path(tempfile.mkdtemp(prefix="repro-learning-")), "--iterations", "40")
    assert code == 0
    return out


@pytest.fixture
def walked(tmp_path: Path) -> Path:
    """A fresh copy of one finished learning session whose policies walk."""
    return Path(shutil.copytree(_walked(), tmp_path / "report"))


def result_of(out: Path) -> Result:
    return read_model(Result, out / RESULT_FILE)


def rewritten(run: Path, change: Callable[[int, dict[str, float]], Mapping[str, float]]) -> Path:
    """Write a fake run's events again, the tags of record i as `change(i, tags)` gives them."""
    options = fake_trainer.RunOptions()
    records = []
    for i, seconds in enumerate(fake_trainer.iteration_seconds(options)):
        tags = dict(change(i, fake_trainer._tags(options, i)))
        wall_time = fake_trainer.WALL_START + fake_trainer.STARTUP_SECONDS + seconds
        records.append(fake_trainer.scalar_event(fake_trainer.env_steps(options, i), wall_time, tags))
    (events,) = run.glob("events*")
    fake_trainer.write_events(events, records)
    return run


def learned(run: Path) -> Learning:
    return learn(run, measure(run))


# --- one run ---------------------------------------------------------------------------------------------------------


def test_numbers_of_a_run_by_hand(fake_run: Callable[..., Path]) -> None:
    """60 records, 16 env steps each at 10,000 steps/s; return and length are 4 i and 17 i in record i."""
    run = rewritten(fake_run(), lambda i, tags: {**tags, MEAN_REWARD: 4.0 * i, MEAN_EPISODE_LENGTH: 17.0 * i})
    found = learned(run)
    assert (found.seed, found.env_steps) == (1, 960)
    assert found.wall_seconds == pytest.approx(59 * 16 / 10_000, abs=1e-6)
    assert found.episode_return == pytest.approx(4 * 56.5)  # records 54 to 59
    assert found.episode_length == pytest.approx(17 * 56.5)
    assert found.seconds_to_walk == pytest.approx(found.seconds[53])  # 17 * 53 = 901, and six records follow from there
    assert (found.tracking_error_lin, found.tracking_error_ang) == (None, None)
    assert set(found.curves) == {MEAN_REWARD, MEAN_EPISODE_LENGTH}
    assert found.curves[MEAN_REWARD][1:].tolist() == [4.0 * i for i in range(1, 60)]
    assert found.steps.tolist() == [16 * i for i in range(1, 61)] and found.seconds[0] == 0.0


@pytest.mark.parametrize(
    ("long_records", "first"),
    [
        (range(60), 0),
        (range(5), None),  # the first to end do so at the time limit; five records are less than a tenth
        ([*range(5), *range(20, 26), *range(50, 60)], 20),
        ([*range(20, 25), *range(30, 60)], 30),
        (range(54, 60), 54),
        (range(55, 60), None),  # too late to be held
    ],
)
def test_walking_must_be_held_for_a_tenth_of_the_records(
    fake_run: Callable[..., Path], long_records: list[int], first: int | None
) -> None:
    lengths = [
        WALKING_LENGTH if i in long_records else np.nextafter(WALKING_LENGTH, 0, dtype=np.float32) for i in range(60)
    ]
    found = learned(rewritten(fake_run(), lambda i, tags: {**tags, MEAN_EPISODE_LENGTH: float(lengths[i])}))
    assert found.seconds_to_walk == (None if first is None else found.seconds[first])


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (9, 1), (19, 1), (20, 2), (1000, 100)])
def test_a_tenth_is_at_least_one(count: int, expected: int) -> None:
    assert tenth(count) == expected


def test_before_an_episode_ended_there_is_no_number(fake_run: Callable[..., Path]) -> None:
    def until(last: int) -> Callable[[int, dict[str, float]], Mapping[str, float]]:
        return lambda i, tags: {**tags, MEAN_REWARD: 7.0 * (i > last), MEAN_EPISODE_LENGTH: 30.0 * (i > last)}

    found = learned(rewritten(fake_run("late"), until(56)))
    assert (found.episode_return, found.episode_length) == (7.0, 30.0)  # zeros do not count
    assert np.isnan(found.curves[MEAN_REWARD]).sum() == 57
    found = learned(rewritten(fake_run("never"), until(60)))
    assert (found.episode_return, found.episode_length, found.seconds_to_walk) == (None, None, None)


def test_tracking_errors_are_read_where_they_were_logged(fake_run: Callable[..., Path]) -> None:
    found = learned(fake_run(tags={TRACKING_ERROR_LIN: 0.125, TRACKING_ERROR_ANG: 0.5}))
    assert (found.tracking_error_lin, found.tracking_error_ang) == (0.125, 0.5)
    assert found.curves[TRACKING_ERROR_ANG].tolist() == [0.5] * 60


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (
            lambda i, tags: {tag: value for tag, value in tags.items() if tag != MEAN_REWARD},
            "missing_tag",
            "run has 0 points of Train/mean_reward and 60 of Perf/total_fps; a learning curve needs one in every",
        ),
        (
            lambda i, tags: {tag: value for tag, value in tags.items() if i != 3 or tag != MEAN_EPISODE_LENGTH},
            "missing_tag",
            "run has 59 points of Train/mean_episode_length and 60",
        ),
        (
            lambda i, tags: {**tags, TRACKING_ERROR_LIN: float("nan") if i in (2, 4) else 0.1},
            "non_finite",
            "run: Episode/tracking_error_lin is nan at step 48 and at 1 more points; look into the training",
        ),
        (lambda i, tags: {**tags, **({TRACKING_ERROR_ANG: 0.1} if i else {})}, "missing_tag", "run has 59 points"),
    ],
)
def test_curves_with_holes_are_refused(
    fake_run: Callable[..., Path],
    change: Callable[[int, dict[str, float]], Mapping[str, float]],
    code: str,
    message: str,
) -> None:
    with pytest.raises(Refusal) as caught:
        learned(rewritten(fake_run(), change))
    assert caught.value.code == code and str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("seed", ['"one"', "true", "1.0", "null"])
def test_a_run_without_a_seed_is_refused(fake_run: Callable[..., Path], seed: str) -> None:
    run = fake_run()
    text = (run / CONFIG_FILE).read_text()
    (run / CONFIG_FILE).write_text(text.replace('"seed": 1', f'"seed": {seed}'))
    with pytest.raises(Refusal, match=r"config\.json: algo\.seed is .+, not an integer; run it again"):
        learned(run)


def test_five_thousand_records_are_read(fake_run: Callable[..., Path]) -> None:
    run = fake_run(iterations=5000, final_length=1000.0)
    found = learned(run)
    end = read_run_end(run)
    assert len(found.steps) == end.event_count == 5000
    assert found.env_steps == end.final_env_steps
    assert found.episode_length == pytest.approx(20 + 980 * (4500 + 4999) / 2 / 5000)
    assert found.seconds_to_walk == pytest.approx(found.seconds[4490])  # 20 + 980 * 4490 / 5000 = 900.04


# --- the matrix ------------------------------------------------------------------------------------------------------


def test_the_shipped_matrix_asks_for_five_thousand_iterations_on_all_cores_but_one() -> None:
    matrix = load_matrix("learning")
    assert matrix.learning and not matrix.smoke and not matrix.comparisons
    assert (matrix.iterations, matrix.repeats, matrix.warmup) == (5000, 1, 0)
    assert {"algo.seed=1", "algo.save_interval=0"} < set(matrix.overrides) and matrix.evaluate == 64
    host, topology = make_host(cpus=32, gpu_count=2)
    plan = make_plan(matrix, host, topology, SOURCE)
    assert [(cell.id, cell.gpus, len(cell.cpu_ids or ())) for cell in plan.runnable] == [
        ("exact_r1", ("GPU-0",), 31),
        ("fast_r1", ("GPU-0",), 31),
    ]
    assert [cell.arguments[-1] for cell in plan.cells] == ["env.physics_profile=exact", "env.physics_profile=fast"]
    assert plan.timeout_seconds >= 5 * plan.estimated_seconds
    assert default_out_dir(plan, host).name == f"{plan.created[:10]}_learning_h200x1_0123456"


def test_a_learning_matrix_compares_no_rates() -> None:
    text = matrix_text(
        {"slow": {}, "fast": {}}, extra='\n[[comparisons]]\nname = "x"\nnumerator = "fast"\ndenominator = "slow"\n'
    )
    with pytest.raises(UsageError) as caught:
        parse_matrix(text.replace("smoke = true", "smoke = true\nlearning = true"), "toy.toml")
    assert str(caught.value) == (
        "toy.toml: learning = true, but comparison 'x' compares rates; "
        "a learning matrix gives no verdict on speed, take it out"
    )
    with pytest.raises(UsageError, match="learning: input should be a valid boolean, found 1"):
        parse_matrix(text.replace("smoke = true", "smoke = true\nlearning = 1"), "toy.toml")


def test_plans_of_other_matrices_have_the_bytes_they_had() -> None:
    assert "learning" not in json.loads(canonical_json(toy_matrix()))
    learning = canonical_json(load_matrix("learning"))
    assert json.loads(learning)["learning"] is True
    assert Matrix.model_validate_json(learning) == load_matrix("learning")


# --- sessions --------------------------------------------------------------------------------------------------------


def test_a_session_that_walks_is_published_and_verifies(walked: Path) -> None:
    result = result_of(walked)
    assert (result.verdict, result.smoke, result.matrix) == ("measured", True, "learning")
    exact, fast = result.learning
    assert (exact.run, fast.run) == ("runs/exact_r1", "runs/fast_r1")
    assert (exact.algo, exact.task, exact.sim, exact.world_size) == ("sac", "g1_walk_flat", "mujoco", 1)
    assert (exact.seed, exact.env_steps) == (1, 640)
    assert exact.episode_length == pytest.approx(20 + 980 * 37.5 / 40)
    assert exact.episode_return == pytest.approx(-2 + 245 * 37.5 / 40)
    assert (exact.tracking_error_lin, exact.tracking_error_ang) == (0.125, 0.25)
    rate = result.cells[0].steps_per_second or 0.0
    assert exact.wall_seconds == pytest.approx(39 * 16 / rate, rel=1e-3)
    assert exact.seconds_to_walk == pytest.approx(36 * 16 / rate, rel=0.01)
    lines: list[str] = []
    assert verify([walked], lines.append), lines
    assert lines[-1].endswith(", 2 runs recomputed")
    assert main(["report", str(walked), "--check"]) == 0
    assert next_step(result, walked, "repro").endswith("on a host with a GPU: repro run --matrix learning")


def test_the_page_is_about_learning_and_gives_no_verdict_on_speed(walked: Path) -> None:
    page = (walked / REPORT_FILE).read_text(encoding="utf-8")
    assert page.startswith(
        "# SMOKE: sac on g1_walk_flat (mujoco), matrix learning\n\n**`exact` walks: mean episode length 938.8 control "
        "steps (return 227.7 after 640 env steps, 0 s, seed 1). `fast` walks: "
    )
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert headings[:2] == ["Learning", "Speed"] and "Result" not in headings
    assert re.search(
        r"^\| exact \| +1 \| yes +\| +227\.7 \| +938\.8 \| +0\.125 \| 0\.250 \| +640 \|", page, re.MULTILINE
    )
    assert "`exact` n = 1, seed 1; `fast` n = 1, seed 1. One run has no spread" in page
    assert "the rates below are stated and give no verdict" in page
    assert "Learning was judged over 40 iterations with seed 1 alone" in page and "learning is not judged" not in page
    assert "did not log" not in page and "rates.svg" not in page and "\n\n\n" not in page
    figures = sorted(path.name for path in (walked / "figures").iterdir())
    assert figures == ["episode_length.svg", "return.svg", "steps.svg", "tracking_error.svg"]
    assert all(f"](figures/{name})" in page for name in figures)


def test_curves_are_drawn_over_steps_and_seconds_and_repeat_byte_for_byte(walked: Path) -> None:
    evidence = read_evidence(walked)
    first, second = (draw_figures(evidence, compute_result(evidence)) for _ in range(2))
    assert first == second
    for name in ("return", "episode_length", "tracking_error"):
        svg = (walked / "figures" / f"{name}.svg").read_bytes()
        assert svg == first[f"figures/{name}.svg"]
        for label in (b">million env steps<", b">seconds since the first record<", b">exact<", b">fast<"):
            assert label in svg
    assert first["figures/tracking_error.svg"].count(b">planar velocity error, m/s<") == 1


@pytest.mark.parametrize("field", ["episode_length", "episode_return", "seconds_to_walk", "tracking_error_lin"])
def test_a_changed_learning_number_is_found_by_recomputation(walked: Path, field: str) -> None:
    from repro.manifest import write_manifest

    result = json.loads((walked / RESULT_FILE).read_text())
    result["learning"][1][field] += 1.0
    (walked / RESULT_FILE).write_text(json.dumps(result, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    write_manifest(walked)
    lines: list[str] = []
    assert not verify([walked], lines.append)
    assert any(line.strip().startswith(f"{RESULT_FILE}: differs from what its raw files give") for line in lines)


def test_a_policy_that_does_not_walk_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its runs log no tracking errors, and are reported without them."""
    monkeypatch.setenv("FAKE_LENGTH", "900")
    code, out = run_learning(tmp_path, "--iterations", "40")
    assert code == 1
    result = result_of(out)
    assert result.verdict == "does_not_walk"
    assert [(item.seconds_to_walk, item.walks) for item in result.learning] == [(None, False)] * 2
    said = "exact does not walk: mean episode length 845.0 control steps, 900 are needed (return "
    lines = capsys.readouterr().out.splitlines()
    assert lines[-6].startswith(f"SMOKE, not a benchmark: {said}")
    assert lines[-2] == f"next: look for the fault: curves in the report, events in {out / 'runs'}"
    page = (out / REPORT_FILE).read_text(encoding="utf-8")
    assert f"**{said.replace('exact', '`exact`')}" in page and re.search(r"^\| exact +\| +1 \| NO ", page, re.MULTILINE)
    assert "No tracking error of `exact`, `fast`: " in page
    assert not (out / "figures" / "tracking_error.svg").exists() and "tracking_error.svg" not in page
    assert [item.tracking_error_lin for item in result.learning] == [None, None]
    assert verify([out], lambda line: None)


def test_a_session_with_a_missing_run_is_incomplete_though_the_other_does_not_walk(walked: Path) -> None:
    shutil.rmtree(walked / "runs" / "fast_r1")
    report = derive_report(walked)
    assert (report.result.verdict, len(report.result.learning)) == ("incomplete", 1)
    said = headline(report.result, report.evidence.plan.matrix)
    assert said.startswith("Incomplete: 1 of 2 cells gave no number. `exact` walks: ")


def test_no_curve_of_a_run_is_used_that_gives_no_rate(walked: Path) -> None:
    (walked / "runs" / "fast_r1" / "run_end.json").unlink()
    assert [item.run for item in derive_report(walked).result.learning] == ["runs/exact_r1"]


@pytest.mark.parametrize(("length", "walks"), [(None, False), (899.99, False), (900.0, True), (1000.0, True)])
def test_walking_is_a_mean_episode_of_nine_hundred_steps(length: float | None, walks: bool) -> None:
    facts = {"algo": "sac", "task": "g1_walk_flat", "sim": "mujoco", "world_size": 1, "seed": 1, "env_steps": 1}
    numbers = dict.fromkeys(("seconds_to_walk", "episode_return", "tracking_error_lin", "tracking_error_ang"))
    found = LearningResult(**facts, **numbers, wall_seconds=1.0, episode_length=length, run="runs/a_r1")
    assert found.walks == walks


def test_the_real_trainer_gives_a_learning_report(tmp_path: Path) -> None:
    overrides = [word for override in TINY for word in ("--override", override)]
    exact_alone, _, _ = on_the_cpu().rpartition("[[cases]]")
    code, out = run_learning(tmp_path, "--iterations", "20", *overrides, trainer=REAL_TRAINER, text=exact_alone)
    assert code == 1  # five control steps are no walk
    result = result_of(out)
    assert [cell.status for cell in result.cells] == ["measured"]
    (found,) = result.learning
    assert found.seed == 1 and found.env_steps == 4 * 20 and found.wall_seconds > 0
    assert found.episode_length == pytest.approx(5.0, abs=1.0) and found.episode_return is not None
    assert (out / "figures" / "return.svg").is_file()
    assert verify([out], lambda line: None)
