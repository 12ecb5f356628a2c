"""Cells of two ranks from plan to report: pools, ceilings of both, the ratio beside that of the physics alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from session_builder import make_host, matrix_text, run_session, toy_matrix

from repro import ceiling as ceiling_module
from repro.cli import main
from repro.cycle import bounding_stages
from repro.doctor import choose_matrix
from repro.evidence import read_evidence
from repro.headline import closing_lines, comparison_sentence, headline
from repro.layout import CEILING_FILE, RESULT_FILE
from repro.matrix import Comparison, Matrix, load_matrix, parse_matrix
from repro.result import ComparisonResult, Result, compute_result, values
from repro.scaling_section import SAME_CPUS, STRONG, WEAK, scaling_section
from repro.schema import canonical_json, read_model
from repro.stats import verdict
from repro.verify import verify
from unilab.physics.pinning import LINUX, allowed_cpus

two_cpus = pytest.mark.skipif(
    not LINUX or len(allowed_cpus()) < 2, reason="two pools need thread masks, a Linux feature, and two CPUs"
)


def dual_text(rates: dict[str, str]) -> str:
    """The shipped matrix's comparisons over two smoke cases, one of two ranks."""
    shipped = Path(str(ceiling_module.__file__)).parent / "matrices" / "dual.toml"
    comparisons = shipped.read_text().partition("# Weak scaling")[2].partition("[[cases]]")[0].partition("\n")[2]
    cases = {name: {"FAKE_RATE": rate, "FAKE_NOISE": "0.001"} for name, rate in rates.items()}
    text = matrix_text(cases, name="toy_dual", repeats=2, extra="ceiling = true\n" + comparisons)
    return text.replace('name = "n2"\nreason', 'name = "n2"\ngpus = [0, 1]\nreason')


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank at 1000 env steps/s, two at 1960; ceilings are measured for a fraction of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceiling_module, "SECONDS", 0.3)
        code, out = run_session(tmp_path_factory.mktemp("dual"), dual_text({"n1": "1000", "n2": "1960"}))
    assert code == 0
    return out


@pytest.fixture
def out(session: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(session, tmp_path / "out"))


@two_cpus
def test_the_ceiling_of_two_ranks_is_that_of_two_pools(session: Path) -> None:
    first, second = allowed_cpus()[:2]
    record = json.loads((session / "runs" / "n2_r1" / CEILING_FILE).read_text())
    assert record["ceiling"] is None and record["reason"] is None
    pools = record["ceilings"]["pools"]
    assert [pool["cpu_ids"] for pool in pools] == [[first], [second]]
    total = sum(16 * sum(map(len, p["step_seconds"])) / sum(map(sum, p["step_seconds"])) for p in pools)
    assert record["ceilings"]["env_steps_per_second"] == pytest.approx(total, rel=1e-9)
    result = read_model(Result, session / RESULT_FILE)
    cell = next(cell for cell in result.cells if cell.id == "n2_r1")
    assert cell.world_size == 2 and cell.steps_per_second is not None
    assert cell.ceiling_share == pytest.approx(cell.steps_per_second / total, rel=1e-8)
    assert cell.learner_rows_per_second == pytest.approx(cell.steps_per_second / 16 * 64 * 8, rel=1e-6)
    one = json.loads((session / "runs" / "n1_r1" / CEILING_FILE).read_text())
    assert sorted(one) == ["ceiling", "reason", "schema_version"] and one["ceiling"]["cpu_ids"] == [first]


