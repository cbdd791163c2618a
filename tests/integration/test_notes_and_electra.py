"""Notes and ELECTRA in every kind of layout: ten fp32 steps give the losses and the dictionary of one process.

Steps have two micro-batches or more, but for four data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ddrp.checkpoint import load_model, mark_latest, newest, read_state, save_weights_only, write_state
from megatron_ddrp.checkpoint.weights import read_notes
from megatron_ddrp.config import load_config
from megatron_ddrp.model import build_model
from tests.integration.launch import start_ranks, training_rows

Flags = Callable[..., list[str]]
NOTES = {"notes": True, "notes_min_count": 4, "notes_max_count": 30, "notes_window": 5, "zero_stage": 1}
COURSE = {**NOTES, "train_iters": 10, "global_batch_size": 16, "generator_size": 0.5}
TENSOR_2 = {"tensor_model_parallel_size": 2, "micro_batch_size": 8}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data 2": (2, {}),
    "tensor 2": (2, TENSOR_2),
    "tensor 2 with sequence": (2, {**TENSOR_2, "sequence_parallel": True, "packing": True}),
    "pipeline 2": (2, {"pipeline_model_parallel_size": 2}),
    "data 4": (4, {"packing": True}),
    "tensor 2 x pipeline 2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}


def dictionary(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    path = newest(folder)
    assert path is not None
    return read_notes(path)[1:]


@pytest.fixture(scope="module")
def one_process(flags: Flags, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for objective in ("mth", "electra"):
        folders[objective] = tmp_path_factory.mktemp(objective)
        start_ranks(flags(**COURSE, objective=objective, save=folders[objective])).check()
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("objective", ["mth", "electra"])
def test_every_layout_follows_one_process(
    objective: str, name: str, one_process: dict[str, Path], flags: Flags, tmp_path: Path
) -> None:
    world_size, changes = LAYOUTS[name]
    start_ranks(flags(**COURSE, objective=objective, save=tmp_path, **changes), world_size=world_size).check()
    rows, reference = training_rows(tmp_path), training_rows(one_process[objective])
    assert len(rows) == 10 and ("rtd_loss" in rows[0]) == (objective == "electra")
    for row, expected in zip(rows, reference, strict=True):
        assert row == {key: pytest.approx(value, rel=1e-5, abs=1e-5) for key, value in expected.items()}
    words, notes = dictionary(tmp_path)
    expected_words, expected_notes = dictionary(one_process[objective])
    assert len(words) > 50 and torch.equal(words, expected_words)
    torch.testing.assert_close(notes, expected_notes, rtol=1e-5, atol=1e-5)


def test_notes_act_and_lambda_0_is_plain_training(one_process: dict[str, Path], flags: Flags, tmp_path: Path) -> None:
    plain = {"train_iters": 10, "global_batch_size": 16, "zero_stage": 1}
    start_ranks(flags(**plain, save=tmp_path / "plain")).check()
    start_ranks(flags(**COURSE, notes_mix=0.0, save=tmp_path / "zero")).check()
    expected = training_rows(tmp_path / "plain")
    assert training_rows(tmp_path / "zero") == expected
    assert len(dictionary(tmp_path / "zero")[0]) > 50
    assert training_rows(one_process["mth"])[0] == expected[0], "there is nothing to read in the first step"
    assert training_rows(one_process["mth"])[-1]["lm_loss"] != expected[-1]["lm_loss"]


def test_a_resumed_run_has_its_notes_back(one_process: dict[str, Path], flags: Flags, tmp_path: Path) -> None:
    settings = {**COURSE, "save": tmp_path, "load": tmp_path}
    start_ranks(flags(**settings, exit_interval=5)).check()
    start_ranks(flags(**settings)).check()
    assert training_rows(tmp_path) == training_rows(one_process["mth"])
    for ours, theirs in zip(dictionary(tmp_path), dictionary(one_process["mth"]), strict=True):
        assert torch.equal(ours, theirs)


def test_notes_of_other_words_are_refused(one_process: dict[str, Path], flags: Flags) -> None:
    other = COURSE | {"notes_min_count": 5}
    result = start_ranks(flags(**other, save=one_process["mth"], load=one_process["mth"]))
    assert result.exit_codes == [1]
    assert "holds notes of" in result.stderr[0] and "--notes-min-count" in result.stderr[0]


def test_an_older_electra_goes_on_in_its_own_layout(flags: Flags, tmp_path: Path) -> None:
    """No flag says it: state.json lacks a key. A run from it, stopped and resumed, is the run never stopped."""
    start_ranks(
        flags(**COURSE, objective="electra", position_encoding="absolute", exit_interval=1, save=tmp_path / "now")
    ).check()
    config = load_config(tmp_path / "now").replace(objective={"generator_embeddings": "own"})
    torch.manual_seed(1)
    model = build_model(config.model, objective=config.objective)
    (tmp_path / "older").mkdir()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    path = save_weights_only(weights, config, tmp_path / "older")
    state = read_state(path)
    del state["config"]["objective"]["generator_embeddings"]
    write_state(path, state)
    mark_latest(tmp_path / "older", path.name)
    settings = {**COURSE, "objective": "electra", "position_encoding": "absolute", "train_iters": 4}
    for name, load, changes in (
        ("whole", "older", {}),
        ("part", "older", {"exit_interval": 2}),
        ("part", "part", {"tensor_model_parallel_size": 2, "sequence_parallel": True, "checkpoint_activations": True}),
    ):
        size = changes.get("tensor_model_parallel_size", 1)
        folders = {"load": tmp_path / load, "save": tmp_path / name}
        start_ranks(flags(**settings | changes, **folders), world_size=size).check()
    rows, expected = training_rows(tmp_path / "part"), training_rows(tmp_path / "whole")
    assert len(rows) == 4 and rows[:2] == expected[:2]
    for row, other in zip(rows, expected, strict=True):
        assert row == {key: pytest.approx(value, rel=1e-5, abs=1e-5) for key, value in other.items()}
    _, _, resumed = load_model(tmp_path / "part")
    assert resumed.objective.generator_embeddings == "own"
