"""Scores over resampled development rows: how much of a score hangs on the rows that happen to be in the file.

A bootstrap sample draws as many rows as there are, with replacement (Efron and Tibshirani, An Introduction to the
Bootstrap, 1993, chapter 6), and the metric is computed on it. All models see the same samples of a file, so that their
differences are paired. A sample is kept as how often it draws each row: a metric of sums over rows is then one product
of matrices for all samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from megatron_ddrp.tasks.statistics import BOOTSTRAP_SAMPLES, BOOTSTRAP_SEED

_TOGETHER = 100
"""Samples that are scored at once."""


@lru_cache(maxsize=4)
def drawn_rows(task: str, rows: int) -> np.ndarray:
    """Return how often each sample draws each row of a task, uint8 `[samples, rows]`; each task has its own samples."""
    generator = np.random.default_rng([BOOTSTRAP_SEED, zlib.crc32(task.encode())])
    samples = (np.bincount(generator.integers(rows, size=rows), minlength=rows) for _ in range(BOOTSTRAP_SAMPLES))
    return np.stack([sample.astype(np.uint8) for sample in samples])


def resampled_scores(task: str, metric: str, labels: np.ndarray, predictions: np.ndarray) -> np.ndarray | None:
    """Return a metric of every bootstrap sample of a task's rows, `[samples]`; None for one not in `RESAMPLED`.

    A score is 0 where it is undefined, as in the tables. `labels` and `predictions` are `[rows, …]` as the metric
    takes them.
    """
    if metric not in RESAMPLED:
        return None
    if not np.isfinite(predictions).all():
        return np.zeros(BOOTSTRAP_SAMPLES)
    drawn = drawn_rows(task, len(labels))
    parts = np.split(drawn, range(_TOGETHER, len(drawn), _TOGETHER))
    return np.concatenate([RESAMPLED[metric](part.astype(float), labels, predictions) for part in parts])


def _accuracy(drawn: np.ndarray, labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    is_right = (labels == predictions).reshape(len(labels), -1).all(axis=1)
    return drawn @ is_right / len(labels)


def _f1(drawn: np.ndarray, labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    """Return F1 of class 1, or micro F1 of many labels."""
    right, both = (drawn @ terms.reshape(len(labels), -1).sum(axis=1) for terms in _positives(labels, predictions))
    return _ratio(2 * right, both)


def _macro_f1(drawn: np.ndarray, labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    """Return the mean F1 of the classes that a sample has among its labels or predictions."""
    if labels.ndim == 1:
        labels, predictions, _ = _one_hot(labels, predictions)
    right, both = (drawn @ terms for terms in _positives(labels, predictions))  # [samples, classes] each
    return _ratio(_ratio(2 * right, both).sum(axis=1), np.count_nonzero(both, axis=1))


def _positives(labels: np.ndarray, predictions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return true positives, and positives of both sides, of labels and predictions that are 0 or 1, `[rows, …]`."""
    return labels * predictions, labels + predictions


def _matthews(drawn: np.ndarray, labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    """Return the correlation of any number of classes, R_K (Gorodkin 2004, equation 8)."""
    label, predicted, rows = _one_hot(labels, predictions)
    label_share, predicted_share = drawn @ label / rows, drawn @ predicted / rows  # [samples, classes] each
    right = drawn @ (label * predicted).sum(axis=1) / rows
    variances = (1 - (label_share**2).sum(axis=1)) * (1 - (predicted_share**2).sum(axis=1))
    return _ratio(right - (label_share * predicted_share).sum(axis=1), np.sqrt(np.maximum(variances, 0)))


def _one_hot(labels: np.ndarray, predictions: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Return class numbers `[rows]` as 0 and 1, `[rows, classes]` each, and the number of rows."""
    classes = np.union1d(labels, predictions)
    return (labels[:, None] == classes) * 1.0, (predictions[:, None] == classes) * 1.0, len(labels)


def _pearson(drawn: np.ndarray, labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    shape = drawn.shape
    return _correlation(drawn, np.broadcast_to(labels, shape), np.broadcast_to(predictions, shape))


def _spearman(drawn: np.ndarray, labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    return _correlation(drawn, _ranks(drawn, labels), _ranks(drawn, predictions))


def _ranks(drawn: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the rank of each row in each sample, `[samples, rows]`; equal values share their mean rank."""
    order = np.argsort(values)
    _, first, places = np.unique(values[order], return_index=True, return_inverse=True)
    times = np.add.reduceat(drawn[:, order], first, axis=1)  # how often each value is drawn
    return (np.cumsum(times, axis=1) - (times - 1) / 2)[:, places[np.argsort(order)]]


def _correlation(drawn: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the correlation of x and y, `[samples, rows]` each, in which a row counts as often as it is drawn."""
    total = drawn.sum(axis=1, keepdims=True)
    x, y = (side - (drawn * side).sum(axis=1, keepdims=True) / total for side in (x, y))
    covariance, *variances = ((drawn * product).sum(axis=1) for product in (x * y, x * x, y * y))
    return _ratio(covariance, np.sqrt(variances[0] * variances[1]))


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return the quotients, 0 where the divisor is 0 but for rounding."""
    is_defined = below > 1e-12
    return np.where(is_defined, above / np.where(is_defined, below, 1.0), 0.0)


RESAMPLED: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "macro-f1": _macro_f1,
    "matthews": _matthews,
    "pearson": _pearson,
    "spearman": _spearman,
}
"""Metric → its function of (how often each row is drawn `[samples, rows]`, labels, predictions) → `[samples]`."""
