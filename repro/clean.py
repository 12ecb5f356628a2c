"""What a run left, made fit to publish: right after its end, or later where its session was killed before."""

from __future__ import annotations

import re
from pathlib import Path

from repro.plan import Cell
from repro.redact import Redactor

UNLISTED = re.compile("[\\\\\x00-\x1f\x7f\ud800-\udfff]")  # in a name: no page or hash list can hold it
MOST_TEXT = 64 * 2**20  # bytes of a file that is looked at


def clean_cell(out_dir: Path, cell: Cell) -> tuple[str, ...]:
    """Take names and paths out of what a cell left; the files of its run that changed. Again, it changes nothing."""
    redactor = Redactor(out_dir)
    for path in (out_dir / cell.log, out_dir / cell.stacks):
        if path.exists():
            redactor.file(path)
    run_dir = out_dir / cell.run
    if run_dir.is_symlink():  # what lies elsewhere is no part of the report
        run_dir.unlink()
    if not run_dir.is_dir():
        return ()
    return tuple(clean_folder(run_dir, redactor) if cell.foreign else redactor.folder(run_dir))


def clean_folder(run_dir: Path, redactor: Redactor) -> list[str]:
    """Make a run directory fit to publish; return the names that changed, relative to it.

    Links are removed, names of files are redacted as TensorBoard's carry the host's, and so is every text file. Other
    files, as events and checkpoints, stay as they are. Letters of a name that no hash list can hold become ``_``.
    """
    changed = []
    for path in sorted(run_dir.rglob("*"), reverse=True):  # what is in a folder before the folder
        name = path.relative_to(run_dir).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            path.unlink()
            changed.append(redactor.text(name))
            continue
        rewritten = path.is_file() and _is_text(path) and redactor.file(path)
        kept = path.with_name(UNLISTED.sub("_", redactor.text(path.name).replace("<", "").replace(">", "")))
        if kept != path:
            path.rename(kept)
        if kept != path or rewritten:
            changed.append(redactor.text(kept.relative_to(run_dir).as_posix()))
    return sorted(changed)


def _is_text(path: Path) -> bool:
    if path.stat().st_size > MOST_TEXT:
        return False
    content = path.read_bytes()
    try:
        return b"\0" not in content and bool(content.decode("utf-8"))
    except UnicodeDecodeError:
        return False
