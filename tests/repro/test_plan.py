from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_builder import SOURCE, make_host, toy_matrix

from repro.dry_run import plan_lines
from repro.errors import UsageError
from repro.matrix import Matrix, load_matrix
from repro.plan import Cell, Plan, check_plan, interleave, make_plan, same_words
from repro.schema import canonical_json, parse_model
from repro.session import default_out_dir

NOW = datetime(2026, 11, 29, 12, 0, 1, tzinfo=UTC)


def plan_for(matrix: Matrix, cpus: int = 4, gpus: int = 0, **options: object) -> Plan:
    host, topology = make_host(cpus, gpus)
    return make_plan(matrix, host, topology, SOURCE, now=NOW, **options)  # type: ignore[arg-type]


def test_ranks_have_the_cpus_of_the_nodes_that_their_gpus_are_on() -> None:
    host, topology = make_host(8, 2)
    crossed = [gpu.model_copy(update={"numa_node": 1 - position}) for position, gpu in enumerate(host.gpus)]
    on_nodes = tuple(replace(cpu, node=cpu.cpu // 4) for cpu in topology)
    dual = load_matrix("dual")
    pools = {}
    for name, gpus in (("known", tuple(crossed)), ("unknown", host.gpus)):
        plan = make_plan(dual, host.model_copy(update={"gpus": gpus}), on_nodes, SOURCE, now=NOW)
        pools[name] = {cell.case: cell.cpu_ids for cell in plan.cells}
    assert pools["known"]["n2"] == (4, 5, 6, 0, 1, 2)
    assert pools["known"]["n1"] == (4, 5, 6)
    assert pools["unknown"] == {"n1": (0, 1, 2), "n2": (0, 1, 2, 4, 5, 6)}


def test_the_warm_up_comes_first_then_blocks_in_turn() -> None:
    plan = plan_for(toy_matrix(repeats=3))
    assert [cell.id for cell in plan.cells] == [
        "warmup1_slow",
        *("slow_r1", "fast_r1"),
        *("fast_r2", "slow_r2"),
        *("slow_r3", "fast_r3"),
    ]
    assert [cell.warmup for cell in plan.cells] == [True] + [False] * 6


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=6, unique=True), st.integers(1, 9))
def test_every_block_holds_every_case_once_and_neighbouring_blocks_mirror(names: list[str], repeats: int) -> None:
    order = interleave(names, repeats)
    blocks = [order[i : i + len(names)] for i in range(0, len(order), len(names))]
    assert len(blocks) == repeats
    for number, block in enumerate(blocks, start=1):
        assert [repeat for _, repeat in block] == [number] * len(names)
        assert [name for name, _ in block] == (names if number % 2 else names[::-1])


@given(st.integers(2, 6), st.integers(1, 5))
def test_a_steady_drift_of_the_host_hits_all_cases_alike(cases: int, pairs: int) -> None:
    """A B B A: over any even number of blocks every case runs at the same mean place in the session."""
    order = [name for name, _ in interleave("abcdef"[:cases], 2 * pairs)]
    places = {name: [place for place, other in enumerate(order) if other == name] for name in order}
    assert {len(found) for found in places.values()} == {2 * pairs}
    assert len({sum(found) for found in places.values()}) == 1
    assert all(order[i] == order[i - 1] for i in range(cases, len(order), cases))  # blocks meet at one case


overrides = st.lists(st.sampled_from(["algo.num_envs=64", "algo.num_envs=128", "algo.seed=2"]), unique=True, max_size=2)
variants = st.fixed_dictionaries(
    {
        "overrides": overrides.map(tuple),
        "workers": st.sampled_from([1, 2, "default", "all"]),
        "environment": st.dictionaries(st.sampled_from(["NCCL_ALGO", "OMP_NUM_THREADS"]), st.sampled_from("12")),
    }
)


@given(variants, variants, st.integers(20, 40), st.integers(20, 40))
def test_contents_are_equal_exactly_where_hashes_are(
    one: dict[str, object], other: dict[str, object], iterations: int, others: int
) -> None:
    def cell(changes: dict[str, object], iterations: int) -> Cell:
        matrix = toy_matrix(repeats=1, warmup=0, comparisons=(), iterations=iterations)
        return plan_for(matrix.model_copy(update={"cases": (matrix.cases[0].model_copy(update=changes),)})).cells[0]

    same = (one, iterations) == (other, others)
    assert (cell(one, iterations).content_sha256 == cell(other, others).content_sha256) == same


