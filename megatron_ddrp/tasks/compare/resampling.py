"""Scores on resampled development rows, which show how much a score depends on the choice of rows.

A bootstrap sample draws rows (texts, sentences, questions) with replacement, as many as there are (Efron and
Tibshirani, An Introduction to the Bootstrap, 1993, chapter 6), and the metric is computed on it. All models see the
same samples of a file, so that their differences are paired. A sample is stored as the count of each row: then a matrix
product computes sums over rows for all samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from megatron_ddrp.tasks.finetune import answers as qa
from megatron_ddrp.tasks.finetune.entities import STRICT, score_entities
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.kinds.tokens import Tags
from megatron_ddrp.tasks.finetune.metrics import rounding_error
from megatron_ddrp.tasks.finetune.task import Task
from megatron_ddrp.tasks.statistics import BOOTSTRAP_SAMPLES, BOOTSTRAP_SEED

_TOGETHER = 100
"""Number of samples scored at a time."""

Terms = tuple[np.ndarray, np.ndarray]
"""Input of a metric: two arrays `[rows]` or `[rows, classes]`."""


class Resampled(NamedTuple):
    """Metric on resampled rows."""

    terms: Callable[[Any, Any], Terms]
    """Function from (answers, predictions), in the form that the task's metric takes, to the terms."""
    score: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
    """Function from (counts of the rows `[samples, rows]`, both terms) to the metric `[samples]`, 0 if undefined."""


@lru_cache(maxsize=4)
def drawn_rows(task: str, rows: int) -> np.ndarray:
    """Return the count of each row of a task in each sample, uint8 `[samples, rows]`. Tasks have different samples."""
    generator = np.random.default_rng([BOOTSTRAP_SEED, zlib.crc32(task.encode())])
    samples = (np.bincount(generator.integers(rows, size=rows), minlength=rows) for _ in range(BOOTSTRAP_SAMPLES))
    return np.stack([sample.astype(np.uint8) for sample in samples])


def resampled_scores(task: Task, answers: Any, predictions: Any) -> np.ndarray:
    """Return a task's metric on every bootstrap sample of its rows, `[samples]`; 0 if it is undefined.

    `answers` and `predictions` are in the form that the task's metric takes.
    """
    if KINDS[task.kind].score(task.metric, answers, predictions) is None:  # then it is undefined on every sample
        return np.zeros(BOOTSTRAP_SAMPLES)
    metric = RESAMPLED[task.kind][task.metric]
    first, second = metric.terms(answers, predictions)
    drawn = drawn_rows(task.name, len(first))
    parts = np.split(drawn, range(_TOGETHER, len(drawn), _TOGETHER))
    return np.concatenate([metric.score(part.astype(float), first, second) for part in parts])


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return the quotients; 0 if the divisor is 0 up to rounding."""
    is_defined = below > 1e-12
    return np.where(is_defined, above / np.where(is_defined, below, 1.0), 0.0)


def _share(drawn: np.ndarray, above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return the sum of the first term divided by the sum of the second."""
    return _ratio(drawn @ above, drawn @ below)


def _right(labels: np.ndarray, predictions: np.ndarray) -> Terms:
    is_right = (labels == predictions).reshape(len(labels), -1).all(axis=1)
    return is_right * 1.0, np.ones(len(labels))


def _f1(labels: np.ndarray, predictions: np.ndarray) -> Terms:
    """Return numerator and denominator of F1 = 2 TP / (2 TP + FP + FN) for 0/1 labels, `[rows]` or `[rows, labels]`."""
    right, both = _by_class(labels, predictions)
    return right.sum(axis=1), both.sum(axis=1)


def _by_class(labels: np.ndarray, predictions: np.ndarray) -> Terms:
    """Return numerator and denominator of F1 per class, `[rows, classes]`, for 0/1 labels."""
    labels, predictions = (side.reshape(len(labels), -1) for side in (labels, predictions))
    return 2.0 * labels * predictions, labels + predictions


def _by_number(labels: np.ndarray, predictions: np.ndarray) -> Terms:
    """Return numerator and denominator of F1 per class, for class numbers `[rows]` or 0/1 labels `[rows, labels]`."""
    return _by_class(*(_one_hot(labels, predictions) if labels.ndim == 1 else (labels, predictions)))


def _one_hot(labels: np.ndarray, predictions: np.ndarray) -> Terms:
    """Convert class numbers `[rows]` to 0 and 1, `[rows, classes]`."""
    classes = np.union1d(labels, predictions)
    return (labels[:, None] == classes) * 1.0, (predictions[:, None] == classes) * 1.0


def _macro_f1(drawn: np.ndarray, right: np.ndarray, both: np.ndarray) -> np.ndarray:
    """Return the mean F1 over the classes in a sample's labels or predictions."""
    drawn_both = drawn @ both  # [samples, classes]
    return _ratio(_ratio(drawn @ right, drawn_both).sum(axis=1), np.count_nonzero(drawn_both, axis=1))


