"""Build a model from its configuration, and count its parameters."""

from __future__ import annotations

import torch
from torch import nn

from megatron_ddrp.config import ModelConfig, ObjectiveConfig, objective_class
from megatron_ddrp.model.bert import Encoder
from megatron_ddrp.model.embeddings import Embeddings
from megatron_ddrp.model.heads import EnhancedMaskDecoder
from megatron_ddrp.model.positions import LayerPositions, PositionEncoding


def build_model(
    config: ModelConfig, checkpoint_activations: bool = False, objective: ObjectiveConfig | None = None
) -> Encoder:
    """Return a freshly initialised model on the CPU, without DeepSpeed. Its weights come from torch's random state.

    The objective decides which model class is built; without one it is masked LM.
    """
    settings = objective or ObjectiveConfig(objective="mlm")
    return objective_class(settings.objective)(settings).build(config, checkpoint_activations)


def on_meta_device(config: ModelConfig, objective: ObjectiveConfig | None = None) -> Encoder:
    """Return the model on torch's meta device: it has shapes and takes no memory."""
    with torch.device("meta"):
        return build_model(config, objective=objective)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the number of all parameters, without the vocabulary's padding, and of the position encoding's."""
    position = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, (PositionEncoding, LayerPositions, EnhancedMaskDecoder))
        for parameter in module.parameters()
    }
    position |= {
        id(module.absolute.weight)
        for module in model.modules()
        if isinstance(module, Embeddings) and module.absolute is not None
    }
    sizes = {id(parameter): parameter.numel() for parameter in model.parameters()}
    padding = 0
    if isinstance(model, Encoder):
        rows = model.config.padded_vocab_size - model.config.vocab_size
        tables = (getattr(model.embeddings, name) for name in model.embeddings.tables)
        padding = rows * (sum(table.embedding_dim for table in tables) + 1)
    return sum(sizes.values()) - padding, sum(size for key, size in sizes.items() if key in position)
