"""Cases of another trainer, from the matrix to a verified report."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import foreign_trainer
import pytest
from session_builder import SOURCE, make_host, matrix_text, run_session

from repro.clean import clean_folder
from repro.cli import main
from repro.dry_run import plan_lines
from repro.errors import UsageError
from repro.evidence import read_evidence
from repro.foreign import fill_command
from repro.layout import PLAN_FILE, RESULT_FILE
from repro.matrix import Matrix, load_matrix, parse_matrix
from repro.plan import Executor, Plan, check_plan, make_plan
from repro.redact import Redactor
from repro.result import Result
from repro.schema import canonical_json, read_model
from repro.verify import verify
from unilab.physics.pinning import LINUX, allowed_cpus

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "foreign.toml"
SCRIPT = str(Path(foreign_trainer.__file__))
COMMAND = [sys.executable, SCRIPT, "--out", "{run_dir}", "--iterations", "{iterations}", "--cpus", "{cpu_ids}"]
COMPARISON = '[[comparisons]]\nname = "speedup"\nnumerator = "ours"\ndenominator = "theirs"\n'

linux = pytest.mark.skipif(not LINUX, reason="masks of processes are a Linux feature")


def foreign_case(name: str = "theirs", *flags: str, **changes: Any) -> str:
    """TOML of a case of the other trainer; a key that is None is left out."""
    keys = {"command": [*COMMAND, *flags], "event_tag": foreign_trainer.TAG, "step_axis": 64, **changes}
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items() if value is not None]
    workers = "" if "workers" in keys else "workers = 1\n"
    return f'\n[[cases]]\nname = "{name}"\nreason = "Another trainer."\n{workers}' + "\n".join(lines) + "\n"


def text_of(*cases: str, own: bool = True, extra: str = "", repeats: int = 1) -> str:
    return matrix_text({"ours": {"FAKE_RATE": "9600"}} if own else {}, extra=extra, repeats=repeats) + "".join(cases)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both trainers in turn, twice."""
    text = text_of(foreign_case(affinity=LINUX), extra=COMPARISON, repeats=2)
    code, out = run_session(tmp_path_factory.mktemp("foreign"), text)
    assert code == 0
    return out


@pytest.fixture
def out(session: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(session, tmp_path / "out"))


def test_both_trainers_are_measured_in_turn_and_compared(session: Path) -> None:
    result = read_model(Result, session / RESULT_FILE)
    assert [cell.id for cell in result.cells] == ["ours_r1", "theirs_r1", "theirs_r2", "ours_r2"]
    theirs = [cell for cell in result.cells if cell.case == "theirs"]
    assert [cell.steps_per_second for cell in theirs] == pytest.approx([6400.0, 6400.0], rel=1e-6)
    (ratio,) = result.comparisons
    assert ratio.ratio == pytest.approx(1.5, rel=0.02) and ratio.n == 2


def test_what_is_not_known_is_missing_and_said_so(session: Path) -> None:
    cell = next(cell for cell in read_model(Result, session / RESULT_FILE).cells if cell.case == "theirs")
    missing = ("learner_rows_per_second", "tail_mean_total_fps", "physics_fraction", "exposed_ms", "startup_seconds")
    assert {getattr(cell, name) for name in (*missing, "learner_cycle_ms", "ceiling_share")} == {None}
    page = (session / "report.md").read_text()
    assert "theirs_r1: another trainer: what it does beyond this tag is not read" in page
    assert "theirs_r1: no run_end.json of this trainer: nothing says that the run is complete" in page
    assert "`theirs` lacks every tag: what needs them is missing too." in page


def test_its_report_verifies_and_a_changed_event_is_found(out: Path) -> None:
    lines: list[str] = []
    assert verify([out], lines.append), lines
    (event_file,) = (out / "runs" / "theirs_r2").glob("*tfevents*")
    content = bytearray(event_file.read_bytes())
    content[len(content) // 2] ^= 1
    event_file.write_bytes(bytes(content))
    assert main(["report", str(out)]) == 1
    cell = next(item for item in read_evidence(out).cells if item.cell.id == "theirs_r2")
    assert (cell.status, cell.throughput) == ("refused", None) and (cell.reason or "").startswith("damaged_record: ")


def test_nothing_of_it_that_is_published_names_this_machine(session: Path) -> None:
    run = session / "runs" / "theirs_r1"
    assert sorted(path.name for path in run.iterdir() if "tfevents" not in path.name) == [
        *("config.json", "facts.json", "model.bin", "run_end.json", "settings.yaml"),
    ]
    assert (run / "settings.yaml").read_text().splitlines()[0] == "out: ./runs/theirs_r1"
    entries = [json.loads(line) for line in (session / "journal.jsonl").read_text().splitlines()]
    changed = next(
        set(entry["redacted"]) for entry in entries if entry.get("cell") == "theirs_r1" and "redacted" in entry
    )
    assert {"latest", "settings.yaml"} <= changed


def test_names_of_files_and_folders_lose_the_hosts_name_and_links_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "walker01")
    folder = tmp_path / "run"
    (folder / "walker01_tb").mkdir(parents=True)
    (folder / "walker01_tb" / "events.out.tfevents.17.walker01.9.0").write_bytes(b"\0walker01")
    (folder / "notes.cfg").write_text("on walker01\n")
    (folder / "last").symlink_to(folder / "walker01_tb")
    changed = clean_folder(folder, Redactor(tmp_path))
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*")) == [
        *("host_tb", "host_tb/events.out.tfevents.17.host.9.0", "notes.cfg"),
    ]
    assert (folder / "notes.cfg").read_text() == "on <host>\n"
    assert len(changed) == 4 and not any("walker01" in name for name in changed)
    assert (folder / "host_tb" / "events.out.tfevents.17.host.9.0").read_bytes() == b"\0walker01"  # binary: as it was


