"""Markdown for our pages. Names (folders, models, log lines) are escaped, so that they appear unchanged.

Generated blocks of Markdown files. Each stands between lines `<!-- NAME -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import read_text

_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
_MARKUP = re.compile(r"(`[^`]+`)|(?<![\w*])\*([^*\s][^*]*)\*(?![\w*])")
"""Pattern of `code` (group 1) or *emphasised text* (group 2)."""


def escape(name: str) -> str:
    """Return Markdown that shows a name unchanged on one line of a paragraph or of a table cell."""
    return re.sub(r"([\\`*\[\]|])", r"\\\1", one_line(name).translate(_ENTITIES))


def one_line(text: str) -> str:
    """Return a text with a blank for each group of line breaks and control characters."""
    return re.sub(r"[\x00-\x1f\x7f\u2028\u2029]+", " ", text)


def paragraph(text: str) -> str:
    """Return a paragraph as Markdown; keep *emphasis* and `code`, escape everything else."""
    done, at = "", 0
    for found in _MARKUP.finditer(text):
        done += escape(text[at : found.start()]) + (found[1] or f"*{escape(found[2])}*")
        at = found.end()
    return done + escape(text[at:])


def code(lines: Sequence[str], language: str = "") -> str:
    """Return lines as a fenced code block; the lines may contain backticks."""
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([fence + language, *lines, fence])


@dataclass(frozen=True)
class Table:
    """Table of escaped cells below an optional caption, which may have markup."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    is_paper: bool = False
    """True if the numbers are the paper's, which are shown in italics."""
    wordy: Sequence[int] = ()
    """Numbers of the columns with sentences. These and the first column are aligned to the left."""

    def is_left(self, column: int) -> bool:
        """Return whether a column, counted from 0, is aligned to the left."""
        return column in (0, *self.wordy)

    def __str__(self) -> str:
        star = "*" if self.is_paper else ""
        dashes = ["---" if self.is_left(number) else "---:" for number in range(len(self.header))]
        cells = [[f"{star}{escape(cell)}{star}" if cell else "" for cell in row] for row in self.rows]
        lines = [f"| {' | '.join(row)} |" for row in ([escape(name) for name in self.header], dashes, *cells)]
        return "\n".join([paragraph(self.caption), ""] * bool(self.caption) + lines)


def percent(share: float | None) -> str:
    """Return a share times 100 with two decimals; empty for None."""
    return "" if share is None else f"{100 * share:.2f}"


def block_names(text: str, prefix: str) -> list[str]:
    """Return the names of the blocks that begin with `prefix`, in the order of the text, each once."""
    found = re.findall(rf"^<!-- ({re.escape(prefix)}.+?) -->$", text, re.MULTILINE)
    return list(dict.fromkeys(found))


def read_block(text: str, name: str) -> str:
    """Return the content of the first block of a name. Raises `UserError` for a block without an end, or for none."""
    lines = text.split("\n")
    first, last = _places(lines, name)[0]
    return "\n".join(lines[first + 1 : last])


def replace_blocks(text: str, name: str, content: str) -> str:
    """Return a text with a new content of every block of a name. Raises `UserError` as `read_block` does."""
    lines = text.split("\n")
    for first, last in reversed(_places(lines, name)):
        lines[first + 1 : last] = content.split("\n")
    return "\n".join(lines)


def write_blocks(path: Path, prefix: str, contents: Mapping[str, str]) -> list[str]:
    """Replace the blocks `prefix NAME` of a Markdown file by the contents of these names; return those that it has.

    Raises:
        UserError: the file is missing or not UTF-8, has no block, an unknown one, or one without an end.
    """
    text = read_text(path)
    names = [name.removeprefix(prefix) for name in block_names(text, prefix)]
    unknown = [name for name in names if name not in contents]
    if unknown or not names:
        got = f"unknown table {unknown[0]!r}" if unknown else f"no line <!-- {prefix}NAME -->"
        raise UserError(f"{path}: {got}; expected one of {', '.join(contents)}")
    for name in names:
        try:
            text = replace_blocks(text, prefix + name, contents[name])
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    write_text(path, text)
    return names


def _places(lines: list[str], name: str) -> list[tuple[int, int]]:
    """Return the numbers of the first and last line of every block of a name, markers included."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    markers = [(number, line) for number, line in enumerate(lines) if line in (begin, end)]
    if not markers or [line for _, line in markers] != [begin, end] * (len(markers) // 2):
        raise UserError(f"expected a line {begin} before every line {end}, and one {end} after every {begin}")
    numbers = [number for number, _ in markers]
    return list(zip(numbers[::2], numbers[1::2], strict=True))
