"""config.json of a Hugging Face BERT or DeBERTa (v1 layout) → our settings; what our model has not is refused by name.

Absent keys have the values that transformers gives them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.conversion.foreign_config import (
    LARGEST_SIZE,
    OWN_MODEL_TYPE,
    SIZES,
    model_config,
    read_config_file,
    read_settings,
    shown,
    whole_number,
)
from megatron_ddrp.errors import UserError

EXACT_GELU = ("gelu", "gelu_python")
"""Names of the activation that our feed-forward block has; "gelu_new" is an approximation of it, so another one."""

FOLLOWED: dict[str, dict[str, tuple[Any, ...]]] = {
    "bert": {
        "hidden_act": EXACT_GELU,
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "type_vocab_size": (2, 1, 0),
    },
    "deberta": {
        "hidden_act": EXACT_GELU,
        "relative_attention": (True,),
        "position_biased_input": (True, False),
        "talking_head": (False,),
        "type_vocab_size": (0, 1, 2),
    },
}
"""Settings that change what a model computes → the values that our encoder can follow, transformers' default first."""

SHARED_DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "bert": {"vocab_size": 30522, "layer_norm_eps": 1e-12},
    "deberta": {
        "vocab_size": 50265,
        "layer_norm_eps": 1e-7,
        "relative_attention": False,  # which our encoder cannot follow
        "max_relative_positions": -1,
        "pos_att_type": None,
    },
}

SECOND_LAYOUT = {
    "position_buckets": "relative positions in logarithmic buckets",
    "norm_rel_ebd": "a LayerNorm over the relative table",
    "share_att_key": "position projections shared with the content's",
    "conv_kernel_size": "a convolution beside the first layer",
}
"""Settings of DeBERTa v2 and v3 → what they switch on."""


def read_layout(folder: Path) -> tuple[ModelConfig, int]:
    """Return our settings for a folder's model and its number of segments.

    Raises `UserError` where the model cannot be imported, or for a size that no model has.
    """
    path, values = folder / "config.json", read_config_file(folder)
    kind = values.get("model_type")
    if kind == "deberta-v2" or (kind == "deberta" and _second_layout(values)):
        missing = ", ".join(_second_layout(values)) or "other projections of the relative table"
        raise UserError(
            f"{path}: a DeBERTa of the v2/v3 layout; missing here: {missing}. Give one of the v1 layout, or a BERT"
        )
    if kind == OWN_MODEL_TYPE:
        raise UserError(f"{path}: exported from a checkpoint of ours: go on from that one, pretrain_bert.py --load")
    if not isinstance(kind, str) or kind not in DEFAULTS:
        raise UserError(f"{path}: model_type is {shown(kind)}; expected {' or '.join(DEFAULTS)}")
    usual = {key: allowed[0] for key, allowed in FOLLOWED[kind].items()}
    values = {**usual, **SHARED_DEFAULTS, **DEFAULTS[kind], **values}
    _refuse_unknown_parts(path, values, kind)
    settings = {"position_encoding": "absolute", **read_settings(path, values, SIZES)}
    if kind == "deberta":
        furthest = whole_number(path, values, "max_relative_positions", least=-LARGEST_SIZE)
        settings |= {
            "position_encoding": "deberta",
            "relative_distance": furthest if furthest > 0 else settings["seq_length"],
            "absolute_embedding": values["position_biased_input"],
            "deberta_emd": False,
        }
    return model_config(path, settings), values["type_vocab_size"]


def _second_layout(values: dict[str, Any]) -> list[str]:
    """Return the parts that a DeBERTa has and v1 has not."""
    on = {
        key: value not in (None, False, "none", "") and not (isinstance(value, int) and value < 1)
        for key, value in values.items()
        if key in SECOND_LAYOUT
    }
    return [f"{what} ({key})" for key, what in SECOND_LAYOUT.items() if on.get(key)]


def _refuse_unknown_parts(path: Path, values: dict[str, Any], kind: str) -> None:
    """Stop at the first setting that our encoder cannot follow."""
    followed = FOLLOWED[kind]
    if kind == "deberta":
        followed = {**followed, "embedding_size": (values["hidden_size"],)}
        terms = values["pos_att_type"] or []
        terms = terms.split("|") if isinstance(terms, str) else terms
        if not isinstance(terms, list) or {str(term).strip().lower() for term in terms} != {"c2p", "p2c"}:
            raise UserError(f"{path}: pos_att_type is {shown(values['pos_att_type'])}, expected c2p and p2c, no others")
    for key, allowed in followed.items():
        if values.get(key, allowed[0]) not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise UserError(f"{path}: {key} is {shown(values[key])}, which is not built here: need {expected}")
