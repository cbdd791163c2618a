"""Counts of words and pieces of a corpus: rare words for Taking Notes on the Fly, and the unigram level of a text.

Frequencies of pieces also show whether the validation text is of the same kind as the training text.
"""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import io
import json
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron_ddrp.data.atomic import Advance, AnyPath, BeingWritten, atomic_file, silent, take_lock
from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.data.batches.loader import Blend
from megatron_ddrp.data.batches.samples import SampleIndex
from megatron_ddrp.data.dataset.dataset_index import dataset_path
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset, recorded_sum
from megatron_ddrp.data.dataset.verification import check_ids
from megatron_ddrp.data.progress import progress
from megatron_ddrp.data.randomness import Bools, Hashes, Ints, fold_in, hash_uint64
from megatron_ddrp.data.tokenizers.tokenizer import BEGIN, Tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import reading


@dataclass(frozen=True)
class RareWords:
    """Rare words of a corpus, for Taking Notes on the Fly (Wu et al., arXiv:2008.01466).

    Word number i, from 1, has row i − 1 in every table; 0 means no word. Words are identified by a 64-bit hash of their
    pieces, so a look-up is a binary search.
    """

    hashes: Hashes
    """Hashes `[words]`, ascending."""
    counts: Ints
    """Occurrences of each word in the corpus, `[words]`."""
    pieces: Ints
    """Piece ids of all words, one word after another."""
    ends: Ints
    """End of each word in `pieces`, `[words]`."""

    def __len__(self) -> int:
        return len(self.hashes)

    def word(self, number: int) -> list[int]:
        """Return the piece ids of word `number`, from 1."""
        begin = int(self.ends[number - 2]) if number > 1 else 0
        return self.pieces[begin : int(self.ends[number - 1])].tolist()

    def find(self, hashes: Hashes) -> Ints:
        """Return the number of each word by its hash, 0 if it is not rare, in the shape of `hashes`."""
        row = np.searchsorted(self.hashes, hashes)
        found = self.hashes[np.minimum(row, len(self) - 1)] == hashes
        return np.where(found, row + 1, 0)


