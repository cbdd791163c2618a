"""A task and the files of rows that it comes from: tables, CoNLL's and SQuAD's layouts.

`read_rows` reads a file of examples as rows of named cells, in one pass and in constant memory:

    read_rows("train.csv.gz") → FileRow("train.csv.gz, line 2", {"text": "Rain tomorrow.", "label": "weather"}), …

The ending of the name selects the format (`FORMATS`); text files may be compressed as in `data/preprocess/inputs.py`.
Cells of .csv and .tsv are strings; JSON and Parquet keep their types. JSON is read as documents are.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from megatron_ddrp.data.preprocess.documents import MAX_RECORD_BYTES, iter_chunks
from megatron_ddrp.data.preprocess.inputs import BLOCK_BYTES, PACKINGS, InputFile, OpenInput
from megatron_ddrp.data.preprocess.records import ROWS, Fault, object_of_lines, open_parquet, read_records
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, nearest, refusals_as_user_errors, shown_names

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
    number of columns differs from the first line's, for a comment, and for a first column that counts the words. A word
    with # at the begin of a sentence is a token if its tag is that of other tokens, of an entity, or one without small
    letters and digits, such as SYM.

    A CoNLL file has one token with its tag per line, and a blank line after each sentence. The first column is the
    token and the last one its tag (CoNLL-2003, Tjong Kim Sang and De Meulder, arXiv:cs/0306050); columns between them
    are ignored. A file with one column has tokens without tags.
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
        line = line.strip(" \t\r")
        cells = [] if not line else line.split("\t") if "\t" in line else _BLANKS.split(line)
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

    is_judged = False  # by the first sentence that can tell: a later one may be a row of numbers
    for where, sentence in _sentences(lines, cells_of):
        words = sentence["tokens"]
        if not is_judged and width > 2 and words == [str(count) for count in range(1, 1 + len(words))] != ["1"]:
            raise UserError(
                f"{path}, {where}: the first column counts the words; keep the columns of word and tag: "
                "grep -v '^#' FILE | cut -f2,3"
            )
        is_judged = is_judged or len(words) > 1
        yield where, sentence
    for number, tag in doubtful.items():
        if tag not in tags and not _ENTITY.match(tag) and any(sign.isalnum() and not sign.isupper() for sign in tag):
            refuse_comment(number)


def read_conllu(path: str, lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the sentences of a CoNLL-U file in the form of `read_conll`; skip comments, word ranges and empty nodes.

    CoNLL-U is the layout of Universal Dependencies: the token is the word form (column 2) and the tag is the universal
    part of speech (column 4).
    """

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


def is_squad(value: Any) -> bool:
    """Return whether a JSON value has SQuAD's outer layout: articles with paragraphs under `data`."""
    articles = value.get("data") if isinstance(value, dict) else None
    return isinstance(articles, list) and any(isinstance(a, dict) and "paragraphs" in a for a in articles)


