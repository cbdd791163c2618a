"""Entities against numbers that seqeval gave (tests/golden/seqeval.json) and a slow twin; undefined scores."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.kinds.tokens import Tags
from megatron_ddrp.tasks.finetune.metrics import SCHEMES, STRICT, count_entities, entities_of, rules, scheme_of

CASES = json.loads((Path(__file__).parents[3] / "golden" / "seqeval.json").read_text())["cases"]


def all_tags(scheme, types=("PER", "LOC")):
    return ["O", *(f"{prefix}-{kind}" for prefix in SCHEMES[scheme].prefixes for kind in types)]


def tags_of(sentences, labels):
    """Return sentences of tags in the form that the metrics take."""
    classes = np.array([labels.index(tag) for tags in sentences for tag in tags], float)
    return Tags(classes, np.cumsum([len(tags) for tags in sentences]), tuple(labels))


def scores(case, strict):
    """Return precision and recall from the counts, and F1 from the metric."""
    gold, predicted = ([line.split() for line in case[side]] for side in ("gold", "predicted"))
    labels = sorted({*all_tags(case.get("scheme", "IOB2")), *(tag for tags in gold + predicted for tag in tags)})
    entities, told, correct = np.sum(count_entities(gold, predicted, strict, labels), axis=0)
    sides = (tags_of(sentences, labels) for sentences in (gold, predicted))
    f1 = KINDS["tokens"].metrics[STRICT if strict else "seqeval"].value(*sides)
    return [correct / told if told else 0.0, correct / entities if entities else 0.0, f1 or 0.0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_scores_are_those_of_seqeval(case):
    assert scores(case, strict=True) == pytest.approx(case["strict"], abs=1e-12)
    if case.get("scheme") != "BILOU":  # whose tags seqeval's default mode does not know
        case = case | {"scheme": "IOBES"}
        assert scores(case, strict=False) == pytest.approx(case["lenient"], abs=1e-12)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_golden_cases_can_tell_the_modes_apart(scheme):
    own = [case for case in CASES if case.get("scheme", "IOB2") == scheme]
    assert sum(case["strict"] != case.get("lenient") for case in own) >= 5
    assert sum(0 < case["strict"][2] < 1 for case in own) >= 5


def strict_twin(tags, scheme):
    """Read a sentence word by word: which tag may begin an entity, go on with it and end it."""
    begins, ends = {"IOB2": ("B", ""), "IOE2": ("IE", "E"), "IOBES": ("BS", "ES"), "BILOU": ("BU", "LU")}[scheme]
    single = {"IOBES": "S", "BILOU": "U"}.get(scheme, "")
    found, first = [], None

    def close(end):
        if first is not None and (not ends or tags[end - 1][0] in ends):
            found.append((tags[first][2:], first, end))

    for place, tag in enumerate(tags):
        if first is not None:
            before = tags[place - 1]
            over = tag == "O" or tag[2:] != before[2:] or (ends and before[0] in ends) or tag[0] in ("B", single)
            if over:
                close(place)
                first = None
        if first is None and tag[0] in begins:
            first = place
    close(len(tags))
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_strict_entities_are_those_of_the_twin(scheme):
    draw, tags = random.Random(scheme), all_tags(scheme)
    for _ in range(500):
        sentence = draw.choices(tags, k=draw.randrange(1, 9))
        assert entities_of(sentence, rules(tags, strict=True)) == strict_twin(sentence, scheme), sentence


def test_entities_by_hand():
    tags = ["I-PER", "I-PER", "B-PER", "O", "I-LOC", "I-ORG"]
    assert entities_of(tags) == [("PER", 0, 2), ("PER", 2, 3), ("LOC", 4, 5), ("ORG", 5, 6)]
    assert entities_of(tags, rules(tags, strict=True)) == [("PER", 2, 3)]
    iobes = ["B-A", "I-A", "E-A", "I-A", "S-A", "I-A"]
    assert entities_of(iobes) == [("A", 0, 3), ("A", 3, 4), ("A", 4, 5), ("A", 5, 6)]
    assert entities_of(iobes, rules(iobes, strict=True)) == [("A", 0, 3), ("A", 4, 5)]
    assert entities_of([]) == []


def test_scores_without_entities_are_undefined():
    labels = all_tags("IOB2")
    outside, person = tags_of([["O"]], labels), tags_of([["B-PER"]], labels)
    for name in ("seqeval", STRICT):
        assert KINDS["tokens"].metrics[name].value(outside, outside) is None
        assert (
            KINDS["tokens"].metrics[name].value(person, outside)
            == KINDS["tokens"].metrics[name].value(outside, person)
            == 0
        )


def test_sentences_of_another_number_are_no_scores():
    with pytest.raises(ValueError):
        count_entities([["O"]], [])


@pytest.mark.parametrize("tag", ["NN", "B", "B-", "PER", "b-per", "-X", "M-PER", "PER-B", "B_PER", ""])
def test_tags_that_name_no_entity(tag):
    rules(["O", "B-PER", "I-per", "S-X-Y"], strict=False)
    for strict in (True, False):
        with pytest.raises(ValueError, match=f"tag '{tag}', expected O, or B- or I-"):
            rules(["O", tag], strict)


@pytest.mark.parametrize(
    ("prefixes", "scheme"),
    [("", "IOB2"), ("B", "IOB2"), ("BI", "IOB2"), ("E", "IOE2"), ("IE", "IOE2"), ("BE", "IOBES"), ("BIE", "IOBES")]
    + [("BES", "IOBES"), ("BIES", "IOBES"), ("S", "IOBES"), ("BL", "BILOU"), ("BILU", "BILOU"), ("U", "BILOU")],
)
def test_the_scheme_is_found_from_the_prefixes(prefixes, scheme):
    assert scheme_of(["O", *(f"{prefix}-PER" for prefix in prefixes)]) == scheme
    assert scheme_of([f"{prefix}-PER" for prefix in prefixes]) == scheme


@pytest.mark.parametrize("prefixes", ["I", "BS", "BIS", "ES", "IS", "IU", "BU", "LU", "BIESLU", "BEL", "SU"])
def test_prefixes_of_no_scheme_have_no_strict_rules(prefixes):
    with pytest.raises(ValueError, match=r"have no strict rules, expected IOB2 \(B- I-\), .*; use --metric seqeval"):
        scheme_of(["O", *(f"{prefix}-PER" for prefix in prefixes)])


def test_bilou_has_no_lenient_rules():
    with pytest.raises(ValueError, match="tags of BILOU have only strict rules; use --metric seqeval-strict"):
        rules(all_tags("BILOU"), strict=False)
