"""Means, spreads and paired differences over seeds and over test items, and verdicts about them."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

VISIBLE, NOT_VISIBLE, OPPOSITE = "visible", "not visible", "opposite"
ONE_SEED, EQUAL_SEEDS = "one seed: no spread", "equal seeds: no spread"
NO_VERDICT = (ONE_SEED, EQUAL_SEEDS)
"""Verdicts on differences without an interval."""

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
class Spread:
    """Values of one arm over the seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the seeds (n − 1); None for one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Difference(Spread):
    """Difference of two arms, paired by seed: one value per common seed."""

    size: float = 0.0
    """Largest absolute value of the two arms, whose rounding the differences have."""

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

    def verdict(self, expected_sign: int) -> str:
        """Classify the interval: on the expected side of 0, around 0, or on the other side."""
        if self.interval is None:
            return ONE_SEED if self.deviation is None else EQUAL_SEEDS
        low, high = self.interval
        if low <= 0 <= high:
            return NOT_VISIBLE
        return VISIBLE if (low > 0) == (expected_sign > 0) else OPPOSITE


def spread(values: BySeed) -> Spread | None:
    """Return the spread of an arm's values; None without a value."""
    return Spread(tuple(values[seed] for seed in sorted(values))) if values else None


def paired(first: BySeed, second: BySeed, relative: bool = False) -> Difference | None:
    """Return `first` − `second` at every common seed; None without one. With `relative`, divide by `second`."""
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    units = {seed: second[seed] if relative else 1.0 for seed in seeds}
    size = max(abs(arm[seed] / units[seed]) for arm in (first, second) for seed in seeds)
    return Difference(tuple((first[seed] - second[seed]) / units[seed] for seed in seeds), size)


def mean_and_band(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float, float, float]]:
    """Return (mean x, mean y, lowest y, highest y) over curves, point by point, up to the end of the shortest curve."""
    points = []
    for at in zip(*curves, strict=False):
        values = [y for _, y in at]
        points.append((statistics.fmean(x for x, _ in at), statistics.fmean(values), min(values), max(values)))
    return points


def bootstrap_macro_average(groups: Sequence[np.ndarray]) -> np.ndarray:
    """Return the macro average (the mean of the groups' means) of every bootstrap sample, `[samples]`.

    A sample draws groups with replacement, as many as there are, and items with replacement from each drawn group, as
    many as it has (Davison and Hinkley, Bootstrap Methods and their Application, 1997, section 3.8). Each of `groups`
    is `[items]`; a group whose mean alone is known has one item.
    """
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    drawn = generator.integers(len(groups), size=(BOOTSTRAP_SAMPLES, len(groups)))
    means = np.empty(drawn.shape)  # [samples, groups]
    for number, group in enumerate(groups):
        places = drawn == number
        values, counts = np.unique(group, return_counts=True)
        # Items with equal values are interchangeable, so only the number of draws per value matters.
        times = generator.multinomial(len(group), counts / len(group), size=np.count_nonzero(places))
        means[places] = times @ values / len(group)
    return means.mean(axis=1)


def percentile_interval(samples: np.ndarray) -> tuple[float, float]:
    """Return the 2.5 % and 97.5 % quantiles of bootstrap samples `[samples]`."""
    low, high = np.quantile(samples, (0.025, 0.975))
    return float(low), float(high)


def paired_bootstrap(differences: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the 95 % interval of the macro average of differences between two models on the same items.

    `differences` has one array `[items]` per group (a paradigm of minimal pairs): first minus second model.
    """
    return percentile_interval(bootstrap_macro_average(differences))
