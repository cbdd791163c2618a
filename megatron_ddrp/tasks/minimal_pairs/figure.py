"""Figure heatmap.png: accuracies of encoders, piece counts and published models on every paradigm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from megatron_ddrp.pages.plotting import pyplot, save_figure, short_names

MOST_WITH_NUMBERS = 24
"""Largest number of columns at which the cells show their numbers."""
ROW, COLUMN = 0.19, 0.42
"""Height of a row and width of a column in inches."""


def draw_heat_map(
    levels: Mapping[str, Mapping[str, float]], num_own: int, fields: Mapping[str, str], path: Path
) -> None:
    """Draw accuracies: blue is 100 %, white 50 % (chance), red 0 %.

    `levels` has a column each: name → paradigm → accuracy; the first `num_own` are encoders, and a line follows them.
    `fields` has the paradigms' fields, in the order of the rows.
    """
    plt = pyplot()
    uids = list(fields)
    accuracies = np.array([[100 * level[uid] for level in levels.values()] for uid in uids])  # [paradigms, columns]
    names = short_names(list(levels))
    labels = max(map(len, uids)) * 0.075, max(map(len, names)) * 0.085
    size = (labels[0] + COLUMN * len(names) + 1.6, labels[1] + max(1.6, ROW * len(uids)) + 0.8)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    image = axes.imshow(accuracies, cmap="RdBu", vmin=0, vmax=100, aspect="auto")
    if len(names) <= MOST_WITH_NUMBERS:
        for (row, column), accuracy in np.ndenumerate(accuracies):
            colour = "white" if abs(accuracy - 50) > 35 else "black"
            axes.text(column, row, f"{accuracy:.0f}", ha="center", va="center", fontsize=6.5, color=colour)
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
    axes.set_yticks(range(len(uids)), uids, fontsize=7)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    names_of_fields = list(dict.fromkeys(fields.values()))
    groups = [[row for row, uid in enumerate(uids) if fields[uid] == name] for name in names_of_fields]
    right = axes.secondary_yaxis("right")
    right.set_yticks([sum(rows) / len(rows) for rows in groups], names_of_fields, rotation=90, va="center")
    right.tick_params(length=0, labelsize=8)
    for rows in groups[1:]:
        axes.axhline(rows[0] - 0.5, color="black", linewidth=1.2)
    axes.axvline(num_own - 0.5, color="black", linewidth=1.2)
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01, aspect=40)
    bar.set_label("accuracy [%] (white: chance)", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    save_figure(plt, figure, path)
