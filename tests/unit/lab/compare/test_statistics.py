"""Spreads and paired differences against SciPy and by hand; gains judged in three words."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from megatron_ddrp.lab.compare.tables import format_spread
from megatron_ddrp.tasks.statistics import (
    BETTER,
    LOSS,
    NOT_TOLD_APART,
    WORSE,
    Difference,
    Gain,
    benjamini_hochberg,
    judge,
    pair_by_seed,
    percentile_interval,
)

FIRST = {1: 0.61, 2: 0.58, 3: 0.66, 4: 0.60}
SECOND = {1: 0.52, 2: 0.55, 3: 0.57, 9: 0.90}


def test_a_spread_is_mean_and_deviation_of_the_seeds():
    assert format_spread(LOSS, {1: 1.0, 2: 2.0, 3: 6.0}) == f"3.0000 ± {7**0.5:.4f}"
    assert format_spread(LOSS, {1: 2.0}) == "2.0000"
    assert format_spread(LOSS, {}) == ""


def test_a_difference_is_paired_by_seed_as_in_scipy():
    found = pair_by_seed(FIRST, SECOND)
    common = sorted(FIRST.keys() & SECOND.keys())
    expected = stats.ttest_rel([FIRST[s] for s in common], [SECOND[s] for s in common])
    assert len(found.values) == 3 and found.mean == pytest.approx((0.09 + 0.03 + 0.09) / 3)
    assert found.interval == pytest.approx(tuple(expected.confidence_interval(0.95)))


def test_three_seeds_by_hand():
    # differences 1, 2, 3: mean 2, deviation 1, t(0.975, 2) = 4.3027
    found = Difference((1.0, 2.0, 3.0))
    assert found.interval == pytest.approx((2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-4)
    assert found.interval[0] < 0 < found.interval[1]


def test_a_relative_difference_is_a_share_of_the_second():
    assert pair_by_seed({1: 1.1, 2: 2.4}, {1: 1.0, 2: 2.0}, relative=True).values == pytest.approx((0.1, 0.2))


@pytest.mark.parametrize(
    ("values", "has_interval"),
    [((1.0, 1.1, 0.9), True), ((0.0, 0.0, 0.0), True), ((5.0,), False), ((0.3, 0.3), False), ((0.1 + 0.2, 0.3), False)],
)
def test_seeds_that_agree_have_an_interval_only_at_0(values, has_interval):
    assert (Difference(values).interval is not None) == has_interval


def test_rounding_is_no_difference_and_no_spread():
    found = pair_by_seed({1: 0.1 + 0.2, 2: 0.5}, {1: 0.3, 2: 0.5})
    assert found.values[0] > 0 and (found.mean, found.deviation, found.interval) == (0.0, 0.0, (0.0, 0.0))
    found = pair_by_seed({1: 6.05, 2: 6.35}, {1: 6.02, 2: 6.32})
    assert len(set(found.values)) == 2 and (found.deviation, found.interval) == (0.0, None)
    assert found.interval is None and found.mean == pytest.approx(0.03)


def test_no_common_seed_is_no_difference():
    assert pair_by_seed({1: 1.0}, {2: 1.0}) is None


def test_a_percentile_interval_is_the_central_95_per_cent():
    assert percentile_interval(np.arange(201.0)) == pytest.approx((5, 195))


def test_the_p_value_is_that_of_scipys_paired_test():
    common = sorted(FIRST.keys() & SECOND.keys())
    expected = stats.ttest_rel([FIRST[s] for s in common], [SECOND[s] for s in common]).pvalue
    found = pair_by_seed(FIRST, SECOND)
    assert found.p_value == pytest.approx(expected, rel=1e-12)
    assert found.by_seed == {seed: FIRST[seed] - SECOND[seed] for seed in common}


def test_no_p_value_without_a_spread_and_p_1_for_equal_models():
    assert Difference((0.3,)).p_value is None
    assert Difference((0.3, 0.3)).p_value is None, "equal gains: no spread to test against"
    assert Difference((0.0, 0.0)).p_value == 1.0


@pytest.mark.parametrize("count", [0, 1, 2, 7, 40])
def test_benjamini_and_hochberg_as_scipy_adjusts_p_values(count):
    generator = np.random.default_rng(count)
    for scale in (1.0, 0.1, 0.01):
        p_values = [float(value) for value in scale * generator.random(count) ** 2]
        expected = list(stats.false_discovery_control(p_values) <= 0.05) if count else []
        assert benjamini_hochberg(p_values) == expected == slow_benjamini_hochberg(p_values)


def slow_benjamini_hochberg(p_values, rate=0.05):
    """The definition, literally: of all numbers k of smallest p values, take the largest that the rule allows."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    k = max((k for k in range(1, len(order) + 1) if p_values[order[k - 1]] <= k * rate / len(order)), default=0)
    return [place in order[:k] for place in range(len(order))]


def test_a_gain_is_judged_with_the_other_gains_of_its_table():
    clear, worse, weak = Difference((1.0, 1.1, 0.9)), Difference((-1.0, -1.1, -0.9)), Difference((0.1, 0.16, 0.21))
    assert weak.interval[0] > 0 and weak.p_value < 0.05
    nothing = [Difference((-1.0, 1.0 + 0.1 * number, 0.2)) for number in range(20)]

    def words(*gains):
        return [gain.word for gain in judge([Gain("a", "b", "score", seeds, None) for seeds in gains])]

    assert words(weak) == [BETTER]
    assert words(clear, Difference((1.0,)), worse) == [BETTER, "", WORSE]
    assert words(weak, *nothing) == [NOT_TOLD_APART] * 21, "one of 21 is expected to look like this by chance"
    assert words() == []
