"""DeBERTa, versions 1 to 3, as in transformers, without the enhanced mask decoder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ddrp.config import ModelConfig, ObjectiveConfig
from megatron_ddrp.conversion.families.bert import BERT_HEAD, BERT_MODULES
from megatron_ddrp.conversion.families.contract import (
    DROPOUT,
    EXACT_GELU,
    LARGEST_SIZE,
    NOTHING,
    NUMBER,
    SIZES,
    Family,
    refuse_other_head_size,
    setting,
    whole_number,
)
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import show

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


class Disentangled(Family):
    """Base of all DeBERTas. Absolute positions, if a model has any, are added to the input."""

    prefix = "deberta."
    defaults: dict[str, Any] = {
        "layer_norm_eps": 1e-7,
        "relative_attention": False,  # our encoder does not support this default
        "max_relative_positions": -1,
        "pos_att_type": None,
    }
    followed: dict[str, tuple[Any, ...]] = {
        "hidden_act": EXACT_GELU,
        "relative_attention": (True,),
        "position_biased_input": (True, False),
        "type_vocab_size": (0, 1, 2),
    }
    head_keys = POOLER_KEYS
    task_head = NOTHING
    fields: dict[str, tuple[Any, ...]] = {
        "num_segments": (0, 1, 2),
        "absolute_embedding": (None, True),
        "deberta_emd": (False,),
    }
    parameters = {"embeddings.position.relative": "encoder.rel_embeddings.weight"}

    def complete(self, path: Path, values: dict[str, Any]) -> dict[str, Any]:
        """Refuse attention with other terms than DeBERTa's three too, and embeddings of another width."""
        values = super().complete(path, values)
        terms = values["pos_att_type"]
        if isinstance(terms, str):
            terms = [term.strip() for term in terms.lower().split("|")]
        if terms not in (["c2p", "p2c"], ["p2c", "c2p"]):  # v1 counts the terms of a list, and reads none in capitals
            raise UserError(f"{path}: pos_att_type is {show(values['pos_att_type'])}, expected c2p and p2c, no others")
        width = values.get("embedding_size", values["hidden_size"])
        if width != values["hidden_size"]:
            raise UserError(f"{path}: embedding_size is {show(width)}, which is not supported: need hidden_size")
        return values

    def settings(self, path: Path, values: dict[str, Any]) -> dict[str, Any]:
        return super().settings(path, values) | {"absolute_embedding": values["position_biased_input"]}


class DebertaFamily(Disentangled):
    """DeBERTa v1 (He et al., arXiv:2006.03654).

    Query, key and value are fused head by head, and keys have no bias. Folders name the head's weights like BERT's or
    like the original release (`lm_predictions`).
    """

    model_type, class_name = "deberta", "Deberta"
    defaults = Disentangled.defaults | {"vocab_size": 50265}
    followed = Disentangled.followed | {"talking_head": (False,)}
    fields = {"position_encoding": ("deberta",), "key_bias": (False,), **Disentangled.fields}
    modules = BERT_MODULES | {
        "layer_position.key": "attention.self.pos_proj",
        "layer_position.query": "attention.self.pos_q_proj",
    }
    head_modules = {"masked-lm": BERT_HEAD}
    more_modules = {
        "lm_predictions.lm_head.dense": "head.dense",
        "lm_predictions.lm_head.LayerNorm": "head.norm",
        "lm_predictions.lm_head": "head.decoder",
        "cls.predictions.decoder": "head.decoder",
    }

    def complete(self, path: Path, values: dict[str, Any]) -> dict[str, Any]:
        for key, what in SECOND_LAYOUT.items():
            value = values.get(key)
            if not (value in (None, False, "none", "") or (isinstance(value, int) and value < 1)):
                raise UserError(
                    f"{path}: {key} is {show(value)}, {what}, which belongs to the v2/v3 layout: such a folder has "
                    "model_type 'deberta-v2'"
                )
        return super().complete(path, values)

    def settings(self, path: Path, values: dict[str, Any]) -> dict[str, Any]:
        settings = super().settings(path, values)
        furthest = setting(path, values, "max_relative_positions", whole_number(-LARGEST_SIZE))
        return settings | {"relative_distance": furthest if furthest > 0 else settings["seq_length"]}

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


BERTS_HEAD, RELEASED_HEAD, DETECTOR = "cls.", "lm_predictions.", "mask_predictions."
"""Prefixes of the names of the heads that a folder may have."""


