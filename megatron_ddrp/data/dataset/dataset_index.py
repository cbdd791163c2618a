"""The index of a token dataset in Megatron's format, version 1: read through a memory map, written as a stream.

    PREFIX.idx   b"MMIDIDX\\0\\0" | uint64 version 1 | uint8 type code | uint64 sequences | uint64 document indices
                 | int32 size of each sequence, in tokens | int64 byte offset of each sequence in PREFIX.bin
                 | int64 document indices: document d is the sequences [indices[d], indices[d + 1])

Opening takes constant time, writing constant memory. Opening checks the header against the file's size, and both ends
of every list. The other numbers are checked on use (`IndexedDataset`), and all at once by `verification.verify`.
"""

from __future__ import annotations

import difflib
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from megatron_ddrp.data.atomic import AnyPath
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import refuse_stand_in

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, type code, sequences, document indices
DTYPES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
"""Type code of the index → type of the token ids."""

MEND = "copy both files again, or preprocess again"

SIZE, OFFSET = np.dtype("<i4"), np.dtype("<i8")
"""Types of the index: sizes in tokens; byte offsets and document indices."""

CHUNK = 1 << 20
"""Number of index entries in memory at once."""


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Return the type for ids of a vocabulary: uint16 below 65,500 pieces, otherwise int32 (Megatron's rule)."""
    return np.uint16 if vocab_size < 65_500 else np.int32


def dataset_path(prefix: AnyPath, suffix: str) -> Path:
    """Return `PREFIX.bin`, `.idx` or `.json`. An ending `.bin` or `.idx` of the prefix is dropped."""
    name = os.fspath(prefix)
    for known in (".bin", ".idx"):
        name = name.removesuffix(known)
    return Path(name + suffix)


def file_size(path: Path) -> int:
    """Return the size of a dataset's file in bytes. Raises `UserError` if there is none."""
    try:
        size = path.stat().st_size
        if path.is_file():
            refuse_stand_in(b"", path)
            return size
        reason = "not a file"
    except OSError as error:
        reason = str(error.strerror)
    raise UserError(f"{path}: {reason}; {suggest(path) if path.suffix == '.idx' else MEND}")


class Header(NamedTuple):
    """Header of an index: its first 34 bytes."""

    magic: bytes
    version: int
    code: int
    sequences: int
    document_indices: int

    @property
    def file_bytes(self) -> int:
        """Size in bytes of an index with these counts."""
        return (
            HEADER.size + (SIZE.itemsize + OFFSET.itemsize) * self.sequences + OFFSET.itemsize * self.document_indices
        )

    def faults(self, size: int) -> Iterator[str]:
        """Yield one line per fault of the header of an index file of `size` bytes."""
        if self.magic != MAGIC:
            yield f"starts with {self.magic!r}, expected {MAGIC!r}: not a Megatron index; preprocess again"
        if self.version != VERSION:
            yield f"format version {self.version}, expected {VERSION}; preprocess again"
        if self.code not in DTYPES:
            known = ", ".join(f"{key} ({np.dtype(value).name})" for key, value in DTYPES.items())
            yield f"type code {self.code}, expected one of {known}; preprocess again"
        if size != self.file_bytes:
            counts = f"{self.sequences} sequences and {self.document_indices} document indices"
            yield f"{size} bytes, expected {self.file_bytes} for {counts}; {MEND}"
        elif self.document_indices == 0:
            yield "no document index, expected at least one (0); preprocess again"


def read_header(path: Path) -> Header:
    """Return the header of an index. Raises `UserError` for a missing or too short file."""
    size = file_size(path)
    if size < HEADER.size:
        raise UserError(f"{path}: {size} bytes, expected at least the {HEADER.size} of a header; {MEND}")
    with open(path, "rb") as stream:
        return Header(*HEADER.unpack(stream.read(HEADER.size)))


class DatasetIndex:
    """Index lists of `PREFIX.idx` as views of its memory map; opening reads only a few bytes.

    Attributes:
        dtype: numpy type of the token ids.
        sizes: int32 `[sequences]`, tokens in each sequence.
        pointers: int64 `[sequences]`, byte offset of each sequence in `PREFIX.bin`.
        document_indices: int64 `[documents + 1]`.

    Raises `UserError` for a header that does not fit the file. The lists may still be damaged.
    """

    def __init__(self, path: Path):
        header, size = read_header(path), file_size(path)
        for fault in header.faults(size):
            raise UserError(f"{path}: {fault}")
        self.dtype = np.dtype(DTYPES[header.code])
        data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))  # [size]
        sizes_end = HEADER.size + SIZE.itemsize * header.sequences
        pointers_end = sizes_end + OFFSET.itemsize * header.sequences
        self.sizes = data[HEADER.size : sizes_end].view(SIZE)
        self.pointers = data[sizes_end:pointers_end].view(OFFSET)
        self.document_indices = data[pointers_end:].view(OFFSET)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def bin_bytes(self) -> int:
        """Required size of `PREFIX.bin`: the end of the last sequence."""
        return int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize if len(self) else 0

    def faults_of_ends(self) -> Iterator[str]:
        """Yield one line if the first or the last document index is wrong."""
        ends = (int(self.document_indices[0]), int(self.document_indices[-1]))
        if ends != (0, len(self)):
            yield f"document indices run over {ends}, expected (0, {len(self)}); preprocess again"

    def faults_of_bin(self, size: int) -> Iterator[str]:
        """Yield one line if a `PREFIX.bin` of `size` bytes does not fit this index."""
        if size != self.bin_bytes:
            yield f"{size} bytes, expected {self.bin_bytes} as its .idx says; {MEND}"
        elif size % self.dtype.itemsize:
            yield f"{size} bytes, expected a multiple of {self.dtype.itemsize} for {self.dtype.name} ids; {MEND}"


