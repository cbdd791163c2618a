"""Entities against numbers that seqeval gave (tests/golden/seqeval.json), and the scores that are undefined."""

import json
from pathlib import Path

import pytest

from megatron_ddrp.tasks.finetune.entities import EntityScores, check_tags, entities_of, score_entities

CASES = json.loads((Path(__file__).parents[2] / "golden" / "seqeval.json").read_text())["cases"]


def scores(case, strict):
    gold, predicted = ([line.split() for line in case[side]] for side in ("gold", "predicted"))
    found = score_entities(gold, predicted, strict)
    return [0.0 if value is None else value for value in (found.precision, found.recall, found.f1)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_scores_are_those_of_seqeval(case):
    assert scores(case, strict=False) == pytest.approx(case["lenient"], abs=1e-12)
    if "strict" in case:  # of IOBES the strict rules are not written here
        assert scores(case, strict=True) == pytest.approx(case["strict"], abs=1e-12)


def test_the_golden_cases_can_tell_the_two_modes_apart():
    assert sum(case.get("strict", case["lenient"]) != case["lenient"] for case in CASES) >= 10


def test_entities_by_hand():
    tags = ["I-PER", "I-PER", "B-PER", "O", "I-LOC", "I-ORG"]
    assert entities_of(tags) == [("PER", 0, 2), ("PER", 2, 3), ("LOC", 4, 5), ("ORG", 5, 6)]
    assert entities_of(tags, strict=True) == [("PER", 2, 3)]
    assert entities_of(["B-A", "I-A", "E-A", "I-A", "S-A", "I-A"]) == [
        ("A", 0, 3),
        ("A", 3, 4),
        ("A", 4, 5),
        ("A", 5, 6),
    ]
    assert entities_of([]) == []


def test_scores_without_entities_are_undefined():
    nothing = score_entities([["O"]], [["O"]])
    assert (nothing.precision, nothing.recall, nothing.f1) == (None, None, None)
    only_gold = EntityScores(gold=2, predicted=0, correct=0)
    assert (only_gold.precision, only_gold.recall, only_gold.f1) == (None, 0.0, 0.0)


def test_sentences_of_another_number_are_no_scores():
    with pytest.raises(ValueError):
        score_entities([["O"]], [])


@pytest.mark.parametrize("tag", ["NN", "B", "B-", "PER", "b-per", "-X"])
def test_tags_that_name_no_entity(tag):
    check_tags(["O", "B-PER", "I-per", "S-X-Y"])
    with pytest.raises(ValueError, match=f"tag '{tag}', expected O, or B- or I-"):
        check_tags(["O", tag])