@two_cpus
def test_every_metric_is_compared_and_the_shares_ratio_is_their_quotient(session: Path) -> None:
    found = {item.metric: item for item in read_model(Result, session / RESULT_FILE).comparisons}
    assert [item.name for item in found.values()] == ["steps", "rows", "physics_only", "against_physics"]
    steps, rows, physics, share = (item.ratio or 0.0 for item in found.values())
    assert steps == pytest.approx(1.96, rel=2e-3) and rows == pytest.approx(steps, rel=1e-9)
    assert share == pytest.approx(steps / physics, rel=1e-8)
    assert found["steps_per_second"].verdict == "no_regression"  # 2 % below the two expected
    evidence = read_evidence(session)
    ceilings = [values(evidence, case, "ceiling") for case in ("n1", "n2")]
    assert all(len(own) == 2 for own in ceilings)
    assert physics == pytest.approx(
        (ceilings[1][1] * ceilings[1][2] / ceilings[0][1] / ceilings[0][2]) ** 0.5, rel=1e-8
    )


@two_cpus
def test_the_page_and_the_last_lines_speak_of_both(session: Path) -> None:
    page = (session / "report.md").read_text()
    assert "**`n2` runs at 1.96" in page and "of the 2 expected, not lower by more than 5.0 %." in page
    assert "\nScaling, `n2` (2 ranks) over `n1` (1 rank):\n\n- Env steps/s: 1.96" in page
    assert (
        "end-to-end *weak scaling*" in page and "A loss against the expected ratio within 5.0 % is tolerated." in page
    )
    assert "| n2, all ranks |" in page and "| n2, rank 1 " in page and "missing" not in page
    assert "| physics_only: n2 / n1, physics ceiling (2 expected) |" in page
    assert "training.dp_collector_cpu_ids=[[0],[1]]" in page and " 2 x 1 |" in page
    evidence = read_evidence(session)
    result = compute_result(evidence)
    lines = closing_lines(result, evidence.plan.matrix, bounding_stages(evidence), "report.md", "next")
    assert len(lines) == 6 and lines[0].startswith("SMOKE, not a benchmark: n2 runs at 1.96")
    assert lines[1].startswith("share of the physics ceiling: n1 ") and ", n2 " in lines[1]
    assert verify([session], lambda line: None)


def slower(record: dict[str, Any]) -> None:
    """A total that its pools do not give."""
    record["ceilings"]["env_steps_per_second"] /= 2


@two_cpus
@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        (CEILING_FILE, slower, "ceilings: env_steps_per_second is "),
        (CEILING_FILE, lambda r: r["ceilings"]["pools"].pop(), "ceilings.pools: "),
        (
            CEILING_FILE,
            lambda r: r["ceilings"]["pools"].reverse(),
            "CPUs of rank 0 of the run: 0, of the ceiling: 1",
        ),
        (
            CEILING_FILE,
            lambda r: r["ceilings"]["pools"][1]["iterations"].__setitem__(-1, 59),
            "ceilings: its pools stepped states of different iterations",
        ),
        (
            CEILING_FILE,
            lambda r: r.update(ceiling=r["ceilings"]["pools"][0], ceilings=None),
            "ranks of the run: 2, pools of the ceiling: 1",
        ),
        (
            CEILING_FILE,
            lambda r: r["ceilings"]["pools"][1].update(profile="fast"),
            "env.physics_profile of the run: exact, of the ceiling: fast",
        ),
        (
            "manifest.json",
            lambda m: m["ranks"][1].update(cpu_ids=[7]),
            "CPUs of rank 1 in manifest.json of the run: 7, of the ceiling: 1",
        ),
    ],
)
def test_a_ceiling_of_other_pools_gives_no_share(
    file: str, change: Callable[[dict[str, Any]], object], reason: str, out: Path
) -> None:
    path = out / "runs" / "n2_r1" / file
    content = json.loads(path.read_text())
    change(content)
    path.write_text(canonical_json(content))
    cell = next(item for item in read_evidence(out).cells if item.cell.id == "n2_r1")
    assert (cell.status, cell.ceiling) == ("measured", None)
    assert cell.ceiling_reason is not None and reason in cell.ceiling_reason


