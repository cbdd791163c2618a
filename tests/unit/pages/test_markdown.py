"""Names in Markdown: shown as they stand by a renderer, and never markup or a column."""

import html
import re

import pytest

from megatron_ddrp.pages.markdown import Table, code, escape

NAMES = ["runs/a_b-c.1", "<script>alert(1)</script>", "a|b", "`x`", r"c:\d\|e", "*x* & [y](javascript:z)", "&lt;b&gt;"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_shown_as_it_stands(name):
    escaped = escape(name)
    assert not re.search(r"[<>]", escaped)
    assert not re.search(r"(?<!\\)(\\\\)*[`*|\[\]]", re.sub(r"\\[`*|\[\]]", "", escaped)), "one is left unescaped"
    assert html.unescape(re.sub(r"\\([\\`*\[\]|])", r"\1", escaped)) == name


def test_a_name_is_one_line():
    assert escape("a\n# b\r\u2028c\x00") == "a # b c "


def test_tables_and_code():
    table = Table(["a", "b", "c"], [["1", "2", ""]], wordy=(2,))
    assert str(table) == "| a | b | c |\n| --- | ---: | --- |\n| 1 | 2 |  |"
    assert str(Table(["a"], [["1"], [""]], "of *b*", is_paper=True)) == "of *b*\n\n| a |\n| --- |\n| *1* |\n|  |"
    assert code(["a", "```", "<b>"]) == "````\na\n```\n<b>\n````"
