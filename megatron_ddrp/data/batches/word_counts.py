"""The counting pass of Taking Notes on the Fly: how often each word stands in the training text, cached beside it.

A pass over the token ids in memory-mapped chunks holds about 40 bytes per different word, however long the text. The
result is stored (cache_file.py) under a fingerprint of the data, the tokenizer and the bounds; the first process that
needs it counts, under a lock, while others wait for its file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_ddrp.data.batches.cache_file import CacheFile
from megatron_ddrp.data.batches.rare_words import RareWords, WordFinder
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset, dataset_path
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import UserError

Part = tuple[IndexedDataset, tuple[int, int]]
"""A dataset and the range of its documents that are counted."""

_CHUNK_TOKENS = 1 << 22
_MERGE_WORDS = 1 << 23
_FORMAT = 1


@dataclass(frozen=True)
class _Counts:
    """Different words, `[words]` each: hash, count, and where one of them stands."""

    hashes: NDArray[np.uint64]
    counts: NDArray[np.int64]
    sequences: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @classmethod
    def merged(cls, parts: Sequence[_Counts]) -> _Counts:
        """All parts as one, sorted by hash."""
        hashes, counts, sequences, offsets, sizes = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("hashes", "counts", "sequences", "offsets", "sizes")
        )
        unique, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        total = np.bincount(inverse, weights=counts, minlength=len(unique)).astype(np.int64)
        return cls(unique, total, sequences[first], offsets[first], sizes[first])


def count_rare_words(
    parts: Sequence[Part],
    finder: WordFinder,
    bounds: tuple[int, int],
    progress: Callable[[int], object] = lambda tokens: None,
) -> RareWords:
    """The words that the parts together hold at least `bounds[0]` and at most `bounds[1]` times.

    `progress` is told how many tokens were read since it was last called.
    """
    nothing = np.empty(0, np.int64)
    single = np.zeros(finder.vocab_size, np.int64)  # words of one piece, most of all, are counted by it
    known = _Counts(nothing.astype(np.uint64), nothing, nothing, nothing, nothing)
    fresh: list[_Counts] = []
    waiting = 0
    for sequences, begins, ids in _chunks(parts):
        row_begins = np.zeros(len(ids), bool)
        row_begins[begins] = True
        first, sizes = finder.words(ids, row_begins)
        single += np.bincount(ids[first[sizes == 1]], minlength=len(single))
        first, sizes = first[sizes > 1], sizes[sizes > 1]
        row = np.searchsorted(begins, first, side="right") - 1
        chunk = _Counts(
            finder.hashes(ids, first, sizes), np.ones_like(first), sequences[row], first - begins[row], sizes
        )
        fresh.append(_Counts.merged([chunk]))
        waiting += len(fresh[-1].hashes)
        if waiting > max(_MERGE_WORDS, len(known.hashes)):
            known, fresh, waiting = _Counts.merged([known, *fresh]), [], 0
        progress(len(ids))
    known = _Counts.merged([known, *fresh])
    rare = np.flatnonzero((known.counts >= bounds[0]) & (known.counts <= bounds[1]))
    firsts = np.cumsum([0, *(len(dataset) for dataset, _ in parts)])  # first number of each part's sequences
    words: list[NDArray[np.int64]] = []
    for word in rare.tolist():
        part = int(np.searchsorted(firsts, known.sequences[word], side="right")) - 1
        sequence = int(known.sequences[word] - firsts[part])
        words.append(parts[part][0].get(sequence, int(known.offsets[word]), int(known.sizes[word])).astype(np.int64))
    pieces = np.flatnonzero((single >= bounds[0]) & (single <= bounds[1]))
    words += list(pieces[:, None])
    hashes = np.concatenate([known.hashes[rare], finder.hashes(pieces, np.arange(len(pieces)), np.ones_like(pieces))])
    counts = np.concatenate([known.counts[rare], single[pieces]])
    order = np.argsort(hashes)
    flat = np.concatenate([nothing, *(words[word] for word in order.tolist())])
    return RareWords(hashes[order], counts[order], flat, np.cumsum([len(words[word]) for word in order.tolist()]))


def _chunks(parts: Sequence[Part]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Numbers of some non-empty sequences, where each begins, and their ids laid end to end."""
    base = 0
    for dataset, (low, high) in parts:
        numbers: list[int] = []
        rows: list[np.ndarray] = []
        tokens = 0
        last = int(dataset.document_indices[high])
        for sequence in range(int(dataset.document_indices[low]), last):
            row = dataset[sequence]
            if len(row):
                numbers.append(base + sequence)
                rows.append(row)
                tokens += len(row)
            if rows and (tokens >= _CHUNK_TOKENS or sequence == last - 1):
                begins = np.cumsum([0, *(len(row) for row in rows[:-1])])
                yield np.array(numbers), begins, np.concatenate(rows).astype(np.int64)
                numbers, rows, tokens = [], [], 0
        base += len(dataset)


