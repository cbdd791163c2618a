"""Whole training steps on the fake GPU of benchmarks/; prints the places where the host waits as one JSON object.

    python tests/unit/counted_steps.py

Every encoding × objective runs with both attention backends, once with notes and once without. A process of its own,
since the device has to be registered before the first backward pass.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from counting import Counting
from fake_gpu import fake_device, fake_tensors, gpu_kernels, on_device

from megatron_ddrp.config import ENCODINGS, OBJECTIVES, Config, ObjectiveConfig
from megatron_ddrp.data.batches.rare_words import RareWords
from megatron_ddrp.engine import step as engine_step
from megatron_ddrp.engine.inputs import training_inputs
from megatron_ddrp.engine.layout import GradientClipping
from megatron_ddrp.model import on_meta_device
from megatron_ddrp.model.positions.contract import PositionEncoding
from megatron_ddrp.objectives.notes import NoteDictionary
from megatron_ddrp.parallel.process_group import Ranks
from tests.unit.model.tiny import packed_batch, tiny_batch, tiny_config

WORDS = RareWords(np.arange(3, dtype=np.uint64), np.full(3, 9), np.arange(3), np.arange(1, 4))


class Engine:
    """What `train_step` uses of DeepSpeed's engine, around torch's own optimizer."""

    def __init__(self, module: nn.Module, ranks: Ranks, counting: Counting) -> None:
        self.module, self.counting = module, counting
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
        self.own_clipping = GradientClipping(module, 1.0, ranks)
        self.optimizer.register_step_pre_hook(self.own_clipping)
        self.waits: list[str] = []

    def __call__(self, *inputs: Any) -> Any:
        self.before = len(self.counting.waits)
        return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.waits += [f"{wait.operation} at {wait.place}" for wait in self.counting.waits[self.before :]]

    def step(self) -> None:
        self.optimizer.step()


class ReadCopy:
    """`HostCopy` on the fake GPU: reading it is a wait if anything was launched since the last one that was read."""

    counting: Counting
    reads: list[int]
    """Number of launches before each wait."""

    def __init__(self, tensor: Tensor) -> None:
        self.is_there = not isinstance(tensor, FakeTensor)
        with unset_fake_temporarily():
            self.copy = (tensor if self.is_there else torch.zeros(tensor.shape, dtype=tensor.dtype)).numpy()

    def read(self) -> np.ndarray:
        launched = len(self.counting.launches)
        if not self.is_there and (not self.reads or self.reads[-1] < launched):
            self.reads.append(launched)
        return self.copy


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes with real tensors, as the notes in host memory do."""

    def real(*arguments: Any) -> Any:
        with unset_fake_temporarily():
            return function(*arguments)

    return real


def batch() -> Any:
    """Return a micro-batch of numpy arrays: a row of two documents, a padded one, rare words in both."""
    packed = packed_batch(tiny_batch(lengths=(7, 4, 3)), [[1, 2], [0]]).map(Tensor.numpy)
    note_ids = np.zeros_like(packed.labels)
    note_ids[:, 1] = (1, 2)
    return packed._replace(note_ids=note_ids, input_ids=packed.input_ids)


def count_waits(encoding: str, objective: str, backend: str, notes: bool) -> tuple[list[str], list[str], int]:
    """Return the waits of a step's micro-batch, its other waits, and how often its numbers and notes are read."""
    gpu = fake_device()
    ranks = Ranks(0, 1, gpu, 0, 1, 0, 1, 0, 1, data_group=None, tensor_group=None, model_group=None)
    model_config = tiny_config(position_encoding=encoding, attention_backend=backend, hidden_size=48, attention_dropout=0.1)
    config = Config(model=model_config, objective=ObjectiveConfig(objective=objective, notes=notes))
    inputs = training_inputs([batch()], config, 1, gpu)
    dictionary = NoteDictionary(WORDS, model_config.hidden_size, config.objective) if notes else None
    ReadCopy.reads = []
    with fake_tensors(), Counting() as counting, gpu_kernels():
        ReadCopy.counting = counting
        with counting.paused():
            model = on_device(on_meta_device(model_config, config.objective), gpu, torch.float32)
        engine = Engine(model.train(), ranks, counting)
        result = engine_step.train_step(engine, inputs, config, ranks, 1, dictionary)
        with unset_fake_temporarily():
            result.grad_norm, result.counts
    others = [f"{wait.operation} at {wait.place}" for wait in counting.waits]
    for wait in engine.waits:
        others.remove(wait)
    return engine.waits, others, len(ReadCopy.reads)


def main() -> None:
    found = {}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(engine_step, "HostCopy", ReadCopy))
        stack.enter_context(mock.patch.object(engine_step, "seed_dropout", lambda *_: None))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda tensor: fake_tensors().from_tensor(tensor)))
        stack.enter_context(mock.patch.object(engine_step, "row_counts", on_host(engine_step.row_counts)))
        for name in ("inputs", "update"):
            stack.enter_context(mock.patch.object(NoteDictionary, name, on_host(getattr(NoteDictionary, name))))
        for place, encoding in enumerate(ENCODINGS):
            for objective in OBJECTIVES:
                for backend, notes in (("sdpa", place % 2 == 0), ("triton", place % 2 == 1)):
                    name = f"{encoding}, {objective}, {backend}{', notes' if notes else ''}"
                    found[name] = count_waits(encoding, objective, backend, notes)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
