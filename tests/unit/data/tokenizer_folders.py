"""Folders with a tokenizer.json of a few pieces, and the names of its special ones."""

import json

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers

from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer

NAMES = {"cls": "<c>", "sep": "<s>", "pad": "<p>", "mask": "<m>", "unk": "<u>"}
ADDED = (*NAMES.values(),)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def numbered(*pieces):
    return {piece: i for i, piece in enumerate(pieces)}


def byte_bpe(pieces=ALPHABET, unknown=None, **more):
    """Return the parts of a byte-level BPE tokenizer."""
    return plain_bpe(pieces, unknown, **more)[0], pre_tokenizers.ByteLevel(add_prefix_space=False)


def plain_bpe(pieces, unknown=None, **more):
    return models.BPE(numbered(*ADDED, *pieces), [], unk_token=unknown, **more), None


def unigram(pieces, unknown, **more):
    return models.Unigram([(piece, -1.0) for piece in [*NAMES.values(), *pieces]], unknown, **more), None


def write(folder, made, names=NAMES, file="tokenizer_config.json", added=ADDED, change=None):
    """Write a folder with tokenizer.json, and the names of its special pieces."""
    model, splitter = made
    backend = RustTokenizer(model)
    if splitter is not None:
        backend.pre_tokenizer = splitter
    backend.add_special_tokens(list(added))
    layout = json.loads(backend.to_str())
    if change:
        change(layout)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(layout), encoding="utf-8")
    (folder / file).write_text(json.dumps({f"{role}_token": name for role, name in names.items()}))
    return folder


def built(folder, *made, **how):
    """Return the tokenizer of a folder, which is written first if it is said what is made."""
    return build_tokenizer("HuggingFace", tokenizer_model=write(folder, *made, **how) if made else folder)
