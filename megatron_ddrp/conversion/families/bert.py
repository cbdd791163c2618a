"""BERT (Devlin et al., arXiv:1810.04805) as in transformers: absolute positions, LayerNorm after each block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.conversion.families.contract import CLASSIFIER_DROPOUT, EXACT_GELU, Family, Table
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer

BERT_MODULES = {
    "embeddings.token": "embeddings.word_embeddings",
    "embeddings.segment": "embeddings.token_type_embeddings",
    "embeddings.absolute": "embeddings.position_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.input": "intermediate.dense",
    "feed_forward.output": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
"""Our name → name in most families, for the encoder's modules."""

BERT_HEAD = {
    "head.dense": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head.decoder": "cls.predictions",
}

BERT_FIELDS: dict[str, tuple[Any, ...]] = {
    "position_encoding": ("absolute",),
    "num_segments": (2, 1, 0),
    "deberta_emd": (None, False),
    "relative_table": ("shared", "per-layer"),  # there is no table
}
"""Fields of `ModelConfig` → values with which a model is a BERT."""

SEGMENTS = "embeddings.token_type_embeddings.weight"


class Bert(Family):
    """BERT. A model without segment embeddings is exported with one of zeros, since transformers always adds one."""

    model_type, class_name, prefix = "bert", "Bert", "bert."
    defaults = {"vocab_size": 30522, "layer_norm_eps": 1e-12}
    followed = {
        "hidden_act": EXACT_GELU,
        "position_embedding_type": ("absolute",),
        "type_vocab_size": (2, 1),
    }
    head_keys = CLASSIFIER_DROPOUT
    task_head: Table | None = {"pooler.dense": "bert.pooler.dense"}
    fields = BERT_FIELDS
    modules = BERT_MODULES
    head_modules = {"masked-lm": BERT_HEAD}
    more_modules = {"cls.predictions.decoder": "head.decoder"}

    def folder_settings(self, config: ModelConfig, head: str, tokenizer: Tokenizer) -> dict[str, Any]:
        return super().folder_settings(config, head, tokenizer) | {"type_vocab_size": max(1, config.num_segments)}

    def to_folder(self, tensors: dict[str, Tensor], config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Tensor]:
        if config.num_segments:
            return tensors
        return {**tensors, self.prefix + SEGMENTS: torch.zeros(1, config.embedding_width)}
