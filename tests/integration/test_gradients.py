"""Gradients under tensor parallelism and their sums in bf16: each rank's are its part of those of one process.

Losses say nothing here: after some steps a table whose gradient holds the other ranks' heads still gives equal losses.
An encoding of this file stands beside the registered ones: all that it has by head is fixed, as a buffer and as a
frozen parameter.

bf16 gradients are added up and reduced in fp32 in every layout: 16 micro-batches, two ranks. Each run proves it for
some parameters: none is wrong in any layout, and a change of a tenth of one micro-batch's gradient ends the run, in the
rank that has it or in another.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.checkpoint import MODEL, OPTIMIZER, StoredTensors, newest
from megatron_ddrp.config import ENCODINGS, ModelConfig, ObjectiveConfig, ParallelConfig, encoding_class
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.model import Encoder, build_model
from megatron_ddrp.model.positions.contract import PositionEncoding, PositionTerms
from megatron_ddrp.parallel.pipeline import own_part
from megatron_ddrp.parallel.process_group import Ranks, place_in_grid
from megatron_ddrp.parallel.tensor_parallel import apply_sequence_parallel, apply_tensor_parallel
from tests.integration.conftest import TENSOR, Flags
from tests.integration.inside_engines import Proved, proofs
from tests.integration.launch import json_file
from tests.integration.training_runs import TIMEOUT, of_each_run, run_ranks, train_run
from tests.unit.model.tiny import packed_batch, some_draws, tiny_batch, tiny_config

REACH = 3


class Fixed(PositionEncoding):
    """B[h,i,j] = gain · slopes[h] · |i − j| + table[clip(i − j), h]: one learned number, and all by head is fixed."""

    by_head = {"table": 1, "slopes": 0, "passing": 0}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        rows = torch.empty(2 * REACH + 1, config.num_attention_heads)
        self.table = nn.Parameter(rows.normal_(std=config.init_method_std), requires_grad=False)
        self.gain = nn.Parameter(torch.ones(1))
        slopes = -(2.0 ** -torch.arange(1.0, config.num_attention_heads + 1))
        self.register_buffer("slopes", slopes)
        self.register_buffer("passing", slopes.clone(), persistent=False)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        place = torch.arange(position_ids.shape[1])
        offset = place[:, None] - place  # [seq, seq]
        table = self.table[offset.clamp(-REACH, REACH) + REACH].permute(2, 0, 1)  # [heads, seq, seq]
        slopes = (self.slopes + self.passing) / 2
        return ((table + self.gain * slopes[:, None, None] * offset.abs()).unsqueeze(0),)

    @staticmethod
    def terms(config: ModelConfig, tensors: tuple[Tensor, ...]) -> PositionTerms:
        return PositionTerms(config.head_dim**-0.5, bias=tensors[0])


def register_own() -> None:
    """Make this file's encoding known to this process."""
    ENCODINGS["fixed"] = f"{__name__}:Fixed"


CASES = [(name, table, {}) for name in (*ENCODINGS, "fixed") for table in ("shared", "per-layer")]
LOCAL = {"local_attention": 4, "global_every": 2, "deberta_emd": True}
CASES += [("absolute", "local", LOCAL), ("deberta-v2", "local", LOCAL)]
NOTHING_LEARNED = [name for name in ENCODINGS if not list(encoding_class(name)(tiny_config()).parameters())]
WAYS: dict[str, tuple[tuple[tuple[int, ...], ...], bool]] = {
    "sampled heads": (((0, 3), (1, 2)), False),
    "in parts": ((tuple(range(4)),) * 2, True),
}
"""Name → (HCD's heads by layer, whether the sequence is cut and layers are computed again).

A generator is compared in parts alone.
"""


OBJECTIVES: dict[str, dict[str, Any]] = {
    "rtd": {"tcd_weight": 1.0, "hcd_weight": 0.01},
    "head-disagreement": {"objective_options": ("value=0.5", "attention=0.1"), "tcd_weight": 1.0, "hcd_weight": 0.01},
}
"""Objective → its settings, beside MTH's two terms; tests/integration/test_layouts.py trains it in layouts."""
OBJECTIVE_CASES = [("rtd", "ddrp"), ("head-disagreement", "ddrp"), ("head-disagreement", "t5")]
"""(objective, encoding): tables that all heads share, and rows of single heads."""


@pytest.mark.slow
def test_each_rank_has_its_part_of_the_gradients_of_one_process_also_of_an_objective() -> None:
    reports = run_ranks(2, _compare, [], TIMEOUT)
    for report in reports:
        assert len(report) == len(CASES) * 3 + len(OBJECTIVE_CASES) * 2 + 1
        for case, (names, sums, gradients) in report.items():
            assert names or case.split()[0] in NOTHING_LEARNED, case
            assert sums < 1e-12 and gradients < 1e-10, (case, sums, gradients)
    positions = {name for names, _, _ in reports[0].values() for name in names}
    assert {"embeddings.position.table", "embeddings.position.gain", "layers.1.position.table"} <= positions
    assert {"generator.embeddings.position.table", "layers.0.layer_position.key.weight"} <= positions


