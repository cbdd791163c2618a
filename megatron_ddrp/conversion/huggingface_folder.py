"""Reader of a Hugging Face folder of any family as a model of ours: settings, weights and tokenizer, without code.

Hidden states and logits equal those of transformers. Poolers and classifiers are left out; if the folder lacks the head
that its objective trains, the model gets a new one.

Import of an ELECTRA generator from its own folder, joined to its discriminator.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_ddrp import checkpoint
from megatron_ddrp.config import ModelConfig, ObjectiveConfig
from megatron_ddrp.conversion.families import Family, family_of
from megatron_ddrp.conversion.foreign_config import read_config_file
from megatron_ddrp.conversion.huggingface_tokenizer import find_tokenizer
from megatron_ddrp.conversion.vocabulary_transfer import Transfer, plan_transfer
from megatron_ddrp.conversion.weight_files import (
    EMBEDDING_DIFFERENCE,
    SEGMENT_EMBEDDING,
    TOKEN_EMBEDDING,
    Weights,
    change_rows,
    fill,
    read_weights,
    refuse_homeless,
    refuse_sizes,
    rename,
)
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.model import Encoder, build_model, on_meta_device

SEED = 1234
"""Seed of the weights that a folder lacks, and of the rows that pad the vocabulary."""

PADDED_ROWS = 255
"""Most rows that a model may embed beyond its tokenizer's pieces: tables are often padded to a multiple."""


@dataclass(frozen=True)
class ReadFolder:
    """The model of a Hugging Face folder as one of ours, and an account of the folder's tensors."""

    source: Path
    family: Family
    config: ModelConfig
    objective: ObjectiveConfig
    model: Encoder
    weights: Weights
    embedded_pieces: int
    """Rows of the folder's word embedding; those beyond the tokenizer's vocabulary are left out."""
    tokenizer: Tokenizer | None
    transfer: Transfer | None
    """Origin of each row of the vocabulary, if the model was given another one."""
    padding_id: int | None
    """Id that must be the tokenizer's padding, by `Family.padding_id`."""
    head_settings: dict[str, Any]
    """Settings of heads that fine-tuning adds, by `Family.head_settings`."""
    warning: str
    """Line about a tokenizer that may not be the model's, by `check_rows`; often empty."""


def read_folder(source: Path, generator: Path | None = None, tokenizer: Tokenizer | None = None) -> ReadFolder:
    """Read a folder of a family in the registry; for an ELECTRA, optionally also the folder of its generator.

    With a `tokenizer`, the model gets its vocabulary instead of the folder's: `vocabulary_transfer.py`.

    Raise `UserError` if its family is not in the registry, or if a weight is missing or does not fit.
    """
    config, objective, family, weights, values = _settings_and_weights(source)
    if generator is not None:
        other_config, _, _, other, _ = _settings_and_weights(generator)
        objective = generator_objective(objective, config, other_config)
        join_generator(weights, other, dict(on_meta_device(config, objective).named_parameters()))
    own, rows = find_tokenizer(source), len(weights.ours[TOKEN_EMBEDDING])
    if own:
        family.check_tokenizer(source / "config.json", values, own)
    pieces = own.vocab_size if own else rows
    warning, transfer = check_rows(source, pieces, rows), None
    if tokenizer is not None:
        transfer = plan_transfer(_require_own(own, source), tokenizer)
        change_rows(weights, transfer)
        pieces = rows = tokenizer.vocab_size
    config = dataclasses.replace(config, vocab_size=pieces)
    torch.manual_seed(SEED)
    model = build_model(config, objective=objective)
    fill(model, weights, pieces, source)
    kept = (family.padding_id(values), family.head_settings(source / "config.json", values), warning)
    return ReadFolder(source, family, config, objective, model, weights, rows, tokenizer or own, transfer, *kept)


def _settings_and_weights(source: Path) -> tuple[ModelConfig, ObjectiveConfig, Family, Weights, dict[str, Any]]:
    """Return a folder's model, objective, family, weights under our names, and completed config.json.

    Every size is compared with the weights before a tensor of that size is allocated.
    """
    path = source / "config.json"
    family, values, config = _settings(source)
    tensors = read_weights(source)
    refuse_sizes(config, tensors, source)
    objective = family.objective(path, values, tensors)
    shapes = on_meta_device(config, objective)
    wanted = dict(shapes.named_parameters()) | checkpoint.persistent_buffers(shapes)
    weights = rename(family.from_folder(tensors, values), family.our_name, wanted, source)
    _refuse_other_tables(config, weights, source)
    refuse_homeless(weights.encoder, weights.left_out, family.prefix, source)
    return config, objective, family, weights, values


def _settings(source: Path) -> tuple[Family, dict[str, Any], ModelConfig]:
    """Return a folder's family, its completed config.json, and our configuration of its model."""
    path, values = source / "config.json", read_config_file(source)
    family = family_of(path, values)
    values = family.complete(path, values)
    return family, values, family.model_config(path, values)


