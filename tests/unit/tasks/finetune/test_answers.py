"""Exact match and F1 against SQuAD's script (tests/golden/squad_scores.json), and by hand."""

import json
from pathlib import Path

import pytest

from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.metrics import exact_match, f1, normalize

CASES = json.loads((Path(__file__).parents[3] / "golden" / "squad_scores.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['gold']}-{case['predicted']}")
def test_scores_are_those_of_the_released_script(case):
    scores = [exact_match(case["gold"], case["predicted"]), f1(case["gold"], case["predicted"])]
    assert scores == pytest.approx(case["scores"], abs=1e-12)


def test_normalization_by_hand():
    assert normalize(" The U.S.  Army's\tan-other\u00a0a ") == "us armys another"
    assert normalize("theory of Anna") == "theory of anna"  # articles are whole words
    assert normalize("«Straße»") == "«straße»"  # punctuation beyond ASCII stays


def test_f1_by_hand():
    assert f1(["red blue blue green"], "blue blue blue") == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert f1(["green", "blue"], "blue sky") == pytest.approx(2 / 3)  # the best of several
    assert f1(["blue"], "red") == 0


def test_questions_without_an_answer():
    assert (exact_match([], ""), f1([], "")) == (1, 1)
    assert (exact_match([], "blue"), f1([], "blue")) == (0, 0)
    assert (exact_match(["blue"], ""), f1(["blue"], "")) == (0, 0)


def test_means_over_questions():
    means = KINDS["qa"].metrics
    gold, predicted = [["blue"], [], ["red sky"]], ["blue", "blue", "sky"]
    assert means["exact-match"].value(gold, predicted) == 1 / 3
    assert means["f1"].value(gold, predicted) == (1 + 0 + 2 / 3) / 3
    assert means["f1"].value([], []) is None and means["f1"].value(gold, ["blue", None, "sky"]) is None


def test_the_mean_of_the_golden_cases_is_that_of_the_released_script():
    gold, predicted = ([case[key] for case in CASES] for key in ("gold", "predicted"))
    exact, f1s = zip(*(case["scores"] for case in CASES), strict=True)
    assert KINDS["qa"].metrics["exact-match"].value(gold, predicted) == sum(exact) / len(CASES)
    assert KINDS["qa"].metrics["f1"].value(gold, predicted) == pytest.approx(sum(f1s) / len(CASES), abs=1e-12)
