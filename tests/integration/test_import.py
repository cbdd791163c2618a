"""Pre-training goes on from an imported folder: its weights, a fresh optimizer, step 1."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_ddrp.checkpoint import load_model, read_state
from megatron_ddrp.data.preprocess.pipeline import PreprocessConfig, preprocess
from megatron_ddrp.errors import FAILURE
from tests.conftest import TinyCorpus
from tests.integration.conftest import TINY
from tests.integration.launch import start_ranks, training_rows

LEARNING_RATE = 1e-4


@pytest.fixture
def imported(tiny_corpus: TinyCorpus, tmp_path: Path) -> Path:
    """A random BERT of the tiny size, brought here from a Hugging Face folder."""
    transformers = pytest.importorskip("transformers")
    from megatron_ddrp.conversion.from_huggingface import import_folder

    torch.manual_seed(5)
    pieces = len(tiny_corpus.vocab_file.read_text(encoding="utf-8").splitlines())
    config = transformers.BertConfig(
        vocab_size=pieces,
        hidden_size=TINY["hidden_size"],
        num_hidden_layers=TINY["num_layers"],
        num_attention_heads=TINY["num_attention_heads"],
        intermediate_size=4 * TINY["hidden_size"],
        max_position_embeddings=TINY["seq_length"],
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "hf")
    shutil.copyfile(tiny_corpus.vocab_file, tmp_path / "hf" / "vocab.txt")
    import_folder(tmp_path / "hf", tmp_path / "start")
    return tmp_path / "start"


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_training_goes_on_from_imported_weights(
    zero_stage: int, imported: Path, flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in imported.rglob("*") if path.is_file()}
    settings = {"position_encoding": "absolute", "relative_distance": 64, "zero_stage": zero_stage}
    common = {**settings, "load": imported, "save": tmp_path / "run", "train_iters": 2, "lr": LEARNING_RATE}
    result = start_ranks(flags(**common, weight_decay=0.0), world_size=2).check()
    assert f"weights from {imported / 'iter_0000000'}, optimizer fresh" in result.stdout[0]
    assert [row["iteration"] for row in training_rows(tmp_path / "run")] == [1, 2]
    assert {path: path.read_bytes() for path in imported.rglob("*") if path.is_file()} == before
    (start, _, _), (end, _, _) = load_model(imported), load_model(tmp_path / "run")
    moved = {name: (end.get_parameter(name) - weight).abs().max() for name, weight in start.named_parameters()}
    assert max(moved.values()) < 2.5 * LEARNING_RATE, "other weights than the imported ones were trained"
    assert all(change > 0 for name, change in moved.items() if not name.endswith("attention.key.bias"))
    assert read_state(tmp_path / "run" / "iter_0000002")["started_from"] == "start/iter_0000000"


@pytest.mark.slow
def test_a_resumed_run_remembers_the_import_that_it_started_from(
    imported: Path, flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    common = {"position_encoding": "absolute", "relative_distance": 64, "save": tmp_path / "run", "train_iters": 2}
    start_ranks(flags(**common, load=imported, exit_interval=1)).check()
    start_ranks(flags(**common, load=tmp_path / "run")).check()
    assert read_state(tmp_path / "run" / "iter_0000002")["started_from"] == "start/iter_0000000"
    branch = common | {"load": tmp_path / "run" / "iter_0000001", "save": tmp_path / "branch"}
    start_ranks(flags(**branch)).check()
    assert read_state(tmp_path / "branch" / "iter_0000002")["started_from"] == "run/iter_0000001"


@pytest.mark.slow
def test_other_flags_than_the_imports_are_named(
    imported: Path, flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    result = start_ranks(flags(load=imported, save=tmp_path / "run"))
    assert result.exit_codes == [FAILURE] and len(result.stderr[0].splitlines()) == 1
    assert "--position-encoding is absolute there and ddrp here" in result.stderr[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_data_of_another_vocabulary_than_the_imports_are_refused(
    imported: Path, tiny_corpus: TinyCorpus, flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    pieces = tiny_corpus.vocab_file.read_text(encoding="utf-8").splitlines()
    vocabulary = tmp_path / "other.txt"
    vocabulary.write_text("\n".join([*pieces[:-2], pieces[-1], pieces[-2]]) + "\n", encoding="utf-8")
    texts, kind = (str(tiny_corpus.text_file),), "BertWordPieceLowerCase"
    data = preprocess(PreprocessConfig(texts, str(tmp_path / "other"), kind, vocab_file=str(vocabulary)))
    common = {"data_path": data.prefixes[0], "vocab_file": vocabulary, "load": imported, "save": tmp_path / "run"}
    result = start_ranks(flags(**common, position_encoding="absolute", relative_distance=64, train_iters=1))
    assert result.exit_codes == [FAILURE] and len(result.stderr[0].splitlines()) == 1
    assert f"2 of its pieces differ, such as {len(pieces) - 2}, {pieces[-2]!r} there" in result.stderr[0]
    assert not (tmp_path / "run").exists()