def read_squad(path: str, value: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `question ID` and the cells id, question, context and answers of each question.

    `answers` is {"text": [str, …], "answer_start": [int, …]}, with empty lists for an unanswerable question; questions
    of a test set have no answers. Raises `UserError` for another layout.

    SQuAD's JSON is nested (Rajpurkar et al., arXiv:1606.05250; version 2 arXiv:1806.03822).
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


MAX_CELL = 1 << 24
"""Largest number of characters in a .csv cell. A longer cell comes from a quotation mark that is never closed."""


_MARKS = {";": "semicolon", "\t": "tab"}
"""Character in a header of one cell → name of the separator that the file then has."""


class FileRow(NamedTuple):
    """One example of a file."""

    where: str
    """Place for messages: `FILE, line N`, `FILE, row N` or `FILE, question ID`."""
    cells: dict[str, Any]
    """Column → content of the cell."""


Placed = tuple[str, dict[str, Any]]
"""Place in the file, such as `line 7`, and the cells."""


def read_rows(path: str, columns: Sequence[str] | None = ()) -> Iterator[FileRow]:
    """Yield the rows of a file in order. Every row has at least `columns`; None means that no cell will be read.

    Raises:
        UserError: the file is missing, empty, damaged, not UTF-8 or of unknown format, or lacks a column. The message
            names file and line.
    """
    file = InputFile(path, path)
    if file.ending not in FORMATS:
        packed = ", ".join(PACKINGS)
        raise UserError(f"{path}: expected a name that ends in {', '.join(FORMATS)}, or in one of these and {packed}")
    yield from checked_rows(path, FORMATS[file.ending](file, columns), columns or ())


def checked_rows(path: str, placed: Iterable[Placed], columns: Sequence[str]) -> Iterator[FileRow]:
    """Yield rows that have at least `columns`. Raises `UserError` for a row that lacks one, and without any row."""
    row = None
    for place, cells in placed:
        row = FileRow(f"{path}, {place}", cells)
        for column in columns:
            if column not in cells:
                close = nearest(column, known := list(cells))
                hint = f"; did you mean {close!r}?" if close else ""
                raise UserError(f"{row.where}: no column {column!r}, it has {shown_names(known)}{hint}")
        yield row
    if row is None:
        raise UserError(f"{path}: no rows, expected at least one")


@dataclass(frozen=True)
class KnownFile:
    """File that a command reads several times, with the hash of its bytes: it must not change in between."""

    path: Path
    digest: bytes

    @classmethod
    def of(cls, path: Path) -> KnownFile:
        """Hash a file. Raises `UserError` if it cannot be read."""
        digest = hashlib.sha256()
        with refusals_as_user_errors(path, "give a readable file"), path.open("rb") as stream:
            while block := stream.read(BLOCK_BYTES):
                digest.update(block)
        return cls(path, digest.digest())

    def check(self) -> None:
        """Raise `UserError` if the file has changed."""
        if KnownFile.of(self.path) != self:
            raise UserError(
                f"{self.path}: changed after this command had read it; finished runs are kept; run the same command "
                "again to go on with the new rows, or put the old file back first"
            )

    def rows(self, columns: Sequence[str] = ()) -> Iterator[FileRow]:
        """Yield the rows as `read_rows` does; check before the first and after the last row."""
        self.check()
        yield from read_rows(str(self.path), columns)
        self.check()


@contextmanager
def at(where: object) -> Iterator[None]:
    """Turn a ValueError of the block into a `UserError` that names a file, or its line."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def columns_of(path: str) -> list[str]:
    """Return the columns of a file's first row, without reading the rest. A pipe cannot be read again afterwards.

    Raises:
        UserError: as `read_rows`.
    """
    return list(next(read_rows(path, None)).cells)


def _read_lines(file: InputFile) -> Iterator[str]:
    r"""Yield the lines of a text file without `\n`. Only `\n` ends a line: U+0085 and U+2028 are text.

    Raises `UserError` for lines that end in `\r` alone.
    """
    number = 0
    rest = b""
    with OpenInput(file) as opened:
        if b"\r" in (first := opened.first()).rstrip() and b"\n" not in first:
            raise UserError(rf"{file.path}: its lines end in \r alone; convert them: tr '\r' '\n'")
        while block := opened.read(BLOCK_BYTES):
            data = rest + block
            end = data.rfind(b"\n") + 1
            rest = data[end:]
            if len(rest) > MAX_RECORD_BYTES:
                raise UserError(f"{file.path}, line {number + 1}: longer than {MAX_RECORD_BYTES >> 20} MiB")
            for line in decode(file.path, data[:end], number).split("\n")[:-1]:
                yield line
                number += 1
    if rest:
        yield decode(file.path, rest, number)


def decode(path: str, data: bytes, lines_before: int = 0) -> str:
    """Return a part of a text file behind some lines. Raises `UserError` that names the line of a wrong byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = lines_before + data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: not UTF-8 (byte 0x{data[error.start]:02x}); save it as UTF-8") from None


def _read_json(file: InputFile, columns: Sequence[str] | None) -> Iterator[Placed]:
    """Read objects in any layout that documents have, or SQuAD's nested file."""
    with OpenInput(file) as opened:
        for chunk in iter_chunks(opened, columns or ()):
            for line, found in read_records(chunk, columns, partial(object_of_lines, distinct=True)):
                place = f"{'line' if chunk.format == 'json' else 'row'} {line}"
                if isinstance(found, Fault):
                    raise UserError(f"{file.path}, {place}: {found.reason}")
                yield from read_squad(file.path, found) if is_squad(found) else [(place, found)]


def _csv_rows(file: InputFile) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the first line and the cells of each row of comma-separated values.

    A quoted cell may contain commas, line breaks and doubled quotes. A blank line between rows of one column is an
    empty cell; all other blank lines are skipped.
    """
    csv.field_size_limit(MAX_CELL)
    reader = csv.reader((line + "\n" for line in _read_lines(file)), strict=True)
    begin, width = 1, 0
    blank: list[int] = []
    try:
        for cells in reader:
            if cells:
                yield from ((line, [""]) for line in blank)
                yield begin, cells
                width, blank = width or len(cells), []
            elif width == 1:
                blank.append(begin)
            begin = reader.line_num + 1
    except csv.Error as error:
        hint = "a quotation mark may be unclosed, or not doubled inside a cell"
        if str(error).startswith("new-line"):
            error, hint = csv.Error(r"a line that ends in \r alone"), r"convert it: tr '\r' '\n'"
        raise UserError(f"{file.path}, line {begin}: {error}; {hint}") from None


def tsv_rows(path: str, lines: Iterable[str], header: Sequence[str] = (), num_cut: int = 0) -> Iterator[Placed]:
    """Yield the rows of tab-separated lines, in which quotation marks are text, as in GLUE.

    `header` has the columns of a file without a header line. Up to `num_cut` rows of another width are left out.
    """
    cells = (line.removesuffix("\r").split("\t") for line in lines)
    yield from _table(path, enumerate(cells, 1), "tab", header, num_cut)


def _table(
    path: str, rows: Iterable[tuple[int, list[str]]], separator: str, header: Sequence[str] = (), num_cut: int = 0
) -> Iterator[Placed]:
    """Yield the rows below the header. Raises `UserError` for another separator, a repeated column and a cut row."""
    for line, cells in rows:
        if not header and ",".join(cells).lower().rstrip(", \t") == "sep=":
            continue  # Excel's first line, which names the separator
        if not header:
            header = cells
            if len(header) == 1 and (wrong := next((name for mark, name in _MARKS.items() if mark in cells[0]), "")):
                raise UserError(f"{path}, line {line}: {wrong}-separated; save it with commas, or as .tsv with tabs")
            check_distinct(f"{path}, line {line}", header)
        elif len(cells) == len(header):
            yield f"line {line}", dict(zip(header, cells, strict=True))
        elif num_cut:
            num_cut -= 1
        else:
            raise UserError(
                f"{path}, line {line}: {len(cells)} columns, expected {len(header)} ({', '.join(header)}); "
                f"the row is cut off or not {separator}-separated"
            )


def check_distinct(where: str, columns: Sequence[str]) -> None:
    """Raise `UserError` for a column that is twice in a header."""
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise UserError(f"{where}: column {twice[0]!r} is twice in the header; rename one")


def _read_parquet(file: InputFile) -> Iterator[Placed]:
    if file.packing:
        raise UserError(f"{file.path}: compressed Parquet; uncompress the file")
    if file.is_stream:
        raise UserError(f"{file.path}: a pipe, but Parquet cannot be read in one pass; give a file")
    with OpenInput(file), open_parquet(file.path) as table:
        check_distinct(file.path, table.schema_arrow.names)
        batches = table.iter_batches(ROWS, use_threads=False)
        for number, cells in enumerate(chain.from_iterable(_cells(file.path, batch) for batch in batches), 1):
            yield f"row {number}", cells


def _cells(path: str, batch: Any) -> list[dict[str, Any]]:
    try:
        return list(batch.to_pylist())
    except ValueError as error:  # such as a struct with a field twice
        raise UserError(f"{path}: {error}; write these columns in another form") from None


FORMATS: dict[str, Callable[[InputFile, Sequence[str] | None], Iterator[Placed]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".ndjson": _read_json,
    ".csv": lambda file, _: _table(file.path, _csv_rows(file), "comma"),
    ".tsv": lambda file, _: tsv_rows(file.path, _read_lines(file)),
    ".parquet": lambda file, _: _read_parquet(file),
    ".conll": lambda file, _: read_conll(file.path, _read_lines(file)),
    ".txt": lambda file, _: read_conll(file.path, _read_lines(file)),
    ".conllu": lambda file, _: read_conllu(file.path, _read_lines(file)),
}
"""Ending of a file name → function that yields place and cells of each row, given the columns that are read."""


@dataclass(frozen=True)
class Task:
    """Facts about a task that tables, prediction files and heads need."""

    name: str
    metric: str
    """Name among the kind's `metrics`."""
    kind: str = "classification"
    """Name in `kinds.KINDS`."""
    labels: tuple[str, ...] = ()
    """Names of the labels in the order of the class numbers; empty for kinds that predict numbers or answers."""

    @property
    def facts(self) -> dict[str, Any]:
        """JSON form of the task; `Task.of` reads it."""
        return {"name": self.name, "metric": self.metric, "kind": self.kind, "labels": list(self.labels)}

    def most_frequent(self, counts: Mapping[str, int]) -> int:
        """Return the number of the label with the largest of the `counts` by label; the first of equal ones."""
        return max(range(len(self.labels)), key=lambda number: counts.get(self.labels[number], 0))

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Task:
        """Return the task with these `facts`. Raises KeyError or TypeError for invalid facts."""
        return cls(facts["name"], facts["metric"], facts["kind"], tuple(facts["labels"]))


class Example(NamedTuple):
    """One row of a file."""

    texts: tuple[str, ...]
    """One text or a pair; the words of a sentence; question and context."""
    label: Any
    """Class number or number, nan in a test set; other kinds document their own labels."""


class Examples:
    """Rows of a file in its order. Every pass reads them from the file again, so that they need no memory."""

    def __init__(self, read: Callable[[], Iterable[Example]], lengths: np.ndarray):
        """Keep `read`, which starts a pass, and `lengths`, the number of characters per row, `[rows]`."""
        self._read, self.lengths = read, lengths

    @classmethod
    def of(cls, rows: Sequence[Example]) -> Examples:
        """Return examples whose rows are in memory."""
        return cls(lambda: rows, np.array([sum(map(len, row.texts)) for row in rows], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Example]:
        return iter(self._read())

    def only(self, rows: np.ndarray) -> Examples:
        """Return the rows with these numbers, in the file's order."""
        wanted = np.zeros(len(self), dtype=bool)
        wanted[rows] = True
        return Examples(lambda: (row for row, kept in zip(self, wanted, strict=True) if kept), self.lengths[wanted])


class Columns(NamedTuple):
    """Columns of a file that a task reads."""

    text: str
    pair: str | None
    """Column of the second text of a pair."""
    label: str

    def check_distinct(self) -> None:
        """Raise `UserError` for a column with two uses, such as a label that is the text as well."""
        flags = {"--text-column": self.text, "--text-pair-column": self.pair, "--label-column": self.label}
        used: dict[str | None, str] = {None: ""}
        for flag, column in flags.items():
            if column and column in used:
                raise UserError(
                    f"column {column!r} is {used[column]} and {flag} at once, expected different columns; name another "
                    "by one of the two flags",
                    WRONG_ARGUMENTS,
                )
            used[column] = flag


class TaskData(NamedTuple):
    """Checked files of one task."""

    task: Task
    train: Examples
    dev: dict[str, Examples]
    """Name of a development file without its ending → its examples; the first file gives the score."""
    digest: str
    """Hash of all bytes of the files and all settings of the task."""
    facts: tuple[str, ...] = ()
    """Sentences about the data, shown in the plan."""
    columns: Columns | None = None
    """Columns of a user's own task; None for GLUE."""
    baseline: float | None = None
    """Score of always predicting the most frequent label."""
    unlabelled: Mapping[str, KnownFile] = MappingProxyType({})
    """Name → test file without labels of a user's own task, to be predicted."""
    tests: Mapping[str, Examples] = MappingProxyType({})
    """Name of a test set of GLUE in a submission → its examples, if they are to be predicted."""

    @property
    def fingerprint(self) -> str:
        """First 16 digits of the digest, recorded in runs and kept models."""
        return self.digest[:16]
