"""One global batch, one result: ranks, layouts, ZeRO stages, micro-batch sizes and packing change neither losses nor
gradient norms.

The rows are of different lengths and are padded per micro-batch, so a mean of micro-batch means would show at once.
`make endurance` runs every layout with every encoding. Layouts with as many ranks share a process group, but ZeRO 3,
which changes torch for good, comes last.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.checkpoint import StoredTensors, newest
from megatron_ddrp.config import ENCODINGS, Config, ParallelConfig
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.loader import BatchLoader
from megatron_ddrp.data.preprocess.pipeline import preprocess
from megatron_ddrp.model import Encoder, build_model
from megatron_ddrp.model.attention.backends import BACKENDS
from megatron_ddrp.model.stages import State
from megatron_ddrp.objectives.contract import count_sequences, make_objective
from megatron_ddrp.parallel import tensor_parallel
from megatron_ddrp.parallel.pipeline import enter
from megatron_ddrp.parallel.process_group import Ranks, place_in_grid
from megatron_ddrp.parallel.tensor_parallel import apply_sequence_parallel, apply_tensor_parallel
from tests.conftest import documents, write_vocabulary
from tests.datasets import wordpiece_job
from tests.integration.conftest import Flags, Train
from tests.integration.launch import start_ranks, steps_of, training_rows
from tests.integration.training_runs import TIMEOUT, Rows, largest_differences, run_ranks, train_runs
from tests.unit.model.tiny import some_draws, tiny_batch, tiny_config

EXACT = ("iteration", "consumed_samples", "consumed_tokens", "lr")


def assert_same_course(rows: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
    """Equal counts, losses and norms to 1e-5 (relative; hcd_loss passes through 0, so 1e-6 beside it)."""
    assert len(rows) == len(reference) > 0
    for row, expected in zip(rows, reference, strict=True):
        assert row.keys() == expected.keys()
        for key, value in expected.items():
            close = value if key in EXACT else pytest.approx(value, rel=1e-5, abs=1e-6)
            assert row[key] == close, (row["iteration"], key)


ONE_PROCESS = {"global_batch_size": 16, "zero_stage": 0}


@pytest.fixture(scope="module")
def one_process(train: Train) -> list[dict[str, Any]]:
    """DDRP + MTH at ZeRO 0 in one process: four micro-batches of four."""
    rows = steps_of(train(**ONE_PROCESS, micro_batch_size=4).rows)
    assert rows[-1]["consumed_tokens"] < 0.95 * 5 * 16 * 32, "nothing to pad: the comparisons below would prove little"
    return rows


@pytest.mark.parametrize(
    "changes",
    [*({"micro_batch_size": size} for size in (1, 2, 8, 16)), {"checkpoint_activations": True}],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_micro_batches_and_recomputing_change_nothing(
    changes: dict[str, Any], one_process: list[dict[str, Any]], train: Train
) -> None:
    assert_same_course(steps_of(train(**ONE_PROCESS, **changes).rows), one_process)


def test_another_seed_changes_the_course(one_process: list[dict[str, Any]], train: Train) -> None:
    ours, theirs = steps_of(train(**ONE_PROCESS, seed=4321).rows)[0], one_process[0]
    assert abs(ours["lm_loss"] - theirs["lm_loss"]) > 1e-4
    assert ours["hcd_loss"] != theirs["hcd_loss"]


WHOLE_VOCABULARY = 30522
COURSE = {"train_iters": 10, "micro_batch_size": 2, "zero_stage": 0}
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
EAGER = {"checkpoint_activations": True, "attention_backend": "eager", "tcd_squared": True}
SEQUENCE: dict[str, dict[str, Any]] = {
    "ddrp": {"position_encoding": "ddrp", "train_iters": 5},
    "deberta": {"position_encoding": "deberta", "train_iters": 5},
    "absolute": {**ABSOLUTE, "seq_length": 31, "train_iters": 5},
    "modern": {
        **{"position_encoding": "ddrp", "layernorm_position": "pre", "seq_length": 31, "num_segments": 1},
        **{"ffn": "geglu", "no_bias": True, "embedding_size": 20, "local_attention": 8, "train_iters": 5},
    },
}
"""Rows of 31 tokens do not divide."""


def cut(tensor: int, pipeline: int = 1, **changes: Any) -> dict[str, Any]:
    return layout(tensor, pipeline, sequence_parallel=True, **changes)


MODEL_PARALLEL: dict[int, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    2: {
        "tensor 2": ({"position_encoding": "ddrp"}, layout(2, zero_stage=1, **TWO_MICRO_BATCHES)),
        "pipeline 2": ({"position_encoding": "tupe-r", "packing": True}, layout(1, 2, checkpoint_activations=True)),
        "tensor 2, modern": (MODERN, layout(2, zero_stage=2)),
        "pipeline 2, causal": ({"position_encoding": "deberta", **CAUSAL}, layout(1, 2)),
        "pipeline 2, causal, ZeRO 1": ({"position_encoding": "ddrp", **CAUSAL}, layout(1, 2, zero_stage=1)),
        "tensor 2, causal, cut sequences": ({**MODERN, **CAUSAL}, cut(2, zero_stage=1)),
        "data 2, absolute": (KIND | ABSOLUTE, {"micro_batch_size": 2}),
        "data 2, mlm": (KIND | {"objective": "mlm", "relative_table": "per-layer"}, {"micro_batch_size": 2}),
        "data 2, all": (KIND | {"tcd_tokens": 0, "hcd_heads": 0}, {"micro_batch_size": 2}),
        "data 2, eager": (KIND | EAGER, {"micro_batch_size": 2}),
        "sequence, ddrp": (SEQUENCE["ddrp"], cut(2, **TWO_MICRO_BATCHES, zero_stage=1)),
        "sequence, absolute": (SEQUENCE["absolute"], cut(2, **TWO_MICRO_BATCHES)),
        "sequence, modern": (SEQUENCE["modern"], cut(2, **TWO_MICRO_BATCHES)),
        "sequence, deberta": (
            SEQUENCE["deberta"],
            cut(2, **TWO_MICRO_BATCHES, checkpoint_activations=True, zero_stage=2),
        ),
        **{f"data 2, ZeRO {stage}": (DATA_2, {"zero_stage": stage}) for stage in (0, 1, 2, 3)},
        "sequence, ddrp, ZeRO 3": (SEQUENCE["ddrp"], cut(2, **TWO_MICRO_BATCHES, zero_stage=3)),
    },
    4: {
        "tensor 4": (
            {"position_encoding": "deberta", "tcd_tokens": 0, "hcd_heads": 0, "vocabulary": True},
            layout(4, **TWO_MICRO_BATCHES),
        ),
        "pipeline 2 x data 2": (ABSOLUTE, layout(1, 2)),
        "tensor 2 x pipeline 2": ({"position_encoding": "deberta"}, layout(2, 2, zero_stage=1)),
        "pipeline 4": ({"relative_table": "per-layer", "num_layers": 4, "objective": "mlm"}, layout(1, 4)),
        "sequence 4, absolute": (SEQUENCE["absolute"], cut(4, **TWO_MICRO_BATCHES, zero_stage=1)),
        "sequence 4, deberta": (SEQUENCE["deberta"], cut(4, **TWO_MICRO_BATCHES)),
        "sequence x pipeline 2, ddrp": (SEQUENCE["ddrp"], cut(2, 2, zero_stage=1)),
        "sequence x pipeline 2, deberta": (SEQUENCE["deberta"], cut(2, 2)),
        "sequence x data 2, absolute": (SEQUENCE["absolute"], cut(2)),
        "tensor 2 x data 2": ({"position_encoding": "bert-r"}, layout(2, zero_stage=3)),
        "tensor 2 x data 2, causal": ({"position_encoding": "t5", "packing": True, **CAUSAL}, layout(2, zero_stage=3)),
        "tensor 2 x data 2, modern": ({**MODERN, "norm": "layernorm"}, layout(2, zero_stage=3)),
    },
    8: {"tensor 2 x pipeline 2 x data 2": ({"position_encoding": "tupe-a"}, layout(2, 2, zero_stage=1))},
}
"""World size → name → (the model and objective, the layout); ZeRO 3 changes torch for good and comes last."""
SAVED = "data 2, ZeRO 0"
"""Whose weights at the end are those of all "data 2, ZeRO …"."""


@pytest.fixture(scope="module")
def whole_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny corpus under a vocabulary of BERT's size."""
    folder = tmp_path_factory.mktemp("whole")
    texts = documents()
    vocab_file = write_vocabulary(texts, folder / "vocab.txt")
    with vocab_file.open("a", encoding="utf-8") as stream:
        known = len(vocab_file.read_text(encoding="utf-8").splitlines())
        stream.writelines(f"[unused{number}]\n" for number in range(WHOLE_VOCABULARY - known))
    (folder / "corpus.txt").write_text("\n\n".join(texts), encoding="utf-8")
    job = wordpiece_job(vocab_file, folder / "corpus", folder / "corpus.txt")
    return {"data_path": Path(preprocess(job).prefixes[0]), "vocab_file": vocab_file}


