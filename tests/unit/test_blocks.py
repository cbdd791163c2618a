"""Generated blocks of Markdown files."""

from __future__ import annotations

import pytest

from benchmarks.pages import written_table
from megatron_ddrp.errors import UserError
from megatron_ddrp.pages.markdown import block_names, read_block, replace_blocks

TEXT = (
    "a\n<!-- x one -->\n1\n\n2\n<!-- end of x one -->\n<!-- two -->\n<!-- end of two -->\n"
    "<!-- x one -->\n<!-- end of x one -->"
)


def test_names_and_contents():
    assert block_names(TEXT, "x ") == ["x one"]
    assert read_block(TEXT, "x one") == "1\n\n2"
    assert read_block(TEXT, "two") == ""


def test_every_block_of_a_name_is_replaced_and_a_second_time_nothing_changes():
    found = replace_blocks(TEXT, "x one", "new\nlines")
    assert found == (
        "a\n<!-- x one -->\nnew\nlines\n<!-- end of x one -->\n<!-- two -->\n<!-- end of two -->\n"
        "<!-- x one -->\nnew\nlines\n<!-- end of x one -->"
    )
    assert replace_blocks(found, "x one", "new\nlines") == found


@pytest.mark.parametrize(
    "text",
    ["", "<!-- x -->", "<!-- end of x -->\n<!-- x -->", "<!-- x -->\n<!-- x -->\n<!-- end of x -->", "a <!-- x --> b"],
)
def test_a_block_without_a_begin_or_an_end_is_refused(text):
    with pytest.raises(UserError, match="expected a line <!-- x -->"):
        replace_blocks(text, "x", "new")


@pytest.mark.parametrize(
    ("document", "name"),
    [
        ("foreign-files.md", "damage"),
        ("lab/agreement.md", "parity"),
        ("lab/agreement.md", "layouts"),
    ],
)
def test_each_document_has_the_block_that_a_script_writes(document, name):
    assert "|\n| --- | ---" in written_table(document, name)
