"""How numbers and tables look in a report and on the terminal: rounding, units, aligned columns."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

NOTHING = "\N{EN DASH}"
# Letters that Markdown or GitHub's kind of it may take for markup; an underscore is none inside a word.
MARKUP = re.compile(r"[\\`*\[\]<&~$]|(?<![^\W_])_|_(?![^\W_])")
MARKUP_AT_START = re.compile(r"^(\d*)([-+.)#>])")  # of a list, a heading, a quotation


def rate(value: float | None) -> str:
    """A rate with thousands separators and no more digits than a run repeats."""
    return NOTHING if value is None else f"{value:,.0f}"


def number(value: float | None, digits: int = 2) -> str:
    """A number with fixed digits after the point."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def significant(value: float | None, digits: int = 3) -> str:
    """A number with fixed significant digits, never in exponent form."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def percent(value: float | None) -> str:
    """A fraction as a percentage with one digit."""
    return NOTHING if value is None else f"{100 * value:.1f} %"


def change(value: float | None) -> str:
    """A relative change as a percentage with its sign."""
    return NOTHING if value is None else f"{100 * value:+.1f} %"


def ratio(value: float | None) -> str:
    """A ratio, with the multiplication sign behind it."""
    return NOTHING if value is None else f"{value:.3f}\N{MULTIPLICATION SIGN}"


def interval(low: float | None, high: float | None, form: str = ",.0f") -> str:
    """An interval, as in ``[9,812, 10,106]``."""
    return NOTHING if low is None or high is None else f"[{low:{form}}, {high:{form}}]"


def duration(seconds: float) -> str:
    """Seconds as people say them: ``8 s``, ``2 min 05 s``, ``1 h 03 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def gib(count: int | None) -> str:
    """Bytes as GiB."""
    return NOTHING if count is None else f"{count / 2**30:,.1f} GiB"


def cpu_list(cpus: Sequence[int]) -> str:
    """CPU numbers with runs joined, as in ``0-3,8``; the order is kept."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or NOTHING


def pools(cpus: Sequence[Sequence[int]]) -> str:
    """CPU numbers of each rank's pool, as in ``0-3 + 8-11``."""
    return " + ".join(map(cpu_list, cpus)) or NOTHING


def workers(cpus: Sequence[Sequence[int]]) -> str:
    """How many physics workers the pools have, as in ``15`` or ``2 x 7``."""
    if not cpus:
        return NOTHING
    return f"{len(cpus[0])}" if len(cpus) == 1 else f"{len(cpus)} x {len(cpus[0])}"


def count_of(count: int, singular: str, plural: str | None = None) -> str:
    """A count with its noun, as in ``1 run`` or ``3 runs``."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def escaped(words: str) -> str:
    """A user's words in Markdown that shows them as they are; their vertical bars are left to `markdown_table`."""
    return MARKUP_AT_START.sub(r"\1\\\2", MARKUP.sub(r"\\\g<0>", words.strip()))


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """A Markdown table whose columns also line up as plain text.

    Args:
        headers: One for each column.
        rows: Cells; a vertical bar in one is escaped.
        align: One letter for each column, ``l`` or ``r``.
    """
    assert len(headers) == len(align) and all(len(row) == len(align) for row in rows)
    lines = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (headers, *rows)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(align))]
    marks = ["-" * (width - 1) + ":" if side == "r" else "-" * width for width, side in zip(widths, align, strict=True)]
    padded = [_padded(line, widths, align) for line in (lines[0], marks, *lines[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def plain_table(headers: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """The same table for a terminal, columns two spaces apart."""
    lines = [list(row) for row in (headers, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(align))]
    return "\n".join("  ".join(_padded(line, widths, align)).rstrip() for line in lines)


def _padded(line: Sequence[str], widths: Sequence[int], align: str) -> list[str]:
    sides = zip(line, widths, align, strict=True)
    return [cell.rjust(width) if side == "r" else cell.ljust(width) for cell, width, side in sides]
