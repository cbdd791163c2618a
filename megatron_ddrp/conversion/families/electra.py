"""ELECTRA (Clark et al., arXiv:2003.10555) as transformers has it: BERT's encoder, its embeddings maybe narrower.

A discriminator's folder has the replaced-token head, a generator's the masked-LM head, and each stands alone.
"""

from __future__ import annotations

from typing import Any

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.conversion.families.bert import Bert
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer


class Electra(Bert):
    """ELECTRA's discriminator."""

    model_type, class_name, prefix = "electra", "Electra", "electra."
    heads = ("replaced-token",)
    head_modules = {
        "head.dense": "discriminator_predictions.dense",
        "head.output": "discriminator_predictions.dense_prediction",
    }

    def folder_settings(self, config: ModelConfig, head: str, tokenizer: Tokenizer) -> dict[str, Any]:
        return super().folder_settings(config, head, tokenizer) | {"embedding_size": config.embedding_width}
