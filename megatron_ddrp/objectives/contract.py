"""The contract of an objective: its terms, rates and counts, its draws, the model it builds, and its sums.

    loss = Σ_terms weight · (sum over the global batch ÷ count over the global batch)

Losses, weights, the log's labels and the exported parts all follow from the class. A subclass defines its additions to
masked LM, TCD and HCD; `megatron_ddrp/config/registry.py` names it. An objective returns sums, never means: no
micro-batch, rank or stage may divide by its own count.

Every draw is a pure function of (seed, step, layer | sequence, position), so every layout, rank and resumed run draws
the same. Open reading: the paper draws TCD's tokens "uniformly in sequence order", which may mean evenly spaced tokens.
Ours are random, without replacement; n′ = 0 or m′ = 0 means all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig, Number, ObjectiveConfig, objective_class
from megatron_ddrp.config.reading import refuse
from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.data.randomness import hash_uint64
from megatron_ddrp.model.attention.logits import Attended
from megatron_ddrp.model.bert import Bert, Encoder
from megatron_ddrp.model.embeddings import token_cosine
from megatron_ddrp.model.stages import Draws, End, ModelOutput, State, window_means


@dataclass(frozen=True)
class Term:
    """One summand of the loss."""

    name: str
    """Key of its mean in metrics.jsonl, such as "lm_loss"."""
    per: str
    """Name of the count that divides its sum."""
    label: str
    """Label in the progress line."""
    weight: float
    similarity: str | None = None
    """Key of its mean when `--log-similarity` measures it in validation."""


@dataclass(frozen=True)
class Rate:
    """A ratio that is logged but not trained on."""

    name: str
    """Key in metrics.jsonl."""
    of: str
    """Name of the sum that is the dividend."""
    per: str
    """Name of the sum or count that is the divisor."""
    label: str | None = None
    """Label in the progress line; None leaves it out."""


Counter = Callable[[Batch], int]


def count_predicted(batch: Batch) -> int:
    """Return the number of tokens that masked LM predicts."""
    return int((batch.labels != IGNORED_LABEL).sum())


def count_sequences(batch: Batch) -> int:
    """Return the number of documents of at least two tokens."""
    rows, seq = batch.document_ids.shape
    numbers = batch.document_ids + np.arange(rows)[:, None] * (seq + 1)  # unique per document: a row holds at most seq
    return int((np.bincount(numbers[batch.document_ids > 0]) >= 2).sum())


def count_tokens(batch: Batch) -> int:
    """Return the number of tokens that are not padding."""
    return int((batch.document_ids > 0).sum())


class Objective:
    """Masked LM, with TCD and HCD as optional terms (eq. 19). Holds settings and no tensors."""

    tcd_weight, hcd_weight, rtd_weight = 0.0, 0.0, 50.0
    """Defaults of `--tcd-weight`, `--hcd-weight` and `--rtd-weight`."""

    options: Mapping[str, Number] = MappingProxyType({})
    """Names of the objective's own numbers in `--objective-options`, with their defaults and ranges."""

    mask_share, random_share = 0.8, 0.1
    """Shares of the selected pieces that become [MASK] and a random piece; the rest stays unchanged (BERT's shares)."""

    rates: tuple[Rate, ...] = ()
    """Ratios that are logged beside the terms."""

    counts: Mapping[str, Counter] = MappingProxyType(
        {"predicted": count_predicted, "sequences": count_sequences, "tokens": count_tokens}
    )
    """Name → function that counts in a micro-batch, in numpy. A subclass adds its own to these three."""

    generates = False
    """True if a generator replaces tokens and the model proper detects them."""

    looks_inside: bool = False
    """True if every layer of the model proper calls `look_inside`."""

    kept_maps: int = 0
    """Attention maps, fp32 `[seq, seq]` per head, that `look_inside` keeps in each layer for the backward pass."""

    exported = "masked-lm"
    """Head of an exported folder, a key of `HEADS` in `conversion/families/contract.py`."""

    left_out: tuple[str, ...] = ("head.own.",)
    """Prefixes of the names of parameters that are not exported."""

    travelling: tuple[type, ...] = ()
    """Named tuples in `Draws.own` and `State.own`, which a pipeline sends from rank to rank."""

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config
        self.numbers = config.numbers(self.options)
        """Name in `options` → given number, or its default."""

    @property
    def notes_share(self) -> float:
        """λ of Taking Notes; 0 without notes."""
        return self.config.notes_share

    @property
    def terms(self) -> tuple[Term, ...]:
        """Terms of the loss, in a fixed order."""
        tcd, hcd = self.config.tcd_weight or 0.0, self.config.hcd_weight or 0.0
        return (
            Term("lm_loss", "predicted", "mlm", 1.0),
            Term("tcd_loss", "sequences", "tcd", tcd, similarity="token_similarity"),
            Term("hcd_loss", "sequences", "hcd", hcd, similarity="head_similarity"),
        )

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Names of the sums that the last stage returns: the terms', then the dividends and divisors of the rates."""
        sums = [rate.of for rate in self.rates]
        sums += [rate.per for rate in self.rates if rate.per not in self.counts]
        return tuple(dict.fromkeys((*(term.name for term in self.terms), *sums)))

    @property
    def labels(self) -> dict[str, str]:
        """Key in metrics.jsonl → name in the progress line."""
        items: tuple[Term | Rate, ...] = (*self.terms, *self.rates)
        return {item.name: item.label for item in items if item.label}

    def build(self, config: ModelConfig, checkpoint_activations: bool = False) -> Encoder:
        """Return a freshly initialised model for this objective."""
        return Bert(config, self, checkpoint_activations)

    def generator_config(self, config: ModelConfig) -> ModelConfig | None:
        """Return the configuration of the generator that is trained beside a model of `config`, or None."""
        return None

    def modules(self, hidden_size: int) -> nn.Module | None:
        """Return modules of the last stage that are trained with the model, as `head.own`, or None."""
        return None

    def draw(self, batch: Batch, model: ModelConfig, seed: int, step: int) -> Draws:
        """Return the draws for one micro-batch (numpy) at one step, on the CPU."""
        config, documents = self.config, range(1, max(1, int(batch.document_ids.max())) + 1)
        none = Draws.none(len(batch.document_ids), model.num_layers)
        token_mask, heads = none.token_mask.expand(-1, len(documents), -1), none.heads
        if config.tcd_weight:
            where = (batch.sequence_ids, batch.position_ids, config.tcd_tokens, seed, step)
            masks = [sample_tokens(batch.document_ids == number, *where) for number in documents]
            token_mask = torch.from_numpy(np.stack(masks, axis=1))
        if config.hcd_weight:
            drawn = sample_heads(model.num_layers, model.num_attention_heads, config.hcd_heads, seed, step)
            heads = torch.from_numpy(drawn)
        return Draws(token_mask, heads, self.draw_own(batch, seed, step))

    def draw_own(self, batch: Batch, seed: int, step: int) -> Any:
        """Return a named tuple of tensors that the objective alone draws, a type in `travelling`, or None."""
        return None

    def look_inside(self, state: State, attended: Attended) -> Any:
        """Return the next state's `own`: a named tuple of sums, of a type in `travelling`, to which each layer adds.

        Each layer calls this if `looks_inside`; `state` is the layer's input. `state.inputs.draws.own` is None if the
        sums are not needed, as in fine-tuning.
        """
        return state.own

    def sums(self, end: End) -> dict[str, Tensor]:
        """Return every sum of `sum_names` over this micro-batch, in the last stage."""
        state = end.state
        token_mask = state.inputs.draws.token_mask
        squared = self.config.tcd_squared and end.head.training  # validation logs f(S), which is a mean of cosines
        tcd = state.head_cosine.new_zeros(())
        if token_mask.shape[2]:
            tcd = token_cosine(end.hidden, token_mask, squared).sum()
        return {**self.own_sums(end), "tcd_loss": tcd, "hcd_loss": state.head_cosine / len(state.heads)}

    def own_sums(self, end: End) -> dict[str, Tensor]:
        """Return the sums other than TCD's and HCD's: here −log p(label) over the predicted tokens."""
        logits = end.head.logits(end.predicted)
        return {"lm_loss": end.head.lm_sum(logits, end.state.inputs.predicted_labels)}

    @cached_property
    def causal(self) -> Objective:
        """Objective of a causal phase before this one."""
        return CausalLM(ObjectiveConfig(objective="mlm"))  # none of this one's settings acts

    def output(self, end: End) -> ModelOutput:
        """Return the sums in the order of `sum_names`, and the new notes; in a causal phase those of its objective."""
        if end.state.inputs.layout.causal and self is not self.causal:
            return self.causal.output(end)
        sums = self.sums(end)
        if set(sums) != set(self.sum_names):
            wanted = f"its terms and rates need {sorted(self.sum_names)}"
            refuse(f"--objective {self.config.objective} gives the sums {sorted(sums)}; {wanted}")
        notes = end.state.inputs.notes
        dtype = end.state.head_cosine.dtype
        return ModelOutput(
            torch.stack([sums[name].to(dtype) for name in self.sum_names]),
            None if notes is None else window_means(end.hidden, notes.windows),
        )