@given(st.permutations(["slow", "fast", "more"]), st.integers(1, 4), st.integers(1, 8), st.booleans())
def test_order_host_and_prefix_do_not_change_what_a_cell_is(
    names: list[str], repeats: int, cpus: int, prefixed: bool
) -> None:
    matrix = toy_matrix(repeats=repeats, warmup=0, comparisons=())
    cases = [matrix.cases[0].model_copy(update={"name": name}) for name in ("slow", "fast", "more")]
    sorted_names = {case.name: case for case in cases}
    base = plan_for(matrix.model_copy(update={"cases": tuple(cases)}))
    moved = matrix.model_copy(update={"cases": tuple(sorted_names[name] for name in names)})
    found = plan_for(moved, cpus=cpus, prefix="p" if prefixed else None)
    assert {(c.case, c.repeat): c.content_sha256 for c in found.cells} == {
        (c.case, c.repeat): c.content_sha256 for c in base.cells
    }
    assert {c.id.removeprefix("p_") for c in found.cells} == {c.id for c in base.cells}
    assert len({c.id for c in found.cells}) == len({c.content_sha256 for c in found.cells}) == len(found.cells)


def test_commands_follow_the_trainers_command_line() -> None:
    cell = plan_for(load_matrix("smoke"), cpus=2).cells[2]
    assert cell.id == "workers2_r1"
    assert cell.arguments[:11] == (
        *("--algo", "sac", "--task", "g1_walk_flat", "--sim", "mujoco"),
        *("training.log_dir=runs/workers2_r1", "training.no_play=true", "training.smoke=true"),
        "training.record_states=8",
        "algo.max_iterations=100",
    )
    assert "env.cpu_ids=[0,1]" in cell.arguments
    assert cell.environment == {"PYTHONUNBUFFERED": "1"}


def test_a_gpu_case_gets_its_device_and_leaves_a_cpu_for_the_learner() -> None:
    cell = plan_for(load_matrix("single"), cpus=16, gpus=2).cells[1]
    assert (cell.id, cell.gpus, cell.world_size) == ("n1_r1", ("GPU-0",), 1)
    assert cell.cpu_ids == tuple(range(15))
    assert cell.environment["CUDA_VISIBLE_DEVICES"] == "GPU-0"
    assert not any("smoke" in word for word in cell.arguments)


def test_two_ranks_get_two_equal_pools_and_one_rank_the_first_of_them() -> None:
    plan = plan_for(load_matrix("dual"), cpus=16, gpus=2)
    one, two = (next(cell for cell in plan.cells if cell.id == name) for name in ("n1_r1", "n2_r1"))
    assert [cell.id for cell in plan.cells] == ["warmup1_n1", "n1_r1", "n2_r1", "n2_r2", "n1_r2", "n1_r3", "n2_r3"]
    first, second = tuple(range(7)), tuple(range(8, 15))
    assert (one.world_size, one.cpu_ids, one.pools) == (1, first, (first,))
    assert (two.world_size, two.cpu_ids, two.pools) == (2, first + second, (first, second))
    assert "env.cpu_ids=[0,1,2,3,4,5,6]" in one.arguments
    assert "training.dp_collector_cpu_ids=[[0,1,2,3,4,5,6],[8,9,10,11,12,13,14]]" in two.arguments
    assert not any(word.startswith("env.cpu_ids") for word in two.arguments)
    assert two.environment["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    check_plan(plan)


def test_a_dry_run_shows_the_pool_of_every_rank() -> None:
    lines = "\n".join(plan_lines(plan_for(load_matrix("dual"), cpus=16, gpus=2))).splitlines()
    (row,) = [line.split() for line in lines if " n2_r1 " in line]
    assert row[:-1] == ["3", "n2_r1", "measured", "2", "x", "7", "0-6", "+", "8-14", "GPU-0,GPU-1"]


def test_one_gpu_skips_two_ranks_with_the_reason() -> None:
    plan = plan_for(load_matrix("dual"), cpus=16, gpus=1)
    skipped = {cell.case: cell.skip_reason for cell in plan.cells if cell.skip_reason}
    assert skipped == {"n2": "asks for GPU position 1, this host shows 1 GPU (counted from 0)"}
    assert {cell.pools for cell in plan.runnable} == {(tuple(range(7)),)}
    check_plan(plan)


def test_several_ranks_of_a_smoke_matrix_need_no_gpu() -> None:
    case = toy_matrix().cases[0].model_copy(update={"gpus": (0, 1)})
    plan = plan_for(toy_matrix(cases=(case,), comparisons=()), cpus=2)
    assert {cell.pools for cell in plan.cells} == {((0,), (1,))}
    assert plan.cells[0].environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert default_out_dir(plan, make_host(gpu_count=2)[0]).name == "2026-11-29_toy_smoke_0123456"
    assert plan_for(toy_matrix(cases=(case,), comparisons=()), cpus=1).cells[0].skip_reason == (
        "asks for 2 ranks, this host offers 1 CPU"
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"cpu_ids": (0, 1, 2)}, "cpu_ids of cell 'slow_r1'"),  # three CPUs of two ranks
        ({"world_size": 1}, "world_size of cell 'slow_r1'"),
    ],
)
def test_pools_that_the_matrix_does_not_give_are_refused(change: dict[str, object], problem: str) -> None:
    case = toy_matrix().cases[0].model_copy(update={"gpus": (0, 1)})
    plan = plan_for(toy_matrix(cases=(case,), comparisons=(), warmup=0))
    changed = plan.cells[0].model_copy(update=change)
    other = plan.model_copy(update={"cells": (plan.cells[0], changed)})
    twisted = other.model_copy(update={"cells": (changed.model_copy(update={"id": "slow_r1"}), plan.cells[1])})
    with pytest.raises(UsageError, match=problem):
        check_plan(twisted)


