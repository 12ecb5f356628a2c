"""Runs each cell in a container of its own; the engine's Python SDK is needed for that alone."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from repro.container_owner import PROC, is_dead, own_label
from repro.docker_image import SOURCES_LABEL, connect, default_image, explanation, find_image
from repro.errors import HostUnfitError, UsageError
from repro.host import Host
from repro.journal import Outcome
from repro.launch import GRACE_SECONDS, Ended, Runner, interrupts_held, last_line
from repro.plan import Cell, Executor, Plan
from repro.provenance import Source
from repro.schema import parse_model
from unilab.names import EXIT_OK

# Labels of a container.
SESSION_LABEL, CELL_LABEL, OWNER_LABEL = "unilab-repro.session", "unilab-repro.cell", "unilab-repro.owner"
COMPOSE_LABEL = "com.docker.compose.project"
ENTRYPOINT = "/opt/unilab-repro/docker/entrypoint.sh"
CACHES, CACHES_AT = "unilab-repro-caches", "/var/cache/unilab"
SHM_SIZE = "8g"  # NCCL's shared-memory transport; memory is taken as it is used
CHECK_SECONDS = 120.0  # for a container that looks at itself
LOG_SECONDS = 10.0  # for the rest of a log, once its container has ended
FACTS = "from repro.host import find_host; print(find_host()[0].model_dump_json())"
CODE = "from repro.provenance import find_source; print(find_source().model_dump_json())"
# Versions that a run is made with; the others belong to the suite, which reads and renders outside.
INSIDE = ("python", "torch", "mujoco", "numpy", "tensorboard", "triton", "cuda", "cudnn", "nccl", "unilab-repro")


@dataclass(frozen=True)
class Room:
    """What a container may use.

    Attributes:
        name: Cell it is for.
        cpus: Its CPUs; None for all.
        gpus: Ids of its GPUs.
        environment: Variables beside the image's own.
    """

    name: str
    cpus: tuple[int, ...] | None = None
    gpus: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None


@contextlib.contextmanager
def docker_executor(image: str | None, host: Host, source: Source | None) -> Iterator[DockerExecutor]:
    """Open the engine, check the image, and remove what dead sessions left.

    Args:
        image: Name of the image; None takes `unilab-repro:cuda` where the driver lists a GPU, else `unilab-repro:cpu`.
        host: Facts of the host.
        source: The checkout's code, which must be the image's; None where it may be any.

    Raises:
        HostUnfitError: Without Linux, SDK, engine, or an image of these sources.
    """
    if sys.platform != "linux":
        raise HostUnfitError("a container for each run needs Linux: elsewhere an engine has other CPUs than this host")
    client = connect()
    try:
        executor = DockerExecutor(client, find_image(client, image or default_image(host), source))
        executor.remove_leftovers()
        yield executor
    finally:
        client.close()


class DockerExecutor:
    """Containers of one session; every one is removed when its command has ended, however it ended.

    Args:
        client: A `docker.DockerClient`. All its errors that mean a refused or lost request are `OSError`.
        facts: The image.
    """

    def __init__(self, client: Any, facts: Executor) -> None:
        self.facts = facts
        self._client = client
        self._session = uuid.uuid4().hex[:12]

    def remove_leftovers(self) -> None:
        """Remove containers of sessions that ended without doing so themselves; say how many on stderr."""
        found = self._client.containers.list(all=True, ignore_removed=True, filters={"label": SESSION_LABEL})
        dead = [item for item in found if is_dead(item.labels.get(OWNER_LABEL, ""), item.status == "running")]
        for container in dead:
            _remove(container)
        if dead:
            print(f"removed {len(dead)} container{'s' * (len(dead) > 1)} of a session that was killed", file=sys.stderr)

    def host_inside(self, host: Host) -> Host:
        """The host as a container sees it: compiler, shared memory, variables and what a run is made with are its own.

        Raises:
            HostUnfitError: If the image cannot be started.
        """
        inside = parse_model(Host, self._ask("facts", FACTS), f"facts of image {self.facts.image}")
        versions = {name: inside.versions.get(name) for name in INSIDE}
        own = {name: getattr(inside, name) for name in ("compiler", "shm_bytes", "environment")}
        return host.model_copy(update={**own, "versions": host.versions | versions})

    def source_inside(self) -> Source:
        """The code that the image holds, as its suite reads it there.

        Raises:
            HostUnfitError: If the image cannot be started, or its label names other code.
        """
        image = self.facts.image
        source = parse_model(Source, self._ask("code", CODE), f"code of image {image}")
        label = self._client.images.get(self.facts.image_id).labels[SOURCES_LABEL]
        if source.sources_sha256 != label:
            raise HostUnfitError(
                f"image {image} holds sources {source.sources_sha256[:12]}, its label says {label[:12]}; build it again"
            )
        if source.trainer_sha256 is None:
            raise HostUnfitError(f"image {image} does not say which trainer it holds; build one of a later commit")
        return source.model_copy(update={"trainer": None})

    def check_gpus(self, plan: Plan) -> None:
        """Give the plan's GPUs to a container that does nothing.

        Raises:
            UsageError: If a GPU is not named by its id.
            HostUnfitError: If the engine refuses.
        """
        gpus = tuple(dict.fromkeys(gpu for cell in plan.runnable for gpu in _gpus(cell)))
        for gpu in gpus:
            if not gpu.startswith(("GPU-", "MIG-")):
                raise UsageError(
                    f"a container takes GPUs by id, CUDA_VISIBLE_DEVICES has {gpu!r}; unset it or use the ids "
                    "that nvidia-smi -L prints"
                )
        if gpus and (ended := self._look(Room("gpus", gpus=gpus), "pass")[0]).exit_code != EXIT_OK:
            raise HostUnfitError(
                f"the engine gives containers no GPU: {ended.reason}; install the NVIDIA Container Toolkit, or run "
                "without containers"
            )

    def runner(self, cell: Cell) -> Runner:
        """What runs a cell's commands: a container each, which inherits nothing and gets what the cell sets."""
        return functools.partial(self._run, Room(cell.id, cell.cpuset, _gpus(cell), cell.environment))

    def _ask(self, name: str, program: str) -> str:
        """The last line that a Python program in the image prints."""
        ended, output = self._look(Room(name), program)
        if ended.exit_code != EXIT_OK:
            raise HostUnfitError(f"image {self.facts.image} does not start: {ended.reason}")
        return output.strip().splitlines()[-1]

    def _look(self, room: Room, program: str) -> tuple[Ended, str]:
        """Run a Python program in a container; return how it ended and its output."""
        with tempfile.TemporaryDirectory() as name:
            log = Path(name) / "logs" / "container.log"
            log.parent.mkdir()
            ended = self._run(room, [sys.executable, "-c", program], {}, Path(name), log, CHECK_SECONDS)
            if ended.outcome == "interrupted":
                raise KeyboardInterrupt
            return ended, log.read_text(encoding="utf-8", errors="replace")

    def _run(
        self,
        room: Room,
        command: Sequence[str],
        environment: Mapping[str, str],
        out_dir: Path,
        log: Path,
        timeout: float,
        grace: float = GRACE_SECONDS,
        late: Callable[[int], str] | None = None,
    ) -> Ended:
        """As `launch.run_cell`; the environment of the host is not looked at.

        `late` is called with the process id of a container whose time is over, where this host can see it, before
        anything is ended; it says why it is late.
        """
        began = time.monotonic()
        code: int | None = None
        try:
            with log.open("wb", buffering=0) as output, interrupts_held() as let_interrupts_in:
                try:
                    container = self._client.containers.create(**self._options(room, command, out_dir, log))
                    outcome, reason = _watch(container, output, timeout, grace, let_interrupts_in, late)
                    if outcome == "exited":
                        code, reason = _end_of(container, log)
                finally:
                    self._remove_room(room)
        except OSError as error:
            outcome, reason = "exited", f"the container engine refused or failed: {explanation(error)}"
        return Ended(outcome, code, time.monotonic() - began, reason)

    def _options(self, room: Room, command: Sequence[str], out_dir: Path, log: Path) -> dict[str, Any]:
        """Arguments of `containers.create`.

        It may write the report's folder and the one that holds `logs/`, at the same paths, so that messages are true
        outside.
        """
        folders = {out_dir.resolve(), log.resolve().parent.parent}
        outer = [folder for folder in sorted(folders) if not any(folder.is_relative_to(f) for f in folders - {folder})]
        binds = [{"Type": "bind", "Source": str(folder), "Target": str(folder)} for folder in outer]
        gpus = {"driver": "nvidia", "device_ids": list(room.gpus), "capabilities": [["gpu"]]}
        return {
            "image": self.facts.image_id,
            "entrypoint": [ENTRYPOINT],
            "command": ["python" if word == sys.executable else word for word in command],
            "environment": dict(room.environment or {}),
            "working_dir": str(out_dir.resolve()),
            "mounts": [*binds, {"Type": "volume", "Source": CACHES, "Target": CACHES_AT}],
            "user": f"{os.getuid()}:{os.getgid()}",
            "cpuset_cpus": ",".join(map(str, room.cpus)) if room.cpus is not None else None,
            "device_requests": [gpus] if room.gpus else None,
            "shm_size": SHM_SIZE,
            "ulimits": [{"name": "memlock", "soft": -1, "hard": -1}] if room.gpus else None,  # pinned host memory
            "tmpfs": {"/tmp": "mode=1777,exec"},
            "read_only": True,
            "network_mode": "none",
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
            "init": True,
            "log_config": {"type": "json-file"},  # whatever the engine is set to, this one can be read
            "labels": {
                **{SESSION_LABEL: self._session, CELL_LABEL: room.name, OWNER_LABEL: own_label()},
                COMPOSE_LABEL: "",  # inherited from an image that compose built: it would stop the cell as its own
            },
        }

    def _remove_room(self, room: Room) -> None:
        """Remove by label, so also a container whose making was cut off. No interrupt comes between."""
        labels = [f"{SESSION_LABEL}={self._session}", f"{CELL_LABEL}={room.name}"]
        with interrupts_held(), contextlib.suppress(OSError):  # what an engine that is gone keeps, the next start finds
            for item in self._client.containers.list(all=True, ignore_removed=True, filters={"label": labels}):
                _remove(item)


