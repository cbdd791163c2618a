"""Metrics beside hand-made numbers, scikit-learn, scipy, seqeval and SQuAD's script; resampled rows; plug-ins."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics

from megatron_ddrp.config.registry import load_plugin, plugins_forgotten_after
from megatron_ddrp.tasks.finetune import metrics as formulas
from megatron_ddrp.tasks.finetune.command import main
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.kinds.tokens import Tags
from megatron_ddrp.tasks.finetune.table_files import Task
from megatron_ddrp.tasks.statistics import BOOTSTRAP_SAMPLES
from tests.refusals import refused
from tests.unit.tasks.conftest import GLANCE, rows, words

accuracy, f1, macro_f1, matthews = (metric.value for metric in KINDS["classification"].metrics.values())
pearson, spearman = (metric.value for metric in KINDS["regression"].metrics.values())


def judged(kind, name, labels, predictions):
    """Return the score by scikit-learn or scipy."""
    if kind == "regression":
        return {"pearson": stats.pearsonr, "spearman": stats.spearmanr}[name](labels, predictions).statistic
    if kind == "multi-label" and name != "accuracy":
        return metrics.f1_score(labels, predictions, average={"f1": "micro", "macro-f1": "macro"}[name])
    if name == "macro-f1":
        return metrics.f1_score(labels, predictions, average="macro")
    by_name = {"accuracy": metrics.accuracy_score, "f1": metrics.f1_score, "matthews": metrics.matthews_corrcoef}
    return by_name[name](labels, predictions)


def drawn_data(kind, name, rng):
    """Return labels and predictions of a random size, number of classes, error rate and number of equal values."""
    rows = int(rng.integers(4, 400))
    if kind == "regression":
        labels = rng.normal(size=rows).round(int(rng.integers(0, 4))) * 10.0 ** rng.integers(-6, 7)
        return labels, labels + labels.std() * rng.normal(size=rows).round(int(rng.integers(0, 4)))
    shape = (rows, int(rng.integers(2, 6))) if kind == "multi-label" else (rows,)
    classes = 2 if kind == "multi-label" or name == "f1" else int(rng.integers(2, 9))
    labels, guesses = rng.integers(classes, size=(2, *shape))
    return labels, np.where(rng.random(shape) < rng.random(), labels, guesses).astype(float)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("tokens", "qa")])
def test_scores_are_those_of_scikit_learn_and_scipy(kind):
    for name, metric in KINDS[kind].metrics.items():
        rng, known = np.random.default_rng(3), 0
        for _ in range(60):
            labels, predictions = drawn_data(kind, name, rng)
            score = metric.value(labels, predictions)
            if kind == "multi-label" and name == "macro-f1" and not (labels.any(0) | predictions.any(0)).all():
                continue  # a label that does not occur counts as 0 there and is left out here
            if score is not None:
                known += 1
                assert score == pytest.approx(judged(kind, name, labels, predictions), rel=0, abs=1e-12), name
        assert known > 45, name


def test_a_label_that_does_not_occur_counts_as_0_and_a_single_one_is_no_special_case():
    labels, predictions = np.array([[1, 0, 0], [1, 1, 0]]), np.array([[1, 1, 0], [0, 1, 0]])
    assert macro_f1(labels, predictions) == pytest.approx((2 / 3 + 2 / 3) / 2)  # nothing of the third label
    assert f1(np.array([[1], [1]]), np.array([[1.0], [1.0]])) == 1


def test_the_loss_of_many_labels_is_their_mean_summed_over_rows():
    logits, labels = [[0.5, -2.0, 1.0], [3.0, 0.0, -1.0]], [[1, 0, 1], [0, 1, 1]]
    outputs, targets = torch.tensor(logits, dtype=torch.float64), torch.tensor(labels)
    pairs = [(x, y) for xs, ys in zip(logits, labels, strict=True) for x, y in zip(xs, ys, strict=True)]
    expected = sum(math.log1p(math.exp(-x if y else x)) for x, y in pairs) / 3
    assert KINDS["multi-label"].loss_sum(outputs, targets).item() == pytest.approx(expected, rel=1e-12)


def test_a_metric_of_another_kind_and_f1_of_three_classes_are_refused():
    KINDS["classification"].check_metric("f1", "ab")
    KINDS["multi-label"].check_metric("f1", "abcdefg")
    said = "--metric pearson: --kind tokens has seqeval, seqeval-strict, accuracy, macro"
    refused(said, KINDS["tokens"].check_metric, "pearson")
    said = "--metric f1: 3 labels, expected 2; use --metric macro-f1"
    refused(said, KINDS["classification"].check_metric, "f1", "abc")


def test_undefined_scores_are_none_and_the_rounding_of_a_constant_guess_grows_with_the_numbers():
    """Labels of any size have a score, and differences of 0.01 % of the predicted numbers count."""
    labels = np.array([1.0, 2.0, 4.0])
    for size in (1e-7, 1.0, 1e7):
        assert pearson(size * labels, size * labels) == pytest.approx(1)
    assert pearson(labels, 2000 + 0.1 * labels) == pytest.approx(1)
    assert pearson(1.7e9 + 60 * labels, 1.7e9 + 50 * labels) == pytest.approx(1)  # times, predicted around their mean
    assert pearson(1.7e9 + 60 * labels, 1.7e9 + 1e-5 * labels) is None
    assert spearman(labels, 2000 - 0.1 * labels) == pytest.approx(-1)
    nearly_one = [15.22750473022461, 15.227506637573242, 15.227505683898926]
    for metric, labels, predictions in (
        *((matthews, [0, 1, 1], [1, 1, 1]), (matthews, [1, 1, 1], [0, 1, 1]), (matthews, [0, 1, 1], [0, 1, math.nan])),
        *((pearson, [1.0, 2.0, 3.0], [2.0, 2.0, 2.0]), (pearson, [1000.5, 4000.5, 2000.5], nearly_one)),
        *((pearson, [1.0, 5.0, 3.0], [1e-9, 5e-9, 3e-9]), (pearson, [2.0, 2.0], [1.0, 3.0]), (pearson, [1.0], [1.0])),
        *((pearson, [1.0, 2.0], [1.0, math.nan]), (spearman, [1000.5, 4000.5, 2000.5], nearly_one)),
        *((spearman, [1.0, 2.0, 3.0], [2.0, 2.0, 2.0]), (spearman, [1.0, 2.0], [1.0, math.nan])),
        *((f1, [0, 0], [0.0, 0.0]), (f1, [0, 1], [0.0, math.nan]), (f1, [[0, 0]], [[0.0, 0.0]])),
        *((accuracy, [0, 1], [0, math.nan]), (macro_f1, [0, 1], [0.0, math.nan]), (macro_f1, [[0, 0]], [[0.0, 0.0]])),
    ):
        assert metric(np.array(labels), np.array(predictions)) is None, (metric, labels, predictions)


def test_scores_are_those_of_the_released_script():
    for case in json.loads((Path(__file__).parents[3] / "golden" / "squad_scores.json").read_text())["cases"]:
        scores = [formula(case["gold"], case["predicted"]) for formula in (formulas.exact_match, formulas.f1)]
        assert scores == pytest.approx(case["scores"], abs=1e-12), case


def test_scores_of_answers_are_means_over_questions():
    exact, mean_f1 = (KINDS["qa"].metrics[name].value for name in ("exact-match", "f1"))
    gold, predicted = [["blue"], [], ["red sky"]], ["blue", "blue", "sky"]
    assert exact(gold, predicted) == 1 / 3 and mean_f1(gold, predicted) == (1 + 0 + 2 / 3) / 3
    assert mean_f1([], []) is None and mean_f1(gold, ["blue", None, "sky"]) is None


ENTITIES = json.loads((Path(__file__).parents[3] / "golden" / "seqeval.json").read_text())["cases"]


def all_tags(scheme, types=("PER", "LOC")):
    return ["O", *(f"{prefix}-{kind}" for prefix in formulas.SCHEMES[scheme].prefixes for kind in types)]


def tags_of(sentences, labels):
    """Return sentences of tags in the form that the metrics take."""
    classes = np.array([labels.index(tag) for tags in sentences for tag in tags], float)
    return Tags(classes, np.cumsum([len(tags) for tags in sentences]), tuple(labels))


def scores(case, strict):
    """Return precision and recall from the counts, and F1 from the metric."""
    gold, predicted = ([line.split() for line in case[side]] for side in ("gold", "predicted"))
    labels = sorted({*all_tags(case.get("scheme", "IOB2")), *(tag for tags in gold + predicted for tag in tags)})
    entity = formulas.rules(labels, strict)
    found = [[set(formulas.entities_of(tags, entity)) for tags in side] for side in (gold, predicted)]
    entities, told = (sum(map(len, side)) for side in found)
    correct = sum(len(one & other) for one, other in zip(*found, strict=True))
    sides = (tags_of(sentences, labels) for sentences in (gold, predicted))
    f1 = KINDS["tokens"].metrics[formulas.STRICT if strict else "seqeval"].value(*sides)
    return [correct / told if told else 0.0, correct / entities if entities else 0.0, f1 or 0.0]


@pytest.mark.parametrize("case", ENTITIES, ids=lambda case: case["name"])
def test_scores_are_those_of_seqeval(case):
    assert scores(case, strict=True) == pytest.approx(case["strict"], abs=1e-12)
    if case.get("scheme") != "BILOU":  # whose tags seqeval's default mode does not know
        case = case | {"scheme": "IOBES"}
        assert scores(case, strict=False) == pytest.approx(case["lenient"], abs=1e-12)


def test_scores_without_entities_are_undefined_and_tags_that_name_none_refused():
    labels = all_tags("IOB2")
    outside, person = tags_of([["O"]], labels), tags_of([["B-PER"]], labels)
    for name in ("seqeval", formulas.STRICT):
        score = KINDS["tokens"].metrics[name].value
        assert score(outside, outside) is None and score(person, outside) == score(outside, person) == 0
    with pytest.raises(ValueError):
        score(outside, tags_of([], labels))
    with pytest.raises(ValueError, match="tags of BILOU have only strict rules; use --metric seqeval-strict"):
        formulas.rules(all_tags("BILOU"), strict=False)
    formulas.rules(["O", "B-PER", "I-per", "S-X-Y"], strict=False)
    for tag in ("NN", "B", "B-", "PER", "b-per", "-X", "M-PER", "PER-B", "B_PER", ""):
        for strict in (True, False):
            with pytest.raises(ValueError, match=f"tag '{tag}', expected O, or B- or I-"):
                formulas.rules(["O", tag], strict)


def test_the_scheme_is_found_from_the_prefixes():
    schemes = {"IOB2": ("", "B", "BI"), "IOE2": ("E", "IE"), "BILOU": ("BL", "BILU", "U")}
    schemes["IOBES"] = ("BE", "BIE", "BES", "BIES", "S")
    for scheme, several in schemes.items():
        for prefixes in several:
            tags = [f"{prefix}-PER" for prefix in prefixes]
            assert formulas.scheme_of(["O", *tags]) == formulas.scheme_of(tags) == scheme, prefixes


@pytest.mark.parametrize("prefixes", ["I", "BS", "BIS", "ES", "IS", "IU", "BU", "LU", "BIESLU", "BEL", "SU"])
def test_prefixes_of_no_scheme_have_no_strict_rules(prefixes):
    with pytest.raises(ValueError, match=r"have no strict rules, expected IOB2 \(B- I-\), .*; use --metric seqeval"):
        formulas.scheme_of(["O", *(f"{prefix}-PER" for prefix in prefixes)])


ROWS, COMPARED = 40, 60
RANDOM = np.random.default_rng(5)
TWO, FOUR = RANDOM.integers(2, size=ROWS), RANDOM.integers(4, size=ROWS)
GUESS_TWO = np.where(RANDOM.random(ROWS) < 0.7, TWO, 1 - TWO).astype(float)
GUESS_FOUR = np.where(RANDOM.random(ROWS) < 0.6, FOUR, RANDOM.integers(4, size=ROWS)).astype(float)
MANY = RANDOM.integers(2, size=(ROWS, 3))
GUESS_MANY = np.where(RANDOM.random((ROWS, 3)) < 0.8, MANY, 1 - MANY).astype(float)
NUMBERS = RANDOM.integers(0, 6, size=ROWS) / 2
GUESS_NUMBERS = (NUMBERS + RANDOM.normal(size=ROWS)).round(1)
ONE_APART = 1000 + 1e-6 * GUESS_NUMBERS + 1000 * np.eye(ROWS)[0]
"""One number up to rounding, except in row 0, which every third sample lacks."""


def scores_of(task, answers, predictions):
    """Return a task's metric on every bootstrap sample."""
    return KINDS[task.kind].resampled_scores(task, answers, predictions)


