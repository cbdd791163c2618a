"""Figures of gains and of minimal pairs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_ddrp.lab.compare.claims import Gain
from megatron_ddrp.lab.compare.results import Results
from megatron_ddrp.lab.compare.rows import Arm, RunRow
from megatron_ddrp.lab.compare.tables import format_budget
from megatron_ddrp.pages.plotting import draw_cells, figure_tools, run_style, wrap_title
from megatron_ddrp.tasks.measures import MINIMAL_PAIRS, factor_of, unit_of
from megatron_ddrp.tasks.minimal_pairs.pairs import phenomenon

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
