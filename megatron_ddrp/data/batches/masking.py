"""Dynamic masking (DDRP paper, section 4.3), vectorised over a batch and a pure function of its indices.

A row holds one sample. Its n ordinary tokens fall into units: the words or pieces that `--masking` masks as one. Units
are visited in random order. A unit is taken if it fits into the rest of the budget `max(1, round(mask_prob · n))`, or
skipped otherwise. Every taken piece is replaced by [MASK] (80 %), by a random ordinary piece (10 %) or kept (10 %).
This is drawn separately for each piece, unless the masking draws once for each unit.

The papers leave open:

- If no unit fits (a short row of multi-piece words), the first unit in random order is taken: at least one word is
  always predicted, and a word is never masked in part.
- A continuation piece without its start (a row that begins inside a word) starts a unit.
- [UNK] stands for a word, so it may be selected; it is never drawn as a random piece. The structural pieces, [CLS],
  [SEP], [PAD] and [MASK], are neither.
- Halves are rounded to the even number.

All draws hash (seed, purpose, epoch, sample, column), so a row's masks do not depend on the other rows, on its padding
or on the rank. To mask packed rows, mask first and pack afterwards.
"""

from __future__ import annotations

from copy import copy
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.data.randomness import Bools, Floats, Hashes, Ints, fold_in, hash_uint64, to_unit
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer, word_begins
from megatron_ddrp.errors import UserError


class Masking:
    """Base of maskings: a few facts and, if its units join words, a function that gives their lengths.

    `Masker` does all else: words, order, budget, replacements, resuming and layouts. Instances hold no state.
    """

    keeps_words: ClassVar[bool] = True
    """False if each piece is a word of its own."""
    longest: ClassVar[int] = 1
    """Number of words in the longest unit."""
    acts_together: ClassVar[bool] = False
    """True if all pieces of a unit become [MASK], random pieces, or stay; otherwise each piece is drawn separately."""

    def lengths(self, draws: Floats, ids: Ints, first: Ints) -> Ints:
        """Return the number of words, 1 … `longest`, of the unit that would start at each word, `[words]`.

        `draws` `[words]` are uniform in [0, 1). `ids` `[tokens]` are the ordinary tokens of some rows, and `first`
        `[words]` the place in them where each word begins. The result depends on these arguments only, so that it does
        not change when a run resumes. It is called only if `longest` is above 1, so units of single words need none.
        """
        raise UserError(f"{type(self).__name__} has no lengths(), which longest above 1 needs: write it")


class WholeWord(Masking):
    """Single words: a unit is a word, the piece that starts it and the pieces that continue it.

    A word of more than four pieces is split, each piece its own unit. In vocabularies that mark the ends of words, a
    word starts after an end.
    """


class Token(Masking):
    """Single pieces."""

    keeps_words = False


class Ngram(Masking):
    """Runs of one to three neighbouring words with p(n) ∝ 1/n, as in ALBERT (Lan et al., arXiv:1909.11942).

    SpanBERT draws geometric lengths up to ten. ALBERT draws places and lengths one after the other and drops
    overlapping ones; here the whole row is first cut into runs of random lengths, from its start, so that runs never
    overlap. A run ends early at the row's end and before a word of more than four pieces, whose pieces stay single. A
    run that alone exceeds the budget is shortened, word by word. Units of plug-ins are cut in the same way.
    """

    longest = 3

    def lengths(self, draws: Floats, ids: Ints, first: Ints) -> Ints:
        shares = 1 / np.arange(1, self.longest + 1)
        return 1 + np.searchsorted(np.cumsum(shares[:-1]) / shares.sum(), draws, side="right")


MAX_WORD_PIECES = 4
"""Number of pieces of the longest word that is masked as a whole; longer words are masked piece by piece."""


def predict_next(input_ids: Ints, document_ids: Ints, epochs: ArrayLike, sample_ids: ArrayLike) -> tuple[Ints, Ints]:
    """Return the ids unmasked, and as its label each token's next one in its document, both int64 `[rows, seq]`.

    The causal phase calls it in place of a `Masker`. So [SEP], which ends a document, is predicted and predicts
    nothing; [CLS], which begins it, is not predicted.
    """
    labels = np.full_like(input_ids, IGNORED_LABEL)
    follows = (document_ids[:, 1:] == document_ids[:, :-1]) & (document_ids[:, 1:] != 0)
    labels[:, :-1][follows] = input_ids[:, 1:][follows]
    return input_ids, labels


# A unit's sort key is one integer, row | 32 random bits | unit number, so that one plain sort orders all units.
_UNIT_BITS = 20
_ROW_BITS = 12
_CHUNK_TOKENS = 1 << 15  # rows are masked in chunks that stay in a core's cache


def predicted_pieces(tokenizer: Tokenizer) -> Bools:
    """Return which pieces may be selected and predicted, `[vocab_size]`: the ordinary ones and [UNK]."""
    predicted = np.ones(tokenizer.vocab_size, bool)
    predicted[tokenizer.special_ids] = False
    predicted[tokenizer.unk_id] = True
    predicted[[tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id, tokenizer.mask_id]] = False
    return predicted


