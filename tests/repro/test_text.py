from __future__ import annotations

from html import escape

import pytest
from markdown_it import MarkdownIt

from repro import text


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min 00 s"), (126, "2 min 06 s"), (3785, "1 h 03 min")]
)
def test_durations(seconds: float, shown: str) -> None:
    assert text.duration(seconds) == shown


@pytest.mark.parametrize(("cpus", "shown"), [((), text.NOTHING), ((3,), "3"), ((0, 1, 2, 8, 6), "0-2,8,6")])
def test_cpu_lists(cpus: tuple[int, ...], shown: str) -> None:
    assert text.cpu_list(cpus) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(None, text.NOTHING), (0, "0"), (0.012345, "0.0123"), (12.345, "12.3"), (123456, "123,456")]
)
def test_significant_digits(value: float | None, shown: str) -> None:
    assert text.significant(value) == shown


def test_numbers() -> None:
    assert text.rate(50194.4) == "50,194"
    assert text.percent(0.9349) == "93.5 %"
    assert text.ratio(2.1646) == "2.165\u00d7"
    assert text.interval(9811.6, 10105.7) == "[9,812, 10,106]"
    assert text.interval(None, 1.0) == text.NOTHING
    assert text.gib(3 * 2**30) == "3.0 GiB"
    assert text.count_of(1, "run") == "1 run"
    assert text.count_of(2000, "run") == "2,000 runs"


@pytest.mark.parametrize(
    "words",
    [
        *("# A heading", "> said", "- item", "+ item", "1. item", "2) item", "~~~", "    code", "---", "2.5 times"),
        *("<img src=x onerror=y>", "a <!-- b", "[x](https://example.org)", "![x](y)", "[x]: y", "`code`", "&lt;&#60;"),
        *("*a* **b** _c_ __d__ e__f__ ~~g~~", "a\\", "a\\`b`", "a | b", "a\\|b", "a\\\\| <b>", "HEAD~1 or HEAD~2?"),
    ],
)
def test_words_of_a_user_are_shown_as_they_are(words: str) -> None:
    shown = escape(words.strip())
    markdown = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    assert markdown.render(f"{text.escaped(words)} Measured.") == f"<p>{shown} Measured.</p>\n"
    table = markdown.render(text.markdown_table(("why", "n"), [[text.escaped(words), "1"]], "ll"))
    assert f"<tr>\n<td>{shown}</td>\n<td>1</td>\n</tr>" in table


def test_plain_words_stay_as_they_are() -> None:
    plain = "How fast is batch_size=8192 of G1's task (SAC), at 50 % load; what else?"
    assert text.escaped(plain) == plain


def test_markdown_tables_line_up_and_escape_bars() -> None:
    table = text.markdown_table(("case", "rate"), [["a|b", "1"], ["long name", "12,345"]], "lr")
    assert table.splitlines() == [
        "| case      |   rate |",
        "| --------- | -----: |",
        "| a\\|b      |      1 |",
        "| long name | 12,345 |",
    ]


def test_plain_tables_line_up() -> None:
    assert text.plain_table(("a", "b"), [["xx", "1"], ["y", "22"]], "lr").splitlines() == ["a    b", "xx   1", "y   22"]
