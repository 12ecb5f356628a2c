"""What a container runs: the suite; after `repro run` also the verification of the report it wrote."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from repro import cli
from unilab.names import EXIT_INTERRUPTED


class LastLine:
    """A text stream that passes everything on and remembers the last line that is not empty."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._tail = stream, ""

    def write(self, text: str) -> int:
        """Pass text on."""
        self._tail = (self._tail + text)[-4096:]
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def text(self) -> str:
        """The line, without what surrounds it."""
        lines = self._tail.strip().splitlines()
        return lines[-1].strip() if lines else ""


def main(argv: Sequence[str]) -> int:
    """Run one command of the suite; return its exit code, or that of the verification if only this one failed."""
    shown = LastLine(sys.stdout)
    with contextlib.redirect_stdout(shown):
        code = cli.main(argv)
    report = Path(shown.text)
    if argv[:1] != ["run"] or code == EXIT_INTERRUPTED or not report.is_file():
        return code
    verified = cli.main(["verify", str(report.parent)])
    print(report, flush=True)
    return code or verified


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
