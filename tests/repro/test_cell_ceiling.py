"""The same-run physics ceiling: measured after each measured cell, checked by every report, never a guess."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_trainer
import pytest
from session_builder import SOURCE, finished_session, make_host, matrix_text, run_session, toy_matrix

from repro import ceiling as ceiling_module
from repro import launch
from repro.ceiling import Ceiling
from repro.cli import main
from repro.errors import UsageError
from repro.evidence import read_evidence
from repro.layout import CEILING_FILE, RESULT_FILE
from repro.manifest import write_manifest
from repro.matrix import check_overrides, load_matrix
from repro.plan import CEILING_ESTIMATE_SECONDS, make_plan
from repro.result import Result, compute_result
from repro.schema import canonical_json, parse_model, read_model
from repro.verify import verify
from unilab.names import STATES_FILE

NOT_OF_THE_RUN = "the ceiling's iterations do not ascend within those of the run, 1 to 40"
ONE_OF_TWO = "ceiling.json: it must hold a measurement or a reason, and not both"
CASES = {
    "good": {"FAKE_RATE": "1000"},
    "none": {"FAKE_STATES": "none"},
    "damaged": {"FAKE_STATES": "damaged"},
    "crash": {"FAKE_MODE": "crash"},
}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One session of the cases above with a warm-up; ceilings are measured for a fraction of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceiling_module, "SECONDS", 0.2)
        text = matrix_text(CASES, warmup=1, extra="ceiling = true\n")
        code, out = run_session(tmp_path_factory.mktemp("ceiling"), text)
    assert code == 4  # one case crashes, as asked
    return out


@pytest.fixture
def out(session: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(session, tmp_path / "out"))


def record_of(out: Path, cell: str = "good_r1") -> dict[str, Any]:
    return dict(json.loads((out / "runs" / cell / CEILING_FILE).read_text()))


def edit(out: Path, change: Callable[[dict[str, Any]], object]) -> None:
    record = record_of(out)
    change(record["ceiling"])
    (out / "runs" / "good_r1" / CEILING_FILE).write_text(canonical_json(record))


def test_a_share_is_steps_per_second_over_what_the_times_say(session: Path) -> None:
    found = record_of(session)["ceiling"]
    times = found["step_seconds"]
    assert len(times) == len(found["iterations"]) == 8
    assert found["num_envs"] == 16 and found["cpu_ids"] == [0] and found["profile"] == "exact"
    rate = 16 * sum(map(len, times)) / sum(map(sum, times))
    cells = {cell.case: cell for cell in read_model(Result, session / RESULT_FILE).cells if not cell.id.startswith("w")}
    good = cells["good"]
    assert good.steps_per_second is not None
    assert good.ceiling_share == pytest.approx(good.steps_per_second / rate, rel=1e-9)
    assert [cells[case].ceiling_share for case in ("none", "damaged", "crash")] == [None] * 3
    assert [cells[case].status for case in CASES] == ["measured", "measured", "measured", "failed"]


def test_the_states_never_land_in_a_report(session: Path) -> None:
    assert not list(session.rglob(f"*{STATES_FILE}*"))
    kept = sorted(path.parent.name for path in session.rglob(CEILING_FILE))
    assert kept == ["damaged_r1", "good_r1", "none_r1"]  # neither the warm-up nor a failed run
    listed = (session / "MANIFEST.sha256").read_text()
    assert f"runs/good_r1/{CEILING_FILE}" in listed and STATES_FILE not in listed
    for cell in ("good_r1", "warmup1_good"):
        command = json.loads((session / "runs" / cell / "command.json").read_text())
        assert "training.record_states=8" in command["argv"]


def test_the_page_shows_the_share_and_says_why_one_is_missing(session: Path) -> None:
    page = (session / "report.md").read_text()
    share = read_model(Result, session / RESULT_FILE).cells[1].ceiling_share
    assert share is not None
    (row,) = [line for line in page.splitlines() if line.startswith("| good  ") and "ceiling" not in line][:1]
    assert row.split("|")[-2].strip() == f"{100 * share:.1f} %"
    assert "none_r1: no share of the physics ceiling: the run left no physics_states.npz" in page
    assert "damaged_r1: no share of the physics ceiling: exit code 2: ceiling: runs/damaged_r1/physics_states" in page
    assert "*Ceiling share* is" in page and "- No correctness probe ran." in page


def test_verification_computes_shares_again(out: Path) -> None:
    lines: list[str] = []
    assert verify([out], lines.append), lines
    edit(out, lambda found: found["step_seconds"][0].__setitem__(0, 1.0))
    write_manifest(out)
    assert not verify([out], lines.append)
    assert f"{RESULT_FILE}: differs from what its raw files give" in " ".join(lines)


def slower(found: dict[str, Any]) -> None:
    """All times doubled and the rate with them: a consistent lie that only the hash list can show."""
    found["step_seconds"] = [[2 * second for second in times] for times in found["step_seconds"]]
    found["env_steps_per_second"] /= 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c.update(num_envs=15), "ceiling: env_steps_per_second is "),
        (lambda c: c.update(env_steps_per_second=1.0), "ceiling: env_steps_per_second is 1.0, its times give "),
        (lambda c: c.update(step_seconds=c["step_seconds"][1:]), "ceiling: 7 lists of times for 8 snapshots"),
        (lambda c: c["step_seconds"][0].__setitem__(0, -1.0), "ceiling.step_seconds.0.0: "),
        (lambda c: c.update(profile="fast"), "env.physics_profile of the run: exact, of the ceiling: fast"),
        (lambda c: c.update(mujoco="3.9.0"), "mujoco of the run: 4.0.0, of the ceiling: 3.9.0"),
        (lambda c: c.update(cpu_ids=[0, 1]), "CPUs of the run: 0, of the ceiling: 0,1"),
        (lambda c: c.pop("workers"), "key 'ceiling.workers' is missing"),
        (lambda c: c.update(groups=2), "physics.groups of the run: 1, of the ceiling: 2"),
        (lambda c: c.update(decimation=1), "physics.decimation of the run: 3, of the ceiling: 1"),
        (lambda c: c.update(timestep=0.02), "physics.timestep of the run: 0.006666666666666667, of the ceiling: 0.02"),
        (lambda c: c.update(workers=2), "physics.workers of the run: 1, of the ceiling: 2"),
        (lambda c: c.update(iterations=[0, *range(2, 9)]), NOT_OF_THE_RUN),
        (lambda c: c.update(iterations=[*range(1, 8), 41]), NOT_OF_THE_RUN),
        (lambda c: c.update(iterations=[2, 1, *range(3, 9)]), NOT_OF_THE_RUN),
        (lambda c: c.update(iterations=[1] * 8), NOT_OF_THE_RUN),
        (lambda c: c.update(env_steps_per_second=0), "ceiling.env_steps_per_second: input should be greater than 0"),
        (lambda c: c.update(step_seconds=[[1e308]] * 8), "ceiling.step_seconds.0.0: input should be less than 1000000"),
        (lambda c: c.update(step_seconds=[[5e-324]] * 8), "ceiling: env_steps_per_second is "),
        (lambda c: c.update(num_envs=10**400), "ceiling.num_envs: input should be less than or equal to 2147483648"),
        (lambda c: c.update(iterations=[*range(1, 8), 10**400]), NOT_OF_THE_RUN),
        (lambda c: c.update(timestep=10**400), "ceiling.timestep: "),
        (lambda c: c.update(seconds=-5), "ceiling.seconds: input should be greater than 0"),
        (lambda c: c.update(seconds=1e6), "ceiling.seconds: input should be less than 1000000"),
    ],
)
def test_a_ceiling_of_other_work_gives_no_share(
    change: Callable[[dict[str, Any]], object], reason: str, out: Path
) -> None:
    edit(out, change)
    cell = next(item for item in read_evidence(out).cells if item.cell.id == "good_r1")
    assert (cell.status, cell.ceiling) == ("measured", None)
    assert cell.ceiling_reason is not None and reason in cell.ceiling_reason


def test_a_missing_record_is_a_reason_too_and_a_halved_ceiling_doubles_the_share(out: Path) -> None:
    before = next(cell for cell in compute_result(read_evidence(out)).cells if cell.id == "good_r1").ceiling_share
    edit(out, slower)
    after = next(cell for cell in compute_result(read_evidence(out)).cells if cell.id == "good_r1").ceiling_share
    assert before is not None and after == pytest.approx(2 * before, rel=1e-8)
    (out / "runs" / "good_r1" / CEILING_FILE).unlink()
    cell = next(item for item in read_evidence(out).cells if item.cell.id == "good_r1")
    assert cell.ceiling is None and cell.ceiling_reason == "ceiling.json is missing in runs/good_r1"


def test_a_matrix_without_ceilings_asks_for_none(tmp_path: Path) -> None:
    out = finished_session(tmp_path)
    assert not list(out.rglob(CEILING_FILE))
    assert all(item.ceiling_reason is None for item in read_evidence(out).cells)
    page = (out / "report.md").read_text()
    assert "eiling share" not in page and "The physics ceiling of the host was not measured" in page


def test_several_pools_that_cannot_be_pinned_have_no_ceiling(tmp_path: Path) -> None:
    host, topology = make_host(gpu_count=2)
    plan = make_plan(load_matrix("dual"), host, topology, SOURCE)
    cell = next(cell for cell in plan.cells if cell.id == "n2_r1")
    (tmp_path / cell.run).mkdir(parents=True)
    (tmp_path / cell.run / STATES_FILE).touch()
    unpinned = cell.model_copy(update={"arguments": ()})
    ended, record = ceiling_module._measure(unpinned, {}, tmp_path, 1.0)
    assert ended is None and record.reason == "several pools are measured only where threads can be pinned"


def test_the_plan_records_states_and_counts_the_time() -> None:
    plain, asked = (make_plan(toy_matrix(ceiling=on), *make_host(), SOURCE) for on in (False, True))
    measured = sum(not cell.warmup for cell in asked.cells)
    assert asked.estimated_seconds - plain.estimated_seconds == pytest.approx(CEILING_ESTIMATE_SECONDS[True] * measured)
    assert all("training.record_states=8" in cell.arguments for cell in asked.cells)
    assert not any("training.record_states=8" in cell.arguments for cell in plain.cells)
    hashes = [{cell.content_sha256 for cell in plan.cells} for plan in (plain, asked)]
    assert hashes[0].isdisjoint(hashes[1])
    with pytest.raises(UsageError, match=r"training.record_states is set by the suite; use ceiling = true"):
        check_overrides(("training.record_states=3",))


def test_the_shipped_matrices_measure_their_ceiling() -> None:
    assert all(load_matrix(name).ceiling for name in ("dual", "single", "smoke", "learning"))


def test_an_interrupt_during_the_ceiling_ends_the_session_and_keeps_the_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = launch.run_cell

    def interrupted(command: list[str], *arguments: Any) -> Any:
        ended = real(command, *arguments)
        if "unilab.physics.ceiling" not in command:
            return ended
        return type(ended)("interrupted", None, ended.seconds, "by the user; its process group ended on SIGTERM")

    monkeypatch.setattr(ceiling_module, "SECONDS", 0.1)
    monkeypatch.setattr(launch, "run_cell", interrupted)
    code, out = run_session(tmp_path, matrix_text({"a": {}, "b": {}}, extra="ceiling = true\n"))
    assert code == 130
    result = read_model(Result, out / RESULT_FILE)
    assert [(cell.id, cell.status) for cell in result.cells] == [("a_r1", "measured"), ("b_r1", "not_run")]
    assert record_of(out, "a_r1")["reason"].startswith("by the user")
    assert not list(out.rglob(STATES_FILE)) and verify([out], lambda line: None)


def test_output_that_is_no_measurement_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = "import sys; open(sys.argv[sys.argv.index('--output') + 1], 'w').write('{}')"
    monkeypatch.setattr(ceiling_module, "PROGRAM", (ceiling_module.PROGRAM[0], "-c", writes))
    ended, found = ceiling_module.run_ceiling(Path("x"), None, {}, tmp_path, 1.0)
    assert found is None and ended.reason is not None
    assert ended.reason.startswith("the ceiling program's output: key ")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ceiling": None}, ONE_OF_TWO),
        ({"reason": "it failed"}, ONE_OF_TWO),
        ({"ceiling": None, "reason": ""}, "ceiling.json: reason: string should have at least 1 character, found ''"),
    ],
)
def test_a_record_is_a_measurement_or_a_reason(change: dict[str, Any], reason: str, out: Path) -> None:
    (out / "runs" / "good_r1" / CEILING_FILE).write_text(canonical_json(record_of(out) | change))
    cell = next(item for item in read_evidence(out).cells if item.cell.id == "good_r1")
    assert (cell.status, cell.ceiling, cell.ceiling_reason) == ("measured", None, reason)


def test_an_older_run_does_not_name_its_groups(out: Path) -> None:
    path = out / "runs" / "good_r1" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["physics"]["groups"]
    path.write_text(canonical_json(manifest))
    edit(out, lambda found: found.update(groups=2))
    cell = next(item for item in read_evidence(out).cells if item.cell.id == "good_r1")
    assert cell.ceiling is not None and cell.ceiling_reason is None


def test_the_page_says_not_measured_only_where_no_cell_has_a_record(out: Path) -> None:
    missing = "The physics ceiling of the host was not measured"
    edit(out, lambda found: found.update(profile="fast"))
    for path in list(out.rglob(CEILING_FILE)):
        write_manifest(out)
        assert main(["report", str(out)]) == 0
        page = (out / "report.md").read_text()
        assert missing not in page and "- No correctness probe ran." in page
        path.unlink()
    write_manifest(out)
    assert main(["report", str(out)]) == 0
    assert f"- {missing} and no correctness probe ran." in (out / "report.md").read_text()


def test_the_record_is_the_programs_output_and_nothing_else(session: Path) -> None:
    found = record_of(session)
    assert sorted(found) == ["ceiling", "reason", "schema_version"] and found["reason"] is None
    parse_model(Ceiling, json.dumps(found["ceiling"]), "test")


def test_closing_lines_name_the_share_of_every_case(session: Path) -> None:
    from repro.headline import closing_lines

    result = read_model(Result, session / RESULT_FILE)
    share = result.cells[1].ceiling_share
    assert share is not None
    line = closing_lines(result, read_evidence(session).plan.matrix, {}, "report", "next")[1]
    assert line == f"share of the physics ceiling: good {100 * share:.1f} %"


def test_a_report_is_rendered_again_from_its_folder(out: Path) -> None:
    (out / "report.md").unlink()
    assert main(["report", str(out)]) == 0
    assert verify([out], lambda line: None)


def test_the_fake_trainer_leaves_states_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_trainer.write_states(tmp_path / STATES_FILE, 2, 1)
    assert (tmp_path / STATES_FILE).stat().st_size > 1000
    monkeypatch.setenv("FAKE_STATES", "none")
    fake_trainer.write_states(tmp_path / "other.npz", 2, 1)
    assert not (tmp_path / "other.npz").exists()
