"""Figures of a comparison's page.

Figures of gains and of minimal pairs.

Figures of the page. A model has one colour, marker and line on all of them.

Curves are smoothed and drawn as differences to the baseline from the same seeds, because seeds differ more than models.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_ddrp.lab.compare.rows import Arm, RunRow
from megatron_ddrp.lab.compare.tables import Gain, Results, format_budget
from megatron_ddrp.pages.markdown import (
    draw_band,
    draw_cells,
    figure_tools,
    label_lines,
    panel_grid,
    remove_figure,
    run_style,
    save_figure,
    wrap_title,
)
from megatron_ddrp.tasks.minimal_pairs.pairs import phenomenon
from megatron_ddrp.tasks.statistics import GLUE, LOSS, MINIMAL_PAIRS, ONSET, TRAINING_LOSS, factor_of, unit_of

ROW = 0.36
"""Height of a row in inches."""


def styles(results: Results) -> dict[Arm, dict[str, Any]]:
    """Return arm → colour, marker and line, the same on all figures; arms of many budgets have distinct colours."""
    arms = sorted(results.arms, key=lambda arm: -sum(bool(results.at(budget, arm)) for budget in results.budgets))
    return {arm: run_style(number) | {"markersize": 6} for number, arm in enumerate(arms)}


def draw_gains(results: Results, found: Sequence[Gain]) -> Any:
    """Draw a panel per measure and budget with one row per claim: seeds, mean, intervals over seeds and over items."""
    plt, look = figure_tools(), styles(results)
    measures = list(dict.fromkeys(gain.claim.measure for gain in found))
    budgets = [budget for budget in results.budgets if any(gain.budget == budget for gain in found)]
    claims = {name: list(dict.fromkeys(g.claim for g in found if g.claim.measure == name)) for name in measures}
    heights = [len(of_measure) for of_measure in claims.values()]
    size = (4.5 + 3.2 * len(budgets), 0.5 + 0.9 * len(measures) + ROW * sum(heights))
    grid = {"squeeze": False, "height_ratios": heights, "figsize": size, "layout": "constrained"}
    figure, axes = plt.subplots(len(measures), len(budgets), sharey="row", **grid)
    for (name, rows), line in zip(claims.items(), axes, strict=True):
        for budget, axis in zip(budgets, line, strict=True):
            own = [gain for gain in found if gain.claim.measure == name and gain.budget == budget]
            for gain in own:
                _draw_gain(axis, gain, rows.index(gain.claim), look[gain.claim.first])
            axis.axvline(0, color="black", linewidth=1)
            axis.grid(axis="x", alpha=0.3)
            axis.locator_params(axis="x", nbins=5)
            if not any(gain.seeds.mean or gain.seeds.deviation for gain in own):
                axis.set_xlim(-1, 1)  # no gain at all
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "−"))
            axis.set_xlabel(f"gain, {name}{unit_of(name)}", fontsize="small")
            if not own:
                axis.set_visible(False)
        line[0].set_ylim(len(rows) - 0.4, -0.6)
        line[0].set_yticks(range(len(rows)), [wrap_title(claim.text, 5.2) for claim in rows], fontsize="small")
    for budget, axis in zip(budgets, axes[0], strict=True):
        axis.set_title(format_budget(budget, results.budgets[budget]), fontsize="medium")
    return figure


def _draw_gain(axis: Any, gain: Gain, height: float, look: Mapping[str, Any]) -> None:
    """Draw a gain in a row, in the look of its first arm."""
    factor, color = factor_of(gain.claim.measure), look["color"]
    for interval, width, below in ((gain.seeds.interval, 3.5, 0.0), (gain.items, 1.5, 0.25)):
        if interval:
            place = [height + below] * 2
            axis.plot(np.multiply(interval, factor), place, color=color, linewidth=width, solid_capstyle="butt")
    axis.plot(np.multiply(gain.seeds.values, factor), [height] * len(gain.seeds.values), "|", markersize=9, color=color)
    mean = {"marker": look["marker"], "markersize": 8, "markeredgecolor": "white"}
    axis.plot([factor * gain.seeds.mean], [height], color=color, **mean)


def draw_pairs(results: Results) -> Any:
    """Draw heat maps of arms × phenomena, one per budget, with colours centred on chance; None without pairs."""
    budgets: dict[str, dict[Arm, Mapping[str, float]]] = {}
    for budget in results.budgets:
        found = {arm: by_phenomenon(list(results.at(budget, arm).values())) for arm in results.arms_at(budget)}
        if kept := {arm: groups for arm, groups in found.items() if groups}:
            budgets[budget] = kept
    if not budgets:
        return None
    groups = list(dict.fromkeys(name for arms in budgets.values() for by_group in arms.values() for name in by_group))
    values = {
        name: np.array([[100 * by_group.get(group, np.nan) for group in groups] for by_group in arms.values()])
        for name, arms in budgets.items()
    }
    widest = max(1.0, *(float(np.nanmax(np.abs(table - 50))) for table in values.values()))
    plt = figure_tools()
    heights = [len(arms) for arms in budgets.values()]
    size = (4.6 + 0.7 * len(groups), 2.2 + 0.5 * len(budgets) + 0.34 * sum(heights))
    figure, axes = plt.subplots(
        len(budgets), 1, squeeze=False, figsize=size, height_ratios=heights, sharex=True, layout="constrained"
    )
    for axis, (budget, arms) in zip(axes.flat, budgets.items(), strict=True):
        image = draw_cells(axis, values[budget], widest)
        axis.axvline(0.5, color="black", linewidth=1.5)
        axis.set_yticks(range(len(arms)), [arm.label for arm in arms])
        if len(budgets) > 1:
            axis.set_title(format_budget(budget, results.budgets[budget]), loc="left", fontsize="medium")
    axes[-1, 0].set_xticks(range(len(groups)), groups, rotation=40, ha="right", rotation_mode="anchor")
    figure.colorbar(image, ax=axes, label="pairs right [%]; chance is 50", fraction=0.03, pad=0.02)
    return figure


def by_phenomenon(runs: Sequence[RunRow]) -> Mapping[str, float]:
    """Return phenomenon of BLiMP → mean accuracy over its paradigms and the runs, with "all" first.

    Fields take the place of phenomena if a run has a paradigm that BLiMP lacks. Empty without minimal pairs.
    """
    scored = [run for run in runs if MINIMAL_PAIRS in run.values and (run.paradigms or run.fields)]
    if not scored:
        return {}
    found = [_groups(run) for run in scored]
    names = sorted((name for name in found[0] if all(name in one for one in found)), key=str.lower)
    average = statistics.fmean(run.values[MINIMAL_PAIRS] for run in scored)
    return {"all": average} | {name: statistics.fmean(one[name] for one in found) for name in names if name != "all"}


def _groups(run: RunRow) -> Mapping[str, float]:
    groups: dict[str, list[float]] = {}
    for uid, accuracy in run.paradigms.items():
        name = phenomenon(uid)
        if name is None:
            return run.fields
        groups.setdefault(name, []).append(accuracy)
    return {name: statistics.fmean(values) for name, values in groups.items()} or run.fields


LINES = 7
"""Largest number of lines of a panel; as many colours are distinct."""
COLUMNS = 3
SMOOTHED = 0.1
"""Share of a curve that is averaged around each of its points."""

Points = list[tuple[float, float, float, float]]
"""Points (x, mean, lowest, highest seed)."""


class _Line(NamedTuple):
    """Line of a panel, with its name beside its end."""

    name: str
    look: Mapping[str, Any]
    points: Points


class _Panel(NamedTuple):
    """Panel of a figure of curves."""

    title: str
    label: str
    """Label of the axis of values."""
    lines: Sequence[_Line]


def draw_all(results: Results, gains: Mapping[str, Sequence[Gain]], folder: Path) -> dict[str, str]:
    """Draw the figures that have data into the folder; return name → caption."""
    figures = {name: (partial(draw, results), caption) for name, (draw, caption) in FIGURES.items()}
    figures |= {name: (partial(draw_gains, results, found), "") for name, found in gains.items()}
    captions = {}
    for name, (draw, caption) in figures.items():
        path = folder / f"{name}.png"
        remove_figure(path)  # an old figure may show data that no longer exist
        figure = draw() if results.runs else None
        if figure is not None:
            folder.mkdir(parents=True, exist_ok=True)
            save_figure(figure, path)
            captions[name] = caption
    return captions


def draw_curves(results: Results, measure: str) -> Any:
    """Draw the baseline's curve over tokens, one line per budget, and panels of the other arms minus the baseline."""
    look, baseline = styles(results), results.baseline
    budgets = {budget: format_budget(budget, tokens) for budget, tokens in results.budgets.items()}
    factor = 1 if measure == TRAINING_LOSS else factor_of(measure)
    own: list[_Line] = []
    panels: list[_Panel] = []
    for budget, name in budgets.items():
        base = _curves(results, measure, baseline, budget, factor)
        if not base:
            continue
        own.append(_Line(name if len(budgets) > 1 else "", look[baseline], _band(list(map(_smoothed, base.values())))))
        others = [arm for arm in look if arm != baseline and not arm.half]
        found = [(arm, _difference(_curves(results, measure, arm, budget, factor), base)) for arm in others]
        lines = [_Line(arm.label, look[arm], points) for arm, points in found if points]
        panels += [
            _Panel(f"minus {baseline.label}, {name}", f"difference{unit_of(measure)}", x) for x in _shares(lines)
        ]
    first = _Panel(f"{baseline.label}: {measure}", f"{measure}{unit_of(measure)}", own)
    return _draw(results, [first, *panels]) if panels else None


