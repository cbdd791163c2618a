"""Training steps and validations, and the micro-batches that the loader's thread prepares for them.

In every layout a loss is a sum over the global batch ÷ a count of the global batch. Each micro-batch returns sums. The
counts of the whole global batch are known before its first micro-batch, so each micro-batch's loss is its exact share
of the step's loss. No mean of micro-batch means is ever taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_ddrp.config import Config
from megatron_ddrp.config.training import HEAD_LR
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.loader import VALIDATION_SEED
from megatron_ddrp.data.batches.word_counts import Occurrences
from megatron_ddrp.data.randomness import hash_uint64
from megatron_ddrp.engine.layout import NEVER, Setup, WeightedLoss, pipeline_part
from megatron_ddrp.engine.optimizer_state import forget_moments
from megatron_ddrp.engine.optimizers import OF_TABLES, learning_rate
from megatron_ddrp.model.positions.absolute import set_theta
from megatron_ddrp.model.stages import Inputs, layout_of
from megatron_ddrp.objectives.contract import Objective, count, losses_of
from megatron_ddrp.objectives.electra import NoteDictionary
from megatron_ddrp.parallel.pipeline import seed_draws
from megatron_ddrp.parallel.process_group import Ranks, gather_rows, row_counts, sum_over_ranks

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
    def of(cls, arrays: Batch, setup: Setup, step: int) -> MicroBatch:
        """Return the micro-batch with the draws for one step; its memory is pinned if the run is on GPUs."""
        config = setup.config
        draws = setup.objective.draw(arrays, config.model, config.training.seed, step)
        if config.data.packing and setup.uses_graphs:
            draws = draws.with_documents(-(-draws.num_documents // DOCUMENT_MULTIPLE) * DOCUMENT_MULTIPLE)
        inputs = Inputs(arrays.map(torch.from_numpy), draws, None, layout_of(arrays, setup.causal))
        if setup.ranks.device.type != "cpu":
            inputs = tree_map_only(Tensor, Tensor.pin_memory, inputs)
        return cls(arrays, inputs, count(setup.objective, [arrays]))

    def with_notes(self, notes: NoteDictionary | None) -> tuple[Inputs, Occurrences | None]:
        """Return the inputs with current notes, and the rare words' occurrences that will make new notes."""
        if notes is None:
            return self.inputs, None
        read, occurrences = notes.inputs(self.arrays)
        return self.inputs._replace(notes=read), occurrences


def training_inputs(micro_batches: Iterable[Batch], setup: Setup, step: int) -> list[MicroBatch]:
    """Return the micro-batches of step 1, 2, … with all model inputs. Any thread can call it: it uses no device."""
    setup = setup.at(step)
    return [MicroBatch.of(arrays, setup, step) for arrays in micro_batches]


def move_tensors(value: Any, device: torch.device) -> Any:
    """Return a tensor, or nested named tuples with their tensors, on a device, without waiting for a GPU."""

    def move(tensor: Tensor) -> Tensor:
        pins = device.type != "cpu" and tensor.device.type == "cpu"
        return tensor.pin_memory().to(device, non_blocking=True) if pins else tensor.to(device)

    return tree_map_only(Tensor, move, value)


class HostCopy:
    """A copy of a tensor in host memory. Creating it does not wait for a GPU; reading it waits for the copy only."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.detach().to("cpu", non_blocking=True)  # pinned memory if it comes from a GPU
        self._arrived = None
        if tensor.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> np.ndarray:
        """Return the values, as soon as they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.numpy()


VALIDATION_STEP = 0
"""Step number whose draws every validation uses, with `VALIDATION_SEED`."""


class StepResult:
    """Result of a step, copied to the host in the background. Reading anything but `lr` waits for the step's end."""

    def __init__(self, lr: float, sums: Tensor, grad_norm: Tensor, counts: Tensor, objective: Objective) -> None:
        """Keep the global batch's `sums` fp64 `[sums]` and `counts` int64 `[counts]`, in the objective's order."""
        self.lr = lr
        self._objective = objective
        self._numbers = HostCopy(torch.cat([grad_norm.double().view(1), counts.double(), sums]))

    @property
    def grad_norm(self) -> float:
        """Gradient norm over all ranks, before clipping."""
        return self._numbers.read().tolist()[0]

    @property
    def counts(self) -> dict[str, int]:
        """Counts of the global batch by name; "tokens" excludes padding."""
        names = self._objective.counts
        return dict(zip(names, map(int, self._numbers.read().tolist()[1 : 1 + len(names)]), strict=True))

    @property
    def totals(self) -> dict[str, float]:
        """Sums and counts of the global batch by name."""
        sums = self._numbers.read().tolist()[1 + len(self._objective.counts) :]
        return {**dict(zip(self._objective.sum_names, sums, strict=True)), **self.counts}

    @property
    def losses(self) -> dict[str, float]:
        """The losses and rates of this step alone, over all ranks."""
        return losses_of(self.totals, self._objective)


