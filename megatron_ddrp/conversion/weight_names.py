"""Names of weights: ours, BERT's in transformers (DeBERTa's are mostly the same), and those of our own model files."""

from __future__ import annotations

import re

BERT_MODULES = {
    "embeddings.token": "embeddings.word_embeddings",
    "embeddings.segment": "embeddings.token_type_embeddings",
    "embeddings.absolute": "embeddings.position_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
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
    "head.decoder": "cls.predictions",
}
"""Module of ours → BERT's in transformers, without "bert."; those of a layer without "layers.N."."""

OUR_MODULES = {theirs: ours for ours, theirs in BERT_MODULES.items()} | {
    "attention.self.pos_proj": "layer_position.key",
    "attention.self.pos_q_proj": "layer_position.query",
    "lm_predictions.lm_head.dense": "head.dense",
    "lm_predictions.lm_head.LayerNorm": "head.norm",
    "lm_predictions.lm_head": "head.decoder",
    "cls.predictions.decoder": "head.decoder",
}
"""The inverse, and DeBERTa's own."""

RELATIVE_TABLE = "encoder.rel_embeddings.weight"
"""A table that is a module's there and a bare parameter here."""


def own_name(name: str) -> str:
    """Return the name in modeling_ddrp.py of a weight of ours; the encoder's modules are under `encoder.` there."""
    if name == "head.decoder.bias":
        return "head.bias"
    if name.startswith("head.final_norm."):
        return name.replace("head.", "encoder.")
    return name if name.startswith(("head.", "mask_decoder.")) else f"encoder.{name}"


def bert_name(name: str) -> str:
    """Return the name in transformers' BertForMaskedLM of a weight of ours."""
    prefix = "bert." if not name.startswith("head.") else ""
    if name.startswith("layers."):
        _, number, name = name.split(".", 2)
        prefix = f"bert.encoder.layer.{number}."
    module, _, kind = name.rpartition(".")
    return f"{prefix}{BERT_MODULES[module]}.{kind}"


def electra_name(name: str) -> str:
    """Return the name in transformers' ElectraForPreTraining, whose encoder is BERT's, of a weight of ours."""
    if name.startswith("head."):
        return name.replace("head.", "discriminator_predictions.").replace(".output.", ".dense_prediction.")
    return "electra." + bert_name(name).removeprefix("bert.")


def our_name(name: str) -> str | None:
    """Return our name of a BERT or DeBERTa weight, with or without its model's prefix; None if it has no place here.

    Folders converted from TensorFlow write LayerNorms as gamma and beta.
    """
    name = re.sub(r"^(bert|deberta)\.", "", name)
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))
    if name == RELATIVE_TABLE:
        return "embeddings.position.relative"
    layer = re.match(r"encoder\.layer\.(\d+)\.", name)
    module, _, kind = name[layer.end() if layer else 0 :].rpartition(".")
    ours = OUR_MODULES.get(module)
    return None if ours is None else f"{f'layers.{layer[1]}.' if layer else ''}{ours}.{kind}"
