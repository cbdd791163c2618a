"""The tokenizer of a Hugging Face folder as one of ours, read as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_ddrp.conversion.foreign_config import one_of, refuse_code
from megatron_ddrp.data.tokenizers.sentencepiece import SentencePieceTokenizer
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron_ddrp.json_files import read_object


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """Return a folder's tokenizer, None where it has none.

    It comes from an export's SentencePiece model, from vocab.txt if BERT's usual rules apply, else from tokenizer.json.
    """
    model = folder / SentencePieceTokenizer.file_name
    if model.is_file():
        return build_tokenizer("SentencePiece", tokenizer_model=model)
    vocab, settings = folder / "vocab.txt", tokenizer_settings(folder)
    lower = settings["do_lower_case"]
    usual = settings.get("strip_accents") in (None, lower) and settings.get("tokenize_chinese_chars", True)
    has_rules = (folder / "tokenizer.json").is_file()
    if vocab.is_file() and (usual or not has_rules):
        return build_tokenizer("BertWordPieceLowerCase" if lower else "BertWordPieceCase", vocab_file=vocab)
    return build_tokenizer("HuggingFace", tokenizer_model=folder) if has_rules else None


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json with `do_lower_case`, which is true by default.

    Raises `UserError` where it cannot be read, or where the tokenizer is another's code.
    """
    path = folder / "tokenizer_config.json"
    settings = {"do_lower_case": True} | (read_object(path) if path.is_file() else {})
    refuse_code(path, settings)
    one_of(path, settings, "do_lower_case", (True, False))
    return settings
