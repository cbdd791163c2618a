"""Input of preprocessing: files, folders, pipes and texts from Python, plain or compressed, as streams of bytes.

    find_inputs(["corpus/", "more-*.jsonl.gz"]) → the files, sorted within each argument
    OpenInput(file)                             → uncompressed bytes; the SHA-256 of the file as stored on the disk

One reader unpacks gzip, xz, bzip2 and Zstandard, with any number of streams in a file. A file is read whole or refused.
A later stream that is damaged or cut off, and bytes that belong to no stream, are errors, although Python's
`lzma.LZMAFile` and `bz2.BZ2File` end there without a word.
"""

from __future__ import annotations

import bz2
import codecs
import glob
import hashlib
import io
import itertools
import json
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from megatron_ddrp.data.preprocess.records import is_beside_rows
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, code_of_others
from megatron_ddrp.foreign import reading, refuse_stand_in, refuse_wide

LARGEST_WINDOW = 1 << 31
"""Largest window of Zstandard's format, in bytes: `zstd --long=31` writes it; the library's own limit is 128 MiB."""

_PACKED_BYTES = 1 << 11  # given to a decompressor at once: Zstandard makes at most 64 MiB of them, zlib 2 MiB
_UNPACKED_BYTES = 1 << 20  # taken from a decompressor at once


class Packing(NamedTuple):
    """Format of packed files."""

    begin: Callable[[], Any]
    """Returns a decompressor of one stream, with the methods of `bz2.BZ2Decompressor`.

    One without `needs_input`, as of zlib and Zstandard, makes all bytes of its input at once.
    """
    padding: int = 0
    """Unit in bytes of the zeros that may follow a stream; 0 if there may be none."""
    several: bool = True
    """False if nothing may follow the first stream."""


class BlockStream(io.RawIOBase):
    """Bytes of some blocks, one block after another; the first block is taken when the first byte is read."""

    def __init__(self, blocks: Iterator[bytes]):
        self._blocks, self._rest = filter(None, blocks), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._rest = self._rest or memoryview(next(self._blocks, b""))
        part, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


class HashedStream(io.RawIOBase):
    """First `length` bytes of another stream, or all, counted and hashed while they are read.

    Attributes:
        count: number of bytes read.
        digest: their SHA-256.
    """

    def __init__(self, source: io.RawIOBase, length: int | None = None):
        self._source, self._length = source, length
        self.count = 0
        self.digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        if self._length is not None:
            view = view[: self._length - self.count]
        count = self._source.readinto(view) or 0
        while not self.count and 0 < count < FIRST_BYTES and (more := self._source.readinto(view[count:])):
            count += more  # a pipe may give its first bytes one by one
        self.digest.update(view[:count])
        self.count += count
        return count

    def close(self) -> None:
        self._source.close()
        super().close()


def packing_of(first: bytes) -> str:
    """Return the key of `PACKINGS` that the first `FIRST_BYTES` of a file tell; empty for one that is not packed."""
    return next((packing for magic, packing in _MAGIC.items() if first.startswith(magic)), "")


def _unpack(raw: BinaryIO, packing: Packing) -> Iterator[bytes]:
    """Yield the uncompressed bytes of a packed file. The libraries raise their own errors."""
    packed = raw.read(_PACKED_BYTES)
    if not packed:
        raise EOFError("empty")
    if packing is PACKINGS[".xz"] and packing_of(packed) != ".xz":
        packing = _LZMA
    while packed:
        stream = packing.begin()
        most = [_UNPACKED_BYTES] if hasattr(stream, "needs_input") else []
        while not stream.eof:
            if getattr(stream, "needs_input", True) and not (packed := packed or raw.read(_PACKED_BYTES)):
                raise EOFError("the last stream has no end")
            yield stream.decompress(packed, *most)
            packed = b""
        if not lzma.is_check_supported(getattr(stream, "check", lzma.CHECK_NONE)):
            raise OSError("its integrity check is of an unknown kind")
        packed = _behind_padding(stream.unused_data, raw, packing.padding)
        if packed and not packing.several:
            raise OSError("bytes behind the end")


