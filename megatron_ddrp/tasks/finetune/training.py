"""One fine-tuning run, as in appendix B of the DDRP+MTH paper.

AdamW with β = (0.9, 0.999), eps 1e-6 and weight decay 0.01 (not on biases, LayerNorms and, as in pre-training, gains
of a position encoding), linear warm-up over a tenth of the steps, then linear decay to 0, gradients clipped at norm 1.
The task's kind defines the loss.

With `Run.scales_labels` the loss of a regression sees (label − mean) / standard deviation, both of the training rows,
because a learning rate of 1e-5 never reaches prices or years. Predictions are on the scale of the labels, and after
the last step the output layer contains that scale.

A batch is the sum of its micro-batches. The run alone determines a micro-batch: its rows, its padding and its dropout,
which is drawn from (seed, step, micro-batch). Ranks share the micro-batches and the development rows, so the run has
the same score on any number of ranks.
"""

from __future__ import annotations

import math
import multiprocessing
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron_ddrp.data.progress import progress
from megatron_ddrp.data.sealed import Advance, silent
from megatron_ddrp.encoders.rows import Encoded, dev_order, pad_batch, train_order
from megatron_ddrp.model.positions.contract import LayerPositions, PositionEncoding
from megatron_ddrp.model.stages import DTYPES, run_stage
from megatron_ddrp.parallel.collectives import seed_draws
from megatron_ddrp.parallel.process_group import Ranks, sum_over_ranks
from megatron_ddrp.tasks.finetune.determinism import deterministic, with_fallback
from megatron_ddrp.tasks.finetune.heads import Scale, fold, output_layer
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.runs import Run
from megatron_ddrp.tasks.finetune.task import Task

WARMUP = 0.1
WEIGHT_DECAY = 0.01
CLIP_NORM = 1.0
DEV_BATCH_SIZE = 64
_LAYER = re.compile(r"\.(?:layers?|h|blocks?)\.(\d+)\.")


@dataclass(frozen=True)
class RunResult:
    """Result of one run."""

    scores: dict[str, list[float | None]]
    """Development file → score after each epoch; None if it is undefined."""
    predictions: dict[str, Any]
    """Development or test file → the last epoch's predictions, from `FineTuning.predict`."""
    model: nn.Module
    """Fine-tuned model in fp32."""
    steps: int
    seconds: float


def learning_rate_factor(step: int, total: int) -> float:
    """Return the share of the peak learning rate at `step` (from 0) of `total`: linear warm-up, then decay to 0."""
    warmup = math.ceil(WARMUP * total)
    return (step + 1) / warmup if step < warmup else (total - step) / (total - warmup)


