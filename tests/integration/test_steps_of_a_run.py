"""A step has its own settings, draws and dropout, also behind a validation, in a later phase and after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ddrp import pretrain
from megatron_ddrp.data.batches.loader import VALIDATION_SEED
from megatron_ddrp.engine import step as engine_step
from megatron_ddrp.objectives.contract import Objective
from tests.conftest import TinyCorpus
from tests.integration.conftest import TINY

Train = Callable[..., Any]


@pytest.fixture
def train(tiny_corpus: TinyCorpus) -> Train:
    """A run of four steps of two micro-batches."""
    data = {"data_path": tiny_corpus.prefix, "vocab_file": tiny_corpus.vocab_file, "train_iters": 4}
    return lambda **changes: pretrain(**TINY | data | changes)


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(seed, step) of every draw of an objective, in order."""
    noted = []
    draw = Objective.draw

    def note(self: Objective, *given: Any) -> Any:
        noted.append(given[-2:])
        return draw(self, *given)

    monkeypatch.setattr(Objective, "draw", note)
    return noted


def test_validation_has_its_own_seed_and_leaves_dropout_on(
    train: Train, draws: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []
    train_whole = engine_step._train_whole

    def note(engine: Any, *given: Any) -> None:
        modes.append(engine.module.training)
        train_whole(engine, *given)

    monkeypatch.setattr(engine_step, "_train_whole", note)
    train(seed=7, objective="electra", eval_interval=2, eval_iters=1)
    assert modes == [True] * 4
    trained = [draw for draw in draws if draw[0] == 7]
    assert trained == [(7, step) for step in (1, 2, 3, 4) for _ in range(2)]
    validated = [draw for draw in draws if draw[0] != 7]
    assert len(validated) == 4 and {seed for seed, _ in validated} == {VALIDATION_SEED} and len(set(validated)) == 1


def test_other_text_is_evaluated_as_validation_text_is_and_changes_no_step(train: Train, prose_then_code: str) -> None:
    def rows_of(**changes: Any) -> list[dict[str, float]]:
        rows = train(eval_interval=2, eval_iters=2, hidden_dropout=0.1, log_similarity=True, **changes).rows
        timed = ("step_time", "tokens_per_second", "peak_memory_gib")
        return [{name: value for name, value in row.items() if name not in timed} for row in rows]

    alone, beside = rows_of(), rows_of(other_data_path=prose_then_code)
    other = [{name: row.pop(name) for name in [*row] if name.startswith("other_")} for row in beside]
    assert beside == alone and [bool(row) for row in other] == [False, False, True] * 2
    apart = {"data_path": None, "split": None, "train_data_path": prose_then_code, "valid_data_path": prose_then_code}
    still, valid = (rows_of(**data, lr=0.0)[-1] for data in ({"other_data_path": prose_then_code}, apart))
    assert {f"other_{name.removeprefix('valid_')}": valid[name] for name in valid if name != "iteration"} == {
        name: value for name, value in still.items() if name.startswith("other_")
    }


def test_a_resumed_run_goes_on_with_the_draws_of_its_next_step(
    train: Train, draws: list[tuple[int, int]], tmp_path: Path
) -> None:
    train(save=tmp_path, exit_interval=2)
    assert [step for _, step in draws[:4]] == [1, 1, 2, 2]  # and steps that the loader made ahead
    draws.clear()
    train(save=tmp_path, load=tmp_path)
    assert [step for _, step in draws] == [3, 3, 4, 4]


def test_a_phase_has_its_rotary_base_from_its_first_to_its_last_step(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    bases = []
    monkeypatch.setattr(engine_step, "set_theta", lambda model, theta: bases.append(theta))
    rotary = {"position_encoding": "rope", "relative_distance": None, "rope_theta": 50.0}
    train(**rotary, seq_length_phases=("16:0.5:100",))
    assert bases == [100.0, 100.0, 50.0, 50.0]


STEPS, MICRO_BATCHES = 4, 2


def test_each_step_draws_its_own_heads_and_tokens(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    draw = Objective.draw

    def note(self: Objective, *given: Any) -> Any:
        drawn.append(draw(self, *given))
        return drawn[-1]

    monkeypatch.setattr(Objective, "draw", note)
    train(num_attention_heads=8, hidden_size=64, hcd_heads=3)
    assert len(drawn) == STEPS * MICRO_BATCHES
    heads = np.array([draws.heads.numpy() for draws in drawn])  # [steps x micro-batches, layers, heads]
    of_steps = heads[::MICRO_BATCHES]
    assert (heads == of_steps.repeat(MICRO_BATCHES, axis=0)).all()
    assert len({each.tobytes() for each in of_steps}) == STEPS


def test_each_micro_batch_of_each_step_has_its_own_dropout(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    seed_dropout = engine_step.seed_dropout

    def note(*given: Any) -> None:
        seed_dropout(*given)
        seeds.append(torch.default_generator.initial_seed())

    monkeypatch.setattr(engine_step, "seed_dropout", note)
    train(hidden_dropout=0.1)
    first = seeds.copy()
    assert len(first) == len(set(first)) == STEPS * MICRO_BATCHES
    seeds.clear()
    train(hidden_dropout=0.1)
    assert seeds == first
    seeds.clear()
    train(hidden_dropout=0.1, seed=2)
    assert not set(seeds) & set(first)
