"""Spreads, differences and gains against SciPy, loops over pairs and by hand, and numbers in tables and on axes."""

import math
import sys

import numpy as np
import pytest
from scipy import stats

from megatron_ddrp.lab.compare.page import draw_over_tokens
from megatron_ddrp.lab.compare.tables import Claim, above_chance, cost_table, format_spread, gains
from megatron_ddrp.tasks import statistics
from megatron_ddrp.tasks.minimal_pairs.pairs import ParadigmScore, Result, difference, standard_error
from tests.refusals import refused
from tests.unit.lab.compare.made_rows import RUNGS, make_row, results_of

FIRST = {1: 0.61, 2: 0.58, 3: 0.66, 4: 0.60}
SECOND = {1: 0.52, 2: 0.55, 3: 0.57, 9: 0.90}


def test_a_spread_is_mean_and_deviation_of_the_seeds():
    assert format_spread(statistics.LOSS, {1: 1.0, 2: 2.0, 3: 6.0}) == f"3.0000 ± {7**0.5:.4f}"
    assert format_spread(statistics.LOSS, {1: 2.0}) == "2.0000"
    assert format_spread(statistics.LOSS, {}) == ""


def test_a_difference_is_paired_by_seed_as_in_scipy():
    found = statistics.pair_by_seed(FIRST, SECOND)
    common = sorted(FIRST.keys() & SECOND.keys())
    expected = stats.ttest_rel([FIRST[s] for s in common], [SECOND[s] for s in common])
    assert len(found.values) == 3 and found.mean == pytest.approx((0.09 + 0.03 + 0.09) / 3)
    assert found.interval == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-12)
    assert found.by_seed == {seed: FIRST[seed] - SECOND[seed] for seed in common}


def test_an_interval_without_scipy_is_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    refused(
        "a 95 % interval needs scipy, not installed here: pip install scipy", statistics.student_interval, [1.0, 2.0]
    )


