"""Encoders out of Hugging Face folders: as data. No code of a folder is run, whatever it asks for.

Folders that tools/convert_checkpoint.py wrote are loaded by our own classes, others by those of transformers itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_ddrp.conversion.families import FAMILIES
from megatron_ddrp.conversion.foreign_config import LARGEST_SIZE, OWN_MODEL_TYPE, whole_number
from megatron_ddrp.conversion.huggingface_tokenizer import tokenizer_settings
from megatron_ddrp.conversion.huggingface_weights import NOT_TENSORS, PICKLED_WEIGHTS, SAFE_WEIGHTS, read_weights
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron_ddrp.errors import UserError

ROBERTA_FAMILY = ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "longformer", "mpnet")
"""Model types with two separators in a pair and position numbers that begin after the padding's."""
MOST_LAYERS = 1000
SIZES = ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size", "max_position_embeddings")
"""Attributes that the configurations of most encoders have; the first two are needed."""


class HuggingFaceEncoder(nn.Module):
    """A BERT-class model of transformers as an encoder."""

    def __init__(self, model: Any):
        super().__init__()
        if getattr(model, "pooler", None) is not None:
            model.pooler = None  # every run has a new one, see finetune.py
        self.model = model
        self.has_segments = getattr(model.config, "type_vocab_size", 0) > 1

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return hidden states `[batch, seq, hidden]`."""
        segments = {"token_type_ids": batch.segment_ids} if self.has_segments else {}
        output = self.model(batch.input_ids, attention_mask=(batch.document_ids > 0).long(), **segments)
        return output.last_hidden_state


@dataclass(frozen=True)
class Folder:
    """A loaded Hugging Face folder."""

    config: Any
    model: Any
    build: Callable[[Any], nn.Module]
    """Makes a model with new random weights from `config`."""
    missing: set[str]
    unexpected: set[str]
    max_length: int
    """Longest sequence that the model knows positions for."""

    pair_separators: int
    """Separators between the two texts of a pair."""


def load_folder(folder: Path, values: dict[str, Any], masked_lm: bool = False) -> Folder:
    """Load the model of a folder whose config.json holds `values`, in fp32 on the CPU; `masked_lm`: under that head.

    Raises `UserError`, one line, for whatever is wrong with the folder.
    """
    try:
        from transformers import logging
    except ImportError:
        raise UserError(f"--load {folder} is a Hugging Face folder: it needs pip install 'megatron-ddrp[hf]'") from None
    logging.set_verbosity_error()  # its list of unused weights is about a head that we do not use
    logging.disable_progress_bar()
    if values["model_type"] == OWN_MODEL_TYPE:
        FAMILIES[OWN_MODEL_TYPE].model_config(folder / "config.json", values)
    try:
        return _load(folder, values, masked_lm)
    except UserError:
        raise
    except Exception as error:  # a damaged folder may make transformers raise anything
        raise UserError(f"--load {folder}: transformers cannot load it: {_reason(error)}") from None


def _load(folder: Path, values: dict[str, Any], masked_lm: bool) -> Folder:
    build: Callable[[Any], nn.Module]
    if values["model_type"] == OWN_MODEL_TYPE:
        from megatron_ddrp.conversion.modeling_ddrp import DdrpConfig, DdrpForMaskedLM, DdrpModel

        own: Any = DdrpForMaskedLM if masked_lm else DdrpModel
        config, build = DdrpConfig.from_pretrained(folder), own
        model, report = own.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    else:
        from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

        auto: Any = AutoModelForMaskedLM if masked_lm else AutoModel
        safely = {"local_files_only": True, "trust_remote_code": False}
        config, build = AutoConfig.from_pretrained(folder, **safely), auto.from_config
        if config.is_encoder_decoder or getattr(config, "is_decoder", False):
            raise ValueError(f"{config.model_type} is no encoder; give a BERT, RoBERTa, ELECTRA, DeBERTa, …")
        _check_sizes(folder, config)
        if (folder / PICKLED_WEIGHTS).is_file() and not (folder / SAFE_WEIGHTS).is_file():
            read_weights(folder)  # refuses a pickle in our own words
        model, report = auto.from_pretrained(folder, output_loading_info=True, **safely)
    is_roberta = config.model_type in ROBERTA_FAMILY
    longest = getattr(config, "max_position_embeddings", 512) - (config.pad_token_id + 1 if is_roberta else 0)
    missing, unexpected = set(report["missing_keys"]), set(report["unexpected_keys"])
    return Folder(config, model.float(), build, missing, unexpected, longest, 2 if is_roberta else 1)


def _check_sizes(folder: Path, config: Any) -> None:
    """Refuse sizes that no encoder has, before transformers builds a model of them."""
    path = folder / "config.json"
    found = {key: getattr(config, key) for key in SIZES if getattr(config, key, None) is not None}
    for key in {*SIZES[:2], *found}:
        whole_number(path, found, key, most=LARGEST_SIZE)
    layers = {"num_hidden_layers": getattr(config, "num_hidden_layers", 1)}
    whole_number(path, layers, "num_hidden_layers", most=MOST_LAYERS)


def _reason(error: Exception) -> str:
    text = str(error) or type(error).__name__
    if "weights_only" in text or "nsafe" in text:
        return f"its weights are {NOT_TENSORS}"
    lines = " ".join(text.split())
    return lines if len(lines) <= 300 else lines[:297] + "..."


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of tokenizer.json, else that of vocab.txt."""
    settings = tokenizer_settings(folder)
    if (folder / "tokenizer.json").is_file() or not (folder / "vocab.txt").is_file():
        return build_tokenizer("HuggingFace", tokenizer_model=folder)
    kind = "BertWordPieceLowerCase" if settings["do_lower_case"] else "BertWordPieceCase"
    return build_tokenizer(kind, vocab_file=folder / "vocab.txt")
