"""Several corpora as one endless stream, addressed by position, whose every prefix follows the weights.

`--data-path 0.7 A 0.3 B`: of the first p samples of the stream, corpus c gives ⌊w_c·p⌋ or ⌈w_c·p⌉, for every p and c.
This is the chairman assignment problem (Tijdeman, 1980). Earliest deadline first over the allowed slots of each corpus'
j-th sample solves it (Baruah et al., Proportionate progress, 1996). Megatron's rule (the corpus with the largest
deficit comes next) is similar but has no bound. Integer weights give a pattern that repeats after their sum, so a
position needs one look-up in one period: nothing is stored per sample, and a run can resume anywhere.

Each corpus has its own epochs, each in a new order. Without weights the corpora count as one: an epoch is all their
samples in one common order, as if the files had been merged.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_ddrp.data.batches.samples import SampleIndex
from megatron_ddrp.data.randomness import permute
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

    def visits(self, positions: NDArray[np.int64], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
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

    def count_visits(self, positions: int) -> NDArray[np.int64]:
        """Return how many of the first `positions` of the stream belong to each of `sizes`."""
        cycles, rest = divmod(positions, len(self._pattern))
        return cycles * self._slots + np.bincount(self._pattern[:rest], minlength=len(self._slots))

    def lengths(self, indices: ArrayLike) -> NDArray[np.int64]:
        """Return the number of tokens per sample, including special ones, in the shape of `indices`."""
        indices = np.asarray(indices)
        lengths = np.empty(indices.shape, np.int64)
        for part, mine in self._by_part(indices):
            lengths[mine] = self.parts[part].lengths(indices[mine] - self._offsets[part])
        return lengths

    def tokens(self, indices: ArrayLike) -> list[NDArray[Any]]:
        """Return the ids of each of the samples `indices` `[n]` without specials: n arrays `[length - 2]`."""
        indices = np.asarray(indices)
        if len(self.parts) == 1:
            return self.parts[0].tokens(indices)
        tokens: list[Any] = [None] * len(indices)
        for part, mine in self._by_part(indices):
            read = self.parts[part].tokens(indices[mine] - self._offsets[part])
            for place, ids in zip(np.flatnonzero(mine).tolist(), read, strict=True):
                tokens[place] = ids
        return tokens

    def source(self, index: int) -> str:
        """Return the prefix of the dataset that a sample comes from."""
        return self.parts[int(np.searchsorted(self._offsets, index, side="right")) - 1].prefix

    def _by_part(self, indices: NDArray[np.int64]) -> list[tuple[int, NDArray[np.bool_]]]:
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
        return BlendWords(tuple(words), None)
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
    return BlendWords(tuple(words[1::2]), tuple(Fraction(Decimal(word)) for word in words[::2]))


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


def interleave(counts: Sequence[int]) -> NDArray[np.int64]:
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
