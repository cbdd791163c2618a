"""Sizes of an exported model; one of the files that travel inside its folder, see modeling_ddrp.py."""

from typing import Any

from transformers import PretrainedConfig


class DdrpConfig(PretrainedConfig):
    """Sizes under BERT's names, and where positions and LayerNorms stand."""

    model_type = "megatron_ddrp"

    def __init__(
        self,
        vocab_size: int = 30522,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        intermediate_size: int = 3072,
        hidden_dropout_prob: float = 0.1,
        attention_probs_dropout_prob: float = 0.1,
        max_position_embeddings: int = 512,
        type_vocab_size: int = 2,
        initializer_range: float = 0.02,
        layer_norm_eps: float = 1e-12,
        layernorm_position: str = "post",
        position_encoding: str = "ddrp",
        relative_distance: int = 64,
        relative_table: str = "shared",
        direction_init: str = "spread",
        absolute_embedding: bool | None = None,
        deberta_emd: bool = False,
        pad_token_id: int = 0,
        **kwargs: Any,
    ) -> None:
        if absolute_embedding is None:  # a folder older than this key, when tupe-r's distance was always 128
            absolute_embedding = position_encoding == "absolute"
            relative_distance = 128 if position_encoding == "tupe-r" else relative_distance
        super().__init__(**kwargs)
        self.pad_token_id = pad_token_id
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.hidden_dropout_prob = hidden_dropout_prob
        self.attention_probs_dropout_prob = attention_probs_dropout_prob
        self.max_position_embeddings = max_position_embeddings
        self.type_vocab_size = type_vocab_size
        self.initializer_range = initializer_range
        self.layer_norm_eps = layer_norm_eps
        self.layernorm_position = layernorm_position
        self.position_encoding = position_encoding
        self.relative_distance = relative_distance
        self.relative_table = relative_table
        self.direction_init = direction_init
        self.absolute_embedding = absolute_embedding
        self.deberta_emd = deberta_emd

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads
