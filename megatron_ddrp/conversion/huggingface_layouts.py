"""config.json of a Hugging Face BERT or DeBERTa (v1 layout) → our settings; what our model has not is refused by name.

Absent keys have the values that transformers gives them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.conversion.foreign_config import (
    LARGEST_SIZE,
    OWN_MODEL_TYPE,
    finite_number,
    read_config_file,
    shown,
    whole_number,
)
from megatron_ddrp.errors import UserError
from megatron_ddrp.model.embeddings import NUM_SEGMENTS

EXACT_GELU = ("gelu", "gelu_python")
"""Names of the activation that our feed-forward block has; "gelu_new" is an approximation of it, so another one."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "bert": {"vocab_size": 30522, "type_vocab_size": 2, "layer_norm_eps": 1e-12},
    "deberta": {"vocab_size": 50265, "type_vocab_size": 0, "layer_norm_eps": 1e-7, "position_biased_input": True},
}
SHARED_DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "max_relative_positions": -1,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
}

SECOND_LAYOUT = {
    "position_buckets": "relative positions in logarithmic buckets",
    "norm_rel_ebd": "a LayerNorm over the relative table",
    "share_att_key": "position projections shared with the content's",
    "conv_kernel_size": "a convolution beside the first layer",
}
"""Settings of DeBERTa v2 and v3 → what they switch on."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a folder whose model can be imported, absent keys filled in."""
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
    _refuse_unknown_parts(path, values, kind)
    return SHARED_DEFAULTS | DEFAULTS[kind] | values


def model_config(folder: Path, values: dict[str, Any]) -> ModelConfig:
    """Return our settings for what `read_config` gave. Raises `UserError` for a size that no model has."""
    path = folder / "config.json"
    size, number = partial(whole_number, path, values), partial(finite_number, path, values)
    hidden_size, ffn_size = size("hidden_size"), size("intermediate_size")
    longest, furthest = size("max_position_embeddings"), size("max_relative_positions", least=-LARGEST_SIZE)
    is_deberta = values["model_type"] == "deberta"
    settings: dict[str, Any] = {"position_encoding": "absolute"}
    if is_deberta:
        settings = {
            "position_encoding": "deberta",
            "relative_distance": furthest if furthest > 0 else longest,
            "absolute_embedding": values["position_biased_input"],
            "deberta_emd": False,
        }
    settings |= {
        "num_layers": size("num_hidden_layers"),
        "hidden_size": hidden_size,
        "num_attention_heads": size("num_attention_heads"),
        "ffn_hidden_size": None if ffn_size == 4 * hidden_size else ffn_size,
        "seq_length": longest,
        "hidden_dropout": number("hidden_dropout_prob"),
        "attention_dropout": number("attention_probs_dropout_prob"),
        "layernorm_epsilon": number("layer_norm_eps"),
        "init_method_std": number("initializer_range"),
        "vocab_size": size("vocab_size"),
    }
    return checked(path, settings)


def checked(path: Path, settings: dict[str, Any]) -> ModelConfig:
    """Return the settings as a `ModelConfig`. What it refuses is an error of the file `path`, not of a flag."""
    try:
        return ModelConfig(**settings)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


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
    required: dict[str, tuple[Any, tuple[Any, ...]]] = {"hidden_act": ("gelu", EXACT_GELU)}
    if kind == "bert":
        required |= {
            "position_embedding_type": ("absolute", ("absolute",)),
            "is_decoder": (False, (False,)),
            "add_cross_attention": (False, (False,)),
            "type_vocab_size": (NUM_SEGMENTS, tuple(range(NUM_SEGMENTS + 1))),
        }
    else:
        width = values.get("hidden_size", SHARED_DEFAULTS["hidden_size"])
        required |= {
            "relative_attention": (False, (True,)),
            "position_biased_input": (True, (True, False)),
            "talking_head": (False, (False,)),
            "embedding_size": (width, (width,)),
            "type_vocab_size": (0, tuple(range(NUM_SEGMENTS + 1))),
        }
        terms = values.get("pos_att_type") or []
        terms = terms.split("|") if isinstance(terms, str) else terms
        if not isinstance(terms, list) or {str(term).strip().lower() for term in terms} != {"c2p", "p2c"}:
            given = shown(values.get("pos_att_type"))
            raise UserError(f"{path}: pos_att_type is {given}, expected c2p and p2c, no others")
    for key, (default, allowed) in required.items():
        if values.get(key, default) not in allowed:
            expected = " or ".join(map(repr, allowed))
            given = shown(values.get(key, default))
            raise UserError(f"{path}: {key} is {given}, which is not built here: need {expected}")
