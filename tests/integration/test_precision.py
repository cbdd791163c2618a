"""Half precision follows fp32, loss scaling works, and the whole learns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ddrp.checkpoint import load_model
from megatron_ddrp.data.preprocess.pipeline import PreprocessConfig, preprocess
from tests.conftest import TinyCorpus
from tests.integration.launch import start_ranks, training_rows

Flags = Callable[..., list[str]]
STEPS = 20


def losses(folder: Path) -> list[float]:
    return [row["lm_loss"] for row in training_rows(folder)]


@pytest.fixture(scope="module")
def full_precision(flags: Flags, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Masked-LM losses of `STEPS` steps in fp32; they fall by more than half a nat."""
    folder = tmp_path_factory.mktemp("fp32")
    start_ranks(flags(train_iters=STEPS, lr=1e-2, save=folder)).check()
    rows = losses(folder)
    assert rows[-1] < rows[0] - 0.5
    return rows


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_bf16_falls_near_fp32(zero_stage: int, full_precision: list[float], flags: Flags, tmp_path: Path) -> None:
    start_ranks(flags(train_iters=STEPS, lr=1e-2, zero_stage=zero_stage, bf16=True, save=tmp_path)).check()
    rows = losses(tmp_path)
    assert rows != full_precision
    assert rows == pytest.approx(full_precision, abs=0.1)
    model, _, config = load_model(tmp_path)
    assert config.training.bf16
    weights = model.embeddings.token.weight
    assert not weights.equal(weights.bfloat16().float()), "the checkpoint holds rounded weights, not the master's"


@pytest.mark.slow
def test_bf16_on_two_ranks(full_precision: list[float], flags: Flags, tmp_path: Path) -> None:
    arguments = flags(train_iters=STEPS, lr=1e-2, zero_stage=2, bf16=True, save=tmp_path)
    start_ranks(arguments, world_size=2).check()
    assert losses(tmp_path) == pytest.approx(full_precision, abs=0.1)


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_bf16_resumes_exactly(zero_stage: int, flags: Flags, tmp_path: Path) -> None:
    settings = {"train_iters": 6, "bf16": True, "hidden_dropout": 0.1, "zero_stage": zero_stage}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    start_ranks(flags(save=whole, load=whole, **settings)).check()
    for _ in range(2):
        start_ranks(flags(save=parts, load=parts, exit_interval=3, **settings)).check()
    assert training_rows(parts) == training_rows(whole)


def allow_fp16_on_the_cpu() -> None:
    """DeepSpeed refuses it for its speed; its arithmetic is what is wanted here."""
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True


def scaling(path: Path, **settings: int) -> Path:
    """A DeepSpeed file with settings of the dynamic loss scale."""
    path.write_text(json.dumps({"fp16": settings}), encoding="utf-8")
    return path


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_fp16_falls_near_fp32(zero_stage: int, full_precision: list[float], flags: Flags, tmp_path: Path) -> None:
    settings = scaling(tmp_path / "scale.json", initial_scale_power=8)
    arguments = {"train_iters": STEPS, "lr": 1e-2, "zero_stage": zero_stage, "deepspeed_config": settings}
    start_ranks(flags(**arguments, fp16=True, save=tmp_path / "run"), before=allow_fp16_on_the_cpu).check()
    assert losses(tmp_path / "run") == pytest.approx(full_precision, abs=0.1)


def test_fp16_survives_a_scale_far_too_high(flags: Flags, tmp_path: Path) -> None:
    """Steps that overflow are skipped and halve the scale; the rows stay JSON."""
    settings = scaling(tmp_path / "scale.json", initial_scale_power=24, hysteresis=1)
    arguments = flags(train_iters=30, lr=1e-2, fp16=True, deepspeed_config=settings, save=tmp_path / "run")
    start_ranks(arguments, before=allow_fp16_on_the_cpu).check()
    for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=pytest.fail)
    norms = [row["grad_norm"] for row in training_rows(tmp_path / "run")]
    assert norms[0] is None
    assert norms[-1] > 0
    rows = losses(tmp_path / "run")
    assert rows[-1] < rows[0] - 0.3


@pytest.mark.parametrize(("position_encoding", "highest"), [("absolute", 3.2), ("ddrp", 4.3)])
def test_a_small_corpus_is_learnt_by_heart(
    position_encoding: str, highest: float, tiny_corpus: TinyCorpus, flags: Flags, tmp_path: Path
) -> None:
    text = tmp_path / "few.jsonl"
    lines = tiny_corpus.text_file.read_text(encoding="utf-8").splitlines(keepends=True)
    text.write_text("".join(lines[:2]), encoding="utf-8")
    config = PreprocessConfig(
        input=(str(text),),
        output_prefix=str(tmp_path / "few"),
        tokenizer_type="BertWordPieceLowerCase",
        vocab_file=str(tiny_corpus.vocab_file),
    )
    changes = {"data_path": preprocess(config).prefixes[0], "split": "1,0,0", "train_iters": 100, "lr": 1e-2}
    changes |= {"position_encoding": position_encoding, "global_batch_size": 16, "micro_batch_size": 16}
    start_ranks(flags(**changes, save=tmp_path / "run")).check()
    rows = losses(tmp_path / "run")
    assert rows[0] > 6
    assert sum(rows[-10:]) / 10 < highest
