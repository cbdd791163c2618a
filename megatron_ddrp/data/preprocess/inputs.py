"""The files of `--input`: names, folders and patterns in a fixed order; files are uncompressed and hashed while read.

find_inputs(["corpus/", "more-*.jsonl.gz"]) → the files, sorted within each argument
OpenInput(file)                             → uncompressed bytes; the SHA-256 of the file as stored on the disk
"""

from __future__ import annotations

import codecs
import glob
import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron_ddrp.data.preprocess.arrow_tables import is_beside_rows
from megatron_ddrp.data.preprocess.packed import FIRST_BYTES, PACKINGS, HashedFile, PackedStream, packing_of
from megatron_ddrp.data.preprocess.python_texts import TEXTS, TextStream
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import reading, refuse_stand_in, refuse_wide

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
    outside = [(path, *(os.path.join(path, name) for name in TOKENIZER_FILES)) for path in leave_out]
    apart = [os.path.realpath(path) for paths in outside for path in paths]
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
    streams = [os.path.realpath(file.path) for file in files if is_stream(file.path)]
    for file in (files := _once(files)):
        _check(file)
        if streams.count(os.path.realpath(file.path)) > 1:
            raise UserError(f"--input {file.path} is given twice; standard input and pipes can be read only once")
    return files


def is_stream(path: str) -> bool:
    """Return whether an input can be read only once: standard input, a pipe, a shell's `<(command)`, Python's texts."""
    is_pipe = os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
    return is_pipe or path == STANDARD_INPUT or path in TEXTS


class OpenInput:
    """An open input, read block by block; a context manager.

    Attributes:
        file: the `InputFile`.
    """

    def __init__(self, file: InputFile):
        self.file = file
        self._raw = _open_raw(file)
        self._buffered = io.BufferedReader(self._raw, BLOCK_BYTES)
        packing = packing_of(self._buffered.peek(FIRST_BYTES)) if is_stream(file.path) else file.packing
        self._stream = PackedStream(self._buffered, packing) if packing else self._buffered
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


def _open_raw(file: InputFile) -> HashedFile | TextStream:
    path = file.path
    if path in TEXTS:
        return TEXTS[path]
    if Path(path).is_fifo() and os.path.exists(os.path.realpath(path)):  # `<(command)` is a link to a nameless pipe
        print(f"{path}: a pipe; waiting for its writer", file=sys.stderr, flush=True)
    try:
        return HashedFile(sys.stdin.fileno() if path == STANDARD_INPUT else path, file.begin, file.end)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a readable file") from None


def _check(file: InputFile) -> None:
    if file.path == STANDARD_INPUT:
        return
    if not is_stream(file.path):
        _open_raw(file).close()
        refuse_stand_in(b"", file.path)
        if file.packing and not os.path.getsize(file.path):
            raise UserError(f"{file.path}: empty, expected a {file.packing} file; copy it again, or leave it out")
    elif file.is_table:
        raise UserError(f"{file.path}: a pipe, but {file.ending} cannot be read from a pipe; give a file")
    if file.ending not in ("", *ENDINGS):
        raise UserError(f"{file.path}: expected a name that ends in {_KNOWN}, or in one of these and {_PACKED}")


def _sorted_files(folder: str, apart: Sequence[str]) -> list[InputFile]:
    """Return the files with documents in a folder, sorted, and print one line about the others."""
    visible = sorted(_walk(folder, apart), key=lambda file: Path(file.name).parts)
    files = [file for file in visible if file.ending in ENDINGS or (not file.ending and _holds_documents(file))]
    read = {os.path.realpath(file.path) for file in files}
    others = [file.name for file in visible if os.path.realpath(file.path) not in read]
    if others := [name for name in others if not name.endswith(DATASET_ENDINGS)]:
        count = f"{len(others):,} file{'s' * (len(others) > 1)} left out"
        shown = ", ".join([*others[:NAMED_FILES], *["…"] * (len(others) > NAMED_FILES)])
        expected = (
            f"expected names that end in {_KNOWN}, or in one of these and {_PACKED}; rename a file to have it read"
        )
        print(f"{folder}: {count} ({shown}): {expected}", file=sys.stderr)
    return files


def _once(files: Sequence[InputFile]) -> list[InputFile]:
    """Return each file once, by its real path, in order; of several names one with an ending, then one without a link.

    A folder of the Hugging Face hub has each file as a blob without an ending, and a link to it; `**` follows circles.
    """
    names: dict[str, list[InputFile]] = {}
    for file in files:
        names.setdefault(os.path.realpath(file.path), []).append(file)
    best = {
        path: min(same, key=lambda f: (f.ending not in ENDINGS, os.path.islink(f.path))) for path, same in names.items()
    }
    return [file for file in files if best[os.path.realpath(file.path)] is file]


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
            if not _is_beside_data(path) and not is_stream(path):
                yield InputFile(path, os.path.relpath(path, folder))


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
