"""Heads on top of the encoder.

Their weights are new in every run, even if a checkpoint has a pooler, so that a comparison measures only the encoders.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megatron_ddrp.conversion.heads_ddrp import TaskHead
from megatron_ddrp.conversion.task_heads import HeadForm
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.encoders.encoder import Encoder
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.runs import Run
from megatron_ddrp.tasks.finetune.task import Task

DROPOUT = 0.1
INIT_STD = 0.02


class TaskModel(nn.Module):
    """Encoder under a `TaskHead`. The head's weights are new (appendix B of the DDRP+MTH paper)."""

    def __init__(self, encoder: nn.Module, hidden_size: int, form: HeadForm, num_outputs: int):
        """Build the head. `encoder` maps a torch Batch to hidden states `[batch, seq, hidden_size]`."""
        super().__init__()
        self.encoder = encoder
        self.head = TaskHead(hidden_size, num_outputs, form.is_pooled, DROPOUT, form.output)
        for layer in self.head.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=INIT_STD)
                nn.init.zeros_(layer.bias)

    def forward(self, batch: Batch) -> Tensor:
        """Return the outputs, float32: `[batch, num_outputs]` of a pooled head, else `[batch, seq, num_outputs]`."""
        return self.head(self.encoder(batch)).float()


class Scale(NamedTuple):
    """Mean and standard deviation of the labels of a regression's training rows."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, labels: np.ndarray) -> Scale:
        """Return the scale of labels `[rows]`; equal labels have a deviation of 1."""
        return cls(float(labels.mean()), float(labels.std()) or 1.0)


def output_layer(model: nn.Module) -> nn.Linear | None:
    """Return the layer that computes the single output of a model with a head; None for a head without such a layer."""
    found = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer.out_features == 1]
    return found[0] if len(found) == 1 and found[0].bias is not None else None


@torch.no_grad()
def fold(scale: Scale, layer: nn.Linear) -> None:
    """Change an output layer in place so that its outputs x become deviation · x + mean."""
    layer.weight.mul_(scale.deviation)
    layer.bias.mul_(scale.deviation).add_(scale.mean)


def build_model(encoder: Encoder, task: Task, run: Run, device: torch.device) -> nn.Module:
    """Return a fresh copy of the encoder with a new head on the device. The run's seed determines its weights."""
    module, kind = encoder.fresh(run.seed, device), KINDS[task.kind]
    torch.manual_seed(run.seed_of("fine-tuning head"))
    if run.head == "family":
        assert encoder.family_model is not None
        return encoder.family_model(module, kind.head, kind.hub_labels(task)).to(device)
    return TaskModel(module, encoder.hidden_size, kind.head, kind.num_outputs(task)).to(device)
