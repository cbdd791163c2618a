"""Token sequences on disk in Megatron's indexed format: read by memory map, written in a stream and atomically.

    PREFIX.bin   the token ids of all sequences, one after another, little-endian
    PREFIX.idx   where each sequence and document begins (dataset_index.py)
    PREFIX.json  the manifest (ours): counts, the tokenizer's fingerprint, SHA-256 of both files; absent beside other
                 writers' files

Neither opening nor writing takes memory that grows with the dataset. The reader refuses, in one clear line, a header
that does not fit the files' sizes, and a sequence that does not lie inside `PREFIX.bin` or does not end where the next
begins. It does not see an id that became another id, nor a document's border that moved from one sequence to another:
only the SHA-256 in the manifest tells (`verification.py`, `--verify-data`).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from megatron_ddrp.data.atomic import AtomicFile
from megatron_ddrp.data.dataset.dataset_index import (
    CHUNK,
    MEND,
    SIZE,
    DatasetIndex,
    dataset_path,
    file_size,
    write_index,
)
from megatron_ddrp.data.dataset.index_faults import index_faults
from megatron_ddrp.data.dataset.manifest import read_manifest, write_manifest
from megatron_ddrp.errors import UserError

CHUNK_TOKENS = 1 << 22
"""How many tokens are looked at at once where a whole dataset is read."""


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """The type that stores ids of a vocabulary: uint16 below 65,500 pieces, else int32 (Megatron's rule)."""
    return np.uint16 if vocab_size < 65_500 else np.int32


class IndexedDataset:
    """`dataset[i]` is sequence i as a read-only numpy view `[size]` into the memory map of `PREFIX.bin`.

    Attributes:
        dtype: numpy type of the ids.
        sizes: int32 `[sequences]`, tokens in each sequence.
        pointers: int64 `[sequences]`, byte offset of each sequence.
        document_indices: int64 `[documents + 1]`; document d is the sequences `[d]` up to `[d + 1]`.

    The three lists are views of the file, in constant memory however long they are. Raises `UserError` when a file is
    missing, truncated, or not in this format, and on access to a sequence that does not lie inside `PREFIX.bin`.
    Pickles as its prefix.
    """

    def __init__(self, prefix: str | os.PathLike[str]):
        self.prefix = os.fspath(dataset_path(prefix, ""))
        path = dataset_path(prefix, ".idx")
        index = DatasetIndex(path)
        for fault in index.faults_of_ends():
            raise UserError(f"{path}: {fault}")
        self.dtype, self.sizes, self.pointers = index.dtype, index.sizes, index.pointers
        self.document_indices = index.document_indices
        path = dataset_path(prefix, ".bin")
        for fault in index.faults_of_bin(file_size(path)):
            raise UserError(f"{path}: {fault}")
        self._tokens = map_tokens(path, self.dtype)  # [tokens]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> np.ndarray:
        begin, end = self._span(index)
        return self._tokens[begin:end]  # [size]

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens `[offset, offset + length)` of a sequence, to its end when `length` is None; without copying."""
        begin, end = self._span(index)
        stop = end - begin if length is None else offset + length
        if not 0 <= offset <= stop <= end - begin:
            raise IndexError(f"{self.prefix}: tokens [{offset}, {stop}) of sequence {index}, which has {end - begin}")
        return self._tokens[begin + offset : begin + stop]  # [length]

    def _span(self, index: int) -> tuple[int, int]:
        """Return the first token of a sequence and the one behind its last, both inside the file."""
        size, pointer = int(self.sizes[index]), int(self.pointers[index])
        begin, rest = divmod(pointer, self.dtype.itemsize)
        last = index % len(self.sizes) == len(self.sizes) - 1
        end = self._tokens.nbytes if last else int(self.pointers[index + 1])  # where the next sequence begins
        if rest or not 0 <= begin <= begin + size or pointer + size * self.dtype.itemsize != end:
            raise UserError(
                f"{self.prefix}.idx: sequence {index} has {size} tokens from byte {pointer} of a .bin with "
                f"{len(self._tokens)} tokens: damaged; {MEND}, and see all of it by tools/dataset.py verify"
            )
        return begin, begin + size

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all sequences."""
        return len(self._tokens)

    @property
    def manifest(self) -> dict[str, Any] | None:
        """The contents of `PREFIX.json`, or None where another program wrote the dataset."""
        return read_manifest(self.prefix)

    def check(self) -> None:
        """Read the whole index. Raises `UserError` for the first fault in it."""
        path = dataset_path(self.prefix, ".idx")
        for fault in index_faults(DatasetIndex(path)):
            raise UserError(f"{path}: {fault}: damaged; {MEND}, and see all of it by tools/dataset.py verify")

    def chunks(self) -> Iterator[np.ndarray]:
        """Copies of all tokens in file order, at most `CHUNK_TOKENS` at a time."""
        return token_chunks(dataset_path(self.prefix, ".bin"), self.dtype)

    def id_range(self) -> tuple[int, int]:
        """The smallest and the largest token id, by reading the whole file; (0, 0) for a dataset without tokens."""
        ranges = [(int(part.min()), int(part.max())) for part in self.chunks()]
        return min((low for low, _ in ranges), default=0), max((high for _, high in ranges), default=0)

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexedDataset, (self.prefix,)


def map_tokens(path: Path, dtype: np.dtype) -> np.ndarray:
    """The ids of a `PREFIX.bin` `[tokens]`, read-only; bytes behind the last whole id are left out."""
    count = file_size(path) // dtype.itemsize
    mapped = np.memmap(path, dtype=dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype)
    tokens = np.asarray(mapped)  # [tokens]
    tokens.flags.writeable = False
    return tokens


def token_chunks(path: Path, dtype: np.dtype) -> Iterator[np.ndarray]:
    """All ids of a `PREFIX.bin`, at most `CHUNK_TOKENS` at a time; read, not mapped, so that no page stays behind."""
    with open(path, "rb", buffering=0) as stream:
        while len(tokens := np.fromfile(stream, dtype, CHUNK_TOKENS)):
            yield tokens


class IndexedDatasetWriter:
    """Writes a dataset sequence by sequence; it appears under its name only on `finalize()`.

        with IndexedDatasetWriter(prefix, token_dtype(vocab_size)) as writer:
            writer.append(ids)
            writer.end_document()
            writer.finalize()

    Leaving the block without `finalize()` removes what was written. Existing files are replaced on `finalize()`. The
    tokens of each sequence and the sequences of each document wait in nameless files, so that memory does not grow.

    Attributes:
        num_sequences, num_documents, num_tokens: what was written so far.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: Any):
        self.prefix = os.fspath(dataset_path(prefix, ""))
        self.dtype = np.dtype(dtype)
        self._bin = AtomicFile(dataset_path(prefix, ".bin"))
        try:
            self._index = AtomicFile(dataset_path(prefix, ".idx"))
        except UserError:
            self._bin.abort()
            raise
        folder = self._bin.path.parent
        self._sizes, self._documents = (tempfile.TemporaryFile(dir=folder) for _ in range(2))  # noqa: SIM115
        self._ended_sequences = 0  # sequences in the documents ended so far
        self._digest = hashlib.sha256()
        self.num_sequences = self.num_documents = self.num_tokens = 0

    def append(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append one sequence. Raises `ValueError` for an id that the dataset's type cannot hold."""
        tokens = np.asarray(ids)
        limits = np.iinfo(self.dtype)
        if tokens.size and not limits.min <= int(tokens.min()) <= int(tokens.max()) <= limits.max:
            raise ValueError(f"{self.prefix}: ids from {tokens.min()} to {tokens.max()} do not fit {self.dtype.name}")
        self._write_sizes(np.array([tokens.size]))
        self._write_tokens(tokens.astype(self.dtype))

    def append_documents(
        self, tokens: np.ndarray, sizes: Sequence[int] | np.ndarray, sequences: Sequence[int] | np.ndarray
    ) -> None:
        """Append whole documents: their ids end to end `[sum(sizes)]`, already of `dtype`; the tokens of each sequence
        `[sum(sequences)]`; the sequences of each document `[documents]`."""
        sizes, sequences = np.asarray(sizes, np.int64), np.asarray(sequences, np.int64)
        assert tokens.dtype == self.dtype and len(tokens) == sizes.sum() and len(sizes) == sequences.sum()
        self._write_documents(sequences)
        self._write_sizes(sizes)
        self._write_tokens(tokens)

    def append_dataset(self, dataset: IndexedDataset, read: Callable[[np.ndarray], object]) -> None:
        """Append all documents of a sound dataset of this type or a narrower one, in chunks.

        Calls `read` with the ids `[at most CHUNK_TOKENS]` of each chunk, as they stand in its .bin.
        """
        assert np.can_cast(dataset.dtype, self.dtype)
        for begin in range(0, dataset.num_documents, CHUNK):
            self._write_documents(np.diff(dataset.document_indices[begin : begin + CHUNK + 1]))
        for begin in range(0, len(dataset), CHUNK):
            self._write_sizes(dataset.sizes[begin : begin + CHUNK])
        for tokens in dataset.chunks():
            self._write_tokens(tokens.astype(self.dtype, copy=False))
            read(tokens)

    def end_document(self) -> None:
        """The sequences since the last call are one document."""
        self._write_documents(np.array([self.num_sequences - self._ended_sequences]))

    def finalize(self, manifest: dict[str, Any] | None = None) -> None:
        """Make the dataset appear: `.bin`, then the manifest (if any) as `.json`, and `.idx` last.

        The manifest gains `files`: bytes and SHA-256 of `.bin` and `.idx`.
        """
        assert self._ended_sequences == self.num_sequences, "end_document() is missing"
        manifest_path = dataset_path(self.prefix, ".json")
        with self._index as index:
            write_index(index, self.dtype, self._sizes, self._documents)
            index.sync()
            self._bin.sync()
            # An old index or manifest must never stand beside the new tokens, not even after a crash right here.
            index.path.unlink(missing_ok=True)
            manifest_path.unlink(missing_ok=True)
            self._bin.commit()
            if manifest is not None:
                write_manifest(manifest_path, manifest, self._bin.path, index.temporary, self._digest.hexdigest())
        self._close()

    def abort(self) -> None:
        """Remove what was written; nothing happens after `finalize()`."""
        self._bin.abort()
        self._index.abort()
        self._close()

    def _close(self) -> None:
        """Let the nameless files go."""
        self._sizes.close()
        self._documents.close()

    def _write_tokens(self, tokens: np.ndarray) -> None:
        data = tokens.tobytes()
        self._bin.write(data)
        self._digest.update(data)
        self.num_tokens += len(tokens)

    def _write_sizes(self, sizes: np.ndarray) -> None:
        most = np.iinfo(SIZE).max
        if len(sizes) and int(sizes.max()) > most:
            raise UserError(f"{self.prefix}: a sequence of {sizes.max()} tokens, the format holds {most}; cut the text")
        self._sizes.write(sizes.astype(SIZE).tobytes())
        self.num_sequences += len(sizes)

    def _write_documents(self, sequences: np.ndarray) -> None:
        self._documents.write(sequences.astype(SIZE).tobytes())
        self.num_documents += len(sequences)
        self._ended_sequences += int(sequences.sum())

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
