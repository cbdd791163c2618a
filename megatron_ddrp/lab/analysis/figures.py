"""Figures of the analyses: f(S) and f(H), triangles, direction, hidden states, throughput and attention maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ddrp.lab.analysis.attention_maps import AttentionMap
from megatron_ddrp.pages.plotting import (
    COLORS,
    FONT_SIZE,
    GREY,
    draw_band,
    figure_tools,
    legend_below,
    panel_grid,
    run_handles,
    run_style,
    save_figure,
    thousands,
)
from megatron_ddrp.tasks import measures
from megatron_ddrp.tasks.measures import HEAD_SIMILARITY, TOKEN_SIMILARITY

SPACE = {
    "token_similarity": TOKEN_SIMILARITY,
    "head_similarity": HEAD_SIMILARITY,
    **{key: name for name, key in measures.SPACE.items()},
}
"""Key of a measure of hidden states in the JSON → its name in printed lines."""
DRAWN = {
    "token_similarity": "f(S): tokens of a sentence",
    "cosine_between": "cosine between sentences",
    "isoscore": "IsoScore",
    "effective_rank": "effective rank",
}
"""Key of a measure of hidden states that the figure shows → title of its panel; the JSON has all."""
LOOKS: dict[str, dict[str, str]] = {
    "probe": {"linestyle": "-"},
    "shuffled": {"linestyle": "--", "markerfacecolor": "white"},
}
"""Key of a measurement of the probe → style that sets it apart."""


def draw_similarity(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw f(S) and f(H) of runs over their steps, side by side. A model of unknown step becomes a horizontal line.

    `rows` are those of the JSON.
    """
    figure, axes = panel_grid(2, 2, 5.5, 4.4)
    steps, runs = {row["iteration"] for row in rows} - {None}, _by_run(rows)
    panels = {"token_similarity": "f(S): tokens", "head_similarity": "f(H): heads of a layer"}
    for axis, (key, title) in zip(axes.flat, panels.items(), strict=True):
        for number, of_run in enumerate(runs.values()):
            _draw_known(axis, [(row["iteration"], row[key]) for row in of_run], run_style(number))
        axis.set(title=title, xlabel="training step", ylabel="mean cosine")
        if len(steps) == 1:
            axis.set_xticks(sorted(steps))
        axis.grid(alpha=0.3)
    legend_below(figure, run_handles(runs))
    save_figure(figure, path)


