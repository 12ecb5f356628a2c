"""The group of ranks itself; what ranks learn together is in `sac/test_learner_ranks.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unilab.data_parallel import DataParallel

CPU = torch.device("cpu")


def test_one_rank_makes_no_group_and_changes_nothing() -> None:
    for ranks in (DataParallel(), DataParallel.join(0, 1, CPU, Path("nowhere"))):
        values = torch.tensor([1.0, torch.inf])
        ranks.average(values)
        ranks.broadcast([values])
        assert values.tolist() == [1.0, torch.inf]
        assert ranks.gather(values).tolist() == [[1.0, torch.inf]]
        assert not torch.distributed.is_initialized() and not Path("nowhere").exists()
        assert ranks.facts(10, captured=True)["mode"] == "none"
        ranks.close()


@pytest.mark.slow
def test_torchrun_starts_ranks_too(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys, torch\n"
        "from unilab.data_parallel import DataParallel\n"
        "from unilab.ranks import plan_ranks\n"
        "plan = plan_ranks(os.environ)\n"
        "ranks = DataParallel.join(plan.rank, plan.world_size, torch.device('cpu'), None, timeout=60)\n"
        "values = torch.tensor([float(plan.rank)])\n"
        "ranks.average(values)\n"
        "ranks.close()\n"
        "print(plan.rank, plan.world_size, plan.entry, values.item(), file=open(sys.argv[1] + str(plan.rank), 'w'))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    environment |= {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, str(script), f"{tmp_path}/out"], env=environment, capture_output=True, text=True, timeout=110
    )
    assert ended.returncode == 0, ended.stderr
    assert [(tmp_path / f"out{rank}").read_text() for rank in range(2)] == ["0 2 0 0.5\n", "1 2 1 0.5\n"]


def test_a_rank_that_does_not_come_is_named_in_time(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"rank 1 waited 0\.1 s for 3 ranks; not there: 0, 2"):
        DataParallel.join(1, 3, CPU, tmp_path / "meeting", timeout=0.1)
    assert not torch.distributed.is_initialized()


def test_facts_of_one_rank_are_its_own() -> None:
    assert DataParallel().collect({"a": 1}) == [{"a": 1}]
