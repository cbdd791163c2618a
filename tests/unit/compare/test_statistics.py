"""Spreads and paired differences against SciPy and by hand; verdicts by whether the interval excludes 0."""

from __future__ import annotations

import pytest
from scipy import stats

from megatron_ddrp.tasks.statistics import (
    NOT_VISIBLE,
    ONE_SEED,
    OPPOSITE,
    VISIBLE,
    Difference,
    mean_and_band,
    paired,
    spread,
)

FIRST = {1: 0.61, 2: 0.58, 3: 0.66, 4: 0.60}
SECOND = {1: 0.52, 2: 0.55, 3: 0.57, 9: 0.90}


def test_a_spread_is_mean_and_deviation_of_the_seeds():
    found = spread({1: 1.0, 2: 2.0, 3: 6.0})
    assert found.mean == 3.0 and found.deviation == pytest.approx(7**0.5)
    assert spread({1: 2.0}).deviation is None
    assert spread({}) is None


def test_a_difference_is_paired_by_seed_as_in_scipy():
    found = paired(FIRST, SECOND)
    common = sorted(FIRST.keys() & SECOND.keys())
    expected = stats.ttest_rel([FIRST[s] for s in common], [SECOND[s] for s in common])
    assert len(found.values) == 3 and found.mean == pytest.approx((0.09 + 0.03 + 0.09) / 3)
    assert found.interval == pytest.approx(tuple(expected.confidence_interval(0.95)))


def test_three_seeds_by_hand():
    # differences 1, 2, 3: mean 2, deviation 1, t(0.975, 2) = 4.3027
    found = Difference((1.0, 2.0, 3.0))
    assert found.interval == pytest.approx((2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-4)
    assert found.verdict(1) == NOT_VISIBLE


def test_a_relative_difference_is_a_share_of_the_second():
    assert paired({1: 1.1, 2: 2.4}, {1: 1.0, 2: 2.0}, relative=True).values == pytest.approx((0.1, 0.2))


@pytest.mark.parametrize(
    ("values", "sign", "verdict"),
    [
        ((1.0, 1.1, 0.9), 1, VISIBLE),
        ((1.0, 1.1, 0.9), -1, OPPOSITE),
        ((-1.0, -1.1, -0.9), -1, VISIBLE),
        ((-1.0, -1.1, -0.9), 1, OPPOSITE),
        ((1.0, -1.1, 0.3), 1, NOT_VISIBLE),
        ((0.0, 0.0, 0.0), 1, NOT_VISIBLE),
        ((5.0,), 1, ONE_SEED),
    ],
)
def test_the_word_is_that_of_the_interval(values, sign, verdict):
    assert Difference(values).verdict(sign) == verdict


def test_no_common_seed_is_no_difference():
    assert paired({1: 1.0}, {2: 1.0}) is None


def test_a_band_spans_the_seeds():
    curves = [[(1.0, 5.0), (2.0, 3.0)], [(1.5, 7.0), (3.0, 2.0)]]
    assert mean_and_band(curves) == [(1.25, 6.0, 5.0, 7.0), (2.5, 2.5, 2.0, 3.0)]
