"""The dry run's bytes of weights, gradients and optimizer state beside those that engines hold, rank by rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import Config
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.memory import Memory, by_zero_stage
from megatron_ddrp.model import on_meta_device
from tests.integration.held_memory import held_by

Flags = Callable[..., list[str]]

MODEL = {"num_layers": 3, "hidden_size": 128, "ffn_hidden_size": 1024, "micro_batch_size": 2, "train_iters": 2}
"""1.1 million parameters, few of them padding; the feed-forward weights are large enough for ZeRO 3 to cut."""

BUFFERS = {"reduce_bucket_size": 200_000, "stage3_prefetch_bucket_size": 200_000}
"""Elements; as many as the model has itself, so that they do not hide the rest."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO 0": {"zero_stage": 0},
    "ZeRO 1": {"zero_stage": 1},
    "ZeRO 2": {"zero_stage": 2},
    "ZeRO 0, bf16": {"zero_stage": 0, "bf16": True},
    "ZeRO 1, bf16": {"zero_stage": 1, "bf16": True},
    "ZeRO 2, bf16": {"zero_stage": 2, "bf16": True},
    "tensor 2": {"zero_stage": 1, "tensor_model_parallel_size": 2, "bf16": True},
    "pipeline 2": {"zero_stage": 1, "pipeline_model_parallel_size": 2},
    "ZeRO 3": {"zero_stage": 3},
    "ZeRO 3, bf16": {"zero_stage": 3, "bf16": True},
}
"""Of two ranks; ZeRO 3, which changes torch for good, comes last."""


def estimates(config: Config, world_size: int) -> list[Memory]:
    """Of each rank."""
    tokenizer = build_tokenizer("BertWordPieceLowerCase", config.data.vocab_file, None)
    config = config.replace(model={"vocab_size": tokenizer.vocab_size})
    data_size = config.parallel.data_parallel_size(world_size)
    micro_batches = config.training.global_batch_size // (config.training.micro_batch_size * data_size)
    model = on_meta_device(config.model, config.objective)
    ranks = by_zero_stage(model, config, data_size, micro_batches, device_type="cpu")[config.parallel.zero_stage]
    return [memory for memory in ranks for _ in range(config.parallel.tensor_model_parallel_size)]


@pytest.mark.slow
def test_estimates_are_within_a_tenth_of_what_engines_hold(flags: Flags, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": BUFFERS}))
    command_lines = [flags(**MODEL | layout, deepspeed_config=tmp_path / "ds.json") for layout in LAYOUTS.values()]
    for name, words, ranks in zip(LAYOUTS, command_lines, held_by(2, command_lines), strict=True):
        expected = estimates(parse_arguments(words).config, 2)
        for rank, (held, memory) in enumerate(zip(ranks, expected, strict=True)):
            for kind in ("weights", "gradients", "optimizer"):
                assert asdict(memory)[kind] == pytest.approx(held[kind], rel=0.1), (name, rank, kind)
            kept = memory.weights + memory.gradients + memory.optimizer
            assert 0.9 * kept < held["all"] < 1.1 * (kept + memory.buffers), (name, rank)
