"""The part of a report that puts side by side what several changes of one base case do, as finished text."""

from __future__ import annotations

from repro import text
from repro.matrix import Comparison, Matrix
from repro.result import ComparisonResult, Result

Effect = tuple[Comparison, ComparisonResult]
NOTE = (
    "Effects are sorted by size; an effect whose interval holds 0 is inside the noise, and effects whose intervals "
    "overlap are in no certain order. Each interval is a 95 % interval of its own: of twenty effects that are none, "
    "one is beyond the noise by chance."
)


def effects_section(matrix: Matrix, result: Result) -> str:
    """One table for each base case that two or more comparisons of one metric share; empty without such a base."""
    bases: dict[tuple[str, str], list[Effect]] = {}
    for item, found in zip(matrix.comparisons, result.comparisons, strict=True):
        if found.ratio is not None and item.expected == 1.0:  # more ranks are no change of the base case
            bases.setdefault((item.denominator, found.metric), []).append((item, found))
    shared = {base: effects for (base, _), effects in bases.items() if len(effects) > 1}
    parts = [f"{_table(base, effects)}\n\n{_summary(effects)}" for base, effects in shared.items()]
    return "\n\n".join([*parts, NOTE]) if parts else ""


def _table(base: str, effects: list[Effect]) -> str:
    rows = [
        [
            f"{item.name}: {item.numerator}",
            text.change(_size(found)),
            f"[{text.change(found.ci_low - 1)}, {text.change(found.ci_high - 1)}]"
            if found.ci_low is not None and found.ci_high is not None
            else text.NOTHING,
            str(found.n),
            _standing(found),
        ]
        for item, found in sorted(effects, key=lambda effect: -_size(effect[1]))
    ]
    return text.markdown_table((f"effect on {base}", "change", "95 % interval", "n", "noise"), rows, "lrrrl")


def _summary(effects: list[Effect]) -> str:
    """Name the largest effect only where its interval lies above all others."""
    beyond = [effect for effect in effects if _standing(effect[1]) == "beyond"]
    if not beyond:
        return "No effect is beyond the noise."
    largest, found = max(effects, key=lambda effect: _size(effect[1]))
    others = [other.ci_high for item, other in effects if item is not largest]
    certain = found.ci_low is not None and all(high is not None and high < found.ci_low for high in others)
    if not certain or found.ci_low is None or found.ci_low <= 1:
        return (
            f"Beyond the noise: {', '.join(f'`{item.name}`' for item, _ in beyond)}; which is largest is not certain."
        )
    return f"The largest gain is that of `{largest.name}`."


def _size(found: ComparisonResult) -> float:
    assert found.ratio is not None
    return found.ratio - 1


def _standing(found: ComparisonResult) -> str:
    if found.ci_low is None or found.ci_high is None:
        return "one run, not known"
    return "inside" if found.ci_low <= 1 <= found.ci_high else "beyond"
