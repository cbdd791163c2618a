"""bf16 gradients are added up and reduced in fp32 in every layout: 16 micro-batches, two ranks.

Each run proves it for some parameters: none is wrong in any layout, and a change of a tenth of one micro-batch's
gradient ends the run, in the rank that has it or in another.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.gradient_sums import errors_by, proofs_by

Flags = Callable[..., list[str]]

MODEL = {"objective": "mlm", "position_encoding": "absolute", "seq_length": 16, "hidden_size": 16}
RUN = MODEL | {"bf16": True, "micro_batch_size": 1, "global_batch_size": 16}
OVERLAPPED = {"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 3000}}
"""As on GPUs: several buckets, two in turn, from hooks of the last backward pass."""
IN_BF16 = {"data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "bf16"}

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "ZeRO 0": ({"zero_stage": 0}, None),
    "ZeRO 1, overlapped": ({"zero_stage": 1}, OVERLAPPED),
    "ZeRO 2, overlapped": ({"zero_stage": 2}, OVERLAPPED),
    "pipeline": ({"pipeline_model_parallel_size": 2}, None),
    "in bf16": ({"zero_stage": 1}, IN_BF16),
    "ZeRO 3": ({"zero_stage": 3}, None),
}
"""Flags and the file of `--deepspeed_config`; ZeRO 3, which changes torch for good, comes last."""


@pytest.mark.slow
def test_the_sum_of_16_micro_batches_has_fp32s_rounding_and_not_bf16s(flags: Flags, tmp_path: Path) -> None:
    command_lines = []
    for number, (layout, settings) in enumerate(LAYOUTS.values()):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(settings))
        command_lines.append(flags(**RUN | layout, deepspeed_config=path if settings else None))
    errors = dict(zip(LAYOUTS, map(max, errors_by(2, command_lines)), strict=True))
    in_bf16 = errors.pop("in bf16")
    assert max(errors.values()) < 1e-6 < 1e-3 < in_bf16, (errors, in_bf16)


PROVED: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "fp32, ZeRO 0": ({"bf16": False, "zero_stage": 0}, None, "embeddings.norm.weight"),
    "bf16, ZeRO 0": ({"zero_stage": 0}, None, "layers.0.attention.query.bias"),
    "ZeRO 1, overlapped": ({"zero_stage": 1}, OVERLAPPED, "embeddings.absolute.weight"),
    "ZeRO 2, overlapped": ({"zero_stage": 2}, OVERLAPPED, "embeddings.token.weight"),
    "offloaded": ({"zero_stage": 2, "offload_optimizer": "cpu"}, None, "embeddings.norm.weight"),
    "tensor": ({"tensor_model_parallel_size": 2}, None, "layers.0.attention.query.weight"),
    "positions of all heads": (
        {"tensor_model_parallel_size": 2, "position_encoding": "ddrp"},
        None,
        "embeddings.position.direction",
    ),
    "sequence": (
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        None,
        "embeddings.norm.weight",
    ),
    "tied weights of a pipeline": ({"pipeline_model_parallel_size": 2}, None, "embeddings.token.weight"),
    "electra": ({"objective": "electra"}, None, "generator.embeddings.projection.bias"),
    "in bf16": ({"zero_stage": 1}, IN_BF16, ""),
    "ZeRO 3": ({"zero_stage": 3}, None, "embeddings.norm.weight"),
}
"""Flags, file and the parameter to change; ZeRO 3 comes last."""


@pytest.mark.slow
def test_a_changed_gradient_ends_the_run_in_every_layout(flags: Flags, tmp_path: Path) -> None:
    runs = []
    for number, (layout, settings, changed) in enumerate(PROVED.values()):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(settings))
        runs.append((flags(**RUN | layout, deepspeed_config=path if settings else None), changed))
    for (name, (*_, changed)), ranks in zip(PROVED.items(), proofs_by(2, runs), strict=True):
        errors, lines = {proved.error for proved in ranks}, [proved.lines for proved in ranks]
        if not changed:
            assert errors == {""} and lines[0][0].startswith(
                "gradients are added up in bfloat16 and reduced in bfloat16: those of the first step are off by 0."
            ), (name, errors, lines)
            continue
        (error,) = errors
        assert lines == [[], []], (name, lines)
        assert f"wrong gradients: that of {changed} is off by 0.0" in error, (name, error)
        assert any(changed in proved.compared for proved in ranks)
