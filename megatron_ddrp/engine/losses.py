"""From sums to what the log says: global counts, means, and the loss they make.

A loss is a sum over the global batch ÷ a count over the global batch, in every layout; so are ELECTRA's rates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_ddrp.config import ObjectiveConfig
from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.model.stages import (
    GENERATOR_CORRECT,
    HCD,
    LM,
    NUM_ELECTRA_SUMS,
    NUM_LOSSES,
    REPLACED,
    REPLACED_FOUND,
    RTD,
    RTD_CORRECT,
    TCD,
)


class Counts(NamedTuple):
    """Of the whole global batch: what its sums are divided by."""

    predicted: int
    """Tokens that masked LM predicts."""
    sequences: int
    """Sequences with at least two valid tokens."""
    tokens: int
    """Tokens that are not padding."""

    def of_terms(self, objective: ObjectiveConfig) -> tuple[int, ...]:
        """The divisor of each weighted term, in the order of `objective.weights`; never 0."""
        terms = (self.predicted, self.sequences, self.sequences, self.tokens)
        return tuple(max(1, count) for count in terms[: len(objective.weights)])


def num_sums(objective: ObjectiveConfig) -> int:
    """How many sums a model gives under an objective."""
    return NUM_ELECTRA_SUMS if objective.generates else NUM_LOSSES


def step_losses(sums: list[float], counts: Counts, objective: ObjectiveConfig) -> dict[str, float]:
    """The rows of the log from global sums: the loss, its terms, and ELECTRA's rates."""
    names = {"lm_loss": LM, "tcd_loss": TCD, "hcd_loss": HCD, "rtd_loss": RTD}
    terms = list(zip(names, objective.weights, counts.of_terms(objective), strict=False))
    means = {name: sums[names[name]] / count for name, _, count in terms}
    total = sum(weight * means[name] for name, weight, _ in terms)
    losses = {"loss": total, **{name: means[name] for name, weight, _ in terms if weight}}
    return losses | electra_rates(sums, counts) if objective.generates else losses


def electra_rates(sums: list[float], counts: Counts) -> dict[str, float]:
    """How well the generator fills in, and the discriminator tells; 1 − `replaced_share` is the majority's accuracy."""
    predicted, tokens = max(1, counts.predicted), max(1, counts.tokens)
    return {
        "generator_accuracy": sums[GENERATOR_CORRECT] / predicted,
        "rtd_accuracy": sums[RTD_CORRECT] / tokens,
        "rtd_recall": sums[REPLACED_FOUND] / max(1, sums[REPLACED]),
        "replaced_share": sums[REPLACED] / tokens,
    }


def own_counts(micro_batches: list[Batch]) -> np.ndarray:
    """int64 `[3]`: this rank's part of `Counts`."""
    return np.array(
        [
            sum(int((b.labels != IGNORED_LABEL).sum()) for b in micro_batches),
            sum(count_sequences(b.document_ids) for b in micro_batches),
            sum(int((b.document_ids > 0).sum()) for b in micro_batches),
        ],
        np.int64,
    )


def count_sequences(document_ids: np.ndarray) -> int:
    """Documents of all rows `[batch, seq]` with at least two tokens."""
    batch, seq = document_ids.shape
    numbers = document_ids + np.arange(batch)[:, None] * (seq + 1)  # one a document: a row holds at most seq of them
    return int((np.bincount(numbers[document_ids > 0]) >= 2).sum())
