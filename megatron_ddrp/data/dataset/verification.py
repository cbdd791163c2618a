"""Summary of an indexed dataset, and checks that its files are whole and belong to a tokenizer.

Memory does not grow with the dataset.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron_ddrp.data.atomic import Advance, AnyPath, file_sha256, silent
from megatron_ddrp.data.batches.samples import MIN_DOCUMENT_TOKENS, document_lengths
from megatron_ddrp.data.dataset.dataset_index import (
    MEND,
    DatasetIndex,
    dataset_path,
    file_size,
    first_faults,
    index_faults,
    read_header,
)
from megatron_ddrp.data.dataset.indexed_dataset import (
    IndexedDataset,
    entry,
    read_manifest,
    recorded_sum,
    token_chunks,
    tokenizer_entry,
    tokenizer_name,
)
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.data.tokenizers.vocabulary import unknown_share, warn_of_unknown
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, refusals_as_user_errors

LONGEST_COUNTED = 1 << 20
"""Length in tokens from which on all documents count as equally long in quantiles."""

QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
BAR = 40
"""Length of the histogram's longest bar in characters."""


@dataclass(frozen=True)
class DatasetSummary:
    """Counts of a dataset."""

    documents: int
    sequences: int
    tokens: int
    dtype: str
    shortest: int
    """Length of the shortest document in tokens."""
    longest: int
    """Length of the longest document in tokens."""
    quantiles: dict[str, int]
    """"0.5" → the median of tokens per document."""
    short_documents: int
    """Number of documents too short for a training sample."""
    histogram: list[tuple[int, int, int]]
    """Histogram rows: (lowest, highest, number of documents with a length in this range, both included)."""
    tokenizer: dict[str, Any] | None
    """Tokenizer entry of the manifest, if there is one."""
    unknown_tokens: int | None
    """Number of unknown pieces according to the manifest; None without this entry."""
    dropped_characters: int = 0
    """Number of characters that the tokenizer left out, according to the manifest; 0 without this entry."""

    def lines(self) -> Iterator[str]:
        """Yield the summary as text."""
        mean = self.tokens / max(1, self.documents)
        yield (
            f"{self.documents:,} documents, {self.sequences:,} sequences, {self.tokens:,} tokens as {self.dtype}, "
            f"{mean:,.1f} tokens per document"
        )
        made_by = "not recorded (no manifest)" if self.tokenizer is None else tokenizer_name(self.tokenizer)
        yield f"tokenizer: {made_by}"
        unknown, dropped = self.unknown_tokens, self.dropped_characters
        yield "unknown pieces: not recorded" if unknown is None else unknown_share(unknown, self.tokens, dropped)
        if unknown is not None and (warning := warn_of_unknown("this dataset", unknown, self.tokens, dropped)):
            yield warning
        if not self.documents:
            return
        shares = ", ".join(f"{float(name):.0%} {value:,}" for name, value in self.quantiles.items())
        yield f"tokens per document: shortest {self.shortest:,}, {shares}, longest {self.longest:,}"
        if self.short_documents:
            yield f"{self.short_documents:,} have fewer than {MIN_DOCUMENT_TOKENS} tokens and give no training sample"
        yield ""
        most = max(count for _, _, count in self.histogram)
        for low, high, count in self.histogram:
            span = f"{low:,}" if low == high else f"{low:,} – {high:,}"
            yield f"{span:>25}  {count:>13,}  {'█' * -(-BAR * count // most)}"


def summarize(dataset: IndexedDataset) -> DatasetSummary:
    """Count the documents of a dataset by their lengths.

    The histogram of lengths has powers of two as borders, and quantiles are exact below `LONGEST_COUNTED` tokens.
    """
    counts = np.zeros(LONGEST_COUNTED + 1, np.int64)  # documents of each length, the last entry and beyond
    bins = np.zeros(64, np.int64)  # documents of 0, 1, 2–3, 4–7, … tokens
    shortest, longest = np.iinfo(np.int64).max, 0
    for lengths in document_lengths(dataset):
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
        counts += np.bincount(np.minimum(lengths, LONGEST_COUNTED), minlength=len(counts))
        bins += np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=len(bins))
    filled = np.flatnonzero(bins)
    exponents = range(filled[0], filled[-1] + 1) if len(filled) else range(0)
    histogram = [((1 << e) >> 1, max(0, (1 << e) - 1), int(bins[e])) for e in exponents]
    below = np.cumsum(counts)
    documents, manifest = dataset.num_documents, dataset.manifest or {}
    unknown, dropped = manifest.get("unknown_tokens"), manifest.get("dropped_characters")
    ranks = [(q, min(documents - 1, int(q * documents))) for q in QUANTILES] if documents else []
    return DatasetSummary(
        documents=documents,
        sequences=len(dataset),
        tokens=dataset.num_tokens,
        dtype=dataset.dtype.name,
        shortest=shortest if documents else 0,
        longest=longest,
        quantiles={str(q): int(np.searchsorted(below, rank, side="right")) for q, rank in ranks},
        short_documents=int(below[MIN_DOCUMENT_TOKENS - 1]),
        histogram=histogram,
        tokenizer=manifest.get("tokenizer"),
        unknown_tokens=unknown if isinstance(unknown, int) else None,
        dropped_characters=dropped if isinstance(dropped, int) else 0,
    )


