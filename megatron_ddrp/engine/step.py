"""One optimizer step, and one validation: sums over the global batch ÷ global counts, in every layout.

Each micro-batch gives sums. The counts of the whole global batch are known before the first of them, so every
micro-batch's loss is already its exact share of the step's loss; a mean of micro-batch means never arises.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ddrp.config import Config
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.rare_words import Occurrences
from megatron_ddrp.data.randomness import hash_uint64
from megatron_ddrp.engine.layout import WeightedLoss, pipeline_part
from megatron_ddrp.engine.schedule import learning_rate
from megatron_ddrp.model.stages import Inputs, layout_of
from megatron_ddrp.objectives.contract import Objective, count, losses_of, make_objective
from megatron_ddrp.objectives.notes import NoteDictionary
from megatron_ddrp.parallel.process_group import Ranks, gather_rows, sum_over_ranks

VALIDATION_STEP = 0
"""The step whose draws every validation uses."""


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step. Its sums are still on the device, so that reading the losses is the only wait."""

    loss_sums: Tensor
    """fp32: this rank's sums, in the order of the objective's `sum_names`; zeros where another rank reports them."""
    counts: dict[str, int]
    """The global batch's counts, by name; "tokens" are those that are not padding."""
    lr: float
    grad_norm: float

    def losses(self, config: Config) -> dict[str, float]:
        """Return the step's own losses over all ranks; a collective call."""
        objective = make_objective(config.objective)
        sums = sum_over_ranks(self.loss_sums.double()).tolist()
        return losses_of(sums, self.counts, objective)


def train_step(
    engine: Any,
    micro_batches: list[Batch],
    config: Config,
    ranks: Ranks,
    step: int,
    notes: NoteDictionary | None = None,
) -> StepResult:
    """Run forward, backward and update over this rank's `micro_batches` of step 1, 2, …, then store the notes taken."""
    objective = make_objective(config.objective)
    counts = _global_counts(objective, micro_batches, ranks)
    share = ranks.data_size * len(micro_batches)  # DeepSpeed averages over both; our sums want neither
    factors = [share * term.weight / max(1, counts[term.per]) for term in objective.terms]
    weights = torch.zeros(len(objective.sum_names), dtype=torch.float32, device=ranks.device)
    weights[: len(factors)] = torch.tensor(factors)
    lr = learning_rate(step, config.training.train_iters, config.optimizer)
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    inputs = [MicroBatch.of(arrays, objective, config, step, notes) for arrays in micro_batches]
    loss = WeightedLoss(weights)
    run = _train_pipeline if ranks.pipeline_size > 1 else _train_whole
    run(engine, inputs, loss, ranks, lambda number: seed_dropout(config.training.seed, step, number, ranks))
    clipping = engine.own_clipping
    grad_norm = clipping.norm if clipping else float(engine.get_global_grad_norm())
    if notes is not None and math.isfinite(grad_norm):
        nothing = torch.zeros(0, config.model.hidden_size, device=ranks.device)  # where the losses do not arise
        take_notes(notes, [x.occurrences for x in inputs if x.occurrences is not None], loss.notes or [nothing], ranks)
    return StepResult(loss.sums * ranks.reports_losses, counts, lr, grad_norm)


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences with all that a model needs for them, on the CPU."""

    inputs: Inputs
    occurrences: Occurrences | None
    """The words whose notes will be taken."""

    @classmethod
    def of(
        cls, arrays: Batch, objective: Objective, config: Config, step: int, notes: NoteDictionary | None
    ) -> MicroBatch:
        """Draw for the objective, and read the notes."""
        draws = objective.draw(arrays, config.model, config.training.seed, step)
        read, occurrences = notes.inputs(arrays) if notes else (None, None)
        return cls(Inputs(arrays.map(torch.from_numpy), draws, read, layout_of(arrays)), occurrences)

    def to(self, device: torch.device) -> Inputs:
        """Return the inputs on a device."""
        return _moved(self.inputs, device)


def _moved(value: Any, device: torch.device) -> Any:
    """Return nested named tuples with their tensors on a device; None and numbers stay."""
    if isinstance(value, Tensor):
        return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)
    return type(value)(*(_moved(item, device) for item in value)) if isinstance(value, tuple) else value


def _train_whole(
    engine: Any, micro_batches: list[MicroBatch], loss: WeightedLoss, ranks: Ranks, seed: Callable[[int], None]
) -> None:
    """Train on micro-batches that pass through all layers here; `seed(number)` sets the seed of each one's dropout."""
    for number, micro_batch in enumerate(micro_batches):
        seed(number)
        engine.backward(loss(engine(*micro_batch.to(ranks.device))))
        engine.step()


