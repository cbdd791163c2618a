"""Tokenizers read from Hugging Face folders and written to them, and another vocabulary for a trained encoder.

No code in a folder is run. `find_tokenizer` reads, `write_tokenizer` writes the files that AutoTokenizer reads, and
`plan_transfer` moves an encoder to another vocabulary.
"""

from __future__ import annotations

import codecs
import importlib.util
import json
import re
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import Metaspace
from torch import Tensor

from megatron_ddrp.conversion.families.contract import refuse_code, setting
from megatron_ddrp.data.tokenizers.libraries import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    bert_backend,
    make_exact,
    read_backend,
    read_model,
    read_vocab,
)
from megatron_ddrp.data.tokenizers.tokenizer import (
    BEGIN,
    DESCRIPTION_FILE,
    NONE,
    SPECIAL_PIECES,
    WORD_END,
    WORD_START,
    Tokenizer,
    backend_rows,
    build_tokenizer,
    usual_rows,
)
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import quiet_transformers, read_bytes, read_object, reading, show

OTHER_VOCABULARIES = ("sentencepiece.bpe.model", "spm.model", "spiece.model", "merges.txt")
"""Vocabularies that only transformers can turn into a tokenizer.json: it numbers pieces and treats text in its own
way."""
_BYTE_ORDER_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_BERT_LIKE = ("Bert", "ConvBert", "DistilBert", "Electra", "Funnel", "LayoutLM", "MobileBert", "MPNet", "Splinter")
BERT_CLASSES = tuple(f"{name}Tokenizer" for name in (*_BERT_LIKE, "SqueezeBert"))
"""Values of `tokenizer_class`, without `Fast`, that stand for BERT's rules on a vocab.txt."""
GENERIC_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")
"""Values of `tokenizer_class`, without `Fast`, that take all rules from tokenizer.json."""
PROBED_PIECES = 2000
"""Number of pieces, at most, whose text our tokenizer and that of transformers must split alike."""
_WIDE = {code: code + 0xFEE0 for code in range(0x21, 0x7F)}


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """Return a folder's tokenizer, or None if it has none. Its ids, roles and rows are those of AutoTokenizer.

    Sources in this order: the SentencePiece model that an export keeps beside its tokenizer.json; vocab.txt if BERT's
    usual rules apply and it has every piece; tokenizer.json; transformers' conversion of vocab.txt or of another
    vocabulary. Where transformers reads the folder in another way, because the class that tokenizer_config.json names
    has rules of its own, its tokenizer replaces ours. Raise `UserError` if a file cannot be read, if vocab.txt belongs
    to a tokenizer with other rules than BERT's, or if transformers is needed and fails.
    """
    settings, rules = tokenizer_settings(folder), folder / HuggingFaceTokenizer.file_name
    model, vocab = folder / SentencePieceTokenizer.file_name, folder / "vocab.txt"
    lower, kind = settings["do_lower_case"], settings["tokenizer_class"]
    is_bert = kind is None or str(kind).removesuffix("Fast") in BERT_CLASSES
    usual = settings.get("strip_accents") in (None, lower) and settings.get("tokenize_chinese_chars", True)
    if model.is_file():
        own = build_tokenizer("SentencePiece", tokenizer_model=model)
        if not rules.is_file() and not (folder / "tokenizer_config.json").is_file():
            return own
        if not rules.is_file() or own.pieces == build_tokenizer("HuggingFace", tokenizer_model=folder).pieces:
            return _reconciled(folder, own)
    if vocab.is_file() and is_bert and usual and _agrees(folder, read_vocab(vocab)):
        own = build_tokenizer("BertWordPieceLowerCase" if lower else "BertWordPieceCase", vocab_file=vocab)
    elif rules.is_file():
        own = build_tokenizer("HuggingFace", tokenizer_model=folder)
    elif vocab.is_file() and not is_bert:
        raise UserError(
            f"{folder}: its vocab.txt belongs to a {show(kind)}, expected BertTokenizer or another class with BERT's "
            "rules; add the tokenizer.json of this model if there is one, or choose another model"
        )
    else:
        others = [name for name in ("vocab.txt", *OTHER_VOCABULARIES) if (folder / name).is_file()]
        choice = {} if kind or others[:1] != ["vocab.txt"] else {"tokenizer_type": "bert"}
        return _as_ours(folder, _load(folder, others[0], **choice)) if others else None
    return _reconciled(folder, own)


