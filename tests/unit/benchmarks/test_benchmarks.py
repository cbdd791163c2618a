"""Benchmarks: a training step is one of the model that it names, and the signs of the onset are what their names say.

A run that looks for the signs stops after its onset. Scripts outside the package import modules that exist; a type
checker takes the others for foreign ones."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import arms
import numpy as np
import onset_signs
import pytest
import torch

from megatron_ddrp.config import CheckpointConfig, Config, ModelConfig, ObjectiveConfig
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.lab.analysis.figures import layer_logits
from megatron_ddrp.model import build_model
from megatron_ddrp.objectives.contract import losses_of
from megatron_ddrp.run.callbacks import StopTraining
from megatron_ddrp.run.metrics import store_level


@pytest.mark.parametrize("objective", ["mlm", "mth"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_of_a_step_is_the_objectives(
    objective: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=arms.VOCABULARY, seq_length=8,
        position_encoding="ddrp", hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    settings, arrays = ObjectiveConfig(objective=objective), arms.full_rows(4, 8)
    monkeypatch.setattr(arms, "training_step", lambda model, loss: (model, loss))
    model, loss = arms.our_step(config, settings, arrays, dtype)
    computed = loss()

    terms = arms.make_objective(settings)
    sums = model(arms.on_device(arrays), arms.new_draws(arrays, settings, config)()).sums.double()
    counts = {name: float(count(arrays)) for name, count in terms.counts.items()}
    totals = dict(zip(terms.sum_names, sums.tolist(), strict=True)) | counts
    assert computed.item() == pytest.approx(losses_of(totals, terms)["loss"], rel=1e-5)
    assert all(weight.dtype == dtype for weight in model.parameters())
    computed.backward()
    assert any(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in model.parameters())


ROOT = Path(__file__).parents[3]


def test_scripts_import_modules_that_exist():
    wrong, seen = [], 0
    for folder in ("benchmarks", "examples", "tools"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                module = node.module if isinstance(node, ast.ImportFrom) else None
                if module and module.startswith("megatron_ddrp."):
                    seen += 1
                    place = ROOT / module.replace(".", "/")
                    if not (place.is_dir() or place.with_suffix(".py").is_file()):
                        wrong.append(f"{file.relative_to(ROOT)}: {module}")
    assert seen > 50 and not wrong


LENGTHS = (12, 7)


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 12, "vocab_size": 50}
    return build_model(ModelConfig(**sizes, position_encoding="ddrp"))


@pytest.fixture
def batch() -> Batch:
    document_ids = (torch.arange(12) < torch.tensor(LENGTHS)[:, None]).long()  # [2, 12]
    return Batch.of_texts(torch.randint(5, 50, (2, 12), generator=torch.Generator().manual_seed(0)), document_ids)


def test_the_spread_is_the_deviation_over_the_keys_of_a_text(model, batch):
    model.eval()  # without dropout
    by_layer = []
    for logits, _ in layer_logits(model, batch):  # [2, heads, 12, 12]
        rows = [logits[text, :, query, :length] for text, length in enumerate(LENGTHS) for query in range(length)]
        by_layer.append(np.mean([row.numpy().std(-1) for row in rows]))
    assert onset_signs.logit_spread(model, batch) == pytest.approx(np.mean(by_layer), rel=1e-5)


def test_the_gradient_is_that_of_the_position_tables_and_the_run_stops_after_its_onset(model, batch, tmp_path):
    store_level(tmp_path, 7.0)
    callback = onset_signs.Signs(batch)
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


def test_the_rank_correlation_of_equal_orders_is_one_and_seldom_by_chance(monkeypatch):
    monkeypatch.setattr(onset_signs, "PERMUTATIONS", 1000)
    rho, chance = onset_signs.rank_correlation([(0.1, 1e6), (0.2, 2e6), (0.4, 3e6), (0.5, 5e6), (0.9, 8e6)])
    assert rho == "+1.00" and float(chance) == pytest.approx(2 / 120, abs=0.01)
