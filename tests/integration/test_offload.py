"""ZeRO-Offload: optimizer state, and at ZeRO 3 parameters, in host memory, with the losses of a run without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.launch import start_ranks, training_rows
from tests.integration.test_faults import poisoned
from tests.integration.test_layout_changes import tensors

Flags = Callable[..., list[str]]
RUN = {"train_iters": 4, "hidden_dropout": 0.1}
LOSSES = ("loss", "grad_norm")


def offload(folder: Path, *what: str) -> Path:
    path = folder / "offload.json"
    path.write_text(json.dumps({"zero_optimization": {name: {"device": "cpu"} for name in what}}), encoding="utf-8")
    return path


def losses(folder: Path) -> list[float]:
    return [row[name] for row in training_rows(folder) for name in LOSSES]


@pytest.mark.parametrize(
    ("stage", "what", "settings"),
    [
        (1, ["offload_optimizer"], {"bf16": True}),
        (2, ["offload_optimizer"], {}),
        (3, ["offload_optimizer", "offload_param"], {}),
        pytest.param(1, ["offload_optimizer"], {}, marks=pytest.mark.slow),
        pytest.param(2, ["offload_optimizer"], {"bf16": True}, marks=pytest.mark.slow),
        pytest.param(3, ["offload_optimizer"], {"bf16": True}, marks=pytest.mark.slow),
    ],
)
def test_offload_changes_no_loss_and_resumes_exactly(
    stage: int, what: list[str], settings: dict[str, Any], flags: Flags, tmp_path: Path
) -> None:
    plain, whole, parts = (tmp_path / name for name in ("plain", "whole", "parts"))
    common = {**RUN, **settings, "zero_stage": stage}
    start_ranks(flags(save=plain, **common)).check()
    common["deepspeed_config"] = offload(tmp_path, *what)
    start_ranks(flags(save=whole, **common)).check()
    for _ in range(2):
        start_ranks(flags(save=parts, load=parts, exit_interval=2, **common)).check()
    assert losses(whole) == pytest.approx(losses(plain), rel=1e-6)
    assert training_rows(parts) == training_rows(whole)
    expected, resumed, held = (tensors(folder / "iter_0000004") for folder in (whole, parts, plain))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())
    assert all(torch.allclose(held[name], tensor, atol=1e-5) for name, tensor in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "bf16"), [(1, False), (2, False), (2, True), (3, False)])
def test_offload_on_two_ranks_skips_what_is_not_finite(stage: int, bf16: bool, flags: Flags, tmp_path: Path) -> None:
    common = {**RUN, "zero_stage": stage, "save_interval": 1, "bf16": bf16}
    spoiled = poisoned((3,), "output")
    start_ranks(flags(save=tmp_path / "plain", **common), 2, before=spoiled).check()
    common["deepspeed_config"] = offload(tmp_path, "offload_optimizer")
    start_ranks(flags(save=tmp_path / "offload", **common), 2, before=spoiled).check()
    rows = [[row["loss"] for row in training_rows(tmp_path / name)] for name in ("plain", "offload")]
    assert rows[0][2] is rows[1][2] is None
    assert rows[1][:2] + rows[1][3:] == pytest.approx(rows[0][:2] + rows[0][3:], rel=1e-6)
    before, after = (tensors(tmp_path / "offload" / f"iter_000000{step}") for step in (2, 3))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_resumes_with_and_without_offload(stage: int, flags: Flags, tmp_path: Path) -> None:
    common, file = {**RUN, "zero_stage": stage}, offload(tmp_path, "offload_optimizer")
    start_ranks(flags(save=tmp_path / "plain", **common)).check()
    expected = losses(tmp_path / "plain")
    for first, second in ((None, file), (file, None)):
        run = tmp_path / f"from {'plain' if first is None else 'offload'}"
        for deepspeed_config in (first, second):
            settings = {**common, "exit_interval": 2, "deepspeed_config": deepspeed_config}
            start_ranks(flags(save=run, load=run, **settings)).check()
        assert losses(run) == pytest.approx(expected, rel=1e-6)
