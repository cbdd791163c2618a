"""Training checkpoint → Hugging Face folder with equal hidden states and logits.

A model that transformers knows (absolute positions, LayerNorm after each block) becomes a plain BERT, or a plain
ELECTRA where it was trained as a discriminator. Any other one travels with its own model code (`MODEL_CODE`), under the
names that it was trained with. The vocabulary's padding is cut; a generator and the notes of rare words stay behind;
the output matrix is the token embedding and is written once.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_ddrp import checkpoint
from megatron_ddrp.config import ENCODINGS, ModelConfig
from megatron_ddrp.conversion.export_sums import write_sums
from megatron_ddrp.conversion.foreign_config import OWN_MODEL_TYPE
from megatron_ddrp.conversion.output_folder import refuse_output, whole_folder
from megatron_ddrp.conversion.tokenizer_files import write_tokenizer
from megatron_ddrp.conversion.weight_names import bert_name, electra_name, own_name
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.json_files import read_object
from megatron_ddrp.model.embeddings import NUM_SEGMENTS, adds_absolute_embedding

MODEL_CODE = ("configuration_ddrp.py", "modeling_positions.py", "modeling_ddrp.py")
AUTO_MAP = {
    "AutoConfig": "configuration_ddrp.DdrpConfig",
    "AutoModel": "modeling_ddrp.DdrpModel",
    "AutoModelForMaskedLM": "modeling_ddrp.DdrpForMaskedLM",
    "AutoModelForPreTraining": "modeling_ddrp.DdrpForPreTraining",
    "AutoModelForSequenceClassification": "modeling_ddrp.DdrpForSequenceClassification",
}
GENERATOR = "generator."


@dataclass(frozen=True)
class Export:
    """What an export read and wrote."""

    source: Path
    output: Path
    config: ModelConfig
    """With `deberta_emd` resolved."""
    weights: dict[str, Tensor]
    tokenizer_line: str
    detects: bool = False
    """Whether it is an ELECTRA discriminator."""

    def summary(self) -> str:
        """A few lines: what was loaded, written, left out and not there."""
        model, plain = self.config, is_plain_bert(self.config)
        groups = Counter(_group(name) for name in self.weights)
        names = ", ".join(f"{group} ({count})" for group, count in groups.items())
        table = "" if model.position_encoding == "absolute" else f", {model.relative_table} table"
        decoder = "; the mask decoder is in the masked-LM model alone" if model.deberta_emd else ""
        padding = model.padded_vocab_size - model.vocab_size
        trust = "" if plain else ", trust_remote_code=True"
        kind = "a plain ELECTRA" if self.detects else "a plain BERT"
        head_class = "AutoModelForPreTraining" if self.detects else "AutoModelForMaskedLM"
        lines = {
            "loaded": f"{self.source}: {model.position_encoding} positions{table}, "
            f"{model.layernorm_position}-LayerNorm, {model.num_layers} layers x {model.hidden_size}, "
            f"{model.vocab_size:,} pieces",
            "exported": f"{sum(w.numel() for w in self.weights.values()):,} parameters, fp32; tensors: {names}"
            f"{decoder}",
            "left out": f"{padding} rows of vocabulary padding; optimizer state" + "; the generator" * self.detects,
            "initialised": "nothing; a classification head is drawn anew when one is loaded",
            "tokenizer": self.tokenizer_line,
            "wrote": f"{self.output}, {kind if plain else f'with its own {MODEL_CODE[-1]}'}: "
            f'{head_class}.from_pretrained("{self.output}"{trust})',
        }
        return "\n".join(f"{label + ':':<13}{line}" for label, line in lines.items())


def export_checkpoint(load: Path, output: Path, overwrite: bool = False) -> Export:
    """Write the newest checkpoint of `load` (or the one it names) as the Hugging Face folder `output`.

    `output` appears whole or not at all. Raises `UserError` where there is no checkpoint, where its encoding cannot be
    exported, or where `output` exists and may not be replaced.
    """
    refuse_output(output, overwrite, _is_hugging_face, "Hugging Face folder")
    source = _find_checkpoint(load)
    model, tokenizer, whole = checkpoint.read_model(source)
    detects = whole.objective.generates
    config = replace(whole.model, deberta_emd=model.mask_decoder is not None)
    weights = exported_weights(dict(model.named_parameters()), config, detects)
    with whole_folder(output) as folder:
        checkpoint.save_weights(weights, folder)
        text = json.dumps(huggingface_config(config, tokenizer, detects), indent=2) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
        if not is_plain_bert(config):
            write_model_code(folder)
        tokenizer_line = write_tokenizer(tokenizer, folder, config.seq_length)
        write_sums(folder)
    return Export(source, output, config, weights, tokenizer_line, detects)


def is_plain_bert(config: ModelConfig) -> bool:
    """Whether transformers' own BERT, or ELECTRA, computes the same."""
    return (config.position_encoding, config.layernorm_position, config.deberta_emd) == ("absolute", "post", False)


