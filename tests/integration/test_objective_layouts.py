"""`rtd` in every layout: gradients of one process in float64, and its losses from the engine in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ddrp.config import ModelConfig, ObjectiveConfig, ParallelConfig
from megatron_ddrp.model import Encoder, build_model
from megatron_ddrp.parallel.process_group import place_in_grid
from megatron_ddrp.parallel.sequence_parallel import apply_sequence_parallel
from megatron_ddrp.parallel.sharding import own_part
from megatron_ddrp.parallel.tensor_parallel import apply_tensor_parallel
from tests.integration.training_runs import TIMEOUT, largest_differences, run_ranks, train_runs
from tests.unit.model.tiny import packed_batch, some_draws, tiny_batch, tiny_config

Flags = Callable[..., list[str]]
pytestmark = pytest.mark.slow

OBJECTIVES: dict[str, dict[str, Any]] = {
    "rtd": {"tcd_weight": 1.0, "hcd_weight": 0.01},
}
"""Objective → its settings, beside MTH's two terms where it has room for them."""
ENCODINGS = ("absolute", "ddrp", "t5")


def test_each_rank_has_its_part_of_the_gradients_of_one_process() -> None:
    for report in run_ranks(2, _compare, [[]], TIMEOUT):
        assert len(report) == len(OBJECTIVES) * len(ENCODINGS) * 2
        for case, (sums, gradients) in report.items():
            assert sums < 1e-12 and gradients < 1e-10, (case, sums, gradients)


def _compare(_words: list[list[str]], _error: Path) -> dict[str, tuple[float, float]]:
    """Case → the largest differences of a sum and of a gradient to one process's, relative to the norm."""
    ranks = place_in_grid(torch.device("cpu"), ParallelConfig(tensor_model_parallel_size=2))
    found = {}
    for name in OBJECTIVES:
        for encoding in ENCODINGS:
            config = tiny_config(num_attention_heads=4, hidden_size=16, seq_length=16, position_encoding=encoding)
            for cuts in (False, True):
                whole, part = (_build(config, name) for _ in range(2))
                expected_sums, expected = _gradients(whole)
                apply_tensor_parallel(part, config, ranks)
                if cuts:
                    part.checkpoint_activations = True
                    apply_sequence_parallel(part, ranks)
                sums, gradients = _gradients(part)
                assert gradients.keys() == expected.keys()
                off = max(_distance(gradients[n], own_part(n, g, config, ranks), g) for n, g in expected.items())
                found[f"{name} {encoding}{' in parts' * cuts}"] = (_distance(sums, expected_sums, expected_sums), off)
    return found


def _build(config: ModelConfig, name: str) -> Encoder:
    torch.manual_seed(0)
    model = build_model(config, objective=ObjectiveConfig(objective=name, **OBJECTIVES[name])).double()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)  # what starts at 0 acts too
    return model


def _gradients(model: Encoder) -> tuple[Tensor, dict[str, Tensor]]:
    """The sums of a packed batch, and of their weighted sum the gradient of every parameter by name."""
    batch = packed_batch(tiny_batch(lengths=(7, 4, 5)), [[0, 2], [1]])
    draws = some_draws(batch, heads=((0, 3), (1, 2)))
    draws = draws._replace(own=model.head.objective.draw_own(batch.map(lambda field: field.numpy()), 1234, 1))
    sums = model(batch, draws).sums
    (sums * torch.linspace(0.7, 1.3, len(sums))).sum().backward()
    return sums.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _distance(ours: Tensor, expected: Tensor, whole: Tensor) -> float:
    return float((ours - expected).norm() / whole.norm().clamp_min(1e-4))


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor 2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline 2": {"pipeline_model_parallel_size": 2, "zero_stage": 0, "packing": True},
    "ZeRO 2": {"zero_stage": 2, "checkpoint_activations": True},
    "ZeRO 3": {"zero_stage": 3},
}
"""ZeRO 3 changes torch for good and comes last."""


def test_every_layout_follows_one_process(flags: Flags) -> None:
    model = {"num_layers": 3, "micro_batch_size": 2, "train_iters": 3}
    lines = [{**model, "objective": name, **settings} for name, settings in OBJECTIVES.items()]
    expected = train_runs(1, [flags(**line, zero_stage=0) for line in lines])
    runs = train_runs(2, [flags(**line, **layout) for layout in LAYOUTS.values() for line in lines])
    for number, rows in enumerate(runs):
        layout, line = list(LAYOUTS)[number // len(lines)], lines[number % len(lines)]
        differences = largest_differences(rows, expected[number % len(lines)])
        assert {"lm_loss", "tcd_loss", "hcd_loss", "grad_norm"} <= differences.keys()
        assert max(differences.values()) < 5e-5, (line["objective"], layout, differences)
