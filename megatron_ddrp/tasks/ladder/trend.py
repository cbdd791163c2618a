"""Trend of a gain over the budgets: a straight line in the logarithm of the budget, by least squares.

With x = log₄(budget / first budget), the line is a + b·x, and b is the change of the gain per factor of four. Every
paired difference counts once; each rung has its own variance, because seeds spread far more on some rungs than on
others. Rung i has nᵢ differences with mean mᵢ and variance sᵢ², and N = Σnᵢ, x̄ = Σnᵢxᵢ/N, Sxx = Σnᵢ(xᵢ − x̄)². The
height of the line at x, and its slope, are weighted sums Σwᵢmᵢ of the rungs' means, with

    wᵢ = nᵢ·(1/N + (xᵢ − x̄)(x − x̄)/Sxx) for the height,   wᵢ = nᵢ·(xᵢ − x̄)/Sxx for the slope,

so their variance is V = Σvᵢ with vᵢ = wᵢ²sᵢ²/nᵢ. Half the 95 % interval is t·√V, where t is the 97.5 % quantile of
Student's distribution with V² / Σ(vᵢ²/(nᵢ − 1)) degrees of freedom (Welch, The generalization of Student's problem
when several different population variances are involved, 1947; Satterthwaite, 1946). Between two rungs the band at a
rung is the rung's own Student interval.

No straight line describes gains that visibly rise from one rung to the next and visibly fall elsewhere: those turn.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_ddrp.tasks.statistics import SMALLEST_SHARE


@dataclass(frozen=True)
class Rung:
    """Gains on one rung, as far as the trend needs them."""

    x: float
    """Factors of four between the first rung of the ladder and this one."""
    count: int
    """Number of gains, at least two."""
    mean: float
    variance: float


@dataclass(frozen=True)
class Trend:
    """Line a + b·x through the gains of two or more rungs, with its 95 % intervals."""

    rungs: tuple[Rung, ...]

    def at(self, x: float) -> float:
        """Return the line's height."""
        return sum(weight * rung.mean for weight, rung in zip(self._height_weights(x), self.rungs, strict=True))

    def half_width(self, x: float) -> float:
        """Return half the width of the 95 % interval of the line's height."""
        return self._half_width(self._height_weights(x))

    def side(self, x: float) -> int:
        """Return 1 if the 95 % interval of the line's height is above 0, −1 if it is below, 0 if it contains 0."""
        return _sign(self.at(x), self.half_width(x))

    @cached_property
    def slope(self) -> float:
        """Change of the gain per factor of four."""
        slope = sum(weight * rung.mean for weight, rung in zip(self._slope_weights, self.rungs, strict=True))
        largest = max(abs(rung.mean) for rung in self.rungs)
        return 0.0 if abs(slope) <= SMALLEST_SHARE * largest else slope

    @property
    def slope_half_width(self) -> float:
        """Half the width of the 95 % interval of the slope."""
        return self._half_width(self._slope_weights)

    @property
    def direction(self) -> int:
        """Sign of the slope if its interval excludes 0, otherwise 0."""
        return _sign(self.slope, self.slope_half_width)

    @cached_property
    def steps(self) -> list[int]:
        """Sign of the change from each rung to the next if its 95 % interval (Welch's) excludes 0, otherwise 0."""
        return [Trend(pair).direction for pair in itertools.pairwise(self.rungs)] if len(self.rungs) > 2 else []

    @property
    def turns(self) -> bool:
        """True if the gain visibly rises between two neighbouring rungs and visibly falls between two others."""
        return {1, -1} <= set(self.steps)

    @cached_property
    def _center(self) -> float:
        """Mean of x over all gains."""
        return sum(rung.count * rung.x for rung in self.rungs) / sum(rung.count for rung in self.rungs)

    @cached_property
    def _slope_weights(self) -> list[float]:
        spread = sum(rung.count * (rung.x - self._center) ** 2 for rung in self.rungs)
        return [rung.count * (rung.x - self._center) / spread for rung in self.rungs]

    def _height_weights(self, x: float) -> list[float]:
        count = sum(rung.count for rung in self.rungs)
        slopes = zip(self._slope_weights, self.rungs, strict=True)
        return [rung.count / count + slope * (x - self._center) for slope, rung in slopes]

    def _half_width(self, weights: Sequence[float]) -> float:
        """Return half the width of the 95 % interval of a weighted sum of the rungs' means."""
        from scipy.stats import t

        pairs = list(zip(weights, self.rungs, strict=True))
        parts = [(weight**2 * rung.variance / rung.count, rung.count - 1) for weight, rung in pairs]
        if (variance := sum(part for part, _ in parts)) == 0:
            return 0.0
        freedom = variance**2 / sum(part**2 / own for part, own in parts)
        return float(t.ppf(0.975, freedom)) * math.sqrt(variance)


def _sign(value: float, half_width: float) -> int:
    """Return the sign of `value` if the interval around it excludes 0, otherwise 0."""
    if abs(value) <= half_width:
        return 0
    return 1 if value > 0 else -1


def steps_of_four(rung: float, first: float) -> float:
    """Return x, the number of factors of four between the first rung and another one."""
    return math.log(rung / first, 4)


def fit(gains: Mapping[float, Sequence[float]]) -> Trend | None:
    """Return the trend of gains by x of their rung; None if fewer than two rungs have two gains or more.

    A rung with one gain has no spread of its own and is left out.
    """
    measured = {x: values for x, values in gains.items() if len(values) > 1}
    if len(measured) < 2:
        return None
    smallest = SMALLEST_SHARE * max(abs(value) for values in measured.values() for value in values)
    rungs = []
    for x, values in sorted(measured.items()):
        deviation = statistics.stdev(values)
        variance = deviation**2 if deviation > smallest else 0.0
        rungs.append(Rung(x, len(values), statistics.fmean(values), variance))
    return Trend(tuple(rungs))
