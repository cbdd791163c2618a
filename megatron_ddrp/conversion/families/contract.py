"""The contract of a family: how a folder of a transformers model stores its settings and weights, in both directions.

A new family is one file here and one line in `__init__.py`. Most of it is five tables:

- `defaults` and `followed`: the meaning of an absent key of config.json, and the values that our encoder supports;
- `head_keys`: the keys that act only in heads that fine-tuning adds, which exports have again;
- `fields`: the values of `ModelConfig` with which our encoder computes the same, so that a trained model can be
  exported;
- `modules` and `head_modules`: names of weights.

Methods do the rest: `settings` and `folder_settings` for config.json, `from_folder` and `to_folder` for tensors that
folders store differently (fused, split, with more rows). The tests and `benchmarks/parity.py` find every family in the
registry and compare it with transformers in both directions.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from megatron_ddrp.config import STARTS, ModelConfig, ObjectiveConfig, flag
from megatron_ddrp.conversion.foreign_config import SIZES, model_config, read_settings, show
from megatron_ddrp.data.tokenizers.tokenizer import SPECIAL_PIECES, Tokenizer
from megatron_ddrp.errors import UserError


class Head(NamedTuple):
    """Head of an exported model."""

    name: str
    """Suffix of the names of its classes, BertFor… or our own DdrpFor…"""
    auto: str
    """Suffix of the class of transformers that loads it, AutoModelFor…"""


HEADS = {
    "masked-lm": Head("MaskedLM", "MaskedLM"),
    "replaced-token": Head("PreTraining", "PreTraining"),
    "contextual-replaced-token": Head("ContextualPreTraining", "PreTraining"),
}
"""`exported` of an objective → head of its models."""

NOT_COMPARED = {
    *("attention_backend", "compile", *STARTS),
    *("global_every", "first_norm", "relative_distance", "rope_theta", "local_rope_theta"),
}
"""Fields of `ModelConfig` that every family accepts, in addition to those in its `sizes`: settings of the computation
and of the start, and fields that act only together with a compared field (`global_every` with `local_attention`). Of a
new field, a family accepts only the default."""

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
"""Values that transformers uses for an absent key in most families."""

SHARED_FOLLOWED: dict[str, tuple[Any, ...]] = {
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "tie_word_embeddings": (True,),
    "pruned_heads": ({}, None),
    "per_layer_config": (None, {}),
    "quantization_config": (None,),  # its weights are codes, of the same shapes
}
"""Keys that change the computation of every family → values that we support, transformers' default first."""

NUMBER = (float,)
DROPOUT = (float, None)
CLASSIFIER_DROPOUT: dict[str, tuple[Any, ...]] = {"classifier_dropout": DROPOUT}
KINDS = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}
"""Type of a value in config.json → its name in messages."""

EXACT_GELU = ("gelu", "gelu_python")
"""Names of the activation in our feed-forward block. "gelu_new" is an approximation of it, so it is not included."""

Table = Mapping[str, Any]
NOTHING: Table = MappingProxyType({})


