"""The tokenizer of a vocabulary, one interface over WordPiece, SentencePiece and Hugging Face, all from local files.

Besides `Tokenizer` the file has `RowForm`, the rows that a tokenizer makes of texts; the treatment of text for which a
vocabulary has no piece: it is spelled by bytes, becomes [UNK], is dropped or fails; and `WordMarks`, by which pieces
tell words apart.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import pre_tokenizers, processors

from megatron_ddrp.data.atomic import AnyPath, write_bytes
from megatron_ddrp.data.dataset.dataset_index import token_dtype
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.foreign import misfit, read_object

FIRST, SECOND = -1, -2
"""Stand-ins for the ids of the two texts."""
Parts = tuple[tuple[int, int], ...]
"""Id of each special piece of a row, or a stand-in, with its segment."""


class RowForm(NamedTuple):
    """Form of the rows of one text and of a pair: special pieces around and between, with the segment of each piece."""

    single: Parts
    pair: Parts

    def row(self, sides: Sequence[Sequence[int]]) -> tuple[list[int], list[int], list[int]]:
        """Return the pieces of the row of one text or two, their segments, and the place where each text begins."""
        pieces: list[int] = []
        segments: list[int] = []
        begins: list[int] = []
        for part, segment in self[len(sides) - 1]:
            own = [part] if part >= 0 else sides[FIRST - part]
            begins += [len(pieces)] * (part < 0)
            pieces += own
            segments += [segment] * len(own)
        return pieces, segments, begins

    def num_specials(self, texts: int) -> int:
        """Return the number of special pieces in a row of one text or two."""
        return len(self[texts - 1]) - texts

    def without_segments(self) -> RowForm:
        """Return the same rows in segment 0."""
        return RowForm(*(tuple((part, 0) for part, _ in parts) for parts in self))

    def is_made_by(self, form: RowForm | None) -> bool:
        """Return whether these are the rows of `form`, of which a tokenizer may leave out the segments."""
        return form is not None and self in (form, form.without_segments())

    @property
    def num_segments(self) -> int:
        """Number of segments, counted from 0."""
        return 1 + max(segment for parts in self for _, segment in parts)

    def processor(self, pieces: Sequence[str]) -> processors.TemplateProcessing:
        """Return the library's template of these rows."""
        texts = {FIRST: "$A", SECOND: "$B"}
        single, pair = ([f"{texts.get(i) or pieces[i]}:{segment}" for i, segment in parts] for parts in self)
        known = {i for parts in self for i, _ in parts if i >= 0}
        return processors.TemplateProcessing(single, pair, [(pieces[i], i) for i in sorted(known)])


def usual_rows(cls: int, sep: int, doubled: bool = False) -> RowForm:
    """Return BERT's rows, or with `doubled` RoBERTa's: two separators between the texts of a pair, and one segment."""
    single = ((cls, 0), (FIRST, 0), (sep, 0))
    return RowForm(single, single + (((sep, 0), (SECOND, 0), (sep, 0)) if doubled else ((SECOND, 1), (sep, 1))))


def backend_rows(backend: RustTokenizer) -> RowForm | None:
    """Return the rows that a tokenizer of the library makes; None if it puts no piece around a text."""
    text = " ".join(filter(None, map(backend.id_to_token, range(100))))
    forms = []
    for sides in ((text,), (text, text)):
        row = backend.encode(*sides)
        parts = [
            (piece if side is None else FIRST - side, segment)
            for piece, segment, side in zip(row.ids, row.type_ids, row.sequence_ids, strict=True)
        ]
        ends = [*parts[1:], (FIRST, -1)]
        forms.append(tuple(part for part, after in zip(parts, ends, strict=True) if part[0] >= 0 or part != after))
    return RowForm(*forms) if any(part >= 0 for part, _ in forms[0]) else None


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
    """Rule that tells from a piece whether a word begins or ends with it; vocabularies mark one side, or none."""

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


TOKENIZERS = {
    "BertWordPieceLowerCase": "WordPieceTokenizer",
    "BertWordPieceCase": "WordPieceTokenizer",
    "SentencePiece": "SentencePieceTokenizer",
    "HuggingFace": "HuggingFaceTokenizer",
}
"""Tokenizer type → class in `libraries.py`, which is imported when needed."""
TOKENIZER_TYPES = tuple(TOKENIZERS)
SPECIAL_PIECES = {
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "pad": ("[PAD]", "<pad>"),
    "mask": ("[MASK]", "<mask>"),
    "unk": ("[UNK]", "<unk>"),
}
"""Role → its names in vocabularies, BERT's first."""

