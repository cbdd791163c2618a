"""Warnings for a vocabulary that does not fit its text or its tokenizer type."""

from __future__ import annotations

import unicodedata

from megatron_ddrp.data.tokenizers.spelling import NONE
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer

MOST_UNKNOWN = 0.01
"""Share of unknown pieces in a text above which a warning is given."""
MOST_IMPOSSIBLE = 0.01
"""Share of impossible pieces in a vocabulary above which a warning is given; bert-base-uncased has none."""

MOST_STRIPPED = 0.01
"""Share of a text's letters that may lose a mark of their script before a warning is given."""
STRIPPED_BY_CUSTOM = ("LATIN", "GREEK", "CYRILLIC", "HEBREW", "ARABIC")
"""Scripts, by the first word of their letters' names, that are often written without accents or vowel points."""


def unknown_share(unknown: int, tokens: int, dropped: int = 0) -> str:
    """Return the share of unknown pieces among the tokens of a text, and the number of its dropped characters."""
    share = f"{unknown / max(1, tokens):.2%} unknown pieces"
    return f"{share}, {dropped:,} characters dropped" if dropped else share


def warn_of_unknown(prefix: str, unknown: int, tokens: int, dropped: int = 0) -> str | None:
    """Return a warning if too much of a dataset's text is unknown pieces or dropped characters, otherwise None."""
    if unknown + dropped <= MOST_UNKNOWN * tokens:
        return None
    found = f"{unknown:,} of {tokens:,} tokens ({unknown / max(1, tokens):.1%}) are unknown pieces"
    if dropped:
        found = f"{dropped:,} characters are dropped beside {tokens:,} tokens"
    return (
        f"warning: {prefix}: {found}: the vocabulary does not fit the text; check its language, case and tokenizer "
        "type, or train one on this text"
    )


def warn_of_vocabulary(tokenizer: Tokenizer) -> list[str]:
    """Return what a user must know about a vocabulary wherever it is loaded."""
    lines = []
    if tokenizer.drops_text:
        lines.append(
            "warning: this vocabulary has neither an unknown piece nor pieces for all bytes: characters that it lacks "
            "are dropped from every text without a trace; preprocess counts them"
        )
    if others := [role for role in tokenizer.roles_of("unk") if role != "[UNK]"]:
        piece = tokenizer.pieces[tokenizer.unk_id]
        lines.append(f"{piece!r} is [UNK] and {' and '.join(others)}; the pieces spell all bytes, so no text gives it")
    return lines


def warn_of_impossible(tokenizer: Tokenizer) -> str | None:
    """Return a warning if too many pieces of a vocabulary can never occur, otherwise None."""
    impossible = tokenizer.count_impossible()
    if impossible <= MOST_IMPOSSIBLE * tokenizer.vocab_size:
        return None
    return (
        f"warning: {impossible:,} of {tokenizer.vocab_size:,} pieces can never occur: they have capitals or accents, "
        f"which {tokenizer.tokenizer_type} removes from text; did you mean BertWordPieceCase?"
    )


def warn_of_unmarked_words(tokenizer: Tokenizer) -> str | None:
    """Return a warning if a vocabulary marks neither where words begin nor where they end, otherwise None."""
    if tokenizer.word_side != NONE:
        return None
    return (
        "warning: this vocabulary marks neither begins nor ends of words, so every piece counts as a word: --masking "
        "whole-word masks single pieces, ngram neighbouring pieces, --notes are of pieces, and --score l2r and "
        "whole-word equal pll"
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
