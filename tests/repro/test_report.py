"""The page and its figures: what a reader sees, and that the same folder always gives the same bytes."""

from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import jinja2
import pytest
from session_builder import SOURCE, finished_session, make_host, matrix_text, run_session, toy_matrix

import repro.render
from repro.evidence import read_evidence
from repro.figures import draw_figures, installed_version, matplotlib_version
from repro.headline import headline
from repro.layout import PLAN_FILE, REPORT_FILE
from repro.plan import Plan, make_plan
from repro.render import render_report
from repro.report import derive_report
from repro.result import compute_result
from repro.schema import canonical_json, read_canonical
from repro.settings_section import settings_section


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return finished_session(tmp_path)


def sections(page: str) -> dict[str, str]:
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_a_page_has_everything_a_reader_needs(out: Path) -> None:
    page = (out / "report.md").read_text(encoding="utf-8")
    assert page.startswith("# SMOKE: sac on g1_walk_flat (mujoco), matrix toy\n\n**`fast` runs at 1.")
    found = sections(page)
    assert list(found) == [
        *("Result", "Metric", "Runs", "Where a tick goes", "Window sensitivity", "Noise", "Host while it ran"),
        *("Settings", "Cases", "Environment", "Limits", "Inputs and verification"),
    ]
    assert "floor(N/2)" in found["Metric"] and "tail mean of `Perf/total_fps`" in found["Metric"]
    assert "geometric mean, env steps/s" in found["Result"] and "geometric mean of its runs" in found["Metric"]
    assert "weak scaling" not in found["Limits"] and "Convergence was not verified" in found["Limits"]
    assert "2 runs of each case: the 95 % intervals are Student t" in found["Limits"]
    assert "SMOKE" in found["Limits"]
    for row in ("frequency governor", "sockets, NUMA nodes", "| nccl", "| trainer"):
        assert row in found["Environment"]
    assert "(figures/rates.svg)" in found["Result"] and "(figures/steps.svg)" in found["Runs"]
    assert "| fast_r1" in found["Runs"] and "tail mean of `Perf/total_fps`" in found["Runs"]
    assert "| speedup: fast / slow |" in found["Result"] and "| improved |" in found["Result"]
    assert "torch" in found["Environment"]


def settings(out: Path) -> dict[str, list[str]]:
    """The settings of a folder's page by name; those that all cases share have one value."""
    found = read_evidence(out)
    rows = [
        line.strip("| ").split("|")
        for line in settings_section(found).splitlines()
        if line.startswith("| ") and "---" not in line
    ]
    return {name.strip(): [value.strip() for value in values] for name, *values in rows}


def test_a_page_says_what_was_trained(tmp_path: Path) -> None:
    text = matrix_text({"one": {}, "two": {}, "gone": {"FAKE_MODE": "crash"}})
    text = text.replace('name = "two"\n', 'name = "two"\noverrides = ["algo.batch_size=32"]\ngpus = [0, 1]\n')
    found = settings(run_session(tmp_path, text)[1])
    assert found == {
        "setting": ["one", "two"],  # the header of the second table; a case without a run has no column
        "environments per rank": ["16"],
        "critic, actor updates per iteration": ["8, 2"],
        "physics workers per rank": ["1"],
        "seed": ["1"],
        "physics profile": ["exact"],
        "groups of environments": ["1"],
        "AMP": ["no"],
        "Inductor": ["no"],
        "whole-cycle graph": ["no"],
        "ranks": ["1", "2"],
        "batch per rank": ["64", "32"],
        "transport between ranks": ["none", "gloo"],
    }


def test_a_case_whose_runs_disagree_is_not_shown_as_agreeing(out: Path) -> None:
    path = out / "runs" / "slow_r2" / "config.json"
    path.write_text(path.read_text().replace('"batch_size": 64', '"batch_size": 128'))
    path = out / "runs" / "fast_r2" / "manifest.json"
    path.write_text(path.read_text().replace('"transport": "none"', '"transport": "p2p"').replace("exact", "fast"))
    path = path.with_name("config.json")
    path.write_text(path.read_text().replace("exact", "fast"))
    found = settings(out)
    assert found["batch per rank"] == ["its runs differ: 64; 128", "64"]
    assert found["physics profile"] == ["exact", "its runs differ: exact; fast"]


def test_files_of_another_version_that_lack_a_setting_give_a_dash(out: Path) -> None:
    for case in ("slow", "fast"):
        for repeat in (1, 2):
            path = out / "runs" / f"{case}_r{repeat}" / "manifest.json"
            path.write_text(path.read_text().replace('"groups"', '"other"'))
    assert settings(out)["groups of environments"] == ["\N{EN DASH}"]


