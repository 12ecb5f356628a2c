"""Whether videos can be rendered here, without importing mujoco, which fails under a bad MUJOCO_GL."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

VARIABLE = "MUJOCO_GL"
# Libraries of the renderers that need no display, by the names mujoco gives them.
LIBRARIES = {"egl": "libEGL.so.1", "osmesa": "libOSMesa.so.8"}
# What mujoco takes besides.
OFF = ("disable", "disabled", "off", "false", "0")
NEEDS_DISPLAY = ("enable", "enabled", "on", "true", "1", "glfw", "glx", "cgl", "wgl")


def can_load(library: str) -> bool:
    """Whether the system's loader finds a library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def find_renderer(environment: Mapping[str, str], loads: Callable[[str], bool] = can_load) -> str:
    """Say in a few words what can render: the renderer that MUJOCO_GL asks for, else every one that is installed.

    Args:
        environment: The process's environment.
        loads: Whether a library can be loaded.
    """
    asked = environment.get(VARIABLE, "").strip().lower()
    installed = [name for name, library in LIBRARIES.items() if loads(library)]
    offered = ", ".join(installed) or "none: training works, videos need libEGL or libOSMesa"
    if not asked:
        return offered
    if asked in OFF:
        return f"switched off by {VARIABLE}={asked}"
    if asked in LIBRARIES:
        return (
            asked if asked in installed else f"{VARIABLE}={asked}, but {LIBRARIES[asked]} is missing; there: {offered}"
        )
    if asked in NEEDS_DISPLAY:
        return f"{VARIABLE}={asked} needs a display; without one: {offered}"
    return f"{VARIABLE}={asked} is no renderer; use egl or osmesa (there: {offered})"
