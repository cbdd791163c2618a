"""Loading of an encoder with its tokenizer from a training checkpoint or a Hugging Face folder.

Both become a module that maps a Batch to hidden states. Everything comes from the given folder: nothing is downloaded,
and no code in the folder is run.
"""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_ddrp.checkpoint import choose_checkpoint, holds_run, is_checkpoint, read_model
from megatron_ddrp.checkpoint.folder import look_inside
from megatron_ddrp.config.registry import ENCODINGS
from megatron_ddrp.conversion.families.contract import (
    NO_SETTINGS,
    OWN_MODEL_TYPE,
    SHARED_DEFAULTS,
    model_type,
    read_config_file,
)
from megatron_ddrp.conversion.from_huggingface import check_rows
from megatron_ddrp.conversion.model_code import HeadForm, Labels
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.data.tokenizers.vocabulary import warn_of_vocabulary
from megatron_ddrp.encoders.huggingface import (
    PADDING_SENSITIVE,
    FamilyModel,
    HuggingFaceEncoder,
    load_folder,
    load_tokenizer,
    num_segments,
)
from megatron_ddrp.errors import UserError


@dataclass(frozen=True)
class LoadedEncoder:
    """A loaded encoder; `fresh` gives each run its own copy."""

    name: str
    """Name of the encoder in tables."""
    folder: Path
    """Folder of its weights: of a run the checkpoint that was chosen. Whoever loads the encoder again loads this."""
    module: nn.Module
    """Module that maps a torch Batch to hidden states `[batch, seq, hidden_size]`."""
    tokenizer: Tokenizer
    hidden_size: int
    max_length: int
    """Longest sequence that the encoder has positions for, in tokens."""
    fingerprint: str
    """Hash of the weights and of the code of a plug-in's encoding; of a Hugging Face folder, which users edit, also of
    its tokenizer and settings."""
    origin: str
    """Sentence for the user about loaded, missing and unused weights and about skipped damage."""
    rebuild: Callable[[], nn.Module] | None = None
    """Builder of the same architecture with random weights; None if runs start from the loaded weights."""
    family_model: Callable[[nn.Module, HeadForm, Labels], nn.Module] | None = None
    """Function that puts the head of the encoder's family on a fresh copy; None for a training checkpoint."""
    warning: str = ""
    """Line about skipped damaged checkpoints and the loaded one, by `check_rows`, or about padding; often empty."""

    def fresh(self, seed: int, device: torch.device) -> nn.Module:
        """Return a copy to fine-tune, with the loaded weights or with random weights drawn from `seed`."""
        if self.rebuild is None:
            return copy.deepcopy(self.module).to(device)
        torch.manual_seed(seed)
        return self.rebuild().to(device)


class TrainedEncoder(nn.Module):
    """Encoder around a model of this project."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return hidden states `[batch, seq, hidden]`."""
        return self.model.encode(batch.input_ids, batch.segment_ids, batch.document_ids, batch.position_ids)


class NoMaskedLM(UserError):
    """A folder whose model has no masked-LM head."""

    def __init__(self, folder: Path, reason: str):
        super().__init__(f"--load {folder}: minimal pairs (BLiMP) are not defined: no masked-LM head; {reason}")
        self.reason = reason


def load_encoder(folder: Path, random_init: bool = False, masked_lm: bool = False) -> LoadedEncoder:
    """Load `folder`; with `random_init` keep its architecture and tokenizer but draw new weights in every run.

    A training checkpoint always brings its masked-LM head; with `masked_lm` a Hugging Face folder does too.

    Raises:
        UserError: the folder is of neither kind or cannot be loaded, its tokenizer does not fit its model, or with
            `masked_lm` it lacks the weights of that head (`NoMaskedLM`).
    """
    path = folder / "config.json"
    is_ours = is_checkpoint(folder) or holds_run(folder)
    if not path.is_file() and not is_ours:
        wrote = "expected a folder that megatron-ddrp pretrain --save or megatron-ddrp convert wrote"
        raise UserError(
            f"--load {folder}: neither a training checkpoint nor a Hugging Face folder; "
            + (look_inside(folder) or f"{wrote}, or a downloaded encoder")
        )
    config = read_config_file(folder) if path.is_file() else {}
    if "model_type" in config or not (is_ours or "checkpoint" in config):
        model_type(path, config)
        encoder = _load_hugging_face(folder, config, random_init, masked_lm)
    else:
        encoder = _load_checkpoint(folder, random_init, masked_lm)
    return replace(encoder, origin="; ".join((*_remarks(encoder), encoder.origin)))


def warn_of(encoder: LoadedEncoder) -> None:
    """Warn, in the name of our caller, of an older checkpoint in place of a damaged one and of the vocabulary."""
    for line in _remarks(encoder):
        warnings.warn(line.removeprefix("warning: "), stacklevel=3)


def _remarks(encoder: LoadedEncoder) -> list[str]:
    return [*filter(None, [encoder.warning]), *warn_of_vocabulary(encoder.tokenizer)]


