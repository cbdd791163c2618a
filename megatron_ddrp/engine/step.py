"""One optimizer step, and one validation: sums over the global batch ÷ global counts, in every layout.

Each micro-batch gives sums. The counts of the whole global batch are known before the first of them, so every
micro-batch's loss is already its exact share of the step's loss; a mean of micro-batch means never arises.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ddrp.config import Config, ObjectiveConfig
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.rare_words import Occurrences
from megatron_ddrp.data.randomness import hash_uint64
from megatron_ddrp.engine.layout import WeightedLoss, own_part
from megatron_ddrp.engine.losses import Counts, num_sums, own_counts, step_losses
from megatron_ddrp.engine.schedule import learning_rate
from megatron_ddrp.model.bert import first_tensors
from megatron_ddrp.model.notes import NoteInputs
from megatron_ddrp.model.stages import Draws
from megatron_ddrp.objectives.draws import draw
from megatron_ddrp.objectives.notes import NoteDictionary
from megatron_ddrp.parallel.process_group import Ranks, gather_rows, sum_over_ranks

VALIDATION_STEP = 0
"""The step whose draws every validation uses."""

SIMILARITIES = {"tcd_loss": "token_similarity", "hcd_loss": "head_similarity"}
"""Losses that are not trained on but looked at, under the names of what they then are."""


@dataclass(frozen=True)
class StepResult:
    """What a step knows of itself; the losses are global sums still on the device, so reading them is the only wait."""

    loss_sums: Tensor
    """fp32 `[3]`, this rank's sums of LM, TCD and HCD; `[8]` under ELECTRA; zeros where another rank
    reports the same."""
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
    share = ranks.data_size * len(micro_batches)  # DeepSpeed averages over both; our sums want neither
    factors = zip(config.objective.weights, counts.of_terms(config.objective), strict=True)
    weights = torch.zeros(num_sums(config.objective), dtype=torch.float32, device=ranks.device)
    weights[: len(config.objective.weights)] = torch.tensor([share * weight / count for weight, count in factors])
    lr = learning_rate(step, config.training.train_iters, config.optimizer)
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    inputs = [MicroBatch.of(arrays, config.objective, config, step, notes) for arrays in micro_batches]
    run = _train_pipeline if ranks.pipeline_size > 1 else _train_whole
    loss_sums, new_notes = run(engine, inputs, weights, config, ranks, step)
    clipping = engine.own_clipping
    grad_norm = clipping.norm if clipping else float(engine.get_global_grad_norm())
    if notes is not None and math.isfinite(grad_norm):
        take_notes(notes, [x.occurrences for x in inputs if x.occurrences is not None], new_notes, ranks)
    return StepResult(loss_sums * ranks.reports_losses, counts, lr, grad_norm)


@dataclass(frozen=True)
class MicroBatch:
    """All that a model is given for some sequences."""

    arrays: Batch
    draws: Draws
    notes: NoteInputs | None
    occurrences: Occurrences | None
    """Whose the notes will be that are taken."""

    @classmethod
    def of(
        cls, arrays: Batch, objective: ObjectiveConfig, config: Config, step: int, notes: NoteDictionary | None
    ) -> MicroBatch:
        """Draw for the objective, and read the notes."""
        ids = (arrays.document_ids, arrays.sequence_ids, arrays.position_ids)
        draws = draw(*ids, objective, config.model, config.training.seed, step)
        read, occurrences = notes.inputs(arrays) if notes else (None, None)
        return cls(arrays, draws, read, occurrences)

    def to(self, device: torch.device) -> tuple[Any, ...]:
        """The model's arguments, there."""
        arguments = (_to_device(self.arrays, device), _draws_to_device(self.draws, device))
        return arguments if self.notes is None else (*arguments, self.notes.to(device))


def _train_whole(
    engine: Any, micro_batches: list[MicroBatch], weights: Tensor, config: Config, ranks: Ranks, step: int
) -> tuple[Tensor, list[Tensor]]:
    """Train on micro-batches that pass through all layers here → their loss sums, and the notes taken."""
    loss = WeightedLoss(weights)
    for number, micro_batch in enumerate(micro_batches):
        seed_dropout(config.training.seed, step, number, ranks)
        engine.backward(loss(engine(*micro_batch.to(ranks.device))))
        engine.step()
    return loss.sums, loss.notes


def _train_pipeline(
    engine: Any, micro_batches: list[MicroBatch], weights: Tensor, config: Config, ranks: Ranks, step: int
) -> tuple[Tensor, list[Tensor]]:
    """The same where other ranks hold other layers: zeros, and no notes, where the losses do not arise."""
    engine.module.loss_fn = loss = WeightedLoss(weights)
    own_part(engine).begin_step(lambda number: seed_dropout(config.training.seed, step, number, ranks))
    engine.train_batch(_for_pipeline(micro_batches, ranks))
    nothing = torch.zeros(0, config.model.hidden_size, device=ranks.device)
    return loss.sums, loss.notes or [nothing]


