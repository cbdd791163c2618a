"""Verdicts over the ladder on rows whose truth is known."""

from __future__ import annotations

import pytest

from megatron_ddrp.tasks.ladder.claims import check_claims, judge, model_claims, paper_claims
from megatron_ddrp.tasks.ladder.tables import claims_table
from megatron_ddrp.tasks.ladder.verdicts import DEFINITIONS, over_the_ladder
from megatron_ddrp.tasks.statistics import EQUAL_SEEDS, NOT_VISIBLE, OPPOSITE, VISIBLE
from tests.unit.ladder.conftest import LOSS, RUNGS, full_rows, gain_rows, ladder_of, make_row


def verdict_of(rows, text, measure=LOSS):
    ladder = ladder_of(rows)
    found = {(item.claim.text, item.claim.measure): item for item in judge(ladder, paper_claims(ladder))}
    return found[text, measure].verdict


MTH = "MTH is better than MLM with BERT"


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ((0.050, 0.050, 0.050), "holds on every rung"),
        ((0.080, 0.050, 0.020), "holds on every rung, shrinking"),
        ((0.020, 0.050, 0.080), "holds on every rung, growing"),
        ((0.020, 0.080, 0.040), "holds on every rung, growing, then shrinking"),
        ((0.080, 0.020, 0.060), "holds on every rung, shrinking, then growing"),
        ((-0.020, -0.080, -0.040), "contradicted, gain falling, then rising"),
        ((0.080, -0.050, 0.040), "changes sign, gain falling, then rising"),
        ((0.000, 0.000, 0.000), "not told apart"),
        ((0.060, 0.030, 0.000), "holds on some rungs, shrinking"),
        ((0.050, 0.000, -0.050), "changes sign, gain falling"),
        ((-0.050, -0.050, -0.050), "contradicted"),
        ((-0.080, -0.050, -0.020), "contradicted, gain rising"),
        ((0.050, 0.050), "holds on every rung"),
        ((0.050,), "holds"),
        ((-0.050,), "contradicted"),
    ],
)
def test_the_words_tell_the_truth(gains, expected):
    assert verdict_of(gain_rows({"absolute+mth": gains}), MTH) == expected


def test_more_is_better_for_scores():
    rows = gain_rows({"ddrp": (0.05, 0.05, 0.05)}, measure="STS-B")
    rows = [row | {"values": row["values"] | {"GLUE average": 0.0}} for row in rows]
    assert verdict_of(rows, "DDRP is better than BERT", "GLUE average") == "holds on every rung"


def test_two_seeds_on_the_last_rung_are_decided_by_the_trend():
    """With two seeds the interval has 12.7 standard errors to either side; the band pools the rungs."""
    rows = gain_rows({"ddrp": (0.02, 0.02, 0.02)}, seeds=(4, 4, 2), noise=0.004)
    ladder = ladder_of(rows)
    (item,) = [item for item in judge(ladder, paper_claims(ladder)) if item.claim.measure == LOSS]
    assert item.verdicts == {RUNGS[0]: VISIBLE, RUNGS[1]: VISIBLE, RUNGS[2]: NOT_VISIBLE}
    assert item.verdict == "holds by the trend"
    assert item.band == 1


def test_a_gain_that_turns_has_no_line_and_no_band():
    """A line through 0.02, 0.08 and 0.02 is level, and its band far above the gains of the third rung's two seeds."""
    rows = gain_rows({"ddrp": (0.02, 0.08, 0.02)}, seeds=(6, 6, 2), noise=0.004)
    ladder = ladder_of(rows)
    (item,) = [item for item in judge(ladder, paper_claims(ladder)) if item.claim.measure == LOSS]
    assert item.verdicts[RUNGS[2]] == NOT_VISIBLE and item.trend.side(item.trend.rungs[2].x) == 1
    assert item.band == 0 and item.verdict == "holds on some rungs, growing, then shrinking"
    assert claims_table("claims", [item], ladder).rows[0][-2:] == ["no line", item.verdict]


def test_one_seed_after_equal_gains_makes_no_trend():
    """Gains of 0 without spread on the first rung must not make a single seed on the next one certain."""
    rows = [make_row(model, seed, RUNGS[0], {LOSS: 6.0}) for model in ("absolute", "ddrp") for seed in (1, 2, 3)]
    rows += [make_row("absolute", 1, RUNGS[1], {LOSS: 5.5}), make_row("ddrp", 1, RUNGS[1], {LOSS: 5.0})]
    ladder = ladder_of(rows)
    (item,) = judge(ladder, paper_claims(ladder))
    assert item.trend is None and item.band == 0 and item.verdict == "not told apart"


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ((0.02, 0.08, 0.14), "holds where measured, growing"),
        ((0.02, 0.08, 0.03), "holds where measured, growing, but lower in the one seed at 67.1 M"),
        ((-0.02, -0.08, -0.14), "contradicted, gain falling"),
        ((-0.02, -0.08, -0.01), "contradicted, gain falling, but higher in the one seed at 67.1 M"),
        ((0.05, 0.05, 0.01), "holds where measured"),
    ],
)
def test_one_seed_above_the_trend_that_turns_back_is_named(gains, expected):
    assert verdict_of(gain_rows({"absolute+mth": gains}, seeds=(4, 4, 1)), MTH) == expected


