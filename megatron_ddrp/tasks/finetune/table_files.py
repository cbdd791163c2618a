"""Reader of files of examples as rows of named cells, in one pass and in constant memory.

read_rows("train.csv.gz") → FileRow("train.csv.gz, line 2", {"text": "Rain tomorrow.", "label": "weather"}), …

The ending of the name selects the format (`FORMATS`); text files may be compressed as in `data/preprocess/packed.py`.
Cells of .csv and .tsv are strings; JSON and Parquet keep their types. JSON is read as documents are.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ddrp.data.preprocess.arrow_tables import ROWS, open_parquet
from megatron_ddrp.data.preprocess.documents import MAX_RECORD_BYTES, iter_chunks
from megatron_ddrp.data.preprocess.inputs import BLOCK_BYTES, InputFile, OpenInput, is_stream
from megatron_ddrp.data.preprocess.packed import PACKINGS
from megatron_ddrp.data.preprocess.records import Fault, read_object, read_records
from megatron_ddrp.errors import UserError, nearest, refusals_as_user_errors, shown_names
from megatron_ddrp.tasks.finetune.layouts import is_squad, read_conll, read_conllu, read_squad

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
                raise UserError(f"{row.where}: {_no_column(column, list(cells))}")
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
def at_row(row: FileRow) -> Iterator[None]:
    """Turn a ValueError of the block into a `UserError` that names the file and line of a row."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{row.where}: {error}") from None


def columns_of(path: str) -> list[str]:
    """Return the columns of a file's first row, without reading the rest. A pipe cannot be read again afterwards.

    Raises:
        UserError: as `read_rows`.
    """
    return list(next(read_rows(path, None)).cells)


def _no_column(column: str, known: Sequence[str]) -> str:
    close = nearest(column, known)
    hint = f"; did you mean {close!r}?" if close else ""
    return f"no column {column!r}, it has {shown_names(known)}{hint}"


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
            for line, found in read_records(chunk, columns, partial(read_object, distinct=True)):
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
    if is_stream(file.path):
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