def draw_losses(results: Results) -> Any:
    """Draw the training loss of every arm over the tokens of the largest budget; None if there are no curves."""
    look, (budget, tokens) = styles(results), max(results.budgets.items(), key=lambda item: item[1])
    found = [(arm, _curves(results, TRAINING_LOSS, arm, budget, 1)) for arm in look if not arm.half]
    lines = [_Line(arm.label, look[arm], _band(list(map(_smoothed, own.values())))) for arm, own in found if own]
    title, label = format_budget(budget, tokens), f"{TRAINING_LOSS} [nats]"
    return _draw(results, [_Panel(title, label, share) for share in _shares(lines)]) if lines else None


def draw_onsets(results: Results) -> Any:
    """Draw the share of each arm's runs that are still on the plateau over tokens, a panel per budget and few arms.

    A line ends where the runs end: all runs of an arm and budget are equally long, so none is lost on the way. None if
    no run left the plateau.
    """
    look, panels = styles(results), []
    for budget, tokens in results.budgets.items():
        lines = []
        for arm in look:
            runs = [run for run in results.at(budget, arm).values() if ONSET in run.values]
            end = max((run.tokens for run in runs), default=0) or tokens
            bounds = [0.0, *sorted(run.onset for run in runs if run.onset is not None), float(end)]
            shares = [100 * (1 - number / max(1, len(runs))) for number in range(len(bounds) - 1)]
            steps = [(x, y, y, y) for y, pair in zip(shares, itertools.pairwise(bounds), strict=True) for x in pair]
            lines += [_Line(arm.label, look[arm], steps)] if runs else []
        panels += [_Panel(format_budget(budget, tokens), "runs on the plateau [%]", own) for own in _shares(lines)]
    return _draw(results, panels) if any(run.onset for run in results.runs if ONSET in run.values) else None


