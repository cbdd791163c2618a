"""Sequence parallelism: the numbers of one process, from parts of the rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_ddrp.config import ParallelConfig
from megatron_ddrp.model import Encoder, build_model
from megatron_ddrp.model.stages import State
from megatron_ddrp.parallel.pipeline import enter
from megatron_ddrp.parallel.process_group import Ranks, place_in_grid
from megatron_ddrp.parallel.tensor_parallel import (
    SEQUENCE_PARALLEL,
    apply_sequence_parallel,
    apply_tensor_parallel,
    gathering_entrance,
    join,
    leave,
    split,
)
from tests.integration.training_runs import TIMEOUT, largest_differences, run_ranks, train_runs
from tests.unit.model.tiny import some_draws, tiny_batch, tiny_config

Flags = Callable[..., list[str]]
pytestmark = pytest.mark.slow

SHARED = {"micro_batch_size": 2, "zero_stage": 0, "sequence_parallel": True}
TENSOR_2: dict[str, Any] = {**SHARED, "tensor_model_parallel_size": 2}
TWO_MICRO_BATCHES = {"micro_batch_size": 4}
"""Where no data-parallel rank takes a part and no pipeline needs more."""
MODELS: dict[str, dict[str, Any]] = {
    "ddrp": {"position_encoding": "ddrp"},
    "deberta": {"position_encoding": "deberta"},
    "absolute": {"position_encoding": "absolute", "layernorm_position": "pre", "seq_length": 31},
    "modern": {
        **{"position_encoding": "ddrp", "layernorm_position": "pre", "seq_length": 31, "num_segments": 1},
        **{"ffn": "geglu", "no_bias": True, "embedding_size": 20, "local_attention": 8},
    },
}
LAYOUTS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        ("ddrp", {**TENSOR_2, **TWO_MICRO_BATCHES, "zero_stage": 1}),
        ("absolute", {**TENSOR_2, **TWO_MICRO_BATCHES}),
        ("modern", {**TENSOR_2, **TWO_MICRO_BATCHES}),
        ("deberta", {**TENSOR_2, **TWO_MICRO_BATCHES, "checkpoint_activations": True, "zero_stage": 2}),
        ("ddrp", {**TENSOR_2, **TWO_MICRO_BATCHES, "zero_stage": 3}),
    ],
    4: [
        ("absolute", {**SHARED, **TWO_MICRO_BATCHES, "tensor_model_parallel_size": 4, "zero_stage": 1}),
        ("deberta", {**SHARED, **TWO_MICRO_BATCHES, "tensor_model_parallel_size": 4}),
        ("ddrp", {**TENSOR_2, "pipeline_model_parallel_size": 2, "zero_stage": 1}),
        ("deberta", {**TENSOR_2, "pipeline_model_parallel_size": 2}),
        ("absolute", TENSOR_2),
    ],
}
"""World size → (model, layout); rows of 31 tokens do not divide, and ZeRO 3 changes torch for good and comes last."""


def test_every_layout_follows_one_process(flags: Flags) -> None:
    """Losses, each on its own, and gradient norms; `train_runs` compares the bits of all replicas at the end."""
    references = train_runs(1, [flags(**model, zero_stage=0) for model in MODELS.values()])
    expected = dict(zip(MODELS, references, strict=True))
    for world_size, layouts in LAYOUTS.items():
        runs = train_runs(world_size, [flags(**MODELS[name], **layout) for name, layout in layouts])
        for (name, layout), rows in zip(layouts, runs, strict=True):
            differences = largest_differences(rows, expected[name])
            assert {"lm_loss", "tcd_loss", "hcd_loss", "grad_norm", "valid_lm_loss"} <= differences.keys()
            assert max(differences.values()) < 1e-5, (name, layout, differences)


def test_a_run_goes_on_with_and_without(flags: Flags, tmp_path: Path) -> None:
    """The flag is no part of a checkpoint: saved with it and loaded without, and the other way round."""
    ways = [{**TENSOR_2, "sequence_parallel": kind} for kind in (True, False)]
    whole, *_ = train_runs(
        2, [flags(**TENSOR_2)] + [flags(**way, exit_interval=2, save=tmp_path / str(i)) for i, way in enumerate(ways)]
    )
    for rows in train_runs(2, [flags(**way, load=tmp_path / str(1 - i)) for i, way in enumerate(ways)]):
        assert len(rows) == 3
        assert max(largest_differences(rows, whole[2:]).values()) < 1e-5


def test_dropout_leaves_replicas_equal_and_is_the_same_when_recomputed(flags: Flags) -> None:
    dropout = {**TENSOR_2, "hidden_dropout": 0.1, "attention_dropout": 0.1, "train_iters": 3}
    lines = [flags(**dropout, position_encoding="deberta", checkpoint_activations=kind) for kind in (False, True)]
    without = flags(**dropout | {"hidden_dropout": 0.0}, position_encoding="deberta")
    plain, recomputed, other = train_runs(2, [*lines, without])
    assert plain == recomputed
    assert plain[0]["lm_loss"] != other[0]["lm_loss"]


@pytest.mark.parametrize("length", [6, 7, 2])
def test_what_travels_and_its_gradients(length: int) -> None:
    run_ranks(3, _travel, [[str(length)]], TIMEOUT)


def _travel(words: list[list[str]], _error: Path) -> None:
    """Three ranks with tensors that each can compute of all: parts, sums and gradients as slices of whole ones."""
    length = int(words[0][0])
    ranks, size = place_in_grid(torch.device("cpu"), ParallelConfig(tensor_model_parallel_size=3)), 3
    generator = torch.Generator().manual_seed(0)
    wholes, weights = torch.randn(2, size, 2, length, 4, dtype=torch.float64, generator=generator)
    per_rank = -(-length // size)

    def own(x: Tensor) -> Tensor:
        filled = torch.cat((x, x.new_zeros(2, size * per_rank - length, 4)), 1)
        return filled[:, ranks.rank * per_rank : (ranks.rank + 1) * per_rank]

    def check(function: Callable[[Tensor], Tensor], x: Tensor, expected: Tensor, weight: Tensor, slope: Tensor) -> None:
        x = x.clone().requires_grad_()
        result = function(x)
        torch.testing.assert_close(result, expected, rtol=1e-14, atol=1e-14)
        (gradient,) = torch.autograd.grad((result * weight).sum(), x)
        torch.testing.assert_close(gradient, slope, rtol=1e-14, atol=1e-14)

    whole, weight = wholes[0], weights[0]
    check(partial(split, ranks=ranks), whole, own(whole), own(weight), weight)
    check(partial(join, length=length, ranks=ranks), own(whole), whole, weight, own(weight))
    check(
        partial(enter, entrance=gathering_entrance(length, ranks)),
        own(whole),
        whole,
        weights[ranks.rank],
        own(weights.sum(0)),
    )
    check(partial(leave, ranks=ranks), wholes[ranks.rank], own(wholes.sum(0)), own(weight), weight)


BATCH, LENGTH, PART, HIDDEN = 3, 63, 32, 12


def test_between_the_cut_regions_each_rank_has_its_part() -> None:
    reports = run_ranks(2, _look, [[]], TIMEOUT)
    whole, part = [BATCH, LENGTH, HIDDEN], [BATCH, PART, HIDDEN]
    for report in reports:
        assert report["shapes"] == {
            "embeddings.norm": [whole, part],
            "embeddings.dropout": [part, part],
            "layers.0.attention": [part, part],
            "layers.0.attention.output": [[BATCH, LENGTH, HIDDEN // 2], part],
            "layers.0.attention_norm": [part, part],
            "layers.0.feed_forward": [part, part],
            "layers.0.feed_forward.input": [part, [BATCH, LENGTH, 5]],
            "layers.0.feed_forward.output": [[BATCH, LENGTH, 5], part],
            "layers.0.dropout": [part, part],
            "layers.0.feed_forward_norm": [part, part],
            "layers.0": [part, part],
            "layers.1": [part, whole],
        }
        # Five LayerNorms' inputs, means and deviations, and as many dropout masks, less their parameters side by side.
        assert report["saved"] == 5 * 4 * (BATCH * (LENGTH - PART) * (2 * HIDDEN + 2) - 2 * HIDDEN)
    first, second = (torch.tensor(report["dropped"]) for report in reports)
    assert 20 < (first == 0).sum() < 80 and not torch.equal(first, second), "each part draws its own"
    assert reports[0]["next"] == reports[1]["next"], "and randomness goes on alike"


def _look(_words: list[list[str]], _error: Path) -> dict[str, Any]:
    """What a model with sequence parallelism does on one of two ranks; one without keeps more."""
    ranks = place_in_grid(torch.device("cpu"), ParallelConfig(tensor_model_parallel_size=2))
    kept_without = _kept_bytes(_cut_model(ranks))
    model = _cut_model(ranks)
    apply_sequence_parallel(model, ranks)
    shapes: dict[str, list[list[int]]] = {}
    for name, module in model.named_modules():
        if (
            name.endswith("feed_forward") or isinstance(module, tuple(kind for _, kind in SEQUENCE_PARALLEL))
        ) and not name.startswith("layers.1."):
            module.register_forward_hook(partial(_note_shapes, shapes, name))
    kept, seen = _kept_bytes(model), dict(shapes)
    torch.manual_seed(5)
    model.layers[0].dropout.p = 0.5
    dropped = model.layers[0].dropout(torch.ones(100)).tolist()
    after = torch.rand(()).item()
    return {"shapes": seen, "saved": kept_without - kept, "dropped": dropped, "next": after}


def _cut_model(ranks: Ranks) -> Encoder:
    config = tiny_config(num_attention_heads=2, seq_length=LENGTH, hidden_dropout=0.1)
    torch.manual_seed(0)
    model = build_model(config)
    apply_tensor_parallel(model, config.position_encoding, ranks)
    return model


def _kept_bytes(model: Encoder) -> int:
    """What a pass keeps for the backward pass, each storage once, parameters not counted."""
    kept = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x  # held, so that no other takes its place
        return x

    batch = tiny_batch(lengths=(LENGTH, 4, 2), seq=LENGTH)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(batch, some_draws(batch, heads=((0, 1), (0, 1)))).sums.sum().backward()
    return sum(x.untyped_storage().nbytes() for place, x in kept.items() if place not in own)


def _note_shapes(shapes: dict[str, list[list[int]]], name: str, module: nn.Module, inputs: Any, output: Any) -> None:
    """Note the shapes of the hidden states that go in and come out."""
    given, taken = ((x[0] if type(x) is tuple else x) for x in (inputs[0], output))
    shapes[name] = [list((x.hidden if isinstance(x, State) else x).shape) for x in (given, taken)]
