"""A blended run through the real engine: one rank, two ranks and a resumed run see the same samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ddrp.data.preprocess.pipeline import PreprocessConfig, preprocess
from tests.conftest import TinyCorpus
from tests.integration.launch import read_rows, start_ranks, training_rows

Flags = Callable[..., list[str]]


@pytest.fixture(scope="module")
def second(tiny_corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another dataset of the same tokenizer."""
    folder = tmp_path_factory.mktemp("second")
    lines = tiny_corpus.text_file.read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "second.jsonl").write_text("".join(lines[5::6]), encoding="utf-8")
    config = PreprocessConfig(
        input=(str(folder / "second.jsonl"),),
        output_prefix=str(folder / "second"),
        tokenizer_type="BertWordPieceLowerCase",
        vocab_file=str(tiny_corpus.vocab_file),
    )
    return str(preprocess(config).prefixes[0])


def blend(flags: Flags, first: object, second: str, **changes: object) -> list[str]:
    """A run whose training data are two parts of the first corpus to one of the second."""
    own = flags(data_path=None, split=None, eval_interval=4, eval_iters=2, packing=True, masking="ngram", **changes)
    return [*own, "--train-data-path", "2", str(first), "1", second, "--valid-data-path", second]


def test_a_resumed_blend_is_the_run_never_stopped(
    tiny_corpus: TinyCorpus, second: str, flags: Flags, tmp_path: Path
) -> None:
    for folder, stops in (("whole", [None]), ("resumed", [3, None])):
        for stop in stops:
            run = {"save": tmp_path / folder, "load": tmp_path / folder, "train_iters": 6, "exit_interval": stop}
            result = start_ranks(blend(flags, tiny_corpus.prefix, second, **run)).check()
    assert "66.67% " in result.stdout[0] and second in result.stdout[0]
    assert training_rows(tmp_path / "resumed") == training_rows(tmp_path / "whole")
    validations = [[row for row in read_rows(tmp_path / f) if "valid_lm_loss" in row] for f in ("whole", "resumed")]
    assert validations[0] == validations[1] and len(validations[0]) == 2


@pytest.mark.slow
def test_two_ranks_see_the_blend_of_one(tiny_corpus: TinyCorpus, second: str, flags: Flags, tmp_path: Path) -> None:
    for ranks in (1, 2):
        start_ranks(blend(flags, tiny_corpus.prefix, second, save=tmp_path / str(ranks)), ranks).check()
    one, two = training_rows(tmp_path / "1"), training_rows(tmp_path / "2")
    assert len(one) == len(two) == 5
    for row, expected in zip(two, one, strict=True):
        assert row["consumed_tokens"] == expected["consumed_tokens"]
        assert row["lm_loss"] == pytest.approx(expected["lm_loss"], rel=1e-5)


def test_one_rank_tells_of_validation_of_another_kind(prose_then_code: str, flags: Flags, tmp_path: Path) -> None:
    validated = {"split": "949,50,1", "eval_interval": 1, "eval_iters": 1}
    result = start_ranks(flags(data_path=prose_then_code, save=tmp_path, train_iters=1, **validated), 2).check()
    told = f"{prose_then_code}: the validation text is of another kind than the training text"
    assert [text.count(told) for text in result.stdout] == [1, 0]
