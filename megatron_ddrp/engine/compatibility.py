"""Comparison of a checkpoint's layout and configuration with those of the run that resumes from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_ddrp.config import Config, ModelConfig, OptimizerConfig, changed_model, encoding_class, flag
from megatron_ddrp.errors import UserError
from megatron_ddrp.model.bert import decodes_masks
from megatron_ddrp.parallel.process_group import Ranks

CHANGEABLE = {
    *("hidden_dropout", "attention_dropout", "init_method_std", "direction_init"),
    *("attention_backend", "compile"),
}
"""Settings of the model that a resumed run may change: they do not affect the shapes or meaning of its weights."""


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