def open_rare_words(
    parts: Sequence[Part],
    tokenizer: Tokenizer,
    bounds: tuple[int, int],
    folder: str | Path | None = None,
    keep: bool = True,
) -> tuple[RareWords, str]:
    """Return (the rare words of a corpus, one line about them): read from the cache, else counted and put there.

    The cache lies in `folder`, by default beside the first dataset; where that cannot be written, the words are counted
    at every start. A damaged cache is counted again, with a line on standard error. Without `keep` nothing is written.
    Raises `UserError` for a named `folder` that cannot be written, and where no word lies in the bounds.
    """
    cache = _cache(parts, tokenizer, bounds, folder)
    with _one_at_a_time(dataset_path(parts[0][0].prefix, ".idx")):
        words, kept = cache.load(_read), f"as counted in {cache.path}"
        if cache.damaged:
            print(f"{cache.path}: damaged, or of an earlier version; the words are counted again", file=sys.stderr)
        if words is None:
            words, kept = _count_with_bar(parts, tokenizer, bounds), f"to be counted into {cache.path}"
            if keep:
                refused = cache.write(_packed(words))
                kept = f"counted into {cache.path}"
                if refused:
                    kept = f"counted at every start, as {refused}; --index-cache-dir DIR keeps them"
    if not len(words):
        raise UserError(
            f"--notes-min-count {bounds[0]} and --notes-max-count {bounds[1]}: the training text holds no word so "
            "often; choose wider bounds, or leave --notes out"
        )
    return words, f"{len(words):,} words that stand {bounds[0]:,} to {bounds[1]:,} times in the training text, {kept}"


def _cache(
    parts: Sequence[Part], tokenizer: Tokenizer, bounds: tuple[int, int], folder: str | Path | None
) -> CacheFile:
    """Return the file of this corpus, tokenizer and bounds; another corpus has another name."""
    identity = [
        [Path(dataset.prefix).name, len(dataset), dataset.num_tokens, _sample_digest(dataset), *documents]
        for dataset, documents in parts
    ]
    key = json.dumps([_FORMAT, identity, tokenizer.fingerprint, bounds])
    return CacheFile(parts[0][0], hashlib.sha256(key.encode()).hexdigest()[:16], "words.npz", folder)


def _sample_digest(dataset: IndexedDataset) -> str:
    """Hash up to 64 sequences, evenly spread: tells apart datasets whose counts agree by chance."""
    digest = hashlib.sha256()
    for sequence in np.unique(np.linspace(0, max(0, len(dataset) - 1), 64).astype(int)) if len(dataset) else ():
        digest.update(np.ascontiguousarray(dataset[int(sequence)]).tobytes())
    return digest.hexdigest()


def _count_with_bar(parts: Sequence[Part], tokenizer: Tokenizer, bounds: tuple[int, int]) -> RareWords:
    finder = WordFinder(tokenizer.word_starts, tokenizer.special_ids)
    total = sum(
        int(dataset.sizes[dataset.document_indices[low] : dataset.document_indices[high]].sum(dtype=np.int64))
        for dataset, (low, high) in parts
    )
    with tqdm(total=total, desc="counting words", unit="token", unit_scale=True, file=sys.stderr) as bar:
        return count_rare_words(parts, finder, bounds, bar.update)


def _packed(words: RareWords) -> bytes:
    content = io.BytesIO()
    np.savez(content, hashes=words.hashes, counts=words.counts, pieces=words.pieces, ends=words.ends)
    return content.getvalue()


def _read(path: Path) -> RareWords:
    with np.load(path) as arrays:
        return RareWords(arrays["hashes"], arrays["counts"], arrays["pieces"], arrays["ends"])


@contextlib.contextmanager
def _one_at_a_time(file: Path) -> Iterator[None]:
    """Let one process of this machine at a time in, as far as the file system can lock; writes nothing."""
    with file.open("rb") as stream:
        with contextlib.suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
