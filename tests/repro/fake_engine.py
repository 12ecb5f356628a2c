"""A container engine for tests: keeps what it was asked for, and ends its containers as a test tells it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from repro.docker_image import LOCK_LABEL, REVISION_LABEL, SOURCES_LABEL
from repro.provenance import Source

IMAGE_ID = "sha256:" + 64 * "1"


class RefusedError(OSError):
    """As the SDK's APIError, which is an OSError too."""

    def __init__(self, explanation: str) -> None:
        super().__init__(f"500 Server Error for http+docker://localhost: {explanation}")
        self.explanation = explanation


class FakeContainer:
    """One container."""

    def __init__(self, engine: FakeEngine, labels: dict[str, str], status: str = "running") -> None:
        self.engine, self.labels, self.status = engine, labels, status
        self.id = 64 * "c"
        self.signals: list[str] = []
        self.attrs: dict[str, Any] = {
            "State": {"ExitCode": 0, "OOMKilled": False, "Error": "", "Pid": 0, **engine.state}
        }

    def start(self) -> None:
        self.engine.on_start()

    def wait(self, timeout: float) -> None:
        self.engine.on_wait(self, timeout)

    def kill(self, signal: str = "SIGKILL") -> None:
        self.signals.append(signal)

    def logs(self, stream: bool, follow: bool) -> list[bytes]:
        assert stream and follow
        return [b"first\n", self.engine.output]

    def reload(self) -> None:
        pass

    def remove(self, force: bool, v: bool) -> None:
        assert force and v
        self.engine.removed.append(self)
        self.engine.present.remove(self)


class FakeEngine:
    """Stands for `docker.DockerClient`; a test sets what an image says and what happens in a container's life."""

    def __init__(self) -> None:
        self.image_labels: dict[str, str] = {}
        self.images_by_name: dict[str, SimpleNamespace] = {}  # beside the one of `image_labels`, which has any name
        self.created: list[dict[str, Any]] = []
        self.present: list[FakeContainer] = []
        self.removed: list[FakeContainer] = []
        self.state: dict[str, Any] = {}
        self.output = b"last\n"
        self.on_create: Callable[[], None] = lambda: None
        self.on_start: Callable[[], None] = lambda: None
        self.on_wait: Callable[[FakeContainer, float], None] = lambda container, timeout: None
        self.is_closed = False
        self.containers = SimpleNamespace(create=self._create, list=self._list)
        self.images = SimpleNamespace(get=self._image)

    def close(self) -> None:
        self.is_closed = True

    def _create(self, **options: Any) -> FakeContainer:
        self.created.append(options)
        self.present.append(FakeContainer(self, options["labels"]))
        self.on_create()
        return self.present[-1]

    def _list(self, filters: dict[str, Any], **flags: bool) -> list[FakeContainer]:
        assert flags == {"all": True, "ignore_removed": True}
        wanted = [filters["label"]] if isinstance(filters["label"], str) else filters["label"]
        pairs = [label.partition("=") for label in wanted]
        return [
            item
            for item in self.present
            if all(name in item.labels and value in ("", item.labels[name]) for name, _, value in pairs)
        ]

    def _image(self, name: str) -> SimpleNamespace:
        if name in self.images_by_name:
            return self.images_by_name[name]
        if not self.image_labels:
            raise RefusedError(f"No such image: {name}")
        return SimpleNamespace(id=IMAGE_ID, labels=self.image_labels)


def image_labels(source: Source, **changes: str) -> dict[str, str]:
    """Labels of an image of these sources."""
    return {SOURCES_LABEL: source.sources_sha256, REVISION_LABEL: source.revision, LOCK_LABEL: "cpu", **changes}
