"""Figures of minimal pairs by phenomenon and of direction, and the list of all figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ddrp.pages.plotting import COLORS, GREY, pyplot, remove_figure, save_figure
from megatron_ddrp.tasks.ladder.claims import Judged
from megatron_ddrp.tasks.ladder.curves import draw_loss, draw_similarity, draw_training
from megatron_ddrp.tasks.ladder.gains import draw_claims, draw_gains
from megatron_ddrp.tasks.ladder.ladder import Ladder
from megatron_ddrp.tasks.ladder.measures import COSINE, PROBE, RANDOM, SHUFFLED
from megatron_ddrp.tasks.ladder.minimal_pairs import CHANCE
from megatron_ddrp.tasks.ladder.numbers import shown_tokens
from megatron_ddrp.tasks.ladder.rows import Arm
from megatron_ddrp.tasks.statistics import spread

DIRECTION_PANELS = {
    SHUFFLED: "probe on shuffled text, accuracy",
    PROBE: "probe on text, accuracy",
    COSINE: "cosine of T[+k] and T[−k]",
}
"""Measure → label of its axis. Only positions can tell left from right in shuffled text."""


def draw_all(ladder: Ladder, gains: Mapping[str, Sequence[Judged]], folder: Path) -> list[str]:
    """Draw the figures that have data; return their names. `gains` maps each figure of gains to its claims."""
    wanted: dict[str, Callable[[Path], bool]] = {
        "loss": partial(draw_loss, ladder),
        "training": partial(draw_training, ladder),
        "claims": partial(draw_claims, ladder, [item for claims in gains.values() for item in claims]),
        **{name: partial(draw_gains, ladder, claims) for name, claims in gains.items()},
        "minimal-pairs": partial(draw_minimal_pairs, ladder),
        "similarity": partial(draw_similarity, ladder),
        "direction": partial(draw_direction, ladder),
    }
    drawn = []
    for name, draw in wanted.items():
        path = folder / f"{name}.png"
        remove_figure(path)
        if ladder.runs and draw(path):
            drawn.append(name)
    return drawn


def draw_minimal_pairs(ladder: Ladder, path: Path) -> bool:
    """Draw heat maps of arms × phenomena, one per rung, with colours centred on chance; return False without pairs."""
    rungs: dict[int, dict[Arm, Mapping[str, float]]] = {}
    for rung in ladder.rungs:
        found = {arm: ladder.accuracies(arm, rung) for arm in ladder.arms_on(rung)}
        if kept := {arm: by_group for arm, by_group in found.items() if by_group}:
            rungs[rung] = kept
    if not rungs:
        return False
    groups = list(dict.fromkeys(name for arms in rungs.values() for by_group in arms.values() for name in by_group))
    values = {rung: _percent(arms, groups) for rung, arms in rungs.items()}
    widest = max(1.0, *(float(np.nanmax(np.abs(found - 50))) for found in values.values()))
    plt = pyplot()
    heights = [len(arms) for arms in rungs.values()]
    size = (4.6 + 0.78 * len(groups), 2.2 + 0.9 * len(rungs) + 0.36 * sum(heights))
    figure, axes = plt.subplots(
        len(rungs), 1, squeeze=False, figsize=size, height_ratios=heights, sharex=True, layout="constrained"
    )
    for axis, (rung, arms) in zip(axes.flat, rungs.items(), strict=True):
        image = axis.imshow(values[rung], cmap="RdBu", vmin=50 - widest, vmax=50 + widest, aspect="auto")
        for (row, column), value in np.ndenumerate(values[rung]):
            if not np.isnan(value):
                color = "white" if abs(value - 50) > 0.6 * widest else "black"
                axis.text(column, row, f"{value:.0f}", ha="center", va="center", color=color, fontsize="small")
        axis.axvline(0.5, color="black", linewidth=1.5)
        axis.set_yticks(range(len(arms)), [arm.label for arm in arms])
        if not ladder.is_one_budget:
            axis.set_title(f"{shown_tokens(rung)} tokens", loc="left")
    axes[-1, 0].set_xticks(range(len(groups)), groups, rotation=40, ha="right", rotation_mode="anchor")
    figure.colorbar(image, ax=axes, label="pairs right [%]; chance is 50", fraction=0.03, pad=0.02)
    save_figure(plt, figure, path)
    return True


def _percent(arms: Mapping[Arm, Mapping[str, float]], groups: Sequence[str]) -> np.ndarray:
    """Return accuracies in per cent, `[arms, groups]`, nan where one is missing."""
    return np.array([[100 * by_group.get(group, np.nan) for group in groups] for by_group in arms.values()])


def draw_direction(ladder: Ladder, path: Path) -> bool:
    """Draw how well attention tells left from right, with open dots for random weights; return False without values."""
    panels = {name: label for name, label in DIRECTION_PANELS.items() if name in ladder.measures}
    if not panels:
        return False
    arms = [arm for arm in ladder.arms if any(ladder.of(name, arm, rung) for name in panels for rung in ladder.rungs)]
    plt = pyplot()
    size = (3.0 + 3.6 * len(panels), 1.9 + 0.42 * len(arms))
    figure, axes = plt.subplots(1, len(panels), squeeze=False, figsize=size, sharey=True, layout="constrained")
    handles = {}
    for axis, (measure, label) in zip(axes.flat, panels.items(), strict=True):
        for number, rung in enumerate(ladder.rungs):
            shift = 0.22 * (number - (len(ladder.rungs) - 1) / 2)
            style = {"color": COLORS[number % len(COLORS)], "linestyle": "", "marker": "o", "markersize": 7}
            for place, arm in enumerate(arms):
                _draw_dots(axis, ladder, (measure, arm, rung), place + shift, style)
            if any(ladder.of(measure, arm, rung) for arm in arms):
                rung_label = "trained" if ladder.is_one_budget else f"{shown_tokens(rung)} tokens"
                handles[rung_label] = plt.Line2D([], [], **style)
        axis.grid(alpha=0.3)
        axis.set_xlabel(label)
        axis.axvline(CHANCE if measure != COSINE else 1.0, color="black", linewidth=1)
    if RANDOM in ladder.measures and SHUFFLED in panels:
        handles["random weights"] = plt.Line2D([], [], **style | {"color": GREY, "fillstyle": "none"})
    axes[0, 0].set_yticks(range(len(arms)), [arm.label for arm in arms])
    axes[0, 0].set_ylim(len(arms) - 0.5, -0.5)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    save_figure(plt, figure, path)
    return True


def _draw_dots(axis: Any, ladder: Ladder, what: tuple[str, Arm, int], height: float, style: dict[str, Any]) -> None:
    """Draw the mean of a measure over the seeds as a dot, joined to an open dot for random weights."""
    measure, arm, rung = what
    found = spread(ladder.of(measure, arm, rung))
    if found is None:
        return
    axis.plot([found.mean], [height], **style)
    random = spread(ladder.of(RANDOM, arm, rung)) if measure == SHUFFLED else None
    if random:
        axis.plot([random.mean, found.mean], [height] * 2, color=style["color"], linewidth=1.5, zorder=0)
        axis.plot([random.mean], [height], fillstyle="none", **style)
