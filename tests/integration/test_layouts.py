"""One global batch, one result: ranks, layouts, ZeRO stages, micro-batch sizes and packing change neither losses nor
gradient norms.

The rows are of different lengths and are padded per micro-batch, so a mean of micro-batch means would show at once.
Here is a selection: `make endurance` runs every layout with every encoding, and draws layouts with every objective and
option (tests/endurance/combinations.py). Layouts with as many ranks share a process group, but ZeRO 3, which changes
torch for good, comes last.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_ddrp.checkpoint import StoredTensors, newest
from megatron_ddrp.config import ParallelConfig
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.loader import BatchLoader
from megatron_ddrp.model import Encoder, build_model
from megatron_ddrp.objectives.contract import count_sequences
from megatron_ddrp.parallel.process_group import Ranks, place_in_grid
from megatron_ddrp.parallel.tensor_parallel import apply_sequence_parallel, apply_tensor_parallel
from tests.integration.conftest import Flags, Train
from tests.integration.launch import steps_of
from tests.integration.training_runs import TIMEOUT, Rows, assert_near, largest_differences, run_ranks, train_runs
from tests.unit.model.tiny import some_draws, tiny_batch, tiny_config


def test_micro_batches_and_recomputing_change_nothing(train: Train) -> None:
    """DDRP + MTH at ZeRO 0 in one process."""
    ways = [{"micro_batch_size": size} for size in (4, 1, 2, 16)] + [{"checkpoint_activations": True}]
    expected, *others = (steps_of(train(global_batch_size=16, zero_stage=0, **way).rows) for way in ways)
    assert expected[-1]["consumed_tokens"] < 0.95 * 5 * 16 * 32, "nothing to pad: the comparisons would prove little"
    for rows in others:
        assert_near(rows, expected, 1e-6)


COURSE = {"train_iters": 5, "micro_batch_size": 2, "zero_stage": 0}
TWO_MICRO_BATCHES = {"micro_batch_size": 4}
"""Where no data-parallel rank takes a part and no pipeline needs more."""


def layout(tensor: int = 1, pipeline: int = 1, **changes: Any) -> dict[str, Any]:
    return {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline, **changes}


ABSOLUTE = {"position_encoding": "absolute", "layernorm_position": "pre"}
MODERN = {
    **{"position_encoding": "rope", "layernorm_position": "pre", "no_first_norm": True, "num_segments": 0},
    **{"ffn": "swiglu", "norm": "rmsnorm", "no_bias": True, "norm_bias": True, "embedding_size": 20},
    "local_attention": 8,
}
CAUSAL = {"objective": "mlm", "objective_phases": "clm:0.5", "train_iters": 4}
DATA_2 = {"global_batch_size": 16, "micro_batch_size": 4, "train_iters": 5}
KIND = {"global_batch_size": 16, "micro_batch_size": 16, "train_iters": 3, "zero_stage": 1}
EAGER = {"checkpoint_activations": True, "attention_backend": "eager", "tcd_squared": True, "tcd_tokens": 0}
RTD = {"objective": "rtd", "tcd_weight": 1.0, "hcd_weight": 0.01, "train_iters": 3}
DISAGREEMENT = RTD | {"objective": "head-disagreement", "objective_options": ("value=0.5", "attention=0.1")}
GEGLU = {
    **{"layernorm_position": "pre", "num_segments": 1, "ffn": "geglu", "no_bias": True, "embedding_size": 20},
    **{"local_attention": 8, "seq_length": 31},
}
"""Rows of 31 tokens do not divide."""


def cut(tensor: int, pipeline: int = 1, **changes: Any) -> dict[str, Any]:
    return layout(tensor, pipeline, sequence_parallel=True, **changes)


MODEL_PARALLEL: dict[int, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    2: {
        "pipeline 2": ({"position_encoding": "tupe-r", "packing": True}, layout(1, 2, checkpoint_activations=True)),
        "tensor 2, modern": (MODERN, layout(2, zero_stage=2)),
        "pipeline 2, causal": ({"position_encoding": "deberta", **CAUSAL}, layout(1, 2, zero_stage=1)),
        "tensor 2, causal, cut sequences": ({**MODERN, **CAUSAL}, cut(2, zero_stage=1)),
        "data 2, mlm": (KIND | {"objective": "mlm", "relative_table": "per-layer"}, {"micro_batch_size": 2}),
        "data 2, eager": (KIND | ABSOLUTE | EAGER, {"micro_batch_size": 2}),
        "sequence, modern": (GEGLU, cut(2, **TWO_MICRO_BATCHES)),
        "tensor 2, cut, rtd": (RTD, cut(2)),
        "pipeline 2, rtd": (RTD, layout(1, 2, packing=True)),
        "tensor 2, cut, disagreement": (DISAGREEMENT, cut(2, zero_stage=1)),
        "data 2, disagreement": (DISAGREEMENT, {"zero_stage": 2, "offload_optimizer": "cpu"}),
        **{f"data 2, ZeRO {stage}": (DATA_2, {"zero_stage": stage}) for stage in (0, 1, 2, 3)},
        "data 2, rtd": (RTD, {"zero_stage": 3}),
        "sequence, ddrp, ZeRO 3": ({}, cut(2, **TWO_MICRO_BATCHES, zero_stage=3)),
    },
    4: {
        "tensor 4": (
            {"position_encoding": "deberta", "tcd_tokens": 0, "hcd_heads": 0, "optimizer": "muon"},
            layout(4, **TWO_MICRO_BATCHES),
        ),
        "pipeline 2 x data 2": (ABSOLUTE, layout(1, 2)),
        "pipeline 4": ({"relative_table": "per-layer", "num_layers": 4, "objective": "mlm"}, layout(1, 4)),
        "sequence 4, absolute": (ABSOLUTE | {"seq_length": 31}, cut(4, **TWO_MICRO_BATCHES, zero_stage=1)),
        "sequence x pipeline 2, deberta": (
            {"position_encoding": "deberta"},
            cut(2, 2, checkpoint_activations=True, zero_stage=1),
        ),
        "tensor 2 x data 2": ({"position_encoding": "bert-r"}, layout(2, zero_stage=3)),
        "tensor 2 x data 2, causal": ({"position_encoding": "t5", "packing": True, **CAUSAL}, layout(2, zero_stage=3)),
    },
    8: {"tensor 2 x pipeline 2 x data 2": ({"position_encoding": "tupe-a"}, layout(2, 2, zero_stage=1))},
}
"""World size → name → (the model and objective, the layout); ZeRO 3 changes torch for good and comes last.

