"""The trend, its intervals and the seeds needed, against loops written from their definitions and against scipy."""

from __future__ import annotations

import math
import random

import pytest
from scipy.stats import linregress, t

from megatron_ddrp.tasks.ladder.trend import fit, steps_of_four
from megatron_ddrp.tasks.statistics import seeds_needed

POINTS = [(0.0, 0.05), (0.0, 0.043), (0.0, 0.061), (1.0, 0.038), (1.0, 0.049), (2.0, 0.031)]


def slow_line(points):
    """Solve the two normal equations, Σy = n·a + b·Σx and Σxy = a·Σx + b·Σx², by Cramer's rule."""
    n = sx = sy = sxx = sxy = 0.0
    for x, y in points:
        n, sx, sy, sxx, sxy = n + 1, sx + x, sy + y, sxx + x * x, sxy + x * y
    determinant = n * sxx - sx * sx
    return (sy * sxx - sx * sxy) / determinant, (n * sxy - sx * sy) / determinant


def slow_half_width(points, at):
    """Half-width of the line at x: with v = (1, x), t·s·√(vᵀ (XᵀX)⁻¹ v), the inverse of the 2 × 2 matrix by hand."""
    a, b = slow_line(points)
    n = sx = sxx = squares = 0.0
    for x, y in points:
        n, sx, sxx, squares = n + 1, sx + x, sxx + x * x, squares + (y - a - b * x) ** 2
    quadratic = (sxx - 2 * at * sx + at * at * n) / (n * sxx - sx * sx)
    return t.ppf(0.975, n - 2) * math.sqrt(squares / (n - 2) * quadratic)


def test_the_line_is_that_of_the_normal_equations():
    trend = fit(POINTS)
    assert (trend.intercept, trend.slope) == pytest.approx(slow_line(POINTS), rel=1e-12)
    for at in (-0.3, 0.0, 0.7, 2.5):
        assert trend.half_width(at) == pytest.approx(slow_half_width(POINTS, at), rel=1e-12)
        assert trend.at(at) == pytest.approx(trend.intercept + at * trend.slope)


def test_the_slope_and_its_interval_are_those_of_scipy():
    found = linregress(*zip(*POINTS, strict=True))
    trend = fit(POINTS)
    assert trend.slope == pytest.approx(found.slope, rel=1e-12)
    assert trend.slope_half_width == pytest.approx(found.stderr * t.ppf(0.975, len(POINTS) - 2), rel=1e-12)


def test_the_interval_of_the_slope_has_its_level():
    """About 95 % of the intervals, from many samples with a known slope, contain this slope."""
    generator = random.Random(3)
    samples = [fit([(x, 1 - 0.2 * x + generator.gauss(0, 0.1)) for x in (0, 0, 0, 1, 1, 2)]) for _ in range(2000)]
    covered = sum(abs(trend.slope + 0.2) <= trend.slope_half_width for trend in samples) / len(samples)
    assert covered == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("points", [POINTS[:2], POINTS[:3], []])
def test_no_trend_without_three_points_on_two_rungs(points):
    assert fit(points) is None


def test_rounding_is_no_trend():
    """Differences that are equal but for rounding give a level line without width."""
    trend = fit([(x, (6.05 + x / 3) - (6.02 + x / 3)) for x in (0, 0, 1, 1, 2)])
    assert (trend.slope, trend.deviation, trend.direction) == (0.0, 0.0, 0)
    assert trend.side(1) == 1


def test_signs():
    up = fit([(0, -0.1), (0, -0.11), (1, 0.0), (1, 0.01), (2, 0.1), (2, 0.11)])
    assert [up.side(x) for x in (0, 0.98, 2)] == [-1, 0, 1]
    assert (up.direction, fit([(x, -y) for x, y in POINTS]).direction) == (1, fit(POINTS).direction * -1)


def test_x_counts_factors_of_four():
    assert [steps_of_four(4**k * 4_194_304, 4_194_304) for k in range(3)] == pytest.approx([0, 1, 2])


@pytest.mark.parametrize(
    ("mean", "deviation"), [(0.006, 0.0094), (-0.006, 0.0094), (0.05, 0.01), (1.0, 0.0), (0.01, 0.2)]
)
def test_the_seeds_needed_are_the_first_that_exclude_0(mean, deviation):
    count = 2
    while t.ppf(0.975, count - 1) * deviation / math.sqrt(count) >= abs(mean):
        count += 1
    assert seeds_needed(mean, deviation) == count


def test_no_number_of_seeds_shows_a_mean_of_0():
    assert seeds_needed(0.0, 0.1) is None
    assert seeds_needed(1e-6, 1.0) is None
    assert seeds_needed(0.01, 0.2, most=100) is None
