"""Spreads, differences, gains and onsets against SciPy, loops from their definitions and by hand, and what tables and
figures show of them."""

import math
import random
import sys

import numpy as np
import pytest
from scipy import stats

from megatron_ddrp.lab.compare.page import Page, draw_onsets, draw_over_tokens
from megatron_ddrp.lab.compare.rows import UNITS, as_run, times_on_plateau
from megatron_ddrp.lab.compare.tables import Claim, above_chance, cost_table, format_spread, gains
from megatron_ddrp.tasks import statistics
from megatron_ddrp.tasks.minimal_pairs.pairs import ParadigmScore, Result, difference, standard_error
from megatron_ddrp.tasks.statistics import (
    STEP_SECONDS,
    TRAINING_LOSS,
    Difference,
    format_median,
    log_rank,
    share_resting,
)
from tests.refusals import refused
from tests.unit.lab.compare.made_rows import LOSS, RUNGS, make_row, results_of

FIRST = {1: 0.61, 2: 0.58, 3: 0.66, 4: 0.60}
SECOND = {1: 0.52, 2: 0.55, 3: 0.57, 9: 0.90}


def test_spreads_and_differences_by_hand_and_as_in_scipy(monkeypatch):
    for by_seed, text in (({1: 1.0, 2: 2.0, 3: 6.0}, f"3.0000 ± {7**0.5:.4f}"), ({1: 2.0}, "2.0000"), ({}, "")):
        assert format_spread(LOSS, by_seed) == text
    found = statistics.pair_by_seed(FIRST, SECOND)
    common = sorted(FIRST.keys() & SECOND.keys())
    expected = stats.ttest_rel([FIRST[s] for s in common], [SECOND[s] for s in common])
    assert len(found.values) == 3 and found.mean == pytest.approx((0.09 + 0.03 + 0.09) / 3)
    assert found.interval == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-12)
    assert found.by_seed == {seed: FIRST[seed] - SECOND[seed] for seed in common}
    found = Difference((1.0, 2.0, 3.0))  # mean 2, deviation 1, t(0.975, 2) = 4.3027
    assert found.interval == pytest.approx((2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-4)
    assert found.interval[0] < 0 < found.interval[1]
    assert statistics.pair_by_seed({1: 1.0}, {2: 1.0}) is None
    relative = statistics.pair_by_seed({1: 1.1, 2: 2.4}, {1: 1.0, 2: 2.0}, relative=True)
    assert relative.values == pytest.approx((0.1, 0.2))
    assert statistics.percentile_interval(np.arange(201.0)) == pytest.approx((5, 195))  # the central 95 %
    monkeypatch.setitem(sys.modules, "scipy", None)
    words = "a 95 % interval needs scipy, not installed here: pip install scipy"
    refused(words, statistics.student_interval, [1.0, 2.0])


def test_seeds_that_agree_have_an_interval_only_at_0_and_rounding_is_no_difference_and_no_spread():
    agreeing = {(0.0, 0.0, 0.0): True, (5.0,): False, (0.3, 0.3): False, (0.1 + 0.2, 0.3): False}
    for values, has_interval in (agreeing | {(1.0, 1.1, 0.9): True}).items():
        assert (Difference(values).interval is not None) == has_interval, values
    found = statistics.pair_by_seed({1: 0.1 + 0.2, 2: 0.5}, {1: 0.3, 2: 0.5})
    assert found.values[0] > 0 and (found.mean, found.deviation, found.interval) == (0.0, 0.0, (0.0, 0.0))
    found = statistics.pair_by_seed({1: 6.05, 2: 6.35}, {1: 6.02, 2: 6.32})
    assert len(set(found.values)) == 2 and (found.deviation, found.interval) == (0.0, None)
    assert found.mean == pytest.approx(0.03)
    assert Difference((0.3,)).p_value is None
    assert Difference((0.3, 0.3)).p_value is None, "equal gains: no spread to test against"
    assert Difference((0.0, 0.0)).p_value == 1.0


def test_p_values_are_adjusted_as_in_scipy_and_a_gain_is_judged_with_the_others_of_its_table():
    for count in (0, 1, 2, 7, 40):
        generator = np.random.default_rng(count)
        for scale in (1.0, 0.1, 0.01):
            p_values = [float(value) for value in scale * generator.random(count) ** 2]
            expected = list(stats.false_discovery_control(p_values) <= 0.05) if count else []
            assert statistics.benjamini_hochberg(p_values) == expected == slow_benjamini_hochberg(p_values)
    better, worse, apart, few = statistics.BETTER, statistics.WORSE, statistics.NOT_TOLD_APART, statistics.EXPLORATORY
    clear, lost, weak = map(Difference, ((1.0, 1.1, 0.9), (-1.0, -1.1, -0.9), (0.1, 0.16, 0.21)))
    assert weak.interval[0] > 0 and weak.p_value < 0.05
    nothing = [Difference((-1.0, 1.0 + 0.1 * number, 0.2)) for number in range(20)]
    beside = [Difference((1.0, 1.001 + number / 1e6)) for number in range(20)]
    middle = Difference((0.1, 0.16, 0.31))  # p is 0.095
    assert middle.p_value > 0.05 > max(gain.p_value for gain in beside)
    for seeds_of_gains, words in (
        ([weak], [better]),
        ([clear, Difference((1.0,)), lost], [better, few, worse]),
        ([weak, *nothing], [apart] * 21),  # one of 21 looks like this by chance
        ([Difference((0.3, 0.3, 0.3))], [""]),  # equal gains: no spread to test against
        ([], []),
        ([middle, *beside], [apart, *[few] * 20]),  # two seeds help no other gain to pass
    ):
        found = [statistics.Gain("a", "b", "score", seeds, None) for seeds in seeds_of_gains]
        assert [gain.word for gain in statistics.judge(found)] == words


def slow_benjamini_hochberg(p_values, rate=0.05):
    """The definition, literally: of all numbers k of smallest p values, take the largest that the rule allows."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    k = max((k for k in range(1, len(order) + 1) if p_values[order[k - 1]] <= k * rate / len(order)), default=0)
    return [place in order[:k] for place in range(len(order))]


def pairs_row(model, seed, accuracies, pairs=4):
    paradigms = {f"p{place}": accuracy for place, accuracy in enumerate(accuracies)}
    values = {"minimal pairs": sum(accuracies) / len(accuracies)}
    return make_row(model, seed, RUNGS[0], values, paradigms=paradigms, pairs=pairs)


def result_of(paradigms):
    """The result of minimal pairs, given for each paradigm which of its pairs are right."""
    cells = {f"p{place}": ParadigmScore(np.array(right, bool), 0, 0, 0.5) for place, right in enumerate(paradigms)}
    return Result("", cells)


def slow_error(paradigms):
    """Square root of the sum of s²/n over paradigms, divided by their number; s² is the variance of the 0s and 1s."""
    total = 0.0
    for right in paradigms:
        mean = sum(right) / len(right)
        variance = sum((value - mean) ** 2 for value in right) / (len(right) - 1)
        total += variance / len(right)
    return math.sqrt(total) / len(paradigms)


def test_the_standard_error_is_that_of_the_pairs_and_of_a_mean_over_seeds_an_upper_bound():
    paradigms = [[1, 1, 0, 1], [0, 1], [1, 1, 1, 1]]
    accuracies, pairs = [sum(right) / len(right) for right in paradigms], [len(right) for right in paradigms]
    assert standard_error(accuracies, pairs) == pytest.approx(slow_error(paradigms), rel=1e-12)
    first = result_of(paradigms)
    assert first.standard_error == standard_error(accuracies, pairs)
    row = pairs_row("absolute", 1, accuracies, pairs={f"p{place}": count for place, count in enumerate(pairs)})
    found = above_chance(results_of([row]).runs)
    assert found == pytest.approx((sum(accuracies) / 3 - 0.5) / first.standard_error)
    assert standard_error([], []) is standard_error([0.5], [1]) is standard_error([0.5, 1.0], [0, 9]) is None
    # seeds score the same pairs: the error of the mean of their results per pair is at most the mean of the errors
    first, second = [[1, 1, 0, 1], [0, 1, 0, 0]], [[1, 0, 0, 1], [0, 1, 1, 0]]
    rows = [pairs_row("absolute", seed, [sum(r) / 4 for r in runs]) for seed, runs in enumerate((first, second))]
    error = (slow_error(first) + slow_error(second)) / 2
    together = [[(a + b) / 2 for a, b in zip(x, y, strict=True)] for x, y in zip(first, second, strict=True)]
    assert slow_error(together) < error
    mean = sum(row["values"]["minimal pairs"] for row in rows) / 2
    assert above_chance(results_of(rows).runs) == pytest.approx((mean - 0.5) / error)


def test_the_interval_over_paradigms_is_that_of_the_command_minimal_pairs_also_if_a_seed_has_none():
    """It may have diverged, or be scored later."""
    base, ddrp = ([1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1]), ([1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1])
    shares = {"absolute": [sum(right) / 4 for right in base], "ddrp": [sum(right) / 4 for right in ddrp]}
    rows = [pairs_row(model, seed, found) for seed in (1, 2) for model, found in shares.items()]
    more = [make_row(model, 3, RUNGS[0], {"minimal pairs": None}) for model in shares]
    found = []
    for several in (rows[:2], rows, rows + more):
        results = results_of(several)
        found += gains(results, [Claim("", "minimal pairs", *results.arms[::-1])])
    one_seed, two_seeds, with_none = found
    assert one_seed.items == difference(result_of(ddrp), result_of(base)).items
    assert two_seeds == with_none and two_seeds.items is not None


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
    rows = [make_row(name, 1, RUNGS[0], {}, curves={TRAINING_LOSS: points}) for name, points in both.items()]
    figure = draw_over_tokens(results_of(rows), TRAINING_LOSS)
    _, differences = figure.axes
    (line,) = [line for line in differences.lines if len(line.get_xdata()) > 2]
    assert len(line.get_xdata()) == 36 and line.get_xdata()[0] == 5 * size
    assert differences.get_xlabel() == "million tokens"
    assert differences.xaxis.get_major_formatter()(2_500_000, 0) == "2.5"


GRID = 200_000
"""Tokens between two points of a curve: as many as the loss is averaged over."""


def onset_row(model, seed, onset, end=20, **other):
    """Return a row that leaves at the `onset`-th of `end` points of its curve, or never for None."""
    losses = [5.0 if onset and point >= onset else 7.0 for point in range(1, end + 1)]
    curve = [[GRID * point, loss] for point, loss in enumerate(losses, 1)]
    about = {"curves": {TRAINING_LOSS: curve}, "unigram_loss": 7.0, "tokens": GRID * end, "steps": 100 * end}
    return make_row(model, seed, RUNGS[0], {LOSS: losses[-1], STEP_SECONDS: 0.25}, **about | other)


def slow_shares(times):
    """Kaplan and Meier: the product over the times at which runs left of 1 − those that left / those still there."""
    share, found = 1.0, [(0.0, 1.0)]
    for time in sorted({time for time, _ in times}):
        share *= 1 - times.count((time, True)) / sum(other >= time for other, _ in times)
        found.append((time, share))
    return found


def slow_log_rank(first, second):
    """Mantel: observed − expected of the first arm over the times of leaving, by its hypergeometric deviation."""
    both, surplus, variance = [*first, *second], 0.0, 0.0
    for time in sorted({time for time, left in both if left}):
        there, own = (sum(other >= time for other, _ in times) for times in (both, first))
        left = both.count((time, True))
        surplus += first.count((time, True)) - left * own / there
        if there > 1:
            variance += left * own / there * (1 - own / there) * (there - left) / (there - 1)
    return surplus / math.sqrt(variance)


def test_shares_and_tests_are_those_of_their_definitions_and_the_median_is_where_half_of_the_runs_have_left():
    for seed in range(5):
        draw = random.Random(seed)
        arms = [[(float(draw.randint(1, 9)), draw.random() < 0.7) for _ in range(count)] for count in (6, 9)]
        for times in arms:
            assert share_resting(times) == [pytest.approx(point) for point in slow_shares(times)]
        found = log_rank(*arms)
        assert found.side == pytest.approx(slow_log_rank(*arms), rel=1e-9) and found.seeds == 6
        assert found.p_value == pytest.approx(2 * stats.norm.sf(abs(found.side)))
    for left, ended, median in (
        ([1, 2, 2.4], [], "2.0"),
        ([1, 2], [4, 4], "2.0"),
        ([1], [4, 4.5], "> 4.5"),
        ([2, 3], [1], "2.0"),  # a run that was cut off early does not count as one that rested longer
        (range(1, 13), [20] * 12, "12.0"),  # the share is 0.5000000000000001
        ([], [], ""),
    ):
        times = [*((float(time), True) for time in left), *((float(time), False) for time in ended)]
        assert format_median(times, 1) == median, (left, ended)

    def told(unit, **about):
        found = times_on_plateau({1: as_run(onset_row("ddrp", 1, 10, **about))}, unit=unit)
        return format_median(found, UNITS[unit])

    predictions = "million predictions"
    rates = sum(GRID / 100 * (0.4 - 0.2 * step / 2000) for step in range(1000))  # 1,000 of 2,000 steps
    expected = {"million tokens": "2.00", "steps": "1,000", predictions: f"{rates / 1e6:.2f}", "seconds": "250"}
    for unit, median in expected.items():
        assert told(unit, common={"lr": 0.1}, flags={"mask-prob": "0.4:0.2"}) == median
        assert told(unit, common={}, steps=0) == ("2.00" if unit == "million tokens" else "")
    assert (told(predictions), told(predictions, common={"mask_prob": 0.3})) == ("0.30", "0.60")
    short = {"common": {"seq_length": 128, "seq_length_phases": ["32:0.5"]}, "flags": {"mask-prob": "0.4:0.2"}}
    lengths = [32] * 1000 + [128] * 1000  # of the steps; half of the tokens are spent after 1,375
    rates = sum(length * (0.4 - 0.2 * step / 2000) for step, length in enumerate(lengths[:1375]))
    spent = f"{rates * 20 * GRID / sum(lengths) / 1e6:.2f}"
    assert [told(unit, **short) for unit in UNITS] == ["2.00", "1,375", spent, "344"]
    phased = told(predictions, common={}, flags={"objective-phases": "clm:0.25"})
    assert phased == "1.15"  # half of the tokens, and 15 % of the rest


def onsets_page(folder, **arms):
    """The page of models, given the onsets of each."""
    rows = [onset_row(model, seed, onset) for model, onsets in arms.items() for seed, onset in enumerate(onsets)]
    return Page(list(map(as_run, rows)), folder)


def test_onsets_are_judged_together_have_no_gains_and_their_figure_goes_to_the_end_of_the_runs(tmp_path):
    arms = {"absolute": [None] * 6, "ddrp": [10, 11, 12, 13, 14, 15], "t5": [None] * 6, "rope": [5, 6]}
    found = onsets_page(tmp_path, **arms, **{"ddrp+mth": [2, 3, 4, 5, 6, 7]})
    rows = {one["model"]: one for one in found.numbers()["onsets"]}
    assert {model: one["against absolute"].partition(",")[0] for model, one in rows.items()} == {
        "absolute": "", "ddrp": "sooner", "ddrp+mth": "sooner", "t5": "", "rope": "exploratory",
    }  # fmt: skip
    times = [[(time / 5, True) for time in onsets] for onsets in ([2, 3, 4, 5, 6, 7], arms["ddrp"])]
    assert rows["ddrp+mth"]["against ddrp"] == f"sooner, p = {log_rank(*times).p_value:.2g}"
    (line,) = [line for line in found.blocks["plateau"].splitlines() if line.startswith("| 4.19 M tokens | ddrp+mth")]
    assert "| 6 | 6 | 0.80 | 400 | 0.12 | 100 | sooner, p =" in line
    assert {gain["measure"] for gain in found.numbers()["gains"]} == {LOSS}
    assert "| 2.40 (6/6) |" in found.blocks["scores"] and "| &gt; 4.00 (0/6) |" in found.blocks["scores"]
    later = onsets_page(tmp_path, absolute=[2, 3, 4, 5], ddrp=[10, 11, 12, 13]).numbers()["onsets"][1]
    assert later["against absolute"].startswith("later, p = ")
    pytest.importorskip("matplotlib")
    (axis,) = draw_onsets(onsets_page(tmp_path, absolute=[None, 10, 15]).results).axes
    (line,) = axis.lines
    assert line.get_xydata().ravel() == pytest.approx([0, 100, 2e6, 200 / 3, 3e6, 100 / 3, 4e6, 100 / 3])
    assert line.get_drawstyle() == "steps-post" and axis.get_ylabel() == "runs on the plateau [%]"
    assert draw_onsets(onsets_page(tmp_path, absolute=[None, None, None]).results) is None
