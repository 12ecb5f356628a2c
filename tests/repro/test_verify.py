from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from session_builder import finished_session, matrix_text, run_session

from repro.cli import main
from repro.layout import MANIFEST_FILE, REPORT_FILE, RESULT_FILE
from repro.manifest import read_manifest, write_manifest
from repro.report import write_report
from repro.schema import canonical_json
from repro.verify import verify


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return finished_session(tmp_path)


def checked(folder: Path) -> tuple[bool, list[str]]:
    lines: list[str] = []
    return verify([folder], lines.append), lines


def flip(path: Path, position: int, bit: int = 0x01) -> bytes:
    """Change one byte of a file and return what it was."""
    before = path.read_bytes()
    changed = bytearray(before)
    changed[position] ^= bit
    path.write_bytes(bytes(changed))
    return before


def test_one_flipped_byte_in_any_listed_file_fails_and_names_it(out: Path) -> None:
    listed, problems = read_manifest(out)
    assert len(listed) > 30 and not problems
    for name in listed:
        size = (out / name).stat().st_size
        for position in {0, size // 2, size - 1}:
            before = flip(out / name, position)
            passed, lines = checked(out)
            assert not passed
            assert any(
                line.strip().startswith(f"{name}: the file or its line in {MANIFEST_FILE} changed: ") for line in lines
            ), (name, lines)
            assert lines[-1].startswith("NOT verified: ")
            (out / name).write_bytes(before)
    assert checked(out)[0]


def test_one_flipped_byte_anywhere_in_the_hash_list_fails(out: Path) -> None:
    text = (out / MANIFEST_FILE).read_bytes()
    first = text.index(b"\n") + 1
    for position in [*range(first + 1), len(text) - 1]:  # the first line in full, and the last byte
        for bit in (0x01, 0x20):
            flip(out / MANIFEST_FILE, position, bit)
            passed, lines = checked(out)
            assert not passed, (position, bit)
            assert any(MANIFEST_FILE in line for line in lines), lines
            (out / MANIFEST_FILE).write_bytes(text)


def edit_result(out: Path) -> None:
    result = json.loads((out / RESULT_FILE).read_text())
    result["groups"][0]["mean"] += 1.0
    (out / RESULT_FILE).write_text(json.dumps(result, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def replace_in(name: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(out: Path) -> None:
        text = (out / name).read_text(encoding="utf-8")
        assert old in text
        (out / name).write_text(text.replace(old, new), encoding="utf-8")

    return edit


def swap_events(out: Path) -> None:
    """Give slow_r1 the events of fast_r1: an intact file that says something else."""
    (mine,) = (out / "runs" / "slow_r1").glob("events*")
    (other,) = (out / "runs" / "fast_r1").glob("events*")
    shutil.copyfile(other, mine)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (edit_result, f"{RESULT_FILE}: differs"),
        (replace_in(REPORT_FILE, "| fast ", "| FAST "), f"{REPORT_FILE}: differs"),
        (replace_in("figures/rates.svg", "<path", "<Path"), "figures/rates.svg: differs"),
        (lambda out: (out / "figures" / "steps.svg").unlink(), "figures/steps.svg: missing"),
        (lambda out: shutil.copy(out / "figures/rates.svg", out / "figures/x.svg"), "figures/x.svg: is no part"),
        (swap_events, f"{RESULT_FILE}: differs"),
        (replace_in("journal.jsonl", '"exit_code": 0', '"exit_code": 1'), f"{RESULT_FILE}: differs"),
        (lambda out: (out / "runs" / "extra_r1").mkdir(), "runs/extra_r1: belongs to no cell of plan.json"),
        (lambda out: (out / "logs" / "extra_r1.log").touch(), "logs/extra_r1.log: belongs to no cell of plan.json"),
        (lambda out: shutil.rmtree(out / "logs"), "logs/warmup1_slow.log is missing, though journal.jsonl says"),
        (
            replace_in("plan.json", '"schema_version": 1,', '"schema_version": 1,\n  "schema_version": 1,'),
            "plan.json: not",
        ),
        (replace_in("host.json", '"cpu_count"', ' "cpu_count"'), "host.json: not as the suite writes it"),
        (
            replace_in("plan.json", '"id": "slow_r1"', '"id": "../slow_r1"'),
            "plan.json: cells.1.id: string should match",
        ),
        (replace_in("plan.json", '"id": "slow_r1"', '"id": "fast_r1"'), "plan.json: two cells would be called"),
        (replace_in("plan.json", '"smoke": true', '"smoke": 1'), "plan.json: matrix.smoke"),
        (replace_in("host.json", '"cpu_model"', '"cpu_modell"'), "host.json: unknown key 'cpu_modell'"),
        (replace_in(RESULT_FILE, '"verdict": "improved"', '"verdict": "splendid"'), f"{RESULT_FILE}: "),
    ],
)
def test_a_change_whose_hashes_were_made_to_fit_is_found_by_recomputation(
    out: Path, edit: Callable[[Path], object], problem: str
) -> None:
    edit(out)
    write_manifest(out)
    passed, lines = checked(out)
    assert not passed
    assert "  hashes: ok" in "\n".join(lines)
    assert any(line.strip().startswith(problem) for line in lines), lines


def test_figures_of_another_matplotlib_are_not_redrawn_and_it_says_so(out: Path) -> None:
    host = json.loads((out / "host.json").read_text())
    host["versions"]["matplotlib"] = f"0.{host['versions']['matplotlib']}"
    (out / "host.json").write_text(canonical_json(host))
    write_report(out)
    for svg in (out / "figures").iterdir():
        svg.write_bytes(svg.read_bytes().replace(b"Matplotlib v", b"Matplotlib v0."))
    write_manifest(out)
    passed, lines = checked(out)
    assert passed
    assert any("figures/rates.svg: drawn with matplotlib 0." in line and "hash checked" in line for line in lines)


def test_a_figure_of_another_matplotlib_than_the_host_had_fails(out: Path) -> None:
    svg = out / "figures" / "rates.svg"
    svg.write_bytes(svg.read_bytes().replace(b"Matplotlib v", b"Matplotlib v0."))
    write_manifest(out)
    passed, lines = checked(out)
    assert not passed and "  figures: FAILED" in lines
    assert any("figures/rates.svg: drawn with matplotlib 0." in line and "host.json records" in line for line in lines)


def test_a_report_can_be_moved(out: Path, tmp_path: Path) -> None:
    assert checked(Path(shutil.move(out, tmp_path / "elsewhere")))[0]


def test_rendering_again_gives_the_same_bytes(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(["report", str(out), "--check"]) == 0
    assert main(["report", str(out)]) == 0
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert capsys.readouterr().out.splitlines() == [f"{out}: up to date", f"{out}/{REPORT_FILE}"]


def test_report_check_finds_an_old_page_and_report_renews_it(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (out / REPORT_FILE).write_text("old")
    assert main(["report", str(out), "--check"]) == 1
    assert f"{REPORT_FILE}: differs" in capsys.readouterr().out
    assert main(["report", str(out)]) == 0
    assert checked(out)[0]


def test_changed_raw_files_are_not_rendered_into_a_fresh_hash_list(out: Path) -> None:
    flip(out / "plan.json", 10)
    listed = (out / MANIFEST_FILE).read_bytes()
    assert main(["report", str(out)]) == 1
    assert (out / MANIFEST_FILE).read_bytes() == listed


def test_verify_without_argument_takes_all_reports(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    for name in ("a", "b"):
        shutil.copytree(out, tmp_path / "reports" / name)
    (tmp_path / "reports" / "unfinished").mkdir()
    assert main(["verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "reports/a" and lines[-1].endswith("10 runs recomputed")
    flip(tmp_path / "reports" / "b" / "plan.json", 3)
    assert main(["verify"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "NOT verified: reports/b: 1 problem"


def test_an_authentic_report_without_numbers_is_verified_and_called_incomplete(tmp_path: Path) -> None:
    _, folder = run_session(tmp_path, matrix_text({"bad": {"FAKE_MODE": "crash"}, "good": {}}))
    passed, lines = checked(folder)
    assert passed and any(line.startswith("  figures: ok, drawn again") for line in lines)
    assert re.fullmatch(
        r"verified, but incomplete: 1 of 2 cells gave no number: \d+ files, 1 run recomputed", lines[-1]
    )
    _, folder = run_session(tmp_path / "other", matrix_text({"bad": {"FAKE_MODE": "crash"}}))
    passed, lines = checked(folder)
    assert passed and "  figures: none" in lines
    assert lines[-1].startswith("verified, but incomplete: 1 of 1 cell gave no number: ")


@pytest.mark.parametrize(("name", "code"), [("missing", 2), ("empty", 2)])
def test_what_is_no_report_folder_is_a_usage_error(tmp_path: Path, name: str, code: int) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["verify", str(tmp_path / name)]) == code


def test_a_report_without_its_hash_list_fails(out: Path) -> None:
    (out / MANIFEST_FILE).unlink()
    assert main(["verify", str(out)]) == 1
