"""config.json of a Hugging Face folder, read as data: the code that it names never runs, and sizes are checked."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_ddrp.checkpoint.other_folders import look_inside
from megatron_ddrp.config import ModelConfig
from megatron_ddrp.conversion.exported_folder import check_sums
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import read_object

OWN_MODEL_TYPE = "megatron_ddrp"
"""`model_type` of folders for our own classes. The model code in them is for users of transformers."""
LARGEST_SIZE = 2**22
"""Largest width, vocabulary or length that is accepted."""

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "ffn_hidden_size",
    "hidden_dropout_prob": "hidden_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "max_position_embeddings": "seq_length",
    "initializer_range": "init_method_std",
    "layer_norm_eps": "layernorm_epsilon",
}
"""Key of config.json in every folder → field of `ModelConfig`."""
OWN_SETTINGS = (
    "layernorm_position",
    "position_encoding",
    "relative_distance",
    "relative_table",
    "direction_init",
    "rope_theta",
    "local_rope_theta",
    "absolute_embedding",
    "deberta_emd",
    "ffn",
    "norm",
    "bias",
    "key_bias",
    "first_norm",
    "local_attention",
    "global_every",
    "embedding_size",
    "num_segments",
)
"""Fields of `ModelConfig` that our own exports also have in config.json, under their own names."""


def read_config_file(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json.

    Raise `UserError` if it cannot be read, if the model needs foreign code or weights in a file of another name, or if
    an export of ours has changed since it was written.
    """
    check_sums(folder)
    path = folder / "config.json"
    if not path.is_file() and (advice := look_inside(folder)):
        raise UserError(f"{path}: no such file; {advice}")
    values = read_object(path)
    if file := values.get("transformers_weights"):
        raise UserError(f"{path}: transformers_weights is {show(file)}; rename that file to model.safetensors instead")
    if values.get("model_type") != OWN_MODEL_TYPE:
        refuse_code(path, values)
    return values


def model_type(path: Path, values: Mapping[str, Any]) -> str:
    """Return `model_type` of a config.json. Raise `UserError` if it is missing, or not the name of a family."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or not kind:
        found = f"is {show(kind)}" if "model_type" in values else "is missing"
        raise UserError(f"{path}: model_type {found}, expected the name of the model's family, such as bert")
    return kind


def refuse_code(path: Path, values: dict[str, Any]) -> None:
    """Raise `UserError` if a configuration file names Python code, in the folder or elsewhere."""
    kernel = values.get("attn_implementation") or values.get("_attn_implementation")
    if values.get("auto_map") or (isinstance(kernel, str) and "/" in kernel):
        key = "auto_map" if values.get("auto_map") else "attn_implementation"
        raise UserError(
            f"{path}: {key} names code outside transformers, and code of a folder is never run here; give a folder "
            "with a model that transformers itself contains"
        )


def read_settings(path: Path, values: dict[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Return settings of `ModelConfig`, read from the given keys (→ fields) of config.json.

    Raise `UserError` for a value of the wrong type.
    """
    known = {field.name: field for field in fields(ModelConfig)}
    settings: dict[str, Any] = {}
    for key, name in keys.items():
        value, kind = values.get(key), str(known[name].type)
        choices = known[name].metadata.get("choices") or ((True, False) if "bool" in kind else ())
        if key in values and value is None and known[name].default is None:
            settings[name] = None
        elif choices:
            settings[name] = one_of(path, values, key, tuple(choices))
        elif "float" not in kind:
            least = 0 if known[name].metadata.get("within", "").startswith("[0") else 1
            settings[name] = whole_number(path, values, key, least)
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
            raise UserError(f"{path}: {key} is {show(value)}, expected a number of at least 0")
        else:
            settings[name] = value
    return settings


def model_config(path: Path, settings: dict[str, Any]) -> ModelConfig:
    """Return the settings as a `ModelConfig`. Its errors name the file `path`, not a flag."""
    try:
        config = ModelConfig(**settings)
        usual = ModelConfig(**settings | {"ffn_hidden_size": None})
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return usual if usual.ffn_size == config.ffn_size else config


def whole_number(path: Path, values: dict[str, Any], key: str, least: int = 1, most: int = LARGEST_SIZE) -> int:
    """Return an integer of config.json. Raise `UserError` for any other value."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UserError(f"{path}: {key} is {show(value)}, expected a whole number from {least} to {most}")
    return value


def refuse_other_head_size(path: Path, values: dict[str, Any], key: str) -> None:
    """Raise `UserError` if `key` gives attention heads another width than the hidden size has for each."""
    width, heads = (whole_number(path, values, name) for name in ("hidden_size", "num_attention_heads"))
    if values.get(key) not in (None, width // heads):
        raise UserError(
            f"{path}: {key} is {show(values[key])}, which is not supported: need hidden_size / num_attention_heads"
        )


def one_of(path: Path, values: dict[str, Any], key: str, allowed: tuple[Any, ...]) -> Any:
    """Return a setting of config.json. Raise `UserError` if it is not in `allowed`."""
    value = values.get(key)
    if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in allowed):
        others = ", or a name from --plugin FILE.py" if key == "position_encoding" else ""
        raise UserError(f"{path}: {key} is {show(value)}, expected {' or '.join(map(repr, allowed))}{others}")
    return value


def show(value: Any) -> str:
    """Return a value as text for an error, at most 80 characters long."""
    text = "too long a number" if isinstance(value, int) and abs(value) >= 10**80 else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
