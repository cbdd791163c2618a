"""A run that was stopped or killed, started again by the same command, is the run never stopped, to the last bit."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ddrp.checkpoint import load_model, newest, read_state
from tests.conftest import TinyCorpus
from tests.integration.launch import armed, read_rows, run_program, start_ranks, training_rows

Flags = Callable[..., list[str]]
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
STEPS = 6


def arguments(flags: Flags, folder: Path, **changes: Any) -> list[str]:
    """A run with dropout that both saves to and resumes from a folder."""
    return flags(**{"train_iters": STEPS, "save": folder, "load": folder, **DROPOUT, **changes})


def checkpoint_of(folder: Path) -> Path:
    """The newest checkpoint, which must be there."""
    path = newest(folder)
    assert path
    return path


def assert_same_run(folder: Path, reference: Path) -> None:
    """Equal rows, none missing or twice, and equal weights, to the last bit."""
    assert [row["iteration"] for row in training_rows(folder)] == list(range(1, STEPS + 1))
    assert training_rows(folder) == training_rows(reference)
    assert checkpoint_of(folder).name == checkpoint_of(reference).name == f"iter_{STEPS:07d}"
    (ours, _, _), (theirs, _, _) = load_model(folder), load_model(reference)
    for name, weight in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), weight), name


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_stopped_and_restarted(zero_stage: int, flags: Flags, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    start_ranks(arguments(flags, whole, zero_stage=zero_stage)).check()
    command = arguments(flags, parts, zero_stage=zero_stage, exit_interval=STEPS // 2)
    first = start_ranks(command).check()
    assert "holds no checkpoint: starting afresh" in first.stdout[0]
    assert [row["iteration"] for row in training_rows(parts)] == list(range(1, STEPS // 2 + 1))
    second = start_ranks(command).check()
    assert f"resumed from {parts} at step {STEPS // 2}" in second.stdout[0]
    assert_same_run(parts, whole)


def test_data_that_changed_since_the_checkpoint_are_told(flags: Flags, tiny_corpus: TinyCorpus, tmp_path: Path) -> None:
    """Reordered documents change the sum of a dataset. Without a manifest only the sizes are compared."""
    prefix, text = tmp_path / "data", Path(tiny_corpus.prefix)
    for suffix in (".bin", ".idx", ".json"):
        shutil.copyfile(f"{text}{suffix}", f"{prefix}{suffix}")
    command = arguments(flags, tmp_path / "run", data_path=prefix, exit_interval=2)

    def told() -> list[str]:
        lines = start_ranks(command).check().stdout[0].splitlines()
        return [line for line in lines if line.startswith(f"data {prefix}: another content")]

    assert told() == told() == []
    shuffle = ["dataset", "shuffle", prefix, "--output-prefix", prefix, "--overwrite", "--seed", "3"]
    assert run_program("megatron_ddrp", *shuffle).returncode == 0
    (line,) = told()
    before, after = re.findall(r"documents, [\d,]+ tokens, SHA-256 ([0-9a-f]{12})", line)
    assert before != after and "validation text may have been trained on" in line
    Path(f"{prefix}.json").unlink()
    command += ["--vocab-file", str(tiny_corpus.vocab_file), "--train-iters", "8"]
    assert told() == []


def test_stopped_between_two_logged_steps(flags: Flags, tmp_path: Path) -> None:
    """The sums since the last row are in the checkpoint."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    every = {"log_interval": 10, "train_iters": 20}
    start_ranks(arguments(flags, whole, **every)).check()
    for _ in range(2):
        start_ranks(arguments(flags, parts, **every, exit_interval=15)).check()
    assert [row["iteration"] for row in training_rows(parts)] == [1, 10, 20]
    assert training_rows(parts) == training_rows(whole)


