"""A step has its own settings, draws and dropout, also behind a validation, in a later phase and after a resume."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ddrp.checkpoint import MODEL, newest
from megatron_ddrp.data.batches.loader import VALIDATION_SEED
from megatron_ddrp.engine import step as engine_step
from megatron_ddrp.objectives.contract import Objective
from megatron_ddrp.run.metrics import curve_of
from tests.integration.conftest import Train
from tests.integration.launch import without_times
from tests.integration.training_runs import assert_same_bits, tensors

STEPS, MICRO_BATCHES = 4, 2


@pytest.fixture
def train(train: Train) -> Train:
    return partial(train, train_iters=STEPS)


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, Any]]:
    """(seed, step, what was drawn) of every draw of an objective, in order."""
    noted, draw = list[tuple[int, int, Any]](), Objective.draw

    def note(self: Objective, *given: Any) -> Any:
        drawn = draw(self, *given)
        noted.append((*given[-2:], drawn))
        return drawn

    monkeypatch.setattr(Objective, "draw", note)
    return noted


def test_validation_has_its_own_seed_and_leaves_dropout_on(
    train: Train, draws: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []
    train_whole = engine_step._train_whole

    def note(engine: Any, *given: Any) -> None:
        modes.append(engine.module.training)
        train_whole(engine, *given)

    monkeypatch.setattr(engine_step, "_train_whole", note)
    train(seed=7, objective="electra", eval_interval=2, eval_iters=1)
    assert modes == [True] * 4
    assert [step for seed, step, _ in draws if seed == 7] == [1, 1, 2, 2, 3, 3, 4, 4]
    validated = [draw[:2] for draw in draws if draw[0] != 7]
    assert len(validated) == 4 and {seed for seed, _ in validated} == {VALIDATION_SEED} and len(set(validated)) == 1


def test_other_text_is_evaluated_as_validation_text_is_and_changes_no_step(train: Train, prose_then_code: str) -> None:
    def rows_of(**changes: Any) -> list[dict[str, float]]:
        settings = {"eval_interval": 2, "eval_iters": 2, "hidden_dropout": 0.1, "log_similarity": True}
        return without_times(train(**settings, **changes).rows)

    alone, beside = rows_of(), rows_of(other_data_path=prose_then_code)
    other = [{name: row.pop(name) for name in [*row] if name.startswith("other_")} for row in beside]
    assert beside == alone and [bool(row) for row in other] == [False, False, True] * 2
    apart = {"data_path": None, "split": None, "train_data_path": prose_then_code, "valid_data_path": prose_then_code}
    still, valid = (rows_of(**data, lr=0.0)[-1] for data in ({"other_data_path": prose_then_code}, apart))
    assert {f"other_{name.removeprefix('valid_')}": valid[name] for name in valid if name != "iteration"} == {
        name: value for name, value in still.items() if name.startswith("other_")
    }


def test_a_resumed_run_goes_on_with_the_draws_of_its_next_step(train: Train, draws: list[Any], tmp_path: Path) -> None:
    train(save=tmp_path, exit_interval=2)
    assert [step for _, step, _ in draws[:4]] == [1, 1, 2, 2]  # and steps that the loader made ahead
    draws.clear()
    train(save=tmp_path, load=tmp_path)
    assert [step for _, step, _ in draws] == [3, 3, 4, 4]


def test_a_phase_has_its_rotary_base_from_its_first_to_its_last_step(train: Train, monkeypatch: Any) -> None:
    bases = []
    monkeypatch.setattr(engine_step, "set_theta", lambda model, theta: bases.append(theta))
    train(position_encoding="rope", rope_theta=50.0, seq_length_phases=("16:0.5:100",))
    assert bases == [100.0, 100.0, 50.0, 50.0]


def test_a_run_resumed_in_each_phase_and_at_their_border_is_the_run_never_stopped(train: Train, tmp_path: Path) -> None:
    settings = {"train_iters": 8, "objective_phases": "clm:0.5", "log_interval": 3, "eval_interval": 8, "eval_iters": 1}
    settings |= {"hidden_dropout": 0.1, "attention_dropout": 0.1, "position_encoding": "deberta", "packing": True}
    settings |= {"seq_length_phases": ("16:0.75",)}  # which overlaps both
    whole = train(**settings, save=tmp_path / "whole").rows
    folder = {"save": tmp_path / "parts", "load": tmp_path / "parts"}
    parts = [row for _ in range(4) for row in train(**settings, **folder, exit_interval=2).rows]
    assert without_times(parts) == without_times(whole)
    assert_same_bits(tmp_path / "parts", tmp_path / "whole")
    *steps, validation = whole
    assert [(row["iteration"], "clm_loss" in row, "lm_loss" in row) for row in steps] == [
        *((1, True, False), (3, True, False), (4, True, False), (6, False, True), (8, False, True))
    ]
    assert "tcd_loss" not in steps[0] and "tcd_loss" in steps[-1]
    assert "valid_lm_loss" in validation and not any("clm" in name for name in validation)
    assert [tokens for tokens, _ in curve_of(whole)] == [row["consumed_tokens"] for row in steps[3:]]


@pytest.mark.parametrize("settings", [{"zero_stage": 0}, {"zero_stage": 1}, {"zero_stage": 0, "optimizer": "muon"}])
def test_entries_for_following_tokens_rest_in_the_phase_and_learn_after_it(
    train: Train, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Weight decay, at a rate of 0.05 and a decay of 1, would take a twentieth of them away in each step."""
    found = []
    for name, phase, lr in (("start", "clm:1", 0.0), ("causal", "clm:1", 0.05), ("both", "clm:0.5", 0.05)):
        own = {"position_encoding": "bert-r", "objective_phases": phase, "lr": lr, "weight_decay": 1.0}
        train(**own, **settings, objective="mlm", save=tmp_path / name)
        found.append(tensors(newest(tmp_path / name), MODEL))
    start, causal, both = (weights["embeddings.position.relative"] for weights in found)
    following, before = start[:8], start[8:]  # the row of i − j is i − j + 8
    assert torch.equal(causal[:8], following) and not torch.isclose(causal[8:], before).any()
    assert not torch.isclose(both[:8], following).any()
    assert causal[8:].norm() > 0.9 * before.norm(), "tables do not decay in the phase"
    unread = found[0]["embeddings.segment.weight"][1]
    assert found[1]["embeddings.segment.weight"][1].norm() < 0.9 * unread.norm(), "other weights do"


def test_each_step_draws_its_own_heads(train: Train, draws: list[Any]) -> None:
    train(num_attention_heads=8, hidden_size=64, hcd_heads=3)
    assert len(draws) == STEPS * MICRO_BATCHES
    heads = [drawn.heads.numpy().tobytes() for _, _, drawn in draws]
    assert heads[::MICRO_BATCHES] == heads[1::MICRO_BATCHES] and len({*heads}) == STEPS


def test_each_micro_batch_of_each_step_has_its_own_dropout(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    seed_dropout = engine_step.seed_dropout

    def note(*given: Any) -> None:
        seed_dropout(*given)
        seeds.append(torch.default_generator.initial_seed())

    monkeypatch.setattr(engine_step, "seed_dropout", note)
    for seed in (1, 1, 2):
        train(hidden_dropout=0.1, seed=seed)
    first, again, other = (seeds[place : place + STEPS * MICRO_BATCHES] for place in (0, 8, 16))
    assert len(set(first)) == len(first) == len(seeds) / 3 and again == first and not set(other) & set(first)
