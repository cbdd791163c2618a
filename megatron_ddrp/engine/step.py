"""One optimizer step, and one validation: sums over the global batch ÷ global counts, in every layout.

Each micro-batch gives sums. The counts of the whole global batch are known before the first of them, so every
micro-batch's loss is already its exact share of the step's loss; a mean of micro-batch means never arises.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ddrp.config import Config
from megatron_ddrp.data.batch import IGNORED_LABEL, Batch
from megatron_ddrp.data.randomness import hash_uint64
from megatron_ddrp.engine.schedule import learning_rate
from megatron_ddrp.model.stages import HCD, LM, TCD
from megatron_ddrp.objectives.mth import Draws, draw
from megatron_ddrp.parallel.process_group import Ranks, sum_over_ranks


@dataclass(frozen=True)
class StepResult:
    """What a step knows of itself; the losses are global sums still on the device, so reading them is the only wait."""

    loss_sums: Tensor
    """fp32 `[3]`, this rank's sums of LM, TCD and HCD."""
    predicted: int
    """Predicted tokens of the global batch."""
    sequences: int
    """Sequences of the global batch with at least two valid tokens."""
    tokens: int
    """Non-padding tokens of the global batch."""
    lr: float
    grad_norm: float

    def losses(self, config: Config) -> dict[str, float]:
        """The step's own losses over all ranks; a collective call."""
        sums = sum_over_ranks(self.loss_sums.double()).tolist()
        means = {
            "lm_loss": sums[LM] / max(1, self.predicted),
            "tcd_loss": sums[TCD] / max(1, self.sequences),
            "hcd_loss": sums[HCD] / max(1, self.sequences),
        }
        weights = dict(zip(means, config.objective.weights, strict=True))
        total = sum(weights[name] * mean for name, mean in means.items())
        return {"loss": total, **{name: mean for name, mean in means.items() if weights[name]}}


def train_step(engine: Any, micro_batches: list[Batch], config: Config, ranks: Ranks, step: int) -> StepResult:
    """Forward, backward and update over this rank's `micro_batches` of step 1, 2, …"""
    predicted, sequences, tokens = _global_counts(micro_batches, ranks)
    share = ranks.world_size * len(micro_batches)  # DeepSpeed averages over both; our sums want neither
    counts = (predicted, sequences, sequences)
    weights = torch.tensor(
        [share * weight / max(1, count) for weight, count in zip(config.objective.weights, counts, strict=True)],
        dtype=torch.float32,
        device=ranks.device,
    )
    lr = learning_rate(step, config.training.train_iters, config.optimizer)
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    loss_sums = torch.zeros(3, dtype=torch.float32, device=ranks.device)
    own_norm = None
    for number, arrays in enumerate(micro_batches):
        draws = draw(
            arrays.document_ids,
            arrays.sequence_ids,
            arrays.position_ids,
            config.objective,
            config.model,
            config.training.seed,
            step,
        )
        seed_dropout(config.training.seed, step, number, ranks.rank)
        sums = engine(_to_device(arrays, ranks.device), _draws_to_device(draws, ranks.device))
        engine.backward((sums * weights).sum())
        loss_sums += sums.detach()
        if number + 1 == len(micro_batches):
            own_norm = _own_grad_norm(engine, config)
        engine.step()
    grad_norm = own_norm if own_norm is not None else float(engine.get_global_grad_norm())
    return StepResult(loss_sums, predicted, sequences, tokens, lr, grad_norm)


def evaluate(engine: Any, steps: Iterable[list[Batch]], config: Config, ranks: Ranks) -> float:
    """Masked-LM loss in nats a predicted token over some global batches of held-out text, dropout off."""
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    engine.eval()
    with torch.no_grad():
        for micro_batches in steps:
            for arrays in micro_batches:
                batch = _to_device(arrays, ranks.device)
                draws = Draws.none(len(batch.input_ids), config.model.num_layers, ranks.device)
                total[0] += engine(batch, draws)[LM]
                total[1] += int((arrays.labels != IGNORED_LABEL).sum())
    engine.train()
    loss_sum, predicted = sum_over_ranks(total).tolist()
    return loss_sum / max(1.0, predicted)


def seed_dropout(seed: int, step: int, micro_batch: int, rank: int) -> None:
    """Make dropout a function of (seed, step, micro-batch, rank): a resumed run drops what the first would have."""
    torch.manual_seed(int(hash_uint64(seed, "dropout", np.uint64(step), micro_batch, rank)) & (2**63 - 1))


def _global_counts(micro_batches: list[Batch], ranks: Ranks) -> tuple[int, int, int]:
    """(predicted tokens, sequences with at least two valid tokens, non-padding tokens) over all ranks."""
    predicted = sum(int((b.labels != IGNORED_LABEL).sum()) for b in micro_batches)
    sequences = sum(_count_sequences(b.document_ids) for b in micro_batches)
    tokens = sum(int((b.document_ids > 0).sum()) for b in micro_batches)
    if ranks.world_size == 1:
        return predicted, sequences, tokens
    counts = torch.tensor([predicted, sequences, tokens], dtype=torch.int64, device=ranks.device)
    predicted, sequences, tokens = sum_over_ranks(counts).tolist()
    return predicted, sequences, tokens


def _count_sequences(document_ids: np.ndarray) -> int:
    """Documents of all rows `[batch, seq]` with at least two tokens."""
    batch, seq = document_ids.shape
    numbers = document_ids + np.arange(batch)[:, None] * (seq + 1)  # one a document: a row holds at most seq of them
    return int((np.bincount(numbers[document_ids > 0]) >= 2).sum())


def _own_grad_norm(engine: Any, config: Config) -> float | None:
    """The global gradient norm where DeepSpeed gives none: fp32 at ZeRO 0, whose gradients are whole on every rank."""
    if config.parallel.zero_stage:
        return None
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])))


def _to_device(batch: Batch, device: torch.device) -> Batch:
    pin = device.type == "cuda"

    def move(array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if pin else tensor

    return batch.map(move)


def _draws_to_device(draws: Draws, device: torch.device) -> Draws:
    return Draws(draws.token_mask.to(device, non_blocking=True), draws.heads.to(device, non_blocking=True))
