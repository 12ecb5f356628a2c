"""Two images, compared with an engine whose containers are the fake trainer; `tests/docker` has a real one."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import fake_probe
import pytest
from fake_engine import FakeContainer, FakeEngine, RefusedError, image_labels
from session_builder import TRAINER, make_host, matrix_text

from repro import ab as ab_module
from repro import cli
from repro.docker_executor import CELL_LABEL, CODE
from repro.docker_image import SOURCES_LABEL
from repro.errors import UsageError
from repro.evidence import read_evidence
from repro.journal import read_journal
from repro.layout import PLAN_FILE, RESULT_FILE
from repro.provenance import Source
from repro.result import Result
from repro.schema import canonical_json, read_model
from repro.verify import verify

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the executor is for Linux")

MATRIX = matrix_text({"one": {}}, name="base", repeats=2, warmup=1)
PROBED = MATRIX.replace("warmup = 1", 'warmup = 1\nprobes = ["communication"]')
RATES = {"suite:old": 10_000, "suite:new": 15_000}
IDS = {name: "sha256:" + 64 * digit for name, digit in zip(RATES, "ab", strict=True)}
OLD, NEW = IDS.values()
VERSIONS = {name: importlib.metadata.version(name) for name in ("torch", "matplotlib")}  # outside
REFS = ("image:suite:old", "image:suite:new")


class ImageEngine(FakeEngine):
    """An engine with an image for each of `RATES`, whose containers run the fake trainer with its rate."""

    def __init__(self) -> None:
        super().__init__()
        self.sources = {name: make_source(digit) for name, digit in zip(RATES, "56", strict=True)}
        self.versions = dict.fromkeys(RATES, "2.13.0")  # of torch
        self.gpus = 0
        self.interrupted: str | None = None  # cell that Ctrl-C meets
        self.on_start, self.on_wait = self._start, self._wait
        for name, source in self.sources.items():
            self.add(name, IDS[name], image_labels(source))

    def add(self, name: str, identity: str, labels: dict[str, str]) -> None:
        self.images_by_name[name] = self.images_by_name[identity] = SimpleNamespace(id=identity, labels=labels)

    def images_of(self, *cells: str) -> list[str]:
        """Images of the containers of these cells, in the order they were made."""
        return [options["image"] for options in self.created if options["labels"][CELL_LABEL] in cells]

    def _start(self) -> None:
        options = self.created[-1]
        name = next(name for name in RATES if self.images_by_name[name].id == options["image"])
        if options["command"][1] == "-c":
            self.output = self._facts(name, options["command"][2]).encode() + b"\n"
        elif options["labels"][CELL_LABEL] != self.interrupted:
            done = subprocess.run(
                self._program(options["command"]),
                cwd=options["working_dir"],
                env=self._environment(name, options["environment"]),
                capture_output=True,
                check=False,
            )
            self.output = done.stdout + done.stderr
            self.present[-1].attrs["State"]["ExitCode"] = done.returncode

    def _facts(self, name: str, program: str) -> str:
        if program == CODE:
            return self.sources[name].model_dump_json()
        return make_host(versions={"python": "3.12.0", "torch": self.versions[name]})[0].model_dump_json()

    def _program(self, command: list[str]) -> list[str]:
        if command[1:4] == ["-P", "-m", "unilab.probes"]:
            return [sys.executable, fake_probe.__file__, *command[4:]]
        return [sys.executable, *command[1:]]

    def _environment(self, name: str, own: dict[str, str]) -> dict[str, str]:
        source = self.sources[name]
        git = {key: getattr(source, key) for key in ("commit", "dirty", "diff_sha256")}
        code = {"git": git, "source_sha256": source.trainer_sha256, "versions": {"torch": self.versions[name]}}
        return {**os.environ, **own, "FAKE_RATE": f"{RATES[name]}", "FAKE_CODE": json.dumps(code)}

    def _wait(self, container: FakeContainer, timeout: float) -> None:
        if container.labels[CELL_LABEL] == self.interrupted and not container.signals:
            signal.raise_signal(signal.SIGINT)


def make_source(digit: str) -> Source:
    return Source(
        origin="stamp",
        commit=40 * digit,
        dirty=False,
        diff_sha256=None,
        sources_sha256=64 * digit,
        trainer="<project>/unilab",
        trainer_sha256=64 * digit,
    )


@contextlib.contextmanager
def image_engine(folder: Path) -> Iterator[ImageEngine]:
    """An engine for what this process runs in `folder`; no container may be left in it."""
    found = ImageEngine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("repro.docker_executor.connect", lambda: found)
        patch.setattr("repro.launch.run_cell", None)  # nothing may be started outside of containers
        patch.setattr(ab_module, "find_host", lambda: make_host(gpu_count=found.gpus, versions=VERSIONS))
        patch.chdir(folder)
        yield found
    assert found.is_closed and found.present == []


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[ImageEngine]:
    with image_engine(tmp_path) as found:
        use_matrix(MATRIX)
        yield found


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ImageEngine, list[str]]:
    """The folder of a comparison that has ended, its engine, and what it printed."""
    folder, printed = tmp_path_factory.mktemp("images"), io.StringIO()
    with image_engine(folder) as found, contextlib.redirect_stdout(printed):
        use_matrix(PROBED)
        assert run_ab(*REFS) == 0
    return folder / "out", found, printed.getvalue().splitlines()


@pytest.fixture
def finished(comparison: tuple[Path, ImageEngine, list[str]], tmp_path: Path) -> Path:
    """A fresh copy of its folder."""
    return Path(shutil.copytree(comparison[0], tmp_path / "report"))


def use_matrix(text: str) -> None:
    Path("base.toml").write_text(text)


def run_ab(*words: str) -> int:
    return cli.main(["ab", *words, "--matrix", "base.toml", "--out", "out"], trainer=TRAINER)


def test_a_faster_image_is_found_faster_by_its_factor(comparison: tuple[Path, ImageEngine, list[str]]) -> None:
    out, _, lines = comparison
    assert lines[-6].startswith("SMOKE, not a benchmark: B (suite:new) runs at 1.")
    assert "the rate of A (suite:old) (95 % interval [1." in lines[-6]
    assert lines[-6].endswith("], n = 2): faster, beyond the noise.")
    assert read_model(Result, out / RESULT_FILE).comparisons[0].ratio == pytest.approx(1.5, rel=0.02)


def test_each_side_runs_in_its_own_image_and_probes_in_that_of_the_change(
    comparison: tuple[Path, ImageEngine, list[str]],
) -> None:
    out, engine, _ = comparison
    made = [(item["image"], "unilab.probes" in item["command"]) for item in engine.created]
    looks = [(OLD, False), (NEW, False)] * 2
    assert made == [*looks, (NEW, True), *((image, False) for image in (OLD, NEW, OLD, NEW, NEW, OLD))]
    assert "Probes ran with the code of b, the change." in (out / "report.md").read_text()


def test_plan_and_page_name_both_images_and_their_code(finished: Path) -> None:
    plan = read_evidence(finished).plan
    assert {side: (image.image, image.image_id) for side, image in plan.images.items()} == {
        "a": ("suite:old", OLD),
        "b": ("suite:new", NEW),
    }
    assert [plan.sources[side].sources_sha256 for side in "ab"] == [64 * "5", 64 * "6"]
    page = (finished / "report.md").read_text()
    assert page.startswith("# SMOKE: sac on g1_walk_flat (mujoco), A (suite:old) against B (suite:new)\n")
    assert re.search(rf"\| image of a +\| suite:old {OLD}, sources 555555555555… ", page)
    assert re.search(rf"\| image of b +\| suite:new {NEW}, sources 666666666666… ", page)
    assert f"commit {40 * '5'} " in page and f"commit {40 * '6'} " in page
    assert "image of every run" not in page and "PYTHONPATH" not in page and "ommits" not in page
    assert verify([finished], print)


def test_a_run_of_other_code_than_its_image_is_refused(finished: Path) -> None:
    path = finished / "runs" / "b_r1" / "command.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "source_sha256": 64 * "5"}))
    found = {item.cell.id: item.reason for item in read_evidence(finished).cells if item.status == "refused"}
    assert found == {"b_r1": "other_code: ran trainer sources 555555555555…, but the plan was made for 666666666666…"}


def test_a_plan_whose_images_are_not_those_of_its_sources_is_refused(finished: Path) -> None:
    plan = json.loads((finished / PLAN_FILE).read_text())
    for images in ({"a": plan["images"]["a"]}, {**plan["images"], "b": plan["images"]["a"]}):
        (finished / PLAN_FILE).write_text(canonical_json({**plan, "images": images}))
        with pytest.raises(UsageError, match=r"plan\.json: images must name one for each of its sources, and executor"):
            read_evidence(finished)


def test_other_versions_are_said_and_compared(engine: ImageEngine, capfd: pytest.CaptureFixture[str]) -> None:
    engine.versions["suite:new"] = "2.14.0"
    engine.sources["suite:new"] = engine.sources["suite:new"].model_copy(update={"trainer_sha256": 64 * "5"})
    assert run_ab(*REFS, "--repeats", "1") == 0
    output, page = capfd.readouterr().out, Path("out/report.md").read_text()
    for remark in (
        "Both images have the same trainer, so that a difference of their rates is that of what else they hold, or "
        "the host's.",
        "The images hold different versions: torch 2.13.0 in a, torch 2.14.0 in b.",
    ):
        assert f"{remark}\n" in output and f"- {remark}\n" in page


# What is refused.


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and message, which must be one line; no report may have been begun."""
    code = run_ab(*words)
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("matrix ")]
    assert len(lines) == 1 and not Path("out").exists()
    return code, lines[0].removeprefix("repro: ")


