"""The signs that may foretell the onset are what their names say, and a run stops after its onset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from megatron_ddrp.config import CheckpointConfig, Config, ModelConfig
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.lab.analysis.figures import layer_logits
from megatron_ddrp.model import build_model
from megatron_ddrp.run.callbacks import StopTraining
from megatron_ddrp.run.metrics import store_level

LENGTHS = (12, 7)


@pytest.fixture(scope="module")
def signs(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("onset_signs")


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 12, "vocab_size": 50}
    return build_model(ModelConfig(**sizes, position_encoding="ddrp"))


@pytest.fixture
def batch() -> Batch:
    document_ids = (torch.arange(12) < torch.tensor(LENGTHS)[:, None]).long()  # [2, 12]
    return Batch.of_texts(torch.randint(5, 50, (2, 12), generator=torch.Generator().manual_seed(0)), document_ids)


def test_the_spread_is_the_deviation_over_the_keys_of_a_text(signs, model, batch):
    model.eval()  # without dropout
    by_layer = []
    for logits, _ in layer_logits(model, batch):  # [2, heads, 12, 12]
        rows = [logits[text, :, query, :length] for text, length in enumerate(LENGTHS) for query in range(length)]
        by_layer.append(np.mean([row.numpy().std(-1) for row in rows]))
    assert signs.logit_spread(model, batch) == pytest.approx(np.mean(by_layer), rel=1e-5)


def test_the_gradient_is_that_of_the_position_tables_and_the_run_stops_after_its_onset(signs, model, batch, tmp_path):
    store_level(tmp_path, 7.0)
    callback = signs.Signs(batch)
    callback.on_start(replace(Config(), checkpoint=CheckpointConfig(save=str(tmp_path))), 0, model)
    model.embeddings.position.direction.sum().backward()  # ones at every number of this table
    columns = callback.columns()
    assert columns["position_gradient"] == pytest.approx(model.embeddings.position.direction.numel() ** 0.5)
    assert model.training and -1 <= columns["f_s"] <= 1 and columns["logit_spread"] > 0
    callback.on_step({"consumed_tokens": 1_000, "lm_loss": 7.0})  # a run that begins below the level has no onset
    for tokens in range(100_000, 400_001, 100_000):  # below the level by more than 1 from here on
        callback.on_step({"consumed_tokens": tokens, "lm_loss": 5.0})
    with pytest.raises(StopTraining):
        callback.on_step({"consumed_tokens": 500_000, "lm_loss": 5.0})


def test_the_rank_correlation_of_equal_orders_is_one_and_seldom_by_chance(signs):
    rho, chance = signs.rank_correlation([(0.1, 1e6), (0.2, 2e6), (0.4, 3e6), (0.5, 5e6), (0.9, 8e6)])
    assert rho == "+1.00" and float(chance) == pytest.approx(2 / 120, abs=0.004)
