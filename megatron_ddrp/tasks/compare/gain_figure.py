"""Figure of gains: one row per gain with both its intervals, whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_ddrp.pages.plotting import GREY, MARKERS, handles_by_label, pyplot, wrapped
from megatron_ddrp.tasks.compare.claims import Gain
from megatron_ddrp.tasks.compare.numbers import factor_of, shown_budget, unit_of
from megatron_ddrp.tasks.compare.results import Results

ROW = 0.21
"""Height of a row in inches."""
LONG = 6
"""Gains that reach so many times as far as half of them make the axis logarithmic."""


def draw_gains(results: Results, found: Sequence[Gain]) -> Any:
    """Draw one row per gain, those of a claim together: seeds, mean, intervals over seeds (thick) and items (thin)."""
    plt = pyplot()
    claims = list(dict.fromkeys(gain.claim for gain in found))
    budgets = [budget for budget in results.budgets if any(gain.budget == budget for gain in found)]
    shades = dict(zip(budgets, np.linspace(0.62, 0.0, len(budgets)) if len(budgets) > 1 else [0.0], strict=True))
    several = len({claim.measure for claim in claims}) > 1
    figure, axis = plt.subplots(figsize=(9.5, 1.3 + ROW * (len(found) + len(claims))), layout="constrained")
    top, centers = 0.0, []
    for place, claim in enumerate(claims):
        own = [gain for gain in found if gain.claim == claim]
        for height, gain in enumerate(own, 1):
            look = {"color": str(shades[gain.budget]), "marker": MARKERS[budgets.index(gain.budget) % len(MARKERS)]}
            _draw_gain(
                axis, gain, top + height, look | {"label": shown_budget(gain.budget, results.budgets[gain.budget])}
            )
        bottom = top + len(own) + 1
        centers.append((top + bottom) / 2)
        if place % 2:
            axis.axhspan(top, bottom, color=GREY, alpha=0.08, linewidth=0)
        top = bottom
    _scale(axis, found)
    axis.set_ylim(top, 0)
    texts = [f"{claim.text}, {claim.measure}" if several else claim.text for claim in claims]
    axis.set_yticks(centers, [wrapped(text, 4.6) for text in texts], fontsize="small")
    axis.axvline(0, color="black", linewidth=1)
    axis.grid(axis="x", alpha=0.3)
    axis.set_xlabel("gain" if several else f"gain, {claims[0].measure}{unit_of(claims[0].measure)}")
    handles = handles_by_label(axis)
    if len(handles) > 1:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    return figure


def _draw_gain(axis: Any, gain: Gain, height: float, look: Mapping[str, Any]) -> None:
    """Draw a gain in a row: `look` has its colour, marker and label."""
    factor, color = factor_of(gain.claim.measure), look["color"]
    for interval, width, below in ((gain.seeds.interval, 3.5, 0.0), (gain.items, 1.5, 0.35)):
        if interval:
            place = [height + below] * 2
            axis.plot(np.multiply(interval, factor), place, color=color, linewidth=width, solid_capstyle="butt")
    axis.plot(np.multiply(gain.seeds.values, factor), [height] * len(gain.seeds.values), "|", markersize=7, color=color)
    axis.plot([factor * gain.seeds.mean], [height], linestyle="", markersize=7, markeredgecolor="white", **look)


def _scale(axis: Any, found: Sequence[Gain]) -> None:
    """Make the axis logarithmic beyond the gains of most claims, if some intervals are much longer than the others."""
    reach = [
        factor_of(gain.claim.measure)
        * max(map(abs, (*gain.seeds.values, *(gain.seeds.interval or ()), *(gain.items or ()))))
        for gain in found
    ]
    usual, longest = float(np.median(reach)), max(reach)
    if usual and longest > LONG * usual:
        decimals = 10.0 ** np.floor(np.log10(usual))
        linear = float(np.floor(usual / decimals) * decimals)
        axis.set_xscale("symlog", linthresh=linear, linscale=2.5)
        for edge in (-linear, linear):
            axis.axvline(edge, color=GREY, linewidth=1, linestyle=":")
        outside = [
            sign * linear * power for power in (10, 100, 1000) if linear * power < 3 * longest for sign in (-1, 1)
        ]
        ticks = sorted({0.0, -linear, linear, -linear / 2, linear / 2, *outside})
        axis.set_xticks(ticks, [f"{tick:g}".replace("-", "−") for tick in ticks])
        axis.minorticks_off()
