"""Steps of DeepSpeed's optimizers are the same to the last bit with CUDA graphs and without, on an emulator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.graph_steps import train_emulated
from tests.integration.training_runs import TIMEOUT, run_ranks

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
MODEL = {"seq_length": 16, "hidden_size": 16, "attention_backend": "sdpa", "train_iters": 4, **DROPOUT}
LAYOUTS: dict[str, dict[str, Any]] = {
    "bf16, ZeRO 0, Muon": {"bf16": True, "zero_stage": 0, "optimizer": "muon"},
    "bf16, ZeRO 1": {"bf16": True, "zero_stage": 1},
    "bf16, ZeRO 2": {"bf16": True, "zero_stage": 2},
    "fp32, ZeRO 0": {"zero_stage": 0},
    "fp32, ZeRO 1": {"zero_stage": 1},
    "notes": {"notes": True, "notes_min_count": 4, "notes_max_count": 30, "notes_window": 5},
    "electra, packing": {"objective": "electra", "generator_size": 0.5, "packing": True},
}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a run's last checkpoint: weights, moments, notes."""
    files = sorted(folder.glob("iter_*/*.safetensors"))
    return {f"{file.name} {name}": tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.slow
def test_steps_with_graphs_are_those_without(flags: Callable[..., list[str]], tmp_path: Path) -> None:
    lines = []
    for name, layout in LAYOUTS.items():
        for graphs in ("off", "on"):
            settings = {"micro_batch_size": 2, "save": tmp_path / name / graphs, "cuda_graphs": graphs}
            lines.append(flags(**MODEL | layout | settings))
    (answers,) = run_ranks(1, train_emulated, lines, TIMEOUT)
    for name, (without, used_without), (with_graphs, used) in zip(LAYOUTS, answers[::2], answers[1::2], strict=True):
        assert with_graphs == without, name
        assert used_without == [] and len(used) == 1 and min(used[0]) >= 1, (name, used)
        expected, found = (stored(tmp_path / name / graphs) for graphs in ("off", "on"))
        assert expected.keys() == found.keys() and len(found) > 50, name
        assert all(torch.equal(expected[key], found[key]) for key in expected), name
