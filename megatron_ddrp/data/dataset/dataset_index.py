"""The index of a token dataset in Megatron's format, version 1: read by memory map, written in a stream.

    PREFIX.idx   b"MMIDIDX\\0\\0" | uint64 version 1 | uint8 type code | uint64 sequences | uint64 document indices
                 | int32 size of each sequence, in tokens | int64 byte offset of each sequence in PREFIX.bin
                 | int64 document indices: document d is the sequences [indices[d], indices[d + 1])

Opening takes constant time, writing constant memory. Opening checks what costs nothing: the header against the file's
size, and both ends of every list. The numbers between are checked where they are used (`IndexedDataset`), and all at
once by `verification.verify`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from megatron_ddrp.data.atomic import AnyPath, AtomicFile
from megatron_ddrp.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, type code, sequences, document indices
DTYPES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
"""Type code of the index → type of the token ids."""

MEND = "copy both files again, or preprocess again"

SIZE, OFFSET = np.dtype("<i4"), np.dtype("<i8")
"""Types in the index of a number of tokens, and of a byte offset or a document index."""

CHUNK = 1 << 20
"""Numbers of an index in memory at once."""


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Return the type that stores ids of a vocabulary: uint16 below 65,500 pieces, else int32 (Megatron's rule)."""
    return np.uint16 if vocab_size < 65_500 else np.int32


def dataset_path(prefix: AnyPath, suffix: str) -> Path:
    """Return `PREFIX.bin`, `.idx` or `.json`. A prefix that ends in `.bin` or `.idx` counts without it."""
    name = os.fspath(prefix)
    for known in (".bin", ".idx"):
        name = name.removesuffix(known)
    return Path(name + suffix)


def file_size(path: Path) -> int:
    """Return the bytes of a dataset's file. Raises `UserError` when there is none."""
    try:
        size = path.stat().st_size
        if path.is_file():
            return size
        reason = "not a file"
    except OSError as error:
        reason = str(error.strerror)
    hint = "expected PREFIX.bin and PREFIX.idx as megatron-ddrp preprocess writes them; check --data-path"
    raise UserError(f"{path}: {reason}; {hint}")


class Header(NamedTuple):
    """First 34 bytes of an index."""

    magic: bytes
    version: int
    code: int
    sequences: int
    document_indices: int

    @property
    def file_bytes(self) -> int:
        """Size of an index with these counts."""
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
            yield "no document index, expected at least one, which is 0; preprocess again"


def read_header(path: Path) -> Header:
    """Return the header of an index. Raises `UserError` for a missing file and for one too short to have it."""
    size = file_size(path)
    if size < HEADER.size:
        raise UserError(f"{path}: {size} bytes, expected at least the {HEADER.size} of a header; {MEND}")
    with open(path, "rb") as stream:
        return Header(*HEADER.unpack(stream.read(HEADER.size)))


class DatasetIndex:
    """Three lists of `PREFIX.idx` as views of its memory map; opening reads a few bytes of it.

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
        """Size that `PREFIX.bin` must have: where the last sequence ends."""
        return int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize if len(self) else 0

    def faults_of_ends(self) -> Iterator[str]:
        """Yield a line if the first or the last document index is wrong."""
        ends = (int(self.document_indices[0]), int(self.document_indices[-1]))
        if ends != (0, len(self)):
            yield f"document indices run over {ends}, expected (0, {len(self)}); preprocess again"

    def faults_of_bin(self, size: int) -> Iterator[str]:
        """Yield a line if a `PREFIX.bin` of `size` bytes does not fit this index."""
        if size != self.bin_bytes:
            yield f"{size} bytes, expected {self.bin_bytes} as its .idx says; {MEND}"
        elif size % self.dtype.itemsize:
            yield f"{size} bytes, expected a multiple of {self.dtype.itemsize} for {self.dtype.name} ids; {MEND}"


def write_index(index: AtomicFile, dtype: np.dtype, sizes: BinaryIO, documents: BinaryIO) -> None:
    """Write an index over token ids of `dtype`, `CHUNK` numbers at a time, from two files that grew with the ids:

    `sizes` holds the tokens of each sequence, `documents` the sequences of each document, both as `SIZE`.
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
    """Yield the numbers of a file `[at most CHUNK]`, from its beginning."""
    stream.seek(0)
    while data := stream.read(CHUNK * SIZE.itemsize):
        yield np.frombuffer(data, SIZE)
