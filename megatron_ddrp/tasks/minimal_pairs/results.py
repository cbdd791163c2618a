"""Accuracies, their standard errors and paired differences, from the scores of sentences.

A pair is right where the good sentence scores higher by more than `TIE`. A tie is never right, as BLiMP says it; a
program that takes the first of two equal scores, with the good sentence first, counts it (`ties="first"`), and gives a
model without any preference 100 %. A score that is no number is never right.

Standard errors and intervals answer two questions: other pairs of the same paradigms (pairs are drawn anew within each
paradigm), or other paradigms (whole paradigms are drawn anew).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TIES = ("strict", "first")
TIE = 2e-5
"""Nats. Scores no further apart are equal but for rounding, which differs between two orders of the same pieces.

A model without positions (2 layers x 128, scores of about -100) gave 2,427 permuted pairs differences up to 1e-5."""
DRAWS = 10_000
"""Draws of the bootstrap."""
_SEED = 0


@dataclass(frozen=True)
class Cell:
    """Result of an encoder on a paradigm."""

    right: np.ndarray
    """bool `[pairs]`."""
    ties: int
    undefined: int
    """Pairs with a score that is no finite number."""
    piece_counts: float
    """Accuracy that piece counts alone give: shorter wins, equally long counts half, identical pieces are a tie."""

    @property
    def accuracy(self) -> float:
        """Share of the pairs that are right."""
        return float(self.right.mean())

    @property
    def standard_error(self) -> float | None:
        """Standard error of the accuracy over pairs, √(p(1 − p)/(n − 1)); None for one pair."""
        n, p = len(self.right), self.accuracy
        return math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else None


def cell(row: Mapping[str, Any], ties: str) -> Cell:
    """Return how a line of scores.jsonl counts; `ties` is one of `TIES`."""
    good, bad = (np.array([np.nan if v is None else v for v in row[key]]) for key in ("good", "bad"))
    difference = good - bad
    tied = np.abs(difference) <= TIE  # False where a score is no number
    right = (difference > TIE) | (tied if ties == "first" else False)
    counts = np.array(row["pieces_good"]) - np.array(row["pieces_bad"])
    identical = row["identical"]
    even = (int((counts == 0).sum()) - identical) / 2 + (identical if ties == "first" else 0)
    piece_counts = (int((counts < 0).sum()) + even) / len(counts)
    return Cell(right, int(tied.sum()), int(np.isnan(difference).sum()), piece_counts)


@dataclass(frozen=True)
class Result:
    """An encoder's results over all paradigms."""

    name: str
    cells: dict[str, Cell]
    """Results by the paradigm's UID."""

    @property
    def macro_average(self) -> float:
        """Mean of the paradigms' accuracies."""
        return statistics.fmean(cell.accuracy for cell in self.cells.values())

    @property
    def standard_error(self) -> float | None:
        """Standard error of the macro average over pairs; None where a paradigm has one pair only."""
        errors = [cell.standard_error for cell in self.cells.values()]
        if None in errors:
            return None
        return math.sqrt(sum(error * error for error in errors if error)) / len(errors)

    @property
    def paradigm_error(self) -> float | None:
        """Standard error of the macro average over paradigms; None for one paradigm."""
        values = [cell.accuracy for cell in self.cells.values()]
        return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None

    @property
    def piece_counts(self) -> float:
        """Macro average that piece counts alone give."""
        return statistics.fmean(cell.piece_counts for cell in self.cells.values())

    def only(self, uids: Iterable[str]) -> Result:
        """Return the results on some paradigms."""
        return Result(self.name, {uid: self.cells[uid] for uid in uids})

    def average(self, uids: Iterable[str]) -> float:
        """Return the mean accuracy over some paradigms."""
        return self.only(uids).macro_average


Interval = tuple[float, float]


@dataclass(frozen=True)
class Difference:
    """Macro average of `first` minus that of `second`, paired by pair."""

    first: str
    second: str
    difference: float
    over_pairs: Interval
    """95 % interval: pairs drawn anew within each paradigm."""
    over_paradigms: Interval | None
    """95 % interval: whole paradigms drawn anew; None for one paradigm."""


def difference(first: Result, second: Result) -> Difference:
    """Return the paired difference of two encoders, with percentile intervals of `DRAWS` bootstrap draws each."""
    gains = [first.cells[uid].right.astype(int) - second.cells[uid].right for uid in first.cells]  # −1, 0 or 1 per pair
    means = np.array([gain.mean() for gain in gains])  # [paradigms]
    rng = np.random.default_rng(_SEED)
    drawn = rng.integers(len(means), size=(DRAWS, len(means)))
    return Difference(
        first.name,
        second.name,
        float(means.mean()),
        _interval(_pairs_anew(gains, rng)),
        _interval(means[drawn].mean(1)) if len(means) > 1 else None,
    )


def _pairs_anew(gains: Sequence[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Return `[DRAWS]` macro differences. n pairs drawn from n are multinomial counts of −1, 0 and 1."""
    total = np.zeros(DRAWS)
    for gain in gains:
        shares = [(gain == value).mean() for value in (-1, 0, 1)]
        counts = rng.multinomial(len(gain), shares, size=DRAWS)  # [draws, 3]
        total += (counts[:, 2] - counts[:, 0]) / len(gain)
    return total / len(gains)


def _interval(draws: np.ndarray) -> Interval:
    low, high = np.quantile(draws, (0.025, 0.975)).tolist()
    return low, high