def test_an_image_that_is_not_there_is_refused(engine: ImageEngine, capsys: pytest.CaptureFixture[str]) -> None:
    code, message = refusal(capsys, REFS[0], "image:suite:nope")
    assert code == 3
    assert message.startswith("the engine gives no image suite:nope (No such image: suite:nope); build it: make image")


def test_an_image_without_labels_is_refused_before_it_is_started(
    engine: ImageEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.add("suite:new", NEW, {})
    code, message = refusal(capsys, *REFS)
    assert code == 3
    assert message.startswith(f"image suite:new has no label {SOURCES_LABEL}: nothing says which code it holds; build")
    assert engine.created == []


def test_an_image_that_holds_other_code_than_its_label_says_is_refused(
    engine: ImageEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.add("suite:new", NEW, image_labels(engine.sources["suite:old"]))
    code, message = refusal(capsys, *REFS)
    assert (code, message) == (
        3,
        "image suite:new holds sources 666666666666, its label says 555555555555; build it again",
    )


def test_the_same_image_under_two_names_is_refused(engine: ImageEngine, capsys: pytest.CaptureFixture[str]) -> None:
    code, message = refusal(capsys, REFS[0], f"image:{OLD}")
    assert (code, message) == (2, f"image:suite:old and image:{OLD} are the same image, {OLD}; name two")


def test_an_image_that_alone_can_use_the_gpus_is_refused(
    engine: ImageEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.gpus, engine.versions["suite:old"] = 1, "2.13.0+cpu"
    code, message = refusal(capsys, *REFS)
    assert (code, message) == (
        3,
        "image:suite:old: torch 2.13.0+cpu is built without CUDA; image:suite:new uses the GPUs",
    )


def test_an_engine_without_a_gpu_runtime_is_refused(engine: ImageEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.gpus = 1
    use_matrix(MATRIX.replace("smoke = true", "smoke = false").replace("workers = 1", "workers = 1\ngpus = [0]"))
    start = engine.on_start

    def refuse() -> None:
        if engine.created[-1]["device_requests"]:
            raise RefusedError('could not select device driver "nvidia"')
        start()

    engine.on_start = refuse
    code, message = refusal(capsys, *REFS)
    assert code == 3 and message.startswith("the engine gives containers no GPU: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["HEAD", REFS[0]], f"{REFS[0]} is an image and the other side a commit; name two images, or two commits"),
        ([REFS[0], "image:"], "image: names no image; give image:NAME, as in image:unilab-repro:cuda"),
    ],
)
def test_sides_that_are_not_two_images_are_a_usage_error(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, *words) == (2, message)


def test_a_dry_run_names_both_images_and_starts_no_run(engine: ImageEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_ab(*REFS, "--dry-run") == 0
    line = f"each run in a container of a suite:old ({OLD}), b suite:new ({NEW}); CPUs: a 0-1, b 0-1\n"
    assert line in capsys.readouterr().out
    assert {options["labels"][CELL_LABEL] for options in engine.created} == {"facts", "code"}


# What goes on.


def test_an_interrupted_comparison_goes_on_in_the_same_images(engine: ImageEngine) -> None:
    use_matrix(MATRIX.replace("warmup = 1", "warmup = 0"))
    engine.interrupted = "b_r1"
    assert run_ab(*REFS) == 130
    done, engine.interrupted = len(engine.created), None
    assert run_ab(*REFS, "--resume") == 0
    again = [options["labels"][CELL_LABEL] for options in engine.created[done:]]
    assert again == ["facts", "facts", "code", "code", "b_r1", "b_r2", "a_r2"]
    assert engine.images_of("b_r1", "b_r2") == [NEW] * 3 and engine.images_of("a_r2") == [OLD]
    assert "session_resumed" in [entry.event for entry in read_journal(Path("out"))]
    assert verify([Path("out")], print)


def test_another_image_of_the_same_name_is_not_gone_on_with(
    engine: ImageEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.interrupted = "warmup1_a"
    assert run_ab(*REFS) == 130
    capsys.readouterr()
    before = Path("out/journal.jsonl").read_bytes()
    engine.add("suite:old", "sha256:" + 64 * "c", image_labels(engine.sources["suite:old"]))
    assert run_ab(*REFS, "--resume") == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(f'repro: --resume out: images.a.image_id in its plan.json is "{OLD[:58]}')
    assert Path("out/journal.jsonl").read_bytes() == before
