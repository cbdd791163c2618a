"""Figure of the geometry of hidden states: one set of panels over layers, one over checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ddrp.pages.plotting import FONT_SIZE, legend_below, pyplot, run_style, save_figure
from megatron_ddrp.tasks import measures
from megatron_ddrp.tasks.measures import HEAD_SIMILARITY, TOKEN_SIMILARITY

SPACE = {
    "token_similarity": TOKEN_SIMILARITY,
    "head_similarity": HEAD_SIMILARITY,
    **{key: name for name, key in measures.SPACE.items()},
}
"""Key of a measure in the JSON → its name in the figure and in printed lines."""

COLUMNS = 4


def draw_space(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw each measure over the layers of a run's last checkpoint and, if any run has several checkpoints, the last
    layer's measure over training steps. `rows` are those of the JSON. A single checkpoint is a marker at its step, a
    model of unknown step a horizontal line.
    """
    plt = pyplot()
    runs = {row["run"]: [other for other in rows if other["run"] == row["run"]] for row in rows}
    has_steps = any(len(of_run) > 1 for of_run in runs.values())
    height = -(-len(SPACE) // COLUMNS)
    panels = height * (1 + has_steps)
    figure, axes = plt.subplots(panels, COLUMNS, figsize=(15, 3.3 * panels), layout="constrained")
    for axis, (key, title) in zip(axes[:height].flat, SPACE.items(), strict=True):
        for number, of_run in enumerate(runs.values()):
            _draw_layers(axis, of_run[-1]["layers"], key, run_style(number))
        axis.set_title(title, fontsize=FONT_SIZE)
        axis.set_xlabel("layer (last checkpoint)")
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis, (key, title) in zip(axes[height:].flat, SPACE.items() if has_steps else (), strict=True):
        for number, of_run in enumerate(runs.values()):
            _draw_steps(axis, of_run, key, run_style(number))
        axis.set_title(title, fontsize=FONT_SIZE)
        axis.set_xlabel("training step (last layer)")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    legend_below(figure, {run: plt.Line2D([], [], **run_style(number)) for number, run in enumerate(runs)})
    save_figure(plt, figure, path)


def _draw_layers(axis: Any, layers: Sequence[Mapping[str, Any]], key: str, style: Mapping[str, Any]) -> None:
    points = [(layer["layer"], layer[key]) for layer in layers if layer[key] is not None]
    if points:
        axis.plot(*zip(*points, strict=True), **style)


def _draw_steps(axis: Any, rows: Sequence[Mapping[str, Any]], key: str, style: Mapping[str, Any]) -> None:
    points = [(row["iteration"], row["layers"][-1][key]) for row in rows if row["layers"][-1][key] is not None]
    if points and all(step is not None for step, _ in points):
        axis.plot(*zip(*points, strict=True), **style)
    elif points:
        axis.axhline(points[-1][1], color=style["color"], linestyle=style["linestyle"], linewidth=style["linewidth"])