def refuse_other_ids(path: str | None) -> None:
    """Raise `UserError` if AutoTokenizer has other ids than the tokenizer.json of a folder, a `--tokenizer-model`."""
    if not path or not (Path(path) / "tokenizer_config.json").is_file():
        return
    own = build_tokenizer("HuggingFace", tokenizer_model=path)
    if _reconciled(Path(path), own) is not own:
        raise UserError(
            f"--tokenizer-model {path}: its tokenizer_config.json gives AutoTokenizer other ids or special pieces than "
            "its tokenizer.json: give a folder that AutoTokenizer.from_pretrained(…).save_pretrained(…) wrote, or the "
            "file tokenizer.json itself if its rules are right"
        )


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json with `do_lower_case`, which is true by default, and `tokenizer_class`.

    config.json may have the class instead, or name a model with BERT's (`is_guess`); otherwise it is None. Raise
    `UserError` if a file cannot be read, or if the tokenizer needs foreign code or a program that finds words (MeCab).
    """
    path, model = folder / "tokenizer_config.json", folder / "config.json"
    settings = {"do_lower_case": True} | (read_object(path) if path.is_file() else {})
    refuse_code(path, settings)
    setting(path, settings, "do_lower_case", bool)
    splitter = settings.get("word_tokenizer_type")
    if splitter not in (None, "basic"):
        raise UserError(
            f"{path}: word_tokenizer_type is {show(splitter)}, expected basic or none: a tokenizer that finds words "
            "by such a program cannot be read; choose another model"
        )
    if not settings.get("tokenizer_class"):
        known = read_object(model) if model.is_file() else {}
        usual = {"bert": "BertTokenizer", "electra": "ElectraTokenizer"}.get(str(known.get("model_type")))
        named = known.get("tokenizer_class")
        settings |= {"tokenizer_class": named or usual, "is_guess": not named}
    return settings


def _reconciled(folder: Path, own: Tokenizer) -> Tokenizer:
    """Return our tokenizer with the roles and rows of AutoTokenizer, or the latter as ours if ids differ."""
    settings = tokenizer_settings(folder)
    kind = settings["tokenizer_class"]
    try:
        theirs = _load(folder, own.file_name)
    except UserError:  # transformers cannot read every folder that we can
        has_rules = kind is not None and str(kind).removesuffix("Fast") not in GENERIC_CLASSES
        if has_rules and own.tokenizer_type == "HuggingFace" and importlib.util.find_spec("transformers") is None:
            raise
        return own
    named, pieces = {getattr(theirs, f"{role}_token") for role in SPECIAL_PIECES} - {None}, {*own.pieces}
    can_read = theirs.is_fast and pieces - {""} <= theirs.get_vocab().keys() and named <= pieces
    if can_read and own.tokenizer_type == "HuggingFace":
        can_read = type(theirs.backend_tokenizer.model) is type(_read_rules(folder / own.file_name).model)
    if settings.get("is_guess") and not can_read:
        return own  # no file names a class, and that of the model's type is not for this vocabulary
    if not theirs.is_fast:
        raise UserError(
            f"{folder}: its tokenizer is a {type(theirs).__name__}, whose rules are code: choose another model"
        )
    theirs.split_special_tokens = False
    added = theirs.added_tokens_decoder.values()
    special = {*theirs.all_special_tokens, *(token.content for token in added if token.special)} - {""}
    probes = (text for text in _probes(own, theirs) if not any(map(text.__contains__, special)))
    texts = [f"a {theirs.mask_token} a", *probes]
    ids = [own.encode_with_masks(texts[0]), *own.encode_batch(texts[1:])]
    roles = ((getattr(theirs, f"{role}_token_id"), getattr(own, f"{role}_id")) for role in SPECIAL_PIECES)
    with reading(folder, "its tokenizer fails on a text in transformers: {error}; copy its files again"):
        their_ids = theirs(texts, add_special_tokens=False, verbose=False)["input_ids"]
    is_marked = special <= {own.pieces[i] for i in own.special_ids.tolist()}
    is_same = is_marked and ids == their_ids and all(i in (None, j) for i, j in roles)
    return _with_rows(own, theirs) if is_same else _as_ours(folder, theirs)


def _agrees(folder: Path, pieces: Sequence[str]) -> bool:
    """Return whether a vocab.txt has the pieces of tokenizer.json, or of added_tokens.json of an older layout."""
    rules, older = folder / HuggingFaceTokenizer.file_name, folder / "added_tokens.json"
    if rules.is_file():
        return _read_rules(rules).get_vocab() == {piece: i for i, piece in enumerate(pieces)}
    return not older.is_file() or set(read_object(older)) <= set(pieces)


def _read_rules(rules: Path) -> RustTokenizer:
    return read_backend(read_bytes(rules).removeprefix(codecs.BOM_UTF8), rules)


def _probes(own: Tokenizer, theirs: Any) -> Iterator[str]:
    """Yield texts of pieces in many spellings, and of many characters."""
    some = (own.decode([i]) for i in range(0, own.vocab_size, 1 + own.vocab_size // PROBED_PIECES))
    added = (token.content for token in theirs.added_tokens_decoder.values())
    for word in dict.fromkeys([*re.findall(r"\w+", " ".join(some)), *added]):
        wide, parts = word.translate(_WIDE), unicodedata.normalize("NFD", word)
        marked = unicodedata.normalize("NFC", f"{word}\u0301")  # SentencePiece would leave ü and a mark apart
        yield f"{word} {word.upper()}  {word.title()}\t{wide}\n{parts} x{word}x-{marked} 1{word}23 \u4e2d{word}"
        yield f" {word}\u00a0{word}\u3000{word}. {word}'s,{word}\u00ad{word}\u200d{word}\r\n{word} "
    codes = (*range(0x20, 0x3130), *range(0x3130, 0xFB00, 97), *range(0xFB00, 0x10000))
    letters = [chr(code) for code in codes if unicodedata.category(chr(code)) not in ("Cs", "Cn", "Co")]
    yield from (" ".join(letters[start : start + 64]) for start in range(0, len(letters), 64))


def _load(folder: Path, vocabulary: str, **choice: str) -> Any:
    """Return the tokenizer that transformers makes of a folder's `vocabulary`.

    `choice` may name the type of the tokenizer (`tokenizer_type`), if the folder does not.
    """
    for name in (vocabulary, "vocab.json"):
        if (folder / name).is_file() and read_bytes(folder / name).startswith(_BYTE_ORDER_MARKS):
            raise UserError(
                f"{folder / name}: begins with a byte order mark, which transformers reads as text; save the file as "
                "UTF-8 without one"
            )
    refused = (
        f"has {vocabulary}, from which transformers must make the tokenizer, and that failed ({{error}}): run, with "
        'transformers and sentencepiece installed, python -c "from transformers import AutoTokenizer as T; '
        f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )
    with reading(folder, refused), quiet_transformers():
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **choice)


def _as_ours(folder: Path, theirs: Any) -> Tokenizer:
    """Return the tokenizer of transformers as one of ours."""
    with tempfile.TemporaryDirectory() as written:
        theirs.save_pretrained(written)
        try:
            return _with_rows(build_tokenizer("HuggingFace", tokenizer_model=written), theirs)
        except UserError as error:
            raise UserError(str(error).replace(written, str(folder)), error.exit_code) from None


def _with_rows(own: Tokenizer, theirs: Any) -> Tokenizer:
    """Give our tokenizer the rows of that of transformers, whose pieces around a text are [CLS] and [SEP]."""
    backend = RustTokenizer.from_str(theirs.backend_tokenizer.to_str())
    make_exact(backend)
    own.own_rows = rows = backend_rows(backend)
    if rows and [i < 0 for i, _ in rows.single] == [False, True, False]:
        own.cls_id, own.sep_id = rows.single[0][0], rows.single[2][0]
    if rows and "token_type_ids" not in theirs.model_input_names:
        own.own_rows = rows.without_segments()
    return own


BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int, num_segments: int = 2) -> str:
    """Write the files that AutoTokenizer reads: tokenizer.json, its settings, the vocabulary.

    Return one line that lists them, or the reason why AutoTokenizer cannot load them. A copied tokenizer.json stays
    unchanged, byte for byte, if it already adds the special pieces around texts: datasets made with it store its sum.

    One difference comes from transformers: there, "[MASK]" in a text becomes the mask token, which fill-mask needs. In
    training, the name of a special token (or of a byte, "<0x41>") inside a text is plain text.
    """
    tokenizer.save(folder)  # the vocabulary's own file
    (folder / DESCRIPTION_FILE).unlink()
    converted = _rust_tokenizer(tokenizer, folder)
    is_copied = tokenizer.tokenizer_type == "HuggingFace"
    if converted is None or not (is_copied or _agree(tokenizer, converted)):
        return (
            f"{tokenizer.tokenizer_type}: {tokenizer.file_name} only; transformers has no equal of this model, so "
            "AutoTokenizer fails or cuts texts otherwise: use megatron_ddrp.load_encoder"
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
    files = {"tokenizer_config.json": settings, "special_tokens_map.json": names}
    for file, values in files.items():
        (folder / file).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    written = dict.fromkeys([tokenizer.file_name, "tokenizer.json", *files])
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


_UNIGRAM = 1
_COMPOSING = (b"nmt_nfkc", b"nmt_nfkc_cf", b"nfkc", b"nfkc_cf")
"""Names of the character maps that join a letter and its marks, or the parts of a Korean syllable."""
_KEPT = {"～": "\ue000", "İ": "\ue001"}
"""Characters that NFKC and lower-casing change and some maps keep, and what stands for them meanwhile."""


def unigram_tokenizer(content: bytes, pieces: Sequence[str], unk_id: int) -> RustTokenizer | None:
    """Return a SentencePiece model as a tokenizer of the `tokenizers` library, which all versions of transformers read.

    It has the same pieces and ids; None for a model other than unigram. `pieces` are all pieces of the training
    tokenizer, including those that it added to the model's own.

    `content`, of a .model file, is a protocol buffer. The sentencepiece library does not return all of its fields, so
    the others are read from the wire format, without a protobuf package: trainer (field 2: model type 3) and normalizer
    (field 3: name 1, character map 2, dummy prefix 3, remove extra whitespace 4).
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
    kept = {sign: mark for sign, mark in _KEPT.items() if processor.normalize(sign).strip(f" {WORD_START}") == sign}
    if normalizer.get(1) in _COMPOSING:  # the map's own step joins nothing, and drops a mark behind a changed letter
        hide = [normalizers.Replace(sign, mark) for sign, mark in kept.items()]
        steps += [*hide, normalizers.NFKC(), *[*hide, normalizers.Lowercase()] * normalizer[1].endswith(b"_cf")]
    if normalizer.get(2):
        steps.append(normalizers.Precompiled(normalizer[2]))
    steps += [normalizers.Replace(mark, sign) for sign, mark in kept.items()]
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


