"""Token sequences on disk in Megatron's indexed format, version 1 (`MMIDIDX`): read by memory map, written atomically.

    PREFIX.bin   the token ids of all sequences, one after another, little-endian
    PREFIX.idx   b"MMIDIDX\\0\\0" | uint64 version 1 | uint8 type code | uint64 sequences | uint64 document indices
                 | int32 size of each sequence, in tokens | int64 byte offset of each sequence in PREFIX.bin
                 | int64 document indices: document d is the sequences [indices[d], indices[d + 1])
    PREFIX.json  the manifest (ours): counts and the tokenizer's fingerprint; absent beside other writers' files

Opening checks every size against every other, so that a truncated copy is one clear line and not garbage in training.
"""

from __future__ import annotations

import json
import os
import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from megatron_ddrp.data.atomic import AtomicFile
from megatron_ddrp.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, type code, sequences, document indices
DTYPES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
"""Type code of the index → type of the token ids."""

_MEND = "copy both files again, or preprocess again"

CHUNK_TOKENS = 1 << 24
"""How many tokens are looked at at once where a whole dataset is read."""


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """The type that stores ids of a vocabulary: uint16 below 65,500 pieces, else int32 (Megatron's rule)."""
    return np.uint16 if vocab_size < 65_500 else np.int32


def dataset_path(prefix: str | os.PathLike[str], suffix: str) -> Path:
    """`PREFIX.bin`, `PREFIX.idx` or `PREFIX.json`; a prefix given with one of these suffixes counts without it."""
    name = os.fspath(prefix)
    for known in (".bin", ".idx"):
        name = name.removesuffix(known)
    return Path(name + suffix)


class IndexedDataset:
    """`dataset[i]` is sequence i as a read-only numpy view `[size]` into the memory map of `PREFIX.bin`.

    Attributes:
        dtype: numpy type of the ids.
        sizes: int32 `[sequences]`, tokens in each sequence.
        document_indices: int64 `[documents + 1]`; document d is the sequences `[d]` up to `[d + 1]`.

    Raises `UserError` when a file is missing, truncated, or not in this format. Pickles as its prefix.
    """

    def __init__(self, prefix: str | os.PathLike[str]):
        self.prefix = os.fspath(dataset_path(prefix, ""))
        self._read_index(dataset_path(prefix, ".idx"))
        self._map_tokens(dataset_path(prefix, ".bin"))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> np.ndarray:
        start = self._starts[index]
        return self._tokens[start : start + self.sizes[index]]  # [size]

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens `[offset, offset + length)` of a sequence, to its end when `length` is None; without copying."""
        size = int(self.sizes[index])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise IndexError(f"{self.prefix}: tokens [{offset}, {stop}) of sequence {index}, which has {size}")
        start = int(self._starts[index])
        return self._tokens[start + offset : start + stop]  # [length]

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all sequences."""
        return int(self.sizes.sum(dtype=np.int64))

    @property
    def manifest(self) -> dict[str, Any] | None:
        """The contents of `PREFIX.json`, or None where another program wrote the dataset."""
        path = dataset_path(self.prefix, ".json")
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise UserError(f"{path}: not a dataset manifest ({error}); preprocess again, or remove it") from None

    def id_range(self) -> tuple[int, int]:
        """The smallest and the largest token id, by reading the whole file; (0, 0) for a dataset without tokens."""
        parts = [self._tokens[begin : begin + CHUNK_TOKENS] for begin in range(0, len(self._tokens), CHUNK_TOKENS)]
        lowest = min((int(part.min()) for part in parts), default=0)
        return lowest, max((int(part.max()) for part in parts), default=0)

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexedDataset, (self.prefix,)

    def _read_index(self, path: Path) -> None:
        size = _file_size(path)
        if size < HEADER.size:
            raise UserError(f"{path}: {size} bytes, expected at least the {HEADER.size} of a header; {_MEND}")
        with open(path, "rb") as stream:
            magic, version, code, sequences, documents = HEADER.unpack(stream.read(HEADER.size))
        if magic != MAGIC:
            raise UserError(
                f"{path}: starts with {magic!r}, expected {MAGIC!r}: not a Megatron index; preprocess again"
            )
        if version != VERSION:
            raise UserError(f"{path}: format version {version}, expected {VERSION}; preprocess again")
        if code not in DTYPES:
            known = ", ".join(f"{key} ({np.dtype(value).name})" for key, value in DTYPES.items())
            raise UserError(f"{path}: type code {code}, expected one of {known}; preprocess again")
        expected = HEADER.size + 12 * sequences + 8 * documents
        if size != expected:
            counts = f"{sequences} sequences and {documents} document indices"
            raise UserError(f"{path}: {size} bytes, expected {expected} for {counts}; {_MEND}")
        self.dtype = np.dtype(DTYPES[code])
        index = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))  # [size]
        self.sizes, index = _take(index[HEADER.size :], np.dtype("<i4"), sequences)
        self.pointers, index = _take(index, np.dtype("<i8"), sequences)
        self.document_indices, _ = _take(index, np.dtype("<i8"), documents)
        ends = (int(self.document_indices[0]), int(self.document_indices[-1])) if documents else None
        if ends != (0, sequences):
            raise UserError(f"{path}: document indices run over {ends}, expected (0, {sequences}); preprocess again")

    def _map_tokens(self, path: Path) -> None:
        size = _file_size(path)
        expected = int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize if len(self) else 0
        if size != expected:
            raise UserError(f"{path}: {size} bytes, expected {expected} as its .idx says; {_MEND}")
        mapped = np.memmap(path, dtype=self.dtype, mode="r") if size else np.empty(0, self.dtype)
        self._tokens = np.asarray(mapped)  # [tokens]
        self._tokens.flags.writeable = False
        self._starts = self.pointers // self.dtype.itemsize  # [sequences]


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        hint = "expected PREFIX.bin and PREFIX.idx as tools/preprocess_data.py writes them; check --data-path"
        raise UserError(f"{path}: {error.strerror}; {hint}") from None