def _for_pipeline(micro_batches: Iterable[MicroBatch], ranks: Ranks) -> Iterator[tuple[Any, Tensor]]:
    """(what the first part takes, labels): the labels travel with the first part's tensors, so nothing stands here."""
    nothing = torch.zeros((), device=ranks.device)
    for micro_batch in micro_batches:
        yield () if ranks.pipeline_rank else first_tensors(*micro_batch.to(ranks.device)), nothing


def take_notes(notes: NoteDictionary, occurrences: list[Occurrences], vectors: list[Tensor], ranks: Ranks) -> None:
    """Put the notes of all ranks' micro-batches into everyone's dictionary; a collective call."""
    names = np.concatenate([np.stack([o.words, o.sequence_ids, o.position_ids], axis=1) for o in occurrences])
    names = gather_rows(torch.from_numpy(names).to(ranks.device), ranks).cpu().numpy()  # [n, 3]
    notes.update(names, gather_rows(torch.cat(vectors).float(), ranks).cpu())


def evaluate(
    engine: Any, steps: Iterable[list[Batch]], config: Config, ranks: Ranks, notes: NoteDictionary | None = None
) -> dict[str, float]:
    """Losses over some global batches of held-out text, dropout off, notes read but not taken.

    `valid_lm_loss` in nats a predicted token, the generator's under ELECTRA, with its detector's beside it. Under
    `--log-similarity` also `token_similarity`, f(S), and `head_similarity`, f(H), of the masked text (eq. 15, 16).
    """
    objective = dataclasses.replace(config.objective, tcd_weight=0.0, hcd_weight=0.0)
    if config.logging.log_similarity:  # TCD and HCD over all tokens and heads are f(S) and f(H)
        objective = dataclasses.replace(objective, tcd_weight=1.0, hcd_weight=1.0, tcd_tokens=0, hcd_heads=0)
    total = torch.zeros(num_sums(objective), dtype=torch.float64, device=ranks.device)
    counted = np.zeros(len(Counts._fields), np.int64)
    run = _evaluate_pipeline if ranks.pipeline_size > 1 else _evaluate_whole
    engine.eval()
    with torch.no_grad():
        for micro_batches in steps:
            counted += own_counts(micro_batches)
            inputs = [MicroBatch.of(b, objective, config, VALIDATION_STEP, notes) for b in micro_batches]
            total += run(engine, inputs, WeightedLoss(torch.zeros_like(total)), ranks)
    engine.train()
    sums = sum_over_ranks(total * ranks.reports_losses).tolist()
    counted *= ranks.reports_losses
    counts = Counts(*sum_over_ranks(torch.from_numpy(counted).to(ranks.device)).tolist())
    losses = step_losses(sums, counts, objective)
    return {SIMILARITIES.get(name, f"valid_{name}"): value for name, value in losses.items() if name != "loss"}


def _evaluate_whole(engine: Any, micro_batches: list[MicroBatch], loss: WeightedLoss, ranks: Ranks) -> Tensor:
    """Loss sums of some micro-batches."""
    for micro_batch in micro_batches:
        loss(engine(*micro_batch.to(ranks.device)))
    return loss.sums


def _evaluate_pipeline(engine: Any, micro_batches: list[MicroBatch], loss: WeightedLoss, ranks: Ranks) -> Tensor:
    """The same where other ranks hold other layers: zeros where the losses do not arise."""
    engine.module.loss_fn = loss
    given = _for_pipeline(micro_batches, ranks)
    engine.eval_batch(given, reduce_output=None, bcast_loss=False, num_micro_batches=len(micro_batches))
    return loss.sums


def seed_dropout(seed: int, step: int, micro_batch: int, ranks: Ranks) -> None:
    """Make dropout a function of (seed, step, micro-batch, place in the grid): a resumed run drops what the first
    would have. Alike on tensor-parallel ranks, whose replicated tensors must stay equal."""
    rank = ranks.pipeline_rank * ranks.data_size + ranks.data_rank
    torch.manual_seed(int(hash_uint64(seed, "dropout", np.uint64(step), micro_batch, rank)) & (2**63 - 1))


def _global_counts(micro_batches: list[Batch], ranks: Ranks) -> Counts:
    """The counts over all ranks; a collective call."""
    counts = own_counts(micro_batches)
    if ranks.data_size > 1:
        counts = sum_over_ranks(torch.from_numpy(counts).to(ranks.device), ranks.data_group).cpu().numpy()
    return Counts(*counts.tolist())


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