@two_cpus
def test_a_run_with_other_pools_than_planned_is_refused(out: Path) -> None:
    path = out / "runs" / "n2_r1" / "config.json"
    content = json.loads(path.read_text())
    content["training"]["dp_collector_cpu_ids"] = [[1], [0]]
    path.write_text(canonical_json(content))
    cell = next(item for item in read_evidence(out).cells if item.cell.id == "n2_r1")
    assert cell.reason == (
        "not_as_planned: training.dp_collector_cpu_ids was planned as [[0], [1]], the run says [[1], [0]]"
    )


@two_cpus
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m["ranks"].pop(), "ranks was planned as [0, 1], the run says [0]"),
        (lambda m: m["ranks"][1].update(rank=0), "ranks was planned as [0, 1], the run says [0, 0]"),
        (lambda m: m.pop("ranks"), "ranks was planned as [0, 1], the run says []"),
        (lambda m: m["dp_sync"].update(mode="none"), "dp_sync.mode was planned as"),
    ],
)
def test_a_run_whose_ranks_are_not_those_of_its_plan_is_refused(
    change: Callable[[dict[str, Any]], object], reason: str, out: Path
) -> None:
    path = out / "runs" / "n2_r1" / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(canonical_json(content))
    cell = next(item for item in read_evidence(out).cells if item.cell.id == "n2_r1")
    assert cell.throughput is None and cell.reason is not None and reason in cell.reason


@pytest.mark.parametrize(
    ("gpus", "name", "why"),
    [(0, "smoke", "no usable GPU"), (1, "single", "this host shows 1 GPU"), (8, "dual", "this host shows 8 GPUs")],
)
def test_auto_picks_the_widest_matrix(gpus: int, name: str, why: str) -> None:
    found, said = choose_matrix(*make_host(cpus=32, gpu_count=gpus))
    assert found == name and said.startswith(why)


@pytest.mark.parametrize(
    ("cpus", "entries", "contained", "chosen"),
    [
        (1, "0,1", False, "this host shows 2 GPUs, but case n2 of dual asks for 2 ranks, this host offers 1 CPU"),
        (3, "0,1", True, "this host shows 2 GPUs, but case n2 of dual in a container 2 workers and 2 learners need 4"),
        (8, "0,9", False, "this host shows 1 GPU"),
        (
            8,
            "0,9,1",
            False,
            "this host shows 2 GPUs, but case n2 of dual asks for GPU position 1: CUDA_VISIBLE_DEVICES ",
        ),
    ],
)
def test_auto_picks_one_gpu_where_not_every_case_of_two_fits(
    cpus: int, entries: str, contained: bool, chosen: str
) -> None:
    host, topology = make_host(cpus=cpus, gpu_count=2, visible_gpus=tuple(entries.split(",")))
    name, why = choose_matrix(host, topology, contained)
    assert name == "single" and why.startswith(chosen)


STEPS = {"name": "steps", "metric": "steps_per_second", "ratio": 1.97, "ci_low": 1.95, "ci_high": 1.99, "n": 3}
ASKED = Comparison(name="steps", numerator="n2", denominator="n1", expected=2.0)
SHARE = Comparison(name="against_physics", metric="ceiling_share", numerator="n2", denominator="n1")


def compared(**changes: Any) -> ComparisonResult:
    return ComparisonResult(**{**STEPS, "verdict": "no_regression", **changes})


SPREAD = "95 % interval [1.950, 1.990], n = 3"


