"""Token sequences on disk in Megatron's indexed format, read through a memory map (`unfinished.py` writes them).

    PREFIX.bin   the token ids of all sequences, one after another, little-endian
    PREFIX.idx   the begin of each sequence and document (dataset_index.py)
    PREFIX.json  the manifest (ours): counts, the tokenizer's fingerprint, SHA-256 of both files; absent for datasets
                 that other programs wrote

The memory of an open dataset does not grow with its size. The reader refuses, in one line, a header that does not fit
the files' sizes, and a sequence that does not lie inside `PREFIX.bin` or does not end at the begin of the next one. It
cannot detect an id that changed into another id, nor a document border that moved from one sequence to another: only
the SHA-256 in the manifest does (`verification.py`, `--verify-data`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ddrp.data.atomic import AnyPath
from megatron_ddrp.data.dataset.dataset_index import MEND, DatasetIndex, dataset_path, file_size, index_faults
from megatron_ddrp.data.dataset.manifest import read_manifest
from megatron_ddrp.errors import UserError

CHUNK_TOKENS = 1 << 22
"""Number of tokens in memory at once while a whole dataset is read."""


class IndexedDataset(DatasetIndex):
    """Dataset whose item `dataset[i]` is sequence i, a read-only numpy view `[size]` of the memory map of `PREFIX.bin`.

    It has the lists of `DatasetIndex`. Raises `UserError` if a file is missing, truncated or not in this format, and on
    access to a sequence that does not lie inside `PREFIX.bin`. It is pickled as its prefix.
    """

    def __init__(self, prefix: AnyPath):
        self.prefix = os.fspath(dataset_path(prefix, ""))
        path = dataset_path(prefix, ".idx")
        super().__init__(path)
        for fault in self.faults_of_ends():
            raise UserError(f"{path}: {fault}")
        path = dataset_path(prefix, ".bin")
        for fault in self.faults_of_bin(file_size(path)):
            raise UserError(f"{path}: {fault}")
        mapped = np.memmap(path, self.dtype, mode="r") if self.bin_bytes else np.empty(0, self.dtype)
        self._tokens = np.asarray(mapped)  # [tokens]
        self._tokens.flags.writeable = False

    def __getitem__(self, index: int) -> np.ndarray:
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return ids `[offset, offset + length)` of a sequence without a copy; up to its end if `length` is None."""
        begin, end = self._span(index)
        stop = end - begin if length is None else offset + length
        if not 0 <= offset <= stop <= end - begin:
            raise IndexError(f"{self.prefix}: tokens [{offset}, {stop}) of sequence {index}, which has {end - begin}")
        return self._tokens[begin + offset : begin + stop]  # [length]

    def _span(self, index: int) -> tuple[int, int]:
        """Return the range of a sequence in tokens of the file: its first token, and the one after its last."""
        size, pointer = int(self.sizes[index]), int(self.pointers[index])
        begin, rest = divmod(pointer, self.dtype.itemsize)
        last = index % len(self.sizes) == len(self.sizes) - 1
        end = self._tokens.nbytes if last else int(self.pointers[index + 1])  # the begin of the next sequence
        if rest or not 0 <= begin <= begin + size or pointer + size * self.dtype.itemsize != end:
            raise UserError(
                f"{self.prefix}.idx: sequence {index} has {size} tokens from byte {pointer} of a .bin with "
                f"{len(self._tokens)} tokens: damaged; {MEND}, and see all of it by megatron-ddrp dataset verify"
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
        """Content of `PREFIX.json`, or None if there is no such file."""
        return read_manifest(self.prefix)

    @property
    def sample_digest(self) -> str:
        """SHA-256 of up to 64 evenly spread sequences, which distinguishes datasets whose counts agree by chance."""
        digest = hashlib.sha256()
        for sequence in np.unique(np.linspace(0, max(0, len(self) - 1), 64).astype(int)) if len(self) else ():
            digest.update(np.ascontiguousarray(self[int(sequence)]).tobytes())
        return digest.hexdigest()

    @cached_property
    def description(self) -> str:
        """Numbers of documents and tokens, and the begin of `sample_digest`: the same for every copy of the files."""
        return f"{self.num_documents:,} documents, {self.num_tokens:,} tokens, digest {self.sample_digest:.12}"

    @cached_property
    def closing_tokens(self) -> int:
        """Number of [SEP] that end each document: 1 with `--append-eod`, by the manifest, otherwise 0."""
        return int((self.manifest or {}).get("append_eod") is True)

    def check(self) -> None:
        """Check the whole index. Raises `UserError` for its first fault."""
        path = dataset_path(self.prefix, ".idx")
        for fault in index_faults(DatasetIndex(path)):  # a separate map, so that its pages are released
            raise UserError(f"{path}: {fault}: damaged; {MEND}, and see all of it by megatron-ddrp dataset verify")

    def chunks(self) -> Iterator[np.ndarray]:
        """Yield copies of all tokens in file order, at most `CHUNK_TOKENS` at a time."""
        return token_chunks(dataset_path(self.prefix, ".bin"), self.dtype)

    def piece_counts(self) -> np.ndarray:
        """Read the whole file and return the count of each piece, int64 `[pieces]`."""
        counts = np.zeros(0, dtype=np.int64)
        for tokens in self.chunks():
            found = np.bincount(tokens, minlength=len(counts))
            found[: len(counts)] += counts
            counts = found
        return counts

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexedDataset, (self.prefix,)


def token_chunks(path: Path, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield all ids of a `PREFIX.bin`, at most `CHUNK_TOKENS` at a time.

    Reads instead of mapping, so that no page stays in memory.
    """
    with open(path, "rb", buffering=0) as stream:
        while len(tokens := np.fromfile(stream, dtype, CHUNK_TOKENS)):
            yield tokens
