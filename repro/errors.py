"""The two ways a request can be turned down before anything is measured; each has its own exit code."""

from __future__ import annotations


class UsageError(ValueError):
    """The request is wrong: unknown name, bad file, conflicting flags (exit code 2)."""


class HostUnfitError(RuntimeError):
    """The request is fine, this host cannot do it (exit code 3)."""