def train_step(
    engine: Any, micro_batches: list[MicroBatch], setup: Setup, step: int, notes: NoteDictionary | None = None
) -> StepResult:
    """Run forward, backward and update over this rank's `micro_batches` of step 1, 2, …, then store the new notes.

    Without notes the function returns before the device has finished.
    """
    setup = setup.at(step)
    config, ranks, objective = setup.config, setup.ranks, setup.objective
    counts = _global_counts(micro_batches, ranks)
    loss = WeightedLoss(_loss_weights(objective, counts, ranks.data_size * len(micro_batches)))
    lr, rests = rate_of_step(step, config), step <= (config.training.new_head_iters or 0)
    for group in engine.optimizer.param_groups:
        decay = group.setdefault("given_weight_decay", group["weight_decay"])
        group["lr"] = lr
        group["weight_decay"] = 0.0 if rests or (setup.causal and group.get(OF_TABLES)) else decay
    if any(phase.rope_theta for phase in config.phases):
        set_theta(engine.module, config.rope_theta_at(step - 1))
    inputs, found = zip(*(micro_batch.with_notes(notes) for micro_batch in micro_batches), strict=True)
    taking = NoteTaking(notes, found, ranks) if notes is not None else None
    run = _train_pipeline if ranks.pipeline_size > 1 else _train_whole
    run(engine, inputs, loss, ranks, lambda number: seed_dropout(config.training.seed, step, number, ranks))
    sums = (loss.sums * ranks.reports_losses).double()
    all_sums = sum_over_ranks(sums) if ranks.world_size > 1 else sums
    norm = engine.own_clipping.norm if engine.own_clipping else engine.get_global_grad_norm()
    result = StepResult(lr, all_sums, move_tensors(torch.as_tensor(norm), ranks.device), counts, objective)
    if taking is not None:
        nothing = torch.zeros(0, config.model.hidden_size, device=ranks.device)  # for ranks that compute no losses
        taking.take(torch.cat(loss.notes or [nothing]), result)
    return result


def rate_of_step(step: int, config: Config) -> float:
    """Return the learning rate of step 1, 2, … of a run; its schedule begins after `--new-head-iters`."""
    of_head = config.training.new_head_iters or 0
    if step <= of_head:
        return max(HEAD_LR, config.optimizer.lr)
    return learning_rate(step - of_head, *config.schedule)


def rest_or_learn(engine: Any, step: int, head_steps: int) -> None:
    """Prepare step 1, 2, … of a run whose encoder rests in the first `head_steps`: its weights and moments stay.

    Its gradients are 0 (`engine.resting` are the hooks), and `train_step` lets nothing decay. Groups of parameters with
    a rate of 0 would need equal groups on all stages of a pipeline. Then the optimizer starts anew, because its count
    of steps is one for all weights: Adam's first updates would be up to 3 times too large.
    """
    if step == head_steps + 1:
        forget_moments(engine)
    while step > head_steps and engine.resting:
        engine.resting.pop().remove()


def _train_whole(
    engine: Any, micro_batches: Sequence[Inputs], loss: WeightedLoss, ranks: Ranks, seed: Callable[[int], None]
) -> None:
    """Train on micro-batches through all layers; `seed(number)` seeds the dropout of each micro-batch."""
    for number, micro_batch in enumerate(micro_batches):
        seed(number)
        engine.backward(loss(engine(*move_tensors(micro_batch, ranks.device))))
        engine.step()


def _train_pipeline(
    engine: Any, micro_batches: Sequence[Inputs], loss: WeightedLoss, ranks: Ranks, seed: Callable[[int], None]
) -> None:
    """Train one part of a pipeline; `loss` stays unchanged on ranks that compute no losses."""
    engine.module.loss_fn = loss
    pipeline_part(engine).begin_step(seed)
    engine.train_batch(_for_pipeline(engine, micro_batches, ranks))
    if engine.steps_per_print() == NEVER:
        engine.timers("train_batch").reset()  # it keeps two events of every step until DeepSpeed prints them


def _for_pipeline(engine: Any, micro_batches: Iterable[Inputs], ranks: Ranks) -> Iterator[tuple[Any, Tensor]]:
    """Yield (input of the first part, labels). Our labels travel in the input, so the second item is a placeholder."""
    courier, nothing = pipeline_part(engine).courier, torch.zeros((), device=ranks.device)
    for micro_batch in micro_batches:
        yield () if ranks.pipeline_rank else courier.send(move_tensors(micro_batch, ranks.device)), nothing


