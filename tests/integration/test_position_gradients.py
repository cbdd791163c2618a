"""Gradients of position parameters under tensor parallelism: each rank's are its part of those of one process.

Losses say nothing here: after some steps a table whose gradient holds the other ranks' heads still gives equal losses.
Four encodings of this file stand beside the registered ones: a table by head without a projection, as a bias of pairs
as one of offsets, and as one that HCD does not compare, and one that is fixed, as a buffer and as a frozen parameter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.checkpoint import MODEL, OPTIMIZER, StoredTensors, newest
from megatron_ddrp.config import ENCODINGS, ModelConfig, ObjectiveConfig, ParallelConfig, encoding_class
from megatron_ddrp.model import Encoder, build_model
from megatron_ddrp.model.positions.contract import PositionEncoding, PositionTerms
from megatron_ddrp.parallel.pipeline import own_part
from megatron_ddrp.parallel.process_group import Ranks, place_in_grid
from megatron_ddrp.parallel.tensor_parallel import apply_sequence_parallel, apply_tensor_parallel
from tests.integration.training_runs import TIMEOUT, run_ranks, train_run
from tests.unit.model.tiny import some_draws, tiny_batch, tiny_config

Flags = Callable[..., list[str]]
pytestmark = pytest.mark.slow

REACH = 3


class ByHead(PositionEncoding):
    """B[h,i,j] = table[clip(i − j), h]: learned by head, and no projection reads it."""

    by_head = {"table": 1}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        rows = torch.empty(2 * REACH + 1, config.num_attention_heads)
        self.table = nn.Parameter(rows.normal_(std=config.init_method_std))

    def forward(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        return (self.table[clipped(position_ids)].permute(2, 0, 1).unsqueeze(0),)

    @staticmethod
    def terms(config: ModelConfig, tensors: tuple[Tensor, ...]) -> PositionTerms:
        return PositionTerms(config.head_dim**-0.5, bias=tensors[0])


class ByOffset(ByHead):
    """The same as `offset_bias`, which attention spreads over the pairs."""

    def forward(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        return (self.table.T,)

    @staticmethod
    def terms(config: ModelConfig, tensors: tuple[Tensor, ...]) -> PositionTerms:
        return PositionTerms(config.head_dim**-0.5, lowest=-REACH, highest=REACH, offset_bias=tensors[0])


class Fixed(ByHead):
    """B[h,i,j] = gain · slopes[h] · |i − j| + table[clip(i − j), h]: one learned number, and all by head is fixed."""

    by_head = {"table": 1, "slopes": 0, "passing": 0}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.table.requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(1))
        slopes = -(2.0 ** -torch.arange(1.0, config.num_attention_heads + 1))
        self.register_buffer("slopes", slopes)
        self.register_buffer("passing", slopes.clone(), persistent=False)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        (bias,) = super().forward(position_ids)
        place = torch.arange(position_ids.shape[1])
        distance = (place[:, None] - place).abs()
        slopes = (self.slopes + self.passing) / 2
        return (bias + self.gain * slopes[:, None, None] * distance,)


def clipped(position_ids: Tensor) -> Tensor:
    """Row of i − j, `[seq, seq]`."""
    place = torch.arange(position_ids.shape[1])
    return (place[:, None] - place).clamp(-REACH, REACH) + REACH


class NotCompared(ByOffset):
    """The same, and HCD compares the logits without it."""

    @staticmethod
    def terms(config: ModelConfig, tensors: tuple[Tensor, ...]) -> PositionTerms:
        return replace(ByOffset.terms(config, tensors), biases_compared=False)


OWN = {"by-head": ByHead, "by-offset": ByOffset, "fixed": Fixed, "not-compared": NotCompared}


def register_own() -> None:
    """Make this file's encodings known to this process."""
    ENCODINGS.update({name: f"{__name__}:{own.__name__}" for name, own in OWN.items()})