def test_a_case_that_never_ran_has_no_command(out: Path) -> None:
    evidence = read_evidence(out)
    cells = tuple(
        replace(item, status="skipped", throughput=None) if item.cell.case == "fast" else item
        for item in evidence.cells
    )
    evidence = replace(evidence, cells=cells)
    (command,) = repro.render.report_context(evidence, compute_result(evidence))["commands"]
    assert "runs/slow_r1" in command


def test_no_section_is_empty_and_tables_line_up(out: Path) -> None:
    page = (out / "report.md").read_text(encoding="utf-8")
    assert all(len(text.strip()) > 20 for text in sections(page).values())
    assert "\n\n\n" not in page and page.endswith("\n") and not page.endswith("\n\n")
    for block in re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE):
        assert len({len(line) for line in block.splitlines()}) == 1, block


def test_a_page_says_where_a_tick_goes_and_what_bounds_it(out: Path) -> None:
    found = sections((out / "report.md").read_text(encoding="utf-8"))
    row = r"^\| slow \| +1\.\d\d \| +1\.4\d \(90\.0 %\) \| +0\.11 \(7\.0 %\) \| +0\.05 \(3\.0 %\) \|$"
    assert re.search(row, found["Where a tick goes"], re.MULTILINE)
    assert "in `slow` (costs the pool 0.11 ms; the pool is inside `Batch.step` for 90.0 % of a tick" in found["Result"]
    assert "missing" not in found["Where a tick goes"]


def test_every_input_is_listed_with_its_hash(out: Path) -> None:
    page = (out / "report.md").read_text(encoding="utf-8")
    inputs = read_evidence(out).inputs
    assert {"plan.json", "host.json", "journal.jsonl", "logs/slow_r1.log"} < set(inputs)
    assert "result.json" not in inputs and "MANIFEST.sha256" not in inputs
    for name, digest in inputs.items():
        assert f"\n{digest}  {name}\n" in page


def test_reasons_of_a_matrix_are_words_and_no_markup(out: Path) -> None:
    reason = "# Fast | <img src=x>"
    content = read_canonical(Plan, out / PLAN_FILE).model_dump(mode="json", exclude_unset=True)
    content["matrix"]["reason"] = content["matrix"]["cases"][0]["reason"] = reason
    (out / PLAN_FILE).write_text(canonical_json(content), encoding="utf-8")
    page = derive_report(out, figures=False).files[REPORT_FILE].decode()
    assert "\n\\# Fast | \\<img src=x> Measured " in page and "| \\# Fast \\| \\<img src=x>" in page


def test_no_number_is_computed_in_the_page(out: Path) -> None:
    """Every rate of the group table is one of the result's, only rounded."""
    result = compute_result(read_evidence(out))
    page = (out / "report.md").read_text(encoding="utf-8")
    for group in result.groups:
        assert re.search(rf"^\| {group.case} +\| +2 \| +{group.mean:,.0f} \|", page, flags=re.MULTILINE)


def test_the_same_folder_gives_the_same_bytes_each_time(out: Path) -> None:
    first, second = derive_report(out), derive_report(out)
    assert first.files == second.files
    assert {name: (out / name).read_bytes() for name in first.files} == first.files


def test_a_users_matplotlib_settings_change_nothing(out: Path) -> None:
    import matplotlib

    evidence = read_evidence(out)
    expected = draw_figures(evidence, compute_result(evidence))
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30, "svg.hashsalt": None}):
        assert draw_figures(evidence, compute_result(evidence)) == expected


def test_figures_are_svg_that_names_its_version_and_shows_every_run(out: Path) -> None:
    for name in ("rates.svg", "steps.svg"):
        content = (out / "figures" / name).read_bytes()
        assert ET.fromstring(content).tag == "{http://www.w3.org/2000/svg}svg"
        assert matplotlib_version(content) == installed_version()
        assert b"<dc:date>" not in content
    rates = (out / "figures" / "rates.svg").read_text()
    assert rates.count("<use xlink:href") >= 4
    assert "SMOKE, not a benchmark" in rates and "slow (n = 2)" in rates


def test_a_session_without_numbers_has_a_page_without_figures_or_empty_tables(tmp_path: Path) -> None:
    _, out = run_session(tmp_path, matrix_text({"bad": {"FAKE_MODE": "crash"}}))
    page = (out / "report.md").read_text(encoding="utf-8")
    assert "**Incomplete: 1 of 1 cell gave no number.**" in page
    assert "figures/" not in page and not list(out.glob("figures/*"))
    assert "Window sensitivity" not in sections(page)
    assert "exit code 1: RuntimeError: asked to crash" in sections(page)["What gave no number"]
    assert sections(page)["Result"].strip() == "No case has a number."
    assert all(text.strip() for text in sections(page).values())
    assert "\n\n\n" not in page


