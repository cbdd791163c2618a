"""One optimizer step, and one validation: sums over the global batch ÷ global counts, in every layout.

Each micro-batch gives sums. The counts of the whole global batch are known before the first of them, so every
micro-batch's loss is already its exact share of the step's loss; a mean of micro-batch means never arises.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ddrp.config import Config, ObjectiveConfig
from megatron_ddrp.data.batch import Batch
from megatron_ddrp.data.randomness import hash_uint64
from megatron_ddrp.data.rare_words import Occurrences
from megatron_ddrp.engine.losses import Counts, num_sums, own_counts, step_losses
from megatron_ddrp.engine.schedule import learning_rate
from megatron_ddrp.objectives.mth import Draws, draw
from megatron_ddrp.objectives.notes import NoteDictionary
from megatron_ddrp.parallel.process_group import Ranks, gather_rows, sum_over_ranks

VALIDATION_STEP = 0
"""The step whose draws every validation uses."""


@dataclass(frozen=True)
class StepResult:
    """What a step knows of itself; the losses are global sums still on the device, so reading them is the only wait."""

    loss_sums: Tensor
    """fp32 `[3]`, this rank's sums of LM, TCD and HCD; `[8]` under ELECTRA."""
    counts: Counts
    lr: float
    grad_norm: float

    def losses(self, config: Config) -> dict[str, float]:
        """The step's own losses over all ranks; a collective call."""
        return step_losses(sum_over_ranks(self.loss_sums.double()).tolist(), self.counts, config.objective)


def train_step(
    engine: Any,
    micro_batches: list[Batch],
    config: Config,
    ranks: Ranks,
    step: int,
    notes: NoteDictionary | None = None,
) -> StepResult:
    """Forward, backward and update over this rank's `micro_batches` of step 1, 2, …, and then the notes taken."""
    counts = _global_counts(micro_batches, ranks)
    share = ranks.world_size * len(micro_batches)  # DeepSpeed averages over both; our sums want neither
    loss_sums = torch.zeros(num_sums(config.objective), dtype=torch.float32, device=ranks.device)
    factors = zip(config.objective.weights, counts.of_terms(config.objective), strict=True)
    weights = torch.zeros_like(loss_sums)
    weights[: len(config.objective.weights)] = torch.tensor([share * weight / count for weight, count in factors])
    lr = learning_rate(step, config.training.train_iters, config.optimizer)
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    own_norm = None
    taken = []
    for number, arrays in enumerate(micro_batches):
        draws = _draws_of(arrays, config.objective, config, step)
        seed_dropout(config.training.seed, step, number, ranks.rank)
        batch, draws = _to_device(arrays, ranks.device), _draws_to_device(draws, ranks.device)
        if notes is None:
            sums = engine(batch, draws)
        else:
            inputs, occurrences = notes.inputs(arrays)
            sums, new_notes = engine(batch, draws, inputs.to(ranks.device))
            taken.append((occurrences, new_notes))
        engine.backward(spread_nonfinite((sums * weights).sum()))
        loss_sums += sums.detach()
        if number + 1 == len(micro_batches):
            own_norm = _own_grad_norm(engine, config)
            if own_norm is not None and not math.isfinite(own_norm):
                engine.zero_grad()  # so that the step changes nothing, as ZeRO's own steps do
        engine.step()
    grad_norm = own_norm if own_norm is not None else float(engine.get_global_grad_norm())
    if notes is not None and math.isfinite(grad_norm):
        take_notes(notes, taken, ranks)
    return StepResult(loss_sums, counts, lr, grad_norm)


def take_notes(notes: NoteDictionary, taken: list[tuple[Occurrences, Tensor]], ranks: Ranks) -> None:
    """Put the notes of all ranks' micro-batches into everyone's dictionary; a collective call."""
    names = np.concatenate([np.stack([o.words, o.sequence_ids, o.position_ids], axis=1) for o, _ in taken])
    names = gather_rows(torch.from_numpy(names).to(ranks.device), ranks).cpu().numpy()  # [n, 3]
    vectors = gather_rows(torch.cat([vectors for _, vectors in taken]).float(), ranks).cpu()  # [n, hidden]
    notes.update(names, vectors)


def evaluate(
    engine: Any, steps: Iterable[list[Batch]], config: Config, ranks: Ranks, notes: NoteDictionary | None = None
) -> dict[str, float]:
    """Losses over some global batches of held-out text, dropout off, notes read but not taken.

    `valid_lm_loss` in nats a predicted token, the generator's under ELECTRA, with its detector's beside it.
    """
    objective = dataclasses.replace(config.objective, tcd_weight=0.0, hcd_weight=0.0)
    total = torch.zeros(num_sums(objective), dtype=torch.float64, device=ranks.device)
    counted = np.zeros(len(Counts._fields), np.int64)
    engine.eval()
    with torch.no_grad():
        for micro_batches in steps:
            counted += own_counts(micro_batches)
            for arrays in micro_batches:
                batch = _to_device(arrays, ranks.device)
                draws = _draws_to_device(_draws_of(arrays, objective, config, VALIDATION_STEP), ranks.device)
                if notes is None:
                    total += engine(batch, draws)
                else:
                    total += engine(batch, draws, notes.inputs(arrays)[0].to(ranks.device))[0]
    engine.train()
    sums = sum_over_ranks(total).tolist()
    counts = Counts(*sum_over_ranks(torch.from_numpy(counted).to(ranks.device)).tolist())
    losses = step_losses(sums, counts, objective)
    return {f"valid_{name}": value for name, value in losses.items() if name != "loss"}


def spread_nonfinite(loss: Tensor) -> Tensor:
    """`loss`, with gradients that are not finite where it is not: an infinite loss can have finite ones.

    The gradient norm, equal on all ranks, then tells all of them that a step is to be skipped (`engine/nonfinite.py`).
    """
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


def seed_dropout(seed: int, step: int, micro_batch: int, rank: int) -> None:
    """Make dropout a function of (seed, step, micro-batch, rank): a resumed run drops what the first would have."""
    torch.manual_seed(int(hash_uint64(seed, "dropout", np.uint64(step), micro_batch, rank)) & (2**63 - 1))


def _draws_of(arrays: Batch, objective: ObjectiveConfig, config: Config, step: int) -> Draws:
    ids = (arrays.document_ids, arrays.sequence_ids, arrays.position_ids)
    return draw(*ids, objective, config.model, config.training.seed, step)


def _global_counts(micro_batches: list[Batch], ranks: Ranks) -> Counts:
    """The counts over all ranks; a collective call."""
    counts = own_counts(micro_batches)
    if ranks.world_size > 1:
        counts = sum_over_ranks(torch.from_numpy(counts).to(ranks.device)).cpu().numpy()
    return Counts(*counts.tolist())


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
    keys = draws.sample_keys
    return Draws(
        draws.token_mask.to(device, non_blocking=True),
        draws.heads.to(device, non_blocking=True),
        keys if keys is None else keys.to(device, non_blocking=True),
    )
