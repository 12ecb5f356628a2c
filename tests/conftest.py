"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# A busy machine is no fault of the code, and a suite that fails now and then teaches to ignore it.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")
