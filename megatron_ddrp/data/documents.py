"""Documents out of files: JSON lines, plain text, WikiExtractor's files and Parquet, every fault named by file and line.

Cutting and parsing are two steps, so that one process reads and many parse:

    iter_chunks(file, …)     → Chunk: about a megabyte of whole records, not looked into
    parse_chunk(chunk, …)    → the documents' texts, and the records that are none
    iter_documents(names, …) → both in one process

A record is one JSON object a line (.jsonl, .json); the lines between two blank lines (.txt, so that Google's files of
one sentence a line work); what stands between `<doc …>` and `</doc>` (WikiExtractor, known by its first line); or a row
(.parquet).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from megatron_ddrp.data.inputs import BLOCK_BYTES, InputFile, OpenInput, find_inputs
from megatron_ddrp.data.parquet import parquet_rows
from megatron_ddrp.errors import UserError

MAX_RECORD_BYTES = 1 << 28
"""A longer record is taken for a file of another kind: it would fill the memory of any machine."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BLANK = " \t\r\x0b\x0c"
_BLANK_LINE = re.compile(rb"\n[ \t\r\x0b\x0c]*\n")
_OVERLAP = 64  # bytes of the block before in which a separator may begin
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")

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


class Fault(NamedTuple):
    """A record that could not be read."""

    line: int
    """From 1, inside the chunk."""
    reason: str


class Parsed(NamedTuple):
    """What a chunk holds."""

    texts: list[Text]
    faults: list[Fault]
    lines: int
    """Lines of the chunk (rows of a Parquet file)."""


def iter_chunks(opened: OpenInput, keys: Sequence[str], chunk_bytes: int = BLOCK_BYTES) -> Iterator[Chunk]:
    """All records of an open input in order, in chunks of about `chunk_bytes` unpacked bytes."""
    before = 0
    if opened.file.ending == ".parquet":
        size = opened.describe()["bytes"]  # hashed here, because pyarrow reads the file by itself
        for rows, done in parquet_rows(opened.file.path, keys, chunk_bytes):
            yield Chunk("rows", rows, int(done * size) - before)
            before = int(done * size)
        return
    for kind, data in _parts(opened, chunk_bytes):
        yield Chunk(kind, data, opened.bytes_read - before)
        before = opened.bytes_read


def parse_chunk(chunk: Chunk, keys: Sequence[str]) -> Parsed:
    """The documents of a chunk and the faults in it. Plain text and WikiExtractor's give their text for every key."""
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


class FaultCounter:
    """Names the faults of chunks given in order by file and line; raises the first, or counts them."""

    def __init__(self, on_error: str = "stop"):
        """`on_error` is `stop` or `skip`."""
        self._stop = on_error == "stop"
        self.line = 0
        self.count = 0
        self.first = ""

    def add(self, path: str, parsed_faults: Sequence[Fault], lines: int) -> list[str]:
        """`file:line: why` of each fault of the next chunk, which has `lines` lines. Raises `UserError` with `stop`."""
        reasons = [f"{path}:{self.line + fault.line}: {fault.reason}" for fault in parsed_faults]
        if reasons and self._stop:
            raise UserError(f"{reasons[0]}; mend the file, or leave such records out with --on-error skip")
        self.line += lines
        self.count += len(reasons)
        self.first = self.first or next(iter(reasons), "")
        return reasons


def iter_documents(
    names: Sequence[str],
    json_keys: Sequence[str] = ("text",),
    on_error: str = "stop",
    on_skip: Callable[[str], Any] = lambda reason: None,
    on_read: Callable[[int], Any] = lambda count: None,
) -> Iterator[Text]:
    """The texts of every document of the files, folders and patterns (see inputs.py), one for each JSON key.

    `on_skip` is told the reason for each record left out; `on_read` how many bytes of the files were read.
    """
    for file in find_inputs(names):
        counter = FaultCounter(on_error)
        with OpenInput(file) as opened:
            for chunk in iter_chunks(opened, json_keys):
                parsed = parse_chunk(chunk, json_keys)
                for reason in counter.add(file.path, parsed.faults, parsed.lines):
                    on_skip(reason)
                yield from parsed.texts
                on_read(chunk.read)


def _parts(opened: OpenInput, chunk_bytes: int) -> Iterator[tuple[str, bytes]]:
    """(format, bytes) cut behind whole records."""
    rest = opened.read(chunk_bytes).removeprefix(_BYTE_ORDER_MARK)
    kind = _format(opened.file, rest)
    end = _ENDS[kind](rest, 0)
    while True:
        if end:
            yield kind, rest[:end]
            rest = rest[end:]
        if len(rest) > MAX_RECORD_BYTES:
            raise UserError(
                f"{opened.file.path}: a record of more than {MAX_RECORD_BYTES >> 20} MiB before byte "
                f"{opened.bytes_read}; expected one document a {'line' if kind == 'json' else 'record'}"
            )
        block = opened.read(max(chunk_bytes, len(rest)))  # ever larger, or a long record would be copied too often
        if not block:
            break
        start = max(0, len(rest) - _OVERLAP)
        rest += block
        end = _ENDS[kind](rest, start)
    yield kind, rest


def _format(file: InputFile, first: bytes) -> str:
    if first.startswith(b"PAR1"):
        raise UserError(f"{file.path}: Parquet; give it as a file whose name ends in .parquet")
    start = first[:256].lstrip()
    if file.ending in (".json", ".jsonl"):
        return "json"
    if start.startswith(b"<doc ") and b"id=" in start:
        return "wiki"
    return "json" if start.startswith(b"{") and not file.ending else "text"


def _end_of_line(data: bytes, start: int) -> int:
    return data.rfind(b"\n", start) + 1


def _end_of_text(data: bytes, start: int) -> int:
    for blank in (b"\n\n", b"\n\r\n"):
        if (found := data.rfind(blank, start)) >= 0:
            return found + len(blank)
    end = 0
    for match in _BLANK_LINE.finditer(data, start):
        end = match.end()
    return end


def _end_of_wiki(data: bytes, start: int) -> int:
    for closing in (b"</doc>\n", b"</doc>\r\n"):
        if (found := data.rfind(closing, start)) >= 0:
            return found + len(closing)
    return 0


_ENDS: dict[str, Callable[[bytes, int], int]] = {
    "json": _end_of_line,
    "text": _end_of_text,
    "wiki": _end_of_wiki,
}
"""Format → where the last whole record that ends behind `start` ends, or 0."""

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
    """The texts under the keys of one JSON line. Raises `ValueError` with the reason when there are none."""
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
                texts.append(("\n".join(gathered),) * len(keys))
            gathered, fault = [], None
    return texts, faults


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