class Family:
    """A kind of model that transformers knows by its `model_type`."""

    model_type: str
    class_name: str
    """Prefix of its class names in transformers, and its name in messages."""

    sizes: Mapping[str, str] = MappingProxyType(SIZES)
    """Key of config.json → field of `ModelConfig`; the family supports every value of these fields."""
    defaults: Table = NOTHING
    """Values that transformers uses for an absent key, in addition to `SHARED_DEFAULTS`."""
    followed: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
    """Key of config.json that changes the computation → values that we support, transformers' default first."""
    head_keys: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
    """Key of config.json that acts only in the heads that fine-tuning adds, or when a weight is drawn → values or types
    that it may have."""
    fields: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
    """Field of `ModelConfig` → values with which a model belongs to this family, the usual one first. A field that is
    neither here nor in `sizes` nor in `NOT_COMPARED` must have its default."""
    training: Table = NOTHING
    """Settings of `ObjectiveConfig` under which the family's models were trained."""
    has_code = False
    """True if `write_code` writes code, which transformers runs only with `trust_remote_code=True`."""

    prefix: str
    """Prefix of the names of the encoder's weights, such as "bert."; a folder of a bare encoder has none."""
    layers = "encoder.layer"
    """Name of the list of layers, after `prefix`."""
    modules: Mapping[str, str]
    """Our module → their module, after `prefix`; modules of a layer are named without `layers` and number."""
    head_modules: Mapping[str, Mapping[str, str]]
    """Key of `HEADS`, for each head that its folders may have → our module → their module, without `prefix`."""
    task_head: Table | None = None
    """Names in its folders of a pooled `TaskHead`'s layers that differ from ours; None if its classes in transformers
    compute another head. All families use our names for heads on pieces."""
    bare_heads: tuple[str, ...] = ()
    """Keys of `head_modules` for which transformers has no class; it loads such a folder as a bare encoder."""
    parameters: Mapping[str, str] = MappingProxyType({})
    """Our whole name → their name after `prefix`, for weights that are a module's on one side and bare on the other."""
    more_modules: Mapping[str, str] = MappingProxyType({})
    """Their further modules in some folders → ours."""

    # ---- from a folder

    def complete(self, path: Path, values: dict[str, Any]) -> dict[str, Any]:
        """Return config.json with the keys that it lacks. Raise `UserError` for a value that we do not support."""
        followed = {**SHARED_FOLLOWED, **self.followed}
        usual = {key: allowed[0] for key, allowed in followed.items()}
        values = {**usual, **SHARED_DEFAULTS, **self.defaults, **values}
        _refuse_others(path, values, followed)
        return values

    def head_settings(self, path: Path, values: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of heads that fine-tuning adds, for an export to have again.

        Raise `UserError` for a value that transformers does not know.
        """
        found = {key: values[key] for key in self.head_keys if key in values}
        _refuse_others(path, found, self.head_keys)
        return {
            key: float(value) if float in self.head_keys[key] else value
            for key, value in found.items()
            if value is not None  # as an absent key
        }

    def padding_id(self, values: dict[str, Any]) -> int | None:
        """Return the id that gets no position of its own in transformers; None in a family without such an id."""
        return None

    def check_tokenizer(self, path: Path, values: dict[str, Any], tokenizer: Tokenizer) -> None:
        """Raise `UserError` if a piece of a text may have the id that gets no position of its own."""
        padding, piece = self.padding_id(values), tokenizer.pieces[tokenizer.pad_id]
        roles = [role for role in SPECIAL_PIECES if getattr(tokenizer, f"{role}_id") == padding]
        if padding is not None and roles != ["pad"]:
            raise UserError(
                f"{path}: pad_token_id is {padding}, but its tokenizer pads with {tokenizer.pad_id} ({show(piece)}): "
                "transformers gives every token with pad_token_id the position of padding, so it must be the padding "
                "and no other piece; put the tokenizer of the model's training into the folder, or correct pad_token_id"
            )

    def model_config(self, path: Path, values: dict[str, Any]) -> ModelConfig:
        """Return the configuration of a completed config.json. Raise `UserError` for an impossible size."""
        return model_config(path, self.settings(path, values))

    def settings(self, path: Path, values: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of `ModelConfig`: those of `sizes`, the segments, and the usual values of `fields`."""
        usual = {name: allowed[0] for name, allowed in self.fields.items()}
        segments = {"num_segments": values["type_vocab_size"]} if "type_vocab_size" in values else {}
        return {**usual, **segments, **read_settings(path, values, self.sizes)}

    def objective(self, path: Path, values: dict[str, Any], names: Iterable[str]) -> ObjectiveConfig:
        """Return the objective with which training of a folder's model resumes; `names` are its weights' names."""
        return ObjectiveConfig("mlm", **self.training)

    def our_name(self, name: str) -> str | None:
        """Return our name of a weight, with or without `prefix`, or None if our model has no such weight.

        Folders converted from TensorFlow call the weights of LayerNorms gamma and beta.
        """
        name = name.removeprefix(self.prefix)
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))
        whole = {theirs: ours for ours, theirs in self.parameters.items()}.get(name)
        if whole is not None:
            return whole
        layer = re.match(rf"{re.escape(self.layers)}\.(\d+)\.", name)
        module, _, kind = name[layer.end() if layer else 0 :].rpartition(".")
        ours = self._ours.get(module)
        return None if ours is None else f"{f'layers.{layer[1]}.' if layer else ''}{ours}.{kind}"

    def from_folder(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> dict[str, Tensor]:
        """Return a folder's tensors, under its names, in our layout. Raise `UserError` if that is impossible."""
        return tensors

    # ---- to a folder

    def refusal(self, config: ModelConfig, head: str) -> str | None:
        """Return the reason why a model does not belong to this family, or None if it does."""
        if head not in self.head_modules:
            return f"its head is {head}, and {self.class_name} has {' or '.join(self.head_modules)}"
        default = ModelConfig(position_encoding=config.position_encoding)
        free = {*NOT_COMPARED, *self.sizes.values()}
        for name in dict.fromkeys((*self.fields, *(f.name for f in fields(ModelConfig) if f.name not in free))):
            value, allowed = getattr(config, name), self.fields.get(name, (getattr(default, name),))
            if value not in allowed:
                expected = " or ".join(map(str, allowed))
                return f"{flag(name)} is {value}, and {self.class_name} has {expected}"
        return None

    def fits(self, config: ModelConfig, tokenizer: Tokenizer) -> bool:
        """Return whether a model that belongs to this family is exported as such if the user names no family."""
        return True

    def folder_settings(self, config: ModelConfig, head: str, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the content of config.json, with every key that affects the computation."""
        return {
            "model_type": self.model_type,
            "architectures": [self.classes(head)[0]],
            **{key: getattr(config, name) for key, name in self.sizes.items()},
            "intermediate_size": config.ffn_size,
            "hidden_act": "gelu",
            "type_vocab_size": config.num_segments,
            "tie_word_embeddings": True,
            "pad_token_id": tokenizer.pad_id,
            "torch_dtype": "float32",
        }

    def classes(self, head: str) -> tuple[str, str]:
        """Return the class that a folder with `head` names, and the class of transformers with which users load it."""
        if head in self.bare_heads:
            return f"{self.class_name}Model", "AutoModel"
        return f"{self.class_name}For{HEADS[head].name}", f"AutoModelFor{HEADS[head].auto}"

    def their_name(self, name: str, head: str) -> str:
        """Return the folder's name of our weight `name`, in a model with `head`."""
        if name in self.parameters:
            return self.prefix + self.parameters[name]
        layer, inside = "", name
        if name.startswith("layers."):
            _, number, inside = name.split(".", 2)
            layer = f"{self.layers}.{number}."
        module, _, kind = inside.rpartition(".")
        if module in self.head_modules[head]:
            return f"{self.head_modules[head][module]}.{kind}"
        return f"{self.prefix}{layer}{self.modules[module]}.{kind}"

    def to_folder(self, tensors: dict[str, Tensor], config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Tensor]:
        """Return tensors, under the folder's names, in the folder's layout."""
        return tensors

    def write_code(self, folder: Path, config: ModelConfig) -> None:
        """Write the code that such a folder needs in addition to transformers; by default none."""

    @cached_property
    def _ours(self) -> dict[str, str]:
        tables = (self.modules, *self.head_modules.values())
        return {theirs: ours for table in tables for ours, theirs in table.items()} | dict(self.more_modules)


def _refuse_others(path: Path, values: Table, followed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `UserError` for a value that is neither one of its key's choices nor of one of the types among them."""
    for key, value in values.items():
        choices = followed.get(key)
        if choices is None or any(_is(value, choice) for choice in choices):
            continue
        expected = " or ".join(KINDS[choice] if isinstance(choice, type) else repr(choice) for choice in choices)
        raise UserError(f"{path}: {key} is {show(value)}, which is not supported: need {expected}")


def _is(value: Any, choice: Any) -> bool:
    if isinstance(choice, type):
        is_number = choice is float and type(value) in (int, float)
        return abs(value) <= sys.float_info.max if is_number else type(value) is choice
    return type(value) is type(choice) and value == choice
