"""One run: what it learns, what decides it, and the schedule."""

import numpy as np
import pytest
import torch
from torch import nn

from tasks.glue.data import Encoded
from tasks.glue.finetune import Classifier, finetune, learning_rate_factor, predict
from tasks.glue.runs import Point
from tasks.glue.tasks import TASKS

HIDDEN = 8


class BagOfPieces(nn.Module):
    """Hidden states of [CLS] = the mean of the row's embeddings; `calls` counts what it was asked."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, HIDDEN)
        self.dropout = nn.Dropout(0.1)
        self.rows_seen = []

    def forward(self, batch):
        valid = (batch.document_ids > 0).unsqueeze(-1)  # [batch, seq, 1]
        self.rows_seen += batch.sequence_ids[:, 0].tolist()
        hidden = self.dropout(self.embedding(batch.input_ids)) * valid
        return hidden.sum(1, keepdim=True) / valid.sum(1, keepdim=True) + 0 * hidden


def rows(count, seed, regression=False):
    """Rows of random pieces; class 1 ends in three pieces 19, a number is their count."""
    rng = np.random.default_rng(seed)
    pieces = [rng.integers(3, 19, rng.integers(3, 9)).tolist() for _ in range(count)]
    counts = rng.integers(0, 2, count) if not regression else rng.integers(0, 6, count)
    for row, number in zip(pieces, counts, strict=True):
        row.extend([19] * int(number) * (1 if regression else 3))
    dtype = np.float64 if regression else np.int64
    return Encoded(pieces, [[0] * len(row) for row in pieces], counts.astype(dtype), pad_id=0)


def run(task, seed=1, epochs=6, lr=3e-2, regression=False):
    torch.manual_seed(0)
    encoder = BagOfPieces()
    train, dev = rows(96, 0, regression), {"dev": rows(41, 1, regression)}
    return encoder, dev, finetune(task, encoder, HIDDEN, train, dev, Point(8, lr, epochs), seed)


def test_learns_a_separable_task():
    _, _, result = run(TASKS["CoLA"])
    assert result.scores["dev"][-1] > 0.8
    assert result.steps == 6 * 12
    assert len(result.scores["dev"]) == 6


def test_learns_a_regression():
    _, _, result = run(TASKS["STS-B"], regression=True)
    assert result.scores["dev"][-1] > 0.7
    assert result.predictions["dev"].dtype == np.float64


def test_a_seed_fixes_everything():
    first, second, other = (run(TASKS["CoLA"], seed)[2] for seed in (1, 1, 2))
    assert first.scores == second.scores
    assert (first.predictions["dev"] == second.predictions["dev"]).all()
    first_number, second_number, other_number = (
        run(TASKS["STS-B"], seed, epochs=1, regression=True)[2].predictions["dev"] for seed in (1, 1, 2)
    )
    assert (first_number == second_number).all()
    assert (first_number != other_number).any()
    assert other.steps == first.steps


def test_the_score_is_the_metric_of_the_predictions():
    from sklearn.metrics import matthews_corrcoef

    _, dev, result = run(TASKS["CoLA"], epochs=2)
    expected = matthews_corrcoef(dev["dev"].targets, result.predictions["dev"])
    assert result.scores["dev"][-1] == expected


def test_every_dev_row_is_scored_once_without_dropout():
    encoder = BagOfPieces()
    model = Classifier(encoder, HIDDEN, 2)
    dev = rows(131, 3)
    first = predict(TASKS["CoLA"], model, dev)
    assert sorted(encoder.rows_seen) == list(range(131))
    assert (predict(TASKS["CoLA"], model, dev) == first).all()


def test_learning_rate_rises_for_a_tenth_and_falls_to_zero():
    factors = [learning_rate_factor(step, 100) for step in range(100)]
    assert max(factors) == factors[9] == factors[10] == 1.0
    assert factors[0] == pytest.approx(0.1)
    assert np.allclose(np.diff(factors[:10]), 0.1)
    assert np.allclose(np.diff(factors[10:]), -1 / 90)
    assert 0 < factors[-1] < 0.02
    assert learning_rate_factor(0, 1) == 1.0
