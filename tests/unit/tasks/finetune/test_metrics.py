"""Scores against hand-made numbers, scikit-learn and scipy, and the undefined ones."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks import finetune
from megatron_ddrp.tasks.finetune.kinds import KINDS

accuracy, f1, macro_f1, matthews = (metric.value for metric in KINDS["classification"].metrics.values())
pearson, spearman = (metric.value for metric in KINDS["regression"].metrics.values())


def judged(kind, name, labels, predictions):
    """Return the score by scikit-learn or scipy."""
    from scipy import stats
    from sklearn import metrics

    if kind == "regression":
        return {"pearson": stats.pearsonr, "spearman": stats.spearmanr}[name](labels, predictions).statistic
    if kind == "multi-label" and name != "accuracy":
        return metrics.f1_score(labels, predictions, average={"f1": "micro", "macro-f1": "macro"}[name])
    return {
        "accuracy": metrics.accuracy_score,
        "f1": metrics.f1_score,
        "macro-f1": lambda *sides: metrics.f1_score(*sides, average="macro"),
        "matthews": metrics.matthews_corrcoef,
    }[name](labels, predictions)


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
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in KINDS if kind not in ("tokens", "qa") for name in KINDS[kind].metrics]
)
def test_scores_are_those_of_scikit_learn_and_scipy(kind, name):
    rng, known = np.random.default_rng(3), 0
    for _ in range(60):
        labels, predictions = drawn_data(kind, name, rng)
        score = KINDS[kind].metrics[name].value(labels, predictions)
        if kind == "multi-label" and name == "macro-f1" and not (labels.any(0) | predictions.any(0)).all():
            continue  # a label that does not occur counts as 0 there and is left out here
        if score is not None:
            known += 1
            assert score == pytest.approx(judged(kind, name, labels, predictions), rel=0, abs=1e-12)
    assert known > 45


def test_accuracy_counts_equal_entries():
    assert accuracy(np.array([0, 1, 2, 1]), np.array([0, 1, 1, 1])) == 0.75


def test_matthews_follows_its_definition():
    labels = np.array([1] * 6 + [0] * 4)
    predictions = np.array([1, 1, 1, 1, 1, 0, 1, 0, 0, 0])  # 5 true and 1 false positives, 3 true and 1 false negatives
    expected = (5 * 3 - 1 * 1) / math.sqrt((5 + 1) * (5 + 1) * (3 + 1) * (3 + 1))
    assert matthews(labels, predictions) == pytest.approx(expected)


def test_pearson_follows_its_definition():
    labels, predictions = np.array([0.0, 2.5, 5.0, 3.2]), np.array([0.1, 2.0, 4.0, 4.5])
    centred = labels - labels.mean(), predictions - predictions.mean()
    expected = (centred[0] @ centred[1]) / math.sqrt((centred[0] @ centred[0]) * (centred[1] @ centred[1]))
    assert pearson(labels, predictions) == pytest.approx(expected)


def f1_twin(labels, predictions):
    """2·TP / (2·TP + FP + FN) of one class, from lists of bools."""
    both = sum(a and b for a, b in zip(labels, predictions, strict=True))
    return 2 * both / (sum(labels) + sum(predictions))


def test_f1_is_that_of_the_second_label():
    labels, predictions = np.array([1, 1, 1, 0, 0]), np.array([1.0, 0.0, 1.0, 1.0, 0.0])
    assert f1(labels, predictions) == pytest.approx(f1_twin(labels == 1, predictions == 1)) == pytest.approx(2 / 3)
    assert f1(labels, 1 - labels) == 0


def test_f1_of_many_labels_counts_over_all_of_them():
    labels, predictions = np.array([[1, 0, 0], [1, 1, 0]]), np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    twin = f1_twin((labels == 1).ravel().tolist(), (predictions == 1).ravel().tolist())
    assert f1(labels, predictions) == pytest.approx(twin) == pytest.approx(2 / 3)
    assert f1(labels[:, :1], predictions[:, :1]) == 1  # a single label is no special case


def test_macro_f1_is_the_mean_over_the_classes_that_occur():
    labels, predictions = np.array([0, 0, 1, 2, 2, 2]), np.array([0, 1, 1, 2, 2, 5])
    twin = [f1_twin((labels == c).tolist(), (predictions == c).tolist()) for c in (0, 1, 2, 5)]
    assert macro_f1(labels, predictions) == pytest.approx(sum(twin) / 4)
    many, guesses = np.array([[1, 0, 0], [1, 1, 0]]), np.array([[1, 1, 0], [0, 1, 0]])
    assert macro_f1(many, guesses) == pytest.approx((2 / 3 + 2 / 3) / 2)  # nothing of the third label


def test_accuracy_of_many_labels_wants_whole_rows():
    assert accuracy(np.array([[1, 0], [1, 1]]), np.array([[1.0, 0.0], [1.0, 0.0]])) == 0.5


def test_the_loss_of_many_labels_is_their_mean_summed_over_rows():
    logits, labels = [[0.5, -2.0, 1.0], [3.0, 0.0, -1.0]], [[1, 0, 1], [0, 1, 1]]
    outputs, targets = torch.tensor(logits, dtype=torch.float64), torch.tensor(labels)
    pairs = [(x, y) for xs, ys in zip(logits, labels, strict=True) for x, y in zip(xs, ys, strict=True)]
    expected = sum(math.log1p(math.exp(-x if y else x)) for x, y in pairs) / 3
    assert KINDS["multi-label"].loss_sum(outputs, targets).item() == pytest.approx(expected, rel=1e-12)


def test_spearman_is_pearson_of_mean_ranks():
    labels, predictions = np.array([1.0, 5.0, 5.0, 2.0, 9.0]), np.array([0.1, 0.2, 0.9, 0.2, 0.8])
    mean_ranks = [1.0, 3.5, 3.5, 2.0, 5.0], [1.0, 2.5, 5.0, 2.5, 4.0]
    assert spearman(labels, predictions) == pytest.approx(pearson(*map(np.array, mean_ranks)))
    assert spearman(labels, np.exp(labels)) == pytest.approx(1.0)


ELSEWHERE = {
    ("table_files.py", "classification"),  # the default of a task, as in GLUE
    ("table_files.py", "tokens"),  # the column of a CoNLL file's words
}
"""(file, text) of names of kinds outside their files."""


def test_no_kinds_name_outside_its_file():
    """A new kind is one file and one line, because everything that differs by kind belongs to the kind."""
    folder = Path(finetune.__file__).parent
    found = {
        (file.name, node.value)
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in KINDS
    }
    assert found <= ELSEWHERE
    assert list(KINDS) == [kind.name for kind in KINDS.values()]


def test_metrics_of_other_kinds_are_refused():
    KINDS["classification"].check_metric("f1", "ab")
    KINDS["multi-label"].check_metric("f1", "abcdefg")
    with pytest.raises(UserError, match="--metric pearson: --kind tokens has seqeval, seqeval-strict, accuracy, macro"):
        KINDS["tokens"].check_metric("pearson")
    with pytest.raises(UserError, match="--metric f1: 3 labels, expected 2; use --metric macro-f1"):
        KINDS["classification"].check_metric("f1", "abc")


@pytest.mark.parametrize(
    ("metric", "labels", "predictions"),
    [
        (matthews, [0, 1, 1], [1, 1, 1]),
        (matthews, [1, 1, 1], [0, 1, 1]),
        (pearson, [1.0, 2.0, 3.0], [2.0, 2.0, 2.0]),
        (pearson, [1000.5, 4000.5, 2000.5], [15.22750473022461, 15.227506637573242, 15.227505683898926]),
        (spearman, [1000.5, 4000.5, 2000.5], [15.22750473022461, 15.227506637573242, 15.227505683898926]),
        (pearson, [1.0, 5.0, 3.0], [1e-9, 5e-9, 3e-9]),
        (pearson, [2.0, 2.0], [1.0, 3.0]),
        (pearson, [1.0, 2.0], [1.0, math.nan]),
        (pearson, [1.0], [1.0]),
        (accuracy, [0, 1], [0, math.nan]),
        (matthews, [0, 1, 1], [0, 1, math.nan]),
        (spearman, [1.0, 2.0, 3.0], [2.0, 2.0, 2.0]),
        (spearman, [1.0, 2.0], [1.0, math.nan]),
        (f1, [0, 0], [0.0, 0.0]),
        (f1, [0, 1], [0.0, math.nan]),
        (f1, [[0, 0]], [[0.0, 0.0]]),
        (macro_f1, [0, 1], [0.0, math.nan]),
        (macro_f1, [[0, 0]], [[0.0, 0.0]]),
    ],
)
def test_undefined_scores_are_none(metric, labels, predictions):
    assert metric(np.array(labels), np.array(predictions)) is None


def test_the_rounding_of_a_constant_guess_grows_with_the_numbers():
    """Labels of any size have a score, and differences of 0.01 % of the predicted numbers count."""
    labels = np.array([1.0, 2.0, 4.0])
    for size in (1e-7, 1.0, 1e7):
        assert pearson(size * labels, size * labels) == pytest.approx(1)
    assert pearson(labels, 2000 + 0.1 * labels) == pytest.approx(1)
    assert pearson(1.7e9 + 60 * labels, 1.7e9 + 50 * labels) == pytest.approx(1)  # times, predicted around their mean
    assert pearson(1.7e9 + 60 * labels, 1.7e9 + 1e-5 * labels) is None
    assert spearman(labels, 2000 - 0.1 * labels) == pytest.approx(-1)