def _compare(_: list[Any]) -> dict[str, tuple[list[str], float, float]]:
    """Case → position parameters that are trained, largest differences of a sum and of a gradient, by their norms."""
    register_own()
    ranks = place_in_grid(torch.device("cpu"), ParallelConfig(tensor_model_parallel_size=2))
    electra, found = ObjectiveConfig(objective="electra", generator_size=0.5), {}

    def compare(case: str, config: ModelConfig, objective: ObjectiveConfig | None, batch: Batch, *ways: str) -> None:
        for way in ways:
            sums, off, names = _differences(partial(_build, config, objective), batch, *WAYS[way], ranks)
            names = [name for name in names if ".position." in name or "layer_position" in name]
            found[f"{case}, {way}"] = (names, sums, off)

    for encoding, name, options in CASES:
        table = "per-layer" if name == "per-layer" else "shared"
        settings = {"num_attention_heads": 4, "hidden_size": 16, "relative_table": table, "deberta_emd": False}
        config = tiny_config(position_encoding=encoding, **settings | options)
        compare(f"{encoding} {name}", config, None, tiny_batch(), *WAYS)
        compare(f"{encoding} {name} electra", config, electra, tiny_batch(), "in parts")
    short = tiny_batch(lengths=(1, 1), seq=1)  # of which the second rank has no part
    compare("ddrp, rows of one token", tiny_config(num_attention_heads=4, hidden_size=16), None, short, "in parts")
    packed = packed_batch(tiny_batch(lengths=(7, 4, 5)), [[0, 2], [1]])
    for name, encoding in OBJECTIVE_CASES:
        config = tiny_config(num_attention_heads=4, hidden_size=16, seq_length=16, position_encoding=encoding)
        compare(f"{encoding} {name}", config, ObjectiveConfig(objective=name, **OBJECTIVES[name]), packed, *WAYS)
    return found


def _build(config: ModelConfig, objective: ObjectiveConfig | None) -> Encoder:
    torch.manual_seed(0)
    model = build_model(config, objective=objective).double()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)  # what starts at 0 acts too
    return model


def _differences(
    build: Callable[[], Encoder], batch: Batch, heads: tuple[tuple[int, ...], ...], cuts: bool, ranks: Ranks
) -> tuple[float, float, list[str]]:
    """Return the largest differences of a sum and of a gradient to one process's, relative to the norm, and the names
    of the trained parameters. With `cuts` the sequence is cut and layers are computed again."""
    whole, part = build(), build()
    expected_sums, expected = _gradients(whole, batch, heads)
    apply_tensor_parallel(part, ranks)
    if cuts:
        part.checkpoint_activations = True
        apply_sequence_parallel(part, ranks)
    sums, ours = _gradients(part, batch, heads)
    assert ours.keys() == expected.keys()
    encoding = whole.config.encoding
    off = max(_distance(ours[n], own_part(n, gradient, encoding, ranks), gradient) for n, gradient in expected.items())
    return _distance(sums, expected_sums, expected_sums), off, list(expected)


def _gradients(model: Encoder, batch: Batch, heads: tuple[tuple[int, ...], ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sums, and of their weighted total the gradient of every trained parameter by name."""
    draws = some_draws(batch, heads)
    draws = draws._replace(own=model.head.objective.draw_own(batch.map(lambda field: field.numpy()), 1234, 1))
    sums = model(batch, draws).sums
    (sums * torch.linspace(0.7, 1.3, len(sums))).sum().backward()
    return sums.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def _distance(ours: Tensor, expected: Tensor, whole: Tensor) -> float:
    return float((ours - expected).norm() / whole.norm().clamp_min(1e-4))


ZERO_3_OF_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
"""DeepSpeed's settings under which ZeRO 3 takes tiny parameters apart, too."""
IN_PARTS = {"zero_stage": 3, "deepspeed_config": ZERO_3_OF_ALL}
MODELS: dict[str, dict[str, Any]] = {
    "t5": {"position_encoding": "t5"},
    "fixed": {"position_encoding": "fixed", "relative_table": "per-layer"},
    "deberta": {"position_encoding": "deberta", "objective": "electra", "generator_size": 0.5},
}
LAYOUTS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        ("t5", {"zero_stage": 1}),
        ("fixed", {"zero_stage": 2, "sequence_parallel": True, "checkpoint_activations": True}),
        ("deberta", {**IN_PARTS, "sequence_parallel": True}),
        ("fixed", IN_PARTS),
        ("t5", {"zero_stage": 3}),
    ],
    4: [
        ("fixed", {"zero_stage": 1, "load": "2-1"}),  # what another layout wrote, what is fixed included
        ("fixed", {"zero_stage": 0, "pipeline_model_parallel_size": 2}),
        ("deberta", {"zero_stage": 1, "pipeline_model_parallel_size": 2, "sequence_parallel": True}),
        ("fixed", IN_PARTS),
    ],
}
"""World size → (model, layout beside tensor parallelism of 2); ZeRO 3 changes torch for good and comes last."""


