"""Onsets: shares and tests beside loops from their definitions, what a row has spent, words and cells of a page."""

import math
import random

import pytest
from scipy.stats import norm

from megatron_ddrp.lab.compare.page import Page, draw_onsets
from megatron_ddrp.lab.compare.rows import UNITS, as_run, times_on_plateau
from megatron_ddrp.tasks.statistics import STEP_SECONDS, TRAINING_LOSS, format_median, log_rank, share_resting
from tests.unit.lab.compare.made_rows import LOSS, RUNGS, make_row

GRID = 200_000
"""Tokens between two points of a curve: as many as the loss is averaged over."""


def row(model, seed, onset, end=20, **other):
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


@pytest.mark.parametrize("seed", range(5))
def test_shares_and_tests_are_those_of_their_definitions(seed):
    draw = random.Random(seed)
    arms = [[(float(draw.randint(1, 9)), draw.random() < 0.7) for _ in range(count)] for count in (6, 9)]
    for times in arms:
        assert share_resting(times) == [pytest.approx(point) for point in slow_shares(times)]
    found = log_rank(*arms)
    assert found.side == pytest.approx(slow_log_rank(*arms), rel=1e-9) and found.seeds == 6
    assert found.p_value == pytest.approx(2 * norm.sf(abs(found.side)))


@pytest.mark.parametrize(
    ("left", "ended", "median"),
    [
        ([1, 2, 2.4], [], "2.0"),
        ([1, 2], [4, 4], "2.0"),
        ([1], [4, 4.5], "> 4.5"),
        ([2, 3], [1], "2.0"),  # a run that was cut off early does not count as one that rested longer
        (range(1, 13), [20] * 12, "12.0"),  # the share is 0.5000000000000001
        ([], [], ""),
    ],
)
def test_the_median_is_where_half_of_the_runs_have_left(left, ended, median):
    times = [*((float(time), True) for time in left), *((float(time), False) for time in ended)]
    assert format_median(times, 1) == median


def test_a_median_in_steps_predictions_and_seconds_is_that_of_the_row():
    def told(**about):
        found = times_on_plateau({1: as_run(row("ddrp", 1, 10, **about))}, unit=unit)
        return format_median(found, UNITS[unit])

    rates = sum(GRID / 100 * (0.4 - 0.2 * step / 2000) for step in range(1000))  # 1,000 of 2,000 steps
    expected = {
        "million tokens": "2.00",
        "steps": "1,000",
        "million predictions": f"{rates / 1e6:.2f}",
        "seconds": "250",
    }
    for unit, median in expected.items():
        assert told(common={"lr": 0.1}, flags={"mask-prob": "0.4:0.2"}) == median
        assert told(common={}, steps=0) == ("2.00" if unit == "million tokens" else "")
    unit = "million predictions"
    assert (told(), told(common={"mask_prob": 0.3})) == ("0.30", "0.60")
    assert told(common={}, flags={"objective-phases": "clm:0.25"}) == "1.15"  # half of the tokens, and 15 % of the rest


@pytest.fixture
def page(tmp_path):
    """Return a function from the onsets of each model to their page."""

    def make(**arms):
        rows = [row(model, seed, onset) for model, onsets in arms.items() for seed, onset in enumerate(onsets)]
        return Page(list(map(as_run, rows)), tmp_path)

    return make


def test_onsets_are_judged_together_and_have_no_gains(page):
    arms = {"absolute": [None] * 6, "ddrp": [10, 11, 12, 13, 14, 15], "t5": [None] * 6, "rope": [5, 6]}
    found = page(**arms, **{"ddrp+mth": [2, 3, 4, 5, 6, 7]})
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
    later = page(absolute=[2, 3, 4, 5], ddrp=[10, 11, 12, 13]).numbers()["onsets"][1]
    assert later["against absolute"].startswith("later, p = ")


def test_the_figure_shows_the_shares_up_to_the_end_of_the_runs(page):
    pytest.importorskip("matplotlib")
    (axis,) = draw_onsets(page(absolute=[None, 10, 15]).results).axes
    (line,) = axis.lines
    assert line.get_xydata().ravel() == pytest.approx([0, 100, 2e6, 200 / 3, 3e6, 100 / 3, 4e6, 100 / 3])
    assert line.get_drawstyle() == "steps-post" and axis.get_ylabel() == "runs on the plateau [%]"
    assert draw_onsets(page(absolute=[None, None, None]).results) is None
