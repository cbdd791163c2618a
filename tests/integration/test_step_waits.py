"""A whole step through the DeepSpeed engine waits for the device only where a line here says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ddrp.engine.layout import mark_invalid
from tests.integration.step_waits import Waits, waits_of
from tests.integration.training_runs import train_runs

Flags = Callable[..., list[str]]

MICRO_BATCHES = 4
MODEL = {
    "objective": "mth",
    "position_encoding": "ddrp",
    "seq_length": 16,
    "hidden_size": 16,
    "attention_backend": "sdpa",
}
RUN = MODEL | {"micro_batch_size": 1}
BF16 = RUN | {"bf16": True}
TIMED = {"timers": {"throughput": {"enabled": True}}}
CHECKED = {"bf16": {"check_grad_overflow": True}}

OF_REDUCTION, OF_TIMER = "synchronize stage_1_and_2.py", "synchronize timer.py"
OF_CHECKS = {"read stage_1_and_2.py": 1, "read utils.py": 3}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any] | None, Waits]] = {
    "fp32, ZeRO 0": (1, RUN | {"zero_stage": 0}, None, {}),
    "bf16, ZeRO 0": (1, BF16 | {"zero_stage": 0}, None, {}),
    "muon, ZeRO 0": (1, RUN | {"zero_stage": 0, "optimizer": "muon"}, None, {}),
    "bf16, ZeRO 1": (1, BF16 | {"zero_stage": 1}, None, {}),
    "bf16, ZeRO 2": (1, BF16 | {"zero_stage": 2}, None, {}),
    "bf16, ZeRO 1, the user's timer": (1, BF16 | {"zero_stage": 1}, TIMED, {OF_TIMER: 2 * MICRO_BATCHES}),
    "bf16, ZeRO 1, the user's check": (1, BF16 | {"zero_stage": 1}, CHECKED, OF_CHECKS),
    "fp16, ZeRO 1": (1, RUN | {"fp16": True, "zero_stage": 1}, None, OF_CHECKS),
    "bf16, ZeRO 1, two ranks": (2, BF16 | {"zero_stage": 1}, None, {OF_REDUCTION: 1}),
    "bf16, ZeRO 2, two ranks": (2, BF16 | {"zero_stage": 2}, None, {OF_REDUCTION: MICRO_BATCHES}),
}
"""Ranks, flags, file of `--deepspeed_config`, and the waits of one step of `MICRO_BATCHES` micro-batches."""
OFFLOADED = BF16 | {"zero_stage": 1, "offload_optimizer": "cpu"}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_waits_of_a_step(world_size: int, flags: Flags, tmp_path: Path) -> None:
    cases = {name: case for name, case in CASES.items() if case[0] == world_size}
    command_lines = []
    for number, (_, settings, from_file, _) in enumerate(cases.values()):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(from_file))
        batch = {"global_batch_size": MICRO_BATCHES * world_size}
        command_lines.append(flags(**settings | batch, deepspeed_config=path if from_file else None))
    waits = dict(zip(cases, waits_of(world_size, command_lines), strict=True))
    assert waits == {name: case[3] for name, case in cases.items()}


@pytest.mark.slow
def test_offloaded_state_is_waited_for_by_deepspeed_alone(flags: Flags) -> None:
    (waits,) = waits_of(1, [flags(**OFFLOADED, global_batch_size=MICRO_BATCHES)])
    assert waits.keys() == {OF_REDUCTION, *OF_CHECKS}


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 2])
@pytest.mark.parametrize("clip_grad", [0.0, 0.5])
def test_clipping_on_the_device_is_deepspeeds_to_the_last_bit(
    clip_grad: float, zero_stage: int, flags: Flags, tmp_path: Path
) -> None:
    checked = tmp_path / "checked.json"
    checked.write_text(json.dumps(CHECKED))
    run = BF16 | {"zero_stage": zero_stage, "clip_grad": clip_grad, "global_batch_size": 4, "train_iters": 6}
    ours, deepspeeds = train_runs(2, [flags(**run), flags(**run, deepspeed_config=checked)])
    assert ours == deepspeeds and min(row["grad_norm"] for row in ours) > 0.5


@pytest.mark.parametrize("number", [2.5, float("inf"), float("-inf"), float("nan")])
def test_an_invalid_norm_is_marked_as_deepspeed_marks_it(number: float) -> None:
    from deepspeed.runtime.utils import mask_nan_or_inf_with_val_inplace

    ours, theirs = torch.tensor(number), torch.tensor(number)
    mark_invalid(ours)
    mask_nan_or_inf_with_val_inplace(theirs)
    assert ours.item() == theirs.item() == (number if number == 2.5 else -1.0)