CONTINUES = "##"
"""WordPiece's mark of a piece inside a word."""
NO_TEXT = "\ufffd"
"""Character that stands for bytes which are no text by themselves, as in pieces of byte-level vocabularies."""


class Surface(NamedTuple):
    """Text of an ordinary piece and its place in a word, by which pieces of different vocabularies are compared.

    WordPiece's `ing` and `##ing` are SentencePiece's `▁ing` and `ing`, and a byte-level vocabulary's `Ġing` and `ing`.
    """

    text: str
    has_mark: bool
    """True if a word begins with the piece, or ends with it, as both vocabularies mark it."""


@dataclass(frozen=True)
class Transfer:
    """Old pieces of which each new piece is the mean."""

    parts: list[list[int]]
    """New id → old ids; none stands for all ordinary ones."""
    ordinary: list[int]
    """Old ids that are not special."""
    old_size: int
    """Number of old pieces."""
    kept: int
    """Number of pieces that the old vocabulary has too."""
    spelled: int
    """Number of other pieces that the old tokenizer can spell; the rest are the mean of all."""
    by_text: bool = False
    """True if pieces are compared by their text alone."""

    def summary(self) -> str:
        """Return a line about the pieces."""
        rest = len(self.parts) - self.kept - self.spelled
        return (
            f"{len(self.parts):,} pieces instead of {self.old_size:,}: {self.kept:,} kept, {self.spelled:,} the mean "
            f"of the old pieces that spell them, {rest:,} the mean of all"
            + "; compared by text alone, because the two do not mark words on the same side"
            * self.by_text
        )

    def rows(self, table: Tensor) -> Tensor:
        """Return the new rows `[new pieces, …]` of a table `[old pieces, …]` with one row per piece."""
        ids = torch.tensor([i for parts in self.parts for i in parts])
        begins = torch.tensor([0, *(len(parts) for parts in self.parts[:-1])]).cumsum(0)
        flat = table.reshape(len(table), -1).double()  # [old pieces, width]
        means = F.embedding_bag(ids, flat, begins, mode="mean")
        means[[not parts for parts in self.parts]] = flat[self.ordinary].mean(0)
        return means.to(table.dtype).reshape(len(self.parts), *table.shape[1:])


