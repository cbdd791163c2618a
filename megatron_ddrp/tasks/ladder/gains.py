"""Figures of gains by validation loss: all claims side by side, and each claim against the budget."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ddrp.pages.plotting import (
    COLORS,
    GREY,
    MARKERS,
    handles_by_label,
    hide_rest,
    pyplot,
    save_figure,
    wrapped,
)
from megatron_ddrp.tasks.ladder.claims import Judged
from megatron_ddrp.tasks.ladder.ladder import Ladder
from megatron_ddrp.tasks.ladder.numbers import shown, shown_tokens
from megatron_ddrp.tasks.ladder.panels import budget_axis, mark_cut
from megatron_ddrp.tasks.ladder.trend import steps_of_four

GAIN_COLUMNS = 4


def draw_claims(ladder: Ladder, gains: Sequence[Judged], path: Path) -> bool:
    """Draw one line per claim with its gain and 95 % interval on every rung; return False without claims.

    A second panel enlarges the small gains if its scale is at least twice as large.
    """
    if not gains:
        return False
    plt = pyplot()
    (low, high), (close_low, close_high) = _limits(gains), _close_limits(gains)
    panels = [(low, high), *[(close_low, close_high)] * (close_high - close_low < (high - low) / 2)]
    size = (3.0 + 5.0 * len(panels), 1.7 + (0.2 + 0.08 * len(ladder.rungs)) * len(gains))
    figure, grid = plt.subplots(1, len(panels), squeeze=False, figsize=size, sharey=True, layout="constrained")
    axes = grid[0]
    for axis, limits in zip(axes, panels, strict=True):
        axis.set_xlim(limits)
        for place, item in enumerate(gains):
            _draw_claim(axis, ladder, item, place)
        axis.axvline(0, color="black", linewidth=1)
        axis.grid(axis="x", alpha=0.3)
        axis.locator_params(axis="x", nbins=5)
    axes[0].set_ylim(len(gains) - 0.5, -0.5)
    axes[0].set_yticks(range(len(gains)), [item.claim.text for item in gains], fontsize="small")
    axes[0].set_xlabel("gain in validation loss [nats]")
    for axis in axes[1:]:
        axis.set_xlabel("the same, enlarged")
    found = handles_by_label(axes[0])
    order = [label for rung in ladder.rungs if (label := f"{shown_tokens(rung)} tokens") in found]
    if not ladder.is_one_budget:
        figure.legend([found[label] for label in order], order, loc="outside lower center", ncols=len(order))
    save_figure(plt, figure, path)
    return True


def _draw_claim(axis: Any, ladder: Ladder, item: Judged, place: int) -> None:
    """Draw the gains of one claim around the height `place`, the lowest rung on top."""
    for rung, gain in item.gains.items():
        number = ladder.rungs.index(rung)
        height = place + 0.24 * (number - (len(ladder.rungs) - 1) / 2)
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        if gain.interval:
            axis.plot(gain.interval, [height] * 2, color=color, linewidth=2)
        mark_cut(axis, "x", gain.interval or (gain.mean, gain.mean), height, color)
        label = f"{shown_tokens(rung)} tokens"
        axis.plot([gain.mean], [height], marker=marker, markersize=6, linestyle="", color=color, label=label)
    if place % 2:
        axis.axhspan(place - 0.5, place + 0.5, color=GREY, alpha=0.08, linewidth=0)


def _close_limits(gains: Sequence[Judged]) -> tuple[float, float]:
    """Return the limits of an axis on which the smaller half of the mean gains has room."""
    half = 1.5 * statistics.median(abs(gain.mean) for item in gains for gain in item.gains.values()) or 1.0
    return -half, half


def _limits(gains: Sequence[Judged]) -> tuple[float, float]:
    """Return the limits of an axis that shows all seeds; intervals of two seeds may be many times longer."""
    values = [0.0, *(value for item in gains for gain in item.gains.values() for value in gain.values)]
    margin = 0.2 * (max(values) - min(values)) or 1.0
    return min(values) - margin, max(values) + margin


def draw_gains(ladder: Ladder, gains: Sequence[Judged], path: Path) -> bool:
    """Draw one panel per claim on several rungs, with its gains and trend; return False if there is no such claim."""
    gains = [item for item in gains if len(item.gains) > 1]
    if not gains:
        return False
    plt = pyplot()
    columns = min(GAIN_COLUMNS, len(gains))
    lines = -(-len(gains) // columns)
    size = (0.9 + 3.2 * columns, 0.7 + 3.2 * lines)
    figure, axes = plt.subplots(lines, columns, squeeze=False, figsize=size, layout="constrained")
    for axis, item in zip(axes.flat, gains, strict=False):
        _draw_gain(axis, ladder, item)
    hide_rest(axes, len(gains))
    for row in axes:
        row[0].set_ylabel("gain [nats]")
    figure.supxlabel("tokens of the rung", fontsize="medium")
    save_figure(plt, figure, path)
    return True


def _draw_gain(axis: Any, ladder: Ladder, item: Judged) -> None:
    """Draw the gains of one claim: seeds as small dots, means with 95 % intervals, the trend with its band."""
    axis.set_ylim(_limits([item]))
    for rung, gain in item.gains.items():
        axis.plot([rung * 1.12] * len(gain.values), gain.values, ".", color=GREY, alpha=0.6, markersize=5)
        if gain.interval:
            axis.plot([rung, rung], gain.interval, color=COLORS[0], linewidth=3, solid_capstyle="butt")
            mark_cut(axis, "y", gain.interval, rung, COLORS[0])
        axis.plot([rung], [gain.mean], "o", color=COLORS[0], markersize=7)
    slope, trend = "no trend: a rung has one seed", item.trend
    if trend and trend.turns:
        slope = "no line: the gain turns"
    elif trend:
        tokens = np.geomspace(min(item.gains) / 1.3, max(item.gains) * 1.3, 50)
        x = [steps_of_four(value, ladder.rungs[0]) for value in tokens]
        height, half = np.array([trend.at(at) for at in x]), np.array([trend.half_width(at) for at in x])
        axis.plot(tokens, height, color=COLORS[1], linewidth=2, zorder=1)
        axis.fill_between(tokens, height - half, height + half, color=COLORS[1], alpha=0.18, linewidth=0, zorder=0)
        ends = [shown(item.claim.measure, trend.slope, "+"), shown(item.claim.measure, trend.slope_half_width)]
        slope = f"b = {' ± '.join(ends)} per ×4"
    axis.axhline(0, color="black", linewidth=1)
    budget_axis(axis, ladder)
    axis.set_xlim(ladder.rungs[0] / 1.8, ladder.rungs[-1] * 1.8)
    axis.set_title(f"{wrapped(item.claim.text, 3.6)}\n{slope}", fontsize="small", pad=8)