def write_model_code(folder: Path) -> None:
    """Copy the model's files, which import one another from their own folder there."""
    for name in MODEL_CODE:
        code = Path(__file__).with_name(name).read_text(encoding="utf-8")
        (folder / name).write_text(code.replace("from megatron_ddrp.conversion.", "from ."), encoding="utf-8")


def exported_weights(parameters: dict[str, Tensor], config: ModelConfig, detects: bool = False) -> dict[str, Tensor]:
    """Our named parameters → the folder's, fp32, without the vocabulary's padding rows and without a generator."""
    rename = (electra_name if detects else bert_name) if is_plain_bert(config) else own_name
    padded = {"embeddings.token.weight", "head.decoder.bias"}
    return {
        rename(name): (tensor[: config.vocab_size] if name in padded else tensor).detach().float().clone()
        for name, tensor in parameters.items()
        if not name.startswith(GENERATOR)
    }


def huggingface_config(config: ModelConfig, tokenizer: Tokenizer, detects: bool = False) -> dict[str, Any]:
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
    if is_plain_bert(config) and detects:
        width = {"embedding_size": config.hidden_size, "hidden_act": "gelu"}
        return {"model_type": "electra", "architectures": ["ElectraForPreTraining"], **width, **sizes}
    if is_plain_bert(config):
        return {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_act": "gelu", **sizes}
    other_head = "AutoModelForMaskedLM" if detects else "AutoModelForPreTraining"
    return {
        "model_type": OWN_MODEL_TYPE,
        "architectures": ["DdrpForPreTraining" if detects else "DdrpForMaskedLM"],
        "auto_map": {name: place for name, place in AUTO_MAP.items() if name != other_head},
        **sizes,
        "layernorm_position": config.layernorm_position,
        "position_encoding": config.position_encoding,
        "relative_distance": config.relative_distance,
        "relative_table": config.relative_table,
        "direction_init": config.direction_init,
        "absolute_embedding": adds_absolute_embedding(config),
        "deberta_emd": config.deberta_emd,
    }


def _find_checkpoint(load: Path) -> Path:
    """Return the checkpoint that is exported. Raises `UserError` where none is whole or its encoding is foreign."""
    path = checkpoint.choose_checkpoint(load)
    config = checkpoint.read_config(path)
    if config.model.position_encoding not in ENCODINGS:
        raise UserError(
            f"{path} has {config.model.position_encoding!r} positions, which cannot be exported: "
            f"expected one of {', '.join(ENCODINGS)}"
        )
    return path


def _is_hugging_face(folder: Path) -> bool:
    try:
        return "model_type" in read_object(folder / "config.json")
    except UserError:
        return False


def _group(name: str) -> str:
    """Part of the model that a weight of the folder belongs to, for the summary."""
    if name.startswith(("head.output", "discriminator_predictions.")):
        return "replaced-token head"
    if name.startswith(("head.", "cls.")):
        return "head"
    if "embeddings." in name:
        return "embeddings"
    if name.startswith("mask_decoder."):
        return "mask decoder"
    return "final LayerNorm" if "final_norm" in name else "layers"