class WordFinder:
    """Finder of whole words in rows of piece ids.

    A word is the piece that starts it and the pieces that continue it, as in whole-word masking, in every vocabulary;
    it may be a single piece. The tokenizer's special pieces, such as [UNK], are in no word and end the word before
    them. A word that a sample's end cuts in two is not found: its first half may be another word. The tokenizer's
    `word_ends` are False everywhere in a vocabulary that does not mark the ends of words.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocab_size = len(tokenizer.word_starts)
        self._ordinary = np.ones(self.vocab_size, bool)
        self._ordinary[tokenizer.special_ids] = False
        self._starts = tokenizer.word_starts & self._ordinary
        self._ends = tokenizer.word_ends if tokenizer.word_ends.any() else None
        self._keys = hash_uint64(0, "word-piece", np.arange(self.vocab_size))  # [vocab]

    def words(self, ids: np.ndarray, row_begins: Bools) -> tuple[Ints, Ints]:
        """Return first place and size of each whole word of flat `ids` `[tokens]`; `row_begins` marks begins of rows.

        Skips words that begin with a continuation piece, or, where the ends of words are marked, those without an end
        before them or at their own last piece. Skips special pieces, which end the word before them.
        """
        ordinary = self._ordinary[ids]
        boundary = row_begins | self._starts[ids] | ~ordinary
        boundary[1:] |= ~ordinary[:-1]
        begins = self._starts[ids]
        if self._ends is not None:
            ends = self._ends[ids]
            begins = row_begins & ordinary
            begins[1:] |= ends[:-1] & ordinary[1:]
            boundary |= begins
        first = np.flatnonzero(boundary)
        sizes = np.diff(first, append=len(ids))
        whole = begins[first]
        if self._ends is not None:
            whole &= ends[first + sizes - 1]
        return first[whole], sizes[whole]

    def hashes(self, ids: np.ndarray, first: Ints, sizes: Ints) -> Hashes:
        """Return the hash of each word of flat `ids`; `first`, `sizes` `[words]`."""
        hashes = self._keys[ids[first]]
        for place in range(1, int(sizes.max(initial=1))):  # fold in the second piece of each word, then the third, …
            longer = np.flatnonzero(sizes > place)
            hashes[longer] = fold_in(hashes[longer], ids[first[longer] + place])
        return hashes

    def number(self, rare: RareWords, input_ids: Ints, whole_rows: Bools) -> Ints:
        """Return `note_ids` for unmasked rows `[rows, seq]`: w at the first piece of rare word w, −w at its others.

        `whole_rows` `[rows]` is False if the text continues after the row's [SEP]: the last word may be cut in two.
        """
        begins = np.zeros(input_ids.shape, bool)
        begins[:, :1] = True
        flat = input_ids.ravel()
        first, sizes = self.words(flat, begins.ravel())
        numbers = rare.find(self.hashes(flat, first, sizes))
        rows, columns = np.divmod(first + sizes, input_ids.shape[1])
        uncut = whole_rows[np.minimum(rows, len(whole_rows) - 1)] | (columns != input_ids.shape[1] - 1)
        chosen = (numbers > 0) & uncut
        note_ids = np.zeros_like(flat)
        first, sizes, numbers = first[chosen], sizes[chosen], numbers[chosen]
        for place in range(int(sizes.max(initial=0))):
            longer = sizes > place
            note_ids[first[longer] + place] = numbers[longer] if place == 0 else -numbers[longer]
        return note_ids.reshape(input_ids.shape)


@dataclass(frozen=True)
class Occurrences:
    """Occurrences of rare words in a micro-batch, `n` in total; places are flat, row · seq + column."""

    words: Ints
    """`[n]`."""
    sequence_ids: Ints
    """Sample of each occurrence `[n]`, see `Batch`; with `position_ids` it identifies the occurrence."""
    position_ids: Ints
    """Position of the word's first piece, `[n]`."""
    windows: Ints
    """Begin and end (exclusive) of the tokens whose states make the note, inside the word's document, `[n, 2]`."""
    read_places: Ints
    """Pieces that may read a note, those of words without a predicted piece, `[m]`."""
    read_words: Ints
    """Word of each of these pieces, `[m]`."""


def find_occurrences(batch: Batch, window: int) -> Occurrences:
    """Return the occurrences that `note_ids` marks in a batch `[batch, seq]`, with `window` tokens on either side."""
    notes, labels, documents = (
        np.asarray(field).ravel() for field in (batch.note_ids, batch.labels, batch.document_ids)
    )
    first = np.flatnonzero(notes > 0)  # [n]
    in_word = notes != 0
    occurrence = np.cumsum(notes > 0) - 1  # of each place in a word
    sizes = np.bincount(occurrence[in_word], minlength=len(first))
    predicted = np.bincount(occurrence[in_word & (labels != IGNORED_LABEL)], minlength=len(first)) > 0
    rows = np.arange(len(notes)) // batch.note_ids.shape[1]
    changes = (np.diff(documents) != 0) | (np.diff(rows) != 0)
    bounds = np.concatenate([[0], np.flatnonzero(changes) + 1, [len(notes)]])  # of documents and rows
    document = np.searchsorted(bounds, first, side="right")  # [n]
    begin = np.maximum(first - window, bounds[document - 1])
    end = np.minimum(first + sizes + window, bounds[np.minimum(document, len(bounds) - 1)])
    read_places = np.flatnonzero(in_word)
    read_places = read_places[~predicted[occurrence[read_places]]]
    return Occurrences(
        words=notes[first],
        sequence_ids=batch.sequence_ids.ravel()[first],
        position_ids=batch.position_ids.ravel()[first],
        windows=np.stack([begin, end], axis=1).astype(np.int64),
        read_places=read_places,
        read_words=np.abs(notes[read_places]),
    )


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

    The pass reads the token ids in memory-mapped chunks and takes about 40 bytes per different word, for any length of
    text. Calls `advance` with the number of tokens read since the last call. Raises `UserError` for an id outside the
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


