"""Figures of the page. A model has one colour, marker and line on all of them, and budgets are shades of grey to black.

Curves are smoothed and drawn as differences to the baseline from the same seeds, because seeds differ more than models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_ddrp.pages.plotting import (
    draw_band,
    hide_rest,
    label_lines,
    pyplot,
    remove_figure,
    run_style,
    save_figure,
)
from megatron_ddrp.tasks.compare.arms import Arm
from megatron_ddrp.tasks.compare.claims import Gain
from megatron_ddrp.tasks.compare.gain_figure import draw_gains
from megatron_ddrp.tasks.compare.heat_map import draw_pairs
from megatron_ddrp.tasks.compare.numbers import factor_of, shown_budget, unit_of
from megatron_ddrp.tasks.compare.results import Results
from megatron_ddrp.tasks.measures import GLUE, LOSS, TRAINING_LOSS

LINES = 7
"""Largest number of lines of a panel; as many colours are distinct."""
COLUMNS = 3
SMOOTHED = 0.1
"""Share of a curve that is averaged around each of its points."""

Points = list[tuple[float, float, float, float]]
"""Points (x, mean, lowest, highest seed)."""


class Line(NamedTuple):
    """Line of a panel."""

    arm: Arm
    points: Points


def draw_all(results: Results, gains: Mapping[str, Sequence[Gain]], folder: Path) -> dict[str, str]:
    """Draw the figures that have data into the folder; return name → caption."""
    figures = {name: (partial(draw, results), caption) for name, (draw, caption) in FIGURES.items()}
    figures |= {name: (partial(draw_gains, results, found), GAINS) for name, found in gains.items()}
    captions = {}
    for name, (draw, caption) in figures.items():
        path = folder / f"{name}.png"
        remove_figure(path)  # an old figure may show data that no longer exist
        figure = draw() if results.runs else None
        if figure is not None:
            folder.mkdir(parents=True, exist_ok=True)
            save_figure(pyplot(), figure, path)
            captions[name] = caption
    for old in OLD:
        remove_figure(folder / f"{old}.png")
    return captions


def styles(results: Results) -> dict[Arm, dict[str, Any]]:
    """Return arm → colour, marker and line, the same on all figures."""
    return {arm: run_style(number) | {"markersize": 6} for number, arm in enumerate(results.arms)}


def draw_curves(results: Results, measure: str) -> Any:
    """Draw the baseline's curve over tokens, one line per budget, and panels of the other arms minus the baseline."""
    base = {budget: _curves(results, measure, results.baseline, budget) for budget in results.budgets}
    base = {budget: curves for budget, curves in base.items() if curves}
    panels = [(budget, lines) for budget in base for lines in _in_panels(_differences(results, measure, budget))]
    if not panels:
        return None
    plt = pyplot()
    columns = min(COLUMNS, 1 + len(panels))
    rows = -(-(1 + len(panels)) // columns)
    figure, axes = plt.subplots(rows, columns, squeeze=False, figsize=(5.6 * columns, 4.0 * rows), layout="constrained")
    first, *others = axes.flat
    ends = {}
    for number, (budget, curves) in enumerate(base.items()):
        points = _band([_smoothed(np.array(curve) * (1, factor_of_curve(measure))) for curve in curves.values()])
        shade = str(0.6 * (1 - number / max(1, len(base) - 1))) if len(base) > 1 else "0"
        draw_band(first, points, {"color": shade, "linewidth": 2})
        ends[shown_budget(budget, results.budgets[budget])] = (points[-1], shade)
    first.set_title(f"{results.baseline.label}: {measure}", fontsize="small")
    if len(base) > 1:
        label_lines(first, {name: (point[0], point[1], shade) for name, (point, shade) in ends.items()})
    for axis, (budget, lines) in zip(others, panels, strict=False):
        _draw_lines(axis, lines, styles(results))
        name = shown_budget(budget, results.budgets[budget])
        axis.set_title(f"minus {results.baseline.label}, {name}", fontsize="small")
        axis.set_ylabel(f"difference{unit_of(measure)}")
    for axis in axes.flat[: 1 + len(panels)]:
        axis.grid(alpha=0.3)
        axis.set_xlabel("million tokens")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    hide_rest(axes, 1 + len(panels))
    return figure


def factor_of_curve(measure: str) -> int:
    """Return the factor with which a curve is shown."""
    return 1 if measure == TRAINING_LOSS else factor_of(measure)


def draw_budgets(results: Results) -> Any:
    """Draw the loss of every arm minus the baseline's over the budgets; None if no arm ran at two budgets."""
    found = []
    for arm in results.arms:
        points: Points = []
        for budget, tokens in results.budgets.items():
            own, base = results.of(LOSS, arm, budget), results.of(LOSS, results.baseline, budget)
            values = [own[seed] - base[seed] for seed in own if seed in base]
            if values and arm != results.baseline:
                points.append((tokens / 1e6, float(np.mean(values)), min(values), max(values)))
        if len(points) > 1:
            found.append(Line(arm, points))
    panels = list(_in_panels(found))
    if not panels:
        return None
    plt = pyplot()
    size = (6.4 * len(panels), 4.8)
    figure, axes = plt.subplots(1, len(panels), squeeze=False, sharey=True, figsize=size, layout="constrained")
    for axis, lines in zip(axes.flat, panels, strict=True):
        _draw_lines(axis, lines, styles(results))
        axis.set_xscale("log")
        ticks = [tokens / 1e6 for tokens in results.budgets.values()]
        axis.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_xlabel("million tokens of the budget")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel(f"{LOSS}\nminus {results.baseline.label} [nats]")
    return figure


def _in_panels(found: Sequence[Line]) -> Iterator[Sequence[Line]]:
    """Yield the lines of each panel, so many on each that they can be told apart."""
    count = -(-len(found) // LINES)
    for number in range(count):
        yield found[number * len(found) // count : (number + 1) * len(found) // count]


def _draw_lines(axis: Any, lines: Sequence[Line], look: Mapping[Arm, dict[str, Any]]) -> None:
    """Draw lines with their bands around 0, and write their names beside their ends."""
    for arm, points in lines:
        draw_band(axis, points, look[arm] | {"markevery": max(1, len(points) // 8)})
    axis.axhline(0, color="black", linewidth=1)
    ends = {arm.label: (points[-1][0], points[-1][1], look[arm]["color"]) for arm, points in lines}
    label_lines(axis, ends)


def _curves(results: Results, measure: str, arm: Arm, budget: str) -> dict[int, Any]:
    """Return seed → curve of an arm, `[points, 2]` in millions of tokens, for curves of two or more points."""
    found = {seed: run.curves.get(measure, ()) for seed, run in results.at(budget, arm).items()}
    return {seed: np.array(curve) / (1e6, 1.0) for seed, curve in found.items() if len(curve) > 1}


def _differences(results: Results, measure: str, budget: str) -> list[Line]:
    """Return the curves of the other arms at a budget minus the baseline's, those without a common seed left out."""
    base = _curves(results, measure, results.baseline, budget)
    others = [arm for arm in results.arms_at(budget) if arm != results.baseline and not arm.half]
    found = [_difference(_curves(results, measure, arm, budget), base, factor_of_curve(measure)) for arm in others]
    return [Line(arm, points) for arm, points in zip(others, found, strict=True) if points]


def _difference(own: Mapping[int, Any], base: Mapping[int, Any], factor: int) -> Points:
    """Return the band of the smoothed differences of two arms at their common seeds, without the first tenth."""
    found = []
    for seed in own.keys() & base.keys():
        x = own[seed][:, 0]
        x = x[(x >= base[seed][0, 0]) & (x <= base[seed][-1, 0])]
        values = np.interp(x, *own[seed].T) - np.interp(x, *base[seed].T)
        curve = _smoothed(np.stack([x, factor * values], axis=1))
        found.append(curve[len(curve) // 10 :])
    return _band(found)


def _smoothed(curve: Any) -> Any:
    """Return a curve `[points, 2]` whose values are means over a window around each point."""
    half = int(SMOOTHED * len(curve) / 2)
    sums = np.concatenate([[0.0], np.cumsum(curve[:, 1])])
    low = np.maximum(np.arange(len(curve)) - half, 0)
    high = np.minimum(np.arange(len(curve)) + half + 1, len(curve))
    return np.stack([curve[:, 0], (sums[high] - sums[low]) / (high - low)], axis=1)


def _band(curves: Sequence[Any]) -> Points:
    """Return mean, lowest and highest of some curves, up to the end of the shortest."""
    count = min(map(len, curves), default=0)
    if not count:
        return []
    stacked = np.stack([curve[:count] for curve in curves])
    x, values = stacked[:, :, 0].mean(0), stacked[:, :, 1]
    return list(zip(x, values.mean(0), values.min(0), values.max(0), strict=True))


FIGURES: dict[str, tuple[Callable[[Results], Any], str]] = {
    "curves": (
        partial(draw_curves, measure=TRAINING_LOSS),
        "Training masked-LM loss: of the baseline, and of the other models minus the baseline's from the same seeds. "
        "Below 0 is better. Lines are smoothed means over the seeds, bands reach from the lowest to the highest seed.",
    ),
    "budgets": (
        draw_budgets,
        "Validation masked-LM loss over the budgets: minus the baseline's from the same seeds. Below 0 is better. "
        "Lines are means over the seeds, bands reach from the lowest to the highest seed.",
    ),
    "glue-curve": (
        partial(draw_curves, measure=GLUE),
        "GLUE average over the checkpoints (the paper's figure 3b): of the baseline, and of other models minus it.",
    ),
    "minimal-pairs": (
        draw_pairs,
        "Minimal pairs by phenomenon: share of the pairs that are right, means over paradigms and seeds. Guessing "
        "gives 50 %, which is white.",
    ),
}
"""Name → function that draws the figure, and its caption."""
GAINS = (
    "Gains: means (markers), seeds (ticks), 95 % intervals over seeds (thick) and items (thin, below). Right of 0 the "
    "first model is better. Every interval is whole; the axis is logarithmic outside of dotted lines, where there are."
)
OLD = ("training", "gains", "gains-others", "loss", "similarity", "direction", "loss-steps", "loss-seconds", "measures")
"""Figures of earlier versions."""
