"""The documents against the code: tags, files and fields, links, commands, exit codes."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from repro.arguments import build_parser
from repro.as_planned import MISSING_PROVENANCE, NOT_AS_PLANNED, OTHER_CODE
from repro.events import Reason, read_scalars
from repro.evidence import COPIED_EVENTS, NO_EVALUATION
from repro.stats import Verdict
from unilab import eval as evaluation
from unilab import names, train
from unilab.config import TASKS, load_config
from unilab.flash_sac.learner import METRICS

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
TINY = (
    "training.smoke=true training.no_play=true algo.num_envs=2 algo.batch_size=2 algo.updates_per_step=2 "
    "algo.max_iterations=2 algo.learning_starts=1 algo.replay_buffer_n=4 algo.actor_hidden_dim=4 "
    "algo.critic_hidden_dim=4 algo.num_atoms=3"
)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def rows(text: str) -> list[list[str]]:
    """Cells of every table row, headings and rules left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    rules = {index for index, row in enumerate(cells) if set("".join(row)) <= set("-: ")}
    return [row for index, row in enumerate(cells) if index not in rules and index + 1 not in rules]


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of any level."""
    _, found, rest = text.partition(f"\n{heading}\n")
    assert found, f"no heading {heading!r}"
    return re.split(r"\n#+ ", rest)[0]


def code(text: str) -> str:
    """The text of fenced blocks, continued lines joined."""
    return "\n".join(re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")


def leaves(value: Any, prefix: str = "") -> set[str]:
    """Field names of a JSON value as the documents write them: `host.gpus`, `ranks[].rank`."""
    if isinstance(value, dict):
        return {leaf for key, item in value.items() for leaf in leaves(item, f"{prefix}.{key}" if prefix else key)}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {leaf for item in value for leaf in leaves(item, f"{prefix}[]")}
    return {prefix}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("docs") / "run"
    route = ["--algo", "sac", "--task", "g1_walk_flat", "--sim", "mujoco"]
    recorded = ["training.trace_enabled=true", "training.record_states=2", f"training.log_dir={path}"]
    assert train.main([*route, *TINY.split(), *recorded]) == 0
    assert evaluation.main([*route, "--load-run", str(path), "--episodes", "2"]) == 0
    return path


def test_every_tag_is_documented_and_every_documented_tag_is_written(run_dir: Path) -> None:
    documented = {row[0].strip("`"): row[1] for row in rows(read("docs/metrics.md")) if "/" in row[0]}
    assert set(documented.values()) == {"kept", "redefined", "new", "dropped"}
    rewards = {f"reward/{entry.name}" for task in TASKS.values() for entry in fields(task.reward)}
    written = set(read_scalars(run_dir)) | set(METRICS) | rewards  # of the other algorithm and tasks too
    assert {tag for tag, status in documented.items() if status != "dropped"} == written


def test_tags_of_the_suite_are_documented() -> None:
    constants = {value for name, value in vars(names).items() if name.isupper() and "/" in str(value)}
    assert names.TOTAL_FPS in constants
    assert {row[0].strip("`") for row in rows(read("docs/metrics.md"))} >= constants


@pytest.mark.parametrize(
    "file", [names.CONFIG_FILE, names.COMMAND_FILE, names.MANIFEST_FILE, names.EVAL_FILE, names.RUN_END_FILE]
)
def test_fields_of_json_files_are_documented(run_dir: Path, file: str) -> None:
    content = json.loads((run_dir / file).read_text())
    if file == names.CONFIG_FILE:
        found = set(content)
    else:  # free content, described as one field
        found = leaves({key: {} if key in ("environment", "versions") else value for key, value in content.items()})
        found |= {"environment", "versions"} & set(content)
    documented = {row[0].strip("`") for row in rows(section(read("docs/metrics.md"), f"### `{file}`"))}
    assert documented == found


def test_fields_of_progress_lines_are_documented(run_dir: Path) -> None:
    lines = (run_dir / names.PROGRESS_FILE).read_text().splitlines()
    documented = {row[0].strip("`") for row in rows(section(read("docs/metrics.md"), f"### `{names.PROGRESS_FILE}`"))}
    assert len(lines) == 2
    assert all(set(json.loads(line)) == documented for line in lines)


def test_fields_of_a_checkpoint_are_documented(run_dir: Path) -> None:
    found = set(torch.load(run_dir / names.CHECKPOINT_PATTERN.format(iteration=2), weights_only=True))
    heading = f"### `{names.CHECKPOINT_PATTERN.format(iteration='<iteration>')}`"
    assert {row[0].strip("`") for row in rows(section(read("docs/metrics.md"), heading))} == found


def test_the_files_of_a_run_are_those_documented(run_dir: Path) -> None:
    headings = re.findall(r"^### `(.+)`$", read("docs/metrics.md"), re.MULTILINE)
    patterns = [re.escape(re.sub("<.+?>", "N", heading)).replace("N", r"\d+") for heading in headings]
    for path in run_dir.iterdir():
        assert [p for p in patterns if re.fullmatch(p, path.name)], f"{path.name} is not documented"
    assert len(list(run_dir.iterdir())) == len(patterns)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = document.parent / path if path else document
        assert linked.exists(), f"{document.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}, target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_named_in_backticks_exist(document: Path) -> None:
    pattern = r"`((?:unilab|repro|tests|docs)/[\w./-]*|\.ci/\w+)`"
    for name in re.findall(pattern, document.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), f"{document.name} names {name}"


def test_every_source_file_has_its_line_in_the_architecture() -> None:
    table = rows(section(read("docs/architecture.md"), "## Where things are"))
    listed = {name for row in table for name in re.findall("`(.+?)`", row[0])}
    folders = tuple(name for name in listed if name.endswith("/"))
    for package in ("unilab", "repro"):
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            assert name in listed or name.startswith(folders) or path.name == "__init__.py", f"{name} is not listed"


def test_tests_named_by_the_invariants_exist() -> None:
    table = section(read("docs/architecture.md"), "## What must hold, and which test says so")
    for file, test in re.findall(r"`([\w/]+\.py)::(\w+)`", table):
        assert f"def {test}(" in read(file), f"{file} has no {test}"


def test_every_reason_for_no_number_is_documented() -> None:
    documented = {row[0].strip("`") for row in rows(section(read("docs/metrics.md"), "### No number"))}
    own = {NOT_AS_PLANNED, MISSING_PROVENANCE, OTHER_CODE, COPIED_EVENTS, NO_EVALUATION}
    assert documented == own | set(Reason)


def test_every_verdict_is_documented() -> None:
    documented = re.findall(r"`([a-z_]+)`", section(read("docs/reports.md"), "## Verdicts"))
    assert set(documented) >= set(get_args(Verdict))


def test_the_suites_commands_of_the_readme_are_accepted() -> None:
    lines = [line.partition("#")[0] for line in code(read("README.md")).splitlines() if line.startswith("repro ")]
    commands = [build_parser().parse_args(shlex.split(line)[1:]).command for line in lines]
    asked = ["ab", "analyze", "bench", "doctor", "gate", "plan", "probe", "report", "run", "scaling", "verify"]
    assert sorted(set(commands)) == asked


def test_the_readme_names_every_console_script() -> None:
    scripts = tomllib.loads(read("pyproject.toml"))["project"]["scripts"]
    for script in scripts:
        assert re.search(rf"`{script}\b", read("README.md")), f"README does not name `{script}`"


def test_exit_codes_of_the_readme_are_those_of_the_code() -> None:
    found = {int(row[0]) for row in rows(section(read("README.md"), "## Exit codes"))}
    assert found == {value for name, value in vars(names).items() if name.startswith("EXIT_")}


def test_make_targets_that_documents_name_exist() -> None:
    targets = set(re.findall(r"^(\w+):", read("Makefile"), re.MULTILINE))
    for document in DOCUMENTS:
        for line in re.findall(r"(?:^|`)make ([a-z ]+)", document.read_text(encoding="utf-8"), re.MULTILINE):
            assert set(line.split()) <= targets, f"{document.name}: make {line}"


def test_training_commands_of_the_readme_are_accepted() -> None:
    commands = [
        line for line in code(read("README.md")).splitlines() if re.search(r"\btrain --algo|unilab\.train ", line)
    ]
    assert len(commands) >= 3
    for command in commands:
        words = shlex.split(command, comments=True)
        options = {words[i]: words[i + 1] for i in range(len(words)) if words[i].startswith("--")}
        start = words.index("--algo")
        overrides = [word for word in words[start:] if "=" in word]
        load_config(options["--algo"], options["--task"], options["--sim"], overrides)


def test_keys_that_were_not_carried_over_are_refused() -> None:
    keys = code(section(read("docs/fidelity.md"), "## Command line and configuration")).split()
    assert len(keys) > 20
    for key in keys:
        with pytest.raises(ValueError, match="unknown key"):
            load_config("sac", "g1_walk_flat", "mujoco", [f"{key}=1"])
