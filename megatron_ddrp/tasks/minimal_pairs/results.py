"""Store scores.jsonl, and accuracies, standard errors and paired differences from its scores of sentences.

The store has one line per encoder and paradigm. Everything that affects the scores (weights, sentences, kind of score)
identifies a line. So a restarted command scores nothing twice, and new weights under an old name are never mistaken for
the old ones. Ties are counted later.

A pair is right if the good sentence scores higher by more than `TIE`. A tie is wrong, as BLiMP defines it: a program
that takes the first of two equal scores, with the good sentence first, gives a model without any preference 100 %. A
pair with a score that is no number is wrong.

There are two standard errors: for other pairs of the same paradigms, and for other paradigms. The interval of a
difference resamples whole paradigms, whose means already contain the spread of their pairs; only for a single paradigm
it resamples pairs. A mean of n values drawn anew from n values varies (n − 1)/n times as much as the mean of n other
values, so deviations are multiplied by √(n/(n − 1)). One value tells nothing about others: there is no standard error
and no interval then.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ddrp.tasks.jobs.store import Store, digest
from megatron_ddrp.tasks.statistics import BOOTSTRAP_SAMPLES, BOOTSTRAP_SEED, percentile_interval

TIE = 2e-5
"""Largest difference of a tie, in nats. Rounding makes equal scores differ for two orders of the same pieces: a model
without positions (2 layers x 128, scores of about -100) gave 2,427 permuted pairs differences of up to 1e-5."""
DRAWS = 10_000
"""Number of bootstrap draws of an interval of the command."""
_SEED = 0
_BLOCK = 2**20
"""Number of values that are drawn at once."""


SCORES_FILE = "scores.jsonl"


@dataclass(frozen=True)
class PairJob:
    """Everything that determines the scores of a paradigm's sentences."""

    encoder: str
    """Fingerprint of the encoder."""
    seed: int | None
    """Seed of random weights; None for the loaded weights."""
    paradigm: str
    data: str
    """Fingerprint of the sentences."""
    score: str

    @cached_property
    def name(self) -> str:
        """File name that no other job has."""
        return f"{re.sub(r'[^A-Za-z0-9_-]', '_', self.paradigm)[:60]}-{digest(asdict(self))}"

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> PairJob:
        """Return the job of a line of scores.jsonl."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})


class PairStore(Store):
    """Store of finished jobs in scores.jsonl."""

    def __init__(self, path: Path):
        """Read the finished lines. Raises `UserError` for a damaged line."""
        super().__init__(path, lambda row: PairJob.of_row(row).name, "written by megatron-ddrp minimal-pairs", _checked)


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row unchanged. Raises KeyError, TypeError or ValueError if it is not a finished job."""
    lengths = {len(row[name]) for name in ("good", "bad", "pieces_good", "pieces_bad")}
    numbers = (row["rows"], row["seconds"], row["identical"])
    if len(lengths) != 1 or not all(isinstance(number, (int, float)) for number in numbers):
        raise ValueError("expected two scores and two lengths per pair")
    return row


@dataclass(frozen=True)
class ParadigmScore:
    """Result of an encoder on a paradigm."""

    right: np.ndarray
    """True for each pair that is right, bool `[pairs]`."""
    ties: int
    undefined: int
    """Number of pairs with a score that is not finite."""
    piece_counts: float
    """Accuracy from piece counts alone: fewer pieces win, equal counts are half right, identical pieces are a tie."""

    @property
    def accuracy(self) -> float:
        """Share of the pairs that are right."""
        return float(self.right.mean())

    @property
    def standard_error(self) -> float | None:
        """Standard error of the accuracy over pairs, √(p(1 − p)/(n − 1)); None for one pair."""
        return standard_error([self.accuracy], [len(self.right)])


def standard_error(accuracies: Sequence[float], pairs: Sequence[int]) -> float | None:
    """Return the standard error over pairs of the mean of k accuracies p, each of n pairs: √(Σ p(1 − p)/(n − 1))/k.

    None without an accuracy, or if one has fewer than two pairs.
    """
    if min(pairs, default=0) < 2:
        return None
    variances = (p * (1 - p) / (n - 1) for p, n in zip(accuracies, pairs, strict=True))
    return math.sqrt(math.fsum(variances)) / len(accuracies)


