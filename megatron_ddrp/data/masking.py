"""Dynamic whole-word masking (DDRP paper, section 4.3), vectorised over a batch and a pure function of its indices.

A row holds one sample. Its n ordinary tokens fall into units: a word is the piece that starts it and the pieces that
continue it; a word of more than four pieces is split, each piece its own unit. In random order a unit is taken if it
still fits in the budget `max(1, round(mask_prob · n))`; one that would overflow it is skipped. Every taken piece is
replaced by [MASK] (80 %), by a random ordinary piece (10 %) or kept (10 %), drawn for each piece on its own.

Where the papers are silent:
- Where no unit fits (a short row of multi-piece words), the first unit in random order is taken: at least one word is
  always predicted, and a word is never half masked.
- A continuation piece without its start (a row that begins inside a word) starts a unit.
- [UNK] stands for a word, so it may be selected; it is never drawn as a random piece. The structural pieces, [CLS],
  [SEP], [PAD] and [MASK], are neither.
- Halves are rounded to even.

All draws hash (seed, purpose, epoch, sample, column), so a row's masks do not depend on the other rows, on its padding
or on which rank asks. To mask packed rows, mask first and pack after.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_ddrp.data.batch import IGNORED_LABEL
from megatron_ddrp.data.randomness import fold_in, hash_uint64, to_unit

MAX_WORD_PIECES = 4
"""A word of more pieces than this is masked piece by piece."""

# A unit's sort key is one integer, row | 32 random bits | unit number, so that one plain sort orders all units.
_UNIT_BITS = 20
_ROW_BITS = 12
_CHUNK_TOKENS = 1 << 15  # rows are masked in chunks that stay in a core's cache


class WholeWordMasker:
    """`masker(input_ids, document_ids, epochs, sample_ids) -> (masked_input_ids, labels)`.

    For a tokenizer `t`: `WholeWordMasker(t.word_starts, t.special_ids, t.mask_id, t.vocab_size, unk_id=t.unk_id)`.

    `word_starts` is bool `[vocab_size]`: the piece starts a word. `special_ids` are never drawn as random pieces, and
    never selected but for `unk_id`. `mask_share` and `random_share` are the shares of the selected pieces that become
    [MASK] and a random piece; the rest is kept (ELECTRA's generator uses 0.85 and 0).
    """

    def __init__(
        self,
        word_starts: NDArray[np.bool_],
        special_ids: Iterable[int],
        mask_id: int,
        vocab_size: int,
        mask_prob: float = 0.15,
        seed: int = 1234,
        *,
        unk_id: int | None = None,
        mask_share: float = 0.8,
        random_share: float = 0.1,
    ) -> None:
        if not 0 < mask_prob <= 1:
            raise ValueError(f"mask_prob is {mask_prob}: expected a share of the tokens in (0, 1], such as 0.15")
        if min(mask_share, random_share) < 0 or mask_share + random_share > 1 + 1e-9:
            raise ValueError(f"mask_share {mask_share} and random_share {random_share}: expected a sum of at most 1")
        if len(word_starts) != vocab_size:
            raise ValueError(f"word_starts has {len(word_starts)} entries: expected vocab_size = {vocab_size}")
        special = np.fromiter(special_ids, np.int64)
        self.vocab_size = vocab_size
        self.mask_id = mask_id
        self.mask_prob = mask_prob
        self.seed = seed
        self._word_starts = np.array(word_starts, bool)
        self._mask_below, self._random_below = mask_share, mask_share + random_share
        ordinary = np.ones(vocab_size, bool)
        ordinary[special] = False
        ordinary[mask_id] = False
        self._selectable = ordinary.copy()  # [vocab_size]
        if unk_id is not None:
            ordinary[unk_id] = False
            self._selectable[unk_id] = True
        self._random_pieces = np.flatnonzero(ordinary)
        if not self._random_pieces.size:
            raise ValueError(
                f"all {vocab_size} pieces of the vocabulary are special: nothing to draw random pieces from"
            )

    def __call__(
        self, input_ids: NDArray[np.int64], document_ids: NDArray[np.int64], epochs: ArrayLike, sample_ids: ArrayLike
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Masked copies: input ids and labels, both int64 `[rows, seq]`; the arguments are left as they are.

        `document_ids` `[rows, seq]` is 0 at padding; `epochs` and `sample_ids` `[rows]` name each row's draws. Ids lie
        in [0, vocab_size); seq is at most 2**20.
        """
        num_rows, seq_length = input_ids.shape
        assert seq_length <= 1 << _UNIT_BITS, f"rows of {seq_length} tokens exceed the sort key"
        masked = np.array(input_ids, np.int64, order="C")
        labels = np.full_like(masked, IGNORED_LABEL)
        order_keys, action_keys, piece_keys = (
            np.broadcast_to(hash_uint64(self.seed, purpose, epochs, sample_ids), num_rows)
            for purpose in ("mask-order", "mask-action", "mask-piece")
        )  # [rows]
        chunk = min(max(1, _CHUNK_TOKENS // max(1, seq_length)), 1 << _ROW_BITS)
        for begin in range(0, num_rows, chunk):
            rows = slice(begin, begin + chunk)
            selected, selected_rows = self._select(masked[rows], document_ids[rows] != 0, order_keys[rows])
            columns = selected - selected_rows * seq_length
            ids = masked[rows].reshape(-1)  # a view: rows of a contiguous array
            originals = ids[selected]
            labels[rows].reshape(-1)[selected] = originals
            action = to_unit(fold_in(action_keys[rows][selected_rows], columns))
            draw = to_unit(fold_in(piece_keys[rows][selected_rows], columns)) * self._random_pieces.size
            pieces = self._random_pieces[draw.astype(np.int64)]
            replaced = np.where(action < self._random_below, pieces, originals)
            ids[selected] = np.where(action < self._mask_below, self.mask_id, replaced)
        return masked, labels

    def _select(
        self, input_ids: NDArray[np.int64], valid: NDArray[np.bool_], order_keys: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Flat indices into `[rows, seq]` of the tokens to predict, and the row of each; both `[selected]`."""
        num_rows, seq_length = input_ids.shape
        selectable = self._selectable[input_ids] & valid  # [rows, seq]
        num_tokens = np.count_nonzero(selectable, axis=1)  # [rows]
        flat = np.flatnonzero(selectable)  # [tokens]: from here on, only the ordinary tokens
        if not flat.size:
            return flat, flat
        starts = self._word_starts[input_ids] | ~_shift_right(selectable)  # [rows, seq]
        first, sizes = _units(starts.reshape(-1)[flat])  # [units]
        row_ends = np.cumsum(num_tokens)
        unit_rows = np.repeat(np.arange(num_rows), np.diff(np.searchsorted(first, row_ends), prepend=0))  # [units]
        unit_columns = flat[first] - unit_rows * seq_length
        keys = fold_in(order_keys[unit_rows], unit_columns) >> np.uint64(32) << np.uint64(_UNIT_BITS)
        keys |= unit_rows.astype(np.uint64) << np.uint64(32 + _UNIT_BITS)
        keys |= np.arange(first.size, dtype=np.uint64)
        keys.sort()
        order = (keys & np.uint64((1 << _UNIT_BITS) - 1)).astype(np.int64)  # [units]: by row, then by random key
        budgets = np.where(num_tokens > 0, np.maximum(1, np.rint(self.mask_prob * num_tokens)), 0).astype(np.int64)
        taken = _take_greedily(order, unit_rows, sizes, budgets)
        return flat[np.repeat(taken, sizes)], np.repeat(unit_rows[taken], sizes[taken])


def _shift_right(values: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """`values` `[rows, seq]` moved one column to the right, False entering."""
    shifted = np.zeros_like(values)
    shifted[:, 1:] = values[:, :-1]
    return shifted


def _units(starts: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First token and number of tokens of each unit, `[units]`, from the tokens that start a word, `[tokens]`."""
    first = np.flatnonzero(starts)
    sizes = np.diff(first, append=starts.size)
    too_long = sizes > MAX_WORD_PIECES
    if too_long.any():
        first = np.flatnonzero(starts | np.repeat(too_long, sizes))
        sizes = np.diff(first, append=starts.size)
    return first, sizes


def _take_greedily(
    order: NDArray[np.int64], unit_rows: NDArray[np.int64], sizes: NDArray[np.int64], budgets: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which units, bool `[units]`, are taken when each row takes its units in `order` while they fit its budget.

    Exact, in at most 1 + MAX_WORD_PIECES passes. Units larger than what remains will never fit and are set aside; of
    the others a row takes the longest run from the front that fits. The unit that ends the run is larger than what
    then remains, so less than MAX_WORD_PIECES remains after the first pass, and less after each pass.
    """
    taken = np.zeros(order.size, bool)
    remaining = budgets.copy()  # [rows]
    candidates = order
    while True:
        candidates = candidates[sizes[candidates] <= remaining[unit_rows[candidates]]]
        if not candidates.size:
            break
        rows, tokens = unit_rows[candidates], sizes[candidates]
        running = np.cumsum(tokens)
        row_begins = np.searchsorted(rows, np.arange(budgets.size))  # rows ascend along `order`
        before_row = np.concatenate([[0], running])[row_begins]  # [rows]
        fits = running - before_row[rows] <= remaining[rows]
        taken[candidates[fits]] = True
        remaining -= np.bincount(rows[fits], weights=tokens[fits], minlength=budgets.size).astype(np.int64)
        candidates = candidates[~fits]
    untouched = np.flatnonzero((remaining == budgets) & (budgets > 0))
    if untouched.size:
        taken[order[np.searchsorted(unit_rows[order], untouched)]] = True
    return taken
