"""Two commits of a small repository, compared with the fake trainer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_project import commit, git, make_project, write_trainer
from session_builder import SOURCE, finished_session, make_host, matrix_text, toy_matrix

from repro import ab as ab_module
from repro.cli import main
from repro.errors import UsageError
from repro.evidence import Evidence, differing_settings, mixed_cases, read_evidence
from repro.gpus import GpuLoad
from repro.layout import PLAN_FILE, RESULT_FILE
from repro.matrix import load_matrix
from repro.plan import make_plan
from repro.redact import AB_FOLDER, Redactor
from repro.render import side_notes
from repro.result import Result
from repro.schema import canonical_json, read_model
from repro.verify import verify

MATRIX = matrix_text({"other": {}, "one": {}}, name="base", repeats=3, warmup=1)
SLOW, FAST = 10_000, 15_000
EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "foreign.toml"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder in which code is laid out; none may be left there."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    assert list(folder.glob(f"{AB_FOLDER}*")) == []


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a slow trainer, then a fast one."""
    make_project(tmp_path / "project", SLOW, FAST)
    return use(tmp_path / "project", monkeypatch)


def use(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ab_module, "PROJECT", project)
    monkeypatch.chdir(project.parent)
    (project.parent / "base.toml").write_text(MATRIX)
    theirs = 'command = ["theirs", "{run_dir}"]\nevent_tag = "fps"\nstep_axis = "env_steps"\n'
    (project.parent / "theirs.toml").write_text(matrix_text({"theirs": {}}) + theirs)
    return project


def run_ab(*words: str, matrix: str = "base.toml") -> int:
    return main(["ab", *words, "--matrix", matrix, "--out", "out"])


@pytest.fixture(scope="module")
def first_comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    folder = tmp_path_factory.mktemp("ab")
    commits = make_project(folder / "project", SLOW, FAST)
    with pytest.MonkeyPatch.context() as patch:
        use(folder / "project", patch)
        patch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it where another test compiles
        assert run_ab("HEAD~1", "HEAD") == 0
    return folder / "out", tuple(commits)


@pytest.fixture
def finished(first_comparison: tuple[Path, tuple[str, ...]], tmp_path: Path) -> tuple[Path, tuple[str, ...]]:
    """A fresh copy of one finished comparison, and its two commits."""
    out, commits = first_comparison
    return Path(shutil.copytree(out, tmp_path / "report")), commits