DESCRIPTION_FILE = "megatron_tokenizer.json"
WORD_START = "\u2581"
"""SentencePiece's character for a space, ▁."""

Span = tuple[int, int]
"""First character of a piece, and the position after its last character."""


class Tokenizer(ABC):
    """Text ↔ ids of one vocabulary.

    Besides ids, a tokenizer knows where words begin (for whole-word masking), which ids are special (never a random
    replacement, never produced by text), and a fingerprint that identifies it in a dataset's manifest.

    Attributes:
        tokenizer_type: one of `TOKENIZER_TYPES`.
        pieces: `vocab_size` strings, id → piece.
        cls_id, sep_id, pad_id, mask_id, unk_id: the ids of [CLS], [SEP], [PAD], [MASK], [UNK].
        special_ids: int64 `[special]`, sorted: these five and all others that the vocabulary marks as special.
        word_starts: bool `[vocab_size]`, True if a piece begins a word. A text's first piece always begins a word.
        word_ends: bool `[vocab_size]`, True if a piece ends a word, in vocabularies that mark the ends of words.
        word_side: the side that they mark, as in `WordMarks`.
        fingerprint: SHA-256 of the type and the vocabulary's content, in hexadecimal.
    """

    library: str
    """Package that tokenizes; manifests store its version."""
    file_name: str
    """Name of the vocabulary's file in a folder written by `save`."""
    spells_all: bool = False
    """True if the vocabulary spells every text, by pieces of bytes, so that no character gives [UNK]."""
    drops_text: bool = False
    """True if characters without a piece are left out of the ids; see `count_dropped`."""
    own_rows: RowForm | None = None
    """Rows that the tokenizer's own files describe, if they do."""

    def __init__(
        self,
        tokenizer_type: str,
        pieces: Sequence[str],
        specials: Mapping[str, int],
        words: WordMarks,
        content: bytes,
        more_special_ids: Iterable[int] = (),
    ):
        """Take the five roles' ids (`specials`) and the file's `content`, used for the fingerprint and by `save`."""
        self.tokenizer_type = tokenizer_type
        self.pieces = list(pieces)
        self.cls_id, self.sep_id = specials["cls"], specials["sep"]
        self.pad_id, self.mask_id, self.unk_id = specials["pad"], specials["mask"], specials["unk"]
        special = {*specials.values(), *more_special_ids}
        self.special_ids = np.array(sorted(special), dtype=np.int64)  # [special]
        self.word_starts = np.array([i in special or words.begins(piece) for i, piece in enumerate(self.pieces)])
        self.word_ends = np.array([i not in special and words.ends(piece) for i, piece in enumerate(self.pieces)])
        self.word_side = words.side
        self.fingerprint = hashlib.sha256(tokenizer_type.encode() + b"\n" + content).hexdigest()
        self._content = content
        self._never_from_text = special - {self.unk_id}

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is smaller."""
        return len(self.pieces)

    @property
    def rows(self) -> RowForm:
        """Rows of fine-tuning and of exports: the tokenizer's own, otherwise BERT's."""
        return self.own_rows or usual_rows(self.cls_id, self.sep_id)

    def settle_rows(self, num_segments: int) -> None:
        """Choose the rows of a run: [CLS] and [SEP] around a text, and pairs by the files, as BERT or as RoBERTa."""
        is_roberta = num_segments == 1 and self.pieces[self.cls_id] == "<s>"
        usual = usual_rows(self.cls_id, self.sep_id, is_roberta)
        if self.own_rows is None or self.own_rows.single != usual.single:
            self.own_rows = usual

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return a text's ids, without [CLS] and [SEP]. A special token's name inside the text is ordinary text."""

    @abstractmethod
    def encode_with_spans(self, text: str) -> tuple[list[int], list[Span]]:
        """Return the same ids as `encode`, and the span of `text` of each piece.

        A span counts characters of `text` before normalization. It may begin with the blank before a word; a piece
        without characters has an empty one. If a character gives several pieces, all have its span, or only the last.
        """

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text."""
        return [self.encode(text) for text in texts]

    def encode_with_masks(self, text: str) -> list[int]:
        """Return a text's ids with [MASK] where it names the mask piece; `encode` reads each part between."""
        first, *others = (self.encode(part) for part in text.split(self.pieces[self.mask_id]))
        return first + [i for part in others for i in (self.mask_id, *part)]

    @property
    def dtype(self) -> np.dtype:
        """Type of these ids in a dataset, little-endian."""
        return np.dtype(token_dtype(self.vocab_size)).newbyteorder("<")

    def encode_packed(self, texts: Sequence[str]) -> list[bytes]:
        """Encode each text and `pack` its ids."""
        return [self.pack(ids) for ids in self.encode_batch(texts)]

    def pack(self, ids: Sequence[int]) -> bytes:
        """Return the bytes that a dataset stores, `dtype.itemsize` for each id."""
        return np.array(ids, self.dtype).tobytes()

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return readable text of ids."""

    def count_impossible(self) -> int:
        """Return the number of ordinary pieces that no text can give, because text is normalized before it is split."""
        return 0

    def count_dropped(self, texts: Sequence[str]) -> int:
        """Return the number of characters of the texts that give no piece, not even [UNK], though they should."""
        return 0

    def count_unknown(self, ids: np.ndarray) -> int:
        """Return the number of unknown pieces among a text's ids, which may end in [SEP]."""
        is_shared = len(self.roles_of("unk")) > 1  # with [CLS] or [SEP]: then no text gives it
        return 0 if is_shared else int(np.count_nonzero(ids == self.unk_id))

    def roles_of(self, role: str) -> list[str]:
        """Return the names of the roles, such as [CLS], that have the same piece as `role`."""
        own = getattr(self, f"{role}_id")
        return [names[0] for other, names in SPECIAL_PIECES.items() if getattr(self, f"{other}_id") == own]

    def save(self, folder: AnyPath) -> None:
        """Write the vocabulary and its description into a folder for `load_tokenizer`."""
        description = {
            "tokenizer_type": self.tokenizer_type,
            "file": self.file_name,
            "vocab_size": self.vocab_size,
            "special_tokens": {role: self.pieces[getattr(self, f"{role}_id")] for role in SPECIAL_PIECES},
            "fingerprint": self.fingerprint,
            "rows": self.own_rows,
        }
        write_bytes(Path(folder) / self.file_name, self._content)
        text = json.dumps(description, indent=2, sort_keys=True, ensure_ascii=False)
        write_bytes(Path(folder) / DESCRIPTION_FILE, f"{text}\n".encode())

    def _only_text(self, ids: list[int]) -> list[int]:
        """Return the ids with [UNK] in place of every special id that text must not produce."""
        if self._never_from_text.isdisjoint(ids):
            return ids
        return [self.unk_id if i in self._never_from_text else i for i in ids]


