"""The code of two images for `repro ab`: whatever runs of a side is in a container of its image."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from repro.commits import Code
from repro.docker_executor import INSIDE, DockerExecutor, docker_executor
from repro.errors import HostUnfitError, UsageError
from repro.host import Host
from repro.redact import Redactor

PREFIX = "image:"  # no commit is called so: git would look for a file in it


def are_images(refs: Mapping[str, str]) -> bool:
    """Whether both sides are images.

    Raises:
        UsageError: If one of them is, or names none.
    """
    found = [ref for ref in refs.values() if ref.startswith(PREFIX)]
    if found and len(found) < len(refs):
        raise UsageError(f"{found[0]} is an image and the other side a commit; name two images, or two commits")
    if PREFIX in found:
        raise UsageError(f"{PREFIX} names no image; give {PREFIX}NAME, as in {PREFIX}unilab-repro:cuda")
    return bool(found)


def open_images(stack: contextlib.ExitStack, refs: Mapping[str, str], host: Host) -> tuple[dict[str, Code], Host]:
    """Look both images up and let each say which code it holds.

    Args:
        stack: Closes the connections to the engine.
        refs: The images of sides a and b, with `PREFIX`.
        host: This machine.

    Returns:
        The code of each side, and the host as containers of b, the change, see it.

    Raises:
        UsageError: If both are the same image.
        HostUnfitError: Without an engine, or an image that can be measured; or if one alone can use the GPUs.
    """
    names = {side: ref.removeprefix(PREFIX) for side, ref in refs.items()}
    executors = {side: stack.enter_context(docker_executor(name, host, None)) for side, name in names.items()}
    if executors["a"].facts.image_id == executors["b"].facts.image_id:
        raise UsageError(f"{refs['a']} and {refs['b']} are the same image, {executors['a'].facts.image_id}; name two")
    hosts = {side: executor.host_inside(host) for side, executor in executors.items()}
    for side, other in (("a", "b"), ("b", "a")):
        if hosts[side].gpu_unusable is not None and hosts[other].gpu_unusable is None:
            raise HostUnfitError(f"{refs[side]}: {hosts[side].gpu_unusable}; {refs[other]} uses the GPUs")
    return {side: _code(refs[side], executor, hosts[side]) for side, executor in executors.items()}, hosts["b"]


def _code(ref: str, executor: DockerExecutor, inside: Host) -> Code:
    versions = frozenset(f"{name} {inside.versions[name]}" for name in INSIDE if name in inside.versions)
    label = Redactor().text(f"{executor.facts.image}")
    return Code(ref, label, executor.source_inside(), versions, executor=executor)
