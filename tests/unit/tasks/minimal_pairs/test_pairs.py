"""Reading minimal pairs, what counts as right, and intervals beside SciPy and by how often they cover."""

import json
import math
import random
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from megatron_ddrp.tasks.minimal_pairs import pairs, scoring
from megatron_ddrp.tasks.minimal_pairs.pairs import Paradigm, ParadigmScore, Result, difference, read_pairs
from tests.refusals import refused
from tests.unit.tasks.minimal_pairs.conftest import PAIRS, write_pairs

GOOD = '{"sentence_good": "a b", "sentence_bad": "b a"}\n'
BAD = {
    **{"": "no rows, expected at least one", "{}\n": "line 1: sentence_good is missing"},
    GOOD + "\n" + '{"sentence_good": "a b"}\n': "line 3: sentence_bad is missing",
    GOOD + '{"sentence_good": " ", "sentence_bad": "b"}\n': "line 2: sentence_good is ' '",
    GOOD + '{"sentence_good": 3, "sentence_bad": "b"}\n': "line 2: sentence_good is 3",
    **{GOOD + "{\n": "line 2: not JSON", GOOD[:-2] + ', "UID": 7}\n': "line 1: UID is 7"},
}


def test_a_bad_file_a_folder_without_files_and_a_uid_in_two_files_are_refused_in_one_line(tmp_path):
    refused("holds no .jsonl file", read_pairs, tmp_path)
    write_pairs(tmp_path / "blimp" / "data", uid="zero")
    refused(f"sentence_bad; maybe --data-dir {tmp_path}/blimp/data$", read_pairs, tmp_path)
    for content, reason in BAD.items():
        (tmp_path / "pairs.jsonl").write_text(content)
        refused(f"pairs.jsonl.*{re.escape(reason)}", read_pairs, tmp_path)
    (tmp_path / "pairs.jsonl").unlink()
    write_pairs(tmp_path, uid="one")
    (tmp_path / "two.jsonl").write_text((tmp_path / "one.jsonl").read_text())
    refused("two.jsonl: UID 'one' is in .*one.jsonl too", read_pairs, tmp_path)


def test_a_pair_belongs_to_its_uid_else_to_its_file(tmp_path):
    write_pairs(tmp_path / "data", uid="island", field="syntax/semantics", linguistics_term="islands")
    (tmp_path / "data" / "own.jsonl").write_text("\ufeff" + GOOD + "\n" + GOOD)
    island, own = read_pairs(tmp_path)
    assert (island.uid, island.field, island.term, len(island)) == ("island", "syntax_semantics", "islands", len(PAIRS))
    assert (own.uid, own.field, own.places) == ("own", "", [f"{own.file}, line {number}" for number in (1, 3)])
    assert [list(pair) for pair in zip(island.good, island.bad, strict=True)] == [list(pair) for pair in PAIRS]


def test_a_sample_is_the_same_every_time_and_known_by_its_sentences(tmp_path):
    write_pairs(tmp_path)
    (whole,), (first,), (again,) = read_pairs(tmp_path), read_pairs(tmp_path, 3), read_pairs(tmp_path, 3)
    assert len(first) == 3 and first == again
    assert [whole.good[whole.places.index(place)] for place in first.places] == first.good
    assert first.digest == again.digest != whole.digest
    assert read_pairs(tmp_path, 99)[0] == whole


def test_published_levels_are_shown_where_they_cover_all_paradigms(tmp_path):
    summary = tmp_path / "raw_results" / "summary"
    summary.mkdir(parents=True)
    row = {"UID": "a", "ngram": 0.1, "lstm": 0.2, "txl": 0.3, "gpt2": 0.4}
    (summary / "models_summary.jsonl").write_text(json.dumps(row) + "\n")
    levels = {"5-gram": {"a": 0.1}, "LSTM": {"a": 0.2}, "Transformer-XL": {"a": 0.3}, "GPT-2": {"a": 0.4}}
    assert pairs.published_levels(tmp_path, ["a"]) == levels
    (summary / "human_validation_summary.csv").write_text('"Condition","total_mean"\n"a",0.9\n')
    assert pairs.published_levels(tmp_path / "data", ["a"]) == levels | {"human": {"a": 0.9}}
    assert pairs.published_levels(tmp_path, ["a", "b"]) == {}
    assert pairs.published_levels(tmp_path / "data" / "deeper", ["a"]) == {}
    (summary / "models_summary.jsonl").write_text("{}\n")
    refused("not BLiMP's summary of models", pairs.published_levels, tmp_path, ["a"])


def row(good, bad):
    pieces = {"pieces_good": [5, 5, 4, 6][: len(good)], "pieces_bad": [5] * len(good)}
    return {"good": good, "bad": bad, "identical": 1} | pieces


def encoder(name, *accuracies, pairs=100):
    """A result whose n-th paradigm has this many hundredths right, the first pairs first."""
    cells = {
        f"p{n}": ParadigmScore(np.arange(pairs) < share * pairs, ties=0, undefined=0, piece_counts=0.5)
        for n, share in enumerate(accuracies)
    }
    return Result(name, cells)


