"""Documents of files of JSON lines, plain text, WikiExtractor or tables, and the part of them that one command takes.

Errors name file and line. Cutting and parsing are two steps, so that one process can read and many can parse:

    iter_chunks(opened, …)   → Chunk: about a megabyte of whole records, not parsed
    parse_chunk(chunk, …)    → the documents' texts, and the records that cannot be read (records.py)
    iter_documents(names, …) → both in one process
    record_start(file, byte) → where the first record at or behind a byte begins, to read a range of a file
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from megatron_ddrp.data.preprocess.inputs import BLOCK_BYTES, InputFile, OpenInput, find_inputs
from megatron_ddrp.data.preprocess.records import Chunk, Fault, Text, parse_chunk, table_rows
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.foreign import json_values, reading

MAX_RECORD_BYTES = 1 << 26
"""Longest record in bytes. A longer one is probably a file of another format and would fill the memory."""
MAX_VALUES_BYTES = 1 << 30
"""Largest file in bytes of JSON that is not in lines, such as the one value of SQuAD; it is read as a whole."""

_JSON = re.compile(rb'(?:\[\s*)?\{\s*"[^"]*"\s*:')
_LIST = re.compile(rb"\[\s*[\[{\]]")
"""Begin of a list of objects."""
_OPEN_LINE = re.compile(r'\{(?:[^"\n]|"(?:[^"\\\n]|\\.)*")*[{\[,:]\s*\n|\{\s*\n')
"""First line of an object that goes on in the next line."""


def iter_chunks(opened: OpenInput, keys: Sequence[str], chunk_bytes: int = BLOCK_BYTES) -> Iterator[Chunk]:
    """Yield all records of an open input in order, in chunks of about `chunk_bytes` uncompressed bytes."""
    read = line = 0
    if opened.file.is_table:
        size = opened.manifest_entry()["bytes"]  # hashed here, because pyarrow reads the file itself
        for rows, done in table_rows(opened.file.path, keys, chunk_bytes):
            yield Chunk("rows", rows, int(done * size) - read, line)
            read, line = int(done * size), line + len(rows)
        return
    for kind, data in _parts(opened, chunk_bytes):
        yield Chunk(kind, data, opened.bytes_read - read, line)
        read, line = opened.bytes_read, line + data.count(b"\n")


def name_faults(file: InputFile, faults: Sequence[Fault], on_error: str) -> list[str]:
    """Return `file:line: reason` for each fault of a chunk.

    Raises `UserError` for the first fault if `on_error` is `stop`, not `skip`.
    """
    before = lines_before(file) if faults else 0
    reasons = [f"{file.path}:{before + fault.line}: {fault.reason}" for fault in faults]
    if reasons and on_error == "stop":
        raise UserError(f"{reasons[0]}; fix the file, or skip such records with --on-error skip")
    return reasons


def iter_documents(
    names: Sequence[str],
    json_keys: Sequence[str] = ("text",),
    on_error: str = "stop",
    on_skip: Callable[[str], Any] = lambda reason: None,
    on_read: Callable[[int], Any] = lambda count: None,
) -> Iterator[Text]:
    """Yield the texts of every document of the files, folders and patterns (see inputs.py), one per JSON key.

    Calls `on_skip` with the reason for each skipped record, and `on_read` with the bytes of the files read since the
    last call.
    """
    for file in find_inputs(names):
        with OpenInput(file) as opened:
            for chunk in iter_chunks(opened, json_keys):
                texts, faults = parse_chunk(chunk, json_keys)
                for reason in name_faults(file, faults, on_error):
                    on_skip(reason)
                yield from texts
                on_read(chunk.read)


_WORD = re.compile(r"\w+")
Words = tuple[str, ...]


def words_of(text: str) -> Words:
    """Return the words of a text in lower case, without the signs between them."""
    return tuple(_WORD.findall(text.casefold()))


def sequences_within(names: Sequence[str], sequences: Iterable[Words], fewest: int) -> set[Words]:
    """Return the sequences of at least `fewest` words that stand in one document of the files, word after word.

    Raises `UserError` if the files have no document, and as `iter_documents` does.
    """
    begins: dict[Words, set[Words]] = {}
    for sequence in sequences:
        begins.setdefault(sequence[:fewest], set()).add(sequence)
    found: set[Words] = set()
    place = None
    for (document,) in iter_documents(names):
        words = words_of(document)
        for place in range(len(words) - fewest + 1):
            near = begins.get(words[place : place + fewest], ())
            found.update(each for each in near if words[place : place + len(each)] == each)
    if place is None:
        raise UserError(f"{names[0]}: no document of {fewest} words or more; give a file with text")
    return found


def record_start(file: InputFile, position: int) -> int:
    """Return the byte at which the first record that begins at or behind `position` begins, or the file's size.

    Reads on from `position` only, so that several machines which ask for the same byte find the same border. Behind
    `position` a plain-text document needs a blank line before it, and WikiExtractor's one the `</doc>` of another. JSON
    objects over several lines have no such border. The file is not packed.
    """
    size = os.path.getsize(file.path)
    if position <= 0 or position >= size:
        return 0 if position <= 0 else size
    if (kind := _format_of(file)) == "values":
        return size
    is_last = _LAST_LINES[kind]
    with open(file.path, "rb") as stream:
        stream.seek(position - 1)
        line = _next_line(stream)  # the rest of the line that holds the byte before `position`
        while is_last and line:
            line = _next_line(stream)
            if is_last(line):
                break
        return stream.tell()


def _next_line(stream: BinaryIO) -> bytes:
    """Read a line; return it, of a longer one the first megabyte."""
    line = part = stream.readline(BLOCK_BYTES)
    while part and not part.endswith(b"\n"):
        part = stream.readline(BLOCK_BYTES)
    return line


@functools.lru_cache(maxsize=1)
def lines_before(file: InputFile) -> int:
    """Return the number of lines before the range of a file; 0 for a whole file, which is not opened again."""
    if not file.begin:  # a stream can be read only once, and a packed file has no empty range
        return 0
    with OpenInput(file._replace(begin=0, end=file.begin)) as opened:
        return sum(block.count(b"\n") for block in iter(functools.partial(opened.read, BLOCK_BYTES), b""))


def _parts(opened: OpenInput, chunk_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Yield (format, bytes), cut behind whole records."""
    file = opened.file
    first = opened.first() if file.begin == 0 else b""
    kind = _format(file, first) if (file.begin, file.end) == (0, None) else _format_of(file)
    stream: OpenInput | io.BytesIO = opened
    most = MAX_RECORD_BYTES
    if kind == "values":
        stream, most = io.BytesIO(_as_lines(opened)), MAX_VALUES_BYTES
    rest = b""
    while block := stream.read(max(chunk_bytes, len(rest))):  # growing, or a long record would be copied too often
        start, rest = len(rest), rest + block
        if end := _end(kind, rest, start):
            yield kind, rest[:end]
            rest = rest[end:]
        if len(rest) > most:
            raise UserError(
                f"{file.path}: a record of more than {most >> 20} MiB before byte "
                f"{file.begin + opened.bytes_read}; expected one document a {'line' if kind == 'json' else 'record'}"
            )
    yield kind, rest