def _read_pieces(words: np.ndarray, parts: Sequence[Part]) -> Iterator[Ints]:
    """Yield the piece ids of each word, read at its place."""
    firsts = np.cumsum([0, *(len(dataset) for dataset, _ in parts)])  # number of the first sequence of each part
    for word in words:
        part = int(np.searchsorted(firsts, word["sequence"], side="right")) - 1
        sequence = int(word["sequence"] - firsts[part])
        yield parts[part][0].get(sequence, int(word["offset"]), int(word["size"])).astype(np.int64)


def _chunks(parts: Sequence[Part], vocab_size: int) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yield the numbers of some non-empty sequences, the begin of each, and their concatenated ids."""
    base = 0
    for dataset, (low, high) in parts:
        first, last = (int(dataset.document_indices[document]) for document in (low, high))
        while first < last:
            most = int(dataset.pointers[first]) + _CHUNK_TOKENS * dataset.dtype.itemsize
            behind = max(first + 1, bisect_left(dataset.pointers, most, first, last))
            ids, sizes = dataset.get(first, count=behind - first).astype(np.int64), dataset.sizes[first:behind]
            check_ids(dataset.prefix, ids, vocab_size)
            if filled := np.flatnonzero(sizes).tolist():
                yield base + first + np.array(filled), (np.cumsum(sizes, dtype=np.int64) - sizes)[filled], ids
            first = behind
        base += len(dataset)


def open_rare_words(
    parts: Sequence[Part],
    tokenizer: Tokenizer,
    bounds: tuple[int, int],
    folder: AnyPath | None = None,
    keep: bool = True,
) -> tuple[RareWords, str]:
    """Return (the rare words of a corpus, one line about them), read from the cache, or counted and cached.

    The cache lies in `folder`, by default beside the first dataset; its name has a fingerprint of the data, the
    tokenizer and the bounds. The first process that needs it counts, under a lock; the others wait for its file. The
    arrays of the .npz file carry sums, one array is the file's name, and equal words give equal bytes: a damaged or
    foreign file is made again, with a line on standard error. If the folder cannot be written to, the words are counted
    at every start. Without `keep` nothing is written. Raises `UserError` for a named `folder` that cannot be written
    to, and if no word lies in the bounds.
    """
    index = dataset_path(parts[0][0].prefix, ".idx")
    path = Path(folder or index.parent) / f"{index.stem}.{_fingerprint(parts, tokenizer, bounds)}.words.npz"
    with _one_at_a_time(index):
        words, kept = _read_words(path), f"as counted in {path}"
        if words is None:
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


MOST_TOKENS = 2_000_000
"""Number of tokens from which the unigram level is counted; it is lower by vocabulary / 4 M nats than that of all."""
LEVEL_ROW = 128
"""Row length of the samples that are counted, whatever `--seq-length` is: the level is one of the text."""
SAMPLES = 256
"""Number of samples read for each frequency; with 128 tokens each, the shift is known to about 0.02 nats."""
STRETCHES = 5
"""Number of stretches of the training text whose shift is measured."""
MIN_DOCUMENTS = 20
"""Fewest validation documents that can be of another kind: fewer than these differ by their topics."""
MIN_SHIFT, MIN_RATIO = 0.2, 2.0
"""Smallest shift that gives a line, in nats per piece and in units of the usual one."""
NAMED_INPUTS = 3
"""Number of input files that the line about shared ones names."""

Inputs = dict[tuple[str, Any], str]
"""SHA-256 and JSON key of input files → their names."""


def unigram_loss(samples: Blend, never_predicted: ArrayLike, seq_length: int) -> float:
    """Return the unigram level of a text: the entropy in nats of its pieces.

    It is the loss of a model that knows the frequencies of pieces and nothing else (`run/metrics.py`). Samples are read
    in the shares in which training reads its corpora. The ids in `never_predicted` do not count. No sample is longer
    than `seq_length`. The samples are the same for every `--seed`, and are as many as have `MOST_TOKENS` tokens.
    """
    read: list[np.ndarray] = []
    step = max(1, MOST_TOKENS // seq_length)
    while sum(map(len, read)) < MOST_TOKENS and len(read) * step < len(samples):
        places = np.arange(len(read) * step, min((len(read) + 1) * step, len(samples)))
        read.append(np.concatenate(samples.tokens(samples.visits(places, 0)[1])))
    pieces, counts = np.unique(np.concatenate(read)[:MOST_TOKENS], return_counts=True)
    return entropy(counts[~np.isin(pieces, never_predicted)])


def entropy(counts: Ints) -> float:
    """Return the entropy in nats of pieces that occur so often, `[pieces]`."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def split_shift(training: SampleIndex, validation: SampleIndex) -> float | None:
    """Return the shift of a dataset's validation part from its training part in nats per piece; None for a few texts.

    From `MIN_SHIFT` on the validation loss is one on another kind of text than the training text.
    """
    if min(len(training), validation.num_documents - validation.num_dropped_documents) < MIN_DOCUMENTS:
        return None
    return shift_of(validation, 0, len(validation), training)


