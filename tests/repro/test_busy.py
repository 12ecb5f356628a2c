"""GPUs that something else uses: found before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from session_builder import SOURCE, TRAINER, make_host, matrix_text

from repro.busy import busy_gpus
from repro.cli import main
from repro.gpus import GpuLoad
from repro.host import Host
from repro.matrix import Matrix, parse_matrix
from repro.plan import make_plan

TEXT = matrix_text({"n1": {}}).replace("smoke = true", "smoke = false").replace("workers = 1\n", "gpus = [0]\n")
BUSY = "GPU 1 is busy (1 process, 97 %, 3.0 GiB); end what uses it, nvidia-smi names it, or set CUDA_VISIBLE_DEVICES to"


def use_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else computes on the second of two GPUs."""
    idle = GpuLoad(position=0, processes=0, utilization=0, used_bytes=2**29)
    busy = GpuLoad(position=1, processes=1, utilization=97, used_bytes=3 * 2**30)
    monkeypatch.setattr("repro.busy.gpu_loads", lambda: (idle, busy))


def found(host: Host, matrix: Matrix) -> str | None:
    return busy_gpus(make_plan(matrix, host, make_host(cpus=8)[1], SOURCE), host)


@pytest.mark.parametrize(
    ("entries", "busy"),
    [
        (("GPU-0", "GPU-1"), False),
        (("GPU-1", "GPU-0"), True),
        (("1",), True),
        (("01",), True),
        (("0", "1"), False),
        (("gpu-1",), True),
        (("MIG-1",), False),
    ],
)
def test_only_gpus_that_a_run_would_open_are_looked_at(
    entries: tuple[str, ...], busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_second(monkeypatch)
    host, _ = make_host(cpus=8, gpu_count=2, visible_gpus=entries)
    said = found(host, parse_matrix(TEXT, "m.toml"))
    assert (said or "").startswith(BUSY if busy else "") and (said is not None) == busy


def test_ranks_of_a_smoke_matrix_open_none(monkeypatch: pytest.MonkeyPatch) -> None:
    use_second(monkeypatch)
    host, _ = make_host(cpus=8, gpu_count=2)
    text = TEXT.replace("smoke = false", "smoke = true").replace("[0]", "[0, 1]").replace('"default"', "1")
    assert found(host, parse_matrix(text, "m.toml")) is None
    assert found(host, parse_matrix(text.replace("smoke = true", "smoke = false"), "m.toml")) is not None


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder on a host whose second GPU is in use, and the first one hidden."""
    use_second(monkeypatch)
    for module in ("cli", "scaling"):
        monkeypatch.setattr(f"repro.{module}.find_host", lambda: make_host(cpus=8, gpu_count=2, visible_gpus=("1",)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.toml").write_text(TEXT)
    return tmp_path


@pytest.mark.parametrize("words", [["run", "--matrix", "m.toml"], ["run", "--matrix", "auto"], ["scaling"]])
def test_a_busy_gpu_is_refused_before_anything_is_started(
    words: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words, trainer=["/nonexistent"]) == 3
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith("matrix ")]
    assert len(lines) == 1 and lines[0].startswith(f"repro: nothing was started: {BUSY}") and captured.out == ""
    assert [path.name for path in here.iterdir()] == ["m.toml"]


@pytest.mark.parametrize("words", [["plan"], ["plan", "--json"], ["run", "--dry-run"]])
def test_a_plan_says_it_and_ends_as_before(
    words: list[str], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--matrix", "m.toml"]) == 0
    busy = capsys.readouterr()
    assert busy.err.startswith(f"a run would be refused now: {BUSY}") and busy.err.count("\n") == 1
    monkeypatch.setattr("repro.busy.gpu_loads", tuple)
    assert main([*words, "--matrix", "m.toml"]) == 0
    idle = capsys.readouterr()
    assert idle.err == "" and len(idle.out) == len(busy.out)


def test_a_session_goes_on_when_the_gpu_is_free_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had is untouched meanwhile; a session with nothing left to run needs no GPU."""
    command = ["run", "--matrix", "m.toml", "--out", "out"]
    with monkeypatch.context() as patch:
        patch.setattr("repro.busy.gpu_loads", tuple)
        patch.setenv("FAKE_MODE", "crash")
        assert main(command, trainer=TRAINER) == 4
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    assert main([*command, "--resume"], trainer=TRAINER) == 3
    assert before == {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr("repro.busy.gpu_loads", tuple)
        assert main([*command, "--resume"], trainer=TRAINER) == 0
    Path("out/MANIFEST.sha256").unlink()  # as if it had been killed before its page was written
    assert main([*command, "--resume"], trainer=TRAINER) == 0
