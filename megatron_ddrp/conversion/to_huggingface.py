"""Training checkpoint → Hugging Face folder with equal hidden states and logits.

A model that transformers knows (absolute positions, LayerNorm after each block) becomes a plain BERT, or a plain
ELECTRA where it was trained as a discriminator. Any other one travels with its own model code (model_code.py), under
the names that it was trained with. The vocabulary's padding is cut; a generator and the notes of rare words stay
behind; the output matrix is the token embedding and is written once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron_ddrp import checkpoint
from megatron_ddrp.config import ENCODINGS, ModelConfig, objective_class
from megatron_ddrp.conversion.export_check import check_export
from megatron_ddrp.conversion.export_sums import write_sums
from megatron_ddrp.conversion.foreign_config import OWN_MODEL_TYPE, OWN_SETTINGS, SIZES
from megatron_ddrp.conversion.model_code import write_model_code
from megatron_ddrp.conversion.output_folder import refuse_output, whole_folder
from megatron_ddrp.conversion.tokenizer_files import write_tokenizer
from megatron_ddrp.conversion.weight_names import bert_name, electra_name, own_name
from megatron_ddrp.errors import UserError
from megatron_ddrp.json_files import read_object
from megatron_ddrp.model.embeddings import adds_absolute_embedding


class Head(NamedTuple):
    """A head that a model is exported with."""

    name: str
    """End of the class names in transformers (BertFor…, AutoModelFor…)."""
    family: str | None
    """The model of transformers that has this head; None: none has."""
    plain_name: Callable[[str], str]
    """Name of a weight of ours → name in that model."""
    own: str
    """The class in our own model code."""


HEADS = {
    "masked-lm": Head("MaskedLM", "Bert", bert_name, "DdrpForMaskedLM"),
    "replaced-token": Head("PreTraining", "Electra", electra_name, "DdrpForPreTraining"),
    "contextual-replaced-token": Head("PreTraining", None, own_name, "DdrpForContextualPreTraining"),
}
"""`exported` of an objective → the head of its models."""


@dataclass(frozen=True)
class Export:
    """What an export read and wrote."""

    source: Path
    output: Path
    config: ModelConfig
    """With `deberta_emd` resolved."""
    weights: dict[str, Tensor]
    head: Head
    left_out: tuple[str, ...]
    """Beginnings of names of weights that stayed behind."""
    tokenizer_line: str
    check_line: str

    def summary(self) -> str:
        """Return a few lines: what was loaded, written, left out and not there."""
        model, head = self.config, self.head
        groups = Counter(_group(name) for name in self.weights)
        names = ", ".join(f"{group} ({count})" for group, count in groups.items())
        table = "" if model.position_encoding == "absolute" else f", {model.relative_table} table"
        decoder = "; the mask decoder is in the masked-LM model alone" if model.deberta_emd else ""
        padding = model.padded_vocab_size - model.vocab_size
        trust, kind = ", trust_remote_code=True", "with its own modeling_ddrp.py"
        if is_plain(model, head):
            trust, kind = "", f"a plain {str(head.family).upper()}"
        lines = {
            "loaded": f"{self.source}: {model.position_encoding} positions{table}, "
            f"{model.layernorm_position}-LayerNorm, {model.num_layers} layers x {model.hidden_size}, "
            f"{model.vocab_size:,} pieces",
            "exported": f"{sum(w.numel() for w in self.weights.values()):,} parameters, fp32; tensors: {names}"
            f"{decoder}",
            "left out": f"{padding} rows of vocabulary padding; optimizer state"
            + "".join(f"; the {name.rstrip('.')}" for name in self.left_out),
            "initialised": "nothing; a classification head is drawn anew when one is loaded",
            "tokenizer": self.tokenizer_line,
            "checked": self.check_line,
            "wrote": f'{self.output}, {kind}: AutoModelFor{head.name}.from_pretrained("{self.output}"{trust})',
        }
        return "\n".join(f"{label + ':':<13}{line}" for label, line in lines.items())


def export_checkpoint(load: Path, output: Path, overwrite: bool = False) -> Export:
    """Write the newest checkpoint of `load` (or the one it names) as the Hugging Face folder `output`.

    `output` appears whole or not at all. Raises `UserError` where there is no checkpoint, where its encoding cannot be
    exported, or where `output` exists and may not be replaced.
    """
    refuse_output(output, overwrite, _is_hugging_face, "Hugging Face folder")
    source = checkpoint.choose_checkpoint(load)
    encoding = checkpoint.read_config(source).model.position_encoding
    if encoding not in ENCODINGS:
        raise UserError(
            f"{source} has {encoding!r} positions, which are not known: expected one of {', '.join(ENCODINGS)}, or a "
            "name that --plugin FILE.py brings"
        )
    model, tokenizer, whole = checkpoint.read_model(source)
    objective = objective_class(whole.objective.objective)
    head = HEADS[objective.exported]
    model.merge_embeddings()
    config = replace(whole.model, deberta_emd=model.mask_decoder is not None)
    tensors = dict(model.named_parameters()) | checkpoint.persistent_buffers(model)
    left_out = tuple(start for start in objective.left_out if any(name.startswith(start) for name in tensors))
    padded = ("embeddings.token.weight", "head.decoder.bias")
    rename = head.plain_name if is_plain(config, head) else own_name
    weights = {
        rename(name): tensor.detach()[: config.vocab_size] if name in padded else tensor.detach()
        for name, tensor in tensors.items()
        if not name.startswith(left_out)
    }
    with whole_folder(output) as folder:
        checkpoint.save_weights(weights, folder)
        settings = huggingface_config(config, head) | {"pad_token_id": tokenizer.pad_id}
        (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        if not is_plain(config, head):
            write_model_code(folder, config.position_encoding)
        tokenizer_line = write_tokenizer(tokenizer, folder, config.seq_length)
        check_line = check_export(folder, settings["architectures"][0], model, config)
        write_sums(folder)
    return Export(source, output, config, weights, head, left_out, tokenizer_line, check_line)


def is_plain(config: ModelConfig, head: Head) -> bool:
    """Return whether transformers' own BERT, or ELECTRA, computes the same."""
    usual = ModelConfig(position_encoding="absolute")
    parts = (
        "layernorm_position",
        "ffn",
        "norm",
        "bias",
        "key_bias",
        "embedding_size",
        "num_segments",
        "local_attention",
    )
    same = all(getattr(config, name) == getattr(usual, name) for name in (*parts, "position_encoding"))
    return head.family is not None and same and not config.deberta_emd