def _behind_padding(packed: bytes, raw: BinaryIO, unit: int) -> bytes:
    """Return bytes of the next stream, empty at the end of the file. `packed` has been read already."""
    zeros = 0
    while packed := packed or raw.read(_PACKED_BYTES):
        rest = packed.lstrip(b"\0") if unit else packed
        zeros += len(packed) - len(rest)
        packed = rest
        if packed:
            break
    if unit and zeros % unit:
        raise OSError(f"{zeros} bytes of padding, expected a multiple of {unit}")
    return packed


def _zstd_frame() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj()


PACKINGS = {
    ".gz": Packing(lambda: zlib.decompressobj(16 + zlib.MAX_WBITS), padding=1),  # 16: with gzip's head and check sum
    ".xz": Packing(lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), padding=4),
    ".zst": Packing(_zstd_frame),
    ".bz2": Packing(bz2.BZ2Decompressor),
}
"""Ending of a file name → its packing."""

_LZMA = Packing(lzma.LZMADecompressor, several=False)  # of xz's older format, which `xz` reads from a .xz file too

_MAGIC = {b"\x1f\x8b": ".gz", b"\xfd7zXZ\x00": ".xz", b"BZh": ".bz2", b"\x28\xb5\x2f\xfd": ".zst"}
_MAGIC |= {bytes([0x50 + number]) + b"\x2a\x4d\x18": ".zst" for number in range(16)}  # a skippable frame, as of pzstd
FIRST_BYTES = max(map(len, _MAGIC))


TEXTS: dict[str, HashedStream] = {}
"""Path of an input file that is none → the texts that a program has given."""


@contextmanager
def texts_as_file(texts: Iterable[Any], keys: Sequence[str]) -> Iterator[str]:
    """Yield the path of a file, to be read once in this process, with the texts as JSON lines.

    The lines are made while they are read, and no text is stored. A text is a string, for the only key, or a row: a
    mapping with a string for every key, as `datasets.Dataset` gives. An error of the texts ends the reading and reaches
    the caller as it is.

    Raises:
        UserError: `texts` is no list or a table, or a text is neither a string nor a row with the keys.
    """
    refuse_no_list(texts, "a list of texts or rows; a file is given by input", but=(str, bytes))
    path = f"<texts {len(TEXTS) + 1}>/texts.jsonl"
    TEXTS[path] = HashedStream(BlockStream(_json_lines(texts, keys)))
    try:
        yield path
    finally:
        del TEXTS[path]


def refuse_no_list(texts: Any, expected: str, but: tuple[type, ...] = ()) -> None:
    """Raise `UserError` for what cannot be iterated or is one of the types `but`, and for a table.

    A table gives the names of its columns when it is iterated.
    """
    try:
        if isinstance(texts, but):
            raise TypeError
        iter(texts)  # an array may have no axis
    except TypeError:
        raise UserError(f"texts={texts!r:.60}: expected {expected}", WRONG_ARGUMENTS) from None
    if any(hasattr(texts, name) for name in ("keys", "columns")) and not hasattr(texts, "tolist"):
        raise UserError(
            f"texts is a table ({type(texts).__name__}), expected a list of texts; give one of its columns, such as "
            'table["text"]'
        )


def _json_lines(texts: Iterable[Any], keys: Sequence[str]) -> Iterator[bytes]:
    """Yield the row of JSON of each text."""
    with code_of_others():
        source = iter(texts)
    for number in itertools.count(1):
        with code_of_others():
            text = next(source, source)
            text = text.as_py() if hasattr(text, "as_py") else text  # of a column of pyarrow
        if text is source:
            return
        row = {keys[0]: text} if isinstance(text, str) and len(keys) == 1 else text
        if not isinstance(row, Mapping) or not all(isinstance(row.get(key), str) for key in keys):
            wanted = "a string, or " * (len(keys) == 1) + f"a row with a string for {' and '.join(map(repr, keys))}"
            raise UserError(f"text {number:,} is {text!r:.80}: expected {wanted}")
        yield json.dumps({key: row[key] for key in keys}).encode() + b"\n"