class CausalLM(Objective):
    """Causal language modelling, the objective of `--objective-phases clm:END`, and its accuracy.

        loss = −(1/n) Σ log p(x_{i+1} | x_1 … x_i)    over the n tokens i that have a next one in their document

    All tokens are read unmasked, the attention of token i ends with itself (`Layout.causal`), and the masked-LM head
    predicts. To begin so and to go on with masked LM is better at equal compute than masked LM alone, from random
    weights (Gisserot-Boukhlef et al., arXiv:2507.00994) and from an encoder's (arXiv:2605.12438). TCD, HCD and terms of
    other objectives rest.
    """

    terms = (Term("clm_loss", "predicted", "clm", 1.0),)  # type: ignore[assignment]
    rates = (Rate("clm_accuracy", of="clm_correct", per="predicted"),)

    @property
    def causal(self) -> Objective:  # type: ignore[override]
        return self

    def draw(self, batch: Batch, model: ModelConfig, seed: int, step: int) -> Draws:
        return Draws.none(len(batch.document_ids), model.num_layers)

    def sums(self, end: End) -> dict[str, Tensor]:
        logits, labels = end.head.logits(end.predicted), end.state.inputs.predicted_labels
        return {"clm_loss": end.head.lm_sum(logits, labels), "clm_correct": (end.head.best(logits) == labels).sum()}


