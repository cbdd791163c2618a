"""ModernBERT, NomicBERT and EuroBERT as in transformers, and exports that carry their own model code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ddrp.config import Config, ModelConfig, ObjectiveConfig
from megatron_ddrp.conversion.families.bert import BERT_HEAD
from megatron_ddrp.conversion.families.contract import (
    BARE,
    CLASSIFIER_DROPOUT,
    EXACT_GELU,
    HEADS,
    NOTHING,
    NUMBER,
    OWN_MODEL_TYPE,
    OWN_SETTINGS,
    SIZES,
    Family,
    read_settings,
    refuse_other_head_size,
    setting,
    whole_number,
)
from megatron_ddrp.conversion.families.contract import model_config as checked_config
from megatron_ddrp.conversion.model_code import HEAD_FORMS, write_model_code
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import misfit, show

FULL, LOCAL = "full_attention", "sliding_attention"
"""The two kinds of layers in `layer_types` and `rope_parameters`."""
THETAS = {FULL: "global_rope_theta", LOCAL: "local_rope_theta"}
EVERY = "global_attn_every_n_layers"
BIASES = ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")
FUSED = {
    "attn.Wqkv": ("attn.query", "attn.key", "attn.value"),
    "mlp.Wi": ("mlp.input", "mlp.gate"),
}
"""Matrix of a layer → maps whose rows it holds in turn; no folder contains the names of these maps."""


class ModernBertFamily(Family):
    """ModernBERT (Warner et al., arXiv:2412.13663). Its configuration also allows a bias in every map and norm.

    Rotary positions with one θ for layers that attend to whole documents and one for local layers, GEGLU, pre-norm
    without a norm before the first attention. A folder stores query, key and value as one matrix, and the two first
    maps of the feed-forward block as another. A classifier's folder has a `head` of its own, which is left out.

    transformers 4 describes local layers and θ with three numbers, transformers 5 with a list of layers and a table. A
    folder may have either, and an export has both. If both exist, the list and the table decide.

    Dropout differs: ours acts on the output of both blocks at `mlp_dropout`, theirs on the output of attention at
    `attention_dropout` and inside the feed-forward block.
    """

    model_type, class_name, prefix, layers = "modernbert", "ModernBert", "model.", "layers"
    sizes = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_attention_heads",
        "intermediate_size": "ffn_hidden_size",
        "mlp_dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
        "max_position_embeddings": "seq_length",
        "initializer_range": "init_method_std",
        "norm_eps": "layernorm_epsilon",
        "norm_bias": "bias",
        "local_attention": "local_attention",
        EVERY: "global_every",
        THETAS[FULL]: "rope_theta",
        THETAS[LOCAL]: "local_rope_theta",
    }
    defaults = {
        "vocab_size": 50368,
        "num_hidden_layers": 22,
        "intermediate_size": 1152,
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "classifier_bias": False,
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
        "local_attention": 128,
        EVERY: 3,
        THETAS[FULL]: 160_000.0,
        THETAS[LOCAL]: 10_000.0,
        "layer_types": None,
        "rope_parameters": None,
    }
    followed = {
        "hidden_activation": EXACT_GELU,
        "classifier_activation": EXACT_GELU,
        "decoder_bias": (True,),
        "rope_scaling": (None,),
        "sliding_window": (None,),  # transformers would put it in place of local_attention
    }
    head_keys = {
        "classifier_dropout": NUMBER,
        "classifier_pooling": ("cls", "mean"),
        "initializer_cutoff_factor": NUMBER,
        "sparse_prediction": (bool,),
        "sparse_pred_ignore_index": (int,),
        "deterministic_flash_attn": (bool,),
    }
    fields = {
        "position_encoding": ("rope",),
        "layernorm_position": ("pre",),
        "first_norm": (False,),
        "ffn": ("geglu",),
        "bias": (False, True),
        "key_bias": (True, False),
        "num_segments": (0,),
        "deberta_emd": (None, False),
        "relative_table": ("shared", "per-layer"),  # there is no table
    }
    training = {"masking": "token", "mask_prob": 0.3}
    modules = {
        "embeddings.token": "embeddings.tok_embeddings",
        "embeddings.norm": "embeddings.norm",
        "attention_norm": "attn_norm",
        "attention.query": "attn.query",
        "attention.key": "attn.key",
        "attention.value": "attn.value",
        "attention.output": "attn.Wo",
        "feed_forward_norm": "mlp_norm",
        "feed_forward.input": "mlp.input",
        "feed_forward.gate": "mlp.gate",
        "feed_forward.output": "mlp.Wo",
        "head.final_norm": "final_norm",
    }
    head_modules = {
        "masked-lm": {"head.dense": "head.dense", "head.norm": "head.norm", "head.decoder": "decoder"},
    }

    def complete(self, path: Path, values: dict[str, Any]) -> dict[str, Any]:
        values = super().complete(path, values)
        refuse_other_head_size(path, values, "head_dim")
        _refuse_different(path, values, BIASES, "here all maps and norms have one, or none has")
        _refuse_different(path, values, ("embedding_dropout", "mlp_dropout"), "--hidden-dropout is one number for both")
        values |= _thetas(path, values) | {EVERY: _period(path, values)}
        if values[EVERY] == 1:
            return values | {"local_attention": None, THETAS[LOCAL]: None}
        if values["local_attention"] is None:
            raise UserError(f"{path}: local_attention is None, but some layers are local: expected a number")
        return values | {
            THETAS[LOCAL]: None if values[THETAS[LOCAL]] == values[THETAS[FULL]] else values[THETAS[LOCAL]]
        }

    def from_folder(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> dict[str, Tensor]:
        split = {}
        for name, tensor in tensors.items():
            place, _, kind = name.rpartition(".")
            whole = next((matrix for matrix in FUSED if place.endswith(f".{matrix}")), None)
            if whole is None:
                split[name] = tensor
                continue
            parts = torch.atleast_1d(tensor).tensor_split(len(FUSED[whole]))
            split |= {
                f"{place.removesuffix(whole)}{part}.{kind}": rows
                for part, rows in zip(FUSED[whole], parts, strict=True)
            }
        if any(name.startswith("classifier.") for name in split):  # the head is the classifier's, not the masked LM's
            return {f"classifier.{name}" if name.startswith("head.") else name: rows for name, rows in split.items()}
        return split

    def folder_settings(self, config: ModelConfig, head: str, tokenizer: Tokenizer) -> dict[str, Any]:
        thetas = {FULL: config.rope_theta, LOCAL: config.local_rope_theta or config.rope_theta}
        every = 1 if config.local_attention is None else config.global_every
        layers = range(config.num_layers)
        settings = super().folder_settings(config, head, tokenizer)
        del settings["hidden_act"], settings["type_vocab_size"]
        return {
            **settings,
            "embedding_dropout": config.hidden_dropout,
            **dict.fromkeys(BIASES, config.bias),
            "decoder_bias": True,
            "hidden_activation": "gelu",
            "classifier_activation": "gelu",
            "local_attention": config.local_attention or self.defaults["local_attention"],
            "layer_types": [LOCAL if number % every else FULL for number in layers],
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in thetas.items()},
            EVERY: every,
            **{THETAS[kind]: base for kind, base in thetas.items()},
            "bos_token_id": tokenizer.cls_id,
            "cls_token_id": tokenizer.cls_id,
            "eos_token_id": tokenizer.sep_id,
            "sep_token_id": tokenizer.sep_id,
        }

    def to_folder(self, tensors: dict[str, Tensor], config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Tensor]:
        fused = dict(tensors)
        for number in range(config.num_layers):
            place = f"{self.prefix}{self.layers}.{number}."
            if config.bias and not config.key_bias:
                fused[f"{place}attn.key.bias"] = torch.zeros(config.hidden_size)
            for whole, parts in FUSED.items():
                for kind in ("weight", "bias") if config.bias else ("weight",):
                    fused[f"{place}{whole}.{kind}"] = torch.cat([fused.pop(f"{place}{part}.{kind}") for part in parts])
        return fused


def _refuse_different(path: Path, values: dict[str, Any], keys: tuple[str, ...], reason: str) -> None:
    """Raise `UserError` if settings that are a single one here differ."""
    for key in keys:
        if values[key] != values[keys[0]]:
            raise UserError(f"{path}: {key} is {show(values[key])} and {keys[0]} is {show(values[keys[0]])}: {reason}")


def _period(path: Path, values: dict[str, Any]) -> int:
    """Return N if the layers 0, N, 2N, … attend to whole documents and the others are local."""
    every, layers = (setting(path, values, key, whole_number()) for key in (EVERY, "num_hidden_layers"))
    types = values["layer_types"]
    if types is None:
        return every
    if misfit(types, list) or len(types) != layers:
        raise UserError(f"{path}: layer_types is {show(types)}, expected a list with one kind for each layer")
    second = next((number for number, kind in enumerate(types) if number and kind == FULL), layers)
    for number in (every, second):
        if types == [LOCAL if layer % number else FULL for layer in range(layers)]:
            return number
    raise UserError(
        f"{path}: layer_types has an unsupported order: need {FULL!r} in the layers 0, N, 2N, … and "
        f"{LOCAL!r} in the others"
    )


def _thetas(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return θ of both kinds of layers, under the keys of transformers 4."""
    table = values["rope_parameters"]
    if table is None:
        return {}
    if misfit(table, Mapping[str, dict | None]):
        raise UserError(f"{path}: rope_parameters is {show(table)}, expected one table for each of {FULL}, {LOCAL}")
    thetas = {}
    for kind, settings in table.items():
        settings = settings or {}
        rope_type = settings.get("rope_type", settings.get("type", "default"))  # transformers reads both names
        if kind not in THETAS or rope_type != "default":
            raise UserError(
                f"{path}: rope_parameters of {show(kind)} are {show(settings)}, which is not supported: need {FULL} "
                f"or {LOCAL} with rope_type 'default'"
            )
        thetas[THETAS[kind]] = settings.get("rope_theta", values[THETAS[kind]])
    return thetas


