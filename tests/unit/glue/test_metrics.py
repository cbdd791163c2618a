"""Scores against hand-made numbers, and the undefined ones."""

import math

import numpy as np
import pytest

from megatron_ddrp.tasks.finetune.metrics import accuracy, matthews, pearson


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


@pytest.mark.parametrize(
    ("metric", "labels", "predictions"),
    [
        (matthews, [0, 1, 1], [1, 1, 1]),
        (matthews, [1, 1, 1], [0, 1, 1]),
        (pearson, [1.0, 2.0, 3.0], [2.0, 2.0, 2.0]),
        (pearson, [2.0, 2.0], [1.0, 3.0]),
        (pearson, [1.0, 2.0], [1.0, math.nan]),
        (pearson, [1.0], [1.0]),
        (accuracy, [0, 1], [0, math.nan]),
        (matthews, [0, 1, 1], [0, 1, math.nan]),
    ],
)
def test_undefined_scores_are_none(metric, labels, predictions):
    assert metric(np.array(labels), np.array(predictions)) is None