def plan_transfer(old: Tokenizer, new: Tokenizer) -> Transfer:
    """Return the old pieces that make up each piece of a new vocabulary for a trained encoder.

    A piece that both vocabularies have keeps its row; any other gets the mean of the rows of the pieces into which the
    old tokenizer splits it; a piece that the old one cannot spell gets the mean of all rows (Gee, Zugarini, Rigutini,
    Torroni: Fast Vocabulary Transfer for Language Model Compression, EMNLP 2022 industry track, section 3). Rows are
    those of the token embedding, of E_Δ under replaced-token detection, and of the output bias.

    Pieces are the same if their `Surface` is. If one vocabulary marks the begins of words and the other the ends, or
    one marks nothing, the text alone counts: the other fact cannot be known.
    """
    same_kind = old.tokenizer_type == new.tokenizer_type
    same_marks = old.word_side == new.word_side != NONE
    old_alone, new_alone = _lone_characters(old), _lone_characters(new)
    known = _known(old, same_marks, old_alone)
    names = {piece: i for i, piece in enumerate(old.pieces)}
    roles = {getattr(new, f"{role}_id"): getattr(old, f"{role}_id") for role in SPECIAL_PIECES}
    surfaces, special = _surfaces(new, same_marks), set(old.special_ids.tolist())
    unused = _unused(new, surfaces, new_alone)
    if not _is_wordpiece(old):
        inside = {i: Surface(text, False) for i, (text, _) in surfaces.items() if text in new_alone}
        surfaces |= {i: surface for i, surface in inside.items() if surface in known}
    parts, kept, spelled = list[list[int]](), 0, 0
    for i, piece in enumerate(new.pieces):
        surface = surfaces.get(i)
        own = roles.get(i, names.get(piece) if i in unused else None)
        if own is None and surface:
            own = known.get(surface)
        if own is None and surface is None and (same_kind or i in new.special_ids):
            own = names.get(piece)  # bytes, or a further special piece
        if own is not None:
            parts.append([own])
            kept += 1
        elif surface and (spelling := _spell(surface, old, known, old_alone)):
            parts.append(spelling)
            spelled += 1
        else:
            parts.append([])
    ordinary = [i for i in range(old.vocab_size) if i not in special]
    return Transfer(parts, ordinary, old.vocab_size, kept, spelled, not same_marks)


