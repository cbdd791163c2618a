"""Means, spreads and paired differences over seeds and over test items; the judgement of a table's gains."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

EQUAL_SEEDS = "equal seeds: no spread"
"""Remark on a difference without an interval."""

BETTER, WORSE, NOT_TOLD_APART = "better", "worse", "not told apart"
FALSE_DISCOVERIES = 0.05
"""Expected share of false ones among the words "better" and "worse" of a table, at most."""

SMALLEST_SHARE = 1e-9
"""Means, deviations and slopes below this share of the values behind them are rounding errors and count as 0."""

BOOTSTRAP_SAMPLES = 2000
"""Number of samples of every bootstrap. The seed is fixed, so that a page can be reproduced."""
BOOTSTRAP_SEED = 1234

BySeed = Mapping[int, float]
"""Seed → value of one arm."""


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return Student's 95 % interval of the mean of two or more values."""
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def seeds_needed(mean: float, deviation: float, most: int = 100_000) -> int | None:
    """Return the smallest number of seeds n whose 95 % Student interval would exclude 0.

    n is the first with t(0.975, n − 1)·s/√n < |mean|, if the mean and the standard deviation s stay as they are. None
    for a mean of 0, or if more than `most` seeds were needed.
    """
    from scipy.stats import t

    def excludes(count: int) -> bool:
        return float(t.ppf(0.975, count - 1)) * deviation / math.sqrt(count) < abs(mean)

    if mean == 0 or not excludes(most):
        return None
    return bisect.bisect_left(range(most + 1), True, lo=2, key=excludes)  # the half-width falls as n grows


@dataclass(frozen=True)
class Difference:
    """Difference of two arms, paired by seed: one value per common seed."""

    values: tuple[float, ...]
    size: float = 0.0
    """Largest absolute value of the two arms, whose rounding the differences have."""
    seeds: tuple[int, ...] = ()
    """Seed of each value, if it is known."""

    @property
    def by_seed(self) -> dict[int, float]:
        """Seed → difference."""
        return dict(zip(self.seeds, self.values, strict=True))

    @property
    def _rounding(self) -> float:
        return SMALLEST_SHARE * max(self.size, *map(abs, self.values))

    @property
    def mean(self) -> float:
        """Mean over the seeds; 0 if it is a rounding error."""
        mean = statistics.fmean(self.values)
        return 0.0 if abs(mean) <= self._rounding else mean

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the seeds (n − 1), 0 if it is a rounding error; None for one seed."""
        if len(self.values) < 2:
            return None
        deviation = statistics.stdev(self.values)
        return 0.0 if deviation <= self._rounding else deviation

    @property
    def interval(self) -> tuple[float, float] | None:
        """Student's 95 % interval of the mean; None for one seed, and for equal differences that are not 0."""
        if self.deviation:
            return student_interval(self.values)
        return (0.0, 0.0) if self.deviation == 0 == self.mean else None

    @property
    def p_value(self) -> float | None:
        """Two-sided p value of Student's paired test; None without an interval."""
        from scipy.stats import t

        if not self.deviation:
            return 1.0 if self.interval else None
        count = len(self.values)
        return float(2 * t.sf(abs(self.mean) * math.sqrt(count) / self.deviation, count - 1))


def pair_by_seed(first: BySeed, second: BySeed, relative: bool = False) -> Difference | None:
    """Return `first` − `second` at every common seed; None without one. With `relative`, divide by `second`."""
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    units = {seed: second[seed] if relative else 1.0 for seed in seeds}
    size = max(abs(arm[seed] / units[seed]) for arm in (first, second) for seed in seeds)
    return Difference(tuple((first[seed] - second[seed]) / units[seed] for seed in seeds), size, tuple(seeds))


def judge(gains: Sequence[Difference]) -> list[str]:
    """Return the word for each gain of one table: `BETTER`, `WORSE` or `NOT_TOLD_APART`; empty without a p value.

    Positive gains are better. The words hold for the table as a whole, see `benjamini_hochberg`; intervals do not.
    """
    p_values = [gain.p_value for gain in gains]
    told = iter(benjamini_hochberg([p_value for p_value in p_values if p_value is not None]))
    return [
        "" if p_value is None else (BETTER if gain.mean > 0 else WORSE) if next(told) else NOT_TOLD_APART
        for gain, p_value in zip(gains, p_values, strict=True)
    ]


def benjamini_hochberg(p_values: Sequence[float]) -> list[bool]:
    """Return which of m hypotheses are rejected so that at most a share r of the rejected ones is expected to be true.

    r is `FALSE_DISCOVERIES`. Rejected are the k smallest p values, where k is the largest number whose k-th smallest
    value is at most k·r/m (Benjamini and Hochberg, Controlling the false discovery rate, 1995).
    """
    ordered = sorted(p_values)
    passed = [p_value for k, p_value in enumerate(ordered, 1) if p_value <= k * FALSE_DISCOVERIES / len(ordered)]
    return [p_value <= max(passed, default=-1.0) for p_value in p_values]


def percentile_interval(samples: np.ndarray) -> tuple[float, float]:
    """Return the 2.5 % and 97.5 % quantiles of bootstrap samples `[samples]`."""
    low, high = np.quantile(samples, (0.025, 0.975))
    return float(low), float(high)
