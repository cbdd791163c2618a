"""The two tokenizers by fast libraries: BERT's WordPiece and SentencePiece.

BERT's WordPiece (Devlin et al., arXiv:1810.04805) by the Rust `tokenizers` library, with a cache of words.

Words repeat, and looking a word up is faster than tokenizing it again. The table holds the bytes that a dataset
stores: a text costs one split, one look-up per word and one join. The split is exact for every Unicode text: space,
tab, newline and carriage return always separate words, ASCII punctuation marks and ideographs are always separate
words, and BERT's normalization (clean-up, accents, lower case) never depends on characters across such a point.

SentencePiece models (Kudo and Richardson, arXiv:1808.06226) as pre-training tokenizers.

A model's own control pieces ([CLS] or <s>, [SEP] or </s>, …) take the special roles. Pieces for missing roles are
appended after the model's pieces, so any model can be used without retraining.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import sentencepiece
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron_ddrp.data.atomic import AnyPath
from megatron_ddrp.data.tokenizers.tokenizer import (
    END,
    SPECIAL_PIECES,
    UNMARKED,
    WORD_START,
    Span,
    Tokenizer,
    WordMarks,
    begins_with,
    ends_with,
    find_specials,
    has_byte_pieces,
    require_specials,
)
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import read_bytes, reading, refuse_wide

WORDS = re.compile(r"[^ \t\n\r!-/:-@\[-`{-~]+|[!-/:-@\[-`{-~]")
_IDEOGRAPHS = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002f800-\U0002fa1f"
AROUND_IDEOGRAPHS = re.compile(f"[{_IDEOGRAPHS}]|[^{_IDEOGRAPHS}]+")
LONGEST_WORD = 100
"""Number of characters above which a word becomes [UNK] as a whole, as in BERT."""
CACHED_WORDS = 500_000  # about 100 MB per process
CACHED_WORD_LENGTH = 64  # characters; a longer word (a URL) hardly repeats


class WordPieceTokenizer(Tokenizer):
    """Tokenizer of type `BertWordPieceLowerCase` or `BertWordPieceCase`, from a vocab.txt (one piece per line).

    The id of a piece is its line number, from 0.
    """

    library = "tokenizers"
    file_name = "vocab.txt"

    def __init__(self, vocab_file: AnyPath, tokenizer_type: str = "BertWordPieceLowerCase"):
        pieces = read_vocab(vocab_file)
        ids = {piece: i for i, piece in enumerate(pieces)}
        specials = find_specials(ids)
        require_specials(specials, vocab_file, "add one line for each, or train a vocabulary")
        super().__init__(
            tokenizer_type,
            pieces,
            specials,
            words=WordMarks(lambda piece: not piece.startswith("##")),
            content="".join(f"{piece}\n" for piece in pieces).encode(),
        )
        self._lower = lower = tokenizer_type == "BertWordPieceLowerCase"
        self._backend = bert_backend(ids, pieces[self.unk_id], lower)
        self._words = _WordCache(self._backend, lower, np.arange(len(pieces), dtype=self.dtype))

    def encode(self, text: str) -> list[int]:
        return np.frombuffer(self._pack(text), self.dtype).tolist()

    def encode_with_spans(self, text: str) -> tuple[list[int], list[Span]]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode_packed(self, texts: Sequence[str]) -> list[bytes]:
        return [self._pack(text) for text in texts]

    def count_impossible(self) -> int:
        if not self._lower:
            return 0
        fold = normalizers.BertNormalizer(clean_text=False, handle_chinese_chars=False, strip_accents=True)
        special = set(self.special_ids.tolist())
        ordinary = (piece.removeprefix("##") for i, piece in enumerate(self.pieces) if i not in special)
        return sum(fold.normalize_str(piece) != piece for piece in ordinary)

    def _pack(self, text: str) -> bytes:
        return b"".join(map(self._words.__getitem__, WORDS.findall(text)))

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)


class _WordCache(dict[str, bytes]):
    """Table of word, as written in the text → ids of its pieces, as bytes."""

    def __init__(self, backend: RustTokenizer, lower: bool, ids: np.ndarray):
        super().__init__()
        self._backend = backend
        self._lower = lower
        self._packed = [i.tobytes() for i in ids]  # id → its bytes

    def __missing__(self, word: str) -> bytes:
        packed = self._packed
        if word.isascii() and word.isalnum():  # nothing to normalize but the case
            pieces = self._backend.model.tokenize(word.lower() if self._lower else word)
            ids = b"".join([packed[piece.id] for piece in pieces])
        elif len(parts := AROUND_IDEOGRAPHS.findall(word)) > 1:
            ids = b"".join(map(self.__getitem__, parts))
        else:
            ids = b"".join([packed[i] for i in self._backend.encode(word, add_special_tokens=False).ids])
        if len(word) <= CACHED_WORD_LENGTH:
            if len(self) >= CACHED_WORDS:
                self.clear()  # frequent words soon return, and words of another language get room
            self[word] = ids
        return ids


def bert_backend(ids: Mapping[str, int], unknown: str, lower: bool) -> RustTokenizer:
    """Return the library's tokenizer with BERT's rules and these pieces."""
    backend = RustTokenizer(models.WordPiece(dict(ids), unk_token=unknown, max_input_chars_per_word=LONGEST_WORD))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=lower)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def read_vocab(path: AnyPath) -> list[str]:
    """Return the pieces of a vocab.txt in line order, without blanks around them, as in BERT's own reader.

    A byte order mark is left out. Raises `UserError` if the file is missing, empty or not UTF-8, or has a zero byte or
    a piece twice (one of the two could never occur).
    """
    data, name = read_bytes(path), os.fspath(path)
    if not data:
        raise UserError(f"{name}: empty; expected a vocab.txt with one piece per line")
    refuse_wide(data, name)
    try:
        lines = data.removeprefix(codecs.BOM_UTF8).decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name}:{line}: not UTF-8; expected a vocab.txt with one piece per line") from None
    lines_of: dict[str, int] = {}
    for number, piece in enumerate(map(_without_blanks, lines), 1):
        if "\0" in piece:
            raise UserError(f"{name}:{number}: a piece with a zero byte: damaged; copy the file again")
        first = lines_of.setdefault(piece, number)
        if first != number:
            raise UserError(
                f"{name}:{number}: {piece!r} is already on line {first}, expected each piece once; "
                f"line {first} can never occur: write another name there, such as [unused-{first}]"
            )
    return list(lines_of)


def _without_blanks(line: str) -> str:
    """Return the piece of a line. A line of blanks is a piece that no text gives, so it keeps its place."""
    return line.strip() or line.removesuffix("\r")


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