def _take(data: np.ndarray, dtype: np.dtype, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Split `count` numbers off the front of bytes: (numbers `[count]`, the remaining bytes)."""
    length = count * dtype.itemsize
    return data[:length].view(dtype), data[length:]


class IndexedDatasetWriter:
    """Writes a dataset sequence by sequence; it appears under its name only on `finalize()`.

        with IndexedDatasetWriter(prefix, token_dtype(vocab_size)) as writer:
            writer.append(ids)
            writer.end_document()
            writer.finalize()

    Leaving the block without `finalize()` removes what was written. Existing files are replaced on `finalize()`.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: Any):
        self.prefix = os.fspath(dataset_path(prefix, ""))
        self.dtype = np.dtype(dtype)
        self._code = next(code for code, known in DTYPES.items() if known == self.dtype)
        self._sizes = array("i")
        self._document_indices = array("q", [0])
        self._bin = AtomicFile(dataset_path(prefix, ".bin"))
        self.num_tokens = 0

    @property
    def num_sequences(self) -> int:
        """Sequences appended so far."""
        return len(self._sizes)

    @property
    def num_documents(self) -> int:
        """Documents ended so far."""
        return len(self._document_indices) - 1

    def append(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append one sequence. Raises `ValueError` for an id that the dataset's type cannot hold."""
        tokens = np.asarray(ids)
        limits = np.iinfo(self.dtype)
        if tokens.size and not limits.min <= int(tokens.min()) <= int(tokens.max()) <= limits.max:
            raise ValueError(f"{self.prefix}: ids from {tokens.min()} to {tokens.max()} do not fit {self.dtype.name}")
        self._write(tokens.astype(self.dtype), [tokens.size])

    def append_documents(self, tokens: np.ndarray, sizes: Sequence[int], sequences: Sequence[int]) -> None:
        """Append whole documents: their ids end to end `[sum(sizes)]`, already of `dtype`; the tokens of each sequence
        `[sum(sequences)]`; the sequences of each document `[documents]`."""
        assert tokens.dtype == self.dtype and len(tokens) == sum(sizes) and len(sizes) == sum(sequences)
        first = len(self._sizes)
        self._write(tokens, sizes)
        self._document_indices.extend(first + end for end in accumulate(sequences))

    def _write(self, tokens: np.ndarray, sizes: Sequence[int]) -> None:
        self._bin.write(tokens.tobytes())
        self._sizes.extend(sizes)
        self.num_tokens += len(tokens)

    def end_document(self) -> None:
        """The sequences since the last call are one document."""
        self._document_indices.append(len(self._sizes))

    def finalize(self, manifest: dict[str, Any] | None = None) -> None:
        """Make the dataset appear: `.bin`, then the manifest (if any) as `.json`, and `.idx` last."""
        assert self._document_indices[-1] == len(self._sizes), "end_document() is missing"
        sizes = np.frombuffer(self._sizes, dtype=np.int32) if self._sizes else np.empty(0, np.int32)  # [sequences]
        lengths = sizes.astype(np.int64) * self.dtype.itemsize  # bytes
        pointers = np.cumsum(lengths) - lengths  # [sequences]
        documents = np.frombuffer(self._document_indices, dtype=np.int64)  # [documents + 1]
        manifest_path, index_path = dataset_path(self.prefix, ".json"), dataset_path(self.prefix, ".idx")
        with AtomicFile(index_path) as index:
            index.write(HEADER.pack(MAGIC, VERSION, self._code, len(sizes), len(documents)))
            for numbers, dtype in ((sizes, "<i4"), (pointers, "<i8"), (documents, "<i8")):
                index.write(numbers.astype(dtype, copy=False).tobytes())
            index.sync()
            self._bin.sync()
            # An old index or manifest must never stand beside the new tokens, not even after a crash right here.
            index_path.unlink(missing_ok=True)
            manifest_path.unlink(missing_ok=True)
            self._bin.commit()
            if manifest is not None:
                with AtomicFile(manifest_path) as stream:
                    stream.write((json.dumps(manifest, indent=2, sort_keys=True) + "\n").encode())

    def abort(self) -> None:
        """Remove what was written; nothing happens after `finalize()`."""
        self._bin.abort()

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