def write_index(index: BinaryIO, dtype: np.dtype, sizes: BinaryIO, documents: BinaryIO) -> None:
    """Write an index for token ids of `dtype`, `CHUNK` numbers at a time, from two files.

    `sizes` holds the tokens of each sequence, `documents` the sequences of each document, both of type `SIZE`.
    """
    sequences, ends = (stream.seek(0, os.SEEK_END) // SIZE.itemsize for stream in (sizes, documents))
    code = next(code for code, known in DTYPES.items() if known == dtype)
    index.write(HEADER.pack(MAGIC, VERSION, code, sequences, ends + 1))
    for block in _blocks(sizes):
        index.write(block.tobytes())
    end = 0
    for block in _blocks(sizes):
        lengths = block.astype(OFFSET) * dtype.itemsize  # bytes
        stops = end + np.cumsum(lengths)
        index.write((stops - lengths).tobytes())
        end = int(stops[-1])
    index.write(bytes(OFFSET.itemsize))
    end = 0
    for block in _blocks(documents):
        stops = end + np.cumsum(block, dtype=OFFSET)
        index.write(stops.tobytes())
        end = int(stops[-1])


def _blocks(stream: BinaryIO) -> Iterator[np.ndarray]:
    """Yield the numbers of a file from its beginning, in arrays `[at most CHUNK]`."""
    stream.seek(0)
    while data := stream.read(CHUNK * SIZE.itemsize):
        yield np.frombuffer(data, SIZE)


SHOWN = 5
"""Names in a message."""


def suggest(index: Path) -> str:
    """Return a hint about a missing `PREFIX.idx`: similar names in its folder, else all names there."""
    folder, name = index.parent, index.name.removesuffix(".idx")
    if not folder.is_dir():
        return f"there is no folder {folder}; check --data-path"
    unfinished = [path for path in sorted(folder.glob("*.unfinished")) if f"{name}_".startswith(f"{path.stem}_")]
    if unfinished:
        return f"its preprocessing has not ended ({unfinished[0]}): run the same command again"
    there = sorted(path.stem for path in folder.glob("*.idx"))
    longer = [other for other in there if other.startswith(f"{name}_")]
    similar = longer or difflib.get_close_matches(name, there, n=1, cutoff=0.85)
    if similar:
        return f"did you mean {' or '.join(_prefixes(folder, similar))}?"
    if there:
        return f"the folder has {', '.join(_prefixes(folder, there))}"
    return "expected PREFIX.bin and PREFIX.idx as megatron-ddrp preprocess writes them; check --data-path"


def _prefixes(folder: Path, names: list[str]) -> list[str]:
    shown = [os.fspath(folder / name) for name in names[:SHOWN]]
    return shown if len(names) <= SHOWN else [*shown, f"{len(names) - SHOWN} more"]


MOST_LISTED = 10
"""Number of faults of a kind that are listed; the others are counted."""


def index_faults(index: DatasetIndex) -> Iterator[str]:
    """Read a whole index and yield one line per fault; its header must fit the file.

    Faults are negative sizes, sequences with gaps or overlaps, and documents out of order. Memory does not grow with
    the dataset.
    """
    sizes, pointers, indices, width = index.sizes, index.pointers, index.document_indices, index.dtype.itemsize

    def gap(i: int) -> str:
        end = int(pointers[i]) + int(sizes[i]) * width
        return f"sequence {i + 1} begins at byte {pointers[i + 1]}, but sequence {i} ends at byte {end}"

    def crossing(d: int) -> str:
        return f"document {d} begins with sequence {indices[d]}, but ends before sequence {indices[d + 1]}"

    def has_gap(these: slice, following: slice) -> np.ndarray:
        return pointers[these] + sizes[these].astype(np.int64) * width != pointers[following]

    negative = _places(len(sizes), lambda these, _: sizes[these] < 0)
    gaps = _places(len(sizes) - 1, has_gap)
    crossings = _places(len(indices) - 1, lambda these, following: indices[these] > indices[following])
    yield from first_faults("negative sizes", negative, lambda i: f"sequence {i} has {sizes[i]} tokens")
    if len(index) and pointers[0] != 0:
        yield f"sequence 0 begins at byte {pointers[0]}, expected 0"
    yield from first_faults("sequences that do not begin at the end of the previous one", gaps, gap)
    yield from index.faults_of_ends()
    yield from first_faults("documents that end before they begin", crossings, crossing)


def _places(count: int, is_wrong: Callable[[slice, slice], np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the wrong ones of the places 0 to `count`, a chunk at a time, as `is_wrong(places, places + 1)` tells."""
    for begin in range(0, count, CHUNK):
        end = min(begin + CHUNK, count)
        yield begin + np.flatnonzero(is_wrong(slice(begin, end), slice(begin + 1, end + 1)))


def first_faults(kind: str, found: Iterable[np.ndarray], words: Callable[[Any], str]) -> Iterator[str]:
    """Yield lines about the first `MOST_LISTED` rows of all the arrays, and one with the count of the others."""
    total = 0
    for places in found:
        yield from map(words, places[: max(0, MOST_LISTED - total)])
        total += len(places)
    if total > MOST_LISTED:
        yield f"{total - MOST_LISTED:,} more {kind}, {total:,} in all"
