"""Images and services for real: built offline, run, interrupted, started where they cannot run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from compose_cli import NAME, ROOT, Compose

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

NO_GPU = 'could not select device driver "nvidia" with capabilities: [[gpu]]'


def test_compose_accepts_every_service(compose: Compose) -> None:
    services = json.loads(compose("config", "--format", "json").stdout)["services"]
    assert set(services) == {"repro", "smoke", "test"}
    assert services["repro"]["command"] == ["run", "--matrix", "auto", "--require-gpu"]


def test_an_image_says_what_it_was_built_from(compose: Compose, base_image: str) -> None:
    facts, stamp = (
        json.loads(compose.shell(f"cat /opt/unilab-repro/{name}")) for name in ("image.json", "source_stamp.json")
    )
    labels = json.loads(compose.docker("inspect", f"{NAME}:cpu", "--format", "{{json .Config.Labels}}").stdout)
    assert facts["base"]["name"] == labels["org.opencontainers.image.base.name"] == base_image
    assert facts["revision"] == labels["org.opencontainers.image.revision"]
    assert facts["revision"].removesuffix("-dirty") == stamp["commit"]
    assert facts["source_sha256"] == labels["unilab-repro.source-sha256"]
    assert facts["versions"]["torch"].endswith("+cpu")
    for name in ("cuda", "cudnn", "nccl"):
        assert facts["versions"][name] == labels[f"unilab-repro.{name}"] == "none"


def test_an_image_holds_the_lock_and_nothing_is_missing(compose: Compose) -> None:
    assert "No broken requirements" in compose.shell("python -m pip check")
    installed = dict(line.split("==") for line in compose.shell("pip freeze --exclude-editable").splitlines())
    lock = (ROOT / "locks" / "cpu.txt").read_text()
    for name, version in installed.items():
        assert f"\n{name.lower().replace('_', '-')}=={version} " in lock, name


def test_an_image_compiles_against_its_python(compose: Compose) -> None:
    include = "$(python -c 'import sysconfig; print(sysconfig.get_path(\"include\"))')"
    source = "echo '#include <Python.h>' >a.c && gcc -shared -fPIC"
    assert compose.shell(f"cd /tmp && {source} -I{include} a.c -o a.so && echo compiled") == "compiled\n"


def test_an_image_renders_without_a_display(compose: Compose) -> None:
    script = """