def test_a_template_that_asks_for_an_unknown_name_fails(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = read_evidence(out)
    context = repro.render.report_context(evidence, compute_result(evidence))
    context.pop("limits")
    monkeypatch.setattr(repro.render, "report_context", lambda *_: context)
    with pytest.raises(jinja2.UndefinedError):
        render_report(evidence, compute_result(evidence))


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("improved", "faster, beyond the noise"),
        ("no_regression", "not slower by more than 5.0 %"),
        ("regression", "slower by more than 5.0 %"),
    ],
)
def test_the_headline_says_the_verdict_in_words(out: Path, verdict: str, words: str) -> None:
    said = headline_with(out, verdict=verdict)
    assert said.startswith("`fast` runs at 1.") and said.endswith(f", n = 2): {words}.")


@pytest.mark.parametrize(
    ("verdict", "words"), [("suspicious", "Looks slower, undecided"), ("insufficient_data", "Undecided")]
)
def test_an_undecided_headline_does_not_begin_with_a_ratio(out: Path, verdict: str, words: str) -> None:
    found = {"verdict": verdict, "ratio": 1.127, "ci_low": 0.9, "ci_high": 1.4, "n": 3}
    assert headline_with(out, **found) == (
        f"{words}: `fast` against `slow` (ratio 1.127\u00d7, 95 % interval [0.900, 1.400], n = 3)."
    )


def headline_with(out: Path, **comparison: object) -> str:
    evidence = read_evidence(out)
    result = compute_result(evidence)
    changed = result.comparisons[0].model_copy(update=comparison)
    return headline(result.model_copy(update={"comparisons": (changed,)}), evidence.plan.matrix)


def test_one_run_has_no_interval_and_the_page_says_so(out: Path) -> None:
    for name in ("slow_r2", "fast_r2"):
        shutil.rmtree(out / "runs" / name)
    evidence = read_evidence(out)
    page = render_report(evidence, compute_result(evidence))
    assert re.search(r"Undecided: `fast` against `slow` \(ratio 1\.\d{3}\u00d7, one run, no interval\)\.\*\*\n", page)
    assert "Student t intervals" not in sections(page)["Limits"]
    alone = compute_result(evidence).model_copy(update={"comparisons": (), "verdict": "measured"})
    said = headline(alone, evidence.plan.matrix.model_copy(update={"comparisons": ()}))
    assert re.fullmatch(r"`slow` trains at [\d,]+ env steps/s \(one run, no interval\)\. `fast` trains .*", said)


@pytest.mark.parametrize(
    ("gpus", "shown"), [([(), ()], False), ([(0,), (0,)], False), ([(0,), ()], True), ([(0, 1), (0, 1)], True)]
)
def test_weak_scaling_is_a_limit_only_where_gpus_are_added(out: Path, gpus: list[tuple[int, ...]], shown: bool) -> None:
    evidence = read_evidence(out)
    matrix = evidence.plan.matrix
    cases = tuple(case.model_copy(update={"gpus": own}) for case, own in zip(matrix.cases, gpus, strict=True))
    plan = evidence.plan.model_copy(update={"matrix": matrix.model_copy(update={"cases": cases})})
    page = render_report(replace(evidence, plan=plan), compute_result(evidence))
    assert ("weak scaling" in sections(page)["Limits"]) == shown


def test_commands_of_the_page_can_be_pasted_and_name_gpu_positions(out: Path) -> None:
    host, topology = make_host(cpus=3, gpu_count=2)
    case = toy_matrix().cases[0].model_copy(update={"gpus": (1,), "environment": {"NOTE": "a b"}})
    plan = make_plan(toy_matrix(cases=(case,), comparisons=(), smoke=False, warmup=0), host, topology, SOURCE)
    evidence = read_evidence(out)
    result = compute_result(evidence).model_copy(update={"comparisons": ()})
    (command,) = repro.render.report_context(replace(evidence, plan=plan), result)["commands"]
    assert command.startswith("CUDA_VISIBLE_DEVICES=1 NOTE='a b' PYTHONUNBUFFERED=1 python -m unilab.train ")
    assert "'env.cpu_ids=[0]'" in command
    assert plan.cells[0].environment["CUDA_VISIBLE_DEVICES"] == "GPU-1"
