"""Conversion of a SentencePiece unigram model to the `tokenizers` library, which all versions of transformers read.

A .model file is a protocol buffer. The sentencepiece library does not return all of its fields, so the others are read
from the wire format, without a protobuf package: trainer (field 2: model type 3) and normalizer (field 3: name 1,
character map 2, dummy prefix 3, remove extra whitespace 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import Metaspace

from megatron_ddrp.data.tokenizers.sentencepiece import SentencePieceTokenizer, read_model
from megatron_ddrp.data.tokenizers.tokenizer import WORD_START

_UNIGRAM = 1
_COMPOSING = (b"nmt_nfkc", b"nmt_nfkc_cf", b"nfkc", b"nfkc_cf")
"""Names of the character maps that join a letter and its marks, or the parts of a Korean syllable."""


def unigram_tokenizer(content: bytes, pieces: Sequence[str], unk_id: int) -> RustTokenizer | None:
    """Return a tokenizer with the same pieces and ids, or None for a model other than unigram.

    `pieces` are all pieces of the training tokenizer, including those that it added to the model's own.
    """
    messages = dict(_fields(content))
    trainer, normalizer = (dict(_fields(messages.get(number, b""))) for number in (2, 3))
    if trainer.get(3, _UNIGRAM) != _UNIGRAM:
        return None
    processor = read_model(content, SentencePieceTokenizer.file_name)
    own = range(processor.get_piece_size())
    scores = [processor.get_score(i) for i in own] + [0.0] * (len(pieces) - len(own))
    vocabulary = list(zip(pieces, scores, strict=True))
    has_bytes = any(processor.is_byte(i) for i in own)
    tokenizer = RustTokenizer(models.Unigram(vocabulary, unk_id=unk_id, byte_fallback=has_bytes))
    steps: list[normalizers.Normalizer] = []
    if normalizer.get(1) in _COMPOSING:
        steps.append(normalizers.NFC())  # the next step maps one character at a time, and would leave them apart
    if normalizer.get(2):
        steps.append(normalizers.Precompiled(normalizer[2]))
    # "first" puts "▁" before a text, but not before the part after a [MASK]: there a leading space becomes "▁".
    prepend = "first" if normalizer.get(3, 1) else "never"
    if normalizer.get(4, 1):
        outer = r" +\z" if prepend == "first" else r"\A +| +\z"  # only spaces; Strip would also remove line breaks
        steps += [normalizers.Replace(Regex(outer), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=WORD_START, prepend_scheme=prepend)
    tokenizer.decoder = Metaspace(replacement=WORD_START, prepend_scheme=prepend)
    return tokenizer


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of each field: integers for varints, bytes for all other types."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, wire = key >> 3, key & 7
        size = {1: 8, 5: 4}.get(wire, 0)
        if wire in (0, 2):
            size, place = _varint(data, place)
        yield number, size if wire == 0 else data[place : place + size]
        place += size if wire else 0


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Return (value, place after it) of a base-128 integer."""
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, place