def test_a_rung_with_one_seed_has_no_verdict():
    assert verdict_of(gain_rows({"ddrp": (0.05, 0.05)}, seeds=(3, 1)), "DDRP is better than BERT").startswith(
        "holds where measured"
    )
    assert verdict_of(gain_rows({"ddrp": (0.05,)}, seeds=(1,)), "DDRP is better than BERT") == "no interval"


def test_equal_gains_hold_nothing():
    """Two seeds that agree exactly have no spread: they are no evidence, on their rung or in the trend."""
    assert verdict_of(gain_rows({"ddrp": (0.05,)}, seeds=(2,), noise=0.0), "DDRP is better than BERT") == "no interval"
    rows = gain_rows({"ddrp": (0.05, 0.05)}, seeds=(2, 2), noise=0.0)
    rows[1]["values"][LOSS] -= 0.2
    ladder = ladder_of(rows)
    (item,) = judge(ladder, paper_claims(ladder))
    assert item.verdicts == {RUNGS[0]: NOT_VISIBLE, RUNGS[1]: EQUAL_SEEDS}
    assert item.trend is None and item.verdict == "not told apart" and item.last[0] == RUNGS[0]


@pytest.mark.parametrize(
    ("verdicts", "band", "expected"),
    [
        ([VISIBLE, VISIBLE], 1, "holds where measured"),
        ([VISIBLE, NOT_VISIBLE, VISIBLE], 0, "holds on some rungs"),
        ([VISIBLE, NOT_VISIBLE, VISIBLE], 1, "holds by the trend"),
        ([NOT_VISIBLE], 0, "not told apart"),
        ([NOT_VISIBLE, NOT_VISIBLE], 1, "holds by the trend"),
        ([NOT_VISIBLE, NOT_VISIBLE], -1, "contradicted by the trend"),
        ([OPPOSITE, NOT_VISIBLE], 1, "contradicted"),
        ([OPPOSITE, VISIBLE], 1, "changes sign"),
        ([], 0, "no interval"),
    ],
)
def test_the_words_follow_their_definitions(verdicts, band, expected):
    assert over_the_ladder(verdicts, 3, band) == expected
    assert expected in DEFINITIONS


def test_the_papers_numbers_stand_beside_their_claims():
    ladder = ladder_of(full_rows())
    papers = {item.text: item.paper for item in paper_claims(ladder) if item.measure == "GLUE average"}
    assert papers == {
        "BERT-R is better than BERT": "+0.60",
        "DDRP is better than BERT": "+1.12",
        "DDRP is better than BERT-R": "+0.52",
        MTH: "+0.96",
        "MTH is better than TCD alone with BERT": "+0.42",
        "TCD alone is better than MLM with BERT": "+0.54",
        "MTH at half the budget is at least as good as MLM at the whole with BERT": "+0.02",
    }
    inside = {item.text: item.paper for item in paper_claims(ladder) if item.measure == "triangle share"}
    assert inside == {"DDRP shows the triangle in more sentences than BERT-R under MLM": "+13.17"}


def test_the_half_is_compared_with_the_whole_of_its_rung():
    rows = [make_row("absolute", seed, rung, {LOSS: 6.0}) for seed in (1, 2) for rung in RUNGS[:2]]
    rows += [make_row("absolute+mth", 1, RUNGS[0], {LOSS: 5.9})]
    rows += [make_row("absolute+mth", seed, RUNGS[1], {LOSS: 6.1 + seed / 10}, half=True) for seed in (1, 2)]
    ladder = ladder_of(rows)
    gains = {item.claim.text[:11]: item.gains for item in judge(ladder, paper_claims(ladder))}
    assert {rung: gain.values for rung, gain in gains["MTH at half"].items()} == {RUNGS[1]: pytest.approx((-0.2, -0.3))}
    assert list(gains["MTH is bett"]) == [RUNGS[0]]


def test_hcd_alone_and_models_with_flags():
    names = ("absolute", "absolute+hcd", "ddrp", "ddrp+free", "rope", "ddrp+contrast")
    ladder = ladder_of([make_row(name, 1, RUNGS[0], {LOSS: 6.0}) for name in names])
    texts = {claim.text for claim in paper_claims(ladder)}
    assert texts == {"HCD alone is better than MLM with BERT", "DDRP is better than BERT"}
    references = {claim.first.name: claim.second.name for claim in model_claims(ladder)}
    assert references == {
        **{"absolute+hcd": "absolute", "ddrp": "absolute", "rope": "absolute"},
        **{"ddrp+free": "ddrp", "ddrp+contrast": "ddrp"},
    }


@pytest.mark.parametrize("baseline", ["absolute", "absolute+0.001"])
def test_a_check_is_compared_with_its_baseline_or_its_first_arm(baseline):
    rows = [row | {"baseline": baseline} for row in full_rows() if row["check"]]
    check = ladder_of(rows if baseline == "absolute" else rows[::-1], "learning rate")
    (claim,) = check_claims(check)
    assert (claim.first.name, claim.second.name) == ("absolute+0.002", "absolute+0.001")
    (item,) = judge(check, [claim])
    assert item.last[1].values == pytest.approx((0.1,))
