"""Export of a run's tokenizer as the files that AutoTokenizer reads: tokenizer.json, its settings, the vocabulary.

One difference comes from transformers: there, "[MASK]" in a text becomes the mask token, which fill-mask needs. In
training, the name of a special token (or of a byte, "<0x41>") inside a text is plain text.

Conversion of a SentencePiece unigram model to the `tokenizers` library, which all versions of transformers read.

A .model file is a protocol buffer. The sentencepiece library does not return all of its fields, so the others are read
from the wire format, without a protobuf package: trainer (field 2: model type 3) and normalizer (field 3: name 1,
character map 2, dummy prefix 3, remove extra whitespace 4).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import Metaspace

from megatron_ddrp.data.tokenizers.huggingface import make_exact, read_backend
from megatron_ddrp.data.tokenizers.row_form import backend_rows, usual_rows
from megatron_ddrp.data.tokenizers.sentencepiece import SentencePieceTokenizer, read_model
from megatron_ddrp.data.tokenizers.tokenizer import DESCRIPTION_FILE, SPECIAL_PIECES, WORD_START, Tokenizer
from megatron_ddrp.data.tokenizers.wordpiece import bert_backend

BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
PROBED_PIECES = 2000
"""Number of pieces whose text both tokenizers must split alike before the files count as equal."""


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int, num_segments: int = 2) -> str:
    """Write the files; return one line that lists them, or the reason why AutoTokenizer cannot load them.

    A copied tokenizer.json stays unchanged, byte for byte, if it already adds the special pieces around texts: datasets
    made with it store its sum.
    """
    tokenizer.save(folder)  # the vocabulary's own file
    (folder / DESCRIPTION_FILE).unlink()
    converted = _rust_tokenizer(tokenizer, folder)
    is_copied = tokenizer.tokenizer_type == "HuggingFace"
    if converted is None or not (is_copied or _agree(tokenizer, converted)):
        return (
            f"{tokenizer.tokenizer_type}: {tokenizer.file_name} only; transformers has no equal of this model, "
            "so AutoTokenizer cannot load it"
        )
    names = {f"{role}_token": tokenizer.pieces[getattr(tokenizer, f"{role}_id")] for role in SPECIAL_PIECES}
    if not (is_copied and _is_ready(tokenizer, folder)):
        _add_specials(tokenizer, converted)
        converted.save(str(folder / "tokenizer.json"))
    is_usual = tokenizer.rows.is_made_by(usual_rows(tokenizer.cls_id, tokenizer.sep_id))  # by BertTokenizer
    is_wordpiece = tokenizer.tokenizer_type.startswith("BertWordPiece") and is_usual
    has_segments = min(num_segments, tokenizer.rows.num_segments) > 1
    settings = {
        "tokenizer_class": "BertTokenizer" if is_wordpiece else "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "model_input_names": ["input_ids", *["token_type_ids"] * has_segments, "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **names,
    }
    if is_wordpiece:
        lower = tokenizer.tokenizer_type == "BertWordPieceLowerCase"
        settings |= {"do_lower_case": lower, "strip_accents": lower, "tokenize_chinese_chars": True}
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "special_tokens_map.json", names)
    written = dict.fromkeys([tokenizer.file_name, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
    return f"{tokenizer.tokenizer_type}: {', '.join(written)}"


def _rust_tokenizer(tokenizer: Tokenizer, folder: Path) -> RustTokenizer | None:
    """Return the same vocabulary and rules in the `tokenizers` library, or None if it cannot express them."""
    content = (folder / tokenizer.file_name).read_bytes()
    if tokenizer.tokenizer_type == "HuggingFace":
        copied = read_backend(content, folder / tokenizer.file_name)
        make_exact(copied)
        return copied
    if tokenizer.tokenizer_type == "SentencePiece":
        return unigram_tokenizer(content, tokenizer.pieces, tokenizer.unk_id)
    lower = tokenizer.tokenizer_type == "BertWordPieceLowerCase"
    ids = {piece: i for i, piece in enumerate(tokenizer.pieces)}
    return bert_backend(ids, tokenizer.pieces[tokenizer.unk_id], lower)


def _agree(tokenizer: Tokenizer, converted: RustTokenizer) -> bool:
    """Return whether both split the text of the vocabulary's first pieces into the same ids."""
    special = set(tokenizer.special_ids.tolist())
    pieces = [piece for i, piece in enumerate(tokenizer.pieces) if i not in special]
    words = [piece.replace(WORD_START, " ") for piece in pieces if not BYTE_PIECE.fullmatch(piece)][:PROBED_PIECES]
    texts = [" ".join(words[start : start + 50]) for start in range(0, len(words), 50)]
    ours = tokenizer.encode_batch(texts)
    return ours == [encoding.ids for encoding in converted.encode_batch(texts, add_special_tokens=False)]


def _is_ready(tokenizer: Tokenizer, folder: Path) -> bool:
    """Return whether the copied tokenizer.json already meets all requirements of an export."""
    file = folder / tokenizer.file_name
    copied = read_backend(file.read_bytes(), file)
    known = {i for i, token in copied.get_added_tokens_decoder().items() if token.special}
    varies = copied.truncation is not None or copied.padding is not None or getattr(copied.model, "dropout", None)
    is_marked = set(tokenizer.special_ids.tolist()) <= known
    return not varies and is_marked and tokenizer.rows.is_made_by(backend_rows(copied))


def _add_specials(tokenizer: Tokenizer, converted: RustTokenizer) -> None:
    """Mark the special pieces, and add [CLS] and [SEP] around texts as in training."""
    known = converted.get_added_tokens_decoder()  # a copied tokenizer has its own settings for them
    missing = [tokenizer.pieces[i] for i in tokenizer.special_ids.tolist() if i not in known]
    converted.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in missing])
    converted.post_processor = tokenizer.rows.processor(tokenizer.pieces)


def _write_json(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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