def build_tokenizer(
    tokenizer_type: str,
    vocab_file: AnyPath | None = None,
    tokenizer_model: AnyPath | None = None,
    specials: Mapping[str, str] | None = None,
) -> Tokenizer:
    """Make the tokenizer that `--tokenizer-type`, `--vocab-file` and `--tokenizer-model` name.

    `vocab_file` is a vocab.txt for the WordPiece types; `tokenizer_model` is a SentencePiece .model, or for HuggingFace
    a folder with tokenizer.json (or that file). Its `specials` (role → piece) are read from the folder if not given.
    Raises `UserError` for a missing file, an unusable vocabulary, roles that may not share a piece, and a flag of
    another type with another file.
    """
    if tokenizer_type not in TOKENIZER_TYPES:
        allowed = ", ".join(TOKENIZER_TYPES)
        raise UserError(f"--tokenizer-type {tokenizer_type}: expected one of {allowed}", WRONG_ARGUMENTS)
    is_wordpiece = tokenizer_type.startswith("BertWordPiece")
    given = ((vocab_file, "--vocab-file"), (tokenizer_model, "--tokenizer-model"))
    (path, flag), (unused, other) = given if is_wordpiece else given[::-1]
    types = [name for name in TOKENIZER_TYPES if name.startswith("BertWordPiece") is not is_wordpiece]
    rule = f"{other} goes with --tokenizer-type {' or '.join(types)}"
    if not path:
        hint = f"; {rule}" if unused else ""
        raise UserError(f"--tokenizer-type {tokenizer_type} needs {flag} (a local path){hint}", WRONG_ARGUMENTS)
    if unused and unused != path:
        raise UserError(
            f"{other} {os.fspath(unused)} has no effect beside {flag}: {rule}; leave one of the two out",
            WRONG_ARGUMENTS,
        )
    make = getattr(importlib.import_module("megatron_ddrp.data.tokenizers.libraries"), TOKENIZERS[tokenizer_type])
    if is_wordpiece:
        tokenizer = make(path, tokenizer_type)
    else:
        tokenizer = make(path, specials) if tokenizer_type == "HuggingFace" else make(path)
    _refuse_shared_roles(tokenizer, path)
    return tokenizer