@pytest.mark.slow
def test_the_engine_steps_by_the_gradients_of_one_process(flags: Flags, tmp_path: Path) -> None:
    """Adam's first moment after a step is a tenth of the gradient; it is saved by the whole model's names."""
    zero_3 = json_file(tmp_path / "zero3.json", ZERO_3_OF_ALL)

    def command_line(name: str, folder: str, **layout: Any) -> list[str]:
        model = {**MODELS[name], "train_iters": 1, "micro_batch_size": 2}
        encoding = model.pop("position_encoding")
        files = {"deepspeed_config": zero_3, "load": tmp_path / layout.get("load", "")}
        layout |= {name: files[name] for name in layout.keys() & files.keys()}
        return [encoding, *flags(**model, **layout, save=tmp_path / folder)]

    of_each_run(1, [command_line(name, name, zero_stage=0) for name in MODELS], _train)
    for size, layouts in LAYOUTS.items():
        lines = [
            command_line(name, f"{size}-{number}", tensor_model_parallel_size=2, **layout)
            for number, (name, layout) in enumerate(layouts)
        ]
        of_each_run(size, lines, _train)
        for number, (name, layout) in enumerate(layouts):
            _assert_equal(tmp_path / f"{size}-{number}", tmp_path / name, f"{name} {layout}")


def _train(line: list[str]) -> None:
    register_own()
    encoding, *words = line
    train_run(parse_arguments(words).config.replace(model={"position_encoding": encoding}))


def _assert_equal(folder: Path, reference: Path, case: str) -> None:
    """The same first moments of embeddings and position parameters; of what is not trained, the same bits."""
    pairs = ([StoredTensors(newest(path), kind) for path in (folder, reference)] for kind in (OPTIMIZER, MODEL))
    (moments, expected), (weights, stored) = pairs
    assert (moments.names, weights.names) == (expected.names, stored.names), case
    trained = {name for name in moments.names if re.match(r"exp_avg/.*(position|embeddings)\.", name)}
    assert trained, case
    for name in sorted(trained):
        difference = (moments[name] - expected[name]).norm() / expected[name].norm()
        assert difference < 1e-3, (case, name, float(difference))
    fixed = {name for name in weights.names if f"exp_avg/{name}" not in moments.names}
    assert bool(fixed) == ("gain" in " ".join(trained)), case
    assert all(torch.equal(weights[name], stored[name]) for name in fixed), case


SMALL = {"objective": "mlm", "position_encoding": "absolute", "seq_length": 16, "hidden_size": 16}
RUN = SMALL | {"bf16": True, "micro_batch_size": 1, "global_batch_size": 16}
OVERLAPPED = {"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 3000}}
"""Settings that reduce as GPUs do: several buckets, two in turn, from hooks of the last backward pass."""
IN_BF16 = {"data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "bf16"}


PROVED: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "fp32, ZeRO 0": ({"bf16": False, "zero_stage": 0}, None, "embeddings.norm.weight"),
    "bf16, ZeRO 0": ({"zero_stage": 0}, None, "layers.0.attention.query.bias"),
    "ZeRO 1, overlapped": ({"zero_stage": 1}, OVERLAPPED, "embeddings.absolute.weight"),
    "ZeRO 2, overlapped": ({"zero_stage": 2}, OVERLAPPED, "embeddings.token.weight"),
    "offloaded": ({"zero_stage": 2, "offload_optimizer": "cpu"}, None, "embeddings.norm.weight"),
    "tensor": (TENSOR, None, "layers.0.attention.query.weight"),
    "positions of all heads": (TENSOR | {"position_encoding": "ddrp"}, None, "embeddings.position.direction"),
    "sequence": (TENSOR | {"sequence_parallel": True}, None, "embeddings.norm.weight"),
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
        file = json_file(tmp_path / f"{number}.json", settings) if settings else None
        runs.append((flags(**RUN | layout, deepspeed_config=file), changed))
    for (name, (*_, changed)), found in zip(PROVED.items(), of_each_run(2, runs, proofs), strict=True):
        ranks = [Proved(*proved) for proved in found]
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
