"""The encoder to be fine-tuned, from a training checkpoint of this project or a Hugging Face folder.

Both end as a module that maps a Batch to hidden states, beside the tokenizer that belongs to it. Everything comes from
the folder that was named; nothing is fetched.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_ddrp.checkpoint import choose_checkpoint, holds_run, is_checkpoint, read_model
from megatron_ddrp.conversion.to_huggingface import OWN_MODEL_TYPE
from megatron_ddrp.data.batch import Batch
from megatron_ddrp.data.tokenizer import build_tokenizer
from megatron_ddrp.errors import UserError
from tasks.glue.data import Tokenizer

ROBERTA_FAMILY = ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "longformer", "mpnet")
"""Model types with two separators in a pair and position numbers that begin after the padding's."""

PADDED_ROWS = 255
"""Rows that a Hugging Face model may embed beyond its tokenizer's pieces: tables are often padded to a multiple."""


@dataclass(frozen=True)
class Encoder:
    """A loaded encoder; `fresh` gives each run its own copy."""

    name: str
    """What tables call it."""
    module: nn.Module
    """Maps a torch Batch to hidden states `[batch, seq, hidden_size]`."""
    tokenizer: Tokenizer
    hidden_size: int
    max_length: int
    """Longest sequence that it knows positions for."""
    fingerprint: str
    """Changes when any weight does."""
    origin: str
    """Which weights were loaded, which were missing and which are left unused, and damage passed over, for people."""
    rebuild: Callable[[], nn.Module] | None = None
    """Makes the same architecture with new random weights; set where these are wanted."""
    pair_separators: int = 1
    """Separators between the two texts of a pair."""

    def fresh(self, seed: int, device: torch.device) -> nn.Module:
        """A copy to fine-tune: the loaded weights, or new random ones drawn from `seed`."""
        if self.rebuild is None:
            return copy.deepcopy(self.module).to(device)
        torch.manual_seed(seed)
        return self.rebuild().to(device)


class TrainedEncoder(nn.Module):
    """A model of this project as an encoder."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states `[batch, seq, hidden]`."""
        return self.model.encode(batch.input_ids, batch.segment_ids, batch.document_ids, batch.position_ids)