def _matthews(drawn: np.ndarray, labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    """Return Matthews' correlation for any number of classes, R_K (Gorodkin 2004, equation 8), from one-hot classes."""
    rows = len(labels)
    label_share, predicted_share = drawn @ labels / rows, drawn @ predictions / rows  # [samples, classes] each
    right = drawn @ (labels * predictions).sum(axis=1) / rows
    variances = (1 - (label_share**2).sum(axis=1)) * (1 - (predicted_share**2).sum(axis=1))
    return _ratio(right - (label_share * predicted_share).sum(axis=1), np.sqrt(np.maximum(variances, 0)))


def _numbers(labels: np.ndarray, predictions: np.ndarray) -> Terms:
    return labels, predictions


def _pearson(drawn: np.ndarray, labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    x, y = (np.broadcast_to(_on_unit_scale(side), drawn.shape) for side in (labels, predictions))
    correlation = _correlation(drawn, x, y)
    return np.where(_differ(drawn, labels, predictions), correlation, 0.0)


def _on_unit_scale(values: np.ndarray) -> np.ndarray:
    """Return the values `[rows]` minus their mean, divided by their range: `_ratio` takes tiny sums for rounding."""
    return (values - values.mean()) / (np.ptp(values) or 1.0)


def _spearman(drawn: np.ndarray, labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    correlation = _correlation(drawn, _ranks(drawn, labels), _ranks(drawn, predictions))
    return np.where(_differ(drawn, labels, predictions), correlation, 0.0)


def _differ(drawn: np.ndarray, labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    """Return whether the predictions of each sample differ by more than rounding, bool `[samples]`."""
    is_drawn = drawn > 0  # [samples, rows]
    highest = np.where(is_drawn, predictions, -np.inf).max(axis=1)
    lowest = np.where(is_drawn, predictions, np.inf).min(axis=1)
    return highest - lowest > rounding_error(labels, predictions)


def _ranks(drawn: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the rank of each row in each sample, `[samples, rows]`; equal values share their mean rank."""
    order = np.argsort(values)
    _, first, places = np.unique(values[order], return_index=True, return_inverse=True)
    times = np.add.reduceat(drawn[:, order], first, axis=1)  # number of draws of each value
    return (np.cumsum(times, axis=1) - (times - 1) / 2)[:, places[np.argsort(order)]]


def _correlation(drawn: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the correlation of x and y, `[samples, rows]` each, with every row weighted by its count `drawn`."""
    total = drawn.sum(axis=1, keepdims=True)
    x, y = (side - (drawn * side).sum(axis=1, keepdims=True) / total for side in (x, y))
    covariance, *variances = ((drawn * product).sum(axis=1) for product in (x * y, x * x, y * y))
    return _ratio(covariance, np.sqrt(variances[0] * variances[1]))


def _entities(gold: Tags, predicted: Tags, strict: bool) -> Terms:
    """Return numerator and denominator of the entities' F1 per sentence."""
    pairs = zip(gold.by_sentence(), predicted.by_sentence(), strict=True)
    found = [score_entities([expected], [tags], strict, gold.labels) for expected, tags in pairs]
    return np.array([2.0 * one.correct for one in found]), np.array([1.0 * one.gold + one.predicted for one in found])


def _of_words(gold: Tags, predicted: Tags, terms: Callable[[np.ndarray, np.ndarray], Terms]) -> Terms:
    """Return the terms of the words, summed per sentence."""
    begins = np.concatenate([[0], gold.ends[:-1]]).astype(int)
    first, second = (np.add.reduceat(of_words, begins) for of_words in terms(gold.classes, predicted.classes))
    return first, second


def _of_questions(
    gold: Sequence[Sequence[str]], predicted: Sequence[str], score: Callable[[Sequence[str], str], float]
) -> Terms:
    return np.array([score(*pair) for pair in zip(gold, predicted, strict=True)]), np.ones(len(gold))


_CLASSES = {
    "accuracy": Resampled(_right, _share),
    "f1": Resampled(_f1, _share),
    "macro-f1": Resampled(_by_number, _macro_f1),
    "matthews": Resampled(_one_hot, _matthews),
}
RESAMPLED: dict[str, dict[str, Resampled]] = {
    "classification": _CLASSES,
    "multi-label": _CLASSES,
    "regression": {"pearson": Resampled(_numbers, _pearson), "spearman": Resampled(_numbers, _spearman)},
    "tokens": {
        "seqeval": Resampled(partial(_entities, strict=False), _share),
        STRICT: Resampled(partial(_entities, strict=True), _share),
        "accuracy": Resampled(partial(_of_words, terms=_right), _share),
        "macro-f1": Resampled(partial(_of_words, terms=_by_number), _macro_f1),
    },
    "qa": {
        "f1": Resampled(partial(_of_questions, score=qa.f1), _share),
        "exact-match": Resampled(partial(_of_questions, score=qa.exact_match), _share),
    },
}
"""Kind of task → metric → its computation on resampled rows."""