@pytest.mark.parametrize(
    ("item", "changes", "sentence"),
    [
        (
            ASKED,
            {},
            f"`n2` runs at 1.970\u00d7 the rate of `n1` ({SPREAD}): 98.5 % of the 2 expected, "
            "not lower by more than 5.0 %.",
        ),
        (
            ASKED,
            {"verdict": "improved", "ratio": 2.1},
            f"`n2` runs at 2.100\u00d7 the rate of `n1` ({SPREAD}): 105.0 % of the 2 expected, "
            "higher, beyond the noise.",
        ),
        (
            ASKED,
            {"verdict": "regression"},
            f"`n2` runs at 1.970\u00d7 the rate of `n1` ({SPREAD}): 98.5 % of the 2 expected, "
            "lower by more than 5.0 %.",
        ),
        (
            ASKED,
            {"verdict": "suspicious"},
            "Looks lower, undecided: `n2` against `n1` (ratio 1.970\u00d7 of env steps/s, 98.5 % of the 2 expected, "
            f"{SPREAD}).",
        ),
        (
            SHARE,
            {"metric": "ceiling_share", "ratio": 0.992, "ci_low": 0.98, "ci_high": 1.01},
            "`n2` reaches 0.992\u00d7 the ceiling share of `n1` (95 % interval [0.980, 1.010], n = 3): "
            "not lower by more than 5.0 %.",
        ),
    ],
)
def test_a_ratio_is_judged_against_the_expected_one(item: Comparison, changes: dict[str, Any], sentence: str) -> None:
    assert comparison_sentence(compared(**changes), item, 0.05) == sentence


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ((1.97, 1.95, 1.99), "no_regression"),
        ((1.80, 1.78, 1.82), "regression"),
        ((2.10, 2.05, 2.15), "improved"),
        ((1.85, 1.75, 1.95), "suspicious"),
        ((1.95, 1.85, 2.05), "insufficient_data"),
    ],
)
def test_verdicts_of_relative_changes_against_two(interval: tuple[float, float, float], expected: str) -> None:
    """As `repro.result` hands them over: every number over the expected ratio."""
    assert verdict(*(value / 2.0 for value in interval), margin=0.05) == expected  # type: ignore[misc]


def dual_result(**verdicts: Any) -> tuple[Matrix, Result]:
    """The shipped matrix with made-up ratios; `verdicts` by name of the comparison."""
    matrix = load_matrix("dual")
    numbers = [(1.94, 1.92, 1.96), (1.94, 1.92, 1.96), (1.97, 1.96, 1.98), (0.985, 0.97, 1.0)]
    comparisons = tuple(
        compared(
            **{"name": item.name, "metric": item.metric, "ratio": ratio, "ci_low": low, "ci_high": high},
            **({"verdict": verdicts[item.name]} if item.name in verdicts else {}),
        )
        for item, (ratio, low, high) in zip(matrix.comparisons, numbers, strict=True)
    )
    empty = Result(
        schema_version=1,
        matrix="dual",
        smoke=False,
        host=make_host()[0],
        cells=(),
        groups=(),
        comparisons=comparisons,
        probes=(),
        learning=(),
        verdict="no_regression",
    )
    return matrix, empty


def test_the_scaling_section_says_ratio_physics_quotient_efficiency_and_what_it_is_not() -> None:
    assert scaling_section(*dual_result()) == (
        "Scaling, `n2` (2 ranks) over `n1` (1 rank):\n\n"
        "- Env steps/s: 1.940\u00d7 ([1.920, 1.960], n = 3); efficiency 97.0 % (ratio / 2).\n"
        "- Learner rows/s: 1.940\u00d7 ([1.920, 1.960], n = 3); efficiency 97.0 % (ratio / 2).\n"
        "- Physics alone, the ratio of the runs' physics ceilings: 1.970\u00d7 ([1.960, 1.980], n = 3); "
        "efficiency 98.5 % (ratio / 2).\n"
        "- Env steps/s over physics alone, the ratio of the ceiling shares: 0.985\u00d7 ([0.970, 1.000], n = 3).\n\n"
        "This is end-to-end *weak scaling*: environments, batch, collectors, CPU pools and GPUs grow together. It is "
        "not a patch's own gain nor pure GPU scaling; long-run convergence is not shown here. Physics alone is a fact "
        "about the host: it says what that many pools could give, and is no part of the verdict."
    )