def test_differences_by_hand():
    found = statistics.Difference((1.0, 2.0, 3.0))  # mean 2, deviation 1, t(0.975, 2) = 4.3027
    assert found.interval == pytest.approx((2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-4)
    assert found.interval[0] < 0 < found.interval[1]
    assert statistics.pair_by_seed({1: 1.0}, {2: 1.0}) is None
    relative = statistics.pair_by_seed({1: 1.1, 2: 2.4}, {1: 1.0, 2: 2.0}, relative=True)
    assert relative.values == pytest.approx((0.1, 0.2))


@pytest.mark.parametrize(
    ("values", "has_interval"),
    [((1.0, 1.1, 0.9), True), ((0.0, 0.0, 0.0), True), ((5.0,), False), ((0.3, 0.3), False), ((0.1 + 0.2, 0.3), False)],
)
def test_seeds_that_agree_have_an_interval_only_at_0(values, has_interval):
    assert (statistics.Difference(values).interval is not None) == has_interval


def test_rounding_is_no_difference_and_no_spread():
    found = statistics.pair_by_seed({1: 0.1 + 0.2, 2: 0.5}, {1: 0.3, 2: 0.5})
    assert found.values[0] > 0 and (found.mean, found.deviation, found.interval) == (0.0, 0.0, (0.0, 0.0))
    found = statistics.pair_by_seed({1: 6.05, 2: 6.35}, {1: 6.02, 2: 6.32})
    assert len(set(found.values)) == 2 and (found.deviation, found.interval) == (0.0, None)
    assert found.interval is None and found.mean == pytest.approx(0.03)


def test_a_percentile_interval_is_the_central_95_per_cent():
    assert statistics.percentile_interval(np.arange(201.0)) == pytest.approx((5, 195))


def test_no_p_value_without_a_spread_and_p_1_for_equal_models():
    assert statistics.Difference((0.3,)).p_value is None
    assert statistics.Difference((0.3, 0.3)).p_value is None, "equal gains: no spread to test against"
    assert statistics.Difference((0.0, 0.0)).p_value == 1.0


@pytest.mark.parametrize("count", [0, 1, 2, 7, 40])
def test_benjamini_and_hochberg_as_scipy_adjusts_p_values(count):
    generator = np.random.default_rng(count)
    for scale in (1.0, 0.1, 0.01):
        p_values = [float(value) for value in scale * generator.random(count) ** 2]
        expected = list(stats.false_discovery_control(p_values) <= 0.05) if count else []
        assert statistics.benjamini_hochberg(p_values) == expected == slow_benjamini_hochberg(p_values)


def slow_benjamini_hochberg(p_values, rate=0.05):
    """The definition, literally: of all numbers k of smallest p values, take the largest that the rule allows."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    k = max((k for k in range(1, len(order) + 1) if p_values[order[k - 1]] <= k * rate / len(order)), default=0)
    return [place in order[:k] for place in range(len(order))]


def test_a_gain_is_judged_with_the_other_gains_of_its_table():
    clear, worse, weak = map(statistics.Difference, ((1.0, 1.1, 0.9), (-1.0, -1.1, -0.9), (0.1, 0.16, 0.21)))
    assert weak.interval[0] > 0 and weak.p_value < 0.05
    nothing = [statistics.Difference((-1.0, 1.0 + 0.1 * number, 0.2)) for number in range(20)]

    def words(*gains):
        found = [statistics.Gain("a", "b", "score", seeds, None) for seeds in gains]
        return [gain.word for gain in statistics.judge(found)]

    assert words(weak) == [statistics.BETTER]
    assert words(clear, statistics.Difference((1.0,)), worse) == [
        statistics.BETTER,
        statistics.EXPLORATORY,
        statistics.WORSE,
    ]
    assert words(weak, *nothing) == [statistics.NOT_TOLD_APART] * 21, "one of 21 looks like this by chance"
    assert words(statistics.Difference((0.3, 0.3, 0.3))) == [""], "equal gains: no spread to test against"
    assert words() == []
    beside = [statistics.Difference((1.0, 1.001 + number / 1e6)) for number in range(20)]
    middle = statistics.Difference((0.1, 0.16, 0.31))  # p is 0.095
    assert middle.p_value > 0.05 > max(gain.p_value for gain in beside)
    found = words(middle, *beside)
    assert found == [statistics.NOT_TOLD_APART, *[statistics.EXPLORATORY] * 20], "two seeds help no other gain to pass"


def pairs_row(model, seed, accuracies, pairs=4):
    paradigms = {f"p{place}": accuracy for place, accuracy in enumerate(accuracies)}
    values = {"minimal pairs": sum(accuracies) / len(accuracies)}
    return make_row(model, seed, RUNGS[0], values, paradigms=paradigms, pairs=pairs)


def result_of(paradigms):
    """The result of minimal pairs, given for each paradigm which of its pairs are right."""
    cells = {f"p{place}": ParadigmScore(np.array(right, bool), 0, 0, 0.5) for place, right in enumerate(paradigms)}
    return Result("", cells)


def gain_of_pairs(results):
    """The gain of the second model over the first by minimal pairs."""
    (gain,) = gains(results, [Claim("", "minimal pairs", *results.arms[::-1])])
    return gain


def slow_error(paradigms):
    """Square root of the sum of s²/n over paradigms, divided by their number; s² is the variance of the 0s and 1s."""
    total = 0.0
    for right in paradigms:
        mean = sum(right) / len(right)
        variance = 0.0
        for value in right:
            variance += (value - mean) ** 2 / (len(right) - 1)
        total += variance / len(right)
    return math.sqrt(total) / len(paradigms)


def test_the_standard_error_is_that_of_the_pairs():
    paradigms = [[1, 1, 0, 1], [0, 1], [1, 1, 1, 1]]
    accuracies, pairs = [sum(right) / len(right) for right in paradigms], [len(right) for right in paradigms]
    assert standard_error(accuracies, pairs) == pytest.approx(slow_error(paradigms), rel=1e-12)
    first = result_of(paradigms)
    assert first.standard_error == standard_error(accuracies, pairs)
    row = pairs_row("absolute", 1, accuracies, pairs={f"p{place}": count for place, count in enumerate(pairs)})
    found = above_chance(results_of([row]).runs)
    assert found == pytest.approx((sum(accuracies) / 3 - 0.5) / first.standard_error)


@pytest.mark.parametrize(("accuracies", "pairs"), [([], []), ([0.5], [1]), ([0.5, 1.0], [0, 9])])
def test_no_error_without_pairs(accuracies, pairs):
    assert standard_error(accuracies, pairs) is None


def test_the_interval_over_paradigms_is_that_of_the_command_minimal_pairs():
    rights = {
        "absolute": ([1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1]),
        "ddrp": ([1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]),
    }
    rows = [pairs_row(name, 1, [sum(right) / 4 for right in found]) for name, found in rights.items()]
    base, ddrp = map(result_of, rights.values())
    assert gain_of_pairs(results_of(rows)).items == difference(ddrp, base).items


def test_the_error_of_a_mean_over_seeds_is_an_upper_bound():
    """Seeds score the same pairs: the error of the mean of their results per pair is at most the mean of the errors."""
    first, second = [[1, 1, 0, 1], [0, 1, 0, 0]], [[1, 0, 0, 1], [0, 1, 1, 0]]
    rows = [pairs_row("absolute", seed, [sum(r) / 4 for r in runs]) for seed, runs in enumerate((first, second))]
    error = (slow_error(first) + slow_error(second)) / 2
    together = [[(a + b) / 2 for a, b in zip(x, y, strict=True)] for x, y in zip(first, second, strict=True)]
    assert slow_error(together) < error
    mean = sum(row["values"]["minimal pairs"] for row in rows) / 2
    assert above_chance(results_of(rows).runs) == pytest.approx((mean - 0.5) / error)


def test_a_seed_without_minimal_pairs_leaves_the_interval_of_the_others():
    """It may have diverged, or be scored later."""
    shares = {"absolute": [0.25, 0.5, 0.25], "ddrp": [0.5, 0.25, 1.0]}
    rows = [pairs_row(model, seed, found) for seed in (1, 2) for model, found in shares.items()]
    more = [make_row(model, 3, RUNGS[0], {"minimal pairs": None}) for model in shares]
    results, less = results_of(rows + more), results_of(rows)
    gain = gain_of_pairs(results)
    assert gain == gain_of_pairs(less) and gain.items is not None


def test_a_cost_is_in_seconds_and_as_often_the_baselines():
    seconds = {("absolute", 1): 0.1, ("absolute", 2): 0.2, ("rope", 1): 0.15, ("rope", 2): 0.3}
    rows = [make_row(model, seed, RUNGS[0], {"seconds of a step": s}) for (model, seed), s in seconds.items()]
    table = cost_table(results_of(rows))
    assert table.header == ["model", "seconds per step", "÷ absolute"]
    assert table.rows == [["absolute", "0.1500", ""], ["rope", "0.2250", "1.500"]]


def test_curves_of_differences_leave_out_the_steep_beginning_and_count_tokens_in_their_unit():
    pytest.importorskip("matplotlib")
    size = RUNGS[0] // 40
    curve = [(size * part, 6.0) for part in range(1, 41)]
    steep = [(tokens, 90.0 if part < 3 else 5.5) for part, (tokens, _) in enumerate(curve)]
    both = {"absolute": curve, "rope": steep}
    rows = [make_row(name, 1, RUNGS[0], {}, curves={statistics.TRAINING_LOSS: points}) for name, points in both.items()]
    figure = draw_over_tokens(results_of(rows), statistics.TRAINING_LOSS)
    _, differences = figure.axes
    (line,) = [line for line in differences.lines if len(line.get_xdata()) > 2]
    assert len(line.get_xdata()) == 36 and line.get_xdata()[0] == 5 * size
    assert differences.get_xlabel() == "million tokens"
    assert differences.xaxis.get_major_formatter()(2_500_000, 0) == "2.5"