def test_names_that_no_list_can_hold_are_changed_and_a_folder_elsewhere_is_no_run(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    odd = "import os, sys; os.symlink(sys.argv[2], sys.argv[1])"
    command = ["command", [sys.executable, "-c", odd, "{run_dir}", str(elsewhere)]]
    foreign_trainer.write_events(elsewhere, 40)
    code, out = run_session(
        tmp_path, text_of(foreign_case(**dict([command]), event_tag=foreign_trainer.TAG), own=False)
    )
    assert code == 4
    assert "missing_run_dir" in (out / RESULT_FILE).read_text() and verify([out], lambda line: None)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "a\nb\\c\udcff.bin").write_bytes(b"\0")
    clean_folder(folder, Redactor(tmp_path))
    assert [path.name for path in folder.iterdir()] == ["a_b_c_.bin"]


@linux
def test_it_runs_where_the_case_says_and_imports_nothing_of_this_project(session: Path) -> None:
    facts = json.loads((session / "runs" / "theirs_r1" / "facts.json").read_text())
    first = allowed_cpus()[0]
    assert facts == {"cpus": str(first), "mask": [first], "path": None}
    plan = read_evidence(session).plan
    commands = "\n".join(plan_lines(plan))
    assert f"taskset -c {first} " in commands and "--out runs/theirs_r1 --iterations 40 --cpus" in commands


def test_a_file_of_the_command_is_found_from_where_the_suite_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(SCRIPT, tmp_path / "train.py")
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "train.py", *COMMAND[2:]]
    code, out = run_session(tmp_path / "session", text_of(foreign_case(command=command), own=False))
    assert code == 0 and "train.py" in read_evidence(out).plan.cells[0].arguments