def _load_checkpoint(folder: Path, random_init: bool, masked_lm: bool) -> LoadedEncoder:
    from megatron_ddrp.model import build_model

    remarks: list[str] = []  # part of the origin: every worker and rank loads, but only one prints it
    chosen = choose_checkpoint(folder, tell=remarks.append)
    if remarks:
        remarks.append(f"loaded {chosen.name}")
    model, tokenizer, config = read_model(chosen)
    check_rows(folder, tokenizer.vocab_size, config.model.vocab_size, is_run=True)
    model.merge_embeddings()
    names = [name for name, _ in model.named_parameters()]
    unused = [] if masked_lm else [name for name in names if name.startswith("head.")]
    encoding = config.model.position_encoding
    return LoadedEncoder(
        with_random_weights(str(folder)) if random_init else str(folder),
        chosen,
        TrainedEncoder(model),
        tokenizer,
        config.model.hidden_size,
        config.model.seq_length,
        _fingerprint(model, encoding, f"{config.model} {tokenizer.fingerprint}" if random_init else None),
        _origin(len(names) - len(unused), unused, random_init, masked_lm, f" from {chosen.name}"),
        (lambda: TrainedEncoder(build_model(config.model))) if random_init else None,
        warning="; ".join(remarks),
    )


def _load_hugging_face(folder: Path, raw_config: dict[str, Any], random_init: bool, masked_lm: bool) -> LoadedEncoder:
    found = load_folder(folder, raw_config, masked_lm, random_init)
    segments = num_segments(found.config)
    tokenizer = load_tokenizer(folder, segments)
    remarks = [check_rows(folder, tokenizer.vocab_size, found.config.vocab_size)]
    if 1 < segments < tokenizer.rows.num_segments or (masked_lm and any(i for _, i in tokenizer.rows.single)):
        raise UserError(
            f"--load {folder}: its tokenizer writes rows with {tokenizer.rows.num_segments} segments, also around a "
            f"single text, and its model has {segments}: put the tokenizer of the model's training into the folder"
        )
    if tokenizer.rows.single[0][0] != tokenizer.cls_id:
        remarks.append(
            f"warning: {folder}: its tokenizer begins no row with {tokenizer.pieces[tokenizer.cls_id]!r}: what reads "
            "the first piece, as classifiers of BERT's kind and the pooling of [CLS] do, reads text"
        )
    if found.config.model_type in PADDING_SENSITIVE:
        remarks.append(
            f"warning: {folder}: padding changes the states of a {found.config.model_type} model, so results depend on "
            "the rows that share a batch"
        )
    _refuse_missing(folder, found.weights.missing, f"{found.model.base_model_prefix}." if masked_lm else "")
    encoder = HuggingFaceEncoder(found.model)
    names = [name for name, _ in encoder.model.named_parameters()]
    is_ours = raw_config["model_type"] == OWN_MODEL_TYPE
    encoding = found.config.position_encoding if is_ours else ""
    drawn = f"{_settings(found.config)} {tokenizer.fingerprint}" if random_init else None
    fingerprint = _fingerprint(encoder, encoding, drawn)
    if not random_init:
        usual = {key: value for key, value in SHARED_DEFAULTS.items() if getattr(found.config, key, None) == value}
        settings = {key: value for key, value in (usual | raw_config).items() if key not in NO_SETTINGS}
        facts = f"{fingerprint} {tokenizer.fingerprint} {tokenizer.rows} {json.dumps(settings, sort_keys=True)}"
        fingerprint = hashlib.sha256(facts.encode()).hexdigest()[:16]
    return LoadedEncoder(
        with_random_weights(str(folder)) if random_init else str(folder),
        folder,
        encoder,
        tokenizer,
        found.config.hidden_size,
        found.max_length,
        fingerprint,
        _origin(len(names), sorted(found.weights.unused), random_init, masked_lm),
        (lambda: HuggingFaceEncoder(found.build(found.config))) if random_init else None,
        family_model=partial(FamilyModel.on_top_of, folder),
        warning="; ".join(filter(None, remarks)),
    )


def _refuse_missing(folder: Path, missing: set[str], encoder: str) -> None:
    """Raise `UserError` for missing weights of the encoder, whose names begin with `encoder`, else `NoMaskedLM`."""
    if lacking := sorted(name for name in missing if name.startswith(encoder)):
        raise UserError(
            f"--load {folder}: its weights do not belong to its config.json: {_names(lacking)} of the encoder are "
            "missing; copy the folder again"
        )
    if missing:
        lacks = f"the folder lacks {_names(sorted(missing))}"
        raise NoMaskedLM(folder, f"{lacks}; use the folder of a masked language model")


def _origin(loaded: int, unused: list[str], random_init: bool, masked_lm: bool, checkpoint: str = "") -> str:
    if random_init:
        return "loaded: none, all weights are new and random in every run"
    whole = "of the masked language model" if masked_lm else "of the encoder"
    parts = [f"loaded: {loaded} weights {whole}{checkpoint}", "missing: none", f"not used: {_names(unused)}"]
    return "; ".join(parts if masked_lm else [*parts, "new in every run: the task's head"])


def _names(weights: list[str]) -> str:
    if not weights:
        return "none"
    few = ", ".join(weights[:4]) + (", …" if len(weights) > 4 else "")
    return f"{len(weights)} ({few})"


def _settings(config: Any) -> str:
    """Return a Hugging Face configuration as text, without the names of its folder and version."""
    known = config.to_dict()
    return json.dumps({key: known[key] for key in sorted(known.keys() - {"_name_or_path", "transformers_version"})})


def _fingerprint(model: nn.Module, encoding: str, random_settings: str | None) -> str:
    """Return a hash of the weights; for random weights, of the settings and the shapes.

    The code of a plug-in that brought the `encoding` enters it too.
    """
    digest = hashlib.sha256(b"" if random_settings is None else f"random weights {random_settings}".encode())
    digest.update("".join(ENCODINGS.code(encoding)).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if random_settings is None:
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def with_random_weights(name: str) -> str:
    """Return the name in tables of the encoder `name` with random weights."""
    return f"{name}, random weights"
