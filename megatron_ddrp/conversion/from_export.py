"""A folder that tools/convert_checkpoint.py --load wrote, read back as a model of ours: weights and sizes, no code."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.config.older import model_as_meant
from megatron_ddrp.conversion.from_huggingface import find_tokenizer, read_folder
from megatron_ddrp.conversion.huggingface_weights import Weights, fill, read_weights
from megatron_ddrp.conversion.to_huggingface import OWN_MODEL_TYPE
from megatron_ddrp.conversion.weight_names import own_name
from megatron_ddrp.data.sentencepiece_tokenizer import SentencePieceTokenizer
from megatron_ddrp.data.tokenizer import Tokenizer, build_tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import Encoder, build_model

SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "seq_length",
    "layernorm_position": "layernorm_position",
    "layer_norm_eps": "layernorm_epsilon",
    "position_encoding": "position_encoding",
    "relative_distance": "relative_distance",
    "relative_table": "relative_table",
    "deberta_emd": "deberta_emd",
    "vocab_size": "vocab_size",
}
"""Key of config.json → field of `ModelConfig`, of what a forward pass needs."""

ADDED = {"absolute_embedding": "absolute_embedding"}
"""Keys that folders of older versions lack."""


def load_hugging_face(folder: Path) -> tuple[Encoder, Tokenizer, ModelConfig]:
    """(model on the CPU in fp32 and eval mode, tokenizer, sizes) of an export of ours, a BERT or a DeBERTa v1.

    Raises `UserError` where the folder is none of them, or lacks a weight or its tokenizer.
    """
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'} cannot be read: {error}") from None
    if values.get("model_type") == OWN_MODEL_TYPE:
        model, tokenizer = _own(folder, values), _tokenizer(folder)
    else:
        read = read_folder(folder)
        model, tokenizer = read.model, _tokenizer(folder) if read.tokenizer else None
    if tokenizer is None:
        raise UserError(f"{folder} has no tokenizer: copy the model's vocab.txt or tokenizer.json there")
    return model.eval(), tokenizer, model.config


def _own(folder: Path, values: dict) -> Encoder:
    missing = [key for key in SIZES if key not in values]
    if missing:
        raise UserError(f"{folder / 'config.json'}: no {missing[0]}; export the checkpoint again")
    sizes = {field: values[key] for key, field in (SIZES | ADDED).items() if key in values}
    config = ModelConfig(**model_as_meant(sizes))
    model, stored = build_model(config), read_weights(folder)
    names = {name: own_name(name) for name, _ in model.named_parameters()}
    ours = {name: stored[there] for name, there in names.items() if there in stored}
    fill(model, Weights(ours), config.vocab_size, folder)
    return model


def _tokenizer(folder: Path) -> Tokenizer | None:
    """The vocabulary's own file where there is one: its fingerprint is that of the datasets it made."""
    model_file = folder / SentencePieceTokenizer.file_name
    if model_file.is_file():
        return build_tokenizer("SentencePiece", tokenizer_model=model_file)
    return find_tokenizer(folder)
