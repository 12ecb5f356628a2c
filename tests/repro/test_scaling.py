from __future__ import annotations

import json
from pathlib import Path

import pytest
from session_builder import TRAINER, make_host

from repro.cli import main
from repro.errors import HostUnfitError, UsageError
from repro.scaling import choose_devices, scaling_matrix
from repro.text import NOTHING, ratio


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory on a host with two GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("repro.scaling.find_host", lambda: make_host(cpus=8, gpu_count=2))
    return tmp_path


def test_one_index_runs_one_gpu_and_keeps_its_numbers(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_RATE", "5000")
    monkeypatch.setenv("FAKE_NOISE", "0")
    flags = ["--devices", "1", "--extra-overrides", "algo.num_envs=32", "algo.batch_size=64", "--out-json", "x.json"]
    assert main(["scaling", *flags], trainer=TRAINER) == 0
    found = json.loads((here / "x.json").read_text())
    (run,) = found["runs"]
    assert (run["ranks"], run["devices"], run["status"], run["steps_relative"]) == (1, [1], "measured", 1.0)
    assert run["steps_per_second"] == pytest.approx(5000.0, rel=1e-4)
    assert run["learner_rows_relative"] == 1.0
    assert found["iterations"] == 60
    assert found["overrides"][-2:] == ["algo.num_envs=32", "algo.batch_size=64"]
    report = Path(found["report"])
    assert report.parent == Path("reports") and "_scaling_h200x1_" in report.name
    plan = json.loads((report / "plan.json").read_text())
    assert [cell["gpus"] for cell in plan["cells"]] == [["GPU-1"]]
    lines = capfd.readouterr().out.splitlines()
    assert lines[-2].split() == ["1", "1", "5,000", ratio(1.0), f"{run['learner_rows_per_second']:,.0f}", ratio(1.0)]
    assert "no interval" in lines[-1]


def test_a_second_session_replaces_nothing(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["scaling", "--devices", "0", "--iterations", "20"], trainer=TRAINER) == 0
    first, second = sorted(path.name for path in (here / "reports").iterdir())
    assert second == f"{first}-2"
    assert main(["scaling", "--devices", "0", "--out-json", f"reports/{first}/result.json"], trainer=TRAINER) == 2
    assert "older results are never replaced" in capfd.readouterr().err
    assert len(list((here / "reports").iterdir())) == 2


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--devices", "0,0"], 2, "--devices '0,0': give distinct positions"),
        (["--devices", "0,x"], 2, "--devices '0,x'"),
        (["--devices", "-1"], 2, "--devices"),
        (["--devices", ""], 2, "--devices ''"),
        (["--devices", "7"], 3, "nothing was started: n1: asks for GPU position 7, this host shows 2 GPU"),
        (["--devices", "0", "--iterations", "19"], 2, "case 'n1' logs 19 events in 19 iterations, a rate needs 20"),
        (["--devices", "0", "--iterations", "0"], 2, "--iterations 0: must be at least 1"),
        (["--devices", "0", "--extra-overrides", "a"], 2, "override 'a' is not key=value"),
        (["--devices", "0", "--extra-overrides", "training.log_dir=x"], 2, "training.log_dir is set by the suite"),
        (["--devices", "0", "--out-json", "no/where.json"], 2, "--out-json no/where.json: no is not a folder"),
    ],
)
def test_what_cannot_be_asked_is_one_line_and_starts_nothing(
    here: Path, flags: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main(["scaling", *flags], trainer=["/nonexistent"]) == code
    except SystemExit as stopped:  # of the parser
        assert stopped.code == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert list(here.iterdir()) == []


def test_without_a_gpu_the_host_is_unfit() -> None:
    with pytest.raises(HostUnfitError, match=r"needs a GPU: the driver lists no GPU; on the CPU use"):
        choose_devices("0", make_host()[0])
    with pytest.raises(UsageError, match="--devices '1;2'"):
        choose_devices("1;2", make_host()[0])


def test_devices_are_the_first_two_or_the_only_one() -> None:
    assert choose_devices(None, make_host(gpu_count=1)[0]) == (0,)
    assert choose_devices(None, make_host(gpu_count=4)[0]) == (0, 1)
    assert choose_devices("3,1", make_host(gpu_count=4)[0]) == (3, 1)


def test_several_devices_make_one_rank_and_then_all() -> None:
    matrix = scaling_matrix((2, 0))
    assert [(case.name, case.gpus) for case in matrix.cases] == [("n1", (2,)), ("n2", (2, 0))]
    assert [(c.numerator, c.denominator) for c in matrix.comparisons] == [("n2", "n1")] * 2
    assert (matrix.iterations, matrix.repeats, matrix.warmup) == (60, 1, 0)
    assert scaling_matrix((0,)).comparisons == ()


def test_two_devices_run_one_and_then_both(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["scaling", "--out-json", "x.json"], trainer=TRAINER) == 0
    one, two = json.loads((here / "x.json").read_text())["runs"]
    assert [(run["ranks"], run["devices"]) for run in (one, two)] == [(1, [0]), (2, [0, 1])]
    assert two["steps_relative"] == pytest.approx(two["steps_per_second"] / one["steps_per_second"])
    assert two["learner_rows_relative"] == pytest.approx(2.0, rel=0.05)  # twice the CPUs, twice the rate
    lines = capfd.readouterr().out.splitlines()
    assert lines[-2].split()[:2] == ["2", "0,1"] and lines[-2].split()[3] == ratio(two["steps_relative"])


def test_a_run_without_a_number_has_no_ratio(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_MODE", "nan")
    assert main(["scaling", "--out-json", "x.json"], trainer=TRAINER) == 4
    runs = json.loads((here / "x.json").read_text())["runs"]
    assert {(run["status"], run["steps_per_second"], run["steps_relative"]) for run in runs} == {
        ("refused", None, None)
    }
    assert "non_finite" in runs[0]["reason"]
    assert capfd.readouterr().out.splitlines()[-2].split()[2:] == [NOTHING] * 4
