"""A run gives the objective the number of each step, and each micro-batch a dropout seed of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ddrp import pretrain
from megatron_ddrp.engine import step as engine_step
from megatron_ddrp.objectives.contract import Objective
from tests.conftest import TinyCorpus
from tests.integration.conftest import TINY

STEPS, MICRO_BATCHES = 4, 2


@pytest.fixture
def train(tiny_corpus: TinyCorpus) -> Callable[..., Any]:
    data = {"data_path": tiny_corpus.prefix, "vocab_file": tiny_corpus.vocab_file, "train_iters": STEPS}

    def train(**changes: Any) -> Any:
        return pretrain(**TINY | data | changes)

    return train


def test_each_step_draws_its_own_heads_and_tokens(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    draw = Objective.draw

    def note(self: Objective, *given: Any) -> Any:
        drawn.append(draw(self, *given))
        return drawn[-1]

    monkeypatch.setattr(Objective, "draw", note)
    train(num_attention_heads=8, hidden_size=64, hcd_heads=3)
    assert len(drawn) == STEPS * MICRO_BATCHES
    heads = np.array([draws.heads.numpy() for draws in drawn])  # [steps x micro-batches, layers, heads]
    of_steps = heads[::MICRO_BATCHES]
    assert (heads == of_steps.repeat(MICRO_BATCHES, axis=0)).all()
    assert len({each.tobytes() for each in of_steps}) == STEPS


def test_each_micro_batch_of_each_step_has_its_own_dropout(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    seed_dropout = engine_step.seed_dropout

    def note(*given: Any) -> None:
        seed_dropout(*given)
        seeds.append(torch.default_generator.initial_seed())

    monkeypatch.setattr(engine_step, "seed_dropout", note)
    train(hidden_dropout=0.1)
    first = seeds.copy()
    assert len(first) == len(set(first)) == STEPS * MICRO_BATCHES
    seeds.clear()
    train(hidden_dropout=0.1)
    assert seeds == first
    seeds.clear()
    train(hidden_dropout=0.1, seed=2)
    assert not set(seeds) & set(first)