def compare(found, score, *sides):
    """Compare the first samples with the score of the rows, each repeated as often as the sample drew it."""
    for sample in range(COMPARED):
        rows = np.repeat(np.arange(ROWS), formulas.drawn_rows("own", ROWS)[sample])
        assert found[sample] == pytest.approx(score(rows, *sides) or 0.0, abs=1e-12)


RESAMPLED = {
    ("classification", "accuracy"): [(TWO, GUESS_TWO)],
    ("classification", "f1"): [(TWO, GUESS_TWO)],
    ("classification", "macro-f1"): [(FOUR, GUESS_FOUR)],
    # The last is undefined in every third sample.
    ("classification", "matthews"): [(TWO, GUESS_TWO), (FOUR, GUESS_FOUR), (np.eye(ROWS)[0], np.eye(ROWS)[0])],
    **{("multi-label", metric): [(MANY, GUESS_MANY)] for metric in ("accuracy", "f1", "macro-f1")},
    ("regression", "spearman"): [(NUMBERS, GUESS_NUMBERS), (NUMBERS, ONE_APART)],
    ("regression", "pearson"): [
        *((NUMBERS, GUESS_NUMBERS), (NUMBERS, ONE_APART), (1e-9 * NUMBERS, 1e-9 * GUESS_NUMBERS)),
        (1.7e9 + 60 * NUMBERS, 1.7e9 + 60 * GUESS_NUMBERS),
    ],
}
"""Kind and metric → pairs of labels and predictions."""