class NoteTaking:
    """Exchange of one step's new notes, from all ranks' micro-batches to every rank's dictionary."""

    def __init__(self, notes: NoteDictionary, found: Iterable[Occurrences], ranks: Ranks) -> None:
        """Keep the occurrences in this rank's micro-batches, in their order; a collective call."""
        self.notes, self.ranks = notes, ranks
        self.names = np.concatenate([np.stack([o.words, o.sequence_ids, o.position_ids], axis=1) for o in found])
        self._row_counts = HostCopy(row_counts(len(self.names), ranks))

    def take(self, vectors: Tensor, result: StepResult) -> None:
        """Store the notes `[n, hidden]` of all ranks, unless the step was skipped; a collective call."""
        counts: list[int] = self._row_counts.read().tolist()
        rows = (move_tensors(torch.from_numpy(self.names), self.ranks.device), vectors.float())
        names, notes = (HostCopy(gather_rows(own, counts, self.ranks)) for own in rows)
        if math.isfinite(result.grad_norm):
            self.notes.update(names.read(), notes.read())


def evaluate(
    engine: Any, steps: Iterable[list[Batch]], setup: Setup, notes: NoteDictionary | None = None, split: str = "valid"
) -> dict[str, float]:
    """Return losses over some global batches of held-out text, without dropout; notes are read but not made.

    `valid_lm_loss` is in nats per predicted token, the generator's under ELECTRA. The objective's other terms follow.
    With `--log-similarity`, so do `token_similarity`, f(S), and `head_similarity`, f(H), of the masked text (eq. 15,
    16). With another `split`, its name stands before the names of losses and of similarities.
    """
    measured: dict[str, Any] = {"tcd_weight": 0.0, "hcd_weight": 0.0}
    if setup.config.logging.log_similarity:  # over all tokens and heads, TCD and HCD are f(S) and f(H)
        measured = {"tcd_weight": 1.0, "hcd_weight": 1.0, "tcd_tokens": 0, "hcd_heads": 0}
    setup = setup.replace(objective=measured, training={"seed": VALIDATION_SEED})
    ranks, objective = setup.ranks, setup.objective
    total = torch.zeros(len(objective.sum_names), dtype=torch.float64, device=ranks.device)
    counted = count(objective, ())
    engine.eval()
    with torch.no_grad():
        for micro_batches in steps:
            prepared = [MicroBatch.of(arrays, setup, VALIDATION_STEP) for arrays in micro_batches]
            counted += sum(micro_batch.counts for micro_batch in prepared)
            inputs = [micro_batch.with_notes(notes)[0] for micro_batch in prepared]
            loss = WeightedLoss(torch.zeros_like(total))
            if ranks.pipeline_size > 1:
                engine.module.loss_fn, given = loss, _for_pipeline(engine, inputs, ranks)
                engine.eval_batch(given, reduce_output=None, bcast_loss=False, num_micro_batches=len(inputs))
            else:
                for one in inputs:
                    loss(engine(*move_tensors(one, ranks.device)))
            total += loss.sums
    engine.train()
    sums, all_counted = total * ranks.reports_losses, torch.from_numpy(counted * ranks.reports_losses).to(ranks.device)
    if ranks.world_size > 1:
        sum_over_ranks(sums), sum_over_ranks(all_counted)
    names = (*objective.sum_names, *objective.counts)
    losses = losses_of(dict(zip(names, (*sums.tolist(), *all_counted.tolist()), strict=True)), objective)
    prefix = "" if split == "valid" else f"{split}_"
    similarities = {term.name: prefix + term.similarity for term in objective.terms if term.similarity}
    return {similarities.get(name, f"{split}_{name}"): value for name, value in losses.items() if name != "loss"}


def seed_dropout(seed: int, step: int, micro_batch: int, ranks: Ranks) -> None:
    """Seed dropout from (seed, step, micro-batch, place in the grid), so a resumed run repeats the original draws.

    Tensor-parallel ranks get the same seed, because their replicated tensors must stay equal.
    """
    rank = ranks.pipeline_rank * ranks.data_size + ranks.data_rank
    drawn = int(hash_uint64(seed, "dropout", np.uint64(step), micro_batch, rank)) & (2**63 - 1)
    seed_draws(drawn, ranks.device)


def _global_counts(micro_batches: list[MicroBatch], ranks: Ranks) -> Tensor:
    """Return the counts over all ranks, int64 `[counts]` on the device; a collective call."""
    counts = np.sum([micro_batch.counts for micro_batch in micro_batches], axis=0)
    on_device = move_tensors(torch.from_numpy(counts), ranks.device)
    return sum_over_ranks(on_device, ranks.data_group) if ranks.data_size > 1 else on_device


def _loss_weights(objective: Objective, counts: Tensor, share: int) -> Tensor:
    """Return the weight of each of the objective's sums in the loss, fp32, from the counts of the global batch.

    `share` cancels DeepSpeed's average over the micro-batches of all ranks, because sums must not be averaged.
    """
    names = list(objective.counts)
    factors = [share * term.weight / counts[names.index(term.per)].clamp_min(1).double() for term in objective.terms]
    return F.pad(torch.stack(factors).float(), (0, len(objective.sum_names) - len(factors)))