CASES = [(name, table, {}) for name in (*ENCODINGS, *OWN) for table in ("shared", "per-layer")]
LOCAL = {"local_attention": 4, "global_every": 2, "deberta_emd": True}
CASES += [("absolute", "local", LOCAL), ("deberta-v2", "local", LOCAL)]
NOTHING_LEARNED = [name for name in ENCODINGS if not list(encoding_class(name)(tiny_config()).parameters())]
WAYS: dict[str, tuple[tuple[tuple[int, ...], ...], bool]] = {
    "sampled heads": (((0, 3), (1, 2)), False),
    "all heads, parts of rows, recomputed": ((tuple(range(4)),) * 2, True),
}
"""Name → (HCD's heads by layer, whether the sequence is cut and layers are computed again)."""


def test_each_rank_has_its_part_of_the_gradients_of_one_process() -> None:
    reports = run_ranks(2, _compare, [[]], TIMEOUT)
    for report in reports:
        assert len(report) == len(CASES) * len(WAYS) * 2
        for case, (names, difference) in report.items():
            assert names or case.split()[0] in NOTHING_LEARNED, case
            assert difference < 1e-10, case
    positions = {name for names, _ in reports[0].values() for name in names}
    assert {"embeddings.position.table", "embeddings.position.gain", "layers.1.position.table"} <= positions
    assert {"generator.embeddings.position.table", "layers.0.layer_position.key.weight"} <= positions


def _compare(_words: list[list[str]], _error: Path) -> dict[str, tuple[list[str], float]]:
    """Case → (position parameters that are trained, the largest difference of any gradient, relative to its norm)."""
    register_own()
    ranks = place_in_grid(torch.device("cpu"), ParallelConfig(tensor_model_parallel_size=2))
    found = {}
    for encoding, name, options in CASES:
        table = "per-layer" if name == "per-layer" else "shared"
        settings = {"num_attention_heads": 4, "hidden_size": 16, "relative_table": table, "deberta_emd": False}
        config = tiny_config(position_encoding=encoding, **settings | options)
        for electra in (False, True):
            for way, (heads, cuts) in WAYS.items():
                whole, part = (_build(config, electra) for _ in range(2))
                expected = _gradients(whole, heads)
                apply_tensor_parallel(part, config.position_encoding, ranks)
                if cuts:
                    part.checkpoint_activations = True
                    apply_sequence_parallel(part, ranks)
                ours = _gradients(part, heads)
                assert ours.keys() == expected.keys()
                off = max(_difference(n, ours[n], expected[n], config, ranks) for n in expected)
                names = [n for n in expected if ".position." in n or "layer_position" in n]
                found[f"{encoding} {name}{' electra' * electra}, {way}"] = (names, off)
    return found


def _build(config: ModelConfig, electra: bool) -> Encoder:
    torch.manual_seed(0)
    objective = ObjectiveConfig(objective="electra", generator_size=0.5) if electra else None
    return build_model(config, objective=objective).double()


def _gradients(model: Encoder, heads: tuple[tuple[int, ...], ...]) -> dict[str, Tensor]:
    """Of every trained parameter, by name; every term of the loss has its weight."""
    batch = tiny_batch()
    draws = some_draws(batch, heads)
    draws = draws._replace(own=model.head.objective.draw_own(batch.map(lambda field: field.numpy()), 1234, 1))
    sums = model(batch, draws).sums
    (sums * torch.linspace(0.7, 1.3, len(sums))).sum().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def _difference(name: str, ours: Tensor, whole: Tensor, config: ModelConfig, ranks: Ranks) -> float:
    return float((ours - own_part(name, whole, config.position_encoding, ranks)).norm() / whole.norm().clamp_min(1e-4))