class HuggingFaceEncoder(nn.Module):
    """A BERT-class model of transformers as an encoder."""

    def __init__(self, model: Any):
        super().__init__()
        if getattr(model, "pooler", None) is not None:
            model.pooler = None  # every run has a new one, see finetune.py
        self.model = model
        self.has_segments = getattr(model.config, "type_vocab_size", 0) > 1

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states `[batch, seq, hidden]`."""
        segments = {"token_type_ids": batch.segment_ids} if self.has_segments else {}
        output = self.model(batch.input_ids, attention_mask=(batch.document_ids > 0).long(), **segments)
        return output.last_hidden_state


def load_encoder(folder: Path, random_init: bool = False) -> Encoder:
    """Load `folder`; with `random_init` keep its architecture and tokenizer but draw new weights in every run.

    Raises:
        UserError: the folder is of neither kind, cannot be loaded, or its tokenizer has more pieces than its model.
    """
    path = folder / "config.json"
    if not path.is_file() and not is_checkpoint(folder) and not holds_run(folder):
        raise UserError(
            f"--load {folder}: neither a training checkpoint nor a Hugging Face folder; expected a folder that "
            "pretrain_bert.py --save or tools/convert_checkpoint.py wrote, or a downloaded encoder"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); copy the folder again") from None
    load = _load_hugging_face if "model_type" in config else _load_checkpoint
    return load(folder, config, random_init)


def _load_checkpoint(folder: Path, _: dict[str, Any], random_init: bool) -> Encoder:
    from megatron_ddrp.model import build_model

    notes: list[str] = []  # told with the origin: every worker and rank loads, one of them tells
    model, tokenizer, config = read_model(choose_checkpoint(folder, tell=notes.append))
    _refuse_foreign_tokenizer(folder, tokenizer, config.model.vocab_size, spare=0)
    names = [name for name, _ in model.named_parameters()]
    unused = [name for name in names if name.startswith("head.")]
    return Encoder(
        _name(folder, random_init),
        TrainedEncoder(model),
        tokenizer,
        config.model.hidden_size,
        config.model.seq_length,
        _fingerprint(model, random_init),
        "; ".join((*notes, _origin(len(names) - len(unused), [], unused, random_init))),
        (lambda: TrainedEncoder(build_model(config.model))) if random_init else None,
    )


def _load_hugging_face(folder: Path, raw_config: dict[str, Any], random_init: bool) -> Encoder:
    try:
        from transformers import AutoConfig, AutoModel, logging
    except ImportError:
        raise UserError(f"--load {folder} is a Hugging Face folder: it needs pip install 'megatron-ddrp[hf]'") from None
    logging.set_verbosity_error()  # its list of unused weights is about a head that we do not use
    logging.disable_progress_bar()
    build: Callable[[Any], nn.Module]
    try:
        if raw_config["model_type"] == OWN_MODEL_TYPE:
            # The folder carries a copy of this code for users of transformers; here no code of a folder is run.
            from megatron_ddrp.conversion.modeling_ddrp import DdrpConfig, DdrpModel

            config, build = DdrpConfig.from_pretrained(folder), DdrpModel
            own: Any = DdrpModel
            model, report = own.from_pretrained(folder, output_loading_info=True)
        else:
            config, build = AutoConfig.from_pretrained(folder, local_files_only=True), AutoModel.from_config
            if config.is_encoder_decoder or getattr(config, "is_decoder", False):
                raise ValueError(f"{config.model_type} is no encoder; give a BERT, RoBERTa, ELECTRA, DeBERTa, …")
            model, report = AutoModel.from_pretrained(folder, local_files_only=True, output_loading_info=True)
        model = model.float()
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--load {folder}: transformers cannot load it: {error}") from None
    tokenizer = _hugging_face_tokenizer(folder)
    _refuse_foreign_tokenizer(folder, tokenizer, config.vocab_size, PADDED_ROWS)
    encoder = HuggingFaceEncoder(model)
    names = {name for name, _ in encoder.model.named_parameters()}
    missing = sorted(names & set(report["missing_keys"]))
    if len(missing) == len(names):
        raise UserError(f"--load {folder}: its weights are of another model than its config.json; copy it again")
    roberta = config.model_type in ROBERTA_FAMILY
    longest = getattr(config, "max_position_embeddings", 512)
    return Encoder(
        _name(folder, random_init),
        encoder,
        tokenizer,
        config.hidden_size,
        longest - config.pad_token_id - 1 if roberta else longest,
        _fingerprint(encoder, random_init),
        _origin(len(names) - len(missing), missing, sorted(report["unexpected_keys"]), random_init),
        (lambda: HuggingFaceEncoder(build(config))) if random_init else None,
        pair_separators=2 if roberta else 1,
    )


def _hugging_face_tokenizer(folder: Path) -> Tokenizer:
    if (folder / "tokenizer.json").is_file() or not (folder / "vocab.txt").is_file():
        return build_tokenizer("HuggingFace", tokenizer_model=folder)
    settings = folder / "tokenizer_config.json"
    lower = json.loads(settings.read_text(encoding="utf-8")).get("do_lower_case", True) if settings.is_file() else True
    kind = "BertWordPieceLowerCase" if lower else "BertWordPieceCase"
    return build_tokenizer(kind, vocab_file=folder / "vocab.txt")


def _refuse_foreign_tokenizer(folder: Path, tokenizer: Tokenizer, rows: int, spare: int) -> None:
    if not rows - spare <= tokenizer.vocab_size <= rows:
        raise UserError(
            f"--load {folder}: its tokenizer has {tokenizer.vocab_size} pieces and its model embeds {rows}; "
            "put the vocabulary there that the model was trained with"
        )


def _origin(loaded: int, missing: list[str], unused: list[str], random_init: bool) -> str:
    if random_init:
        return "loaded: none, all weights are new and random in every run"
    parts = [f"loaded: {loaded} weights of the encoder", f"missing: {_names(missing)}"]
    return "; ".join([*parts, f"not used: {_names(unused)}", "new in every run: pooler and classifier"])


def _names(weights: list[str]) -> str:
    if not weights:
        return "none"
    few = ", ".join(weights[:4]) + (", …" if len(weights) > 4 else "")
    return f"{len(weights)} ({few})"


def _name(folder: Path, random_init: bool) -> str:
    return f"{folder}, random weights" if random_init else str(folder)


def _fingerprint(model: nn.Module, random_init: bool) -> str:
    digest = hashlib.sha256(b"random weights" if random_init else b"")
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if not random_init:
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
