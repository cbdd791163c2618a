"""Sentences of a text by NLTK's Punkt (Kiss and Strunk, 2006). NLTK is imported only for `--split-sentences`.

Punkt uses its trained English parameters if they are installed (`punkt_tab`), otherwise its untrained defaults; nothing
is downloaded. The boundaries are NLTK's own, found in the text before any lower-casing.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_ddrp.errors import UserError

Splitter = Callable[[str], list[str]]


def sentence_splitter() -> tuple[str, Splitter]:
    """Return (name of the parameters, function text → its sentences). Raises `UserError` if NLTK is not installed."""
    try:
        from nltk.tokenize import punkt
    except ImportError:
        raise UserError("--split-sentences needs NLTK, which is not installed; pip install nltk") from None
    try:
        name, split = "punkt-english", punkt.PunktTokenizer("english").tokenize
    except (LookupError, AttributeError):  # AttributeError: NLTK before 3.8.2 has no PunktTokenizer
        name, split = "punkt-untrained", punkt.PunktSentenceTokenizer().tokenize
    return name, split
