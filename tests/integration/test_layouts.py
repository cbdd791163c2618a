"""One global batch, one result: ranks, ZeRO stages and micro-batch sizes change neither losses nor gradient norms.

The rows are of different lengths and are padded per micro-batch, so a mean of micro-batch means would show at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ddrp.checkpoint import load_model
from tests.integration.launch import start_ranks, training_rows

Flags = Callable[..., list[str]]
EXACT = ("iteration", "consumed_samples", "consumed_tokens", "lr")
CLOSE = ("loss", "lm_loss", "tcd_loss", "hcd_loss", "grad_norm")


def assert_same_course(rows: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
    """Equal counts and rates, losses and norms to 1e-5 (relative; hcd_loss passes through 0, so 1e-6 beside it)."""
    assert len(rows) == len(reference)
    for row, expected in zip(rows, reference, strict=True):
        assert row.keys() == expected.keys()
        assert {k: row[k] for k in EXACT} == {k: expected[k] for k in EXACT}
        for key in CLOSE:
            assert row[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6), (row["iteration"], key)


@pytest.fixture(scope="module")
def one_process(flags: Flags, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DDRP + MTH at ZeRO 0 in one process: four micro-batches of four."""
    folder = tmp_path_factory.mktemp("one")
    start_ranks(flags(global_batch_size=16, micro_batch_size=4, zero_stage=0, save=folder)).check()
    tokens = training_rows(folder)[-1]["consumed_tokens"]
    assert tokens < 0.95 * 5 * 16 * 32, "nothing to pad: the comparisons below would prove little"
    return folder


@pytest.mark.parametrize("micro_batch_size", [1, 2, 8, 16])
def test_micro_batch_size_changes_nothing(
    micro_batch_size: int, one_process: Path, flags: Flags, tmp_path: Path
) -> None:
    arguments = flags(global_batch_size=16, micro_batch_size=micro_batch_size, zero_stage=0, save=tmp_path)
    start_ranks(arguments).check()
    assert_same_course(training_rows(tmp_path), training_rows(one_process))


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_two_ranks_follow_one_process(zero_stage: int, one_process: Path, flags: Flags, tmp_path: Path) -> None:
    arguments = flags(global_batch_size=16, micro_batch_size=4, zero_stage=zero_stage, save=tmp_path)
    start_ranks(arguments, world_size=2).check()
    assert_same_course(training_rows(tmp_path), training_rows(one_process))
    (ours, _, _), (theirs, _, _) = load_model(tmp_path), load_model(one_process)
    for name, weight in theirs.named_parameters():
        change = (ours.get_parameter(name) - weight).abs().max()
        assert change < 2e-5, f"{name} ended {change} away"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"position_encoding": "absolute", "layernorm_position": "pre"},
        {"objective": "mlm", "relative_table": "per-layer"},
        {"tcd_tokens": 0, "hcd_heads": 0},
        {"checkpoint_activations": True, "attention_backend": "eager", "tcd_squared": True},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_two_ranks_follow_one_process_for_every_kind_of_model(
    changes: dict[str, Any], flags: Flags, tmp_path: Path
) -> None:
    arguments = {"global_batch_size": 16, "train_iters": 3, **changes}
    start_ranks(flags(**arguments, micro_batch_size=16, save=tmp_path / "one")).check()
    start_ranks(flags(**arguments, micro_batch_size=2, save=tmp_path / "two"), world_size=2).check()
    rows, reference = training_rows(tmp_path / "two"), training_rows(tmp_path / "one")
    if changes.get("objective") == "mlm":
        assert all("tcd_loss" not in row and "hcd_loss" not in row for row in rows)
        rows, reference = ([row | {"tcd_loss": 0, "hcd_loss": 0} for row in r] for r in (rows, reference))
    assert_same_course(rows, reference)


def test_recomputing_activations_changes_nothing(one_process: Path, flags: Flags, tmp_path: Path) -> None:
    arguments = flags(global_batch_size=16, zero_stage=0, checkpoint_activations=True, save=tmp_path)
    start_ranks(arguments).check()
    assert_same_course(training_rows(tmp_path), training_rows(one_process))


def test_another_seed_changes_the_course(one_process: Path, flags: Flags, tmp_path: Path) -> None:
    start_ranks(flags(global_batch_size=16, zero_stage=0, seed=4321, save=tmp_path)).check()
    ours, theirs = training_rows(tmp_path)[0], training_rows(one_process)[0]
    assert abs(ours["lm_loss"] - theirs["lm_loss"]) > 1e-4
    assert ours["hcd_loss"] != theirs["hcd_loss"]
