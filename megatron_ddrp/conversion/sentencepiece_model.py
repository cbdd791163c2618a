"""A SentencePiece unigram model as a tokenizer of the `tokenizers` library, which every version of transformers reads.

A .model file is a protocol buffer. The few fields needed are read from its wire format directly, so that no protobuf
package is required: pieces (1: piece 1, score 2, type 3), trainer (2: model type 3), normalizer (3: character map 2,
dummy prefix 3, remove extra whitespace 4).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import Metaspace

WORD_START = "\u2581"
_UNIGRAM = 1
_BYTE = 6  # type of a byte-fallback piece

Field = tuple[int, int | bytes]


def unigram_tokenizer(content: bytes, pieces: Sequence[str], unk_id: int) -> RustTokenizer | None:
    """The same pieces under the same ids, or None for a model other than unigram.

    `pieces` are all pieces of the training tokenizer, those that it added to the model's own included.
    """
    fields = list(_fields(content))
    trainer = dict(_fields(_message(fields, 2)))
    normalizer = dict(_fields(_message(fields, 3)))
    if trainer.get(3, _UNIGRAM) != _UNIGRAM:
        return None
    own = [dict(_fields(value)) for number, value in fields if number == 1 and isinstance(value, bytes)]
    scores = [_score(piece.get(2)) for piece in own] + [0.0] * (len(pieces) - len(own))
    has_bytes = any(piece.get(3) == _BYTE for piece in own)
    tokenizer = RustTokenizer(
        models.Unigram(list(zip(pieces, scores, strict=True)), unk_id=unk_id, byte_fallback=has_bytes)
    )
    steps: list[normalizers.Normalizer] = []
    character_map = normalizer.get(2)
    if isinstance(character_map, bytes) and character_map:
        steps.append(normalizers.Precompiled(character_map))
    if normalizer.get(4, 1):
        outer = normalizers.Replace(Regex(r"\A +| +\z"), "")  # spaces alone; Strip would take line breaks as well
        steps += [outer, normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    prepend = "always" if normalizer.get(3, 1) else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=WORD_START, prepend_scheme=prepend)
    tokenizer.decoder = Metaspace(replacement=WORD_START, prepend_scheme=prepend)
    return tokenizer


def _message(fields: Sequence[Field], wanted: int) -> bytes:
    """The last sub-message of a number; empty where there is none."""
    found = [value for number, value in fields if number == wanted and isinstance(value, bytes)]
    return found[-1] if found else b""


def _score(raw: int | bytes | None) -> float:
    return struct.unpack("<f", raw)[0] if isinstance(raw, bytes) else 0.0


def _fields(data: bytes) -> Iterator[Field]:
    """(number, value) of each field: integers for varints, bytes for everything else."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, place = _varint(data, place)
            yield number, value
            continue
        if wire == 2:
            size, place = _varint(data, place)
        else:
            size = 8 if wire == 1 else 4
        yield number, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """(value, place after it) of a base-128 integer."""
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, place