def test_what_the_host_cannot_hold_is_skipped_with_the_reason_and_not_warmed_up() -> None:
    plan = plan_for(load_matrix("smoke"), cpus=1)
    skipped = {cell.id: cell.skip_reason for cell in plan.cells if cell.skip_reason}
    assert set(skipped) == {"workers2_r1", "workers2_r2", "workers2_r3"}
    assert set(skipped.values()) == {"asks for 2 workers, this host offers 1 CPU"}
    assert [cell.id for cell in plan.runnable] == ["warmup1_workers1", "workers1_r1", "workers1_r2", "workers1_r3"]
    assert plan_for(load_matrix("single")).runnable == ()


def test_content_hashes_depend_on_content_alone() -> None:
    here, there = plan_for(toy_matrix(), cpus=4), plan_for(toy_matrix(), cpus=2, prefix="again")
    assert [cell.content_sha256 for cell in here.cells] == [cell.content_sha256 for cell in there.cells]
    assert len({cell.content_sha256 for cell in here.cells}) == len(here.cells)
    other = plan_for(toy_matrix(iterations=41))
    assert not {cell.content_sha256 for cell in here.cells} & {cell.content_sha256 for cell in other.cells}


def test_a_prefix_begins_every_name() -> None:
    assert all(cell.id.startswith("mine_") for cell in plan_for(toy_matrix(), prefix="mine").cells)


