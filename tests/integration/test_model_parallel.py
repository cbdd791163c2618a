"""Tensor and pipeline parallelism, alone, together and with ZeRO: the losses and gradient norms of one process.

Eight telling layouts, the encodings spread over them; `make endurance` runs every layout with every encoding. Layouts
with as many ranks share a process group, but ZeRO 3, which changes torch for good, comes last.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ddrp.data.preprocess.pipeline import PreprocessConfig, preprocess
from tests.conftest import TinyCorpus, documents, write_vocabulary
from tests.integration.launch import start_ranks, training_rows
from tests.integration.training_runs import Rows, largest_differences, train_runs

Flags = Callable[..., list[str]]
pytestmark = pytest.mark.slow

WHOLE_VOCABULARY = 30522
COURSE = {"train_iters": 10, "micro_batch_size": 2, "zero_stage": 0}
TWO_MICRO_BATCHES = {"micro_batch_size": 4}
"""Where no data-parallel rank takes a part and no pipeline needs more."""


def layout(tensor: int = 1, pipeline: int = 1, **changes: Any) -> dict[str, Any]:
    return {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline, **changes}


MODERN = {
    **{"position_encoding": "rope", "layernorm_position": "pre", "no_first_norm": True, "num_segments": 0},
    **{"ffn": "geglu", "norm": "rmsnorm", "no_bias": True, "embedding_size": 20, "local_attention": 8},
}
LAYOUTS: dict[int, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    2: {
        "tensor 2": ({"position_encoding": "ddrp"}, layout(2, zero_stage=1, **TWO_MICRO_BATCHES)),
        "pipeline 2": ({"position_encoding": "tupe-r", "packing": True}, layout(1, 2, checkpoint_activations=True)),
        "tensor 2, modern": (MODERN, layout(2, zero_stage=2)),
    },
    4: {
        "tensor 4": (
            {"position_encoding": "deberta", "tcd_tokens": 0, "hcd_heads": 0, "vocabulary": True},
            layout(4, **TWO_MICRO_BATCHES),
        ),
        "pipeline 2 x data 2": ({"position_encoding": "absolute", "layernorm_position": "pre"}, layout(1, 2)),
        "tensor 2 x pipeline 2": ({"position_encoding": "deberta"}, layout(2, 2, zero_stage=1)),
        "pipeline 4": ({"relative_table": "per-layer", "num_layers": 4, "objective": "mlm"}, layout(1, 4)),
        "tensor 2 x data 2": ({"position_encoding": "bert-r"}, layout(2, zero_stage=3)),
        "tensor 2 x data 2, modern": ({**MODERN, "norm": "layernorm"}, layout(2, zero_stage=3)),
    },
    8: {"tensor 2 x pipeline 2 x data 2": ({"position_encoding": "tupe-a"}, layout(2, 2, zero_stage=1))},
}
"""World size → name → (the model and objective, the layout)."""


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
    prefix = str(folder / "corpus")
    config = PreprocessConfig((str(folder / "corpus.txt"),), prefix, "BertWordPieceLowerCase", str(vocab_file))
    return {"data_path": Path(preprocess(config).prefixes[0]), "vocab_file": vocab_file}


@pytest.fixture(scope="module")
def words(flags: Flags, whole_vocabulary: dict[str, Path]) -> Callable[..., list[str]]:
    def command_line(**changes: Any) -> list[str]:
        data = whole_vocabulary if changes.pop("vocabulary", False) else {}
        return flags(**(COURSE | changes | data))

    return command_line


@pytest.fixture(scope="module")
def one_process(words: Callable[..., list[str]]) -> dict[str, Rows]:
    """The rows of each layout's model in one process."""
    models = {name: model for layouts in LAYOUTS.values() for name, (model, _) in layouts.items()}
    return dict(zip(models, train_runs(1, [words(**model) for model in models.values()]), strict=True))


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_layout_follows_one_process(
    world_size: int, one_process: dict[str, Rows], words: Callable[..., list[str]]
) -> None:
    layouts = LAYOUTS[world_size]
    runs = train_runs(world_size, [words(**model, **changes) for model, changes in layouts.values()])
    for name, rows in zip(layouts, runs, strict=True):
        for row, expected in zip(rows, one_process[name], strict=True):
            assert row.keys() == expected.keys()
            for key, value in expected.items():
                assert row[key] == pytest.approx(value, rel=1e-5, abs=1e-6), (name, key)


def test_the_comparison_sees_another_seed(one_process: dict[str, Rows], words: Callable[..., list[str]]) -> None:
    (rows,) = train_runs(1, [words(**LAYOUTS[2]["tensor 2"][0], seed=4321)])
    assert min(largest_differences(rows, one_process["tensor 2"]).values()) > 1e-4


def test_dropout_leaves_replicas_equal_and_is_the_same_when_recomputed(words: Callable[..., list[str]]) -> None:
    """`train_runs` compares the bits of all replicas at the end."""
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "position_encoding": "deberta", "train_iters": 3}
    for changes in (layout(2), layout(1, 2)):
        plain, recomputed, without = train_runs(
            2,
            [
                words(**dropout, **changes),
                words(**dropout, **changes, checkpoint_activations=True),
                words(**(dropout | {"hidden_dropout": 0.0, "attention_dropout": 0.0}), **changes),
            ],
        )
        assert plain == recomputed
        assert plain[0]["lm_loss"] != without[0]["lm_loss"]


def test_the_script_itself(tiny_corpus: TinyCorpus, flags: Flags, tmp_path: Path) -> None:
    """Two ranks write the rows that one writes, validation included."""
    for name, size, changes in (("one", 1, {}), ("two", 2, layout(1, 2))):
        settings = {"train_iters": 3, "eval_interval": 3, "eval_iters": 1, "save": tmp_path / name, **changes}
        start_ranks(flags(**settings), world_size=size).check()
    rows, reference = training_rows(tmp_path / "two"), training_rows(tmp_path / "one")
    assert len(rows) == 3
    for row, expected in zip(rows, reference, strict=True):
        assert row == {key: pytest.approx(value, rel=1e-5, abs=1e-6) for key, value in expected.items()}