A selection: each axis, each pair of axes and each ZeRO stage, with some encoding and objective.
"""
SAVED = "data 2, ZeRO 0"
"""Whose weights at the end are those of all "data 2, ZeRO …"."""


@pytest.fixture(scope="module")
def words(flags: Flags) -> Callable[..., list[str]]:
    return lambda **changes: flags(**COURSE | changes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def rows_of_one_process(words: Callable[..., list[str]], saved: Path) -> dict[str, Rows]:
    """The rows of each layout's model in one process, and of one of them under another seed."""
    models = {name: model for layouts in MODEL_PARALLEL.values() for name, (model, _) in layouts.items()}
    models["another seed"] = models[SAVED] | {"seed": 4321}
    lines = [words(**model, save=saved / "one" if name == SAVED else None) for name, model in models.items()]
    rows = dict(zip(models, train_runs(1, lines), strict=True))
    found = largest_differences(rows["another seed"], rows[SAVED])
    assert min(found.values()) > 1e-4, "the comparisons below would see no other seed"
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("world_size", MODEL_PARALLEL)
def test_model_parallel_ranks_follow_one_process(
    world_size: int, rows_of_one_process: dict[str, Rows], words: Callable[..., list[str]], saved: Path
) -> None:
    """Losses, each on its own, and gradient norms; `train_runs` compares the bits of all replicas at the end."""
    layouts = MODEL_PARALLEL[world_size]
    save = {name: saved / name if model is DATA_2 else None for name, (model, _) in layouts.items()}
    runs = train_runs(world_size, [words(**model | own, save=save[name]) for name, (model, own) in layouts.items()])
    for (name, (model, _)), rows in zip(layouts.items(), runs, strict=True):
        assert_near(rows, rows_of_one_process[name], 0.0 if name.startswith("sequence") else 1e-6, name)
        assert model.get("objective") != "mlm" or not {"tcd_loss", "hcd_loss"} & set().union(*rows), name
        if name.startswith("sequence"):
            assert {"lm_loss", "tcd_loss", "hcd_loss", "grad_norm", "valid_lm_loss"} <= rows[-1].keys()
    for name, folder in save.items():
        if folder:
            ours, theirs = (StoredTensors(newest(path), "weights") for path in (folder, saved / "one"))
            for part in theirs.names:
                change = (ours[part] - theirs[part]).abs().max()
                assert change < 2e-5, f"{name}: {part} ended {change} away"


