"""Figure of minimal pairs by phenomenon."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_ddrp.pages.plotting import pyplot
from megatron_ddrp.tasks.compare.arms import Arm
from megatron_ddrp.tasks.compare.numbers import shown_budget
from megatron_ddrp.tasks.compare.phenomena import phenomenon
from megatron_ddrp.tasks.compare.results import Results
from megatron_ddrp.tasks.compare.rows import Run
from megatron_ddrp.tasks.measures import MINIMAL_PAIRS


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
    values = {name: _percent(arms, groups) for name, arms in budgets.items()}
    widest = max(1.0, *(float(np.nanmax(np.abs(table - 50))) for table in values.values()))
    plt = pyplot()
    heights = [len(arms) for arms in budgets.values()]
    size = (4.6 + 0.7 * len(groups), 2.2 + 0.5 * len(budgets) + 0.34 * sum(heights))
    figure, axes = plt.subplots(
        len(budgets), 1, squeeze=False, figsize=size, height_ratios=heights, sharex=True, layout="constrained"
    )
    for axis, (budget, arms) in zip(axes.flat, budgets.items(), strict=True):
        image = axis.imshow(values[budget], cmap="RdBu", vmin=50 - widest, vmax=50 + widest, aspect="auto")
        for (row, column), value in np.ndenumerate(values[budget]):
            if not np.isnan(value):
                color = "white" if abs(value - 50) > 0.6 * widest else "black"
                axis.text(column, row, f"{value:.0f}", ha="center", va="center", color=color, fontsize="small")
        axis.axvline(0.5, color="black", linewidth=1.5)
        axis.set_yticks(range(len(arms)), [arm.label for arm in arms])
        if len(budgets) > 1:
            axis.set_title(shown_budget(budget, results.budgets[budget]), loc="left", fontsize="medium")
    axes[-1, 0].set_xticks(range(len(groups)), groups, rotation=40, ha="right", rotation_mode="anchor")
    figure.colorbar(image, ax=axes, label="pairs right [%]; chance is 50", fraction=0.03, pad=0.02)
    return figure


def _percent(arms: Mapping[Arm, Mapping[str, float]], groups: Sequence[str]) -> np.ndarray:
    """Return accuracies in per cent, `[arms, groups]`, nan where one is missing."""
    return np.array([[100 * by_group.get(group, np.nan) for group in groups] for by_group in arms.values()])


def by_phenomenon(runs: Sequence[Run]) -> Mapping[str, float]:
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


def _groups(run: Run) -> Mapping[str, float]:
    groups: dict[str, list[float]] = {}
    for uid, accuracy in run.paradigms.items():
        name = phenomenon(uid)
        if name is None:
            return run.fields
        groups.setdefault(name, []).append(accuracy)
    return {name: statistics.fmean(values) for name, values in groups.items()} or run.fields