def huggingface_config(config: ModelConfig, head: Head) -> dict[str, Any]:
    """Return the content of config.json; sizes carry BERT's names in both kinds of folder."""
    sizes = {key: getattr(config, name) for key, name in SIZES.items()} | {
        "intermediate_size": config.ffn_size,
        "type_vocab_size": config.num_segments,
        "torch_dtype": "float32",
    }
    if head.family is not None and is_plain(config, head):
        sizes |= {"embedding_size": config.hidden_size} if head.family == "Electra" else {}
        classes = {"model_type": head.family.lower(), "architectures": [f"{head.family}For{head.name}"]}
        return {**classes, "hidden_act": "gelu", **sizes}
    return {
        "model_type": OWN_MODEL_TYPE,
        "architectures": [head.own],
        "auto_map": {
            "AutoConfig": "configuration_ddrp.DdrpConfig",
            "AutoModel": "modeling_ddrp.DdrpModel",
            f"AutoModelFor{head.name}": f"modeling_ddrp.{head.own}",
            "AutoModelForSequenceClassification": "modeling_ddrp.DdrpForSequenceClassification",
        },
        **sizes,
        **{name: getattr(config, name) for name in OWN_SETTINGS},
        "absolute_embedding": adds_absolute_embedding(config),
    }


def _is_hugging_face(folder: Path) -> bool:
    try:
        return "model_type" in read_object(folder / "config.json")
    except UserError:
        return False


def _group(name: str) -> str:
    """Return the part of the model that a weight of the folder belongs to, for the summary."""
    if name.startswith(("head.output", "discriminator_predictions.")):
        return "replaced-token head"
    if name.startswith(("head.", "cls.")):
        return "head"
    if "embeddings." in name:
        return "embeddings"
    if name.startswith("mask_decoder."):
        return "mask decoder"
    return "final LayerNorm" if "final_norm" in name else "layers"