@pytest.mark.slow
def test_stopped_and_restarted_on_two_ranks(flags: Flags, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    start_ranks(arguments(flags, whole), world_size=2).check()
    for _ in range(2):
        start_ranks(arguments(flags, parts, exit_interval=STEPS // 2), world_size=2).check()
    assert_same_run(parts, whole)


def test_dropout_is_on_and_differs_between_steps_and_ranks(flags: Flags, tmp_path: Path) -> None:
    """Else the tests above would prove nothing about it."""
    start_ranks(arguments(flags, tmp_path / "with")).check()
    start_ranks(arguments(flags, tmp_path / "without", hidden_dropout=0.0, attention_dropout=0.0)).check()
    for ours, theirs in zip(training_rows(tmp_path / "with"), training_rows(tmp_path / "without"), strict=True):
        assert ours["lm_loss"] != theirs["lm_loss"]


def test_validation_and_saving_leave_the_course_alone(flags: Flags, tmp_path: Path) -> None:
    start_ranks(arguments(flags, tmp_path / "plain")).check()
    busy = arguments(flags, tmp_path / "busy", eval_interval=1, eval_iters=2, save_interval=2)
    start_ranks(busy).check()
    assert_same_run(tmp_path / "busy", tmp_path / "plain")
    assert sum("valid_lm_loss" in row for row in read_rows(tmp_path / "busy")) == STEPS


def test_killed_after_a_checkpoint(flags: Flags, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    start_ranks(arguments(flags, whole, save_interval=4)).check()
    command = arguments(flags, killed, save_interval=4)
    assert start_ranks(command, before=armed("step.logged=SIGKILL@5")).exit_codes == [-signal.SIGKILL]
    assert [row["iteration"] for row in training_rows(killed)] == [1, 2, 3, 4, 5]
    with (killed / "metrics.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('{"iteration": 6, "lo')  # the row that the kill cut off
    assert "at step 4" in start_ranks(command).check().stdout[0]
    assert_same_run(killed, whole)


LAST_WHOLE = {"checkpoint.tensors": 2, "checkpoint.renamed": 2, "checkpoint.moved_away": 2, "checkpoint.latest": 4}
"""Point of a save → the last checkpoint after kills there and at the points before, all in step 4."""


def test_killed_at_each_point_of_a_save(flags: Flags, tmp_path: Path) -> None:
    """With the weights and without the optimizer's state, around the renaming, and before older checkpoints go."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    start_ranks(arguments(flags, whole, save_interval=2)).check()
    command = arguments(flags, killed, save_interval=2)
    for name, last in LAST_WHOLE.items():
        ended = start_ranks(command, before=armed(f"{name}=SIGKILL@4"))
        assert ended.exit_codes == [-signal.SIGKILL], name
        assert checkpoint_of(killed).name == f"iter_{last:07d}", name
    assert list(killed.glob("iter_*.tmp"))
    assert "at step 4" in start_ranks(command).check().stdout[0]
    assert_same_run(killed, whole)
    assert not list(killed.glob("*.tmp")), "leftovers of the killed run stay for ever"


def test_a_finished_run_started_again_changes_nothing(flags: Flags, tmp_path: Path) -> None:
    command = arguments(flags, tmp_path)
    start_ranks(command).check()
    rows, state = read_rows(tmp_path), read_state(checkpoint_of(tmp_path))
    start_ranks(command).check()
    assert read_rows(tmp_path) == rows
    assert read_state(checkpoint_of(tmp_path)) == state


def test_a_finished_run_goes_on_under_more_steps(flags: Flags, tmp_path: Path) -> None:
    start_ranks(arguments(flags, tmp_path, train_iters=3)).check()
    start_ranks(arguments(flags, tmp_path, train_iters=5)).check()
    assert [row["iteration"] for row in training_rows(tmp_path)] == [1, 2, 3, 4, 5]
    assert read_state(checkpoint_of(tmp_path))["consumed_samples"] == 5 * 8


def test_loading_from_another_folder_leaves_it_alone(flags: Flags, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    start_ranks(arguments(flags, source, train_iters=3)).check()
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    start_ranks(arguments(flags, target, load=source, train_iters=5)).check()
    assert [row["iteration"] for row in training_rows(target)] == [4, 5]
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before


def test_changed_settings_are_told_at_a_resume(flags: Flags, tmp_path: Path) -> None:
    start_ranks(flags(save=tmp_path, exit_interval=1)).check()
    changes = {"lr": 2e-3, "mask_prob": 0.2, "save_interval": 3, "exit_interval": 2}
    said = start_ranks(flags(save=tmp_path, load=tmp_path, **changes)).check().stdout[0].splitlines()
    place = said.index(f"resumed from {tmp_path} at step 1")
    assert [line for line in said[:place] if " → " in line] == ["--mask-prob: 0.15 → 0.2", "--lr: 0.001 → 0.002"]
    again = start_ranks(flags(save=tmp_path, load=tmp_path, **changes, log_interval=9)).check().stdout[0]
    assert " → " not in again
