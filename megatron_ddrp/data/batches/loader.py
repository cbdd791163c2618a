"""Micro-batches from one corpus or several, as a pure function of the number of consumed samples.

So resuming is exact and takes no time. `Blend` orders the samples of the corpora, `SampleReader` reads and masks them,
and `BatchLoader` gives each rank its micro-batches.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.samples import Row, SampleIndex, join_samples, pack_rows
from megatron_ddrp.data.dataset.dataset_index import dataset_path
from megatron_ddrp.data.dataset.verification import check_ids
from megatron_ddrp.data.progress import results_in_order
from megatron_ddrp.data.randomness import Bools, Ints, permute
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError

MAX_PERIOD = 1 << 20
"""Longest pattern. Weights that need a longer one are rounded to multiples of 1/MAX_PERIOD."""


class BlendWords(NamedTuple):
    """Value of `--data-path` and of the flags like it."""

    prefixes: tuple[str, ...]
    weights: tuple[Fraction, ...] | None
    """Weights, one per prefix, exactly as written; None without weights."""


class Blend:
    """Samples of several corpora, numbered one corpus after the other, and the order in which a run visits them.

    The order is an endless stream, addressed by position, whose every prefix follows the weights.

    `--data-path 0.7 A 0.3 B`: of the first p samples of the stream, corpus c gives ⌊w_c·p⌋ or ⌈w_c·p⌉, for every p and
    c. This is the chairman assignment problem (Tijdeman, 1980). Earliest deadline first over the allowed slots of each
    corpus' j-th sample solves it (Baruah et al., Proportionate progress, 1996). Megatron's rule (the corpus with the
    largest deficit comes next) is similar but has no bound. Integer weights give a pattern that repeats after their
    sum, so a position needs one look-up in one period: nothing is stored per sample, and a run can resume anywhere.

    Each corpus has its own epochs, each in a new order. Without weights the corpora count as one: an epoch is all their
    samples in one common order, as if the files had been merged.

    Attributes:
        parts: the corpora.
        counts: number of samples per corpus in one period of the pattern; None without weights.
        sizes: number of samples per weighted corpus `[parts]`, or of all of them `[1]`.
    """

    def __init__(self, parts: Sequence[SampleIndex], weights: Sequence[Fraction] | None = None) -> None:
        assert parts and (weights is None or len(weights) == len(parts)), (len(parts), weights)
        self.parts = list(parts)
        self.counts = None if weights is None else whole_weights(weights)
        self._offsets = np.cumsum([0, *(len(part) for part in parts)])  # [parts + 1]
        self._begins = self._offsets if self.counts else self._offsets[[0, -1]]  # [sizes + 1]
        self.sizes = np.diff(self._begins)
        self._slots = np.array(self.counts or [1])  # [sizes]: in one period
        self._pattern = interleave(self._slots.tolist())  # [period]
        order = np.argsort(self._pattern, kind="stable")
        self._ordinals = np.empty(len(order), np.int64)  # [period]: earlier slots of the same corpus
        self._ordinals[order] = np.concatenate([np.arange(count) for count in self._slots])

    def __len__(self) -> int:
        """Number of samples of all corpora."""
        return int(self._offsets[-1])

    def visits(self, positions: Ints, seed: int) -> tuple[Ints, Ints]:
        """Return the epoch and the sample at each of the `positions` `[n]` of the stream, both int64 `[n]`.

        With weights the epoch is that of the sample's corpus.
        """
        cycles, places = np.divmod(positions, len(self._pattern))
        parts = self._pattern[places]
        numbers = cycles * self._slots[parts] + self._ordinals[places]  # [n]: in the corpus' stream
        epochs, indices = np.empty_like(positions), np.empty_like(positions)
        for part in np.unique(parts).tolist():
            mine, size = parts == part, int(self.sizes[part])
            purpose = f"shuffle {part}" if part else "shuffle"
            epochs[mine], own = np.divmod(numbers[mine], size)
            indices[mine] = self._begins[part] + permute(own, size, seed, purpose, epochs[mine])
        return epochs, indices

    def count_visits(self, positions: int) -> Ints:
        """Return how many of the first `positions` of the stream belong to each of `sizes`."""
        cycles, rest = divmod(positions, len(self._pattern))
        return cycles * self._slots + np.bincount(self._pattern[:rest], minlength=len(self._slots))

    def lengths(self, indices: ArrayLike) -> Ints:
        """Return the number of tokens per sample, including special ones, in the shape of `indices`."""
        indices = np.asarray(indices)
        lengths = np.empty(indices.shape, np.int64)
        for part, mine in self._by_part(indices):
            lengths[mine] = self.parts[part].lengths(indices[mine] - self._offsets[part])
        return lengths

    def tokens(self, indices: ArrayLike) -> list[np.ndarray]:
        """Return the ids of each of the samples `indices` `[n]` without specials: n arrays `[length - 2]`."""
        indices = np.asarray(indices)
        tokens: list[Any] = [None] * len(indices)
        for part, mine in self._by_part(indices):
            read = self.parts[part].tokens(indices[mine] - self._offsets[part])
            for place, ids in zip(np.flatnonzero(mine).tolist(), read, strict=True):
                tokens[place] = ids
        return tokens

    def source(self, index: int) -> str:
        """Return the prefix of the dataset that a sample comes from."""
        return self.parts[int(np.searchsorted(self._offsets, index, side="right")) - 1].prefix

    def _by_part(self, indices: Ints) -> list[tuple[int, Bools]]:
        """Return the corpora of the samples `indices`, each with the mask of its samples."""
        parts = np.searchsorted(self._offsets, indices, side="right") - 1
        return [(part, parts == part) for part in np.unique(parts).tolist()]


def read_blend(words: Sequence[str], flag: str) -> BlendWords:
    """Return the blend that `[WEIGHT] P …` names. Raises `UserError` (exit code 2) if only some prefixes have a weight.

    A word is a weight if it is a number; write such a prefix as a path, ./2024. A single word is always a prefix.
    Errors name `flag`.
    """
    shown = f"{flag} {' '.join(words)}".strip()
    if not words:
        raise UserError(f"{flag} is empty: give one prefix or more, such as {flag} 0.7 A 0.3 B", WRONG_ARGUMENTS)
    numbers = [_is_number(word) for word in words]
    if len(words) == 1 or not any(numbers):
        return BlendWords(_each_once(words, shown), None)
    if numbers != [True, False] * (len(words) // 2):
        raise UserError(
            f"{shown}: expected a weight before every prefix or before none, got {len(words)} words of which "
            f"{sum(numbers)} are numbers; write {flag} 0.7 A 0.3 B or {flag} A B",
            WRONG_ARGUMENTS,
        )
    for word in words[::2]:
        if not 0 < float(word) < math.inf:
            raise UserError(
                f"{shown}: weight {word} must be a number above 0; leave out a corpus without a share",
                WRONG_ARGUMENTS,
            )
    return BlendWords(_each_once(words[1::2], shown), tuple(Fraction(Decimal(word)) for word in words[::2]))


def _each_once(prefixes: Sequence[str], shown: str) -> tuple[str, ...]:
    """Return the prefixes. Raises `UserError` if two name one dataset, such as P.bin and P.idx."""
    if twice := [p for p, count in Counter(dataset_path(prefix, "") for prefix in prefixes).items() if count > 1]:
        raise UserError(f"{shown} names {twice[0]} twice: give it once; a weight reads it more often", WRONG_ARGUMENTS)
    return tuple(prefixes)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return "_" not in word  # Python reads 2024_01, the name of a file, as 202401


def whole_weights(weights: Sequence[Fraction]) -> list[int]:
    """Return the smallest integers in the proportions of `weights`; rounded, but not to 0, beyond `MAX_PERIOD`."""
    scale = math.lcm(*(weight.denominator for weight in weights))
    counts = [int(weight * scale) for weight in weights]
    if sum(counts) // math.gcd(*counts) > MAX_PERIOD:
        total = sum(counts)
        counts = [max(1, round(Fraction(count * MAX_PERIOD, total))) for count in counts]
    divisor = math.gcd(*counts)
    return [count // divisor for count in counts]


def interleave(counts: Sequence[int]) -> Ints:
    """Return the corpus of each slot of a period, `[sum(counts)]`; corpus c has `counts[c]` slots.

    Its j-th sample (from 0) may have the slots from ⌊j/w⌋ to ⌈(j+1)/w⌉ - 1, w = counts[c] / sum(counts). Of the samples
    whose slots have begun, the one whose slots end first comes next; of equal ones the one whose slots began first.
    """
    period = sum(counts)
    waiting = [(0, corpus, 0) for corpus in range(len(counts))]  # (first slot, corpus, j)
    ready: list[tuple[int, int, int, int]] = []  # (last slot, first slot, corpus, j)
    pattern = np.empty(period, np.int64)
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            first, corpus, j = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(j + 1) * period // counts[corpus]) - 1, first, corpus, j))
        last, _, corpus, j = heapq.heappop(ready)
        assert last >= slot, "earliest deadline first meets every deadline"
        pattern[slot] = corpus
        if j + 1 < counts[corpus]:
            heapq.heappush(waiting, ((j + 1) * period // counts[corpus], corpus, j + 1))
    return pattern


ROW_MULTIPLE = {"cpu": 8, "cuda": 16, "cuda graphs": 64}
"""Use of rows → multiple to which the length of cut rows is rounded up. Triton compiles a kernel anew for lengths that
16 does not divide, and graphs serve one length each."""
_STEPS_AHEAD = 2
VALIDATION_SEED = 1234
"""Seed of the order, the masks and the draws of validation and test, whatever `--seed` is; the default of `--seed`."""


@dataclass(frozen=True)
class Share:
    """Share of one data-parallel rank in a global batch.

    Raises `UserError` (exit code 2) if the global batch does not divide into micro-batches.
    """

    global_batch_size: int
    micro_batch_size: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, f"rank {self.rank} of {self.world_size}"
        count_micro_batches(self.global_batch_size, self.micro_batch_size, self.world_size)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches per rank and step: the gradient accumulation steps."""
        return self.global_batch_size // (self.micro_batch_size * self.world_size)

    def deal(self, rows: list[Row]) -> list[list[Row]]:
        """Return this rank's micro-batches from the rows of a global batch, which are sorted by length."""
        parts = self.num_micro_batches * self.world_size
        size, rest = divmod(len(rows), parts)  # the first parts, with the shortest rows, have one row more
        ends = [part * size + min(part, rest) for part in range(parts + 1)]
        mine = range(self.rank, parts, self.world_size)  # ranks work on neighbouring parts at the same time
        return [rows[ends[part] : ends[part + 1]] for part in mine]


