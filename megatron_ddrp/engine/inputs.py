"""Prepare a step's micro-batches in the loader's thread: tensors, layout, draws and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ddrp.config import Config
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.rare_words import Occurrences
from megatron_ddrp.model.graphs import uses_graphs
from megatron_ddrp.model.stages import Inputs, layout_of
from megatron_ddrp.objectives.contract import Objective, count, make_objective
from megatron_ddrp.objectives.notes import NoteDictionary

DOCUMENT_MULTIPLE = 16
"""Multiple to which CUDA graphs round up the documents of packed rows, so that micro-batches have equal shapes."""


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences with all model inputs but notes, on the CPU."""

    arrays: Batch
    inputs: Inputs
    """Model inputs without notes; a step reads notes itself, because the step before it writes some."""
    counts: np.ndarray
    """int64 `[counts]`: the objective's counts, in their order."""

    @classmethod
    def of(cls, arrays: Batch, objective: Objective, config: Config, step: int, device: torch.device) -> MicroBatch:
        """Return the micro-batch with the draws for one step; its memory is pinned if `device` is a GPU."""
        draws = objective.draw(arrays, config.model, config.training.seed, step)
        if config.data.packing and uses_graphs(config, device):
            draws = draws.with_documents(-(-draws.num_documents // DOCUMENT_MULTIPLE) * DOCUMENT_MULTIPLE)
        inputs = Inputs(arrays.map(torch.from_numpy), draws, None, layout_of(arrays))
        if device.type != "cpu":
            inputs = _map_tensors(inputs, Tensor.pin_memory)
        return cls(arrays, inputs, count(objective, [arrays]))

    def with_notes(self, notes: NoteDictionary | None) -> tuple[Inputs, Occurrences | None]:
        """Return the inputs with current notes, and the rare words' occurrences that will make new notes."""
        if notes is None:
            return self.inputs, None
        read, occurrences = notes.inputs(self.arrays)
        return self.inputs._replace(notes=read), occurrences


def training_inputs(
    micro_batches: Iterable[Batch], config: Config, step: int, device: torch.device
) -> list[MicroBatch]:
    """Return the micro-batches of step 1, 2, … with all model inputs. Any thread can call it: it uses no device."""
    objective = make_objective(config.objective)
    return [MicroBatch.of(arrays, objective, config, step, device) for arrays in micro_batches]


def move_tensors(value: Any, device: torch.device) -> Any:
    """Return a tensor, or nested named tuples with their tensors, on a device, without waiting for a GPU."""

    def move(tensor: Tensor) -> Tensor:
        pins = device.type != "cpu" and tensor.device.type == "cpu"
        return tensor.pin_memory().to(device, non_blocking=True) if pins else tensor.to(device)

    return _map_tensors(value, move)


def _map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply `function` to the tensors of nested named tuples; None and numbers stay unchanged."""
    if isinstance(value, Tensor):
        return function(value)
    return type(value)(*(_map_tensors(item, function) for item in value)) if isinstance(value, tuple) else value
