from __future__ import annotations

from pathlib import Path

import pytest
from session_builder import COMPARISON, TOY, matrix_text

from repro.errors import UsageError
from repro.matrix import Matrix, adjust, builtin_names, load_matrix, matrix_of_cases, parse_matrix, select_cases
from repro.schema import canonical_json, parse_model


def test_the_shipped_matrices_load_and_say_what_they_are() -> None:
    learning = ["learning", "learning_flashsac", "learning_go2"]
    assert builtin_names() == ["ablation", "documents", "dual", *learning, "pools", "single", "smoke", "strong"]
    smoke, single = load_matrix("smoke"), load_matrix("single")
    assert smoke.smoke and not single.smoke
    assert [case.workers for case in smoke.cases] == [1, 2]
    assert (smoke.repeats, smoke.warmup, len(smoke.cases)) == (3, 1, 2)  # seven cells
    assert (single.iterations, single.repeats) == (300, 3)
    assert [(case.name, case.gpus, case.workers) for case in single.cases] == [("n1", (0,), "default")]
    dual = load_matrix("dual")
    assert [(case.name, case.gpus, case.workers) for case in dual.cases] == [
        ("n1", (0,), "default"),
        ("n2", (0, 1), "default"),
    ]
    assert (dual.iterations, dual.repeats, dual.warmup, dual.ceiling, dual.benchmarks) == (300, 3, 1, True, False)
    assert [(item.metric, item.expected) for item in dual.comparisons] == [
        ("steps_per_second", 2.0),
        ("learner_rows_per_second", 2.0),
        ("ceiling", 2.0),
        ("ceiling_share", 1.0),
    ]
    assert all("algo.save_interval=-1" in matrix.overrides for matrix in (smoke, single))