@pytest.mark.parametrize(
    ("flags", "changes", "reason"),
    [
        (("--mode", "none"), {}, "no_event_file: theirs_r1 has no *tfevents* file; was the logger on?"),
        (("--mode", "several"), {}, "several_runs: theirs_r1 holds 2 event files: eval/events.out."),
        ((), {"events": "tb"}, "no_event_file: theirs_r1 has no folder tb, which its case names as events"),
        ((), {"event_tag": "rollout/fsp"}, " has no scalar rollout/fsp; nearest are rollout/fps"),
    ],
)
def test_a_run_without_its_events_is_refused(
    flags: tuple[str, ...], changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    code, out = run_session(tmp_path, text_of(foreign_case("theirs", *flags, **changes), own=False))
    assert code == 4
    (cell,) = read_model(Result, out / RESULT_FILE).cells
    assert cell.status == "refused" and reason in (cell.reason or "")
    assert verify([out], lambda line: None)


@pytest.mark.parametrize(("mode", "events"), [("sub", None), ("several", "tb")])
def test_events_in_a_folder_are_found_where_they_are_the_only_ones_or_named(
    mode: str, events: str | None, tmp_path: Path
) -> None:
    code, out = run_session(tmp_path, text_of(foreign_case("theirs", "--mode", mode, events=events), own=False))
    assert code == 0 and read_model(Result, out / RESULT_FILE).cells[0].steps_per_second == pytest.approx(6400.0)


def test_exit_codes_of_another_trainer_do_not_speak_of_the_host(tmp_path: Path) -> None:
    code, out = run_session(tmp_path, text_of(foreign_case("theirs", "--mode", "exit3"), own=False))
    assert code == 4 and read_model(Result, out / RESULT_FILE).cells[0].status == "failed"


def test_what_was_typed_into_a_command_is_redacted(tmp_path: Path) -> None:
    command = [*COMMAND, f"--cpus={Path.home() / 'some' / 'where'}"]
    _, out = run_session(tmp_path, text_of(foreign_case(command=command), own=False))
    assert str(Path.home() / "some") not in (out / PLAN_FILE).read_text() + (out / "report.md").read_text()
    assert verify([out], lambda line: None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"command": ["a", "{run_dri}"]}, "command has unknown placeholder {run_dri}; did you mean 'run_dir'?"),
        ({"command": ["a"]}, "command has no {run_dir}"),
        ({"command": ["a\n", "{run_dir}"]}, "holds a control character or a line end"),
        ({"command": ["a", "{run_dir}", "{gpus}"]}, "command has {gpus}, but the case names none"),
        ({"command": None}, "event_tag is about another trainer; give its command too"),
        ({"event_tag": None}, "command without event_tag"),
        ({"step_axis": None}, "command without step_axis"),
        ({"step_axis": 0}, "step_axis"),
        ({"step_axis": "iterations"}, "step_axis"),
        ({"events": "/tmp"}, "events '/tmp' is no folder below the run directory"),
        ({"events": "a/../.."}, "is no folder below the run directory"),
        ({"overrides": ["a.b=1"]}, "overrides are this trainer's settings"),
        ({"workers": "auto"}, "{cpu_ids} needs CPUs that the suite names"),
        ({"workers": "auto", "affinity": True, "command": ["a", "{run_dir}"]}, "affinity needs CPUs"),
        ({"comand": ["a"]}, "unknown key 'cases.1.comand'; did you mean 'command'?"),
    ],
)
def test_a_wrong_case_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_matrix(text_of(foreign_case(**changes)), "toy.toml")
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("extra", "own", "message"),
    [
        ("learning = true\n", True, "case 'theirs' is of another trainer, which has no learning report"),
        ("ceiling = true\n", False, "which has no physics ceiling"),
        ('probes = ["correctness"]\n', False, "which has no probes"),
        ("ceiling = true\n" + COMPARISON + 'metric = "ceiling_share"\n', True, "which has no ceiling_share"),
        (COMPARISON + 'metric = "learner_rows_per_second"\n', True, "which has no learner_rows_per_second"),
    ],
)
def test_what_another_trainer_does_not_have_is_not_asked_of_it(extra: str, own: bool, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_matrix(text_of(foreign_case(), own=own, extra=extra), "toy.toml")


@pytest.mark.parametrize(
    ("pools", "expected"), [([[0, 1]], "x=[0,1]"), ([[0, 1], [2, 3]], "x=[[0,1],[2,3]]"), ([], "x=[]")]
)
def test_brackets_around_cpus_make_one_list_or_one_of_each_rank(pools: list[list[int]], expected: str) -> None:
    words = fill_command(["x=[{cpu_ids}]", "${home}/{iterations}", "{run_dir}:{gpus}"], "runs/a", pools, ["A", "B"], 7)
    assert words == (expected, "${home}/7", "runs/a:A,B")


def example_plan(gpus: int = 1) -> Plan:
    host, topology = make_host(16, gpus)
    return make_plan(load_matrix(str(EXAMPLE)), host, topology, SOURCE)


def test_the_example_can_be_planned_and_shown() -> None:
    plan = example_plan()
    check_plan(plan)
    lines = plan_lines(plan)
    cpus = ",".join(map(str, range(15)))
    assert any(
        line.endswith(
            "original/start --algo sac --task g1_walk_flat --sim mujoco training.no_play=true "
            f"training.log_dir=runs/release_r1 algo.max_iterations=300 '+env.cpu_ids=[{cpus}]'"
        )
        for line in lines
    )
    assert {cell.foreign for cell in plan.cells if cell.case == "here"} == {False}
    assert {cell.skip_reason for cell in example_plan(0).cells} == {
        "asks for GPU position 0, but the driver lists no GPU"
    }


def test_another_trainer_is_not_in_the_image_of_containers() -> None:
    host, topology = make_host(16, 1)
    executor = Executor(kind="docker", image="suite", image_id="sha256:1")
    plan = make_plan(load_matrix(str(EXAMPLE)), host, topology, SOURCE, executor=executor)
    assert {cell.case for cell in plan.runnable} == {"here"}
    assert {cell.skip_reason for cell in plan.cells if cell.foreign} == {
        "is of another trainer, which the image does not hold; run it with --executor local"
    }


def test_a_command_that_the_matrix_does_not_give_is_refused() -> None:
    plan = example_plan()
    cells = list(plan.cells)
    at = next(i for i, cell in enumerate(cells) if cell.foreign)
    cells[at] = cells[at].model_copy(update={"arguments": ("original/bin/other",)})
    with pytest.raises(UsageError, match="arguments of cell"):
        check_plan(plan.model_copy(update={"cells": tuple(cells)}))
    assert canonical_json(Matrix.model_validate_json(canonical_json(plan.matrix))) == canonical_json(plan.matrix)
