"""Milliseconds per micro-batch by part of a training step.

A part's time is that of its own forward and backward pass in a model without DeepSpeed, timed in turns with the others:
the embeddings; embeddings and layers together, so that the layers are the difference; the layers' feed-forward blocks;
the whole model, so that the head is the difference; the optimizer on fp32 weights. Attention is what remains of the
layers without their feed-forward blocks: projections, dropout, residuals and LayerNorms included. DeepSpeed's rest is
what remains of a real step. Data is the loader's time, which a thread of its own spends beside the step.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_device import precision, release_memory
from gpu_groups import Bench, Row, halve_until_it_fits, noted
from gpu_training import SEED, Arm, Training, open_loader
from measure import DEVICE, time_rounds
from torch import Tensor, nn

from megatron_ddrp.config import Config
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.loader import BatchLoader
from megatron_ddrp.engine.build import build_optimizer
from megatron_ddrp.engine.inputs import moved, training_inputs
from megatron_ddrp.model import build_model
from megatron_ddrp.model.bert import run_stages
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.stages import Inputs

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Parts:
    """A model without DeepSpeed on the device, one micro-batch, and each part's forward and backward pass."""

    def __init__(self, config: Config, arrays: Batch) -> None:
        torch.manual_seed(SEED)
        self.model = build_model(config.model, objective=config.objective).to(DEVICE, DTYPES[precision()])
        (micro_batch,) = training_inputs([arrays], config, 1, DEVICE)
        self.inputs: Inputs = moved(micro_batch.inputs, DEVICE)
        self.stages = self.model.stages()
        self.layers = [stage for stage in self.stages if isinstance(stage, EncoderLayer)]
        shape = (*arrays.input_ids.shape, config.model.hidden_size)
        self.hidden = torch.randn(shape, device=DEVICE, dtype=DTYPES[precision()], requires_grad=True)
        weights = copy.deepcopy(self.model).float()
        for weight in weights.parameters():
            weight.grad = torch.zeros_like(weight)
        self.optimizer = build_optimizer(weights, config.optimizer, config.model.position_encoding)

    def embeddings(self) -> None:
        """Run the first stage forward and backward."""
        self._run(self.stages[:1])

    def layers_too(self) -> None:
        """Run the embeddings and the layers forward and backward."""
        self._run(self.stages[: 1 + len(self.layers)])

    def feed_forward(self) -> None:
        """Run the feed-forward blocks of all layers, one after the other, forward and backward."""
        hidden = self.hidden
        for layer in self.layers:
            _, hidden = layer.feed_forward(hidden)
        self._backward([hidden])

    def whole(self) -> None:
        """Run the whole model forward and backward."""
        self._run(self.stages)

    def update(self) -> None:
        """Make the optimizer's step on fp32 weights."""
        self.optimizer.step()

    def _run(self, stages: Sequence[nn.Module]) -> None:
        self._backward(learned_tensors(run_stages(stages, self.inputs)))

    def _backward(self, outputs: list[Tensor]) -> None:
        sum(output.float().sum() for output in outputs).backward()  # type: ignore[union-attr]
        self.model.zero_grad(set_to_none=True)
        self.hidden.grad = None


def learned_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples that have a gradient."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in learned_tensors(item)]
    return []


def measure_parts(arm: Arm, bench: Bench) -> None:
    """Write a row of milliseconds for each part of an arm's training step."""
    attempt = partial(_parts_of, arm, bench)
    for row in halve_until_it_fits(attempt, bench.sizes.tokens, arm.length):
        bench.write({"name": arm.name, "length": arm.length, **row})


def _parts_of(arm: Arm, bench: Bench, tokens: int, may_halve: bool) -> list[Row]:
    """Return the rows of an arm with one micro-batch of `tokens` tokens per step; see `halve_until_it_fits`."""
    config, loader = open_loader(arm.config(bench, tokens))
    size = config.training.micro_batch_size
    config = config.replace(training={"global_batch_size": size})
    note: Row = {}
    try:
        with noted([note], may_halve):
            return part_rows(_timed_parts(config, loader, bench), f"{size} x {arm.length}")
    finally:
        release_memory()
    return [note]


def _timed_parts(config: Config, loader: BatchLoader, bench: Bench) -> dict[str, float]:
    """Return the median milliseconds of each pass, of the loader's micro-batch and of a whole step."""
    whole, numbers = Training(config, bench.ranks), iter(range(10**9))
    try:
        parts = Parts(config, loader.step(0)[0])
        passes = {
            "data": lambda: loader.step(next(numbers) * loader.global_batch_size),
            "embeddings": parts.embeddings,
            "layers too": parts.layers_too,
            "feed-forward": parts.feed_forward,
            "whole": parts.whole,
            "optimizer": parts.update,
            "step": whole.step,
        }
        seconds = time_rounds(passes, bench.sizes.rounds)
    finally:
        whole.close()
    milliseconds = {name: float(np.median(values)) * 1e3 for name, values in seconds.items()}
    return milliseconds | {"data": milliseconds["data"] / loader.num_micro_batches}


def part_rows(ms: dict[str, float], micro_batch: str) -> list[Row]:
    """Return a row for each part from the milliseconds of the passes."""
    layers = ms["layers too"] - ms["embeddings"]
    parts = {
        "embeddings": ms["embeddings"],
        "attention": layers - ms["feed-forward"],
        "feed-forward": ms["feed-forward"],
        "head": ms["whole"] - ms["layers too"],
        "optimizer": ms["optimizer"],
        "DeepSpeed's rest": ms["step"] - ms["whole"] - ms["optimizer"],
        "whole step": ms["step"],
    }
    rows: list[Row] = [{"part": name, "ms": value, "share": value / ms["step"]} for name, value in parts.items()]
    rows.append({"part": "data, beside the step", "ms": ms["data"], "share": None})
    return [{"micro_batch": micro_batch, **row} for row in rows]