def read_model_config(folder: Path) -> ModelConfig:
    """Return the configuration of a folder's model without reading its weights.

    Raise `UserError` if its family is not in the registry, or for a setting that we do not support.
    """
    return _settings(folder)[2]


def load_hugging_face(folder: Path) -> tuple[Encoder, Tokenizer, ModelConfig]:
    """Return (model on the CPU in fp32 and eval mode, tokenizer, configuration) of a folder.

    Print the warning of `check_rows`. Raise `UserError` as `read_folder` does, and if the folder has no tokenizer.
    """
    read = read_folder(folder)
    if read.warning:
        print(read.warning, file=sys.stderr)
    return read.model.eval(), _require_own(read.tokenizer, folder), read.config


def _require_own(tokenizer: Tokenizer | None, folder: Path) -> Tokenizer:
    if tokenizer is None:
        raise UserError(f"{folder} has no tokenizer: copy the model's vocab.txt or tokenizer.json there")
    return tokenizer


def check_rows(folder: Path, pieces: int, rows: int, is_run: bool = False) -> str:
    """Return a warning if a model embeds over `PADDED_ROWS` more rows than its tokenizer has pieces, otherwise nothing.

    Some models on the hub have so many spare rows. Raise `UserError` if it embeds fewer, or, in a run of ours, which
    has no spare rows, another number.
    """
    found = f"{folder}: its tokenizer has {pieces} pieces but its model embeds {rows}"
    if pieces > rows or (is_run and pieces != rows):
        raise UserError(f"{found}; put the vocabulary of the model's training into the folder")
    if rows - pieces <= PADDED_ROWS:
        return ""
    return f"warning: {found}: is it the tokenizer of the model's training? The other rows are not used"


def _refuse_other_tables(config: ModelConfig, weights: Weights, source: Path) -> None:
    """Raise `UserError` if the embeddings of words or segments do not match config.json."""
    words, segments = (weights.ours.get(name, ()) for name in (TOKEN_EMBEDDING, SEGMENT_EMBEDDING))
    if not len(words):
        raise UserError(f"{source}: no word embedding among its weights; give a folder with a whole encoder")
    if len(words) != config.vocab_size:
        raise UserError(
            f"{source}: config.json says {config.vocab_size} pieces and the weights embed {len(words)}: they do not "
            "match; copy or export the folder again"
        )
    if len(segments) != config.num_segments:
        raise UserError(
            f"{source}: config.json says type_vocab_size {config.num_segments}, and the weights embed {len(segments)} "
            "segments: they do not match; copy the folder again"
        )


ADVICE = "leave --generator out to draw a new one"
COMPARED = ("num_layers", "hidden_size", "num_attention_heads", "ffn_size", "seq_length", "layernorm_epsilon")
PROJECTION = "generator.embeddings.projection."


def generator_objective(objective: ObjectiveConfig, config: ModelConfig, generator: ModelConfig) -> ObjectiveConfig:
    """Return the discriminator's objective with a generator of the folder's sizes; `config` is the discriminator's.

    Raise `UserError` if the objective trains no generator, or none of these sizes beside this discriminator.
    """
    share = round(min(1.0, generator.num_attention_heads / config.num_attention_heads), 4)
    for candidate in (objective, replace(objective, generator_size=share)):
        expected = candidate.generator_config(config)
        if expected is None:
            raise UserError(
                "--generator needs a discriminator's folder as --from-hf, but that folder holds a masked LM: give the "
                "discriminator's folder, or leave --generator out",
                WRONG_ARGUMENTS,
            )
        wrong = [name for name in COMPARED if getattr(generator, name) != getattr(expected, name)]
        if not wrong:
            return candidate
    there, here = getattr(generator, wrong[0]), getattr(expected, wrong[0])
    raise UserError(f"--generator: its {wrong[0]} is {there}, but this discriminator needs {here}; {ADVICE}")


def join_generator(weights: Weights, other: Weights, wanted: Collection[str]) -> None:
    """Add a generator's weights to its discriminator's; `wanted` are the names of both together.

    Shared weights must be equal, except token embeddings if their difference is a weight. Raise `UserError` otherwise.
    """
    for name, tensor in other.ours.items():
        if f"generator.{name}" in wanted:
            weights.ours[f"generator.{name}"] = tensor
        elif name == TOKEN_EMBEDDING and EMBEDDING_DIFFERENCE in wanted and tensor.shape == weights.ours[name].shape:
            weights.ours.update({EMBEDDING_DIFFERENCE: weights.ours[name] - tensor, name: tensor})
        elif not torch.equal(tensor, weights.ours[name]):
            raise UserError(
                f"--generator: {name} differs from the discriminator's, but both must share embeddings; {ADVICE}"
            )
    if PROJECTION + "weight" in wanted and PROJECTION + "weight" not in weights.ours:  # both widths are equal
        width = len(weights.ours["generator.layers.0.attention.query.weight"])
        weights.ours[PROJECTION + "weight"] = torch.eye(width)
        weights.ours[PROJECTION + "bias"] = torch.zeros(width)