def _refuse_shared_roles(tokenizer: Tokenizer, path: AnyPath) -> None:
    """Raise `UserError` if two roles share a piece, except for [CLS], [SEP] and [PAD], and [UNK] if no text gives it.

    Masking could not tell the two apart: it hides unknown pieces and keeps the structure of a row. Padding is known by
    its place.
    """
    for role in ("mask", "unk"):
        shared = tokenizer.roles_of(role)
        if len(shared) == 1 or (role == "unk" and _never_unknown(tokenizer)):
            continue
        piece = tokenizer.pieces[getattr(tokenizer, f"{role}_id")]
        raise UserError(
            f"{os.fspath(path)}: {piece!r} is {', '.join(shared[:-1])} and {shared[-1]}: expected pieces of their own "
            "for [MASK] and [UNK] (only [CLS], [SEP] and [PAD] may share one); give each its own piece, also in the "
            "files special_tokens_map.json and tokenizer_config.json beside it, or use another tokenizer",
            WRONG_ARGUMENTS,
        )


def _never_unknown(tokenizer: Tokenizer) -> bool:
    """Return whether no text gives [UNK]: not by a character, and not by the name of a special piece."""
    names = [tokenizer.pieces[i] for i in tokenizer.special_ids.tolist()]
    texts = [text for name in names for text in (name, f"a {name} a")]
    return tokenizer.spells_all and not any(tokenizer.unk_id in ids for ids in tokenizer.encode_batch(texts))


def load_tokenizer(folder: AnyPath) -> Tokenizer:
    """Load the tokenizer that `Tokenizer.save` wrote into a folder. Raises `UserError` if it is missing or changed."""
    described = read_description(folder)
    file = Path(folder) / described["file"]
    names = described["special_tokens"]
    tokenizer = build_tokenizer(described["tokenizer_type"], vocab_file=file, tokenizer_model=file, specials=names)
    if tokenizer.fingerprint != described["fingerprint"]:
        raise UserError(f"{file}: not the vocabulary that was saved here (fingerprint differs); copy the folder again")
    if described["rows"]:
        tokenizer.own_rows = RowForm(*(tuple(map(tuple, parts)) for parts in described["rows"]))
    return tokenizer


_DESCRIPTION = {
    "tokenizer_type": str,
    "file": str,
    "special_tokens": Mapping[str, str],
    "fingerprint": str,
    "rows": tuple[Parts, Parts] | None,
}
"""Key of a description → type hint of its value."""


def read_description(folder: AnyPath) -> dict[str, Any]:
    """Return what `Tokenizer.save` wrote about a tokenizer into a folder. Raises `UserError` if it is none."""
    path = Path(folder) / DESCRIPTION_FILE
    found = {"rows": None, **read_object(path)}  # older runs have none
    if wrong := misfit(found, _DESCRIPTION):
        raise UserError(f"{path}: not a tokenizer description ({wrong}); save the tokenizer again")
    return found


def find_specials(ids: Mapping[str, int], named: Mapping[str, str] | None = None) -> dict[str, int]:
    """Return role → id for the roles found in `ids` (piece → id), by the names in `named`, then by the usual ones."""
    found = {}
    for role, usual in SPECIAL_PIECES.items():
        for name in ((named or {}).get(role), *usual):
            if name is not None and name in ids:
                found[role] = ids[name]
                break
    return found


def require_specials(found: Mapping[str, int], path: AnyPath, hint: str) -> None:
    """Raise `UserError`, with a `hint` on how to fix it, for a vocabulary file that lacks a role."""
    if missing := [names[0] for role, names in SPECIAL_PIECES.items() if role not in found]:
        raise UserError(f"{os.fspath(path)}: lacks {', '.join(missing)}; {hint}")
