"""Parsing of a chunk of a file: its documents' texts, and the records that cannot be read, each with the reason.

A record is a line with one JSON object; the lines between two blank lines, so that Google's files of one sentence per
line work; the text between `<doc …>` and `</doc>` (WikiExtractor); or a row of a table.

A line of plain text may end anywhere, so its line breaks are no part of the text, and many SentencePiece models turn
one into [UNK]. They become spaces, or nothing between characters of scripts without spaces (Chinese, Japanese), as in
CSS Text (section 4.1.3). Other formats keep their line breaks, which separate paragraphs there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_BLANK = " \t\r\x0b\x0c"
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
_UNSPACED = (
    "\u2e80-\u312f\u3190-\u4dbf\u4e00-\u9fff\uf900-\ufaff\ufe30-\ufe4f\uff01-\uff9f\U0001aff0-\U0001b16f"
    "\U00020000-\U0003ffff"
)
"""Han, kana, bopomofo, their punctuation and full-width forms; not Hangul, which has spaces between words."""
_BREAK_WITHOUT_SPACE = re.compile(f"(?<=[{_UNSPACED}])\n(?=[{_UNSPACED}])")

Text = tuple[str, ...]
"""The texts of one document, one for each JSON key."""


class Chunk(NamedTuple):
    """Some whole records of one file, in order."""

    format: str
    """`json`, `text`, `wiki` or `rows`."""
    data: bytes | list[tuple[bytes | None, ...]]
    """Unpacked bytes; of a Parquet file the rows, UTF-8 of each key or None."""
    read: int
    """Bytes of the file, as it lies on the disk, read since the chunk before."""
    file: int = 0
    """Number of the file among the inputs."""

    @property
    def text_bytes(self) -> int:
        """Bytes of the records."""
        if isinstance(self.data, bytes):
            return len(self.data)
        return sum(len(cell or b"") for row in self.data for cell in row)


class Fault(NamedTuple):
    """A record that could not be read."""

    line: int
    """From 1, inside the chunk."""
    reason: str


class Parsed(NamedTuple):
    """Contents of a chunk."""

    texts: list[Text]
    faults: list[Fault]
    lines: int
    """Lines of the chunk (rows of a Parquet file)."""


def parse_chunk(chunk: Chunk, keys: Sequence[str]) -> Parsed:
    """Return the documents of a chunk and the faults in it. Formats without keys give their text for every key."""
    if chunk.format == "rows":
        return _parse_rows(chunk.data, keys)
    assert isinstance(chunk.data, bytes)
    bad: dict[int, str] = {}
    try:
        text = chunk.data.decode("utf-8")
        lines = text.split("\n")
    except UnicodeDecodeError:
        lines = chunk.data.decode("utf-8", "surrogateescape").split("\n")
        for number, line in enumerate(lines):
            if found := _NOT_UTF8.search(line):
                bad[number] = f"not UTF-8 (byte 0x{ord(found[0]) - 0xDC00:02x})"
    texts, faults = PARSERS[chunk.format](lines, keys, bad)
    return Parsed(texts, faults, len(lines) - (not lines[-1]))


Lines = tuple[list[Text], list[Fault]]


def _parse_json(lines: list[str], keys: Sequence[str], bad: dict[int, str]) -> Lines:
    texts, faults = [], []
    for number, line in enumerate(lines):
        if not line or line.isspace():
            continue
        try:
            if number in bad:
                raise ValueError(bad[number])
            texts.append(_texts_of_json(line, keys))
        except ValueError as error:
            faults.append(Fault(number + 1, str(error)))
    return texts, faults


def _texts_of_json(line: str, keys: Sequence[str]) -> Text:
    """Return the texts under the keys of one JSON line. Raises `ValueError` with the reason when one is missing."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}); expected one object a line") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, expected one object a line")
    for key in keys:
        if key not in value:
            known = ", ".join(list(value)[:8]) or "none"
            raise ValueError(f"no key {key!r}, it has {known} (see --json-keys)")
        if not isinstance(value[key], str):
            raise ValueError(f"key {key!r} holds {type(value[key]).__name__}, expected a string")
        if ("\\ud" in line or "\\uD" in line) and _HALF_PAIR.search(value[key]):
            raise ValueError(f"key {key!r} holds half a surrogate pair, which is no character")
    return tuple(value[key] for key in keys)


def _parse_text(lines: list[str], keys: Sequence[str], bad: dict[int, str]) -> Lines:
    texts: list[Text] = []
    faults: list[Fault] = []
    gathered: list[str] = []
    fault: Fault | None = None
    for number, line in enumerate([*lines, ""]):
        if line.strip(_BLANK):
            gathered.append(line.rstrip("\r"))
            fault = fault or (Fault(number + 1, bad[number]) if number in bad else None)
        elif gathered:
            if fault:
                faults.append(fault)
            else:
                texts.append((_join_lines(gathered),) * len(keys))
            gathered, fault = [], None
    return texts, faults


def _join_lines(lines: list[str]) -> str:
    """Return the lines of a document as running text."""
    text = "\n".join(lines)
    if not text.isascii():
        text = _BREAK_WITHOUT_SPACE.sub("", text)
    return text.replace("\n", " ")


def _parse_wiki(lines: list[str], keys: Sequence[str], bad: dict[int, str]) -> Lines:
    texts: list[Text] = []
    faults: list[Fault] = []
    gathered: list[str] = []
    opened = 0  # line number of the <doc …> that is open, 0 outside
    fault: Fault | None = None
    for number, line in enumerate(map(str.rstrip, lines), 1):
        if line.startswith("<doc ") and line.endswith(">"):
            if opened:
                faults.append(fault or Fault(opened, "<doc …> without </doc>"))
            gathered, opened, fault = [], number, None
        elif opened:
            gathered.append(line)
            fault = fault or (Fault(number, bad[number - 1]) if number - 1 in bad else None)
            if line.endswith("</doc>"):
                if fault:
                    faults.append(fault)
                else:
                    texts.append(("\n".join(gathered).removesuffix("</doc>").strip("\n"),) * len(keys))
                opened = 0
        elif line:
            faults.append(Fault(number, "text outside <doc …> and </doc>"))
    if opened:
        faults.append(fault or Fault(opened, "<doc …> without </doc>"))
    return texts, faults


def _parse_rows(rows: Any, keys: Sequence[str]) -> Parsed:
    texts, faults = [], []
    for number, row in enumerate(rows, 1):
        try:
            if None in row:
                raise ValueError(f"column {keys[row.index(None)]!r} holds null, expected a string")
            texts.append(tuple(cell.decode("utf-8") for cell in row))
        except UnicodeDecodeError as error:
            faults.append(Fault(number, f"not UTF-8 (byte 0x{error.object[error.start]:02x})"))
        except ValueError as error:
            faults.append(Fault(number, str(error)))
    return Parsed(texts, faults, len(rows))


PARSERS: dict[str, Callable[[list[str], Sequence[str], dict[int, str]], Lines]] = {
    "json": _parse_json,
    "text": _parse_text,
    "wiki": _parse_wiki,
}
"""Format → lines (and what is wrong with some, by index) to documents and faults."""