@pytest.fixture(scope="module")
def words(flags: Flags, whole_vocabulary: dict[str, Path]) -> Callable[..., list[str]]:
    def command_line(**changes: Any) -> list[str]:
        data = whole_vocabulary if changes.pop("vocabulary", False) else {}
        return flags(**(COURSE | changes | data))

    return command_line


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def rows_of_one_process(words: Callable[..., list[str]], saved: Path) -> dict[str, Rows]:
    """The rows of each layout's model in one process, and of one of them under another seed."""
    models = {name: model for layouts in MODEL_PARALLEL.values() for name, (model, _) in layouts.items()}
    models["another seed"] = models["tensor 2"] | {"seed": 4321}
    lines = [words(**model, save=saved / "one" if name == SAVED else None) for name, model in models.items()]
    rows = dict(zip(models, train_runs(1, lines), strict=True))
    found = largest_differences(rows["another seed"], rows["tensor 2"])
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
        near_0 = 0.0 if name.startswith("sequence") else 1e-6
        for row, expected in zip(rows, rows_of_one_process[name], strict=True):
            assert row.keys() == expected.keys()
            assert model.get("objective") != "mlm" or not {"tcd_loss", "hcd_loss"} & row.keys(), name
            for key, value in expected.items():
                assert row[key] == pytest.approx(value, rel=1e-5, abs=near_0), (name, key)
        if name.startswith("sequence"):
            assert {"lm_loss", "tcd_loss", "hcd_loss", "grad_norm", "valid_lm_loss"} <= rows[-1].keys()
    for name, folder in save.items():
        if folder:
            ours, theirs = (StoredTensors(newest(path), "weights") for path in (folder, saved / "one"))
            for part in theirs.names:
                change = (ours[part] - theirs[part]).abs().max()
                assert change < 2e-5, f"{name}: {part} ended {change} away"


