"""Figures of the loss and of f(S) and f(H) against tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ddrp.pages.plotting import COLORS, LINES, draw_band, handles_by_label, pyplot, run_style, save_figure
from megatron_ddrp.tasks.ladder.ladder import Ladder
from megatron_ddrp.tasks.ladder.measures import HEAD_SIMILARITY, LOSS, TOKEN_SIMILARITY
from megatron_ddrp.tasks.ladder.numbers import shown_tokens
from megatron_ddrp.tasks.ladder.panels import arm_groups, budget_axis, group_styles
from megatron_ddrp.tasks.ladder.rows import Arm
from megatron_ddrp.tasks.statistics import mean_and_band, paired, spread


def draw_loss(ladder: Ladder, path: Path) -> bool:
    """Draw the loss at the ends of the rungs, and below it the differences to each group's first arm.

    Return False without drawing if there is one rung, or no row with a loss.
    """
    groups = arm_groups(ladder)
    if LOSS not in ladder.measures or len(ladder.rungs) < 2:
        return False
    plt = pyplot()
    most = max(map(len, groups.values()))
    size = (0.8 + 4.6 * len(groups), 7.6 + 0.26 * most)
    figure, axes = plt.subplots(2, len(groups), squeeze=False, figsize=size, layout="constrained")
    for (top, bottom), (title, arms) in zip(axes.T, groups.items(), strict=True):
        styles = group_styles(arms)
        for number, arm in enumerate(arms):
            _loss_line(top, ladder, arm, styles[arm])
            if arm != arms[0] and not arm.half:
                aside = 1.05 ** (number - len(arms) / 2)  # beside each other, because many lie at one height
                _difference_line(bottom, ladder, (arm, arms[0]), aside, styles[arm])
        for axis in (top, bottom):
            budget_axis(axis, ladder)
        top.set_title(title)
        bottom.axhline(0, color="black", linewidth=1)
        bottom.set_title(f"minus {arms[0].label}", fontsize="medium")
        bottom.set_xlabel("tokens of the rung")
        handles, labels = top.get_legend_handles_labels()
        bottom.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize="small", handlelength=3)
    axes[0, 0].set_ylabel("validation masked-LM loss [nats]")
    axes[1, 0].set_ylabel("difference [nats]")
    save_figure(plt, figure, path)
    return True


def _loss_line(axis: Any, ladder: Ladder, arm: Arm, style: dict[str, Any]) -> None:
    """Draw an arm's mean loss over its consumed tokens, with a band from the lowest to the highest seed."""
    points = []
    for rung in ladder.rungs:
        found = spread(ladder.of(LOSS, arm, rung))
        if found:
            points.append((rung / 2 if arm.half else rung, found.mean, min(found.values), max(found.values)))
    draw_band(axis, points, style | {"label": arm.label})


def _difference_line(axis: Any, ladder: Ladder, arms: tuple[Arm, Arm], aside: float, style: dict[str, Any]) -> None:
    """Draw the mean difference of two arms over the budgets times `aside`, with a band over the seeds."""
    points = []
    for rung in ladder.rungs:
        first, second = (ladder.of(LOSS, arm, rung) for arm in arms)
        found = paired(first, second)
        if found:
            points.append((rung * aside, found.mean, min(found.values), max(found.values)))
    draw_band(axis, points, style)


def draw_training(ladder: Ladder, path: Path) -> bool:
    """Draw the training loss of every arm, one panel per group and rung; return False if there are no curves.

    A curve is the mean over the seeds that all arms of its panel have, because seeds differ more than arms do.
    """
    curves = [run.curve for run in ladder.runs if run.curve]
    if not curves:
        return False
    plt = pyplot()
    groups, rungs = arm_groups(ladder), ladder.rungs
    is_row = ladder.is_one_budget  # then the groups stand beside each other
    lines, columns = (1, len(groups)) if is_row else (len(groups), len(rungs))
    size = (1.2 + 3.9 * columns, 0.6 + (4.4 if is_row else 3.0) * lines)
    figure, axes = plt.subplots(lines, columns, squeeze=False, sharey=True, figsize=size, layout="constrained")
    ends = [value for curve in curves for _, value in curve[len(curve) // 10 :]]
    axes[0, 0].set_ylim(min(ends) - 0.05, float(np.quantile(ends, 0.99)))
    for row, (title, arms) in zip(axes.T if is_row else axes, groups.items(), strict=True):
        for axis, rung in zip(row, rungs, strict=True):
            _draw_curves(axis, ladder, arms, rung)
            if axis.lines:
                axis.set_title(
                    title if ladder.is_one_budget else f"{title}, {shown_tokens(rung)} tokens", fontsize="small"
                )
            else:
                axis.set_axis_off()  # no model of the group has run on this rung
        beside = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5)}
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
        if found := _visible(row):
            row[-1].legend(found.values(), found.keys(), fontsize="x-small", **(below if is_row else beside))
    for axis in axes[-1]:
        axis.set_xlabel("million tokens", fontsize="small")
    for axis in axes[:, 0]:
        axis.set_ylabel("training loss [nats]", fontsize="small")
    save_figure(plt, figure, path)
    return True


