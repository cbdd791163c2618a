"""Training samples as an index over documents (section 4.3 of the paper), and rows that hold one sample or several.

Sample i is some tokens of one document. `SampleIndex` finds it; `pack_rows` and `join_samples` put several samples side
by side in a row.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.data.dataset.dataset_index import MEND
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.data.randomness import Ints
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError

SPLIT_NAMES = ("train", "valid", "test")
MIN_DOCUMENT_TOKENS = 8
"""Length in tokens of the shortest document that gives a sample; shorter ones stay in the files."""
NUM_SPECIAL_TOKENS = 2
BLOCK = 64
"""Number of documents between two running totals."""
_CHUNK = BLOCK << 12  # documents read at once while the totals are made
_SAMPLES, _DOCUMENTS, _TOKENS = range(3)  # columns of the totals


class NoSample(UserError):
    """A part of a dataset that holds no sample."""


class SampleIndex:
    """Samples of the documents `[low, high)` of a dataset.

    A sample comes from one document; a longer document gives consecutive pieces of at most `seq_length - 2` tokens,
    which leaves room for [CLS] and [SEP]. Samples are not filled from the next document and not shortened at random.
    The last piece of a document may be short. It is kept: dropping it would lose text, and the loader sorts by length,
    so it costs little.

    The index keeps running totals before every 64th document: 3/8 byte per document and nothing per sample. Between two
    of them the samples are counted from the dataset's own index on demand, and must add up to the totals; an index that
    was damaged after the totals were made is refused. The totals belong to a whole dataset and a sequence length, so
    training and validation share them. Every start makes them anew, in about two seconds for 10⁸ documents.

    Raises `UserError` if no document is long enough.

    Attributes:
        prefix: prefix of the dataset.
        num_documents: documents in the range.
        num_dropped_documents: documents under `MIN_DOCUMENT_TOKENS` tokens, which give no sample.
        num_tokens: tokens in all samples, without special ones.
    """

    def __init__(self, dataset: IndexedDataset, document_range: tuple[int, int], seq_length: int) -> None:
        low, high = document_range
        if not 0 <= low <= high <= dataset.num_documents:
            raise ValueError(f"documents [{low}, {high}) of {dataset.prefix}, which has {dataset.num_documents}")
        self.dataset, self.prefix = dataset, dataset.prefix
        self._piece_length = seq_length - NUM_SPECIAL_TOKENS
        self._totals = sample_totals(dataset, seq_length)  # [blocks + 1, 3]
        self._first_samples = self._totals[:, _SAMPLES]  # [blocks + 1]
        before, after = self._totals_before(low), self._totals_before(high)
        self._first, self._last = int(before[_SAMPLES]), int(after[_SAMPLES])
        self.num_documents = high - low
        self.num_dropped_documents = self.num_documents - int(after[_DOCUMENTS] - before[_DOCUMENTS])
        self.num_tokens = int(after[_TOKENS] - before[_TOKENS])
        if not len(self):
            why = dropped_text([self]) if high > low else "the range is empty"
            raise NoSample(
                f"{dataset.prefix}: no sample in documents [{low}, {high}) of {dataset.num_documents}: {why}"
            )

    def __len__(self) -> int:
        """Number of samples."""
        return self._last - self._first

    def tokens(self, indices: ArrayLike) -> list[np.ndarray]:
        """Return the ids of each of the samples `indices` `[n]` without specials, in the dataset's own integer type.

        n arrays `[1 … seq_length - 2]`.
        """
        documents, begins, lengths = self._find(np.asarray(indices))
        firsts, behind = self.dataset.document_indices[documents], self.dataset.document_indices[documents + 1]
        places = zip(*(each.tolist() for each in (firsts, begins, lengths, behind - firsts)), strict=True)
        return [self.dataset.get(*place) for place in places]

    def lengths(self, indices: ArrayLike) -> Ints:
        """Return the number of tokens per sample, including [CLS] and [SEP], in the shape of `indices`."""
        _, _, lengths = self._find(np.asarray(indices))
        return lengths + NUM_SPECIAL_TOKENS

    def _find(self, indices: Ints) -> tuple[Ints, ...]:
        """Return documents, first tokens within them, and lengths without special tokens, in the shape of `indices`.

        Searches the totals, then counts the documents in one block.
        """
        if indices.size and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(f"samples {indices.min()} to {indices.max()} of {len(self)}")
        numbers = indices.ravel() + self._first
        blocks = np.searchsorted(self._first_samples, numbers, side="right") - 1
        tokens = _document_tokens(self.dataset, blocks * BLOCK, BLOCK)  # [n, BLOCK]
        ends = np.cumsum(_num_pieces(tokens, self._piece_length), axis=1)
        self._check_blocks(blocks, ends[:, -1], (tokens * (tokens >= MIN_DOCUMENT_TOKENS)).sum(axis=1))
        within = numbers - self._first_samples[blocks]
        places = np.count_nonzero(ends <= within[:, None], axis=1)  # [n]: the document within its block
        rows = np.arange(len(numbers))
        before = np.where(places > 0, ends[rows, places - 1], 0)
        begins = (within - before) * self._piece_length
        lengths = np.minimum(self._piece_length, tokens[rows, places] - begins)
        return tuple(values.reshape(indices.shape) for values in (blocks * BLOCK + places, begins, lengths))

    def _check_blocks(self, blocks: Ints, samples: Ints, tokens: Ints) -> None:
        """Refuse blocks `[n]` whose samples and tokens differ from the totals."""
        expected = self._totals[blocks + 1] - self._totals[blocks]  # [n, 3]
        wrong = np.flatnonzero((expected[:, _SAMPLES] != samples) | (expected[:, _TOKENS] != tokens))
        if wrong.size:
            raise _damage(self.dataset, int(blocks[wrong[0]]) * BLOCK)

    def _totals_before(self, document: int) -> Ints:
        """Return the numbers of samples, kept documents and their tokens before a document, `[3]`."""
        block, rest = divmod(document, BLOCK)
        tokens = _document_tokens(self.dataset, np.array([block * BLOCK]), rest)  # [1, rest]
        return self._totals[block] + _count(tokens, self._piece_length).sum(axis=(0, 1))


def dropped_text(parts: Sequence[SampleIndex]) -> str:
    """Return how many documents of some parts are too short to give a sample; "" if none is."""
    dropped, documents = sum(p.num_dropped_documents for p in parts), sum(p.num_documents for p in parts)
    return f"{dropped:,} of these {documents:,} documents have fewer than {MIN_DOCUMENT_TOKENS} tokens" * bool(dropped)


def sample_totals(dataset: IndexedDataset, seq_length: int) -> Ints:
    """Return the samples, kept documents and their tokens before every `BLOCK`-th document, int64 `[blocks + 1, 3]`.

    The last row is before document `BLOCK * blocks` or, if the last block is not full, at the end. The first call for a
    dataset and a length reads the whole index and refuses a damaged one; the dataset keeps the totals.
    """
    if seq_length in dataset.sample_totals:
        return dataset.sample_totals[seq_length]
    if seq_length <= NUM_SPECIAL_TOKENS:
        raise UserError(f"--seq-length is {seq_length}: it must hold [CLS], one token and [SEP]", WRONG_ARGUMENTS)
    totals = np.zeros((-(-dataset.num_documents // BLOCK) + 1, 3), np.int64)
    begin = 1
    for tokens in document_lengths(dataset):
        counts = _count(tokens, seq_length - NUM_SPECIAL_TOKENS)  # [documents, 3]
        blocks = np.add.reduceat(counts, np.arange(0, len(tokens), BLOCK), axis=0)
        totals[begin : begin + len(blocks)] = blocks
        begin += len(blocks)
    return dataset.sample_totals.setdefault(seq_length, np.cumsum(totals, axis=0, out=totals))


def document_lengths(dataset: IndexedDataset) -> Iterator[Ints]:
    """Check the index, and yield the tokens of each document, in chunks `[documents]`."""
    dataset.check()
    for low in range(0, dataset.num_documents, _CHUNK):
        yield _document_tokens(dataset, np.array([low]), min(_CHUNK, dataset.num_documents - low))[0]


def _document_tokens(dataset: IndexedDataset, firsts: Ints, count: int) -> Ints:
    """Return the tokens of the `count` documents from each of `firsts` `[n]` on, `[n, count]`; 0 past the last one.

    A [SEP] that ends a document does not count, because each sample gets its own. Raises `UserError` where documents
    end before they begin.
    """
    documents = np.minimum(firsts[:, None] + np.arange(count + 2), dataset.num_documents)  # [n, count + 2]
    bounds = dataset.document_indices[documents].astype(np.int64)  # [n, count + 2]: sequences
    disordered = (np.diff(bounds) < 0).any(axis=1) | (bounds[:, 0] < 0) | (bounds[:, -1] > len(dataset.sizes))
    if disordered.any():
        raise _damage(dataset, int(firsts[disordered][0]))
    bounds = bounds[:, :-1]  # includes one document more: if its size is far too large, it would fill the memory
    widths = bounds[:, -1] - bounds[:, 0]  # [n]
    ends = np.cumsum(widths)
    if len(firsts) == 1:
        sizes = dataset.sizes[bounds[0, 0] : bounds[0, -1]]
    else:
        sizes = dataset.sizes[np.arange(widths.sum()) + np.repeat(bounds[:, 0] - ends + widths, widths)]
    running = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    tokens = np.diff(running[bounds - (bounds[:, 0] - ends + widths)[:, None]], axis=1)  # [n, count]
    return np.maximum(tokens - dataset.closing_tokens, 0) if dataset.closing_tokens else tokens


def _damage(dataset: IndexedDataset, document: int) -> UserError:
    return UserError(
        f"{dataset.prefix}.idx: damaged near document {document}: changed since the sample index was made; "
        f"{MEND}, and see all of it by megatron-ddrp dataset verify"
    )


def _num_pieces(tokens: Ints, piece_length: int) -> Ints:
    """Return the number of samples per document, from documents' lengths in tokens."""
    return np.where(tokens >= MIN_DOCUMENT_TOKENS, -(-tokens // piece_length), 0)


def _count(tokens: Ints, piece_length: int) -> Ints:
    """Return the contribution of documents to the totals `[…, 3]`, from their lengths in tokens."""
    kept = tokens >= MIN_DOCUMENT_TOKENS
    return np.stack([_num_pieces(tokens, piece_length), kept, tokens * kept], axis=-1)


def split_documents(num_documents: int, split: str) -> dict[str, tuple[int, int]]:
    """Return contiguous document ranges `{"train": (low, high), "valid": …, "test": …}` in the proportions of `split`.

    `split` is up to three weights, "949,50,1"; missing ones are 0. Each share is rounded, and the largest one
    takes the difference; this gives Megatron's ranges whenever training is the largest. A part with a weight that would
    get no document takes one from the largest part, if that has more than one. Raises `UserError`, exit code 2.
    """
    try:
        weights = [float(weight) for weight in split.split(",")]
    except ValueError:
        weights = []
    valid = all(math.isfinite(weight) and weight >= 0 for weight in weights) and 0 < sum(weights) < math.inf
    if not valid or len(weights) > len(SPLIT_NAMES):
        raise UserError(
            f"--split is {split!r}: expected up to three weights for training, validation and test, none negative and "
            "not all 0, such as 949,50,1",
            WRONG_ARGUMENTS,
        )
    weights += [0.0] * (len(SPLIT_NAMES) - len(weights))
    counts = [round(weight / sum(weights) * num_documents) for weight in weights]
    counts[weights.index(max(weights))] += num_documents - sum(counts)
    for part, weight in enumerate(weights):
        largest = counts.index(max(counts))
        if weight > 0 and counts[part] == 0 and counts[largest] > 1:
            counts[largest] -= 1
            counts[part] = 1
    bounds = [sum(counts[:part]) for part in range(len(SPLIT_NAMES) + 1)]
    return {name: (bounds[part], bounds[part + 1]) for part, name in enumerate(SPLIT_NAMES)}


Row = list[int]
"""Samples of a row, as indices into the lengths, longest first."""


def pack_rows(lengths: Ints, row_length: int, min_rows: int = 1) -> list[Row]:
    """Return rows of at most `row_length` tokens for samples of `lengths` `[samples]`, emptiest row first.

    A row of one short document is mostly padding. Packing does not change the tokens and masks of the samples of a
    global batch, only their places, so losses and gradients equal those of one document per row, to rounding.

    Rows are filled by best fit, longest sample first (best-fit decreasing; Johnson et al., SIAM J. Comput. 1974: at
    most 11/9 of the fewest possible rows, plus a constant). Short documents fill the rows almost completely. The layout
    depends only on the lengths, so all ranks find the same one.

    There are at least `min_rows` rows, none of them empty, because every micro-batch of every rank needs one;
    `min_rows` is at most the number of samples.
    """
    assert min_rows <= len(lengths), f"{min_rows} rows of {len(lengths)} samples"
    assert not len(lengths) or lengths.max() <= row_length, f"a sample of {lengths.max()} tokens, rows of {row_length}"
    sizes = lengths.tolist()
    rows = _best_fit_decreasing(sizes, row_length)
    if len(rows) < min_rows:
        rows = _spread(rows, sizes, min_rows)
    return sorted(rows, key=lambda row: (_tokens(row, sizes), row))


def _tokens(row: Row, sizes: list[int]) -> int:
    return sum(sizes[sample] for sample in row)


def _best_fit_decreasing(sizes: list[int], row_length: int) -> list[Row]:
    """Put each sample, longest first, into the fullest row with enough space; of equal rows into the oldest."""
    rows: list[Row] = []
    open_rows: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for sample in sorted(range(len(sizes)), key=lambda sample: -sizes[sample]):
        place = bisect_left(open_rows, (sizes[sample],))
        if place == len(open_rows):
            free, number = row_length, len(rows)
            rows.append([])
        else:
            free, number = open_rows.pop(place)
        rows[number].append(sample)
        if free > sizes[sample]:
            insort(open_rows, (free - sizes[sample], number))
    return rows


def _spread(rows: list[Row], sizes: list[int], num_rows: int) -> list[Row]:
    """Split the fullest row of several documents until there are `num_rows` rows."""
    queue = [(len(row) == 1, -_tokens(row, sizes), row) for row in rows]  # rows of one document come last
    heapq.heapify(queue)
    while len(queue) < num_rows:
        _, _, row = heapq.heappop(queue)
        for half in _halve(row, sizes):
            heapq.heappush(queue, (len(half) == 1, -_tokens(half, sizes), half))
    return [row for _, _, row in queue]


def _halve(row: Row, sizes: list[int]) -> tuple[Row, Row]:
    """Return two rows of similar length with the documents of one row."""
    assert len(row) > 1, "a row of one document has no halves"
    halves: tuple[Row, Row] = ([], [])
    fullness = [0, 0]
    for sample in row:
        emptier = int(fullness[1] < fullness[0])
        halves[emptier].append(sample)
        fullness[emptier] += sizes[sample]
    return halves


def join_samples(samples: Batch, documents: Ints, row_length: int, pad_id: int) -> Batch:
    """Return rows of several documents from rows of one document: `[samples, seq]` → `[rows, row_length]`.

    `documents` `[rows]` is the number of samples per row, taken in order. They get the document ids 1, 2, … of their
    row, which limit attention, and keep their own positions from 0; all other fields move with their tokens.
    """
    assert documents.sum() == len(samples.input_ids), (documents.sum(), len(samples.input_ids))
    valid = samples.document_ids > 0  # [samples, seq]
    first = np.cumsum(documents) - documents  # [rows]: the first sample of each
    numbers = np.arange(documents.sum()) - np.repeat(first, documents) + 1  # [samples]: 1, 2, … within the row
    row_tokens = np.add.reduceat(valid.sum(axis=1), first)  # [rows]
    # Row by row and sample by sample, the tokens have the same order on both sides.
    source = np.flatnonzero(valid)  # [tokens]
    target = np.flatnonzero(np.arange(row_length) < row_tokens[:, None])  # [tokens]

    def lay(field: Ints, padding: int) -> Ints:
        laid = np.full(len(documents) * row_length, padding, np.int64)
        laid[target] = field.ravel()[source]
        return laid.reshape(len(documents), row_length)

    numbered = samples._replace(document_ids=samples.document_ids * numbers[:, None])
    padding = Batch(pad_id, IGNORED_LABEL, document_ids=0, position_ids=0, segment_ids=0, sequence_ids=0, note_ids=0)
    return Batch(*(None if field is None else lay(field, fill) for field, fill in zip(numbered, padding, strict=True)))