def _surfaces(tokenizer: Tokenizer, marks: bool) -> dict[int, Surface]:
    """Return id → surface of the ordinary pieces that are text by themselves; without `marks` none has one."""
    special, found = set(tokenizer.special_ids.tolist()), {}
    for i, piece in enumerate(tokenizer.pieces):
        has_mark = bool(tokenizer.word_starts[i] or tokenizer.word_ends[i])
        inside = not has_mark and piece.startswith(CONTINUES) and len(piece) > len(CONTINUES)
        text = "" if i in special else piece[len(CONTINUES) :] if inside else tokenizer.decode([i]).strip()
        text = text.removesuffix(WORD_END) if tokenizer.word_ends[i] else text
        if text and NO_TEXT not in text and not BYTE_PIECE.fullmatch(piece):
            found[i] = Surface(text, has_mark and marks)
    return found


def _known(old: Tokenizer, marks: bool, alone: Set[str]) -> dict[Surface, int]:
    """Return surface → id of the old pieces that texts give. A lone character counts as inside a word too."""
    surfaces = _surfaces(old, marks)
    unused = _unused(old, surfaces, alone)
    known = {surface: i for i, surface in reversed(surfaces.items()) if i not in unused}  # of twins, the first counts
    return known | {Surface(text, False): i for (text, _), i in known.items() if text in alone}


