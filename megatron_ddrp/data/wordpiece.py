"""BERT's WordPiece (Devlin et al., arXiv:1810.04805) over the Rust `tokenizers` library, with a cache of words.

Words repeat, so looking a word up beats tokenizing it again. The split below is exact for every Unicode text: space,
tab, newline and carriage return always separate words, and ASCII punctuation is always a word of its own; BERT's
normalization (clean-up, CJK spacing, accents, lower case) never looks across such a point.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import chain

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron_ddrp.data.tokenizer import Tokenizer, find_specials, missing_specials, read_bytes
from megatron_ddrp.errors import UserError

WORDS = re.compile(r"[^ \t\n\r!-/:-@\[-`{-~]+|[!-/:-@\[-`{-~]")
CACHED_WORDS = 1_000_000
CACHED_WORD_LENGTH = 64  # characters; a longer word (a line of Chinese, a URL) hardly repeats


class WordPieceTokenizer(Tokenizer):
    """`BertWordPieceLowerCase` or `BertWordPieceCase` from a vocab.txt (one piece a line; ids are line numbers)."""

    file_name = "vocab.txt"

    def __init__(self, vocab_file: str | os.PathLike[str], tokenizer_type: str = "BertWordPieceLowerCase"):
        pieces = read_vocab(vocab_file)
        ids = {piece: i for i, piece in enumerate(pieces)}
        specials = find_specials(ids)
        if missing := missing_specials(specials):
            raise UserError(f"{os.fspath(vocab_file)}: lacks {missing}; add one line for each, or train a vocabulary")
        super().__init__(
            tokenizer_type,
            pieces,
            specials,
            begins_word=lambda piece: not piece.startswith("##"),
            content="".join(f"{piece}\n" for piece in pieces).encode(),
        )
        lower = tokenizer_type == "BertWordPieceLowerCase"
        self._backend = RustTokenizer(models.WordPiece(ids, unk_token=pieces[self.unk_id]))
        self._backend.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=lower)
        self._backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self._backend.decoder = decoders.WordPiece()
        self._words = _WordCache(self._backend, lower)

    def encode(self, text: str) -> list[int]:
        return list(chain.from_iterable(map(self._words.__getitem__, WORDS.findall(text))))

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)


class _WordCache(dict[str, tuple[int, ...]]):
    """Word as it stands in the text → ids of its pieces."""

    def __init__(self, backend: RustTokenizer, lower: bool):
        super().__init__()
        self._backend = backend
        self._lower = lower

    def __missing__(self, word: str) -> tuple[int, ...]:
        if word.isascii() and word.isalnum():  # nothing to normalize but the case
            pieces = self._backend.model.tokenize(word.lower() if self._lower else word)
            ids = tuple(piece.id for piece in pieces)
        else:
            ids = tuple(self._backend.encode(word, add_special_tokens=False).ids)
        if len(self) < CACHED_WORDS and len(word) <= CACHED_WORD_LENGTH:
            self[word] = ids
        return ids


def read_vocab(path: str | os.PathLike[str]) -> list[str]:
    """The pieces of a vocab.txt in line order. Raises `UserError` when it is missing, empty or not UTF-8."""
    data = read_bytes(path)
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{os.fspath(path)}:{line}: not UTF-8; expected a vocab.txt with one piece a line") from None
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise UserError(f"{os.fspath(path)}: empty; expected a vocab.txt with one piece a line")
    return [line.removesuffix("\r") for line in lines]