class Masker:
    """Function object `masker(input_ids, document_ids, epochs, sample_ids) -> (masked_input_ids, labels)`.

    `mask_prob` is the share of a row's ordinary tokens to select. `mask_share` and `random_share` are the shares of the
    selected pieces that become [MASK] and a random piece; the rest is kept (ELECTRA's generator uses 0.85 and 0).
    `masking` gives the units. Raises `ValueError` for a share out of its range.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        mask_prob: float = 0.15,
        seed: int = 1234,
        masking: Masking | None = None,
        mask_share: float = 0.8,
        random_share: float = 0.1,
    ) -> None:
        if not 0 < mask_prob <= 1:
            raise ValueError(f"mask_prob is {mask_prob}: expected a share of the tokens in (0, 1], such as 0.15")
        if min(mask_share, random_share) < 0 or mask_share + random_share > 1 + 1e-9:
            raise ValueError(f"mask_share {mask_share} and random_share {random_share}: expected a sum of at most 1")
        self.mask_id, self.mask_prob, self.seed = tokenizer.mask_id, mask_prob, seed
        self.masking = masking or WholeWord()
        self._word_starts = tokenizer.word_starts | (not self.masking.keeps_words)  # [vocab_size]
        self._word_ends = tokenizer.word_ends  # [vocab_size]
        self._mask_below, self._random_below = mask_share, mask_share + random_share
        self._selectable = predicted_pieces(tokenizer)
        has_piece = np.array([piece != "" for piece in tokenizer.pieces])  # [vocab_size]; a tokenizer.json may skip ids
        self._random_pieces = np.setdiff1d(np.flatnonzero(has_piece), tokenizer.special_ids)
        if not self._random_pieces.size:
            raise ValueError(
                f"all {tokenizer.vocab_size} pieces of the vocabulary are special: nothing to draw random pieces from"
            )

    def at_rate(self, mask_prob: float) -> Masker:
        """Return a masker with another rate and the same random order.

        A lower rate takes the first units of that order, except for units that exceed one budget and not the other."""
        changed = copy(self)
        changed.mask_prob = mask_prob
        return changed

    def __call__(
        self, input_ids: Ints, document_ids: Ints, epochs: ArrayLike, sample_ids: ArrayLike
    ) -> tuple[Ints, Ints]:
        """Return masked copies: input ids and labels, both int64 `[rows, seq]`; the arguments do not change.

        `document_ids` `[rows, seq]` is 0 at padding; `epochs` and `sample_ids` `[rows]` determine each row's draws. Ids
        lie in [0, vocab_size); seq is at most 2**20.
        """
        num_rows, seq_length = input_ids.shape
        assert seq_length <= 1 << _UNIT_BITS, f"rows of {seq_length} tokens exceed the sort key"
        masked = np.array(input_ids, np.int64, order="C")
        labels = np.full_like(masked, IGNORED_LABEL)
        order_keys, ngram_keys, action_keys, piece_keys = (
            np.broadcast_to(hash_uint64(self.seed, purpose, epochs, sample_ids), num_rows)
            for purpose in ("mask-order", "mask-ngram", "mask-action", "mask-piece")
        )  # [rows]
        chunk = min(max(1, _CHUNK_TOKENS // max(1, seq_length)), 1 << _ROW_BITS)
        for begin in range(0, num_rows, chunk):
            rows = slice(begin, begin + chunk)
            selected, selected_rows, begins = self._select(
                masked[rows], document_ids[rows] != 0, order_keys[rows], ngram_keys[rows]
            )
            columns = selected - selected_rows * seq_length
            ids = masked[rows].reshape(-1)  # a view: rows of a contiguous array
            originals = ids[selected]
            labels[rows].reshape(-1)[selected] = originals
            acting = columns[begins] if self.masking.acts_together else columns
            action = to_unit(fold_in(action_keys[rows][selected_rows], acting))
            draw = to_unit(fold_in(piece_keys[rows][selected_rows], columns)) * self._random_pieces.size
            pieces = self._random_pieces[draw.astype(np.int64)]
            replaced = np.where(action < self._random_below, pieces, originals)
            ids[selected] = np.where(action < self._mask_below, self.mask_id, replaced)
        return masked, labels

    def _select(self, input_ids: Ints, valid: Bools, order_keys: Hashes, ngram_keys: Hashes) -> tuple[Ints, Ints, Ints]:
        """Return three arrays `[selected]` about the predicted tokens, unit after unit.

        They are the tokens' flat indices into `[rows, seq]`, their rows, and where among them their units begin.
        """
        num_rows, seq_length = input_ids.shape
        selectable = self._selectable[input_ids] & valid  # [rows, seq]
        num_tokens = np.count_nonzero(selectable, axis=1)  # [rows]
        flat = np.flatnonzero(selectable)  # [tokens]: from here on only ordinary tokens
        if not flat.size:
            return flat, flat, flat
        budgets = np.where(num_tokens > 0, np.maximum(1, np.rint(self.mask_prob * num_tokens)), 0).astype(np.int64)
        gaps = ~np.pad(selectable, ((0, 0), (1, 0)))[:, :-1]  # [rows, seq]: no ordinary token comes right before
        starts = word_begins(self._word_starts, self._word_ends, input_ids) | gaps  # [rows, seq]
        first, single = _units(starts.reshape(-1)[flat])  # [units]
        row_ends = np.cumsum(num_tokens)
        unit_rows = np.repeat(np.arange(num_rows), np.diff(np.searchsorted(first, row_ends), prepend=0))  # [units]
        if self.masking.longest > 1:
            alone = single | gaps.reshape(-1)[flat[first]]  # [units]: joins no unit on its left
            draws = to_unit(fold_in(ngram_keys[unit_rows], flat[first] - unit_rows * seq_length))
            lengths = self._lengths(draws, input_ids.reshape(-1)[flat], first)
            units = _join_words(first, alone, single, lengths, flat.size, budgets[unit_rows])
            first, unit_rows = first[units], unit_rows[units]
        sizes = np.diff(first, append=flat.size)
        unit_columns = flat[first] - unit_rows * seq_length
        keys = fold_in(order_keys[unit_rows], unit_columns) >> np.uint64(32) << np.uint64(_UNIT_BITS)
        keys |= unit_rows.astype(np.uint64) << np.uint64(32 + _UNIT_BITS)
        keys |= np.arange(first.size, dtype=np.uint64)
        keys.sort()
        order = (keys & np.uint64((1 << _UNIT_BITS) - 1)).astype(np.int64)  # [units]: by row, then by random key
        taken = _take_greedily(order, unit_rows, sizes, budgets)
        taken_sizes = sizes[taken]
        begins = np.repeat(np.cumsum(taken_sizes) - taken_sizes, taken_sizes)
        return flat[np.repeat(taken, sizes)], np.repeat(unit_rows[taken], taken_sizes), begins

    def _lengths(self, draws: Floats, ids: Ints, first: Ints) -> Ints:
        """Return the masking's lengths `[words]`. Raises `UserError` if a plug-in gives anything else."""
        lengths, longest = np.asarray(self.masking.lengths(draws, ids, first)), self.masking.longest
        is_right = lengths.shape == first.shape and np.issubdtype(lengths.dtype, np.integer)
        if not is_right or (lengths.size and not 1 <= lengths.min() <= lengths.max() <= longest):
            raise UserError(
                f"{type(self.masking).__name__}.lengths gave {lengths!r:.60}: expected a whole number from 1 to "
                f"{longest} for each of {first.size} words"
            )
        return lengths


