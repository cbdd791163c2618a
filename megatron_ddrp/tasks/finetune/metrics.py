"""Metrics of fine-tuning from scikit-learn and scipy, as fractions (1.0 is perfect), and the kinds that use them.

A metric returns None if it is undefined: any metric if a prediction is not finite (training diverged), F1 if neither
labels nor predictions have a positive, Matthews' correlation if the predictions or the labels are all of one class,
Pearson's and Spearman's if either side is constant; predictions are constant if they differ by rounding alone. A run
counts such a score as 0, as scikit-learn does for a constant guess, and marks it as undefined.

The metrics of tag sequences and of answers are in `entities.py` and `answers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError

_ROUNDING = 1e-5
"""Relative error of predictions. One guess for all rows differs by less: float32 and padding change its last digits."""


def accuracy(labels: np.ndarray, predictions: np.ndarray) -> float | None:
    """Return the share of correct entries, or of entirely correct rows.

    Arguments: class numbers `[examples]`, or 0 and 1 `[examples, labels]`.
    """
    from sklearn.metrics import accuracy_score

    if not np.isfinite(predictions).all():
        return None
    return float(accuracy_score(labels, predictions))


def f1(labels: np.ndarray, predictions: np.ndarray) -> float | None:
    """Return F1 of the second of two classes, or micro F1 over labels: 2·TP / (2·TP + FP + FN).

    Arguments: 0 and 1, `[examples]` or `[examples, labels]`.
    """
    from sklearn.metrics import f1_score

    if not np.isfinite(predictions).all() or not (labels.any() or predictions.any()):
        return None
    return float(f1_score(labels.ravel(), predictions.ravel()))


def macro_f1(labels: np.ndarray, predictions: np.ndarray) -> float | None:
    """Return the mean F1 over the classes that occur in labels or predictions.

    Arguments: class numbers `[examples]`, or 0 and 1 `[examples, labels]`.
    """
    from sklearn.metrics import f1_score

    if not np.isfinite(predictions).all():
        return None
    if labels.ndim == 1:
        return float(f1_score(labels, predictions, average="macro"))
    by_label = [f1(*columns) for columns in zip(labels.T, predictions.T, strict=True)]
    known = [value for value in by_label if value is not None]
    return sum(known) / len(known) if known else None


def matthews(labels: np.ndarray, predictions: np.ndarray) -> float | None:
    """Return Matthews' correlation coefficient. Arguments: class numbers `[examples]`."""
    from sklearn.metrics import matthews_corrcoef

    if not np.isfinite(predictions).all() or len(np.unique(labels)) < 2 or len(np.unique(predictions)) < 2:
        return None
    return float(matthews_corrcoef(labels, predictions))


def pearson(labels: np.ndarray, predictions: np.ndarray) -> float | None:
    """Return Pearson's correlation coefficient. Arguments: numbers `[examples]`."""
    from scipy.stats import pearsonr

    return _correlation(pearsonr, labels, predictions)


def spearman(labels: np.ndarray, predictions: np.ndarray) -> float | None:
    """Return Spearman's rank correlation coefficient; equal numbers share their mean rank. Arguments: see `pearson`."""
    from scipy.stats import spearmanr

    return _correlation(spearmanr, labels, predictions)


def _correlation(test: Callable[..., object], labels: np.ndarray, predictions: np.ndarray) -> float | None:
    if len(labels) < 2 or not np.isfinite(predictions).all() or np.ptp(labels) == 0:
        return None
    if np.ptp(predictions) <= rounding_error(labels, predictions):
        return None
    value = float(test(labels, predictions).statistic)  # type: ignore[attr-defined]
    return value if math.isfinite(value) else None


def rounding_error(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Return the largest difference between two predicted numbers that rounding may explain.

    It is relative to the larger of the spread of the labels and the size of the predictions. The size is the largest
    distance from 0 or from the labels' mean, whichever is smaller: a run that scales labels predicts around their mean,
    so years are as exact as scores from 0 to 5.
    """
    sizes = (float(np.abs(predictions - center).max()) for center in (0.0, np.mean(labels)))
    return _ROUNDING * max(float(np.std(labels)), min(sizes))


Metric = Callable[[np.ndarray, np.ndarray], float | None]

METRICS: dict[str, Metric] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro-f1": macro_f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}
"""Name of `--metric` → function of labels and predictions, which have one value per example or per word."""

METRICS_OF_KIND: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "f1", "macro-f1", "matthews"),
    "multi-label": ("f1", "macro-f1", "accuracy"),
    "regression": ("pearson", "spearman"),
    "tokens": ("seqeval", "seqeval-strict", "accuracy", "macro-f1"),
    "qa": ("f1", "exact-match"),
}
"""Kind → names of its metrics; the first is the default."""


def check_metric(name: str, kind: str, num_labels: int | None = None) -> None:
    """Raise `UserError` if a kind does not have the metric, or for F1 with another number of classes than two."""
    if name not in METRICS_OF_KIND[kind]:
        allowed = ", ".join(METRICS_OF_KIND[kind])
        raise UserError(f"--metric {name}: --kind {kind} has {allowed}", WRONG_ARGUMENTS)
    if kind == "classification" and name == "f1" and num_labels is not None and num_labels != 2:
        raise UserError(f"--metric f1: {num_labels} labels, expected 2; use --metric macro-f1", WRONG_ARGUMENTS)