class FineTuning:
    """A model in training. `step` trains on one batch; `predict` may be called at any time before `finish`."""

    def __init__(self, run: Run, task: Task, model: nn.Module, train: Encoded, ranks: Ranks | None = None):
        """Prepare to train `model` in place, on its device, on `train`; `ranks` is None in a single process.

        `model` maps a torch Batch to the outputs of the task's kind. The run's seed determines the order of the rows
        and dropout.
        """
        self.run, self.task, self.model, self.train = run, task, model, train
        self.kind = KINDS[task.kind]
        self.rank, self.world_size = (ranks.rank, ranks.world_size) if ranks else (0, 1)
        self.device = next(model.parameters()).device
        self.weights = dict(self.model.named_parameters())
        self.compute_dtype = None if run.precision == "fp32" else DTYPES[run.precision]
        self.output = output_layer(model) if run.scales_labels else None
        self.scale = Scale.of(train.targets) if self.output else Scale(0.0, 1.0)
        self.optimizer = _optimizer(self.weights, run.layerwise_lr_decay, model)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=run.precision == "fp16")
        self.scaler.scale(torch.zeros((), device=self.device))  # makes its scale, also on a rank without a micro-batch
        self.total = run.epochs * math.ceil(len(train) / run.batch_size)
        self.steps = 0

    def order(self, epoch: int) -> list[np.ndarray]:
        """Return the row numbers of each batch of an epoch."""
        return train_order(self.train, self.run.batch_size, self.run.seed, epoch)

    def step(self, rows: np.ndarray) -> None:
        """Do one optimizer step on the rows with these numbers."""
        self.model.train()
        with_fallback(partial(self._compute_gradients, rows))
        if self.world_size > 1:
            self._sum_gradients()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.weights.values(), CLIP_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.lr * group["share"] * learning_rate_factor(self.steps, self.total)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.steps += 1

    def finish(self) -> None:
        """Fold the scale of the labels into the output layer, after the last step."""
        if self.output:
            fold(self.scale, self.output)

    def batches(self, encoded: Encoded) -> list[np.ndarray]:
        """Return the row numbers of each batch of a file that this rank predicts."""
        return dev_order(encoded, DEV_BATCH_SIZE)[self.rank :: self.world_size]

    @torch.inference_mode()
    def predict(self, encoded: Encoded, advance: Advance = silent) -> Any:
        """Return the predictions of all rows in the form that the task's metric takes.

        A row gets nan if one of its outputs is not finite. Calls `advance` with 1 after each batch.
        """
        self.model.eval()
        outcomes, times_scored = with_fallback(partial(self._outcomes, encoded, advance))
        if self.world_size > 1:
            flat = np.concatenate([outcomes.reshape(len(outcomes), -1), times_scored[:, None]], axis=1)
            summed = sum_over_ranks(torch.from_numpy(flat).to(self.device)).cpu().numpy()  # [outcomes, values + 1]
            outcomes, times_scored = summed[:, :-1].reshape(outcomes.shape), summed[:, -1]
        assert (times_scored == 1).all(), "each outcome must be computed exactly once"
        if self.output:
            outcomes = self.scale.deviation * outcomes + self.scale.mean
        return self.kind.predictions(self.task, encoded, outcomes)

    def _outcomes(self, encoded: Encoded, advance: Advance) -> tuple[np.ndarray, np.ndarray]:
        """Return the outcomes of this rank's rows, with those of other ranks blank, and how often each was computed."""
        outcomes = self.kind.blank(encoded)
        times_scored = np.zeros(len(outcomes))
        for rows in self.batches(encoded):
            places, values = self.kind.outcomes(self._outputs(encoded, rows), encoded, rows)
            outcomes[places] = values.cpu().numpy()
            times_scored[places] += 1
            advance(1)
        return outcomes, times_scored

    def _outputs(self, encoded: Encoded, rows: np.ndarray) -> Tensor:
        batch = pad_batch(encoded, rows).map(lambda field: torch.from_numpy(field).to(self.device, non_blocking=True))
        return run_stage(self.model, batch, self.compute_dtype)

    def _compute_gradients(self, rows: np.ndarray) -> None:
        """Set the gradients to those of this rank's micro-batches; whatever they were before does not matter."""
        self.optimizer.zero_grad(set_to_none=True)
        size, size_of_batch = self.run.micro_batch_size, max(1, self.kind.size(self.train, rows))
        for number, start in enumerate(range(0, len(rows), size)):
            if number % self.world_size != self.rank:
                continue
            micro = rows[start : start + size]
            seed_draws(self.run.seed_of("fine-tuning dropout", self.steps, number), self.device)
            labels = self.kind.targets(self.train, micro)
            if self.output:
                labels = (labels - self.scale.mean) / self.scale.deviation
            targets = torch.from_numpy(labels).to(self.device)
            loss = self.kind.loss_sum(self._outputs(self.train, micro), targets) / size_of_batch
            self.scaler.scale(loss).backward()

    def _sum_gradients(self) -> None:
        """Sum every gradient over ranks, in one reduction."""
        parameters = list(self.weights.values())
        # A rank without a micro-batch has no gradients; an unused parameter has none on any rank.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        used = torch.tensor([float(p.grad is not None) for p in parameters], device=self.device)
        summed = sum_over_ranks(torch.cat([used, *(gradient.reshape(-1) for gradient in gradients)]))
        used, flat = summed.split([len(parameters), len(summed) - len(parameters)])
        parts = flat.split([parameter.numel() for parameter in parameters])
        for parameter, part, count in zip(parameters, parts, used.tolist(), strict=True):
            parameter.grad = part.view_as(parameter) if count else None


