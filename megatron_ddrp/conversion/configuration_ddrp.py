"""Configuration of an exported model; this file is copied into every exported folder, see modeling_ddrp.py."""

from typing import Any

from transformers import PretrainedConfig

DEFAULTS: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": None,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "layernorm_position": "post",
    "position_encoding": "ddrp",
    "relative_distance": 64,
    "relative_table": "shared",
    "direction_init": "spread",
    "rope_theta": 10_000.0,
    "local_rope_theta": None,
    "deberta_emd": False,
    "ffn": "gelu",
    "norm": "layernorm",
    "bias": True,
    "norm_bias": None,
    "embedding_norm": True,
    "key_bias": True,
    "first_norm": True,
    "local_attention": None,
    "global_every": 3,
    "embedding_size": None,
    "num_segments": 2,
    "pad_token_id": 0,
}


class DdrpConfig(PretrainedConfig):
    """Sizes under BERT's names, the position encoding, and the place of LayerNorms."""

    model_type = "megatron_ddrp"
    attribute_map = {
        "num_layers": "num_hidden_layers",
        "seq_length": "max_position_embeddings",
        "hidden_dropout": "hidden_dropout_prob",
        "layernorm_epsilon": "layer_norm_eps",
        "init_method_std": "initializer_range",
    }
    """Name that a position encoding reads → name in config.json."""

    def __init__(self, **settings: Any) -> None:
        """Take the settings of a config.json; missing ones get the values of `DEFAULTS`."""
        if settings.get("absolute_embedding") is None:
            encoding = settings.get("position_encoding", DEFAULTS["position_encoding"])
            settings["absolute_embedding"] = encoding == "absolute"
        super().__init__(**(DEFAULTS | settings))

    def window(self, layer: int) -> int | None:
        """Return the number of tokens on each side to which a layer's tokens attend; None means all tokens."""
        if self.local_attention is None or layer % self.global_every == 0:
            return None
        return self.local_attention // 2

    @property
    def biased_norms(self) -> bool:
        return self.bias if self.norm_bias is None else self.norm_bias

    @property
    def embedding_width(self) -> int:
        return self.embedding_size or self.hidden_size

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads
