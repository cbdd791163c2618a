"""Figures of a ladder: arrowheads where an interval leaves its panel, legends without absent lines."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ddrp.tasks.ladder import curves, figures, gains
from megatron_ddrp.tasks.ladder.claims import judge, model_claims
from tests.unit.ladder.conftest import LOSS, RUNGS, gain_rows, ladder_of, make_row

pytest.importorskip("matplotlib")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list that receives every figure instead of the disk."""
    found: list[Any] = []
    for module in (curves, figures, gains):
        monkeypatch.setattr(module, "save_figure", lambda plt, figure, path: found.append(figure))
    return found


def heads(axis: Any) -> set[tuple[str, float]]:
    """Return (marker, x) of the arrowheads."""
    markers = [(line.get_marker(), float(line.get_xdata()[0])) for line in axis.lines]
    return {(marker, x) for marker, x in markers if marker in ("<", ">", "v")}


def test_an_arrowhead_stands_where_an_interval_leaves_its_panel(drawn, tmp_path):
    """The gains of two seeds have an interval of ±12.7 standard errors, far beyond the seeds."""
    ladder = ladder_of(gain_rows({"rope": (0.2, 0.2), "t5": (0.01, 0.01)}, seeds=(4, 2), noise=0.2))
    judged = judge(ladder, model_claims(ladder))
    assert gains.draw_gains(ladder, judged, tmp_path / "gains.png")
    all_cut = []
    for panel, item in zip(drawn[0].axes, judged, strict=True):
        lowest, _ = panel.get_ylim()
        all_cut.append({("v", float(rung)) for rung, gain in item.gains.items() if gain.interval[0] < lowest})
        assert heads(panel) == all_cut[-1]
    assert any(all_cut)

    assert gains.draw_claims(ladder, judged, tmp_path / "claims.png")
    for panel in drawn[1].axes:
        left, right = panel.get_xlim()
        intervals = [gain.interval for item in judged for gain in item.gains.values()]
        cut = {("<", left) for low, _ in intervals if low < left} | {
            (">", right) for _, high in intervals if high > right
        }
        assert heads(panel) == cut != set()


@pytest.mark.parametrize(("small", "panels"), [(0.19, 1), (0.001, 2)])
def test_gains_are_enlarged_only_where_that_shows_more(drawn, tmp_path, small, panels):
    ladder = ladder_of(gain_rows({"rope": (0.2,), "t5": (small,), "alibi": (small,)}))
    assert gains.draw_claims(ladder, judge(ladder, model_claims(ladder)), tmp_path / "claims.png")
    widths = [right - left for left, right in (axis.get_xlim() for axis in drawn[0].axes)]
    assert len(widths) == panels and all(width < widths[0] / 2 for width in widths[1:])


def test_a_legend_names_only_lines_that_can_be_seen(drawn, tmp_path):
    """The curve of `absolute` is above the panel, and the second rung has no probe."""
    flat = {"curve": [[at, 5.0] for at in range(1, 400)]}
    rows = [
        make_row("ddrp", 1, rung, {LOSS: 5.0, **probe}, **flat)
        for rung, probe in ((RUNGS[0], {"direction probe": 0.7}), (RUNGS[1], {}))
    ]
    rows.append(make_row("absolute", 1, RUNGS[0], {LOSS: 9.0}, curve=[[1, 9.0]]))
    ladder = ladder_of(rows)
    assert curves.draw_training(ladder, tmp_path / "training.png")
    assert figures.draw_direction(ladder, tmp_path / "direction.png")
    legends = [axis.get_legend() for axis in drawn[0].axes if axis.get_legend()] + drawn[1].legends
    assert [[text.get_text() for text in legend.get_texts()] for legend in legends] == [["ddrp"], ["4.19 M tokens"]]
    assert [axis.get_xlabel() for axis in drawn[1].axes] == [figures.DIRECTION_PANELS["direction probe"]]