def finetune(
    run: Run,
    task: Task,
    model: nn.Module,
    train: Encoded,
    dev: dict[str, Encoded],
    ranks: Ranks | None = None,
    test: dict[str, Encoded] | None = None,
) -> RunResult:
    """Train for one run, score `dev` after each epoch, and after the last epoch also predict `test`."""
    start = time.perf_counter()
    tuning = FineTuning(run, task, model, train, ranks)
    scores: dict[str, list[float | None]] = {name: [] for name in dev}
    predictions: dict[str, Any] = {}
    is_worker = multiprocessing.parent_process() is not None
    others = run.epochs * sum(len(tuning.batches(rows)) for rows in dev.values())
    others += sum(len(tuning.batches(rows)) for rows in (test or {}).values())
    shown, name = not (is_worker or tuning.rank), f"{run.task} seed {run.seed}"
    with deterministic(tuning.device), progress("batch", tuning.total + others, name, show=shown) as bar:
        for epoch in range(run.epochs):
            for rows in tuning.order(epoch):
                tuning.step(rows)
                bar.update()
            for name, encoded in dev.items():
                predictions[name] = tuning.predict(encoded, bar.update)
                scores[name].append(tuning.kind.score(task.metric, encoded.answers, predictions[name]))
        for name, encoded in (test or {}).items():
            predictions[name] = tuning.predict(encoded, bar.update)
    assert tuning.steps == tuning.total
    tuning.finish()
    return RunResult(scores, predictions, model, tuning.steps, time.perf_counter() - start)


def layer_depths(names: Iterable[str], encoder: str = "encoder.") -> dict[str, int]:
    """Return parameter name → depth: 0 for embeddings and shared parameters, i + 1 for layer i, then the head.

    The names of the encoder's parameters begin with `encoder`. A pooler in the encoder belongs to the head.
    """
    found = {name: _LAYER.search(f".{name}") for name in names}
    top = max((int(match[1]) for match in found.values() if match), default=-1) + 2

    def depth(name: str, match: re.Match[str] | None) -> int:
        if match:
            return int(match[1]) + 1
        return 0 if name.startswith(encoder) and ".pooler." not in name else top

    return {name: depth(name, match) for name, match in found.items()}


def _optimizer(weights: dict[str, nn.Parameter], layerwise_lr_decay: float, model: nn.Module) -> torch.optim.AdamW:
    """Return AdamW. A group's `share` is its factor on the rate: layerwise_lr_decay^(layers below the head)."""
    depths = layer_depths(weights, getattr(model, "encoder_prefix", "encoder."))
    top = max(depths.values())
    gains = {
        f"{place}.{gain}"
        for place, module in model.named_modules()
        if isinstance(module, (PositionEncoding, LayerPositions))
        for gain in module.gains
    }
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in weights.items():
        # Biases and LayerNorm parameters are vectors; weights, embeddings and some gains are matrices.
        decay = WEIGHT_DECAY if parameter.ndim >= 2 and name not in gains else 0.0
        share = layerwise_lr_decay ** (top - depths[name])
        groups.setdefault((decay, share), []).append(parameter)
    listed = [{"params": p, "weight_decay": decay, "share": share} for (decay, share), p in groups.items()]
    return torch.optim.AdamW(listed, lr=0.0, betas=(0.9, 0.999), eps=1e-6, fused=True)