def draw_budgets(results: Results) -> Any:
    """Draw the loss of every arm minus the baseline's over the budgets; None if no arm ran at two budgets."""
    look, base = styles(results), results.baseline
    found = []
    for arm in look:
        points: Points = []
        for budget, tokens in results.budgets.items():
            by_seed, of_base = results.of(LOSS, arm, budget), results.of(LOSS, base, budget)
            values = [by_seed[seed] - of_base[seed] for seed in by_seed if seed in of_base]
            if values and arm != base:
                points.append((tokens, float(np.mean(values)), min(values), max(values)))
        if len(points) > 1:
            found.append(_Line(arm.label, look[arm], points))
    if not found:
        return None
    figure = _draw(results, [_Panel("", f"{LOSS}\nminus {base.label} [nats]", lines) for lines in _shares(found)])
    size, name = unit_of_tokens(results)
    ticks = list(results.budgets.values())
    for axis in figure.axes:
        axis.set_xscale("log")
        axis.set_xticks(ticks, [f"{tick / size:.3g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_xlabel(f"{name} of the budget")
    return figure


def unit_of_tokens(results: Results) -> tuple[float, str]:
    """Return the unit of an axis of tokens, in tokens and in words, in which the largest budget has a short number."""
    largest = max(results.budgets.values())
    units = ((1e9, "billion tokens"), (1e6, "million tokens"), (1e3, "thousand tokens"))
    return next((unit for unit in units if largest >= unit[0]), (1.0, "tokens"))


def _shares(lines: Sequence[_Line]) -> Iterator[Sequence[_Line]]:
    """Yield the lines of each panel, so many on each that they can be told apart."""
    count = -(-len(lines) // LINES)
    for number in range(count):
        yield lines[number * len(lines) // count : (number + 1) * len(lines) // count]


def _draw(results: Results, panels: Sequence[_Panel]) -> Any:
    """Draw panels of lines with their bands over tokens, those of differences around 0."""
    size, unit = unit_of_tokens(results)
    figure, axes = panel_grid(len(panels), COLUMNS, 5.8, 4.2)
    for axis, panel in zip(axes.flat, panels, strict=False):
        for _, look, points in panel.lines:
            draw_band(axis, points, {**look, "markevery": max(1, len(points) // 8)})
        if "minus" in panel.title + panel.label:
            axis.axhline(0, color="black", linewidth=1)
        axis.set_title(panel.title, fontsize="small")
        axis.set(xlabel=unit, ylabel=panel.label)
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / size:g}")
        label_lines(axis, {name: (*points[-1][:2], look["color"]) for name, look, points in panel.lines if name})
    return figure


def _curves(results: Results, measure: str, arm: Arm, budget: str, factor: float) -> dict[int, Any]:
    """Return seed → curve of an arm, `[points, 2]`, for curves of two or more points; values are times a factor."""
    found = {seed: run.curves.get(measure, ()) for seed, run in results.at(budget, arm).items()}
    return {seed: np.array(curve) * (1, factor) for seed, curve in found.items() if len(curve) > 1}


def _difference(own: Mapping[int, Any], base: Mapping[int, Any]) -> Points:
    """Return the band of the smoothed differences of two arms at their common seeds, without the first tenth."""
    found = []
    for seed in own.keys() & base.keys():
        x = own[seed][:, 0]
        x = x[(x >= base[seed][0, 0]) & (x <= base[seed][-1, 0])]
        values = np.interp(x, *own[seed].T) - np.interp(x, *base[seed].T)
        curve = _smoothed(np.stack([x, values], axis=1))
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
    "losses": (
        draw_losses,
        "Training masked-LM loss of every model on the largest budget. Lines are smoothed means over the seeds, bands "
        "reach from the lowest to the highest seed.",
    ),
    "onsets": (
        draw_onsets,
        "Runs that are still on the plateau: share of each model's seeds whose training loss has not yet come down for "
        "good to 1 nat below the unigram level. A line that ends above 0 has runs that never left.",
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