ROPE: Any = {"rope_type": ("default",), "rope_theta": float}
LAYER = {
    **{f"attention.{part}": f"self_attn.{part[0]}_proj" for part in ("query", "key", "value", "output")},
    **{"feed_forward.input": "mlp.gate_proj", "feed_forward.gate": "mlp.up_proj"},
    "feed_forward.output": "mlp.down_proj",
}
"""Our name → name in both families, for the maps of a layer."""
FOLLOWED = {"hidden_act": ("silu",), "rope_scaling": (None,)}


class RotaryFamily(Family):
    """Base of the families with one rotary base and SwiGLU, whose maps have no biases.

    transformers 5 has the base inside `rope_parameters`, transformers 4 beside it as `rope_theta`; exports have both.
    """

    layers = "layers"
    fields = {
        **{"position_encoding": ("rope",), "ffn": ("swiglu",), "bias": (False,), "deberta_emd": (None, False)},
        "relative_table": ("shared", "per-layer"),  # there is no table
    }

    def complete(self, path: Path, values: dict[str, Any]) -> dict[str, Any]:
        rope = values.get("rope_parameters") or {}
        values = super().complete(path, values)
        usual = {"rope_type": "default", "rope_theta": values["rope_theta"]}
        if reason := misfit(rope, dict) or misfit(usual | rope, ROPE):
            raise UserError(f"{path}: rope_parameters is {show(rope)}, which is not supported: {reason}")
        refuse_other_head_size(path, values, "head_dim")
        return values | ({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {})

    def folder_settings(self, config: ModelConfig, head: str, tokenizer: Tokenizer) -> dict[str, Any]:
        ids = {f"{key}_token_id": getattr(tokenizer, f"{role}_id") for key, role in ROLES.items()}
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        settings = super().folder_settings(config, head, tokenizer)
        return settings | {"hidden_act": "silu", "rope_parameters": rope} | ids


ROLES = {"bos": "cls", "eos": "sep", "mask": "mask"}


class NomicBertFamily(RotaryFamily):
    """NomicBERT (Nussbaum et al., arXiv:2402.01613): BERT with rotary positions and SwiGLU, without biases in its maps.

    The released folders name sizes as GPT-2 does. Their weights, and those that transformers writes, have names of
    their own, with query, key and value in one matrix. The released masked-LM head has no biases, which are zeros here.
    """

    model_type, class_name, prefix = "nomic_bert", "NomicBert", "nomic_bert."
    sizes = SIZES | {"rope_theta": "rope_theta"}
    defaults = {
        **{"vocab_size": 30528, "max_position_embeddings": 2048, "layer_norm_eps": 1e-12},
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        **{"rope_theta": 1000.0, "rope_parameters": None},
    }
    followed = {
        **FOLLOWED,
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm", "use_rms_norm"), (False,)),
        **dict.fromkeys(("causal", "parallel_block", "rotary_emb_interleaved"), (False,)),
        **{"rotary_scaling_factor": (None,), "rotary_emb_fraction": (1.0,), "activation_function": ("swiglu",)},
        "type_vocab_size": (2, 1),
    }
    head_keys = CLASSIFIER_DROPOUT
    fields = RotaryFamily.fields | {"norm_bias": (True,), "num_segments": (2, 1)}
    modules = LAYER | {
        **{"embeddings.token": "embeddings.word_embeddings", "embeddings.segment": "embeddings.token_type_embeddings"},
        **{"embeddings.norm": "embeddings.LayerNorm", "attention_norm": "post_attention_layernorm"},
        "feed_forward_norm": "post_mlp_layernorm",
    }
    transform = "cls.predictions.transform."
    head_modules = {
        "masked-lm": {
            **{"head.dense": f"{transform}dense", "head.norm": f"{transform}layer_norm"},
            "head.decoder": "cls.predictions",
        }
    }
    more_modules = {"cls.predictions.decoder": "head.decoder"}
    released = {
        **{"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
        **{"n_inner": "intermediate_size", "n_positions": "max_position_embeddings"},
        **{"resid_pdrop": "hidden_dropout_prob", "attn_pdrop": "attention_probs_dropout_prob"},
        **{"layer_norm_epsilon": "layer_norm_eps", "rotary_emb_base": "rope_theta"},
    }
    """Key in released folders → key of transformers."""
    stored = {
        **{"bert.": "", "encoder.layers.": "layers.", "emb_ln.": "embeddings.LayerNorm."},
        **{"attn.out_proj.": "self_attn.o_proj.", "fc11.": "up_proj.", "fc12.": "gate_proj.", "fc2.": "down_proj."},
        **{"norm1.": "post_attention_layernorm.", "norm2.": "post_mlp_layernorm."},
    }
    """Part of the name of a stored weight → part of the name in transformers' model."""

    def complete(self, path: Path, values: dict[str, Any]) -> dict[str, Any]:
        renamed = {theirs: values[key] for key, theirs in self.released.items() if key in values}
        return super().complete(path, renamed | values)

    def from_folder(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            name = name.removeprefix(self.prefix)
            for old, new in self.stored.items():
                name = name.replace(old, new)
            fused = "attn.Wqkv." in name
            for part, rows in zip("qkv", tensor.tensor_split(3), strict=True) if fused else (("", tensor),):
                found[name.replace("attn.Wqkv.", f"self_attn.{part}_proj.")] = rows
        if f"{self.transform}dense.weight" in found:
            found.setdefault(f"{self.transform}dense.bias", torch.zeros(values["hidden_size"]))
            bias = found.get("cls.predictions.decoder.bias", torch.zeros(values["vocab_size"]))
            found.setdefault("cls.predictions.bias", bias)
        return found


class EuroBertFamily(RotaryFamily):
    """EuroBERT (Boizard et al., arXiv:2503.05500): Llama's block with attention in both directions.

    Its masked-LM head is an output matrix of its own, which no model here has, so an import draws a new head, and an
    export is a bare encoder with our head's weights beside it. Its larger models share keys between heads and are
    refused.
    """

    model_type, class_name, prefix = "eurobert", "EuroBert", "model."
    sizes = {
        **{key: name for key, name in SIZES.items() if not key.endswith(("_prob", "_eps"))},
        **{"hidden_dropout": "hidden_dropout", "attention_dropout": "attention_dropout"},
        **{"rms_norm_eps": "layernorm_epsilon", "rope_theta": "rope_theta"},
    }
    defaults = {
        **{"vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "rope_theta": 10_000.0, "rope_parameters": None},
    }
    followed = {
        **FOLLOWED,
        **{"attention_bias": (False,), "mlp_bias": (False,)},
        "tie_word_embeddings": (False, True),  # the head is left out
    }
    head_keys = {"classifier_pooling": ("late", "bos", "mean")}
    fields = RotaryFamily.fields | {
        **{"layernorm_position": ("pre",), "norm": ("rmsnorm",), "embedding_norm": (False,), "num_segments": (0,)},
    }
    bare_heads = ("masked-lm",)
    modules = LAYER | {
        **{"embeddings.token": "embed_tokens", "attention_norm": "input_layernorm"},
        **{"feed_forward_norm": "post_attention_layernorm", "head.final_norm": "norm"},
    }
    head_modules = {"masked-lm": BERT_HEAD}

    def complete(self, path: Path, values: dict[str, Any]) -> dict[str, Any]:
        values = super().complete(path, values)
        groups, heads = values.get("num_key_value_heads"), values["num_attention_heads"]
        if groups not in (None, heads):
            raise UserError(
                f"{path}: num_key_value_heads is {show(groups)} and num_attention_heads is {show(heads)}: heads that "
                "share their keys are not supported; choose a model with as many of both, such as EuroBERT-210m"
            )
        return values


ALWAYS = ("layernorm_position", "position_encoding", "relative_distance", "relative_table", "deberta_emd")
"""Settings of `OWN_SETTINGS` in folders of all versions. A folder that lacks any other setting means its default."""
OBJECTIVES = {"masked-lm": "mlm", "replaced-token": "electra", "contextual-replaced-token": "rtd"}
"""Head of a folder → objective that trains it, if the folder names none."""


class OwnFamily(Family):
    """Family of every model of this project, under the names of training; for models that transformers does not have.

    An export has the code that transformers runs. Import never runs that code; it reads settings and weights.
    """

    model_type, class_name, prefix = OWN_MODEL_TYPE, "Ddrp", "encoder."
    head_modules = {head: {} for head in HEADS}
    head_keys = CLASSIFIER_DROPOUT
    task_head = NOTHING
    has_code = True

    def complete(self, path: Path, values: dict[str, Any]) -> dict[str, Any]:
        return values

    def model_config(self, path: Path, values: dict[str, Any]) -> ModelConfig:
        keys = SIZES | {name: name for name in OWN_SETTINGS if name in values or name in ALWAYS}
        if missing := [key for key in keys if key not in values]:
            raise UserError(f"{path}: {missing[0]} is missing; export the checkpoint again")
        return checked_config(path, read_settings(path, values, keys))

    def objective(self, path: Path, values: dict[str, Any], names: Iterable[str]) -> ObjectiveConfig:
        if "objective" not in values:
            return ObjectiveConfig(OBJECTIVES[_head(set(names))])
        try:
            return Config.from_dict({"objective": values["objective"]}).objective
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    def our_name(self, name: str) -> str | None:
        if name == "head.bias":
            return "head.decoder.bias"
        if name.startswith("encoder.final_norm."):
            return name.replace("encoder.", "head.", 1)
        return name.removeprefix(self.prefix)

    def refusal(self, config: ModelConfig, head: str) -> str | None:
        return None

    def folder_settings(self, config: ModelConfig, head: str, tokenizer: Tokenizer) -> dict[str, Any]:
        settings = super().folder_settings(config, head, tokenizer)
        class_name, auto = self.classes(head)
        return {
            "model_type": settings["model_type"],
            "architectures": settings["architectures"],
            "auto_map": {
                "AutoConfig": "configuration_ddrp.DdrpConfig",
                "AutoModel": "modeling_ddrp.DdrpModel",
                **({auto: f"modeling_ddrp.{class_name}"} if head != BARE else {}),
                **{f"AutoModelFor{name}": f"modeling_ddrp.DdrpFor{name}" for name, *_ in HEAD_FORMS},
            },
            **settings,
            **{name: getattr(config, name) for name in OWN_SETTINGS},
            "absolute_embedding": config.adds_absolute_embedding,
        }

    def their_name(self, name: str, head: str) -> str:
        if name == "head.decoder.bias":
            return "head.bias"
        if name.startswith("head.final_norm."):
            return name.replace("head.", "encoder.", 1)
        return name if name.startswith(("head.", "mask_decoder.")) else f"{self.prefix}{name}"

    def write_code(self, folder: Path, config: ModelConfig) -> None:
        write_model_code(folder, config.position_encoding)


def _head(names: set[str]) -> str:
    """Return the key of `HEADS` for the head among a folder's weights."""
    if "head.output.weight" not in names:
        return "masked-lm"
    return "contextual-replaced-token" if "head.norm.weight" in names else "replaced-token"
