"""Metrics of resampled rows against the metrics themselves, sample by sample and row by row."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ddrp.tasks.compare.resampling import drawn_rows, resampled_scores
from megatron_ddrp.tasks.finetune.metrics import METRICS
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


@pytest.mark.parametrize(
    ("metric", "labels", "predictions"),
    [
        ("accuracy", TWO, GUESS_TWO),
        ("accuracy", MANY, GUESS_MANY),
        ("f1", TWO, GUESS_TWO),
        ("f1", MANY, GUESS_MANY),
        ("macro-f1", FOUR, GUESS_FOUR),
        ("macro-f1", MANY, GUESS_MANY),
        ("matthews", TWO, GUESS_TWO),
        ("matthews", FOUR, GUESS_FOUR),
        ("matthews", np.eye(ROWS)[0], np.eye(ROWS)[0]),  # undefined in every third sample
        ("pearson", NUMBERS, GUESS_NUMBERS),
        ("spearman", NUMBERS, GUESS_NUMBERS),
    ],
)
def test_a_metric_of_resampled_rows_is_that_of_the_rows_repeated(metric, labels, predictions):
    found = resampled_scores("RTE", metric, labels, predictions)
    assert found.shape == (BOOTSTRAP_SAMPLES,)
    for sample in range(COMPARED):
        rows = np.repeat(np.arange(ROWS), drawn_rows("RTE", ROWS)[sample])
        assert found[sample] == pytest.approx(METRICS[metric](labels[rows], predictions[rows]) or 0.0, abs=1e-12)


def test_a_sample_draws_as_many_rows_as_there_are_with_replacement():
    drawn = drawn_rows("RTE", ROWS).astype(float)
    assert (drawn.sum(axis=1) == ROWS).all() and drawn.mean(axis=0) == pytest.approx(np.ones(ROWS), abs=0.1)
    assert drawn.var() == pytest.approx(1 - 1 / ROWS, rel=0.02)  # of a binomial distribution


def test_the_spread_of_an_accuracy_is_the_binomial_one():
    share, found = (TWO == GUESS_TWO).mean(), resampled_scores("RTE", "accuracy", TWO, GUESS_TWO)
    assert found.var() == pytest.approx(share * (1 - share) / ROWS, rel=0.1)


def test_a_run_that_diverged_scores_0_in_every_sample_and_an_unknown_metric_has_none():
    assert not resampled_scores("RTE", "pearson", NUMBERS, np.where(NUMBERS > 1, np.nan, 1.0)).any()
    assert resampled_scores("RTE", "bleu", TWO, TWO) is None
