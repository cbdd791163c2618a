"""Units of masking: which neighbouring words are masked as one.

A masking is a class with a few facts and, if its units join words, a function that gives their lengths. The masker
(`masking.py`) does all else: words, order, budget, replacements, resuming and layouts.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray


class Masking:
    """Base of maskings. Instances hold no state."""

    keeps_words: ClassVar[bool] = True
    """False if each piece is a word of its own."""
    longest: ClassVar[int] = 1
    """Number of words in the longest unit."""
    acts_together: ClassVar[bool] = False
    """True if all pieces of a unit become [MASK], random pieces, or stay; otherwise each piece is drawn separately."""

    def lengths(
        self, draws: NDArray[np.float64], ids: NDArray[np.int64], first: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the number of words, 1 … `longest`, of the unit that would start at each word, `[words]`.

        `draws` `[words]` are uniform in [0, 1). `ids` `[tokens]` are the ordinary tokens of some rows, and `first`
        `[words]` the place in them where each word begins. The result depends on these arguments only, so that it does
        not change when a run resumes. It is called only if `longest` is above 1, so units of single words need none.
        """
        raise NotImplementedError(f"{type(self).__name__} has no lengths()")


class WholeWord(Masking):
    """Single words."""


class Token(Masking):
    """Single pieces."""

    keeps_words = False


class Ngram(Masking):
    """Runs of one to three words with p(n) ∝ 1/n, as in ALBERT (Lan et al., arXiv:1909.11942)."""

    longest = 3

    def lengths(
        self, draws: NDArray[np.float64], ids: NDArray[np.int64], first: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        shares = 1 / np.arange(1, self.longest + 1)
        return 1 + np.searchsorted(np.cumsum(shares[:-1]) / shares.sum(), draws, side="right")