def _draw_curves(axis: Any, ladder: Ladder, arms: Sequence[Arm], rung: int) -> None:
    """Draw the mean curve of each arm on a rung over their common seeds, or over its own seeds if there is none."""
    by_seed: dict[Arm, dict[int, Any]] = {
        arm: {seed: run.curve for seed, run in ladder.on(rung, arm).items() if run.curve} for arm in arms
    }
    common = set.intersection(*(set(found) for found in by_seed.values() if found)) if any(by_seed.values()) else set()
    styles = group_styles(arms)
    for arm, found in by_seed.items():
        points = mean_and_band([curve for seed, curve in found.items() if seed in (common or found)]) if found else []
        if points:
            x, mean, _, _ = zip(*points, strict=True)
            style = {key: styles[arm][key] for key in ("color", "linestyle")}
            axis.plot(np.array(x) / 1e6, mean, linewidth=1.3, label=arm.label, **style)
    axis.grid(alpha=0.3)
    axis.tick_params(labelsize="small")


def _visible(axes: Sequence[Any]) -> dict[str, Any]:
    """Return label → line of some panels, without lines outside of their panel's limits."""
    found = {}
    for axis in axes:
        lowest, highest = axis.get_ylim()
        for label, line in handles_by_label(axis).items():
            if any(lowest <= value <= highest for value in line.get_ydata()):
                found[label] = line
    return found


def draw_similarity(ladder: Ladder, path: Path) -> bool:
    """Draw f(S) and f(H) over the tokens, one line per arm; return False without values.

    On several rungs the lines are coloured by objective, on one rung each has its own style.
    """
    rungs = [rung for rung in ladder.rungs if any(run.similarity for run in ladder.runs if run.rung == rung)]
    if not rungs:
        return False
    plt = pyplot()
    styles = _similarity_styles(ladder)
    lines, columns = (1, 2) if ladder.is_one_budget else (2, len(rungs))
    size = (1.0 + 4.0 * columns, 0.8 + 3.3 * lines)
    figure, axes = plt.subplots(lines, columns, squeeze=False, figsize=size, sharey="row", layout="constrained")
    if ladder.is_one_budget:
        axes = axes.T
    for column, rung in zip(axes.T, rungs, strict=True):
        for arm in filter(styles.__contains__, ladder.arms_on(rung)):
            triples = [run.similarity for run in ladder.on(rung, arm).values() if run.similarity]
            for part, axis in enumerate(column, 1):
                points = mean_and_band([[(point[0], point[part]) for point in triple] for triple in triples])
                if points:
                    x, mean, _, _ = zip(*points, strict=True)
                    axis.plot(np.array(x) / 1e6, mean, alpha=0.8, **styles[arm])
        if not ladder.is_one_budget:
            column[0].set_title(f"{shown_tokens(rung)} tokens")
        for axis in column if ladder.is_one_budget else column[1:]:
            axis.set_xlabel("million tokens")
        for axis in column:
            axis.grid(alpha=0.3)
            axis.axhline(0, color="black", linewidth=1)
            axis.locator_params(axis="x", nbins=5)
    for axis, measure in zip(axes[:, 0], (TOKEN_SIMILARITY, HEAD_SIMILARITY), strict=True):
        axis.set_ylabel(f"{measure}, mean cosine of {'tokens' if measure == TOKEN_SIMILARITY else 'heads'}")
    found = handles_by_label(*axes.flat)
    ncols = min(len(found), 4)
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=ncols, handlelength=3)
    save_figure(plt, figure, path)
    return True


def _similarity_styles(ladder: Ladder) -> dict[Arm, dict[str, Any]]:
    """Return arm at the full budget → style and label of its line."""
    arms = [arm for arm in ladder.arms if not arm.half]
    if ladder.is_one_budget:
        return {arm: run_style(number) | {"label": arm.label} for number, arm in enumerate(arms)}
    objectives = list(dict.fromkeys(arm.objective_name for arm in arms))
    styles = {}
    for arm in arms:
        number = objectives.index(arm.objective_name)
        look = {"color": COLORS[number % len(COLORS)], "linestyle": LINES[number % len(LINES)], "linewidth": 1.6}
        styles[arm] = look | {"marker": "o", "markersize": 4, "label": arm.objective_name}
    return styles
