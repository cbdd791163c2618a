"""Figure table.png: scores of all seeds and their median, by task, with encoders side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_ddrp.pages.plotting import GREY, legend_below, pyplot, run_style, save_figure, short_names, wrapped
from megatron_ddrp.tasks.finetune.cells import Cell, Cells

LEAST_WIDTH, ENDS = 6.5, 1.3
"""Smallest width of a figure, and width of the parts beside its axes, in inches."""
BOTTOM = 0.04
"""Height of undefined scores, as a share of the axes."""


def draw(encoders: dict[str, Cells], tasks: list[str], title: str, path: Path) -> None:
    """Draw the result of `best_cells`, with the tasks in this order.

    An undefined score counts as 0 in the median. It stands at the lower edge as a cross, so that it does not stretch
    the axis to 0.
    """
    plt = pyplot()
    width = max(LEAST_WIDTH, ENDS + len(tasks) * max(1.15, 0.3 * len(encoders)))
    figure, axes = plt.subplots(figsize=(width, 4.4), layout="constrained")
    slot = 0.8 / len(encoders)
    handles: dict[str, Any] = {}
    for number, (name, cells) in enumerate(zip(short_names(list(encoders)), encoders.values(), strict=True)):
        style = {key: value for key, value in run_style(number).items() if key in ("color", "marker")}
        for task, cell in cells.items():
            place = tasks.index(task) + (number - (len(encoders) - 1) / 2) * slot
            _draw_cell(axes, cell, place, min(slot, 0.3), style)
        handles[name] = plt.Line2D([], [], linestyle="", markersize=7, **style)
    grey = {"color": GREY, "linestyle": ""}
    handles["seed"] = plt.Line2D([], [], marker="o", alpha=0.5, **grey)
    handles["median"] = plt.Line2D([], [], marker="_", markersize=16, markeredgewidth=3, **grey)
    if any(cell.undefined for cells in encoders.values() for cell in cells.values()):
        handles["undefined, counts as 0"] = plt.Line2D([], [], marker="x", markersize=8, markeredgewidth=2, **grey)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_xlim(-0.5, len(tasks) - 0.5)
    axes.margins(y=0.1)
    axes.set_ylabel("development score × 100")
    axes.set_title(wrapped(title, width))
    axes.grid(axis="y", alpha=0.3)
    legend_below(figure, handles)
    save_figure(plt, figure, path)


def _draw_cell(axes: Any, cell: Cell, place: float, width: float, style: dict[str, Any]) -> None:
    """Draw the seeds and the median of one encoder on one task around x = `place`."""
    scores = [100 * row["score"] for row in cell.rows if not row["undefined"]]
    axes.plot([place] * len(scores), scores, linestyle="", markersize=6, alpha=0.5, **style)
    axes.hlines(100 * cell.median, place - 0.4 * width, place + 0.4 * width, color=style["color"], linewidth=3)
    if cell.undefined:
        edge = axes.get_xaxis_transform()
        cross = {"marker": "x", "markersize": 8, "markeredgewidth": 2, "color": style["color"]}
        axes.plot([place], [BOTTOM], linestyle="", transform=edge, **cross)
        if cell.undefined > 1:
            axes.annotate(f"{cell.undefined}", (place, BOTTOM), (6, 0), xycoords=edge, textcoords="offset points")
