"""Keeps names of people and machines, and absolute paths, out of what is published."""

from __future__ import annotations

import contextlib
import getpass
import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
AB_FOLDER = "repro-ab-"  # start of the name of a temporary folder with the code of two commits
_AB_CODE = re.compile(rf"(?:/[\w.-]+)+/{AB_FOLDER}\w+/[a-z](?![\w.-])")
UNFINISHED = ".redacted"  # end of the name of a file that is being written
TEXT_SUFFIXES = (".json", ".jsonl", ".log", ".txt", ".TXT")


class Redactor:
    """Replaces paths and names by placeholders.

    Args:
        out_dir: Folder of the report; its path is replaced by ``.`` so that recorded paths are relative to it.
    """

    def __init__(self, out_dir: Path | None = None) -> None:
        self._paths = sorted(_paths(out_dir).items(), key=lambda item: len(item[0]), reverse=True)
        self._names = sorted(_names().items(), key=lambda item: len(item[0]), reverse=True)

    def text(self, text: str) -> str:
        """Return `text` with every path and name replaced; a name counts only where no letter or digit touches it."""
        text = _AB_CODE.sub("<project>", text)
        for path, placeholder in self._paths:
            text = re.sub(rf"{re.escape(path)}(?![\w.-])", placeholder, text)
        for name, placeholder in self._names:
            text = re.sub(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", placeholder, text)
        return text

    def file(self, path: Path) -> bool:
        """Redact a text file in place; return whether it changed. Bytes that are not UTF-8 stay as they are."""
        before = path.read_bytes().decode("utf-8", errors="surrogateescape")
        is_json = path.suffix in (".json", ".jsonl")
        after = self._json(before, lines=path.suffix == ".jsonl") if is_json else self.text(before)
        if after != before:
            temporary = path.with_name(f".{path.name}{UNFINISHED}")
            try:
                temporary.write_bytes(after.encode("utf-8", errors="surrogateescape"))
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)  # of a full disk, or an interrupt
        return after != before

    def value(self, value: Any) -> Any:
        """Redact the strings of a JSON value; keys stay."""
        if isinstance(value, dict):
            return {key: self.value(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.value(item) for item in value]
        return self.text(value) if isinstance(value, str) else value

    def _json(self, text: str, lines: bool) -> str:
        """Redact JSON by value; a damaged text by its letters."""
        try:
            values = [json.loads(part) for part in (text.splitlines() if lines else [text])]
        except ValueError:
            return self.text(text)
        redacted = self.value(values)
        if redacted == values:
            return text
        indent = None if lines else 2
        return "".join(json.dumps(value, indent=indent, ensure_ascii=False) + "\n" for value in redacted)

    def folder(self, folder: Path) -> list[str]:
        """Redact every text file below `folder`; return the names of those that changed, relative to it."""
        files = sorted(path for path in folder.rglob("*") if path.suffix in TEXT_SUFFIXES and path.is_file())
        return [path.relative_to(folder).as_posix() for path in files if not path.is_symlink() and self.file(path)]


def remove_unfinished(out_dir: Path) -> None:
    """Remove what a session that was killed while it redacted left in a report's folder."""
    for path in out_dir.rglob(f".*{UNFINISHED}"):
        path.unlink()


def _paths(out_dir: Path | None) -> dict[str, str]:
    """Absolute paths to hide. The report's own folder becomes ``.``, so ``/x/reports/r/runs/a`` reads ``./runs/a``."""
    found = {str(PROJECT): "<project>", str(Path(sys.prefix)): "<python>", str(Path(sys.prefix).resolve()): "<python>"}
    with contextlib.suppress(RuntimeError):  # a container's user may have no home
        found[str(Path.home())] = "<home>"
    if out_dir is not None:
        found |= {str(out_dir.absolute()): ".", str(out_dir.resolve()): "."}
    return {path: placeholder for path, placeholder in found.items() if path.count("/") > 1 or path in ("/root",)}


def _names() -> dict[str, str]:
    host = socket.gethostname()
    found = {host: "<host>", host.partition(".")[0]: "<host>"}
    with contextlib.suppress(KeyError, OSError):  # a container's user may have no name
        found[getpass.getuser()] = "<user>"
    common = {"root", "localhost", "user", "runner", "repro", "unilab"}  # words of logs, not names of anybody
    return {name: placeholder for name, placeholder in found.items() if len(name) > 2 and name not in common}
