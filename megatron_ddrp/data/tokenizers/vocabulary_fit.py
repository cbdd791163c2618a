"""Warnings for a vocabulary that does not fit its text or its tokenizer type."""

from __future__ import annotations

from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer

MOST_UNKNOWN = 0.01
"""Share of unknown pieces in a text above which a warning is given."""
MOST_IMPOSSIBLE = 0.01
"""Share of impossible pieces in a vocabulary above which a warning is given; bert-base-uncased has none."""


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
