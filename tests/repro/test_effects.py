from __future__ import annotations

from session_builder import make_host, matrix_text

from repro import stats
from repro.effects_section import effects_section
from repro.matrix import Comparison, Matrix, parse_matrix
from repro.result import ComparisonResult, Result
from repro.text import NOTHING

CASES = ("base", "a", "b", "c")


def ablation(*denominators: str) -> Matrix:
    """A matrix that compares cases a, b, … with the given ones."""
    matrix = parse_matrix(matrix_text({name: {} for name in CASES}), "toy.toml")
    pairs = zip(CASES[1:], denominators, strict=False)
    found = tuple(Comparison(name=f"effect_{case}", numerator=case, denominator=base) for case, base in pairs)
    return matrix.model_copy(update={"comparisons": found})


def section(matrix: Matrix, *ratios: tuple[float, float, float] | float | None) -> str:
    """The section for ratios with intervals, single runs (no interval), or nothing measured."""
    comparisons = []
    for item, ratio in zip(matrix.comparisons, ratios, strict=True):
        value, low, high = ratio if isinstance(ratio, tuple) else (ratio, None, None)
        verdict = stats.verdict(value, low, high, 0.05) if value is not None else "insufficient_data"
        n = 3 if low is not None else 1
        comparisons.append(
            ComparisonResult(
                name=item.name, metric="steps_per_second", ratio=value, ci_low=low, ci_high=high, n=n, verdict=verdict
            )
        )
    host, _ = make_host()
    return effects_section(
        matrix,
        Result(
            schema_version=1,
            matrix="toy",
            smoke=True,
            host=host,
            cells=(),
            groups=(),
            comparisons=tuple(comparisons),
            probes=(),
            learning=(),
            verdict="measured",
        ),
    )


def test_effects_are_sorted_with_interval_n_and_noise() -> None:
    text = section(ablation("base", "base", "base"), (1.01, 0.97, 1.05), (1.30, 1.25, 1.35), 0.9)
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:5]] == [
        ["effect_b: b", "+30.0 %", "[+25.0 %, +35.0 %]", "3", "beyond"],
        ["effect_a: a", "+1.0 %", "[-3.0 %, +5.0 %]", "3", "inside"],
        ["effect_c: c", "-10.0 %", NOTHING, "1", "one run, not known"],
    ]


def test_the_largest_is_named_only_above_all_other_intervals() -> None:
    matrix = ablation("base", "base")
    assert "The largest gain is that of `effect_b`." in section(matrix, (1.01, 0.97, 1.05), (1.3, 1.25, 1.35))
    overlapping = section(matrix, (1.24, 1.21, 1.27), (1.3, 1.25, 1.35))
    assert "Beyond the noise: `effect_a`, `effect_b`; which is largest is not certain." in overlapping
    assert "which is largest is not certain" in section(matrix, 1.1, (1.3, 1.25, 1.35))  # one run may be anything
    assert "which is largest is not certain" in section(matrix, (0.8, 0.7, 0.9), (0.95, 0.92, 0.98))  # no gain


def test_inside_the_noise_there_is_no_winner() -> None:
    text = section(ablation("base", "base"), (1.04, 0.99, 1.09), (0.99, 0.9, 1.1))
    assert "No effect is beyond the noise." in text and "largest" not in text


def test_a_section_needs_two_effects_on_one_base() -> None:
    assert section(ablation("base"), (1.3, 1.2, 1.4)) == ""
    assert section(ablation("base", "c"), (1.3, 1.2, 1.4), (1.3, 1.2, 1.4)) == ""
    assert section(ablation("base", "base"), (1.3, 1.2, 1.4), None) == ""
