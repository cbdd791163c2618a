"""ELECTRA (Clark et al., arXiv:2003.10555) as in transformers: BERT's encoder, possibly with narrower embeddings.

A discriminator's folder has the replaced-token head, a generator's folder the masked-LM head.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_ddrp.config import ModelConfig, ObjectiveConfig
from megatron_ddrp.conversion.families.bert import Bert
from megatron_ddrp.conversion.families.contract import CLASSIFIER_DROPOUT, NUMBER
from megatron_ddrp.conversion.foreign_config import SIZES
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer


class Electra(Bert):
    """ELECTRA's discriminator, or its generator as a masked LM."""

    model_type, class_name, prefix = "electra", "Electra", "electra."
    sizes = SIZES | {"embedding_size": "embedding_size"}
    defaults = {
        "vocab_size": 30522,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "embedding_size": 128,
        "layer_norm_eps": 1e-12,
    }
    head_keys = CLASSIFIER_DROPOUT | {
        "summary_type": (str,),
        "summary_use_proj": (bool,),
        "summary_proj_to_labels": (bool,),
        "summary_activation": (str,),
        "summary_first_dropout": NUMBER,
        "summary_last_dropout": NUMBER,
    }
    task_head = None  # it pools with a GELU
    training = {"masking": "token"}
    modules = Bert.modules | {"embeddings.projection": "embeddings_project"}
    head_modules = {
        "replaced-token": {
            "head.dense": "discriminator_predictions.dense",
            "head.output": "discriminator_predictions.dense_prediction",
        },
        "masked-lm": {
            "head.dense": "generator_predictions.dense",
            "head.norm": "generator_predictions.LayerNorm",
            "head.decoder": "generator_lm_head",
        },
    }
    more_modules = {}

    def settings(self, path: Path, values: dict[str, Any]) -> dict[str, Any]:
        settings = super().settings(path, values)
        is_full = settings["embedding_size"] == settings["hidden_size"]
        return settings | ({"embedding_size": None} if is_full else {})

    def objective(self, path: Path, values: dict[str, Any], names: Iterable[str]) -> ObjectiveConfig:
        heads = {name.partition(".")[0] for name in names} & {"generator_lm_head", "discriminator_predictions"}
        says_generator = not heads and values.get("architectures") == ["ElectraForMaskedLM"]
        is_generator = says_generator or heads == {"generator_lm_head"}
        return ObjectiveConfig("mlm" if is_generator else "electra", **self.training)

    def folder_settings(self, config: ModelConfig, head: str, tokenizer: Tokenizer) -> dict[str, Any]:
        return super().folder_settings(config, head, tokenizer) | {"embedding_size": config.embedding_width}
