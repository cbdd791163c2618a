"""Readers of CoNLL's and SQuAD's layouts as rows of cells, and the writer of CoNLL's.

A CoNLL file has one token with its tag per line, and a blank line after each sentence.

The first column is the token and the last one its tag (CoNLL-2003, Tjong Kim Sang and De Meulder, arXiv:cs/0306050);
columns between them are ignored. A file with one column has tokens without tags. In CoNLL-U files of Universal
Dependencies the token is the word form (column 2) and the tag is the universal part of speech (column 4).

SQuAD's JSON is nested (Rajpurkar et al., arXiv:1606.05250; version 2 arXiv:1806.03822).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NoReturn

from megatron_ddrp.errors import UserError

DOCUMENT_START = "-DOCSTART-"
CONLLU_COLUMNS = 10
_BLANKS = re.compile("[ \t]+")
_ENTITY = re.compile("[BIESLU]-.")
_BREAKS = re.compile("[\t\r\n]")
_SQUAD = (
    'expected SQuAD\'s {"data": [{"paragraphs": [{"context": …, "qas": [{"id": …, "question": …, "answers": …}]}]}]}'
)


def read_conll(path: str, lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield per sentence `line N` of its first token and its cells `tokens` and `tags` (lists of strings).

    Tabs separate the columns of a line with a tab, blanks those of other lines. Raises `UserError` for a line whose
    number of columns differs from the first line's, and for a comment. A word with # at the begin of a sentence is a
    token if its tag is that of other tokens, of an entity, or one without small letters and digits, such as SYM.
    """
    width, may_be_comment = 0, True
    tags: set[str] = set()
    doubtful: dict[int, str] = {}  # line → tag, at the begin of sentences

    def refuse_comment(number: int) -> NoReturn:
        raise UserError(
            f"{path}, line {number}: a comment, expected only tokens with tags; remove such lines (if its # is a "
            "token, give the sentences as .jsonl)"
        )

    def cells_of(number: int, line: str) -> list[str]:
        nonlocal width, may_be_comment
        cells = _cells(line)
        if not cells or cells[0] == DOCUMENT_START:
            may_be_comment = True
            return []
        may_be_comment = may_be_comment and cells[0].startswith("#")
        width = width or len(cells)
        if len(cells) != width:
            if may_be_comment or not tags:
                refuse_comment(number if may_be_comment else min(doubtful))
            raise UserError(
                f"{path}, line {number}: {len(cells)} columns, expected {width} as in the lines before: "
                "a token first, its tag last, and a blank line after each sentence"
            )
        if may_be_comment and width > 1:
            doubtful[number] = cells[-1]
        else:
            tags.add(cells[-1])
        return [cells[0], cells[-1]] if width > 1 else cells

    yield from _sentences(lines, cells_of)
    for number, tag in doubtful.items():
        if tag not in tags and not _ENTITY.match(tag) and any(sign.isalnum() and not sign.isupper() for sign in tag):
            refuse_comment(number)


def read_conllu(path: str, lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the sentences of a CoNLL-U file in the form of `read_conll`; skip comments, word ranges and empty nodes."""

    def cells_of(number: int, line: str) -> list[str] | None:
        line = line.rstrip("\r")
        if line.startswith("#"):
            return None
        if not line.strip():
            return []
        cells = line.split("\t")
        if len(cells) != CONLLU_COLUMNS:
            raise UserError(
                f"{path}, line {number}: {len(cells)} columns, expected the {CONLLU_COLUMNS} of CoNLL-U with tabs "
                "between them; a file of two columns must be named .conll"
            )
        return [cells[1], cells[3]] if cells[0].isdecimal() else None

    return _sentences(lines, cells_of)


def _sentences(
    lines: Iterable[str], cells_of: Callable[[int, str], list[str] | None]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the sentences of some lines.

    `cells_of` returns token and tag of a line, from its number and text; nothing at the end of a sentence, None for a
    line to skip.
    """
    begin = 1
    sentence: list[list[str]] = []
    for number, line in enumerate(chain(lines, [""]), 1):
        cells = cells_of(number, line)
        if cells:
            begin = begin if sentence else number
            sentence.append(cells)
        elif cells is not None and sentence:
            columns = map(list, zip(*sentence, strict=True))
            yield f"line {begin}", dict(zip(("tokens", "tags"), columns, strict=False))
            sentence = []


def conll_text(tokens: Sequence[str], tags: Sequence[str]) -> str:
    """Return a sentence in CoNLL's layout, with a tab between token and tag and a blank line at the end.

    Tabs and line breaks inside a token become blanks.
    """
    lines = (f"{_BREAKS.sub(' ', token)}\t{tag}\n" for token, tag in zip(tokens, tags, strict=True))
    return "".join(lines) + "\n"


def _cells(line: str) -> list[str]:
    line = line.strip(" \t\r")
    return (line.split("\t") if "\t" in line else _BLANKS.split(line)) if line else []


def is_squad(value: Any) -> bool:
    """Return whether a JSON value has SQuAD's outer layout: articles with paragraphs under `data`."""
    articles = value.get("data") if isinstance(value, dict) else None
    return isinstance(articles, list) and any(isinstance(a, dict) and "paragraphs" in a for a in articles)


def read_squad(path: str, value: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `question ID` and the cells id, question, context and answers of each question.

    `answers` is {"text": [str, …], "answer_start": [int, …]}, with empty lists for an unanswerable question; questions
    of a test set have no answers. Raises `UserError` for another layout.
    """
    place = "its first question"
    try:
        for article in value["data"]:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    place = f"question {asked['id']}"
                    cells = {key: asked[key] for key in ("id", "question")} | {"context": paragraph["context"]}
                    if "answers" in asked:
                        cells["answers"] = flat_answers(asked["answers"])
                    yield place, cells
    except (KeyError, TypeError) as error:
        reason = f"no key {error}" if isinstance(error, KeyError) else "another layout"
        raise UserError(f"{path}, at or after {place}: {reason}; {_SQUAD}") from None


def flat_answers(answers: Any) -> dict[str, list[Any]]:
    """Return answers as {"text": […], "answer_start": […]}; `answers` may also be a list of {"text", "answer_start"}.

    Raises `KeyError` or `TypeError` for anything else.
    """
    if isinstance(answers, dict):
        return {"text": list(answers["text"]), "answer_start": list(answers["answer_start"])}
    return {key: [answer[key] for answer in answers] for key in ("text", "answer_start")}