def split_remark(training: SampleIndex, validation: SampleIndex, shift: float | None) -> str | None:
    """Return a line for the user if the validation part of a dataset is of another kind than its training part.

    `shift` is their `split_shift`. `--split` divides documents in order, so the validation text may be of another kind
    than the training text, or a part of it.
    """
    if shift is None or shift < MIN_SHIFT or shift < MIN_RATIO * (usual := usual_shift(training, len(validation))):
        return None
    return (
        f"{training.prefix}: the validation text is of another kind than the training text (its piece frequencies are "
        f"off by {shift:.2f} nats per piece; {max(usual, 0):.2f} is usual within the training text), as --split "
        "divides documents in order: shuffle them by megatron-ddrp dataset shuffle, or blend one dataset per kind"
    )


def shared_remarks(training: Sequence[IndexedDataset], validation: Sequence[IndexedDataset]) -> list[str]:
    """Return a line for the user for each validation dataset that is trained on, under whatever name, or in part."""
    lines = []
    for dataset in dict.fromkeys(validation):
        for other in training:
            if told := _shared(other, dataset):
                lines.append(f"{dataset.prefix}: {told}: give other validation data, or --data-path with --split")
                break
    return lines


def _shared(training: IndexedDataset, validation: IndexedDataset) -> str:
    """Return what two datasets have in common; empty if it is nothing."""
    if training.prefix == validation.prefix:
        return "both training and validation data, so the validation loss is that of text trained on"
    if _is_copy(training, validation):
        return f"the same data as {training.prefix}, so the validation loss is that of text trained on"
    if common := _in_common(_inputs(validation), _inputs(training), training.prefix):
        return f"{common}, so the validation loss is partly that of text trained on"
    return ""


def overlap_remarks(datasets: Sequence[IndexedDataset]) -> list[str]:
    """Return a line for each two datasets of one split that have input files in common.

    Copies are no fault: the split divides them at the same documents.
    """
    inputs = {each.prefix: _inputs(each) for each in datasets}
    return [
        f"{one.prefix}: {common}, and --split divides each on its own, so the validation text of one is partly trained "
        "on in the other: give each file to one dataset alone"
        for one, other in combinations(datasets, 2)
        if (common := _in_common(inputs[one.prefix], inputs[other.prefix], other.prefix)) and not _is_copy(one, other)
    ]


