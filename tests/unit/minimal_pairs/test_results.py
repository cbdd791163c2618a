"""What counts as right, standard errors, and the bootstrap beside loops that draw pair by pair."""

import math
import random
import statistics

import numpy as np
import pytest

from megatron_ddrp.tasks.minimal_pairs import figure as heat_map
from megatron_ddrp.tasks.minimal_pairs.pairs import Paradigm
from megatron_ddrp.tasks.minimal_pairs.report import Report
from megatron_ddrp.tasks.minimal_pairs.results import Cell, Result, cell, difference


def row(good, bad, pieces=((5, 5), (5, 5), (4, 5), (6, 5)), identical=1):
    counts = list(pieces)[: len(good)]
    return {
        "good": good,
        "bad": bad,
        "pieces_good": [first for first, _ in counts],
        "pieces_bad": [second for _, second in counts],
        "identical": identical,
    }


def encoder(name, *accuracies, pairs=100):
    """A result whose n-th paradigm has this many hundredths right, the first pairs first."""
    cells = {
        f"p{n}": Cell(np.arange(pairs) < share * pairs, ties=0, undefined=0, piece_counts=0.5)
        for n, share in enumerate(accuracies)
    }
    return Result(name, cells)


def test_ties_and_what_is_no_number_are_never_right():
    found = cell(row([-1.0, -2.0, None, -3.0], [-2.0, -2.0 - 1e-5, -5.0, None]), "strict")
    assert found.right.tolist() == [True, False, False, False]
    assert (found.ties, found.undefined, found.accuracy) == (1, 2, 0.25)
    first = cell(row([-1.0, -2.0, None, -3.0], [-2.0, -2.0 + 1e-5, -5.0, None]), "first")
    assert first.right.tolist() == [True, True, False, False]
    assert (first.ties, first.undefined) == (1, 2)


def test_a_difference_beyond_rounding_decides():
    assert cell(row([-2.0, -2.0], [-2.0 - 4e-5, -2.0 + 4e-5]), "strict").right.tolist() == [True, False]


def test_piece_counts_alone_prefer_the_shorter_sentence():
    """Shorter 1 of 4, equally long 2 of which one has identical pieces: ½, and a tie."""
    scores = row([0.0] * 4, [0.0] * 4)
    assert cell(scores, "strict").piece_counts == (1 + 0.5) / 4
    assert cell(scores, "first").piece_counts == (1 + 0.5 + 1) / 4


def test_standard_errors_are_those_of_a_mean():
    result = encoder("e", 0.7, 0.4)
    of_pairs = [statistics.stdev(map(float, cell.right)) / 10 for cell in result.cells.values()]
    assert result.macro_average == pytest.approx(0.55)
    assert [cell.standard_error for cell in result.cells.values()] == pytest.approx(of_pairs)
    assert result.standard_error == pytest.approx(math.hypot(*of_pairs) / 2)
    assert result.paradigm_error == pytest.approx(statistics.stdev([0.7, 0.4]) / math.sqrt(2))
    lonely = encoder("e", 1.0, pairs=1)
    assert lonely.standard_error is None and lonely.paradigm_error is None


def quantiles(draws):
    ordered = sorted(draws)
    return ordered[int(0.025 * len(ordered))], ordered[int(0.975 * len(ordered))]


def test_intervals_are_those_of_drawing_pairs_or_paradigms_anew():
    rng = random.Random(0)
    first = Result("a", {uid: Cell(np.array([rng.random() < 0.7 for _ in range(40)]), 0, 0, 0.5) for uid in "xyzuvw"})
    second = Result("b", {uid: Cell(np.array([rng.random() < 0.5 for _ in range(40)]), 0, 0, 0.5) for uid in "xyzuvw"})
    gains = [
        [int(a) - int(b) for a, b in zip(first.cells[uid].right, second.cells[uid].right, strict=True)]
        for uid in first.cells
    ]

    def anew(values):
        """The mean of values drawn with replacement, its deviation as large as that of other values."""
        mean, widening = statistics.fmean(values), math.sqrt(len(values) / (len(values) - 1))
        return mean + widening * (statistics.fmean(rng.choices(values, k=len(values))) - mean)

    by_pairs = [statistics.fmean(anew(g) for g in gains) for _ in range(3000)]
    means = [statistics.fmean(g) for g in gains]
    by_paradigms = [anew(means) for _ in range(3000)]
    found = difference(first, second)
    assert found.difference == pytest.approx(first.macro_average - second.macro_average)
    assert found.over_pairs == pytest.approx(quantiles(by_pairs), abs=0.012)
    assert found.over_paradigms == pytest.approx(quantiles(by_paradigms), abs=0.012)


def test_the_two_intervals_answer_two_questions():
    """Every pair of a paradigm gains the same: no doubt about pairs, much about paradigms; and the other way round."""
    apart = difference(encoder("a", 1.0, 0.0, 1.0), encoder("b", 0.0, 0.0, 0.0))
    assert apart.over_pairs == pytest.approx((2 / 3, 2 / 3))
    assert apart.over_paradigms == pytest.approx((2 / 3 * (1 - math.sqrt(3 / 2)), 1.0))  # no gain is above 1
    alike = difference(encoder("a", 0.6, 0.6), encoder("b", 0.5, 0.5))
    assert alike.over_paradigms == pytest.approx((0.1, 0.1))
    assert alike.over_pairs[0] < 0.1 < alike.over_pairs[1]
    assert difference(encoder("a", 0.6), encoder("b", 0.5)).over_paradigms is None
    assert difference(encoder("a", 0.6), encoder("b", 0.5)) == difference(encoder("a", 0.6), encoder("b", 0.5))


def test_few_pairs_give_a_wide_interval_and_one_pair_gives_none():
    """The interval of 2 pairs in each of 400 paradigms is that of the mean's standard error; resampling alone
    would make it narrower by √2."""
    rng = np.random.default_rng(0)
    cells = [{f"p{n}": Cell(rng.random(2) < share, 0, 0, 0.5) for n in range(400)} for share in (0.7, 0.5)]
    first, second = Result("a", cells[0]), Result("b", cells[1])
    gains = [cells[0][uid].right.astype(int) - cells[1][uid].right for uid in cells[0]]
    error = math.sqrt(sum(gain.var(ddof=1) / 2 for gain in gains)) / 400
    low, high = difference(first, second).over_pairs
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.05)
    one, other = encoder("a", 1.0, 1.0, pairs=1), encoder("b", 0.0, 1.0, pairs=1)
    assert difference(one, other).over_pairs is None and difference(one, other).over_paradigms is not None
    mixed = {uid: Result(uid, {"x": encoder(uid, 1.0).cells["p0"], **encoder(uid, 0.0, pairs=1).cells}) for uid in "ab"}
    assert difference(mixed["a"], mixed["b"]).over_pairs is None


def test_the_colours_of_the_heat_map_and_its_numbers_have_one_unit(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    kept = []
    monkeypatch.setattr(heat_map, "save_figure", lambda plt, figure, path: kept.append(figure))
    paradigms = {uid: Paradigm(uid, tmp_path, field="syntax") for uid in ("p0", "p1")}
    heat_map.draw(Report(paradigms, [encoder("e", 0.7, 0.25)], {}, "l2r", "strict"), tmp_path / "heatmap.png")
    cells, *_, bar = kept[0].axes
    (image,) = cells.images
    assert [float(text.get_text()) for text in cells.texts[::2]] == image.get_array()[:, 0].tolist() == [70, 25]
    assert image.get_clim() == bar.get_ylim() == (0, 100) and "[%]" in bar.get_ylabel()
