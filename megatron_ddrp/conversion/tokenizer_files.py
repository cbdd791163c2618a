"""Export of a run's tokenizer as the files that AutoTokenizer reads: tokenizer.json, its settings, the vocabulary.

One difference comes from transformers: there, "[MASK]" in a text becomes the mask token, which fill-mask needs. In
training, the name of a special token (or of a byte, "<0x41>") inside a text is plain text.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from megatron_ddrp.conversion.sentencepiece_model import unigram_tokenizer
from megatron_ddrp.data.tokenizers.huggingface import make_exact, read_backend
from megatron_ddrp.data.tokenizers.tokenizer import DESCRIPTION_FILE, SPECIAL_PIECES, WORD_START, Tokenizer

BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
PROBED_PIECES = 2000
"""Number of pieces whose text both tokenizers must split alike before the files count as equal."""


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int, num_segments: int = 2) -> str:
    """Write the files; return one line that lists them, or the reason why AutoTokenizer cannot load them.

    A copied tokenizer.json stays unchanged, byte for byte, if it already adds the special pieces around texts: datasets
    made with it store its sum.
    """
    tokenizer.save(folder)  # the vocabulary's own file
    (folder / DESCRIPTION_FILE).unlink()
    converted = _rust_tokenizer(tokenizer, folder)
    is_copied = tokenizer.tokenizer_type == "HuggingFace"
    if converted is None or not (is_copied or _agree(tokenizer, converted)):
        return (
            f"{tokenizer.tokenizer_type}: {tokenizer.file_name} only; transformers has no equal of this model, "
            "so AutoTokenizer cannot load it"
        )
    names = {f"{role}_token": tokenizer.pieces[getattr(tokenizer, f"{role}_id")] for role in SPECIAL_PIECES}
    if not (is_copied and _is_ready(tokenizer, folder)):
        _add_specials(tokenizer, converted, names)
        converted.save(str(folder / "tokenizer.json"))
    is_wordpiece = tokenizer.tokenizer_type.startswith("BertWordPiece")
    settings = {
        "tokenizer_class": "BertTokenizer" if is_wordpiece else "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "model_input_names": ["input_ids", *["token_type_ids"] * (num_segments > 1), "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **names,
    }
    if is_wordpiece:
        lower = tokenizer.tokenizer_type == "BertWordPieceLowerCase"
        settings |= {"do_lower_case": lower, "strip_accents": lower, "tokenize_chinese_chars": True}
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "special_tokens_map.json", names)
    written = dict.fromkeys([tokenizer.file_name, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
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
    made = RustTokenizer(models.WordPiece(ids, unk_token=tokenizer.pieces[tokenizer.unk_id]))
    made.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=lower)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made


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
    outer = copied.encode("").ids
    varies = copied.truncation is not None or copied.padding is not None or getattr(copied.model, "dropout", None)
    return not varies and set(tokenizer.special_ids.tolist()) <= known and outer == [tokenizer.cls_id, tokenizer.sep_id]


def _add_specials(tokenizer: Tokenizer, converted: RustTokenizer, names: dict[str, str]) -> None:
    """Mark the special pieces, and add [CLS] and [SEP] around texts as in training."""
    known = converted.get_added_tokens_decoder()  # a copied tokenizer has its own settings for them
    missing = [tokenizer.pieces[i] for i in tokenizer.special_ids.tolist() if i not in known]
    converted.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in missing])
    cls, sep = names["cls_token"], names["sep_token"]
    converted.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, tokenizer.cls_id), (sep, tokenizer.sep_id)],
    )


def _write_json(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
