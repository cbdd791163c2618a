"""Scores over the steps of a run: which encoders make a curve, and what is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ddrp.pages import markdown as figures
from megatron_ddrp.tasks import statistics as learning_curves
from megatron_ddrp.tasks.statistics import FIGURE, Score, curves_of, draw_learning_curves

LOW, HIGH = Score(0.5, 0.4, 0.6), Score(0.7, 0.6, 0.75)


def test_a_run_with_several_scored_checkpoints_has_a_curve_in_the_order_of_steps() -> None:
    scores = {"runs/a/iter_0000200": HIGH, "runs/a/iter_0000100": LOW, "runs/b/iter_0000100": LOW, "bert-base": HIGH}
    scores |= {"iter_0000002": HIGH, "iter_0000001": LOW, "runs/c/iter_0000100, random weights": LOW}
    assert curves_of(scores) == {"runs/a": [(100, LOW), (200, HIGH)], ".": [(1, LOW), (2, HIGH)]}


def test_encoders_that_are_no_checkpoints_of_one_run_draw_nothing(tmp_path: Path) -> None:
    assert draw_learning_curves([("RTE", {"a/iter_0000001": LOW, "b": HIGH})], "none", tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_a_panel_shows_each_run_with_its_error_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    save = figures.save_figure

    def keep(figure: object, path: Path) -> None:
        drawn.append(figure)
        save(figure, path)

    monkeypatch.setattr(learning_curves, "save_figure", keep)
    scores = {"a/iter_0000001": LOW, "a/iter_0000002": HIGH, "b/iter_0000001": HIGH, "b/iter_0000003": LOW}
    without_b = {name: score for name, score in scores.items() if name[0] == "a"}
    panels = [("CoLA", scores), ("RTE", without_b), ("QQP", {}), ("MNLI", scores), ("WNLI", scores)]
    assert draw_learning_curves(panels, "seeds", tmp_path) == FIGURE
    assert (tmp_path / FIGURE).stat().st_size > 10_000
    axes = [axis for axis in drawn[0].axes if axis.axison]
    assert [axis.get_title() for axis in axes] == ["CoLA", "RTE", "MNLI", "WNLI"]
    first, second = axes[0].containers
    assert [list(values) for values in first.lines[0].get_data()] == [[1, 2], [50, 70]]
    assert [[round(y) for _, y in bar] for bar in first.lines[2][0].get_segments()] == [[40, 60], [60, 75]]
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["a", "b", "seeds"]
    assert second.get_label() == "b" and len(axes[1].containers) == 1