def edit(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


def statuses(evidence: Evidence) -> dict[str, tuple[str, str | None]]:
    return {item.cell.id: (item.status, item.reason) for item in evidence.cells}


def test_a_faster_commit_is_found_faster_by_its_factor(
    project: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    a, b = (git(project, "rev-parse", "--short=7", ref) for ref in ("HEAD~1", "HEAD"))
    before = git(project, "status", "--porcelain"), git(project, "worktree", "list")
    assert run_ab("HEAD~1", "HEAD") == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[-6].startswith(f"SMOKE, not a benchmark: B ({b}) runs at 1.")
    assert f"the rate of A ({a}) (95 % interval [1." in lines[-6]
    assert lines[-6].endswith("], n = 3): faster, beyond the noise.")
    assert lines[-2].endswith("to measure, run this on a host with a GPU: repro ab REF_A REF_B")
    assert lines[-1] == "out/report.md"
    result = read_model(Result, tmp_path / "out" / RESULT_FILE)
    assert result.comparisons[0].ratio == pytest.approx(FAST / SLOW, rel=0.02)
    assert (result.matrix, result.verdict) == ("ab", "improved")
    assert before == (git(project, "status", "--porcelain"), git(project, "worktree", "list"))


def test_both_sides_are_warmed_up_and_take_turns(finished: tuple[Path, tuple[str, ...]]) -> None:
    plan = read_evidence(finished[0]).plan
    assert [cell.id for cell in plan.cells] == [
        *("warmup1_a", "warmup2_b"),
        *("a_r1", "b_r1", "b_r2", "a_r2", "a_r3", "b_r3"),
    ]
    assert {cell.arguments[8:] for cell in plan.cells} == {plan.cells[0].arguments[8:]}


def test_every_run_says_that_it_ran_its_sides_code(finished: tuple[Path, tuple[str, ...]]) -> None:
    out, commits = finished
    plan = read_evidence(out).plan
    assert [plan.sources[side].commit for side in "ab"] == list(commits)
    assert plan.source.commit not in commits
    for cell in plan.cells:
        command = json.loads((out / cell.run / "command.json").read_text())
        assert command["git"]["commit"] == plan.sources[cell.case].commit
        assert command["source_sha256"] == plan.sources[cell.case].trainer_sha256


def test_its_report_verifies_and_names_both_commits(finished: tuple[Path, tuple[str, ...]]) -> None:
    out, commits = finished
    page = (out / "report.md").read_text()
    a, b = (text[:7] for text in commits)
    assert page.startswith(f"# SMOKE: sac on g1_walk_flat (mujoco), A ({a}) against B ({b})\n")
    assert f"**B ({b}) runs at 1." in page and f"Does {b} (b) train faster than {a} (a)?" in page
    assert f"PYTHONPATH=checkout_of_{a} PYTHONUNBUFFERED=1 python -m unilab.train" in page
    for side, full in zip("ab", commits, strict=True):
        assert f"| code of {side} " in page and f"commit {full} " in page
    assert "Subject of" not in page  # free text
    assert "/tmp" not in page and verify([out], lambda line: None)
    assert main(["report", str(out), "--check"]) == 0


def test_a_slower_commit_is_a_regression_and_exit_code_1(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ab("HEAD", "HEAD~1", "--repeats", "2") == 1
    line = capfd.readouterr().out.splitlines()[-6]
    assert "runs at 0.6" in line and line.endswith("n = 2): slower by more than 5.0 %.")


def test_the_working_tree_is_compared_with_its_changes(
    project: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_trainer(project, 2 * FAST)
    (project / "unilab" / "new.py").write_text("x = 1\n")
    assert run_ab("HEAD", ".", "--repeats", "2") == 0
    short = git(project, "rev-parse", "--short=7", "HEAD")
    line = capfd.readouterr().out.splitlines()[-6]
    assert f"B ({short} with changes) runs at 2." in line or f"B ({short} with changes) runs at 1.9" in line
    source = read_evidence(tmp_path / "out").plan.sources["b"]
    assert source.dirty and len(source.diff_sha256 or "") == 64
    assert "The sources had uncommitted changes" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nope", "HEAD"], 2, "'nope' is no commit of this repository; name one (HEAD~1, a branch, a tag, a hash), or"),
        (["", "HEAD"], 2, "'' is no commit of this repository"),
        (["HEAD", "HEAD:unilab"], 2, "'HEAD:unilab' is no commit of this repository"),
        (["HEAD", "HEAD"], 2, "HEAD and HEAD are the same code"),
        (["HEAD", "."], 2, "HEAD and . are the same code"),
        (["HEAD~1", "HEAD", "--matrix", "learning"], 2, "--matrix learning asks what policies learn and gives no"),
        (
            ["HEAD~1", "HEAD", "--matrix", "theirs.toml"],
            2,
            "--matrix theirs.toml has cases of other trainers alone, in",
        ),
        (["HEAD~1", "HEAD", "--matrix", "smok"], 2, "unknown matrix 'smok'; did you mean 'smoke'?"),
        (["HEAD~1", "HEAD", "--repeats", "0"], 2, "--repeats 0: must be at least 1"),
        (["HEAD~1", "HEAD", "--iterations", "19"], 2, "case 'a' logs 19 events in 19 iterations, a rate needs 20; "),
        (["HEAD~1", "HEAD", "--override", "a"], 2, "override 'a' is not key=value"),
        (["HEAD~1", "HEAD", "--matrix", "single"], 3, "nothing was started: asks for GPU position 0"),
        (["HEAD~1", "HEAD", "--require-gpu"], 3, "--require-gpu: the driver lists no GPU"),
    ],
)
def test_what_cannot_be_compared_is_one_line_with_its_code(
    words: list[str],
    code: int,
    message: str,
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ab_module, "find_host", make_host)
    assert main(["ab", *words, "--out", "out"]) == code
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("matrix ")]
    assert len(lines) == 1 and message in lines[0]
    assert not (tmp_path / "out").exists()


def test_a_busy_gpu_is_refused_before_any_run(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = GpuLoad(position=0, processes=2, utilization=80, used_bytes=2**30)
    monkeypatch.setattr(ab_module, "find_host", lambda: make_host(cpus=8, gpu_count=1))
    monkeypatch.setattr("repro.busy.gpu_loads", lambda: (busy,))
    assert run_ab("HEAD~1", "HEAD", matrix="single") == 3
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert last.startswith("repro: nothing was started: GPU 0 is busy (2 processes, 80 %, 1.0 GiB); end what uses it")
    assert captured.out == "" and not (tmp_path / "out").exists()
    assert run_ab("HEAD~1", "HEAD", "--dry-run", matrix="single") == 0
    assert capsys.readouterr().err.splitlines()[-1].startswith("a run would be refused now: GPU 0 is busy")


def test_only_a_checkout_can_be_compared(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plain").mkdir()
    for folder, message in (
        (tmp_path / "plain", "needs the git repository of this suite: git says: fatal: not a git repository"),
        (project / "unilab", "this suite is not installed from its git repository; clone it and run repro there"),
    ):
        monkeypatch.setattr(ab_module, "PROJECT", folder)
        assert run_ab("HEAD~1", "HEAD") == 2
        assert message in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nonexistent")
    assert run_ab("HEAD~1", "HEAD") == 2
    assert "repro ab needs git, which is not installed" in capsys.readouterr().err


def test_a_commit_whose_trainer_cannot_be_used_is_refused_before_any_run(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = project / "unilab"
    provenance = (package / "provenance.py").read_text()
    (package / "provenance.py").write_text(provenance.replace("source_stamp.json", "other.json"))
    commit(project, "records no commit")
    (package / "train.py").unlink()
    commit(project, "no train")
    (package / "provenance.py").write_text("import nothing_like_this\n")
    commit(project, "does not import")
    shutil.rmtree(package)
    commit(project, "no trainer")
    (project / "README").write_text("nothing else")
    git(project, "rm", "-rq", "repro", "pyproject.toml")
    commit(project, "nothing")
    for ref, message in {
        "HEAD~4": "its runs do not record their code as this suite reads it",
        "HEAD~3": "it has no unilab/train.py",
        "HEAD~2": "No module named 'nothing_like_this'",
        "HEAD~1": "it has no package unilab",
        "HEAD": "it has no package unilab",
    }.items():
        assert run_ab(ref, "HEAD~5") == 2
        short = git(project, "rev-parse", "--short=7", ref)
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"repro: {ref} ({short}) cannot be measured by this suite: ") and message in error
    assert not (tmp_path / "out").exists()


def test_a_dry_run_lists_both_sides_and_starts_nothing(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_ab("HEAD~1", "HEAD", "--dry-run", "--override", "algo.seed=3") == 0
    captured = capsys.readouterr()
    assert captured.err == "matrix base: asked for; case other\n"
    for side, ref in (("a", "HEAD~1"), ("b", "HEAD")):
        short = git(project, "rev-parse", "--short=7", ref)
        (line,) = (text for text in captured.out.splitlines() if f"runs/{side}_r1" in text)
        assert line.startswith(f"  PYTHONPATH=checkout_of_{short} ") and line.endswith(" algo.seed=3")
    assert not (tmp_path / "out").exists()


def test_a_run_of_other_code_than_its_sides_is_refused(finished: tuple[Path, tuple[str, ...]]) -> None:
    out, commits = finished
    facts = json.loads((out / "runs" / "b_r1" / "command.json").read_text())
    edit(out / "runs" / "a_r1" / "command.json", git=facts["git"])
    edit(out / "runs" / "a_r2" / "command.json", source_sha256=facts["source_sha256"])
    found = statuses(read_evidence(out))
    a, b = (text[:12] for text in commits)
    assert found["a_r1"] == (
        "refused",
        f"other_code: ran code {b} (without changes), but the plan was made for {a} (without changes)",
    )
    status, reason = found["a_r2"]
    assert status == "refused" and (reason or "").startswith("other_code: ran trainer sources ")
    assert {found[name][0] for name in ("a_r3", "b_r1", "b_r2", "b_r3")} == {"measured"}
    assert not verify([out], lambda line: None)


def test_versions_of_both_sides_must_be_equal(finished: tuple[Path, tuple[str, ...]]) -> None:
    out, _ = finished
    assert mixed_cases(read_evidence(out), "a", "b") is None
    versions = json.loads((out / "runs" / "a_r1" / "command.json").read_text())["versions"]
    for repeat in (1, 2, 3):
        edit(out / "runs" / f"b_r{repeat}" / "command.json", versions={**versions, "new": "1"})
    assert mixed_cases(read_evidence(out), "a", "b") is None  # a did not record it
    for repeat in (1, 2, 3):
        edit(out / "runs" / f"b_r{repeat}" / "command.json", versions={**versions, "torch": "1.0"})
    assert mixed_cases(read_evidence(out), "a", "b") == "versions.torch 2.13.0 and 1.0"


def test_other_work_of_a_side_is_said(finished: tuple[Path, tuple[str, ...]]) -> None:
    out, _ = finished
    assert side_notes(read_evidence(out)) == []
    for repeat in (1, 2, 3):
        path = out / "runs" / f"b_r{repeat}" / "config.json"
        config = json.loads(path.read_text())
        edit(path, algo={**config["algo"], "batch_size": 8})
    evidence = read_evidence(out)
    assert differing_settings(evidence) == ["algo.batch_size 64 and 8"]
    assert side_notes(evidence)[-1] == (
        "The commits do not do the same work: settings of a and b are algo.batch_size 64 and 8."
    )


def test_a_plan_names_the_code_of_each_of_its_cases_or_of_none(finished: tuple[Path, tuple[str, ...]]) -> None:
    out, _ = finished
    plan = json.loads((out / PLAN_FILE).read_text())
    del plan["sources"]["a"]
    (out / PLAN_FILE).write_text(canonical_json(plan))
    with pytest.raises(UsageError, match=r"plan\.json: sources names b, its cases are"):
        read_evidence(out)
    ordinary = json.loads(canonical_json(make_plan(toy_matrix(), *make_host(), SOURCE)))
    assert not {"sources", "remarks"} & ordinary.keys()


def test_a_gate_takes_no_comparison_of_commits(
    finished: tuple[Path, tuple[str, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = finished
    assert main(["gate", str(out), "--baseline", str(finished_session(tmp_path / "base"))]) == 2
    assert (
        "compares two commits or images and has its own verdict; give a report of repro run" in capsys.readouterr().err
    )


def test_what_a_reader_must_know_of_both_commits_is_in_report_and_output(
    project: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(text.replace("torch>=2", "torch>=3").replace("numpy >= 2", "numpy>=2"))
    commit(project, "dependencies")
    (tmp_path / "probed.toml").write_text(MATRIX.replace("warmup = 1", 'warmup = 0\nprobes = ["communication"]'))
    run_ab("HEAD~1", "HEAD", "--repeats", "1", matrix="probed.toml")
    output, page = capfd.readouterr().out, (tmp_path / "out" / "report.md").read_text()
    for remark in (
        "Both commits have the same trainer, so that a difference of their rates is the host's.",
        "The commits ask for different dependencies (torch); both ran with those installed here.",
        "No probe ran: the trainer of b has none.",
    ):
        assert f"{remark}\n" in output and f"- {remark}\n" in page
    assert output.splitlines()[-3] == "probes: none"


def test_probes_run_with_the_code_of_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_project(tmp_path / "project", SLOW, FAST, probes=True)
    use(tmp_path / "project", monkeypatch)
    (tmp_path / "probed.toml").write_text(MATRIX.replace("warmup = 1", 'warmup = 1\nprobes = ["communication"]'))
    assert run_ab("HEAD~1", "HEAD", "--repeats", "2", matrix="probed.toml") == 0
    output = capfd.readouterr().out
    assert (
        output.splitlines()[-3] == "probes: 1 of 1 passed"
        and "\nProbes ran with the code of b, the change.\n" in output
    )
    log = (tmp_path / "out" / "logs" / "probe_communication.log").read_text()
    assert f"probed by the trainer of rate {FAST}" in log
    assert verify([tmp_path / "out"], lambda line: None)


def test_the_case_of_most_ranks_is_compared() -> None:
    assert ab_module._widest(load_matrix("dual")).name == "n2"
    assert ab_module._widest(load_matrix("smoke")).name == "workers1"  # the first of equals
    assert ab_module._widest(load_matrix(str(EXAMPLE))).name == "here"  # its first runs no commit


def test_the_folder_of_the_code_is_not_published() -> None:
    text = 'File "/var/tmp/repro-ab-k3_x9z/a/unilab/train.py", line 1'
    assert Redactor().text(text) == 'File "<project>/unilab/train.py", line 1'


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_leaves_no_code_behind(project: Path, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    started = out / "runs" / "warmup1_a" / "progress.jsonl"
    code, output = interrupt(project, number, started, FAKE_MODE="hang")
    assert code == 130 and "Traceback" not in output
    assert output.splitlines()[-1] == "out/report.md"
    assert verify([out], lambda line: None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_before_the_first_run_leaves_no_code_behind(
    project: Path, tmp_path: Path, number: signal.Signals
) -> None:
    mark = tmp_path / "mark"
    with (project / "unilab" / "provenance.py").open("a") as file:
        file.write(f"\nimport time\nPath({str(mark)!r}).write_text('x')\ntime.sleep(60)\n")
    commit(project, "slow to import")
    code, output = interrupt(project, number, mark)
    assert (code, output.splitlines()[-1]) == (130, "repro: interrupted")
    assert not (tmp_path / "out").exists()


def test_an_interrupted_comparison_goes_on_with_the_same_commits_alone(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (tmp_path / "base.toml").write_text(MATRIX.replace("repeats = 3", "repeats = 1"))
    assert interrupt(project, signal.SIGINT, out / "runs" / "warmup2_b" / "progress.jsonl", FAKE_SECONDS="3")[0] == 130
    slow, fast = (git(project, "rev-parse", ref) for ref in ("HEAD~1", "HEAD"))
    write_trainer(project, 3 * FAST)
    commit(project, "faster still")
    assert run_ab("HEAD~1", "HEAD", "--resume") == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(
        f'repro: --resume out: sources.a.commit in its plan.json is "{slow}", here it is "{fast}"'
    )
    assert run_ab("HEAD~2", "HEAD~1", "--resume") == 0
    commits = {cell.cell.id: json.loads(cell.fingerprint["git.commit"]) for cell in read_evidence(out).cells}
    assert commits == {"warmup1_a": slow, "warmup2_b": fast, "a_r1": slow, "b_r1": fast}
    assert verify([out], print)


def test_a_comparison_goes_on_only_in_a_folder_that_is_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ab", "HEAD~1", "HEAD", "--matrix", "base.toml", "--resume"]) == 2
    assert "--resume needs --out DIR, the folder of the session to go on with" in capsys.readouterr().err


def interrupt(project: Path, number: signal.Signals, started: Path, **environment: str) -> tuple[int, str]:
    """Run the command in a process of its own, send the signal once `started` exists."""
    script = (
        "import sys; from pathlib import Path; import repro.ab; from repro.cli import main\n"
        "repro.ab.PROJECT = Path(sys.argv[1]); sys.exit(main(sys.argv[2:]))"
    )
    words = ["ab", "HEAD~1", "HEAD", "--matrix", "base.toml", "--out", "out"]
    with subprocess.Popen(
        [sys.executable, "-c", script, str(project), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=project.parent,
        env={**os.environ, **environment},
    ) as process:
        try:
            deadline = time.monotonic() + 60
            while not started.exists():
                assert process.poll() is None and time.monotonic() < deadline, "nothing was started"
                time.sleep(0.02)
            process.send_signal(number)
            output = process.communicate(timeout=60)[0]
        finally:
            process.kill()
    return process.returncode, output
