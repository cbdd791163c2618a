"""Tokenizers from a local tokenizer.json of the `tokenizers` library, the file of Hugging Face models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from megatron_ddrp.data.atomic import AnyPath
from megatron_ddrp.data.tokenizers.tokenizer import (
    DESCRIPTION_FILE,
    SPECIAL_PIECES,
    WORD_START,
    Span,
    Tokenizer,
    find_specials,
    read_bytes,
    require_specials,
)
from megatron_ddrp.errors import UserError
from megatron_ddrp.json_files import read_object

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
        content = read_bytes(file)
        try:
            layout = json.loads(content)
            self._backend = RustTokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception, and Python's reader RecursionError
            raise UserError(f"{file}: not a tokenizer.json of the tokenizers library ({str(error)[:200]})") from None
        self._backend.no_truncation()
        self._backend.no_padding()
        self._read_specials_as_text()
        if getattr(self._backend.model, "dropout", None):
            self._backend.model.dropout = None  # the same text must always give the same ids
        ids = self._backend.get_vocab(with_added_tokens=True)
        specials = find_specials(ids, named or self._outer_pieces() | _named_specials(file.parent))
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
            _word_start_rule(layout, pieces),
            content,
            more_special_ids=[i for i, token in added.items() if token.special],
        )

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


def _named_specials(folder: Path) -> dict[str, str]:
    """Return role → piece from the folder's configuration files; empty without them."""
    named = {}
    paths = [folder / name for name in ("special_tokens_map.json", "tokenizer_config.json", DESCRIPTION_FILE)]
    for config in [read_object(path) for path in paths if path.exists()]:
        own = config.get("special_tokens")  # of `Tokenizer.save`
        for role in SPECIAL_PIECES:
            token = own.get(role) if isinstance(own, dict) else config.get(f"{role}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                named[role] = token
    return named


def _word_start_rule(layout: dict[str, Any], pieces: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that tells whether a piece begins a word, for a tokenizer.json and its pieces.

    In Metaspace and SentencePiece vocabularies such a piece begins with ▁; in byte-level ones with Ġ (space), Ċ
    (newline) or ĉ (tab); in WordPiece-like ones it lacks the continuation prefix. In a vocabulary that marks word ends,
    or nothing, every piece is a word of its own.
    """
    for part in (*_parts(layout.get("pre_tokenizer")), *_parts(layout.get("decoder"))):
        if part.get("type") == "Metaspace":
            mark = part.get("replacement", WORD_START)
            return lambda piece: piece.startswith(mark)
        if part.get("type") == "ByteLevel":
            return lambda piece: piece.startswith(("\u0120", "\u010a", "\u0109"))
    prefix = layout["model"].get("continuing_subword_prefix")
    if not prefix and any(piece.startswith(WORD_START) for piece in pieces):
        return lambda piece: piece.startswith(WORD_START)
    return lambda piece: not (prefix and piece.startswith(prefix))


def _parts(component: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield a component of a tokenizer.json and, for a sequence, the components inside it."""
    if component:
        yield component
        for inner in component.get("pretokenizers", component.get("decoders", [])):
            yield from _parts(inner)
