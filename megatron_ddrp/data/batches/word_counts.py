"""The counting pass of Taking Notes on the Fly: the number of occurrences of each word in the training text.

The pass reads the token ids in memory-mapped chunks and takes about 40 bytes per different word, for any length of
text. The result is cached beside the data, in a file whose name has a fingerprint of the data, the tokenizer and the
bounds. The first process that needs it counts, under a lock; the others wait for its file. The arrays of a .npz file
carry sums, one of them is the file's name, and equal words give equal bytes: a damaged or foreign file is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_ddrp.data.atomic import AnyPath, BeingWritten, atomic_file, take_lock
from megatron_ddrp.data.batches.rare_words import RareWords, WordFinder
from megatron_ddrp.data.dataset.dataset_index import dataset_path
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.data.dataset.verification import check_ids
from megatron_ddrp.data.progress import progress
from megatron_ddrp.data.sealed import Advance, silent
from megatron_ddrp.data.tokenizers.spelling import BEGIN
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import reading

Part = tuple[IndexedDataset, tuple[int, int]]
"""A dataset and the counted range of its documents."""

_CHUNK_TOKENS = 1 << 22
_MERGE_WORDS = 1 << 23
_FORMAT = 1


_WORD = np.dtype([(name, np.int64) for name in ("count", "sequence", "offset", "size")] + [("hash", np.uint64)])
"""A word: its hash, its count and the place of one of its occurrences."""


def _merge_words(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the different words of all parts `[words]`, sorted by hash, with summed counts."""
    words = np.concatenate(parts)
    _, first, inverse = np.unique(words["hash"], return_index=True, return_inverse=True)
    merged = words[first]
    merged["count"] = np.bincount(inverse, weights=words["count"], minlength=len(first))
    return merged


def count_rare_words(
    parts: Sequence[Part], finder: WordFinder, bounds: tuple[int, int], advance: Advance = silent
) -> RareWords:
    """Return the words that occur at least `bounds[0]` and at most `bounds[1]` times in all parts together.

    Calls `advance` with the number of tokens read since the last call. Raises `UserError` for an id outside the
    vocabulary.
    """
    single = np.zeros(finder.vocab_size, np.int64)  # words of one piece, the most frequent kind, are counted by it
    known, fresh, waiting = np.empty(0, _WORD), [], 0
    for sequences, begins, ids in _chunks(parts, finder.vocab_size):
        row_begins = np.zeros(len(ids), bool)
        row_begins[begins] = True
        first, sizes = finder.words(ids, row_begins)
        single += np.bincount(ids[first[sizes == 1]], minlength=len(single))
        first, sizes = first[sizes > 1], sizes[sizes > 1]
        row = np.searchsorted(begins, first, side="right") - 1
        words = np.ones(len(first), _WORD)
        words["hash"], words["size"] = finder.hashes(ids, first, sizes), sizes
        words["sequence"], words["offset"] = sequences[row], first - begins[row]
        fresh.append(_merge_words([words]))
        waiting += len(fresh[-1])
        if waiting > max(_MERGE_WORDS, len(known)):
            known, fresh, waiting = _merge_words([known, *fresh]), [], 0
        advance(len(ids))
    known = _merge_words([known, *fresh])
    known = known[(known["count"] >= bounds[0]) & (known["count"] <= bounds[1])]
    pieces = np.flatnonzero((single >= bounds[0]) & (single <= bounds[1]))
    words_of_one = finder.hashes(pieces, np.arange(len(pieces)), np.ones_like(pieces))
    hashes = np.concatenate([known["hash"], words_of_one])
    counts = np.concatenate([known["count"], single[pieces]])
    spelled = [*_read_pieces(known, parts), *pieces[:, None]]
    order = np.argsort(hashes)
    flat = np.concatenate([np.empty(0, np.int64), *(spelled[word] for word in order.tolist())])
    return RareWords(hashes[order], counts[order], flat, np.cumsum([len(spelled[word]) for word in order.tolist()]))


def _read_pieces(words: np.ndarray, parts: Sequence[Part]) -> Iterator[NDArray[np.int64]]:
    """Yield the piece ids of each word, read at its place."""
    firsts = np.cumsum([0, *(len(dataset) for dataset, _ in parts)])  # number of the first sequence of each part
    for word in words:
        part = int(np.searchsorted(firsts, word["sequence"], side="right")) - 1
        sequence = int(word["sequence"] - firsts[part])
        yield parts[part][0].get(sequence, int(word["offset"]), int(word["size"])).astype(np.int64)