import mujoco
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><light pos='0 0 3'/><geom size='1'/></worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 32, 32)
renderer.update_scene(data)
print(renderer.render().max() > 0)
"""
    options = ("--entrypoint", "python", "--env", "MUJOCO_GL=egl")
    assert compose.run("smoke", "-c", script, options=options).stdout == "True\n"


def test_smoke_ends_with_a_verified_report(smoke: subprocess.CompletedProcess[str], report: Path) -> None:
    assert smoke.stdout.splitlines()[-2].startswith("verified")
    assert smoke.stdout.splitlines()[-1] == f"reports/{report.name}/report.md"
    assert (report / "report.md").read_text().startswith("# SMOKE")


def test_every_file_belongs_to_the_caller(report: Path, owner: tuple[int, int]) -> None:
    paths = [report, *report.rglob("*")]
    assert {(path.stat().st_uid, path.stat().st_gid) for path in paths} == {owner}


def test_the_host_verifies_what_the_container_wrote(report: Path) -> None:
    command = [sys.executable, "-m", "repro.cli", "verify", str(report)]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_report_names_the_commit_of_its_image(compose: Compose, report: Path) -> None:
    source = json.loads((report / "plan.json").read_text())["source"]
    assert source["origin"] == "stamp"
    assert source["commit"] == json.loads(compose.shell("cat source_stamp.json"))["commit"]


def test_arguments_and_exit_codes_pass_through(compose: Compose, report: Path, owner: tuple[int, int]) -> None:
    assert compose.run("smoke", "verify", f"reports/{report.name}").stdout.splitlines()[-1].startswith("verified")
    altered = shutil.copytree(report, compose.reports / "altered")
    with (altered / "report.md").open("a") as page:
        page.write("x")
    assert compose.run("smoke", "verify", "reports/altered", check=False).returncode == 1
    assert compose.run("smoke", "verfy", check=False).returncode == 2
    shutil.rmtree(altered)


def test_caches_stay_on_their_volume(compose: Compose, report: Path, owner: tuple[int, int]) -> None:
    assert report.is_dir()
    assert "fontlist" in compose.shell(f"ls /var/cache/unilab/{owner[0]}/matplotlib")


def test_only_reports_and_caches_can_be_written(compose: Compose) -> None:
    tried = "for folder in / /opt /opt/unilab-repro /opt/venv /usr /var /etc; do touch $folder/x && echo $folder; done"
    assert compose.shell(f"{tried} 2>/dev/null; ls /sys/class/net").split() == ["lo"]


def test_a_missing_report_folder_is_refused(compose: Compose) -> None:
    elsewhere = Compose(compose.reports, {**compose.environment, "REPORTS_DIR": str(compose.reports / "missing")})
    assert elsewhere.run("smoke", "doctor", check=False).returncode != 0
    assert not (compose.reports / "missing").exists()


def test_a_user_can_be_chosen(compose: Compose, owner: tuple[int, int]) -> None:
    chosen = f"{owner[0]}:{owner[1]}"
    planned = compose.run("smoke", "plan", "--matrix", "smoke", options=("--user", chosen))
    assert "workers1" in planned.stdout


def test_an_interrupted_container_leaves_a_valid_journal(compose: Compose, owner: tuple[int, int]) -> None:
    name, folder = f"{NAME}-interrupted", compose.reports / "interrupted"
    compose("run", "--detach", "--name", name, "smoke", "run", "--matrix", "smoke", "--out", "reports/interrupted")
    try:
        wait_for(folder, "runs/*/progress.jsonl")
        fields = "grep -E '^(Uid|CapEff|NoNewPrivs):' $process/status | tr -d '\\n'"
        status = f"for process in /proc/[0-9]*; do {fields}; echo; done"
        processes = compose.docker("exec", name, "sh", "-c", status).stdout.splitlines()
        compose.docker("stop", name)
        code = compose.docker("inspect", name, "--format", "{{.State.ExitCode}}").stdout.strip()
        log = compose.docker("logs", name).stdout
    finally:
        compose.docker("rm", "--force", name)
    of_suite = [line for line in processes if line.startswith(f"Uid:\t{owner[0]}\t")]
    assert len(of_suite) >= 3, processes  # suite, trainer, collector
    assert all("CapEff:\t0000000000000000" in line and "NoNewPrivs:\t1" in line for line in of_suite)
    assert code == "130", log
    journal = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert [entry["event"] for entry in journal] == [
        "session_started", "cell_started", "cell_ended", "session_interrupted"
    ]  # fmt: skip
    ended = json.loads(next(folder.glob("runs/*/run_end.json")).read_text())
    assert (journal[2]["outcome"], ended["status"]) == ("interrupted", "interrupted")
    assert compose.run("smoke", "verify", "reports/interrupted").stdout.splitlines()[-1].startswith("verified")


def test_an_image_without_a_gpu_exits_3_with_one_line(compose: Compose) -> None:
    result = compose.docker("run", "--rm", "--network", "none", f"{NAME}:cpu", check=False)
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr.splitlines()[-1] == "repro: --require-gpu: the driver lists no GPU; see repro doctor"
    assert len(result.stderr.splitlines()) == 1


def test_the_readme_quotes_the_engine_without_a_gpu_runtime(compose: Compose) -> None:
    compose.docker("tag", f"{NAME}:cpu", f"{NAME}:cuda")  # the refusal comes before the image's content matters
    result = compose.run("repro", check=False)
    compose.docker("rmi", f"{NAME}:cuda")
    if NO_GPU not in result.stderr:
        pytest.skip("this engine has a GPU runtime")
    assert result.returncode == 1
    assert NO_GPU in (ROOT / "README.md").read_text()


def test_the_test_service_runs_tests(compose: Compose) -> None:
    assert " passed" in compose.run("test", "-q", "tests/repro/test_stats.py").stdout


def wait_for(folder: Path, pattern: str, seconds: float = 90) -> None:
    """Wait until a file has content."""
    deadline = time.monotonic() + seconds
    while not any(path.stat().st_size for path in folder.glob(pattern)):
        assert time.monotonic() < deadline, f"no {pattern} in {folder} after {seconds:g} s"
        time.sleep(0.2)
