"""Sentences of a text by NLTK's Punkt (Kiss and Strunk, 2006). NLTK is imported only for `--split-sentences`.

Punkt uses its trained English parameters if they are installed (`punkt_tab`), otherwise its untrained defaults; nothing
is downloaded. The boundaries are NLTK's own, found in the text before any lower-casing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megatron_ddrp.data.tokenizers.tokenizer import Span
from megatron_ddrp.errors import UserError

Splitter = Callable[[str], list[int]]
"""Text → the first character of each sentence."""


def sentence_splitter() -> tuple[str, Splitter]:
    """Return (name of the parameters, splitter). Raises `UserError` if NLTK is not installed."""
    try:
        from nltk.tokenize import punkt
    except ImportError:
        raise UserError("--split-sentences needs NLTK, which is not installed; pip install nltk") from None
    try:
        name, splitter = "punkt-english", punkt.PunktTokenizer("english")
    except (LookupError, AttributeError):  # AttributeError: NLTK before 3.8.2 has no PunktTokenizer
        name, splitter = "punkt-untrained", punkt.PunktSentenceTokenizer()
    return name, lambda text: [begin for begin, _ in splitter.span_tokenize(text)]


def cut_sentences(ids: Sequence[int], spans: Sequence[Span], begins: Sequence[int]) -> list[Sequence[int]]:
    """Cut the ids of a text into those of its sentences, which begin at the characters `begins`; some may be empty.

    A piece belongs to the sentence of its last character, so the blank before a word stays with the word; a piece
    without characters belongs to the piece behind it (`Tokenizer.encode_with_spans`).
    """
    lasts = np.array([end if end > begin else np.iinfo(np.int64).max for begin, end in spans], np.int64)  # [pieces]
    lasts = np.minimum.accumulate(lasts[::-1])[::-1]
    cuts = [0, *np.searchsorted(lasts, begins[1:], side="right").tolist(), len(ids)]
    return [ids[low:high] for low, high in zip(cuts, cuts[1:], strict=False)]