def make_objective(config: ObjectiveConfig) -> Objective:
    """Return the objective that the settings name. Raise `UserError` if its class contradicts itself."""
    objective = objective_class(config.objective)(config)
    for term in objective.terms:
        if term.per not in objective.counts:
            known = ", ".join(objective.counts)
            refuse(f"--objective {config.objective}: {term.name} is per {term.per!r}; its counts are {known}")
    names = [item.name for item in (*objective.terms, *objective.rates)]
    for name in names:
        if names.count(name) > 1:
            refuse(
                f"--objective {config.objective}: {names.count(name)} of its terms and rates are named {name!r}: "
                "rename one, or give the existing term another weight"
            )
    if twice := set(objective.sum_names) & set(objective.counts):
        refuse(f"--objective {config.objective}: {', '.join(sorted(twice))} is a sum and a count: rename one")
    return objective


def count(objective: Objective, micro_batches: Iterable[Batch]) -> np.ndarray:
    """Return int64 `[counts]`: this rank's share of the objective's counts, in their order."""
    batches = list(micro_batches)
    return np.array([sum(counter(batch) for batch in batches) for counter in objective.counts.values()], np.int64)


def losses_of(totals: Mapping[str, float], objective: Objective) -> dict[str, float]:
    """Return a row of the log: the loss, its terms with a weight, and the rates.

    `totals` holds the sums of `sum_names` and the counts by name, over one or several whole global batches.
    """
    means = {term.name: totals[term.name] / max(1, totals[term.per]) for term in objective.terms}
    total = sum(term.weight * means[term.name] for term in objective.terms)
    rates = {rate.name: totals[rate.of] / max(1, totals[rate.per]) for rate in objective.rates}
    return {"loss": total, **{term.name: means[term.name] for term in objective.terms if term.weight}, **rates}


def sample_tokens(
    valid: np.ndarray, sequence_ids: np.ndarray, position_ids: np.ndarray, count: int, seed: int, step: int
) -> np.ndarray:
    """Return int64 `[batch, seq]`: 1 at `count` valid tokens of each row, drawn without replacement.

    A row with fewer valid tokens has all of them, as every row has if `count` is 0.
    """
    if count == 0:
        return valid.astype(np.int64)
    keys = hash_uint64(seed, "tcd", np.uint64(step), sequence_ids, position_ids)  # [batch, seq]
    keys[~valid] = np.iinfo(np.uint64).max
    rank = keys.argsort(axis=-1, kind="stable").argsort(axis=-1, kind="stable")  # place of each token in random order
    return ((rank < count) & valid).astype(np.int64)


def sample_heads(num_layers: int, num_heads: int, count: int, seed: int, step: int) -> np.ndarray:
    """Return int64 `[layers, count]`: a separate draw of heads for each layer, ascending; all heads if `count` is 0."""
    count = count or num_heads
    layer, head = np.meshgrid(np.arange(num_layers), np.arange(num_heads), indexing="ij")
    keys = hash_uint64(seed, "hcd", np.uint64(step), layer, head)  # [layers, heads]
    return np.sort(keys.argsort(axis=-1, kind="stable")[:, :count], axis=-1).astype(np.int64)


def sample_keys(sequence_ids: np.ndarray, position_ids: np.ndarray, seed: int, step: int) -> Tensor:
    """Return int64 `[batch, seq]` on the CPU: the key of each token's Gumbel noise."""
    keys = hash_uint64(seed, "replace", np.uint64(step), sequence_ids, position_ids)
    return torch.from_numpy((keys >> np.uint64(32)).astype(np.uint32).view(np.int32).astype(np.int64))
