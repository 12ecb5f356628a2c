"""The container engine, and the image whose code must be this checkout's."""

from __future__ import annotations

import importlib
from typing import Any

from repro.errors import HostUnfitError
from repro.host import Host
from repro.plan import Executor
from repro.provenance import UNKNOWN, Source

# Labels of an image, set by the Dockerfile.
SOURCES_LABEL, REVISION_LABEL, LOCK_LABEL = (
    "unilab-repro.source-sha256",
    "org.opencontainers.image.revision",
    "unilab-repro.lock",
)


def connect() -> Any:
    """Client of the engine that DOCKER_HOST names, or of this host's.

    Raises:
        HostUnfitError: Without the SDK, or where nothing answers.
    """
    try:  # the checkout's folder docker/ is a namespace, so it is the modules that tell whether the SDK is there
        sdk, errors = importlib.import_module("docker.client"), importlib.import_module("docker.errors")
    except ImportError:
        raise HostUnfitError(
            "a container for each run needs the docker package, which is not installed: pip install docker"
        ) from None
    try:
        return sdk.from_env()
    except (errors.DockerException, OSError) as error:
        raise HostUnfitError(f"no container engine answers ({error}); start one or set DOCKER_HOST") from None


def default_image(host: Host) -> str:
    """Name that `make image` gives the image for this host."""
    return f"unilab-repro:{'cuda' if host.gpus else 'cpu'}"


def find_image(client: Any, name: str, source: Source | None) -> Executor:
    """Look an image up and compare its labels with the checkout.

    Args:
        client: Of the engine.
        name: Name or id of the image.
        source: The checkout's code; None where an image of any code is wanted, if its label says which.

    Raises:
        HostUnfitError: If the engine has none of that name, or it was built from other code or does not say from which.
    """
    try:
        image = client.images.get(name)
    except OSError as error:
        lock = "cuda" if name.endswith(":cuda") else "cpu"
        raise HostUnfitError(
            f"the engine gives no image {name} ({explanation(error)}); build it: make image LOCK={lock}"
        ) from None
    labels = image.labels
    build = f"build it again: make image LOCK={labels.get(LOCK_LABEL, 'cpu')}"
    sources, revision = labels.get(SOURCES_LABEL, UNKNOWN), labels.get(REVISION_LABEL, UNKNOWN)
    if source is None and sources == UNKNOWN:
        raise HostUnfitError(f"image {name} has no label {SOURCES_LABEL}: nothing says which code it holds; {build}")
    if source is None:
        return Executor(kind="docker", image=name, image_id=image.id)
    if sources != source.sources_sha256:
        raise HostUnfitError(
            f"image {name} holds sources {sources[:12]}, this checkout {source.sources_sha256[:12]}; {build}"
        )
    if revision != source.revision:
        raise HostUnfitError(f"image {name} is of revision {revision}, this checkout {source.revision}; {build}")
    return Executor(kind="docker", image=name, image_id=image.id)


def explanation(error: OSError) -> str:
    """What the engine said, without the address it said it at."""
    return str(getattr(error, "explanation", None) or error)
