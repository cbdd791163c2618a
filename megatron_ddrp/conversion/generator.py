"""Import of an ELECTRA generator from its own folder, joined to its discriminator."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from megatron_ddrp.config import ModelConfig, ObjectiveConfig
from megatron_ddrp.conversion.huggingface_weights import EMBEDDING_DIFFERENCE, TOKEN_EMBEDDING, Weights
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError

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