def _train_pipeline(
    engine: Any, micro_batches: list[MicroBatch], loss: WeightedLoss, ranks: Ranks, seed: Callable[[int], None]
) -> None:
    """Train where other ranks hold other layers; `loss` stays as it is where the losses do not arise."""
    engine.module.loss_fn = loss
    pipeline_part(engine).begin_step(seed)
    engine.train_batch(_for_pipeline(engine, micro_batches, ranks))


def _for_pipeline(engine: Any, micro_batches: Iterable[MicroBatch], ranks: Ranks) -> Iterator[tuple[Any, Tensor]]:
    """Yield (what the first part receives, labels). The labels travel inside, so that nothing stands in their place."""
    courier, nothing = pipeline_part(engine).courier, torch.zeros((), device=ranks.device)
    for micro_batch in micro_batches:
        yield () if ranks.pipeline_rank else courier.send(micro_batch.to(ranks.device)), nothing


def take_notes(notes: NoteDictionary, occurrences: list[Occurrences], vectors: list[Tensor], ranks: Ranks) -> None:
    """Put the notes of all ranks' micro-batches into everyone's dictionary; a collective call."""
    names = np.concatenate([np.stack([o.words, o.sequence_ids, o.position_ids], axis=1) for o in occurrences])
    names = gather_rows(torch.from_numpy(names).to(ranks.device), ranks).cpu().numpy()  # [n, 3]
    notes.update(names, gather_rows(torch.cat(vectors).float(), ranks).cpu())


def evaluate(
    engine: Any, steps: Iterable[list[Batch]], config: Config, ranks: Ranks, notes: NoteDictionary | None = None
) -> dict[str, float]:
    """Return losses over some global batches of held-out text, dropout off, notes read but not taken.

    `valid_lm_loss` in nats per predicted token, the generator's under ELECTRA, and the objective's other terms. Under
    `--log-similarity` also `token_similarity`, f(S), and `head_similarity`, f(H), of the masked text (eq. 15, 16).
    """
    settings = dataclasses.replace(config.objective, tcd_weight=0.0, hcd_weight=0.0)
    if config.logging.log_similarity:  # TCD and HCD over all tokens and heads are f(S) and f(H)
        settings = dataclasses.replace(settings, tcd_weight=1.0, hcd_weight=1.0, tcd_tokens=0, hcd_heads=0)
    objective = make_objective(settings)
    total = torch.zeros(len(objective.sum_names), dtype=torch.float64, device=ranks.device)
    counted = count(objective, ())
    run = _evaluate_pipeline if ranks.pipeline_size > 1 else _evaluate_whole
    engine.eval()
    with torch.no_grad():
        for micro_batches in steps:
            counted += count(objective, micro_batches)
            inputs = [MicroBatch.of(b, objective, config, VALIDATION_STEP, notes) for b in micro_batches]
            loss = WeightedLoss(torch.zeros_like(total))
            run(engine, inputs, loss, ranks)
            total += loss.sums
    engine.train()
    sums = sum_over_ranks(total * ranks.reports_losses).tolist()
    all_counted = sum_over_ranks(torch.from_numpy(counted * ranks.reports_losses).to(ranks.device)).tolist()
    losses = losses_of(sums, dict(zip(objective.counts, all_counted, strict=True)), objective)
    names = {term.name: term.similarity for term in objective.terms if term.similarity}
    return {names.get(name, f"valid_{name}"): value for name, value in losses.items() if name != "loss"}


def _evaluate_whole(engine: Any, micro_batches: list[MicroBatch], loss: WeightedLoss, ranks: Ranks) -> None:
    for micro_batch in micro_batches:
        loss(engine(*micro_batch.to(ranks.device)))


def _evaluate_pipeline(engine: Any, micro_batches: list[MicroBatch], loss: WeightedLoss, ranks: Ranks) -> None:
    engine.module.loss_fn = loss
    given = _for_pipeline(engine, micro_batches, ranks)
    engine.eval_batch(given, reduce_output=None, bcast_loss=False, num_micro_batches=len(micro_batches))


def seed_dropout(seed: int, step: int, micro_batch: int, ranks: Ranks) -> None:
    """Make dropout a function of (seed, step, micro-batch, place in the grid): a resumed run drops what the first
    would have. Alike on tensor-parallel ranks, whose replicated tensors must stay equal."""
    rank = ranks.pipeline_rank * ranks.data_size + ranks.data_rank
    torch.manual_seed(int(hash_uint64(seed, "dropout", np.uint64(step), micro_batch, rank)) & (2**63 - 1))


def _global_counts(objective: Objective, micro_batches: list[Batch], ranks: Ranks) -> dict[str, int]:
    """Return the counts over all ranks, by name; a collective call."""
    counts = count(objective, micro_batches)
    if ranks.data_size > 1:
        counts = sum_over_ranks(torch.from_numpy(counts).to(ranks.device), ranks.data_group).cpu().numpy()
    return dict(zip(objective.counts, counts.tolist(), strict=True))