ZERO_3_OF_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
"""DeepSpeed's settings under which ZeRO 3 takes tiny parameters apart, too."""
MODELS: dict[str, dict[str, Any]] = {
    "by-head": {"position_encoding": "by-head"},
    "by-offset": {"position_encoding": "by-offset"},
    "fixed": {"position_encoding": "fixed", "relative_table": "per-layer"},
    "deberta": {"position_encoding": "deberta"},
    "deberta-v2": {"position_encoding": "deberta-v2", "deberta_emd": True},
    "tupe-r": {
        "position_encoding": "tupe-r",
        "absolute_embedding": True,
        "objective": "electra",
        "generator_size": 0.5,
    },
}
LAYOUTS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        ("by-head", {"zero_stage": 1}),
        ("by-offset", {"zero_stage": 1}),
        ("fixed", {"zero_stage": 2, "sequence_parallel": True, "checkpoint_activations": True}),
        ("deberta", {"zero_stage": 3, "deepspeed_config": ZERO_3_OF_ALL}),
        ("tupe-r", {"zero_stage": 3, "deepspeed_config": ZERO_3_OF_ALL, "sequence_parallel": True}),
        ("deberta-v2", {"zero_stage": 3, "deepspeed_config": ZERO_3_OF_ALL, "sequence_parallel": True}),
        ("fixed", {"zero_stage": 3, "deepspeed_config": ZERO_3_OF_ALL}),
        ("by-head", {"zero_stage": 3}),
    ],
    4: [
        ("fixed", {"zero_stage": 0, "pipeline_model_parallel_size": 2}),
        ("deberta", {"zero_stage": 1, "pipeline_model_parallel_size": 2}),
        ("tupe-r", {"zero_stage": 1, "pipeline_model_parallel_size": 2, "sequence_parallel": True}),
        ("fixed", {"zero_stage": 3, "deepspeed_config": ZERO_3_OF_ALL}),
    ],
}
"""World size → (model, layout beside tensor parallelism of 2); ZeRO 3 changes torch for good and comes last."""


def test_the_engine_steps_by_the_gradients_of_one_process(flags: Flags, tmp_path: Path) -> None:
    """Adam's first moment after a step is a tenth of the gradient; it is saved by the whole model's names."""
    (tmp_path / "zero3.json").write_text(json.dumps(ZERO_3_OF_ALL), encoding="utf-8")

    def command_line(name: str, folder: str, **layout: Any) -> list[str]:
        model = {**MODELS[name], "train_iters": 1, "micro_batch_size": 2}
        encoding = model.pop("position_encoding")
        if "deepspeed_config" in layout:
            layout["deepspeed_config"] = tmp_path / "zero3.json"
        return [encoding, *flags(**model, **layout, save=tmp_path / folder)]

    run_ranks(1, _train, [command_line(name, name, zero_stage=0) for name in MODELS], TIMEOUT)
    for size, layouts in LAYOUTS.items():
        lines = [
            command_line(name, f"{size}-{number}", tensor_model_parallel_size=2, **layout)
            for number, (name, layout) in enumerate(layouts)
        ]
        run_ranks(size, _train, lines, TIMEOUT)
        for number, (name, layout) in enumerate(layouts):
            _assert_equal(tmp_path / f"{size}-{number}", tmp_path / name, f"{name} {layout}")
    # A layout reads what another wrote, what is fixed included.
    line = command_line("fixed", "again", zero_stage=1, tensor_model_parallel_size=2, load=tmp_path / "2-6")
    run_ranks(2, _train, [line], TIMEOUT)
    _assert_equal(tmp_path / "again", tmp_path / "fixed", "loaded")


def _train(lines: list[list[str]], _error: Path) -> list[int]:
    register_own()
    for encoding, *words in lines:
        train_run(parse_arguments(words).config.replace(model={"position_encoding": encoding}))
    return []


def _assert_equal(folder: Path, reference: Path, case: str) -> None:
    """The same first moments of embeddings and position parameters; of what is not trained, the same bits."""
    (moments, expected), (weights, stored) = (
        [StoredTensors(newest(path), kind) for path in (folder, reference)] for kind in (OPTIMIZER, MODEL)
    )
    assert (moments.names, weights.names) == (expected.names, stored.names), case
    trained = {name for name in moments.names if re.match(r"exp_avg/.*(position|embeddings)\.", name)}
    assert trained, case
    for name in sorted(trained):
        difference = (moments[name] - expected[name]).norm() / expected[name].norm()
        assert difference < 1e-3, (case, name, float(difference))
    fixed = {name for name in weights.names if f"exp_avg/{name}" not in moments.names}
    assert bool(fixed) == ("gain" in " ".join(trained)), case
    assert all(torch.equal(weights[name], stored[name]) for name in fixed), case
