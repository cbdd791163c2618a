"""`megatron-ddrp plan --load`: its numbers, its commands, and the whole road by `--run` with a tiny BERT."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.checkpoint import newest, tag
from megatron_ddrp.commands import continuing
from megatron_ddrp.commands import planning as speed
from megatron_ddrp.commands.continuing import MOST_STEPS, PASSES, RATE, Stage, follow, run_alone
from megatron_ddrp.commands.options import Plan
from megatron_ddrp.commands.plan import main
from megatron_ddrp.config import load_config
from megatron_ddrp.conversion.from_huggingface import import_folder
from megatron_ddrp.data.batches.samples import SampleIndex
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.run.devices import DEVICES
from tests.conftest import TinyCorpus
from tests.refusals import refused, wrong_arguments
from tests.unit.tasks.conftest import sentences, write_bert

Planned = Callable[..., tuple[Plan, str]]


@pytest.fixture
def bert(tiny_corpus: TinyCorpus, tmp_path: Path) -> Path:
    """A Hugging Face folder of a BERT for rows of up to 32 tokens, with the pieces of the corpus."""
    pieces = tiny_corpus.vocab_file.read_text(encoding="utf-8").split("\n")[5:-1]
    return write_bert(tmp_path / "theirs", pieces, max_length=32)


@pytest.fixture
def planned(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> Planned:
    """A function that plans to continue the BERT, and returns the plan and what was printed."""
    monkeypatch.chdir(tmp_path)

    def plan(*words: Any, load: Path = bert) -> tuple[Plan, str]:
        found = main(["--load", str(load), *map(str, words)])
        return found, capsys.readouterr().out

    return plan


@pytest.mark.parametrize(
    ("tokens", "hours", "rows", "steps", "reason"),
    [
        (100_000, 24, 16, PASSES * 100_000 // (16 * 32), "4 passes"),
        (1_000_000, 24, 64, PASSES * 1_000_000 // (64 * 32), "4 passes"),
        (10, 24, 16, 1, "4 passes"),
        (10**10, 24, 256, MOST_STEPS, "RoBERTa"),
        (10**10, 1e-5, None, None, "fit into 1e-05 h"),
    ],
)
def test_batch_and_steps_follow_the_text_and_the_hours(
    planned: Planned, tokens: int, hours: float, rows: int | None, steps: int | None, reason: str
) -> None:
    plan, text = planned("--tokens", tokens, "--device", "t4", "--hours", hours)
    (row,) = plan.rows
    assert reason in text and plan.settings["lr"] == RATE
    if rows is None:
        assert 0 < row["train_iters"] < MOST_STEPS and 0.5 * 3600 * hours < row["seconds"] <= 3600 * hours
    else:
        assert (row["global_batch_size"], row["train_iters"]) == (rows, steps)


def test_the_pretrain_command_is_the_encoder_on_rows_of_the_asked_length(planned: Planned, bert: Path) -> None:
    plan, text = planned("--tokens", "1M", "--device", "a100", "--seq-length", 16, "--world-size", 2)
    (line,) = (line for line in text.splitlines() if line.startswith("  ") and " pretrain " in line)
    launcher, words = line.split(" pretrain ")
    config = parse_arguments(shlex.split(words)).config
    assert launcher.split() == ["deepspeed", "--num_gpus", "2", "--module", "megatron_ddrp"]
    numbers = {name: plan.settings[name] for name in ("train_iters", "micro_batch_size", "global_batch_size")}
    assert config == config.replace(training=numbers, optimizer={"lr": RATE})
    assert config.model.seq_length == 32 and config.last_phase.seq_length == 16
    assert config.training.precision == "bf16" and config.data.packing
    assert f"{plan.rows[0]['memory_gib']:.2f} GiB, estimated" in text
    read = import_folder(bert, bert.parent / "imported")
    counts = [re.search(r"[\d,]+ parameters", each) for each in (read.summary(), text)]
    assert counts[0] and counts[1] and counts[0][0] == counts[1][0]
    assert config.replace(model={"vocab_size": read.config.vocab_size}).model == read.config


def test_an_encoder_that_does_not_fit_is_an_error(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "l4", dataclasses.replace(DEVICES["l4"], memory=0.001))
    refused("does not fit: one row of 32 tokens needs .* L4 has 0", planned, "--tokens", "1M", "--device", "l4")
    refused("no step of 16 rows fits into 1e-09 hours", planned, "--tokens", "1B", "--device", "t4", "--hours", "1e-9")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tokens 1M --device t4 --run", "--run needs --load"),
        ("--load {bert} --run --tokens 1M", "--load needs a text: give --input FILE"),
        ("--load {bert} --device t4", "--load needs a text"),
        ("--load {bert} --run --device t4 --input {text}", "leave --device out"),
        ("--load {bert} --tokens 1M --vocab-size 8192", "--vocab-size is for a new model"),
        ("--load {bert} --tokens 1M --train {text}", "--train and --valid belong together"),
        ("--tokens 1M --device t4 --vocab-file {text}", "--vocab-file needs --load"),
    ],
)
def test_a_mistake_is_one_line(words: str, message: str, bert: Path, tiny_corpus: TinyCorpus) -> None:
    wrong_arguments(message, main, words.format(bert=bert, text=tiny_corpus.text_file).split())


def test_the_text_is_counted_or_estimated(planned: Planned, tiny_corpus: TinyCorpus) -> None:
    """The corpus is small enough that the estimate reads all of it; its dataset has the vocabulary of the flag."""
    plan, by_dataset = planned(
        "--data-path", tiny_corpus.prefix, "--vocab-file", tiny_corpus.vocab_file, "--device", "t4"
    )
    _, by_input = planned("--input", tiny_corpus.text_file, "--device", "t4")
    lines = [next(line for line in text.splitlines() if line.startswith("text:")) for text in (by_dataset, by_input)]
    assert lines[0] == lines[1]
    dataset = IndexedDataset(tiny_corpus.prefix)
    samples = len(SampleIndex(dataset, (0, dataset.num_documents), 32))
    read = plan.settings["train_iters"] * plan.settings["global_batch_size"] / samples
    assert read == pytest.approx(PASSES, rel=0.1)
    assert (
        " preprocess " not in by_dataset and f" --vocab-file {tiny_corpus.vocab_file} --output road/start" in by_dataset
    )


def test_the_whole_road_by_one_command_which_skips_what_is_finished(
    planned: Planned, bert: Path, tiny_corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "DOCUMENTS", 20)
    monkeypatch.setattr(continuing, "SEEDS", 1)
    monkeypatch.setattr(continuing, "ROWS", (64, 64))
    for name in ("train", "valid"):
        rows = [{"text": text, "label": label} for text, label in sentences(24, 0)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--input", tiny_corpus.text_file, "--train", "train.jsonl", "--valid", "valid.jsonl", "--run")
    plan, text = planned(*words)
    (row,), out = plan.rows, tmp_path / "road"
    trained = load_config(out / "continued")
    assert newest(out / "continued") == out / "continued" / tag(row["train_iters"]) and row["measured"]
    assert trained.training.global_batch_size == 64 and trained.optimizer.lr == RATE
    rows = [json.loads(line) for line in (out / "continued" / "metrics.jsonl").read_text().splitlines()]
    assert sum("valid_lm_loss" in each for each in rows) == 5
    assert {str(bert), "road/continued"} == json.loads((out / "scores" / "table.json").read_text())["encoders"].keys()
    assert (out / "encoder" / "model.safetensors").exists() and text.count("\n$ megatron-ddrp ") == 5
    again, second = planned(*words)
    assert again.settings == plan.settings and second.count("done before") == 5 and "$" not in second
    refused("was begun with .* --hours 24.0 .*: give the same options", planned, *words, "--hours", 1)


def test_a_stopped_run_is_resumed_from_its_own_folder(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(continuing, "run_alone", ran.append)
    start, save = str(tmp_path / "start"), str(tmp_path / "run")
    words = ["pretrain", "--load", start, "--save", save]
    follow([Stage([*words], str(tmp_path / "run" / tag(9)))])
    import_folder(bert, tmp_path / "run")  # stands for a checkpoint of the run
    follow([Stage([*words], str(tmp_path / "run" / tag(9)))])
    assert ran == [words, ["pretrain", "--load", save, "--save", save]]


def test_a_request_to_stop_reaches_the_child_and_its_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child inherits that the signal is blocked, and waits for it."""

    class Child(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            os.kill(os.getpid(), signal.SIGTERM)
            return super().wait(timeout)

    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport os, signal\nsignal.sigwait([signal.SIGTERM])\nos._exit(75)\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(subprocess, "Popen", Child)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    error = refused("pretrain ended with exit code 75: the same command resumes it", run_alone, ["pretrain"])
    assert error.exit_code == 75