class DebertaV2Family(Disentangled):
    """DeBERTa v2 and v3 (He et al., arXiv:2111.09543).

    The buckets of relative positions depend on the longest sequence; a folder in which they depend on another number is
    refused. Not supported: the convolution of the two largest v2 models, separate projections of the table, and a table
    without LayerNorm.

    A masked-LM head has BERT's names or the released `lm_predictions`; exports use the latter, for which transformers
    needs `legacy` to be false. Released folders have `mask_predictions`, the head of replaced-token detection, but
    transformers has no class for it: a model trained so is exported as a plain encoder, together with the head's
    weights. Training of a folder with only that head resumes under `rtd`: its word embedding is E_G, E_Δ is 0, and the
    generator is new.
    """

    model_type, class_name = "deberta-v2", "DebertaV2"
    sizes = SIZES | {"position_buckets": "relative_distance"}
    defaults = Disentangled.defaults | {
        "vocab_size": 128100,
        "hidden_size": 1536,
        "num_hidden_layers": 24,
        "num_attention_heads": 24,
        "intermediate_size": 6144,
        "share_att_key": False,  # our encoder does not support this default and the next one
        "norm_rel_ebd": "none",
        "position_buckets": -1,
        "legacy": True,
    }
    followed = Disentangled.followed | {
        "share_att_key": (True,),
        "norm_rel_ebd": ("layer_norm",),
        "conv_kernel_size": (0,),
    }
    fields = {"position_encoding": ("deberta-v2",), **Disentangled.fields}
    modules = BERT_MODULES | {
        "attention.query": "attention.self.query_proj",
        "attention.key": "attention.self.key_proj",
        "attention.value": "attention.self.value_proj",
        "embeddings.position.norm": "encoder.LayerNorm",
    }
    head_modules = {
        "masked-lm": {
            "head.dense": "lm_predictions.lm_head.dense",
            "head.norm": "lm_predictions.lm_head.LayerNorm",
            "head.decoder": "lm_predictions.lm_head",
        },
        "contextual-replaced-token": {
            "head.norm": "mask_predictions.LayerNorm",
            "head.dense": "mask_predictions.dense",
            "head.output": "mask_predictions.classifier",
        },
    }
    bare_heads = ("contextual-replaced-token",)
    more_modules = {theirs: ours for ours, theirs in BERT_HEAD.items()} | {"cls.predictions.decoder": "head.decoder"}

    def complete(self, path: Path, values: dict[str, Any]) -> dict[str, Any]:
        values = super().complete(path, values)
        setting(path, values, "position_buckets", whole_number(2))
        longest = setting(path, values, "max_position_embeddings", whole_number())
        furthest = setting(path, values, "max_relative_positions", whole_number(-LARGEST_SIZE))
        if furthest > 0 and furthest != longest:
            raise UserError(
                f"{path}: max_relative_positions is {furthest} and max_position_embeddings {longest}: here the buckets "
                "depend on the longest sequence; give a folder where the two are equal, or the first is -1"
            )
        refuse_other_head_size(path, values, "attention_head_size")
        return values

    def objective(self, path: Path, values: dict[str, Any], names: Iterable[str]) -> ObjectiveConfig:
        return ObjectiveConfig("rtd" if _head(values, names) == DETECTOR else "mlm", **self.training)

    def from_folder(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> dict[str, Tensor]:
        """Return the tensors with unknown names for the heads that are not read."""
        others = tuple({BERTS_HEAD, RELEASED_HEAD, DETECTOR} - {_head(values, tensors)})
        return {f"unread.{name}" if name.startswith(others) else name: tensor for name, tensor in tensors.items()}

    def folder_settings(self, config: ModelConfig, head: str, tokenizer: Tokenizer) -> dict[str, Any]:
        return super().folder_settings(config, head, tokenizer) | {
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "max_relative_positions": -1,
            "position_biased_input": config.adds_absolute_embedding,
            "conv_kernel_size": 0,
            "attention_head_size": config.head_dim,
            "embedding_size": config.hidden_size,
            "legacy": False,
        }


def _head(values: dict[str, Any], names: Iterable[str]) -> str | None:
    """Return the prefix of the head to read: the masked-LM head that `legacy` prefers, else another one."""
    first = (BERTS_HEAD, RELEASED_HEAD) if values["legacy"] else (RELEASED_HEAD, BERTS_HEAD)
    names = tuple(names)
    return next((head for head in (*first, DETECTOR) if any(name.startswith(head) for name in names)), None)
