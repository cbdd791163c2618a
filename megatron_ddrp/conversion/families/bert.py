"""BERT, RoBERTa and its kin, and ELECTRA, as in transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ddrp.config import ModelConfig, ObjectiveConfig
from megatron_ddrp.conversion.families.contract import (
    CLASSIFIER_DROPOUT,
    EXACT_GELU,
    NUMBER,
    SIZES,
    Family,
    Table,
    setting,
    whole_number,
)
from megatron_ddrp.data.tokenizers.tokenizer import WORD_START, Tokenizer
from megatron_ddrp.errors import UserError

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

BERT_FOLLOWED = {"hidden_act": EXACT_GELU, "position_embedding_type": ("absolute",), "type_vocab_size": (2, 1)}

SEGMENTS = "embeddings.token_type_embeddings.weight"


class BertFamily(Family):
    """BERT (Devlin et al., arXiv:1810.04805): absolute positions, LayerNorm after each block.

    A model without segment embeddings is exported with one of zeros, since transformers always adds one.
    """

    model_type, class_name, prefix = "bert", "Bert", "bert."
    defaults = {"vocab_size": 30522, "layer_norm_eps": 1e-12}
    followed = BERT_FOLLOWED
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


POSITIONS = "embeddings.position_embeddings.weight"


class RobertaFamily(Family):
    """RoBERTa (Liu et al., arXiv:1907.11692): BERT's encoder with one segment, no pooler and a byte-level vocabulary.

    If p is the id of padding, tokens have positions p + 1, p + 2, … and padding has position p, so the table has p + 1
    rows that no token reads. Import drops them; export writes zeros in their place. Our model and theirs are equal if
    padding is to the right of the text, and if p is the id of padding alone: transformers gives any other token with
    this id the position of padding. So p must be the padding of the tokenizer.
    """

    model_type, class_name, prefix = "roberta", "Roberta", "roberta."
    defaults = {"vocab_size": 50265, "layer_norm_eps": 1e-12, "pad_token_id": 1}
    followed = BERT_FOLLOWED
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
        pieces = setting(path, values, "vocab_size", whole_number())
        unread = setting(path, values, "pad_token_id", whole_number(0, pieces - 1)) + 1
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
        usual = tokenizer.pieces[tokenizer.cls_id] == "<s>" and tokenizer.roles_of("pad") == ["[PAD]"]
        return config.num_segments == 1 and usual and self.owns(tokenizer.pieces)

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


class XlmRobertaFamily(RobertaFamily):
    """XLM-R (arXiv:1911.02116): a SentencePiece vocabulary."""

    model_type, class_name = "xlm-roberta", "XLMRoberta"
    defaults = {**RobertaFamily.defaults, "vocab_size": 30522}

    def owns(self, pieces: Sequence[str]) -> bool:
        return any(piece.startswith(WORD_START) for piece in pieces)


class CamembertFamily(XlmRobertaFamily):
    """CamemBERT (arXiv:1911.03894): a SentencePiece vocabulary after some names of fairseq's, which no text has.

    It masks whole words.
    """

    model_type, class_name = "camembert", "Camembert"
    training: dict[str, Any] = {}

    def owns(self, pieces: Sequence[str]) -> bool:
        return "<s>NOTUSED" in pieces


class ElectraFamily(BertFamily):
    """ELECTRA (Clark et al., arXiv:2003.10555): BERT's encoder, possibly with narrower embeddings.

    A discriminator's folder has the replaced-token head; a generator's folder, which is a masked LM, has the masked-LM
    head.
    """

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
    modules = BertFamily.modules | {"embeddings.projection": "embeddings_project"}
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
