"""DeBERTa in its v1 layout (He et al., arXiv:2006.03654) as in transformers, without the enhanced mask decoder.

Query, key and value are fused head by head, and keys have no bias. Folders name the head's weights like BERT's or like
the original release (`lm_predictions`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.conversion.families.bert import BERT_HEAD, BERT_MODULES
from megatron_ddrp.conversion.families.contract import DROPOUT, EXACT_GELU, NOTHING, NUMBER, Family
from megatron_ddrp.conversion.foreign_config import LARGEST_SIZE, show, whole_number
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import UserError

SECOND_LAYOUT = {
    "position_buckets": "relative positions in logarithmic buckets",
    "norm_rel_ebd": "a LayerNorm over the relative table",
    "share_att_key": "position projections shared with the content's",
    "conv_kernel_size": "a convolution beside the first layer",
}
"""Setting of DeBERTa v2 and v3 → feature that it enables."""


POOLER_KEYS: dict[str, tuple[Any, ...]] = {
    "pooler_hidden_act": (str,),
    "pooler_hidden_size": (int,),
    "pooler_dropout": NUMBER,
    "cls_dropout": DROPOUT,
}


class Deberta(Family):
    """DeBERTa v1. Its absolute positions, if it has any, are added to the input."""

    model_type, class_name, prefix = "deberta", "Deberta", "deberta."
    defaults = {
        "vocab_size": 50265,
        "layer_norm_eps": 1e-7,
        "relative_attention": False,  # our encoder does not support this default
        "max_relative_positions": -1,
        "pos_att_type": None,
    }
    followed = {
        "hidden_act": EXACT_GELU,
        "relative_attention": (True,),
        "position_biased_input": (True, False),
        "talking_head": (False,),
        "type_vocab_size": (0, 1, 2),
    }
    head_keys = POOLER_KEYS
    task_head = NOTHING
    fields = {
        "position_encoding": ("deberta",),
        "key_bias": (False,),
        "num_segments": (0, 1, 2),
        "absolute_embedding": (None, True),
        "deberta_emd": (False,),
    }
    modules = BERT_MODULES | {
        "layer_position.key": "attention.self.pos_proj",
        "layer_position.query": "attention.self.pos_q_proj",
    }
    head_modules = {"masked-lm": BERT_HEAD}
    parameters = {"embeddings.position.relative": "encoder.rel_embeddings.weight"}
    more_modules = {
        "lm_predictions.lm_head.dense": "head.dense",
        "lm_predictions.lm_head.LayerNorm": "head.norm",
        "lm_predictions.lm_head": "head.decoder",
        "cls.predictions.decoder": "head.decoder",
    }

    def complete(self, path: Path, values: dict[str, Any]) -> dict[str, Any]:
        _refuse_later_layout(path, values)
        values = super().complete(path, values)
        refuse_other_terms(path, values)
        return values

    def settings(self, path: Path, values: dict[str, Any]) -> dict[str, Any]:
        settings = super().settings(path, values)
        furthest = whole_number(path, values, "max_relative_positions", least=-LARGEST_SIZE)
        distance = furthest if furthest > 0 else settings["seq_length"]
        return settings | {"relative_distance": distance, "absolute_embedding": values["position_biased_input"]}

    def from_folder(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> dict[str, Tensor]:
        """Split `in_proj` `[heads · 3 · d, hidden]`, which holds d rows of query, of key and of value per head."""
        split, num_heads = {}, values["num_attention_heads"]
        for name, tensor in tensors.items():
            layer, _, kind = name.rpartition("attention.self.")
            if kind == "in_proj.weight":
                if len(tensor) % (3 * num_heads):
                    raise UserError(f"{name} has {len(tensor)} rows, not query, key and value of {num_heads} heads")
                parts = tensor.unflatten(0, (num_heads, 3, -1))  # [heads, 3, d, hidden]
                for number, part in enumerate(("query", "key", "value")):
                    split[f"{layer}attention.self.{part}.weight"] = parts[:, number].flatten(0, 1)
            elif kind in ("q_bias", "v_bias"):
                part = "query" if kind == "q_bias" else "value"
                split[f"{layer}attention.self.{part}.bias"] = tensor
            else:
                split[name] = tensor
        return split

    def folder_settings(self, config: ModelConfig, head: str, tokenizer: Tokenizer) -> dict[str, Any]:
        return super().folder_settings(config, head, tokenizer) | {
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "max_relative_positions": config.relative_distance,
            "position_biased_input": config.adds_absolute_embedding,
            "legacy": True,
        }

    def to_folder(self, tensors: dict[str, Tensor], config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Tensor]:
        fused, heads = dict(tensors), (config.num_attention_heads, -1)
        for number in range(config.num_layers):
            place = f"{self.prefix}{self.layers}.{number}.attention.self."
            parts = [fused.pop(f"{place}{part}.weight").unflatten(0, heads) for part in ("query", "key", "value")]
            fused[f"{place}in_proj.weight"] = torch.stack(parts, 1).flatten(0, 2)  # [heads · 3 · d, hidden]
            for part in ("query", "value"):
                fused[f"{place}{part[0]}_bias"] = fused.pop(f"{place}{part}.bias")
        return fused


def refuse_other_terms(path: Path, values: dict[str, Any]) -> None:
    """Raise `UserError` for attention with terms other than DeBERTa's three, and for embeddings of another width."""
    terms = values["pos_att_type"]
    if isinstance(terms, str):
        terms = [term.strip() for term in terms.lower().split("|")]
    if terms not in (["c2p", "p2c"], ["p2c", "c2p"]):  # v1 counts the terms of a list, and reads none in capitals
        raise UserError(f"{path}: pos_att_type is {show(values['pos_att_type'])}, expected c2p and p2c, no others")
    width = values.get("embedding_size", values["hidden_size"])
    if width != values["hidden_size"]:
        raise UserError(f"{path}: embedding_size is {show(width)}, which is not supported: need hidden_size")


def _refuse_later_layout(path: Path, values: dict[str, Any]) -> None:
    """Raise `UserError` for a folder that claims v1 but has features of v2."""
    for key, what in SECOND_LAYOUT.items():
        value = values.get(key)
        is_off = value in (None, False, "none", "") or (isinstance(value, int) and value < 1)
        if not is_off:
            raise UserError(
                f"{path}: {key} is {show(value)}, {what}, which belongs to the v2/v3 layout: such a folder has "
                "model_type 'deberta-v2'"
            )
