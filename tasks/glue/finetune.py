"""One fine-tuning run (appendix B): encoder + pooler (dense, tanh, on [CLS]) + dropout + linear layer.

AdamW with β = (0.9, 0.999), eps 1e-6 and weight decay 0.01 (not on biases and LayerNorms), linear warm-up over a
tenth of the steps, then linear decay to 0, gradients clipped at norm 1. Cross entropy, or mean squared error for a
regression. The pooler and the classifier are new in every run, also where a checkpoint holds a pooler of its own, so
that encoders compare by what pre-training gave them.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from megatron_ddrp.data.batch import Batch
from tasks.glue.data import Encoded, batches, dev_order, train_order
from tasks.glue.metrics import METRICS
from tasks.glue.runs import Point
from tasks.glue.tasks import Task

WARMUP = 0.1
WEIGHT_DECAY = 0.01
CLIP_NORM = 1.0
DROPOUT = 0.1
INIT_STD = 0.02
DEV_BATCH_SIZE = 64


class Classifier(nn.Module):
    """An encoder with a new pooler and output layer on top."""

    def __init__(self, encoder: nn.Module, hidden_size: int, num_outputs: int):
        """`encoder` maps a torch Batch to hidden states `[batch, seq, hidden_size]`."""
        super().__init__()
        self.encoder = encoder
        self.pooler = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(DROPOUT)
        self.output = nn.Linear(hidden_size, num_outputs)
        for layer in (self.pooler, self.output):
            nn.init.normal_(layer.weight, std=INIT_STD)
            nn.init.zeros_(layer.bias)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits, or the prediction of a regression: float32 `[batch, num_outputs]`."""
        first = self.encoder(batch)[:, 0]  # [batch, hidden]
        return self.output(self.dropout(torch.tanh(self.pooler(first)))).float()


@dataclass(frozen=True)
class RunResult:
    """What one run gave."""

    scores: dict[str, list[float | None]]
    """Development file → its score after each epoch; None where it is undefined."""
    predictions: dict[str, np.ndarray]
    """Development file → the last epoch's predictions `[examples]`: class numbers, or numbers."""
    steps: int
    seconds: float


def learning_rate_factor(step: int, total: int) -> float:
    """Share of the peak rate at `step` (from 0) of `total`: linear up over the first tenth, linear down to 0."""
    warmup = math.ceil(WARMUP * total)
    return (step + 1) / warmup if step < warmup else (total - step) / (total - warmup)


def finetune(
    task: Task, encoder: nn.Module, hidden_size: int, train: Encoded, dev: dict[str, Encoded], point: Point, seed: int
) -> RunResult:
    """Train `encoder` (changed in place) and a new head on `train`, scoring `dev` after each epoch.

    The order of the rows, the head's first weights and dropout are functions of `seed`.
    """
    start = time.perf_counter()
    torch.manual_seed(seed)
    device = next(encoder.parameters()).device
    model = Classifier(encoder, hidden_size, task.num_outputs).to(device)
    optimizer = _optimizer(model, point.lr)
    total = point.epochs * math.ceil(len(train) / point.batch_size)
    step = 0
    scores: dict[str, list[float | None]] = {name: [] for name in dev}
    predictions: dict[str, np.ndarray] = {}
    with tqdm(total=total, desc=f"{task.name} seed {seed}", unit="step", leave=False, disable=None) as progress:
        for epoch in range(point.epochs):
            model.train()
            for batch, targets, _ in batches(train, train_order(train, point.batch_size, seed, epoch)):
                for group in optimizer.param_groups:
                    group["lr"] = point.lr * learning_rate_factor(step, total)
                loss = _loss(task, model(_to_torch(batch, device)), torch.from_numpy(targets).to(device))
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
                optimizer.step()
                step += 1
                progress.update()
            for name, encoded in dev.items():
                predictions[name] = predict(task, model, encoded)
                scores[name].append(METRICS[task.metric](encoded.targets, predictions[name]))
    assert step == total
    return RunResult(scores, predictions, step, time.perf_counter() - start)


@torch.inference_mode()
def predict(task: Task, model: Classifier, encoded: Encoded) -> np.ndarray:
    """Predictions `[examples]` in the file's order: class numbers, or numbers of a regression."""
    model.eval()
    device = next(model.parameters()).device
    outputs = np.zeros(len(encoded), dtype=encoded.targets.dtype)
    times_scored = np.zeros(len(encoded), dtype=np.int64)
    for batch, _, rows in batches(encoded, dev_order(encoded, DEV_BATCH_SIZE)):
        logits = model(_to_torch(batch, device))  # [batch, num_outputs]
        outputs[rows] = (logits[:, 0] if task.is_regression else logits.argmax(dim=-1)).cpu().numpy()
        times_scored[rows] += 1
    assert (times_scored == 1).all(), "every development example is scored exactly once"
    return outputs


def _loss(task: Task, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if task.is_regression:
        return nn.functional.mse_loss(logits[:, 0], targets.float())
    return nn.functional.cross_entropy(logits, targets)


def _optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    # Biases and LayerNorm parameters are the vectors; everything that multiplies or is looked up is a matrix.
    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    plain = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-6)


def _to_torch(batch: Batch, device: torch.device) -> Batch:
    return batch.map(lambda field: torch.from_numpy(field).to(device, non_blocking=True))
