"""Metrics of fine-tuning as fractions (1.0 is perfect), on all rows of a file and on its bootstrap samples.

A metric is a function of the rows and of the count of each row. Counts of 1 give its value. A bootstrap sample draws
rows (texts, sentences, questions) with replacement, as many as there are (Efron and Tibshirani, An Introduction to the
Bootstrap, 1993, chapter 6). It gives its rows other counts and shows how much a score depends on the choice of rows.
All models see the same samples of a file, so that their differences are paired.

A metric is undefined if a prediction is not finite (training diverged), F1 if neither labels nor predictions have a
positive, Matthews' correlation if the predictions or the labels are all of one class, Pearson's and Spearman's if
either side is constant; predictions are constant if they differ by rounding alone. A run counts such a score as 0, as
scikit-learn does for a constant guess, and marks it as undefined; in a sample it is 0. The metric of a plug-in may give
a trained model a negative score, so it counts as `WORST` if it is undefined.

The tests compare the metrics with scikit-learn, scipy, seqeval and SQuAD's script.
"""

from __future__ import annotations

import math
import re
import string
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from megatron_ddrp.config.registry import METRICS
from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.statistics import BOOTSTRAP_SAMPLES, BOOTSTRAP_SEED

_ROUNDING = 1e-5
"""Relative error of predictions. One guess for all rows differs by less: float32 and padding change its last digits."""
_TOGETHER = 2**18
"""Number of counts that are scored at a time."""
WORST, BEST = -1.0, 1.0
"""Range of a plug-in's metric."""
_ABOVE_BEST = 1e-6
"""Distance outside the range that counts as rounding."""

Terms = tuple[np.ndarray, np.ndarray]
"""Input of a score: two arrays `[rows]` or `[rows, classes]`."""