def _is_wordpiece(tokenizer: Tokenizer) -> bool:
    """Return whether `CONTINUES` tells the pieces inside words from those that begin one."""
    begins = np.array([not piece.startswith(CONTINUES) for piece in tokenizer.pieces])
    begins[tokenizer.special_ids] = True
    return tokenizer.word_side == BEGIN and np.array_equal(tokenizer.word_starts, begins)


def _lone_characters(tokenizer: Tokenizer) -> set[str]:
    """Return the characters that a WordPiece tokenizer makes words even between letters; empty for other kinds."""
    if not _is_wordpiece(tokenizer):
        return set()
    characters = sorted(set().union(*tokenizer.pieces))
    split = tokenizer.encode_batch([f"a{character}a" for character in characters])
    begins = [tokenizer.word_starts[ids] for ids in split]
    return {character for character, row in zip(characters, begins, strict=True) if len(row) == 3 and row.all()}


def _unused(tokenizer: Tokenizer, surfaces: Mapping[int, Surface], alone: Set[str]) -> set[int]:
    """Return the ids of the pieces that no text gives, because they hold a lone character and are not just that.

    BERT splits text at every punctuation mark and ideograph, so each of them is a word, and no text gives a piece such
    as `##,` or `##中`, whose row is untrained. Such pieces spell nothing: `,` is the old piece of both `▁,` and `,`. In
    the other direction the new `,` is the old `,`: most texts have no space before it, so `▁,` is rare.
    """
    held = [i for i, surface in surfaces.items() if not alone.isdisjoint(surface.text)]
    return {i for i in held if tokenizer.pieces[i] not in alone}


def _spell(surface: Surface, old: Tokenizer, known: Mapping[Surface, int], alone: Set[str]) -> list[int]:
    """Return the old ids that spell a new piece, as words are split; empty if some of it is unknown to the old one."""
    text = surface.text
    if not surface.has_mark:
        end = next((place for place, character in enumerate(text) if character in alone), len(text))
        inside, rest = _longest_first(text[:end], known), _encode(text[end:], old)
        if bool(inside) == (end > 0) and bool(rest) == (end < len(text)):
            return inside + rest
    return _encode(text, old)


def _encode(text: str, old: Tokenizer) -> list[int]:
    """Return the old ids of a text; empty if some of it is unknown."""
    ids = old.encode(f" {text}") if text else []
    return [] if old.unk_id in ids or old.count_dropped([text]) else ids


def _longest_first(text: str, known: Mapping[Surface, int]) -> list[int]:
    """Return the old ids inside words that spell a text, the longest piece first; empty if there are none."""
    ids, begin = [], 0
    while begin < len(text):
        end = next((end for end in range(len(text), begin, -1) if Surface(text[begin:end], False) in known), begin)
        if end == begin:
            return []
        ids.append(known[Surface(text[begin:end], False)])
        begin = end
    return ids