@pytest.mark.slow
def test_dropout_is_the_same_when_recomputed_and_a_run_resumes_with_and_without_sequence_parallelism(
    words: Callable[..., list[str]], flags: Flags, tmp_path: Path
) -> None:
    """`train_runs` compares the bits of all replicas at the end. The flag is no part of a checkpoint: saved with it and
    loaded without, and the other way round."""
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "position_encoding": "deberta", "train_iters": 3}
    lines = []
    for changes in (layout(2), layout(1, 2), layout(2, sequence_parallel=True)):
        lines += [words(**dropout, **changes), words(**dropout, **changes, checkpoint_activations=True)]
        lines.append(words(**(dropout | {"hidden_dropout": 0.0, "attention_dropout": 0.0}), **changes))
    ways = [{"micro_batch_size": 2, **layout(2, zero_stage=0, sequence_parallel=kind)} for kind in (True, False)]
    lines.append(flags(**ways[0]))
    lines += [flags(**way, exit_interval=2, save=tmp_path / str(i)) for i, way in enumerate(ways)]
    lines += [flags(**way, load=tmp_path / str(1 - i)) for i, way in enumerate(ways)]
    runs = train_runs(2, lines)
    for plain, recomputed, without in (runs[:3], runs[3:6], runs[6:9]):
        assert plain == recomputed
        assert plain[0]["lm_loss"] != without[0]["lm_loss"]
    whole, _, _, *resumed = runs[9:]
    assert len(resumed) == 2
    for rows in resumed:
        assert len(rows) == 3
        assert max(largest_differences(rows, whole[2:]).values()) < 1e-5


@pytest.mark.slow
def test_the_script_itself(train: Train, flags: Flags, tmp_path: Path) -> None:
    """Two ranks write the rows that one writes, validation included."""
    settings = {"train_iters": 3, "eval_interval": 3, "eval_iters": 1}
    start_ranks(flags(**settings, save=tmp_path, **layout(1, 2)), world_size=2).check()
    rows = training_rows(tmp_path)
    assert len(rows) == 3
    assert_same_course(rows, steps_of(train(**settings).rows))


@pytest.mark.slow
def test_what_travels_and_its_gradients() -> None:
    """For rows of several lengths."""
    assert run_ranks(3, _travel, [["6"], ["7"], ["2"]], TIMEOUT) == [3] * 3


def _travel(lengths: list[list[str]], _error: Path) -> int:
    """Three ranks with tensors that each can compute of all: parts, sums and gradients as slices of whole ones."""
    ranks = place_in_grid(torch.device("cpu"), ParallelConfig(tensor_model_parallel_size=3))
    for (length,) in lengths:
        _travel_in_rows_of(int(length), ranks)
    return len(lengths)


def _travel_in_rows_of(length: int, ranks: Ranks) -> None:
    size = 3
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
    check(partial(tensor_parallel.split, ranks=ranks), whole, own(whole), own(weight), weight)
    check(partial(tensor_parallel.join, length=length, ranks=ranks), own(whole), whole, weight, own(weight))
    entering = partial(enter, entrance=tensor_parallel.gathering_entrance(length, ranks))
    check(entering, own(whole), whole, weights[ranks.rank], own(weights.sum(0)))
    check(partial(tensor_parallel.leave, ranks=ranks), wholes[ranks.rank], own(wholes.sum(0)), own(weight), weight)