def _format_of(file: InputFile) -> str:
    """Return the format of a file of which a range is read."""
    with OpenInput(file._replace(begin=0, end=None)) as opened:
        return _format(file, opened.first())


def _format(file: InputFile, first: bytes) -> str:
    """Return the format of a file, a key of `_LAST_LINES`, from its name and first bytes."""
    if first.startswith(b"PAR1"):
        raise UserError(f"{file.path}: Parquet; give it as a file whose name ends in .parquet")
    start = first.lstrip()
    if file.ending in (".json", ".jsonl", ".ndjson") or (not file.ending and (start[:1] == b"{" or _JSON.match(start))):
        return "values" if _LIST.match(start) or _is_over_lines(start.decode(errors="replace")) else "json"
    if start.startswith(b"<doc ") and b"id=" in start.partition(b"\n")[0]:
        return "wiki"
    if _JSON.match(start):
        raise UserError(f"{file.path}: a JSON object in a file that is read as plain text; rename it to end in .jsonl")
    return "text"


def _is_over_lines(start: str) -> bool:
    """Return whether JSON begins with an object over several lines, or with two objects on a line."""
    try:
        value = next(json_values(start), "")
    except (ValueError, RecursionError):
        return bool(_OPEN_LINE.match(start))
    behind = start[len(value) :].partition("\n")[0].lstrip(" \t\r,")
    return "\n" in value or behind.startswith("{")


def _as_lines(opened: OpenInput) -> bytes:
    """Return the values of JSON lists, or objects over lines, each as one line. Raises `UserError` for damaged ones."""
    path, data = opened.file.path, opened.read(MAX_VALUES_BYTES + 1)
    if len(data) > MAX_VALUES_BYTES:
        size = f"more than {MAX_VALUES_BYTES >> 20} MiB of JSON that is not in lines"
        raise UserError(f"{path}: {size}; write one object per line, such as by jq -c '.[]'")
    with reading(path, "not JSON ({error}); mend it, or copy it again"):
        values = json_values(data.decode(errors="surrogateescape"))
        return "\n".join(re.sub(r"[\r\n]", " ", value) for value in values).encode(errors="surrogateescape")


