"""The tokenizers of each type, by fast libraries: WordPiece, SentencePiece, and the file of Hugging Face models."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron_ddrp.data.atomic import AnyPath
from megatron_ddrp.data.tokenizers.tokenizer import (
    BEGIN,
    DESCRIPTION_FILE,
    END,
    SPECIAL_PIECES,
    UNMARKED,
    WORD_END,
    WORD_START,
    Span,
    Tokenizer,
    WordMarks,
    backend_rows,
    begins_with,
    count_dropped,
    drop_probe,
    ends_with,
    find_specials,
    has_byte_pieces,
    parts_of,
    require_specials,
    side_of,
    spells_all,
    unknown_piece,
)
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import parse_json, read_bytes, read_object, reading, refuse_wide

WORDS = re.compile(r"[^ \t\n\r!-/:-@\[-`{-~]+|[!-/:-@\[-`{-~]")
_IDEOGRAPHS = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002f800-\U0002fa1f"
AROUND_IDEOGRAPHS = re.compile(f"[{_IDEOGRAPHS}]|[^{_IDEOGRAPHS}]+")
LONGEST_WORD = 100
"""Number of characters above which a word becomes [UNK] as a whole, as in BERT."""
CACHED_WORDS = 500_000  # about 100 MB per process
CACHED_WORD_LENGTH = 64  # characters; a longer word (a URL) hardly repeats


class WordPieceTokenizer(Tokenizer):
    """Tokenizer of type `BertWordPieceLowerCase` or `BertWordPieceCase`, from a vocab.txt (one piece per line).

    BERT's WordPiece (Devlin et al., arXiv:1810.04805) by the Rust `tokenizers` library, with a cache of words. The id
    of a piece is its line number, from 0.
    """

    library = "tokenizers"
    file_name = "vocab.txt"

    def __init__(self, vocab_file: AnyPath, tokenizer_type: str = "BertWordPieceLowerCase"):
        pieces = read_vocab(vocab_file)
        ids = {piece: i for i, piece in enumerate(pieces)}
        specials = find_specials(ids)
        require_specials(specials, vocab_file, "add one line for each, or train a vocabulary")
        content = "".join(f"{piece}\n" for piece in pieces).encode()
        super().__init__(tokenizer_type, pieces, specials, WordMarks(lambda piece: not piece.startswith("##")), content)
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
    """Table of word, as written in the text → ids of its pieces, as the bytes that a dataset stores.

    Words repeat, and looking a word up is faster than tokenizing it again: a text costs one split, one look-up per word
    and one join. The split is exact for every Unicode text: space, tab, newline and carriage return always separate
    words, ASCII punctuation marks and ideographs are always separate words, and BERT's normalization (clean-up,
    accents, lower case) never depends on characters across such a point.
    """

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
    expected = "expected a vocab.txt with one piece per line; others need --tokenizer-type and --tokenizer-model"
    if not data or (data.startswith(b"{") and data.rstrip().endswith(b"}")):
        raise UserError(f"{name}: {'JSON' if data else 'empty'}; {expected}")
    refuse_wide(data, name)
    try:
        lines = data.removeprefix(codecs.BOM_UTF8).decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name}:{line}: not UTF-8; {expected}") from None
    lines_of: dict[str, int] = {}
    # A line of blanks is a piece that no text gives, so it keeps its place.
    for number, piece in enumerate((line.strip() or line.removesuffix("\r") for line in lines), 1):
        if "\0" in piece:
            raise UserError(f"{name}:{number}: a piece with a zero byte: damaged; copy the file again")
        first = lines_of.setdefault(piece, number)
        if first != number:
            raise UserError(
                f"{name}:{number}: {piece!r} is already on line {first}, expected each piece once; "
                f"line {first} can never occur: write another name there, such as [unused-{first}]"
            )
    return list(lines_of)


# Field 3 of a model (its normalizer) with field 3 (add_dummy_prefix). Appended to a model, it overrides its own.
_DUMMY_PREFIX = {True: b"\x1a\x02\x18\x01", False: b"\x1a\x02\x18\x00"}


class SentencePieceTokenizer(Tokenizer):
    """Tokenizer of type `SentencePiece` (Kudo and Richardson, arXiv:1808.06226), from a .model file.

    A model's own control pieces ([CLS] or <s>, [SEP] or </s>, …) take the special roles. Pieces for missing roles are
    appended after the model's pieces, so any model can be used without retraining.
    """

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
        control = [i for i in own if self._processor.IsControl(i)]
        super().__init__("SentencePiece", pieces, specials, _marks_of_model(content, pieces), content, control)
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


def _marks_of_model(content: bytes, pieces: Sequence[str]) -> WordMarks:
    """Return the rule of a model's words: its character for a space comes before a word, or after it.

    The side is `treat_whitespace_as_suffix` of the trainer, and shows where the model puts the mark of a single word.
    """
    shown = "".join(_with_dummy_prefix(content, True).EncodeAsPieces("a"))
    mark = next((mark for mark in (WORD_START, " ") if mark in shown), WORD_START)
    if not any(mark in piece for piece in pieces):
        return UNMARKED
    return begins_with(mark) if shown.startswith(mark) or not shown.endswith(mark) else ends_with(mark)


SPARE_IDS = 2**16
"""Largest number of ids without a piece in a vocabulary."""


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer of type `HuggingFace`, from the tokenizer.json of a Hugging Face model: a folder with it, or the file.

    The special roles come from `named` (role → piece), otherwise from the settings beside the file, otherwise from the
    pieces that it puts around a text, otherwise from the usual names. Decoders' beginning and end of a text stand for
    missing [CLS] and [SEP]; a vocabulary that spells every text needs no [UNK], for which [SEP] then stands.
    """

    library = "tokenizers"
    file_name = "tokenizer.json"

    def __init__(self, path: AnyPath, named: Mapping[str, str] | None = None):
        file = Path(path) / self.file_name if Path(path).is_dir() else Path(path)
        if not file.exists() and file.with_name("vocab.txt").exists():
            raise UserError(f"{file}: no such file; for its vocab.txt use --tokenizer-type BertWordPieceLowerCase")
        if not file.exists() and file.with_name("merges.txt").exists():
            raise UserError(f"{file}: no such file; AutoTokenizer.from_pretrained(…).save_pretrained(…) writes it")
        content = read_bytes(file).removeprefix(codecs.BOM_UTF8)  # which the library does not read
        self._backend = read_backend(content, file)
        with reading(file):
            layout = parse_json(self._backend.to_str(), lenient=True)  # with the keys that the file leaves out
        make_exact(self._backend)
        self._read_specials_as_text()
        unknown = unknown_piece(layout, file)
        ids = self._backend.get_vocab(with_added_tokens=True)
        around = self._backend.encode("").tokens  # the pieces around every text, if there are two
        outer = dict(zip(("cls", "sep"), around, strict=True)) if len(around) == 2 else {}
        own = _named_specials(file.parent)
        ends = {role: own[other] for role, other in (("cls", "bos"), ("sep", "eos")) if other in own}
        specials = find_specials(ids, named or ends | outer | own)
        closed = spells_all(layout)
        if unknown is not None and not (closed and "unk" in specials):
            specials["unk"] = ids[unknown]  # whatever the settings say
        elif closed and "sep" in specials:
            specials.setdefault("unk", specials["sep"])  # no text gives it
        require_specials(specials, file, "add them to the tokenizer or use another one")
        if max(ids.values()) >= len(ids) + SPARE_IDS:
            raise UserError(f"{file}: {len(ids)} pieces have ids up to {max(ids.values())}; use another tokenizer")
        pieces = [""] * (max(ids.values()) + 1)
        for piece, i in ids.items():
            pieces[i] = piece
        marks, added = _marks_of_layout(layout, pieces, self._backend), self._backend.get_added_tokens_decoder()
        more_special_ids = [i for i, token in added.items() if token.special]
        super().__init__("HuggingFace", pieces, specials, marks, content, more_special_ids)
        self.own_rows = backend_rows(self._backend)
        self.spells_all = closed
        self.drops_text = unknown is None and not self.spells_all
        self._drop_probe = drop_probe(layout) if self.drops_text else None

    def encode(self, text: str) -> list[int]:
        return self._only_text(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_with_spans(self, text: str) -> tuple[list[int], list[Span]]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        return self._only_text(encoding.ids), encoding.offsets

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._only_text(e.ids) for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_masks(self, text: str) -> list[int]:
        """Return ids with masks. The library's own rules decide about the spaces around a mask."""
        if self.mask_id not in self._backend.get_added_tokens_decoder():
            return super().encode_with_masks(text)
        self._backend.encode_special_tokens = False
        try:
            found = self._backend.encode(text, add_special_tokens=False).ids
        finally:
            self._read_specials_as_text()
        hidden = self._never_from_text - {self.mask_id}
        return [self.unk_id if i in hidden else i for i in found]

    def count_dropped(self, texts: Sequence[str]) -> int:
        return count_dropped(self._drop_probe, texts) if self._drop_probe else 0

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def _read_specials_as_text(self) -> None:
        self._backend.encode_special_tokens = True  # "[MASK]" in a text is text

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._read_specials_as_text()  # the library loses this setting when pickled
        if self._drop_probe:
            self._drop_probe.encode_special_tokens = True


def read_backend(content: bytes, file: AnyPath) -> RustTokenizer:
    """Return the library's tokenizer of a tokenizer.json. Raises `UserError` about `file` for any other content."""
    with reading(os.fspath(file), "not a tokenizer.json of the tokenizers library ({error})"):
        return RustTokenizer.from_buffer(content)


def make_exact(backend: RustTokenizer) -> None:
    """Switch off what a file may ask for and training must not have: cuts, padding, and merges left out at random."""
    backend.no_truncation()
    backend.no_padding()
    if getattr(backend.model, "dropout", None):
        backend.model.dropout = None


def _named_specials(folder: Path) -> dict[str, str]:
    """Return role → piece from the folder's configuration files; empty without them.

    Where they differ, the newer layout's tokenizer_config.json counts, which lists the added tokens, and the map beside
    an older one, as in transformers.
    """
    named = {}
    names = ("special_tokens_map.json", "tokenizer_config.json", DESCRIPTION_FILE)
    found = [read_object(folder / name) if (folder / name).exists() else {} for name in names]
    if "added_tokens_decoder" not in found[1]:
        found[:2] = found[1::-1]
    for config in found:
        own = config.get("special_tokens")  # of `Tokenizer.save`
        for role in (*SPECIAL_PIECES, "bos", "eos"):
            token = own.get(role) if isinstance(own, dict) else config.get(f"{role}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                named[role] = token
    return named


def _marks_of_layout(layout: dict[str, Any], pieces: Sequence[str], backend: RustTokenizer) -> WordMarks:
    """Return the rule of a vocabulary's words, for a tokenizer.json, its pieces and the library's tokenizer of it.

    A piece that ends a word has the model's own suffix, such as </w>. In Metaspace and SentencePiece vocabularies a
    word begins with ▁, in byte-level ones with Ġ (space), Ċ (newline) or ĉ (tab); either may mark ends instead. In
    WordPiece-like vocabularies the first piece lacks the continuation prefix. In a list of words every piece is one.
    """
    model = layout["model"]
    if suffix := model.get("end_of_word_suffix"):
        return ends_with(suffix)
    sample = backend.normalizer.normalize_str("a a") if backend.normalizer else "a a"
    if backend.pre_tokenizer:  # the model's pieces can show only the marks that are left there
        sample = "".join(word for word, _ in backend.pre_tokenizer.pre_tokenize_str(sample))
    for part in (*parts_of(layout.get("pre_tokenizer")), *parts_of(layout.get("decoder"))):
        if part.get("type") == "Metaspace":
            return _rule_of_mark(pieces, sample, part.get("replacement", WORD_START))
        if part.get("type") == "ByteLevel":
            return _rule_of_mark(pieces, sample, "\u0120", "\u010a", "\u0109")
    if prefix := model.get("continuing_subword_prefix"):
        return WordMarks(lambda piece: not piece.startswith(prefix))
    if model["type"] == "WordLevel":
        return WordMarks(lambda piece: True)
    for mark in (WORD_START, " "):
        if any(mark in piece for piece in pieces):
            return _rule_of_mark(pieces, sample, mark)
    return ends_with(WORD_END) if any(piece.endswith(WORD_END) for piece in pieces) else UNMARKED


def _rule_of_mark(pieces: Sequence[str], sample: str, mark: str, *others: str) -> WordMarks:
    """Return the rule of words with `mark` on the side where most pieces have it; `others` also begin words."""
    side = side_of(pieces, mark)
    if side == END:
        return ends_with(mark)
    return begins_with(mark, *others) if side == BEGIN or mark in sample else UNMARKED