def first_documents(
    dataset: IndexedDataset, count: int, num_tokens: int, tokenizer: Tokenizer | None
) -> Iterator[tuple[int, int, str]]:
    """Yield (document, its tokens, its beginning) for the first documents.

    The beginning is text of at most `num_tokens` tokens, or their ids without a tokenizer.
    """
    for document in range(min(count, dataset.num_documents)):
        first, last = (int(i) for i in dataset.document_indices[document : document + 2])
        if not 0 <= first <= last <= len(dataset):
            raise UserError(f"{dataset.prefix}.idx: document {document} is [{first}, {last}): damaged; {MEND}")
        ids = dataset.get(first, count=last - first) if first < last else np.empty(0, dataset.dtype)
        size, shown = len(ids), ids[:num_tokens].tolist()
        more = " …" if size > len(shown) else ""
        if tokenizer is None:
            text = " ".join(map(str, shown)) + more
        elif foreign := [i for i in shown if not 0 <= i < tokenizer.vocab_size]:
            text = f"not of this tokenizer: id {foreign[0]}, expected 0 to {tokenizer.vocab_size - 1}"
        else:
            text = " ".join(tokenizer.decode(shown).split()) + more
        yield document, size, text


def verify(prefix: AnyPath, tokenizer: Tokenizer | None = None, advance: Advance = silent) -> Iterator[str]:
    """Yield one line per fault of a dataset: file, place, value found and value expected.

    These are the faults that would stop a reader, and those that a reader cannot detect. The index is checked alone
    (dataset_index.py), then against the .bin; then both against the manifest: counts, tokenizer, SHA-256. Ids are
    checked against `tokenizer`, otherwise against the number of pieces in the manifest, otherwise only for being
    negative. Without a SHA-256 in a manifest two faults cannot be detected: an id that changed into another valid id,
    and a border between two documents that moved without crossing another.

    Calls `advance` with the bytes of the .bin read since the last call. Raises `UserError` if there is no index.
    """
    index_path, bin_path, manifest_path = (dataset_path(prefix, suffix) for suffix in (".idx", ".bin", ".json"))
    size = file_size(index_path)
    index, manifest = None, {}
    try:
        manifest = read_manifest(prefix) or {}
    except UserError as error:
        yield str(error)
    made_by = entry(manifest, "tokenizer")
    if tokenizer is not None and (fault := _other_tokenizer(made_by, tokenizer)):
        yield f"{manifest_path}: {fault}"
    try:
        faults = list(read_header(index_path).faults(size))
        yield from (f"{index_path}: {fault}" for fault in faults)
        index = None if faults else DatasetIndex(index_path)
    except UserError as error:
        yield str(error)
    if index is not None:
        yield from (f"{index_path}: {fault}" for fault in index_faults(index))
        yield from (f"{manifest_path}: {fault}" for fault in _wrong_counts(index, manifest))
    yield from _wrong_hash(manifest, index_path)
    try:
        size = file_size(bin_path)
    except UserError as error:
        yield str(error)
        return
    if index is None:
        yield from _wrong_hash(manifest, bin_path)
        return
    yield from (f"{bin_path}: {fault}" for fault in index.faults_of_bin(size))
    vocab_size = tokenizer.vocab_size if tokenizer is not None else made_by.get("vocab_size")
    digest, known = hashlib.sha256(), vocab_size if isinstance(vocab_size, int) else None
    yield from (f"{bin_path}: {fault}" for fault in _wrong_ids(index, bin_path, known, digest, advance))
    yield from _wrong_hash(manifest, bin_path, digest.hexdigest())


def refuse_wrong_sums(
    prefix: AnyPath, manifest: Mapping[str, Any] | None, bin_sha256: str = "", advance: Advance = silent
) -> None:
    """Raise `UserError` for the first file that differs from its SHA-256 in the manifest, if the manifest has one.

    Copies need it: their new checksums would hide the damage. The .bin is read only if its SHA-256 is not given. Calls
    `advance` with the bytes read since the last call.
    """
    for path, found in ((dataset_path(prefix, ".bin"), bin_sha256), (dataset_path(prefix, ".idx"), "")):
        with refusals_as_user_errors(path, MEND):
            for fault in _wrong_hash(manifest, path, found, advance):
                raise UserError(f"{fault}; {MEND}; megatron-ddrp dataset verify tells more")


