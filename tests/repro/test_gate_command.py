"""`repro gate` as a command: real sessions of the fake trainer, wrong input, JUnit, GitHub, the guide's workflow."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from session_builder import finished_session, make_host, matrix_text, run_session

from repro.arguments import build_parser
from repro.ceiling import Ceiling, CeilingRecord
from repro.cli import main
from repro.figures import installed_version
from repro.gate import Finding
from repro.github import annotation_lines
from repro.junit import junit_xml
from repro.launch import Ended, Runner
from repro.layout import CEILING_FILE, RESULT_FILE
from repro.manifest import write_manifest
from repro.plan import Cell
from repro.report import write_report
from repro.schema import canonical_json
from unilab.physics.spec import row_groups

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "ci.md"
NUM_ENVS = 16  # of the fake trainer
KNOWN = {"torch": "2.13.0", "matplotlib": installed_version()}  # which draws the figures again


def write_ceiling(
    cell: Cell, ended: Ended, environment: Mapping[str, str], out_dir: Path, grace: float, run: Runner
) -> bool:
    """Stands for the measurement: 11,000 env steps/s with half a percent of noise, drawn from the cell's name."""
    rate = 11_000.0 * math.exp(0.005 * random.Random(f"ceiling {cell.id}").gauss())
    found = Ceiling(
        schema_version=1,
        env_steps_per_second=rate,
        step_seconds=((NUM_ENVS / rate,),),
        c_loop=None,
        c_loop_reason=None,
        iterations=(20,),
        num_envs=NUM_ENVS,
        groups=len(row_groups(NUM_ENVS, 2)),
        decimation=3,
        timestep=1 / 150,
        profile="exact",
        workers=1,
        cpu_ids=cell.cpu_ids,
        mujoco="4.0.0",
        cpu_model="Made-up CPU",
        seconds=1.0,
    )
    if not cell.warmup:
        (out_dir / cell.run / CEILING_FILE).write_text(canonical_json(CeilingRecord(ceiling=found)))
    return False


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three sessions through the command line, not smoke: a baseline, an equal one, one of a trainer 10 % slower."""
    text = matrix_text({"n1": {}}, repeats=3, extra="ceiling = true\n").replace("smoke = true", "smoke = false")
    text = text.replace("workers = 1\n", "workers = 1\ngpus = [0]\n")
    found: dict[str, Path] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("repro.cli.find_host", lambda: make_host(gpu_count=1, versions=KNOWN))
        patch.setattr("repro.session.record_ceiling", write_ceiling)
        for name, rate in (("base", "10000"), ("equal", "10000"), ("slower", "9000")):
            patch.setenv("FAKE_RATE", rate)
            # Another prefix draws other noise.
            code, found[name] = run_session(tmp_path_factory.mktemp(name), text, "--prefix", name)
            assert code == 0
    return found


@pytest.fixture(autouse=True)
def _no_github(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)


def states(path: Path) -> dict[str, str]:
    """Name and outcome of every test case."""
    root = ElementTree.parse(path).getroot()
    return {
        str(case.get("name")): next((child.tag for child in case if child.tag != "system-out"), "passed")
        for case in root.iter("testcase")
    }


def test_a_trainer_that_is_slower_by_ten_percent_fails(
    sessions: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    junit = tmp_path / "gate.xml"
    assert main(["gate", str(sessions["slower"]), "--baseline", str(sessions["base"]), "--junit", str(junit)]) == 1
    lines = capsys.readouterr().out.splitlines()
    (share,) = [line for line in lines if line.startswith("n1: share of the physics ceiling  ")]
    assert re.search(r"  -1\d\.\d % \[-1\d\.\d, -\d\.\d\]  3, 3  regression$", share)
    assert lines[-1] == (
        "gate FAILED: probes: the matrix names none; speed: regression, the worst of 2 numbers (limit 5.0 %)"
    )
    assert states(junit) == {
        "probes": "skipped",
        "n1: share of the physics ceiling": "failure",
        "n1: env steps/s": "failure",
        "n1: physics ceiling, env steps/s": "skipped",
    }


def test_an_equal_trainer_passes(sessions: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    junit = tmp_path / "gate.xml"
    assert main(["gate", str(sessions["equal"]), "--baseline", str(sessions["base"]), "--junit", str(junit)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("gate passed: probes: the matrix names none; speed: no regression, the worst of 2 numbers")
    assert "failure" not in states(junit).values()


def test_the_same_reports_give_the_same_junit_without_names_of_places(
    sessions: dict[str, Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(sessions["slower"], tmp_path / "elsewhere"))
    contents = []
    for number, folder in enumerate((sessions["slower"], copy)):
        junit = tmp_path / f"{number}.xml"
        assert main(["gate", str(folder), "--baseline", str(sessions["base"]), "--junit", str(junit)]) == 1
        contents.append(junit.read_bytes())
    assert contents[0] == contents[1]
    assert str(tmp_path).encode() not in contents[0] and b"time" not in contents[0]


def test_github_gets_annotations_and_a_summary(
    sessions: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert main(["gate", str(sessions["slower"]), "--baseline", str(sessions["base"])]) == 1
    lines = capsys.readouterr().out.splitlines()
    errors = [line for line in lines if line.startswith("::")]
    assert len(errors) == 2
    assert errors[0].startswith(
        "::error title=repro gate%3A speed::n1: share of the physics ceiling: lower by more than 5.0 %25: -"
    )
    assert lines[-1].startswith("gate FAILED: ")
    text = summary.read_text()
    assert text.startswith("before\n### gate FAILED: ") and "\n| what " in text and "| regression" in text


def test_annotations_are_escaped_and_only_for_what_needs_a_look() -> None:
    found = annotation_lines(
        {
            "speed": [
                Finding("a", "undecided", "100 %\r\n::error::b"),
                Finding("c", "passed", ""),
                Finding("d", "not_judged", ""),
            ]
        }
    )
    assert found == ["::warning title=repro gate%3A speed::a: 100 %25%0D%0A::error::b"]


def test_junit_counts_and_stays_well_formed() -> None:
    findings = [
        Finding('<a & "b">', "failed", "x < y\x00\x1b[31m \ud800"),
        Finding("b", "undecided", "why"),
        Finding("c", "not_judged", "why"),
        Finding("d", "passed", "fine"),
    ]
    root = ElementTree.fromstring(junit_xml({"probes": [], "speed": findings}))
    suites = {str(suite.get("name")): suite for suite in root}
    counts = [suites["speed"].get(key) for key in ("tests", "failures", "errors", "skipped")]
    assert counts == ["4", "1", "0", "2"] and suites["probes"].get("tests") == "0"
    case = suites["speed"][0]
    assert case.get("name") == '<a & "b">'
    assert (
        case[0].get("message")
        == "x < y\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}[31m \N{REPLACEMENT CHARACTER}"
    )


def run_workers(folder: Path, workers: str, monkeypatch: pytest.MonkeyPatch, first: int = 0, more: str = "") -> Path:
    """A session of case n1 on two GPUs and the eight CPUs from `first` on, not smoke; `more` cases follow."""
    case = f'name = "n1"\nreason = "One."\ngpus = [0]\nworkers = "{workers}"\n'
    text = matrix_text({}).replace("smoke = true", "smoke = false") + f"[[cases]]\n{case}{more}"
    host, topology = make_host(cpus=8, gpu_count=2, versions=KNOWN)
    cpus = tuple(replace(cpu, cpu=first + cpu.cpu) for cpu in topology)
    monkeypatch.setattr("repro.cli.find_host", lambda: (host, cpus))
    code, out = run_session(folder, text, "--prefix", folder.name)
    assert code == 0
    return out


def refusal(current: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["gate", str(current), "--baseline", str(base)]) == 2
    return capsys.readouterr().err.removeprefix("repro: ").replace(f"{current}", "current").replace(f"{base}", "base")


FEWER = (
    "not comparable: number of workers per rank of n1 is 7 in the baseline base, 3 in current; "
    "run the baseline's settings, or take a new baseline\n"
)


def test_a_policy_that_came_to_fewer_workers_is_other_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = run_workers(tmp_path / "alone", "default", monkeypatch)
    moved = run_workers(tmp_path / "moved", "default", monkeypatch, first=8)
    n2 = '[[cases]]\nname = "n2"\nreason = "Leaves n1 half of the CPUs."\ngpus = [0, 1]\n'
    wide = run_workers(tmp_path / "wide", "default", monkeypatch, more=n2)
    assert refusal(wide, alone, capsys) == FEWER
    assert "not comparable" not in refusal(moved, alone, capsys)  # as many, on other CPUs


def test_where_the_trainer_chose_its_workers_the_manifest_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = {count: run_workers(tmp_path / f"chose{count}", "auto", monkeypatch) for count in (7, 3)}
    for count, out in sides.items():
        (path,) = out.glob("runs/*/manifest.json")
        manifest = json.loads(path.read_text())
        path.write_text(json.dumps(manifest | {"physics": manifest["physics"] | {"workers": count}}))
        write_report(out)
    assert refusal(sides[3], sides[7], capsys) == FEWER


# ---- wrong input


@pytest.fixture
def smoke(tmp_path: Path) -> Path:
    return finished_session(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--baseline", "{base}"], "nowhere is not a folder"),
        (["{base}", "--baseline", "nowhere"], "nowhere is not a folder"),
        (["{tmp}", "--baseline", "{base}"], "is no report's folder: it has no MANIFEST.sha256"),
        (["{base}", "--baseline", "{base}"], "CURRENT and --baseline are the same folder"),
        (["{base}/../out", "--baseline", "{base}"], "CURRENT and --baseline are the same folder"),
        (["{equal}", "--baseline", "{base}", "--max-drop", "0"], "--max-drop 0: must be above 0 and below 1"),
        (["{equal}", "--baseline", "{base}", "--max-drop", "1"], "--max-drop 1: must be above 0 and below 1"),
        (["{equal}", "--baseline", "{base}", "--max-drop", "nan"], "--max-drop nan: must be above 0 and below 1"),
        (["{equal}", "--baseline", "{base}", "--junit", "{tmp}/no/x.xml"], "cannot be written: No such file or dir"),
        (["{equal}", "--baseline", "{base}", "--junit", "{tmp}"], "exists; older results are never replaced"),
        (["{equal}", "--baseline", "{base}", "--junit", "{base}/x.xml"], "lies in a report, whose files are fixed"),
        (
            ["{smoke}", "--baseline", "{base}", "--junit", "{tmp}/x.xml"],
            "is a smoke report, which is never a benchmark",
        ),
        (["{equal}", "--baseline", "{smoke}"], "is a smoke report, which is never a benchmark"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    sessions: dict[str, Path],
    smoke: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [word.format(tmp=tmp_path, smoke=smoke, **sessions) for word in arguments]
    before = sorted(tmp_path.rglob("*"))
    assert main(["gate", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_arguments_are_checked_before_the_reports_are_read(
    sessions: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(folder: Path) -> None:
        raise AssertionError("read")

    monkeypatch.setattr("repro.gate_command.read_side", read)
    command = ["gate", str(sessions["equal"]), "--baseline", str(sessions["base"])]
    assert main([*command, "--junit", str(tmp_path / "no" / "x.xml")]) == 2
    assert main([*command, "--max-drop", "7"]) == 2


def change_result(out: Path) -> None:
    result = json.loads((out / RESULT_FILE).read_text())
    for cell in result["cells"]:
        cell["ceiling_share"] = 0.99
    (out / RESULT_FILE).write_text(canonical_json(result))


def test_a_report_that_was_edited_is_refused_with_its_reason(
    sessions: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(shutil.copytree(sessions["slower"], tmp_path / "out"))
    change_result(out)
    assert main(["gate", str(out), "--baseline", str(sessions["base"])]) == 2
    assert f"{out} does not verify: {RESULT_FILE}: the file or its line" in capsys.readouterr().err
    write_manifest(out)
    assert main(["gate", str(out), "--baseline", str(sessions["base"])]) == 2
    error = capsys.readouterr().err
    assert f"{out} does not verify: {RESULT_FILE}: differs from what its raw files give" in error
    assert error.endswith(f"see repro verify {out}\n") and error.count("\n") == 1


def test_a_copy_of_the_baseline_is_no_other_report(
    sessions: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(sessions["base"], tmp_path / "copy")
    assert main(["gate", str(copy), "--baseline", str(sessions["base"])]) == 2
    assert "hold the same runs; give the report of other runs" in capsys.readouterr().err


# ---- the guide


def workflow() -> dict[str, Any]:
    (text,) = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def steps() -> Iterator[dict[str, Any]]:
    return itertools.chain.from_iterable(job["steps"] for job in workflow()["jobs"].values())


def test_the_workflow_asks_for_little_and_ends() -> None:
    found = workflow()
    assert found["permissions"] == {"contents": "read"}
    assert found["concurrency"] == {"group": "speed", "cancel-in-progress": False}
    assert all(0 < job["timeout-minutes"] <= 120 for job in found["jobs"].values())
    assert "pull_request" not in json.dumps(list(found[True]))  # YAML reads the key `on` so
    used = [step["uses"] for step in steps() if "uses" in step]
    assert len(used) == 2 and all(re.fullmatch(r"actions/[\w-]+@v\d+", name) for name in used)


def test_the_commands_of_the_guide_are_accepted() -> None:
    commands = [step["run"] for step in steps() if "repro" in step.get("run", "")]
    commands += re.findall(r"(?:^|`)(repro (?:gate|run) [^`\n]*--[^`\n]*)", GUIDE.read_text("utf-8"), re.MULTILINE)
    words = [shlex.split(command)[1:] for command in commands]
    assert len(words) >= 5
    parsed = [build_parser().parse_args(line).command for line in words if line[1:] and "CURRENT" not in line]
    assert {"run", "gate"} == set(parsed)


def test_the_guide_has_every_exit_code() -> None:
    table = GUIDE.read_text(encoding="utf-8").partition("## Exit codes")[2].partition("## ")[0]
    assert re.findall(r"^\| (\d) \|", table, re.MULTILINE) == ["0", "1", "2", "4"]
