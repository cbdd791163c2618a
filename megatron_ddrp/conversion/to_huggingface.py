"""Training checkpoint → Hugging Face folder with equal hidden states and logits.

A model that transformers knows (absolute positions, LayerNorm after each block) becomes a plain BERT. Any other one
travels with its own model code, modeling_ddrp.py, under the names that it was trained with. The vocabulary's padding is
cut; the output matrix is the token embedding and is written once.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from megatron_ddrp import checkpoint
from megatron_ddrp.config import Config, ModelConfig
from megatron_ddrp.conversion.tokenizer_files import write_tokenizer
from megatron_ddrp.data.tokenizer import Tokenizer
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.model.embeddings import NUM_SEGMENTS

EXPORTED_ENCODINGS = ("absolute", "ddrp")
MODEL_CODE = "modeling_ddrp.py"
OWN_MODEL_TYPE = "megatron_ddrp"
AUTO_MAP = {
    "AutoConfig": "modeling_ddrp.DdrpConfig",
    "AutoModel": "modeling_ddrp.DdrpModel",
    "AutoModelForMaskedLM": "modeling_ddrp.DdrpForMaskedLM",
    "AutoModelForSequenceClassification": "modeling_ddrp.DdrpForSequenceClassification",
}

BERT_EMBEDDINGS = {"token": "word_embeddings", "segment": "token_type_embeddings", "absolute": "position_embeddings"}
BERT_NAMES = {
    **{f"embeddings.{ours}": f"bert.embeddings.{theirs}" for ours, theirs in BERT_EMBEDDINGS.items()},
    "embeddings.norm": "bert.embeddings.LayerNorm",
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.input": "intermediate.dense",
    "feed_forward.output": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
    "head.dense": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
}
"""Module of ours → BERT's in transformers; those of a layer without "layers.N."."""


@dataclass(frozen=True)
class Export:
    """What an export read and wrote."""

    source: Path
    output: Path
    config: ModelConfig
    weights: dict[str, Tensor]
    tokenizer_line: str

    def summary(self) -> str:
        """A few lines: what was loaded, written, left out and not there."""
        model, plain = self.config, is_plain_bert(self.config)
        groups = Counter(_group(name) for name in self.weights)
        names = ", ".join(f"{group} ({count})" for group, count in groups.items())
        table = f", {model.relative_table} table" if model.position_encoding == "ddrp" else ""
        padding = model.padded_vocab_size - model.vocab_size
        trust = "" if plain else ", trust_remote_code=True"
        lines = {
            "loaded": f"{self.source}: {model.position_encoding} positions{table}, "
            f"{model.layernorm_position}-LayerNorm, {model.num_layers} layers x {model.hidden_size}, "
            f"{model.vocab_size:,} pieces",
            "exported": f"{sum(w.numel() for w in self.weights.values()):,} parameters, fp32; tensors: {names}",
            "left out": f"{padding} rows of vocabulary padding; optimizer state",
            "initialised": "nothing; a classification head is drawn anew when one is loaded",
            "tokenizer": self.tokenizer_line,
            "wrote": f"{self.output}, {'a plain BERT' if plain else f'with its own {MODEL_CODE}'}: "
            f'AutoModelForMaskedLM.from_pretrained("{self.output}"{trust})',
        }
        return "\n".join(f"{label + ':':<13}{line}" for label, line in lines.items())


def export_checkpoint(load: Path, output: Path, overwrite: bool = False) -> Export:
    """Write the newest checkpoint of `load` (or the one it names) as the Hugging Face folder `output`.

    `output` appears whole or not at all. Raises `UserError` where there is no checkpoint, where its encoding cannot be
    exported, or where `output` exists and may not be replaced.
    """
    _refuse_output(output, overwrite)
    source = _find_checkpoint(load)
    model, tokenizer, config = checkpoint.load_model(source.resolve())
    weights = exported_weights(dict(model.named_parameters()), config.model)
    temporary = output.with_name(output.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        checkpoint.save_weights(weights, temporary)
        text = json.dumps(huggingface_config(config.model, tokenizer), indent=2) + "\n"
        (temporary / "config.json").write_text(text, encoding="utf-8")
        if not is_plain_bert(config.model):
            shutil.copyfile(Path(__file__).with_name(MODEL_CODE), temporary / MODEL_CODE)
        tokenizer_line = write_tokenizer(tokenizer, temporary, config.model.seq_length)
        _take_place(temporary, output)
    except SafetensorError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"--output {output}: the weights cannot be written: {error}") from None
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Export(source, output, config.model, weights, tokenizer_line)


