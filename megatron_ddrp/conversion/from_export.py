"""A folder that tools/convert_checkpoint.py --load wrote, read back as a model of ours: weights and sizes, no code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_ddrp import checkpoint
from megatron_ddrp.config import ModelConfig
from megatron_ddrp.config.older import model_as_meant
from megatron_ddrp.conversion.foreign_config import (
    OWN_MODEL_TYPE,
    OWN_SETTINGS,
    SIZES,
    model_config,
    read_config_file,
    read_settings,
)
from megatron_ddrp.conversion.from_huggingface import PADDED_ROWS, find_tokenizer, read_folder
from megatron_ddrp.conversion.huggingface_weights import TOKEN_EMBEDDING, Weights, fill, read_weights, refuse_sizes
from megatron_ddrp.conversion.weight_names import own_name
from megatron_ddrp.data.tokenizers.sentencepiece import SentencePieceTokenizer
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import Encoder, build_model

ADDED = ("absolute_embedding", "direction_init", "rope_theta", "local_rope_theta")
"""Settings of `OWN_SETTINGS` that folders of older versions lack."""


def load_hugging_face(folder: Path) -> tuple[Encoder, Tokenizer, ModelConfig]:
    """Return (model on the CPU in fp32 and eval mode, tokenizer, sizes) of an export of ours, a BERT or a DeBERTa v1.

    Raises `UserError` where the folder is none of them, lacks a weight or its tokenizer, or has another's tokenizer.
    """
    values = read_config_file(folder)
    if values.get("model_type") == OWN_MODEL_TYPE:
        model, tokenizer = _own(folder, values), _tokenizer(folder)
    else:
        read = read_folder(folder)
        model, tokenizer = read.model, _tokenizer(folder) if read.tokenizer else None
        if tokenizer and read.embedded_pieces - tokenizer.vocab_size > PADDED_ROWS:
            raise UserError(
                f"{folder}: its tokenizer has {tokenizer.vocab_size} pieces and its model embeds "
                f"{read.embedded_pieces}; put the vocabulary there that the model was trained with"
            )
    if tokenizer is None:
        raise UserError(f"{folder} has no tokenizer: copy the model's vocab.txt or tokenizer.json there")
    return model.eval(), tokenizer, model.config


def own_config(folder: Path, values: dict[str, Any]) -> ModelConfig:
    """Return the sizes of an export of ours. Raises `UserError` where one is missing or is no size."""
    path = folder / "config.json"
    keys = SIZES | {name: name for name in OWN_SETTINGS if name in values or name not in ADDED}
    if missing := [key for key in keys if key not in values]:
        raise UserError(f"{path}: no {missing[0]}; export the checkpoint again")
    return model_config(path, model_as_meant(read_settings(path, values, keys)))


def _own(folder: Path, values: dict) -> Encoder:
    config, stored = own_config(folder, values), read_weights(folder)
    refuse_sizes(config, stored, folder)
    rows = len(stored.get(own_name(TOKEN_EMBEDDING), ()))
    if rows != config.vocab_size:
        raise UserError(
            f"{folder}: config.json says {config.vocab_size} pieces and the weights embed {rows}: they do not match; "
            "export the checkpoint again"
        )
    model = build_model(config)
    names = {name: own_name(name) for name in (*dict(model.named_parameters()), *checkpoint.persistent_buffers(model))}
    ours = {name: stored[there] for name, there in names.items() if there in stored}
    fill(model, Weights(ours), config.vocab_size, folder)
    return model


def _tokenizer(folder: Path) -> Tokenizer | None:
    """Return a folder's tokenizer, from the vocabulary's own file if there is one: datasets know its fingerprint."""
    model_file = folder / SentencePieceTokenizer.file_name
    if model_file.is_file():
        return build_tokenizer("SentencePiece", tokenizer_model=model_file)
    return find_tokenizer(folder)