def _end(kind: str, data: bytes, start: int) -> int:
    """Return the end of the last whole record that ends after `start`, or 0."""
    is_last, end = _LAST_LINES[kind], data.rfind(b"\n", start) + 1
    while is_last and end > start:
        begin = data.rfind(b"\n", 0, end - 1) + 1
        if is_last(data[begin:end]):
            return end
        end = begin
    return 0 if is_last else end


_LAST_LINES: dict[str, Callable[[bytes], bool] | None] = {
    "json": None,
    "values": None,
    "text": lambda line: line.endswith(b"\n") and line.decode("utf-8", "surrogateescape").isspace(),
    "wiki": lambda line: line.rstrip().endswith(b"</doc>") and not line.startswith(b"<doc "),
}
"""Format → a function that tells whether a line is the last of its record; None where every line is."""


class Partition(NamedTuple):
    """One part of a partitioned input."""

    part: int
    """Number of the part, from 1."""
    of: int
    """Number of parts."""

    def __str__(self) -> str:
        return f"{self.part}/{self.of}"

    @property
    def suffix(self) -> str:
        """End of the output prefix, which no other part has: `_part03-of-16`, sorted by a shell as by number."""
        return f"_part{self.part:0{len(str(self.of))}}-of-{self.of}"


def parse_partition(text: str) -> Partition:
    """Return the partition that `I/N` names. Raises `UserError` for anything else, and for I outside 1 to N."""
    found = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
    partition = Partition(int(found[1]), int(found[2])) if found else Partition(0, 0)
    if not 1 <= partition.part <= partition.of:
        hint = "expected I/N with I from 1 to N, such as 3/16 for the third of 16 parts"
        raise UserError(f"--partition {text}: {hint}", WRONG_ARGUMENTS)
    return partition


def own_files(files: Sequence[InputFile], partition: Partition) -> list[InputFile]:
    """Return the files, and ranges of files, that belong to a part, in order; none where it owns no document.

    Each machine decides this on its own, from the sizes of all files. The files stand end to end, S bytes in all, and
    part I of N owns the bytes from S(I − 1)/N to S·I/N. A document that crosses the border belongs to the part in which
    it begins, as in Hadoop's text splits: a part reads behind its last byte until the document ends, and skips to the
    first document that begins in its range. A packed file or a table cannot be entered in the middle, so the whole of
    it belongs to the part that owns its first byte. Both sides of a border compute it by the same function
    (`record_start`), so no document is lost or read twice.

    Raises `UserError` for standard input and pipes, whose size nobody knows.
    """
    for file in files:
        if file.is_stream:
            name = "standard input" if file.path == "-" else "a pipe"
            raise UserError(
                f"--partition {partition}: {file.path} is {name}, which cannot be divided by its size; write it to a "
                "file first",
                WRONG_ARGUMENTS,
            )
    sizes = [os.path.getsize(file.path) for file in files]
    total, is_last = sum(sizes), partition.part == partition.of
    begin, end = (total * number // partition.of for number in (partition.part - 1, partition.part))
    own, offset = [], 0  # bytes of all files before this one
    for file, size in zip(files, sizes, strict=True):
        if size == 0 or file.packing or file.is_table:
            if begin <= offset and (offset < end or is_last):
                own.append(file)
        elif begin < offset + size and offset < end:
            first, behind = record_start(file, begin - offset), record_start(file, end - offset)
            if (first, behind) == (0, size):
                own.append(file)
            elif first < behind:
                own.append(file._replace(begin=first, end=behind))
        offset += size
    return own


def own_bytes(files: Sequence[InputFile]) -> int | None:
    """Return the number of bytes to read, as they lie on the disk; None where a stream is among the files."""
    if any(file.is_stream for file in files):
        return None
    return sum((os.path.getsize(file.path) if file.end is None else file.end) - file.begin for file in files)


def partition_entry(partition: Partition, files: Sequence[InputFile]) -> dict[str, Any]:
    """Return the manifest's `partition`, by which a merge knows the parts that belong together.

    `inputs` is the SHA-256 of the names and sizes of all files, those of other parts included.
    """
    listed = json.dumps([[file.name, os.path.getsize(file.path)] for file in files])
    return {**partition._asdict(), "inputs": hashlib.sha256(listed.encode()).hexdigest()}