@pytest.mark.parametrize(("kind", "metric"), RESAMPLED)
def test_a_metric_of_resampled_rows_is_that_of_the_rows_repeated(kind, metric):
    for labels, predictions in RESAMPLED[kind, metric]:
        found = scores_of(Task("own", metric, kind), labels, predictions)
        assert found.shape == (BOOTSTRAP_SAMPLES,)
        compare(
            found, lambda rows, *sides: KINDS[kind].score(metric, *(side[rows] for side in sides)), labels, predictions
        )


TAGS = ("B-X", "I-X", "B-Y", "O")
LENGTHS = RANDOM.integers(1, 6, size=ROWS)
GOLD = [RANDOM.integers(4, size=length).astype(float) for length in LENGTHS]
GUESS = [np.where(RANDOM.random(len(row)) < 0.7, row, RANDOM.integers(4, size=len(row))) for row in GOLD]


def test_sentences_are_drawn_whole_and_questions_with_all_their_answers():
    def score(rows, kind, metric, *sides):
        drawn = ([side[row] for row in rows] for side in sides)
        return KINDS[kind].score(metric, *(map(tags, drawn) if kind == "tokens" else drawn))

    tags = partial(KINDS["tokens"].answers, Task("own", "accuracy", "tokens", TAGS))
    for metric in KINDS["tokens"].metrics:
        found = scores_of(Task("own", metric, "tokens", TAGS), tags(GOLD), tags(GUESS))
        compare(found, score, "tokens", metric, GOLD, GUESS)
    words = ["a red house", "the house", "green", ""]
    gold = [(words[number],) if number < 3 else () for number in FOUR]
    guess = [words[number] for number in GUESS_FOUR.astype(int)]
    for metric in KINDS["qa"].metrics:
        compare(scores_of(Task("own", metric, "qa"), gold, guess), score, "qa", metric, gold, guess)
        assert not scores_of(Task("own", metric, "qa"), gold, [None, *guess[1:]]).any()