def _gpus(cell: Cell) -> tuple[str, ...]:
    return () if "training.smoke=true" in cell.arguments else cell.gpus  # smoke ranks open no GPU


def _watch(
    container: Any,
    output: BinaryIO,
    timeout: float,
    grace: float,
    let_interrupts_in: Callable[[], None],
    late: Callable[[int], str] | None,
) -> tuple[Outcome, str | None]:
    """Start a container and wait for its end, its time limit or an interrupt."""
    follower = threading.Thread(target=_copy_log, args=(container, output), daemon=True)
    try:
        let_interrupts_in()
        container.start()
        follower.start()
        if _has_ended(container, timeout):
            return "exited", None
        pid = _visible_pid(container) if late is not None else None
        why = f"{late(pid)}; " if late is not None and pid is not None else ""
        return "timeout", f"{why}no end after {timeout:g} s; {_end(container, grace)}"
    except KeyboardInterrupt:
        return "interrupted", f"by the user; {_end(container, grace)}"
    finally:
        if follower.is_alive():
            follower.join(LOG_SECONDS)


def _copy_log(container: Any, output: BinaryIO) -> None:
    with contextlib.suppress(OSError, ValueError):  # the engine is gone, or nobody waits for the rest
        for part in container.logs(stream=True, follow=True):
            output.write(part)


