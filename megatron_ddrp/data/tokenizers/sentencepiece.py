"""SentencePiece models (Kudo and Richardson, arXiv:1808.06226) as pre-training tokenizers.

A model's own control pieces ([CLS] or <s>, [SEP] or </s>, …) take the special roles. Pieces for missing roles are
appended after the model's pieces, so any model can be used without retraining.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache

import sentencepiece

from megatron_ddrp.data.atomic import AnyPath
from megatron_ddrp.data.tokenizers.spelling import END, UNMARKED, WordMarks, begins_with, ends_with, has_byte_pieces
from megatron_ddrp.data.tokenizers.tokenizer import (
    SPECIAL_PIECES,
    WORD_START,
    Span,
    Tokenizer,
    find_specials,
)
from megatron_ddrp.foreign import read_bytes, reading

# Field 3 of a model (its normalizer) with field 3 (add_dummy_prefix). Appended to a model, it overrides its own.
_DUMMY_PREFIX = {True: b"\x1a\x02\x18\x01", False: b"\x1a\x02\x18\x00"}


class SentencePieceTokenizer(Tokenizer):
    """Tokenizer of type `SentencePiece`, from a .model file."""

    library = "sentencepiece"
    file_name = "tokenizer.model"

    def __init__(self, model_file: AnyPath):
        content = read_bytes(model_file)
        self._processor = read_model(content, model_file)
        own = range(self._processor.GetPieceSize())
        pieces = [self._processor.IdToPiece(i) for i in own]
        specials = find_specials({piece: i for i, piece in enumerate(pieces)}) | {"unk": self._processor.unk_id()}
        for role, names in SPECIAL_PIECES.items():
            if role not in specials:
                specials[role] = len(pieces)
                pieces.append(names[0])
        super().__init__(
            "SentencePiece",
            pieces,
            specials,
            words=_word_marks(content, pieces),
            content=content,
            more_special_ids=[i for i in own if self._processor.IsControl(i)],
        )
        self.spells_all = has_byte_pieces({pieces[i] for i in own if self._processor.IsByte(i)})

    def encode(self, text: str) -> list[int]:
        return self._only_text(self._processor.EncodeAsIds(text))

    def encode_with_masks(self, text: str) -> list[int]:
        """Return ids with masks. A part after a mask begins with "▁" only if it begins with a space.

        Where "▁" ends words, a part before a mask ends with it only if it ends with a space.
        """
        parts = text.split(self.pieces[self.mask_id])
        whole = len(parts) - 1 if self.word_side == END else 0  # this part has no mask on the side of the "▁"
        ids: list[int] = []
        for number, part in enumerate(parts):
            beside = part[-1:] if self.word_side == END else part[:1]
            read = self._processor if number == whole else _with_dummy_prefix(self._content, beside.isspace())
            ids += [self.mask_id] * (number > 0) + self._only_text(read.EncodeAsIds(part))
        return ids

    def encode_with_spans(self, text: str) -> tuple[list[int], list[Span]]:
        if hasattr(self._processor, "EncodeAsOffsetMapping"):  # not in sentencepiece up to 0.2.1
            encoding = self._processor.EncodeAsOffsetMapping(text)
            return self._only_text(encoding["ids"]), encoding["offsets"]
        pieces = self._processor.encode(text, out_type="immutable_proto").pieces  # type: ignore[arg-type]
        return self._only_text([piece.id for piece in pieces]), [(piece.begin, piece.end) for piece in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.DecodePieces([self.pieces[i] for i in ids])


def read_model(content: bytes, file: AnyPath) -> sentencepiece.SentencePieceProcessor:
    """Return the library's model of a .model file. Raises `UserError` about `file` for any other content."""
    with reading(os.fspath(file), "not a SentencePiece model; expected a .model file"):
        if not content:
            raise ValueError("empty")  # of which the library makes a processor without a model
        return sentencepiece.SentencePieceProcessor(model_proto=content)


@lru_cache(maxsize=2)
def _with_dummy_prefix(content: bytes, wanted: bool) -> sentencepiece.SentencePieceProcessor:
    """Return a model that puts "▁" before every text, or before none."""
    return read_model(content + _DUMMY_PREFIX[wanted], SentencePieceTokenizer.file_name)


def _word_marks(content: bytes, pieces: Sequence[str]) -> WordMarks:
    """Return the rule of a model's words: its character for a space comes before a word, or after it.

    The side is `treat_whitespace_as_suffix` of the trainer, and shows where the model puts the mark of a single word.
    """
    shown = "".join(_with_dummy_prefix(content, True).EncodeAsPieces("a"))
    mark = next((mark for mark in (WORD_START, " ") if mark in shown), WORD_START)
    if not any(mark in piece for piece in pieces):
        return UNMARKED
    return begins_with(mark) if shown.startswith(mark) or not shown.endswith(mark) else ends_with(mark)
