"""Reader and writer of CoNLL files: one token with its tag per line, a blank line after each sentence.

The first column is the token and the last one its tag (CoNLL-2003, Tjong Kim Sang and De Meulder, arXiv:cs/0306050);
columns between them are ignored. A file with one column has tokens without tags. In CoNLL-U files of Universal
Dependencies the token is the word form (column 2) and the tag is the universal part of speech (column 4).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatron_ddrp.errors import UserError

DOCUMENT_START = "-DOCSTART-"
CONLLU_COLUMNS = 10
_BLANKS = re.compile("[ \t]+")
_BREAKS = re.compile("[\t\r\n]")


def read_conll(path: str, lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield per sentence `line N` of its first token and its cells `tokens` and `tags` (lists of strings).

    Tabs separate the columns of a line with a tab, blanks those of other lines. Raises `UserError` for a line whose
    number of columns differs from the first line's.
    """
    width = 0
    sentence: list[list[str]] = []
    begin = 1
    for number, line in enumerate(lines, 1):
        cells = _cells(line)
        if not cells or cells[0] == DOCUMENT_START:
            yield from _finished(begin, sentence)
            sentence = []
            continue
        width = width or len(cells)
        if len(cells) != width:
            raise UserError(
                f"{path}, line {number}: {len(cells)} columns, expected {width} as in the lines before: "
                "a token first, its tag last, and a blank line after each sentence"
            )
        begin = begin if sentence else number
        sentence.append([cells[0], cells[-1]] if width > 1 else cells)
    yield from _finished(begin, sentence)


def read_conllu(path: str, lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the sentences of a CoNLL-U file in the form of `read_conll`; skip comments, word ranges and empty nodes."""
    sentence: list[list[str]] = []
    begin = 1
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r")
        if not line.strip():
            yield from _finished(begin, sentence)
            sentence = []
            continue
        if line.startswith("#"):
            continue
        cells = line.split("\t")
        if len(cells) != CONLLU_COLUMNS:
            raise UserError(
                f"{path}, line {number}: {len(cells)} columns, expected the {CONLLU_COLUMNS} of CoNLL-U with tabs "
                "between them; a file of two columns must be named .conll"
            )
        if cells[0].isdecimal():
            begin = begin if sentence else number
            sentence.append([cells[1], cells[3]])
    yield from _finished(begin, sentence)


def conll_text(tokens: Sequence[str], tags: Sequence[str]) -> str:
    """Return a sentence in CoNLL's layout, with a tab between token and tag and a blank line at the end.

    Tabs and line breaks inside a token become blanks.
    """
    lines = (f"{_BREAKS.sub(' ', token)}\t{tag}\n" for token, tag in zip(tokens, tags, strict=True))
    return "".join(lines) + "\n"


def _cells(line: str) -> list[str]:
    line = line.strip(" \t\r")
    return (line.split("\t") if "\t" in line else _BLANKS.split(line)) if line else []


def _finished(begin: int, sentence: list[list[str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    if sentence:
        cells = {"tokens": [columns[0] for columns in sentence]}
        if len(sentence[0]) > 1:
            cells["tags"] = [columns[1] for columns in sentence]
        yield f"line {begin}", cells
