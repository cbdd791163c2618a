"""Warnings for a vocabulary that does not fit its text or its tokenizer type."""

from __future__ import annotations

import unicodedata

from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer

MOST_UNKNOWN = 0.01
"""Share of unknown pieces in a text above which a warning is given."""
MOST_IMPOSSIBLE = 0.01
"""Share of impossible pieces in a vocabulary above which a warning is given; bert-base-uncased has none."""
WORD_END = "</w>"
"""The usual end of a piece that ends a word, as in the vocabularies of XLM, FlauBERT and HerBERT."""

MOST_STRIPPED = 0.01
"""Share of a text's letters that may lose a mark of their script before a warning is given."""
STRIPPED_BY_CUSTOM = ("LATIN", "GREEK", "CYRILLIC", "HEBREW", "ARABIC")
"""Scripts, by the first word of their letters' names, that are often written without accents or vowel points."""


def unknown_share(unknown: int, tokens: int) -> str:
    """Return the share of unknown pieces among the tokens of a text."""
    return f"{unknown / max(1, tokens):.2%} unknown pieces"


def warn_of_unknown(prefix: str, unknown: int, tokens: int) -> str | None:
    """Return a warning if too many tokens of a dataset are unknown pieces, otherwise None."""
    if unknown <= MOST_UNKNOWN * tokens:
        return None
    return (
        f"warning: {prefix}: {unknown:,} of {tokens:,} tokens ({unknown / tokens:.1%}) are unknown pieces: the "
        "vocabulary does not fit the text; check its language, case and tokenizer type, or train one on this text"
    )


def warn_of_impossible(tokenizer: Tokenizer) -> str | None:
    """Return a warning if too many pieces of a vocabulary can never occur, otherwise None."""
    impossible = tokenizer.count_impossible()
    if impossible <= MOST_IMPOSSIBLE * tokenizer.vocab_size:
        return None
    return (
        f"warning: {impossible:,} of {tokenizer.vocab_size:,} pieces can never occur: they have capitals or accents, "
        f"which {tokenizer.tokenizer_type} removes from text; did you mean BertWordPieceCase?"
    )


def warn_of_word_ends(tokenizer: Tokenizer) -> str | None:
    """Return a warning if a vocabulary marks where words end and not where they begin, otherwise None."""
    if not tokenizer.word_starts.all() or not any(piece.endswith(WORD_END) for piece in tokenizer.pieces):
        return None
    return (
        f"warning: this vocabulary marks the ends of words ({WORD_END}), not their beginnings, so every piece counts "
        "as a word: --masking whole-word masks single pieces, ngram neighbouring pieces, and --notes are of pieces"
    )


def warn_of_stripped(share: float) -> str | None:
    """Return a warning if too large a share of a text's letters loses a mark (`count_stripped`), otherwise None."""
    if share <= MOST_STRIPPED:
        return None
    return (
        f"warning: {share:.1%} of the letters lose a mark that spells another letter or vowel, as in Thai, Hindi or "
        "Japanese, because lower-case WordPiece strips accents: use --cased, or --type sentencepiece"
    )


def count_stripped(word: str) -> tuple[int, int]:
    """Return the number of a word's letters, and the number of those that lose a mark when accents are stripped.

    Letters of the scripts in `STRIPPED_BY_CUSTOM` count only for the first number.
    """
    if word.isascii():
        return sum(map(str.isalpha, word)), 0
    letters = stripped = 0
    loses = False  # whether a mark here belongs to a letter that has lost none yet
    for kind in map(_KINDS.__getitem__, unicodedata.normalize("NFD", word)):
        if kind == "mark":
            stripped, loses = stripped + loses, False
        elif kind != "spacing mark":
            letters, loses = letters + (kind != "other"), kind == "letter"
    return letters, stripped


class _Kinds(dict[str, str]):
    """Table of character → its kind for `count_stripped`."""

    def __missing__(self, character: str) -> str:
        category, name = unicodedata.category(character), unicodedata.name(character, "")
        kind = {"Mn": "mark", "Mc": "spacing mark"}.get(category, "other")
        if category.startswith("L"):
            kind = "customary" if name.startswith(STRIPPED_BY_CUSTOM) else "letter"
        self[character] = kind
        return kind


_KINDS = _Kinds()