def test_strong_scaling_and_equal_cpus_are_called_what_they_are() -> None:
    _, result = dual_result()
    strong = scaling_section(load_matrix("strong"), result)
    assert "Scaling, `strong2` (2 ranks) over `strong1` (1 rank):" in strong
    assert STRONG in strong and WEAK not in strong and SAME_CPUS not in strong
    pools = scaling_section(load_matrix("pools"), result)
    assert "Scaling, `n2_pools` (2 ranks) over `n1_pool` (1 rank):" in pools
    assert "Scaling, `n2_pools` (2 ranks) over `n1_both` (1 rank), both on the same CPUs:" in pools
    assert pools.endswith(f"{WEAK}\n\n{SAME_CPUS}")


def test_cases_of_equal_ranks_have_no_scaling_section() -> None:
    matrix, result = dual_result()
    alike = tuple(case.model_copy(update={"gpus": (0, 1)}) for case in matrix.cases)
    assert scaling_section(matrix.model_copy(update={"cases": alike}), result) == ""
    assert scaling_section(toy_matrix(comparisons=()), result.model_copy(update={"comparisons": ()})) == ""


def test_the_headline_leads_with_steps_and_hides_no_bad_news() -> None:
    matrix, result = dual_result()
    assert headline(result, matrix).count("against") == 0 and headline(result, matrix).count("`n2`") == 1
    matrix, result = dual_result(physics_only="regression", against_physics="regression")
    said = headline(result, matrix)
    assert "reaches 0.985\u00d7 the ceiling share of `n1`" in said and "physics ceiling" not in said


@two_cpus
def test_physics_of_the_host_is_no_part_of_the_verdict(session: Path) -> None:
    evidence = read_evidence(session)
    (physics,) = [item for item in evidence.plan.matrix.comparisons if item.metric == "ceiling"]
    hopeless = physics.model_copy(update={"expected": 1e9})
    steps = evidence.plan.matrix.comparisons[0]
    matrix = evidence.plan.matrix.model_copy(update={"comparisons": (steps, hopeless)})
    changed = evidence.plan.model_copy(update={"matrix": matrix})
    result = compute_result(type(evidence)(**{**vars(evidence), "plan": changed}))
    assert [item.verdict for item in result.comparisons] == ["no_regression", "regression"]
    assert result.verdict == "no_regression"


@two_cpus
@pytest.mark.slow
def test_two_ranks_of_the_real_trainer_give_a_verified_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling_module, "SECONDS", 0.3)
    sizes = "algo.num_envs=16 algo.batch_size=64 algo.actor_hidden_dim=16 algo.critic_hidden_dim=16"
    overrides = json.dumps([*sizes.split(), "algo.save_interval=-1"])
    text = matrix_text({"n2": {}}, extra=f"ceiling = true\noverrides = {overrides}\n")
    text = text.replace('name = "n2"\nreason', 'name = "n2"\ngpus = [0, 1]\nreason')
    text = text.replace("workers = 1", 'workers = "auto"')
    parse_matrix(text, "dual.toml")
    (tmp_path / "dual.toml").write_text(text)
    folder = tmp_path / "out"
    assert main(["run", "--matrix", str(tmp_path / "dual.toml"), "--out", str(folder)]) == 0
    (cell,) = read_model(Result, folder / RESULT_FILE).cells
    assert (cell.status, cell.world_size, cell.reason) == ("measured", 2, None)
    assert cell.ceiling_share is not None and 0 < cell.ceiling_share < 1.5
    manifest = json.loads((folder / "runs" / "n2_r1" / "manifest.json").read_text())
    pools = json.loads((folder / "runs" / "n2_r1" / CEILING_FILE).read_text())["ceilings"]["pools"]
    assert [pool["cpu_ids"] for pool in pools] == [
        rank["cpu_ids"] for rank in manifest["ranks"]
    ]  # as the trainer chose
    assert "| the trainer's choice |" in (folder / "report.md").read_text()
    ticks = (folder / "report.md").read_text().partition("## Where a tick goes")[2].partition("\n## ")[0]
    assert ticks.count("| n2, rank 1 ") == 2 and "missing" not in ticks
    assert verify([folder], lambda line: None)