def test_ties_numbers_that_are_none_and_piece_counts():
    for rounding in (-1e-5, 1e-5):
        found = pairs.cell(row([-1.0, -2.0, None, -3.0], [-2.0, -2.0 + rounding, -5.0, None]))
        assert found.right.tolist() == [True, False, False, False]
        assert (found.ties, found.undefined, found.accuracy) == (1, 2, 0.25)
    assert pairs.cell(row([-2.0, -2.0], [-2.0 - 4e-5, -2.0 + 4e-5])).right.tolist() == [True, False]
    # Shorter 1 of 4, equally long 2 of which one has identical pieces: ½, and a tie.
    assert pairs.cell(row([0.0] * 4, [0.0] * 4)).piece_counts == (1 + 0.5) / 4


def test_standard_errors_are_those_of_a_mean():
    result = encoder("e", 0.7, 0.4)
    of_pairs = [statistics.stdev(map(float, cell.right)) / 10 for cell in result.cells.values()]
    assert result.macro_average == pytest.approx(0.55)
    assert [cell.standard_error for cell in result.cells.values()] == pytest.approx(of_pairs)
    assert result.standard_error == pytest.approx(math.hypot(*of_pairs) / 2)
    assert result.paradigm_error == pytest.approx(statistics.stdev([0.7, 0.4]) / math.sqrt(2))
    lonely = encoder("e", 1.0, pairs=1)
    assert lonely.standard_error is None and lonely.paradigm_error is None


def test_the_interval_is_students_over_paradigms_or_over_the_pairs_of_one():
    def drawn(share):
        rights = {uid: np.array([rng.random() < share for _ in range(40)]) for uid in uids}
        return Result("e", {uid: ParadigmScore(right, 0, 0, 0.5) for uid, right in rights.items()})

    for uids in ("xyzuvw", "x"):
        rng = random.Random(0)
        first, second = drawn(0.7), drawn(0.5)
        gains = [np.subtract(first.cells[uid].right, second.cells[uid].right, dtype=float) for uid in uids]
        values = [gain.mean() for gain in gains] if len(uids) > 1 else gains[0]
        found = difference(first, second)
        assert found.seeds.mean == pytest.approx(first.macro_average - second.macro_average)
        assert found.items == pytest.approx(tuple(ttest_1samp(values, 0).confidence_interval(0.95)))


def test_an_interval_over_four_paradigms_covers_the_gain_in_95_of_100_cases():
    """The gain is 0. Percentiles of a bootstrap of four paradigms cover it in 83 % of the cases."""
    draws = np.random.default_rng(1)
    shares = draws.beta(6, 4, (2000, 2, 4))  # cases, encoders, paradigms
    rights = draws.random((2000, 2, 4, 40)) < shares[..., None]
    covered = 0
    for case in rights:
        sides = ({uid: ParadigmScore(right, 0, 0, 0.5) for uid, right in zip("wxyz", e, strict=True)} for e in case)
        low, high = difference(*(Result("", cells) for cells in sides)).items
        covered += low <= 0 <= high
    assert 0.93 <= covered / 2000 <= 0.97


def test_equal_differences_and_single_pairs_have_no_interval():
    """The means of several paradigms already contain the spread of their pairs."""
    assert difference(encoder("a", 0.6, 0.6), encoder("b", 0.5, 0.5)).items is None
    assert difference(encoder("a", 0.6), encoder("b", 0.5)).items[0] < 0.1
    assert difference(encoder("a", 1.0, pairs=1), encoder("b", 0.0, pairs=1)).items is None
    one, other = encoder("a", 1.0, 1.0, pairs=1), encoder("b", 0.0, 1.0, pairs=1)
    assert difference(one, other).items is not None


def test_the_table_and_the_heat_map_have_one_unit():
    paradigms = {uid: Paradigm(uid, Path("pairs.jsonl")) for uid in ("p0", "p1")}
    report = scoring.Report(paradigms, [encoder("e", 0.7, 0.4)], {}, "l2r")
    table = scoring.all_tables(report, [])["scores"]
    assert list(table.header[:4]) == ["encoder", "macro average", "± pairs", "± paradigms"]
    of_pairs = 100 * math.sqrt((0.7 * 0.3 + 0.4 * 0.6) / 99) / 2
    assert list(table.rows[0][:4]) == ["e", "55.00", f"{of_pairs:.2f}", "15.00"]  # (0.7 - 0.4) / 2 over paradigms
    pytest.importorskip("matplotlib")
    fields = {"p0": "syntax", "p1": "syntax"}
    cells, bar = scoring.draw_heat_map({"e": {"p0": 0.7, "p1": 0.25}}, 1, fields).axes
    (image,) = cells.images
    assert [float(text.get_text()) for text in cells.texts] == image.get_array()[:, 0].tolist() == [70, 25]
    assert image.get_clim() == bar.get_ylim() == (0, 100) and "[%]" in bar.get_ylabel()


def test_the_numbers_say_what_the_interval_is_over():
    for count, of, other in ((1, "over_pairs", "over_paradigms"), (2, "over_paradigms", "over_pairs")):
        paradigms = {f"p{number}": Paradigm(f"p{number}", Path("pairs.jsonl")) for number in range(count)}
        results = [encoder("a", *[0.6, 0.7][:count]), encoder("b", *[0.5, 0.58][:count])]
        report = scoring.Report(paradigms, results, {}, "l2r")
        (found,) = scoring.summary(report, report.differences)["differences"]
        assert found[of] == report.differences[0].items is not None and found[other] is None
        gain = pytest.approx(0.1 + 0.01 * (count > 1))
        assert (found["first"], found["second"], found["difference"]) == ("a", "b", gain)
