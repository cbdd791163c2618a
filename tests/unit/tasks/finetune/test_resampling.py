"""Metrics of resampled rows against the metrics themselves, sample by sample and row by row."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.kinds.tokens import Tags
from megatron_ddrp.tasks.finetune.metrics import drawn_rows
from megatron_ddrp.tasks.finetune.table_files import Task
from megatron_ddrp.tasks.statistics import BOOTSTRAP_SAMPLES

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


@pytest.mark.parametrize(
    ("kind", "metric", "labels", "predictions"),
    [
        ("classification", "accuracy", TWO, GUESS_TWO),
        ("classification", "f1", TWO, GUESS_TWO),
        ("classification", "macro-f1", FOUR, GUESS_FOUR),
        ("classification", "matthews", TWO, GUESS_TWO),
        ("classification", "matthews", FOUR, GUESS_FOUR),
        ("classification", "matthews", np.eye(ROWS)[0], np.eye(ROWS)[0]),  # undefined in every third sample
        ("multi-label", "accuracy", MANY, GUESS_MANY),
        ("multi-label", "f1", MANY, GUESS_MANY),
        ("multi-label", "macro-f1", MANY, GUESS_MANY),
        ("regression", "pearson", NUMBERS, GUESS_NUMBERS),
        ("regression", "spearman", NUMBERS, GUESS_NUMBERS),
        ("regression", "pearson", NUMBERS, ONE_APART),
        ("regression", "spearman", NUMBERS, ONE_APART),
        ("regression", "pearson", 1e-9 * NUMBERS, 1e-9 * GUESS_NUMBERS),
        ("regression", "pearson", 1.7e9 + 60 * NUMBERS, 1.7e9 + 60 * GUESS_NUMBERS),
    ],
)
def test_a_metric_of_resampled_rows_is_that_of_the_rows_repeated(kind, metric, labels, predictions):
    found = scores_of(Task("own", metric, kind), labels, predictions)
    assert found.shape == (BOOTSTRAP_SAMPLES,)
    for sample in range(COMPARED):
        rows = np.repeat(np.arange(ROWS), drawn_rows("own", ROWS)[sample])
        expected = KINDS[kind].score(metric, labels[rows], predictions[rows]) or 0.0
        assert found[sample] == pytest.approx(expected, abs=1e-12)


TAGS = ("B-X", "I-X", "B-Y", "O")
LENGTHS = RANDOM.integers(1, 6, size=ROWS)
GOLD = [RANDOM.integers(4, size=length).astype(float) for length in LENGTHS]
GUESS = [np.where(RANDOM.random(len(row)) < 0.7, row, RANDOM.integers(4, size=len(row))) for row in GOLD]


def tags(sentences):
    """Class numbers of the words of each sentence, in the form that the metrics of tokens take."""
    return Tags(np.concatenate(sentences), np.cumsum([len(sentence) for sentence in sentences]), TAGS)


@pytest.mark.parametrize("metric", KINDS["tokens"].metrics)
def test_sentences_are_drawn_whole(metric):
    found = scores_of(Task("own", metric, "tokens", TAGS), tags(GOLD), tags(GUESS))
    for sample in range(COMPARED):
        rows = np.repeat(np.arange(ROWS), drawn_rows("own", ROWS)[sample])
        repeated = (tags([sentences[row] for row in rows]) for sentences in (GOLD, GUESS))
        assert found[sample] == pytest.approx(KINDS["tokens"].score(metric, *repeated) or 0.0, abs=1e-12)


@pytest.mark.parametrize("metric", KINDS["qa"].metrics)
def test_questions_are_drawn_with_all_their_answers(metric):
    words = ["a red house", "the house", "green", ""]
    gold = [(words[number],) if number < 3 else () for number in FOUR]
    guess = [words[number] for number in GUESS_FOUR.astype(int)]
    found = scores_of(Task("own", metric, "qa"), gold, guess)
    for sample in range(COMPARED):
        rows = np.repeat(np.arange(ROWS), drawn_rows("own", ROWS)[sample])
        expected = KINDS["qa"].score(metric, [gold[row] for row in rows], [guess[row] for row in rows])
        assert found[sample] == pytest.approx(expected, abs=1e-12)
    assert not scores_of(Task("own", metric, "qa"), gold, [None, *guess[1:]]).any()


def test_a_sample_draws_as_many_rows_as_there_are_with_replacement():
    drawn = drawn_rows("own", ROWS).astype(float)
    assert (drawn.sum(axis=1) == ROWS).all() and drawn.mean(axis=0) == pytest.approx(np.ones(ROWS), abs=0.1)
    assert drawn.var() == pytest.approx(1 - 1 / ROWS, rel=0.02)  # of a binomial distribution
    assert (drawn != drawn_rows("other", ROWS)).any()


def test_the_spread_of_an_accuracy_is_the_binomial_one():
    share, found = (TWO == GUESS_TWO).mean(), scores_of(Task("own", "accuracy"), TWO, GUESS_TWO)
    assert found.var() == pytest.approx(share * (1 - share) / ROWS, rel=0.1)


def test_a_run_that_diverged_scores_0_in_every_sample():
    predictions = np.where(NUMBERS > 1, np.nan, NUMBERS)
    assert not scores_of(Task("own", "pearson", "regression"), NUMBERS, predictions).any()