def _chunks(
    parts: Sequence[Part], vocab_size: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the numbers of some non-empty sequences, the begin of each, and their concatenated ids."""
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
                begins, ids = np.cumsum([0, *map(len, rows[:-1])]), np.concatenate(rows).astype(np.int64)
                check_ids(dataset.prefix, ids, vocab_size)
                yield np.array(numbers), begins, ids
                numbers, rows, tokens = [], [], 0
        base += len(dataset)


def open_rare_words(
    parts: Sequence[Part],
    tokenizer: Tokenizer,
    bounds: tuple[int, int],
    folder: AnyPath | None = None,
    keep: bool = True,
) -> tuple[RareWords, str]:
    """Return (the rare words of a corpus, one line about them), read from the cache, or counted and cached.

    The cache lies in `folder`, by default beside the first dataset. If that folder cannot be written to, the words are
    counted at every start. A damaged cache is made again, with a line on standard error. Without `keep` nothing is
    written. Raises `UserError` for a named `folder` that cannot be written to, and if no word lies in the bounds.
    """
    index = dataset_path(parts[0][0].prefix, ".idx")
    path = Path(folder or index.parent) / f"{index.stem}.{_fingerprint(parts, tokenizer, bounds)}.words.npz"
    with _one_at_a_time(index):
        cached, kept = _read_words(path), f"as counted in {path}"
        if cached is not None:
            words = cached
        else:
            total = sum(
                int(dataset.sizes[dataset.document_indices[low] : dataset.document_indices[high]].sum(dtype=np.int64))
                for dataset, (low, high) in parts
            )
            with progress("token", total, "counting words", scale=True) as bar:
                words = count_rare_words(parts, WordFinder(tokenizer), bounds, bar.update)
            kept = f"to be counted into {path}"
            if keep:
                refused = _write_words(path, words, mode=index.stat().st_mode & 0o666)  # the data's rights
                kept = f"counted into {path}"
                if refused and folder is not None:
                    reason = f"cannot be written: {refused}; give a folder that can be"
                    raise UserError(f"--index-cache-dir {folder}: {reason}")
                if refused:
                    reason = f"{path.parent} cannot be written ({refused})"
                    kept = f"counted at every start, as {reason}; --index-cache-dir DIR keeps them"
    if not len(words):
        raise UserError(
            f"--notes-min-count {bounds[0]} and --notes-max-count {bounds[1]}: the training text holds no word so "
            "often; choose wider bounds, or leave --notes out"
        )
    return words, f"{len(words):,} words that stand {bounds[0]:,} to {bounds[1]:,} times in the training text, {kept}"


def _read_words(path: Path) -> RareWords | None:
    """Return the words in a cache file; None if there is none, or a damaged one, which a line names."""
    if not path.exists():
        return None
    try:
        with reading(path):
            if not path.is_file():  # a pipe or a device may have no end
                raise ValueError("no file")
            content = path.read_bytes()
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                words = RareWords(**{key: arrays[key] for key in arrays if key != "name"})
            if _packed(path, words) != content:
                raise ValueError("changed")
            return words
    except UserError:
        print(f"{path}: damaged, or from an earlier version; the words are counted again", file=sys.stderr)
        return None


def _write_words(path: Path, words: RareWords, mode: int) -> str:
    """Write a cache file, whole or not at all; return the reason why its folder cannot be written to, or nothing."""
    try:
        with atomic_file(path, mode) as file:
            file.write(_packed(path, words))
    except (BeingWritten, FileNotFoundError):  # another node, whose locks are not ours, writes the same content
        return ""
    except (OSError, UserError) as error:
        cause = error.__cause__ or error
        return str(cause.strerror if isinstance(cause, OSError) else cause)
    return ""


def _packed(path: Path, words: RareWords) -> bytes:
    """Return the content of the cache file `path`."""
    stream = io.BytesIO()
    np.savez(stream, name=np.array(path.name), **vars(words))
    return stream.getvalue()


def _fingerprint(parts: Sequence[Part], tokenizer: Tokenizer, bounds: tuple[int, int]) -> str:
    """Return a hash of a corpus, its tokenizer and the bounds."""
    identity = [
        [Path(dataset.prefix).name, len(dataset), dataset.num_tokens, dataset.sample_digest, *documents]
        for dataset, documents in parts
    ]
    side = [tokenizer.word_side] * (tokenizer.word_side != BEGIN)  # earlier versions knew words by their begins only
    key = json.dumps([_FORMAT, identity, tokenizer.fingerprint, bounds, *side])
    return hashlib.sha256(key.encode()).hexdigest()[:16]


@contextlib.contextmanager
def _one_at_a_time(file: Path) -> Iterator[None]:
    """Admit one process of this machine at a time, if the file system supports locks; write nothing."""
    with file.open("rb") as stream:
        with contextlib.suppress(OSError):
            take_lock(stream.fileno(), wait=True)
        yield
