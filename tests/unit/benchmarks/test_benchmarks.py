"""Benchmarks: a training step is one of the model that it names.

Scripts outside the package import modules that exist; a type checker takes the others for foreign ones."""

import ast
from importlib.util import find_spec
from pathlib import Path

import arms
import pytest
import torch

from megatron_ddrp.config import ModelConfig, ObjectiveConfig
from megatron_ddrp.objectives.contract import losses_of


@pytest.mark.parametrize("objective", ["mlm", "mth"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_of_a_step_is_the_objectives(objective, dtype, monkeypatch):
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


def test_scripts_import_modules_that_exist():
    root = Path(__file__).parents[3]
    files = [file for folder in ("benchmarks", "examples", "tools") for file in (root / folder).rglob("*.py")]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    imported = {str(node.module) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = [module for module in imported if module.startswith("megatron_ddrp.")]
    assert len(ours) > 30 and [module for module in ours if find_spec(module) is None] == []