def test_samples_draw_with_replacement_and_spread_as_a_binomial():
    drawn = formulas.drawn_rows("own", ROWS).astype(float)
    assert (drawn.sum(axis=1) == ROWS).all() and drawn.mean(axis=0) == pytest.approx(np.ones(ROWS), abs=0.1)
    assert drawn.var() == pytest.approx(1 - 1 / ROWS, rel=0.02)  # of a binomial distribution
    assert (drawn != formulas.drawn_rows("other", ROWS)).any()
    share, found = (TWO == GUESS_TWO).mean(), scores_of(Task("own", "accuracy"), TWO, GUESS_TWO)
    assert found.var() == pytest.approx(share * (1 - share) / ROWS, rel=0.1)
    predictions = np.where(NUMBERS > 1, np.nan, NUMBERS)
    assert not scores_of(Task("own", "pearson", "regression"), NUMBERS, predictions).any()


PLUGIN = """
import numpy as np
def rmse(labels, predictions):
    return np.sqrt(np.mean((labels - predictions) ** 2))
def negative(labels, predictions):
    error = rmse(labels, predictions)
    return None if error == 0 else -error
def rounded(labels, predictions):
    return np.float64(1 + 1e-12) if (labels == predictions).all() else float("nan")
def by_class(labels, predictions):
    return None if (predictions == predictions[0]).all() else -0.5
for function in (rmse, negative, rounded):
    function.kinds = ("regression",)
by_class.kinds = ("classification",)
METRICS = {"rmse": rmse, "negative": negative, "rounded": rounded, "by-class": by_class}
"""
LABELS = np.array([0.5, 3.0, 4.0, 0.0])


