"""The shipped matrices on made-up hosts: their questions can be answered, and what does not fit says why."""

from __future__ import annotations

import pytest
from session_builder import SOURCE, make_host

from repro.dry_run import plan_lines
from repro.matrix import builtin_names, load_matrix, matrix_of_cases, select_cases
from repro.plan import PROBE_ESTIMATE_SECONDS, Cell, Executor, Plan, check_plan, make_plan
from repro.schema import canonical_json, parse_model
from repro.session_probes import planned_probes
from unilab.config import load_config

HOSTS = {"none": (2, 0), "one": (16, 1), "two": (32, 2), "eight": (128, 8)}
NAMES = "n1 n2_default n2_shm n2_45 n2_04 n1_local32 n1_total64 n2_pool32"
NO_GPU = "asks for GPU position 0, but the driver lists no GPU"


def plan_on(matrix: str, host: str) -> Plan:
    facts, topology = make_host(*HOSTS[host])
    return make_plan(load_matrix(matrix), facts, topology, SOURCE)


def first_cells(plan: Plan) -> dict[str, Cell]:
    return {cell.case: cell for cell in reversed(plan.cells)}


def skipped(plan: Plan) -> dict[str, str]:
    return {cell.case: cell.skip_reason for cell in plan.cells if cell.skip_reason is not None}


@pytest.mark.parametrize("name", builtin_names())
@pytest.mark.parametrize("host", HOSTS)
def test_every_matrix_can_be_planned_anywhere_and_its_plan_is_its_own(name: str, host: str) -> None:
    plan = plan_on(name, host)
    check_plan(parse_model(Plan, canonical_json(plan), "plan.json"))
    every = [cell for cell in plan.cells if not cell.warmup]
    assert len(every) == len(plan.matrix.cases) * plan.matrix.repeats
    text = "\n".join(plan_lines(plan))
    for cell in every:
        assert f" {cell.id} " in text
        assert cell.skip_reason is None or f"skipped {cell.id}: {cell.skip_reason}" in text


@pytest.mark.parametrize(
    "name", [name for name in builtin_names() if name != "single" and not load_matrix(name).learning]
)
def test_every_case_of_a_question_is_in_a_comparison(name: str) -> None:
    matrix = load_matrix(name)
    compared = {case for item in matrix.comparisons for case in (item.numerator, item.denominator)}
    assert compared == {case.name for case in matrix.cases}


@pytest.mark.parametrize("name", builtin_names())
def test_what_a_gpu_host_is_measured_with_is_probed_first(name: str) -> None:
    matrix = load_matrix(name)
    assert ("correctness" in matrix.probes) != (matrix.smoke or matrix.learning)


@pytest.mark.parametrize(("name", "cases"), [("dual", []), ("ablation", []), ("documents", ["n1"]), ("single", [])])
def test_what_one_rank_cannot_be_probed_for_is_left_out(name: str, cases: list[str]) -> None:
    """A probe between ranks would fail by itself, and a failed probe ends a session without a run."""
    matrix = select_cases(load_matrix(name), cases) if cases else load_matrix(name)
    plan = make_plan(matrix, *make_host(*HOSTS["one"]), SOURCE)
    assert [(asked.probe, asked.world_size) for asked in planned_probes(plan)] == [("correctness", 1)]
    probing = (
        plan.estimated_seconds
        - make_plan(matrix.model_copy(update={"probes": ()}), *make_host(*HOSTS["one"]), SOURCE).estimated_seconds
    )
    assert plan.runnable and probing == PROBE_ESTIMATE_SECONDS[False]


@pytest.mark.parametrize("name", builtin_names())
def test_the_trainer_knows_every_setting_of_a_case(name: str) -> None:
    matrix = load_matrix(name)
    for case in matrix.cases:
        load_config(matrix.algo, matrix.task, matrix.sim, [*matrix.overrides, *case.overrides])


def test_the_documents_cases_on_the_host_of_eight_gpus() -> None:
    cells = first_cells(plan_on("documents", "eight"))
    assert " ".join(case.name for case in load_matrix("documents").cases) == NAMES
    first, second = tuple(range(32)), tuple(range(64, 96))  # the first CPUs of each half
    assert {name: cell.pools for name, cell in cells.items() if cell.pools} == {
        "n1_local32": (first,),
        "n1_total64": (first + second,),
        "n2_pool32": (first, second),
    }
    assert cells["n2_45"].environment["CUDA_VISIBLE_DEVICES"] == "GPU-4,GPU-5"
    assert cells["n2_04"].gpus == ("GPU-0", "GPU-4")
    assert cells["n1"].chooses_cpus and not any("cpu_ids" in word for word in cells["n1"].arguments)
    transports = {name: [w for w in cell.arguments if "transport" in w] for name, cell in cells.items()}
    assert transports["n2_default"] == ["training.nccl_transport=tcp"]
    assert all(
        transports[name] == ["training.nccl_transport=shm"] for name in ("n2_shm", "n2_45", "n2_04", "n2_pool32")
    )


def test_what_a_host_of_two_gpus_cannot_hold_of_the_documents_is_skipped() -> None:
    assert skipped(plan_on("documents", "two")) == {
        "n2_45": "asks for GPU position 5, this host shows 2 GPU (counted from 0)",
        "n2_04": "asks for GPU position 4, this host shows 2 GPU (counted from 0)",
        "n1_total64": "asks for 64 workers, this host offers 32 CPUs",
        "n2_pool32": "asks for 2 ranks of 32 workers, this host offers 32 CPUs",
    }


