"""What all files of the suite have in common: strict models, canonical JSON, errors that fit on one line."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from repro.errors import UsageError

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # and bytes that are not UTF-8


class Strict(BaseModel):
    """Base of every model: exact types, no unknown keys, finite floats, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=Strict)


def canonical_json(value: Strict | dict[str, Any] | list[Any]) -> str:
    """Return the one text a value has on disk: sorted keys, two spaces, one final newline, no NaN."""
    data = value.model_dump(mode="json") if isinstance(value, Strict) else value
    return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def parse_model(model: type[Model], text: str | bytes, source: str) -> Model:
    """Parse JSON text strictly.

    Args:
        model: The class to build.
        text: JSON.
        source: What the text is called in messages, normally a file name.

    Raises:
        UsageError: If the text is not JSON or does not fit the model; the message is one line and names the field.
    """
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise UsageError(f"{source}: {one_line(error, model)}") from None


def read_model(model: type[Model], path: Path) -> Model:
    """Read one JSON file into a model; messages use the file's name.

    Raises:
        UsageError: If the file is missing or does not fit the model.
    """
    if not path.is_file():
        raise UsageError(f"{path.name} is missing in {path.parent}")
    return parse_model(model, path.read_bytes(), path.name)


def read_canonical(model: type[Model], path: Path, source: str | None = None) -> Model:
    """Read a file that the suite wrote; other bytes, as a key that is there twice, mean that it was edited.

    Args:
        model: The class to build.
        path: The file.
        source: What it is called in messages; None takes its name.

    Raises:
        UsageError: If the file is missing, does not fit the model, or is not as the suite writes it.
    """
    if not path.is_file():
        raise UsageError(f"{source or path.name} is missing in {path.parent}")
    found = parse_model(model, path.read_bytes(), source or path.name)
    # Defaults that are not in the file are not missing: an older version did not know them.
    if path.read_bytes() != canonical_json(found.model_dump(mode="json", exclude_unset=True)).encode():
        raise UsageError(
            f"{source or path.name}: not as the suite writes it (sorted keys, each once, two spaces): it was edited"
        )
    return found


def one_line(error: ValidationError, model: type[Strict]) -> str:
    """Describe the first problem of a validation error, with the nearest known key for an unknown one."""
    problems = error.errors(include_url=False)
    # A misspelt key is also a missing one; the spelling is what helps.
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    where = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"unknown key {where!r}{nearest(str(first['loc'][-1]), known_keys(model))}{more}"
    if first["type"] == "missing":
        return f"key {where!r} is missing{more}"
    at, message = f"{where}: " if where else "", str(first["msg"])
    if first["type"] == "value_error":
        return f"{at}{message.removeprefix('Value error, ')}{more}"
    found = f", found {first['input']!r}" if isinstance(first["input"], str | int | float | bool) and where else ""
    return f"{at}{message[:1].lower()}{message[1:]}{found}{more}"


def known_keys(model: type[Strict]) -> list[str]:
    """List the keys of a model and of the models inside it."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(name)
        inner = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for kind in inner:
            if isinstance(kind, type) and issubclass(kind, Strict):
                keys += known_keys(kind)
    return keys


def nearest(name: str, known: list[str]) -> str:
    """Return ``; did you mean 'x'?`` for the closest known name, or the list of names when nothing is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(sorted(set(known)))}"


def plain_line(text: str) -> str:
    """Refuse text with control characters or line ends: it is printed, published and handed to programs.

    Raises:
        UsageError: With the text.
    """
    if CONTROL.search(text):
        raise UsageError(f"{text!r} holds a control character or a line end; write it as one plain line")
    return text