def test_a_matrix_file_is_loaded_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TOY)
    assert [case.name for case in load_matrix(str(path)).cases] == ["slow", "fast"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("repeats = 2", "repeets = 2", "toy.toml: unknown key 'repeets'; did you mean 'repeats'?"),
        ("workers = 1", "worker = 1", "unknown key 'cases.0.worker'; did you mean 'workers'?"),
        ("repeats = 2", "", "toy.toml: key 'repeats' is missing"),
        ("repeats = 2", "repeats = 2\nrepeats = 3", "not valid TOML: Cannot overwrite a value"),
        ("repeats = 2", "repeats = 0", "repeats: input should be greater than or equal to 1, found 0"),
        ("repeats = 2", 'repeats = "2"', "repeats: input should be a valid integer, found '2'"),
        ("margin = 0.05", "margin = nan", "margin"),
        ('interval = "welch"', 'interval = "bootstrap"', "interval: input should be 'welch' or 'paired'"),
        ('name = "fast"', 'name = "slow"', "case name 'slow' is used 2 times"),
        ('numerator = "fast"', 'numerator = "fats"', "comparison 'speedup' names case 'fats'; did you mean 'fast'?"),
        ('numerator = "fast"', 'numerator = "slow"', "compares 'slow' with itself"),
        ("smoke = true", "smoke = false", "case 'slow' names no GPU; set gpus = [0], or smoke = true"),
        (
            "workers = 1",
            "gpus = [0]",
            "case 'slow' names GPUs [0], but the matrix is smoke (CPU), where one rank needs none; leave gpus out, or",
        ),
        (
            'denominator = "slow"',
            'denominator = "slow"\nmetric = "ceiling"',
            "comparison 'speedup' needs the physics ceiling; set ceiling = true",
        ),
        ('denominator = "slow"', 'denominator = "slow"\nexpected = 0.0', "expected: input should be greater than"),
        ('denominator = "slow"', 'denominator = "slow"\nmetric = "loss"', "metric: input should be 'steps_per_second'"),
        ("workers = 1", "gpus = [1, 1]", "GPU positions [1, 1] repeat"),
        ("workers = 1", "workers = 0", "workers"),
        ("workers = 1", 'workers = "most"', "workers"),
        ("workers = 1", "pools = 0", "pools: input should be greater than or equal to 1, found 0"),
        ("workers = 1", 'workers = "auto"\npools = 2', "pools = 2 needs CPUs that the suite names"),
        ("smoke = true", "smoke = true\nstrong = true", "algo.num_envs of all ranks differs or is not set: slow None"),
        ("workers = 1", 'overrides = ["algo.num_envs"]', "override 'algo.num_envs' is not key=value"),
        ("workers = 1", 'overrides = ["env.cpu_ids=[0]"]', "env.cpu_ids is set by the suite; use workers"),
        ("workers = 1", 'overrides = ["+training.log_dir=x"]', "training.log_dir is set by the suite; "),
        ('name = "toy"', 'name = "Toy run"', "name: string should match pattern"),
        ('name = "toy"', 'name = "toy\\n"', "name: string should match pattern"),
        (
            'reason = "A test."',
            'reason = "A\\n# test."',
            "reason: 'A\\n# test.' holds a control character or a line end",
        ),
        ('reason = "A test."', 'reason = "A\\u2028test."', "holds a control character or a line end"),
        ("workers = 1", 'overrides = ["a.b=1\\u0000"]', r"overrides: 'a.b=1\x00' holds a control character"),
        ("workers = 1", 'overrides = ["a.b=1\\n"]', r"overrides: 'a.b=1\n' holds a control character"),
        ('FAKE_RATE = "10000"', '"A=B" = "1"', "environment: 'A=B' is no name of a variable"),
        ('FAKE_RATE = "10000"', '"A\\nB" = "1"', r"environment: 'A\nB' is no name of a variable"),
        (
            *('FAKE_RATE = "10000"', 'CUDA_VISIBLE_DEVICES = "GPU-1"'),
            "environment: CUDA_VISIBLE_DEVICES is set by the suite; a case names its GPUs by gpus, as in gpus = [0]",
        ),
        ('FAKE_RATE = "10000"', '"" = "1"', "environment: '' is no name of a variable"),
        ('FAKE_RATE = "10000"', 'A = "\\u0000"', r"environment: '\x00' holds a control character"),
        ('FAKE_RATE = "10000"', 'PYTHONPATH = "/x"', "PYTHONPATH changes the code that is measured"),
        ('FAKE_RATE = "10000"', 'PYTHONHOME = "/x"', "PYTHONHOME changes the code that is measured"),
        ('FAKE_RATE = "10000"', 'LD_PRELOAD = "/x.so"', "LD_PRELOAD changes the code that is measured"),
        ("repeats = 2", "repeats = 1" + "0" * 400, "repeats: input should be less than or equal to 10000"),
        ("repeats = 2", "repeats = 1" + "0" * 5000, "not valid TOML: Exceeds the limit"),
        ("iterations = 40", "iterations = 1000000001", "iterations: input should be less than or equal to 1000000000"),
        ("timeout_seconds = 60.0", "timeout_seconds = 1e999", "timeout_seconds"),
        ("workers = 1", "workers = 99999999999", "workers"),
        ("repeats = 2", "repeats = " + "[" * 5000 + "]" * 5000, "toy.toml: nested too deeply"),
        ("repeats = 2", ".".join(5000 * "a") + " = 1", "toy.toml: nested too deeply"),
    ],
)
def test_a_wrong_matrix_is_refused_in_one_line(old: str, new: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_matrix(TOY.replace(old, new), "toy.toml")
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_matrix_file_is_utf8(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(TOY.encode().replace(b"A test", b"A t\xffst"))
    with pytest.raises(UsageError, match=r"mine\.toml: not UTF-8 at byte \d+; save it as UTF-8"):
        load_matrix(str(path))


def test_an_unknown_matrix_or_file_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown matrix 'smok'; did you mean 'smoke'"):
        load_matrix("smok")
    with pytest.raises(UsageError, match="matrix file there/is/none does not exist"):
        load_matrix("there/is/none")


def test_named_cases_bring_their_matrix_and_the_comparisons_between_them() -> None:
    assert matrix_of_cases(["n1", "n2"]) == load_matrix("dual")
    both = matrix_of_cases(["workers2", "workers1"])
    assert [case.name for case in both.cases] == ["workers2", "workers1"]
    assert [item.name for item in both.comparisons] == ["second_worker"]
    assert matrix_of_cases(["workers1"]).comparisons == ()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["worker1"], "unknown case 'worker1'; did you mean 'workers1'"),
        (["smoke", "workers1"], "smoke is a matrix, not a case; type --matrix smoke"),
        (["base", "base"], "cases base base repeat a name; use --repeats for more runs of a case"),
        (["n1", "workers1"], r"one matrix \(n1 in documents/dual/single, workers1 in smoke\); name cases of one$"),
        (["n1"], r"to one matrix \(n1 in documents/dual/single\); say which, as in --matrix documents n1$"),
    ],
)
def test_named_cases_that_cannot_be_run_together_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        matrix_of_cases(names)


