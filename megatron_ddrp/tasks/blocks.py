"""Generated blocks of Markdown files. Each stands between lines `<!-- NAME -->` and `<!-- end of NAME -->`."""

from __future__ import annotations

import re

from megatron_ddrp.errors import UserError


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


def _places(lines: list[str], name: str) -> list[tuple[int, int]]:
    """Return the numbers of the first and last line of every block of a name, markers included."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    markers = [(number, line) for number, line in enumerate(lines) if line in (begin, end)]
    if not markers or [line for _, line in markers] != [begin, end] * (len(markers) // 2):
        raise UserError(f"expected a line {begin} before every line {end}, and one {end} after every {begin}")
    numbers = [number for number, _ in markers]
    return list(zip(numbers[::2], numbers[1::2], strict=True))
