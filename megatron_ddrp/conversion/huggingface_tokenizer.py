"""Reader of a Hugging Face folder's tokenizer as one of ours, without running code."""

from __future__ import annotations

import codecs
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from megatron_ddrp.conversion.foreign_config import one_of, refuse_code, show
from megatron_ddrp.data.tokenizers.huggingface import HuggingFaceTokenizer, read_backend
from megatron_ddrp.data.tokenizers.sentencepiece import SentencePieceTokenizer
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron_ddrp.data.tokenizers.wordpiece import read_vocab
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import parse_json, quiet_transformers, read_bytes, read_object, reading

OTHER_VOCABULARIES = ("sentencepiece.bpe.model", "spm.model", "spiece.model", "merges.txt")
"""Vocabularies that only transformers can turn into a tokenizer.json: it numbers pieces and treats text in its own
way."""
_BYTE_ORDER_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_BERT_LIKE = ("Bert", "ConvBert", "DistilBert", "Electra", "Funnel", "LayoutLM", "MobileBert", "MPNet", "Splinter")
BERT_CLASSES = tuple(f"{name}Tokenizer" for name in (*_BERT_LIKE, "SqueezeBert"))
"""Values of `tokenizer_class`, without `Fast`, that stand for BERT's rules on a vocab.txt."""


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """Return a folder's tokenizer, or None if it has none.

    Sources in this order: the SentencePiece model that an export keeps beside its tokenizer.json; vocab.txt if BERT's
    usual rules apply and it has every piece; tokenizer.json; transformers' conversion of vocab.txt, of another
    vocabulary, or of a tokenizer.json whose rules tokenizer_config.json changes. Raise `UserError` if a file cannot be
    read, if vocab.txt belongs to a tokenizer with other rules than BERT's, or if transformers is needed and fails.
    """
    settings, rules = tokenizer_settings(folder), folder / HuggingFaceTokenizer.file_name
    model, vocab = folder / SentencePieceTokenizer.file_name, folder / "vocab.txt"
    if model.is_file() and (not rules.is_file() or _same_pieces(model, folder)):
        return build_tokenizer("SentencePiece", tokenizer_model=model)
    lower, kind = settings["do_lower_case"], settings["tokenizer_class"]
    is_bert = kind is None or str(kind).removesuffix("Fast") in BERT_CLASSES
    usual = settings.get("strip_accents") in (None, lower) and settings.get("tokenize_chinese_chars", True)
    if vocab.is_file() and is_bert and usual and _added_pieces(folder) <= set(read_vocab(vocab)):
        return build_tokenizer("BertWordPieceLowerCase" if lower else "BertWordPieceCase", vocab_file=vocab)
    if rules.is_file() and not (is_bert and kind and _changes_rules(settings, rules)):
        return build_tokenizer("HuggingFace", tokenizer_model=folder)
    if rules.is_file():
        return _convert(folder, rules.name)
    if vocab.is_file() and is_bert:
        return _convert(folder, "vocab.txt", **{} if kind else {"tokenizer_type": "bert"})
    if vocab.is_file():
        raise UserError(
            f"{folder}: its vocab.txt belongs to a {show(kind)}, expected BertTokenizer or another class with BERT's "
            "rules; add the tokenizer.json of this model if there is one, or choose another model"
        )
    for name in OTHER_VOCABULARIES:
        if (folder / name).is_file():
            return _convert(folder, name)
    return None


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json with `do_lower_case`, which is true by default, and `tokenizer_class`.

    config.json may have the class instead, or name a model with BERT's; otherwise it is None. Raise `UserError` if a
    file cannot be read, or if the tokenizer needs foreign code or a program that finds words, such as MeCab.
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
        settings["tokenizer_class"] = known.get("tokenizer_class") or usual
    return settings


def _changes_rules(settings: dict[str, Any], rules: Path) -> bool:
    """Return whether tokenizer_config.json asks for other rules of BERT's than a tokenizer.json has.

    Then it decides: transformers builds the tokenizers of its BERT classes from these settings.
    """
    normalizer = parse_json(_read_rules(rules).to_str(), lenient=True)["normalizer"]
    if not normalizer or normalizer["type"] != "BertNormalizer":
        return False
    lower, strip = settings["do_lower_case"], settings.get("strip_accents")
    wanted = (lower, lower if strip is None else strip, settings.get("tokenize_chinese_chars", True))
    lower, strip = normalizer["lowercase"], normalizer["strip_accents"]
    return wanted != (lower, lower if strip is None else strip, normalizer["handle_chinese_chars"])


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


def _convert(folder: Path, vocabulary: str, **choice: str) -> Tokenizer:
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
    with tempfile.TemporaryDirectory() as written:
        with reading(folder, refused), quiet_transformers():
            from transformers import AutoTokenizer

            loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **choice)
            loaded.save_pretrained(written)
        try:
            return build_tokenizer("HuggingFace", tokenizer_model=written)
        except UserError as error:
            raise UserError(str(error).replace(written, str(folder)), error.exit_code) from None