def test_a_position_whose_entry_the_driver_does_not_list_skips_its_cases() -> None:
    host, topology = make_host(16, 2, visible_gpus=("0", "9", "1"))
    found = skipped(make_plan(load_matrix("dual"), host, topology, SOURCE))
    assert found == {
        "n2": "asks for GPU position 1: CUDA_VISIBLE_DEVICES has '9' there, the driver lists no such GPU",
    }
    apart = load_matrix("dual").cases[1].model_copy(update={"gpus": (0, 2)})
    matrix = load_matrix("dual").model_copy(update={"cases": (apart,), "comparisons": ()})
    assert skipped(make_plan(matrix, host, topology, SOURCE)) == {}


def test_one_gpu_and_few_cpus_leave_one_case_of_the_documents() -> None:
    plan = plan_on("documents", "one")
    assert set(first_cells(plan)) - set(skipped(plan)) == {"n1"}
    assert skipped(plan)["n1_local32"] == "asks for 32 workers, this host offers 16 CPUs"


@pytest.mark.parametrize("name", ["ablation", "documents", "pools", "strong", "dual", "single", "learning"])
def test_a_host_without_a_gpu_skips_every_case_with_the_reason(name: str) -> None:
    plan = plan_on(name, "none")
    assert plan.runnable == () and NO_GPU in skipped(plan).values()
    assert len(skipped(plan)) == len(plan.matrix.cases)


def test_one_rank_on_both_pools_has_the_cpus_of_two_ranks() -> None:
    cells = first_cells(plan_on("pools", "two"))
    pool, both, split = (cells[name] for name in ("n1_pool", "n1_both", "n2_pools"))
    assert split.pools == (tuple(range(15)), tuple(range(16, 31)))
    assert pool.pools == split.pools[:1]
    assert both.pools == (split.pools[0] + split.pools[1],) and both.cpu_ids == split.cpu_ids
    assert both.world_size == 1 and any(word.startswith("env.cpu_ids=[0,1,") for word in both.arguments)


def test_an_ablation_changes_one_thing_of_its_base_and_one_gpu_skips_transports() -> None:
    plan = plan_on("ablation", "two")
    cells = first_cells(plan)
    assert skipped(plan) == {}
    assert len(cells["base"].pools[0]) == 31  # as many as the trainer takes by itself
    assert all(cells[name].pools == cells["base"].pools for name in ("inductor", "graph", "eager"))
    assert cells["auto_cpus"].chooses_cpus
    assert {cells[name].pools for name in ("ranks2", "ranks2_shm", "ranks2_tcp")} == {
        (tuple(range(15)), tuple(range(16, 31)))
    }
    one = plan_on("ablation", "one")
    assert skipped(one) == dict.fromkeys(
        ("ranks2", "ranks2_shm", "ranks2_tcp"), "asks for GPU position 1, this host shows 1 GPU (counted from 0)"
    )
    assert len(first_cells(one)["base"].pools[0]) == 15


def test_the_trainers_own_choice_of_cpus_is_shown_as_that() -> None:
    (row,) = [line for line in plan_lines(plan_on("ablation", "one")) if " auto_cpus_r1 " in line]
    assert " auto  the trainer's choice  GPU-0  " in row


def test_a_container_needs_cpus_that_the_suite_names() -> None:
    host, topology = make_host(16, 1)
    executor = Executor(kind="docker", image="suite", image_id="sha256:1")
    found = skipped(make_plan(load_matrix("ablation"), host, topology, SOURCE, executor=executor))
    assert found["auto_cpus"] == "names no CPUs for its container; run it with --executor local"
    assert "base" not in found


def test_strong_scaling_shares_out_one_total() -> None:
    matrix = load_matrix("strong")
    assert [len(case.gpus) for case in matrix.cases] == [1, 2]
    assert {item.metric: item.expected for item in matrix.comparisons}["steps_per_second"] == 2.0
    text = canonical_json(matrix).replace("algo.num_envs=1024", "algo.num_envs=2048")
    with pytest.raises(
        ValueError, match=r"algo.num_envs of all ranks differs or is not set: strong1 2048, strong2 4096"
    ):
        parse_model(type(matrix), text, "strong.toml")


def test_named_cases_are_found_where_their_name_is_unique() -> None:
    picked = matrix_of_cases(["n1_local32", "n2_pool32"])
    assert (picked.name, [item.name for item in picked.comparisons]) == ("documents", ["local32"])
    assert matrix_of_cases(["eager", "base"]).name == "ablation"
    assert matrix_of_cases(["n1_both"]).name == "pools"


@pytest.mark.parametrize(
    ("matrix", "case"),
    [("pools", "n1_pool"), ("strong", "strong1"), ("pools", "n1_both"), ("dual", "n1"), ("documents", "n1_local32")],
)
def test_a_case_by_itself_gets_the_cpus_it_has_in_its_matrix(matrix: str, case: str) -> None:
    alone = make_plan(select_cases(load_matrix(matrix), [case]), *make_host(32, 2), SOURCE)
    whole = make_plan(load_matrix(matrix), *make_host(32, 2), SOURCE)
    cells = {cell.id: cell for cell in whole.cells if cell.case == case}
    shared = [cell for cell in alone.cells if cell.id in cells]
    assert shared and [cells[cell.id] for cell in shared] == shared
    assert parse_model(Plan, canonical_json(alone), "plan.json") == alone
    check_plan(alone)


def test_new_keys_are_not_in_the_files_of_matrices_without_them() -> None:
    text = canonical_json(load_matrix("dual"))
    assert '"pools"' not in text and '"strong"' not in text and '"width"' not in text
    for name in ("documents", "pools", "strong"):
        matrix = load_matrix(name)
        assert parse_model(type(matrix), canonical_json(matrix), name) == matrix