def _units(starts: Bools) -> tuple[Ints, Bools]:
    """Return the first token of each unit, and whether the unit is a piece of a long word; both `[units]`.

    `starts` `[tokens]` is True at tokens that start a word.
    """
    first = np.flatnonzero(starts)
    sizes = np.diff(first, append=starts.size)
    too_long = sizes > MAX_WORD_PIECES
    if not too_long.any():
        return first, too_long
    single = np.repeat(too_long, sizes)  # [tokens]
    first = np.flatnonzero(starts | single)
    return first, single[first]


def _join_words(first: Ints, alone: Bools, single: Bools, lengths: Ints, num_tokens: int, budgets: Ints) -> Ints:
    """Return the units, ascending, that start an n-gram when each row is cut into n-grams from its start.

    All arguments but `num_tokens` are `[units]`: first token; True if the unit does not join the unit on its left, as
    at the begin of a row; True for a piece of a long word, which no unit joins; words of the n-gram that would start
    here; budget of its row.
    """
    num_units = len(first)
    units = np.arange(num_units)
    # Number of units from each one on that one n-gram can have: up to the next unit that joins none on its left.
    bounds = np.append(np.flatnonzero(alone), num_units)
    room = np.where(single, 1, bounds[np.searchsorted(bounds, units, side="right")] - units)
    lengths = np.minimum(lengths, room)
    ends = np.append(first, num_tokens)  # [units + 1]
    for words in range(int(lengths.max(initial=1)), 1, -1):
        over = (lengths == words) & (ends[np.minimum(units + words, num_units)] - first > budgets)
        lengths[over] = words - 1
    # Walk all runs of joined units in parallel; each n-gram gives the begin of the next one.
    starts = np.zeros(num_units + 1, bool)
    place, end = bounds[:-1], bounds[1:]
    while place.size:
        starts[place] = True
        place = place + lengths[place]
        going = place < end
        place, end = place[going], end[going]
    return np.flatnonzero(starts)


def _take_greedily(order: Ints, unit_rows: Ints, sizes: Ints, budgets: Ints) -> Bools:
    """Return the taken units, bool `[units]`, if each row takes units in `order` while they fit its budget.

    Exact, in at most 1 + (size of the largest unit) passes. Units larger than the rest of the budget never fit and are
    dropped; of the others a row takes the longest run from the front that fits. The unit that ends the run is larger
    than the new rest. So after the first pass the rest is smaller than the largest unit, and it shrinks with each pass.
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