class Metric(NamedTuple):
    """Metric of the rows of a file, in the form of `Encoded.answers`."""

    terms: Callable[[Any, Any], Terms]
    """Function from (answers, finite predictions) to the terms."""
    score: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
    """Function from (counts of the rows `[samples, rows]`, both terms) to the metric `[samples]`, nan if undefined."""
    undefined: float = 0.0
    """Score that an undefined value counts as."""
    plugin: str = ""
    """Name of a plug-in's metric, which may leave its range."""

    def value(self, answers: Any, predictions: Any) -> float | None:
        """Return the metric of all rows; None if it is undefined. Raises `UserError` if it is out of its range."""
        score = self._scores(np.ones((1, len(answers)), np.uint8), answers, predictions)[0]
        if self.plugin and abs(score) > BEST + _ABOVE_BEST:
            raise UserError(
                f"--metric {self.plugin} gave {score:.6g}: expected a number from -1 to 1, where larger is better; for "
                "an error, return 1 / (1 + error)"
            )
        return None if math.isnan(score) else float(score)

    def counted(self, answers: Any, predictions: Any) -> float:
        """Return the metric of all rows; `undefined` if it is undefined."""
        score = self.value(answers, predictions)
        return self.undefined if score is None else score

    def samples(self, drawn: np.ndarray, answers: Any, predictions: Any) -> np.ndarray:
        """Return the metric with each of the counts `drawn`, uint8 `[samples, rows]`, `undefined` if undefined.

        Few of the rows may have a value out of the range, such as R² below -1: it counts as the end of the range.
        """
        return np.nan_to_num(self._scores(drawn, answers, predictions), nan=self.undefined).clip(WORST, BEST)

    def _scores(self, drawn: np.ndarray, answers: Any, predictions: Any) -> np.ndarray:
        if not len(answers) or not _is_finite(predictions):
            return np.full(len(drawn), math.nan)
        first, second = self.terms(answers, predictions)
        together = -(-_TOGETHER // len(first))
        parts = np.split(drawn, range(together, len(drawn), together))
        return np.concatenate([self.score(part.astype(float), first, second) for part in parts])


def metrics_of_plugins(kind: str) -> dict[str, Metric]:
    """Return the metrics of plug-ins for a kind of task, by name.

    Each is a function of (labels, predictions), whose attribute `kinds` names its kinds of tasks. It returns a number
    from -1 to 1, where larger is better, or None if the score is undefined, and does not depend on the order of the
    rows. Labels and predictions have one value per row: class numbers, numbers, 0 and 1 per label, answers, or the tags
    of a sentence by name.
    """
    functions = {name: METRICS.find(name) for name in METRICS}
    return {name: _of_function(name, function) for name, function in functions.items() if kind in function.kinds}


def _of_function(name: str, function: Callable[[Any, Any], float | None]) -> Metric:
    def terms(answers: Any, predictions: Any) -> Any:
        return tuple([*s.by_sentence()] if hasattr(s, "by_sentence") else s for s in (answers, predictions))

    def take(side: Any, rows: np.ndarray) -> Any:
        return side[rows] if isinstance(side, np.ndarray) else [side[row] for row in rows]

    def score(counts: np.ndarray, labels: Any, predictions: Any) -> np.ndarray:
        found = []
        for count in counts.astype(int):
            rows = np.repeat(np.arange(len(labels)), count)
            value = function(take(labels, rows), take(predictions, rows))
            if not isinstance(value, (int, float, np.number, type(None))):
                raise UserError(f"--metric {name} gave {value!r:.60}: expected a number, or None if it is undefined")
            found.append(math.nan if value is None else float(value))
        return np.array(found)

    return Metric(terms, score, undefined=WORST, plugin=name)


def _is_finite(predictions: Any) -> bool:
    """Return whether no prediction is missing: numbers, the classes of `Tags`, or texts."""
    values = getattr(predictions, "classes", predictions)
    return bool(np.isfinite(values).all()) if isinstance(values, np.ndarray) else None not in values


MOST_RESAMPLED = 100_000
"""Largest number of rows to resample, which takes 18 kB per row. Intervals of more rows are below 0.3 points."""


@lru_cache(maxsize=4)
def drawn_rows(task: str, rows: int) -> np.ndarray:
    """Return the count of each row of a task in each sample, uint8 `[samples, rows]`. Tasks have different samples."""
    generator = np.random.default_rng([BOOTSTRAP_SEED, zlib.crc32(task.encode())])
    samples = (np.bincount(generator.integers(rows, size=rows), minlength=rows) for _ in range(BOOTSTRAP_SAMPLES))
    return np.stack([sample.astype(np.uint8) for sample in samples])


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return the quotients; nan if the divisor is 0 up to rounding."""
    return np.divide(above, below, out=np.full(below.shape, math.nan), where=below > 1e-12)


def share(counts: np.ndarray, above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return the sum of the first term divided by the sum of the second."""
    return _ratio(counts @ above, counts @ below)


def right(labels: np.ndarray, predictions: np.ndarray) -> Terms:
    """Return 1 for each correct row and 0 for the others, and the 1 of each row."""
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


def by_number(labels: np.ndarray, predictions: np.ndarray) -> Terms:
    """Return numerator and denominator of F1 per class, for class numbers `[rows]` or 0/1 labels `[rows, labels]`."""
    return _by_class(*(_one_hot(labels, predictions) if labels.ndim == 1 else (labels, predictions)))


def _one_hot(labels: np.ndarray, predictions: np.ndarray) -> Terms:
    """Convert class numbers `[rows]` to 0 and 1, `[rows, classes]`."""
    classes = np.union1d(labels, predictions)
    return (labels[:, None] == classes) * 1.0, (predictions[:, None] == classes) * 1.0


def macro_f1(counts: np.ndarray, right: np.ndarray, both: np.ndarray) -> np.ndarray:
    """Return the mean F1 over the classes in a sample's labels or predictions."""
    by_class = _ratio(counts @ right, counts @ both)  # [samples, classes]
    return _ratio(np.nansum(by_class, axis=1), np.count_nonzero(~np.isnan(by_class), axis=1).astype(float))


def _matthews(counts: np.ndarray, labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    """Return Matthews' correlation for any number of classes, R_K (Gorodkin 2004, equation 8), from one-hot classes."""
    rows = counts.sum(axis=1)
    of_label, of_prediction = counts @ labels, counts @ predictions  # [samples, classes] each
    covariance = counts @ (labels * predictions).sum(axis=1) * rows - (of_label * of_prediction).sum(axis=1)
    variances = (rows**2 - (numbers**2).sum(axis=1) for numbers in (of_label, of_prediction))
    return _ratio(covariance, np.sqrt(math.prod(variances)))


def _numbers(labels: np.ndarray, predictions: np.ndarray) -> Terms:
    return np.asarray(labels, float), np.asarray(predictions, float)


def _pearson(counts: np.ndarray, labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    def deviations(values: np.ndarray) -> np.ndarray:
        unit = (values - values.mean()) / (np.ptp(values) or 1.0)  # `_ratio` takes tiny sums for rounding
        return unit - (counts @ unit / counts.sum(axis=1))[:, None]

    correlation = _correlation(counts, deviations(labels), deviations(predictions))
    return np.where(_differ(counts, labels, predictions), correlation, math.nan)


def _spearman(counts: np.ndarray, labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    correlation = _correlation(counts, _ranks(counts, labels), _ranks(counts, predictions))
    return np.where(_differ(counts, labels, predictions), correlation, math.nan)


def _ranks(counts: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the rank of each row in each sample minus the mean rank; equal values share theirs. `[samples, rows]`"""
    order = np.argsort(values, kind="stable")
    _, first, places = np.unique(values[order], return_index=True, return_inverse=True)
    times = np.add.reduceat(counts[:, order], first, axis=1)  # number of draws of each value
    ranks = np.cumsum(times, axis=1)
    ranks -= (times + counts.sum(axis=1, keepdims=True)) / 2
    return ranks[:, places[np.argsort(order)]]


def _correlation(counts: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the correlation of two deviations from the means, `[samples, rows]` each."""
    weighted = counts * x
    covariance, variance = (np.einsum("sr,sr->s", weighted, side) for side in (y, x))
    return _ratio(covariance, np.sqrt(variance * np.einsum("sr,sr,sr->s", counts, y, y)))


def _differ(counts: np.ndarray, labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    """Return whether the predictions of each sample differ by more than rounding, bool `[samples]`."""
    order = np.argsort(predictions)
    is_drawn = (counts > 0)[:, order]
    lowest, highest = is_drawn.argmax(axis=1), len(order) - 1 - is_drawn[:, ::-1].argmax(axis=1)
    return predictions[order][highest] - predictions[order][lowest] > rounding_error(labels, predictions)


def rounding_error(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Return the largest difference between two predicted numbers that rounding may explain.

    It is relative to the larger of the spread of the labels and the size of the predictions. The size is the largest
    distance from 0 or from the labels' mean, whichever is smaller: a run that scales labels predicts around their mean,
    so years are as exact as scores from 0 to 5.
    """
    sizes = (float(np.abs(predictions - center).max()) for center in (0.0, np.mean(labels)))
    return _ROUNDING * max(float(np.std(labels)), min(sizes))


ACCURACY, F1, MACRO_F1 = Metric(right, share), Metric(_f1, share), Metric(by_number, macro_f1)
MATTHEWS = Metric(_one_hot, _matthews)
PEARSON, SPEARMAN = Metric(_numbers, _pearson), Metric(_numbers, _spearman)


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
    return max(_overlap(answer.split(), normalize(predicted).split()) for answer in gold_answers(gold))


def gold_answers(answers: Sequence[str]) -> list[str]:
    """Return the normalized answers that are not empty; only "" for an unanswerable question."""
    return [text for text in map(normalize, answers) if text] or [""]


def _overlap(gold: list[str], predicted: list[str]) -> float:
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
"""F1 and exact match of answers to questions, computed as in SQuAD's evaluation script, version 2.0.

Rajpurkar et al., arXiv:1606.05250 and arXiv:1806.03822. Answers are compared in lower case, without ASCII punctuation,
English articles and repeated blanks. If there are several gold answers, the best one counts. An unanswerable question
has the single gold answer "". If the gold answer or the prediction is empty, F1 is 1 if both are and 0 otherwise. For
answers that are not empty, version 1.1 gives the same scores.
"""


OUTSIDE = "O"
STRICT = "seqeval-strict"
LENIENT = re.compile("[BI]I*E?|[ES]")
"""Entity of seqeval's default mode and of conlleval. Every tag other than O belongs to one; B and S always begin one, E
and S always end one."""
PREFIXES = tuple("BIESLU")
"""Begin, inside, end (last word) and single (only word), the last two also named last and unit."""


class Scheme(NamedTuple):
    """Way to write entities as tags that has strict rules. Tags that belong to no entity count as O."""

    prefixes: str
    needed: str
    """Prefixes without which there is no entity of several words."""
    single: str
    """Prefix that may be the only one."""
    entity: re.Pattern[str]
    alike: tuple[str, str] = ("", "(?!)")
    """Name and groups of another scheme with the same prefixes."""

    @property
    def entities(self) -> str:
        """Groups of whole entities."""
        return f"(?:{self.entity.pattern})+"


SCHEMES = {
    "IOB2": Scheme("BI", "B", "", re.compile("BI*"), ("IOB1", "I.*")),
    "IOE2": Scheme("IE", "E", "", re.compile("I*E"), ("IOE1", ".*I")),
    "IOBES": Scheme("BIES", "BE", "S", re.compile("BI*E|S")),
    "BILOU": Scheme("BILU", "BL", "U", re.compile("BI*L|U")),
}

Entity = tuple[str, int, int]
"""Type, first word and end (exclusive)."""


def entities_of(tags: Sequence[str], entity: re.Pattern[str]) -> list[Entity]:
    """Return the entities of a sentence in order. `entity`, from `rules`, matches the prefixes of one."""
    return [
        (kind, begin + match.start(), begin + match.end())
        for kind, begin, prefixes in _groups(tags)
        for match in entity.finditer(prefixes)
    ]


def prefix_groups(sentences: Iterable[Sequence[str]]) -> list[str]:
    """Return the prefixes of each group of all sentences."""
    return [prefixes for tags in sentences for _, _, prefixes in _groups(tags)]


def _groups(tags: Sequence[str]) -> Iterator[tuple[str, int, str]]:
    """Yield type, first word and prefixes of each group."""
    begin = 0
    for kind, group in groupby(tags, lambda tag: tag[2:]):
        prefixes = "".join(tag[0] for tag in group)
        if kind:
            yield kind, begin, prefixes
        begin += len(prefixes)


def rules(tags: Iterable[str], strict: bool) -> re.Pattern[str]:
    """Return the rules for a task with these tags: the lenient ones, or the strict ones of the scheme of the tags.

    Raises `ValueError` with the reason for a tag that names no entity, and for tags without such rules.

    They are regular expressions over the prefixes of a group, which is neighbouring tags of one type.
    """
    if strict:
        return SCHEMES[scheme_of(tags)].entity
    if not _prefixes(tags).isdisjoint("LU"):
        raise ValueError(f"tags of BILOU have only strict rules; use --metric {STRICT}")
    return LENIENT


def scheme_of(tags: Iterable[str]) -> str:
    """Return the scheme of some tags, found from their prefixes as in seqeval. Raises `ValueError` if there is none."""
    found = _prefixes(tags)
    for name, scheme in SCHEMES.items():
        if found <= set(scheme.single) or set(scheme.needed) <= found <= set(scheme.prefixes):
            return name
    known = ", ".join(f"{name} ({_dashed(scheme.prefixes)})" for name, scheme in SCHEMES.items())
    raise ValueError(f"tags with {_dashed(sorted(found))} have no strict rules, expected {known}; use --metric seqeval")


def _prefixes(tags: Iterable[str]) -> set[str]:
    """Return the prefixes of the tags other than O. Raises `ValueError` for a tag without a prefix and a type."""
    named = [tag for tag in tags if tag != OUTSIDE]
    for tag in named:
        if not (tag[:1] in PREFIXES and tag[1:2] == "-" and tag[2:]):
            raise ValueError(
                f"tag {tag!r}, expected O, or B- or I- and a type, such as B-PER (also E- and S-, or L- and U-); for "
                "tags of single words use --metric accuracy or macro-f1"
            )
    return {tag[0] for tag in named}


def _dashed(prefixes: Iterable[str]) -> str:
    return " ".join(f"{prefix}-" for prefix in prefixes)


def _entity_terms(gold: Any, predicted: Any, strict: bool) -> Terms:
    """Return numerator and denominator of the entities' F1 per sentence of `Tags`."""
    entity = rules(gold.labels, strict)
    sides = ([set(entities_of(tags, entity)) for tags in each.by_sentence()] for each in (gold, predicted))
    found = [(len(wanted), len(told), len(wanted & told)) for wanted, told in zip(*sides, strict=True)]
    expected, told, correct = np.array(found, float).T
    return 2 * correct, expected + told


SEQEVAL, SEQEVAL_STRICT = (Metric(partial(_entity_terms, strict=strict), share) for strict in (False, True))
"""F1 of whole entities in tag sequences, found as the `seqeval` package does.

A predicted entity is correct if its type, first word and last word are all correct (CoNLL-2003, Tjong Kim Sang and De
Meulder, arXiv:cs/0306050). The metric, F1 = 2·correct / (gold + predicted), sums over all sentences and types (micro
average).
"""
