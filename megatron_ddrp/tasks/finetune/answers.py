"""Exact match and F1 of answers to questions, computed as in SQuAD's evaluation script, version 2.0.

Rajpurkar et al., arXiv:1606.05250 and arXiv:1806.03822. Answers are compared in lower case, without ASCII punctuation,
English articles and repeated blanks. If there are several gold answers, the best one counts. An unanswerable question
has the single gold answer "". If the gold answer or the prediction is empty, F1 is 1 if both are and 0 otherwise. For
answers that are not empty, version 1.1 gives the same scores.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from megatron_ddrp.tasks.finetune.metrics import Metric, Terms, share

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(answer: str) -> str:
    """Return an answer in lower case, without ASCII punctuation, English articles and repeated blanks."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(gold: Sequence[str], predicted: str) -> float:
    """Return 1.0 if the prediction equals one of the gold answers after normalization, otherwise 0.0."""
    return float(normalize(predicted) in gold_answers(gold))


def f1(gold: Sequence[str], predicted: str) -> float:
    """Return the best F1 of the predicted words over the gold answers: 2·common / (words of both)."""
    return max(_f1(answer.split(), normalize(predicted).split()) for answer in gold_answers(gold))


def gold_answers(answers: Sequence[str]) -> list[str]:
    """Return the normalized answers that are not empty; only "" for an unanswerable question."""
    return [text for text in map(normalize, answers) if text] or [""]


def _f1(gold: list[str], predicted: list[str]) -> float:
    if not gold or not predicted:
        return float(gold == predicted)
    common = (Counter(gold) & Counter(predicted)).total()
    return 2 * common / (len(gold) + len(predicted))


def _mean_of(score: Callable[[Sequence[str], str], float]) -> Metric:
    """Return the metric that is the mean of a question's score."""

    def terms(gold: Sequence[Sequence[str]], predicted: Sequence[str]) -> Terms:
        return np.array([score(*pair) for pair in zip(gold, predicted, strict=True)]), np.ones(len(gold))

    return Metric(terms, share)


ANSWER_F1, EXACT_MATCH = _mean_of(f1), _mean_of(exact_match)
