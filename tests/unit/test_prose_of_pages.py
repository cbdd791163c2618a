"""README.md and the pages of docs/ are for readers in a hurry: short paragraphs, and no command that cannot work."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tools.site_pages import CODE, ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST_WORDS = 120
ENTRY = re.compile(r"^\s*(?:[-*]|\d+\.) ")
"""Begin of an entry of a list, which is a paragraph of its own."""
NO_PROSE = re.compile(r"^\s*(?:\||#|<!--|!\[)")
"""Begin of a line of a table, a heading, a comment or a picture."""


def without_blocks(text: str) -> str:
    """Return the text without its blocks of code; code inside a line stays."""
    return CODE.sub(lambda code: code[0] if re.match("`[^`]", code[0]) else "", text)


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a Markdown document as single lines, without blocks of code."""
    words: list[str] = []
    for line in without_blocks(text).splitlines():
        ends = not line.strip() or NO_PROSE.match(line)
        if (ends or ENTRY.match(line)) and words:
            yield " ".join(words)
            words = []
        words += [] if ends else line.split()
    if words:
        yield " ".join(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_paragraph_is_long(page) -> None:
    found = [paragraph.split() for paragraph in paragraphs(page.read_text(encoding="utf-8"))]
    long = [f"{len(words)} words: {' '.join(words[:12])} …" for words in found if len(words) > MOST_WORDS]
    assert found and not long, "\n".join(long)


def test_the_readme_is_read_in_minutes() -> None:
    assert 300 < len(without_blocks(PAGES[0].read_text(encoding="utf-8")).split()) <= 700


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_installs_a_release_that_does_not_exist(page) -> None:
    assert not re.search(r"pip install '?megatron-ddrp", page.read_text(encoding="utf-8"))


def test_paragraphs_are_found() -> None:
    text = "# Title\n\none two\nthree `four five`\n\n```\ncode\n```\n- six\n- seven\n  eight\n| nine |\n\n    code\n"
    assert list(paragraphs(text)) == ["one two three `four five`", "- six", "- seven eight"]