STANDARD_INPUT = "-"
TABLES = (".parquet", ".arrow")
"""Endings of tables, which are read by rows."""
ENDINGS = (".jsonl", ".ndjson", ".json", ".txt", *TABLES)
"""Accepted endings of file names, in any case. Files without one, as WikiExtractor writes them, are recognised by their
content."""

INPUT_HELP = (
    ".jsonl, .ndjson or .json (one object per line), .txt (a blank line between documents) or WikiExtractor's files, "
    "each also as .gz, .xz, .zst or .bz2; .parquet or .arrow (rows); a folder, also one of Dataset.save_to_disk, or a "
    "quoted pattern of these, sorted; a pipe; - is standard input"
)
"""Help of a command's `--input`."""

TOKENIZER_FILES = (
    *("added_tokens.json", "config.json", "megatron_tokenizer.json", "merges.txt", "special_tokens_map.json"),
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt"),
)
"""Files of a tokenizer's folder that have the ending of a text."""

NAMED_FILES = 3
"""Number of files that the line about left out files names."""
DATASET_ENDINGS = (".bin", ".idx", ".npy", ".npz")
"""Endings of datasets and of caches beside them, which are left out of a folder without a word."""

BLOCK_BYTES = 1 << 20
FIRST = 1 << 16
"""Number of bytes that tell the layout of a file of text."""

_KNOWN, _PACKED = ", ".join(ENDINGS), ", ".join(PACKINGS)
_EXPECTED = f"{_KNOWN}, or in one of these and {_PACKED}"


class InputFile(NamedTuple):
    """One file to read, or a range of its bytes."""

    path: str
    """Path of the file; `-` is standard input."""
    name: str
    """Name in a manifest: the file's name, or its path inside the given folder."""
    begin: int = 0
    """First byte to read, which begins a record."""
    end: int | None = None
    """Byte behind the last one to read; None at the end of the file."""

    @property
    def is_stream(self) -> bool:
        """True if it can be read only once: standard input, a pipe, a shell's `<(command)`, Python's texts."""
        path = self.path
        is_pipe = os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
        return is_pipe or path == STANDARD_INPUT or path in TEXTS

    @property
    def real_path(self) -> str:
        """Path behind all links."""
        return os.path.realpath(self.path)

    @property
    def packing(self) -> str:
        """Key of `PACKINGS`, by the file's name; empty for a file that is not packed."""
        ending = Path(self.path).suffix.lower()
        return ending if ending in PACKINGS else ""

    @property
    def ending(self) -> str:
        """Ending of the uncompressed file's name in lower case, such as `.jsonl`; often empty."""
        return Path(self.path[: len(self.path) - len(self.packing)]).suffix.lower()

    @property
    def is_table(self) -> bool:
        """True for a file of rows."""
        return self.ending in TABLES


def find_inputs(names: Iterable[str], leave_out: Iterable[str] = ()) -> list[InputFile]:
    """Return the input files for names of files, folders, patterns (`*`, `?`, `**`), pipes and `-`.

    Files are in the order of the names, and sorted within each. A folder gives all files with one of `ENDINGS`, at any
    depth, and WikiExtractor's files, but no hidden files, pipes, manifests of datasets, or `leave_out` (files and
    folders, as the vocabulary may lie beside the text); one line on standard error names the other files. A file that
    is reached twice, by links or by two names, is given once. Raises `UserError` for a name without a file, an unknown
    ending, an empty compressed file, and a file or folder that cannot be opened.
    """
    apart = [os.path.realpath(os.path.join(path, name)) for path in leave_out for name in ("", *TOKENIZER_FILES)]
    files: list[InputFile] = []
    for name in names:
        if os.path.isdir(name):
            files += (found := _sorted_files(name, apart))
            if not found:
                kinds = f"{_KNOWN} (also packed: {_PACKED}), nor WikiExtractor's"
                raise UserError(f"{name}: holds no file that ends in {kinds}")
        elif glob.has_magic(name) and not os.path.exists(name):
            files += _files_of_pattern(name, apart)
        else:
            files.append(InputFile(name, os.path.basename(name)))  # a file, a pipe, or nothing: checked below
    streams = [file.real_path for file in files if file.is_stream]
    for file in (files := _once(files)):
        _check(file)
        if streams.count(file.real_path) > 1:
            raise UserError(f"--input {file.path} is given twice; standard input and pipes can be read only once")
    return files


