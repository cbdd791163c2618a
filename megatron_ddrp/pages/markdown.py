"""Markdown for our pages. Names (folders, models, log lines) are escaped, so that they appear unchanged."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
_MARKUP = re.compile(r"(`[^`]+`)|(?<![\w*])\*([^*\s][^*]*)\*(?![\w*])")
"""Pattern of `code` (group 1) or *emphasised text* (group 2)."""


def escape(name: str) -> str:
    """Return Markdown that shows a name unchanged on one line of a paragraph or of a table cell."""
    return re.sub(r"([\\`*\[\]|])", r"\\\1", one_line(name).translate(_ENTITIES))


def one_line(text: str) -> str:
    """Return a text with a blank for each group of line breaks and control characters."""
    return re.sub(r"[\x00-\x1f\x7f\u2028\u2029]+", " ", text)


def marked(text: str) -> str:
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
        return "\n".join([marked(self.caption), ""] * bool(self.caption) + lines)


def percent(share: float | None) -> str:
    """Return a share times 100 with two decimals; empty for None."""
    return "" if share is None else f"{100 * share:.2f}"
