"""`algo.algo_params.actor_config`: where an actor of one's own is built and with what. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEY = "algo.algo_params.actor_config"
GIVEN = ("obs_dim", "action_dim", "device")  # what every builder is called with
EXAMPLE = f"'{KEY}={{builder:package.module:Class,kwargs:{{hidden:64}}}}'"


@dataclass(frozen=True)
class ActorSpec:
    """An actor of one's own, as configured.

    Attributes:
        builder: `package.module:name` or `package.module.name` of something that returns the network.
        kwargs: JSON values that it is called with, beside `GIVEN`.
    """

    builder: str
    kwargs: dict[str, Any]

    @classmethod
    def parse(cls, value: Any) -> ActorSpec:
        """The value of the key.

        Raises:
            ValueError: one line, for what is no builder with keyword arguments of JSON values.
        """
        if not isinstance(value, Mapping):
            raise refusal(f"must be null or a mapping, got {value!r}; type {EXAMPLE}")
        unknown = [str(name) for name in value if name not in ("builder", "kwargs")]
        if unknown:
            raise refusal(f"unknown entry {unknown[0]!r}; there is builder and kwargs")
        builder, kwargs = value.get("builder"), value.get("kwargs")
        if not isinstance(builder, str) or not all(split_builder(builder.strip())):
            raise refusal(f"builder must be text like package.module:name, got {builder!r}; type {EXAMPLE}")
        return cls(builder.strip(), _json_values({} if kwargs is None else kwargs))

    @property
    def place(self) -> tuple[str, str]:
        """Module and name of the builder."""
        return split_builder(self.builder)


def refusal(problem: str) -> ValueError:
    """An error that names the key, on one line."""
    return ValueError(f"{KEY}: {' '.join(problem.split())}")


def split_builder(builder: str) -> tuple[str, str]:
    """Module and name of a builder in either spelling; one that is missing is empty."""
    module, colon, name = builder.partition(":")
    if not colon:
        module, _, name = builder.rpartition(".")
    return module, name


def _json_values(kwargs: Any) -> dict[str, Any]:
    """Keyword arguments as they come back from JSON, in the order of their names."""
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise refusal(f"kwargs must be a mapping of names to values, got {kwargs!r}")
    taken = [name for name in GIVEN if name in kwargs]
    if taken:
        raise refusal(f"kwargs must not have {taken[0]}, every builder is called with {', '.join(GIVEN)}")
    try:
        values: dict[str, Any] = json.loads(json.dumps(dict(kwargs), sort_keys=True, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise refusal(f"kwargs must be JSON values: {error}") from None
    return values
