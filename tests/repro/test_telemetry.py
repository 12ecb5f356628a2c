"""Samples of the host beside a cell: what is read, that a failure hurts nothing, and what the report makes of it."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from session_builder import finished_session

from repro.cpu_reading import CpuReader, CpuTimes, own_seconds, read_times
from repro.errors import UsageError
from repro.evidence import read_evidence
from repro.gpu_reading import GpuSample, NvmlReader, count_foreign, throttle_names
from repro.journal import read_journal
from repro.layout import REPORT_FILE
from repro.manifest import read_manifest
from repro.report import write_report
from repro.telemetry import Sample, Sampler, read_telemetry
from repro.telemetry_section import telemetry_section
from repro.verify import verify


def gpu(**changes: Any) -> GpuSample:
    facts: dict[str, Any] = {"uuid": "GPU-1", "utilisation": 0.5, "sm_mhz": 1980, "memory_mhz": 2619, "power_w": 500.0}
    facts |= {"temperature_c": 60, "throttle": (), "memory_bytes": 2**30, "foreign_processes": 0}
    return GpuSample(**facts | changes)


class FakeGpus:
    """GPUs that answer with one sample after the other, and with an error in place of None."""

    def __init__(self, *samples: GpuSample | None) -> None:
        self.samples, self.closed = list(samples), False

    def __call__(self, entries: Sequence[str]) -> FakeGpus:
        assert entries == ("GPU-1",)
        return self

    def read(self) -> tuple[GpuSample, ...]:
        sample = self.samples.pop(0) if len(self.samples) > 1 else self.samples[0]
        if sample is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return (sample,)

    def close(self) -> None:
        self.closed = True


def sampled(path: Path, open_gpus: Callable[[Sequence[str]], Any], seconds: float = 0.5) -> tuple[Sample, ...]:
    with Sampler(path, (0,), ("GPU-1",), open_gpus, interval=0.05) as sampler:
        time.sleep(seconds)
    assert sampler.count
    return read_telemetry(path, sampler.count)


def test_samples_hold_gpu_and_cpus(tmp_path: Path) -> None:
    gpus = FakeGpus(gpu(), gpu(throttle=("sw_power_cap",), foreign_processes=2))
    first, *others = sampled(tmp_path / "telemetry" / "a.jsonl", gpus)
    assert first.gpus == (gpu(),) and others[-1].gpus[0].foreign_processes == 2
    assert all(one.seconds < other.seconds for one, other in zip([first, *others], others, strict=False))
    assert first.load_average is not None and gpus.closed
    if sys.platform == "linux":
        assert any(sample.own_cpus_busy is not None and 0 <= sample.own_cpus_busy <= 1 for sample in others)


def test_a_cell_shorter_than_the_interval_has_one_sample(tmp_path: Path) -> None:
    with Sampler(tmp_path / "a.jsonl", (0,), ()) as sampler:
        pass
    assert sampler.count == len(read_telemetry(tmp_path / "a.jsonl", 1)) == 1


def test_gpus_that_cannot_be_opened_are_recorded_and_the_cpus_read(tmp_path: Path) -> None:
    def refuse(entries: Sequence[str]) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    first, *others = sampled(tmp_path / "a.jsonl", refuse)
    assert (first.failed or "").startswith("NVMLError_DriverNotLoaded: ")
    assert others and not any(sample.failed or sample.gpus for sample in others)
    assert first.load_average is not None


def test_beside_a_container_nothing_is_called_foreign(tmp_path: Path) -> None:
    with Sampler(tmp_path / "a.jsonl", (0,), ("GPU-1",), FakeGpus(gpu()), descends=False) as sampler:
        pass
    (only,) = read_telemetry(tmp_path / "a.jsonl", sampler.count)
    assert only.foreign_cpus is None and only.gpus == (gpu(foreign_processes=None),)
    assert only.load_average is not None


def test_a_gpu_that_is_lost_is_recorded_once(tmp_path: Path) -> None:
    samples = sampled(tmp_path / "a.jsonl", FakeGpus(gpu(), None))
    assert [bool(sample.gpus) for sample in samples[:3]] == [True, False, False]
    assert [sample.failed for sample in samples if sample.failed] == [samples[1].failed]


def test_whatever_else_fails_is_the_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repro.telemetry.CpuReader", lambda cpus: 1 // 0)
    with Sampler(tmp_path / "a.jsonl", (0,), ()) as sampler:
        time.sleep(0.1)
    (only,) = read_telemetry(tmp_path / "a.jsonl", sampler.count)
    assert only.failed == "ZeroDivisionError: integer division or modulo by zero"


def test_a_file_that_cannot_be_written_hurts_nothing(tmp_path: Path) -> None:
    (tmp_path / "telemetry").touch()
    with Sampler(tmp_path / "telemetry" / "a.jsonl", (0,), ()) as sampler:
        time.sleep(0.05)
    assert sampler.count is None


def test_a_line_that_a_full_disk_took_late_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.TextIOWrapper):
        full = True

        def flush(self) -> None:
            if not self.closed and Full.full:  # the line stays in the buffer and is written when the file is closed
                Full.full = False
                raise OSError(errno.ENOSPC, "No space left on device")
            super().flush()

    path = tmp_path / "cell.jsonl"
    own, stream = Path.open, Full(path.open("wb"), encoding="utf-8")
    monkeypatch.setattr(Path, "open", lambda self, mode, **named: stream if mode == "w" else own(self, mode, **named))
    with Sampler(path, (), (), interval=60.0) as sampler:
        pass
    assert sampler.count == 2  # the sample and what went wrong
    assert len(read_telemetry(path, sampler.count)) == 2


def test_busy_shares_are_those_of_the_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  1 1 1 1 1 1 1 1 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\ncpu1 10 0 0 90 0 0 0 0 7 7\nintr 5\n")
    assert read_times(stat) == {0: CpuTimes(0, 0), 1: CpuTimes(10, 100)}
    clock = iter((0.0, 1.0))
    monkeypatch.setattr("repro.cpu_reading.time.monotonic", lambda: next(clock))
    monkeypatch.setattr("repro.cpu_reading.TICKS", 100)
    spent = iter((1.0, 1.75))
    monkeypatch.setattr("repro.cpu_reading.own_seconds", lambda: next(spent))
    reader = CpuReader((0,), stat)
    stat.write_text("cpu0 60 0 20 10 10 0 0 0 0 0\ncpu1 30 0 0 160 0 0 0 10 7 7\n")
    # CPU 0: 80 of 100 ticks; CPU 1: 20 and 10 stolen of 100; together 1.1 s in one second, of which 0.75 s are ours.
    assert reader.read() == (0.8, 0.3, 0.35)


def test_work_of_a_process_that_ended_is_our_own() -> None:
    """Also of one that it had started and waited for."""
    burn = "import time\nwhile time.process_time() < 0.2: pass"
    both = f"import subprocess, sys\nsubprocess.run([sys.executable, '-S', '-c', {burn!r}])\n{burn}"
    before = own_seconds()
    subprocess.run([sys.executable, "-S", "-c", both], check=True)
    assert own_seconds() - before >= 0.35


def test_throttle_reasons_have_names() -> None:
    assert throttle_names(0) == ()
    assert throttle_names(0x1 | 0x4 | 0x40) == ("gpu_idle", "sw_power_cap", "hw_thermal_slowdown")
    assert throttle_names(0x8000) == ("0x8000",)
    named = {
        name.removeprefix("nvmlClocksThrottleReason"): bits
        for name, bits in vars(pynvml).items()
        if name.startswith("nvmlClocksThrottleReason") and bits and name.removesuffix("All") == name
    }
    for name, bits in named.items():
        if name != "UserDefinedClocks":  # another name of ApplicationsClocksSetting
            assert throttle_names(bits)[0].replace("_", "") == name.lower()


def test_foreign_processes_are_those_that_we_did_not_start(tmp_path: Path) -> None:
    first = tmp_path / "pid"  # not the machine's own ids
    first.touch()
    assert count_foreign([], first) == 0
    assert count_foreign([1], first) is None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert count_foreign([os.getpid(), child.pid, 1], first) == 1  # ours are among them, so ids can be compared
        child.kill()


def test_nvml_is_asked_for_everything_and_may_lack_sensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetHandleByIndex": lambda index: f"GPU-{index}",
        "nvmlDeviceGetUUID": lambda handle: handle,
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=97),
        "nvmlDeviceGetPowerUsage": lambda handle: 512_500,
        "nvmlDeviceGetClockInfo": lambda handle, kind: {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 2619}[kind],
        "nvmlDeviceGetTemperature": missing,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 4,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=123),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=os.getpid())],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    reader = NvmlReader(("GPU-7", "0"))
    one, other = reader.read()
    reader.close()
    expected = gpu(uuid="GPU-7", utilisation=0.97, power_w=512.5, memory_bytes=123, temperature_c=None)
    assert one == expected.model_copy(update={"throttle": ("sw_power_cap",)})
    assert other.uuid == "GPU-0"
    with pytest.raises(ValueError, match="'all' is neither the number nor the id of a GPU"):
        NvmlReader(("all",))


def test_the_table_is_what_the_samples_say() -> None:
    samples = (
        Sample(seconds=1.0, gpus=(gpu(throttle=("gpu_idle",), sm_mhz=345),), own_cpus_busy=0.5, load_average=1.0),
        Sample(
            seconds=2.0,
            gpus=(gpu(utilisation=1.0, throttle=("sw_power_cap",), foreign_processes=2, power_w=700.0),),
            own_cpus_busy=1.0,
            other_cpus_busy=0.25,
            foreign_cpus=0.5,
            load_average=3.0,
        ),
        Sample(seconds=3.0, failed="NVMLError: lost"),
    )
    table = telemetry_section({"a_r1": samples, "b_r1": (), "c_r1": (Sample(seconds=1.0),)})
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    assert rows[2] == [
        *("a_r1", "3", "75.0 %", "25.0 %", "0.50", "3.00"),
        *("0", "75.0 % / 100.0 %", "345", "2,619", "600", "60", "sw_power_cap (1)", "2"),
    ]
    assert rows[3] == ["c_r1", "1", *12 * ["–"]]  # noqa: RUF001 - what stands for nothing
    assert table.endswith("Not everything could be read:\n\n- a_r1: NVMLError: lost")
    assert telemetry_section({"b_r1": ()}) == ""


def test_a_session_keeps_lists_shows_and_verifies_its_samples(tmp_path: Path) -> None:
    out = finished_session(tmp_path)
    evidence = read_evidence(out)
    assert set(evidence.telemetry) == {cell.id for cell in evidence.plan.cells} and all(evidence.telemetry.values())
    assert {f"telemetry/{cell.id}.jsonl" for cell in evidence.plan.cells} < set(read_manifest(out)[0])
    page = (out / REPORT_FILE).read_text()
    assert "## Host while it ran" in page and "own CPUs busy" in page and "throttled" not in page
    assert verify([out], lambda line: None)


def test_samples_that_were_changed_or_taken_away_are_found(tmp_path: Path) -> None:
    out = finished_session(tmp_path)
    path = out / "telemetry" / "slow_r1.jsonl"
    count = next(entry.samples for entry in read_journal(out) if entry.event == "cell_ended")
    assert count
    content = path.read_text()
    sample = json.loads(content.splitlines()[0]) | {"load_average": 77.0}
    path.write_text("\n".join([json.dumps(sample), *content.splitlines()[1:]]) + "\n")
    assert "77.00" in telemetry_section(read_evidence(out).telemetry)
    for text, problem in (
        (content + content, "has .* samples, the journal says"),
        (content.replace("seconds", "secs"), "slow_r1.jsonl line 1: unknown key 'secs'"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=problem):
            read_evidence(out)
    path.unlink()
    with pytest.raises(UsageError, match=r"telemetry/slow_r1\.jsonl has 0 samples"):
        write_report(out)
