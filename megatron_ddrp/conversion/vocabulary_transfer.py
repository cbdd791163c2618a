"""Another vocabulary for a trained encoder: each new piece begins as the mean of the old pieces that spell it.

A piece that both vocabularies have keeps its row; any other gets the mean of the rows of the pieces into which the old
tokenizer splits it; a piece that the old one cannot spell gets the mean of all rows (Gee, Zugarini, Rigutini, Torroni:
Fast Vocabulary Transfer for Language Model Compression, EMNLP 2022 industry track, section 3). Rows are those of the
token embedding, of E_Δ under replaced-token detection, and of the output bias.

Vocabularies of different kinds are compared by what a piece stands for: its text, and whether a word begins with it.
WordPiece's `ing` and `##ing` are SentencePiece's `▁ing` and `ing`, and a byte-level vocabulary's `Ġing` and `ing`. Two
vocabularies that both mark the ends of words are compared by whether a word ends with a piece. If one of them marks
begins and the other ends, or one marks nothing, the text alone counts: the other fact cannot be known.

BERT splits text at every punctuation mark and ideograph, so each of them is a word, and no text gives a piece such as
`##,` or `##中`, whose row is untrained. Such pieces spell nothing: `,` is the old piece of both `▁,` and `,`. In the
other direction the new `,` is the old `,`: most texts have no space before it, so `▁,` is rare.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ddrp.conversion.tokenizer_files import BYTE_PIECE
from megatron_ddrp.data.tokenizers.spelling import BEGIN, NONE, WORD_END
from megatron_ddrp.data.tokenizers.tokenizer import SPECIAL_PIECES, Tokenizer

CONTINUES = "##"
"""WordPiece's mark of a piece inside a word."""
NO_TEXT = "\ufffd"
"""Character that stands for bytes which are no text by themselves, as in pieces of byte-level vocabularies."""


class Surface(NamedTuple):
    """Text of an ordinary piece, and its place in a word."""

    text: str
    has_mark: bool
    """True if a word begins with the piece, or ends with it, as both vocabularies mark it."""


@dataclass(frozen=True)
class Transfer:
    """Old pieces of which each new piece is the mean."""

    parts: list[list[int]]
    """New id → old ids; none stands for all ordinary ones."""
    ordinary: list[int]
    """Old ids that are not special."""
    old_size: int
    """Number of old pieces."""
    kept: int
    """Number of pieces that the old vocabulary has too."""
    spelled: int
    """Number of other pieces that the old tokenizer can spell; the rest are the mean of all."""
    by_text: bool = False
    """True if pieces are compared by their text alone."""

    def summary(self) -> str:
        """Return a line about the pieces."""
        rest = len(self.parts) - self.kept - self.spelled
        return (
            f"{len(self.parts):,} pieces instead of {self.old_size:,}: {self.kept:,} kept, {self.spelled:,} the mean "
            f"of the old pieces that spell them, {rest:,} the mean of all"
            + "; compared by text alone, because the two do not mark words on the same side"
            * self.by_text
        )

    def rows(self, table: Tensor) -> Tensor:
        """Return the new rows `[new pieces, …]` of a table `[old pieces, …]` with one row per piece."""
        ids = torch.tensor([i for parts in self.parts for i in parts])
        begins = torch.tensor([0, *(len(parts) for parts in self.parts[:-1])]).cumsum(0)
        flat = table.reshape(len(table), -1).double()  # [old pieces, width]
        means = F.embedding_bag(ids, flat, begins, mode="mean")
        means[[not parts for parts in self.parts]] = flat[self.ordinary].mean(0)
        return means.to(table.dtype).reshape(len(self.parts), *table.shape[1:])


def plan_transfer(old: Tokenizer, new: Tokenizer) -> Transfer:
    """Return the old pieces that make up each piece of a new vocabulary."""
    same_kind = old.tokenizer_type == new.tokenizer_type
    same_marks = old.word_side == new.word_side != NONE
    old_alone, new_alone = _lone_characters(old), _lone_characters(new)
    known = _known(old, same_marks, old_alone)
    names = {piece: i for i, piece in enumerate(old.pieces)}
    roles = {getattr(new, f"{role}_id"): getattr(old, f"{role}_id") for role in SPECIAL_PIECES}
    surfaces, special = _surfaces(new, same_marks), set(old.special_ids.tolist())
    unused = _unused(new, surfaces, new_alone)
    if not _is_wordpiece(old):
        inside = {i: Surface(text, False) for i, (text, _) in surfaces.items() if text in new_alone}
        surfaces |= {i: surface for i, surface in inside.items() if surface in known}
    parts, kept, spelled = list[list[int]](), 0, 0
    for i, piece in enumerate(new.pieces):
        surface = surfaces.get(i)
        own = roles.get(i, names.get(piece) if i in unused else None)
        if own is None and surface:
            own = known.get(surface)
        if own is None and surface is None and (same_kind or i in new.special_ids):
            own = names.get(piece)  # bytes, or a further special piece
        if own is not None:
            parts.append([own])
            kept += 1
        elif surface and (spelling := _spell(surface, old, known, old_alone)):
            parts.append(spelling)
            spelled += 1
        else:
            parts.append([])
    ordinary = [i for i in range(old.vocab_size) if i not in special]
    return Transfer(parts, ordinary, old.vocab_size, kept, spelled, not same_marks)