@pytest.mark.slow
def test_dropout_is_the_same_when_recomputed(words: Callable[..., list[str]]) -> None:
    """`train_runs` compares the bits of all replicas at the end."""
    model = {"position_encoding": "deberta", "train_iters": 3}
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    lines = [words(**model, **layout(2))]
    for changes in (layout(2), layout(1, 2), cut(2)):
        lines += [words(**model, **dropout, **changes, checkpoint_activations=kind) for kind in (False, True)]
    (without, *_), *runs = train_runs(2, lines)
    for plain, recomputed in zip(runs[::2], runs[1::2], strict=True):
        assert plain == recomputed and plain[0]["lm_loss"] != pytest.approx(without["lm_loss"], rel=1e-4)


BATCH, LENGTH, PART, HIDDEN = 3, 63, 32, 12


@pytest.mark.slow
def test_between_the_cut_regions_each_rank_keeps_and_drops_its_part() -> None:
    reports = run_ranks(2, _look, [], TIMEOUT)
    for report in reports:
        # Five LayerNorms' inputs, means and deviations, and as many dropout masks, less their parameters side by side.
        assert report["saved"] == 5 * 4 * (BATCH * (LENGTH - PART) * (2 * HIDDEN + 2) - 2 * HIDDEN)
    first, second = (torch.tensor(report["dropped"]) for report in reports)
    assert 20 < (first == 0).sum() < 80 and not torch.equal(first, second), "each part draws its own"
    assert reports[0]["next"] == reports[1]["next"], "and randomness goes on alike"


def _look(_: list[Any]) -> dict[str, Any]:
    """What a model with sequence parallelism does on one of two ranks; one without keeps more."""
    ranks = place_in_grid(torch.device("cpu"), ParallelConfig(tensor_model_parallel_size=2))
    kept_without = _kept_bytes(_cut_model(ranks))
    model = _cut_model(ranks)
    apply_sequence_parallel(model, ranks)
    kept = _kept_bytes(model)
    torch.manual_seed(5)
    model.layers[0].dropout.p = 0.5
    dropped = model.layers[0].dropout(torch.ones(100)).tolist()
    after = torch.rand(()).item()
    return {"saved": kept_without - kept, "dropped": dropped, "next": after}


def _cut_model(ranks: Ranks) -> Encoder:
    config = tiny_config(num_attention_heads=2, seq_length=LENGTH, hidden_dropout=0.1)
    torch.manual_seed(0)
    model = build_model(config)
    apply_tensor_parallel(model, ranks)
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


STEPS = {"train_iters": 3, "global_batch_size": 16, "micro_batch_size": 8, "seq_length": 128}
"""Rows of 128 tokens, of which the corpus' documents fill about half."""


@pytest.fixture
def rows_of_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the number of rows of each step, as they come."""
    step, noted = BatchLoader.step, list[int]()

    def counting(self: BatchLoader, *place: int) -> list[Batch]:
        batches = step(self, *place)
        noted.append(sum(len(batch.input_ids) for batch in batches))
        return batches

    monkeypatch.setattr(BatchLoader, "step", counting)
    return noted


def test_sequences_are_counted_by_document() -> None:
    document_ids = np.array([[1, 1, 2, 3, 3], [1, 2, 2, 0, 0], [1, 1, 1, 1, 1], [1, 2, 3, 4, 5], [0, 0, 0, 0, 0]])
    nothing = np.zeros_like(document_ids)
    assert count_sequences(Batch(nothing, nothing, document_ids, nothing, nothing, nothing)) == 2 + 1 + 1 + 0 + 0


@pytest.mark.parametrize("draws", [{}, {"tcd_tokens": 0, "hcd_heads": 0}], ids=["sampled", "all"])
def test_packed_and_unpacked_runs_are_the_same(draws: dict[str, int], rows_of_steps: list[int], train: Train) -> None:
    """tests/unit/model/test_encoder.py packs rows under each encoding and backend."""
    arguments = STEPS | draws | {"eval_interval": 3, "eval_iters": 1}
    unpacked, packed = (train(**arguments, packing=packing).rows for packing in (False, True))
    assert rows_of_steps[:4] == [16] * 4  # three steps and a validation
    assert len(rows_of_steps) == 8 and max(rows_of_steps[4:]) < 12
    assert_near(steps_of(packed), steps_of(unpacked), 1e-6)
    assert packed[-1]["valid_lm_loss"] == pytest.approx(unpacked[-1]["valid_lm_loss"], rel=1e-5)
