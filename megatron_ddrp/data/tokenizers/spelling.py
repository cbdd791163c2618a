"""Treatment of text for which a vocabulary has no piece: it is spelled by bytes, becomes [UNK], is dropped or fails.

Marks by which the pieces of a vocabulary tell words apart: at their begins, at their ends, or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import pre_tokenizers

from megatron_ddrp.data.atomic import AnyPath
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError

_NO_TEXT = {0xC0, 0xC1, *range(0xF5, 256)}
"""Bytes that UTF-8 never has. Byte-level vocabularies write them as the characters of these numbers."""
DROPPED = "\ufffd dropped"
"""Piece of a model that counts dropped characters; no vocabulary has it."""


def has_byte_pieces(vocabulary: Collection[str]) -> bool:
    """Return whether a vocabulary has the pieces of byte fallback, <0x00> to <0xF4>, for every byte of UTF-8."""
    return all(f"<0x{byte:02X}>" in vocabulary for byte in set(range(256)) - _NO_TEXT)


def parts_of(component: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield a component of a tokenizer.json and, for a sequence, the components inside it."""
    if component:
        yield component
        for kind in ("normalizers", "pretokenizers", "decoders"):
            for inner in component.get(kind, ()):
                yield from parts_of(inner)


def spells_all(layout: dict[str, Any]) -> bool:
    """Return whether the model of a tokenizer.json has a piece for every byte, so that no text is unknown to it."""
    model = layout["model"]
    if model["type"] not in ("BPE", "Unigram"):
        return False  # a word that is too long, or not in the list, is unknown
    vocabulary = model["vocab"] if model["type"] == "BPE" else {piece for piece, _ in model["vocab"]}
    if model.get("byte_fallback") and has_byte_pieces(vocabulary):
        return model["type"] == "BPE" or model.get("unk_id") is not None
    steps = [*parts_of(layout.get("normalizer")), *parts_of(layout.get("pre_tokenizer"))]
    if not any(step.get("type") == "ByteLevel" for step in steps):
        return False
    prefixes, suffixes = ({"", model.get(key) or ""} for key in ("continuing_subword_prefix", "end_of_word_suffix"))
    letters = {*pre_tokenizers.ByteLevel.alphabet()} - {*map(chr, _NO_TEXT)}
    return all(
        prefix + letter + suffix in vocabulary for letter in letters for prefix in prefixes for suffix in suffixes
    )


def unknown_piece(layout: dict[str, Any], path: AnyPath) -> str | None:
    """Return the piece that the model of a tokenizer.json gives for unknown text; None if it gives none.

    Raises `UserError` if the model would fail at the first unknown text.
    """
    model = layout["model"]
    vocabulary = model["vocab"]
    if model["type"] == "Unigram":
        unknown = model.get("unk_id")
        given = None if unknown is None else vocabulary[unknown][0]
        known, reason = given is not None, "unk_id is missing"
    else:
        given = model.get("unk_token")
        known, reason = given in vocabulary, f"unk_token is {given!r}, which is not in the model's vocabulary"
    if known or (model["type"] == "BPE" and given is None):
        return given
    if spells_all(layout):
        return None
    raise UserError(
        f"{path}: its {model['type']} model fails at the first text that it has no piece for: {reason}; name a piece "
        "of its vocabulary there, or use another tokenizer",
        WRONG_ARGUMENTS,
    )


def drop_probe(layout: dict[str, Any]) -> RustTokenizer:
    """Return a BPE tokenizer that gives `DROPPED` for each character that the one of a tokenizer.json drops."""
    model = layout["model"]
    vocabulary = {**model["vocab"], DROPPED: 1 + max(model["vocab"].values(), default=-1)}
    changed = {**model, "vocab": vocabulary, "unk_token": DROPPED, "fuse_unk": False}
    probe = RustTokenizer.from_str(json.dumps({**layout, "model": changed}))
    probe.encode_special_tokens = True  # as text, in the tokenizer too
    return probe


def count_dropped(probe: RustTokenizer, texts: Sequence[str]) -> int:
    """Return the number of characters for which a `drop_probe` gives `DROPPED`, also for one of their bytes."""
    dropped = probe.token_to_id(DROPPED)
    encodings = probe.encode_batch(list(texts), add_special_tokens=False)
    return sum(
        len({span for i, span in zip(encoding.ids, encoding.offsets, strict=True) if i == dropped})
        for encoding in encodings
        if dropped in encoding.ids
    )


BEGIN, END, NONE = "begin", "end", "none"
WORD_END = "</w>"
"""The usual end of a piece that ends a word, as in the vocabularies of XLM, FlauBERT and HerBERT."""


class WordMarks(NamedTuple):
    """Rule that tells from a piece whether a word begins or ends with it."""

    begins: Callable[[str], bool]
    ends: Callable[[str], bool] = lambda piece: False
    side: str = BEGIN
    """`BEGIN` or `END`, the side of a word that carries the mark, or `NONE`: then every piece counts as a word."""


UNMARKED = WordMarks(lambda piece: True, side=NONE)


def begins_with(*marks: str) -> WordMarks:
    """Return the rule of a vocabulary in which a word begins with one of the marks."""
    return WordMarks(lambda piece: piece.startswith(marks))


def ends_with(mark: str) -> WordMarks:
    """Return the rule of a vocabulary in which a word ends with the mark."""
    return WordMarks(lambda piece: False, lambda piece: piece.endswith(mark), END)


def side_of(pieces: Sequence[str], mark: str) -> str:
    """Return the side on which most pieces have the mark; `NONE` if they show none, as pieces of one character."""
    begins = sum(piece.startswith(mark) and not piece.endswith(mark) for piece in pieces)
    ends = sum(piece.endswith(mark) and not piece.startswith(mark) for piece in pieces)
    return END if ends > begins else BEGIN if begins else NONE


def word_begins(starts: NDArray[np.bool_], ends: NDArray[np.bool_], ids: NDArray) -> NDArray[np.bool_]:
    """Return whether a word begins at each place of `ids` `[…, seq]`: with its piece, or after one that ends a word.

    `starts` and `ends` are a tokenizer's `word_starts` and `word_ends`, `[vocab_size]`.
    """
    begins = starts[ids]
    if ends.any():
        begins[..., 1:] |= ends[ids[..., :-1]]
    return begins
