"""Comparison of a checkpoint's layout, configuration and tokenizer with those of the run that begins from it."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

from megatron_ddrp.checkpoint import TOKENIZER
from megatron_ddrp.config import Config, ModelConfig, OptimizerConfig, changed_model, encoding_class, flag
from megatron_ddrp.data.dataset.manifest import TokenizerFlags
from megatron_ddrp.data.tokenizers.tokenizer import (
    DESCRIPTION_FILE,
    SPECIAL_PIECES,
    Tokenizer,
    load_tokenizer,
    read_description,
)
from megatron_ddrp.errors import UserError
from megatron_ddrp.model.bert import decodes_masks
from megatron_ddrp.parallel.process_group import Ranks

CHANGEABLE = {"hidden_dropout", "attention_dropout", "attention_backend", "compile"}
"""Settings of the model that a resumed run may change: they do not affect the shapes or meaning of its weights."""

FREE_PIECE = "[unused"
"""Begin of BERT's pieces that no text gives; a user may give words of their own to them."""


def layout(zero_stage: int, precision: str, ranks: Ranks) -> dict[str, Any]:
    """Return a checkpoint's note about the layout that wrote it; the saved tensors do not depend on the layout."""
    return {
        "ranks": ranks.world_size,
        "tensor": ranks.tensor_size,
        "pipeline": ranks.pipeline_size,
        "zero_stage": zero_stage,
        "precision": precision,
    }


def changed_layout(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Return the line for the user about another layout, such as `checkpoint of 4 ranks (TP 2, ZeRO 1, bf16) → …`."""
    return [] if theirs == ours else [f"checkpoint of {_in_words(theirs)} → {_in_words(ours)}"]


def _in_words(layout: dict[str, Any]) -> str:
    """Return a layout in words, such as `4 ranks (TP 2, ZeRO 1, bf16)`."""
    sizes = [(name, layout[axis]) for name, axis in (("TP", "tensor"), ("PP", "pipeline"))]
    axes = "".join(f"{name} {size}, " for name, size in sizes if size > 1)
    count = layout["ranks"]
    return f"{count} rank{'s' * (count > 1)} ({axes}ZeRO {layout['zero_stage']}, {layout['precision']})"


def check_optimizer(path: Path, stored: OptimizerConfig, ours: OptimizerConfig) -> None:
    """Raise `UserError` if a checkpoint's optimizer state belongs to another optimizer."""
    if stored.optimizer != ours.optimizer:
        raise UserError(
            f"--load {path}: its optimizer state comes from --optimizer {stored.optimizer}, this run has "
            f"{ours.optimizer}: give the same, or export only the weights with megatron-ddrp convert and start from "
            "them"
        )


def check_architecture(path: Path, stored: Config, config: Config, step: int = 0) -> None:
    """Raise `UserError` if the weights of a checkpoint, written after `step` steps, belong to another architecture."""
    ours, theirs = config.to_dict()["model"], stored.to_dict()["model"]
    changeable = set(CHANGEABLE)
    if _serves_any_length(config.model):
        changeable.add("seq_length")
    if _rotary_bases(stored, step) == _rotary_bases(config, step):
        changeable |= {"rope_theta", "local_rope_theta"}
    differing = [name for name in changed_model(stored, config) if name not in changeable]
    if differing:
        words = [f"{flag(name)} is {_shown(theirs[name])} there and {_shown(ours[name])} here" for name in differing]
        if differing == ["seq_length"] and ours["seq_length"] < theirs["seq_length"]:
            shorter = f"--seq-length {theirs['seq_length']} --seq-length-phases {ours['seq_length']}:1"
            raise UserError(f"--load {path}: {words[0]}, and this model depends on it: for shorter rows give {shorter}")
        raise UserError(
            f"--load {path}: a checkpoint of another architecture: {', '.join(words)}; give the same (--config "
            f"{path.parent / 'config.json'} has them all), or another --load and --save"
        )


def _serves_any_length(model: ModelConfig) -> bool:
    """Return whether neither weights nor attention depend on `--seq-length`."""
    has_table = model.adds_absolute_embedding or decodes_masks(model)
    return encoding_class(model.position_encoding).any_length and not has_table


def _rotary_bases(config: Config, step: int) -> tuple[float, float]:
    """Return θ of global and of local layers in a step: a length phase may have its own."""
    theta = config.rope_theta_at(max(0, step - 1))
    return theta, config.model.local_rope_theta or theta


def _shown(setting: Any) -> Any:
    return "not given" if setting is None else setting


def changed_tokenizer(path: Path, ours: Tokenizer) -> list[str]:
    """Return a line if a run's tokenizer is another than the one beside a checkpoint, but has its pieces.

    A folder without a tokenizer is not compared, and a vocabulary may name BERT's free pieces, [unused0] and so on.

    Raises:
        UserError: pieces or roles have other ids, so the embeddings would be those of other words.
    """
    folder = path.resolve().parent / TOKENIZER
    if not (folder / DESCRIPTION_FILE).is_file() or read_description(folder)["fingerprint"] == ours.fingerprint:
        return []
    theirs = load_tokenizer(folder)
    pairs = enumerate(zip_longest(theirs.pieces, ours.pieces, fillvalue="no piece"))
    changed = [(number, there, here) for number, (there, here) in pairs if there != here]
    moved = [one for one in changed if not one[1].startswith(FREE_PIECE)]
    roles = [role for role in SPECIAL_PIECES if getattr(theirs, f"{role}_id") != getattr(ours, f"{role}_id")]
    if moved or roles:
        vocabulary = folder if theirs.tokenizer_type == "HuggingFace" else folder / theirs.file_name
        flags = " ".join(TokenizerFlags(theirs.tokenizer_type).with_path(str(vocabulary)).words())
        what = f"the role {' and '.join(roles)} has another id"
        for number, there, here in moved[:1]:
            what = f"{len(moved):,} of its pieces differ, such as {number}, {there!r} there and {here!r} here"
        raise UserError(
            f"--load {path}: the vocabulary of this run is not the one of its embeddings: {what}; preprocess with "
            f"{flags}, or give the encoder the other vocabulary first (docs/huggingface.md, Another vocabulary)"
        )
    names = (theirs.tokenizer_type, ours.tokenizer_type)
    how = [" → ".join(names)] if names[0] != names[1] else []
    how += [f"names for {len(changed):,} of {FREE_PIECE}…]"] if changed else []
    return [f"tokenizer: other than {folder} ({', '.join(how) or 'rules'}); the same text may give other ids there"]
