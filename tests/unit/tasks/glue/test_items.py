"""Intervals over development rows and words in the table, from files of predictions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_ddrp.tasks.finetune.metrics import drawn_rows
from megatron_ddrp.tasks.finetune.runs import Items, RunStore, TuningRun, best_cells
from megatron_ddrp.tasks.finetune.tables import write_report
from megatron_ddrp.tasks.glue import GLUE
from tests.unit.tasks.glue.conftest import scored_folder

ROWS = 60
LABELS = np.arange(ROWS) % 2.0


def predictions(right: float, first_seed: int) -> list[np.ndarray]:
    """Return the predictions of three seeds, each right in about the given share of the rows."""
    draws = [np.random.default_rng(seed).random(ROWS) for seed in range(first_seed, first_seed + 3)]
    return [np.where(draw < right, LABELS, 1 - LABELS) for draw in draws]


SIDES = {"good": predictions(0.9, 0), "alike": predictions(0.9, 3), "bad": predictions(0.3, 6)}


@pytest.fixture
def runs(tmp_path: Path) -> dict[Path, RunStore]:
    """Return output folder → runs of three encoders on RTE: two are right in 90 % of the rows, one in 30 %."""
    folders = [scored_folder(tmp_path / name, found, "RTE", encoder=name) for name, found in SIDES.items()]
    return {folder: RunStore(folder / "runs.jsonl") for folder in folders}


def shares(name: str) -> np.ndarray:
    """Return the share of right rows of each seed in each sample, `[seeds, samples]`, row by row."""
    drawn = drawn_rows("RTE", ROWS)
    return np.array([[np.repeat(found == LABELS, counts).mean() for counts in drawn] for found in SIDES[name]])


def interval(samples: np.ndarray) -> list[float]:
    return pytest.approx(np.quantile(samples, (0.025, 0.975)).tolist())


def test_a_file_of_too_many_rows_has_no_interval(runs: dict[Path, RunStore], monkeypatch: pytest.MonkeyPatch) -> None:
    cell = best_cells(row | {"folder": str(folder)} for folder, store in runs.items() for row in store)["good"]["RTE"]
    assert Items(GLUE).of_cell(cell)
    monkeypatch.setattr("megatron_ddrp.tasks.finetune.runs.MOST_RESAMPLED", ROWS - 1)
    assert Items(GLUE).of_cell(cell) is None


def test_the_table_has_intervals_over_items_and_words(runs: dict[Path, RunStore], tmp_path: Path) -> None:
    text = write_report(runs, tmp_path / "out", GLUE)
    numbers = json.loads((tmp_path / "out" / "table.json").read_text())
    good, alike, bad = (shares(name) for name in SIDES)
    cell = numbers["encoders"]["good"]["tasks"]["RTE"]
    assert cell["over_items"] == interval(np.median(good, axis=0)) and cell["constant_guess"] == 0.5
    same, far, _ = numbers["differences"]
    assert same["over_items"] == interval((good - alike).mean(axis=0))
    assert far["over_items"] == interval((good - bad).mean(axis=0))
    assert [pair["judgement"] for pair in numbers["differences"]] == ["not told apart", "better", "better"]
    assert "(below a constant guess) |" in text and text.count("below a constant guess") == 1
    assert "| (constant guess) | 50.00 |" in text
    assert ",better\n" in (tmp_path / "out" / "tables" / "differences.csv").read_text()


def test_without_predictions_the_cells_stay_empty(runs: dict[Path, RunStore], tmp_path: Path) -> None:
    folder = next(iter(runs))
    row = next(iter(runs[folder]))
    (folder / "predictions" / f"{TuningRun.of_row(row).name}.tsv").unlink()
    write_report(runs, tmp_path / "out", GLUE)
    numbers = json.loads((tmp_path / "out" / "table.json").read_text())
    assert [pair["over_items"] is None for pair in numbers["differences"]] == [True, True, False]
    assert numbers["encoders"]["good"]["tasks"]["RTE"]["over_items"] is None
    assert [pair["judgement"] for pair in numbers["differences"]] == ["not told apart", "better", "better"]


def test_a_negative_correlation_is_below_a_constant_guess(tmp_path: Path) -> None:
    folder = scored_folder(tmp_path / "out", [1 - LABELS + 0.1 * LABELS], "STS-B")
    rows = [row | {"folder": str(folder)} for row in RunStore(folder / "runs.jsonl")]
    assert Items(GLUE).guess(best_cells(rows)["e"]["STS-B"]) == 0.0
    assert "-100.00 (below a constant guess)" in write_report({folder: rows}, tmp_path / "table", GLUE)