def validation_steps(most: int, num_samples: int, global_batch_size: int) -> int:
    """Return the global batches of a validation: at most `most`, at least one, and no sample twice without weights."""
    return min(most, max(1, num_samples // global_batch_size))


def validation_text(most: int, samples: Blend, global_batch_size: int) -> str:
    """Return how much of the validation text such a validation reads, in words."""
    read = validation_steps(most, len(samples), global_batch_size) * global_batch_size
    different = int(np.minimum(samples.count_visits(read), samples.sizes).sum())
    if different == read:
        return f"{read:,} of {len(samples):,} sequences, the same ones each time"
    if read > len(samples):
        return f"one global batch of {read:,} from {len(samples):,} sequences, so some are read more than once"
    return (
        f"{read:,} rows of {different:,} of {len(samples):,} sequences, as the weights read some more than once; a "
        "lower --eval-iters reads them less often"
    )


Mask = Callable[[Ints, Ints, Ints, Ints], tuple[Ints, Ints]]
"""Type of a `Masker`, and of `predict_next`."""


class SampleReader:
    """Reader of samples as masked rows `[CLS] tokens [SEP]`, one sample per row.

    `mark_rare_words` returns `note_ids` from the ids before masking `[rows, seq]` and a flag per row that says whether
    the row holds the end of its text (`WordFinder.number`).
    """

    def __init__(
        self,
        samples: Blend,
        tokenizer: Tokenizer,
        masker: Mask,
        seq_length: int,
        mark_rare_words: Callable[[Ints, Bools], Ints] | None = None,
        row_multiple: int = ROW_MULTIPLE["cpu"],
    ) -> None:
        self.samples, self.tokenizer, self.masker, self.seq_length = samples, tokenizer, masker, seq_length
        self.row_multiple = row_multiple
        self._mark_rare_words = mark_rare_words

    def masked_by(self, masker: Mask) -> SampleReader:
        """Return a reader of the same samples with another masker."""
        changed = copy(self)
        changed.masker = masker
        return changed

    def read(self, positions: Ints, epochs: Ints, indices: Ints, lengths: Ints) -> Batch:
        """Return the given samples, masked and cut to the longest; all arguments are `[samples]`.

        Raises `UserError` for a token id outside the vocabulary.
        """
        columns = np.arange(self.row_length(int(lengths.max())))
        valid = columns < lengths[:, None]  # [samples, seq]
        input_ids = np.full(valid.shape, self.tokenizer.pad_id, np.int64)
        input_ids[:, 0] = self.tokenizer.cls_id
        input_ids[np.arange(len(lengths)), lengths - 1] = self.tokenizer.sep_id
        for row, tokens in zip(input_ids, self.samples.tokens(indices), strict=True):
            row[1 : len(tokens) + 1] = tokens
        outside = (input_ids < 0) | (input_ids >= self.tokenizer.vocab_size)
        for row in np.flatnonzero(outside.any(axis=1)):
            check_ids(self.samples.source(int(indices[row])), input_ids[row], self.tokenizer.vocab_size)
        document_ids = valid.astype(np.int64)
        masked_ids, labels = self.masker(input_ids, document_ids, epochs, indices)
        mark = self._mark_rare_words
        return Batch(
            input_ids=masked_ids,
            labels=labels,
            document_ids=document_ids,
            position_ids=document_ids * columns,
            segment_ids=np.zeros_like(document_ids),
            sequence_ids=document_ids * positions[:, None],
            note_ids=mark(input_ids, lengths < self.seq_length) if mark else None,
        )

    def row_length(self, longest: int) -> int:
        """Return the common length of rows of up to `longest` tokens."""
        return min(-(-longest // self.row_multiple) * self.row_multiple, self.seq_length)


ReaderAt = Callable[[int], SampleReader]
"""Function from the number of steps done before to the reader of the step."""


class BatchLoader:
    """Loader whose `step(consumed_samples)` returns this rank's micro-batches of the global batch that starts there.

    Training reads an endless stream: epoch after epoch of the samples of one corpus or of a blend, each epoch in its
    own order. Position p of the stream gives an epoch and a sample, and these give the masks; nothing is stored. A
    global batch is `global_batch_size` consecutive positions: the same samples with the same masks for every number of
    ranks, micro-batch size and resume point.

    Within the global batch the samples are sorted by length and distributed so that all ranks have rows of similar
    length at the same time. Each micro-batch is cut to its longest row. Order and cut do not matter: the losses are
    sums over the global batch, divided by its counts. With packing the same samples share rows, and the rows are
    distributed instead. Ranks and steps need a fixed number of micro-batches, so the micro-batches become smaller:
    `micro_batch_size` samples lie in fewer rows on average.

    Rows may grow longer and the masking rate may change during a run: `reader_at` returns the reader of each step, by
    default `reader`, which is that of the last step. Positions are counted across phases; each phase has its own order
    over its own samples.

    In validation `step(0)`, `step(global_batch_size)`, … give the same samples with the same masks in every evaluation
    and, under `VALIDATION_SEED`, in every run.
    """

    def __init__(
        self, reader: SampleReader, share: Share, seed: int, packing: bool = False, reader_at: ReaderAt | None = None
    ) -> None:
        self.reader, self.share, self.seed, self.packing = reader, share, seed, packing
        self.reader_at = reader_at or (lambda steps_done: reader)
        self.samples = reader.samples
        self.global_batch_size, self.num_micro_batches = share.global_batch_size, share.num_micro_batches

    def step(self, consumed_samples: int, steps_done: int | None = None) -> list[Batch]:
        """Return `num_micro_batches` batches of int64 `[micro_batch_size, seq]` from sample `consumed_samples` on.

        `steps_done` is the number of steps before, by default computed from the consumed samples. With packing a batch
        is `[rows, seq]`, and the numbers of rows differ by at most one. `sequence_ids` are positions in the stream, the
        same in every layout. Raises `UserError` for a token id outside the vocabulary.
        """
        reader = self.reader_at(consumed_samples // self.global_batch_size if steps_done is None else steps_done)
        positions = consumed_samples + np.arange(self.global_batch_size)
        epochs, indices = reader.samples.visits(positions, self.seed)
        lengths = reader.samples.lengths(indices)  # [global_batch]
        micro_batches = self.share.deal(self._rows(lengths, reader.seq_length))
        mine = np.array([sample for rows in micro_batches for row in rows for sample in row])  # in order of use
        samples = reader.read(positions[mine], epochs[mine], indices[mine], lengths[mine])
        batches = []
        begin = 0
        for rows in micro_batches:
            documents = np.array([len(row) for row in rows])
            end = begin + int(documents.sum())
            width = reader.row_length(max(int(lengths[row].sum()) for row in rows))
            chosen = samples.map(itemgetter(slice(begin, end)))
            if self.packing:
                batches.append(join_samples(chosen, documents, width, reader.tokenizer.pad_id))
            else:
                batches.append(chosen.map(itemgetter((slice(None), slice(width)))).map(np.ascontiguousarray))
            begin = end
        return batches

    def _rows(self, lengths: Ints, row_length: int) -> list[Row]:
        """Return the rows of a global batch, shortest first, from its samples' lengths `[global_batch]`."""
        if self.packing:
            min_rows = self.share.num_micro_batches * self.share.world_size
            return pack_rows(lengths, row_length, min_rows)
        return [[sample] for sample in np.argsort(lengths, kind="stable").tolist()]


def count_micro_batches(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Return the number of micro-batches per rank and step.

    Raises `UserError` with the nearest allowed sizes if the division leaves a remainder.
    """
    at_once = micro_batch_size * world_size
    if global_batch_size > 0 and global_batch_size % at_once == 0:
        return global_batch_size // at_once
    below = global_batch_size // at_once * at_once
    nearest = f"{below} or {below + at_once}" if below > 0 else f"{at_once}"
    raise UserError(
        f"--global-batch-size is {global_batch_size}: expected a multiple of --micro-batch-size {micro_batch_size} x "
        f"{world_size} data-parallel ranks = {at_once}; nearest: {nearest}",
        WRONG_ARGUMENTS,
    )


def iterate(
    loader: BatchLoader,
    consumed_samples: int,
    steps: int,
    prepare: Callable[[list[Batch], int], Any] = lambda micro_batches, number: micro_batches,
    steps_done: int | None = None,
) -> Generator[Any, None, None]:
    """Yield the micro-batches of `steps` steps from `consumed_samples` on, prepared ahead by one background thread.

    `steps_done` is the number of steps before the first, by default computed from the consumed samples. The thread also
    calls `prepare(micro_batches, number)` for step number 0, 1, …, and the results are yielded. An error of the thread
    is raised here, at its step. Stopping early (`close()`, or leaving the loop) waits for the current step and drops
    it.
    """
    begin = consumed_samples // loader.global_batch_size if steps_done is None else steps_done

    def make(number: int) -> Any:
        return prepare(loader.step(consumed_samples + number * loader.global_batch_size, begin + number), number)

    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-loader")
    yield from results_in_order(thread, make, range(steps), _STEPS_AHEAD)
