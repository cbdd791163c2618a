"""The pieces of Markdown that our pages are made of. Names (folders, models, log lines) are shown as they stand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def escape(name: str) -> str:
    """Return a name as Markdown that shows it unchanged, in a paragraph or in a table's cell, on one line."""
    line = re.sub(r"[\x00-\x1f\x7f\u2028\u2029]+", " ", name)
    return re.sub(r"([\\`*\[\]|])", r"\\\1", line.translate(_ENTITIES))


def row(cells: Iterable[str]) -> str:
    """Return one line of a table. The cells are Markdown."""
    return f"| {' | '.join(cells)} |"


def header(names: Sequence[str], left: Sequence[int] = (0,)) -> list[str]:
    """Return the first two lines of a table; columns are aligned to the right but for those numbered in `left`."""
    return [row(names), row("---" if number in left else "---:" for number in range(len(names)))]


def code(lines: Sequence[str]) -> list[str]:
    """Return lines as a block of code, whatever backticks are in them."""
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence, *lines, fence]
