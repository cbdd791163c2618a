"""Documents out of text files: JSON lines or plain text, compressed or not, with every fault named by file and line.

Reading and parsing are two steps, so that one process reads and many parse:

    iter_chunks(paths)       → Chunk: about a megabyte of raw records of one file, each with its line number
    parse_chunk(chunk, …)    → the documents' texts and the reasons for what was left out
    iter_documents(paths, …) → both in one process

A record is one JSON object a line (.jsonl, .json), or the lines between two blank lines (.txt).
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tqdm import tqdm

from megatron_ddrp.data.zstd import open_zstd
from megatron_ddrp.errors import UserError

STANDARD_INPUT = "-"
CHUNK_BYTES = 1 << 20
DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError)
"""What the decompressors raise on a damaged or truncated file."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Text = tuple[str, ...]
"""The texts of one document, one for each JSON key."""


class Chunk(NamedTuple):
    """Some records of one file, in order."""

    path: str
    is_json: bool
    records: list[tuple[int, bytes]]
    """(line number of the record's first line from 1, its bytes)."""
    read: int
    """Bytes of the file, as it lies on the disk, read since the chunk before."""


def iter_chunks(paths: Sequence[str], chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """All records of the files in order, in chunks of about `chunk_bytes` bytes that do not cross files."""
    for path in paths:
        with _open_raw(path) as raw:
            yield from _chunks_of_file(path, raw, chunk_bytes)


def parse_chunk(chunk: Chunk, json_keys: Sequence[str], on_error: str = "stop") -> tuple[list[Text], list[str]]:
    """The documents' texts, and for each record left out the reason as `file:line: why`.

    With `on_error="stop"` the first such record raises its reason as a `UserError`; with "skip" it is left out.
    Plain text gives its text for every key.
    """
    texts, reasons = [], []
    for line, data in chunk.records:
        try:
            if chunk.is_json:
                texts.append(_parse_json(data, json_keys))
            else:
                texts.append((data.decode("utf-8"),) * len(json_keys))
        except ValueError as error:
            if isinstance(error, UnicodeDecodeError):
                line += data.count(b"\n", 0, error.start)
                error = ValueError(f"not UTF-8 (byte 0x{error.object[error.start]:02x})")
            reason = f"{chunk.path}:{line}: {error}"
            if on_error == "stop":
                hint = "mend the file, or leave such records out with --on-error skip"
                raise UserError(f"{reason}; {hint}") from None
            reasons.append(reason)
    return texts, reasons


def iter_documents(
    paths: Sequence[str],
    json_keys: Sequence[str] = ("text",),
    on_error: str = "stop",
    on_skip: Callable[[str], Any] = lambda reason: None,
    on_read: Callable[[int], Any] = lambda count: None,
) -> Iterator[Text]:
    """The texts of every document of the files, in order, one for each JSON key.

    `on_skip` is told the reason for each record left out; `on_read` how many bytes of the files were read.
    """
    check_inputs(paths)
    for chunk in iter_chunks(paths):
        texts, reasons = parse_chunk(chunk, json_keys, on_error)
        for reason in reasons:
            on_skip(reason)
        yield from texts
        on_read(chunk.read)


def check_inputs(paths: Iterable[str]) -> None:
    """Raise `UserError` for the first input that is missing, is not a readable file, or has an unknown ending."""
    for path in paths:
        if path != STANDARD_INPUT:
            if os.path.isdir(path):
                raise UserError(f"{path}: is a folder; give the files in it")
            _endings(path)
            _open_raw(path).close()


def reading_progress(paths: Sequence[str]) -> tqdm:
    """A progress bar on stderr over the bytes of the files, compressed where they are, with the time that is left.

    In a log file it appears for long runs only, and seldom.
    """
    total = None if STANDARD_INPUT in paths else sum(os.path.getsize(path) for path in paths)
    seldom: dict[str, Any] = {} if sys.stderr.isatty() else {"delay": 10, "mininterval": 10}
    return tqdm(total=total, unit="B", unit_scale=True, dynamic_ncols=True, leave=False, file=sys.stderr, **seldom)


def _chunks_of_file(path: str, raw: BinaryIO, chunk_bytes: int) -> Iterator[Chunk]:
    ending, packing = _endings(path)
    stream = PACKINGS[packing](raw)
    lines = _lines(path, stream)
    if path == STANDARD_INPUT:
        first = stream.peek(64) if isinstance(stream, io.BufferedReader) else b""
        ending = ".jsonl" if first.removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"{") else ".txt"
    is_json = ending != ".txt"
    count_read = _read_counter(path, raw)
    records: list[tuple[int, bytes]] = []
    size = 0
    for line, data in FORMATS[ending](lines):
        records.append((line, data))
        size += len(data)
        if size >= chunk_bytes:
            yield Chunk(path, is_json, records, count_read(size))
            records, size = [], 0
    yield Chunk(path, is_json, records, count_read(size))


