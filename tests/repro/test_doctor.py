from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from session_builder import make_host

from repro.doctor import Diagnosis, diagnose, doctor_lines
from repro.gpus import GpuLink, GpuLoad
from repro.renderer import can_load, find_renderer
from repro.spin import SpinNoise, measure_spin


def lines(found: Diagnosis) -> dict[str, str]:
    """What stands behind each heading."""
    return {name: rest.strip() for name, _, rest in (line.partition(":") for line in doctor_lines(found))}


@pytest.fixture
def found() -> Diagnosis:
    host, topology = make_host(cpus=32, gpu_count=2)
    links = (GpuLink(first=0, second=1, link="NVLink"),)
    gpus = tuple(gpu.model_copy(update={"numa_node": node}) for node, gpu in enumerate(host.gpus))
    host = host.model_copy(update={"gpus": gpus, "gpu_links": links, "governor": "performance", "numa_nodes": 2})
    return diagnose(host, topology, None)


def test_links_nodes_and_governor_are_shown(found: Diagnosis) -> None:
    assert lines(found)["GPU links"] == "NVLink (0-1); NUMA nodes 0 1"
    assert lines(found)["CPU"] == "Made-up CPU, 32 logical CPUs, 2 NUMA nodes, governor performance"
    assert len(doctor_lines(found)) <= 24


def test_versions_that_torch_brings_stand_beside_the_driver(found: Diagnosis) -> None:
    assert lines(found)["driver"] == "600.1, CUDA none, cuDNN none, NCCL none"
    versions = {**found.host.versions, "cuda": "13.0.96", "cudnn": "9.20.0.48", "nccl": "2.29.7"}
    host = found.host.model_copy(update={"versions": versions})
    shown = lines(found.model_copy(update={"host": host}))["driver"]
    assert shown == "600.1, CUDA 13.0.96, cuDNN 9.20.0.48, NCCL 2.29.7"


def test_links_of_many_gpus_are_grouped(found: Diagnosis) -> None:
    pairs = [(0, 1, "NVLink"), (0, 2, "NVLink"), (1, 2, "NVLink")]
    links = tuple(GpuLink(first=a, second=b, link=link) for a, b, link in pairs)
    alike = found.model_copy(update={"host": found.host.model_copy(update={"gpu_links": links})})
    assert lines(alike)["GPU links"].startswith("NVLink (all pairs); ")
    mixed = (*links[:2], GpuLink(first=1, second=2, link="one PCIe switch"))
    mixed_found = found.model_copy(update={"host": found.host.model_copy(update={"gpu_links": mixed})})
    assert lines(mixed_found)["GPU links"].startswith("NVLink (0-1 0-2); one PCIe switch (1-2); ")


def test_a_busy_gpu_is_named(found: Diagnosis) -> None:
    idle = GpuLoad(position=0, processes=0, utilization=0, used_bytes=0)
    busy = GpuLoad(position=1, processes=2, utilization=37, used_bytes=2**30)
    assert lines(found.model_copy(update={"loads": (idle, idle)}))["GPU load"] == "idle"
    shown = lines(found.model_copy(update={"loads": (idle, busy)}))["GPU load"]
    assert shown.startswith("GPU 1 busy: 2 processes, 37 %, 1.0 GiB (")


def test_an_entry_that_the_driver_does_not_list_is_named(found: Diagnosis) -> None:
    host = found.host.model_copy(update={"visible_gpus": ("1", "9")})
    shown = lines(found.model_copy(update={"host": host}))["GPUs"]
    assert shown.endswith("; visible: 1 GPU; not listed: '9' of CUDA_VISIBLE_DEVICES")


def test_one_matrix_has_a_line_for_each_case() -> None:
    host, topology = make_host(cpus=1)
    found = diagnose(host, topology, "smoke")
    assert doctor_lines(found)[-3:] == [
        "matrix:    smoke does not fit, 1 of 2 cases would run",
        "             workers1: fits",
        "             workers2: asks for 2 workers, this host offers 1 CPU",
    ]


@pytest.mark.parametrize(
    ("asked", "installed", "said"),
    [
        ("", ("egl", "osmesa"), "egl, osmesa"),
        ("", (), "none: training works, videos need libEGL or libOSMesa"),
        ("EGL", ("egl",), "egl"),
        ("egl", ("osmesa",), "MUJOCO_GL=egl, but libEGL.so.1 is missing; there: osmesa"),
        ("off", ("egl",), "switched off by MUJOCO_GL=off"),
        ("glfw", ("egl",), "MUJOCO_GL=glfw needs a display; without one: egl"),
        ("opengl", ("egl",), "MUJOCO_GL=opengl is no renderer; use egl or osmesa (there: egl)"),
    ],
)
def test_the_renderer_is_named_or_what_is_wrong_with_it(asked: str, installed: tuple[str, ...], said: str) -> None:
    libraries = {"libEGL.so.1": "egl", "libOSMesa.so.8": "osmesa"}
    assert find_renderer({"MUJOCO_GL": asked}, lambda library: libraries[library] in installed) == said


def test_a_library_that_is_not_there_does_not_load() -> None:
    assert not can_load("libno_such_library.so.99")


def uneven_clock() -> Iterator[float]:
    """Ticks of a clock on which the second half of the work takes twice as long."""
    time = 0.0
    for tick in count():
        yield time
        time += 0.001 if tick < 300 else 0.002


def test_uneven_work_is_noise() -> None:
    ticks = uneven_clock()
    found = measure_spin(1.0, clock=lambda: next(ticks))
    assert 0.2 < found.score < 0.5  # half of the rates are half of the others: about ln 2 / 2
    even = count()
    assert measure_spin(1.0, clock=lambda: next(even) / 1000).score < 0.02
    real = measure_spin(0.05)
    assert real.repetitions >= 10 and real.score >= 0.0 and 0.04 < real.seconds < 5.0


@pytest.mark.parametrize(("score", "said"), [(0.031, "within 5%"), (0.2, "above 5%: something else computes here")])
def test_noise_is_judged_by_its_limit(found: Diagnosis, score: float, said: str) -> None:
    noise = SpinNoise(score=score, seconds=0.5, repetitions=100)
    shown = lines(found.model_copy(update={"noise": noise}))["noise"]
    assert shown == f"{100 * score:.1f} % in 0.5 s of equal work on one CPU, {said}"
