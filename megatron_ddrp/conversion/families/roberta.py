"""RoBERTa (Liu et al., arXiv:1907.11692), XLM-R (arXiv:1911.02116) and CamemBERT (arXiv:1911.03894).

BERT's encoder with one segment and without a pooler. If p is the id of padding, tokens have positions p + 1, p + 2, …
and padding has position p, so the table has p + 1 rows that no token reads. Import drops them; export writes zeros in
their place. Our model and theirs are equal if padding is to the right of the text, and if p is the id of padding alone:
transformers gives any other token with this id the position of padding. So p must be the padding of the tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.conversion.families.bert import BERT_FIELDS, BERT_MODULES
from megatron_ddrp.conversion.families.contract import CLASSIFIER_DROPOUT, EXACT_GELU, Family
from megatron_ddrp.conversion.foreign_config import whole_number
from megatron_ddrp.data.tokenizers.tokenizer import WORD_START, Tokenizer
from megatron_ddrp.errors import UserError

POSITIONS = "embeddings.position_embeddings.weight"


class Roberta(Family):
    """RoBERTa: a byte-level vocabulary."""

    model_type, class_name, prefix = "roberta", "Roberta", "roberta."
    defaults = {"vocab_size": 50265, "layer_norm_eps": 1e-12, "pad_token_id": 1}
    followed = {
        "hidden_act": EXACT_GELU,
        "position_embedding_type": ("absolute",),
        "type_vocab_size": (2, 1),
    }
    head_keys = CLASSIFIER_DROPOUT
    task_head = {"pooler.dense": "classifier.dense", "classifier": "classifier.out_proj"}
    fields = BERT_FIELDS | {"num_segments": (1, 2)}
    training = {"masking": "token"}
    modules = BERT_MODULES
    head_modules = {
        "masked-lm": {"head.dense": "lm_head.dense", "head.norm": "lm_head.layer_norm", "head.decoder": "lm_head"}
    }
    more_modules = {"lm_head.decoder": "head.decoder"}

    def settings(self, path: Path, values: dict[str, Any]) -> dict[str, Any]:
        settings = super().settings(path, values)
        pieces = whole_number(path, values, "vocab_size")
        unread = whole_number(path, values, "pad_token_id", least=0, most=pieces - 1) + 1
        if settings["seq_length"] <= unread:
            raise UserError(
                f"{path}: max_position_embeddings is {settings['seq_length']}, of which {unread} rows belong to "
                "padding: none is left for a text"
            )
        return settings | {"seq_length": settings["seq_length"] - unread}

    def padding_id(self, values: dict[str, Any]) -> int | None:
        return int(values["pad_token_id"])

    def from_folder(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> dict[str, Tensor]:
        unread = values["pad_token_id"] + 1
        return {name: tensor[unread:] if name.endswith(POSITIONS) else tensor for name, tensor in tensors.items()}

    def fits(self, config: ModelConfig, tokenizer: Tokenizer) -> bool:
        begins_with_s = tokenizer.pieces[tokenizer.cls_id] == "<s>"
        return config.num_segments == 1 and begins_with_s and self.owns(tokenizer.pieces)

    def owns(self, pieces: Sequence[str]) -> bool:
        """Return whether a vocabulary that begins texts with <s> belongs to this family."""
        return True

    def folder_settings(self, config: ModelConfig, head: str, tokenizer: Tokenizer) -> dict[str, Any]:
        return super().folder_settings(config, head, tokenizer) | {
            "max_position_embeddings": config.seq_length + tokenizer.pad_id + 1,
            "bos_token_id": tokenizer.cls_id,
            "eos_token_id": tokenizer.sep_id,
        }

    def to_folder(self, tensors: dict[str, Tensor], config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Tensor]:
        name = self.prefix + POSITIONS
        return {**tensors, name: F.pad(tensors[name], (0, 0, tokenizer.pad_id + 1, 0))}


class XlmRoberta(Roberta):
    """XLM-R: a SentencePiece vocabulary."""

    model_type, class_name = "xlm-roberta", "XLMRoberta"
    defaults = {**Roberta.defaults, "vocab_size": 30522}

    def owns(self, pieces: Sequence[str]) -> bool:
        return any(piece.startswith(WORD_START) for piece in pieces)


class Camembert(XlmRoberta):
    """CamemBERT: a SentencePiece vocabulary after some names of fairseq's, which no text has. Masks whole words."""

    model_type, class_name = "camembert", "Camembert"
    training: dict[str, Any] = {}

    def owns(self, pieces: Sequence[str]) -> bool:
        return "<s>NOTUSED" in pieces
