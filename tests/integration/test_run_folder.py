"""What a run reads and leaves: YAML, metrics, checkpoints kept, validation, TensorBoard, whole weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_ddrp.checkpoint import load_model, newest, read_state
from megatron_ddrp.config import load_config
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.data.tokenizers.tokenizer import load_tokenizer
from megatron_ddrp.model.stages import Draws
from tests.conftest import TinyCorpus
from tests.integration.launch import read_rows, start_ranks, training_rows
from tests.unit.model.tiny import named_sums

Flags = Callable[..., list[str]]
KEYS = [
    *("iteration", "consumed_samples", "consumed_tokens", "loss", "lm_loss", "tcd_loss", "hcd_loss"),
    *("lm_accuracy", "lr", "grad_norm", "tokens_per_second", "step_time", "mfu", "peak_memory_gib"),
]


def assert_complete(folder: Path, corpus: TinyCorpus) -> None:
    """All that others read from a `--save` folder is there, for a run of 5 steps logged every second step."""
    rows = read_rows(folder)
    assert [row["iteration"] for row in rows if "loss" in row] == [1, 2, 4, 5]
    for row in rows:
        assert list(row) == (KEYS if "loss" in row else ["iteration", "valid_lm_loss", "valid_lm_accuracy"])
    assert [row["iteration"] for row in rows if "valid_lm_loss" in row] == [3, 5]
    first = rows[0]
    assert first["loss"] == pytest.approx(first["lm_loss"] + first["tcd_loss"] + 0.01 * first["hcd_loss"])
    assert rows[-1]["iteration"] == 5
    assert read_state(folder / "iter_0000005")["consumed_samples"] == 5 * 8
    config = load_config(folder)
    assert config.training.train_iters == 5
    tokenizer = load_tokenizer(folder / "tokenizer")
    pieces = corpus.vocab_file.read_text(encoding="utf-8").split("\n")[:-1]
    assert tokenizer.vocab_size == config.model.vocab_size == len(pieces)
    assert (folder / "latest").read_text(encoding="utf-8").strip() == "iter_0000005"
    assert not list(folder.rglob("*.tmp"))


COMPLETE = {"log_interval": 2, "eval_interval": 3, "eval_iters": 1, "peak_tflops": 0.01}


def test_a_run_leaves_all_that_others_read(tiny_corpus: TinyCorpus, flags: Flags, tmp_path: Path) -> None:
    result = start_ranks(flags(save=tmp_path, **COMPLETE)).check()
    assert_complete(tmp_path, tiny_corpus)
    lines = [line for line in result.stdout[0].splitlines() if line.startswith("step ")]
    assert len(lines) == 6
    for part in ("step 5/5 | loss ", "mlm ", "tcd ", "hcd ", "| lr ", "| gnorm ", " tok/s | mfu ", "| mem ", "| eta "):
        assert part in lines[4]
    assert result.stderr == [""]


def test_yaml_is_read_and_flags_win(flags: Flags, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("lr: 3e-4\ntrain-iters: 9\nposition_encoding: absolute\nbf16: true\n", encoding="utf-8")
    arguments = flags(config=path, save=tmp_path / "run", lr=None, train_iters=2)
    start_ranks(arguments).check()
    config = load_config(tmp_path / "run")
    assert config.optimizer.lr == 3e-4
    assert config.training.train_iters == 2
    assert config.model.position_encoding == "absolute"
    assert config.training.bf16
    assert len(training_rows(tmp_path / "run")) == 2


@pytest.mark.parametrize(("keep_last", "kept"), [(0, [2, 4, 6, 7]), (2, [6, 7])])
def test_keep_last(keep_last: int, kept: list[int], flags: Flags, tmp_path: Path) -> None:
    start_ranks(flags(train_iters=7, save_interval=2, keep_last=keep_last, save=tmp_path)).check()
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [f"iter_{number:07d}" for number in kept]
    assert newest(tmp_path) == tmp_path / "iter_0000007"


def test_going_back_to_an_older_checkpoint_keeps_what_is_saved_next(flags: Flags, tmp_path: Path) -> None:
    start_ranks(flags(train_iters=6, save_interval=2, save=tmp_path)).check()
    (tmp_path / "latest").write_text("iter_0000002\n", encoding="utf-8")
    again = flags(train_iters=6, save_interval=1, exit_interval=3, keep_last=1, save=tmp_path, load=tmp_path)
    start_ranks(again).check()
    assert newest(tmp_path) == tmp_path / "iter_0000003"


def valid_losses(folder: Path) -> list[float]:
    return [row["valid_lm_loss"] for row in read_rows(folder) if "valid_lm_loss" in row]


STILL = {"lr": 0.0, "hidden_dropout": 0.1, "attention_dropout": 0.1, "eval_interval": 2, "eval_iters": 3}
"""A run whose weights stay as they were drawn, validated at steps 2 and 4."""


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["mth", "electra"])
def test_validation_depends_on_the_weights_alone(flags: Flags, tmp_path: Path, objective: str) -> None:
    """Same samples, masks and draws, no dropout: at another step, after a resume, under another seed, on two ranks, in
    other micro-batches."""
    still = STILL | {"objective": objective}
    one, two = tmp_path / "one", tmp_path / "two"
    start_ranks(flags(train_iters=4, save=one, load=one, exit_interval=2, **still)).check()
    start_ranks(flags(train_iters=4, save=one, load=one, exit_interval=2, seed=7, **still)).check()
    start_ranks(flags(train_iters=4, save=two, micro_batch_size=2, **still), world_size=2).check()
    before, after = (row | {"iteration": 0} for row in read_rows(one) if "valid_lm_loss" in row)
    assert before == after
    first, second = valid_losses(one)
    assert valid_losses(two) == pytest.approx([first, first], rel=1e-6)
    assert training_rows(one)[0]["lm_loss"] != training_rows(one)[1]["lm_loss"]


def validation_loss(folder: Path) -> float:
    """The masked-LM loss of the held-out split by `load_model` and nothing of the engine."""
    model, tokenizer, config = load_model(folder)
    assert tokenizer.vocab_size == config.model.vocab_size
    loader = Corpus.open(config).loader("valid", 0, 1)
    loss_sum, predicted = 0.0, 0
    with torch.no_grad():
        for step in range(config.logging.eval_iters):
            for arrays in loader.step(step * config.training.global_batch_size):
                batch = arrays.map(torch.from_numpy)
                draws = Draws.none(len(batch.input_ids), config.model.num_layers)
                loss_sum += float(named_sums(model, batch, draws)["lm_loss"])
                predicted += int((batch.labels != IGNORED_LABEL).sum())
    return loss_sum / predicted


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_saved_weights_are_those_of_the_engine(zero_stage: int, flags: Flags, tmp_path: Path) -> None:
    arguments = flags(save=tmp_path, zero_stage=zero_stage, eval_interval=5, eval_iters=3, lr=1e-2)
    start_ranks(arguments, world_size=2).check()
    assert validation_loss(tmp_path) == pytest.approx(valid_losses(tmp_path)[-1], rel=1e-5)


def test_tensorboard_has_the_rows(flags: Flags, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    arguments = flags(save=tmp_path / "run", tensorboard_dir=tmp_path / "board", eval_interval=5, eval_iters=1)
    start_ranks(arguments).check()
    board = events.EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    logged = {event.step: event.value for event in board.Scalars("lm_loss")}
    rows = training_rows(tmp_path / "run")
    assert logged == pytest.approx({row["iteration"]: row["lm_loss"] for row in rows}, rel=1e-6)
    assert [event.step for event in board.Scalars("valid_lm_loss")] == [5]


@pytest.mark.parametrize(
    ("changes", "positions"),
    [({}, (3 + 8) * 8), ({"relative_table": "per-layer"}, 2 * (3 + 8) * 8), ({"position_encoding": "absolute"}, 1024)],
    ids=["shared", "per-layer", "absolute"],
)
def test_dry_run_counts_and_touches_nothing(
    changes: dict[str, str], positions: int, flags: Flags, tmp_path: Path
) -> None:
    arguments = flags(save=tmp_path / "run", tensorboard_dir=tmp_path / "board", dry_run=True, **changes)
    result = start_ranks(arguments).check()
    summary = json.loads(result.stdout[0].splitlines()[-1])
    assert summary["position_parameters"] == positions
    assert summary["tokens_per_step"] == 8 * 32
    assert summary["memory_per_rank_bytes"] > 16 * summary["parameters"]
    assert not list(tmp_path.iterdir())
    trained = start_ranks(flags(train_iters=1, **changes)).check().stdout[0].splitlines()[0]
    assert f"{summary['parameters']:,} parameters ({positions:,} of positions)" in trained


@pytest.mark.parametrize(("relative_table", "positions"), [("shared", 4288), ("per-layer", 51456)])
def test_dry_run_of_the_papers_base_model(relative_table: str, positions: int) -> None:
    """The defaults, with no data at all; 4,288 = (3 + 64) · 64 is the paper's own count."""
    result = start_ranks(["--dry-run", "--relative-table", relative_table]).check()
    summary = json.loads(result.stdout[0].splitlines()[-1])
    assert summary["position_parameters"] == positions
    assert summary["tokens_per_step"] == 256 * 512


def test_dry_run_refuses_what_a_run_refuses() -> None:
    assert start_ranks(["--dry-run", "--hidden-size", "100"]).exit_codes == [2]