def cell(row: Mapping[str, Any]) -> ParadigmScore:
    """Return the result in a line of scores.jsonl."""
    good, bad = (np.array([np.nan if v is None else v for v in row[key]]) for key in ("good", "bad"))
    difference = good - bad
    tied = np.abs(difference) <= TIE  # False if a score is nan
    counts = np.array(row["pieces_good"]) - np.array(row["pieces_bad"])
    even = (int((counts == 0).sum()) - row["identical"]) / 2
    piece_counts = (int((counts < 0).sum()) + even) / len(counts)
    return ParadigmScore(difference > TIE, int(tied.sum()), int(np.isnan(difference).sum()), piece_counts)


@dataclass(frozen=True)
class Result:
    """Results of an encoder on all paradigms."""

    name: str
    cells: dict[str, ParadigmScore]
    """Results by the paradigm's UID."""

    @property
    def macro_average(self) -> float:
        """Mean of the paradigms' accuracies."""
        return statistics.fmean(cell.accuracy for cell in self.cells.values())

    @property
    def undefined(self) -> int:
        """Number of pairs with a score that is not finite."""
        return sum(cell.undefined for cell in self.cells.values())

    @property
    def standard_error(self) -> float | None:
        """Standard error of the macro average over pairs; None if a paradigm has only one pair."""
        cells = self.cells.values()
        return standard_error([cell.accuracy for cell in cells], [len(cell.right) for cell in cells])

    @property
    def paradigm_error(self) -> float | None:
        """Standard error of the macro average over paradigms; None for one paradigm."""
        values = [cell.accuracy for cell in self.cells.values()]
        return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None

    @property
    def piece_counts(self) -> float:
        """Macro average from piece counts alone."""
        return statistics.fmean(cell.piece_counts for cell in self.cells.values())

    def only(self, uids: Iterable[str]) -> Result:
        """Return the result on the paradigms `uids`."""
        return Result(self.name, {uid: self.cells[uid] for uid in uids})

    def average(self, uids: Iterable[str]) -> float:
        """Return the mean accuracy over some paradigms."""
        return self.only(uids).macro_average


Interval = tuple[float, float]


@dataclass(frozen=True)
class PairDifference:
    """Difference of the macro averages, `first` − `second`, on the same pairs."""

    first: str
    second: str
    difference: float
    over_pairs: Interval | None
    """95 % interval from resampling the pairs of a single paradigm; None for several paradigms and for one pair."""
    over_paradigms: Interval | None
    """95 % interval from resampling whole paradigms; None for one paradigm."""

    @property
    def interval(self) -> Interval | None:
        """95 % interval over paradigms or, for a single paradigm, over its pairs."""
        return self.over_paradigms or self.over_pairs


def difference(first: Result, second: Result) -> PairDifference:
    """Return the paired difference of two encoders; its interval has the percentiles of `DRAWS` bootstrap draws."""
    gains = [first.cells[uid].right.astype(int) - second.cells[uid].right for uid in first.cells]  # −1, 0 or 1 per pair
    means = np.array([gain.mean() for gain in gains])  # [paradigms]
    of_pairs = resampled_interval(gains[0]) if len(gains) == 1 else None
    return PairDifference(first.name, second.name, float(means.mean()), of_pairs, resampled_interval(means))


def resampled_interval(values: np.ndarray) -> Interval | None:
    """Return the 95 % interval, within −1 and 1, of the mean of n differences from resampling them; None for n < 2.

    `values` has the difference of each paradigm, or of each pair of one paradigm, `[n]`.
    """
    means = resampled_means(values, DRAWS, _SEED)
    if means is None:
        return None
    low, high = np.clip(percentile_interval(means), -1, 1).tolist()
    return low, high


def resampled_means(
    values: np.ndarray, draws: int = BOOTSTRAP_SAMPLES, seed: int = BOOTSTRAP_SEED
) -> np.ndarray | None:
    """Return the mean of n values on bootstrap samples, `[draws]`, its deviations times √(n/(n − 1)); None for n < 2.

    `values` are `[n]`, such as True for each pair of a paradigm that is right. Models with the same n have the same
    samples, so that their differences are paired.
    """
    count = len(values)
    if count < 2:
        return None
    generator, rows = np.random.default_rng(seed), max(1, _BLOCK // count)
    sizes = (min(rows, draws - first) for first in range(0, draws, rows))
    means = np.concatenate([values[generator.integers(count, size=(size, count))].mean(axis=1) for size in sizes])
    mean = float(values.mean())
    return mean + math.sqrt(count / (count - 1)) * (means - mean)
