"""Rates, row lengths and rotary bases that change with the step, decay branches and Muon: resumed exactly, and in every
layout alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ddrp.checkpoint import StoredTensors
from tests.integration.training_runs import Rows, largest_differences, train_runs

Flags = Callable[..., list[str]]
STEPS, SAVED = 6, 2
RECIPE: dict[str, Any] = {
    "objective": "mlm",
    "position_encoding": "rope",
    "rope_theta": 1000.0,
    "seq_length_phases": "16:0.5:100",
    "mask_prob": "0.4:0.2",
    "optimizer": "muon",
    "zero_stage": 0,
    "train_iters": STEPS,
}
STABLE: dict[str, Any] = {
    "optimizer": "muon",
    "zero_stage": 0,
    "lr_warmup_iters": 1,
    "lr_warmup_fraction": None,
    "objective": "mlm",
}
DECAY: dict[str, Any] = {
    "lr_decay_style": "wsd",
    "lr_wsd_decay_iters": 3,
    "lr_wsd_decay_style": "minus_sqrt",
    "train_iters": SAVED + 3,
}


@pytest.fixture(scope="module")
def runs(flags: Flags, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Rows]]:
    """The folder of checkpoints, and the rows of each run on one rank."""
    folder = tmp_path_factory.mktemp("recipes")
    stable, branch_point = folder / "stable", folder / "stable" / f"iter_{SAVED:07d}"
    commands = {
        "whole": flags(**RECIPE),
        "first": flags(**RECIPE, exit_interval=SAVED, save=folder / "first"),
        "rest": flags(**RECIPE, load=folder / "first"),
        "short rows": flags(
            **RECIPE | {"seq_length_phases": None, "seq_length": 16, "rope_theta": 100.0},
            exit_interval=STEPS // 2,
            save=folder / "short",
        ),
        "longer rows": flags(**RECIPE, load=folder / "short" / f"iter_{STEPS // 2:07d}"),
        "in one go": flags(**RECIPE, micro_batch_size=8),
        "stable": flags(
            **{**STABLE, "lr_decay_style": "constant", "train_iters": 90}, exit_interval=SAVED, save=stable
        ),
        "branch": flags(**STABLE | DECAY, load=branch_point),
        "planned": flags(**STABLE | DECAY),
    }
    return folder, dict(zip(commands, train_runs(1, list(commands.values())), strict=True))


def test_resumed_across_a_phase_is_the_run_never_stopped(runs: tuple[Path, dict[str, Rows]]) -> None:
    rows = runs[1]
    assert rows["first"][: SAVED - 1] == rows["whole"][: SAVED - 1]
    assert rows["rest"] == rows["whole"][SAVED:]


def test_longer_rows_after_a_checkpoint_are_the_phases_planned_so(runs: tuple[Path, dict[str, Rows]]) -> None:
    rows = runs[1]
    assert rows["longer rows"] == rows["whole"][STEPS // 2 :]
    assert rows["short rows"][0] == rows["whole"][0]


def test_deepspeed_steps_both_optimizers(runs: tuple[Path, dict[str, Rows]]) -> None:
    stored = StoredTensors(runs[0] / "first" / f"iter_{SAVED:07d}", "optimizer")
    kinds = Counter(name.partition("/")[0] for name in stored.names)
    assert kinds["momentum_buffer"] == 12 and kinds["exp_avg"] == kinds["exp_avg_sq"] > 12
    assert all(stored[name].abs().max() > 0 for name in stored.names if "embedding" in name or "momentum" in name)


def test_a_branch_off_a_checkpoint_is_the_run_planned_so(runs: tuple[Path, dict[str, Rows]]) -> None:
    rows = runs[1]
    assert rows["branch"] == rows["planned"][SAVED:]
    assert rows["stable"][0] == rows["planned"][0]


def test_accumulated_gradients_take_the_same_steps(runs: tuple[Path, dict[str, Rows]]) -> None:
    found = largest_differences(runs[1]["in one go"], runs[1]["whole"])
    assert max(found.values()) <= 2e-5, found


def test_other_layouts_go_on_alike(runs: tuple[Path, dict[str, Rows]], flags: Flags) -> None:
    folder, rows = runs
    layouts = ({}, {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2})
    for layout, got in zip(
        layouts, train_runs(2, [flags(**RECIPE, **layout, load=folder / "first") for layout in layouts]), strict=True
    ):
        found = largest_differences(got, rows["whole"][SAVED:])
        assert max(found.values()) <= 2e-5, (layout, found)
