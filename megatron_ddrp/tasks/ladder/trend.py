"""Trend of a gain over the budgets: a straight line in the logarithm of the budget, by least squares.

With x = log₄(budget / first budget), the line is a + b·x, and b is the change of the gain per factor of four. The
paired differences of all seeds and rungs count as independent measurements with one variance s² (Draper and Smith,
Applied Regression Analysis, 1998, chapter 1). Then, over n points with Sxx = Σ(x − x̄)²,

    s² = Σ(y − a − b·x)² / (n − 2),   half-width of b = t·s/√Sxx,   half-width of the line = t·s·√(1/n + (x − x̄)²/Sxx),

where t is the 97.5 % quantile of Student's distribution with n − 2 degrees of freedom.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SMALLEST_SHARE = 1e-9
"""Residuals below this share of the largest value are rounding errors and count as 0."""


@dataclass(frozen=True)
class Trend:
    """Line a + b·x with its 95 % intervals."""

    intercept: float
    slope: float
    """Change of the gain per factor of four."""
    deviation: float
    """Standard deviation s of the residuals."""
    count: int
    """Number of points."""
    center: float
    """Mean of x."""
    spread: float
    """Sum of (x − x̄)²."""

    def at(self, x: float) -> float:
        """Return the line's height."""
        return self.intercept + self.slope * x

    def half_width(self, x: float) -> float:
        """Return half the width of the 95 % interval of the line's height."""
        return self._t * self.deviation * math.sqrt(1 / self.count + (x - self.center) ** 2 / self.spread)

    def side(self, x: float) -> int:
        """Return 1 if the 95 % interval of the line's height is above 0, −1 if it is below, 0 if it contains 0."""
        height = self.at(x)
        if abs(height) <= self.half_width(x):
            return 0
        return 1 if height > 0 else -1

    @property
    def slope_half_width(self) -> float:
        """Half the width of the 95 % interval of the slope."""
        return self._t * self.deviation / math.sqrt(self.spread)

    @property
    def direction(self) -> int:
        """Sign of the slope if its interval excludes 0, otherwise 0."""
        if abs(self.slope) <= self.slope_half_width:
            return 0
        return 1 if self.slope > 0 else -1

    @property
    def _t(self) -> float:
        from scipy.stats import t

        return float(t.ppf(0.975, self.count - 2))


def steps_of_four(rung: float, first: float) -> float:
    """Return x, the number of factors of four between the first rung and another one."""
    return math.log(rung / first, 4)


def fit(points: Sequence[tuple[float, float]]) -> Trend | None:
    """Return the trend through points (x, y); None for fewer than three points or for equal x."""
    if len(points) < 3 or len({x for x, _ in points}) < 2:
        return None
    center, mean = (statistics.fmean(values) for values in zip(*points, strict=True))
    spread = math.fsum((x - center) ** 2 for x, _ in points)
    slope = math.fsum((x - center) * (y - mean) for x, y in points) / spread
    intercept = mean - slope * center
    residuals = [y - intercept - slope * x for x, y in points]
    deviation = math.sqrt(math.fsum(r * r for r in residuals) / (len(points) - 2))
    largest = max(abs(y) for _, y in points)
    if deviation <= SMALLEST_SHARE * largest:
        deviation = 0.0
    if abs(slope) <= SMALLEST_SHARE * largest:
        slope, intercept = 0.0, mean
    return Trend(intercept, slope, deviation, len(points), center, spread)