def check_sums(prefix: AnyPath, advance: Advance = silent) -> None:
    """Compare `PREFIX.bin` and `PREFIX.idx` with the SHA-256 in the manifest.

    Raises `UserError` for the first file that differs, and with exit code 2 if the manifest is missing or has no sums.
    Calls `advance` with the bytes read since the last call.
    """
    manifest = read_manifest(prefix)
    paths = [dataset_path(prefix, suffix) for suffix in (".bin", ".idx")]
    if None in [recorded_sum(manifest, path.suffix) for path in paths]:
        reason = "there is no such file" if manifest is None else "it holds no SHA-256"
        raise UserError(
            f"--verify-data needs the sums in {dataset_path(prefix, '.json')}, but {reason}; leave the flag out, or "
            "preprocess again",
            WRONG_ARGUMENTS,
        )
    for path in paths:
        file_size(path)
    refuse_wrong_sums(prefix, manifest, advance=advance)


def open_dataset(prefix: str, tokenizer: Tokenizer) -> IndexedDataset:
    """Open a dataset. Raises `UserError` if its manifest, or without one its beginning, is of another tokenizer."""
    check_tokenizer(prefix, tokenizer)
    dataset = IndexedDataset(prefix)
    if dataset.manifest is None:
        check_ids(prefix, next(dataset.chunks(), ()), tokenizer.vocab_size)
    return dataset


def check_ids(prefix: str, ids: ArrayLike, vocab_size: int) -> None:
    """Refuse ids of a dataset outside the vocabulary, wherever they are read."""
    found = np.asarray(ids)
    if found.size and (found.min() < 0 or found.max() >= vocab_size):
        raise UserError(
            f"{prefix}: token ids from {found.min()} to {found.max()}, but the vocabulary has {vocab_size} pieces; "
            "give the vocabulary that the dataset was preprocessed with, or preprocess again"
        )


def check_tokenizer(prefix: AnyPath, tokenizer: Tokenizer) -> None:
    """Refuse a dataset of another tokenizer, by the fingerprint in its manifest.

    A dataset without a manifest is accepted; its readers still refuse ids outside the vocabulary.
    """
    if fault := _other_tokenizer(entry(read_manifest(prefix), "tokenizer"), tokenizer):
        raise UserError(
            f"{dataset_path(prefix, '.json')}: the dataset was {fault}; give the vocabulary and --tokenizer-type that "
            "it was preprocessed with, or preprocess again"
        )


def _other_tokenizer(made_by: dict[str, Any], tokenizer: Tokenizer) -> str | None:
    if made_by.get("fingerprint") in (None, tokenizer.fingerprint):
        return None
    given = tokenizer_name(tokenizer_entry(tokenizer))
    return f"made by tokenizer {tokenizer_name(made_by)}, but the tokenizer given is {given}"


def _wrong_ids(index: DatasetIndex, path: Path, vocab_size: int | None, digest: Any, advance: Advance) -> Iterator[str]:
    """Yield lines about ids outside the vocabulary; afterwards `digest` covers every byte of `PREFIX.bin`.

    Calls `advance` with the bytes read since the last call.
    """
    width, most = index.dtype.itemsize, np.iinfo(np.int64).max if vocab_size is None else vocab_size - 1
    expected = "expected none below 0" if vocab_size is None else f"expected 0 to {most}"

    def places_and_ids() -> Iterator[np.ndarray]:  # [ids, 2] each
        begin = 0
        for chunk in token_chunks(path, index.dtype):
            digest.update(chunk.data)
            if int(chunk.min()) < 0 or int(chunk.max()) > most:
                places = np.flatnonzero((chunk < 0) | (chunk > most))
                yield np.stack([begin + places, chunk[places].astype(np.int64)], axis=1)
            begin += len(chunk)
            advance(chunk.nbytes)

    def words(place_and_id: np.ndarray) -> str:
        place, token = place_and_id.tolist()
        # bisect reads a few of the pointers; numpy would copy all of them.
        sequence = bisect_right(index.pointers, place * width) - 1
        inside = "" if sequence < 0 else f" (of sequence {sequence})"
        return f"token {place}{inside} is id {token}, {expected}"

    yield from first_faults("ids outside the vocabulary", places_and_ids(), words)
    if rest := file_size(path) % width:
        with open(path, "rb") as stream:
            stream.seek(-rest, os.SEEK_END)
            digest.update(stream.read())


def _wrong_counts(index: DatasetIndex, manifest: dict[str, Any]) -> Iterator[str]:
    found: dict[str, Any] = {
        "documents": len(index.document_indices) - 1,
        "sequences": len(index),
        "tokens": index.bin_bytes // index.dtype.itemsize,
        "dtype": index.dtype.name,
    }
    for key, value in found.items():
        if manifest.get(key, value) != value:
            yield f"{key} {manifest[key]}, but the index says {value}"


def _wrong_hash(
    manifest: Mapping[str, Any] | None, path: Path, found: str = "", advance: Advance = silent
) -> Iterator[str]:
    """Yield one line if a file differs from its SHA-256 in the manifest; the file is read if `found` is not given."""
    expected = recorded_sum(manifest, path.suffix)
    if expected is not None and (found := found or file_sha256(path, advance)) != expected:
        recorded = f"but {path.with_suffix('.json')} says {str(expected)[:12]}…"
        yield f"{path}: SHA-256 {found[:12]}…, {recorded}: damaged, or changed since then"