def _has_ended(container: Any, seconds: float) -> bool:
    """Whether a container ends within some time."""
    deadline = time.monotonic() + seconds
    try:
        container.wait(timeout=seconds)
    except OSError:
        if time.monotonic() < deadline:
            raise
        return False
    return True


def _visible_pid(container: Any, proc: Path = PROC) -> int | None:
    """Process id of a container's first process; None where that number is another process here, or none."""
    container.reload()
    pid = int(container.attrs["State"]["Pid"])
    try:
        return pid if container.id in (proc / str(pid) / "cgroup").read_text() else None
    except OSError:
        return None


def _end(container: Any, grace: float) -> str:
    """Ask a container to end, then force it; return which of the two it took."""
    try:
        container.kill(signal="SIGTERM")
    except OSError:
        return "its container was not running"
    with contextlib.suppress(OSError, KeyboardInterrupt):
        if _has_ended(container, grace):
            return "its container ended on SIGTERM"
    with contextlib.suppress(OSError):
        container.kill()
    return f"its container did not end on SIGTERM within {grace:g} s and was killed"


def _end_of(container: Any, log: Path) -> tuple[int, str | None]:
    """Exit code of a container, and the reason where it is not 0."""
    container.reload()
    state = container.attrs["State"]
    code = int(state["ExitCode"])
    if code == EXIT_OK:
        return code, None
    parts = [f"exit code {code}", "out of memory" if state.get("OOMKilled") else "", state.get("Error", "")]
    return code, f"{', '.join(filter(None, parts))}: {last_line(log)}"


def _remove(container: Any) -> None:
    with contextlib.suppress(OSError):  # it is gone, or is being removed
        container.remove(force=True, v=True)