@pytest.fixture
def plugin(tmp_path):
    """This process knows the plug-in until the end of the test."""
    path = tmp_path / "own_metrics.py"
    path.write_text(PLUGIN, encoding="utf-8")
    with plugins_forgotten_after():
        load_plugin(path)
        yield


@pytest.mark.usefixtures("plugin")
def test_a_value_out_of_range_is_refused_and_counts_as_the_worst_in_samples_as_an_undefined_one_does():
    kind = KINDS["regression"]
    for name, value in (("rmse", "2"), ("negative", "-2")):
        metric, said = kind.metrics[name], rf"--metric {name} gave {value}: expected a number from -1 to 1"
        assert "1 / (1 + error)" in str(refused(said, metric.value, LABELS, LABELS + 2))
        assert abs(metric.value(LABELS, LABELS + 1)) == 1
    drawn = np.array([[4, 0, 0, 0], [0, 4, 0, 0], [1, 1, 1, 1]], np.uint8)
    half = LABELS + [0.0, 0.5, 0.5, 0.5]
    assert metric.samples(drawn, LABELS, half).tolist() == pytest.approx([-1, -0.5, -math.sqrt(3) / 4])
    assert metric.counted(LABELS, LABELS) == metric.counted(LABELS, LABELS * math.nan) == -1
    assert kind.metrics["pearson"].counted(LABELS, LABELS * math.nan) == 0
    task = Task(name="t", kind="classification", labels=("a", "b"), metric="by-class")
    assert KINDS["classification"].baseline(task, {"a": 1, "b": 2}, LABELS) == -1
    assert KINDS["classification"].baseline(replace(task, metric="matthews"), {"a": 1, "b": 2}, LABELS) == 0
    rounded = kind.metrics["rounded"].value
    assert rounded(LABELS, LABELS) == pytest.approx(1) and rounded(LABELS, LABELS[::-1]) is None
    # All rows together are in the range; without this no table could be made of finished runs.
    predictions = LABELS + [2.0, 0.0, 0.0, 0.0]
    assert metric.value(LABELS, predictions) == -1
    drawn = np.array([[4, 0, 0, 0], [2, 2, 0, 0], [0, 2, 2, 0], [1, 3, 0, 0]], np.uint8)
    assert metric.samples(drawn, LABELS, predictions).tolist() == [-1, -1, -1, -1]  # -2, -√2, undefined, -1
    task = Task(name="t", kind="regression", labels=(), metric="pearson")
    assert kind.constant_guess(task, LABELS) == 0
    assert kind.constant_guess(replace(task, metric="negative"), LABELS) is None


@pytest.mark.usefixtures("plugin")
def test_a_run_that_diverged_is_worse_than_every_other(topics, bert_folder, out, tmp_path, capsys):
    """At a learning rate of 1e12 no output is finite."""
    for name, count in (("train", 64), ("valid", 21)):
        lines = [json.dumps({"text": f"red {'cat ' * (n % 3)}", "label": n % 3 / 4 + 0.125}) for n in range(count)]
        (topics / f"{name}.jsonl").write_text("\n".join(lines))
    more = ("--kind", "regression", "--metric", "negative", "--lr", "1e-3", "1e12")
    main(words(topics, bert_folder, out, *GLANCE, *more))
    good, bad = rows(out)
    assert (bad["score"], bad["undefined"], bad["epoch_scores"]) == (-1, True, [-1]) and -1 < good["score"] < 0
    assert "negative -100.00 (undefined, counts as -100)" in capsys.readouterr().out
    (cells,) = json.loads((out / "table.json").read_text())["encoders"].values()
    assert cells["tasks"]["topics"]["point"]["lr"] == 1e-3 and cells["tasks"]["topics"]["constant_guess"] is None
    assert main(["--report", str(out), "--output-dir", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "table.md").read_text() == (out / "table.md").read_text()
