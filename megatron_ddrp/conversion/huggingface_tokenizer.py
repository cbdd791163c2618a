"""Reader of a Hugging Face folder's tokenizer as one of ours, without running code."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from megatron_ddrp.conversion.foreign_config import one_of, refuse_code
from megatron_ddrp.data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_ddrp.data.tokenizers.sentencepiece import SentencePieceTokenizer
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.json_files import read_object

OTHER_VOCABULARIES = ("sentencepiece.bpe.model", "spm.model", "spiece.model", "merges.txt")
"""Vocabularies that only transformers can turn into a tokenizer.json: it numbers pieces and treats text in its own
way."""


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """Return a folder's tokenizer, or None if it has none.

    Sources in this order: the SentencePiece model that an export keeps beside its tokenizer.json; vocab.txt if BERT's
    usual rules apply; tokenizer.json; transformers' conversion of another vocabulary. Raise `UserError` if a file
    cannot be read or transformers is needed and fails.
    """
    settings, rules = tokenizer_settings(folder), folder / HuggingFaceTokenizer.file_name
    model, vocab = folder / SentencePieceTokenizer.file_name, folder / "vocab.txt"
    if model.is_file() and (not rules.is_file() or _same_pieces(model, folder)):
        return build_tokenizer("SentencePiece", tokenizer_model=model)
    lower = settings["do_lower_case"]
    usual = settings.get("strip_accents") in (None, lower) and settings.get("tokenize_chinese_chars", True)
    if vocab.is_file() and (usual or not rules.is_file()):
        return build_tokenizer("BertWordPieceLowerCase" if lower else "BertWordPieceCase", vocab_file=vocab)
    if rules.is_file():
        return build_tokenizer("HuggingFace", tokenizer_model=folder)
    for name in OTHER_VOCABULARIES:
        if (folder / name).is_file():
            return _convert(folder, name)
    return None


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json with `do_lower_case`, which is true by default.

    Raise `UserError` if it cannot be read, or if the tokenizer needs foreign code.
    """
    path = folder / "tokenizer_config.json"
    settings = {"do_lower_case": True} | (read_object(path) if path.is_file() else {})
    refuse_code(path, settings)
    one_of(path, settings, "do_lower_case", (True, False))
    return settings


def _same_pieces(model: Path, folder: Path) -> bool:
    """Return whether a SentencePiece model numbers its pieces like the tokenizer.json beside it."""
    ours = build_tokenizer("SentencePiece", tokenizer_model=model)
    return ours.pieces == build_tokenizer("HuggingFace", tokenizer_model=folder).pieces


def _convert(folder: Path, vocabulary: str) -> Tokenizer:
    """Return the tokenizer that transformers makes of a folder without tokenizer.json."""
    try:
        from transformers import AutoTokenizer, logging

        logging.set_verbosity_error()
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        with tempfile.TemporaryDirectory() as written:
            loaded.save_pretrained(written)
            return build_tokenizer("HuggingFace", tokenizer_model=written)
    except Exception as error:  # with a damaged file the library may raise any error
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        raise UserError(
            f"{folder} has {vocabulary} and no tokenizer.json, and it could not be converted ({reason}): run, "
            f'with transformers and sentencepiece installed, python -c "from transformers import AutoTokenizer as T; '
            f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')\""
        ) from None
