"""Numbers that people read in tables and on axes of a comparison, on rows whose truth is plain."""

import pytest

from megatron_ddrp.lab.compare.page import draw_over_tokens
from megatron_ddrp.lab.compare.tables import cost_table
from megatron_ddrp.tasks.statistics import TRAINING_LOSS
from tests.unit.lab.compare.made_rows import RUNGS, make_row, results_of


def test_a_cost_is_in_seconds_and_as_often_the_baselines():
    seconds = {("absolute", 1): 0.1, ("absolute", 2): 0.2, ("rope", 1): 0.15, ("rope", 2): 0.3}
    rows = [make_row(model, seed, RUNGS[0], {"seconds of a step": s}) for (model, seed), s in seconds.items()]
    table = cost_table(results_of(rows))
    assert table.header == ["model", "seconds per step", "÷ absolute"]
    assert table.rows == [["absolute", "0.1500", ""], ["rope", "0.2250", "1.500"]]


def test_curves_of_differences_leave_out_the_steep_beginning_and_count_tokens_in_their_unit():
    pytest.importorskip("matplotlib")
    size = RUNGS[0] // 40
    curve = [(size * part, 6.0) for part in range(1, 41)]
    steep = [(tokens, 90.0 if part < 3 else 5.5) for part, (tokens, _) in enumerate(curve)]
    both = {"absolute": curve, "rope": steep}
    rows = [make_row(name, 1, RUNGS[0], {}, curves={TRAINING_LOSS: points}) for name, points in both.items()]
    figure = draw_over_tokens(results_of(rows), TRAINING_LOSS)
    _, differences = figure.axes
    (line,) = [line for line in differences.lines if len(line.get_xdata()) > 2]
    assert len(line.get_xdata()) == 36 and line.get_xdata()[0] == 5 * size
    assert differences.get_xlabel() == "million tokens"
    assert differences.xaxis.get_major_formatter()(2_500_000, 0) == "2.5"