class OpenInput:
    """An open input, read block by block; a context manager.

    Attributes:
        file: the `InputFile`.
    """

    def __init__(self, file: InputFile):
        self.file = file
        self._raw = _open_raw(file)
        self._buffered = io.BufferedReader(self._raw, BLOCK_BYTES)
        packing = packing_of(self._buffered.peek(FIRST_BYTES)) if file.is_stream else file.packing
        self._stream: io.BufferedIOBase = self._buffered
        if packing:
            self._stream = io.BufferedReader(BlockStream(_unpack(self._buffered, PACKINGS[packing])), BLOCK_BYTES)
        self._ahead = b""

    @property
    def bytes_read(self) -> int:
        """Bytes read from the disk so far."""
        return self._raw.count

    def first(self) -> bytes:
        """Return the first bytes of a file of text without a byte order mark; `read` returns them again.

        Raises `UserError` for UTF-16 and UTF-32, and for a file that only stands for another one.
        """
        first = self.read(FIRST)
        refuse_stand_in(first, self.file.path)
        refuse_wide(first, self.file.path)
        self._ahead = first.removeprefix(codecs.BOM_UTF8)
        return self._ahead

    def read(self, count: int) -> bytes:
        """Return the next `count` uncompressed bytes, fewer only at the end. Raises `UserError` for a damaged file."""
        data, self._ahead = self._ahead[:count], self._ahead[count:]
        with reading(self.file.path, self._damage):
            return data + self._stream.read(count - len(data))

    def _damage(self) -> str:
        return f"damaged or cut off after {self.bytes_read} bytes ({{error}}); copy it again"

    def manifest_entry(self) -> dict[str, Any]:
        """Return the manifest's entry: name, size and SHA-256 of the whole file as it lies on the disk.

        A range of a file has the entries `begin` and `end` as well, and the SHA-256 is that of the range.
        """
        while self._buffered.read(BLOCK_BYTES):
            pass
        file, size, borders = self.file, self._raw.count, {}
        if (file.begin, file.end) != (0, None):
            borders = {"begin": file.begin, "end": file.end}
            size = os.path.getsize(file.path)
        return {"name": file.name, "bytes": size, **borders, "sha256": self._raw.digest.hexdigest()}

    def __enter__(self) -> OpenInput:
        return self

    def __exit__(self, *error: object) -> None:
        self._buffered.close()


def _open_raw(file: InputFile) -> HashedStream:
    path = file.path
    if path in TEXTS:
        return TEXTS[path]
    if Path(path).is_fifo() and os.path.exists(os.path.realpath(path)):  # `<(command)` is a link to a nameless pipe
        print(f"{path}: a pipe; waiting for its writer", file=sys.stderr, flush=True)
    try:
        source = io.FileIO(sys.stdin.fileno(), closefd=False) if path == STANDARD_INPUT else io.FileIO(path)
        if file.begin:
            source.seek(file.begin)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a readable file") from None
    return HashedStream(source, None if file.end is None else file.end - file.begin)


def _check(file: InputFile) -> None:
    if file.path == STANDARD_INPUT:
        return
    if not file.is_stream:
        _open_raw(file).close()
        refuse_stand_in(b"", file.path)
        if file.packing and not os.path.getsize(file.path):
            raise UserError(f"{file.path}: empty, expected a {file.packing} file; copy it again, or leave it out")
    elif file.is_table:
        raise UserError(f"{file.path}: a pipe, but {file.ending} cannot be read from a pipe; give a file")
    if file.ending not in ("", *ENDINGS):
        raise UserError(f"{file.path}: expected a name that ends in {_EXPECTED}")


