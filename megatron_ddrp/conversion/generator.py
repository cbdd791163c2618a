"""The generator of an ELECTRA out of a folder of its own, joined to its discriminator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megatron_ddrp.config import ModelConfig, ObjectiveConfig, objective_class
from megatron_ddrp.conversion.huggingface_weights import Weights
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.model.electra import generator_config

ADVICE = "leave --generator out, and a new one is drawn"
COMPARED = ("num_layers", "hidden_size", "num_attention_heads", "ffn_size", "seq_length", "layernorm_epsilon")


def refuse_generator(objective: ObjectiveConfig, source: Path) -> None:
    """Raise `UserError` where `--generator` was given for a folder that is no discriminator's."""
    head = objective_class(objective.objective).exported
    if head != "replaced-token":
        kind = "a masked LM" if head == "masked-lm" else "a DeBERTa's"
        raise UserError(
            f"--generator goes with the folder of an ELECTRA discriminator, and {source} is {kind}: give the "
            "discriminator's as --from-hf, or leave --generator out",
            WRONG_ARGUMENTS,
        )


def sized_objective(objective: ObjectiveConfig, config: ModelConfig, generator: ModelConfig) -> ObjectiveConfig:
    """Return the objective whose generator has as many heads as the folder's; `config` is the discriminator's."""
    if objective.generator_heads(config.num_attention_heads) == generator.num_attention_heads:
        return objective
    share = round(generator.num_attention_heads / config.num_attention_heads, 4)
    return replace(objective, generator_size=min(1.0, share))


def join_generator(
    weights: Weights, config: ModelConfig, objective: ObjectiveConfig, other: Weights, other_config: ModelConfig
) -> None:
    """Add a generator's weights to those of its discriminator, whose embeddings are one with its own.

    Raises `UserError` where the generator is of another shape than ours beside this discriminator, or embeds otherwise.
    """
    expected = generator_config(config, objective)
    for name in COMPARED:
        there, here = getattr(other_config, name), getattr(expected, name)
        if there != here:
            raise UserError(
                f"--generator: its {name} is {there}, beside this discriminator it must be {here}; {ADVICE}"
            )
    own = {name: tensor for name, tensor in other.ours.items() if name.startswith(("layers.", "head."))}
    own |= {name: tensor for name, tensor in other.ours.items() if name.startswith("embeddings.projection.")}
    for name in sorted(other.ours.keys() - own.keys()):
        if not torch.equal(other.ours[name], weights.ours[name]):
            raise UserError(
                f"--generator: {name} is not the discriminator's, and here the two share their embeddings; {ADVICE}"
            )
    if other_config.embedding_width == other_config.hidden_size:  # nothing projects there
        own["embeddings.projection.weight"] = torch.eye(other_config.hidden_size)
        own["embeddings.projection.bias"] = torch.zeros(other_config.hidden_size)
    weights.ours.update({f"generator.{name}": tensor for name, tensor in own.items()})