def _in_common(inputs: Inputs, others: Inputs, prefix: str) -> str:
    """Return how many input files are also among the `others` of the dataset `prefix`, in words; empty if none is."""
    both = [name for text, name in inputs.items() if text in others]
    some = ", ".join(both[:NAMED_INPUTS]) + ", …" * (len(both) > NAMED_INPUTS)
    verb = "are" if len(both) > 1 else "is"
    return f"{len(both)} of its {len(inputs)} input files ({some}) {verb} also in {prefix}" if both else ""


def _is_copy(one: IndexedDataset, other: IndexedDataset) -> bool:
    """Return whether two datasets have equal tokens: by the SHA-256 in both manifests, else by comparing the files."""
    files = [(dataset_path(one.prefix, suffix), dataset_path(other.prefix, suffix)) for suffix in (".idx", ".bin")]
    if any(first.samefile(second) for first, second in files):
        return True
    sums = [recorded_sum(dataset.manifest, ".bin") for dataset in (one, other)]
    if None not in sums:
        return sums[0] == sums[1]
    return all(filecmp.cmp(first, second, shallow=False) for first, second in files)


def _inputs(dataset: IndexedDataset) -> Inputs:
    """Return the input files of a dataset that hold text, by the manifest."""
    manifest = dataset.manifest or {}
    return {
        (file["sha256"], manifest.get("json_key")): file.get("name", "")
        for file in manifest.get("inputs") or ()
        if file.get("bytes") and isinstance(file.get("sha256"), str)
    }


def usual_shift(training: SampleIndex, length: int) -> float:
    """Return the median shift of stretches of the training text, each of `length` samples if there are enough.

    It shows which shift is usual for a text as long as the validation text: 0.01 for articles of an encyclopedia, 0.1
    for a few novels. A validation text of novels has 0.5 if the training text is an encyclopedia.
    """
    length = min(length, len(training) // STRETCHES)
    begins = np.linspace(0, len(training) - length, STRETCHES).astype(int).tolist()
    return float(np.median([shift_of(training, begin, begin + length, training) for begin in begins]))


def shift_of(text: SampleIndex, begin: int, end: int, training: SampleIndex) -> float:
    """Return the shift of the samples `[begin, end)` of `text` from those of `training`, in nats per piece.

    If `text` is `training` itself, from those outside `[begin, end)`.
    """
    places = _spread(begin, end, 2 * SAMPLES)
    others = _spread(0, len(training), SAMPLES)
    if text is training:
        others = others[(others < begin) | (others >= end)]
    read = text.tokens(places[1::2]), text.tokens(places[::2]), training.tokens(others)
    return unigram_shift(*map(np.concatenate, read))


def unigram_shift(predicted: Ints, own: Ints, other: Ints) -> float:
    """Return how much worse piece frequencies of `other` predict `predicted` than those of `own` do, in nats per piece.

    This estimates the Kullback-Leibler divergence of the two unigram distributions. All are ids of pieces, `[n]` each.
    A frequency is a count plus one. The longer of `own` and `other` is thinned first, so that both know equally many
    pieces.
    """
    shorter = min(len(own), len(other))
    own, other = (ids[_spread(0, len(ids), shorter)] for ids in (own, other))
    # Numbered anew, because an id of a damaged file may be anything.
    pieces, numbers = np.unique(np.concatenate([predicted, own, other]), return_inverse=True)
    predicted, own, other = np.split(numbers, [len(predicted), len(predicted) + shorter])
    own_counts, other_counts = (np.bincount(ids, minlength=len(pieces)) for ids in (own, other))  # [pieces] each
    return float(np.log((own_counts + 1) / (other_counts + 1))[predicted].mean())


def _spread(begin: int, end: int, count: int) -> Ints:
    """Return at most `count` integers in `[begin, end)`, evenly spread."""
    return begin + np.arange(min(count, end - begin)) * (end - begin) // min(count, end - begin)
