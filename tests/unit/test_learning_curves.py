"""Scores over the steps of a run: which encoders make a curve, and what is drawn."""

from __future__ import annotations

import pytest

from megatron_ddrp.tasks.statistics import Score, curves_of, draw_learning_curves

LOW, HIGH = Score(0.5, 0.4, 0.6), Score(0.7, 0.6, 0.75)


def test_a_run_with_several_scored_checkpoints_has_a_curve_in_the_order_of_steps() -> None:
    scores = {"runs/a/iter_0000200": HIGH, "runs/a/iter_0000100": LOW, "runs/b/iter_0000100": LOW, "bert-base": HIGH}
    scores |= {"iter_0000002": HIGH, "iter_0000001": LOW, "runs/c/iter_0000100, random weights": LOW}
    assert curves_of(scores) == {"runs/a": [(100, LOW), (200, HIGH)], ".": [(1, LOW), (2, HIGH)]}


def test_encoders_that_are_no_checkpoints_of_one_run_draw_nothing() -> None:
    assert draw_learning_curves([("RTE", {"a/iter_0000001": LOW, "b": HIGH})], "none") is None


def test_a_panel_shows_each_run_with_its_bands() -> None:
    pytest.importorskip("matplotlib")
    scores = {"a/iter_0000001": LOW, "a/iter_0000002": HIGH, "b/iter_0000001": HIGH, "b/iter_0000003": LOW}
    without_b = {name: score for name, score in scores.items() if name[0] == "a"}
    panels = [("CoLA", scores), ("RTE", without_b), ("QQP", {}), ("MNLI", scores), ("WNLI", scores)]
    figure = draw_learning_curves(panels, "seeds")
    axes = [axis for axis in figure.axes if axis.axison]
    assert [axis.get_title() for axis in axes] == ["CoLA", "RTE", "MNLI", "WNLI"]
    first, second = axes[0].lines
    assert [list(values) for values in first.get_data()] == [[1, 2], [50, 70]]
    assert list(second.get_xdata()) == [1, 3] and len(axes[1].lines) == 1
    ends = {(x, round(y)) for x, y in axes[0].collections[0].get_paths()[0].vertices}
    assert ends == {(1, 40), (1, 60), (2, 60), (2, 75)}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "seeds"]
