"""The trend, its intervals and the seeds needed, against loops written from their definitions and against scipy."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from scipy.stats import t, ttest_ind

from megatron_ddrp.tasks.ladder.trend import fit, steps_of_four
from megatron_ddrp.tasks.statistics import seeds_needed, student_interval

GAINS = {0.0: (0.05, 0.043, 0.061), 1.0: (0.038, 0.049), 2.0: (0.031, 0.0312, 0.027, 0.03)}
LATER = {1.0: GAINS[1.0], 2.0: GAINS[2.0]}


def slow_line(points):
    """Solve the two normal equations, Σy = n·a + b·Σx and Σxy = a·Σx + b·Σx², by Cramer's rule."""
    n = sx = sy = sxx = sxy = 0.0
    for x, y in points:
        n, sx, sy, sxx, sxy = n + 1, sx + x, sy + y, sxx + x * x, sxy + x * y
    determinant = n * sxx - sx * sx
    return (sy * sxx - sx * sxy) / determinant, (n * sxy - sx * sy) / determinant


def slow_half_width(gains, of_line):
    """Half-width of a number `of_line(a, b)`: move each gain by 1, square what the number does, times its variance."""
    points = [(x, y) for x, values in gains.items() for y in values]
    still = of_line(*slow_line(points))
    variance = below = 0.0
    for x, values in gains.items():
        of_rung = 0.0
        for place, point in enumerate(points):
            if point[0] == x:
                moved = [*points[:place], (x, point[1] + 1.0), *points[place + 1 :]]
                of_rung += (of_line(*slow_line(moved)) - still) ** 2 * statistics.variance(values)
        variance += of_rung
        below += of_rung**2 / (len(values) - 1)
    return t.ppf(0.975, variance**2 / below) * math.sqrt(variance)


@pytest.mark.parametrize("gains", [GAINS, LATER], ids=["three rungs", "two later rungs"])
def test_line_and_intervals_are_those_of_the_loops(gains):
    trend = fit(gains)
    a, b = slow_line([(x, y) for x, values in gains.items() for y in values])
    assert trend.slope == pytest.approx(b, rel=1e-12)
    assert trend.slope_half_width == pytest.approx(slow_half_width(gains, lambda a, b: b), rel=1e-9)
    for at in (-0.3, 0.0, 0.7, 2.5):
        assert trend.at(at) == pytest.approx(a + b * at, rel=1e-12)
        assert trend.half_width(at) == pytest.approx(slow_half_width(gains, lambda a, b, at=at: a + b * at), rel=1e-9)


def test_between_two_rungs_the_slope_has_the_interval_of_welch_and_the_band_that_of_student():
    trend = fit(LATER)
    interval = ttest_ind(LATER[2.0], LATER[1.0], equal_var=False).confidence_interval()
    expected = [trend.slope - trend.slope_half_width, trend.slope + trend.slope_half_width]
    assert expected == pytest.approx([interval.low, interval.high], rel=1e-9)
    for x, values in LATER.items():
        band = [trend.at(x) - trend.half_width(x), trend.at(x) + trend.half_width(x)]
        assert band == pytest.approx(student_interval(values), rel=1e-9)


def test_the_steps_between_rungs_have_the_intervals_of_welch():
    gains = {
        0.0: (0.02, 0.03, 0.025),
        1.0: (0.09, 0.07, 0.08, 0.085),
        2.0: (0.072, 0.074, 0.079),
        3.0: (0.01, 0.02, 0.012),
    }
    expected = []
    for x in (0.0, 1.0, 2.0):
        interval = ttest_ind(gains[x + 1], gains[x], equal_var=False).confidence_interval()
        expected.append(int(interval.low > 0) - int(interval.high < 0))
    assert expected == [1, 0, -1]
    for some in (gains, dict(reversed(gains.items()))):
        assert fit(some).steps == expected and fit(some).turns
    assert fit(LATER).steps == [] and not fit(GAINS).turns


@pytest.mark.parametrize("spreads", [(1.0, 1.0, 1.0), (1.0, 0.1, 0.1), (0.1, 1.0, 0.1)])
def test_the_intervals_have_their_level_also_with_unequal_spreads(spreads):
    """About 95 % of the intervals, from many samples of a known line, contain its slope and its height.

    One variance for all rungs would contain the height at the first rung in 78 % of the samples of the second case.
    """
    generator = random.Random(3)
    slope = height = 0
    for _ in range(1000):
        trend = fit({x: [1 - 0.2 * x + generator.gauss(0, spreads[x]) for _ in range(4 - x // 2)] for x in range(3)})
        slope += abs(trend.slope + 0.2) <= trend.slope_half_width
        height += abs(trend.at(0) - 1) <= trend.half_width(0)
    assert slope / 1000 == pytest.approx(0.95, abs=0.025)
    assert height / 1000 == pytest.approx(0.95, abs=0.025)


@pytest.mark.parametrize("gains", [{}, {0.0: GAINS[0.0]}, {0.0: GAINS[0.0], 1.0: (0.5,)}])
def test_no_trend_without_two_rungs_of_two_gains(gains):
    assert fit(gains) is None


def test_a_rung_with_one_gain_is_left_out():
    assert fit({**LATER, 0.0: (9.0,)}) == fit(LATER)


def test_rounding_is_no_trend():
    """Differences that are equal but for rounding give a level line without width."""
    trend = fit({x: [(6.05 + x / 3) - (6.02 + x / 3), (6.04 + x / 3) - (6.01 + x / 3)] for x in (0, 1, 2)})
    assert (trend.slope, trend.half_width(1), trend.direction) == (0.0, 0.0, 0)
    assert trend.side(1) == 1


def test_signs():
    up = fit({0: (-0.1, -0.11), 1: (0.0, 0.01), 2: (0.1, 0.11)})
    assert [up.side(x) for x in (0, 0.98, 2)] == [-1, 0, 1]
    assert (up.direction, fit({x: [-y for y in values] for x, values in GAINS.items()}).direction) == (1, 1)
    assert fit(GAINS).direction == -1


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