def _surfaces(tokenizer: Tokenizer, marks: bool) -> dict[int, Surface]:
    """Return id → surface of the ordinary pieces that are text by themselves; without `marks` none has one."""
    special, found = set(tokenizer.special_ids.tolist()), {}
    for i, piece in enumerate(tokenizer.pieces):
        has_mark = bool(tokenizer.word_starts[i] or tokenizer.word_ends[i])
        inside = not has_mark and piece.startswith(CONTINUES) and len(piece) > len(CONTINUES)
        text = "" if i in special else piece[len(CONTINUES) :] if inside else tokenizer.decode([i]).strip()
        text = text.removesuffix(WORD_END) if tokenizer.word_ends[i] else text
        if text and NO_TEXT not in text and not BYTE_PIECE.fullmatch(piece):
            found[i] = Surface(text, has_mark and marks)
    return found


def _known(old: Tokenizer, marks: bool, alone: Set[str]) -> dict[Surface, int]:
    """Return surface → id of the old pieces that texts give. A lone character counts as inside a word too."""
    surfaces = _surfaces(old, marks)
    unused = _unused(old, surfaces, alone)
    known = {surface: i for i, surface in reversed(surfaces.items()) if i not in unused}  # of twins, the first counts
    return known | {Surface(text, False): i for (text, _), i in known.items() if text in alone}


def _is_wordpiece(tokenizer: Tokenizer) -> bool:
    """Return whether `CONTINUES` tells the pieces inside words from those that begin one."""
    begins = np.array([not piece.startswith(CONTINUES) for piece in tokenizer.pieces])
    begins[tokenizer.special_ids] = True
    return tokenizer.word_side == BEGIN and np.array_equal(tokenizer.word_starts, begins)


def _lone_characters(tokenizer: Tokenizer) -> set[str]:
    """Return the characters that a WordPiece tokenizer makes words even between letters; empty for other kinds."""
    if not _is_wordpiece(tokenizer):
        return set()
    characters = sorted(set().union(*tokenizer.pieces))
    split = tokenizer.encode_batch([f"a{character}a" for character in characters])
    begins = [tokenizer.word_starts[ids] for ids in split]
    return {character for character, row in zip(characters, begins, strict=True) if len(row) == 3 and row.all()}


def _unused(tokenizer: Tokenizer, surfaces: Mapping[int, Surface], alone: Set[str]) -> set[int]:
    """Return the ids of the pieces that no text gives, because they hold a lone character and are not just that."""
    held = [i for i, surface in surfaces.items() if not alone.isdisjoint(surface.text)]
    return {i for i in held if tokenizer.pieces[i] not in alone}


def _spell(surface: Surface, old: Tokenizer, known: Mapping[Surface, int], alone: Set[str]) -> list[int]:
    """Return the old ids that spell a new piece, as words are split; empty if some of it is unknown to the old one."""
    text = surface.text
    if not surface.has_mark:
        end = next((place for place, character in enumerate(text) if character in alone), len(text))
        inside, rest = _longest_first(text[:end], known), _encode(text[end:], old)
        if bool(inside) == (end > 0) and bool(rest) == (end < len(text)):
            return inside + rest
    return _encode(text, old)


def _encode(text: str, old: Tokenizer) -> list[int]:
    """Return the old ids of a text; empty if some of it is unknown."""
    ids = old.encode(f" {text}") if text else []
    return [] if old.unk_id in ids or old.count_dropped([text]) else ids


def _longest_first(text: str, known: Mapping[Surface, int]) -> list[int]:
    """Return the old ids inside words that spell a text, the longest piece first; empty if there are none."""
    ids, begin = [], 0
    while begin < len(text):
        end = next((end for end in range(len(text), begin, -1) if Surface(text[begin:end], False) in known), begin)
        if end == begin:
            return []
        ids.append(known[Surface(text[begin:end], False)])
        begin = end
    return ids
