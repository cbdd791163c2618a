"""Means, spreads and paired differences over seeds, and the word for what they show."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ddrp.tasks.glue.report import student_interval

VISIBLE, NOT_VISIBLE, OPPOSITE, ONE_SEED = "visible", "not visible", "opposite", "one seed: no spread"

BySeed = Mapping[int, float]
"""Seed → a value of one arm."""


@dataclass(frozen=True)
class Spread:
    """Values of one arm over the seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the seeds (n − 1); None for one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Difference:
    """Of two arms, paired by seed."""

    values: tuple[float, ...]
    """One a common seed."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Student's 95 % interval of the mean; None for one seed."""
        return student_interval(self.values) if len(self.values) > 1 else None

    def verdict(self, expected_sign: int) -> str:
        """Whether the interval lies on the side of `expected_sign`, holds 0, or lies on the other side."""
        if self.interval is None:
            return ONE_SEED
        low, high = self.interval
        if low <= 0 <= high:
            return NOT_VISIBLE
        return VISIBLE if (low > 0) == (expected_sign > 0) else OPPOSITE


def spread(values: BySeed) -> Spread | None:
    """None where there is no value."""
    return Spread(tuple(values[seed] for seed in sorted(values))) if values else None


def paired(first: BySeed, second: BySeed, relative: bool = False) -> Difference | None:
    """`first` − `second` at every seed that both have; with `relative` as a share of `second`. None without any."""
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    return Difference(tuple((first[s] - second[s]) / (second[s] if relative else 1.0) for s in seeds))


def mean_and_band(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float, float, float]]:
    """(x, mean y, lowest y, highest y) at each point of curves that have the same points, x their mean."""
    points = []
    for at in zip(*curves, strict=False):
        values = [y for _, y in at]
        points.append((statistics.fmean(x for x, _ in at), statistics.fmean(values), min(values), max(values)))
    return points
