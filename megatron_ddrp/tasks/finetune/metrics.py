"""The three scores of the paper's tables, from scikit-learn and scipy, as fractions (1.0 is perfect).

A metric returns None where it is undefined: any metric where a prediction is not finite (training diverged), Matthews'
correlation where the predictions or the labels are all of one class, Pearson's where either side is constant. A run
counts such a score as 0, as scikit-learn scores a constant guess, and marks it as undefined (`runs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np


def accuracy(labels: np.ndarray, predictions: np.ndarray) -> float | None:
    """Return the share of equal entries. Arguments: class numbers `[examples]`."""
    from sklearn.metrics import accuracy_score

    if not np.isfinite(predictions).all():
        return None
    return float(accuracy_score(labels, predictions))


def matthews(labels: np.ndarray, predictions: np.ndarray) -> float | None:
    """Return Matthews' correlation coefficient. Arguments: class numbers `[examples]`."""
    from sklearn.metrics import matthews_corrcoef

    if not np.isfinite(predictions).all() or len(np.unique(labels)) < 2 or len(np.unique(predictions)) < 2:
        return None
    return float(matthews_corrcoef(labels, predictions))


def pearson(labels: np.ndarray, predictions: np.ndarray) -> float | None:
    """Return Pearson's correlation coefficient. Arguments: numbers `[examples]`."""
    from scipy.stats import pearsonr

    if len(labels) < 2 or not np.isfinite(predictions).all() or np.ptp(labels) == 0 or np.ptp(predictions) == 0:
        return None
    value = float(pearsonr(labels, predictions).statistic)
    return value if math.isfinite(value) else None


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float | None]] = {
    "accuracy": accuracy,
    "matthews": matthews,
    "pearson": pearson,
}
