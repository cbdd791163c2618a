"""Records of a chunk of a file: their documents' texts, and those that cannot be read, each with the reason.

A record is a JSON object, alone on its line or in a list or over several lines; the lines between two lines of
whitespace alone, as in google-research/bert, so that its files of one sentence per line work; the text of an article
between `<doc …>` and `</doc>` (WikiExtractor); or a row of a table. Tables are Parquet files, and Arrow files, such as
`Dataset.save_to_disk` of Hugging Face writes.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ddrp.errors import UserError, need_packages, shown_names
from megatron_ddrp.foreign import RepeatedKey, parse_json, read_object, reading, stand_in

ROWS = 512  # of a Parquet file, decoded at once; pages, not rows, are what pyarrow keeps in memory

Row = tuple[bytes | str | None, ...]
"""Cell of each column: its UTF-8, None for null, or why the file cannot give it, as a `str`."""

Batches = Callable[[list[str]], Iterator[tuple[Any, float]]]
"""Function from names of columns to pyarrow's batches of rows, each with the fraction of the file read so far."""

_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of a finished Arrow stream."""


def table_rows(path: str, columns: Sequence[str], part_bytes: int) -> Iterator[tuple[list[Row], float]]:
    """Yield parts of about `part_bytes` bytes: rows, and the fraction of the file read.

    pyarrow, an optional dependency, reads a few rows at a time to save memory. Columns that are missing or hold no
    strings are faults of every row. Raises `UserError` without pyarrow, and for a damaged file.
    """
    with _open_arrow(path) if path.lower().endswith(".arrow") else _parquet_batches(path) as (schema, batches):
        import pyarrow

        faults = [_column_fault(schema, column) for column in columns]
        sound = [column for column, fault in zip(columns, faults, strict=True) if not fault]
        rows: list[Row] = []
        size = 0
        for batch, done in batches(sound):
            cells = [
                [fault] * batch.num_rows if fault else batch.column(column).cast(pyarrow.large_binary()).to_pylist()
                for column, fault in zip(columns, faults, strict=True)
            ]
            rows += zip(*cells, strict=True)
            size += sum(batch.column(column).nbytes for column in sound) + batch.num_rows * sum(map(len, faults))
            if size >= part_bytes:
                yield rows, done
                rows, size = [], 0
        yield rows, 1.0


@contextlib.contextmanager
def _parquet_batches(path: str) -> Iterator[tuple[Any, Batches]]:
    """Open a Parquet file; yield its schema and its batches."""

    def batches(columns: list[str]) -> Iterator[tuple[Any, float]]:
        done = 0
        for batch in file.iter_batches(ROWS, columns=columns, use_threads=False):
            done += batch.num_rows
            yield batch, done / max(1, file.metadata.num_rows)

    with open_parquet(path) as file:
        yield file.schema_arrow, batches


@contextlib.contextmanager
def _open_arrow(path: str) -> Iterator[tuple[Any, Batches]]:
    """Open an Arrow file, a stream or the random-access format; yield its schema and its batches.

    Raises `UserError` without pyarrow, and for a damaged file, also if the damage shows inside the block. A stream
    that was cut off between two batches lacks its end.
    """
    pyarrow = _pyarrow(path)

    def batches(columns: list[str]) -> Iterator[tuple[Any, float]]:
        found = iter(reader) if is_stream else map(reader.get_batch, range(reader.num_record_batches))
        try:
            for batch in found:
                batch.validate(full=True)  # damaged lengths would let pyarrow read anywhere
                yield batch, source.tell() / size
        except MemoryError as error:  # for a damaged length
            raise ValueError(error) from None

    with reading(path, "damaged, or not an Arrow file ({error}); copy it again"), pyarrow.OSFile(path) as source:
        size = source.size()
        begin = source.read(6)
        if begin.startswith(b"FEA1"):
            raise UserError(f"{path}: Feather V1, which is no Arrow file; read it by pandas and write Parquet")
        is_stream = begin != b"ARROW1"
        source.seek(max(0, size - len(_STREAM_END)))
        if is_stream and source.read() != _STREAM_END:
            raise ValueError("its end is missing")
        source.seek(0)
        reader = pyarrow.ipc.open_stream(source) if is_stream else pyarrow.ipc.open_file(source)
        yield reader.schema, batches


@contextlib.contextmanager
def open_parquet(path: str) -> Iterator[Any]:
    """Open a file as pyarrow's `ParquetFile`, which reads pages when needed.

    Raises `UserError` without pyarrow, and for a damaged file, also if the damage shows inside the block.
    """
    with (
        reading(path, "damaged, or not a Parquet file ({error}); copy it again"),
        _pyarrow(path).parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file,
    ):
        yield file


def _pyarrow(path: str) -> Any:
    need_packages(path, "pyarrow")
    import pyarrow.parquet

    return pyarrow


def _column_fault(schema: Any, column: str) -> str:
    """Return why a column gives no strings; empty if it does."""
    import pyarrow.types as types

    count = schema.names.count(column)
    if count == 0:
        return f"no column {column!r}, it has {shown_names(schema.names[:8])} (see --json-keys)"
    if count > 1:
        return f"column {column!r} is there {count} times, expected once"
    kind = schema.field(column).type
    plain = kind.value_type if types.is_dictionary(kind) else kind
    if str(plain) not in ("string", "large_string", "string_view", "null"):
        return f"column {column!r} holds {kind}, expected strings"
    return ""


def is_beside_rows(path: str) -> bool:
    """Return whether a file lies beside the rows of a saved `Dataset` and holds none of them.

    Hugging Face's `save_to_disk` writes such files and leaves the rows of a dataset that was there before; `map` and
    `filter` leave caches of rows there.
    """
    folder, name = os.path.split(path)
    state = os.path.join(folder, "state.json")
    if name in ("state.json", "dataset_info.json"):
        return os.path.exists(state) and bool(glob.glob(glob.escape(folder) + "/*.arrow"))
    if name == "dataset_dict.json":
        return bool(glob.glob(glob.escape(folder) + "/*/state.json"))
    if not name.endswith(".arrow"):
        return False
    listed = _listed_rows(state, os.stat(state).st_mtime_ns) if os.path.exists(state) else None
    return name.startswith("cache-") or (listed is not None and name not in listed)


@functools.lru_cache(maxsize=1)
def _listed_rows(state: str, changed: int) -> set[str] | None:
    """Return the files of rows that a state.json, last `changed` then, names; None if it names none."""
    rows = read_object(Path(state)).get("_data_files")
    return {str(file.get("filename")) for file in rows if isinstance(file, dict)} if isinstance(rows, list) else None


_NOT_UTF8 = re.compile("[\udc80-\udcff]")
_UNSPACED = (
    "\u2e80-\u312f\u3190-\u4dbf\u4e00-\u9fff\uf900-\ufaff\ufe30-\ufe4f\uff01-\uff9f\U0001aff0-\U0001b16f"
    "\U00020000-\U0003ffff"
)
"""Han, kana, bopomofo, their punctuation and full-width forms; not Hangul, which has spaces between words."""
_BREAK_WITHOUT_SPACE = re.compile(f"(?<=[{_UNSPACED}])\n(?=[{_UNSPACED}])")
_UNCLOSED = "<doc …> without </doc>"
Text = tuple[str, ...]
"""Texts of one document, one per JSON key."""


class Chunk(NamedTuple):
    """Whole records of one file, in order."""

    format: str
    """Format: `json`, `values` (of JSON that is not in lines, each as a line), `text`, `wiki` or `rows`."""
    data: bytes | list[tuple[bytes | str | None, ...]]
    """Uncompressed bytes; for a table its rows, as Arrow counts them."""
    read: int
    """Bytes of the file, as stored on the disk, read since the previous chunk."""
    line: int
    """Number of lines of the file, or of the range that is read, before the chunk; of rows or values their number."""
    file: int = 0
    """Number of the file among the inputs."""

    @property
    def text_bytes(self) -> int:
        """Bytes of the records."""
        if isinstance(self.data, bytes):
            return len(self.data)
        return sum(len(cell) for row in self.data for cell in row if isinstance(cell, bytes))


class Fault(NamedTuple):
    """An unreadable record."""

    line: int
    """Line number inside the file, or inside the range that is read, from 1."""
    reason: str


def parse_chunk(chunk: Chunk, keys: Sequence[str]) -> tuple[list[Text], list[Fault]]:
    """Return the documents and the faults of a chunk. Formats without keys give their text for every key."""
    texts: list[Text] = []
    faults: list[Fault] = []
    for line, text in read_records(chunk, keys, FORMATS[chunk.format][1]):
        if isinstance(text, Fault):
            faults.append(text)
        elif fault := next(filter(None, map(stand_in, text)), ""):
            faults.append(Fault(line, fault))
        else:
            texts.append(text)
    return texts, faults


def read_records(chunk: Chunk, keys: Any, read: Callable[[Any, Any], Any]) -> Iterator[tuple[int, Any]]:
    """Yield the number of the first line of each record of a chunk, and what `read` makes of it, or a `Fault`."""
    lines, bad = (chunk.data, {}) if chunk.format == "rows" else _decoded_lines(chunk.data)
    for begin, end, complaint in FORMATS[chunk.format][0](lines):
        place = next((number for number in range(begin, end) if number in bad), begin) if bad else begin
        line = chunk.line + place + 1
        try:
            if place in bad or complaint:
                raise ValueError(bad.get(place, complaint))
            yield line, read(lines[begin:end], keys)
        except ValueError as error:
            yield line, Fault(line, str(error))


def _decoded_lines(data: Any) -> tuple[list[str], dict[int, str]]:
    """Return the lines of a chunk, and index → complaint for lines that are not UTF-8."""
    try:
        return data.decode("utf-8").split("\n"), {}
    except UnicodeDecodeError:
        lines = data.decode("utf-8", "surrogateescape").split("\n")
    found = {number: match[0] for number, line in enumerate(lines) if (match := _NOT_UTF8.search(line))}
    return lines, {number: f"not UTF-8 (byte 0x{ord(byte) - 0xDC00:02x})" for number, byte in found.items()}


Span = tuple[int, int, str]
"""First line of a record, the line after its last, and a complaint about it or an empty text."""


def _find_lines(lines: list[str]) -> Iterator[Span]:
    for number, line in enumerate(lines):
        if line and not line.isspace():
            yield number, number + 1, ""


def object_of_lines(lines: list[str], keys: Sequence[str] | None, distinct: bool = False) -> dict[str, Any]:
    """Return the JSON object in one line. Raises `ValueError` with the reason.

    Half a surrogate pair is refused under the `keys`; under any key if there are none, under no key if they are None.
    No key may be there twice, if `distinct` or if it may be one of them.
    """
    (line,) = lines
    distinct = distinct or any(line.count(f'"{key}"') > 1 for key in keys or ())
    try:
        value = parse_json(line, lenient=True, distinct=distinct)
    except RepeatedKey as error:
        raise ValueError(f"{error}; remove one") from None
    except ValueError as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"not JSON ({reason}); expected one object per line") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, expected one object per line")
    for key in filter(value.__contains__, keys or value) if keys is not None and "\\ud" in line.lower() else ():
        try:
            json.dumps(value[key], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError(f"key {key!r} has half a surrogate pair, which is not a character") from None
    return value


def _read_json(lines: list[str], keys: Sequence[str]) -> Text:
    """Return the texts under the keys of one JSON line. Raises `ValueError` with the reason if one is missing."""
    value = object_of_lines(lines, keys)
    for key in keys:
        if key not in value:
            raise ValueError(f"no key {key!r}, it has {shown_names(list(value)[:8])} (see --json-keys)")
        if not isinstance(value[key], str):
            raise ValueError(f"key {key!r} holds {type(value[key]).__name__}, expected a string")
    return tuple(value[key] for key in keys)


def _find_paragraphs(lines: list[str]) -> Iterator[Span]:
    begin = 0
    for number, line in enumerate([*lines, ""]):
        if not line or line.isspace():
            if number > begin:
                yield begin, number, ""
            begin = number + 1


def _read_text(lines: list[str], keys: Sequence[str]) -> Text:
    """Return the lines of a document as running text. Raises `ValueError` for lines that end in `\\r` alone.

    A line of plain text may end anywhere, so its line breaks are not part of the text, and many SentencePiece models
    turn them into [UNK]. They become spaces, or nothing between characters of scripts without spaces (Chinese,
    Japanese), as in CSS Text (section 4.1.3). Other formats keep their line breaks: there they separate paragraphs.
    """
    text = "\n".join([line.rstrip("\r") for line in lines])
    if text.count("\r") > len(lines):
        raise ValueError(r"its lines end in \r alone and would be one document; convert them: tr '\r' '\n'")
    if not text.isascii():
        text = _BREAK_WITHOUT_SPACE.sub("", text)
    return (text.replace("\n", " "),) * len(keys)


def _find_articles(lines: list[str]) -> Iterator[Span]:
    opened: int | None = None  # line of the open <doc …>
    for number, line in enumerate(map(str.rstrip, lines)):
        if line.startswith("<doc ") and line.endswith(">"):
            if opened is not None:
                yield opened, number, _UNCLOSED
            opened = number
        elif opened is not None and line.endswith("</doc>"):
            yield opened + 1, number + 1, ""
            opened = None
        elif opened is None and line:
            yield number, number + 1, "text outside <doc …> and </doc>"
    if opened is not None:
        yield opened, len(lines), _UNCLOSED


def _read_article(lines: list[str], keys: Sequence[str]) -> Text:
    """Return the text between `<doc …>` and `</doc>`."""
    inside = "\n".join(map(str.rstrip, lines)).removesuffix("</doc>").strip("\n")
    for sign, name in (("<", "&lt;"), (">", "&gt;"), ("&", "&amp;")):  # WikiExtractor escapes these three
        inside = inside.replace(name, sign)
    return (inside,) * len(keys)


def _find_rows(rows: list[Any]) -> Iterator[Span]:
    return ((number, number + 1, "") for number in range(len(rows)))


def _read_row(rows: list[Any], keys: Sequence[str]) -> Text:
    (row,) = rows
    if fault := next((cell for cell in row if isinstance(cell, str)), ""):
        raise ValueError(fault)
    if None in row:
        raise ValueError(f"column {keys[row.index(None)]!r} holds null, expected a string")
    try:
        return tuple(cell.decode("utf-8") for cell in row)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte 0x{error.object[error.start]:02x})") from None


FORMATS: dict[str, tuple[Callable[[Any], Iterator[Span]], Callable[[Any, Sequence[str]], Text]]] = {
    "json": (_find_lines, _read_json),
    "values": (_find_lines, _read_json),
    "text": (_find_paragraphs, _read_text),
    "wiki": (_find_articles, _read_article),
    "rows": (_find_rows, _read_row),
}
"""Format → function that finds the records among the lines, and function that reads the lines of a record."""
