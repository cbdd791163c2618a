"""Figure learning_curves.png: scores over training steps, for runs with several scored checkpoints.

The names of the encoders of `--load run/iter_*` are their folders, which give run and step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ddrp.pages.plotting import (
    GREY,
    figure_tools,
    legend_below,
    panel_grid,
    remove_figure,
    run_handles,
    run_style,
    save_figure,
    short_names,
)

FIGURE = "learning_curves.png"
PANELS_PER_ROW = 3

_CHECKPOINT = re.compile(r"(?P<run>.*?)/*iter_(?P<step>\d+)")


class Score(NamedTuple):
    """Score as a fraction, with the ends of its error bar."""

    value: float
    low: float
    high: float


Curves = dict[str, list[tuple[int, Score]]]
"""Run → pairs (step, score), sorted by step."""


def curves_of(scores: Mapping[str, Score]) -> Curves:
    """Return the curves of all runs with at least two scored checkpoints. `scores` maps encoders to scores."""
    curves: Curves = {}
    for name, score in scores.items():
        if found := _CHECKPOINT.fullmatch(name):
            curves.setdefault(found["run"] or ".", []).append((int(found["step"]), score))
    return {run: sorted(curve) for run, curve in curves.items() if len(curve) > 1}


def draw_learning_curves(panels: Iterable[tuple[str, Mapping[str, Score]]], error: str, folder: Path) -> str | None:
    """Draw one panel per (title, score by encoder) over training steps; return the figure's name in `folder`.

    `error` names the error bars. Without two checkpoints of one run, draw nothing and return None.
    """
    remove_figure(folder / FIGURE)
    drawn = [(title, curves) for title, scores in panels if (curves := curves_of(scores))]
    if not drawn:
        return None
    plt = figure_tools()
    figure, axes = panel_grid(len(drawn), PANELS_PER_ROW, 4.4, 3.6, (0.8, 1), sharex=True)
    runs = list(dict.fromkeys(run for _, curves in drawn for run in curves))
    for axis, (title, curves) in zip(axes.flat, drawn, strict=False):
        for run, curve in curves.items():
            _draw_curve(axis, curve, run, run_style(runs.index(run)))
        axis.set_title(title, fontsize=12)
        axis.set_xlabel("training step")
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_locator(plt.MaxNLocator(5, integer=True))
        axis.xaxis.set_major_formatter(lambda step, _: f"{step / 1000:g}k" if step >= 10_000 else f"{step:g}")
        axis.tick_params(labelbottom=True)
        axis.set_ylim(top=min(axis.get_ylim()[1], 101))  # no score is above 100
    for axis in axes[:, 0]:
        axis.set_ylabel("score × 100")
    bar = plt.Line2D([], [], color=GREY, marker="|", linestyle="", markersize=14, markeredgewidth=2)
    legend_below(figure, run_handles(short_names(runs)) | {error: bar})
    save_figure(figure, folder / FIGURE)
    return FIGURE


def _draw_curve(axis: Any, curve: list[tuple[int, Score]], run: str, style: dict[str, Any]) -> None:
    steps = [step for step, _ in curve]
    values = [100 * score.value for _, score in curve]
    below = [100 * (score.value - score.low) for _, score in curve]
    above = [100 * (score.high - score.value) for _, score in curve]
    axis.errorbar(steps, values, yerr=(below, above), label=run, capsize=3, **style)
