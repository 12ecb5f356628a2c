"""The group of ranks itself; what ranks learn together is in `sac/test_learner_ranks.py`, also under torchrun in
`test_train_ranks.py`."""

from __future__ import annotations

import socket
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


def test_a_rank_that_does_not_come_is_named_in_time(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"rank 1 waited 0\.1 s for 3 ranks; not there: 0, 2"):
        DataParallel.join(1, 3, CPU, tmp_path / "meeting", timeout=0.1)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (0, r"rank 0 waited 0\.3 s for 2 ranks; not there: 1"),
        (1, r"rank 1 waited 0\.3 s for rank 0 at MASTER_ADDR=127\.0\.0\.1, MASTER_PORT=\d+: .*refused"),
    ],
)
def test_a_launchers_rank_says_whom_it_waited_for(monkeypatch: pytest.MonkeyPatch, rank: int, message: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(TimeoutError, match=message):
        DataParallel.join(rank, 2, CPU, None, timeout=0.3)


def test_facts_of_one_rank_are_its_own() -> None:
    assert DataParallel().collect({"a": 1}) == [{"a": 1}]
