"""The table: medians, the best grid point, undefined scores, the average."""

import pytest

from tasks.glue.report import average, best_cells, table
from tasks.glue.tasks import PAPER_TASKS


def row(task="RTE", score=0.5, seed=1, lr=1e-5, load="base", **more):
    return {
        "task": task,
        "batch_size": 16,
        "lr": lr,
        "epochs": 4,
        "seed": seed,
        "max_seq_length": 128,
        "encoder": "e" * 16,
        "data": "d" * 16,
        "load": load,
        "score": score,
        "best_epoch_score": score,
        "dev_examples": 277,
        **more,
    }


def test_the_median_at_the_best_grid_point():
    rows = [row(score=score, seed=seed) for seed, score in enumerate((0.1, 0.9, 0.5))]
    rows += [row(score=score, seed=seed, lr=2e-5) for seed, score in enumerate((0.6, 0.6, 0.2))]
    cell = best_cells(rows)["base"]["RTE"]
    assert cell.point.lr == 2e-5
    assert cell.median == 0.6
    assert "| base | 60.00 |" in table(rows)


def test_undefined_scores_are_counted_and_not_replaced():
    rows = [row("CoLA", score, seed) for seed, score in enumerate((None, 0.2, 0.4))]
    assert best_cells(rows)["base"]["CoLA"].median == pytest.approx(0.3)
    assert "| base | CoLA | matthews | 30.00 | 20.00 to 40.00 | 30.00 | 3 | 1 |" in table(rows)
    assert "| base | undefined |" in table([row("CoLA", None)])


def test_a_defined_point_is_better_than_an_undefined_one():
    rows = [row("CoLA", None), row("CoLA", -0.1, lr=2e-5)]
    assert best_cells(rows)["base"]["CoLA"].point.lr == 2e-5


def test_the_average_needs_all_eight_tasks():
    rows = [row(task, 0.1 * number) for number, task in enumerate(PAPER_TASKS)]
    assert average(best_cells(rows)["base"]) == pytest.approx(0.35)
    assert average(best_cells([*rows, row("WNLI", 1.0)])["base"]) == pytest.approx(0.35)
    assert average(best_cells(rows[1:])["base"]) is None
    assert " 35.00 |" in table(rows)
    assert "average" not in table(rows[1:])
    undefined = [{**rows[0], "score": None}, *rows[1:]]
    assert average(best_cells(undefined)["base"]) is None


def test_new_weights_in_an_old_folder_are_another_row():
    cells = best_cells([row(), row(score=0.7, encoder="f" * 16)])
    assert {name: tasks["RTE"].median for name, tasks in cells.items()} == {
        "base (eeeeeeee)": 0.5,
        "base (ffffffff)": 0.7,
    }


def test_scores_on_other_data_are_not_mixed_in():
    assert best_cells([row(score=0.9), row(score=0.1, data="x")])["base"]["RTE"].median == 0.1


def test_mismatched_scores_have_a_line_of_their_own():
    rows = [row("MNLI", 0.5, other_scores={"dev_mismatched": 0.25})]
    assert "| base | MNLI (dev_mismatched) | accuracy | 25.00 |" in table(rows)
