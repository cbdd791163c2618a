"""Reader of a Hugging Face folder's tokenizer as one of ours, without running code."""

from __future__ import annotations

import codecs
import importlib.util
import re
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from megatron_ddrp.conversion.foreign_config import one_of, refuse_code, show
from megatron_ddrp.data.tokenizers.huggingface import HuggingFaceTokenizer, make_exact, read_backend
from megatron_ddrp.data.tokenizers.row_form import backend_rows
from megatron_ddrp.data.tokenizers.sentencepiece import SentencePieceTokenizer
from megatron_ddrp.data.tokenizers.tokenizer import SPECIAL_PIECES, Tokenizer, build_tokenizer
from megatron_ddrp.data.tokenizers.wordpiece import read_vocab
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import quiet_transformers, read_bytes, read_object, reading

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
    if model.is_file() and not rules.is_file():
        return build_tokenizer("SentencePiece", tokenizer_model=model)
    if model.is_file() and _same_pieces(model, folder):
        own = build_tokenizer("SentencePiece", tokenizer_model=model)
    elif vocab.is_file() and is_bert and usual and _added_pieces(folder) <= set(read_vocab(vocab)):
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
    one_of(path, settings, "do_lower_case", (True, False))
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
    is_same = ids == theirs(texts, add_special_tokens=False)["input_ids"] and all(i in (None, j) for i, j in roles)
    return _with_rows(own, theirs) if is_same else _as_ours(folder, theirs)


def _added_pieces(folder: Path) -> set[str]:
    """Return the pieces that tokenizer.json, or added_tokens.json of an older layout, adds to the vocabulary."""
    rules, older = folder / HuggingFaceTokenizer.file_name, folder / "added_tokens.json"
    added = set(read_object(older)) if older.is_file() else set()
    if rules.is_file():
        added |= {token.content for token in _read_rules(rules).get_added_tokens_decoder().values()}
    return added


def _read_rules(rules: Path) -> RustTokenizer:
    return read_backend(read_bytes(rules).removeprefix(codecs.BOM_UTF8), rules)


def _same_pieces(model: Path, folder: Path) -> bool:
    """Return whether a SentencePiece model numbers its pieces like the tokenizer.json beside it."""
    ours = build_tokenizer("SentencePiece", tokenizer_model=model)
    return ours.pieces == build_tokenizer("HuggingFace", tokenizer_model=folder).pieces


def _probes(own: Tokenizer, theirs: Any) -> Iterator[str]:
    """Yield texts of pieces in many spellings, and of many characters."""
    some = (own.decode([i]) for i in range(0, own.vocab_size, 1 + own.vocab_size // PROBED_PIECES))
    added = (token.content for token in theirs.added_tokens_decoder.values())
    for word in dict.fromkeys([*re.findall(r"\w+", " ".join(some)), *added]):
        wide, parts = word.translate(_WIDE), unicodedata.normalize("NFD", word)
        yield f"{word} {word.upper()}  {word.title()}\t{wide}\n{parts} x{word}x-{word}\u0301 1{word}23 \u4e2d{word}"
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