def _by_run(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return run → its rows."""
    return {row["run"]: [other for other in rows if other["run"] == row["run"]] for row in rows}


def draw_triangles(shares: Mapping[str, Sequence[float]], threshold: float, path: Path) -> None:
    """Draw each model's share of sentences with the up-down triangle effect over its layers."""
    figure, axis = figure_tools().subplots(figsize=(8, 4.4), layout="constrained")
    for number, values in enumerate(shares.values()):
        axis.plot(np.arange(1, len(values) + 1), 100 * np.asarray(values), **run_style(number))
    longest = max(map(len, shares.values()))
    axis.set_xticks(np.unique(np.linspace(1, longest, min(longest, 12)).round().astype(int)))
    axis.set(xlabel="layer", ylabel="share of sentences [%]", ylim=(-3, 103))
    axis.set_title(f"Up-down triangle effect, threshold {threshold:g}")
    axis.grid(alpha=0.3)
    legend_below(figure, run_handles(f"{run}: last layer {values[-1]:.2%}" for run, values in shares.items()))
    save_figure(figure, path)


def draw_masked_places(rows: Sequence[Mapping[str, Any]], guesses: int, path: Path) -> None:
    """Draw the share of masked places whose piece is among the first guesses of each model, and of frequent pieces."""
    shares = {row["run"]: row["found"] / row["places"] for row in rows}
    shares["most frequent pieces"] = rows[0]["found_by_frequency"] / rows[0]["places"]
    figure, axis = figure_tools().subplots(figsize=(8, 1.6 + 0.5 * len(shares)), layout="constrained")
    bars = axis.barh(list(shares), [100 * share for share in shares.values()], color=COLORS[0])
    axis.bar_label(bars, fmt="%.0f%%", padding=3)
    axis.invert_yaxis()
    axis.set(xlabel=f"masked piece among the first {guesses} [% of {rows[0]['places']} places]", xlim=(0, 105))
    save_figure(figure, path)


def draw_direction(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the probe's accuracy over the distance: per model a solid line for text, a dashed one for shuffled text."""
    plt = figure_tools()
    figure, axis = plt.subplots(figsize=(8, 4.8), layout="constrained")
    for number, row in enumerate(rows):
        style = run_style(number)
        for key, look in LOOKS.items():
            known = [(point["distance"], 100 * point[key]) for point in row["distances"] if point[key] is not None]
            axis.plot(*zip(*known, strict=True), **style | look)
    axis.axhline(50, color=GREY, linestyle=":", linewidth=2)
    axis.set(xlabel="distance of both keys [tokens]", ylabel="accuracy [%]", title="Left or right, told by attention")
    axis.set_xticks([point["distance"] for point in rows[0]["distances"]])
    axis.grid(alpha=0.3)
    looks = zip(("text", "shuffled text"), LOOKS.values(), strict=True)
    lines = {name: plt.Line2D([], [], color=GREY, marker="o", linewidth=2, **look) for name, look in looks}
    chance = {"chance": plt.Line2D([], [], color=GREY, linestyle=":", linewidth=2)}
    legend_below(figure, run_handles(row["run"] for row in rows) | lines | chance)
    save_figure(figure, path)


def draw_space(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the measures of `DRAWN` over the layers of each run's last checkpoint and, if a run has several, over steps.

    `rows` are those of the JSON. A model of unknown step is a horizontal line over the steps.
    """
    runs = _by_run(rows)
    has_steps = any(len(of_run) > 1 for of_run in runs.values())
    figure, axes = panel_grid(len(DRAWN) * (1 + has_steps), len(DRAWN), 4.0, 3.8)
    for column, (key, title) in enumerate(DRAWN.items()):
        for number, of_run in enumerate(runs.values()):
            layers = [(layer["layer"], layer[key]) for layer in of_run[-1]["layers"]]
            _draw_known(axes[0, column], layers, run_style(number))
            if has_steps:
                steps = [(row["iteration"], row["layers"][-1][key]) for row in of_run]
                _draw_known(axes[1, column], steps, run_style(number))
        axes[0, column].set(title=title, xlabel="layer of the last checkpoint")
        axes[0, column].xaxis.get_major_locator().set_params(integer=True)
        if has_steps:
            axes[1, column].set(title=title, xlabel="training step, last layer")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    legend_below(figure, run_handles(runs))
    save_figure(figure, path)


def _draw_known(axis: Any, points: Sequence[tuple[float | None, float | None]], style: Mapping[str, Any]) -> None:
    """Draw the points that have a value: as a curve or, where x is unknown, as a horizontal line at the last one."""
    known = [(x, value) for x, value in points if value is not None]
    if known and all(x is not None for x, _ in known):
        axis.plot(*zip(*known, strict=True), **style)
    elif known:
        axis.axhline(known[-1][1], **{key: style[key] for key in ("color", "linestyle", "linewidth")})


def draw_throughput(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw tokens per second (with quartiles) and memory over the row length, one line per encoder."""
    plt = figure_tools()
    figure, axes = panel_grid(2, 2, 5.5, 4.4)
    left, right = axes.flat
    for number, row in enumerate(rows):
        style, speeds = run_style(number), row["lengths"]
        keys = ("length", "tokens_per_second", "lower_quartile", "upper_quartile")
        draw_band(left, list(zip(*([speed[key] for speed in speeds] for key in keys), strict=True)), style)
        known = [(speed["length"], speed["memory_bytes"] / 2**20) for speed in speeds if speed["memory_bytes"]]
        _draw_known(right, known, style)
    left.set(title="Inference", ylabel="tokens per second")
    right.set(title="Peak above the loaded encoder", ylabel="memory [MiB]")
    ticks = sorted({speed["length"] for row in rows for speed in row["lengths"]})
    for axis in (axis for axis in (left, right) if axis.lines):  # the memory may be unknown
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(ticks, labels=[str(tick) for tick in ticks])
        axis.xaxis.minorticks_off()
        axis.set_xlabel("length of a row [tokens]")
        axis.grid(alpha=0.3)
        axis.yaxis.set_major_formatter(lambda value, _: thousands(value))
        lowest, highest = axis.get_ylim()
        axis.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)) if highest > 8 * lowest else plt.MaxNLocator(6))
        axis.yaxis.minorticks_off()
    legend_below(figure, run_handles(row["run"] for row in rows))
    save_figure(figure, path)


def draw_maps(maps: Sequence[AttentionMap], title: str, path: Path) -> None:
    """Draw mean attention maps side by side on one logarithmic colour scale."""
    figure, axes = panel_grid(len(maps), 4, 4.2, 4.6, (1.2, 0.4))
    from matplotlib.colors import LogNorm

    values = np.concatenate([panel.map.ravel() for panel in maps])
    positive = values[values > 0]
    lowest, highest = np.quantile(positive, (0.02, 0.998))  # a few cells, such as [SEP]'s column, exceed all others
    even = np.sqrt(lowest * highest)
    lowest, highest = min(lowest, even / 2), max(highest, even * 2)  # noise in a nearly even map stays pale
    scale = LogNorm(lowest, highest)
    for axis, panel in zip(axes.flat, maps, strict=False):
        end = len(panel.map) + 0.5
        image = axis.imshow(panel.map, cmap="cividis", norm=scale, extent=(0.5, end, end, 0.5), interpolation="nearest")
        axis.set_title(f"{panel.name}\nright {panel.up:.0%}, left {panel.down:.0%}", fontsize=FONT_SIZE)
        axis.set_xlabel("key [token]")
    for axis in axes[:, 0]:
        axis.set_ylabel("query [token]")
    bar = figure.colorbar(image, ax=axes.ravel().tolist(), label="mean attention probability", extend="both")
    ticks = np.geomspace(lowest, highest, 5)
    bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
    bar.minorticks_off()
    figure.suptitle(title, fontsize=FONT_SIZE)
    save_figure(figure, path)
