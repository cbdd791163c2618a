"""Make what a step needs of its micro-batches in the loader's thread: tensors, layout, draws and counts."""

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
from megatron_ddrp.model.stages import Inputs, layout_of
from megatron_ddrp.objectives.contract import Objective, count, make_objective
from megatron_ddrp.objectives.notes import NoteDictionary


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences with all that a model needs for them but notes, on the CPU."""

    arrays: Batch
    inputs: Inputs
    """Without notes, which a step reads itself: the step before it writes some."""
    counts: np.ndarray
    """int64 `[counts]`: the objective's counts, in their order."""

    @classmethod
    def of(cls, arrays: Batch, objective: Objective, config: Config, step: int, device: torch.device) -> MicroBatch:
        """Draw for one step, and pin the memory of what will go to a GPU."""
        draws = objective.draw(arrays, config.model, config.training.seed, step)
        inputs = Inputs(arrays.map(torch.from_numpy), draws, None, layout_of(arrays))
        if device.type != "cpu":
            inputs = _mapped(inputs, Tensor.pin_memory)
        return cls(arrays, inputs, count(objective, [arrays]))

    def with_notes(self, notes: NoteDictionary | None) -> tuple[Inputs, Occurrences | None]:
        """Return the inputs with the notes read now, and the words whose notes will be taken."""
        if notes is None:
            return self.inputs, None
        read, occurrences = notes.inputs(self.arrays)
        return self.inputs._replace(notes=read), occurrences


def training_inputs(
    micro_batches: Iterable[Batch], config: Config, step: int, device: torch.device
) -> list[MicroBatch]:
    """Return what step 1, 2, … trains on. Needs neither engine nor device, so that any thread can call it."""
    objective = make_objective(config.objective)
    return [MicroBatch.of(arrays, objective, config, step, device) for arrays in micro_batches]


def moved(value: Any, device: torch.device) -> Any:
    """Return a tensor, or nested named tuples with their tensors, on a device, without waiting for a GPU."""

    def move(tensor: Tensor) -> Tensor:
        pins = device.type != "cpu" and tensor.device.type == "cpu"
        return tensor.pin_memory().to(device, non_blocking=True) if pins else tensor.to(device)

    return _mapped(value, move)


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply `function` to the tensors of nested named tuples; None and numbers stay."""
    if isinstance(value, Tensor):
        return function(value)
    return type(value)(*(_mapped(item, function) for item in value)) if isinstance(value, tuple) else value
