"""`rtd` and `head-disagreement` in every layout: one process's gradients in float64, its losses from the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ddrp.config import ModelConfig, ObjectiveConfig, ParallelConfig
from megatron_ddrp.model import Encoder, build_model
from megatron_ddrp.parallel.pipeline import own_part
from megatron_ddrp.parallel.process_group import place_in_grid
from megatron_ddrp.parallel.tensor_parallel import apply_sequence_parallel, apply_tensor_parallel
from tests.integration.training_runs import TIMEOUT, largest_differences, run_ranks, train_runs
from tests.unit.model.tiny import packed_batch, some_draws, tiny_batch, tiny_config

Flags = Callable[..., list[str]]
pytestmark = pytest.mark.slow

OBJECTIVES: dict[str, dict[str, Any]] = {
    "rtd": {"tcd_weight": 1.0, "hcd_weight": 0.01},
    "head-disagreement": {"objective_options": ("value=0.5", "attention=0.1"), "tcd_weight": 1.0, "hcd_weight": 0.01},
}
"""Objective → its settings, beside MTH's two terms where it has room for them."""
CASES = [("rtd", "ddrp"), ("head-disagreement", "ddrp"), ("head-disagreement", "t5")]
"""(objective, encoding): tables that all heads share, and rows of single heads."""


def test_each_rank_has_its_part_of_the_gradients_of_one_process() -> None:
    for report in run_ranks(2, _compare, [[]], TIMEOUT):
        assert len(report) == len(CASES) * 2
        for case, (sums, gradients) in report.items():
            assert sums < 1e-12 and gradients < 1e-10, (case, sums, gradients)


def _compare(_words: list[list[str]], _error: Path) -> dict[str, tuple[float, float]]:
    """Case → the largest differences of a sum and of a gradient to one process's, relative to the norm."""
    ranks = place_in_grid(torch.device("cpu"), ParallelConfig(tensor_model_parallel_size=2))
    found = {}
    for name, encoding in CASES:
        config = tiny_config(num_attention_heads=4, hidden_size=16, seq_length=16, position_encoding=encoding)
        for cuts in (False, True):
            whole, part = (_build(config, name) for _ in range(2))
            expected_sums, expected = _gradients(whole)
            apply_tensor_parallel(part, config.position_encoding, ranks)
            if cuts:
                part.checkpoint_activations = True
                apply_sequence_parallel(part, ranks)
            sums, gradients = _gradients(part)
            assert gradients.keys() == expected.keys()
            off = max(
                _distance(gradients[n], own_part(n, g, config.position_encoding, ranks), g) for n, g in expected.items()
            )
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


def test_every_layout_follows_one_process(flags: Flags, tmp_path: Path) -> None:
    """Among them one that resumes what one process saved."""

    def command_line(name: str, **layout: Any) -> list[str]:
        settings = dict(OBJECTIVES[name])
        options = settings.pop("objective_options", ())
        words = flags(objective=name, micro_batch_size=2, train_iters=2, **settings, **layout)
        return [*words, *(("--objective-options", *options) if options else ())]

    expected = dict(
        zip(OBJECTIVES, train_runs(1, [command_line(name, zero_stage=0) for name in OBJECTIVES]), strict=True)
    )
    cases = [(layout, name) for layout in LAYOUTS for name in OBJECTIVES]
    train_runs(1, [command_line("rtd", zero_stage=0, exit_interval=1, save=tmp_path)])
    resumed = command_line("rtd", **LAYOUTS["tensor 2"], load=tmp_path)
    again, *runs = train_runs(2, [resumed, *(command_line(name, **LAYOUTS[layout]) for layout, name in cases)])
    assert len(again) == 1 and max(largest_differences(again, expected["rtd"][1:]).values()) < 5e-5
    for (layout, name), rows in zip(cases, runs, strict=True):
        differences = largest_differences(rows, expected[name])
        assert {"lm_loss", "tcd_loss", "hcd_loss", "grad_norm"} <= differences.keys() and len(differences) > 5
        assert max(differences.values()) < 5e-5, (name, layout, differences)