def _sorted_files(folder: str, apart: Sequence[str]) -> list[InputFile]:
    """Return the files with documents in a folder, sorted, and print one line about the others."""
    visible = sorted(_walk(folder, apart), key=lambda file: Path(file.name).parts)
    files = [file for file in visible if file.ending in ENDINGS or (not file.ending and _holds_documents(file))]
    read = {file.real_path for file in files}
    unread = (file.name for file in visible if file.real_path not in read)
    if others := [name for name in unread if not name.endswith(DATASET_ENDINGS)]:
        count = f"{len(others):,} file{'s' * (len(others) > 1)} left out"
        shown = ", ".join([*others[:NAMED_FILES], *["…"] * (len(others) > NAMED_FILES)])
        expected = f"expected names that end in {_EXPECTED}; rename a file to have it read"
        print(f"{folder}: {count} ({shown}): {expected}", file=sys.stderr)
    return files


def _once(files: Sequence[InputFile]) -> list[InputFile]:
    """Return each file once, by its real path, in order; of several names one with an ending, then one without a link.

    A folder of the Hugging Face hub has each file as a blob without an ending, and a link to it; `**` follows circles.
    """
    best_first = sorted(files, key=lambda file: (file.ending not in ENDINGS, os.path.islink(file.path)))
    best = {file.real_path: file for file in reversed(best_first)}
    return [file for file in files if best[file.real_path] is file]


def _walk(folder: str, apart: Sequence[str]) -> Iterator[InputFile]:
    """Yield the visible files of a folder, at any depth."""
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, onerror=_refuse_folder, followlinks=True):
        if os.path.realpath(parent) in seen:  # a link to a folder above
            folders.clear()
            continue
        seen.add(os.path.realpath(parent))
        shown = {name: os.path.join(parent, name) for name in (*folders, *names) if not name.startswith(".")}
        shown = {name: path for name, path in shown.items() if os.path.realpath(path) not in apart}
        folders[:] = sorted(name for name in folders if name in shown and not name.endswith(".unfinished"))
        for path in (shown[name] for name in names if name in shown):
            file = InputFile(path, os.path.relpath(path, folder))
            if not _is_beside_data(path) and not file.is_stream:
                yield file


def _refuse_folder(error: OSError) -> NoReturn:
    raise UserError(f"{error.filename}: {error.strerror}; make it readable, or give the other folders by name")


def _files_of_pattern(pattern: str, apart: Sequence[str]) -> list[InputFile]:
    files: list[InputFile] = []
    parts = Path(pattern).parts
    searched = parts.index("**") if "**" in parts else len(parts) - 1  # number of folders down to the one searched
    for path in sorted(glob.glob(pattern, recursive=True), key=lambda path: Path(path).parts):
        below = (part for part in (Path(path), *Path(path).parents) if len(part.parts) > searched)
        if any(os.path.realpath(part) in apart for part in below):
            continue
        is_dead = not os.path.exists(os.path.realpath(path))  # refused later; links in circles make other paths fail
        if (os.path.isfile(path) or is_dead) and not _is_beside_data(path):
            files.append(InputFile(path, os.path.basename(path)))
        elif os.path.isdir(path) and "**" not in pattern:
            files += _sorted_files(path, apart)
    if not files:
        raise UserError(f"{pattern}: no such file, and no file matches it as a pattern")
    return files


def _is_beside_data(path: str) -> bool:
    """Return whether a file is the manifest of a dataset of ours, or lies beside the rows of a saved `Dataset`."""
    is_manifest = path.endswith(".json") and os.path.exists(path.removesuffix(".json") + ".idx")
    return is_manifest or is_beside_rows(path)


def _holds_documents(file: InputFile) -> bool:
    """Return whether a file without an ending begins like WikiExtractor's: with `<doc …>` or a JSON line.

    Raises `UserError` for a packed file whose beginning is damaged and for a stand-in, because they may hold documents.
    """
    refuse_stand_in(b"", file.path)
    try:
        with OpenInput(file) as opened:
            return opened.read(64).lstrip().startswith((b"<doc ", b"{"))
    except UserError:
        if file.packing:
            raise
        return False