def test_the_command_line_changes_a_matrix_within_its_limits() -> None:
    changed = adjust(parse_matrix(TOY, "toy.toml"), 27, 5, ("algo.gamma=0.9",))
    assert (changed.iterations, changed.repeats, changed.overrides) == (27, 5, ("algo.gamma=0.9",))
    with pytest.raises(UsageError, match="--repeats 0: must be at least 1"):
        adjust(changed, None, 0, ())
    with pytest.raises(UsageError, match=r"--iterations 10{400}: must be at most 1000000000"):
        adjust(changed, 10**400, None, ())
    with pytest.raises(UsageError, match="holds a control character"):
        adjust(changed, None, None, ("a.b=1\n",))
    with pytest.raises(UsageError, match="holds a control character"):
        adjust(changed, None, None, ("a.b=\udcff",))  # a byte of the command line that is not UTF-8
    with pytest.raises(UsageError, match=r"training\.smoke is set by the suite"):
        adjust(changed, None, None, ("training.smoke=false",))


@pytest.mark.parametrize(
    ("text", "iterations", "overrides", "message"),
    [
        (TOY, 19, (), "case 'slow' logs 19 events in 19 iterations, a rate needs 20; type --iterations 20 or more"),
        (TOY, 1, (), "case 'slow' logs 1 event in 1 iteration, a rate needs 20; type --iterations 20 or more"),
        (TOY.replace("iterations = 40", "iterations = 9"), None, (), "'slow' logs 9 events in 9 iterations, a rate"),
        (
            TOY.replace('"fast"\nreason', '"fast"\noverrides = ["training.log_interval=3"]\nreason'),
            *(57, (), "case 'fast' logs 19 events in 57 iterations with training.log_interval=3, a rate needs 20; "),
        ),
        (TOY, 95, ("training.log_interval=5",), "training.log_interval=5, a rate needs 20; type --iterations 96 or "),
    ],
)
def test_too_few_iterations_for_a_rate_are_refused(
    text: str, iterations: int | None, overrides: tuple[str, ...], message: str
) -> None:
    matrix = parse_matrix(text, "toy.toml")
    with pytest.raises(UsageError) as caught:
        adjust(matrix, iterations, None, overrides)
    assert message in str(caught.value)
    assert adjust(matrix, 96, None, overrides).iterations == 96


def test_the_last_log_interval_counts_and_what_another_trainer_logs_is_not_known() -> None:
    overrides = ("training.log_interval=5", "++training.log_interval=1")
    matrix = adjust(parse_matrix(TOY, "toy.toml"), 20, None, overrides)
    foreign = {"command": ("theirs", "{run_dir}"), "event_tag": "rollout/fps", "step_axis": 64}
    cases = tuple(case.model_copy(update=foreign) for case in matrix.cases)
    assert adjust(matrix.model_copy(update={"cases": cases}), 1, None, ()).iterations == 1


def test_comparison_names_are_unique() -> None:
    with pytest.raises(UsageError, match="comparison name 'speedup' is used 2 times"):
        parse_matrix(matrix_text({"slow": {}, "fast": {}}, extra=2 * COMPARISON), "toy.toml")


def test_cases_of_another_trainer_alone_have_no_probe_and_no_ceiling() -> None:
    """What is left of a matrix of both is a matrix that its plan can hold."""
    extra = 'probes = ["correctness"]\nceiling = true\n'
    theirs = 'command = ["theirs", "{run_dir}"]\nevent_tag = "fps"\nstep_axis = "env_steps"\n'
    both = parse_matrix(matrix_text({"ours": {}, "theirs": {}}, extra=extra) + theirs, "both.toml")
    alone = select_cases(both, ["theirs"])
    assert parse_model(Matrix, canonical_json(alone), "plan.json") == alone
    assert (alone.probes, alone.ceiling) == ((), False)
    assert select_cases(both, ["theirs", "ours"]).probes == ("correctness",)