@pytest.mark.parametrize("created", ["yesterday", "2026-11-30", "2026-1-30T00:00:00Z", "2026-13-01T00:00:00Z"])
def test_a_plan_of_no_time_is_refused(created: str) -> None:
    plan = plan_for(toy_matrix()).model_dump(mode="json")
    with pytest.raises(UsageError, match=r"plan\.json: created: "):
        parse_model(Plan, canonical_json({**plan, "created": created}), "plan.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix": "../x"}, "--prefix '../x': use small letters"),
        ({"prefix": "x\n"}, "--prefix"),
        ({"timeout": 0.0}, "--timeout 0: must be above 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_for(toy_matrix(), **options)


def test_two_cells_of_one_name_are_refused() -> None:
    slow = toy_matrix().cases[0]
    names = ("a_r1", "warmup1_a")  # the warm-up of the first and the first repeat of the second
    cases = tuple(slow.model_copy(update={"name": name}) for name in names)
    with pytest.raises(UsageError, match="two cells would be called 'warmup1_a_r1'"):
        plan_for(toy_matrix(cases=cases, comparisons=()))


def test_only_present_variables_are_named_as_cleared() -> None:
    plan = plan_for(toy_matrix(), inherited=["NCCL_DEBUG", "NCCL_PROTO", "CUDA_VISIBLE_DEVICES"])
    assert plan.cleared_environment == ("NCCL_PROTO", "CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize("name", ["NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_P2P_LEVEL", "NCCL_NET"])
def test_a_variable_that_wins_over_the_transport_of_a_case_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"'ranks2_shm' sets training.nccl_transport=shm, but {name} of the environ"):
        plan_for(load_matrix("ablation"), 32, 2, inherited=["NCCL_DEBUG", name])
    plan_for(load_matrix("ablation"), 32, 1, inherited=[name])  # two ranks are skipped
    plan_for(load_matrix("dual"), 32, 2, inherited=[name])  # asks for no transport, so a user's variables go on winning
    plan_for(load_matrix("ablation"), 32, 2, inherited=["NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLED"])


def test_a_cases_own_variable_may_not_win_over_its_transport() -> None:
    matrix = load_matrix("ablation")
    cases = tuple(case.model_copy(update={"environment": {"NCCL_SHM_DISABLE": "1"}}) for case in matrix.cases)
    with pytest.raises(UsageError, match="NCCL_SHM_DISABLE of the environment would win over it; unset what is set"):
        plan_for(matrix.model_copy(update={"cases": cases}), 32, 2)


def test_time_is_estimated_for_what_can_run() -> None:
    matrix = toy_matrix(startup_estimate_seconds=3.0, iteration_estimate_seconds=0.5, iterations=10)
    assert plan_for(matrix).estimated_seconds == 5 * (3.0 + 10 * 0.5)


def test_a_plan_survives_its_file() -> None:
    plan = plan_for(toy_matrix())
    assert parse_model(Plan, canonical_json(plan), "plan.json") == plan
    assert plan.trainer == ("python", "-m", "unilab.train")
    assert plan.created == "2026-11-29T12:00:01Z"


@pytest.mark.parametrize("prefix", [None, "mine", "mine_"])
@pytest.mark.parametrize(
    ("name", "cpus", "gpus"), [("smoke", 1, 0), ("smoke", 4, 0), ("single", 16, 1), ("single", 4, 0), ("dual", 16, 2)]
)
def test_a_plan_is_what_its_own_matrix_gives(name: str, cpus: int, gpus: int, prefix: str | None) -> None:
    check_plan(plan_for(load_matrix(name), cpus, gpus, prefix=prefix))


@pytest.mark.parametrize(
    ("number", "change", "problem"),
    [
        (1, {"id": "fast_r1"}, "two cells would be called 'fast_r1'"),
        (1, {"id": "other_r1"}, "id of cell 'other_r1' is not what its own matrix gives"),
        (1, {"case": "fast"}, "case of cell 'slow_r1'"),
        (1, {"repeat": 3}, "repeat of cell 'slow_r1'"),
        (1, {"warmup": True}, "warmup of cell 'slow_r1'"),
        (1, {"content_sha256": "0" * 64}, "content_sha256 of cell 'slow_r1'"),
        (1, {"cpu_ids": (1,)}, "cpu_ids of cell 'slow_r1'"),
        (2, {"arguments": ("--algo", "ppo")}, "arguments of cell 'fast_r1'"),
        (2, {"environment": {"FAKE_RATE": "99000"}}, "environment of cell 'fast_r1'"),
    ],
)
def test_a_cell_that_its_matrix_does_not_give_is_refused(number: int, change: dict[str, object], problem: str) -> None:
    plan = plan_for(toy_matrix())
    cells = list(plan.cells)
    cells[number] = cells[number].model_copy(update=change)
    with pytest.raises(UsageError, match=problem):
        check_plan(plan.model_copy(update={"cells": tuple(cells)}))


def test_a_plan_of_other_cells_than_its_matrix_has_is_refused() -> None:
    plan = plan_for(toy_matrix())

    def with_cells(*cells: Cell) -> Plan:
        return plan.model_copy(update={"cells": cells})

    with pytest.raises(UsageError, match="id of cell 'fast_r1' is not"):
        check_plan(with_cells(plan.cells[0], plan.cells[2], plan.cells[1], *plan.cells[3:]))
    with pytest.raises(UsageError, match="its matrix gives 5 cells, it holds 4"):
        check_plan(with_cells(*plan.cells[:4]))
    with pytest.raises(UsageError, match="case 'slow' has no cell"):
        check_plan(with_cells(plan.cells[2]))
    more = plan.matrix.model_copy(update={"iterations": 41})
    with pytest.raises(UsageError, match="content_sha256 of cell 'warmup1_slow'"):
        check_plan(plan.model_copy(update={"matrix": more}))


@pytest.mark.parametrize(
    ("planned", "found", "same"),
    [
        ("a=1", "a=1", True),
        ("a=1", "a=2", False),
        ("a=<project>/x", "a=<home>/code/x", True),
        ("a=<home>/x", "a=/root/x", True),
        ("a=<home>", "a=2", False),
        ("g1_<user>_flat", "g1_walk_flat", True),
        ("a=<other>", "a=1", False),
    ],
)
def test_words_are_equal_up_to_what_was_replaced(planned: str, found: str, same: bool) -> None:
    assert same_words([planned], [found]) == same == same_words([found], [planned])
    assert not same_words([planned], [])


def test_a_published_plan_with_replaced_paths_fits_its_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    from repro.redact import Redactor
    from repro.session import published_plan

    monkeypatch.setattr("pathlib.Path.home", lambda: Path("/home/marie"))
    plan = published_plan(plan_for(toy_matrix(overrides=("algo.x=/home/marie/y",))), Redactor())
    assert "algo.x=<home>/y" in plan.cells[0].arguments
    check_plan(plan)
