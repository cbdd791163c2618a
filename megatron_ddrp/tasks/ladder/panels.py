"""Panels, styles and axes that the figures of the page share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_ddrp.pages.plotting import run_style
from megatron_ddrp.tasks.glue.paper import PAPER_NAMES
from megatron_ddrp.tasks.ladder.ladder import Ladder
from megatron_ddrp.tasks.ladder.numbers import shown_tokens
from megatron_ddrp.tasks.ladder.rows import Arm


def arm_groups(ladder: Ladder) -> dict[str, list[Arm]]:
    """Return title → arms: the encodings under masked LM, then for each encoding its objectives and variants."""
    encodings = [arm for arm in ladder.arms if arm.is_plain and arm.objective == "mlm"]
    groups = {"Encodings under MLM": encodings} if len(encodings) > 1 else {}
    for encoding in dict.fromkeys(arm.encoding for arm in ladder.arms):
        arms = [arm for arm in ladder.arms if arm.encoding == encoding]
        if len(arms) > 1 or not groups:
            groups[f"Objectives with {PAPER_NAMES.get(encoding, encoding)}"] = arms
    return groups


def group_styles(arms: Sequence[Arm]) -> dict[Arm, dict[str, Any]]:
    """Return arm → style within one group."""
    return {arm: run_style(number) for number, arm in enumerate(arms)}


def budget_axis(axis: Any, ladder: Ladder) -> None:
    """Make x a logarithmic axis of tokens with one tick per rung and some room at both ends."""
    axis.set_xscale("log")
    axis.set_xlim(ladder.rungs[0] / 2.5, ladder.rungs[-1] * 1.6)
    axis.set_xticks(ladder.rungs, [shown_tokens(rung) for rung in ladder.rungs])
    axis.minorticks_off()
    axis.grid(alpha=0.3)


CUT_MARKERS = {("x", 0): "<", ("x", 1): ">", ("y", 0): "v", ("y", 1): "^"}
"""Direction and end of an axis → arrowhead."""


def mark_cut(axis: Any, direction: str, interval: tuple[float, float], place: float, color: str) -> None:
    """Draw an arrowhead at each end of an axis that an interval goes beyond.

    The interval runs along `direction`, "x" or "y"; `place` is its position on the other axis. The limits must be set.
    """
    limits = axis.get_xlim() if direction == "x" else axis.get_ylim()
    for end, is_beyond in enumerate((min(interval) < limits[0], max(interval) > limits[1])):
        if is_beyond:
            point = (limits[end], place) if direction == "x" else (place, limits[end])
            style = {"marker": CUT_MARKERS[direction, end], "markersize": 8, "clip_on": False, "zorder": 3}
            axis.plot([point[0]], [point[1]], color=color, linestyle="", scalex=False, scaley=False, **style)
