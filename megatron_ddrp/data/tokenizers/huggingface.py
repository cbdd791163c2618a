"""Tokenizers from a local tokenizer.json of the `tokenizers` library, the file of Hugging Face models."""

from __future__ import annotations

import codecs
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

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
    parts_of,
    require_specials,
    side_of,
    spells_all,
    unknown_piece,
)
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import parse_json, read_bytes, read_object, reading

SPARE_IDS = 2**16
"""Largest number of ids without a piece in a vocabulary."""


class HuggingFaceTokenizer(Tokenizer):
    """`HuggingFace` from a folder with tokenizer.json, or that file itself.

    The special roles come from `named` (role → piece), otherwise from the settings beside the file, otherwise from the
    pieces that it puts around a text, otherwise from the usual names.
    """

    library = "tokenizers"
    file_name = "tokenizer.json"

    def __init__(self, path: AnyPath, named: Mapping[str, str] | None = None):
        file = Path(path) / self.file_name if Path(path).is_dir() else Path(path)
        if not file.exists() and file.with_name("vocab.txt").exists():
            raise UserError(f"{file}: no such file; for its vocab.txt use --tokenizer-type BertWordPieceLowerCase")
        content = read_bytes(file).removeprefix(codecs.BOM_UTF8)  # which the library does not read
        self._backend = read_backend(content, file)
        with reading(file):
            layout = parse_json(self._backend.to_str(), lenient=True)  # with the keys that the file leaves out
        make_exact(self._backend)
        self._read_specials_as_text()
        unknown = unknown_piece(layout, file)
        ids = self._backend.get_vocab(with_added_tokens=True)
        specials = find_specials(ids, named or self._outer_pieces() | _named_specials(file.parent))
        closed = spells_all(layout)
        if unknown is not None and not (closed and "unk" in specials):
            specials["unk"] = ids[unknown]  # whatever the settings say
        require_specials(specials, file, "add them to the tokenizer or use another one")
        if max(ids.values()) >= len(ids) + SPARE_IDS:
            raise UserError(f"{file}: {len(ids)} pieces have ids up to {max(ids.values())}; use another tokenizer")
        pieces = [""] * (max(ids.values()) + 1)
        for piece, i in ids.items():
            pieces[i] = piece
        added = self._backend.get_added_tokens_decoder()
        super().__init__(
            "HuggingFace",
            pieces,
            specials,
            _word_marks(layout, pieces, _split_sample(self._backend)),
            content,
            more_special_ids=[i for i, token in added.items() if token.special],
        )
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

    def _outer_pieces(self) -> dict[str, str]:
        """Return the roles of the pieces around every text, if there are two such pieces."""
        pieces = self._backend.encode("").tokens
        return dict(zip(("cls", "sep"), pieces, strict=True)) if len(pieces) == 2 else {}

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
        for role in SPECIAL_PIECES:
            token = own.get(role) if isinstance(own, dict) else config.get(f"{role}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                named[role] = token
    return named


def _split_sample(backend: RustTokenizer) -> str:
    """Return "a a" as the tokenizer gives it to its model, whose pieces can show only the marks that are left there."""
    text = backend.normalizer.normalize_str("a a") if backend.normalizer else "a a"
    words = backend.pre_tokenizer.pre_tokenize_str(text) if backend.pre_tokenizer else [(text, None)]
    return "".join(word for word, _ in words)


def _word_marks(layout: dict[str, Any], pieces: Sequence[str], sample: str) -> WordMarks:
    """Return the rule of a vocabulary's words, for a tokenizer.json, its pieces and its `_split_sample`.

    A piece that ends a word has the model's own suffix, such as </w>. In Metaspace and SentencePiece vocabularies a
    word begins with ▁, in byte-level ones with Ġ (space), Ċ (newline) or ĉ (tab); either may mark ends instead. In
    WordPiece-like vocabularies the first piece lacks the continuation prefix. In a list of words every piece is one.
    """
    model = layout["model"]
    if suffix := model.get("end_of_word_suffix"):
        return ends_with(suffix)
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