def is_plain_bert(config: ModelConfig) -> bool:
    """Whether transformers' own BERT computes the same."""
    return config.position_encoding == "absolute" and config.layernorm_position == "post"


def exported_weights(parameters: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our named parameters → the folder's, fp32, without the vocabulary's padding rows."""
    rename = bert_name if is_plain_bert(config) else own_name
    padded = {"embeddings.token.weight", "head.decoder.bias"}
    return {
        rename(name): (tensor[: config.vocab_size] if name in padded else tensor).detach().float().clone()
        for name, tensor in parameters.items()
    }


def own_name(name: str) -> str:
    """Name in modeling_ddrp.py, which puts the encoder's modules under `encoder.`."""
    if name == "head.decoder.bias":
        return "head.bias"
    if name.startswith("head.final_norm."):
        return name.replace("head.", "encoder.")
    return name if name.startswith("head.") else f"encoder.{name}"


def bert_name(name: str) -> str:
    """Name in transformers' BertForMaskedLM."""
    if name == "head.decoder.bias":
        return "cls.predictions.bias"
    prefix = ""
    if name.startswith("layers."):
        _, number, name = name.split(".", 2)
        prefix = f"bert.encoder.layer.{number}."
    module, _, kind = name.rpartition(".")
    return f"{prefix}{BERT_NAMES[module]}.{kind}"


def huggingface_config(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of config.json; sizes carry BERT's names in both kinds of folder."""
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_size,
        "hidden_dropout_prob": config.hidden_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "max_position_embeddings": config.seq_length,
        "type_vocab_size": NUM_SEGMENTS,
        "initializer_range": config.init_method_std,
        "layer_norm_eps": config.layernorm_epsilon,
        "pad_token_id": tokenizer.pad_id,
        "torch_dtype": "float32",
    }
    if is_plain_bert(config):
        return {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_act": "gelu", **sizes}
    return {
        "model_type": OWN_MODEL_TYPE,
        "architectures": ["DdrpForMaskedLM"],
        "auto_map": AUTO_MAP,
        **sizes,
        "layernorm_position": config.layernorm_position,
        "position_encoding": config.position_encoding,
        "relative_distance": config.relative_distance,
        "relative_table": config.relative_table,
    }


def _find_checkpoint(load: Path) -> Path:
    """The checkpoint's own folder, once its configuration says that it can be exported."""
    path = load if (load / checkpoint.STATE).is_file() else checkpoint.newest(load)
    if path is None:
        raise UserError(f"--load {load}: no checkpoint in it; give a folder that pretrain_bert.py --save wrote")
    try:
        config = Config.from_dict(checkpoint.read_state(path)["config"])
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path / checkpoint.STATE} holds no configuration ({error!r}): give another checkpoint"
        ) from None
    if config.model.position_encoding not in EXPORTED_ENCODINGS:
        raise UserError(
            f"{path} has {config.model.position_encoding!r} positions, which cannot be exported: "
            f"expected {' or '.join(EXPORTED_ENCODINGS)}"
        )
    return path


def _refuse_output(output: Path, overwrite: bool) -> None:
    """Stop before work is done where `output` must stay as it is; an empty folder may be used."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not overwrite:
        raise UserError(f"--output {output} exists: choose another name, or give --overwrite", WRONG_ARGUMENTS)
    try:
        replaceable = "model_type" in json.loads((output / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        replaceable = False
    if not replaceable:
        raise UserError(
            f"--output {output} is no Hugging Face folder, and --overwrite replaces nothing else: choose another name",
            WRONG_ARGUMENTS,
        )


def _take_place(temporary: Path, output: Path) -> None:
    """Rename the complete folder to its name; what stood there goes last."""
    replaced = output.with_name(output.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if output.exists():
        os.replace(output, replaced)
    os.replace(temporary, output)
    shutil.rmtree(replaced, ignore_errors=True)


def _group(name: str) -> str:
    """Part of the model that a weight of the folder belongs to, for the summary."""
    if name.startswith(("head.", "cls.")):
        return "masked-LM head"
    if "embeddings." in name:
        return "embeddings"
    return "final LayerNorm" if "final_norm" in name else "layers"