def _read_counter(path: str, raw: BinaryIO) -> Callable[[int], int]:
    """A function of the bytes just parsed that returns the bytes read from the disk since it was last called."""
    if path == STANDARD_INPUT:
        return lambda parsed: parsed
    position = 0

    def count(parsed: int) -> int:
        nonlocal position
        before, position = position, raw.tell()
        return position - before

    return count


def _lines(path: str, stream: BinaryIO) -> Iterator[bytes]:
    number = 0
    try:
        for number, line in enumerate(stream, 1):
            yield line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
    except DAMAGED as error:
        raise UserError(f"{path}: damaged or cut off after line {number} ({error}); copy it again") from None


def _json_records(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(lines, 1):
        if not line.isspace() and line:
            yield number, line


def _text_records(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    gathered: list[bytes] = []
    number = 0
    for number, line in enumerate(lines, 1):
        if line.strip():
            gathered.append(line.rstrip(b"\r\n"))
        elif gathered:
            yield number - len(gathered), b"\n".join(gathered)
            gathered = []
    if gathered:
        yield number + 1 - len(gathered), b"\n".join(gathered)


def _parse_json(data: bytes, keys: Sequence[str]) -> Text:
    """The texts under the keys of one JSON line. Raises `ValueError` with the reason when there are none."""
    text = data.decode("utf-8")
    try:
        value = json.loads(text)
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
        if b"\\u" in data and not _is_unicode(value[key]):
            raise ValueError(f"key {key!r} holds half a surrogate pair, which is no character")
    return tuple(value[key] for key in keys)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _open_raw(path: str) -> BinaryIO:
    if path == STANDARD_INPUT:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    try:
        return open(path, "rb")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a file that can be read") from None


def _endings(path: str) -> tuple[str, str]:
    """(format, packing) of a file by its name, such as (".jsonl", ".gz"); standard input has none."""
    if path == STANDARD_INPUT:
        return "", ""
    name = Path(path)
    packing = name.suffix if name.suffix in PACKINGS else ""
    ending = name.with_suffix("").suffix if packing else name.suffix
    if ending not in FORMATS:
        known, packed = ", ".join(FORMATS), ", ".join(filter(None, PACKINGS))
        raise UserError(f"{path}: expected a name that ends in {known}, or in one of these and {packed}")
    return ending, packing


FORMATS: dict[str, Callable[[Iterable[bytes]], Iterator[tuple[int, bytes]]]] = {
    ".jsonl": _json_records,
    ".json": _json_records,
    ".txt": _text_records,
}
"""Ending → lines to records, each with the number of its first line."""

PACKINGS: dict[str, Callable[[BinaryIO], Any]] = {
    "": lambda raw: raw,
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw, mode="rb"),
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
    ".zst": open_zstd,
}
"""Ending → a stream of the unpacked bytes."""