BATCH, LENGTH, PART, HIDDEN = 3, 63, 32, 12


@pytest.mark.slow
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
    kinds = tuple(kind for _, kind in tensor_parallel.SEQUENCE_PARALLEL)
    for name, module in model.named_modules():
        if (name.endswith("feed_forward") or isinstance(module, kinds)) and not name.startswith("layers.1."):
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


def _note_shapes(shapes: dict[str, list[list[int]]], name: str, module: nn.Module, inputs: Any, output: Any) -> None:
    """Note the shapes of the hidden states that go in and come out."""
    given, taken = ((x[0] if type(x) is tuple else x) for x in (inputs[0], output))
    shapes[name] = [list((x.hidden if isinstance(x, State) else x).shape) for x in (given, taken)]


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


def sums_and_gradients(config: Config, packing: bool, backend: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The sums `[4]` of the first global batch in float64, and the gradients of their weighted total."""
    config = config.replace(data={"packing": packing}, model={"attention_backend": backend})
    corpus = Corpus.open(config)
    config = config.replace(model={"vocab_size": corpus.tokenizer.vocab_size})
    torch.manual_seed(0)
    model = build_model(config.model).double()
    total = torch.zeros(4, dtype=torch.float64)
    weights = torch.tensor([1.0, 20.0, 20.0, 0.0], dtype=torch.float64)
    for arrays in corpus.loader("train", 0, 1).step(0):
        draws = make_objective(config.objective).draw(arrays, config.model, config.training.seed, 1)
        sums = model(arrays.map(torch.from_numpy), draws).sums
        (sums * weights).sum().backward()
        total += sums.detach()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("draws", [{}, {"tcd_tokens": 0, "hcd_heads": 0}], ids=["sampled", "all"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_losses_and_gradients_of_a_global_batch(encoding: str, draws: dict[str, int], flags: Flags) -> None:
    """Packed, by each backend, as unpacked by the eager one."""
    arguments = STEPS | draws | {"position_encoding": encoding, "init_method_std": 0.2}
    config = parse_arguments(flags(**arguments)).config
    expected, expected_gradients = sums_and_gradients(config, False, "eager")
    assert expected[:3].abs().min() > 1e-3, "a term that is off would prove nothing"
    for backend in BACKENDS:
        sums, gradients = sums_and_gradients(config, True, backend)
        torch.testing.assert_close(sums, expected, rtol=1e-10, atol=1e-10, msg=lambda text, b=backend: f"{b}: {text}")
        assert gradients.keys() == expected_gradients.keys(), backend
        for name, gradient in expected_gradients.items():
            off = float((gradients[name] - gradient).abs().max())
            assert off <= 1e-9 * (1 + float(gradient.abs().max())), f"{backend}, {name}: {off} away"


def test_sequences_are_counted_by_document() -> None:
    document_ids = np.array([[1, 1, 2, 3, 3], [1, 2, 2, 0, 0], [1, 1, 1, 1, 1], [1, 2, 3, 4, 5], [0, 0, 0, 0, 0]])
    nothing = np.zeros_like(document_ids)
    assert count_sequences(Batch(nothing, nothing, document_ids, nothing, nothing, nothing)) == 2 + 1 + 1 + 0 + 0


def test_packed_and_unpacked_runs_are_the_same(rows_of_steps: list[int], train: Train) -> None:
    """Under each encoding, `test_losses_and_gradients_of_a_global_batch` sees what packing changes."""
    arguments = STEPS | {"eval_interval": 3, "eval_iters": 1}
    unpacked, packed = (train(**arguments, packing=packing).rows for packing in (False, True))
    assert rows_of_steps[:4] == [16] * 4  # three steps and a validation
    assert len(rows_of_steps) == 8 and max(rows_of_steps[4:]) < 12
    assert_same_course(steps_of(packed), steps_of(unpacked))
    assert packed[-1]["valid_lm_loss"] == pytest.approx(unpacked[-1]["valid_lm_loss"], rel=1e-5)


@pytest.mark.slow
def test_two_ranks_and_a_resume_follow_one_unpacked_process(train: Train, flags: Flags, tmp_path: Path) -> None:
    changes = STEPS | {"micro_batch_size": 2, "exit_interval": 2, "packing": True}
    for _ in range(2):  # the same command stops after two steps, then goes on
        start_ranks(flags(**changes, save=tmp_path, load=tmp_path), world_size=2).check()
    assert_same_course(training_rows(tmp_path), steps_of(train(**STEPS).rows))
